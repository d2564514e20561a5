//! `y = x W^T + b`.

use super::{Real, check_len, zeros};
use crate::Result;
use rayon::prelude::*;

/// A linear layer, `y[r, o] = sum_i x[r, i] * weight[o, i] + bias[o]`, as
/// [`torch.nn.Linear`](https://docs.pytorch.org/docs/stable/generated/torch.nn.Linear.html) lays it out.
///
/// `x [rows, inputs]`, `weight [outputs, inputs]`, `bias [outputs]`; returns `[rows, outputs]`.
/// The sum runs over the inputs in order, the bias comes last.
///
/// ```
/// use multihead::reference::linear;
///
/// let y = linear(&[1.0, 2.0], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0], Some(&[0.0, 0.0, 0.5]), 1, 2, 3)?;
/// assert_eq!(y, [1.0, 2.0, 3.5]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a slice whose length does not fit.
pub fn linear<T: Real>(
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    rows: usize,
    inputs: usize,
    outputs: usize,
) -> Result<Vec<T>> {
    check_len("x", x.len(), &[rows, inputs])?;
    check_len("weight", weight.len(), &[outputs, inputs])?;
    if let Some(bias) = bias {
        check_len("bias", bias.len(), &[outputs])?;
    }
    if outputs == 0 {
        return Ok(Vec::new());
    }
    let mut y = zeros("y", &[rows, outputs])?;
    y.par_chunks_mut(outputs).enumerate().for_each(|(row, y)| {
        let x = &x[row * inputs..][..inputs];
        for (output, y) in y.iter_mut().enumerate() {
            *y = dot(x, &weight[output * inputs..][..inputs]);
            if let Some(bias) = bias {
                *y += bias[output];
            }
        }
    });
    Ok(y)
}

/// Dot product, summed in order.
pub(super) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).fold(T::ZERO, |sum, (&a, &b)| sum + a * b)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_identity_changes_nothing() {
        let x: Vec<f64> = (0..12).map(|i| f64::from(i) * 0.37 - 2.0).collect();
        let identity: Vec<f64> = (0..16).map(|i| f64::from(u8::from(i % 5 == 0))).collect();
        assert_eq!(linear(&x, &identity, None, 3, 4, 4).unwrap(), x);
    }

    #[test]
    fn rows_and_outputs_are_not_confused() {
        // x = [[1, 2], [3, 4]], W = [[1, 1], [1, -1], [2, 0]].
        let weight = [1.0, 1.0, 1.0, -1.0, 2.0, 0.0];
        let y = linear(&[1.0f32, 2.0, 3.0, 4.0], &weight, None, 2, 2, 3).unwrap();
        assert_eq!(y, [3.0, -1.0, 2.0, 7.0, -1.0, 6.0]);
    }

    #[test]
    fn empty_axes_are_legal_and_wrong_lengths_are_not() {
        assert_eq!(
            linear::<f64>(&[], &[1.0, 2.0], None, 0, 2, 1).unwrap(),
            Vec::<f64>::new()
        );
        assert_eq!(
            linear::<f64>(&[], &[], Some(&[3.0]), 2, 0, 1).unwrap(),
            [3.0, 3.0]
        );
        assert_eq!(
            linear::<f64>(&[1.0], &[], None, 1, 1, 0).unwrap(),
            Vec::<f64>::new()
        );
        let text = linear(&[1.0f64; 5], &[1.0; 4], None, 3, 2, 2)
            .unwrap_err()
            .to_string();
        assert!(text.contains('5') && text.contains("[3, 2]"), "{text}");
        assert!(linear(&[1.0f64; 6], &[1.0; 4], Some(&[0.0]), 3, 2, 2).is_err());
    }
}
