//! The composed path: scores, softmax and weighted sum, a chunk of rows after the other.

use super::{
    Attention,
    rule::BoundRule,
    window::{BroadcastMask, Window},
};
use crate::{
    AttentionOutputs, AttentionShape, Error, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage, most_bytes},
    kernels::{
        Chunk, Vector, mean_heads,
        scores::{self, Rule},
        softmax, weighted_sum,
    },
    tuning::{SCORES_CHUNK, composed_keys},
};

/// What a composed call reads and writes: `[B, H, L, D]` each.
pub(super) struct ComposedCall<'a> {
    pub(super) shape: AttentionShape,
    pub(super) query: &'a Tensor,
    pub(super) key: &'a Tensor,
    pub(super) value: &'a Tensor,
    pub(super) output: &'a Tensor,
    pub(super) mask: Option<BroadcastMask<'a>>,
    pub(super) bound: &'a BoundRule,
}

impl Attention {
    pub(super) fn composed(
        &self,
        batch: &mut Batch,
        call: &ComposedCall,
        outputs: &AttentionOutputs,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let (shape, bound) = (&call.shape, call.bound);
        if let Some(allows) = composed_keys(gpu).filter(|&allows| shape.keys > allows) {
            return Err(Error::Limit {
                what: "the composed path over all keys".to_owned(),
                needs: shape.keys as u64,
                allows: allows as u64,
                limit: "keys, since this software adapter ends an invocation's loops after 65535 rounds",
                advice: "use a newer driver (Mesa 25), fewer keys, or AttentionPath::Fused".to_owned(),
            });
        }
        let lse = outputs
            .lse
            .map(|lse| Binding::output(gpu, "lse", lse))
            .transpose()?;
        // One place for all rows if somebody reads them, else one for each chunk in turn.
        let kept = outputs.weights.is_some() || outputs.mean_weights.is_some();
        let chunks = self.chunks(call)?;
        let rows = if kept {
            Chunk::whole(shape).all_rows()
        } else {
            chunks.iter().map(Chunk::all_rows).max().unwrap_or(0)
        };
        let bytes = rows.saturating_mul(shape.keys as u64 * 4);
        let weights = match outputs.weights {
            Some(weights) => Binding::output(gpu, "weights", weights)?,
            None => {
                let slot = if kept { Scratch::Weights } else { Scratch::Scores };
                let scratch = batch.scratch(slot, bytes)?;
                let what = if kept {
                    "the weights of all heads, of which the mean is taken,"
                } else {
                    "a chunk of scores"
                };
                (Binding::prefix(gpu, what, &scratch, bytes)?, 0)
            }
        };
        let storage = |tensor: &Tensor| Storage::of(gpu, tensor.dtype());
        let ahead = batch.is_planned();
        let storages = [storage(call.query)?, storage(call.key)?];
        let scores_tile = gpu.scores_tile(storages, shape.head_dim, ahead)?.tile;
        let storages = [storage(call.value)?, storage(call.output)?];
        let sum_tile = gpu.weighted_sum_tile(storages, ahead)?.tile;
        let vector = |vector: &Option<Vector>| {
            vector
                .as_ref()
                .map_or_else(|| Binding::absent(gpu), |vector| vector.binding.clone())
        };
        let (lengths, slopes) = (vector(&bound.lengths), vector(&bound.slopes));
        for chunk in chunks {
            let window = Window::new(shape, None, &chunk, &(0..shape.keys));
            let (binding, mut start) = weights.clone();
            if kept {
                let first = chunk.first_head as u64 * shape.queries as u64 + chunk.first_row as u64;
                start += (first * shape.keys as u64) as u32;
            }
            let (mask, mask_start) = window.bind_mask(gpu, call.mask.as_ref())?;
            let inputs = scores::Inputs {
                query: &window.bind_query(gpu, "query", call.query)?,
                key: &window.bind_key(gpu, "key", call.key)?,
                mask: &mask,
                key_mask: &bound.key_mask,
                lengths: &lengths,
                slopes: &slopes,
                rule: Rule {
                    mask_start,
                    ..bound.rule
                },
            };
            scores::push(batch, scores_tile, shape, chunk, &inputs, binding.clone(), start)?;
            softmax::push(batch, shape, chunk, &bound.sinks, binding.clone(), start, &lse)?;
            let value = window.bind_key(gpu, "value", call.value)?;
            let output = window.bind_output(gpu, "output", call.output)?;
            weighted_sum::push(batch, sum_tile, shape, chunk, (binding, start), &value, &output)?;
        }
        if let Some(mean) = outputs.mean_weights {
            mean_heads::push(batch, shape, weights, Binding::output(gpu, "mean_weights", mean)?)?;
        }
        Ok(())
    }

    /// Cuts the rows into chunks whose scores fit the scratch, whose work fits a dispatch and whose operands can be
    /// bound: several heads each, or, if one head is too large, several rows of it.
    fn chunks(&self, call: &ComposedCall) -> Result<Vec<Chunk>> {
        let gpu = &self.gpu;
        let shape = &call.shape;
        let allows = most_bytes(gpu).min(gpu.limits().max_buffer_size);
        let row = (shape.keys as u64 * 4).max(4);
        if row > allows {
            return Err(Error::Limit {
                what: format!("one row of {} scores", shape.keys),
                needs: row,
                allows,
                limit: "max_storage_buffer_binding_size",
                advice: "use AttentionPath::Fused, or split the keys".to_owned(),
            });
        }
        let of_row = row / 4 * shape.head_dim.max(shape.value_dim).max(1) as u64;
        let rows = (allows.min(SCORES_CHUNK) / row)
            .min(gpu.dispatch_work() / of_row)
            .max(1);
        // Whole tiles, so that none but the last is half empty.
        let rows = if rows >= 64 { rows / 64 * 64 } else { rows };
        let mut chunks = Vec::new();
        let mut left = vec![Chunk::whole(shape)];
        while let Some(chunk) = left.pop() {
            let window = Window::new(shape, None, &chunk, &(0..shape.keys));
            let fits = window.query_fits(gpu, call.query, call.output)
                && window.key_fits(gpu, call.key, call.value)
                && window.mask_fits(gpu, call.mask.as_ref());
            if chunk.all_rows() <= rows && fits || chunk.all_rows() == 1 {
                chunks.push(chunk);
            } else if chunk.head_count > 1 {
                // As many heads as fit, in equal steps.
                let heads = match (rows / chunk.rows as u64) as usize {
                    heads if heads > 0 && heads < chunk.head_count => heads,
                    heads if heads > 0 => chunk.head_count.div_ceil(2),
                    _ => 1,
                };
                let first = (chunk.head_count - 1) / heads * heads;
                left.push(Chunk {
                    head_count: first,
                    ..chunk
                });
                left.push(Chunk {
                    first_head: chunk.first_head + first,
                    head_count: chunk.head_count - first,
                    ..chunk
                });
            } else {
                let rows = match rows as usize {
                    rows if rows < chunk.rows => rows,
                    _ => chunk.rows.div_ceil(2),
                };
                let first = (chunk.rows - 1) / rows * rows;
                left.push(Chunk { rows: first, ..chunk });
                left.push(Chunk {
                    first_row: chunk.first_row + first,
                    rows: chunk.rows - first,
                    ..chunk
                });
            }
        }
        // Each cut took the last piece off, and the rest was left to go on with.
        chunks.reverse();
        Ok(chunks)
    }
}
