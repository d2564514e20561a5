//! The layer against the reference: every way to call it.

use half::f16;
use multihead::{
    AttentionOptions, AttentionPath, Causal, CheckpointNames, DType, Error, Gpu, KvLengths, Mask,
    MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, NeedWeights, Parameters,
    Tensor, reference,
};
use proptest::prelude::*;

use crate::{
    field::{all_rows, plain, same_bits},
    support::{self, Numbers, check_bound, download, gpu, halves, through_f16, wide},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Self-attention.
    Itself,
    /// One tensor for keys and values.
    KeyIsValue,
    KeyAndValue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MaskKind {
    None,
    Keep,
    Ignore,
    Bias,
}

/// One call of one layer.
#[derive(Debug, Clone)]
struct Case {
    config: MultiHeadAttentionConfig,
    /// `None`: inputs are `[L, E]`.
    batch: Option<usize>,
    queries: usize,
    keys: usize,
    source: Source,
    mask: MaskKind,
    /// Last axes of the mask that are there: 1 to 4.
    mask_rank: usize,
    mask_ones: [bool; 4],
    padding: MaskKind,
    lengths: bool,
    causal: Option<Causal>,
    activations: DType,
    need: NeedWeights,
    seed: u64,
}

fn upload(gpu: &Gpu, values: &[f32], shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::F16 => Tensor::upload(gpu, &halves(values), shape),
        _ => Tensor::upload(gpu, values, shape),
    }
    .unwrap()
}

/// Parameters with numbers everywhere: a fresh layer's biases are zeros.
pub(crate) fn parameters(config: &MultiHeadAttentionConfig, seed: u64) -> Parameters {
    let mut parameters = Parameters::init(config, seed).unwrap();
    let mut numbers = Numbers::new(seed);
    let p = &mut parameters;
    let vectors = [
        &mut p.q_proj_bias,
        &mut p.k_proj_bias,
        &mut p.v_proj_bias,
        &mut p.out_proj_bias,
        &mut p.bias_k,
        &mut p.bias_v,
    ];
    for vector in vectors.into_iter().flatten() {
        vector.iter_mut().for_each(|x| *x = numbers.normal());
    }
    parameters
}

/// As a layer with parameters of this type holds them.
pub(crate) fn stored(parameters: &Parameters, dtype: DType) -> Parameters {
    let mut stored = parameters.clone();
    if dtype == DType::F16 {
        let p = &mut stored;
        for weight in [
            &mut p.q_proj_weight,
            &mut p.k_proj_weight,
            &mut p.v_proj_weight,
            &mut p.out_proj_weight,
        ] {
            *weight = through_f16(weight);
        }
        for vector in [
            &mut p.q_proj_bias,
            &mut p.k_proj_bias,
            &mut p.v_proj_bias,
            &mut p.out_proj_bias,
            &mut p.bias_k,
            &mut p.bias_v,
        ]
        .into_iter()
        .flatten()
        {
            *vector = through_f16(vector);
        }
    }
    stored
}

pub(crate) fn layer_parameters(p: &Parameters) -> reference::LayerParameters<'_> {
    let mut view = reference::LayerParameters::new(
        &p.q_proj_weight,
        &p.k_proj_weight,
        &p.v_proj_weight,
        &p.out_proj_weight,
    );
    view.q_bias = p.q_proj_bias.as_deref();
    view.k_bias = p.k_proj_bias.as_deref();
    view.v_bias = p.v_proj_bias.as_deref();
    view.out_bias = p.out_proj_bias.as_deref();
    view.bias_k = p.bias_k.as_deref();
    view.bias_v = p.bias_v.as_deref();
    view
}

/// The numbers of a call.
struct Numbered {
    parameters: Parameters,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    mask_shape: Vec<usize>,
    bools: Vec<bool>,
    floats: Vec<f32>,
    padding: Vec<bool>,
    lengths: Vec<usize>,
}

/// The tensors of a call.
struct Uploaded {
    query: Tensor,
    key: Option<Tensor>,
    value: Option<Tensor>,
    mask: Option<Mask>,
    padding: Option<Mask>,
    lengths: Option<KvLengths>,
    causal: Option<Causal>,
}

impl Uploaded {
    fn inputs(&self) -> MultiHeadInputs<'_> {
        let mut inputs = MultiHeadInputs::new(&self.query);
        inputs.key = self.key.as_ref();
        inputs.value = self.value.as_ref();
        inputs.attn_mask = self.mask.as_ref();
        inputs.key_padding_mask = self.padding.as_ref();
        inputs.kv_lengths = self.lengths.as_ref();
        inputs.causal = self.causal;
        inputs
    }
}

impl Case {
    fn new(config: MultiHeadAttentionConfig, batch: usize, queries: usize, keys: usize) -> Self {
        Self {
            config,
            batch: Some(batch),
            queries,
            keys,
            source: Source::Itself,
            mask: MaskKind::None,
            mask_rank: 4,
            mask_ones: [false; 4],
            padding: MaskKind::None,
            lengths: false,
            causal: None,
            activations: DType::F32,
            need: NeedWeights::PerHead,
            seed: 1,
        }
    }

    /// Queries attend to keys of their own.
    fn cross(mut self) -> Self {
        self.source = Source::KeyAndValue;
        self
    }

