//! Decoding: new tokens against the keys and values of those before them.

use super::{MultiHeadAttention, MultiHeadInputs, inputs::Sizes, rotate};
use crate::{
    Attention, AttentionInputs, AttentionOutputs, Causal, DType, Error, KvCache, KvCacheShape, Result,
    Tensor,
    cache::State,
    inputs::{check_device, check_overlaps},
    kernel::{Batch, Storage, warm_up},
    linear::check_float,
};

impl MultiHeadAttention {
    /// An empty cache for [`MultiHeadAttention::step`] of this layer: `batch` sequences of up to `capacity` positions, F32 or
    /// F16, whose keys are turned as the layer turns them.
    ///
    /// # Errors
    ///
    /// As [`KvCache::new`].
    pub fn kv_cache(&self, batch: usize, capacity: usize, dtype: DType) -> Result<KvCache> {
        let cache = KvCache::new(&self.gpu, self.cache_shape(batch, capacity), dtype)?;
        self.with_own_rotary(cache)
    }

    /// [`MultiHeadAttention::kv_cache`] for sequences of any length in the memory of the layer's window: it holds
    /// `window_left + max_chunk` positions and takes at most `max_chunk` in one step ([`KvCache::rolling`]).
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{AttentionOptions, DType, Gpu, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let options = AttentionOptions::new().window(Some(15), Some(0)); // each token sees itself and 15 before it
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4).attention(options), 1)?;
    /// let mut cache = layer.rolling_kv_cache(1, 4, DType::F32)?;
    /// for tokens in [4, 4, 4, 4, 4, 4, 1, 1] {
    ///     layer.step(&Tensor::zeros(&gpu, DType::F32, &[1, tokens, 64])?, &mut cache)?;
    /// }
    /// assert_eq!((cache.len(0), cache.shape().capacity), (26, 19));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`KvCache::rolling`], and [`Error::Option`] for a layer without a window or a chunk of 0.
    pub fn rolling_kv_cache(&self, batch: usize, max_chunk: usize, dtype: DType) -> Result<KvCache> {
        let Some(left) = self.config.attention.window_left else {
            return Err(Error::Option(
                "a rolling cache for a layer without a window: set AttentionOptions::window, or use kv_cache"
                    .to_owned(),
            ));
        };
        if max_chunk == 0 {
            return Err(Error::Option(
                "a rolling cache for steps of 0 tokens: use at least 1".to_owned(),
            ));
        }
        let left = left as usize;
        let shape = self.cache_shape(batch, left.saturating_add(max_chunk));
        let cache = KvCache::rolling(&self.gpu, shape, dtype, left.saturating_add(1))?;
        self.with_own_rotary(cache)
    }

    fn cache_shape(&self, batch: usize, capacity: usize) -> KvCacheShape {
        KvCacheShape::new(batch, self.config.num_kv_heads, capacity, self.config.head_dim())
    }

    fn with_own_rotary(&self, cache: KvCache) -> Result<KvCache> {
        match &self.rotary {
            Some(rotary) => cache.with_rotary(rotary.clone()),
            None => Ok(cache),
        }
    }

    /// [`MultiHeadAttention::warm_up`] for steps of activations of `dtype` against a cache like this one: builds what its
    /// type, window and rotary embedding need, and waits.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let mut cache = layer.kv_cache(1, 64, DType::F16)?;
    /// layer.warm_up_steps(&cache, DType::F32)?;
    /// let built = gpu.pipelines();
    /// layer.step(&Tensor::zeros(&gpu, DType::F32, &[1, 5, 8])?, &mut cache)?;
    /// assert_eq!(gpu.pipelines(), built); // the step built none
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::warm_up`]; [`Error::Option`] for a rolling cache of a layer without a window.
    pub fn warm_up_steps(&self, cache: &KvCache, dtype: DType) -> Result<()> {
        let size = self.config.head_dim();
        let held = Storage::of(&self.gpu, cache.dtype())?;
        let attention = self.attention_of(cache)?;
        let mut variants = self.own_variants(dtype)?;
        variants.extend(cache.variants(DType::F32)?);
        variants.extend(attention.variants([Storage::F32, held, held, Storage::F32], size, size)?);
        warm_up(&self.gpu, &variants)
    }

    /// Attention of new tokens to all before them, and those to come after find them in `cache`: a whole prompt (prefill), a
    /// chunk of one, or a token. `x` is `[B, L, E]` (or `[L, E]` for one sequence); the result has its shape and type.
    /// Submits, does not wait.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, MultiHeadAttention, MultiHeadAttentionConfig, Rotary, RotaryOptions, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let config = MultiHeadAttentionConfig::new(64, 4).num_kv_heads(2).bias(false);
    /// let rotary = Rotary::new(&gpu, RotaryOptions::new(config.head_dim()), 1024)?;
    /// let layer = MultiHeadAttention::seeded(&gpu, config, 1)?.with_rotary(rotary)?;
    /// let mut cache = layer.kv_cache(1, 1024, DType::F16)?;
    /// for tokens in [7, 1, 1] {
    ///     let x = Tensor::zeros(&gpu, DType::F32, &[1, tokens, 64])?;
    ///     let y = layer.step(&x, &mut cache)?;
    ///     assert_eq!(y.shape(), [1, tokens, 64]);
    /// }
    /// assert_eq!(cache.len(0), 9);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Tokens are in causal order, whatever the configuration says; its scale, soft cap, window and ALiBi hold. So a prompt
    /// and steps give what one causal [`forward`](MultiHeadAttention::forward) over the whole sequence gives.
    ///
    /// # Errors
    ///
    /// [`Error::Capacity`] if the cache has no room for the tokens, or the rotary tables do not reach so far;
    /// [`Error::Option`] for a layer with `bias_k`, a key of zeros or a `query_offset`, and for a cache whose rotary
    /// embedding or window is not the layer's; sizes, types, devices and overlaps that do not fit, or more than the device
    /// allows. Then the cache is as it was.
    #[doc(alias = "decode")]
    pub fn step(&self, x: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.run_step(x, None, cache)
    }

    /// Computes a prompt `[B, L, E]`, the first chunk of a sequence: [`step`](MultiHeadAttention::step) under the name that
    /// decoders have for it. All positions come out; what is said next follows from the last.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let mut cache = layer.kv_cache(1, 64, DType::F32)?;
    /// let y = layer.prefill(&Tensor::zeros(&gpu, DType::F32, &[1, 5, 8])?, &mut cache)?;
    /// let last = y.slice(1, 4..5)?; // what the next token follows from
    /// assert_eq!((cache.len(0), last.shape()), (5, &[1, 1, 8][..]));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::step`].
    pub fn prefill(&self, x: &Tensor, cache: &mut KvCache) -> Result<Tensor> {
        self.step(x, cache)
    }

    /// [`MultiHeadAttention::step`] where sequence `b` has `counts[b]` new tokens, in the last rows of `x`; the rows before
    /// them are padding, reach no cache and no other row, and their results mean nothing. See
    /// [`KvCache::append_ragged`].
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let mut cache = layer.kv_cache(2, 64, DType::F32)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[2, 5, 8])?; // 5 tokens, and 3 behind 2 rows of padding
    /// let y = layer.step_ragged(&x, &[5, 3], &mut cache)?;
    /// assert_eq!(y.shape(), [2, 5, 8]);
    /// assert_eq!(cache.lens(), [5, 3]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::step`], and [`Error::Shape`] for counts that do not fit.
    pub fn step_ragged(&self, x: &Tensor, counts: &[usize], cache: &mut KvCache) -> Result<Tensor> {
        self.run_step(x, Some(counts), cache)
    }

    /// [`MultiHeadAttention::step`] into `output`, of `x`'s shape, F32 or F16, in your encoder: nothing is submitted or
    /// waited for. Steps of several layers, and several steps, may share an encoder; submit encoders in the order in which
    /// they were recorded.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # use multihead::{DType, Gpu, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
    /// # let gpu = Gpu::new()?;
    /// # let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4), 1)?;
    /// let mut cache = layer.kv_cache(2, 128, DType::F32)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[2, 1, 64])?;
    /// let y = Tensor::zeros(&gpu, DType::F32, &[2, 1, 64])?;
    /// let mut encoder = gpu.encoder(); // or your own
    /// layer.record_step(&mut encoder, &x, &mut cache, &y)?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(cache.lens(), [1, 1]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::step`]; then nothing has been recorded.
    pub fn record_step(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        x: &Tensor,
        cache: &mut KvCache,
        output: &Tensor,
    ) -> Result<()> {
        self.record_counts(encoder, x, None, cache, output)
    }

    /// [`MultiHeadAttention::record_step`] with `counts` of new tokens, as [`MultiHeadAttention::step_ragged`].
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, MultiHeadAttention, MultiHeadAttentionConfig, Tensor};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let mut cache = layer.kv_cache(2, 64, DType::F32)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[2, 1, 8])?;
    /// let y = Tensor::zeros(&gpu, DType::F32, &[2, 1, 8])?;
    /// let mut encoder = gpu.encoder(); // or your own
    /// layer.record_step_ragged(&mut encoder, &x, &[1, 0], &mut cache, &y)?; // the second sequence has ended
    /// gpu.submit(encoder)?;
    /// assert_eq!(cache.lens(), [1, 0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::step_ragged`]; then nothing has been recorded.
    pub fn record_step_ragged(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        x: &Tensor,
        counts: &[usize],
        cache: &mut KvCache,
        output: &Tensor,
    ) -> Result<()> {
        self.record_counts(encoder, x, Some(counts), cache, output)
    }

    fn run_step(&self, x: &Tensor, counts: Option<&[usize]>, cache: &mut KvCache) -> Result<Tensor> {
        let output = Tensor::zeros(&self.gpu, x.dtype(), x.shape())?;
        let mut encoder = self.gpu.encoder();
        self.record_counts(&mut encoder, x, counts, cache, &output)?;
        self.gpu.submit(encoder)?;
        Ok(output)
    }

    fn record_counts(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        x: &Tensor,
        counts: Option<&[usize]>,
        cache: &mut KvCache,
        output: &Tensor,
    ) -> Result<()> {
        let mut batch = Batch::new(&self.gpu);
        let next = self.prepare_step(&mut batch, x, counts, cache, output)?;
        batch.record(encoder)?;
        cache.commit(next);
        Ok(())
    }

    /// Checks a step and adds its dispatches; gives what the cache holds after it.
    fn prepare_step(
        &self,
        batch: &mut Batch,
        x: &Tensor,
        counts: Option<&[usize]>,
        cache: &KvCache,
        output: &Tensor,
    ) -> Result<State> {
        let inputs = MultiHeadInputs::new(x);
        let sizes = Sizes::new(&self.gpu, &self.config, &inputs)?;
        check_device(&self.gpu, "cached keys", cache.keys())?;
        check_device(&self.gpu, "output", output)?;
        let attention = self.check_cache(cache, sizes)?;
        if output.shape() != x.shape() {
            return Err(Error::Shape(format!(
                "output has shape {:?}, expected {:?} as x",
                output.shape(),
                x.shape()
            )));
        }
        check_float("output", output)?;
        let [keys, values] = cache.memory();
        let read = [("x", x), ("cached keys", keys), ("cached values", values)];
        check_overlaps(read.into_iter(), [("output", output)].into_iter())?;

        let all = vec![sizes.queries; sizes.batch];
        let counts = counts.unwrap_or(&all);
        let [mut query, key, value] = self.project_rows(batch, &inputs, sizes)?;
        let next = cache.prepare_append(batch, &key, &value, counts)?;
        if let Some(rotary) = &self.rotary {
            [query] = rotate(batch, rotary, [&query], sizes.queries, next.positions())?;
        }
        let mask = match cache.window() {
            // What one query must not see of a cache as large as its window is gone.
            Some(window) if sizes.queries > 1 || window < cache.shape().capacity => {
                Some(cache.mask_of(&next, sizes.queries, counts, window)?)
            }
            _ => None,
        };
        let context = self.context(batch, sizes)?;
        let mut attended = AttentionInputs::new(&query, &next.keys, &next.values).kv_lengths(&next.on_gpu);
        attended.mask = mask.as_ref();
        attention.prepare(batch, &attended, &AttentionOutputs::new(&context))?;
        self.project_output(batch, &context, sizes, output)?;
        Ok(next)
    }

    /// Whether steps of this layer can run on the cache; gives the operator that attends to it.
    fn check_cache(&self, cache: &KvCache, sizes: Sizes) -> Result<&Attention> {
        let refuse = |text: String| Err(Error::Option(text));
        let config = &self.config;
        if config.extra_keys() > 0 {
            return refuse(format!(
                "steps of a layer with add_bias_kv = {}, add_zero_attn = {}: a cache holds the sequence's keys alone, use \
                 forward over the whole sequence",
                config.add_bias_kv, config.add_zero_attn
            ));
        }
        if config.attention.query_offset != 0 {
            return refuse(format!(
                "steps of a layer with query_offset = {}: the cache knows where its queries stand, leave the offset out",
                config.attention.query_offset
            ));
        }
        let fits = self.cache_shape(sizes.batch, cache.shape().capacity);
        if cache.shape() != fits {
            return Err(Error::Shape(format!(
                "a cache of keys {:?} and values {:?} for x of {} sequences and a layer of {} key heads of {}: expected keys \
                 and values {:?}, use MultiHeadAttention::kv_cache",
                cache.shape().keys(),
                cache.shape().values(),
                sizes.batch,
                config.num_kv_heads,
                config.head_dim(),
                fits.keys()
            )));
        }
        if cache.rotary() != self.rotary.as_ref() {
            let has = |given: bool| {
                if given {
                    "a rotary embedding of its own"
                } else {
                    "no rotary embedding"
                }
            };
            return refuse(format!(
                "the layer has {} and the cache has {}: queries and keys are turned by the same tables, use \
                 MultiHeadAttention::kv_cache, or give both a clone of one Rotary",
                has(self.rotary.is_some()),
                has(cache.rotary().is_some())
            ));
        }
        self.attention_of(cache)
    }

    /// The operator that attends to a cache: a rolling one must have the layer's window.
    fn attention_of(&self, cache: &KvCache) -> Result<&Attention> {
        let refuse = |text: String| Err(Error::Option(text));
        let config = &self.config;
        let Some(window) = cache.window() else {
            return Ok(&self.attention[Causal::BottomRight as usize]);
        };
        if config.attention.alibi_slopes.is_some() {
            return refuse(
                "ALiBi on a rolling cache, whose keys do not lie in the order of their positions: use kv_cache"
                    .to_owned(),
            );
        }
        let own = config
            .attention
            .window_left
            .map(|left| (left as usize).saturating_add(1));
        match &self.rolling {
            Some(attention) if own == Some(window) => Ok(attention),
            _ => refuse(format!(
                "a rolling cache for a window of {window} positions, the layer's is {}: use \
                 MultiHeadAttention::rolling_kv_cache",
                own.map_or("unbounded".to_owned(), |own| own.to_string())
            )),
        }
    }
}
