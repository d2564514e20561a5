//! `shaders/scores.wgsl`: masked scores of a chunk of query rows.

use super::{Chunk, EXPONENTIAL, RULE, product_variant, tiles};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Binding, Storage, Variant, params},
    tiles::Tile,
};

params! {
    /// What the attention rule needs besides the dot products; WGSL's `Rule`.
    Rule {
        queries: u32,
        maskable: u32,
        offset: i32,
        bottom_right: u32,
        left: i32,
        right: i32,
        scale: f32,
        softcap: f32,
        has_slopes: u32,
        has_lengths: u32,
        lengths_start: u32,
        lengths_stride: u32,
        mask_kind: u32,
        mask_start: u32,
        mask_keys: u32,
        mask_batch: u32,
        mask_head: u32,
        mask_query: u32,
        mask_key: u32,
        key_mask_kind: u32,
        key_mask_start: u32,
        key_mask_batch: u32,
        key_mask_key: u32,
        rule_padding: u32,
    }
}

params! {
    ScoresParams {
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
        head_dim: u32,
        scores_start: u32,
        query_start: u32,
        query_batch: u32,
        query_head: u32,
        query_row: u32,
        query_dim: u32,
        key_start: u32,
        key_batch: u32,
        key_head: u32,
        key_row: u32,
        key_dim: u32,
        padding_a: u32,
        padding_b: u32,
    }
    rule: Rule
}

/// What the kernel reads, bound.
pub(crate) struct Inputs<'a> {
    pub(crate) query: &'a Operand,
    pub(crate) key: &'a Operand,
    pub(crate) mask: &'a Binding,
    pub(crate) key_mask: &'a Binding,
    pub(crate) lengths: &'a Binding,
    pub(crate) slopes: &'a Binding,
    pub(crate) rule: Rule,
}

/// A bound `[B, H, L, D]` operand with its strides.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    pub(crate) binding: Binding,
    pub(crate) storage: Storage,
    pub(crate) start: u32,
    pub(crate) strides: [u32; 4],
}

pub(crate) fn variant(tile: Tile, query: Storage, key: Storage) -> Variant {
    let source = include_str!("../../shaders/scores.wgsl");
    product_variant(
        "scores",
        tile,
        vec![source, RULE, EXPONENTIAL],
        vec![("query", query), ("key", key)],
        None,
    )
}

/// Adds the dispatch that fills `scores`, contiguous `[head_count, rows, keys]` from element `start` on.
pub(crate) fn push(
    batch: &mut Batch,
    tile: Tile,
    shape: &AttentionShape,
    chunk: Chunk,
    inputs: &Inputs,
    scores: Binding,
    start: u32,
) -> Result<()> {
    let row_tiles = tiles(chunk.rows, tile.rows());
    let col_tiles = tiles(shape.keys, tile.cols());
    let groups = row_tiles
        .saturating_mul(col_tiles)
        .saturating_mul(chunk.head_count as u64);
    let variant = variant(tile, inputs.query.storage, inputs.key.storage);
    let [query_batch, query_head, query_row, query_dim] = inputs.query.strides;
    let [key_batch, key_head, key_row, key_dim] = inputs.key.strides;
    let bindings = vec![
        inputs.query.binding.clone(),
        inputs.key.binding.clone(),
        inputs.mask.clone(),
        inputs.key_mask.clone(),
        inputs.lengths.clone(),
        inputs.slopes.clone(),
        scores,
    ];
    batch.push(
        &variant,
        |grid| ScoresParams {
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
            head_dim: shape.head_dim as u32,
            scores_start: start,
            query_start: inputs.query.start,
            query_batch,
            query_head,
            query_row,
            query_dim,
            key_start: inputs.key.start,
            key_batch,
            key_head,
            key_row,
            key_dim,
            padding_a: 0,
            padding_b: 0,
            rule: inputs.rule,
        },
        bindings,
        groups,
    )
}
