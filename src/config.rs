//! What a multi-head attention layer is made of.

use crate::{AttentionOptions, DType, Error, Result};

/// Sizes and options of a [`MultiHeadAttention`](crate::MultiHeadAttention), in PyTorch's vocabulary.
///
/// ```
/// use multihead::MultiHeadAttentionConfig;
///
/// let config = MultiHeadAttentionConfig::new(512, 8).kdim(256).bias(false);
/// assert_eq!(config.head_dim(), 64);
/// assert_eq!(config.validate(), Ok(()));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MultiHeadAttentionConfig {
    /// Size of a query vector and of an output vector, E.
    pub embed_dim: usize,
    /// Heads, H; `embed_dim % num_heads == 0`.
    pub num_heads: usize,
    /// Size of a key vector; `embed_dim` unless set.
    pub kdim: usize,
    /// Size of a value vector; `embed_dim` unless set.
    pub vdim: usize,
    /// Whether the four projections have a bias.
    pub bias: bool,
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
            kdim: embed_dim,
            vdim: embed_dim,
            bias: true,
            add_bias_kv: false,
            add_zero_attn: false,
            dtype: DType::F32,
            attention: AttentionOptions::new(),
        }
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

    /// Whether the projections have biases.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
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

    /// Size of one head, `embed_dim / num_heads`.
    pub fn head_dim(&self) -> usize {
        self.embed_dim.checked_div(self.num_heads).unwrap_or(0)
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
            embed_dim, num_heads, ..
        } = *self;
        if embed_dim == 0 || num_heads == 0 || embed_dim % num_heads != 0 {
            return Err(Error::Option(format!(
                "embed_dim = {embed_dim}, num_heads = {num_heads}: both must be above 0 and embed_dim a multiple of num_heads"
            )));
        }
        for (what, size) in [("embed_dim", embed_dim), ("kdim", self.kdim), ("vdim", self.vdim)] {
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
