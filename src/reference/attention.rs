//! One attention call.

use super::scores::score_row;
use super::softmax::softmax_row;
use super::weighted_sum::{head_of, sum_row};
use super::{Real, check_len, count, rows_mut, zeros};
use crate::mask::Visibility;
use crate::shape::broadcast_strides;
use crate::{AttentionOptions, AttentionShape, Error, Result};
use rayon::prelude::*;

/// A mask broadcast from the right to `[B, H, Lq, Lk - always_visible_keys]`: at most four axes, each 1 or
/// the target's size.
///
/// ```
/// use multihead::reference::{Attention, Mask};
/// use multihead::{AttentionOptions, AttentionShape};
///
/// let options = AttentionOptions::new();
/// let mut call = Attention::new(AttentionShape::new(1, 1, 2, 1), &options, &[0.0f64; 2], &[0.0; 2], &[0.0; 2]);
/// for (mask, weights) in [
///     (Mask::keep(&[true, false, true, true], &[2, 2]), [1.0, 0.0, 0.5, 0.5]),
///     (Mask::bias(&[0.0, f32::NEG_INFINITY], &[2]), [1.0, 0.0, 1.0, 0.0]),
///     (Mask::keep(&[true; 2], &[2, 1]), [0.5; 4]), // an axis of 1 is read again
/// ] {
///     call.mask = Some(mask);
///     assert_eq!(call.run()?.weights, weights);
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mask<'a> {
    /// `true` = attend.
    Keep {
        /// Row-major.
        data: &'a [bool],
        /// Axes, outermost first.
        shape: &'a [usize],
        /// Whether the last axis may be shorter than the keys (but not 1): keys beyond it are invisible.
        short_keys: bool,
    },
    /// Added to the score. Exactly `-inf` hides a key; any finite number, `f32::MIN` too, is a bias.
    Bias {
        /// Row-major.
        data: &'a [f32],
        /// Axes, outermost first.
        shape: &'a [usize],
        /// Whether the last axis may be shorter than the keys (but not 1): keys beyond it are invisible.
        short_keys: bool,
    },
}

impl<'a> Mask<'a> {
    /// A boolean mask, `true` = attend.
    pub const fn keep(data: &'a [bool], shape: &'a [usize]) -> Self {
        Self::Keep {
            data,
            shape,
            short_keys: false,
        }
    }

    /// A float mask, added to the scores.
    pub const fn bias(data: &'a [f32], shape: &'a [usize]) -> Self {
        Self::Bias {
            data,
            shape,
            short_keys: false,
        }
    }

    /// Accepts a last axis that is shorter than the keys (ONNX): keys beyond it are invisible.
    ///
    /// ```
    /// use multihead::reference::{Attention, Mask};
    /// use multihead::{AttentionOptions, AttentionShape};
    ///
    /// let options = AttentionOptions::new();
    /// let shape = AttentionShape { queries: 1, ..AttentionShape::new(1, 1, 3, 1) };
    /// let mut call = Attention::new(shape, &options, &[0.0f64], &[0.0; 3], &[0.0; 3]);
    /// call.mask = Some(Mask::keep(&[true, true], &[2]).with_short_keys());
    /// assert_eq!(call.run()?.weights, [0.5, 0.5, 0.0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub const fn with_short_keys(self) -> Self {
        match self {
            Self::Keep { data, shape, .. } => Self::Keep {
                data,
                shape,
                short_keys: true,
            },
            Self::Bias { data, shape, .. } => Self::Bias {
                data,
                shape,
                short_keys: true,
            },
        }
    }
}

