//! Few queries, many keys: the keys are split over workgroups, and the splits merged.

use std::ops::Range;

use super::{Attention, fused::FusedCall, rule::BoundRule, window::Window};
use crate::{
    AttentionOptions, AttentionShape, Gpu, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage, most_bytes},
    kernels::{
        Chunk,
        attention::Operands,
        decode, join_words,
        merge_ranges::{self, Lse, Ranges},
        scores::{Operand, Rule},
    },
    tiles::DecodeTile,
    tuning::{RANGES_CHUNK, decode_groups, decode_pays},
};

/// What all dispatches of a call share: lengths, slopes and sinks, and the rule that finds them.
struct Words {
    words: Binding,
    slopes_start: u32,
    sinks: Option<(u32, u32)>,
    rule: Rule,
}

/// How a chunk's keys are split.
struct Splits {
    count: usize,
    keys: usize,
    /// Splits at most while a cache of this capacity fills: what is held and built then is held and built from the first
    /// call on.
    reach: usize,
}

impl Splits {
    fn new(gpu: &Gpu, call: &FusedCall, tile: DecodeTile, keys: &Range<usize>, chunk: &Chunk) -> Self {
        let group = call.shape.group();
        let tiles = (group * call.shape.queries).div_ceil(4) * (chunk.head_count / group);
        let groups = decode_groups(gpu);
        let of_split = tile.split_keys(keys.len() * tiles, groups);
        Self {
            count: keys.len().div_ceil(of_split).max(1),
            keys: of_split,
            reach: tile.most_splits(capacity(call.key).max(keys.len()), tiles, groups),
        }
    }
}

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

    /// Adds the call's dispatches and says so, unless a key head's keys would have to be cut, which the fused kernel does.
    pub(super) fn decode(&self, batch: &mut Batch, call: &FusedCall) -> Result<bool> {
        let Some(tile) = self.decode_tile(&call.shape).filter(|_| call.packed.is_none()) else {
            return Ok(false);
        };
        let keys = call.seen().keys(&Chunk::whole(&call.shape));
        let Some(chunks) = self.decode_chunks(call, tile, &keys) else {
            return Ok(false);
        };
        let bound = call.bound;
        let vectors = [
            bound.lengths.as_ref(),
            bound.slopes.as_ref(),
            bound.sinks.as_ref(),
        ];
        let (words, [lengths, slopes, sinks]) = join_words::push(batch, vectors)?;
        let words = Words {
            words,
            slopes_start: slopes.0,
            sinks: bound.sinks.as_ref().map(|_| sinks),
            rule: Rule {
                lengths_start: lengths.0,
                lengths_stride: lengths.1,
                ..bound.rule
            },
        };
        for chunk in chunks {
            self.decode_chunk(batch, call, tile, &keys, chunk, &words)?;
        }
        Ok(true)
    }

    /// Heads that share key heads, as many at a time as can be bound and as a dispatch may have the work of; `None` if one
    /// key head's are too many.
    fn decode_chunks(&self, call: &FusedCall, tile: DecodeTile, keys: &Range<usize>) -> Option<Vec<Chunk>> {
        let gpu = &self.gpu;
        let shape = &call.shape;
        let group = shape.group();
        let mut chunks = Vec::new();
        let mut left = vec![Chunk::whole(shape)];
        while let Some(chunk) = left.pop() {
            let window = Window::new(shape, None, &chunk, keys);
            let work = chunk
                .all_rows()
                .saturating_mul(keys.len() as u64)
                .saturating_mul((shape.head_dim + shape.value_dim) as u64);
            let splits = Splits::new(gpu, call, tile, keys, &chunk);
            let bytes = (splits.reach as u64)
                .saturating_mul(chunk.all_rows())
                .saturating_mul(shape.value_dim as u64 * 4 + 8);
            let fits = window.query_fits(gpu, call.query, call.output)
                && window.key_fits(gpu, call.key, call.value)
                && window.mask_fits(gpu, call.mask.as_ref());
            if fits && work <= gpu.dispatch_work() && bytes <= RANGES_CHUNK.min(most_bytes(gpu)) {
                chunks.push(chunk);
            } else if chunk.head_count > group {
                let first = (chunk.head_count / group).div_ceil(2) * group;
                left.push(Chunk {
                    first_head: chunk.first_head + first,
                    head_count: chunk.head_count - first,
                    ..chunk
                });
                left.push(Chunk {
                    head_count: first,
                    ..chunk
                });
            } else {
                return None;
            }
        }
        Some(chunks)
    }

    fn decode_chunk(
        &self,
        batch: &mut Batch,
        call: &FusedCall,
        tile: DecodeTile,
        keys: &Range<usize>,
        chunk: Chunk,
        words: &Words,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let (shape, bound) = (&call.shape, call.bound);
        let window = Window::new(shape, None, &chunk, keys);
        let splits = Splits::new(gpu, call, tile, keys, &chunk);
        let (mask, mask_start) = window.bind_mask(gpu, call.mask.as_ref())?;
        let output = window.bind_output(gpu, "output", call.output)?;
        let lse = call
            .lse
            .map(|lse| Lse::bind(gpu, lse, shape.heads, shape.queries))
            .transpose()?;
        let mut dispatch = decode::Call {
            first_head: chunk.first_head,
            head_count: chunk.head_count,
            splits: splits.count,
            split_keys: splits.keys,
            output_split: 0,
            lse_split: 0,
            operands: Operands {
                keys: keys.clone(),
                partial: splits.count > 1,
                query: window.bind_query(gpu, "query", call.query)?,
                key: window.bind_key(gpu, "key", call.key)?,
                value: window.bind_key(gpu, "value", call.value)?,
                output: output.clone(),
                mask,
                key_mask: bound.key_mask.clone(),
                words: words.words.clone(),
                slopes_start: words.slopes_start,
                sinks: words.sinks,
                lse: lse.clone(),
                rule: Rule {
                    mask_start,
                    ..words.rule
                },
            },
        };
        if splits.reach == 1 {
            return dispatch.push(batch, tile, shape);
        }
        let (rows, cols) = (chunk.all_rows(), shape.value_dim as u64);
        let output_bytes = splits.reach as u64 * rows * cols * 4;
        let outputs = batch.scratch(Scratch::RangeOutputs, output_bytes)?;
        let outputs = Binding::prefix(gpu, "outputs of splits of the keys", &outputs, output_bytes)?;
        let sums_bytes = splits.reach as u64 * rows * 8;
        let sums = batch.scratch(Scratch::RangeSums, sums_bytes)?;
        let sums = Binding::prefix(gpu, "sums of splits of the keys", &sums, sums_bytes)?;
        if splits.count == 1 {
            if !batch.is_planned() {
                gpu.kernel(&merge_ranges::variant(output.storage))?;
            }
            return dispatch.push(batch, tile, shape);
        }
        let of_head = shape.queries as u32;
        let of_batch = of_head.wrapping_mul(shape.heads as u32);
        let width = cols as u32;
        // The chunk's first head lies at the start; counts wrap as the kernel's do.
        let place = (chunk.first_head as u32).wrapping_mul(of_head).wrapping_neg();
        dispatch.operands.output = Operand {
            binding: outputs.clone(),
            storage: Storage::F32,
            start: place.wrapping_mul(width),
            strides: [
                of_batch.wrapping_mul(width),
                of_head.wrapping_mul(width),
                width,
                1,
            ],
        };
        dispatch.output_split = (rows as u32).wrapping_mul(width);
        dispatch.operands.lse = Some(Lse {
            binding: sums.clone(),
            start: place.wrapping_mul(2),
            batch: of_batch.wrapping_mul(2),
            head: of_head.wrapping_mul(2),
        });
        dispatch.lse_split = 2 * rows as u32;
        dispatch.operands.sinks = None;
        dispatch.push(batch, tile, shape)?;
        let ranges = Ranges {
            chunk,
            count: splits.count,
            outputs,
            sums,
        };
        let (heads, value_dim) = (shape.heads, shape.value_dim);
        merge_ranges::push(batch, ranges, heads, value_dim, &output, &lse, &bound.sinks)
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
    match tensor.strides() {
        &[_, head, row, 1] => head.checked_div(row).unwrap_or(0),
        // Vectors that do not lie in one piece are no cache's.
        _ => 0,
    }
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
