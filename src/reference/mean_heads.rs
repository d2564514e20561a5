//! Weights averaged over the heads.

use super::{Real, check_len, zeros};
use crate::{AttentionShape, Result};

/// `mean[b, i, j] = sum_h weights[b, h, i, j] / H`, what PyTorch returns with `average_attn_weights`.
///
/// `weights [B, H, Lq, Lk]`; returns `[B, Lq, Lk]`, zeros for 0 heads.
///
/// ```
/// use multihead::AttentionShape;
/// use multihead::reference::mean_heads;
///
/// let shape = AttentionShape { queries: 1, ..AttentionShape::new(1, 2, 2, 1) };
/// assert_eq!(mean_heads(&[1.0, 0.0, 0.5, 0.5], &shape)?, [0.75, 0.25]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a slice whose length does not fit.
pub fn mean_heads<T: Real>(weights: &[T], shape: &AttentionShape) -> Result<Vec<T>> {
    check_len("weights", weights.len(), &shape.weights())?;
    let mut mean = zeros("mean", &[shape.batch, shape.queries, shape.keys])?;
    let map = mean.len().checked_div(shape.batch).unwrap_or(0);
    for (index, mean) in mean.iter_mut().enumerate() {
        let (batch, at) = (index / map, index % map);
        for head in 0..shape.heads {
            *mean += weights[(batch * shape.heads + head) * map + at];
        }
        if shape.heads > 0 {
            *mean /= T::from_f64(shape.heads as f64);
        }
    }
    Ok(mean)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn batch_rows_are_not_mixed() {
        let shape = AttentionShape {
            queries: 1,
            ..AttentionShape::new(2, 3, 2, 1)
        };
        let weights: Vec<f64> = (0..12u8).map(f64::from).collect();
        assert_eq!(mean_heads(&weights, &shape).unwrap(), [2.0, 3.0, 8.0, 9.0]);
    }

    #[test]
    fn one_head_is_its_own_mean_and_lengths_are_checked() {
        let shape = AttentionShape::new(1, 1, 2, 1);
        assert_eq!(
            mean_heads(&[0.25f32, 0.75, 1.0, 0.0], &shape).unwrap(),
            [0.25, 0.75, 1.0, 0.0]
        );
        assert!(mean_heads(&[0.25f32; 3], &shape).is_err());
        assert_eq!(
            mean_heads::<f64>(&[], &AttentionShape::new(0, 2, 3, 1)).unwrap(),
            Vec::<f64>::new()
        );
    }
}
