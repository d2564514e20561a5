//! A case on the GPU.

use super::case::{
    Answer, Answers, Case, CaseError, CaseMask, Floats, Hiding, Layer, MaskData, Op, Packed, Rotary, Sdpa,
};
use half::f16;
use multihead::{
    Attention, AttentionInputs, AttentionPath, CuSeqlens, DType, Gpu, KvLengths, Mask, MultiHeadAttention,
    MultiHeadInputs, NeedWeights, PackedInputs, Parameters, Result, RotaryPositions, Tensor, Wanted,
};

/// Computes every answer that the operator has; the weights only if they are wanted. Where the fused path is asked
/// for, the weights, which it never holds, come from a second call on the composed one.
pub(crate) fn run(
    gpu: &Gpu,
    case: &Case,
    weights: bool,
    path: AttentionPath,
) -> std::result::Result<Answers, CaseError> {
    let answers = match &case.op {
        Op::Sdpa(op) => sdpa(
            gpu,
            op,
            weights,
            path,
            op.past.is_some() || case.expected.contains_key("present_key"),
        ),
        Op::Layer(op) => layer(gpu, op, weights, path),
        Op::Packed(_) if path == AttentionPath::Composed => {
            return Err(CaseError::Unsupported(
                "packed sequences on the composed path".to_owned(),
            ));
        }
        Op::Packed(op) => packed(gpu, op, path),
        Op::Rotary(op) => rotary(gpu, op),
    };
    answers.map_err(|error| CaseError::Bad(error.to_string()))
}

fn sdpa(gpu: &Gpu, op: &Sdpa, weights: bool, path: AttentionPath, present: bool) -> Result<Answers> {
    let heads = |x: &Floats, heads: usize| {
        let tensor = upload(gpu, x)?;
        if op.flat {
            tensor.split_heads(heads)
        } else {
            Ok(tensor)
        }
    };
    let query = heads(&op.query, op.shape.heads)?;
    let key = heads(&op.key, op.shape.kv_heads)?;
    let value = heads(&op.value, op.shape.kv_heads)?;
    let past = match &op.past {
        Some((key, value)) => Some((upload(gpu, key)?, upload(gpu, value)?)),
        None => None,
    };
    let sinks = op
        .sinks
        .as_ref()
        .map(|sinks| Tensor::upload(gpu, sinks, &[sinks.len()]))
        .transpose()?;
    let hiding = Uploaded::new(gpu, &op.hiding, op.shape.batch, op.shape.keys)?;

    let mut inputs = AttentionInputs::new(&query, &key, &value);
    inputs.mask = hiding.mask.as_ref();
    inputs.key_mask = hiding.key_mask.as_ref();
    inputs.kv_lengths = hiding.kv_lengths.as_ref();
    inputs.past = past.as_ref().map(|(key, value)| (key, value));
    inputs.sinks = sinks.as_ref();
    let mut wanted = Wanted::output().lse();
    wanted.weights = weights && !op.average_weights;
    wanted.mean_weights = weights && op.average_weights;
    wanted.present = present;

    let attention = Attention::new(gpu, op.options.clone())?;
    let mut result = attention
        .clone()
        .with_path(weights_path(path, weights))
        .run(&inputs, wanted)?;
    if path == AttentionPath::Fused && weights {
        let fused = attention.with_path(path).run(&inputs, Wanted::output().lse())?;
        (result.output, result.lse) = (fused.output, fused.lse);
    }
    let output = if op.flat {
        result.output.merge_heads()?
    } else {
        result.output
    };
    let mut answers = Answers::from([("output", answer(&output)?)]);
    for (name, tensor) in [
        ("lse", result.lse),
        ("weights", result.weights),
        ("weights", result.mean_weights),
        ("present_key", result.present_key),
        ("present_value", result.present_value),
    ] {
        if let Some(tensor) = tensor {
            answers.insert(name, answer(&tensor)?);
        }
    }
    Ok(answers)
}

fn packed(gpu: &Gpu, op: &Packed, path: AttentionPath) -> Result<Answers> {
    let (query, key, value) = (
        upload(gpu, &op.query)?,
        upload(gpu, &op.key)?,
        upload(gpu, &op.value)?,
    );
    let seams = CuSeqlens::new(gpu, &op.cu_seqlens_q, &op.cu_seqlens_k)?;
    let sinks = op
        .sinks
        .as_ref()
        .map(|sinks| Tensor::upload(gpu, sinks, &[sinks.len()]))
        .transpose()?;
    let mut inputs = PackedInputs::new(&query, &key, &value, &seams);
    inputs.sinks = sinks.as_ref();
    let result = Attention::new(gpu, op.options.clone())?
        .with_path(path)
        .run_packed(&inputs)?;
    Ok(Answers::from([
        ("output", answer(&result.output)?),
        ("lse", answer(&result.lse)?),
    ]))
}

/// The path that holds the weights, if they are wanted.
fn weights_path(path: AttentionPath, weights: bool) -> AttentionPath {
    if weights && path == AttentionPath::Fused {
        AttentionPath::Composed
    } else {
        path
    }
}

