//! `shaders/rotary.wgsl`: rotary position embedding.

use super::ROTATE;
use crate::{
    Result, Tensor,
    kernel::{Batch, Binding, Storage, Variant, params},
    linear::bind,
    shape::product,
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    /// `Rotation` in `shaders/shared/rotate.wgsl`.
    Rotation {
        pairs: u32,
        interleaved: u32,
        positions: u32,
        batch: u32,
        cos_start: u32,
        sin_start: u32,
        padding_0: u32,
        padding_1: u32,
    }
}

params! {
    RotaryParams {
        groups: u32,
        grid_width: u32,
        elements: u32,
        heads: u32,
        rows: u32,
        columns: u32,
        input_start: u32,
        input_batch: u32,
        input_head: u32,
        input_row: u32,
        input_column: u32,
        output_start: u32,
        output_batch: u32,
        output_head: u32,
        output_row: u32,
        output_column: u32,
        first: u32,
        consecutive: u32,
        has_positions: u32,
        positions_start: u32,
        positions_batch: u32,
        positions_row: u32,
        padding_0: u32,
        padding_1: u32,
    }
    rotation: Rotation,
}

pub(crate) fn variant(input: Storage, tables: Storage, output: Storage) -> Variant {
    Variant {
        name: "rotary",
        pieces: vec![ROTATE, include_str!("../../shaders/rotary.wgsl")],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: vec![("input", input), ("cosines", tables), ("sines", tables)],
        output: Some(output),
        subgroups: false,
    }
}

/// Tables as kernels bind them.
#[derive(Debug, Clone)]
pub(crate) struct Tables {
    pub(crate) cos: Binding,
    pub(crate) sin: Binding,
    pub(crate) storage: Storage,
    pub(crate) rotation: Rotation,
}

impl Tables {
    /// Those of the sequences from `first` on.
    pub(crate) fn starting_at(&self, first: u32) -> Self {
        let mut tables = self.clone();
        let rotation = &mut tables.rotation;
        rotation.cos_start += first * rotation.batch;
        rotation.sin_start += first * rotation.batch;
        tables
    }
}

/// The position of each row.
#[derive(Debug, Clone)]
pub(crate) struct Positions {
    /// Added to all, modulo 2^32.
    pub(crate) first: u32,
    /// Whether a row's index is added too.
    pub(crate) consecutive: bool,
    /// Words that are added: binding, start, strides of batch and rows.
    pub(crate) words: Option<(Binding, u32, [u32; 2])>,
}

impl Positions {
    /// Those from a sequence and a row on.
    pub(crate) fn starting_at(&self, [sequence, row]: [u32; 2]) -> Self {
        let mut positions = self.clone();
        if positions.consecutive {
            positions.first = positions.first.wrapping_add(row);
        }
        if let Some((_, start, [outer, inner])) = &mut positions.words {
            *start += sequence * *outer + row * *inner;
        }
        positions
    }
}

/// Adds the dispatch that rotates a `[B, H, L, D]` tensor into one of the same shape.
pub(crate) fn push(
    batch: &mut Batch,
    input: &Tensor,
    output: &Tensor,
    tables: &Tables,
    positions: Positions,
) -> Result<()> {
    debug_assert_eq!(input.shape(), output.shape());
    let gpu = batch.gpu();
    let (from, from_storage, input_start) = bind(gpu, "input", input)?;
    let to_storage = Storage::of(gpu, output.dtype())?;
    let (to, output_start) = Binding::output(gpu, "output", output)?;
    let (shape, [input_batch, input_head, input_row, input_column]) = input.four_axes();
    let (_, [output_batch, output_head, output_row, output_column]) = output.four_axes();
    let columns = shape[3] - tables.rotation.pairs;
    let elements = product(&input.shape()[..3]).saturating_mul(u64::from(columns));
    let (words, positions_start, [positions_batch, positions_row]) = positions
        .words
        .clone()
        .unwrap_or_else(|| (Binding::absent(gpu), 0, [0; 2]));
    batch.push(
        &variant(from_storage, tables.storage, to_storage),
        |grid| RotaryParams {
            groups: grid.groups,
            grid_width: grid.width,
            elements: elements as u32,
            heads: shape[1],
            rows: shape[2],
            columns,
            input_start,
            input_batch,
            input_head,
            input_row,
            input_column,
            output_start,
            output_batch,
            output_head,
            output_row,
            output_column,
            first: positions.first,
            consecutive: u32::from(positions.consecutive),
            has_positions: u32::from(positions.words.is_some()),
            positions_start,
            positions_batch,
            positions_row,
            rotation: tables.rotation,
            ..RotaryParams::default()
        },
        vec![from, words, tables.cos.clone(), tables.sin.clone(), to],
        elements.div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )
}
