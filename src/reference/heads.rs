//! The two layouts of heads, and joining a cache with new keys.

use super::{Real, check_len};
use crate::Result;

/// `[B, L, H, D]` (or `[B, L, H*D]`) to `[B, H, L, D]`.
///
/// ```
/// use multihead::reference::split_heads;
///
/// // Two positions, two heads of size 1.
/// assert_eq!(split_heads(&[1.0, 10.0, 2.0, 20.0], 1, 2, 2, 1)?, [1.0, 2.0, 10.0, 20.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a length that does not fit.
pub fn split_heads<T: Real>(
    x: &[T],
    batch: usize,
    length: usize,
    heads: usize,
    size: usize,
) -> Result<Vec<T>> {
    check_len("x", x.len(), &[batch, length, heads, size])?;
    Ok(swap_axes(x, batch, length, heads, size))
}

/// `[B, H, L, D]` to `[B, L, H, D]` (which is `[B, L, H*D]`): undoes [`split_heads`].
///
/// ```
/// use multihead::reference::merge_heads;
///
/// assert_eq!(merge_heads(&[1.0, 2.0, 10.0, 20.0], 1, 2, 2, 1)?, [1.0, 10.0, 2.0, 20.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a length that does not fit.
pub fn merge_heads<T: Real>(
    x: &[T],
    batch: usize,
    length: usize,
    heads: usize,
    size: usize,
) -> Result<Vec<T>> {
    check_len("x", x.len(), &[batch, heads, length, size])?;
    Ok(swap_axes(x, batch, heads, length, size))
}

/// `[batch, outer, inner, size]` to `[batch, inner, outer, size]`.
fn swap_axes<T: Real>(x: &[T], batch: usize, outer: usize, inner: usize, size: usize) -> Vec<T> {
    let mut swapped = Vec::with_capacity(x.len());
    for b in 0..batch {
        for i in 0..inner {
            for o in 0..outer {
                swapped.extend_from_slice(&x[((b * outer + o) * inner + i) * size..][..size]);
            }
        }
    }
    swapped
}

/// Joins a cache and new keys (or values) along the key axis: `past [groups, past_keys, size]` in front of
/// `new [groups, new_keys, size]`. `groups` is `B * Hkv`.
///
/// ```
/// use multihead::reference::join_keys;
///
/// // Two heads of size 1: one cached key each, then two new ones.
/// let joined = join_keys(&[1.0, 10.0], &[2.0, 3.0, 20.0, 30.0], 2, 1, 2, 1)?;
/// assert_eq!(joined, [1.0, 2.0, 3.0, 10.0, 20.0, 30.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`](crate::Error::Shape) for a length that does not fit.
pub fn join_keys<T: Real>(
    past: &[T],
    new: &[T],
    groups: usize,
    past_keys: usize,
    new_keys: usize,
    size: usize,
) -> Result<Vec<T>> {
    check_len("past", past.len(), &[groups, past_keys, size])?;
    check_len("new", new.len(), &[groups, new_keys, size])?;
    let mut joined = Vec::with_capacity(past.len() + new.len());
    for group in 0..groups {
        joined.extend_from_slice(&past[group * past_keys * size..][..past_keys * size]);
        joined.extend_from_slice(&new[group * new_keys * size..][..new_keys * size]);
    }
    Ok(joined)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn merging_undoes_splitting() {
        let x: Vec<f64> = (0..2 * 3 * 4 * 5).map(f64::from).collect();
        let split = split_heads(&x, 2, 3, 4, 5).unwrap();
        // Batch 1, head 2, position 1, element 3.
        assert_eq!(split[((4 + 2) * 3 + 1) * 5 + 3], x[((3 + 1) * 4 + 2) * 5 + 3]);
        assert_eq!(merge_heads(&split, 2, 3, 4, 5).unwrap(), x);
    }

    #[test]
    fn lengths_are_checked() {
        assert!(split_heads(&[0.0f64; 5], 1, 2, 3, 1).is_err());
        assert!(join_keys(&[0.0f64; 3], &[0.0; 2], 2, 1, 1, 1).is_err());
        assert_eq!(join_keys(&[], &[1.0f32, 2.0], 1, 0, 2, 1).unwrap(), [1.0, 2.0]);
    }
}
