//! `shaders/decode.wgsl`: attention of a few queries, the keys split over workgroups.

use super::{
    attention::{self, CallParams, Operands, Storages},
    scores::Rule,
    tiles,
};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Variant, params},
    tiles::DecodeTile,
};

params! {
    DecodeParams {
        groups: u32,
        grid_width: u32,
        row_tiles: u32,
        splits: u32,
        split_keys: u32,
        kv_heads: u32,
        first_head: u32,
        output_split: u32,
        lse_split: u32,
        padding_a: u32,
        padding_b: u32,
        padding_c: u32,
    }
    call: CallParams,
    rule: Rule
}

/// Rows of a tile: queries times heads that share a key head.
const ROWS: u32 = 4;

pub(crate) fn variant(tile: DecodeTile, plain: bool, storages: Storages) -> Variant {
    let core = match tile {
        DecodeTile::Private { .. } => include_str!("../../shaders/shared/decode_private.wgsl"),
        DecodeTile::Workgroup { .. } => include_str!("../../shaders/shared/decode_workgroup.wgsl"),
    };
    let mut own = vec![include_str!("../../shaders/decode.wgsl"), core];
    match tile {
        DecodeTile::Private { rows: 1, .. } => {
            own.push(include_str!("../../shaders/shared/decode_rows_one.wgsl"));
        }
        DecodeTile::Private { .. } => own.push(include_str!("../../shaders/shared/decode_rows_four.wgsl")),
        DecodeTile::Workgroup { .. } => {}
    }
    attention::variant("decode", &own, tile.constants(), plain, storages)
}

/// One dispatch.
pub(crate) struct Call {
    /// Query heads over the whole batch, all that share a key head among them.
    pub(crate) first_head: usize,
    pub(crate) head_count: usize,
    /// The keys are cut into `splits` of `split_keys`.
    pub(crate) splits: usize,
    pub(crate) split_keys: usize,
    /// Elements of the output, and words of the log-sum-exps, from one split to the next.
    pub(crate) output_split: u32,
    pub(crate) lse_split: u32,
    pub(crate) operands: Operands,
}

impl Call {
    /// Adds the dispatch.
    pub(crate) fn push(self, batch: &mut Batch, tile: DecodeTile, shape: &AttentionShape) -> Result<()> {
        let row_tiles = tiles(shape.group() * shape.queries, ROWS);
        let groups = ((self.head_count / shape.group()) as u64)
            .saturating_mul(row_tiles)
            .saturating_mul(self.splits as u64);
        let rule = self.operands.rule;
        let variant = variant(tile, rule.is_plain(), self.operands.storages());
        let (call, bindings) = self.operands.bind(batch.gpu(), shape);
        batch.push(
            &variant,
            |grid| DecodeParams {
                groups: grid.groups,
                grid_width: grid.width,
                row_tiles: row_tiles as u32,
                splits: self.splits as u32,
                split_keys: self.split_keys as u32,
                kv_heads: shape.kv_heads as u32,
                first_head: (self.first_head / shape.group()) as u32,
                output_split: self.output_split,
                lse_split: self.lse_split,
                call,
                rule,
                ..DecodeParams::default()
            },
            bindings,
            groups,
        )
    }
}
