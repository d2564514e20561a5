//! How a fused call is cut into dispatches: by the device's limits on bindings, by the work of one dispatch, and by the
//! rounds of loops that a driver runs.

use std::ops::Range;

use super::{
    seen::Seen,
    window::{BroadcastMask, Window},
};
use crate::{
    AttentionShape, CuSeqlens, Gpu, Tensor, kernel::most_bytes, kernels::Chunk, tiles::FlashTile,
    tuning::RANGES_CHUNK,
};

/// A chunk of rows and the ranges of keys that it is computed in, one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) chunk: Chunk,
    pub(super) ranges: Vec<Range<usize>>,
}

/// What decides about the cuts.
pub(super) struct Cutter<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) tile: FlashTile,
    /// Of a packed call: as many batch entries as sequences, and the longest one's lengths.
    pub(super) shape: AttentionShape,
    pub(super) packed: Option<&'a CuSeqlens>,
    pub(super) seen: Seen<'a>,
    pub(super) mask: Option<BroadcastMask<'a>>,
    pub(super) query: &'a Tensor,
    pub(super) key: &'a Tensor,
    pub(super) value: &'a Tensor,
    pub(super) output: &'a Tensor,
}

/// Keys that the rows of one tile look at, and those that they do not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct KeyTiles {
    pub(super) seen: u64,
    pub(super) hidden: u64,
}

