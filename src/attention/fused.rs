//! The fused path: parts of the call, each one dispatch or, over several ranges of keys, a few and their merge.

use std::ops::Range;

use super::{
    Attention,
    cut::{Cutter, Part},
    rule::BoundRule,
    seen::Seen,
    window::{BroadcastMask, Window},
};
use crate::{
    AttentionOptions, AttentionShape, CuSeqlens, Gpu, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage},
    kernels::{
        Chunk, Vector,
        attention::Operands,
        flash, join_words,
        merge_ranges::{self, Lse, Ranges},
        scores::{Operand, Rule},
        tiles,
    },
    tiles::FlashTile,
};

/// What a fused call reads and writes: `[B, H, L, D]` each, or of a packed call `[1, H, T, D]` with stride 0 of the
/// first axis.
pub(super) struct FusedCall<'a> {
    /// Of a packed call: as many batch entries as sequences, and the longest one's lengths.
    pub(super) shape: AttentionShape,
    pub(super) packed: Option<&'a CuSeqlens>,
    pub(super) query: &'a Tensor,
    pub(super) key: &'a Tensor,
    pub(super) value: &'a Tensor,
    pub(super) output: &'a Tensor,
    /// `[B, H, Lq]`, or of a packed call `[H, Tq]`.
    pub(super) lse: Option<&'a Tensor>,
    pub(super) mask: Option<BroadcastMask<'a>>,
    pub(super) bound: &'a BoundRule,
}

/// Tiles of V's columns; one at least, for the log-sum-exp.
pub(super) fn column_tiles(tile: FlashTile, shape: &AttentionShape) -> u64 {
    tiles(shape.value_dim, tile.value_cols()).max(1)
}

/// What all dispatches of a call share.
struct Shared<'a> {
    call: &'a FusedCall<'a>,
    tile: FlashTile,
    rule: Rule,
    words: Binding,
    slopes_start: u32,
    sinks: Option<(u32, u32)>,
}

impl<'a> FusedCall<'a> {
    /// Which keys rows may see.
    pub(super) fn seen(&'a self) -> Seen<'a> {
        Seen {
            shape: self.shape,
            packed: self.packed,
            rule: &self.bound.rule,
        }
    }

    /// What decides how the call is cut for `tile`.
    pub(super) fn cutter(&'a self, gpu: &'a Gpu, tile: FlashTile) -> Cutter<'a> {
        Cutter {
            gpu,
            tile,
            shape: self.shape,
            packed: self.packed,
            seen: self.seen(),
            mask: self.mask,
            query: self.query,
            key: self.key,
            value: self.value,
            output: self.output,
        }
    }
}

impl Attention {
    pub(super) fn fused(&self, batch: &mut Batch, call: &FusedCall) -> Result<()> {
        if self.decode(batch, call)? {
            return Ok(());
        }
        let storages = self.storages([call.query, call.key, call.value, call.output])?;
        let (plain, ahead) = (call.bound.rule.is_plain(), batch.is_planned());
        let (head_dim, value_dim) = (call.shape.head_dim, call.shape.value_dim);
        let chosen = self.gpu.flash_tile(storages, plain, head_dim, value_dim, ahead)?;
        push(batch, chosen.tile, call)
    }
}

