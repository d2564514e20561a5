//! The sizes of one attention call and every check on them.

use crate::{Error, Result};

/// Sizes of one attention call.
///
/// | tensor | shape |
/// |---|---|
/// | query | `[batch, heads, queries, head_dim]` |
/// | key | `[batch, kv_heads, keys, head_dim]` |
/// | value | `[batch, kv_heads, keys, value_dim]` |
/// | output | `[batch, heads, queries, value_dim]` |
/// | weights | `[batch, heads, queries, keys]` |
///
/// ```
/// use multihead::AttentionShape;
///
/// let shape = AttentionShape::new(2, 8, 128, 64); // batch, heads, length, head size
/// assert_eq!(shape.validate(), Ok(()));
/// assert_eq!(shape.scores(), 2 * 8 * 128 * 128);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// Sequences in the batch, B.
    pub batch: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key and value heads, Hkv: `heads % kv_heads == 0`; query head `h` reads key head
    /// `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Queries, Lq.
    pub queries: usize,
    /// Keys, Lk, of the past and the always visible ones included.
    pub keys: usize,
    /// Size of one query or key vector, D.
    pub head_dim: usize,
    /// Size of one value vector, Dv.
    pub value_dim: usize,
}

impl AttentionShape {
    /// Self-attention: as many keys as queries, as many key heads as query heads, `Dv = D`.
    pub const fn new(batch: usize, heads: usize, length: usize, head_dim: usize) -> Self {
        Self {
            batch,
            heads,
            kv_heads: heads,
            queries: length,
            keys: length,
            head_dim,
            value_dim: head_dim,
        }
    }

    /// Checks what every call needs: heads that divide, and sizes that 32-bit indices reach.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] with the numbers.
    pub fn validate(&self) -> Result<()> {
        if self.kv_heads == 0 && self.heads != 0 || self.heads.checked_rem(self.kv_heads).unwrap_or(0) != 0 {
            return Err(Error::Shape(format!(
                "{} query heads over {} key/value heads: the number of query heads must be a multiple of the number of key/value heads",
                self.heads, self.kv_heads
            )));
        }
        for (what, size) in [
            ("batch", self.batch),
            ("heads", self.heads),
            ("queries", self.queries),
            ("keys", self.keys),
            ("head_dim", self.head_dim),
            ("value_dim", self.value_dim),
        ] {
            if size > MAX_AXIS {
                return Err(Error::Shape(format!(
                    "{what} = {size}: an axis may have at most {MAX_AXIS} entries"
                )));
            }
        }
        Ok(())
    }

    /// Query heads that share one key head.
    ///
    /// ```
    /// use multihead::AttentionShape;
    ///
    /// let shape = AttentionShape { kv_heads: 2, keys: 20, value_dim: 4, ..AttentionShape::new(1, 8, 5, 16) };
    /// assert_eq!(shape.group(), 4);
    /// assert_eq!((shape.query(), shape.key()), ([1, 8, 5, 16], [1, 2, 20, 16]));
    /// assert_eq!((shape.value(), shape.output()), ([1, 2, 20, 4], [1, 8, 5, 4]));
    /// assert_eq!((shape.weights(), shape.scores()), ([1, 8, 5, 20], 8 * 5 * 20));
    /// assert_eq!(shape.outputs(), 8 * 5 * 4);
    /// ```
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(1)
    }

    /// Number of scores, `B H Lq Lk`. Saturates instead of wrapping.
    pub fn scores(&self) -> u64 {
        product(&[self.batch, self.heads, self.queries, self.keys])
    }

    /// Number of output elements, `B H Lq Dv`. Saturates instead of wrapping.
    pub fn outputs(&self) -> u64 {
        product(&[self.batch, self.heads, self.queries, self.value_dim])
    }

    /// Shape of the query, `[B, H, Lq, D]`.
    pub fn query(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.head_dim]
    }

    /// Shape of the key, `[B, Hkv, Lk, D]`.
    pub fn key(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.head_dim]
    }

    /// Shape of the value, `[B, Hkv, Lk, Dv]`.
    pub fn value(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.keys, self.value_dim]
    }

    /// Shape of the output, `[B, H, Lq, Dv]`.
    pub fn output(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.value_dim]
    }

    /// Shape of the weights, `[B, H, Lq, Lk]`.
    pub fn weights(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.keys]
    }
}

