//! `shaders/linear.wgsl`: batched linear projection with bias, written head-split.

use super::{product_variant, tiles};
use crate::{
    Result,
    kernel::{Batch, Binding, Storage, Variant, params},
    tiles::Tile,
};

params! {
    /// Where one part of the columns is and goes; WGSL's `Part`.
    PartParams {
        first_tile: u32,
        first_col: u32,
        cols: u32,
        start: u32,
        batch: u32,
        head: u32,
        row: u32,
        part_padding: u32,
    }
}

params! {
    LinearParams {
        groups: u32,
        grid_width: u32,
        row_tiles: u32,
        col_tiles: u32,
        run_rows: u32,
        rows: u32,
        inputs: u32,
        x_start: u32,
        x_run: u32,
        x_row: u32,
        x_dim: u32,
        weight_start: u32,
        has_bias: u32,
        bias_start: u32,
        head_dim: u32,
        output_dim: u32,
    }
    first: PartParams,
    second: PartParams,
    third: PartParams,
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
    /// Adds the dispatch, with the device's best tile.
    pub(crate) fn push(self, batch: &mut Batch) -> Result<()> {
        let bias = self
            .bias
            .as_ref()
            .map_or(Storage::F32, |(_, storage, _)| *storage);
        let storages = [self.x.1, self.weight.1, bias, self.output.1];
        let chosen = batch
            .gpu()
            .linear_tile(storages, self.inputs, batch.is_planned())?;
        self.push_with(batch, chosen.tile)
    }

    /// Adds the dispatch.
    pub(crate) fn push_with(self, batch: &mut Batch, tile: Tile) -> Result<()> {
        let [x_batch, x_row, x_dim] = self.x_strides;
        // Batch entries that follow each other without a gap are one run of rows.
        let one_run = self.batch <= 1 || u64::from(x_batch) == self.rows as u64 * u64::from(x_row);
        let (runs, run_rows) = if one_run {
            (1, self.batch as u64 * self.rows as u64)
        } else {
            (self.batch as u64, self.rows as u64)
        };
        let row_tiles = run_rows.div_ceil(u64::from(tile.rows()));
        // A part that is not there starts behind the last tile.
        let mut parts = [PartParams {
            first_tile: u32::MAX,
            ..PartParams::default()
        }; 3];
        let (mut col_tiles, mut first_col) = (0, 0);
        for (params, (cols, part)) in parts.iter_mut().zip(self.parts) {
            *params = PartParams {
                first_tile: col_tiles as u32,
                first_col,
                cols: *cols as u32,
                start: part.start,
                batch: part.batch,
                head: part.head,
                row: part.row,
                part_padding: 0,
            };
            col_tiles += tiles(*cols, tile.cols());
            first_col += *cols as u32;
        }
        let groups = runs.saturating_mul(row_tiles).saturating_mul(col_tiles);
        let (x, x_storage, x_start) = self.x;
        let (weight, weight_storage, weight_start) = self.weight;
        let has_bias = self.bias.is_some();
        let (bias, bias_storage, bias_start) = self
            .bias
            .unwrap_or_else(|| (Binding::absent(batch.gpu()), Storage::F32, 0));
        let (output, output_storage) = self.output;
        batch.push(
            &variant(tile, x_storage, weight_storage, bias_storage, output_storage),
            |grid| LinearParams {
                groups: grid.groups,
                grid_width: grid.width,
                row_tiles: row_tiles as u32,
                col_tiles: col_tiles as u32,
                run_rows: run_rows as u32,
                rows: self.rows as u32,
                inputs: self.inputs as u32,
                x_start,
                x_run: x_batch,
                x_row,
                x_dim,
                weight_start,
                has_bias: u32::from(has_bias),
                bias_start,
                head_dim: self.head_dim as u32,
                output_dim: self.output_dim,
                first: parts[0],
                second: parts[1],
                third: parts[2],
            },
            vec![x, weight, bias, output],
            groups,
        )
    }
}
