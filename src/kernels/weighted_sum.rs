//! `shaders/weighted_sum.wgsl`: weights times values, written through the output's strides.

use super::{Chunk, product_variant, scores::Operand, tiles};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Binding, Storage, Variant, params},
    tiles::Tile,
};

params! {
    WeightedSumParams {
        groups: u32,
        grid_width: u32,
        row_tiles: u32,
        col_tiles: u32,
        first_head: u32,
        first_row: u32,
        rows: u32,
        keys: u32,
        heads: u32,
        group_size: u32,
        value_dim: u32,
        weights_start: u32,
        value_start: u32,
        value_batch: u32,
        value_head: u32,
        value_row: u32,
        value_dim_stride: u32,
        output_start: u32,
        output_batch: u32,
        output_head: u32,
        output_row: u32,
        output_dim: u32,
        padding_a: u32,
        padding_b: u32,
    }
}

pub(crate) fn variant(tile: Tile, value: Storage, output: Storage) -> Variant {
    let source = include_str!("../../shaders/weighted_sum.wgsl");
    product_variant(
        "weighted_sum",
        tile,
        vec![source],
        vec![("value", value)],
        Some(output),
    )
}

/// Adds the dispatch that writes the chunk's rows of `output`.
pub(crate) fn push(
    batch: &mut Batch,
    tile: Tile,
    shape: &AttentionShape,
    chunk: Chunk,
    (weights, weights_start): (Binding, u32),
    value: &Operand,
    output: &Operand,
) -> Result<()> {
    let row_tiles = tiles(chunk.rows, tile.rows());
    let col_tiles = tiles(shape.value_dim, tile.cols());
    let groups = row_tiles
        .saturating_mul(col_tiles)
        .saturating_mul(chunk.head_count as u64);
    let [value_batch, value_head, value_row, value_dim_stride] = value.strides;
    let [output_batch, output_head, output_row, output_dim] = output.strides;
    batch.push(
        &variant(tile, value.storage, output.storage),
        |grid| WeightedSumParams {
            groups: grid.groups,
            grid_width: grid.width,
            row_tiles: row_tiles as u32,
            col_tiles: col_tiles as u32,
            first_head: chunk.first_head as u32,
            first_row: chunk.first_row as u32,
            rows: chunk.rows as u32,
            keys: shape.keys as u32,
            heads: shape.heads as u32,
            group_size: shape.group() as u32,
            value_dim: shape.value_dim as u32,
            weights_start,
            value_start: value.start,
            value_batch,
            value_head,
            value_row,
            value_dim_stride,
            output_start: output.start,
            output_batch,
            output_head,
            output_row,
            output_dim,
            padding_a: 0,
            padding_b: 0,
        },
        vec![weights, value.binding.clone(), output.binding.clone()],
        groups,
    )
}