/// One attention call, `softmax(mask(softcap(scale q.k) - alibi + bias)) v`
/// ([Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 3.2.1; order of operations as
/// in ONNX [`Attention`](https://onnx.ai/onnx/operators/onnx__Attention.html)).
///
/// Cached keys are joined by the caller: [`join_keys`](super::join_keys).
///
/// ```
/// use multihead::reference::{Attention, Mask};
/// use multihead::{AttentionOptions, AttentionShape};
///
/// let options = AttentionOptions::new();
/// let value = [1.0, f64::NAN];
/// let mut call = Attention::new(AttentionShape::new(1, 1, 2, 1), &options, &[0.5, 2.0], &[1.0, 1.0], &value);
/// // Query 0 sees key 0, query 1 sees none: its output is 0.
/// call.mask = Some(Mask::keep(&[true, false, false, false], &[2, 2]));
/// let answer = call.run()?;
/// assert_eq!(answer.output, [1.0, 0.0]);
/// assert_eq!(answer.lse, [0.5, f64::NEG_INFINITY]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Attention<'a, T> {
    /// Sizes.
    pub shape: AttentionShape,
    /// Scale, soft cap, ALiBi and positions. Without a scale it is `1 / sqrt(D)`, rounded to `T`.
    pub options: &'a AttentionOptions,
    /// `[B, H, Lq, D]`.
    pub query: &'a [T],
    /// `[B, Hkv, Lk, D]`.
    pub key: &'a [T],
    /// `[B, Hkv, Lk, Dv]`.
    pub value: &'a [T],
    /// Boolean or float mask.
    pub mask: Option<Mask<'a>>,
    /// `[B, Lk - always_visible_keys]`, `true` = attend.
    pub key_mask: Option<&'a [bool]>,
    /// `[B]`: only keys `j < kv_lengths[b]`, and the always visible ones, exist.
    pub kv_lengths: Option<&'a [usize]>,
    /// `[H]`: adds `exp(sinks[h])` to the sum of each row of head `h`.
    pub sinks: Option<&'a [f32]>,
}

/// Answers of [`Attention::run`].
///
/// ```
/// use multihead::reference::{Attention, AttentionOutput};
/// use multihead::{AttentionOptions, AttentionShape};
///
/// let options = AttentionOptions::new();
/// let call = Attention::new(AttentionShape::new(1, 1, 1, 1), &options, &[2.0f64], &[3.0], &[5.0]);
/// let AttentionOutput { output, weights, lse } = call.run()?;
/// assert_eq!((output, weights, lse), (vec![5.0], vec![1.0], vec![6.0]));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionOutput<T> {
    /// `[B, H, Lq, Dv]`; 0 for a row without a visible key.
    pub output: Vec<T>,
    /// `[B, H, Lq, Lk]`; exactly 0 for an invisible key. Empty after [`Attention::run_output`].
    pub weights: Vec<T>,
    /// Natural log-sum-exp, `[B, H, Lq]`; `-inf` for a row without a visible key and without a sink.
    pub lse: Vec<T>,
}

impl<'a, T: Real> Attention<'a, T> {
    /// A call without masks, lengths and sinks; set those fields as needed.
    pub const fn new(
        shape: AttentionShape,
        options: &'a AttentionOptions,
        query: &'a [T],
        key: &'a [T],
        value: &'a [T],
    ) -> Self {
        Self {
            shape,
            options,
            query,
            key,
            value,
            mask: None,
            key_mask: None,
            kv_lengths: None,
            sinks: None,
        }
    }

    /// Output, weights and log-sum-exp.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for lengths that do not fit, [`Error::Option`] for options that are not allowed,
    /// both with the numbers.
    pub fn run(&self) -> Result<AttentionOutput<T>> {
        self.rows(true)
    }

    /// [`run`](Self::run) without the weights: memory grows with `Lq`, not with `Lq * Lk`.
    ///
    /// ```
    /// use multihead::{AttentionOptions, AttentionShape, reference::Attention};
    ///
    /// let options = AttentionOptions::new();
    /// let call = Attention::new(AttentionShape::new(1, 1, 1, 1), &options, &[2.0f64], &[3.0], &[5.0]);
    /// let answer = call.run_output()?;
    /// assert_eq!((answer.output, answer.lse), (vec![5.0], vec![6.0]));
    /// assert!(answer.weights.is_empty());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run).
    pub fn run_output(&self) -> Result<AttentionOutput<T>> {
        self.rows(false)
    }

