//! What a layer call reads and writes, and its sizes.

use super::cross::CrossCache;
use crate::{
    Causal, Error, Gpu, KvLengths, Mask, MultiHeadAttentionConfig, Result, Tensor, inputs::check_device,
    linear::check_float,
};

/// What a layer call reads. Self-attention unless a key or a cross cache is given.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// # let layer = multihead::MultiHeadAttention::seeded(&gpu, multihead::MultiHeadAttentionConfig::new(64, 4), 1)?;
/// # let x = multihead::Tensor::zeros(&gpu, multihead::DType::F32, &[2, 3, 64])?;
/// use multihead::{Causal, Mask, MultiHeadInputs, NeedWeights};
///
/// let padding = Mask::ignore_from(&gpu, &[false, false, false, false, true, true], &[2, 3])?;
/// let inputs = MultiHeadInputs::new(&x).key_padding_mask(&padding).causal(Causal::TopLeft);
/// let result = layer.forward(&inputs, NeedWeights::Averaged)?;
/// assert_eq!(result.weights.unwrap().shape(), [2, 3, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct MultiHeadInputs<'a> {
    /// `[B, Lq, E]` or `[Lq, E]`.
    pub query: &'a Tensor,
    /// `[B, Lk, kdim]` or `[Lk, kdim]`; the query if absent.
    pub key: Option<&'a Tensor>,
    /// `[B, Lk, vdim]` or `[Lk, vdim]`; the key if absent.
    pub value: Option<&'a Tensor>,
    /// Keys and values that were projected before, in place of `key` and `value`.
    pub cross_cache: Option<&'a CrossCache>,
    /// Broadcasts to `[B, H, Lq, Lk]`.
    pub attn_mask: Option<&'a Mask>,
    /// Boolean, `[B, Lk]`, or `[Lk]` without a batch.
    pub key_padding_mask: Option<&'a Mask>,
    /// One key length per batch entry.
    pub kv_lengths: Option<&'a KvLengths>,
    /// Causal order of this call; the configuration's if absent.
    pub causal: Option<Causal>,
}

impl<'a> MultiHeadInputs<'a> {
    /// Self-attention over `query`.
    pub fn new(query: &'a Tensor) -> Self {
        Self {
            query,
            key: None,
            value: None,
            cross_cache: None,
            attn_mask: None,
            key_padding_mask: None,
            kv_lengths: None,
            causal: None,
        }
    }

    /// Attends to `key` and `value` instead (cross attention).
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2).kdim(6).vdim(4), 1)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 3, 8])?;
    /// let key = Tensor::zeros(&gpu, DType::F32, &[1, 5, 6])?;
    /// let value = Tensor::zeros(&gpu, DType::F32, &[1, 5, 4])?;
    /// let inputs = MultiHeadInputs::new(&x).key_value(&key, &value);
    /// let result = layer.forward(&inputs, NeedWeights::Averaged)?;
    /// assert_eq!(result.weights.unwrap().shape(), [1, 3, 5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn key_value(mut self, key: &'a Tensor, value: &'a Tensor) -> Self {
        self.key = Some(key);
        self.value = Some(value);
        self
    }

    /// Attends to keys and values that [`MultiHeadAttention::cross_cache`](crate::MultiHeadAttention::cross_cache)
    /// projected once.
    pub fn cross_cache(mut self, cache: &'a CrossCache) -> Self {
        self.cross_cache = Some(cache);
        self
    }

    /// Adds a mask of scores.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Mask, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 8])?;
    /// let mask = Mask::ignore_from(&gpu, &[false, true, false, false], &[2, 2])?; // [Lq, Lk], for all heads
    /// let result = layer.forward(&MultiHeadInputs::new(&x).attn_mask(&mask), NeedWeights::Averaged)?;
    /// assert_eq!(result.weights.unwrap().download::<f32>()?, [1.0, 0.0, 0.5, 0.5]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn attn_mask(mut self, mask: &'a Mask) -> Self {
        self.attn_mask = Some(mask);
        self
    }

    /// Adds a boolean mask of keys.
    pub fn key_padding_mask(mut self, mask: &'a Mask) -> Self {
        self.key_padding_mask = Some(mask);
        self
    }

    /// Adds key lengths.
    pub fn kv_lengths(mut self, lengths: &'a KvLengths) -> Self {
        self.kv_lengths = Some(lengths);
        self
    }

    /// Sets the causal order of this call.
    pub fn causal(mut self, causal: Causal) -> Self {
        self.causal = Some(causal);
        self
    }

    pub(super) fn key(&self) -> &'a Tensor {
        self.key.unwrap_or(self.query)
    }

    pub(super) fn value(&self) -> &'a Tensor {
        self.value.unwrap_or(self.key())
    }

    /// The padding mask as attention takes it, `[B, Lk]`.
    pub(super) fn padding(&self, sizes: Sizes) -> Result<Option<Mask>> {
        let Some(mask) = self.key_padding_mask else {
            return Ok(None);
        };
        let mask = if !sizes.batched && mask.tensor().shape() == [sizes.keys] {
            mask.with_tensor(mask.tensor().broadcast_to(&[1, sizes.keys])?)
        } else {
            mask.clone()
        };
        mask.check_keys("key_padding_mask", "attn_mask", sizes.batch, sizes.keys)?;
        Ok(Some(mask))
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("query", Some(self.query)),
            ("key", self.key),
            ("value", self.value),
            ("cross cache", self.cross_cache.map(CrossCache::keys)),
            ("cross cache", self.cross_cache.map(CrossCache::values)),
            ("attn_mask", self.attn_mask.map(Mask::tensor)),
            ("key_padding_mask", self.key_padding_mask.map(Mask::tensor)),
            ("kv_lengths", self.kv_lengths.map(KvLengths::tensor)),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }
}