    fn numbers(&self) -> Numbered {
        let mut numbers = Numbers::new(self.seed);
        let batch = self.batch.unwrap_or(1);
        let mut floats = |count: usize| {
            let values = numbers.normals(count);
            match self.activations {
                DType::F16 => through_f16(&values),
                _ => values,
            }
        };
        let query = floats(batch * self.queries * self.config.embed_dim);
        let mut key = floats(batch * self.keys * self.config.kdim);
        let mut value = floats(batch * self.keys * self.config.vdim);
        match self.source {
            Source::Itself => (key, value) = (query.clone(), query.clone()),
            Source::KeyIsValue => value.clone_from(&key),
            Source::KeyAndValue => {}
        }
        let full = [batch, self.config.num_heads, self.queries, self.keys];
        let mut mask_shape = full;
        for (axis, one) in mask_shape.iter_mut().zip(self.mask_ones) {
            *axis = if one { 1 } else { *axis };
        }
        let mask_shape = mask_shape[4 - self.mask_rank..].to_vec();
        let len = mask_shape.iter().product();
        Numbered {
            parameters: parameters(&self.config, self.seed),
            query,
            key,
            value,
            bools: (0..len).map(|_| numbers.chance(0.7)).collect(),
            floats: (0..len)
                .map(|_| match numbers.below(6) {
                    0 => f32::NEG_INFINITY,
                    _ => numbers.normal(),
                })
                .collect(),
            mask_shape,
            padding: (0..batch * self.keys).map(|_| numbers.chance(0.8)).collect(),
            lengths: (0..batch).map(|_| numbers.below(self.keys + 1)).collect(),
        }
    }

    fn reference<T: reference::Real>(&self, of: &Numbered) -> reference::LayerOutput<T> {
        let lift = |values: &[f32]| values.iter().map(|&x| T::from_f32(x)).collect::<Vec<T>>();
        let (query, key, value) = (lift(&of.query), lift(&of.key), lift(&of.value));
        let parameters = stored(&of.parameters, self.config.dtype);
        reference::MultiHead {
            config: &self.config,
            parameters: layer_parameters(&parameters),
            batch: self.batch.unwrap_or(1),
            queries: self.queries,
            keys: self.keys,
            query: &query,
            key: &key,
            value: &value,
            mask: match self.mask {
                MaskKind::None => None,
                MaskKind::Keep | MaskKind::Ignore => Some(reference::Mask::keep(&of.bools, &of.mask_shape)),
                MaskKind::Bias => Some(reference::Mask::bias(&of.floats, &of.mask_shape)),
            },
            key_mask: (self.padding != MaskKind::None).then_some(&of.padding[..]),
            kv_lengths: self.lengths.then_some(&of.lengths[..]),
            causal: self.causal,
            rotary: None,
        }
        .run()
        .unwrap()
    }

    fn upload(&self, of: &Numbered, gpu: &Gpu) -> Uploaded {
        let tensor = |values: &[f32], rows: usize, width: usize| {
            let shape = [self.batch.as_slice(), &[rows, width]].concat();
            upload(gpu, values, &shape, self.activations)
        };
        let ignores = |keeps: &[bool]| keeps.iter().map(|keep| !keep).collect::<Vec<bool>>();
        let mask = match self.mask {
            MaskKind::None => None,
            MaskKind::Keep => Some(Mask::keep_from(gpu, &of.bools, &of.mask_shape)),
            // PyTorch's polarity.
            MaskKind::Ignore => Some(Mask::ignore_from(gpu, &ignores(&of.bools), &of.mask_shape)),
            MaskKind::Bias => Some(Mask::bias_from(gpu, &of.floats, &of.mask_shape)),
        };
        let padding_shape = [self.batch.as_slice(), &[self.keys]].concat();
        let padding = match self.padding {
            MaskKind::None => None,
            MaskKind::Keep => Some(Mask::keep_from(gpu, &of.padding, &padding_shape)),
            _ => Some(Mask::ignore_from(gpu, &ignores(&of.padding), &padding_shape)),
        };
        let (kdim, vdim) = (self.config.kdim, self.config.vdim);
        Uploaded {
            query: tensor(&of.query, self.queries, self.config.embed_dim),
            key: (self.source != Source::Itself).then(|| tensor(&of.key, self.keys, kdim)),
            value: (self.source == Source::KeyAndValue).then(|| tensor(&of.value, self.keys, vdim)),
            mask: mask.map(Result::unwrap),
            padding: padding.map(Result::unwrap),
            lengths: self.lengths.then(|| KvLengths::new(gpu, &of.lengths).unwrap()),
            causal: self.causal,
        }
    }