impl Cutter<'_> {
    /// The parts of the whole call.
    pub(super) fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        self.cut(Chunk::whole(&self.shape), &mut parts);
        parts
    }

    fn cut(&self, chunk: Chunk, parts: &mut Vec<Part>) {
        let mut ranges = self.ranges(&chunk);
        // Heads that lie side by side in memory cannot be bound apart: then it is the keys that are cut first.
        let one_head = Chunk {
            head_count: 1,
            ..chunk
        };
        if !ranges.iter().all(|range| self.range_fits(&one_head, range)) {
            ranges = self.shorter(&one_head, ranges);
        }
        let too_much = self.work(&chunk) > self.gpu.dispatch_work();
        if !too_much && self.fits(&chunk, &ranges) {
            parts.push(Part { chunk, ranges });
            return;
        }
        match self.halves(&chunk) {
            Some(halves) => {
                for half in halves {
                    self.cut(half, parts);
                }
            }
            None => parts.push(Part { chunk, ranges }),
        }
    }

    /// Heads first, at a batch entry's border if there is one; then rows, in whole tiles.
    fn halves(&self, chunk: &Chunk) -> Option<[Chunk; 2]> {
        let heads = self.shape.heads;
        if chunk.head_count > 1 {
            let half = chunk.head_count / 2;
            let border = (chunk.first_head + half).next_multiple_of(heads) - chunk.first_head;
            let first = if border < chunk.head_count { border } else { half };
            return Some([
                Chunk {
                    head_count: first,
                    ..*chunk
                },
                Chunk {
                    first_head: chunk.first_head + first,
                    head_count: chunk.head_count - first,
                    ..*chunk
                },
            ]);
        }
        let tile = self.tile.rows() as usize;
        if chunk.rows <= tile {
            return None;
        }
        let first = (chunk.rows / 2).next_multiple_of(tile).min(chunk.rows - 1);
        Some([
            Chunk {
                rows: first,
                ..*chunk
            },
            Chunk {
                first_row: chunk.first_row + first,
                rows: chunk.rows - first,
                ..*chunk
            },
        ])
    }

    /// Ranges of the keys that some row of the chunk may see, each short enough for the driver's loops.
    fn ranges(&self, chunk: &Chunk) -> Vec<Range<usize>> {
        let seen = self.seen.keys(chunk);
        if seen.is_empty() {
            // The rows that see nothing are still to be written.
            return std::iter::once(0..0).collect();
        }
        let most = self
            .tile
            .most_keys(self.gpu, self.shape.head_dim)
            .unwrap_or(usize::MAX);
        split(seen, most)
    }

    /// Cuts ranges until each can be bound; a mere tile of keys that cannot is an error when it is bound.
    fn shorter(&self, chunk: &Chunk, ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let least = self.tile.keys() as usize;
        let fits = |range: &Range<usize>| range.len() <= least || self.range_fits(chunk, range);
        let mut short = Vec::new();
        let mut left: Vec<_> = ranges.into_iter().rev().collect();
        while let Some(range) = left.pop() {
            if fits(&range) {
                short.push(range);
            } else {
                let middle = range.start + (range.len() / 2).next_multiple_of(least).min(range.len() - 1);
                left.push(middle..range.end);
                left.push(range.start..middle);
            }
        }
        short
    }

    fn range_fits(&self, chunk: &Chunk, range: &Range<usize>) -> bool {
        let window = Window::new(&self.shape, self.packed, chunk, range);
        window.key_fits(self.gpu, self.key, self.value) && window.mask_fits(self.gpu, self.mask.as_ref())
    }

    fn fits(&self, chunk: &Chunk, ranges: &[Range<usize>]) -> bool {
        let window = Window::new(&self.shape, self.packed, chunk, &(0..0));
        window.query_fits(self.gpu, self.query, self.output)
            && ranges.iter().all(|range| self.range_fits(chunk, range))
            && (ranges.len() == 1
                || window
                    .rows()
                    .saturating_mul(ranges.len() as u64)
                    .saturating_mul(self.shape.value_dim as u64 * 4 + 8)
                    <= RANGES_CHUNK.min(most_bytes(self.gpu)))
    }

    /// Multiply-adds of a chunk, those of padding rows included.
    fn work(&self, chunk: &Chunk) -> u64 {
        let columns = super::fused::column_tiles(self.tile, &self.shape);
        let of_pair = columns * self.shape.head_dim as u64 + self.shape.value_dim as u64;
        let tile = u64::from(self.tile.rows());
        let tiles = (chunk.rows as u64).div_ceil(tile);
        let bound = (chunk.head_count as u64)
            .saturating_mul(tiles * tile)
            .saturating_mul(self.shape.keys as u64)
            .saturating_mul(of_pair);
        if bound <= self.gpu.dispatch_work() {
            return bound;
        }
        self.per_tile(chunk, |seen| seen.iter().map(|keys| keys.len() as u64).sum())
            .saturating_mul(tile * of_pair)
    }

    /// Tiles of keys that a chunk's dispatches look at, and those that they do not.
    pub(super) fn key_tiles(&self, part: &Part) -> KeyTiles {
        let tile = u64::from(self.tile.keys());
        let of = |keys: &Range<usize>, range: &Range<usize>| {
            let len = keys
                .end
                .min(range.end)
                .saturating_sub(keys.start.max(range.start));
            (len as u64).div_ceil(tile)
        };
        let columns = super::fused::column_tiles(self.tile, &self.shape);
        let seen = columns
            * self.per_tile(&part.chunk, |seen| {
                part.ranges
                    .iter()
                    .map(|range| of(&seen[0], range) + of(&seen[1], range))
                    .sum()
            });
        let all = columns * self.per_tile(&part.chunk, |_| (self.shape.keys as u64).div_ceil(tile));
        KeyTiles {
            seen,
            hidden: all.saturating_sub(seen),
        }
    }

    /// A sum over the tiles of rows of all heads of a chunk, from the keys that each may see.
    fn per_tile(&self, chunk: &Chunk, count: impl Fn([Range<usize>; 2]) -> u64) -> u64 {
        let tile = self.tile.rows() as usize;
        let of_head = |first_head: usize| -> u64 {
            (0..chunk.rows)
                .step_by(tile)
                .map(|row| {
                    count(self.seen.parts(&Chunk {
                        first_head,
                        head_count: 1,
                        first_row: chunk.first_row + row,
                        rows: tile.min(chunk.rows - row),
                    }))
                })
                .fold(0, u64::saturating_add)
        };
        if self.packed.is_none() {
            return of_head(chunk.first_head).saturating_mul(chunk.head_count as u64);
        }
        (chunk.first_head..chunk.first_head + chunk.head_count)
            .map(of_head)
            .fold(0, u64::saturating_add)
    }
}

/// Ranges of at most `most` that cover `range`, about equal.
fn split(range: Range<usize>, most: usize) -> Vec<Range<usize>> {
    let pieces = range.len().div_ceil(most.max(1)).max(1);
    let step = range.len().div_ceil(pieces).max(1);
    (0..pieces)
        .map(|piece| range.start + piece * step..(range.start + (piece + 1) * step).min(range.end))
        .filter(|piece| !piece.is_empty())
        .collect()
}