/// Which weights a layer call returns.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor};
///
/// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[1, 3, 8])?;
/// let inputs = MultiHeadInputs::new(&x);
/// assert!(layer.forward(&inputs, NeedWeights::No)?.weights.is_none());
/// assert_eq!(layer.forward(&inputs, NeedWeights::Averaged)?.weights.unwrap().shape(), [1, 3, 3]);
/// assert_eq!(layer.forward(&inputs, NeedWeights::PerHead)?.weights.unwrap().shape(), [1, 2, 3, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NeedWeights {
    /// None.
    #[default]
    No,
    /// Their mean over the heads, `[B, Lq, Lk]` (PyTorch's default).
    Averaged,
    /// Those of each head, `[B, H, Lq, Lk]`.
    PerHead,
}

/// Where a layer call writes. Each needs a buffer of its own, which no input shares.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, Tensor};
///
/// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[1, 4, 8])?;
/// let y = Tensor::zeros(&gpu, DType::F16, &[1, 4, 8])?;
/// let weights = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4, 4])?;
/// let mean = Tensor::zeros(&gpu, DType::F32, &[1, 4, 4])?;
/// let outputs = MultiHeadOutputs::new(&y).weights(&weights).mean_weights(&mean);
///
/// let mut encoder = gpu.encoder(); // or your own
/// layer.record(&mut encoder, &MultiHeadInputs::new(&x), &outputs)?;
/// gpu.submit(encoder)?;
/// assert_eq!(mean.download::<f32>()?, [0.25; 4 * 4]); // equal rows
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct MultiHeadOutputs<'a> {
    /// `[B, Lq, E]`, or `[Lq, E]` as the query; any strides, F32 or F16.
    pub output: &'a Tensor,
    /// Weights of each head, `[B, H, Lq, Lk + extra keys]`, contiguous F32.
    pub weights: Option<&'a Tensor>,
    /// Their mean over the heads, `[B, Lq, Lk + extra keys]`, contiguous F32.
    pub mean_weights: Option<&'a Tensor>,
}

impl<'a> MultiHeadOutputs<'a> {
    /// The output alone.
    pub fn new(output: &'a Tensor) -> Self {
        Self {
            output,
            weights: None,
            mean_weights: None,
        }
    }

