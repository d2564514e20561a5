//! The input projections: queries, keys and values of every head, written where attention reads them.

use std::ops::Range;

use super::inputs::{MultiHeadInputs, Sizes};
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

    /// Projects queries, keys and values into scratch, f32, with room for the keys that follow, and gives them as
    /// `[B, H, L, D]`. What comes from one tensor through one weight is one dispatch, unless that would be too long or
    /// the device cannot bind so much.
    pub(super) fn project(
        &self,
        gpu: &Gpu,
        batch: &mut Batch,
        config: &MultiHeadAttentionConfig,
        inputs: &MultiHeadInputs,
        sizes: Sizes,
    ) -> Result<[Tensor; 3]> {
        let (tensors, together) = Self::targets(gpu, batch, config, sizes)?;
        let sources = [inputs.query, inputs.key(), inputs.value()];
        let packed = self.is_packed() && together.is_some();
        let mut first = 0;
        while first < 3 {
            let same = |next: &usize| packed && sources[*next] == sources[first];
            let count = 1 + (first + 1..3).take_while(same).count();
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
            let work = x_sizes[2] * self.sizes[first..first + count].iter().sum::<usize>();
            let target = |index: usize, [batches, rows]: &[Range<usize>; 2]| {
                tensors[index].slice(0, batches.clone())?.slice(2, rows.clone())
            };
            let all_fit = |piece: &[Range<usize>; 2]| {
                let of_target =
                    || target(first, piece).is_ok_and(|part| Binding::fits(gpu, &part, &(0..part.extent())));
                fits(gpu, x, piece) && (together.is_some() || of_target())
            };
            for piece in pieces(gpu, [x_sizes[0], x_sizes[1]], work, all_fit) {
                let mut parts = Vec::with_capacity(count);
                let mut output = together.clone();
                for index in first..first + count {
                    let tensor = target(index, &piece)?;
                    let (_, [batch, head, row, _]) = tensor.four_axes();
                    let start = if together.is_some() {
                        (tensor.offset() / 4) as u32
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
                    parts.push((self.sizes[index], part));
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
                    parts: &parts,
                    head_dim: config.head_dim(),
                    output_dim: 1,
                    output: (output, Storage::F32),
                }
                .push(batch)?;
            }
            first += count;
        }
        Ok(tensors)
    }

    /// Where queries, keys and values go: `[B, H, L, D]` one behind the other in one buffer, which is given too, or, if
    /// no binding holds them all, head-merged in buffers of their own, whose rows can be cut.
    fn targets(
        gpu: &Gpu,
        batch: &mut Batch,
        config: &MultiHeadAttentionConfig,
        sizes: Sizes,
    ) -> Result<([Tensor; 3], Option<Binding>)> {
        let head_dim = config.head_dim();
        let of_keys = [config.num_kv_heads, sizes.all_keys];
        let shapes = [[config.num_heads, sizes.queries], of_keys, of_keys];
        let bytes =
            shapes.map(|[heads, rows]| product(&[sizes.batch, heads, rows, head_dim]).saturating_mul(4));
        let together = bytes.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        if together <= most_bytes(gpu).min(gpu.limits().max_buffer_size) {
            let buffer = batch.scratch(Scratch::Projected, together)?;
            let starts = [0, bytes[0], bytes[0] + bytes[1]];
            let part = |i: usize| {
                let [heads, rows] = shapes[i];
                let shape = [sizes.batch, heads, rows, head_dim];
                Tensor::of_scratch(gpu, buffer.clone(), starts[i], DType::F32, &shape)
            };
            let whole = Binding::prefix(gpu, "projected q, k, v", &buffer, together)?;
            return Ok(([part(0)?, part(1)?, part(2)?], Some(whole)));
        }
        let slots = [Scratch::Projected, Scratch::Keys, Scratch::Values];
        let mut part = |i: usize| {
            let [heads, rows] = shapes[i];
            let buffer = batch.scratch(slots[i], bytes[i])?;
            let merged = [sizes.batch, rows, heads, head_dim];
            Tensor::of_scratch(gpu, buffer, 0, DType::F32, &merged)?.permute(&[0, 2, 1, 3])
        };
        Ok(([part(0)?, part(1)?, part(2)?], None))
    }
}
