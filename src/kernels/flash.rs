//! `shaders/flash.wgsl`: attention in one pass over the keys; no score reaches memory.

use std::ops::Range;

use super::{
    Chunk, EXPONENTIAL, RULE,
    merge_ranges::Lse,
    scores::{Operand, Rule},
    tiles,
};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Binding, Storage, Variant, params},
    tuning::FlashTile,
};

const FLASH_SUBGROUP: &str = include_str!("../../shaders/shared/flash_subgroup.wgsl");
const FLASH_WORKGROUP: &str = include_str!("../../shaders/shared/flash_workgroup.wgsl");

params! {
    FlashParams {
        groups: u32,
        grid_width: u32,
        row_tiles: u32,
        col_tiles: u32,
        first_head: u32,
        first_row: u32,
        rows: u32,
        first_key: u32,
        end_key: u32,
        heads: u32,
        group_size: u32,
        head_dim: u32,
        value_dim: u32,
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
        has_lse: u32,
        lse_start: u32,
        lse_batch: u32,
        lse_head: u32,
        partial_range: u32,
        has_sinks: u32,
        slopes_start: u32,
        sinks_start: u32,
        sinks_stride: u32,
        is_packed: u32,
        key_seams: u32,
    }
    rule: Rule
}

/// Storage of query, key, value and output.
pub(crate) type Storages = [Storage; 4];

pub(crate) fn variant(tile: FlashTile, plain: bool, [query, key, value, output]: Storages) -> Variant {
    let subgroups = matches!(tile, FlashTile::Subgroup { .. });
    let mut constants = tile.constants();
    constants.push(("PLAIN", u32::from(plain)));
    Variant {
        name: "flash",
        pieces: vec![
            include_str!("../../shaders/flash.wgsl"),
            RULE,
            EXPONENTIAL,
            if subgroups {
                FLASH_SUBGROUP
            } else {
                FLASH_WORKGROUP
            },
        ],
        constants,
        inputs: vec![("query", query), ("key", key), ("value", value)],
        output: Some(output),
        subgroups,
    }
}

/// One dispatch: what the kernel reads and writes, bound.
pub(crate) struct Call {
    pub(crate) chunk: Chunk,
    pub(crate) keys: Range<usize>,
    /// Whether other keys follow in other dispatches: outputs stay undivided, and `lse` takes maximum and sum.
    pub(crate) partial: bool,
    pub(crate) query: Operand,
    pub(crate) key: Operand,
    pub(crate) value: Operand,
    pub(crate) output: Operand,
    pub(crate) mask: Binding,
    pub(crate) key_mask: Binding,
    /// Lengths or seams, slopes and sinks.
    pub(crate) words: Binding,
    pub(crate) slopes_start: u32,
    /// First word and stride of the sinks.
    pub(crate) sinks: Option<(u32, u32)>,
    /// Of a packed call, the word at which the seams of its keys start; those of its queries come first of all.
    pub(crate) key_seams: Option<u32>,
    pub(crate) lse: Option<Lse>,
    /// With the lengths' place in `words`.
    pub(crate) rule: Rule,
}

impl Call {
    /// Adds the dispatch.
    pub(crate) fn push(self, batch: &mut Batch, tile: FlashTile, shape: &AttentionShape) -> Result<()> {
        let chunk = self.chunk;
        let row_tiles = tiles(chunk.rows, tile.rows());
        // Without a column there is still a log-sum-exp.
        let col_tiles = tiles(shape.value_dim, tile.value_cols()).max(1);
        let groups = row_tiles
            .saturating_mul(col_tiles)
            .saturating_mul(chunk.head_count as u64);
        let storages = [
            self.query.storage,
            self.key.storage,
            self.value.storage,
            self.output.storage,
        ];
        let [query_batch, query_head, query_row, query_dim] = self.query.strides;
        let [key_batch, key_head, key_row, key_dim] = self.key.strides;
        let [value_batch, value_head, value_row, value_dim_stride] = self.value.strides;
        let [output_batch, output_head, output_row, output_dim] = self.output.strides;
        let has_lse = self.lse.is_some();
        let lse = self.lse.unwrap_or_else(|| Lse::absent(batch.gpu()));
        batch.push(
            &variant(tile, self.rule.is_plain(), storages),
            |grid| FlashParams {
                groups: grid.groups,
                grid_width: grid.width,
                row_tiles: row_tiles as u32,
                col_tiles: col_tiles as u32,
                first_head: chunk.first_head as u32,
                first_row: chunk.first_row as u32,
                rows: chunk.rows as u32,
                first_key: self.keys.start as u32,
                end_key: self.keys.end as u32,
                heads: shape.heads as u32,
                group_size: shape.group() as u32,
                head_dim: shape.head_dim as u32,
                value_dim: shape.value_dim as u32,
                query_start: self.query.start,
                query_batch,
                query_head,
                query_row,
                query_dim,
                key_start: self.key.start,
                key_batch,
                key_head,
                key_row,
                key_dim,
                value_start: self.value.start,
                value_batch,
                value_head,
                value_row,
                value_dim_stride,
                output_start: self.output.start,
                output_batch,
                output_head,
                output_row,
                output_dim,
                has_lse: u32::from(has_lse),
                lse_start: lse.start,
                lse_batch: lse.batch,
                lse_head: lse.head,
                partial_range: u32::from(self.partial),
                has_sinks: u32::from(self.sinks.is_some()),
                slopes_start: self.slopes_start,
                sinks_start: self.sinks.map_or(0, |(start, _)| start),
                sinks_stride: self.sinks.map_or(0, |(_, stride)| stride),
                is_packed: u32::from(self.key_seams.is_some()),
                key_seams: self.key_seams.unwrap_or(0),
                rule: self.rule,
            },
            vec![
                self.query.binding,
                self.key.binding,
                self.value.binding,
                self.mask,
                self.key_mask,
                self.words,
                self.output.binding,
                lse.binding,
            ],
            groups,
        )
    }
}