/// A fused call without masks and lengths, with a tile of its own: what checks a variant.
pub(crate) fn check_fused(
    batch: &mut Batch,
    tile: FlashTile,
    options: &AttentionOptions,
    shape: AttentionShape,
    [query, key, value, output]: [&Tensor; 4],
) -> Result<()> {
    let bound = BoundRule::without_masks(batch.gpu(), options, &shape);
    push(
        batch,
        tile,
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

fn push(batch: &mut Batch, tile: FlashTile, call: &FusedCall) -> Result<()> {
    let gpu = batch.gpu();
    let bound = call.bound;
    let seams = call
        .packed
        .map(|seams| Vector::bind(gpu, "cu_seqlens", seams.tensor()))
        .transpose()?;
    // Lengths of keys and seams exclude each other.
    let vectors = [
        seams.as_ref().or(bound.lengths.as_ref()),
        bound.slopes.as_ref(),
        bound.sinks.as_ref(),
    ];
    let (words, [lengths, slopes, sinks]) = join_words::push(batch, vectors)?;
    let shared = Shared {
        call,
        tile,
        rule: Rule {
            lengths_start: lengths.0,
            lengths_stride: lengths.1,
            ..bound.rule
        },
        words,
        slopes_start: slopes.0,
        sinks: bound.sinks.as_ref().map(|_| sinks),
    };
    let cutter = call.cutter(gpu, tile);
    for part in cutter.parts() {
        if batch.is_planned() {
            let counted = cutter.key_tiles(&part);
            batch.count_key_tiles(counted.seen, counted.hidden);
        }
        shared.push(batch, &part)?;
    }
    Ok(())
}

impl Shared<'_> {
    fn push(&self, batch: &mut Batch, part: &Part) -> Result<()> {
        let call = self.call;
        let chunk = part.chunk;
        let gpu = batch.gpu();
        let whole = Window::new(&call.shape, call.packed, &chunk, &(0..0));
        let output = whole.bind_output(gpu, "output", call.output)?;
        let lse = call
            .lse
            .map(|lse| self.bind_lse(batch, lse, &whole))
            .transpose()?;
        if let [range] = &part.ranges[..] {
            return self.dispatch(batch, chunk, range.clone(), output, &lse, self.sinks, false);
        }

        // Rows of all sequences of a packed chunk lie one behind the other.
        let rows = Chunk {
            first_head: if call.packed.is_some() {
                whole.heads.start
            } else {
                chunk.first_head
            },
            head_count: if call.packed.is_some() {
                whole.heads.len()
            } else {
                chunk.head_count
            },
            first_row: whole.queries.start,
            rows: whole.queries.len(),
        };
        let count = part.ranges.len() as u64;
        let (all_rows, cols) = (rows.all_rows(), call.shape.value_dim as u64);
        let output_bytes = count.saturating_mul(all_rows).saturating_mul(cols * 4);
        let outputs = batch.scratch(Scratch::RangeOutputs, output_bytes)?;
        let outputs = Binding::prefix(gpu, "outputs of ranges of keys", &outputs, output_bytes)?;
        let sums_bytes = count.saturating_mul(all_rows * 8);
        let sums = batch.scratch(Scratch::RangeSums, sums_bytes)?;
        let sums = Binding::prefix(gpu, "sums of ranges of keys", &sums, sums_bytes)?;
        // Counts wrap as the kernel's do: the first head and row are not 0, their place is.
        let first_row = (rows.first_head as u64 * rows.rows as u64 + rows.first_row as u64) as u32;
        let of_head = rows.rows as u32;
        let of_batch = if call.packed.is_some() {
            0
        } else {
            of_head.wrapping_mul(call.shape.heads as u32)
        };
        for (number, range) in (0u32..).zip(&part.ranges) {
            let place = (all_rows as u32).wrapping_mul(number).wrapping_sub(first_row);
            let width = cols as u32;
            let output = Operand {
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
            let sums = Lse {
                binding: sums.clone(),
                start: place.wrapping_mul(2),
                batch: of_batch.wrapping_mul(2),
                head: of_head.wrapping_mul(2),
            };
            self.dispatch(batch, chunk, range.clone(), output, &Some(sums), None, true)?;
        }
        let ranges = Ranges {
            chunk: rows,
            count: part.ranges.len(),
            outputs,
            sums,
        };
        let (heads, value_dim) = (call.shape.heads, call.shape.value_dim);
        merge_ranges::push(batch, ranges, heads, value_dim, &output, &lse, &call.bound.sinks)
    }

    fn bind_lse(&self, batch: &Batch, lse: &Tensor, window: &Window) -> Result<Lse> {
        let (queries, batches) = match self.call.packed {
            Some(seams) => (seams.queries().last().copied().unwrap_or(0), 0),
            None => (self.call.shape.queries, self.call.shape.heads),
        };
        let row = |batch: usize, head: usize, query: usize| {
            ((batch * batches + head) as u64) * queries as u64 + query as u64
        };
        let first = row(window.batches.start, window.heads.start, window.queries.start);
        let end = row(window.batches.end - 1, window.heads.end - 1, window.queries.end);
        let (binding, start) = if first < end {
            Binding::elements(batch.gpu(), "lse", lse, first..end)?
        } else {
            (Binding::absent_output(batch.gpu()), 0)
        };
        Ok(Lse {
            binding,
            start,
            batch: (batches as u32).wrapping_mul(queries as u32),
            head: queries as u32,
        })
    }

    #[allow(clippy::too_many_arguments)] // each differs between the two callers
    fn dispatch(
        &self,
        batch: &mut Batch,
        chunk: Chunk,
        keys: Range<usize>,
        output: Operand,
        lse: &Option<Lse>,
        sinks: Option<(u32, u32)>,
        partial: bool,
    ) -> Result<()> {
        let call = self.call;
        let gpu = batch.gpu();
        let window = Window::new(&call.shape, call.packed, &chunk, &keys);
        let (mask, mask_start) = window.bind_mask(gpu, call.mask.as_ref())?;
        flash::Call {
            chunk,
            operands: Operands {
                keys,
                partial,
                query: window.bind_query(gpu, "query", call.query)?,
                key: window.bind_key(gpu, "key", call.key)?,
                value: window.bind_key(gpu, "value", call.value)?,
                output,
                mask,
                key_mask: call.bound.key_mask.clone(),
                words: self.words.clone(),
                slopes_start: self.slopes_start,
                sinks,
                lse: lse.clone(),
                rule: Rule {
                    mask_start,
                    ..self.rule
                },
            },
            key_seams: call.packed.map(|seams| seams.queries().len() as u32),
        }
        .push(batch, self.tile, &call.shape)
    }
}