    fn check(&self) -> Result<(), String> {
        let numbers = self.numbers();
        let (truth, narrow) = (self.reference::<f64>(&numbers), self.reference::<f32>(&numbers));
        for (name, gpu) in [("", gpu()), ("plain device, ", plain())] {
            let layer = MultiHeadAttention::new(gpu, self.config.clone(), &numbers.parameters)
                .map_err(|error| error.to_string())?;
            let uploaded = self.upload(&numbers, gpu);
            let result = layer
                .forward(&uploaded.inputs(), self.need)
                .map_err(|error| error.to_string())?;
            if result.output.shape() != uploaded.query.shape() || result.output.dtype() != self.activations {
                return Err(format!(
                    "{name}output is {:?} {:?}",
                    result.output.dtype(),
                    result.output.shape()
                ));
            }
            let output = download(&result.output);
            let half = self.activations == DType::F16;
            check_bound(
                &format!("{name}output"),
                &output,
                &narrow.output,
                &truth.output,
                half,
            )?;
            let batch = self.batch.as_slice();
            let [.., queries, keys] = truth.shape.weights();
            let (shape, narrow, truth) = match self.need {
                NeedWeights::No => {
                    if result.weights.is_some() {
                        return Err("weights that nobody wanted".to_owned());
                    }
                    continue;
                }
                NeedWeights::PerHead => (
                    [batch, &[self.config.num_heads, queries, keys]].concat(),
                    narrow.weights.clone(),
                    truth.weights.clone(),
                ),
                NeedWeights::Averaged => (
                    [batch, &[queries, keys]].concat(),
                    reference::mean_heads(&narrow.weights, &truth.shape).unwrap(),
                    reference::mean_heads(&truth.weights, &truth.shape).unwrap(),
                ),
            };
            let weights = result.weights.ok_or("no weights")?;
            if weights.shape() != shape {
                return Err(format!(
                    "{name}weights have shape {:?}, not {shape:?}",
                    weights.shape()
                ));
            }
            let weights = download(&weights);
            check_bound(&format!("{name}weights"), &weights, &narrow, &truth, false)?;
            if let Some(at) = (0..truth.len()).find(|&at| truth[at] == 0.0 && weights[at] != 0.0) {
                return Err(format!("{name}weight {at} is {}", weights[at]));
            }
            let composed = layer.clone().with_path(AttentionPath::Composed);
            let without = composed.forward(&uploaded.inputs(), NeedWeights::No).unwrap();
            if !same_bits(&download(&without.output), &output) {
                return Err(format!("{name}the output differs when weights are wanted"));
            }
        }
        Ok(())
    }

    fn row(self, name: impl Into<String>) -> (String, Result<(), String>) {
        (name.into(), self.check())
    }
}

fn config(embed: usize, heads: usize) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(embed, heads)
}

#[test]
fn self_and_cross_attention_of_every_size() {
    let mut rows = Vec::new();
    for (embed, heads) in [(1, 1), (2, 2), (8, 2), (12, 3), (30, 5), (64, 8), (33, 1), (7, 7)] {
        for (batch, queries, keys) in [(1, 1, 1), (2, 5, 7), (3, 13, 4), (1, 33, 65)] {
            for bias in [true, false] {
                let config = config(embed, heads).bias(bias);
                let name = format!("E {embed} H {heads} B {batch} {queries} x {keys} bias {bias}");
                rows.push(Case::new(config.clone(), batch, queries, queries).row(format!("{name} self")));
                let cross = Case::new(config.clone(), batch, queries, keys).cross();
                rows.push(cross.clone().row(format!("{name} cross")));
                rows.push(
                    Case {
                        source: Source::KeyIsValue,
                        ..cross
                    }
                    .row(format!("{name} key is value")),
                );
            }
        }
    }
    for (kdim, vdim) in [(1, 3), (12, 5), (5, 12), (64, 1), (9, 9)] {
        for bias in [true, false] {
            let case = Case::new(config(12, 3).kdim(kdim).vdim(vdim).bias(bias), 2, 5, 7);
            rows.push(case.cross().row(format!("kdim {kdim} vdim {vdim} bias {bias}")));
        }
    }
    all_rows(rows);
}

/// Fewer heads of keys than of queries, and heads of a size of their own, in every kind of layer.
#[test]
fn grouped_heads_and_heads_of_their_own_size() {
    let mut rows = Vec::new();
    for (embed, heads, kv_heads, head_dim) in [
        (12, 6, 2, None),
        (12, 6, 1, None),
        (20, 4, 4, Some(3)),
        (10, 6, 3, Some(8)),
        (5, 4, 2, Some(1)),
        (64, 8, 2, Some(16)),
        (33, 5, 1, Some(40)),
    ] {
        for add in [false, true] {
            for (dtype, activations) in [(DType::F32, DType::F32), (DType::F16, DType::F16)] {
                let mut config = config(embed, heads).num_kv_heads(kv_heads).dtype(dtype);
                config.head_dim = head_dim;
                config = config.add_bias_kv(add).add_zero_attn(add);
                let name = format!("E {embed} H {heads}/{kv_heads} D {head_dim:?} {add} {dtype:?}");
                let own = Case {
                    activations,
                    causal: Some(Causal::TopLeft),
                    ..Case::new(config.clone().bias(add), 2, 17, 17)
                };
                rows.push(own.row(format!("{name} self")));
                let cross = Case {
                    activations,
                    mask: MaskKind::Ignore,
                    need: NeedWeights::Averaged,
                    ..Case::new(config.clone().out_bias(false), 2, 5, 7).cross()
                };
                rows.push(cross.row(format!("{name} cross")));
                let sizes = Case {
                    activations,
                    padding: MaskKind::Keep,
                    ..Case::new(config.kdim(7).vdim(3).bias(false).out_bias(true), 2, 4, 9).cross()
                };
                rows.push(sizes.row(format!("{name} kdim, vdim")));
            }
        }
    }
    let slopes: Vec<f32> = (1..=6).map(|h| 0.5f32.powi(h)).collect();
    let options = AttentionOptions::new().alibi(slopes).softcap(2.0);
    let alibi = config(12, 6).num_kv_heads(3).attention(options);
    rows.push(Case::new(alibi, 1, 9, 9).row("ALiBi has a slope per query head"));
    all_rows(rows);
}

