//! Sequences of different lengths laid end to end.

use super::{Attention, Real, check_len, zeros};
use crate::{AttentionOptions, AttentionShape, Error, Result};

/// A call over sequences laid end to end, without padding (FlashAttention's `varlen` layout).
///
/// Sequence `b` has queries `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` and keys
/// `cu_seqlens_k[b] .. cu_seqlens_k[b + 1]`, and attends to itself alone; positions start anew in each.
///
/// ```
/// use multihead::AttentionOptions;
/// use multihead::reference::{Packed, packed_attention};
///
/// let options = AttentionOptions::new();
/// let mut packed = Packed {
///     heads: 1,
///     kv_heads: 1,
///     head_dim: 1,
///     value_dim: 1,
///     options: &options,
///     query: &[0.0f64; 3],
///     key: &[0.0; 3],
///     value: &[1.0, 2.0, 4.0],
///     cu_seqlens_q: &[0, 3], // one sequence
///     cu_seqlens_k: &[0, 3],
///     sinks: None,
/// };
/// assert_eq!(packed_attention(&packed)?.output.len(), 3);
/// packed.cu_seqlens_k = &[0, 2]; // a key that belongs to no sequence
/// assert!(packed_attention(&packed).is_err());
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Packed<'a, T> {
    /// Query heads, H.
    pub heads: usize,
    /// Key and value heads, Hkv.
    pub kv_heads: usize,
    /// Size of a query and a key vector, D.
    pub head_dim: usize,
    /// Size of a value vector, Dv.
    pub value_dim: usize,
    /// Scale, soft cap, ALiBi and positions; `always_visible_keys` must be 0.
    pub options: &'a AttentionOptions,
    /// `[Tq, H, D]`.
    pub query: &'a [T],
    /// `[Tk, Hkv, D]`.
    pub key: &'a [T],
    /// `[Tk, Hkv, Dv]`.
    pub value: &'a [T],
    /// Rising, from 0 to Tq.
    pub cu_seqlens_q: &'a [usize],
    /// Rising, from 0 to Tk.
    pub cu_seqlens_k: &'a [usize],
    /// `[H]`, as in [`Attention::sinks`].
    pub sinks: Option<&'a [f32]>,
}

/// Answers of [`packed_attention`].
///
/// ```
/// # use multihead::AttentionOptions;
/// use multihead::reference::{PackedOutput, packed_attention};
///
/// # let packed = multihead::reference::Packed {
/// #     heads: 1,
/// #     kv_heads: 1,
/// #     head_dim: 1,
/// #     value_dim: 1,
/// #     options: &AttentionOptions::new(),
/// #     query: &[0.0f64; 3],
/// #     key: &[0.0; 3],
/// #     value: &[1.0, 2.0, 4.0],
/// #     cu_seqlens_q: &[0, 1, 3],
/// #     cu_seqlens_k: &[0, 1, 3],
/// #     sinks: None,
/// # };
/// let PackedOutput { output, lse } = packed_attention(&packed)?; // sequences of one and of two tokens
/// assert_eq!(output, [1.0, 3.0, 3.0]);
/// assert_eq!(lse, [0.0, 2f64.ln(), 2f64.ln()]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PackedOutput<T> {
    /// `[Tq, H, Dv]`.
    pub output: Vec<T>,
    /// Natural log-sum-exp, `[H, Tq]`.
    pub lse: Vec<T>,
}

/// Runs [`Attention`] on each sequence of a packed call.
///
/// ```
/// use multihead::AttentionOptions;
/// use multihead::reference::{Packed, packed_attention};
///
/// // Two sequences, of one and of two tokens; scores are all 0.
/// let answer = packed_attention(&Packed {
///     heads: 1,
///     kv_heads: 1,
///     head_dim: 1,
///     value_dim: 1,
///     options: &AttentionOptions::new(),
///     query: &[0.0; 3],
///     key: &[0.0; 3],
///     value: &[1.0, 2.0, 4.0],
///     cu_seqlens_q: &[0, 1, 3],
///     cu_seqlens_k: &[0, 1, 3],
///     sinks: None,
/// })?;
/// assert_eq!(answer.output, [1.0, 3.0, 3.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`] for lengths that do not fit, [`Error::Option`] for options that are not allowed.
pub fn packed_attention<T: Real>(packed: &Packed<'_, T>) -> Result<PackedOutput<T>> {
    let Packed {
        heads,
        kv_heads,
        head_dim,
        value_dim,
        options,
        ..
    } = *packed;
    let total = |what: &str, seams: &[usize]| {
        if seams.first() != Some(&0) || !seams.is_sorted() {
            return Err(Error::Shape(format!(
                "{what} must start at 0 and never fall, given {seams:?}"
            )));
        }
        Ok(seams.last().copied().unwrap_or(0))
    };
    let queries = total("cu_seqlens_q", packed.cu_seqlens_q)?;
    let keys = total("cu_seqlens_k", packed.cu_seqlens_k)?;
    if packed.cu_seqlens_q.len() != packed.cu_seqlens_k.len() {
        return Err(Error::Shape(format!(
            "cu_seqlens_q has {} entries, cu_seqlens_k {}: both need one more than there are sequences",
            packed.cu_seqlens_q.len(),
            packed.cu_seqlens_k.len()
        )));
    }
    if options.always_visible_keys != 0 {
        return Err(Error::Option(format!(
            "always_visible_keys = {} in a packed call: must be 0",
            options.always_visible_keys
        )));
    }
    check_len("query", packed.query.len(), &[queries, heads, head_dim])?;
    check_len("key", packed.key.len(), &[keys, kv_heads, head_dim])?;
    check_len("value", packed.value.len(), &[keys, kv_heads, value_dim])?;

    let mut output = zeros("output", &[queries, heads, value_dim])?;
    let mut lse = zeros("lse", &[heads, queries])?;
    for (q, k) in packed.cu_seqlens_q.windows(2).zip(packed.cu_seqlens_k.windows(2)) {
        let (q0, k0) = (q[0], k[0]);
        let shape = AttentionShape {
            batch: 1,
            heads,
            kv_heads,
            queries: q[1] - q0,
            keys: k[1] - k0,
            head_dim,
            value_dim,
        };
        let query = gather(packed.query, q0, shape.queries, heads, head_dim);
        let key = gather(packed.key, k0, shape.keys, kv_heads, head_dim);
        let value = gather(packed.value, k0, shape.keys, kv_heads, value_dim);
        let mut call = Attention::new(shape, options, &query, &key, &value);
        call.sinks = packed.sinks;
        let answer = call.run_output()?;
        for head in 0..heads {
            for i in 0..shape.queries {
                let from = head * shape.queries + i;
                let to = (q0 + i) * heads + head;
                output[to * value_dim..][..value_dim]
                    .copy_from_slice(&answer.output[from * value_dim..][..value_dim]);
                lse[head * queries + q0 + i] = answer.lse[from];
            }
        }
    }
    Ok(PackedOutput { output, lse })
}

