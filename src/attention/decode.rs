//! Few queries, many keys: the keys are split over workgroups, and the splits merged.

use super::{Attention, fused::FusedCall, rule::BoundRule, whole, window::Window};
use crate::{
    AttentionOptions, AttentionShape, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage},
    kernels::{
        decode, join_words,
        merge_ranges::{self, Lse, Ranges},
        scores::{Operand, Rule},
    },
    tuning::{DecodeTile, RANGES_CHUNK, decode_groups, decode_pays},
};

impl Attention {
    /// The tile with which a call of these sizes is decoded, if that is what pays.
    pub(super) fn decode_tile(&self, shape: &AttentionShape) -> Option<DecodeTile> {
        let few = decode_pays(&self.gpu, shape.group(), shape.queries) && shape.value_dim > 0;
        few.then(|| {
            DecodeTile::of(
                &self.gpu,
                shape.group() * shape.queries,
                shape.head_dim,
                shape.value_dim,
            )
        })
        .flatten()
    }

    /// Adds the call's dispatches and says so, unless it would have to be cut, which the fused kernel does.
    pub(super) fn decode(&self, batch: &mut Batch, call: &FusedCall) -> Result<bool> {
        let gpu = &self.gpu;
        let shape = &call.shape;
        let Some(tile) = self.decode_tile(shape).filter(|_| call.packed.is_none()) else {
            return Ok(false);
        };
        let keys = call.seen().keys(&whole(shape));
        let window = Window::new(shape, None, &whole(shape), &keys);
        let rows = window.rows();
        let work = rows
            .saturating_mul(keys.len() as u64)
            .saturating_mul((shape.head_dim + shape.value_dim) as u64);
        let tiles = (shape.group() * shape.queries).div_ceil(4) * shape.batch * shape.kv_heads;
        let groups = decode_groups(gpu);
        let split_keys = tile.split_keys(keys.len() * tiles, groups);
        let splits = keys.len().div_ceil(split_keys).max(1);
        // A cache grows from call to call: what is held and built then is held and built from the first one on.
        let reach = tile.most_splits(capacity(call.key).max(keys.len()), tiles, groups);
        let bytes = (reach as u64)
            .saturating_mul(rows)
            .saturating_mul(shape.value_dim as u64 * 4 + 8);
        let fits = window.query_fits(gpu, call.query, call.output)
            && window.key_fits(gpu, call.key, call.value)
            && window.mask_fits(gpu, call.mask.as_ref());
        if !fits || work > gpu.dispatch_work() || bytes > RANGES_CHUNK {
            return Ok(false);
        }

        let bound = call.bound;
        let vectors = [
            bound.lengths.as_ref(),
            bound.slopes.as_ref(),
            bound.sinks.as_ref(),
        ];
        let (words, [lengths, slopes, sinks]) = join_words::push(batch, vectors)?;
        let (mask, mask_start) = window.bind_mask(gpu, call.mask.as_ref())?;
        let output = window.bind_output(gpu, "output", call.output)?;
        let lse = call
            .lse
            .map(|lse| Lse::bind(gpu, lse, shape.heads, shape.queries))
            .transpose()?;
        let mut dispatch = decode::Call {
            keys,
            splits,
            split_keys,
            query: window.bind_query(gpu, "query", call.query)?,
            key: window.bind_key(gpu, "key", call.key)?,
            value: window.bind_key(gpu, "value", call.value)?,
            output: (output.clone(), 0),
            mask,
            key_mask: bound.key_mask.clone(),
            words,
            slopes_start: slopes.0,
            sinks: bound.sinks.as_ref().map(|_| sinks),
            lse: lse.clone().map(|lse| (lse, 0)),
            rule: Rule {
                lengths_start: lengths.0,
                lengths_stride: lengths.1,
                mask_start,
                ..bound.rule
            },
        };
        if reach == 1 {
            dispatch.push(batch, tile, shape)?;
            return Ok(true);
        }
        let cols = shape.value_dim as u64;
        let output_bytes = reach as u64 * rows * cols * 4;
        let outputs = batch.scratch(Scratch::RangeOutputs, output_bytes)?;
        let outputs = Binding::prefix(gpu, "outputs of splits of the keys", &outputs, output_bytes)?;
        let sums_bytes = reach as u64 * rows * 8;
        let sums = batch.scratch(Scratch::RangeSums, sums_bytes)?;
        let sums = Binding::prefix(gpu, "sums of splits of the keys", &sums, sums_bytes)?;
        if splits == 1 {
            if !batch.is_planned() {
                gpu.kernel(&merge_ranges::variant(output.storage))?;
            }
            dispatch.push(batch, tile, shape)?;
            return Ok(true);
        }
        let of_head = shape.queries as u32;
        let of_batch = of_head * shape.heads as u32;
        let width = cols as u32;
        dispatch.output = (
            Operand {
                binding: outputs.clone(),
                storage: Storage::F32,
                start: 0,
                strides: [of_batch * width, of_head * width, width, 1],
            },
            rows as u32 * width,
        );
        dispatch.lse = Some((
            Lse {
                binding: sums.clone(),
                start: 0,
                batch: 2 * of_batch,
                head: 2 * of_head,
            },
            2 * rows as u32,
        ));
        dispatch.sinks = None;
        dispatch.push(batch, tile, shape)?;
        let ranges = Ranges {
            chunk: whole(shape),
            count: splits,
            outputs,
            sums,
        };
        merge_ranges::push(
            batch,
            ranges,
            shape.heads,
            shape.value_dim,
            &output,
            &lse,
            &bound.sinks,
        )?;
        Ok(true)
    }

    /// Storage of a call's tensors.
    pub(super) fn storages(&self, tensors: [&Tensor; 4]) -> Result<[Storage; 4]> {
        let storage = |tensor: &Tensor| Storage::of(&self.gpu, tensor.dtype());
        let [query, key, value, output] = tensors;
        Ok([storage(query)?, storage(key)?, storage(value)?, storage(output)?])
    }
}

/// Rows for which a head of `[B, H, L, D]` has room in memory, as in a cache of which `L` rows are used.
fn capacity(tensor: &Tensor) -> usize {
    let strides = tensor.strides();
    strides[1].checked_div(strides[2]).unwrap_or(0)
}

/// A decoded call without masks and lengths: what checks a variant.
pub(crate) fn check_decode(
    batch: &mut Batch,
    options: &AttentionOptions,
    shape: AttentionShape,
    [query, key, value, output]: [&Tensor; 4],
) -> Result<bool> {
    let gpu = batch.gpu();
    let bound = BoundRule::without_masks(gpu, options, &shape);
    Attention::new(gpu, options.clone())?.decode(
        batch,
        &FusedCall {
            shape,
            packed: None,
            query,
            key,
            value,
            output,
            lse: None,
            mask: None,
            bound: &bound,
        },
    )
}
