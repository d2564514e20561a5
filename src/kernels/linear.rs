//! `shaders/linear.wgsl`: batched linear projection with bias, written head-split.

use super::{product_variant, tiles};
use crate::{
    Result,
    kernel::{Batch, Binding, Storage, Variant, params},
    tuning::Tile,
};

params! {
    LinearParams {
        groups: u32,
        grid_width: u32,
        col_tiles: u32,
        all_rows: u32,
        rows: u32,
        outputs: u32,
        inputs: u32,
        x_start: u32,
        x_batch: u32,
        x_row: u32,
        x_dim: u32,
        weight_start: u32,
        has_bias: u32,
        bias_start: u32,
        head_dim: u32,
        output_dim: u32,
        second: u32,
        third: u32,
        first_start: u32,
        first_batch: u32,
        first_head: u32,
        first_row: u32,
        second_start: u32,
        second_batch: u32,
        second_head: u32,
        second_row: u32,
        third_start: u32,
        third_batch: u32,
        third_head: u32,
        third_row: u32,
        padding_a: u32,
        padding_b: u32,
    }
}

/// Where one part of the columns goes: first element and strides of batch, head and row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Part {
    pub(crate) start: u32,
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) row: u32,
}

/// One projection `y = x W^T + b`.
pub(crate) struct Linear<'a> {
    /// `[batch, rows, inputs]` with its strides.
    pub(crate) x: (Binding, Storage, u32),
    pub(crate) x_strides: [u32; 3],
    pub(crate) batch: usize,
    pub(crate) rows: usize,
    pub(crate) inputs: usize,
    /// `[outputs, inputs]` row-major from its start on.
    pub(crate) weight: (Binding, Storage, u32),
    /// `[outputs]` from its start on.
    pub(crate) bias: Option<(Binding, Storage, u32)>,
    /// Columns of each part and where they go; one to three parts.
    pub(crate) parts: &'a [(usize, Part)],
    pub(crate) head_dim: usize,
    /// Step from one dim of a head to the next.
    pub(crate) output_dim: u32,
    pub(crate) output: (Binding, Storage),
}

pub(crate) fn variant(tile: Tile, x: Storage, weight: Storage, bias: Storage, output: Storage) -> Variant {
    let source = include_str!("../../shaders/linear.wgsl");
    let inputs = vec![("x", x), ("weight", weight), ("bias", bias)];
    product_variant("linear", tile, vec![source], inputs, Some(output))
}

impl Linear<'_> {
    /// Adds the dispatch.
    pub(crate) fn push(self, batch: &mut Batch, tile: Tile) -> Result<()> {
        let outputs: usize = self.parts.iter().map(|(columns, _)| columns).sum();
        let all_rows = self.batch as u64 * self.rows as u64;
        let col_tiles = tiles(outputs, tile.cols());
        let groups = all_rows
            .div_ceil(u64::from(tile.rows()))
            .saturating_mul(col_tiles);
        let (x, x_storage, x_start) = self.x;
        let (weight, weight_storage, weight_start) = self.weight;
        let has_bias = self.bias.is_some();
        let (bias, bias_storage, bias_start) = self
            .bias
            .unwrap_or_else(|| (Binding::absent(batch.gpu()), Storage::F32, 0));
        let (output, output_storage) = self.output;
        let part = |index: usize| self.parts.get(index).map_or(Part::default(), |(_, part)| *part);
        let ends = |count: usize| {
            if self.parts.len() > count {
                self.parts[..count]
                    .iter()
                    .map(|(columns, _)| *columns as u32)
                    .sum()
            } else {
                u32::MAX
            }
        };
        let (first, second, third) = (part(0), part(1), part(2));
        batch.push(
            &variant(tile, x_storage, weight_storage, bias_storage, output_storage),
            |grid| LinearParams {
                groups: grid.groups,
                grid_width: grid.width,
                col_tiles: col_tiles as u32,
                all_rows: all_rows as u32,
                rows: self.rows as u32,
                outputs: outputs as u32,
                inputs: self.inputs as u32,
                x_start,
                x_batch: self.x_strides[0],
                x_row: self.x_strides[1],
                x_dim: self.x_strides[2],
                weight_start,
                has_bias: u32::from(has_bias),
                bias_start,
                head_dim: self.head_dim as u32,
                output_dim: self.output_dim,
                second: ends(1),
                third: ends(2),
                first_start: first.start,
                first_batch: first.batch,
                first_head: first.head,
                first_row: first.row,
                second_start: second.start,
                second_batch: second.batch,
                second_head: second.head,
                second_row: second.row,
                third_start: third.start,
                third_batch: third.batch,
                third_head: third.head,
                third_row: third.row,
                padding_a: 0,
                padding_b: 0,
            },
            vec![x, weight, bias, output],
            groups,
        )
    }
}
