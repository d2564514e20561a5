//! The layer: projections, attention, output projection, with PyTorch's vocabulary.

mod cross;
mod inputs;
mod projection;
mod step;

pub use cross::CrossCache;
pub use inputs::{MultiHeadInputs, MultiHeadOutputs, MultiHeadResult, NeedWeights};

use inputs::Sizes;
use projection::{Projection, Targets};

use crate::{
    Align, Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, AttentionShape,
    Causal, Choice, DType, Error, Gpu, MultiHeadAttentionConfig, Parameters, Plan, Result, Rotary,
    RotaryPositions, Tensor, VariantCheck,
    gpu::Scratch,
    inputs::{check_device, check_overlaps},
    kernel::{Batch, Storage, Variant, warm_up},
    kernels::{copy, linear},
    linear::{Linear, check_float},
    plan::Planned,
    self_check::check_linear,
    shape::product,
};

/// Multi-head attention as `torch.nn.MultiheadAttention` computes it, on the GPU from end to end.
///
/// ```text
/// Q, K, V = x W + b   split into heads   Attention(Q, K, V)   heads merged   W_o + b_o
/// ```
///
/// Inputs are batch-first: `[B, L, E]`, or `[L, E]` without a batch. Boolean masks say their polarity
/// themselves: PyTorch's `attn_mask` and `key_padding_mask`, whose `True` means "ignore", are
/// [`Mask::ignore`](crate::Mask::ignore); `True` = "attend" is [`Mask::keep`](crate::Mask::keep). PyTorch's
/// three-axis mask `[B * H, L, S]` is `[B, H, L, S]` here.
///
/// Beyond PyTorch's layer, several query heads may share one key head (`num_kv_heads`: grouped-query or multi-query
/// attention), and a head may have a size of its own (`head_dim`), as in Llama and its kin.
///
/// Activations may be F32 or F16 whatever the parameters are stored as; what lies between the projections is f32.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{Gpu, MultiHeadAttention, MultiHeadAttentionConfig};
///
/// let gpu = Gpu::new()?;
/// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4), 1)?;
/// let x = vec![0.5; 2 * 10 * 64];
/// let y = layer.forward_host(&x, &[2, 10, 64])?; // from host data to host data
/// assert_eq!(y.len(), x.len());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    gpu: Gpu,
    config: MultiHeadAttentionConfig,
    projection: Projection,
    output: Linear,
    /// Learned key and value behind the sequence, `[1, Hkv, 1, D]` each.
    bias_kv: Option<[Tensor; 2]>,
    /// A zero that is read for every element of the key of zeros.
    zero: Option<Tensor>,
    /// One operator per causal order; they differ in nothing else.
    attention: [Attention; 3],
    /// The operator on a rolling cache, whose mask stands for causal order and window; `None` if there is no window.
    rolling: Option<Attention>,
    rotary: Option<Rotary>,
}

