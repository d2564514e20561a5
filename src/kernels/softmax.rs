//! `shaders/softmax.wgsl`: stable row softmax in place, with log-sum-exp and sinks.

use super::{Chunk, EXPONENTIAL, SINK, Vector};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Binding, Variant, params},
    tuning::softmax_threads,
};

params! {
    SoftmaxParams {
        groups: u32,
        grid_width: u32,
        all_rows: u32,
        keys: u32,
        scores_start: u32,
        first_head: u32,
        first_row: u32,
        rows: u32,
        queries: u32,
        heads: u32,
        has_lse: u32,
        lse_start: u32,
        has_sinks: u32,
        sinks_start: u32,
        sinks_stride: u32,
        padding: u32,
    }
}

pub(crate) fn variant((lanes, rows): (u32, u32)) -> Variant {
    Variant {
        name: "softmax",
        pieces: vec![include_str!("../../shaders/softmax.wgsl"), SINK, EXPONENTIAL],
        constants: vec![("LANES", lanes), ("ROWS", rows)],
        inputs: Vec::new(),
        output: None,
        subgroups: false,
    }
}

/// Adds the dispatch that turns the chunk's scores into weights and writes its part of `lse`.
pub(crate) fn push(
    batch: &mut Batch,
    shape: &AttentionShape,
    chunk: Chunk,
    sinks: &Option<Vector>,
    scores: Binding,
    start: u32,
    lse: &Option<(Binding, u32)>,
) -> Result<()> {
    let threads = softmax_threads(shape.keys);
    let groups = chunk.all_rows().div_ceil(u64::from(threads.1));
    let gpu = batch.gpu();
    let bindings = vec![
        sinks
            .as_ref()
            .map_or_else(|| Binding::absent(gpu), |sinks| sinks.binding.clone()),
        scores,
        lse.as_ref()
            .map_or_else(|| Binding::absent_output(gpu), |(binding, _)| binding.clone()),
    ];
    batch.push(
        &variant(threads),
        |grid| SoftmaxParams {
            groups: grid.groups,
            grid_width: grid.width,
            all_rows: chunk.all_rows() as u32,
            keys: shape.keys as u32,
            scores_start: start,
            first_head: chunk.first_head as u32,
            first_row: chunk.first_row as u32,
            rows: chunk.rows as u32,
            queries: shape.queries as u32,
            heads: shape.heads as u32,
            has_lse: u32::from(lse.is_some()),
            lse_start: lse.as_ref().map_or(0, |(_, start)| *start),
            has_sinks: u32::from(sinks.is_some()),
            sinks_start: sinks.as_ref().map_or(0, |sinks| sinks.start),
            sinks_stride: sinks.as_ref().map_or(0, |sinks| sinks.stride),
            padding: 0,
        },
        bindings,
        groups,
    )
}
