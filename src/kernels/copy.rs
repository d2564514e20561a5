//! `shaders/copy.wgsl`: strided copy, also from one element type to another.

use crate::{
    Result, Tensor,
    kernel::{Batch, Binding, Storage, Variant, params},
    shape::product,
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    CopyParams {
        groups: u32,
        grid_width: u32,
        elements: u32,
        size_1: u32,
        size_2: u32,
        size_3: u32,
        source_start: u32,
        source_0: u32,
        source_1: u32,
        source_2: u32,
        source_3: u32,
        output_start: u32,
        output_0: u32,
        output_1: u32,
        output_2: u32,
        output_3: u32,
    }
}

pub(crate) fn variant(source: Storage, output: Storage) -> Variant {
    Variant {
        name: "copy",
        pieces: vec![include_str!("../../shaders/copy.wgsl")],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: vec![("source", source)],
        output: Some(output),
        subgroups: false,
    }
}

/// Adds the dispatches that copy a 4-axis tensor to one of the same shape: one, or as many as the device's bindings ask
/// for.
pub(crate) fn push(batch: &mut Batch, what: &str, source: &Tensor, output: &Tensor) -> Result<()> {
    debug_assert_eq!(source.shape(), output.shape());
    let gpu = batch.gpu();
    let fits = |tensor: &Tensor| Binding::fits(gpu, tensor, &(0..tensor.extent()));
    let mut left = vec![(source.clone(), output.clone())];
    while let Some((source, output)) = left.pop() {
        let first = source.shape().iter().position(|&size| size > 1);
        let Some(axis) = first.filter(|_| !(fits(&source) && fits(&output))) else {
            push_bound(batch, what, &source, &output)?;
            continue;
        };
        let size = source.shape()[axis];
        for half in [size / 2..size, 0..size / 2] {
            left.push((source.slice(axis, half.clone())?, output.slice(axis, half)?));
        }
    }
    Ok(())
}

fn push_bound(batch: &mut Batch, what: &str, source: &Tensor, output: &Tensor) -> Result<()> {
    let gpu = batch.gpu();
    let elements = product(source.shape());
    let (from, source_start) = Binding::tensor(gpu, what, source)?;
    let (to, output_start) = Binding::output(gpu, what, output)?;
    let variant = variant(
        Storage::of(gpu, source.dtype())?,
        Storage::of(gpu, output.dtype())?,
    );
    let (shape, source_strides) = source.four_axes();
    let (_, output_strides) = output.four_axes();
    let [source_0, source_1, source_2, source_3] = source_strides;
    let [output_0, output_1, output_2, output_3] = output_strides;
    batch.push(
        &variant,
        |grid| CopyParams {
            groups: grid.groups,
            grid_width: grid.width,
            elements: elements as u32,
            size_1: shape[1],
            size_2: shape[2],
            size_3: shape[3],
            source_start,
            source_0,
            source_1,
            source_2,
            source_3,
            output_start,
            output_0,
            output_1,
            output_2,
            output_3,
        },
        vec![from, to],
        elements.div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )
}
