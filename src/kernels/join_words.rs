//! `shaders/join_words.wgsl`: lengths, slopes and sinks behind one binding.

use super::Vector;
use crate::{
    Result,
    gpu::Scratch,
    kernel::{Batch, Binding, Variant, params},
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    JoinWordsParams {
        groups: u32,
        grid_width: u32,
        first_len: u32,
        first_start: u32,
        first_stride: u32,
        second_len: u32,
        second_start: u32,
        second_stride: u32,
        third_len: u32,
        third_start: u32,
        third_stride: u32,
        padding: u32,
    }
}

pub(crate) fn variant() -> Variant {
    Variant {
        name: "join_words",
        pieces: vec![include_str!("../../shaders/join_words.wgsl")],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: Vec::new(),
        output: None,
        subgroups: false,
    }
}

/// One binding for three vectors, and where each starts in it and how far apart its words lie. A single one is bound
/// where it is; several are joined in scratch by a dispatch.
pub(crate) fn push(batch: &mut Batch, vectors: [Option<&Vector>; 3]) -> Result<(Binding, [(u32, u32); 3])> {
    let gpu = batch.gpu();
    let mut places = [(0, 0); 3];
    let mut there = vectors
        .iter()
        .enumerate()
        .filter_map(|(i, vector)| vector.map(|vector| (i, vector)));
    let Some((at, single)) = there.next() else {
        return Ok((Binding::absent(gpu), places));
    };
    if there.next().is_none() {
        places[at] = (single.start, single.stride);
        return Ok((single.binding.clone(), places));
    }
    let lens = vectors.map(|vector| vector.map_or(0, |vector| vector.len));
    let words: u64 = lens.iter().map(|&len| u64::from(len)).sum();
    let scratch = batch.scratch(Scratch::Words, words * 4)?;
    let output = Binding::prefix(gpu, "lengths, slopes and sinks", &scratch, words * 4)?;
    let binding = |i: usize| vectors[i].map_or_else(|| Binding::absent(gpu), |vector| vector.binding.clone());
    let place = |i: usize| vectors[i].map_or((0, 0), |vector| (vector.start, vector.stride));
    batch.push(
        &variant(),
        |grid| JoinWordsParams {
            groups: grid.groups,
            grid_width: grid.width,
            first_len: lens[0],
            first_start: place(0).0,
            first_stride: place(0).1,
            second_len: lens[1],
            second_start: place(1).0,
            second_stride: place(1).1,
            third_len: lens[2],
            third_start: place(2).0,
            third_stride: place(2).1,
            padding: 0,
        },
        vec![binding(0), binding(1), binding(2), output.clone()],
        words.div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )?;
    Ok((output, [(0, 1), (lens[0], 1), (lens[0] + lens[1], 1)]))
}
