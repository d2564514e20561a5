//! The operator: attention on tensors that are on the GPU already, recorded into the caller's encoder.

use crate::{
    AttentionInputs, AttentionOptions, AttentionOutputs, AttentionShape, DType, Error, Gpu, Mask, Result,
    Tensor,
    gpu::Scratch,
    kernel::{Batch, Binding, Storage},
    kernels::{
        Chunk, Vector, copy, flash, join_words, mean_heads,
        scores::{self, Operand, Rule},
        softmax, weighted_sum,
    },
    mask::{UNBOUNDED, Visibility},
    shape::product,
    tuning::{FUSED_QUERIES, FlashTile, Product, SCORES_CHUNK, SOFTWARE_ITERATIONS, Tile, composed_keys},
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

/// How a call is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AttentionPath {
    /// Whichever [`Attention::choice`] finds.
    #[default]
    Auto,
    /// One pass over the keys; no score reaches memory.
    Fused,
    /// Scores, softmax and weighted sum one after the other.
    Composed,
}

/// What computes a call, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// [`AttentionPath::Fused`] or [`AttentionPath::Composed`].
    pub path: AttentionPath,
    /// Why this path.
    pub reason: String,
    /// Tile sizes of its kernels.
    pub tile: String,
}

/// What [`Attention::run`] returns besides the output.
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
    /// [`Error::Option`] for values that are never allowed; what depends on a call's shape is checked there.
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
    pub fn with_path(mut self, path: AttentionPath) -> Self {
        self.path = path;
        self
    }

    /// Which path computes a call of this shape, and why; `weights` if its weights or their mean are wanted.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Attention, AttentionOptions, AttentionShape, Gpu, AttentionPath};
    ///
    /// let attention = Attention::new(&Gpu::new()?, AttentionOptions::new())?;
    /// let shape = AttentionShape::new(1, 8, 512, 64);
    /// assert_eq!(attention.choice(&shape, false)?.path, AttentionPath::Fused);
    /// assert_eq!(attention.choice(&shape, true)?.path, AttentionPath::Composed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for sizes that no call may have; [`Error::Option`] if the fused path is forced and weights are wanted; [`Error::Limit`] if it is forced beyond
    /// what a software adapter can run.
    pub fn choice(&self, shape: &AttentionShape, weights: bool) -> Result<Choice> {
        shape.validate()?;
        let (path, reason) = self.choose(shape, weights)?;
        let tile = match path {
            AttentionPath::Fused => {
                format!("{:?}", FlashTile::of(&self.gpu, shape.head_dim, shape.value_dim))
            }
            _ => format!("{:?}", Tile::of(&self.gpu, Product::Scores)),
        };
        Ok(Choice { path, reason, tile })
    }

    fn choose(&self, shape: &AttentionShape, weights: bool) -> Result<(AttentionPath, String)> {
        let tile = FlashTile::of(&self.gpu, shape.head_dim, shape.value_dim);
        let visibility = Visibility::new(&self.options);
        let seen = if visibility.left < UNBOUNDED && visibility.right < UNBOUNDED {
            let window = visibility.left as u64 + visibility.right as u64 + u64::from(tile.rows());
            window.min(shape.keys as u64) + self.options.always_visible_keys as u64
        } else {
            shape.keys as u64
        };
        let software = self.gpu.info().device_type == wgpu::DeviceType::Cpu;
        let iterations = tile.iterations(seen, shape.head_dim as u64);
        Ok(match self.path {
            AttentionPath::Fused if weights => {
                return Err(Error::Option(
                    "the fused path never holds the weights: ask for them on AttentionPath::Composed or AttentionPath::Auto"
                        .to_owned(),
                ));
            }
            _ if shape.value_dim == 0 => (
                AttentionPath::Composed,
                "values without columns leave the fused path nothing to do".to_owned(),
            ),
            AttentionPath::Fused if software && iterations > SOFTWARE_ITERATIONS => {
                return Err(Error::Limit {
                    what: format!("the fused path over {seen} keys of {} entries", shape.head_dim),
                    needs: iterations,
                    allows: SOFTWARE_ITERATIONS,
                    limit: "rounds of an invocation's loops, which software adapters end after 65535",
                    advice: "use AttentionPath::Auto or AttentionPath::Composed".to_owned(),
                });
            }
            AttentionPath::Fused => (AttentionPath::Fused, "it was asked for".to_owned()),
            AttentionPath::Composed => (AttentionPath::Composed, "it was asked for".to_owned()),
            AttentionPath::Auto if weights => (AttentionPath::Composed, "the weights are wanted".to_owned()),
            AttentionPath::Auto if shape.queries < FUSED_QUERIES => (
                AttentionPath::Composed,
                format!(
                    "{} queries would leave most of the fused kernel's rows idle",
                    shape.queries
                ),
            ),
            AttentionPath::Auto if software && iterations > SOFTWARE_ITERATIONS => (
                AttentionPath::Composed,
                format!(
                    "software adapters end an invocation's loops after 65535 rounds, the fused one needs {iterations}"
                ),
            ),
            AttentionPath::Auto => (
                AttentionPath::Fused,
                "it is the default where no weights are wanted".to_owned(),
            ),
        })
    }

    /// Its options.
    pub fn options(&self) -> &AttentionOptions {
        &self.options
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Builds the pipelines for tensors of this type and these head sizes ahead of the first call: all but those that
    /// join past keys, or lengths, slopes and sinks.
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] or [`Error::DeviceLost`].
    pub fn warm_up(&self, dtype: DType, head_dim: usize, value_dim: usize) -> Result<()> {
        let gpu = &self.gpu;
        let storage = Storage::of(gpu, dtype)?;
        if self.path != AttentionPath::Fused {
            gpu.kernel(&scores::variant(Tile::of(gpu, Product::Scores), storage, storage))?;
            for threads in crate::tuning::SOFTMAX_THREADS {
                gpu.kernel(&softmax::variant(threads))?;
            }
            gpu.kernel(&weighted_sum::variant(
                Tile::of(gpu, Product::WeightedSum),
                storage,
                storage,
            ))?;
        }
        if self.path != AttentionPath::Composed {
            let tile = FlashTile::of(gpu, head_dim, value_dim);
            // Masks make another variant; which calls have some is not known yet.
            for plain in [false, true] {
                gpu.kernel(&flash::variant(tile, plain, [storage; 4]))?;
            }
        }
        Ok(())
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
        let output = outputs.check(gpu, inputs, &shape)?;
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

        let query = operand(gpu, "query", inputs.query)?;
        let key = operand(gpu, "key", &key)?;
        let value = operand(gpu, "value", &value)?;
        let (binding, start) = Binding::output(gpu, "output", &output)?;
        let (_, strides) = output.four_axes();
        let output = Operand {
            binding,
            storage: Storage::of(gpu, output.dtype())?,
            start,
            strides,
        };
        let rule = self.bind_rule(inputs, &shape)?;
        let lse = outputs
            .lse
            .map(|lse| Binding::output(gpu, "lse", lse))
            .transpose()?;
        let operands = [&query, &key, &value, &output];
        match self
            .choose(
                &shape,
                outputs.weights.is_some() || outputs.mean_weights.is_some(),
            )?
            .0
        {
            AttentionPath::Fused => self.fused(batch, &shape, operands, &rule, &lse),
            _ => self.composed(batch, &shape, operands, &rule, &lse, outputs),
        }
    }

    fn fused(
        &self,
        batch: &mut Batch,
        shape: &AttentionShape,
        [query, key, value, output]: [&Operand; 4],
        bound: &BoundRule,
        lse: &Option<(Binding, u32)>,
    ) -> Result<()> {
        let vectors = [
            bound.lengths.as_ref(),
            bound.slopes.as_ref(),
            bound.sinks.as_ref(),
        ];
        let (words, [lengths, slopes, sinks]) = join_words::push(batch, vectors)?;
        let rule = Rule {
            lengths_start: lengths.0,
            lengths_stride: lengths.1,
            ..bound.rule
        };
        flash::Call {
            query,
            key,
            value,
            output,
            mask: &bound.mask,
            key_mask: &bound.key_mask,
            words,
            slopes_start: slopes.0,
            sinks: bound.sinks.as_ref().map(|_| sinks),
            lse,
            rule,
        }
        .push(
            batch,
            FlashTile::of(&self.gpu, shape.head_dim, shape.value_dim),
            shape,
        )
    }

    fn composed(
        &self,
        batch: &mut Batch,
        shape: &AttentionShape,
        [query, key, value, output]: [&Operand; 4],
        bound: &BoundRule,
        lse: &Option<(Binding, u32)>,
        outputs: &AttentionOutputs,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let vector = |vector: &Option<Vector>| {
            vector
                .as_ref()
                .map_or_else(|| Binding::absent(gpu), |vector| vector.binding.clone())
        };
        let rows = scores::Inputs {
            query,
            key,
            mask: &bound.mask,
            key_mask: &bound.key_mask,
            lengths: &vector(&bound.lengths),
            slopes: &vector(&bound.slopes),
            rule: bound.rule,
        };
        if let Some(allows) = composed_keys(gpu).filter(|&allows| shape.keys > allows) {
            return Err(Error::Limit {
                what: "the composed path over all keys".to_owned(),
                needs: shape.keys as u64,
                allows: allows as u64,
                limit: "keys, since this software adapter ends an invocation's loops after 65535 rounds",
                advice: "use a newer driver (Mesa 25) or fewer keys".to_owned(),
            });
        }
        let all_scores = shape.scores().saturating_mul(4);
        let (chunks, weights) = if let Some(weights) = outputs.weights {
            (vec![whole(shape)], Binding::output(gpu, "weights", weights)?)
        } else if outputs.mean_weights.is_some() {
            let scratch = gpu.scratch(Scratch::Weights, all_scores)?;
            (
                vec![whole(shape)],
                (Binding::prefix(gpu, "weights", &scratch, all_scores)?, 0),
            )
        } else {
            let chunks = chunks(gpu, shape)?;
            let row = shape.keys as u64 * 4;
            let bytes = chunks.iter().map(Chunk::all_rows).max().unwrap_or(0) * row;
            let scratch = gpu.scratch(Scratch::Scores, bytes)?;
            (chunks, (Binding::prefix(gpu, "scores", &scratch, bytes)?, 0))
        };
        let (scores_tile, sum_tile) = (
            Tile::of(gpu, Product::Scores),
            Tile::of(gpu, Product::WeightedSum),
        );
        for chunk in chunks {
            let (binding, start) = &weights;
            scores::push(batch, scores_tile, shape, chunk, &rows, binding.clone(), *start)?;
            softmax::push(batch, shape, chunk, &bound.sinks, binding.clone(), *start, lse)?;
            weighted_sum::push(batch, sum_tile, shape, chunk, weights.clone(), value, output)?;
        }
        if let Some(mean) = outputs.mean_weights {
            mean_heads::push(batch, shape, weights, Binding::output(gpu, "mean_weights", mean)?)?;
        }
        Ok(())
    }

    fn bind_rule(&self, inputs: &AttentionInputs, shape: &AttentionShape) -> Result<BoundRule> {
        let gpu = &self.gpu;
        let options = &self.options;
        let visibility = Visibility::new(options);
        let maskable = shape.keys - options.always_visible_keys;
        let mut rule = Rule {
            queries: shape.queries as u32,
            maskable: maskable as u32,
            offset: visibility.offset,
            bottom_right: u32::from(visibility.bottom_right),
            left: visibility.left,
            right: visibility.right,
            scale: options.scale_for(shape.head_dim),
            softcap: options.softcap.unwrap_or(0.0),
            has_slopes: u32::from(self.slopes.is_some()),
            ..Rule::default()
        };
        let bind = |what: &str, tensor: Option<&Tensor>| match tensor {
            Some(tensor) => Binding::tensor(gpu, what, tensor),
            None => Ok((Binding::absent(gpu), 0)),
        };
        let (mask, start) = bind("mask", inputs.mask.map(Mask::tensor))?;
        rule.mask_start = start;
        if let Some(mask) = inputs.mask {
            rule.mask_kind = mask.kind() as u32;
            rule.mask_keys = mask.covered_keys(maskable) as u32;
            let target = [shape.batch, shape.heads, shape.queries, maskable];
            [rule.mask_batch, rule.mask_head, rule.mask_query, rule.mask_key] =
                mask.strides("mask", target)?;
        }
        let (key_mask, start) = bind("key_mask", inputs.key_mask.map(Mask::tensor))?;
        rule.key_mask_start = start;
        if let Some(mask) = inputs.key_mask {
            rule.key_mask_kind = mask.kind() as u32;
            let strides = mask.tensor().strides();
            [rule.key_mask_batch, rule.key_mask_key] = [strides[0] as u32, strides[1] as u32];
        }
        let vector = |what: &str, tensor: Option<&Tensor>| {
            tensor
                .filter(|tensor| !tensor.is_empty())
                .map(|tensor| Vector::bind(gpu, what, tensor))
                .transpose()
        };
        let lengths = vector("kv_lengths", inputs.kv_lengths.map(|lengths| lengths.tensor()))?;
        if let Some(lengths) = &lengths {
            (rule.has_lengths, rule.lengths_start, rule.lengths_stride) = (1, lengths.start, lengths.stride);
        }
        Ok(BoundRule {
            mask,
            key_mask,
            lengths,
            slopes: vector("slopes", self.slopes.as_ref())?,
            sinks: vector("sinks", inputs.sinks)?,
            rule,
        })
    }
}

