//! The layer: projections, attention, output projection, with PyTorch's weights and vocabulary.

use crate::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, Causal, DType, Error, Gpu,
    KvLengths, Mask, MultiHeadAttentionConfig, Parameters, Result, Tensor,
    gpu::Scratch,
    inputs::{check_device, check_overlaps},
    kernel::{Batch, Binding, Storage},
    kernels::{
        copy,
        linear::{self, Part},
    },
    linear::{Linear, bind, check_float, rows},
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
/// [`Mask::ignore`]; `True` = "attend" is [`Mask::keep`]. PyTorch's three-axis mask `[B * H, L, S]` is
/// `[B, H, L, S]` here.
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
    /// Input projections: q, k, v one below the other, or one each if their sizes differ.
    projection: Projection,
    output: Linear,
    /// Learned key and value behind the sequence, `[1, H, 1, D]` each.
    bias_kv: Option<[Tensor; 2]>,
    /// A zero that is read for every element of the key of zeros.
    zero: Option<Tensor>,
    /// One operator per causal order; they differ in nothing else.
    attention: [Attention; 3],
}

/// Weights and biases of the input projections: one `[3E, E]` and `[3E]`, q, k, v one below the other, or
/// `[E, E]`, `[E, kdim]`, `[E, vdim]` and `[E]` each.
#[derive(Debug, Clone)]
struct Projection(Vec<(Tensor, Option<Tensor>)>);

impl Projection {
    fn is_packed(&self) -> bool {
        self.0.len() == 1
    }

    /// Weight and bias of consecutive projections, q = 0, k = 1, v = 2. More than one only if packed.
    fn get(&self, first: usize, count: usize) -> Result<(Tensor, Option<Tensor>)> {
        if !self.is_packed() {
            return Ok(self.0[first].clone());
        }
        let (weight, bias) = &self.0[0];
        let size = weight.shape()[0] / 3;
        let range = first * size..(first + count) * size;
        let bias = bias
            .as_ref()
            .map(|bias| bias.slice(0, range.clone()))
            .transpose()?;
        Ok((weight.slice(0, range)?, bias))
    }
}

/// What a layer call reads. Self-attention unless a key is given.
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
            attn_mask: None,
            key_padding_mask: None,
            kv_lengths: None,
            causal: None,
        }
    }

    /// Attends to `key` and `value` instead (cross attention).
    pub fn key_value(mut self, key: &'a Tensor, value: &'a Tensor) -> Self {
        self.key = Some(key);
        self.value = Some(value);
        self
    }

    /// Adds a mask of scores.
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

    fn key(&self) -> &'a Tensor {
        self.key.unwrap_or(self.query)
    }

    fn value(&self) -> &'a Tensor {
        self.value.unwrap_or(self.key())
    }

    fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("query", Some(self.query)),
            ("key", self.key),
            ("value", self.value),
            ("attn_mask", self.attn_mask.map(Mask::tensor)),
            ("key_padding_mask", self.key_padding_mask.map(Mask::tensor)),
            ("kv_lengths", self.kv_lengths.map(KvLengths::tensor)),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }
}

/// Which weights a layer call returns.
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

    fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("output", Some(self.output)),
            ("weights", self.weights),
            ("mean_weights", self.mean_weights),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }
}

/// What [`MultiHeadAttention::forward`] computed.
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
struct Sizes {
    batched: bool,
    batch: usize,
    queries: usize,
    /// Keys of the sequence.
    keys: usize,
    /// With those that follow it.
    all_keys: usize,
}

