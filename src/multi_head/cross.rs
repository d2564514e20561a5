//! Keys and values of a sequence that does not change, projected once: cross-attention of a decoder.

use super::{MultiHeadAttention, inputs::Sizes, projection::Targets};
use crate::{
    DType, Error, MultiHeadInputs, Result, Tensor,
    inputs::check_device,
    kernel::{Batch, Storage},
    linear::check_float,
};

/// A layer's projected keys and values of a sequence that many calls attend to, such as an encoder's output
/// ([`MultiHeadAttention::cross_cache`]). `bias_k`, `bias_v` and the key of zeros are among them.
///
/// Cloning it copies no data. It belongs to the layer that made it, and to its clones.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
///
/// let config = MultiHeadAttentionConfig::new(8, 2).add_bias_kv(true);
/// let layer = MultiHeadAttention::seeded(&gpu, config, 1)?;
/// let encoded = Tensor::zeros(&gpu, DType::F32, &[1, 5, 8])?;
/// let cache = layer.cross_cache(&encoded, &encoded, DType::F16)?;
/// assert_eq!((cache.len(), cache.is_empty()), (5, false));
/// assert_eq!(cache.keys().shape(), [1, 2, 5 + 1, 4]); // `bias_k` is the last
/// assert_eq!(cache.values().dtype(), DType::F16);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CrossCache {
    /// `[B, Hkv, Lk + extra keys, D]`.
    keys: Tensor,
    values: Tensor,
    /// Keys of the sequence.
    len: usize,
    /// The weight that projected the keys, which tells the layer.
    weight: Tensor,
}

impl CrossCache {
    /// Projected keys, `[B, Hkv, Lk + extra keys, D]`.
    pub fn keys(&self) -> &Tensor {
        &self.keys
    }

    /// Projected values, `[B, Hkv, Lk + extra keys, D]`.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// Keys of the sequence, Lk; masks and lengths of a call count these.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the sequence has no key.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl MultiHeadAttention {
    /// Projects keys and values once, for all calls that attend to them ([`MultiHeadInputs::cross_cache`]): `key` is
    /// `[B, Lk, kdim]` and `value` `[B, Lk, vdim]`, an encoder's output twice; `dtype`, F32 or F16, is what they are held in.
    /// A call then projects its queries alone. Masks, lengths, causal order and weights are those of
    /// [`MultiHeadAttention::forward`]. Submits, does not wait.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{
    ///     DType, Gpu, KvLengths, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor,
    /// };
    ///
    /// let gpu = Gpu::new()?;
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4).kdim(96).vdim(96), 1)?;
    /// let encoded = Tensor::zeros(&gpu, DType::F32, &[2, 20, 96])?; // two sentences, padded to 20 words
    /// let lengths = KvLengths::new(&gpu, &[20, 13])?;
    /// let memory = layer.cross_cache(&encoded, &encoded, DType::F16)?;
    /// for _ in 0..3 {
    ///     let x = Tensor::zeros(&gpu, DType::F32, &[2, 1, 64])?;
    ///     let inputs = MultiHeadInputs::new(&x).cross_cache(&memory).kv_lengths(&lengths);
    ///     let result = layer.forward(&inputs, NeedWeights::No)?;
    ///     assert_eq!(result.output.shape(), [2, 1, 64]);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for a layer with rotary embedding, which attends to its own rows alone; sizes, types and devices
    /// that do not fit, or more than the device allows.
    pub fn cross_cache(&self, key: &Tensor, value: &Tensor, dtype: DType) -> Result<CrossCache> {
        let mut encoder = self.gpu.encoder();
        let cache = self.record_cross_cache(&mut encoder, key, value, dtype)?;
        self.gpu.submit(encoder)?;
        Ok(cache)
    }

    /// [`MultiHeadAttention::cross_cache`] in your encoder: allocates the cache and records what fills it. What is recorded
    /// after it, also in the same encoder, may attend to it.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let encoded = Tensor::zeros(&gpu, DType::F32, &[1, 4, 8])?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 1, 8])?;
    /// let y = Tensor::zeros(&gpu, DType::F32, &[1, 1, 8])?;
    /// let weights = Tensor::zeros(&gpu, DType::F32, &[1, 2, 1, 4])?;
    ///
    /// let mut encoder = gpu.encoder(); // or your own
    /// let memory = layer.record_cross_cache(&mut encoder, &encoded, &encoded, DType::F32)?;
    /// let inputs = MultiHeadInputs::new(&x).cross_cache(&memory);
    /// layer.record(&mut encoder, &inputs, &MultiHeadOutputs::new(&y).weights(&weights))?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(weights.download::<f32>()?, [0.25; 2 * 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::cross_cache`]; then nothing has been recorded.
    pub fn record_cross_cache(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        key: &Tensor,
        value: &Tensor,
        dtype: DType,
    ) -> Result<CrossCache> {
        let (gpu, config) = (&self.gpu, &self.config);
        if self.rotary.is_some() {
            return Err(Error::Option(
                "a cross cache of a layer with rotary embedding: it attends to its own rows alone, whose positions it knows"
                    .to_owned(),
            ));
        }
        let &[batch, len, _] = key.shape() else {
            return Err(Error::Shape(format!(
                "key has shape {:?}: expected [B, L, {}]",
                key.shape(),
                config.kdim
            )));
        };
        for (name, tensor, width) in [("key", key, config.kdim), ("value", value, config.vdim)] {
            check_device(gpu, name, tensor)?;
            if tensor.shape() != [batch, len, width] {
                return Err(Error::Shape(format!(
                    "{name} has shape {:?}, expected {:?}",
                    tensor.shape(),
                    [batch, len, width]
                )));
            }
            check_float(name, tensor)?;
        }
        Storage::of(gpu, dtype)?;
        let all = len.saturating_add(config.extra_keys());
        let targets = Targets::keys_and_values(gpu, config, dtype, batch, all)?;
        let mut calls = Batch::new(gpu);
        self.projection
            .project(&mut calls, 1..3, [key, key, value], &targets)?;
        let [_, keys, values] = targets.tensors;
        self.push_extra_keys(&mut calls, [&keys, &values], len)?;
        calls.record(encoder)?;
        Ok(CrossCache {
            keys,
            values,
            len,
            weight: self.projection.get(1, 1)?.0,
        })
    }

    /// Projects the queries of a call on a cross cache into scratch, `[B, H, Lq, D]`.
    pub(super) fn project_queries(
        &self,
        batch: &mut Batch,
        inputs: &MultiHeadInputs,
        cache: &CrossCache,
        sizes: Sizes,
    ) -> Result<Tensor> {
        if cache.weight != self.projection.get(1, 1)?.0 || self.rotary.is_some() {
            return Err(Error::Option(
                "a cross cache of another layer: each layer projects its own keys and values, use \
                 MultiHeadAttention::cross_cache of this one"
                    .to_owned(),
            ));
        }
        let targets = Targets::scratch(batch, &self.config, sizes.batch, [sizes.queries, 0])?;
        self.projection
            .project(batch, 0..1, [inputs.query; 3], &targets)?;
        let [query, ..] = targets.tensors;
        Ok(query)
    }
}
