//! The operator: attention on tensors that are on the GPU already, recorded into the caller's encoder.

mod choice;
mod composed;
mod cut;
mod decode;
mod fused;
mod packed;
mod rule;
mod seen;
mod window;

pub use choice::{AttentionPath, Choice};
pub(crate) use decode::check_decode;
pub(crate) use fused::check_fused;

use composed::ComposedCall;
use fused::FusedCall;
use window::BroadcastMask;

use crate::{
    AttentionInputs, AttentionOptions, AttentionOutputs, AttentionShape, DType, Gpu, Result, Tensor,
    gpu::Scratch,
    kernel::{Batch, Storage, Variant, warm_up},
    kernels::{
        attention::Storages, copy, decode as decode_kernel, flash, join_words, mean_heads, merge_ranges,
        scores, scores::Rule, softmax, weighted_sum,
    },
    shape::product,
    tuning::SOFTMAX_THREADS,
};

/// Scaled dot-product attention with everything that hides, moves or caps a score
/// ([`AttentionOptions`]), for tensors that are on the GPU.
///
/// ```text
/// output = softmax(mask(softcap(scale Q K^T) - alibi + bias)) V
/// ```
///
/// Two paths compute it ([`AttentionPath`]). The fused one makes a single pass over the keys, skips those that the window,
/// causal order or length hides from a whole tile of queries, and writes no score to memory. The composed one has
/// kernels of their own for scores, softmax and weighted sum; the scores of a bounded chunk of rows go through memory.
/// It serves when the weights are wanted and where the fused one does not pay; [`Attention::choice`] says which runs
/// and why. A query that sees no key gives 0.
///
/// Build it once and call it with any shapes. [`Attention::record`] puts the work into the caller's encoder and
/// neither submits nor waits; [`Attention::run`] allocates the outputs and submits.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionOutputs, Causal, DType, Gpu, Tensor};
///
/// let gpu = Gpu::new()?;
/// let attention = Attention::new(&gpu, AttentionOptions::new().causal(Causal::TopLeft))?;
/// let q = Tensor::zeros(&gpu, DType::F32, &[1, 8, 128, 64])?; // [B, H, L, D]
/// let output = Tensor::zeros(&gpu, DType::F32, &[1, 128, 8 * 64])?; // heads merged
///
/// let mut encoder = gpu.encoder(); // or your own
/// attention.record(&mut encoder, &AttentionInputs::new(&q, &q, &q), &AttentionOutputs::new(&output))?;
/// gpu.submit(encoder)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Attention {
    gpu: Gpu,
    options: AttentionOptions,
    slopes: Option<Tensor>,
    path: AttentionPath,
}

/// What [`Attention::run`] returns besides the output.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Tensor, Wanted};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4, 8])?; // [B, H, L, D]
/// let wanted = Wanted::output().lse().weights().mean_weights().present();
/// let result = attention.run(&AttentionInputs::new(&x, &x, &x), wanted)?;
/// assert_eq!(result.lse.unwrap().shape(), [1, 2, 4]);
/// assert_eq!(result.weights.unwrap().shape(), [1, 2, 4, 4]);
/// assert_eq!(result.mean_weights.unwrap().shape(), [1, 4, 4]);
/// assert_eq!(result.present_key.unwrap().shape(), [1, 2, 4, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Wanted {
    /// The log-sum-exp of each row.
    pub lse: bool,
    /// The weights of each head.
    pub weights: bool,
    /// The mean of the weights over the heads.
    pub mean_weights: bool,
    /// Past and new keys and values joined.
    pub present: bool,
}

impl Wanted {
    /// The output alone.
    pub fn output() -> Self {
        Self::default()
    }

    /// The log-sum-exp too.
    pub fn lse(mut self) -> Self {
        self.lse = true;
        self
    }

    /// The weights of each head too.
    pub fn weights(mut self) -> Self {
        self.weights = true;
        self
    }