/// Largest axis: positions, offsets and their differences stay inside `i32`.
///
/// ```
/// use multihead::{AttentionShape, MAX_AXIS};
///
/// assert!(AttentionShape::new(1, 1, MAX_AXIS, 1).validate().is_ok());
/// assert!(AttentionShape::new(1, 1, MAX_AXIS + 1, 1).validate().is_err());
/// ```
pub const MAX_AXIS: usize = 1 << 29;

/// Number of elements of a shape, in `u64`, saturating.
pub(crate) fn product(shape: &[usize]) -> u64 {
    shape
        .iter()
        .try_fold(1u64, |n, &axis| {
            if axis == 0 {
                Some(0)
            } else {
                n.checked_mul(axis as u64)
            }
        })
        .unwrap_or(if shape.contains(&0) { 0 } else { u64::MAX })
}

/// Strides, in elements, by which a tensor of `shape` is read when it is broadcast to `target`
/// from the right: an axis of 1, or a missing one, gets stride 0.
///
/// `short_last` allows a last axis that is shorter than the target's.
pub(crate) fn broadcast_strides(
    what: &str,
    shape: &[usize],
    target: [usize; 4],
    short_last: bool,
) -> Result<[usize; 4]> {
    let refuse = |advice: &str| {
        Err(Error::Shape(format!(
            "{what} has shape {shape:?}, which does not broadcast to {target:?} from the right; {advice}"
        )))
    };
    if shape.len() > 4 {
        return refuse("use at most 4 axes");
    }
    let mut strides = [0; 4];
    let mut stride = 1usize;
    for (back, &axis) in shape.iter().rev().enumerate() {
        let at = 3 - back;
        if axis != 1 {
            let short = back == 0 && short_last && axis < target[at];
            if axis != target[at] && !short {
                return if back == 0 && axis < target[at] {
                    refuse(
                        "a last axis that is shorter than the keys is accepted after Mask::with_short_keys only",
                    )
                } else {
                    refuse("each axis must be 1 or equal the target's")
                };
            }
            strides[at] = stride;
        }
        stride = stride.saturating_mul(axis);
    }
    Ok(strides)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn heads_must_divide() {
        let mut shape = AttentionShape::new(1, 5, 3, 8);
        shape.kv_heads = 2;
        let text = shape.validate().unwrap_err().to_string();
        assert!(text.contains('5') && text.contains('2'), "{text}");
    }

    #[test]
    fn products_do_not_wrap() {
        assert_eq!(product(&[usize::MAX, usize::MAX]), u64::MAX);
        assert_eq!(product(&[usize::MAX, usize::MAX, 0]), 0);
        assert_eq!(product(&[]), 1);
    }

    #[test]
    fn broadcasts_from_the_right() {
        let target = [2, 3, 5, 7];
        let strides = |shape: &[usize]| broadcast_strides("mask", shape, target, false);
        assert_eq!(strides(&[7]), Ok([0, 0, 0, 1]));
        assert_eq!(strides(&[5, 7]), Ok([0, 0, 7, 1]));
        assert_eq!(strides(&[2, 1, 5, 1]), Ok([5, 0, 1, 0]));
        assert_eq!(strides(&[2, 3, 5, 7]), Ok([105, 35, 7, 1]));
        assert!(strides(&[4]).is_err() && strides(&[8]).is_err() && strides(&[3, 5, 7, 1]).is_err());
        assert_eq!(broadcast_strides("mask", &[5, 4], target, true), Ok([0, 0, 4, 1]));
    }
}