/// A layer of few key heads is the layer of many whose key heads are the few, repeated.
#[test]
fn grouped_heads_are_repeated_heads() {
    let grouped = config(12, 6).num_kv_heads(2);
    let few = parameters(&grouped, 7);
    let mut many = few.clone();
    // Two rows a head; head h reads h / 3.
    let repeat = |values: &[f32], width: usize| {
        let heads = values.chunks(2 * width);
        heads.flat_map(|head| head.repeat(3)).collect::<Vec<f32>>()
    };
    many.k_proj_weight = repeat(&few.k_proj_weight, 12);
    many.v_proj_weight = repeat(&few.v_proj_weight, 12);
    many.k_proj_bias = few.k_proj_bias.as_deref().map(|bias| repeat(bias, 1));
    many.v_proj_bias = few.v_proj_bias.as_deref().map(|bias| repeat(bias, 1));
    let x = upload(
        gpu(),
        &Numbers::new(1).normals(2 * 5 * 12),
        &[2, 5, 12],
        DType::F32,
    );
    let run = |config: MultiHeadAttentionConfig, parameters: &Parameters| {
        let layer = MultiHeadAttention::new(gpu(), config, parameters).unwrap();
        assert_eq!(&layer.parameters().unwrap(), parameters);
        let result = layer
            .forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)
            .unwrap();
        [result.output, result.weights.unwrap()].map(|tensor| wide(&download(&tensor)))
    };
    for (few, many) in run(grouped, &few).iter().zip(run(config(12, 6), &many)) {
        assert_eq!(few.len(), many.len());
        assert!(few.iter().zip(many).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}

/// Nothing hides what follows the sequence: not masks, padding, lengths, causal order or windows.
#[test]
fn added_keys_with_every_way_to_hide_the_others() {
    let mut rows = Vec::new();
    for (add_bias_kv, add_zero_attn) in [(true, false), (false, true), (true, true)] {
        let config = config(12, 3)
            .add_bias_kv(add_bias_kv)
            .add_zero_attn(add_zero_attn);
        let case = Case::new(config.clone(), 2, 5, 7).cross();
        for mask in [MaskKind::None, MaskKind::Keep, MaskKind::Ignore, MaskKind::Bias] {
            for padding in [MaskKind::None, MaskKind::Ignore] {
                for causal in [None, Some(Causal::TopLeft), Some(Causal::BottomRight)] {
                    let case = Case {
                        mask,
                        padding,
                        causal,
                        lengths: padding == MaskKind::None && mask == MaskKind::Bias,
                        ..case.clone()
                    };
                    rows.push(case.row(format!(
                        "bias_kv {add_bias_kv} zero {add_zero_attn} {mask:?} {padding:?} {causal:?}"
                    )));
                }
            }
        }
        let hidden = AttentionOptions::new()
            .window(Some(0), Some(0))
            .query_offset(-100)
            .alibi([0.5, 0.25, 0.1]);
        rows.push(Case::new(config.attention(hidden), 2, 5, 5).row("all behind a window"));
    }
    all_rows(rows);
    // Stated without the reference: with all keys padded, only the added ones have weight.
    let case = Case {
        padding: MaskKind::Ignore,
        ..Case::new(config(4, 2).add_bias_kv(true).add_zero_attn(true), 1, 3, 3)
    };
    let mut numbers = case.numbers();
    numbers.padding = vec![false; 3];
    let layer = MultiHeadAttention::new(gpu(), case.config.clone(), &numbers.parameters).unwrap();
    let uploaded = case.upload(&numbers, gpu());
    let result = layer.forward(&uploaded.inputs(), NeedWeights::PerHead).unwrap();
    for row in download(&result.weights.unwrap()).chunks(5) {
        assert_eq!(row[..3], [0.0; 3]);
        assert!(row[3] > 0.0 && row[4] > 0.0 && (row[3] + row[4] - 1.0).abs() < 1e-6);
    }
}

#[test]
fn masks_padding_lengths_and_causal_order() {
    let mut rows = Vec::new();
    for source in [Source::Itself, Source::KeyAndValue] {
        let keys = if source == Source::Itself { 6 } else { 9 };
        let case = Case {
            source,
            ..Case::new(config(12, 3), 2, 6, keys)
        };
        for mask in [MaskKind::Keep, MaskKind::Ignore, MaskKind::Bias] {
            for (mask_rank, mask_ones) in [
                (2, [false; 4]),
                (3, [false; 4]),
                (4, [false; 4]),
                (4, [false, true, true, false]),
                (4, [true, false, false, true]),
                (1, [false; 4]),
            ] {
                let case = Case {
                    mask,
                    mask_rank,
                    mask_ones,
                    ..case.clone()
                };
                rows.push(case.row(format!("{source:?} {mask:?} {mask_rank} {mask_ones:?}")));
            }
        }
        for padding in [MaskKind::Keep, MaskKind::Ignore] {
            for lengths in [false, true] {
                for causal in [Causal::None, Causal::TopLeft, Causal::BottomRight] {
                    for need in [NeedWeights::Averaged, NeedWeights::PerHead, NeedWeights::No] {
                        let case = Case {
                            padding,
                            lengths,
                            causal: Some(causal),
                            need,
                            ..case.clone()
                        };
                        rows.push(case.row(format!("{source:?} {padding:?} {lengths} {causal:?} {need:?}")));
                    }
                }
            }
        }
    }
    all_rows(rows);
}

/// The configuration's causal order holds unless the call has one of its own.
#[test]
fn a_call_overrides_the_causal_order() {
    let causal = AttentionOptions::new().causal(Causal::TopLeft);
    let layer = MultiHeadAttention::seeded(gpu(), config(8, 2).attention(causal), 3).unwrap();
    let x = upload(gpu(), &Numbers::new(1).normals(4 * 8), &[1, 4, 8], DType::F32);
    let seen = |causal: Option<Causal>| {
        let mut inputs = MultiHeadInputs::new(&x);
        inputs.causal = causal;
        let weights = layer
            .forward(&inputs, NeedWeights::Averaged)
            .unwrap()
            .weights
            .unwrap();
        download(&weights).iter().filter(|&&w| w != 0.0).count()
    };
    assert_eq!(seen(None), 10);
    assert_eq!(seen(Some(Causal::None)), 16);
    assert_eq!(seen(Some(Causal::BottomRight)), 10);
}

#[test]
fn inputs_without_a_batch() {
    let mut rows = Vec::new();
    for need in [NeedWeights::No, NeedWeights::Averaged, NeedWeights::PerHead] {
        for source in [Source::Itself, Source::KeyIsValue, Source::KeyAndValue] {
            for padding in [MaskKind::None, MaskKind::Ignore] {
                for mask_rank in [2, 3] {
                    let keys = if source == Source::Itself { 5 } else { 8 };
                    let case = Case {
                        batch: None,
                        source,
                        need,
                        padding,
                        mask: MaskKind::Ignore,
                        mask_rank,
                        ..Case::new(config(12, 3).add_zero_attn(true), 1, 5, keys)
                    };
                    rows.push(case.row(format!("{need:?} {source:?} {padding:?} {mask_rank}")));
                }
            }
        }
    }
    all_rows(rows);
}

#[test]
fn f16_activations_and_parameters() {
    let types = [DType::F32, DType::F16];
    let mut rows = Vec::new();
    for activations in types {
        for dtype in types {
            for bias in [true, false] {
                for source in [Source::Itself, Source::KeyAndValue] {
                    for (kdim, add) in [(30, false), (7, false), (30, true)] {
                        if source == Source::Itself && kdim != 30 {
                            continue;
                        }
                        let keys = if source == Source::Itself { 13 } else { 17 };
                        let config = config(30, 5).kdim(kdim).bias(bias).dtype(dtype);
                        let case = Case {
                            activations,
                            source,
                            ..Case::new(config.add_bias_kv(add).add_zero_attn(add), 2, 13, keys)
                        };
                        rows.push(case.row(format!(
                            "{activations:?} {dtype:?} {bias} {source:?} {kdim} {add}"
                        )));
                    }
                }
            }
        }
    }
    all_rows(rows);
}

#[test]
fn empty_sizes() {
    let mut rows = Vec::new();
    for (batch, queries, keys) in [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)] {
        for add in [false, true] {
            let case = Case::new(
                config(6, 2).add_bias_kv(add).add_zero_attn(add),
                batch,
                queries,
                keys,
            );
            rows.push(
                case.clone()
                    .cross()
                    .row(format!("{batch} {queries} {keys} {add}")),
            );
            rows.push(
                Case {
                    need: NeedWeights::Averaged,
                    padding: MaskKind::Ignore,
                    ..case.cross()
                }
                .row(format!("{batch} {queries} {keys} {add} averaged")),
            );
        }
        rows.push(Case::new(config(6, 2), batch, queries, queries).row(format!("{batch} {queries} self")));
    }
    all_rows(rows);
    // Without a key the output is the output projection's bias.
    let case = Case::new(config(6, 2), 1, 2, 0).cross();
    let numbers = case.numbers();
    let layer = MultiHeadAttention::new(gpu(), case.config.clone(), &numbers.parameters).unwrap();
    let uploaded = case.upload(&numbers, gpu());
    let output = layer.forward(&uploaded.inputs(), NeedWeights::No).unwrap().output;
    assert_eq!(
        download(&output),
        numbers.parameters.out_proj_bias.unwrap().repeat(2)
    );
}

