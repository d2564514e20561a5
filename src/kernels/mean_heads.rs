//! `shaders/mean_heads.wgsl`: mean of the weights over the heads.

use crate::{
    AttentionShape, Result,
    kernel::{Batch, Binding, Variant, params},
    shape::product,
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    MeanHeadsParams {
        groups: u32,
        grid_width: u32,
        elements: u32,
        head_size: u32,
        heads: u32,
        weights_start: u32,
        mean_start: u32,
        padding: u32,
    }
}

pub(crate) fn variant() -> Variant {
    Variant {
        name: "mean_heads",
        pieces: vec![include_str!("../../shaders/mean_heads.wgsl")],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: Vec::new(),
        output: None,
        subgroups: false,
    }
}

/// Adds the dispatch from contiguous `[B, H, Lq, Lk]` to contiguous `[B, Lq, Lk]`.
pub(crate) fn push(
    batch: &mut Batch,
    shape: &AttentionShape,
    (weights, weights_start): (Binding, u32),
    (mean, mean_start): (Binding, u32),
) -> Result<()> {
    let head_size = product(&[shape.queries, shape.keys]);
    let elements = head_size.saturating_mul(shape.batch as u64);
    batch.push(
        &variant(),
        |grid| MeanHeadsParams {
            groups: grid.groups,
            grid_width: grid.width,
            elements: elements as u32,
            head_size: head_size as u32,
            heads: shape.heads as u32,
            weights_start,
            mean_start,
            padding: 0,
        },
        vec![weights, mean],
        elements.div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )
}
