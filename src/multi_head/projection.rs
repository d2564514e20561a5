//! The input projections: queries, keys and values of every head, written where attention reads them.

use std::ops::Range;

use crate::{
    DType, Error, Gpu, MultiHeadAttentionConfig, Parameters, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage, most_bytes},
    kernels::linear::{self, Part},
    linear::{bind, fits, pieces, rows, slice},
    shape::product,
};

/// Weights and biases of the input projections.
#[derive(Debug, Clone)]
pub(super) struct Projection {
    /// One weight and bias of all rows, q, k, v one below the other, or one each if their inputs differ in size.
    tensors: Vec<(Tensor, Option<Tensor>)>,
    /// Rows of q, k and v: heads times the size of one.
    sizes: [usize; 3],
}

impl Projection {
    /// Uploads the projections of `parameters` by `upload`.
    pub(super) fn new(
        config: &MultiHeadAttentionConfig,
        parameters: &Parameters,
        upload: impl Fn(&[f32], &[usize]) -> Result<Tensor>,
    ) -> Result<Self> {
        let p = parameters;
        let sizes = [config.q_size(), config.kv_size(), config.kv_size()];
        let weights = [&p.q_proj_weight, &p.k_proj_weight, &p.v_proj_weight];
        let biases = [&p.q_proj_bias, &p.k_proj_bias, &p.v_proj_bias];
        let inputs = [config.embed_dim, config.kdim, config.vdim];
        let tensors = if inputs == [config.embed_dim; 3] {
            let rows = sizes.iter().sum();
            let bias = match biases {
                [Some(q), Some(k), Some(v)] => Some(upload(&[&q[..], k, v].concat(), &[rows])?),
                _ => None,
            };
            let weight = weights.map(Vec::as_slice).concat();
            vec![(upload(&weight, &[rows, config.embed_dim])?, bias)]
        } else {
            (0..3)
                .map(|i| {
                    let bias = biases[i]
                        .as_ref()
                        .map(|bias| upload(bias, &[sizes[i]]))
                        .transpose()?;
                    Ok((upload(weights[i], &[sizes[i], inputs[i]])?, bias))
                })
                .collect::<Result<_>>()?
        };
        Ok(Self { tensors, sizes })
    }

    fn is_packed(&self) -> bool {
        self.tensors.len() == 1
    }

    /// Weight and bias of consecutive projections, q = 0, k = 1, v = 2. More than one only if packed.
    pub(super) fn get(&self, first: usize, count: usize) -> Result<(Tensor, Option<Tensor>)> {
        if !self.is_packed() {
            return Ok(self.tensors[first].clone());
        }
        let (weight, bias) = &self.tensors[0];
        let rows = |parts: &[usize]| parts.iter().sum::<usize>();
        let start = rows(&self.sizes[..first]);
        let range = start..start + rows(&self.sizes[first..first + count]);
        let bias = bias
            .as_ref()
            .map(|bias| bias.slice(0, range.clone()))
            .transpose()?;
        Ok((weight.slice(0, range)?, bias))
    }

    /// Projects some of queries, keys and values (`parts` of 0, 1, 2) from their `sources` into `targets`. What comes from
    /// one tensor through one weight is one dispatch, unless that would be too long or the device cannot bind so much.
    pub(super) fn project(
        &self,
        batch: &mut Batch,
        parts: Range<usize>,
        sources: [&Tensor; 3],
        targets: &Targets,
    ) -> Result<()> {
        let gpu = batch.gpu();
        let Targets { tensors, together } = targets;
        let packed = self.is_packed() && together.is_some();
        let mut first = parts.start;
        while first < parts.end {
            let same = |next: &usize| packed && sources[*next] == sources[first];
            let count = 1 + (first + 1..parts.end).take_while(same).count();
            let sizes = &self.sizes[first..first + count];
            let (weight, bias) = self.get(first, count)?;
            let x = sources[first];
            let Some((x_sizes, x_strides)) = rows(x) else {
                return Err(Error::Shape(format!("{:?}: use [B, L, E] or [L, E]", x.shape())));
            };
            let weight = bind(gpu, "projection weight", &weight)?;
            let bias = bias
                .as_ref()
                .map(|bias| bind(gpu, "projection bias", bias))
                .transpose()?;
            let work = x_sizes[2] * sizes.iter().sum::<usize>();
            let target = |index: usize, [batches, rows]: &[Range<usize>; 2]| {
                tensors[index].slice(0, batches.clone())?.slice(2, rows.clone())
            };
            let all_fit = |piece: &[Range<usize>; 2]| {
                let of_target =
                    || target(first, piece).is_ok_and(|part| Binding::fits(gpu, &part, &(0..part.extent())));
                fits(gpu, x, piece) && (together.is_some() || of_target())
            };
            for piece in pieces(gpu, [x_sizes[0], x_sizes[1]], work, all_fit) {
                let mut pushed = Vec::with_capacity(count);
                let mut output = together.clone();
                for (index, &size) in (first..).zip(sizes) {
                    let tensor = target(index, &piece)?;
                    let (_, [batch, head, row, _]) = tensor.four_axes();
                    let start = if together.is_some() {
                        (tensor.offset() / tensor.dtype().size() as u64) as u32
                    } else {
                        let (binding, start) = Binding::output(gpu, "projected q, k or v", &tensor)?;
                        output = Some(binding);
                        start
                    };
                    let part = Part {
                        start,
                        batch,
                        head,
                        row,
                    };
                    pushed.push((size, part));
                }
                let Some(output) = output else { continue };
                linear::Linear {
                    x: bind(gpu, "layer input", &slice(x, &piece)?)?,
                    x_strides,
                    batch: piece[0].len(),
                    rows: piece[1].len(),
                    inputs: x_sizes[2],
                    weight: weight.clone(),
                    bias: bias.clone(),
                    parts: &pushed,
                    head_dim: tensors[first].shape()[3],
                    output_dim: 1,
                    output: (output, Storage::of(gpu, tensors[first].dtype())?),
                }
                .push(batch)?;
            }
            first += count;
        }
        Ok(())
    }
}