/// One layer is the same from a seed, from its parameters, and from its checkpoint under any names.
#[test]
fn seeded_parameters_go_to_a_checkpoint_and_back() {
    for config in [
        config(12, 3),
        config(12, 3).bias(false),
        config(12, 3).kdim(5).vdim(7).add_bias_kv(true),
        config(12, 6).num_kv_heads(2).with_head_dim(4).out_bias(false),
    ] {
        let seeded = MultiHeadAttention::seeded(gpu(), config.clone(), 42).unwrap();
        let parameters = Parameters::init(&config, 42).unwrap();
        let query = upload(
            gpu(),
            &Numbers::new(1).normals(2 * 4 * 12),
            &[2, 4, 12],
            DType::F32,
        );
        let key = upload(
            gpu(),
            &Numbers::new(2).normals(2 * 6 * config.kdim),
            &[2, 6, config.kdim],
            DType::F32,
        );
        let value = upload(
            gpu(),
            &Numbers::new(3).normals(2 * 6 * config.vdim),
            &[2, 6, config.vdim],
            DType::F32,
        );
        let inputs = MultiHeadInputs::new(&query).key_value(&key, &value);
        let run =
            |layer: &MultiHeadAttention| download(&layer.forward(&inputs, NeedWeights::No).unwrap().output);
        let expected = run(&seeded);
        assert!(expected.iter().any(|&x| x != 0.0));
        let other = MultiHeadAttention::seeded(gpu(), config.clone(), 43).unwrap();
        assert!(!same_bits(&run(&other), &expected));
        let same = MultiHeadAttention::new(gpu(), config.clone(), &parameters).unwrap();
        assert!(same_bits(&run(&same), &expected));
        let names: &[CheckpointNames] = if config.add_bias_kv {
            &[CheckpointNames::PyTorchSeparate]
        } else if config.head_dim.is_some() {
            &[CheckpointNames::PyTorchSeparate, CheckpointNames::Llama]
        } else {
            &[
                CheckpointNames::PyTorch,
                CheckpointNames::Bert,
                CheckpointNames::Gpt2,
                CheckpointNames::Llama,
            ]
        };
        for &names in names {
            let bytes = parameters
                .to_safetensors(&config, "layers.0.attention", names, DType::F32)
                .unwrap();
            let layer =
                MultiHeadAttention::from_safetensors(gpu(), config.clone(), &bytes, "layers.0.attention")
                    .unwrap();
            assert!(same_bits(&run(&layer), &expected), "{names:?}");
            // The same file for a layer that keeps halves, and a file of halves.
            let half_config = config.clone().dtype(DType::F16);
            let halves = parameters
                .to_safetensors(&config, "a", names, DType::F16)
                .unwrap();
            let a = MultiHeadAttention::from_safetensors(gpu(), half_config, &bytes, "layers.0.attention")
                .unwrap();
            let b = MultiHeadAttention::from_safetensors(gpu(), config.clone(), &halves, "a").unwrap();
            let (a, b) = (run(&a), run(&b));
            assert!(same_bits(&a, &b) && !same_bits(&a, &expected));
        }
    }
}

