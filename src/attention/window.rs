//! The part of a call that one dispatch touches, and its bindings.
//!
//! A device bounds the bytes of a binding, often to 128 MiB. A dispatch of some heads, rows and keys needs no more of a
//! tensor than those; what is bound is the range of memory from their first element to their last.

use std::ops::Range;

use crate::{
    AttentionShape, CuSeqlens, Gpu, Mask, Result, Tensor,
    kernel::{Binding, Storage},
    kernels::{Chunk, scores::Operand},
};

/// Entries of each axis that a dispatch touches. In a packed call there is one batch entry, and queries and keys count
/// over all sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) batches: Range<usize>,
    pub(super) heads: Range<usize>,
    pub(super) kv_heads: Range<usize>,
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
}

impl Window {
    pub(super) fn new(
        shape: &AttentionShape,
        packed: Option<&CuSeqlens>,
        chunk: &Chunk,
        keys: &Range<usize>,
    ) -> Self {
        let last = (chunk.first_head + chunk.head_count).max(1) - 1;
        let batches = chunk.first_head / shape.heads..last / shape.heads + 1;
        let heads = if batches.len() == 1 {
            chunk.first_head % shape.heads..last % shape.heads + 1
        } else {
            0..shape.heads
        };
        let group = shape.group();
        let kv_heads = heads.start / group..(heads.end - 1) / group + 1;
        let rows = chunk.first_row..chunk.first_row + chunk.rows;
        let (batches, queries, keys) = match packed {
            None => (batches, rows, keys.clone()),
            Some(seams) => {
                let of = |seams: &[usize], part: &Range<usize>| {
                    let (first, end) = (seams[batches.start], seams[batches.end]);
                    if batches.len() == 1 {
                        let within = |entry: usize| (first + entry).min(end);
                        within(part.start)..within(part.end)
                    } else {
                        first..end
                    }
                };
                (0..1, of(seams.queries(), &rows), of(seams.keys(), keys))
            }
        };
        Self {
            batches,
            heads,
            kv_heads,
            queries,
            keys,
        }
    }

    /// Rows of queries over all batch entries and heads.
    pub(super) fn rows(&self) -> u64 {
        self.batches.len() as u64 * self.heads.len() as u64 * self.queries.len() as u64
    }

    fn query_axes(&self) -> [Range<usize>; 3] {
        [self.batches.clone(), self.heads.clone(), self.queries.clone()]
    }

    fn key_axes(&self) -> [Range<usize>; 3] {
        [self.batches.clone(), self.kv_heads.clone(), self.keys.clone()]
    }

    /// Whether all of the queries' side can be bound.
    pub(super) fn query_fits(&self, gpu: &Gpu, query: &Tensor, output: &Tensor) -> bool {
        [query, output]
            .into_iter()
            .all(|tensor| fits(gpu, tensor, &elements(tensor, self.query_axes())))
    }

    /// Whether all of the keys' side can be bound.
    pub(super) fn key_fits(&self, gpu: &Gpu, key: &Tensor, value: &Tensor) -> bool {
        [key, value]
            .into_iter()
            .all(|tensor| fits(gpu, tensor, &elements(tensor, self.key_axes())))
    }

    /// Whether the mask of its scores can be bound.
    pub(super) fn mask_fits(&self, gpu: &Gpu, mask: Option<&BroadcastMask>) -> bool {
        mask.is_none_or(|mask| fits(gpu, mask.mask.tensor(), &mask.elements(self)))
    }

    /// Binds a tensor `[B, H, Lq, D]`.
    pub(super) fn bind_query(&self, gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<Operand> {
        bind(gpu, what, tensor, elements(tensor, self.query_axes()))
    }

    /// Binds a tensor `[B, Hkv, Lk, D]`.
    pub(super) fn bind_key(&self, gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<Operand> {
        bind(gpu, what, tensor, elements(tensor, self.key_axes()))
    }

    /// Binds a tensor `[B, H, Lq, D]` that is written.
    pub(super) fn bind_output(&self, gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<Operand> {
        let mut operand = self.bind_query(gpu, what, tensor)?;
        if elements(tensor, self.query_axes()).is_none() {
            operand.binding = Binding::absent_output(gpu);
        }
        Ok(operand)
    }

    /// Binds the mask, with the element at which it starts.
    pub(super) fn bind_mask(&self, gpu: &Gpu, mask: Option<&BroadcastMask>) -> Result<(Binding, u32)> {
        match mask.and_then(|mask| mask.elements(self).map(|range| (mask, range))) {
            Some((mask, range)) => Binding::elements(gpu, "mask", mask.mask.tensor(), range),
            None => Ok((Binding::absent(gpu), 0)),
        }
    }
}

/// A mask with the strides by which it is read as `[B, H, Lq, Lk]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct BroadcastMask<'a> {
    pub(super) mask: &'a Mask,
    pub(super) strides: [usize; 4],
    /// Keys that it covers.
    pub(super) keys: usize,
}

impl BroadcastMask<'_> {
    fn elements(&self, window: &Window) -> Option<Range<u64>> {
        // The kernels clamp a key beyond a short mask to its last one.
        let last = self.keys.checked_sub(1)?;
        let keys = window.keys.start.min(last)
            ..window
                .keys
                .end
                .min(self.keys)
                .max(window.keys.start.min(last) + 1);
        span(
            &self.strides,
            [
                window.batches.clone(),
                window.heads.clone(),
                window.queries.clone(),
                keys,
            ],
        )
    }
}

fn bind(gpu: &Gpu, what: &str, tensor: &Tensor, range: Option<Range<u64>>) -> Result<Operand> {
    let (binding, start) = match range {
        Some(range) => Binding::elements(gpu, what, tensor, range)?,
        None => (Binding::absent(gpu), 0),
    };
    let (_, strides) = tensor.four_axes();
    Ok(Operand {
        binding,
        storage: Storage::of(gpu, tensor.dtype())?,
        start,
        strides,
    })
}

fn fits(gpu: &Gpu, tensor: &Tensor, range: &Option<Range<u64>>) -> bool {
    range
        .as_ref()
        .is_none_or(|range| Binding::fits(gpu, tensor, range))
}

/// Elements of `[B, H, L, D]` from the first to the last that the ranges of B, H and L touch.
fn elements(tensor: &Tensor, [batches, heads, rows]: [Range<usize>; 3]) -> Option<Range<u64>> {
    let dims = 0..tensor.shape()[3];
    span(tensor.strides(), [batches, heads, rows, dims])
}

fn span(strides: &[usize], axes: [Range<usize>; 4]) -> Option<Range<u64>> {
    if axes.iter().any(Range::is_empty) {
        return None;
    }
    let place = |entry: fn(&Range<usize>) -> usize| {
        axes.iter()
            .zip(strides)
            .map(|(axis, &stride)| (entry(axis) as u64).saturating_mul(stride as u64))
            .fold(0u64, u64::saturating_add)
    };
    Some(place(|axis| axis.start)..place(|axis| axis.end - 1).saturating_add(1))
}