impl MultiHeadAttention {
    /// A layer with these parameters, uploaded in the configuration's element type.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for sizes that do not fit, [`Error::Checkpoint`] or [`Error::Shape`] for
    /// parameters that do not fit them, and the device's errors.
    pub fn new(gpu: &Gpu, config: MultiHeadAttentionConfig, parameters: &Parameters) -> Result<Self> {
        config.validate()?;
        parameters.validate(&config)?;
        let embed = config.embed_dim;
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
        let projection = if config.kdim == embed && config.vdim == embed {
            let weight = [&p.q_proj_weight[..], &p.k_proj_weight, &p.v_proj_weight].concat();
            let bias = match (&p.q_proj_bias, &p.k_proj_bias, &p.v_proj_bias) {
                (Some(q), Some(k), Some(v)) => Some([&q[..], k, v].concat()),
                _ => None,
            };
            Projection(vec![(
                upload(&weight, &[3 * embed, embed])?,
                vector(&bias, &[3 * embed])?,
            )])
        } else {
            Projection(vec![
                (
                    upload(&p.q_proj_weight, &[embed, embed])?,
                    vector(&p.q_proj_bias, &[embed])?,
                ),
                (
                    upload(&p.k_proj_weight, &[embed, config.kdim])?,
                    vector(&p.k_proj_bias, &[embed])?,
                ),
                (
                    upload(&p.v_proj_weight, &[embed, config.vdim])?,
                    vector(&p.v_proj_bias, &[embed])?,
                ),
            ])
        };
        let output = Linear::new(
            upload(&p.out_proj_weight, &[embed, embed])?,
            vector(&p.out_proj_bias, &[embed])?,
        )?;
        let per_head = [1, config.num_heads, 1, config.head_dim()];
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
        Ok(Self {
            gpu: gpu.clone(),
            config,
            projection,
            output,
            bias_kv,
            zero,
            attention,
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
    pub fn with_path(mut self, path: AttentionPath) -> Self {
        self.attention = self.attention.map(|attention| attention.with_path(path));
        self
    }

    /// The operator of the layer's attention, in the configuration's causal order.
    pub fn attention(&self) -> &Attention {
        &self.attention[self.config.attention.causal as usize]
    }

    /// Copies the parameters back to the host, for [`Parameters::to_safetensors`]. Waits.
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
    pub fn config(&self) -> &MultiHeadAttentionConfig {
        &self.config
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Builds the pipelines for activations of this type ahead of the first call.
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] or [`Error::DeviceLost`].
    pub fn warm_up(&self, dtype: DType) -> Result<()> {
        let (gpu, config) = (&self.gpu, &self.config);
        let activations = Storage::of(gpu, dtype)?;
        let parameters = Storage::of(gpu, self.config.dtype)?;
        let bias = if self.config.bias {
            parameters
        } else {
            Storage::F32
        };
        for [x, y] in [[activations, Storage::F32], [Storage::F32, activations]] {
            let tile = gpu
                .linear_tile([x, parameters, bias, y], config.embed_dim, false)?
                .tile;
            gpu.kernel(&linear::variant(tile, x, parameters, bias, y))?;
        }
        if self.bias_kv.is_some() {
            gpu.kernel(&copy::variant(parameters, Storage::F32))?;
        }
        if self.zero.is_some() {
            gpu.kernel(&copy::variant(Storage::F32, Storage::F32))?;
        }
        self.attention()
            .warm_up(DType::F32, config.head_dim(), config.head_dim())
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
        let sizes = self.sizes(inputs)?;
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
        let sizes = self.sizes(inputs)?;
        for (name, tensor) in outputs.tensors() {
            check_device(gpu, name, tensor)?;
        }
        check_overlaps(inputs.tensors(), outputs.tensors())?;
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

        let [query, key, value] = self.project(batch, inputs, sizes)?;
        let behind = |tensor: &Tensor, row: usize| tensor.slice(2, row..row + 1);
        let mut row = sizes.keys;
        if let Some(bias_kv) = &self.bias_kv {
            for (source, target) in bias_kv.iter().zip([&key, &value]) {
                let target = behind(target, row)?;
                copy::push(
                    batch,
                    "bias_k or bias_v",
                    &source.broadcast_to(target.shape())?,
                    &target,
                )?;
            }
            row += 1;
        }
        if let Some(zero) = &self.zero {
            for target in [&key, &value] {
                let target = behind(target, row)?;
                copy::push(
                    batch,
                    "the key of zeros",
                    &zero.broadcast_to(target.shape())?,
                    &target,
                )?;
            }
        }

        let merged = [sizes.batch, sizes.queries, config.embed_dim];
        let bytes = product(&merged).saturating_mul(4);
        let context = Tensor::of_scratch(
            gpu,
            batch.scratch(Scratch::Context, bytes)?,
            0,
            DType::F32,
            &merged,
        )?;
        let key_padding_mask = self.key_padding_mask(inputs, sizes)?;
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

        let context = if sizes.batched {
            context
        } else {
            context.reshape(&merged[1..])?
        };
        self.output.prepare(batch, &context, outputs.output)
    }

    /// Projects queries, keys and values into scratch, head-split and f32, with room for the keys that follow.
    /// What comes from one tensor through one weight is one dispatch.
    fn project(&self, batch: &mut Batch, inputs: &MultiHeadInputs, sizes: Sizes) -> Result<[Tensor; 3]> {
        let gpu = &self.gpu;
        let (heads, head_dim) = (self.config.num_heads, self.config.head_dim());
        let shape = |rows| [sizes.batch, heads, rows, head_dim];
        let shapes = [shape(sizes.queries), shape(sizes.all_keys), shape(sizes.all_keys)];
        let bytes = shapes.map(|shape| product(&shape).saturating_mul(4));
        let limits = gpu.limits();
        let together = bytes.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        let fits = together <= limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let tensors = if fits {
            let buffer = batch.scratch(Scratch::Projected, together)?;
            let starts = [0, bytes[0], bytes[0] + bytes[1]];
            let part = |i: usize| Tensor::of_scratch(gpu, buffer.clone(), starts[i], DType::F32, &shapes[i]);
            [part(0)?, part(1)?, part(2)?]
        } else {
            let slots = [Scratch::Projected, Scratch::Keys, Scratch::Values];
            let mut part = |i: usize| {
                Tensor::of_scratch(gpu, batch.scratch(slots[i], bytes[i])?, 0, DType::F32, &shapes[i])
            };
            [part(0)?, part(1)?, part(2)?]
        };

        let sources = [inputs.query, inputs.key(), inputs.value()];
        let packed = self.projection.is_packed() && fits;
        let mut first = 0;
        while first < 3 {
            let same = |next: &usize| packed && sources[*next] == sources[first];
            let count = 1 + (first + 1..3).take_while(same).count();
            let (weight, bias) = self.projection.get(first, count)?;
            let Some((x_sizes, x_strides)) = rows(sources[first]) else {
                return Err(Error::Shape(format!(
                    "{:?}: use [B, L, E] or [L, E]",
                    sources[first].shape()
                )));
            };
            let (binding, starts) = if fits {
                let whole = Binding::prefix(gpu, "projected q, k, v", tensors[0].buffer(), together)?;
                (
                    whole,
                    [0, bytes[0], bytes[0] + bytes[1]].map(|byte| (byte / 4) as u32),
                )
            } else {
                (
                    Binding::tensor(gpu, "projected q, k or v", &tensors[first])?.0,
                    [0; 3],
                )
            };
            let parts: Vec<(usize, Part)> = (first..first + count)
                .map(|index| {
                    let (_, [batch, head, row, _]) = tensors[index].four_axes();
                    (
                        self.config.embed_dim,
                        Part {
                            start: starts[index],
                            batch,
                            head,
                            row,
                        },
                    )
                })
                .collect();
            linear::Linear {
                x: bind(gpu, "layer input", sources[first])?,
                x_strides,
                batch: x_sizes[0],
                rows: x_sizes[1],
                inputs: x_sizes[2],
                weight: bind(gpu, "projection weight", &weight)?,
                bias: bias
                    .as_ref()
                    .map(|bias| bind(gpu, "projection bias", bias))
                    .transpose()?,
                parts: &parts,
                head_dim,
                output_dim: 1,
                output: (binding, Storage::F32),
            }
            .push(batch)?;
            first += count;
        }
        Ok(tensors)
    }

    fn key_padding_mask(&self, inputs: &MultiHeadInputs, sizes: Sizes) -> Result<Option<Mask>> {
        let Some(mask) = inputs.key_padding_mask else {
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

    /// Checks the inputs against the configuration and each other.
    fn sizes(&self, inputs: &MultiHeadInputs) -> Result<Sizes> {
        for (name, tensor) in inputs.tensors() {
            check_device(&self.gpu, name, tensor)?;
        }
        let config = &self.config;
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
        let keys = inputs.key().shape().iter().rev().nth(1).copied().unwrap_or(0);
        let batch_axis = if rank == 3 { vec![batch] } else { vec![] };
        let expected = |width: usize| [&batch_axis[..], &[keys, width]].concat();
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
        }
        for (name, tensor) in [
            ("query", inputs.query),
            ("key", inputs.key()),
            ("value", inputs.value()),
        ] {
            check_float(name, tensor)?;
        }
        Ok(Sizes {
            batched: rank == 3,
            batch,
            queries,
            keys,
            all_keys: keys + config.extra_keys(),
        })
    }
}