    fn rows(&self, keep_weights: bool) -> Result<AttentionOutput<T>> {
        let prepared = self.prepare()?;
        let (rows, keys, size) = (prepared.rows, self.shape.keys, self.shape.value_dim);
        let mut output = zeros("output", &[rows, size])?;
        let kept = if keep_weights { keys } else { 0 };
        let mut weights = zeros("weights", &[rows, kept])?;
        let mut lse = zeros("lse", &[rows])?;
        rows_mut(&mut output, rows, size)?
            .into_par_iter()
            .zip(rows_mut(&mut weights, rows, kept)?)
            .zip(&mut lse)
            .enumerate()
            .for_each_init(
                || vec![T::ZERO; keys],
                |row, (index, ((output, weights), lse))| {
                    score_row(&prepared, index, row);
                    let sink = self
                        .sinks
                        .map(|sinks| sinks[index / self.shape.queries % self.shape.heads]);
                    *lse = softmax_row(row, sink);
                    sum_row(row, head_of(self.value, &self.shape, index), output);
                    if keep_weights {
                        weights.copy_from_slice(row);
                    }
                },
            );
        Ok(AttentionOutput { output, weights, lse })
    }

    /// Checks every length and lowers the options.
    pub(super) fn prepare(&self) -> Result<Prepared<'_, T>> {
        let Self { shape, options, .. } = self;
        shape.validate()?;
        options.validate(shape.heads)?;
        check_len("query", self.query.len(), &shape.query())?;
        check_len("key", self.key.len(), &shape.key())?;
        check_len("value", self.value.len(), &shape.value())?;
        let Some(ordinary_keys) = shape.keys.checked_sub(options.always_visible_keys) else {
            return Err(Error::Shape(format!(
                "{} always visible keys, but {} keys in all: they count in the keys",
                options.always_visible_keys, shape.keys
            )));
        };
        if let Some(keep) = self.key_mask {
            check_len("key_mask", keep.len(), &[shape.batch, ordinary_keys])?;
        }
        if let Some(lengths) = self.kv_lengths {
            check_len("kv_lengths", lengths.len(), &[shape.batch])?;
            if let Some((row, length)) = lengths.iter().enumerate().find(|(_, len)| **len > ordinary_keys) {
                return Err(Error::Shape(format!(
                    "kv_lengths[{row}] = {length}, but there are {ordinary_keys} keys that a length may count"
                )));
            }
        }
        if let Some(sinks) = self.sinks {
            check_len("sinks", sinks.len(), &[shape.heads])?;
        }
        let target = [shape.batch, shape.heads, shape.queries, ordinary_keys];
        let lower = |len: usize, axes: &[usize], short_keys: bool| {
            check_len("mask", len, axes)?;
            let strides = broadcast_strides("mask", axes, target, short_keys)?;
            let columns = match axes.last() {
                Some(&columns) if columns != 1 => columns,
                _ => ordinary_keys,
            };
            Ok::<_, Error>((strides, columns))
        };
        let (mask_strides, mask_keys) = match self.mask {
            None => ([0; 4], ordinary_keys),
            Some(Mask::Keep {
                data,
                shape,
                short_keys,
            }) => lower(data.len(), shape, short_keys)?,
            Some(Mask::Bias {
                data,
                shape,
                short_keys,
            }) => lower(data.len(), shape, short_keys)?,
        };
        Ok(Prepared {
            call: self,
            rows: count("lse", &[shape.batch, shape.heads, shape.queries])?,
            ordinary_keys,
            scale: options.scale.map_or_else(
                || T::from_f64(1.0 / (shape.head_dim.max(1) as f64).sqrt()),
                T::from_f32,
            ),
            visibility: Visibility::new(options),
            mask_strides,
            mask_keys,
        })
    }
}

/// A checked call, and what all of its rows share.
pub(super) struct Prepared<'a, T> {
    pub(super) call: &'a Attention<'a, T>,
    /// `B * H * Lq`.
    pub(super) rows: usize,
    /// Keys that masks, lengths and positions count.
    pub(super) ordinary_keys: usize,
    pub(super) scale: T,
    pub(super) visibility: Visibility,
    mask_strides: [usize; 4],
    /// Keys that the mask reaches.
    mask_keys: usize,
}

