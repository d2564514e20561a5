//! Which keys the rows of a chunk may see, as the kernels find it out: what is hidden from all of them costs nothing.

use std::ops::Range;

use crate::{
    AttentionShape, CuSeqlens,
    kernels::{Chunk, scores::Rule},
    mask::UNBOUNDED,
};

/// What decides about visibility on the host.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    /// Of a packed call: as many batch entries as sequences, and the longest one's lengths.
    pub(super) shape: AttentionShape,
    pub(super) packed: Option<&'a CuSeqlens>,
    pub(super) rule: &'a Rule,
}

impl Seen<'_> {
    /// Keys from the first to the last that some row of the chunk may see.
    pub(super) fn keys(&self, chunk: &Chunk) -> Range<usize> {
        let [near, always] = self.parts(chunk);
        match (near.is_empty(), always.is_empty()) {
            (true, _) => always,
            (false, true) => near,
            (false, false) => near.start..always.end,
        }
    }

    /// Keys that some row of the chunk may see: those that masks and positions speak of, and those that they do not.
    /// Lengths that only the GPU has count as the longest possible.
    pub(super) fn parts(&self, chunk: &Chunk) -> [Range<usize>; 2] {
        let heads = self.shape.heads;
        let sequence = chunk.first_head / heads;
        let one = (chunk.first_head + chunk.head_count - 1) / heads == sequence;
        match self.packed {
            Some(_) if !one => [0..self.shape.keys, 0..0],
            Some(seams) => {
                let of = |seams: &[usize]| seams[sequence + 1] - seams[sequence];
                let (queries, keys) = (of(seams.queries()), of(seams.keys()));
                let end = (chunk.first_row + chunk.rows).min(queries);
                [self.by_rows(chunk.first_row, end, queries, keys), 0..0]
            }
            None => {
                let maskable = self.rule.maskable as usize;
                let end = chunk.first_row + chunk.rows;
                [
                    self.by_rows(chunk.first_row, end, self.shape.queries, maskable),
                    maskable..self.shape.keys,
                ]
            }
        }
    }

    /// `find_tile` in `shaders/flash.wgsl`, for the rows `first..end` of a sequence.
    fn by_rows(&self, first: usize, end: usize, queries: usize, keys: usize) -> Range<usize> {
        if first >= end {
            return 0..0;
        }
        let rule = self.rule;
        let aligned = if rule.bottom_right == 1 {
            keys as i64 - queries as i64
        } else {
            0
        };
        let position = |row: usize| row as i64 + i64::from(rule.offset) + aligned;
        let mut last = keys;
        if rule.mask_kind != 0 {
            last = last.min(rule.mask_keys as usize);
        }
        if rule.right < UNBOUNDED {
            let right = position(end - 1) + i64::from(rule.right) + 1;
            last = last.min(usize::try_from(right).unwrap_or(0));
        }
        // A shorter sequence's rows stand further left.
        let moves = rule.bottom_right == 1 && rule.has_lengths == 1;
        let start = if rule.left < UNBOUNDED && !moves {
            usize::try_from(position(first) - i64::from(rule.left)).unwrap_or(0)
        } else {
            0
        };
        start.min(last)..last
    }
}
