//! `shaders/merge_ranges.wgsl`: what the fused kernel computed of ranges of the keys, put together.

use super::{Chunk, EXPONENTIAL, SINK, Vector, scores::Operand};
use crate::{
    Gpu, Result, Tensor,
    kernel::{Batch, Binding, Storage, Variant, params},
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    MergeRangesParams {
        groups: u32,
        grid_width: u32,
        elements: u32,
        first_head: u32,
        first_row: u32,
        rows: u32,
        all_rows: u32,
        ranges: u32,
        heads: u32,
        value_dim: u32,
        cols: u32,
        output_start: u32,
        output_batch: u32,
        output_head: u32,
        output_row: u32,
        output_dim: u32,
        has_lse: u32,
        lse_start: u32,
        lse_batch: u32,
        lse_head: u32,
        has_sinks: u32,
        sinks_start: u32,
        sinks_stride: u32,
        padding: u32,
    }
}

pub(crate) fn variant(output: Storage) -> Variant {
    Variant {
        name: "merge_ranges",
        pieces: vec![include_str!("../../shaders/merge_ranges.wgsl"), SINK, EXPONENTIAL],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: Vec::new(),
        output: Some(output),
        subgroups: false,
    }
}

/// Outputs, tops and sums of ranges of the keys, for the rows of a chunk.
#[derive(Debug, Clone)]
pub(crate) struct Ranges {
    pub(crate) chunk: Chunk,
    pub(crate) count: usize,
    /// `[range][row][value_dim]`.
    pub(crate) outputs: Binding,
    /// `[range][row][top, sum]`.
    pub(crate) sums: Binding,
}

/// Log-sum-exps: binding, first word, strides of batch and head.
#[derive(Debug, Clone)]
pub(crate) struct Lse {
    pub(crate) binding: Binding,
    pub(crate) start: u32,
    pub(crate) batch: u32,
    pub(crate) head: u32,
}

impl Lse {
    /// All of `[B, H, Lq]`.
    pub(crate) fn bind(gpu: &Gpu, lse: &Tensor, heads: usize, queries: usize) -> Result<Self> {
        let (binding, start) = Binding::output(gpu, "lse", lse)?;
        Ok(Self {
            binding,
            start,
            batch: (heads as u32).wrapping_mul(queries as u32),
            head: queries as u32,
        })
    }

    /// Stands for one that is not wanted.
    pub(crate) fn absent(gpu: &Gpu) -> Self {
        Self {
            binding: Binding::absent_output(gpu),
            start: 0,
            batch: 0,
            head: 0,
        }
    }
}

/// Adds the dispatch that writes the chunk's rows of `output` and `lse`.
pub(crate) fn push(
    batch: &mut Batch,
    ranges: Ranges,
    heads: usize,
    value_dim: usize,
    output: &Operand,
    lse: &Option<Lse>,
    sinks: &Option<Vector>,
) -> Result<()> {
    let gpu = batch.gpu();
    let Ranges {
        chunk,
        count,
        outputs,
        sums,
    } = ranges;
    let cols = value_dim.max(1);
    let elements = chunk.all_rows().saturating_mul(cols as u64);
    let [output_batch, output_head, output_row, output_dim] = output.strides;
    let words = |vector: &Option<Vector>| {
        vector
            .as_ref()
            .map_or_else(|| Binding::absent(gpu), |vector| vector.binding.clone())
    };
    batch.push(
        &variant(output.storage),
        |grid| MergeRangesParams {
            groups: grid.groups,
            grid_width: grid.width,
            elements: elements as u32,
            first_head: chunk.first_head as u32,
            first_row: chunk.first_row as u32,
            rows: chunk.rows as u32,
            all_rows: chunk.all_rows() as u32,
            ranges: count as u32,
            heads: heads as u32,
            value_dim: value_dim as u32,
            cols: cols as u32,
            output_start: output.start,
            output_batch,
            output_head,
            output_row,
            output_dim,
            has_lse: u32::from(lse.is_some()),
            lse_start: lse.as_ref().map_or(0, |lse| lse.start),
            lse_batch: lse.as_ref().map_or(0, |lse| lse.batch),
            lse_head: lse.as_ref().map_or(0, |lse| lse.head),
            has_sinks: u32::from(sinks.is_some()),
            sinks_start: sinks.as_ref().map_or(0, |sinks| sinks.start),
            sinks_stride: sinks.as_ref().map_or(0, |sinks| sinks.stride),
            padding: 0,
        },
        vec![
            outputs,
            sums,
            words(sinks),
            output.binding.clone(),
            lse.as_ref()
                .map_or_else(|| Binding::absent_output(gpu), |lse| lse.binding.clone()),
        ],
        elements.div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )
}