impl MultiHeadAttention {
    /// A layer with these parameters, uploaded in the configuration's element type.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{MultiHeadAttention, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(2, 1).bias(false);
    /// let mut parameters = Parameters::zeros(&config)?;
    /// parameters.v_proj_weight = vec![1.0, 0.0, 0.0, 1.0]; // all scores are 0: the mean of the rows
    /// parameters.out_proj_weight = vec![0.0, 1.0, 1.0, 0.0]; // with its elements swapped
    /// let layer = MultiHeadAttention::new(&gpu, config, &parameters)?;
    /// let y = layer.forward_host(&[1.0, 10.0, 3.0, 30.0], &[2, 2])?;
    /// assert_eq!(y, [20.0, 2.0, 20.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for sizes that do not fit, [`Error::Shape`] for
    /// parameters that do not fit them, and the device's errors.
    pub fn new(gpu: &Gpu, config: MultiHeadAttentionConfig, parameters: &Parameters) -> Result<Self> {
        config.validate()?;
        parameters.validate(&config)?;
        let upload = |values: &[f32], shape: &[usize]| match config.dtype {
            DType::F16 => {
                let halves: Vec<half::f16> = values.iter().map(|&value| half::f16::from_f32(value)).collect();
                Tensor::upload(gpu, &halves, shape)
            }
            _ => Tensor::upload(gpu, values, shape),
        };
        let vector = |values: &Option<Vec<f32>>, shape: &[usize]| {
            values.as_ref().map(|values| upload(values, shape)).transpose()
        };
        let p = parameters;
        let projection = Projection::new(&config, p, upload)?;
        let output = Linear::new(
            upload(&p.out_proj_weight, &[config.embed_dim, config.q_size()])?,
            vector(&p.out_proj_bias, &[config.embed_dim])?,
        )?;
        let per_head = [1, config.num_kv_heads, 1, config.head_dim()];
        let bias_kv = match (vector(&p.bias_k, &per_head)?, vector(&p.bias_v, &per_head)?) {
            (Some(key), Some(value)) => Some([key, value]),
            _ => None,
        };
        let zero = if config.add_zero_attn {
            Some(Tensor::upload(gpu, &[0.0f32], &[1, 1, 1, 1])?)
        } else {
            None
        };
        let options = |causal| AttentionOptions {
            causal,
            always_visible_keys: config.extra_keys(),
            ..config.attention.clone()
        };
        let attention = [
            Attention::new(gpu, options(Causal::None))?,
            Attention::new(gpu, options(Causal::TopLeft))?,
            Attention::new(gpu, options(Causal::BottomRight))?,
        ];
        let rolling = match config.attention.window_left {
            Some(_) => Some(Attention::new(gpu, options(Causal::None).window(None, None))?),
            None => None,
        };
        Ok(Self {
            gpu: gpu.clone(),
            config,
            projection,
            output,
            bias_kv,
            zero,
            attention,
            rolling,
            rotary: None,
        })
    }

