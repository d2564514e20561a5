//! `shaders/decode.wgsl`: attention of a few queries, the keys split over workgroups.

use super::{
    EXPONENTIAL, RULE,
    flash::Storages,
    merge_ranges::Lse,
    scores::{Operand, Rule},
    tiles,
};
use crate::{
    AttentionShape, Result,
    kernel::{Batch, Binding, Storage, Variant, params},
    tuning::DecodeTile,
};

const DECODE_PRIVATE: &str = include_str!("../../shaders/shared/decode_private.wgsl");
const ROWS_ONE: &str = include_str!("../../shaders/shared/decode_rows_one.wgsl");
const ROWS_FOUR: &str = include_str!("../../shaders/shared/decode_rows_four.wgsl");
const DECODE_WORKGROUP: &str = include_str!("../../shaders/shared/decode_workgroup.wgsl");

params! {
    DecodeParams {
        groups: u32,
        grid_width: u32,
        row_tiles: u32,
        splits: u32,
        split_keys: u32,
        first_key: u32,
        end_key: u32,
        heads: u32,
        kv_heads: u32,
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
        output_split: u32,
        output_batch: u32,
        output_head: u32,
        output_row: u32,
        output_dim: u32,
        has_lse: u32,
        lse_start: u32,
        lse_split: u32,
        lse_batch: u32,
        lse_head: u32,
        partial_range: u32,
        has_sinks: u32,
        slopes_start: u32,
        sinks_start: u32,
        sinks_stride: u32,
        first_head: u32,
    }
    rule: Rule
}

/// Rows of a tile: queries times heads that share a key head.
const ROWS: u32 = 4;

pub(crate) fn variant(tile: DecodeTile, plain: bool, [query, key, value, output]: Storages) -> Variant {
    let mut constants = tile.constants();
    constants.push(("PLAIN", u32::from(plain)));
    Variant {
        name: "decode",
        pieces: vec![
            include_str!("../../shaders/decode.wgsl"),
            RULE,
            EXPONENTIAL,
            match tile {
                DecodeTile::Private { .. } => DECODE_PRIVATE,
                DecodeTile::Workgroup { .. } => DECODE_WORKGROUP,
            },
            match tile {
                DecodeTile::Private { rows: 1, .. } => ROWS_ONE,
                DecodeTile::Private { .. } => ROWS_FOUR,
                DecodeTile::Workgroup { .. } => "",
            },
        ],
        constants,
        inputs: vec![("query", query), ("key", key), ("value", value)],
        output: Some(output),
        subgroups: false,
    }
}

/// One dispatch: what the kernel reads and writes, bound.
pub(crate) struct Call {
    /// Query heads over the whole batch, all that share a key head among them.
    pub(crate) first_head: usize,
    pub(crate) head_count: usize,
    /// First key and the one after the last, in `splits` of `split_keys`.
    pub(crate) keys: std::ops::Range<usize>,
    pub(crate) splits: usize,
    pub(crate) split_keys: usize,
    pub(crate) query: Operand,
    pub(crate) key: Operand,
    pub(crate) value: Operand,
    /// With the elements from one split to the next if there are several.
    pub(crate) output: (Operand, u32),
    pub(crate) mask: Binding,
    pub(crate) key_mask: Binding,
    /// Lengths, slopes and sinks.
    pub(crate) words: Binding,
    pub(crate) slopes_start: u32,
    /// First word and stride of the sinks.
    pub(crate) sinks: Option<(u32, u32)>,
    /// With the words from one split to the next.
    pub(crate) lse: Option<(Lse, u32)>,
    /// With the lengths' place in `words`.
    pub(crate) rule: Rule,
}

impl Call {
    pub(crate) fn storages(&self) -> [Storage; 4] {
        [
            self.query.storage,
            self.key.storage,
            self.value.storage,
            self.output.0.storage,
        ]
    }

    /// Adds the dispatch.
    pub(crate) fn push(self, batch: &mut Batch, tile: DecodeTile, shape: &AttentionShape) -> Result<()> {
        let row_tiles = tiles(shape.group() * shape.queries, ROWS);
        let groups = ((self.head_count / shape.group()) as u64)
            .saturating_mul(row_tiles)
            .saturating_mul(self.splits as u64);
        let storages = self.storages();
        let [query_batch, query_head, query_row, query_dim] = self.query.strides;
        let [key_batch, key_head, key_row, key_dim] = self.key.strides;
        let [value_batch, value_head, value_row, value_dim_stride] = self.value.strides;
        let (output, output_split) = self.output;
        let [output_batch, output_head, output_row, output_dim] = output.strides;
        let has_lse = self.lse.is_some();
        let (lse, lse_split) = self.lse.unwrap_or_else(|| (Lse::absent(batch.gpu()), 0));
        batch.push(
            &variant(tile, self.rule.is_plain(), storages),
            |grid| DecodeParams {
                groups: grid.groups,
                grid_width: grid.width,
                row_tiles: row_tiles as u32,
                splits: self.splits as u32,
                split_keys: self.split_keys as u32,
                first_key: self.keys.start as u32,
                end_key: self.keys.end as u32,
                heads: shape.heads as u32,
                kv_heads: shape.kv_heads as u32,
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
                output_start: output.start,
                output_split,
                output_batch,
                output_head,
                output_row,
                output_dim,
                has_lse: u32::from(has_lse),
                lse_start: lse.start,
                lse_split,
                lse_batch: lse.batch,
                lse_head: lse.head,
                partial_range: u32::from(self.splits > 1),
                has_sinks: u32::from(self.sinks.is_some()),
                slopes_start: self.slopes_start,
                sinks_start: self.sinks.map_or(0, |(start, _)| start),
                sinks_stride: self.sinks.map_or(0, |(_, stride)| stride),
                first_head: (self.first_head / shape.group()) as u32,
                rule: self.rule,
            },
            vec![
                self.query.binding,
                self.key.binding,
                self.value.binding,
                self.mask,
                self.key_mask,
                self.words,
                output.binding,
                lse.binding,
            ],
            groups,
        )
    }
}