impl<T> Prepared<'_, T> {
    /// What the mask says about one ordinary key: `None` hides it, `Some(None)` adds nothing.
    #[allow(clippy::option_option)]
    pub(super) fn mask_at(&self, batch: usize, head: usize, query: usize, key: usize) -> Option<Option<f32>> {
        let Some(mask) = self.call.mask else {
            return Some(None);
        };
        if key >= self.mask_keys {
            return None;
        }
        let [b, h, q, k] = self.mask_strides;
        let at = batch * b + head * h + query * q + key * k;
        match mask {
            Mask::Keep { data, .. } => data[at].then_some(None),
            Mask::Bias { data, .. } => (data[at] != f32::NEG_INFINITY).then_some(Some(data[at])),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{join_keys, scores, softmax, weighted_sum};
    use super::*;
    use crate::{Align, Causal};

    /// Numbers in (-1, 1) without a pattern that a transposed axis would survive.
    fn noise(count: usize, seed: u32) -> Vec<f64> {
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        (0..count)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                f64::from(state) / f64::from(1u32 << 31) - 1.0
            })
            .collect()
    }

    fn close(a: &[f64], b: &[f64]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || (a - b).abs() < 1e-12)
    }

    const SHAPE: AttentionShape = AttentionShape {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        queries: 5,
        keys: 7,
        head_dim: 3,
        value_dim: 2,
    };

    fn inputs() -> [Vec<f64>; 3] {
        [noise(120, 1), noise(84, 2), noise(56, 3)]
    }

    /// The textbook: exponentials of unshifted scores over one sum, no shared code.
    #[test]
    fn agrees_with_the_textbook() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new();
        let answer = Attention::new(SHAPE, &options, &q, &k, &v).run().unwrap();
        for row in 0..40 {
            let (b, h) = (row / 20, row / 5 % 4);
            let kv = b * 2 + h / 2;
            let e: Vec<f64> = (0..7)
                .map(|j| {
                    (0..3)
                        .map(|d| q[row * 3 + d] * k[(kv * 7 + j) * 3 + d])
                        .sum::<f64>()
                        / 3f64.sqrt()
                })
                .map(f64::exp)
                .collect();
            let sum: f64 = e.iter().sum();
            assert!((answer.lse[row] - sum.ln()).abs() < 1e-14);
            for d in 0..2 {
                let mean = (0..7).map(|j| e[j] * v[(kv * 7 + j) * 2 + d]).sum::<f64>() / sum;
                assert!((answer.output[row * 2 + d] - mean).abs() < 1e-14);
            }
        }
    }

    #[test]
    fn the_composed_path_gives_the_same() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new().softcap(0.7).causal(Causal::BottomRight);
        let sinks = [0.5, -1.0, 0.0, 2.0];
        let mut call = Attention::new(SHAPE, &options, &q, &k, &v);
        call.sinks = Some(&sinks);
        let answer = call.run().unwrap();
        let (weights, lse) = softmax(&scores(&call).unwrap(), &SHAPE, Some(&sinks)).unwrap();
        let output = weighted_sum(&weights, &v, &SHAPE).unwrap();
        assert_eq!(answer, AttentionOutput { output, weights, lse });
        let without = call.run_output().unwrap();
        assert_eq!(
            (&without.output, &without.lse, without.weights.len()),
            (&answer.output, &answer.lse, 0)
        );
    }

    #[test]
    fn equal_values_come_back_whatever_the_weights() {
        let [q, k, _] = inputs();
        let v = [1.25; 56];
        let options = AttentionOptions::new()
            .alibi([0.5, 0.25, 0.125, 0.0])
            .align(Align::BottomRight);
        let answer = Attention::new(SHAPE, &options, &q, &k, &v).run().unwrap();
        assert!(answer.output.iter().all(|x| (x - 1.25).abs() < 1e-15));
        assert!(
            answer
                .weights
                .chunks(7)
                .all(|row| (row.iter().sum::<f64>() - 1.0).abs() < 1e-14)
        );
    }

    #[test]
    fn lengths_equal_a_key_mask_and_a_float_mask() {
        let [q, mut k, mut v] = inputs();
        let options = AttentionOptions::new();
        let keep: Vec<bool> = (0..14).map(|at| at % 7 < if at < 7 { 4 } else { 6 }).collect();
        for (head, cut) in [4, 4, 6, 6].into_iter().enumerate() {
            k[head * 21..][cut * 3..21].fill(f64::NAN);
            v[head * 14..][cut * 2..14].fill(f64::NAN);
        }
        let mut call = Attention::new(SHAPE, &options, &q, &k, &v);
        call.kv_lengths = Some(&[4, 6]);
        let by_length = call.run().unwrap();
        assert!(
            by_length
                .output
                .iter()
                .chain(&by_length.weights)
                .all(|x| x.is_finite())
        );
        call.kv_lengths = None;
        call.key_mask = Some(&keep);
        assert_eq!(call.run().unwrap(), by_length);
        call.key_mask = None;
        call.mask = Some(Mask::keep(&keep, &[2, 1, 1, 7]));
        assert_eq!(call.run().unwrap(), by_length);
        let bias: Vec<f32> = keep
            .iter()
            .map(|&keep| if keep { 0.0 } else { f32::NEG_INFINITY })
            .collect();
        call.mask = Some(Mask::bias(&bias, &[2, 1, 1, 7]));
        assert_eq!(call.run().unwrap(), by_length);
    }

    #[test]
    fn bottom_right_counts_from_the_length() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new().causal(Causal::BottomRight);
        let mut call = Attention::new(SHAPE, &options, &q, &k, &v);
        call.kv_lengths = Some(&[7, 3]);
        let weights = call.run().unwrap().weights;
        let seen: Vec<usize> = weights
            .chunks(7)
            .map(|row| row.iter().filter(|weight| **weight > 0.0).count())
            .collect();
        assert_eq!(seen[..5], [3, 4, 5, 6, 7]);
        // Five queries over three keys: the first two have nothing to see.
        assert_eq!(seen[20..25], [0, 0, 1, 2, 3]);
    }

    #[test]
    fn the_lowest_float_is_a_bias() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new();
        let mut call = Attention::new(SHAPE, &options, &q, &k, &v);
        let bias = [f32::MIN; 7];
        call.mask = Some(Mask::bias(&bias, &[7]));
        let answer = call.run().unwrap();
        // The bias swallows the scores: all keys weigh the same.
        assert!(
            answer
                .weights
                .iter()
                .all(|weight| (weight - 1.0 / 7.0).abs() < 1e-15)
        );
        assert!(answer.lse.iter().all(|lse| lse.is_finite()));
    }

    #[test]
    fn a_cache_changes_nothing_but_the_offset() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new().causal(Causal::BottomRight);
        let whole = Attention::new(SHAPE, &options, &q, &k, &v).run().unwrap();
        let cut = |x: &[f64], size: usize, from: usize, to: usize| -> Vec<f64> {
            x.chunks(7 * size)
                .flat_map(|head| head[from * size..to * size].to_vec())
                .collect()
        };
        let key = join_keys(&cut(&k, 3, 0, 2), &cut(&k, 3, 2, 7), 4, 2, 5, 3).unwrap();
        let value = join_keys(&cut(&v, 2, 0, 2), &cut(&v, 2, 2, 7), 4, 2, 5, 2).unwrap();
        assert_eq!((&key, &value), (&k, &v));
        let offset = AttentionOptions::new().causal(Causal::TopLeft).query_offset(2);
        assert_eq!(
            Attention::new(SHAPE, &offset, &q, &key, &value).run().unwrap(),
            whole
        );
    }

    #[test]
    fn a_sink_is_a_key_of_value_zero() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new();
        let mut call = Attention::new(SHAPE, &options, &q, &k, &v);
        call.sinks = Some(&[0.0; 4]);
        let with_sink = call.run().unwrap();
        // A key of zeros scores 0, as the sink does.
        let key = join_keys(&k, &[0.0; 12], 4, 7, 1, 3).unwrap();
        let value = join_keys(&v, &[0.0; 8], 4, 7, 1, 2).unwrap();
        let options = AttentionOptions::new().always_visible_keys(1);
        let shape = AttentionShape { keys: 8, ..SHAPE };
        let with_key = Attention::new(shape, &options, &q, &key, &value).run().unwrap();
        assert!(close(&with_sink.output, &with_key.output) && close(&with_sink.lse, &with_key.lse));
    }

    #[test]
    fn empty_axes_are_legal() {
        let options = AttentionOptions::new().causal(Causal::BottomRight);
        for (batch, queries, keys) in [(0, 2, 3), (2, 0, 3), (2, 2, 0)] {
            let shape = AttentionShape {
                batch,
                queries,
                keys,
                ..AttentionShape::new(1, 2, 1, 2)
            };
            let [q, k] = [vec![1.0; batch * queries * 4], vec![f64::NAN; batch * keys * 4]];
            let answer = Attention::new(shape, &options, &q, &k, &k).run().unwrap();
            assert_eq!(answer.output, vec![0.0; batch * queries * 4]);
            assert!(answer.lse.iter().all(|lse| *lse == f64::NEG_INFINITY));
        }
        // Values of size 0 still have a log-sum-exp.
        let shape = AttentionShape {
            value_dim: 0,
            ..AttentionShape::new(1, 1, 2, 1)
        };
        let answer = Attention::new(shape, &options, &[0.0; 2], &[0.0; 2], &[])
            .run()
            .unwrap();
        assert_eq!((answer.output, answer.lse), (vec![], vec![0.0, 2f64.ln()]));
    }

    #[test]
    fn wrong_lengths_are_refused_with_numbers() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new();
        let good = Attention::new(SHAPE, &options, &q, &k, &v);
        assert!(good.run_output().is_ok());
        let mut bad = vec![
            (
                Attention {
                    query: &q[1..],
                    ..good.clone()
                },
                "119",
            ),
            (
                Attention {
                    key: &k[1..],
                    ..good.clone()
                },
                "83",
            ),
            (
                Attention {
                    value: &v[1..],
                    ..good.clone()
                },
                "55",
            ),
            (
                Attention {
                    key_mask: Some(&[true; 13]),
                    ..good.clone()
                },
                "13",
            ),
            (
                Attention {
                    kv_lengths: Some(&[1]),
                    ..good.clone()
                },
                "[2]",
            ),
            (
                Attention {
                    kv_lengths: Some(&[1, 8]),
                    ..good.clone()
                },
                "8",
            ),
            (
                Attention {
                    sinks: Some(&[0.0; 3]),
                    ..good.clone()
                },
                "3",
            ),
            (
                Attention {
                    mask: Some(Mask::keep(&[true; 6], &[6])),
                    ..good.clone()
                },
                "[6]",
            ),
            (
                Attention {
                    mask: Some(Mask::keep(&[true; 6], &[7])),
                    ..good.clone()
                },
                "[7]",
            ),
        ];
        let many = AttentionOptions::new().always_visible_keys(8);
        bad.push((
            Attention {
                options: &many,
                ..good.clone()
            },
            "8 always",
        ));
        for (call, part) in bad {
            let text = call.run().unwrap_err().to_string();
            assert!(text.contains(part), "{text} should tell {part}");
        }
    }

    #[test]
    fn f32_stays_close_to_f64() {
        let [q, k, v] = inputs();
        let options = AttentionOptions::new();
        let exact = Attention::new(SHAPE, &options, &q, &k, &v).run().unwrap();
        let [q, k, v] = [&q, &k, &v].map(|x| x.iter().map(|x| *x as f32).collect::<Vec<f32>>());
        let single = Attention::new(SHAPE, &options, &q, &k, &v).run().unwrap();
        assert!(
            exact
                .output
                .iter()
                .zip(&single.output)
                .all(|(a, b)| (a - f64::from(*b)).abs() < 1e-6)
        );
    }
}
