//! Weights and log-sum-exp of a row.

use super::{Real, check_len, count, rows_mut, zeros};
use crate::{AttentionShape, Result};
use rayon::prelude::*;

/// Turns scores `[B, H, Lq, Lk]`, invisible keys at `-inf`, into weights of the same shape and the
/// natural log-sum-exp `[B, H, Lq]`. `sinks [H]`, one number a head.
///
/// ```
/// use multihead::AttentionShape;
/// use multihead::reference::softmax;
///
/// let shape = AttentionShape { queries: 1, ..AttentionShape::new(1, 1, 2, 1) };
/// let (weights, lse) = softmax(&[3.0f64, f64::NEG_INFINITY], &shape, None)?;
/// assert_eq!((weights, lse), (vec![1.0, 0.0], vec![3.0]));
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a slice whose length does not fit.
pub fn softmax<T: Real>(
    scores: &[T],
    shape: &AttentionShape,
    sinks: Option<&[f32]>,
) -> Result<(Vec<T>, Vec<T>)> {
    shape.validate()?;
    check_len("scores", scores.len(), &shape.weights())?;
    if let Some(sinks) = sinks {
        check_len("sinks", sinks.len(), &[shape.heads])?;
    }
    let rows = count("lse", &[shape.batch, shape.heads, shape.queries])?;
    let mut weights = scores.to_vec();
    let mut lse = zeros("lse", &[rows])?;
    rows_mut(&mut weights, rows, shape.keys)?
        .into_par_iter()
        .zip(&mut lse)
        .enumerate()
        .for_each(|(row, (weights, lse))| {
            let sink = sinks.map(|sinks| sinks[row / shape.queries % shape.heads]);
            *lse = softmax_row(weights, sink);
        });
    Ok((weights, lse))
}

/// Turns one row of scores into weights, in place, and returns its log-sum-exp:
///
/// `w[j] = exp(s[j] - m) / (sum_k exp(s[k] - m) + exp(sink - m))`, `lse = m + ln(...)`, where `m` is the
/// largest score, the sink included, so that no exponential overflows.
///
/// A score of `-inf` is an invisible key: its weight is exactly 0. A row without a visible key has
/// weights 0 and `lse = sink`, or `-inf` without a sink. A sink
/// ([attention sinks](https://arxiv.org/abs/2309.17453), learned per head in gpt-oss) takes part in the
/// sum and gets no weight; a sink of `-inf` is none.
///
/// ```
/// use multihead::reference::softmax_row;
///
/// let mut row = [1000.0f32, 1000.0, f32::NEG_INFINITY];
/// let lse = softmax_row(&mut row, None);
/// assert_eq!(row, [0.5, 0.5, 0.0]);
/// assert_eq!(lse, 1000.0 + 2.0f32.ln());
/// ```
pub fn softmax_row<T: Real>(row: &mut [T], sink: Option<f32>) -> T {
    let sink = sink
        .filter(|&sink| sink != f32::NEG_INFINITY)
        .map(|sink| T::from_f32(sink).saturate());
    let mut max = sink.unwrap_or(T::NEG_INFINITY);
    for &score in row.iter() {
        // A NaN compares false and is met again in the sum below.
        if score > max {
            max = score;
        }
    }
    let mut sum = sink.map_or(T::ZERO, |sink| (sink - max).exp());
    let mut any = sink.is_some();
    for score in row.iter_mut() {
        if *score == T::NEG_INFINITY {
            *score = T::ZERO;
        } else {
            *score = (*score - max).exp();
            sum += *score;
            any = true;
        }
    }
    if !any {
        return T::NEG_INFINITY;
    }
    for weight in row.iter_mut() {
        // The hidden keys of a row with a NaN keep their 0.
        if *weight != T::ZERO {
            *weight /= sum;
        }
    }
    max + sum.ln()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const HIDDEN: f64 = f64::NEG_INFINITY;

    fn of(row: &[f64], sink: Option<f32>) -> (Vec<f64>, f64) {
        let mut row = row.to_vec();
        let lse = softmax_row(&mut row, sink);
        (row, lse)
    }

    #[test]
    fn equal_scores_share_equally() {
        for score in [-1e300, -7.0, 0.0, 3.5, 1e300] {
            let (weights, lse) = of(&[score; 8], None);
            assert_eq!(weights, [0.125; 8]);
            assert!((lse - (score + 8f64.ln())).abs() <= 1e-15 * score.abs().max(1.0));
        }
    }

    #[test]
    fn a_shift_moves_the_lse_alone() {
        let (weights, lse) = of(&[0.5, -1.0, 2.0], None);
        let (shifted, moved) = of(&[64.5, 63.0, 66.0], None);
        assert_eq!(weights, shifted);
        assert!((moved - lse - 64.0).abs() < 1e-13);
        let naive: Vec<f64> = [0.5f64, -1.0, 2.0].iter().map(|s| s.exp()).collect();
        let sum: f64 = naive.iter().sum();
        assert!((lse - sum.ln()).abs() < 1e-15);
        assert!(
            weights
                .iter()
                .zip(&naive)
                .all(|(w, e)| (w - e / sum).abs() < 1e-15)
        );
    }

    #[test]
    fn rows_without_a_key_are_zero() {
        assert_eq!(of(&[HIDDEN; 3], None), (vec![0.0; 3], HIDDEN));
        assert_eq!(of(&[], None), (vec![], HIDDEN));
        assert_eq!(of(&[HIDDEN; 3], Some(f32::NEG_INFINITY)), (vec![0.0; 3], HIDDEN));
    }

    #[test]
    fn a_sink_takes_its_share() {
        assert_eq!(of(&[HIDDEN; 2], Some(1.5)), (vec![0.0; 2], 1.5));
        let (weights, lse) = of(&[2.0], Some(2.0));
        assert_eq!(weights, [0.5]);
        assert!((lse - (2.0 + 2f64.ln())).abs() < 1e-15);
        // A sink far above every score leaves nothing and does not overflow.
        assert_eq!(of(&[0.0, 1.0], Some(1e30)), (vec![0.0; 2], f64::from(1e30f32)));
        assert_eq!(of(&[1.0], Some(f32::NEG_INFINITY)), (vec![1.0], 1.0));
    }

    #[test]
    fn a_visible_nan_reaches_the_visible_keys_and_no_other() {
        let (weights, lse) = of(&[f64::NAN, HIDDEN, 1.0], None);
        assert!(weights[0].is_nan() && weights[1] == 0.0 && weights[2].is_nan() && lse.is_nan());
        assert!(of(&[f64::NAN; 2], None).1.is_nan());
    }

    #[test]
    fn sinks_belong_to_heads() {
        let shape = AttentionShape {
            queries: 1,
            ..AttentionShape::new(2, 2, 1, 1)
        };
        let (weights, _) = softmax(&[0.0f64; 4], &shape, Some(&[0.0, f32::NEG_INFINITY])).unwrap();
        assert_eq!(weights, [0.5, 1.0, 0.5, 1.0]);
        assert!(softmax(&[0.0f64; 4], &shape, Some(&[0.0])).is_err());
    }
}
