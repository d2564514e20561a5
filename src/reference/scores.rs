//! Masked scores of one call.

use super::attention::Prepared;
use super::linear::dot;
use super::{Attention, Real, rows_mut, zeros};
use crate::Result;
use rayon::prelude::*;

/// The scores `[B, H, Lq, Lk]` of a call, before the softmax. Its values and sinks are not read.
///
/// In this order, for query `i` at position `p` and key `j`:
///
/// 1. `s = scale * q.k`
/// 2. `s = softcap * tanh(s / softcap)` ([Gemma 2](https://arxiv.org/abs/2408.00118), section 2)
/// 3. `s -= slope[h] * |p - j|` ([ALiBi](https://arxiv.org/abs/2108.12409))
/// 4. `s += float mask`
///
/// An **invisible key is `-inf`** and is not read, so that what lies there may be NaN. A visible score is
/// never infinite: where it overflows it saturates at the largest or the lowest finite number.
/// Always visible keys take steps 1 and 2 alone.
///
/// ```
/// use multihead::reference::{Attention, scores};
/// use multihead::{AttentionOptions, AttentionShape, Causal};
///
/// let options = AttentionOptions::new().causal(Causal::TopLeft).scale(10.0);
/// let call = Attention::new(AttentionShape::new(1, 1, 2, 1), &options, &[1.0, 2.0], &[3.0, 4.0], &[0.0; 2]);
/// assert_eq!(scores(&call)?, [30.0, f64::NEG_INFINITY, 60.0, 80.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// Those of [`Attention::run`].
pub fn scores<T: Real>(call: &Attention<'_, T>) -> Result<Vec<T>> {
    let prepared = call.prepare()?;
    let keys = call.shape.keys;
    let mut scores = zeros("scores", &[prepared.rows, keys])?;
    rows_mut(&mut scores, prepared.rows, keys)?
        .into_par_iter()
        .enumerate()
        .for_each(|(row, scores)| score_row(&prepared, row, scores));
    Ok(scores)
}

