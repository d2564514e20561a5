//! The truth on the CPU: plain loops under the kernels' names, generic over the float.
//!
//! In `f64` it judges the kernels; in `f32` it says how far correct f32 arithmetic may stray, which is
//! what the error bound is made of. It is checked against PyTorch and ONNX by the case files in
//! `tests/data`. It knows no wgpu and shares no arithmetic with the kernels.
//!
//! | file | what it computes |
//! |---|---|
//! | [`linear`](linear()) | `y = x W^T + b` |
//! | [`scores`](scores()) | scaled, capped, biased dot products; invisible keys are `-inf` |
//! | [`softmax`](softmax()) | weights and log-sum-exp of each row |
//! | [`weighted_sum`](weighted_sum()) | weights times values |
//! | [`mean_heads`](mean_heads()) | weights averaged over the heads |
//! | [`Attention`] | the four together, row by row, without holding all scores |
//! | [`packed_attention`] | sequences of different lengths laid end to end |
//! | [`rotary`](rotary()) | rotary position embedding, by tables of [`rotary_tables`] |
//! | [`MultiHead`] | the whole layer: projections, heads, attention, output projection |
//!
//! Inputs and results are flat slices in row-major order. Masks, slopes, sinks and parameters are
//! `f32` in either precision, as the kernels store them.
//!
//! ```
//! use multihead::reference::Attention;
//! use multihead::{AttentionOptions, AttentionShape};
//!
//! // One head, one query, two equal keys: the output is the mean of the two values.
//! let options = AttentionOptions::new();
//! let shape = AttentionShape { queries: 1, ..AttentionShape::new(1, 1, 2, 2) };
//! let call = Attention::new(shape, &options, &[1.0, 0.0], &[0.5, 0.5, 0.5, 0.5], &[1.0, 2.0, 3.0, 6.0]);
//! let answer = call.run()?;
//! assert_eq!(answer.output, [2.0, 4.0]);
//! assert_eq!(answer.weights, [0.5, 0.5]);
//! # Ok::<(), multihead::Error>(())
//! ```

mod attention;
mod heads;
mod linear;
mod mean_heads;
mod multi_head;
mod packed;
mod real;
mod rotary;
mod scores;
mod softmax;
mod weighted_sum;

pub use attention::{Attention, AttentionOutput, Mask};
pub use heads::{join_keys, merge_heads, split_heads};
pub use linear::linear;
pub use mean_heads::mean_heads;
pub use multi_head::{LayerOutput, LayerParameters, MultiHead};
pub use packed::{Packed, PackedOutput, packed_attention};
pub use real::Real;
pub use rotary::{rotary, rotary_tables};
pub use scores::scores;
pub use softmax::{softmax, softmax_row};
pub use weighted_sum::weighted_sum;

use crate::{Error, Result};

/// Refuses a slice whose length is not that of its shape.
fn check_len(what: &str, given: usize, shape: &[usize]) -> Result<()> {
    if crate::shape::product(shape) == given as u64 {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{what} has {given} elements, but its shape {shape:?} needs {}",
        crate::shape::product(shape)
    )))
}

/// Elements of a tensor that is about to be made; refuses what no memory could hold.
fn count(what: &str, shape: &[usize]) -> Result<usize> {
    let elements = crate::shape::product(shape);
    if elements <= isize::MAX as u64 / 8 {
        return Ok(elements as usize);
    }
    Err(Error::Shape(format!(
        "{what} of shape {shape:?} would have more elements than memory can address"
    )))
}

/// A tensor of zeros; refuses one that this host has no memory for, where `vec!` would end the program.
fn zeros<T: Real>(what: &str, shape: &[usize]) -> Result<Vec<T>> {
    let mut zeros = reserved(what, shape)?;
    zeros.resize(count(what, shape)?, T::ZERO);
    Ok(zeros)
}

/// Room for the elements of a tensor.
fn reserved<T>(what: &str, shape: &[usize]) -> Result<Vec<T>> {
    let mut room = Vec::new();
    room.try_reserve_exact(count(what, shape)?).map_err(|_| {
        Error::Shape(format!(
            "{what} of shape {shape:?} does not fit this host's memory"
        ))
    })?;
    Ok(room)
}

/// Cuts `data` into `rows` slices of `width` elements; a width of 0 still gives every row its slice.
fn rows_mut<T>(mut data: &mut [T], rows: usize, width: usize) -> Result<Vec<&mut [T]>> {
    let mut cut = reserved("rows", &[rows])?;
    for _ in 0..rows {
        let (row, rest) = data.split_at_mut(width.min(data.len()));
        cut.push(row);
        data = rest;
    }
    Ok(cut)
}