    /// The mean of the weights over the heads too.
    pub fn mean_weights(mut self) -> Self {
        self.mean_weights = true;
        self
    }

    /// Past and new keys and values joined too.
    pub fn present(mut self) -> Self {
        self.present = true;
        self
    }
}

/// What [`Attention::run`] computed; shapes as in [`AttentionOutputs`].
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Tensor, Wanted};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let q = Tensor::zeros(&gpu, DType::F32, &[1, 2, 3, 8])?; // [B, H, Lq, D]
/// let key = Tensor::zeros(&gpu, DType::F32, &[1, 2, 5, 8])?;
/// let value = Tensor::upload(&gpu, &[1.5f32; 2 * 5 * 4], &[1, 2, 5, 4])?;
/// let result = attention.run(&AttentionInputs::new(&q, &key, &value), Wanted::output())?;
/// let merged = result.output.merge_heads()?;
/// assert_eq!((result.output.shape(), merged.shape()), (&[1, 2, 3, 4][..], &[1, 3, 8][..]));
/// assert!(merged.download::<f32>()?.iter().all(|x| (x - 1.5).abs() < 1e-6));
/// assert!(result.weights.is_none()); // not wanted
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AttentionResult {
    /// `[B, H, Lq, Dv]`, head-merged in memory: [`Tensor::merge_heads`] views it as `[B, Lq, H Dv]`.
    pub output: Tensor,
    /// `[B, H, Lq]`, if wanted.
    pub lse: Option<Tensor>,
    /// `[B, H, Lq, Lk]`, if wanted.
    pub weights: Option<Tensor>,
    /// `[B, Lq, Lk]`, if wanted.
    pub mean_weights: Option<Tensor>,
    /// `[B, Hkv, Lk, D]`, if wanted.
    pub present_key: Option<Tensor>,
    /// `[B, Hkv, Lk, Dv]`, if wanted.
    pub present_value: Option<Tensor>,
}

impl Attention {
    /// An operator with these options.
    ///
    /// # Errors
    ///
    /// [`Error::Option`](crate::Error::Option) for values that are never allowed; what depends on a call's shape is checked
    /// there.
    pub fn new(gpu: &Gpu, options: AttentionOptions) -> Result<Self> {
        options.validate(options.alibi_slopes.as_ref().map_or(0, Vec::len))?;
        let slopes = match &options.alibi_slopes {
            Some(slopes) => Some(Tensor::upload(gpu, slopes, &[slopes.len()])?),
            None => None,
        };
        Ok(Self {
            gpu: gpu.clone(),
            options,
            slopes,
            path: AttentionPath::Auto,
        })
    }