/// From host data to host data is the same call.
#[test]
fn forward_host_is_forward() {
    let layer = MultiHeadAttention::seeded(gpu(), config(12, 3), 5).unwrap();
    let x = Numbers::new(1).normals(2 * 5 * 12);
    let y = layer.forward_host(&x, &[2, 5, 12]).unwrap();
    let x = upload(gpu(), &x, &[2, 5, 12], DType::F32);
    let result = layer.forward(&MultiHeadInputs::new(&x), NeedWeights::No).unwrap();
    assert!(same_bits(&y, &download(&result.output)));
}

/// Outputs and inputs that are views, between values that must stay.
#[test]
fn views_in_and_out() {
    for gpu in [gpu(), plain()] {
        for dtype in [DType::F32, DType::F16] {
            let layer = MultiHeadAttention::seeded(gpu, config(12, 3), 5).unwrap();
            let x = Numbers::new(1).normals(2 * 5 * 12);
            let contiguous = upload(gpu, &x, &[2, 5, 12], dtype);
            let expected = layer
                .forward(&MultiHeadInputs::new(&contiguous), NeedWeights::No)
                .unwrap();
            let expected = download(&expected.output);
            // Sequence first, with three columns that do not belong.
            let mut memory = vec![f32::NAN; 5 * 2 * 15];
            for (at, &x) in x.iter().enumerate() {
                let (b, l, e) = (at / 60, at / 12 % 5, at % 12);
                memory[(l * 2 + b) * 15 + e + 1] = x;
            }
            let view = |whole: &Tensor| whole.slice(2, 1..13).unwrap().permute(&[1, 0, 2]).unwrap();
            let input = view(&upload(gpu, &memory, &[5, 2, 15], dtype));
            let whole = upload(gpu, &vec![-7.0; 5 * 2 * 15], &[5, 2, 15], dtype);
            let output = view(&whole);
            let mut encoder = gpu.encoder();
            layer
                .record(
                    &mut encoder,
                    &MultiHeadInputs::new(&input),
                    &MultiHeadOutputs::new(&output),
                )
                .unwrap();
            gpu.submit(encoder).unwrap();
            assert!(same_bits(&download(&output), &expected));
            for (at, &value) in download(&whole).iter().enumerate() {
                assert!((1..13).contains(&(at % 15)) || value == -7.0, "{value} at {at}");
            }
        }
    }
}

/// Two calls of two layers in one encoder, submitted once: scratch and params of one do not reach the other.
#[test]
fn calls_recorded_before_one_submit() {
    for gpu in [gpu(), plain()] {
        let wide = Case {
            mask: MaskKind::Ignore,
            ..Case::new(config(24, 3).add_bias_kv(true), 2, 9, 9)
        };
        let small = Case {
            padding: MaskKind::Ignore,
            seed: 2,
            ..Case::new(config(6, 2), 1, 3, 5).cross()
        };
        let other_mask = Case {
            causal: Some(Causal::TopLeft),
            ..wide.clone()
        };
        let mut encoder = gpu.encoder();
        let mut outputs = Vec::new();
        for case in [&wide, &small, &other_mask, &wide] {
            let numbers = case.numbers();
            let layer = MultiHeadAttention::new(gpu, case.config.clone(), &numbers.parameters).unwrap();
            let uploaded = case.upload(&numbers, gpu);
            let alone = layer.forward(&uploaded.inputs(), NeedWeights::No).unwrap();
            let output = Tensor::zeros(gpu, DType::F32, uploaded.query.shape()).unwrap();
            layer
                .record(&mut encoder, &uploaded.inputs(), &MultiHeadOutputs::new(&output))
                .unwrap();
            outputs.push((download(&alone.output), output));
        }
        assert!(
            download(&outputs[0].1).iter().all(|&x| x == 0.0),
            "nothing runs before the submit"
        );
        gpu.submit(encoder).unwrap();
        for (at, (alone, output)) in outputs.iter().enumerate() {
            assert!(same_bits(alone, &download(output)), "call {at}");
        }
        assert!(!same_bits(&outputs[0].0, &outputs[2].0));
    }
}

