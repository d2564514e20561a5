//! `shaders/append.wgsl`: new rows behind those that a cache holds.

use super::{
    ROTATE,
    rotary::{Rotation, Tables},
};
use crate::{
    Result, Tensor,
    kernel::{Batch, Binding, Storage, Variant, params},
    linear::bind,
    shape::product,
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    AppendParams {
        groups: u32,
        grid_width: u32,
        elements: u32,
        heads: u32,
        rows: u32,
        columns: u32,
        capacity: u32,
        input_start: u32,
        input_batch: u32,
        input_head: u32,
        input_row: u32,
        input_column: u32,
        output_batch: u32,
        output_head: u32,
        output_row: u32,
        padding: u32,
    }
    rotation: Rotation,
}

pub(crate) fn variant(input: Storage, tables: Storage, output: Storage) -> Variant {
    Variant {
        name: "append",
        pieces: vec![ROTATE, include_str!("../../shaders/append.wgsl")],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: vec![("input", input), ("cosines", tables), ("sines", tables)],
        output: Some(output),
        subgroups: false,
    }
}

/// Adds the dispatch that writes the last `ends - starts` rows of each sequence of `input`, `[B, H, L, D]`, into the
/// contiguous `output`, the row of position p into slot `p % capacity`. `starts` and `ends` are `[B]` from byte 0 of
/// their buffers on.
pub(crate) fn push(
    batch: &mut Batch,
    what: &str,
    input: &Tensor,
    [starts, ends]: [&Tensor; 2],
    tables: Option<&Tables>,
    output: &Tensor,
    capacity: usize,
) -> Result<()> {
    let gpu = batch.gpu();
    let (from, from_storage, input_start) = bind(gpu, what, input)?;
    let to_storage = Storage::of(gpu, output.dtype())?;
    let (to, _) = Binding::output(gpu, what, output)?;
    let (starts, _) = Binding::tensor(gpu, "lengths", starts)?;
    let (ends, _) = Binding::tensor(gpu, "lengths", ends)?;
    let absent = Tables {
        cos: Binding::absent(gpu),
        sin: Binding::absent(gpu),
        storage: Storage::F32,
        rotation: Rotation::default(),
    };
    let tables = tables.unwrap_or(&absent);
    let (shape, [input_batch, input_head, input_row, input_column]) = input.four_axes();
    let (_, [output_batch, output_head, output_row, _]) = output.four_axes();
    let columns = shape[3] - tables.rotation.pairs;
    let elements = product(&input.shape()[..3]).saturating_mul(u64::from(columns));
    batch.push(
        &variant(from_storage, tables.storage, to_storage),
        |grid| AppendParams {
            groups: grid.groups,
            grid_width: grid.width,
            elements: elements as u32,
            heads: shape[1],
            rows: shape[2],
            columns,
            capacity: capacity as u32,
            input_start,
            input_batch,
            input_head,
            input_row,
            input_column,
            output_batch,
            output_head,
            output_row,
            padding: 0,
            rotation: tables.rotation,
        },
        vec![from, starts, ends, tables.cos.clone(), tables.sin.clone(), to],
        elements.div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )
}