    /// The same operator with its path forced.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionPath, DType, Tensor, Wanted};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?.with_path(AttentionPath::Fused);
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4, 8])?;
    /// let inputs = AttentionInputs::new(&x, &x, &x);
    /// assert!(attention.run(&inputs, Wanted::output().weights()).is_err()); // it never holds the weights
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_path(mut self, path: AttentionPath) -> Self {
        self.path = path;
        self
    }

    /// Its options.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionOptions, Causal};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new().causal(Causal::TopLeft))?;
    /// assert_eq!(attention.options().causal, Causal::TopLeft);
    /// assert_eq!(attention.gpu(), &gpu);
    /// # Ok(())
    /// # }
    /// ```
    pub fn options(&self) -> &AttentionOptions {
        &self.options
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Builds the pipelines for tensors of this type and these head sizes ahead of the first call, and waits: calls with
    /// masks, lengths, past keys, a log-sum-exp or weights find theirs too. Tensors of different types in one call need
    /// others.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionPath, DType, Gpu, Tensor, Wanted};
    ///
    /// let gpu = Gpu::new()?;
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?.with_path(AttentionPath::Fused);
    /// attention.warm_up(DType::F32, 8, 8)?;
    /// let built = gpu.pipelines();
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4, 8])?;
    /// attention.run(&AttentionInputs::new(&x, &x, &x), Wanted::output())?;
    /// assert_eq!(gpu.pipelines(), built); // the call built none
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shader`](crate::Error::Shader) or [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn warm_up(&self, dtype: DType, head_dim: usize, value_dim: usize) -> Result<()> {
        let storage = Storage::of(&self.gpu, dtype)?;
        let variants = self.variants([storage; 4], head_dim, value_dim)?;
        warm_up(&self.gpu, &variants)
    }

    /// The kernels of calls between these storages and sizes, whatever masks and outputs they have.
    pub(crate) fn variants(
        &self,
        [query, key, value, output]: Storages,
        head_dim: usize,
        value_dim: usize,
    ) -> Result<Vec<Variant>> {
        let gpu = &self.gpu;
        let mut variants = vec![join_words::variant(), copy::variant(key, key)];
        if value != key {
            variants.push(copy::variant(value, value));
        }
        if self.path != AttentionPath::Fused {
            let tile = gpu.scores_tile([query, key], head_dim, false)?.tile;
            variants.push(scores::variant(tile, query, key));
            variants.extend(SOFTMAX_THREADS.map(softmax::variant));
            let tile = gpu.weighted_sum_tile([value, output], false)?.tile;
            variants.push(weighted_sum::variant(tile, value, output));
            variants.push(mean_heads::variant());
        }
        if self.path != AttentionPath::Composed {
            let storages = [query, key, value, output];
            let one = AttentionShape {
                value_dim,
                ..AttentionShape::new(1, 1, 1, head_dim)
            };
            // Masks make another variant; which calls have some is not known yet.
            let plain = Rule::new(&self.options, &one).is_plain();
            for plain in [false, true].into_iter().filter(|&without| !without || plain) {
                for queries in [1, 2] {
                    if let Some(tile) = self.decode_tile(&AttentionShape { queries, ..one }) {
                        variants.push(decode_kernel::variant(tile, plain, storages));
                    }
                }
                let tile = gpu.flash_tile(storages, plain, head_dim, value_dim, false)?.tile;
                variants.push(flash::variant(tile, plain, storages));
            }
            variants.push(merge_ranges::variant(output));
        }
        Ok(variants)
    }

    /// Records the call into `encoder`, which must come from the same device. Nothing is submitted, waited for
    /// or read back.
    ///
    /// Calls on one queue share scratch memory; recorded in any number of encoders they are right as long as
    /// those are submitted to that queue. wgpu cannot tell an encoder's device: one of another device is found
    /// out when it is finished.
    ///
    /// # Errors
    ///
    /// Sizes, types, devices and overlaps that do not fit, or more than the device allows; then nothing has
    /// been recorded.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        inputs: &AttentionInputs,
        outputs: &AttentionOutputs,
    ) -> Result<()> {
        let mut batch = Batch::new(&self.gpu);
        self.prepare(&mut batch, inputs, outputs)?;
        batch.record(encoder)
    }

    /// Allocates the outputs, records the call, and submits it. Does not wait; downloads do.
    ///
    /// # Errors
    ///
    /// As [`Attention::record`].
    pub fn run(&self, inputs: &AttentionInputs, wanted: Wanted) -> Result<AttentionResult> {
        let shape = inputs.check(&self.gpu, &self.options)?;
        let [batch, heads, queries, keys] = shape.weights();
        let zeros = |wanted: bool, dtype, shape: &[usize]| {
            if wanted {
                Tensor::zeros(&self.gpu, dtype, shape).map(Some)
            } else {
                Ok(None)
            }
        };
        let merged = [batch, queries, heads, shape.value_dim];
        let output = Tensor::zeros(&self.gpu, inputs.query.dtype(), &merged)?.permute(&[0, 2, 1, 3])?;
        let result = AttentionResult {
            output,
            lse: zeros(wanted.lse, DType::F32, &[batch, heads, queries])?,
            weights: zeros(wanted.weights, DType::F32, &shape.weights())?,
            mean_weights: zeros(wanted.mean_weights, DType::F32, &[batch, queries, keys])?,
            present_key: zeros(wanted.present, inputs.key.dtype(), &shape.key())?,
            present_value: zeros(wanted.present, inputs.value.dtype(), &shape.value())?,
        };
        let outputs = AttentionOutputs {
            output: &result.output,
            lse: result.lse.as_ref(),
            weights: result.weights.as_ref(),
            mean_weights: result.mean_weights.as_ref(),
            present_key: result.present_key.as_ref(),
            present_value: result.present_value.as_ref(),
        };
        let mut encoder = self.gpu.encoder();
        self.record(&mut encoder, inputs, &outputs)?;
        self.gpu.submit(encoder)?;
        Ok(result)
    }

    /// Checks the call and adds its dispatches.
    pub(crate) fn prepare(
        &self,
        batch: &mut Batch,
        inputs: &AttentionInputs,
        outputs: &AttentionOutputs,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let shape = inputs.check(gpu, &self.options)?;
        let output = outputs.check(gpu, inputs, &shape, batch.is_planned())?;
        let key = join(
            batch,
            "key",
            Scratch::Keys,
            inputs.past.map(|past| past.0),
            inputs.key,
            outputs.present_key,
        )?;
        let value = join(
            batch,
            "value",
            Scratch::Values,
            inputs.past.map(|past| past.1),
            inputs.value,
            outputs.present_value,
        )?;
        let rows = product(&[shape.batch, shape.heads, shape.queries]);
        let only_output =
            outputs.lse.is_none() && outputs.weights.is_none() && outputs.mean_weights.is_none();
        if rows == 0 || (shape.value_dim == 0 && only_output) {
            return Ok(());
        }

        let bound = self.bind_rule(inputs, &shape)?;
        let mask = match inputs.mask {
            Some(mask) => {
                let maskable = shape.keys - self.options.always_visible_keys;
                let target = [shape.batch, shape.heads, shape.queries, maskable];
                Some(BroadcastMask {
                    mask,
                    strides: mask.strides("mask", target)?,
                    keys: mask.covered_keys(maskable),
                })
            }
            None => None,
        };
        let wants_weights = outputs.weights.is_some() || outputs.mean_weights.is_some();
        match self.choose(wants_weights)?.0 {
            AttentionPath::Fused => self.fused(
                batch,
                &FusedCall {
                    shape,
                    packed: None,
                    query: inputs.query,
                    key: &key,
                    value: &value,
                    output: &output,
                    lse: outputs.lse,
                    mask,
                    bound: &bound,
                },
            ),
            _ => self.composed(
                batch,
                &ComposedCall {
                    shape,
                    query: inputs.query,
                    key: &key,
                    value: &value,
                    output: &output,
                    mask,
                    bound: &bound,
                },
                outputs,
            ),
        }
    }
}

/// Past and new entries one after the other along axis 2, in `present` if given and else in scratch; without a
/// past and a `present`, the new ones where they are.
fn join(
    batch: &mut Batch,
    what: &str,
    slot: Scratch,
    past: Option<&Tensor>,
    new: &Tensor,
    present: Option<&Tensor>,
) -> Result<Tensor> {
    if past.is_none() && present.is_none() {
        return Ok(new.clone());
    }
    let gpu = batch.gpu();
    let past_len = past.map_or(0, |past| past.shape()[2]);
    let mut shape = [0; 4];
    shape.copy_from_slice(new.shape());
    shape[2] += past_len;
    let joined = match present {
        Some(present) => present.clone(),
        None => {
            let bytes = product(&shape).saturating_mul(new.dtype().size() as u64);
            Tensor::of_scratch(gpu, batch.scratch(slot, bytes)?, 0, new.dtype(), &shape)?
        }
    };
    if let Some(past) = past {
        copy::push(batch, what, past, &joined.slice(2, 0..past_len)?)?;
    }
    copy::push(batch, what, new, &joined.slice(2, past_len..shape[2])?)?;
    Ok(joined)
}