fn layer(gpu: &Gpu, op: &Layer, weights: bool, path: AttentionPath) -> Result<Answers> {
    let mut layer = MultiHeadAttention::new(gpu, op.config.clone(), &parameters(op)?)?;
    if let Some(options) = op.rotary {
        layer = layer.with_rotary(multihead::Rotary::new(gpu, options, op.queries.max(1))?)?;
    }
    let query = upload(gpu, &op.query)?;
    let key = op.key.as_ref().map(|key| upload(gpu, key)).transpose()?;
    let value = op.value.as_ref().map(|value| upload(gpu, value)).transpose()?;
    let hiding = Uploaded::new(gpu, &op.hiding, op.batch, op.keys)?;

    let mut inputs = MultiHeadInputs::new(&query);
    inputs.key = key.as_ref();
    inputs.value = value.as_ref();
    inputs.attn_mask = hiding.mask.as_ref();
    inputs.key_padding_mask = hiding.key_mask.as_ref();
    inputs.kv_lengths = hiding.kv_lengths.as_ref();
    let need = match (weights, op.average_weights) {
        (false, _) => NeedWeights::No,
        (true, true) => NeedWeights::Averaged,
        (true, false) => NeedWeights::PerHead,
    };
    let mut result = layer
        .clone()
        .with_path(weights_path(path, weights))
        .forward(&inputs, need)?;
    if path == AttentionPath::Fused && weights {
        result.output = layer.with_path(path).forward(&inputs, NeedWeights::No)?.output;
    }
    let mut answers = Answers::from([("output", answer(&result.output)?)]);
    if let Some(weights) = result.weights {
        answers.insert("weights", answer(&weights)?);
    }
    Ok(answers)
}

fn rotary(gpu: &Gpu, op: &Rotary) -> Result<Answers> {
    let input = upload(gpu, &op.input)?;
    let rotary = multihead::Rotary::from_tables(op.pairing, upload(gpu, &op.cos)?, upload(gpu, &op.sin)?)?;
    let output = Tensor::zeros(gpu, input.dtype(), input.shape())?;
    let heads = |tensor: &Tensor| {
        if op.flat {
            tensor.split_heads(op.shape[1])
        } else {
            Ok(tensor.clone())
        }
    };
    let ids = match &op.positions {
        Some(positions) => {
            let words: Vec<u32> = positions.iter().map(|&position| position as u32).collect();
            Some(Tensor::upload(gpu, &words, &[op.shape[0], op.shape[2]])?)
        }
        None => None,
    };
    let positions = ids
        .as_ref()
        .map_or(RotaryPositions::Start(0), RotaryPositions::Each);
    let mut encoder = gpu.encoder();
    rotary.record(&mut encoder, &heads(&input)?, positions, &heads(&output)?)?;
    gpu.submit(encoder)?;
    Ok(Answers::from([("output", answer(&output)?)]))
}

/// The layer's parameters.
pub(crate) fn parameters(op: &Layer) -> Result<Parameters> {
    let given = &op.parameters;
    let mut parameters = Parameters::zeros(&op.config)?;
    parameters.q_proj_weight.clone_from(&given.q_weight);
    parameters.k_proj_weight.clone_from(&given.k_weight);
    parameters.v_proj_weight.clone_from(&given.v_weight);
    parameters.out_proj_weight.clone_from(&given.out_weight);
    if let Some([q, k, v]) = &given.in_biases {
        parameters.q_proj_bias = Some(q.clone());
        parameters.k_proj_bias = Some(k.clone());
        parameters.v_proj_bias = Some(v.clone());
    }
    if let Some(bias) = &given.out_bias {
        parameters.out_proj_bias = Some(bias.clone());
    }
    if let Some([k, v]) = &given.bias_kv {
        parameters.bias_k = Some(k.clone());
        parameters.bias_v = Some(v.clone());
    }
    Ok(parameters)
}

/// Masks and lengths on the GPU.
struct Uploaded {
    mask: Option<Mask>,
    key_mask: Option<Mask>,
    kv_lengths: Option<KvLengths>,
}

impl Uploaded {
    fn new(gpu: &Gpu, hiding: &Hiding, batch: usize, keys: usize) -> Result<Self> {
        let mask = |mask: &CaseMask| {
            let mask = match &mask.data {
                MaskData::Keep(data) => Mask::keep_from(gpu, data, &mask.shape)?,
                MaskData::Bias(data) => Mask::bias_from(gpu, data, &mask.shape)?,
            };
            Ok(mask.with_short_keys())
        };
        Ok(Self {
            mask: hiding.mask.as_ref().map(mask).transpose()?,
            key_mask: hiding
                .key_mask
                .as_ref()
                .map(|keep| Mask::keep_from(gpu, keep, &[batch, keys]))
                .transpose()?,
            kv_lengths: hiding
                .kv_lengths
                .as_ref()
                .map(|lengths| KvLengths::new(gpu, lengths))
                .transpose()?,
        })
    }
}

fn upload(gpu: &Gpu, x: &Floats) -> Result<Tensor> {
    if x.dtype == DType::F16 {
        let halves: Vec<f16> = x.data.iter().map(|&x| f16::from_f32(x)).collect();
        return Tensor::upload(gpu, &halves, &x.shape);
    }
    Tensor::upload(gpu, &x.data, &x.shape)
}

fn answer(tensor: &Tensor) -> Result<Answer> {
    let data = if tensor.dtype() == DType::F16 {
        tensor.download::<f16>()?.iter().map(|x| x.to_f64()).collect()
    } else {
        tensor.download::<f32>()?.iter().map(|&x| f64::from(x)).collect()
    };
    Ok(Answer {
        shape: tensor.shape().to_vec(),
        data,
    })
}