/// One dispatch projects queries, keys and values of self-attention; each call runs the kernels that it says.
#[test]
fn a_call_runs_its_kernels() {
    let gpu = Gpu::new().unwrap();
    let count = |case: &Case| {
        let numbers = case.numbers();
        let layer = MultiHeadAttention::new(&gpu, case.config.clone(), &numbers.parameters).unwrap();
        let uploaded = case.upload(&numbers, &gpu);
        let before = gpu.dispatches();
        layer.forward(&uploaded.inputs(), case.need).unwrap();
        gpu.dispatches() - before
    };
    let own = Case::new(config(8, 2), 2, 5, 5);
    assert_eq!(count(&own), 5);
    let grouped = config(8, 4).num_kv_heads(2).with_head_dim(3);
    assert_eq!(count(&Case::new(grouped, 2, 5, 5)), 5);
    assert_eq!(count(&own.clone().cross()), 7);
    assert_eq!(
        count(&Case {
            source: Source::KeyIsValue,
            ..own.clone()
        }),
        6
    );
    assert_eq!(
        count(&Case {
            need: NeedWeights::Averaged,
            ..own.clone()
        }),
        6
    );
    let added = Case::new(config(8, 2).add_bias_kv(true).add_zero_attn(true), 2, 5, 5);
    assert_eq!(count(&added), 9);
    // Warming up builds all that a call needs.
    let gpu = Gpu::new().unwrap();
    for dtype in [DType::F32, DType::F16] {
        let numbers = added.numbers();
        let layer =
            MultiHeadAttention::new(&gpu, added.config.clone().dtype(dtype), &numbers.parameters).unwrap();
        layer.warm_up(dtype).unwrap();
        let built = gpu.pipelines();
        let case = Case {
            activations: dtype,
            need: NeedWeights::No,
            ..added.clone()
        };
        let uploaded = case.upload(&numbers, &gpu);
        layer.forward(&uploaded.inputs(), NeedWeights::No).unwrap();
        assert_eq!(gpu.pipelines(), built, "{dtype:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let gpu = gpu();
    let zeros = |shape: &[usize]| Tensor::zeros(gpu, DType::F32, shape).unwrap();
    let refused = |config: MultiHeadAttentionConfig| {
        MultiHeadAttention::seeded(gpu, config, 1)
            .err()
            .map(|error| error.to_string())
    };
    let text = refused(config(10, 3)).unwrap();
    assert!(text.contains("10") && text.contains('3'), "{text}");
    assert!(refused(config(0, 1)).is_some() && refused(config(4, 0)).is_some());
    for (config, told) in [
        (
            config(12, 6).num_kv_heads(4),
            ["num_kv_heads = 4, num_heads = 6", "multiple"],
        ),
        (config(12, 6).num_kv_heads(0), ["num_kv_heads = 0", "above 0"]),
        (
            config(12, 6).num_kv_heads(12),
            ["num_kv_heads = 12, num_heads = 6", "multiple"],
        ),
        (config(12, 6).with_head_dim(0), ["head_dim = 0", "between 1 and"]),
        (
            config(12, 6).with_head_dim(1 << 28),
            ["num_heads * head_dim = 1610612736", "between 1 and"],
        ),
        (
            config(12, 6).with_head_dim(usize::MAX),
            ["head_dim = 18446744073709551615", "between"],
        ),
        (
            config(10, 3),
            ["embed_dim = 10, num_heads = 3", ".with_head_dim(size)"],
        ),
    ] {
        let text = refused(config).unwrap();
        let _ = told.map(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
    }
    let layer = MultiHeadAttention::seeded(gpu, config(8, 2), 1).unwrap();
    let (x, other) = (zeros(&[2, 3, 8]), zeros(&[1, 3, 8]));
    let forward = |inputs: &MultiHeadInputs| layer.forward(inputs, NeedWeights::No).err();
    for (name, error) in [
        ("width", forward(&MultiHeadInputs::new(&zeros(&[2, 3, 7])))),
        ("rank", forward(&MultiHeadInputs::new(&zeros(&[8])))),
        (
            "batch of the key",
            forward(&MultiHeadInputs::new(&x).key_value(&other, &other)),
        ),
        (
            "lengths of key and value",
            forward(&MultiHeadInputs::new(&x).key_value(&x, &zeros(&[2, 4, 8]))),
        ),
        (
            "no batch with a batch",
            forward(&MultiHeadInputs::new(&x).key_value(&zeros(&[3, 8]), &zeros(&[3, 8]))),
        ),
        (
            "padding",
            forward(
                &MultiHeadInputs::new(&x).key_padding_mask(&Mask::ignore(boolean(gpu, &[2, 4])).unwrap()),
            ),
        ),
        (
            "mask",
            forward(&MultiHeadInputs::new(&x).attn_mask(&Mask::ignore(boolean(gpu, &[6, 3, 3])).unwrap())),
        ),
        (
            "lengths",
            forward(&MultiHeadInputs::new(&x).kv_lengths(&KvLengths::new(gpu, &[3, 4]).unwrap())),
        ),
    ] {
        assert!(matches!(error, Some(Error::Shape(_))), "{name}: {error:?}");
    }
    let integers = Tensor::upload(gpu, &[0u32; 48], &[2, 3, 8]).unwrap();
    assert!(matches!(
        forward(&MultiHeadInputs::new(&integers)),
        Some(Error::DType(_))
    ));
    let mut encoder = gpu.encoder();
    let in_place = layer.record(
        &mut encoder,
        &MultiHeadInputs::new(&x),
        &MultiHeadOutputs::new(&x),
    );
    assert!(matches!(in_place, Err(Error::Overlap(_))), "{in_place:?}");
}

fn boolean(gpu: &Gpu, shape: &[usize]) -> Tensor {
    Tensor::zeros(gpu, DType::Bool, shape).unwrap()
}

/// NaN and infinite parameters are computed with, not refused.
#[test]
fn parameters_that_are_not_finite_are_computed_with() {
    let config = config(4, 2);
    let mut parameters = Parameters::init(&config, 1).unwrap();
    // Output 2 of the output projection.
    parameters.out_proj_weight[9] = f32::NAN;
    let layer = MultiHeadAttention::new(gpu(), config, &parameters).unwrap();
    let y = layer
        .forward_host(&Numbers::new(1).normals(12), &[1, 3, 4])
        .unwrap();
    for (at, y) in y.iter().enumerate() {
        assert_eq!(y.is_nan(), at % 4 == 2, "{at}");
    }
    // f16 parameters beyond its range become infinite.
    assert_eq!(f16::from_f32(1e6), f16::INFINITY);
}

fn cases() -> impl Strategy<Value = Case> {
    let kind = || {
        prop_oneof![
            2 => Just(MaskKind::None),
            1 => Just(MaskKind::Keep),
            1 => Just(MaskKind::Ignore),
            1 => Just(MaskKind::Bias)
        ]
    };
    let padding = prop_oneof![Just(MaskKind::None), Just(MaskKind::Keep), Just(MaskKind::Ignore)];
    let sizes = (
        (1usize..4, 1usize..4, proptest::option::of(1usize..40)),
        1usize..14,
        0usize..4,
        0usize..20,
        0usize..40,
        1usize..40,
        1usize..40,
    );
    let source = prop_oneof![
        Just(Source::Itself),
        Just(Source::KeyIsValue),
        Just(Source::KeyAndValue)
    ];
    let need = prop_oneof![
        Just(NeedWeights::No),
        Just(NeedWeights::Averaged),
        Just(NeedWeights::PerHead)
    ];
    let order = || {
        prop_oneof![
            Just(Causal::None),
            Just(Causal::TopLeft),
            Just(Causal::BottomRight)
        ]
    };
    let mask = (kind(), 1usize..=4, any::<[bool; 4]>(), padding);
    let attention = (
        order(),
        proptest::option::of(order()),
        proptest::option::of(0u32..9),
        -3i64..9,
        any::<[bool; 10]>(),
    );
    (sizes, source, need, mask, attention, any::<u64>()).prop_map(
        |(sizes, source, need, mask, attention, seed)| {
            let ((kv_heads, group, own_size), head_dim, batch, queries, keys, kdim, vdim) = sizes;
            let heads = kv_heads * group;
            let (own_order, causal, left, offset, flags) = attention;
            let [
                bias,
                out_bias,
                add_bias_kv,
                add_zero_attn,
                half,
                half_parameters,
                lengths,
                unbatched,
                softcap,
                alibi,
            ] = flags;
            let embed = heads * head_dim;
            let mut options = AttentionOptions::new()
                .causal(own_order)
                .window(left, None)
                .query_offset(offset);
            options.softcap = softcap.then_some(3.0);
            options.alibi_slopes = alibi.then(|| (0..heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect());
            let mut config = config(embed, heads)
                .num_kv_heads(kv_heads)
                .bias(bias)
                .out_bias(out_bias)
                .add_bias_kv(add_bias_kv)
                .add_zero_attn(add_zero_attn)
                .dtype(if half_parameters { DType::F16 } else { DType::F32 })
                .attention(options);
            config.head_dim = own_size;
            match source {
                Source::Itself => {}
                Source::KeyIsValue => config = config.kdim(kdim).vdim(kdim),
                Source::KeyAndValue => config = config.kdim(kdim).vdim(vdim),
            }
            Case {
                config,
                batch: if unbatched { None } else { Some(batch) },
                queries,
                keys: if source == Source::Itself { queries } else { keys },
                source,
                mask: mask.0,
                mask_rank: mask.1,
                mask_ones: mask.2,
                padding: mask.3,
                lengths,
                causal,
                activations: if half { DType::F16 } else { DType::F32 },
                need,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(support::property(150))]

    /// Any combination agrees with the reference.
    #[test]
    fn any_call_agrees_with_the_reference(case in cases()) {
        case.check().map_err(TestCaseError::fail)?;
    }
}
