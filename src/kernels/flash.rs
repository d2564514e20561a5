//! `shaders/flash.wgsl`: attention in one pass over the keys; no score reaches memory.

use super::{EXPONENTIAL, RULE, scores::Operand, scores::Rule, tiles};
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
        has_sinks: u32,
        slopes_start: u32,
        sinks_start: u32,
        sinks_stride: u32,
        padding: u32,
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

/// What the kernel reads and writes, bound.
pub(crate) struct Call<'a> {
    pub(crate) query: &'a Operand,
    pub(crate) key: &'a Operand,
    pub(crate) value: &'a Operand,
    pub(crate) output: &'a Operand,
    pub(crate) mask: &'a Binding,
    pub(crate) key_mask: &'a Binding,
    /// Lengths, slopes and sinks.
    pub(crate) words: Binding,
    pub(crate) slopes_start: u32,
    /// First word and stride of the sinks.
    pub(crate) sinks: Option<(u32, u32)>,
    pub(crate) lse: &'a Option<(Binding, u32)>,
    /// With the lengths' place in `words`.
    pub(crate) rule: Rule,
}

impl Rule {
    /// Whether nothing but the scale and lengths applies to a score.
    pub(crate) fn is_plain(&self) -> bool {
        use crate::mask::UNBOUNDED;
        let positions = self.left >= UNBOUNDED && self.right >= UNBOUNDED && self.has_slopes == 0;
        positions && self.softcap == 0.0 && self.mask_kind == 0 && self.key_mask_kind == 0
    }
}

impl Call<'_> {
    /// Adds the dispatch of the whole call.
    pub(crate) fn push(self, batch: &mut Batch, tile: FlashTile, shape: &AttentionShape) -> Result<()> {
        let row_tiles = tiles(shape.queries, tile.rows());
        let col_tiles = tiles(shape.value_dim, tile.value_cols());
        let heads = shape.batch as u64 * shape.heads as u64;
        let groups = row_tiles.saturating_mul(col_tiles).saturating_mul(heads);
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
        let gpu = batch.gpu();
        batch.push(
            &variant(tile, self.rule.is_plain(), storages),
            |grid| FlashParams {
                groups: grid.groups,
                grid_width: grid.width,
                row_tiles: row_tiles as u32,
                col_tiles: col_tiles as u32,
                first_head: 0,
                first_row: 0,
                rows: shape.queries as u32,
                first_key: 0,
                end_key: shape.keys as u32,
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
                has_lse: u32::from(self.lse.is_some()),
                lse_start: self.lse.as_ref().map_or(0, |(_, start)| *start),
                has_sinks: u32::from(self.sinks.is_some()),
                slopes_start: self.slopes_start,
                sinks_start: self.sinks.map_or(0, |(start, _)| start),
                sinks_stride: self.sinks.map_or(0, |(_, stride)| stride),
                padding: 0,
                rule: self.rule,
            },
            vec![
                self.query.binding.clone(),
                self.key.binding.clone(),
                self.value.binding.clone(),
                self.mask.clone(),
                self.key_mask.clone(),
                self.words,
                self.output.binding.clone(),
                self.lse
                    .as_ref()
                    .map_or_else(|| Binding::absent_output(gpu), |(binding, _)| binding.clone()),
            ],
            groups,
        )
    }
}
