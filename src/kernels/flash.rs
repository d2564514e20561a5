//! `shaders/flash.wgsl`: attention in one pass over the keys; no score reaches memory.

use super::{
    Chunk,
    attention::{self, CallParams, Operands, Storages},
    scores::Rule,
    tiles,
};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Variant, params},
    tiles::FlashTile,
};

params! {
    FlashParams {
        groups: u32,
        grid_width: u32,
        row_tiles: u32,
        col_tiles: u32,
        first_head: u32,
        first_row: u32,
        rows: u32,
        is_packed: u32,
        key_seams: u32,
        padding_a: u32,
        padding_b: u32,
        padding_c: u32,
    }
    call: CallParams,
    rule: Rule
}

pub(crate) fn variant(tile: FlashTile, plain: bool, storages: Storages) -> Variant {
    let subgroups = matches!(tile, FlashTile::Subgroup { .. });
    let core = if subgroups {
        include_str!("../../shaders/shared/flash_subgroup.wgsl")
    } else {
        include_str!("../../shaders/shared/flash_workgroup.wgsl")
    };
    let own = [include_str!("../../shaders/flash.wgsl"), core];
    Variant {
        subgroups,
        ..attention::variant("flash", &own, tile.constants(), plain, storages)
    }
}

/// One dispatch.
pub(crate) struct Call {
    pub(crate) chunk: Chunk,
    pub(crate) operands: Operands,
    /// Of a packed call, the word at which the seams of its keys start; those of its queries come first of all.
    pub(crate) key_seams: Option<u32>,
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
        let rule = self.operands.rule;
        let variant = variant(tile, rule.is_plain(), self.operands.storages());
        let (call, bindings) = self.operands.bind(batch.gpu(), shape);
        batch.push(
            &variant,
            |grid| FlashParams {
                groups: grid.groups,
                grid_width: grid.width,
                row_tiles: row_tiles as u32,
                col_tiles: col_tiles as u32,
                first_head: chunk.first_head as u32,
                first_row: chunk.first_row as u32,
                rows: chunk.rows as u32,
                is_packed: u32::from(self.key_seams.is_some()),
                key_seams: self.key_seams.unwrap_or(0),
                call,
                rule,
                ..FlashParams::default()
            },
            bindings,
            groups,
        )
    }
}