struct BoundRule {
    mask: Binding,
    key_mask: Binding,
    lengths: Option<Vector>,
    slopes: Option<Vector>,
    sinks: Option<Vector>,
    rule: Rule,
}

fn operand(gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<Operand> {
    let (binding, start) = Binding::tensor(gpu, what, tensor)?;
    let (_, strides) = tensor.four_axes();
    Ok(Operand {
        binding,
        storage: Storage::of(gpu, tensor.dtype())?,
        start,
        strides,
    })
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
            Tensor::of_scratch(gpu, gpu.scratch(slot, bytes)?, 0, new.dtype(), &shape)?
        }
    };
    if let Some(past) = past {
        copy::push(batch, what, past, &joined.slice(2, 0..past_len)?)?;
    }
    copy::push(batch, what, new, &joined.slice(2, past_len..shape[2])?)?;
    Ok(joined)
}

fn whole(shape: &AttentionShape) -> Chunk {
    Chunk {
        first_head: 0,
        head_count: shape.batch * shape.heads,
        first_row: 0,
        rows: shape.queries,
    }
}

/// Cuts the rows into chunks whose scores fit the scratch: several heads each, or, if one head is too large,
/// several rows of it.
fn chunks(gpu: &Gpu, shape: &AttentionShape) -> Result<Vec<Chunk>> {
    let allows = gpu
        .limits()
        .max_storage_buffer_binding_size
        .min(gpu.limits().max_buffer_size);
    let row = (shape.keys as u64 * 4).max(4);
    if row > allows {
        return Err(Error::Limit {
            what: format!("one row of {} scores", shape.keys),
            needs: row,
            allows,
            limit: "max_storage_buffer_binding_size",
            advice: "split the keys".to_owned(),
        });
    }
    let rows = (allows.min(SCORES_CHUNK) / row).max(1);
    let heads = shape.batch * shape.heads;
    let head_count = (rows / shape.queries as u64).min(heads as u64) as usize;
    if head_count > 0 {
        return Ok((0..heads)
            .step_by(head_count)
            .map(|first_head| Chunk {
                first_head,
                head_count: head_count.min(heads - first_head),
                first_row: 0,
                rows: shape.queries,
            })
            .collect());
    }
    // Whole tiles, so that none but the last is half empty.
    let rows = if rows >= 64 { rows / 64 * 64 } else { rows } as usize;
    Ok((0..heads)
        .flat_map(|first_head| {
            (0..shape.queries).step_by(rows).map(move |first_row| Chunk {
                first_head,
                head_count: 1,
                first_row,
                rows: rows.min(shape.queries - first_row),
            })
        })
        .collect())
}