/// The scores `[Lk]` of one row of `[B, H, Lq]`.
pub(super) fn score_row<T: Real>(prepared: &Prepared<'_, T>, row: usize, scores: &mut [T]) {
    let call = prepared.call;
    let shape = &call.shape;
    let (head_row, query) = (row / shape.queries, row % shape.queries);
    let (batch, head) = (head_row / shape.heads, head_row % shape.heads);
    let kv_head = head / shape.group();

    let ordinary = prepared.ordinary_keys;
    let len = call.kv_lengths.map_or(ordinary, |lengths| lengths[batch]);
    let position = prepared.visibility.position(query, shape.queries, len);
    let slope = call
        .options
        .alibi_slopes
        .as_ref()
        .map(|slopes| T::from_f32(slopes[head]));
    let softcap = call.options.softcap.map(T::from_f32);
    let q = &call.query[row * shape.head_dim..][..shape.head_dim];

    for (key, score) in scores.iter_mut().enumerate() {
        let always = key >= ordinary;
        let bias = if always {
            None
        } else {
            let seen = key < len
                && prepared.visibility.sees(position, key)
                && call.key_mask.is_none_or(|keep| keep[batch * ordinary + key]);
            match prepared.mask_at(batch, head, query, key) {
                Some(bias) if seen => bias,
                _ => {
                    *score = T::NEG_INFINITY;
                    continue;
                }
            }
        };
        let k = ((batch * shape.kv_heads + kv_head) * shape.keys + key) * shape.head_dim;
        let mut s = prepared.scale * dot(q, &call.key[k..][..shape.head_dim]);
        if let Some(cap) = softcap {
            s = cap * (s / cap).tanh();
        }
        if let (Some(slope), false) = (slope, always) {
            let distance = position.abs_diff(key as i64);
            // Two overflows of opposite sign must not meet: that would be NaN.
            s = s.saturate() - (slope * T::from_f64(distance as f64)).saturate();
        }
        if let Some(bias) = bias {
            // An overflow must not meet the mask's opposite infinity: that would be NaN.
            s = s.saturate() + T::from_f32(bias).saturate();
        }
        *score = s.saturate();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Mask;
    use super::*;
    use crate::{AttentionOptions, AttentionShape, Causal};

    const HIDDEN: f64 = f64::NEG_INFINITY;

    /// One query against `keys.len()` keys of size 1, so that `q.k` is what is written.
    fn row_shape(keys: usize) -> AttentionShape {
        AttentionShape {
            queries: 1,
            ..AttentionShape::new(1, 1, keys, 1)
        }
    }

    #[test]
    fn the_order_is_scale_cap_alibi_bias() {
        let options = AttentionOptions::new()
            .scale(0.5)
            .softcap(2.0)
            .alibi([0.25])
            .query_offset(1);
        let (key, zeros) = ([6.0, -4.0, 1.0], [0.0; 3]);
        let mut call = Attention::new(row_shape(3), &options, &[2.0], &key, &zeros);
        call.mask = Some(Mask::bias(&[10.0, -1.0, f32::NEG_INFINITY], &[3]));
        let expected = [
            2.0 * (6.0f64 / 2.0).tanh() - 0.25 + 10.0,
            2.0 * (-4.0f64 / 2.0).tanh() - 0.0 - 1.0,
            HIDDEN,
        ];
        assert_eq!(scores(&call).unwrap(), expected);
    }

    #[test]
    fn hidden_keys_are_not_read() {
        let options = AttentionOptions::new()
            .scale(1.0)
            .window(Some(2), None)
            .query_offset(3);
        let nan = f64::NAN;
        let key = [nan, 1.0, nan, 3.0, nan, nan];
        let zeros = [0.0; 6];
        let mut call = Attention::new(row_shape(6), &options, &[1.0], &key, &zeros);
        call.kv_lengths = Some(&[5]);
        call.key_mask = Some(&[true, true, false, true, true, true]);
        call.mask = Some(Mask::keep(&[true, true, true, true, false, true], &[1, 6]));
        assert_eq!(scores(&call).unwrap(), [HIDDEN, 1.0, HIDDEN, 3.0, HIDDEN, HIDDEN]);
    }

    #[test]
    fn nothing_moves_or_hides_an_always_visible_key() {
        let options = AttentionOptions::new()
            .scale(1.0)
            .alibi([1.0])
            .causal(Causal::TopLeft)
            .always_visible_keys(1);
        let key = [5.0, 6.0, 7.0];
        let zeros = [0.0; 3];
        let mut call = Attention::new(row_shape(3), &options, &[1.0], &key, &zeros);
        call.mask = Some(Mask::bias(&[-1.0, -1.0], &[2]));
        assert_eq!(scores(&call).unwrap(), [4.0, HIDDEN, 7.0]);
        call.mask = None;
        call.kv_lengths = Some(&[0]);
        assert_eq!(scores(&call).unwrap(), [HIDDEN, HIDDEN, 7.0]);
    }

    #[test]
    fn a_short_mask_hides_the_keys_beyond_it() {
        let options = AttentionOptions::new().scale(1.0);
        let key = [1.0, 2.0, 3.0, 4.0];
        let zeros = [0.0; 4];
        let mut call = Attention::new(row_shape(4), &options, &[1.0], &key, &zeros);
        let short = Mask::bias(&[0.0, 0.5], &[1, 2]);
        call.mask = Some(short);
        assert!(scores(&call).is_err());
        call.mask = Some(short.with_short_keys());
        assert_eq!(scores(&call).unwrap(), [1.0, 2.5, HIDDEN, HIDDEN]);
        // A single column broadcasts, short or not.
        call.mask = Some(Mask::bias(&[0.5], &[1]).with_short_keys());
        assert_eq!(scores(&call).unwrap(), [1.5, 2.5, 3.5, 4.5]);
    }

    #[test]
    fn an_overflow_stays_visible_and_the_lowest_float_is_a_bias() {
        let options = AttentionOptions::new().scale(1.0);
        let key = [1e38f32, -1e38, 0.0];
        let zeros = [0.0; 3];
        let mut call = Attention::new(row_shape(3), &options, &[1e10], &key, &zeros);
        call.mask = Some(Mask::bias(&[0.0, f32::MIN, f32::MIN], &[3]));
        assert_eq!(scores(&call).unwrap(), [f32::MAX, f32::MIN, f32::MIN]);
    }

    #[test]
    fn groups_of_heads_share_a_key_head() {
        let options = AttentionOptions::new().scale(1.0);
        let shape = AttentionShape {
            kv_heads: 2,
            ..AttentionShape::new(1, 4, 1, 1)
        };
        let call = Attention::new(shape, &options, &[1.0, 2.0, 3.0, 4.0], &[10.0, 100.0], &[0.0; 2]);
        assert_eq!(scores(&call).unwrap(), [10.0, 20.0, 300.0, 400.0]);
    }
}