    /// Asks for the weights of each head.
    pub fn weights(mut self, weights: &'a Tensor) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Asks for the mean of the weights over the heads.
    pub fn mean_weights(mut self, weights: &'a Tensor) -> Self {
        self.mean_weights = Some(weights);
        self
    }

    pub(super) fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("output", Some(self.output)),
            ("weights", self.weights),
            ("mean_weights", self.mean_weights),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }
}

/// What [`MultiHeadAttention::forward`](crate::MultiHeadAttention::forward) computed.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor};
///
/// let config = MultiHeadAttentionConfig::new(8, 2).add_zero_attn(true);
/// let layer = MultiHeadAttention::seeded(&gpu, config, 1)?;
/// let x = Tensor::zeros(&gpu, DType::F16, &[3, 8])?; // [L, E]
/// let result = layer.forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)?;
/// assert_eq!((result.output.shape(), result.output.dtype()), (&[3, 8][..], DType::F16));
/// assert_eq!(result.weights.unwrap().shape(), [2, 3, 3 + 1]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MultiHeadResult {
    /// `[B, Lq, E]`, or `[Lq, E]` for a query without a batch.
    pub output: Tensor,
    /// As [`NeedWeights`] asked: `[B, H, Lq, Lk]` or `[B, Lq, Lk]`; without a batch `[H, Lq, Lk]` or `[Lq, Lk]`.
    /// `bias_k` and the key of zeros have columns of their own, last.
    pub weights: Option<Tensor>,
}

/// Sizes of one call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batched: bool,
    pub(super) batch: usize,
    pub(super) queries: usize,
    /// Keys of the sequence.
    pub(super) keys: usize,
    /// With those that follow it.
    pub(super) all_keys: usize,
}

impl Sizes {
    /// Checks the inputs against the configuration and each other.
    pub(super) fn new(
        gpu: &Gpu,
        config: &MultiHeadAttentionConfig,
        inputs: &MultiHeadInputs,
    ) -> Result<Self> {
        for (name, tensor) in inputs.tensors() {
            check_device(gpu, name, tensor)?;
        }
        let rank = inputs.query.shape().len();
        let (batch, queries) = match *inputs.query.shape() {
            [batch, queries, width] if width == config.embed_dim => (batch, queries),
            [queries, width] if width == config.embed_dim => (1, queries),
            ref other => {
                return Err(Error::Shape(format!(
                    "query has shape {other:?}: expected [B, L, {0}] or [L, {0}]",
                    config.embed_dim
                )));
            }
        };
        check_float("query", inputs.query)?;
        let keys = match inputs.cross_cache {
            None => Self::keys_of(config, inputs)?,
            Some(cache) => {
                if inputs.key.is_some() || inputs.value.is_some() {
                    return Err(Error::Option(
                        "a cross cache together with a key or value: the cache holds both already, give one or the other"
                            .to_owned(),
                    ));
                }
                if cache.keys().shape()[0] != batch {
                    return Err(Error::Shape(format!(
                        "query has shape {:?}, the cross cache holds a batch of {}: use as many sequences",
                        inputs.query.shape(),
                        cache.keys().shape()[0]
                    )));
                }
                cache.len()
            }
        };
        Ok(Self {
            batched: rank == 3,
            batch,
            queries,
            keys,
            all_keys: keys + config.extra_keys(),
        })
    }

    /// Checks the key and the value, and gives the number of keys.
    fn keys_of(config: &MultiHeadAttentionConfig, inputs: &MultiHeadInputs) -> Result<usize> {
        let keys = inputs.key().shape().iter().rev().nth(1).copied().unwrap_or(0);
        let outer = inputs.query.shape().len() - 2;
        let expected = |width: usize| [&inputs.query.shape()[..outer], &[keys, width]].concat();
        for (name, tensor, width, size_name) in [
            ("key", inputs.key(), config.kdim, "kdim"),
            ("value", inputs.value(), config.vdim, "vdim"),
        ] {
            if tensor.shape() != expected(width) {
                return Err(Error::Shape(format!(
                    "{name} has shape {:?}, expected {:?}: query {:?}, {size_name} {width}",
                    tensor.shape(),
                    expected(width),
                    inputs.query.shape()
                )));
            }
            check_float(name, tensor)?;
        }
        Ok(keys)
    }
}
