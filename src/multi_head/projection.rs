//! The input projections: queries, keys and values of every head, written where attention reads them.

use super::inputs::{MultiHeadInputs, Sizes};
use crate::{
    DType, Error, Gpu, MultiHeadAttentionConfig, Parameters, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage},
    kernels::linear::{self, Part},
    linear::{bind, rows},
    shape::product,
    tuning::{Product, Tile},
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

    /// Projects queries, keys and values into scratch, head-split and f32, with room for the keys that follow.
    /// What comes from one tensor through one weight is one dispatch.
    pub(super) fn project(
        &self,
        gpu: &Gpu,
        batch: &mut Batch,
        config: &MultiHeadAttentionConfig,
        inputs: &MultiHeadInputs,
        sizes: Sizes,
    ) -> Result<[Tensor; 3]> {
        let head_dim = config.head_dim();
        let shape = |heads, rows| [sizes.batch, heads, rows, head_dim];
        let of_keys = shape(config.num_kv_heads, sizes.all_keys);
        let shapes = [shape(config.num_heads, sizes.queries), of_keys, of_keys];
        let bytes = shapes.map(|shape| product(&shape).saturating_mul(4));
        let limits = gpu.limits();
        let together = bytes.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        let fits = together <= limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let tensors = if fits {
            let buffer = gpu.scratch(Scratch::Projected, together)?;
            let starts = [0, bytes[0], bytes[0] + bytes[1]];
            let part = |i: usize| Tensor::of_scratch(gpu, buffer.clone(), starts[i], DType::F32, &shapes[i]);
            [part(0)?, part(1)?, part(2)?]
        } else {
            let slots = [Scratch::Projected, Scratch::Keys, Scratch::Values];
            let part = |i: usize| {
                Tensor::of_scratch(gpu, gpu.scratch(slots[i], bytes[i])?, 0, DType::F32, &shapes[i])
            };
            [part(0)?, part(1)?, part(2)?]
        };

        let sources = [inputs.query, inputs.key(), inputs.value()];
        let packed = self.is_packed() && fits;
        let mut first = 0;
        while first < 3 {
            let same = |next: &usize| packed && sources[*next] == sources[first];
            let count = 1 + (first + 1..3).take_while(same).count();
            let (weight, bias) = self.get(first, count)?;
            let Some((x_sizes, x_strides)) = rows(sources[first]) else {
                return Err(Error::Shape(format!(
                    "{:?}: use [B, L, E] or [L, E]",
                    sources[first].shape()
                )));
            };
            let (binding, starts) = if fits {
                let whole = Binding::prefix(gpu, "projected q, k, v", tensors[0].buffer(), together)?;
                (
                    whole,
                    [0, bytes[0], bytes[0] + bytes[1]].map(|byte| (byte / 4) as u32),
                )
            } else {
                (
                    Binding::tensor(gpu, "projected q, k or v", &tensors[first])?.0,
                    [0; 3],
                )
            };
            let parts: Vec<(usize, Part)> = (first..first + count)
                .map(|index| {
                    let (_, [batch, head, row, _]) = tensors[index].four_axes();
                    (
                        self.sizes[index],
                        Part {
                            start: starts[index],
                            batch,
                            head,
                            row,
                        },
                    )
                })
                .collect();
            linear::Linear {
                x: bind(gpu, "layer input", sources[first])?,
                x_strides,
                batch: x_sizes[0],
                rows: x_sizes[1],
                inputs: x_sizes[2],
                weight: bind(gpu, "projection weight", &weight)?,
                bias: bias
                    .as_ref()
                    .map(|bias| bind(gpu, "projection bias", bias))
                    .transpose()?,
                parts: &parts,
                head_dim,
                output_dim: 1,
                output: (binding, Storage::F32),
            }
            .push(batch, Tile::of(gpu, Product::Linear))?;
            first += count;
        }
        Ok(tensors)
    }
}