/// Rows `start .. start + length` of `[T, heads, size]` as `[heads, length, size]`.
fn gather<T: Real>(x: &[T], start: usize, length: usize, heads: usize, size: usize) -> Vec<T> {
    let mut gathered = Vec::with_capacity(length * heads * size);
    for head in 0..heads {
        for row in start..start + length {
            gathered.extend_from_slice(&x[(row * heads + head) * size..][..size]);
        }
    }
    gathered
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{merge_heads, split_heads};
    use super::*;
    use crate::Causal;

    #[test]
    fn equal_lengths_are_a_batch() {
        let options = AttentionOptions::new().causal(Causal::BottomRight);
        let numbers = |count: u32, step: u32| -> Vec<f64> {
            (0..count).map(|i| f64::from(i * step % 17) / 8.0 - 1.0).collect()
        };
        let (q, k, v) = (
            numbers(2 * 3 * 4 * 2, 5),
            numbers(2 * 4 * 2 * 2, 7),
            numbers(2 * 4 * 2, 3),
        );
        let answer = packed_attention(&Packed {
            heads: 4,
            kv_heads: 2,
            head_dim: 2,
            value_dim: 1,
            options: &options,
            query: &q,
            key: &k,
            value: &v,
            cu_seqlens_q: &[0, 3, 6],
            cu_seqlens_k: &[0, 4, 8],
            sinks: None,
        })
        .unwrap();
        let shape = AttentionShape {
            batch: 2,
            heads: 4,
            kv_heads: 2,
            queries: 3,
            keys: 4,
            head_dim: 2,
            value_dim: 1,
        };
        let (q, k, v) = (
            split_heads(&q, 2, 3, 4, 2).unwrap(),
            split_heads(&k, 2, 4, 2, 2).unwrap(),
            split_heads(&v, 2, 4, 2, 1).unwrap(),
        );
        let batch = Attention::new(shape, &options, &q, &k, &v).run_output().unwrap();
        assert_eq!(answer.output, merge_heads(&batch.output, 2, 3, 4, 1).unwrap());
        // [B, H, L] against [H, B L].
        for (b, h, i) in [(0, 0, 0), (0, 3, 2), (1, 0, 1), (1, 2, 0)] {
            assert_eq!(answer.lse[h * 6 + b * 3 + i], batch.lse[(b * 4 + h) * 3 + i]);
        }
    }

    #[test]
    fn bad_seams_are_refused() {
        let options = AttentionOptions::new();
        let run = |q: &[usize], k: &[usize]| {
            packed_attention(&Packed {
                heads: 1,
                kv_heads: 1,
                head_dim: 1,
                value_dim: 1,
                options: &options,
                query: &[0.0f64; 3],
                key: &[0.0; 3],
                value: &[0.0; 3],
                cu_seqlens_q: q,
                cu_seqlens_k: k,
                sinks: None,
            })
        };
        assert!(run(&[0, 3], &[0, 3]).is_ok());
        assert!(run(&[0, 0, 3], &[0, 3, 3]).is_ok());
        for (q, k) in [
            (&[0, 4][..], &[0, 3][..]),
            (&[1, 3], &[0, 3]),
            (&[], &[]),
            (&[0, 3, 1, 3], &[0, 1, 2, 3]),
            (&[0, 3], &[0, 1, 3]),
        ] {
            assert!(run(q, k).is_err(), "{q:?} {k:?}");
        }
    }
}
