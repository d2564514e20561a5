//! The options of the attention rule, one vocabulary for the operator, the layer and the reference.

use crate::{AttentionShape, Error, Result};

/// Where a query stands among the keys when their numbers differ, and whether later keys are hidden.
///
/// With 2 queries and 5 keys (`x` = attend):
///
/// ```text
///  TopLeft        BottomRight
///  x . . . .      x x x x .
///  x x . . .      x x x x x
/// ```
///
/// ```
/// use multihead::{AttentionOptions, AttentionShape, Causal, reference::Attention};
///
/// let shape = AttentionShape { queries: 2, ..AttentionShape::new(1, 1, 5, 1) };
/// for (causal, seen) in [(Causal::None, [5, 5]), (Causal::TopLeft, [1, 2]), (Causal::BottomRight, [4, 5])] {
///     let options = AttentionOptions::new().causal(causal);
///     let answer = Attention::new(shape, &options, &[1.0f64; 2], &[1.0; 5], &[1.0; 5]).run()?;
///     let count = |row: &[f64]| row.iter().filter(|&&weight| weight > 0.0).count();
///     assert_eq!(answer.weights.chunks(5).map(count).collect::<Vec<_>>(), seen);
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Causal {
    /// No causal order.
    #[default]
    None,
    /// Query `i` sees keys `j <= i` (PyTorch's `is_causal`, ONNX).
    TopLeft,
    /// The last query sees all keys (FlashAttention 2.1 and later, decoding against a cache).
    BottomRight,
}

/// Where query 0 stands, before [`AttentionOptions::query_offset`] is added.
///
/// ```
/// use multihead::{Align, AttentionOptions, AttentionShape, reference::Attention};
///
/// let shape = AttentionShape { queries: 1, ..AttentionShape::new(1, 1, 3, 1) };
/// for (align, expected) in [(Align::TopLeft, [1.0, 0.0, 0.0]), (Align::BottomRight, [0.0, 0.0, 1.0])] {
///     let options = AttentionOptions::new().align(align).window(Some(0), Some(0)); // its own position alone
///     let answer = Attention::new(shape, &options, &[1.0f64], &[1.0; 3], &[1.0; 3]).run()?;
///     assert_eq!(answer.weights, expected);
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Align {
    /// Query `i` stands at key position `i`.
    #[default]
    TopLeft,
    /// Query `i` stands at `i + len - queries`: the last query stands at the last key. `len` is the
    /// sequence's key length.
    BottomRight,
}

