//! Weights times values.

use super::{Real, check_len, count, rows_mut, zeros};
use crate::{AttentionShape, Result};
use rayon::prelude::*;

/// `output[b, h, i, :] = sum_j weights[b, h, i, j] * value[b, h / group, j, :]`.
///
/// `weights [B, H, Lq, Lk]`, `value [B, Hkv, Lk, Dv]`; returns `[B, H, Lq, Dv]`. A key of weight 0 never
/// counts: its value may be infinite or NaN.
///
/// ```
/// use multihead::AttentionShape;
/// use multihead::reference::weighted_sum;
///
/// let shape = AttentionShape { queries: 1, ..AttentionShape::new(1, 1, 2, 2) };
/// let output = weighted_sum(&[1.0, 0.0], &[3.0, 4.0, f64::NAN, f64::NAN], &shape)?;
/// assert_eq!(output, [3.0, 4.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a slice whose length does not fit.
pub fn weighted_sum<T: Real>(weights: &[T], value: &[T], shape: &AttentionShape) -> Result<Vec<T>> {
    shape.validate()?;
    check_len("weights", weights.len(), &shape.weights())?;
    check_len("value", value.len(), &shape.value())?;
    let rows = count(
        "output",
        &[shape.batch, shape.heads, shape.queries, shape.value_dim.max(1)],
    )? / shape.value_dim.max(1);
    let mut output = zeros("output", &[rows, shape.value_dim])?;
    rows_mut(&mut output, rows, shape.value_dim)?
        .into_par_iter()
        .enumerate()
        .for_each(|(row, output)| {
            sum_row(
                &weights[row * shape.keys..][..shape.keys],
                head_of(value, shape, row),
                output,
            );
        });
    Ok(output)
}

/// The values `[Lk, Dv]` that one row of `[B, H, Lq]` reads.
pub(super) fn head_of<'a, T>(value: &'a [T], shape: &AttentionShape, row: usize) -> &'a [T] {
    let head_row = row / shape.queries;
    let (batch, head) = (head_row / shape.heads, head_row % shape.heads);
    let size = shape.keys * shape.value_dim;
    &value[(batch * shape.kv_heads + head / shape.group()) * size..][..size]
}

/// `output [Dv] = weights [Lk] * value [Lk, Dv]`; `output` starts at 0.
pub(super) fn sum_row<T: Real>(weights: &[T], value: &[T], output: &mut [T]) {
    let size = output.len();
    for (key, &weight) in weights.iter().enumerate() {
        if weight != T::ZERO {
            for (sum, &value) in output.iter_mut().zip(&value[key * size..][..size]) {
                *sum += weight * value;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn one_hot_weights_pick_a_value() {
        let shape = AttentionShape {
            queries: 2,
            value_dim: 3,
            ..AttentionShape::new(1, 1, 3, 1)
        };
        let value: Vec<f32> = (0..9u8).map(f32::from).collect();
        let output = weighted_sum(&[0.0, 0.0, 1.0, 0.0, 1.0, 0.0], &value, &shape).unwrap();
        assert_eq!(output, [6.0, 7.0, 8.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn heads_of_a_group_read_one_value_head() {
        let shape = AttentionShape {
            kv_heads: 2,
            ..AttentionShape::new(1, 4, 1, 1)
        };
        let output = weighted_sum(&[1.0, 2.0, 3.0, 4.0], &[10.0, 100.0], &shape).unwrap();
        assert_eq!(output, [10.0, 20.0, 300.0, 400.0]);
    }

    #[test]
    fn empty_axes_are_legal() {
        let no_keys = AttentionShape {
            queries: 2,
            ..AttentionShape::new(1, 1, 0, 1)
        };
        assert_eq!(weighted_sum::<f64>(&[], &[], &no_keys).unwrap(), [0.0, 0.0]);
        let no_batch = AttentionShape::new(0, 3, 4, 5);
        assert_eq!(
            weighted_sum::<f64>(&[], &[], &no_batch).unwrap(),
            Vec::<f64>::new()
        );
    }
}