    /// A layer whose parameters are drawn from PyTorch's distributions ([`Parameters::init`]).
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::new`].
    pub fn seeded(gpu: &Gpu, config: MultiHeadAttentionConfig, seed: u64) -> Result<Self> {
        let parameters = Parameters::init(&config, seed)?;
        Self::new(gpu, config, &parameters)
    }

    /// A layer from the bytes of a safetensors file ([`Parameters::from_safetensors`]).
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{CheckpointNames, DType, MultiHeadAttention, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(8, 2);
    /// # let file = Parameters::init(&config, 1)?
    /// #     .to_safetensors(&config, "encoder.layer.0.attention", CheckpointNames::Bert, DType::F32)?;
    /// // let file = std::fs::read("model.safetensors")?;
    /// let layer = MultiHeadAttention::from_safetensors(&gpu, config, &file, "encoder.layer.0.attention")?;
    /// assert_eq!(layer.forward_host(&[0.5; 3 * 8], &[3, 8])?.len(), 3 * 8);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] names every tensor that is missing, extra or misshapen; else as
    /// [`MultiHeadAttention::new`].
    pub fn from_safetensors(
        gpu: &Gpu,
        config: MultiHeadAttentionConfig,
        bytes: &[u8],
        prefix: &str,
    ) -> Result<Self> {
        let parameters = Parameters::from_safetensors(&config, bytes, prefix)?;
        Self::new(gpu, config, &parameters)
    }

    /// The same layer with the path of its attention forced; [`Attention::choice`] tells what is chosen otherwise.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{AttentionPath, AttentionShape, DType, MultiHeadAttention, MultiHeadAttentionConfig};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let layer = layer.with_path(AttentionPath::Composed);
    /// let choice = layer.attention().choice(&AttentionShape::new(1, 2, 10, 4), DType::F32, false)?;
    /// assert_eq!(choice.path, AttentionPath::Composed);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_path(mut self, path: AttentionPath) -> Self {
        self.attention = self.attention.map(|attention| attention.with_path(path));
        self.rolling = self.rolling.map(|attention| attention.with_path(path));
        self
    }

    /// The same layer with queries and keys turned by their positions before attention (rotary embedding), as Llama and
    /// its kin have it. Row `l` of a sequence stands at position `l`, or behind those that a cache holds
    /// ([`MultiHeadAttention::step`]). Layers may share the tables: clone one [`Rotary`].
    ///
    /// A layer with it attends to its own rows alone. `bias_k` and the key of zeros are not turned.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Gpu, MultiHeadAttention, MultiHeadAttentionConfig, Rotary, RotaryOptions};
    ///
    /// let gpu = Gpu::new()?;
    /// let config = MultiHeadAttentionConfig::new(64, 4).num_kv_heads(2).bias(false);
    /// let rotary = Rotary::new(&gpu, RotaryOptions::new(config.head_dim()).base(500_000.0), 1024)?;
    /// let layer = MultiHeadAttention::seeded(&gpu, config, 1)?.with_rotary(rotary)?;
    /// let y = layer.forward_host(&[0.5; 10 * 64], &[10, 64])?;
    /// assert_eq!(y.len(), 10 * 64);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if it rotates more than a head has, or has tables for each sequence; [`Error::WrongDevice`];
    /// [`Error::Option`] for a layer with a `query_offset`.
    pub fn with_rotary(mut self, rotary: Rotary) -> Result<Self> {
        rotary.check_positions(&self.gpu, self.config.head_dim())?;
        if self.config.attention.query_offset != 0 {
            return Err(Error::Option(format!(
                "rotary embedding with query_offset = {}: queries and keys of a layer stand at the same positions, leave the \
                 offset out",
                self.config.attention.query_offset
            )));
        }
        self.rotary = Some(rotary);
        Ok(self)
    }

    /// What turns its queries and keys.
    pub fn rotary(&self) -> Option<&Rotary> {
        self.rotary.as_ref()
    }

    /// The operator of the layer's attention, in the configuration's causal order.
    pub fn attention(&self) -> &Attention {
        &self.attention[self.config.attention.causal as usize]
    }

    /// Copies the parameters back to the host, for [`Parameters::to_safetensors`]. Waits.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{MultiHeadAttention, MultiHeadAttentionConfig, Parameters};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 7)?;
    /// assert_eq!(layer.parameters()?, Parameters::init(layer.config(), 7)?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Tensor::download`].
    pub fn parameters(&self) -> Result<Parameters> {
        let values = |tensor: &Tensor| match tensor.dtype() {
            DType::F16 => Ok(tensor
                .download::<half::f16>()?
                .iter()
                .map(|value| value.to_f32())
                .collect()),
            _ => tensor.download::<f32>(),
        };
        let optional = |tensor: Option<&Tensor>| tensor.map(values).transpose();
        let mut parameters = Parameters::zeros(&self.config)?;
        let [(q, q_bias), (k, k_bias), (v, v_bias)] = [
            self.projection.get(0, 1)?,
            self.projection.get(1, 1)?,
            self.projection.get(2, 1)?,
        ];
        parameters.q_proj_weight = values(&q)?;
        parameters.k_proj_weight = values(&k)?;
        parameters.v_proj_weight = values(&v)?;
        parameters.q_proj_bias = optional(q_bias.as_ref())?;
        parameters.k_proj_bias = optional(k_bias.as_ref())?;
        parameters.v_proj_bias = optional(v_bias.as_ref())?;
        parameters.out_proj_weight = values(self.output.weight())?;
        parameters.out_proj_bias = optional(self.output.bias())?;
        parameters.bias_k = optional(self.bias_kv.as_ref().map(|[key, _]| key))?;
        parameters.bias_v = optional(self.bias_kv.as_ref().map(|[_, value]| value))?;
        Ok(parameters)
    }

    /// Its sizes and options.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{MultiHeadAttention, MultiHeadAttentionConfig, Rotary, RotaryOptions};
    ///
    /// let config = MultiHeadAttentionConfig::new(8, 2);
    /// let layer = MultiHeadAttention::seeded(&gpu, config.clone(), 1)?;
    /// assert_eq!((layer.config(), layer.gpu()), (&config, &gpu));
    /// assert!(layer.rotary().is_none());
    /// let layer = layer.with_rotary(Rotary::new(&gpu, RotaryOptions::new(4), 64)?)?;
    /// assert_eq!(layer.rotary().unwrap().max_positions(), 64);
    /// # Ok(())
    /// # }
    /// ```
    pub fn config(&self) -> &MultiHeadAttentionConfig {
        &self.config
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Builds the pipelines for activations of this type ahead of the first call, and waits: with masks, weights per head or
    /// averaged, self or cross attention. A call whose own `causal` lifts the configuration's may need one more; for steps
    /// there is [`MultiHeadAttention::warm_up_steps`].
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] or [`Error::DeviceLost`].
    pub fn warm_up(&self, dtype: DType) -> Result<()> {
        let size = self.config.head_dim();
        let mut variants = self.own_variants(dtype)?;
        variants.extend(self.attention().variants([Storage::F32; 4], size, size)?);
        warm_up(&self.gpu, &variants)
    }

    /// Input, weight, bias and output of the projections to queries, keys and values, and of the one to the output.
    fn projections(&self, dtype: DType) -> Result<[[Storage; 4]; 2]> {
        let activations = Storage::of(&self.gpu, dtype)?;
        let parameters = Storage::of(&self.gpu, self.config.dtype)?;
        let bias = |given| if given { parameters } else { Storage::F32 };
        Ok([
            [activations, parameters, bias(self.config.bias), Storage::F32],
            [Storage::F32, parameters, bias(self.config.out_bias), activations],
        ])
    }

    /// The kernels of the projections, the added keys and the rotary embedding.
    fn own_variants(&self, dtype: DType) -> Result<Vec<Variant>> {
        let mut variants = Vec::new();
        for storages in self.projections(dtype)? {
            let tile = self.gpu.linear_tile(storages, self.config.embed_dim, false)?.tile;
            let [input, weight, bias, output] = storages;
            variants.push(linear::variant(tile, input, weight, bias, output));
        }
        let parameters = Storage::of(&self.gpu, self.config.dtype)?;
        if self.bias_kv.is_some() {
            variants.push(copy::variant(parameters, Storage::F32));
        }
        if self.zero.is_some() {
            variants.push(copy::variant(Storage::F32, Storage::F32));
        }
        if let Some(rotary) = &self.rotary {
            variants.push(rotary.variant(DType::F32)?);
        }
        Ok(variants)
    }

    /// From host data to host data: self-attention over `x` of `shape` `[B, L, E]` or `[L, E]`. Waits.
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::record`] and [`Tensor::download`].
    pub fn forward_host(&self, x: &[f32], shape: &[usize]) -> Result<Vec<f32>> {
        let x = Tensor::upload(&self.gpu, x, shape)?;
        self.forward(&MultiHeadInputs::new(&x), NeedWeights::No)?
            .output
            .download()
    }

    /// Allocates the outputs, of the query's type, records the call, and submits it. Does not wait; downloads do.
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::record`].
    pub fn forward(&self, inputs: &MultiHeadInputs, need_weights: NeedWeights) -> Result<MultiHeadResult> {
        let gpu = &self.gpu;
        let sizes = Sizes::new(gpu, &self.config, inputs)?;
        let output = Tensor::zeros(gpu, inputs.query.dtype(), inputs.query.shape())?;
        let batch = if sizes.batched { vec![sizes.batch] } else { vec![] };
        let heads = if need_weights == NeedWeights::PerHead {
            vec![self.config.num_heads]
        } else {
            vec![]
        };
        let weights_shape = [batch, heads, vec![sizes.queries, sizes.all_keys]].concat();
        let weights = match need_weights {
            NeedWeights::No => None,
            _ => Some(Tensor::zeros(gpu, DType::F32, &weights_shape)?),
        };
        let mut outputs = MultiHeadOutputs::new(&output);
        match need_weights {
            NeedWeights::No => {}
            NeedWeights::Averaged => outputs.mean_weights = weights.as_ref(),
            NeedWeights::PerHead => outputs.weights = weights.as_ref(),
        }
        let mut encoder = gpu.encoder();
        self.record(&mut encoder, inputs, &outputs)?;
        gpu.submit(encoder)?;
        Ok(MultiHeadResult { output, weights })
    }

    /// [`Attention::choice`] of the attention inside [`MultiHeadAttention::forward`], between whose projections all is F32,
    /// for `keys` or, where that is `None`, self-attention.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{AttentionPath, MultiHeadAttention, MultiHeadAttentionConfig, NeedWeights};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4), 1)?;
    /// let choice = layer.choice(1, 100, None, NeedWeights::Averaged)?;
    /// assert_eq!(choice.path, AttentionPath::Composed, "{choice}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Attention::choice`].
    pub fn choice(
        &self,
        batch: usize,
        queries: usize,
        keys: Option<usize>,
        need_weights: NeedWeights,
    ) -> Result<Choice> {
        let shape = self.attention_shape(batch, queries, keys.unwrap_or(queries));
        self.attention()
            .choice(&shape, DType::F32, need_weights != NeedWeights::No)
    }

    /// Sizes of the attention inside, with the added keys.
    fn attention_shape(&self, batch: usize, queries: usize, keys: usize) -> AttentionShape {
        let config = &self.config;
        AttentionShape {
            kv_heads: config.num_kv_heads,
            keys: keys.saturating_add(config.extra_keys()),
            ..AttentionShape::new(batch, config.num_heads, queries, config.head_dim())
        }
    }

    /// Checks the variants that [`MultiHeadAttention::warm_up`] builds against the reference on awkward sizes, and waits:
    /// what a program may do at its start.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{AttentionPath, DType, MultiHeadAttention, MultiHeadAttentionConfig};
    ///
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4), 1)?;
    /// let layer = layer.with_path(AttentionPath::Composed);
    /// assert!(layer.self_check(DType::F32)?.iter().all(|check| check.outcome.is_ok()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Attention::self_check`].
    pub fn self_check(&self, dtype: DType) -> Result<Vec<VariantCheck>> {
        let size = self.config.head_dim();
        let mut checks = Vec::new();
        for storages in self.projections(dtype)? {
            let tile = self.gpu.linear_tile(storages, self.config.embed_dim, false)?.tile;
            checks.push(check_linear(&self.gpu, tile, storages)?);
        }
        checks.extend(self.attention().self_check(DType::F32, size, size)?);
        Ok(checks)
    }

    /// What [`MultiHeadAttention::forward`] would take for contiguous inputs `[batch, queries, E]` and
    /// `[batch, keys, E]`, without masks; `keys` is `None` in self-attention. The layer's parameters are held already
    /// and not counted. Nothing is allocated, built or run.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, MultiHeadAttention, MultiHeadAttentionConfig, NeedWeights};
    ///
    /// let layer = MultiHeadAttention::seeded(&Gpu::new()?, MultiHeadAttentionConfig::new(512, 8), 1)?;
    /// let plan = layer.plan(1, 2048, None, DType::F32, NeedWeights::No)?;
    /// // Queries, keys, values and what attention gives, of 4 MiB each: nothing grows with the square of the length.
    /// assert_eq!(plan.scratch, 4 * (2048 * 512 * 4));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`MultiHeadAttention::forward`].
    pub fn plan(
        &self,
        batch: usize,
        queries: usize,
        keys: Option<usize>,
        dtype: DType,
        need_weights: NeedWeights,
    ) -> Result<Plan> {
        let (gpu, config) = (&self.gpu, &self.config);
        let mut given = Planned::new(gpu);
        let query = given.tensor(dtype, &[batch, queries, config.embed_dim])?;
        let cross = match keys {
            Some(keys) => Some((
                given.tensor(dtype, &[batch, keys, config.kdim])?,
                given.tensor(dtype, &[batch, keys, config.vdim])?,
            )),
            None => None,
        };
        let mut inputs = MultiHeadInputs::new(&query);
        if let Some((key, value)) = &cross {
            (inputs.key, inputs.value) = (Some(key), Some(value));
        }
        let shape = self.attention_shape(batch, queries, keys.unwrap_or(queries));
        let mut results = Planned::new(gpu);
        let output = results.tensor(dtype, query.shape())?;
        let weights = match need_weights {
            NeedWeights::No => None,
            NeedWeights::Averaged => Some(results.tensor(DType::F32, &[batch, queries, shape.keys])?),
            NeedWeights::PerHead => Some(results.tensor(DType::F32, &shape.weights())?),
        };
        let mut outputs = MultiHeadOutputs::new(&output);
        match need_weights {
            NeedWeights::No => {}
            NeedWeights::Averaged => outputs.mean_weights = weights.as_ref(),
            NeedWeights::PerHead => outputs.weights = weights.as_ref(),
        }
        let path = self.attention().chosen_path(&shape, weights.is_some())?;
        let mut planned = Batch::planned(gpu);
        self.prepare(&mut planned, &inputs, &outputs)?;
        Ok(Plan::new(path, planned, given.bytes, results.bytes))
    }

    /// Records the call into `encoder`, which must come from the same device. Nothing is submitted, waited for
    /// or read back; see [`Attention::record`].
    ///
    /// # Errors
    ///
    /// Sizes, types, devices and overlaps that do not fit, or more than the device allows; then nothing has
    /// been recorded.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        inputs: &MultiHeadInputs,
        outputs: &MultiHeadOutputs,
    ) -> Result<()> {
        let mut batch = Batch::new(&self.gpu);
        self.prepare(&mut batch, inputs, outputs)?;
        batch.record(encoder)
    }

    fn prepare(&self, batch: &mut Batch, inputs: &MultiHeadInputs, outputs: &MultiHeadOutputs) -> Result<()> {
        let gpu = &self.gpu;
        let config = &self.config;
        let sizes = Sizes::new(gpu, &self.config, inputs)?;
        for (name, tensor) in outputs.tensors() {
            check_device(gpu, name, tensor)?;
        }
        if !batch.is_planned() {
            check_overlaps(inputs.tensors(), outputs.tensors())?;
        }
        if outputs.output.shape() != inputs.query.shape() {
            return Err(Error::Shape(format!(
                "output has shape {:?}, expected the query's {:?}",
                outputs.output.shape(),
                inputs.query.shape()
            )));
        }
        check_float("output", outputs.output)?;
        if let Some(mask) = inputs.attn_mask {
            mask.strides(
                "attn_mask",
                [sizes.batch, config.num_heads, sizes.queries, sizes.keys],
            )?;
        }

        let [query, key, value] = match inputs.cross_cache {
            None => self.project(batch, inputs, sizes)?,
            Some(cache) => {
                let query = self.project_queries(batch, inputs, cache, sizes)?;
                [query, cache.keys().clone(), cache.values().clone()]
            }
        };
        let context = self.context(batch, sizes)?;
        let key_padding_mask = inputs.padding(sizes)?;
        let with_batch = |tensor: &Tensor| {
            if sizes.batched {
                Ok(tensor.clone())
            } else {
                tensor.reshape(&[&[1], tensor.shape()].concat())
            }
        };
        let weights = outputs.weights.map(with_batch).transpose()?;
        let mean_weights = outputs.mean_weights.map(with_batch).transpose()?;
        let mut attention_inputs = AttentionInputs::new(&query, &key, &value);
        attention_inputs.mask = inputs.attn_mask;
        attention_inputs.key_mask = key_padding_mask.as_ref();
        attention_inputs.kv_lengths = inputs.kv_lengths;
        let mut attention_outputs = AttentionOutputs::new(&context);
        attention_outputs.weights = weights.as_ref();
        attention_outputs.mean_weights = mean_weights.as_ref();
        let causal = inputs.causal.unwrap_or(config.attention.causal);
        self.attention[causal as usize].prepare(batch, &attention_inputs, &attention_outputs)?;

        self.project_output(batch, &context, sizes, outputs.output)
    }

    /// Projects queries, keys and values into scratch, turns queries and keys if the layer does, and puts the keys that
    /// follow the sequence behind it.
    fn project(&self, batch: &mut Batch, inputs: &MultiHeadInputs, sizes: Sizes) -> Result<[Tensor; 3]> {
        let [mut query, mut key, value] = self.project_rows(batch, inputs, sizes)?;
        if let Some(rotary) = &self.rotary {
            self.check_rotary(inputs)?;
            let start = RotaryPositions::Start(0);
            [query, key] = rotate(batch, rotary, [&query, &key], sizes.queries, start)?;
        }
        self.push_extra_keys(batch, [&key, &value], sizes.keys)?;
        Ok([query, key, value])
    }

    /// Projects queries, keys and values into scratch, `[B, H, L, D]`, with room for the keys that follow.
    fn project_rows(&self, batch: &mut Batch, inputs: &MultiHeadInputs, sizes: Sizes) -> Result<[Tensor; 3]> {
        let rows = [sizes.queries, sizes.all_keys];
        let targets = Targets::scratch(batch, &self.config, sizes.batch, rows)?;
        let sources = [inputs.query, inputs.key(), inputs.value()];
        self.projection.project(batch, 0..3, sources, &targets)?;
        Ok(targets.tensors)
    }

    /// Whether every row of a call stands at its own index.
    fn check_rotary(&self, inputs: &MultiHeadInputs) -> Result<()> {
        if inputs.key() != inputs.query {
            return Err(Error::Option(
                "a key of its own in a layer with rotary embedding: it attends to its own rows, whose positions it knows; \
                 use Attention and Rotary for others"
                    .to_owned(),
            ));
        }
        let bottom_right = inputs.causal.unwrap_or(self.config.attention.causal) == Causal::BottomRight
            || self.config.attention.align == Align::BottomRight;
        if bottom_right && inputs.kv_lengths.is_some() {
            return Err(Error::Option(
                "key lengths and an alignment to the bottom right in a layer with rotary embedding: queries would stand \
                 elsewhere than their keys, use Causal::TopLeft"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Adds `bias_k`, `bias_v` and the key of zeros from row `row` of keys and values on.
    fn push_extra_keys(
        &self,
        batch: &mut Batch,
        keys_and_values: [&Tensor; 2],
        mut row: usize,
    ) -> Result<()> {
        let behind = |tensor: &Tensor, row: usize| tensor.slice(2, row..row + 1);
        if let Some(bias_kv) = &self.bias_kv {
            for (source, target) in bias_kv.iter().zip(keys_and_values) {
                let target = behind(target, row)?;
                let source = source.broadcast_to(target.shape())?;
                copy::push(batch, "bias_k or bias_v", &source, &target)?;
            }
            row += 1;
        }
        if let Some(zero) = &self.zero {
            for target in keys_and_values {
                let target = behind(target, row)?;
                let source = zero.broadcast_to(target.shape())?;
                copy::push(batch, "the key of zeros", &source, &target)?;
            }
        }
        Ok(())
    }

    /// Where attention writes, `[B, Lq, H D]` in scratch.
    fn context(&self, batch: &mut Batch, sizes: Sizes) -> Result<Tensor> {
        let merged = [sizes.batch, sizes.queries, self.config.q_size()];
        let bytes = product(&merged).saturating_mul(4);
        let buffer = batch.scratch(Scratch::Context, bytes)?;
        Tensor::of_scratch(&self.gpu, buffer, 0, DType::F32, &merged)
    }

    fn project_output(
        &self,
        batch: &mut Batch,
        context: &Tensor,
        sizes: Sizes,
        output: &Tensor,
    ) -> Result<()> {
        if sizes.batched {
            return self.output.prepare(batch, context, output);
        }
        let rows = context.reshape(&context.shape()[1..])?;
        self.output.prepare(batch, &rows, output)
    }
}

/// Turns the first `rows` rows of tensors `[B, H, L, D]` into scratch, where the rows behind them are left to be written.
fn rotate<const N: usize>(
    batch: &mut Batch,
    rotary: &Rotary,
    tensors: [&Tensor; N],
    rows: usize,
    positions: RotaryPositions<'_>,
) -> Result<[Tensor; N]> {
    let bytes = tensors.map(|tensor| product(tensor.shape()).saturating_mul(4));
    let all = bytes.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
    let buffer = batch.scratch(Scratch::Rotated, all)?;
    let mut rotated = tensors.map(Tensor::clone);
    let mut start = 0;
    for (target, bytes) in rotated.iter_mut().zip(bytes) {
        let source = target.slice(2, 0..rows)?;
        *target = Tensor::of_scratch(batch.gpu(), buffer.clone(), start, DType::F32, target.shape())?;
        rotary.prepare(batch, &source, positions, &target.slice(2, 0..rows)?)?;
        start += bytes;
    }
    Ok(rotated)
}