/// Where queries, keys and values go, `[B, H, L, D]`: one behind the other in one buffer, or, if no binding holds them all,
/// head-merged in buffers of their own, whose rows can be cut. Those that are not projected have no rows.
pub(super) struct Targets {
    pub(super) tensors: [Tensor; 3],
    /// All of them.
    together: Option<Binding>,
}

impl Targets {
    /// In scratch memory, f32.
    pub(super) fn scratch(
        batch: &mut Batch,
        config: &MultiHeadAttentionConfig,
        sequences: usize,
        [queries, keys]: [usize; 2],
    ) -> Result<Self> {
        let gpu = batch.gpu();
        let shapes = Self::shapes(config, sequences, [queries, keys]);
        let bytes = shapes.map(|shape| product(&shape).saturating_mul(4));
        let together = sum(bytes);
        if fits_one(gpu, together) {
            let buffer = batch.scratch(Scratch::Projected, together)?;
            let starts = [0, bytes[0], bytes[0] + bytes[1]];
            let part = |i: usize| Tensor::of_scratch(gpu, buffer.clone(), starts[i], DType::F32, &shapes[i]);
            return Ok(Self {
                tensors: [part(0)?, part(1)?, part(2)?],
                together: Some(Binding::prefix(gpu, "projected q, k, v", &buffer, together)?),
            });
        }
        let slots = [Scratch::Projected, Scratch::Keys, Scratch::Values];
        let mut part = |i: usize| {
            let buffer = batch.scratch(slots[i], bytes[i])?;
            let [sequences, heads, rows, head_dim] = shapes[i];
            let merged = [sequences, rows, heads, head_dim];
            Tensor::of_scratch(gpu, buffer, 0, DType::F32, &merged)?.permute(&[0, 2, 1, 3])
        };
        Ok(Self {
            tensors: [part(0)?, part(1)?, part(2)?],
            together: None,
        })
    }

    /// Keys and values in memory of their own.
    pub(super) fn keys_and_values(
        gpu: &Gpu,
        config: &MultiHeadAttentionConfig,
        dtype: DType,
        sequences: usize,
        keys: usize,
    ) -> Result<Self> {
        let [none, shape, _] = Self::shapes(config, sequences, [0, keys]);
        let bytes = product(&shape).saturating_mul(dtype.size() as u64);
        let together = sum([bytes, bytes]);
        if fits_one(gpu, together) {
            let both = Tensor::zeros(gpu, dtype, &[2, product(&shape) as usize])?;
            let part = |index: usize| both.slice(0, index..index + 1)?.reshape(&shape);
            return Ok(Self {
                tensors: [both.slice(1, 0..0)?.reshape(&none)?, part(0)?, part(1)?],
                together: Some(Binding::prefix(gpu, "projected k, v", both.buffer(), together)?),
            });
        }
        let [sequences, heads, rows, head_dim] = shape;
        let part = || Tensor::zeros(gpu, dtype, &[sequences, rows, heads, head_dim])?.permute(&[0, 2, 1, 3]);
        let (key, value) = (part()?, part()?);
        Ok(Self {
            tensors: [key.slice(2, 0..0)?, key, value],
            together: None,
        })
    }

    fn shapes(
        config: &MultiHeadAttentionConfig,
        sequences: usize,
        [queries, keys]: [usize; 2],
    ) -> [[usize; 4]; 3] {
        let of_keys = [sequences, config.num_kv_heads, keys, config.head_dim()];
        [
            [sequences, config.num_heads, queries, config.head_dim()],
            of_keys,
            of_keys,
        ]
    }
}

fn sum<const N: usize>(bytes: [u64; N]) -> u64 {
    bytes.into_iter().fold(0, u64::saturating_add)
}

/// Whether one buffer and one binding may have so many bytes.
fn fits_one(gpu: &Gpu, bytes: u64) -> bool {
    bytes <= most_bytes(gpu).min(gpu.limits().max_buffer_size)
}