/// Options of the rule `softmax(mask(softcap(scale q.k) - alibi + bias)) v`.
///
/// In this order: `s = scale * q.k`; `s = softcap * tanh(s / softcap)`;
/// `s -= alibi_slopes[h] * |p - j|`; `s += float mask`; softmax over the visible keys. Query `i`
/// stands at `p = i + query_offset`, plus `len - queries` under a bottom-right alignment.
///
/// ```
/// use multihead::{AttentionOptions, Causal};
///
/// let options = AttentionOptions::new().causal(Causal::BottomRight).window(Some(255), Some(0));
/// assert_eq!(options.validate(8), Ok(()));
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Factor of the dot products; `None` means `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Soft cap of the scores (Gemma 2); `None` means none.
    pub softcap: Option<f32>,
    /// One slope per query head (ALiBi); `None` means none.
    pub alibi_slopes: Option<Vec<f32>>,
    /// Causal order.
    pub causal: Causal,
    /// Alignment of the positions; [`Causal::BottomRight`] implies [`Align::BottomRight`].
    pub align: Align,
    /// Keys before the query's position that it may see, itself not counted; `None` = unbounded.
    pub window_left: Option<u32>,
    /// Keys after the query's position that it may see, itself not counted; `None` = unbounded.
    pub window_right: Option<u32>,
    /// Added to every query's position.
    pub query_offset: i64,
    /// The last keys that nothing hides: no mask, padding, length, window or causal order, and ALiBi
    /// does not move them (registers, `bias_k`, `add_zero_attn`). They count in `keys` and in no mask.
    pub always_visible_keys: usize,
}

impl AttentionOptions {
    /// All keys visible, `scale = 1 / sqrt(head_dim)`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor of the dot products.
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps scores softly: `s = cap * tanh(s / cap)`.
    ///
    /// ```
    /// use multihead::{AttentionOptions, AttentionShape, reference};
    ///
    /// let options = AttentionOptions::new().scale(1.0).softcap(2.0);
    /// let call = reference::Attention::new(AttentionShape::new(1, 1, 1, 1), &options, &[3.0f64], &[1.0], &[0.0]);
    /// assert_eq!(reference::scores(&call)?, [2.0 * 1.5f64.tanh()]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    /// Lowers each score by `slopes[h] * |p - j|`.
    ///
    /// ```
    /// use multihead::{AttentionOptions, AttentionShape, reference};
    ///
    /// let options = AttentionOptions::new().alibi([0.5]); // one head
    /// let shape = AttentionShape::new(1, 1, 2, 1);
    /// let scores = reference::scores(&reference::Attention::new(shape, &options, &[0.0f64; 2], &[0.0; 2], &[0.0; 2]))?;
    /// assert_eq!(scores, [0.0, -0.5, -0.5, 0.0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn alibi(mut self, slopes: impl Into<Vec<f32>>) -> Self {
        self.alibi_slopes = Some(slopes.into());
        self
    }

    /// Hides later keys.
    pub fn causal(mut self, causal: Causal) -> Self {
        self.causal = causal;
        self
    }

    /// Sets where query 0 stands without hiding anything.
    pub fn align(mut self, align: Align) -> Self {
        self.align = align;
        self
    }

    /// Keeps keys `p - left <= j <= p + right`; `None` = unbounded.
    pub fn window(mut self, left: Option<u32>, right: Option<u32>) -> Self {
        self.window_left = left;
        self.window_right = right;
        self
    }

    /// Moves every query by `offset` positions (a cache of that many past keys).
    pub fn query_offset(mut self, offset: i64) -> Self {
        self.query_offset = offset;
        self
    }

    /// The last `count` keys are hidden by nothing.
    pub fn always_visible_keys(mut self, count: usize) -> Self {
        self.always_visible_keys = count;
        self
    }

    /// Checks the values against each other and the number of query heads.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for a softcap that is not positive, slopes whose number is not `heads`, a scale
    /// or slope that is not finite, or an offset beyond ±2^29.
    pub fn validate(&self, heads: usize) -> Result<()> {
        let refuse = |text: String| Err(Error::Option(text));
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            return refuse(format!("scale = {scale}: must be finite"));
        }
        if let Some(cap) = self.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return refuse(format!(
                "softcap = {cap}: must be finite and above 0; leave it out for no cap"
            ));
        }
        if let Some(slopes) = &self.alibi_slopes {
            if slopes.len() != heads {
                return refuse(format!(
                    "{} ALiBi slopes for {heads} query heads: give one per head",
                    slopes.len()
                ));
            }
            if let Some(slope) = slopes.iter().find(|slope| !slope.is_finite()) {
                return refuse(format!("ALiBi slope {slope}: must be finite"));
            }
        }
        if self.query_offset.unsigned_abs() > crate::shape::MAX_AXIS as u64 {
            return refuse(format!(
                "query_offset = {}: must lie within ±{}",
                self.query_offset,
                crate::shape::MAX_AXIS
            ));
        }
        Ok(())
    }

    /// Checks them for a call of this shape.
    pub(crate) fn validate_for(&self, shape: &AttentionShape) -> Result<()> {
        self.validate(shape.heads)?;
        if self.always_visible_keys > shape.keys {
            return Err(Error::Option(format!(
                "always_visible_keys = {} of {} keys: at most all of them",
                self.always_visible_keys, shape.keys
            )));
        }
        Ok(())
    }

    /// The factor of the dot products for heads of `head_dim`, rounded once from f64.
    ///
    /// ```
    /// use multihead::AttentionOptions;
    ///
    /// assert_eq!(AttentionOptions::new().scale_for(64), 0.125);
    /// assert_eq!(AttentionOptions::new().scale(1.0).scale_for(64), 1.0);
    /// ```
    pub fn scale_for(&self, head_dim: usize) -> f32 {
        self.scale
            .unwrap_or_else(|| (1.0 / (head_dim.max(1) as f64).sqrt()) as f32)
    }
}
