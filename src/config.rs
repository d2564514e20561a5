//! What a multi-head attention layer is made of.

use crate::{AttentionOptions, DType, Error, Result};

/// Sizes and options of a [`MultiHeadAttention`](crate::MultiHeadAttention), in PyTorch's vocabulary.
///
/// ```
/// use multihead::{AttentionOptions, DType, MultiHeadAttentionConfig};
///
/// let config = MultiHeadAttentionConfig::new(512, 8).kdim(256).bias(false);
/// assert_eq!(config.head_dim(), 64);
/// assert_eq!(config.validate(), Ok(()));
///
/// // Grouped heads of a size of their own, as Llama and its kin have them.
/// let config = MultiHeadAttentionConfig::new(5120, 32).num_kv_heads(8).with_head_dim(128).bias(false);
/// assert_eq!((config.q_size(), config.kv_size()), (32 * 128, 8 * 128));
/// assert_eq!(config.validate(), Ok(()));
///
/// // Qwen2 has biases for queries, keys and values alone.
/// let config = MultiHeadAttentionConfig::new(896, 14).num_kv_heads(2).out_bias(false);
/// assert!(config.bias && !config.out_bias);
///
/// // A learned key and a key of zeros behind each sequence, parameters in f16, scores capped.
/// let options = AttentionOptions::new().softcap(50.0);
/// let config = MultiHeadAttentionConfig::new(64, 4)
///     .vdim(32)
///     .add_bias_kv(true)
///     .add_zero_attn(true)
///     .dtype(DType::F16)
///     .attention(options);
/// assert_eq!(config.extra_keys(), 2);
/// assert_eq!(config.validate(), Ok(()));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MultiHeadAttentionConfig {
    /// Size of a query vector and of an output vector, E.
    pub embed_dim: usize,
    /// Query heads, H; `embed_dim % num_heads == 0` unless `head_dim` is set.
    pub num_heads: usize,
    /// Key and value heads, Hkv; `num_heads` unless set, and a divisor of it. Query head `h` reads key head
    /// `h / (num_heads / num_kv_heads)`.
    pub num_kv_heads: usize,
    /// Size of one head, D; `embed_dim / num_heads` if absent.
    pub head_dim: Option<usize>,
    /// Size of a key vector; `embed_dim` unless set.
    pub kdim: usize,
    /// Size of a value vector; `embed_dim` unless set.
    pub vdim: usize,
    /// Whether the projections of queries, keys and values have a bias.
    pub bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Whether one learned key and value (`bias_k`, `bias_v`) follow the sequence.
    pub add_bias_kv: bool,
    /// Whether one key and value of zeros follow the sequence.
    pub add_zero_attn: bool,
    /// Element type of the parameters on the GPU. Activations may be [`DType::F32`] or [`DType::F16`] in
    /// either case; every sum is f32.
    pub dtype: DType,
    /// Scale, soft cap, window, ALiBi, offset; causal order unless a call sets its own.
    /// `always_visible_keys` must be 0: the layer sets it for `bias_k` and `add_zero_attn`.
    pub attention: AttentionOptions,
}

impl MultiHeadAttentionConfig {
    /// Self-attention over `embed_dim`, with biases, parameters in f32.
    pub fn new(embed_dim: usize, num_heads: usize) -> Self {
        Self {
            embed_dim,
            num_heads,
            num_kv_heads: num_heads,
            head_dim: None,
            kdim: embed_dim,
            vdim: embed_dim,
            bias: true,
            out_bias: true,
            add_bias_kv: false,
            add_zero_attn: false,
            dtype: DType::F32,
            attention: AttentionOptions::new(),
        }
    }

    /// Sets the number of key and value heads (grouped heads; 1: multi-query attention).
    pub fn num_kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = num_kv_heads;
        self
    }

    /// Sets the size of one head where it is not `embed_dim / num_heads`.
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    /// Sets the size of a key vector (cross attention).
    pub fn kdim(mut self, kdim: usize) -> Self {
        self.kdim = kdim;
        self
    }

    /// Sets the size of a value vector (cross attention).
    pub fn vdim(mut self, vdim: usize) -> Self {
        self.vdim = vdim;
        self
    }

    /// Whether the four projections have biases; [`out_bias`](Self::out_bias) behind it sets that of the
    /// output apart.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self.out_bias = bias;
        self
    }

    /// Whether the output projection has a bias.
    pub fn out_bias(mut self, bias: bool) -> Self {
        self.out_bias = bias;
        self
    }

    /// Whether a learned key and value follow the sequence.
    pub fn add_bias_kv(mut self, add: bool) -> Self {
        self.add_bias_kv = add;
        self
    }

    /// Whether a key and value of zeros follow the sequence.
    pub fn add_zero_attn(mut self, add: bool) -> Self {
        self.add_zero_attn = add;
        self
    }

    /// Sets the element type of the parameters on the GPU.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets scale, soft cap, window, ALiBi, offset and default causal order.
    pub fn attention(mut self, options: AttentionOptions) -> Self {
        self.attention = options;
        self
    }

    /// Size of one head, D: the one that was set, else `embed_dim / num_heads`.
    pub fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or_else(|| self.embed_dim.checked_div(self.num_heads).unwrap_or(0))
    }

    /// Rows of the query projection, `num_heads * head_dim`: `embed_dim` unless `head_dim` is set.
    pub fn q_size(&self) -> usize {
        self.num_heads.saturating_mul(self.head_dim())
    }

    /// Rows of the key projection and of the value projection, `num_kv_heads * head_dim`.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.head_dim())
    }

    /// Keys that follow the sequence: `bias_k` and the key of zeros.
    pub fn extra_keys(&self) -> usize {
        usize::from(self.add_bias_kv) + usize::from(self.add_zero_attn)
    }

    /// Checks the sizes and options.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] with the numbers.
    pub fn validate(&self) -> Result<()> {
        let Self {
            embed_dim,
            num_heads,
            num_kv_heads,
            ..
        } = *self;
        let divides = |divisor: usize, of: usize| of.checked_rem(divisor) == Some(0);
        if embed_dim == 0 || num_heads == 0 || self.head_dim.is_none() && !divides(num_heads, embed_dim) {
            return Err(Error::Option(format!(
                "embed_dim = {embed_dim}, num_heads = {num_heads}: both must be above 0 and embed_dim a multiple of num_heads; heads of another size take .with_head_dim(size)"
            )));
        }
        if !divides(num_kv_heads, num_heads) {
            return Err(Error::Option(format!(
                "num_kv_heads = {num_kv_heads}, num_heads = {num_heads}: num_heads must be a multiple of num_kv_heads, and that above 0"
            )));
        }
        for (what, size) in [
            ("embed_dim", embed_dim),
            ("kdim", self.kdim),
            ("vdim", self.vdim),
            ("head_dim", self.head_dim()),
            ("num_heads * head_dim", self.q_size()),
        ] {
            if size == 0 || size > crate::shape::MAX_AXIS {
                return Err(Error::Option(format!(
                    "{what} = {size}: must be between 1 and {}",
                    crate::shape::MAX_AXIS
                )));
            }
        }
        if !matches!(self.dtype, DType::F32 | DType::F16) {
            return Err(Error::Option(format!(
                "dtype = {:?}: parameters are stored as F32 or F16",
                self.dtype
            )));
        }
        if self.attention.always_visible_keys != 0 {
            return Err(Error::Option(format!(
                "always_visible_keys = {}: the layer sets it itself; use add_bias_kv or add_zero_attn",
                self.attention.always_visible_keys
            )));
        }
        self.attention.validate(num_heads)
    }
}
