//! Case files: one safetensors file holds the inputs of one attention call, its options and, mostly, the
//! right answers with their tolerances.
//!
//! The metadata entry `case` is a JSON object `{"name", "op", "source", "options", "tolerance"}`; tensors
//! named `expected.*` are the answers, all others are inputs. Nothing in a file is trusted: any bytes
//! give a [`Case`] or a [`CaseError`].

// The crate's tests include this file too; no includer uses all of it.
#![allow(dead_code)]

use multihead::reference::{LayerParameters, Mask};
use multihead::{
    Align, AttentionOptions, AttentionShape, Causal, DType, MultiHeadAttentionConfig, RotaryOptions,
    RotaryPairing, RotaryScaling,
};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// Why a file gives no case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum CaseError {
    /// It asks for something that this program does not do.
    Unsupported(String),
    /// It is damaged, or its parts do not fit each other.
    Bad(String),
}

type Result<T> = std::result::Result<T, CaseError>;

fn bad<T>(text: impl Into<String>) -> Result<T> {
    Err(CaseError::Bad(text.into()))
}

fn unsupported<T>(text: impl Into<String>) -> Result<T> {
    Err(CaseError::Unsupported(text.into()))
}

/// Larger files are refused before they are read.
const MAX_FILE: u64 = 8 << 30;

/// Answers with more elements are refused before they are computed.
const MAX_ANSWER: u128 = 1 << 30;

/// Floats of a file. Halves are widened, which is exact.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Floats {
    /// Axes, outermost first.
    pub(crate) shape: Vec<usize>,
    /// Row-major.
    pub(crate) data: Vec<f32>,
    /// [`DType::F32`] or [`DType::F16`]: how the file stores them.
    pub(crate) dtype: DType,
}

/// A mask that broadcasts to `[B, H, Lq, Lk]`, its last axis possibly shorter than the keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CaseMask {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: MaskData,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum MaskData {
    /// `true` = attend.
    Keep(Vec<bool>),
    /// Added to the scores.
    Bias(Vec<f32>),
}

impl CaseMask {
    /// As the reference takes it.
    pub(crate) fn view(&self) -> Mask<'_> {
        match &self.data {
            MaskData::Keep(data) => Mask::keep(data, &self.shape),
            MaskData::Bias(data) => Mask::bias(data, &self.shape),
        }
        .with_short_keys()
    }
}

/// What all operators may carry beside their inputs.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Hiding {
    pub(crate) mask: Option<CaseMask>,
    /// `[B, Lk]`, `true` = attend.
    pub(crate) key_mask: Option<Vec<bool>>,
    /// `[B]`.
    pub(crate) kv_lengths: Option<Vec<usize>>,
}

/// One attention operator.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sdpa {
    /// Keys of the past included.
    pub(crate) shape: AttentionShape,
    pub(crate) options: AttentionOptions,
    /// Inputs and output are `[B, L, H*D]` rather than `[B, H, L, D]`.
    pub(crate) flat: bool,
    pub(crate) query: Floats,
    pub(crate) key: Floats,
    pub(crate) value: Floats,
    /// `[B, Hkv, P, D]` and `[B, Hkv, P, Dv]`, in front of the new keys and values.
    pub(crate) past: Option<(Floats, Floats)>,
    pub(crate) hiding: Hiding,
    /// `[H]`.
    pub(crate) sinks: Option<Vec<f32>>,
    pub(crate) average_weights: bool,
}

impl Sdpa {
    /// Keys of the past.
    pub(crate) fn past_keys(&self) -> usize {
        self.past.as_ref().map_or(0, |(key, _)| key.shape[2])
    }
}

/// A whole layer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layer {
    /// Its `attention` holds the options of the case.
    pub(crate) config: MultiHeadAttentionConfig,
    pub(crate) parameters: Parameters,
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    /// `[B, Lq, E]`.
    pub(crate) query: Floats,
    /// `[B, Lk, kdim]`; absent: the query.
    pub(crate) key: Option<Floats>,
    /// `[B, Lk, vdim]`; absent: the key.
    pub(crate) value: Option<Floats>,
    pub(crate) hiding: Hiding,
    pub(crate) average_weights: bool,
    /// Turns queries and keys, row `l` by position `l`.
    pub(crate) rotary: Option<RotaryOptions>,
}

impl Layer {
    /// The key, or what stands in for it.
    pub(crate) fn key(&self) -> &Floats {
        self.key.as_ref().unwrap_or(&self.query)
    }

    /// The value, or what stands in for it.
    pub(crate) fn value(&self) -> &Floats {
        self.value.as_ref().unwrap_or_else(|| self.key())
    }
}

/// Parameters of a layer, row-major.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Parameters {
    pub(crate) q_weight: Vec<f32>,
    pub(crate) k_weight: Vec<f32>,
    pub(crate) v_weight: Vec<f32>,
    /// `[q, k, v]`.
    pub(crate) in_biases: Option<[Vec<f32>; 3]>,
    pub(crate) out_weight: Vec<f32>,
    pub(crate) out_bias: Option<Vec<f32>>,
    /// `[bias_k, bias_v]`.
    pub(crate) bias_kv: Option<[Vec<f32>; 2]>,
}

impl Parameters {
    /// As the reference takes them.
    pub(crate) fn view(&self) -> LayerParameters<'_> {
        let mut view = LayerParameters::new(&self.q_weight, &self.k_weight, &self.v_weight, &self.out_weight);
        if let Some([q, k, v]) = &self.in_biases {
            view.q_bias = Some(q);
            view.k_bias = Some(k);
            view.v_bias = Some(v);
        }
        if let Some([k, v]) = &self.bias_kv {
            view.bias_k = Some(k);
            view.bias_v = Some(v);
        }
        view.out_bias = self.out_bias.as_deref();
        view
    }
}

/// Sequences laid end to end.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Packed {
    pub(crate) options: AttentionOptions,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// `[Tq, H, D]`.
    pub(crate) query: Floats,
    /// `[Tk, Hkv, D]`.
    pub(crate) key: Floats,
    /// `[Tk, Hkv, Dv]`.
    pub(crate) value: Floats,
    pub(crate) cu_seqlens_q: Vec<usize>,
    pub(crate) cu_seqlens_k: Vec<usize>,
    pub(crate) sinks: Option<Vec<f32>>,
}

/// A rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rotary {
    /// `[B, H, L, D]`.
    pub(crate) shape: [usize; 4],
    /// Input and output are `[B, L, H*D]` rather than `[B, H, L, D]`.
    pub(crate) flat: bool,
    pub(crate) input: Floats,
    /// `[positions, rotary_dim / 2]`; without positions `[B, L, rotary_dim / 2]`.
    pub(crate) cos: Floats,
    pub(crate) sin: Floats,
    /// `[B, L]`.
    pub(crate) positions: Option<Vec<usize>>,
    pub(crate) pairing: RotaryPairing,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Op {
    Sdpa(Sdpa),
    Layer(Layer),
    Packed(Packed),
    Rotary(Rotary),
}

/// A right answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Expected {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f32>,
    /// Largest absolute difference that passes.
    pub(crate) tolerance: f64,
}

/// One case.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Who computed the answers.
    pub(crate) source: String,
    pub(crate) op: Op,
    /// Words of each batch row, for pictures.
    pub(crate) tokens: Option<Vec<Vec<String>>>,
    /// By name, without `expected.`.
    pub(crate) expected: BTreeMap<String, Expected>,
}

/// Something computed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<f64>,
}

/// What a run computed, by name.
pub(crate) type Answers = BTreeMap<&'static str, Answer>;

/// One answer against its bound.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Comparison {
    pub(crate) name: String,
    /// Largest absolute difference; NaN if any NaN is involved.
    pub(crate) error: f64,
    pub(crate) bound: f64,
    /// Set where there is nothing to subtract.
    pub(crate) problem: Option<String>,
}

impl Comparison {
    pub(crate) fn passes(&self) -> bool {
        self.problem.is_none() && self.error <= self.bound
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(problem) = &self.problem {
            return write!(f, "{} {problem}", self.name);
        }
        let sign = if self.passes() { "<=" } else { "not <=" };
        write!(
            f,
            "{} {} {sign} {}",
            self.name,
            short(self.error),
            short(self.bound)
        )
    }
}

/// Two digits are enough for an error.
fn short(x: f64) -> String {
    if x == 0.0 || !x.is_finite() {
        format!("{x}")
    } else {
        format!("{x:.1e}")
    }
}

impl Case {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let told = |error: std::io::Error| CaseError::Bad(format!("cannot be read: {error}"));
        let about = std::fs::metadata(path).map_err(told)?;
        if !about.is_file() {
            return bad("is not a file");
        }
        if about.len() > MAX_FILE {
            return bad(format!("has {} bytes, at most {MAX_FILE} are read", about.len()));
        }
        Self::parse(&std::fs::read(path).map_err(told)?)
    }

    /// Reads a file's bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let told = |error| CaseError::Bad(format!("is no safetensors file: {error}"));
        let file = SafeTensors::deserialize(bytes).map_err(told)?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(told)?;
        let Some(text) = header.metadata().as_ref().and_then(|entries| entries.get("case")) else {
            return bad("has no metadata entry `case`");
        };
        let Ok(Value::Object(about)) = serde_json::from_str(text) else {
            return bad("has a metadata entry `case` that is no JSON object");
        };

        let text = |key: &str| {
            about
                .get(key)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let object = |key: &str| match about.get(key) {
            None | Some(Value::Null) => Ok(Map::new()),
            Some(Value::Object(object)) => Ok(object.clone()),
            Some(_) => bad(format!("`{key}` must be a JSON object")),
        };
        let tolerance = object("tolerance")?;
        let mut options = Options(object("options")?);
        let mut inputs = Inputs(BTreeMap::new());
        let mut expected = BTreeMap::new();
        for (name, view) in file.iter() {
            match name.strip_prefix("expected.") {
                Some(answer) if answer.starts_with("grad_") => return unsupported("gradients"),
                Some(answer) => {
                    expected.insert(answer.to_owned(), read_expected(answer, &view, &tolerance)?);
                }
                None => {
                    inputs.0.insert(name.to_owned(), view);
                }
            }
        }
        if inputs.0.contains_key("grad_output") {
            return unsupported("gradients");
        }

        let tokens = options.tokens()?;
        let op = match text("op").as_str() {
            "sdpa" => Op::Sdpa(read_sdpa(&mut inputs, &mut options)?),
            "mha" => Op::Layer(read_layer(bytes, &mut inputs, &mut options)?),
            "packed" => Op::Packed(read_packed(&mut inputs, &mut options)?),
            "rotary" => Op::Rotary(read_rotary(&mut inputs, &mut options)?),
            other => return unsupported(format!("op {other:?}")),
        };
        if let Some(option) = options.0.keys().next() {
            return unsupported(format!("option {option:?}"));
        }
        if let Some(input) = inputs.0.keys().next() {
            return unsupported(format!("input {input:?}"));
        }
        let case = Self {
            name: text("name"),
            source: text("source"),
            op,
            tokens,
            expected,
        };
        let answers: &[&str] = match case.op {
            Op::Sdpa(_) => &["output", "weights", "lse", "present_key", "present_value"],
            Op::Layer(_) => &["output", "weights"],
            Op::Packed(_) => &["output", "lse"],
            Op::Rotary(_) => &["output"],
        };
        if let Some(name) = case
            .expected
            .keys()
            .find(|name| !answers.contains(&name.as_str()))
        {
            return unsupported(format!("answer {name:?}"));
        }
        Ok(case)
    }

    /// Whether the file holds attention weights to compare with.
    pub(crate) fn expects_weights(&self) -> bool {
        self.expected.contains_key("weights")
    }

    /// Refuses answers that would not fit into memory.
    pub(crate) fn check_size(&self, weights: bool) -> Result<()> {
        let (rows, keys, size) = match &self.op {
            Op::Sdpa(op) => {
                let s = op.shape;
                ([s.batch, s.heads, s.queries], s.keys, s.value_dim)
            }
            Op::Layer(op) => (
                [op.batch, op.config.num_heads, op.queries],
                op.keys + op.config.extra_keys(),
                op.config.head_dim(),
            ),
            Op::Packed(op) => ([1, op.heads, op.query.shape[0]], 0, op.value.shape[2]),
            Op::Rotary(op) => ([op.shape[0], op.shape[1], op.shape[2]], 0, op.shape[3]),
        };
        let rows: u128 = rows.iter().map(|&axis| axis as u128).product();
        let elements = rows.saturating_mul(if weights { keys.max(size) } else { size } as u128);
        if elements > MAX_ANSWER {
            return bad(format!(
                "would give {elements} numbers, at most {MAX_ANSWER} are computed"
            ));
        }
        Ok(())
    }

    /// Every expected answer against what was computed.
    pub(crate) fn compare(&self, answers: &Answers) -> Vec<Comparison> {
        self.expected
            .iter()
            .map(|(name, expected)| {
                let mut comparison = Comparison {
                    name: name.clone(),
                    error: f64::INFINITY,
                    bound: expected.tolerance,
                    problem: None,
                };
                match answers.get(name.as_str()) {
                    None => comparison.problem = Some("was not computed".to_owned()),
                    Some(answer) if answer.shape != expected.shape => {
                        comparison.problem = Some(format!(
                            "has shape {:?}, expected {:?}",
                            answer.shape, expected.shape
                        ));
                    }
                    Some(answer) => comparison.error = largest_difference(&answer.data, &expected.data),
                }
                comparison
            })
            .collect()
    }
}

/// Equal infinities differ by 0; a NaN on either side gives NaN.
fn largest_difference(answer: &[f64], expected: &[f32]) -> f64 {
    let mut largest = 0.0f64;
    for (&a, &b) in answer.iter().zip(expected) {
        let b = f64::from(b);
        let difference = if a == b { 0.0 } else { (a - b).abs() };
        if difference.is_nan() {
            return f64::NAN;
        }
        largest = largest.max(difference);
    }
    largest
}

fn read_expected(name: &str, view: &TensorView<'_>, tolerance: &Map<String, Value>) -> Result<Expected> {
    let key = if name.starts_with("present_") {
        "output"
    } else {
        name
    };
    let Some(tolerance) = tolerance
        .get(key)
        .and_then(Value::as_f64)
        .filter(|bound| *bound >= 0.0)
    else {
        return bad(format!("`tolerance` gives no number for {key:?}"));
    };
    let Floats { shape, data, .. } = floats(&format!("expected.{name}"), view)?;
    Ok(Expected {
        shape,
        data,
        tolerance,
    })
}

// ---- tensors ----------------------------------------------------------------------------------

/// Inputs that nobody has taken yet.
struct Inputs<'a>(BTreeMap<String, TensorView<'a>>);

impl Inputs<'_> {
    fn floats(&mut self, name: &str) -> Result<Option<Floats>> {
        self.0.remove(name).map(|view| floats(name, &view)).transpose()
    }

    fn needed(&mut self, name: &str) -> Result<Floats> {
        match self.floats(name)? {
            Some(floats) => Ok(floats),
            None => bad(format!("input {name:?} is missing")),
        }
    }

    /// A parameter of a known shape.
    fn parameter(&mut self, name: &str, shape: &[usize]) -> Result<Option<Vec<f32>>> {
        match self.floats(name)? {
            Some(floats) if floats.shape == shape => Ok(Some(floats.data)),
            Some(floats) => bad(format!(
                "{name:?} has shape {:?}, needed is {shape:?}",
                floats.shape
            )),
            None => Ok(None),
        }
    }

    /// Counts: whole numbers that are not negative.
    fn counts(&mut self, name: &str) -> Result<Option<(Vec<usize>, Vec<usize>)>> {
        let Some(view) = self.0.remove(name) else {
            return Ok(None);
        };
        let counts: Option<Vec<usize>> = match view.dtype() {
            Dtype::I32 => words(view.data())
                .map(|x| usize::try_from(i32::from_le_bytes(x)).ok())
                .collect(),
            Dtype::I64 => words(view.data())
                .map(|x| usize::try_from(i64::from_le_bytes(x)).ok())
                .collect(),
            other => return bad(format!("{name:?} is {other:?}, needed is I32 or I64")),
        };
        match counts {
            Some(counts) => Ok(Some((view.shape().to_vec(), counts))),
            None => bad(format!("{name:?} holds a negative number")),
        }
    }

    /// The mask, key mask and lengths, the last two held against `[batch, keys]`.
    fn hiding(&mut self, batch: usize, keys: usize) -> Result<Hiding> {
        let mask = match self.0.remove("attn_mask") {
            None => None,
            Some(view) => {
                let data = match view.dtype() {
                    Dtype::BOOL => MaskData::Keep(flags(&view)),
                    _ => MaskData::Bias(floats("attn_mask", &view)?.data),
                };
                Some(CaseMask {
                    shape: view.shape().to_vec(),
                    data,
                })
            }
        };
        let key_mask = match self.0.remove("key_mask") {
            None => None,
            Some(view) if view.dtype() != Dtype::BOOL => {
                return bad(format!("\"key_mask\" is {:?}, needed is BOOL", view.dtype()));
            }
            Some(view) if view.shape() != [batch, keys] => {
                return bad(format!(
                    "\"key_mask\" has shape {:?}, needed is [{batch}, {keys}]",
                    view.shape()
                ));
            }
            Some(view) => Some(flags(&view)),
        };
        let kv_lengths = match self.counts("kv_lengths")? {
            None => None,
            Some((shape, lengths)) if shape == [batch] => Some(lengths),
            Some((shape, _)) => {
                return bad(format!("\"kv_lengths\" has shape {shape:?}, needed is [{batch}]"));
            }
        };
        Ok(Hiding {
            mask,
            key_mask,
            kv_lengths,
        })
    }
}

/// Little-endian words of `N` bytes. Safetensors has checked that the bytes fit the shape.
fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes
        .chunks_exact(N)
        .map(|chunk| std::array::from_fn(|at| chunk[at]))
}

fn flags(view: &TensorView<'_>) -> Vec<bool> {
    view.data().iter().map(|&byte| byte != 0).collect()
}

fn floats(name: &str, view: &TensorView<'_>) -> Result<Floats> {
    let (dtype, data) = match view.dtype() {
        Dtype::F32 => (DType::F32, words(view.data()).map(f32::from_le_bytes).collect()),
        Dtype::F16 => (
            DType::F16,
            words(view.data())
                .map(|x| half::f16::from_le_bytes(x).to_f32())
                .collect(),
        ),
        other => return bad(format!("{name:?} is {other:?}, needed is F32 or F16")),
    };
    Ok(Floats {
        shape: view.shape().to_vec(),
        data,
        dtype,
    })
}

// ---- options ----------------------------------------------------------------------------------

/// Options that nobody has taken yet.
struct Options(Map<String, Value>);

impl Options {
    /// `null` is as good as absent.
    fn take<T>(&mut self, key: &str, what: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(&value) {
                Some(value) => Ok(Some(value)),
                None => bad(format!("option {key:?} must be {what}")),
            },
        }
    }

    fn count(&mut self, key: &str) -> Result<Option<usize>> {
        self.take(key, "a whole number above 0", |value| {
            value
                .as_u64()
                .and_then(|n| usize::try_from(n).ok())
                .filter(|n| *n > 0)
        })
    }

    fn flag(&mut self, key: &str) -> Result<bool> {
        Ok(self.take(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    fn tokens(&mut self) -> Result<Option<Vec<Vec<String>>>> {
        self.take("tokens", "lists of strings", |value| {
            let row = |row: &Value| -> Option<Vec<String>> {
                row.as_array()?
                    .iter()
                    .map(|token| token.as_str().map(str::to_owned))
                    .collect()
            };
            value.as_array()?.iter().map(row).collect()
        })
    }

    /// Base and scaling of a layer's rotary embedding.
    fn rope(&mut self) -> Result<Option<(f64, RotaryScaling)>> {
        let base = self.take("rope_theta", "a number", Value::as_f64)?;
        let scaling = self.take("rope_scaling", "an object of Llama 3's four numbers", |value| {
            let number = |key: &str| value.get(key)?.as_f64();
            Some(RotaryScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_max_positions: number("original_max_position_embeddings")? as usize,
            })
        })?;
        match (base, scaling) {
            (Some(base), scaling) => Ok(Some((base, scaling.unwrap_or_default()))),
            (None, None) => Ok(None),
            (None, Some(_)) => bad("option \"rope_scaling\" without \"rope_theta\""),
        }
    }

    /// The options of the rule.
    fn attention(&mut self) -> Result<AttentionOptions> {
        let number = |value: &Value| value.as_f64().map(|x| x as f32);
        let mut options = AttentionOptions::new();
        options.scale = self.take("scale", "a number", number)?;
        // ONNX writes "no cap" as 0.
        options.softcap = self
            .take("softcap", "a number", number)?
            .filter(|cap| *cap != 0.0);
        options.alibi_slopes = self.take("alibi_slopes", "a list of numbers", |value| {
            value.as_array()?.iter().map(number).collect()
        })?;
        options.query_offset = self
            .take("query_offset", "a whole number", Value::as_i64)?
            .unwrap_or(0);
        options.causal = self
            .take("causal", "none, top_left or bottom_right", |value| {
                match value.as_str()? {
                    "none" => Some(Causal::None),
                    "top_left" => Some(Causal::TopLeft),
                    "bottom_right" => Some(Causal::BottomRight),
                    _ => None,
                }
            })?
            .unwrap_or_default();
        options.align = self
            .take("align", "top_left or bottom_right", |value| {
                match value.as_str()? {
                    "top_left" => Some(Align::TopLeft),
                    "bottom_right" => Some(Align::BottomRight),
                    _ => None,
                }
            })?
            .unwrap_or_default();
        let window = self.take("window", "[left, right], each at least -1", |value| {
            let side = |value: &Value| match value.as_i64()? {
                -1 => Some(None),
                keys => u32::try_from(keys).ok().map(Some),
            };
            match value.as_array()?.as_slice() {
                [left, right] => Some((side(left)?, side(right)?)),
                _ => None,
            }
        })?;
        (options.window_left, options.window_right) = window.unwrap_or_default();
        Ok(options)
    }
}

// ---- operators --------------------------------------------------------------------------------

/// The rule lets the batch and both lengths be empty, and no other axis.
fn checked(shape: AttentionShape) -> Result<AttentionShape> {
    if shape.heads == 0 || shape.kv_heads == 0 || shape.head_dim == 0 || shape.value_dim == 0 {
        return bad(format!("no heads, or heads of size 0: {shape:?}"));
    }
    match shape.validate() {
        Ok(()) => Ok(shape),
        Err(error) => bad(error.to_string()),
    }
}

fn read_sdpa(inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Sdpa> {
    let heads = options.count("num_heads")?;
    let kv_heads = options.count("kv_num_heads")?;
    let average_weights = options.flag("average_weights")?;
    let attention = options.attention()?;
    let [query, key, value] = [
        inputs.needed("query")?,
        inputs.needed("key")?,
        inputs.needed("value")?,
    ];

    let flat = query.shape.len() == 3;
    // [B, H, L, D] of each input.
    let axes = |what: &str, x: &Floats, heads: Option<usize>, option: &str| -> Result<[usize; 4]> {
        match (flat, x.shape.as_slice(), heads) {
            (true, &[batch, length, wide], Some(heads)) => match wide % heads {
                0 => Ok([batch, heads, length, wide / heads]),
                _ => bad(format!(
                    "{what:?} has rows of {wide} numbers for {heads} heads ({option})"
                )),
            },
            (true, [_, _, _], None) => bad(format!("{what:?} has 3 axes, which needs option {option:?}")),
            (false, &[batch, given, length, size], heads) if heads.is_none_or(|heads| heads == given) => {
                Ok([batch, given, length, size])
            }
            _ => bad(format!(
                "{what:?} has shape {:?}, the query {:?}, {option:?} is {heads:?}",
                x.shape, query.shape
            )),
        }
    };
    let q = axes("query", &query, heads, "num_heads")?;
    let kv = kv_heads.or(if flat { heads } else { None });
    let k = axes("key", &key, kv, "kv_num_heads")?;
    let v = axes("value", &value, kv, "kv_num_heads")?;
    if k[0] != q[0] || k[3] != q[3] || v[..3] != k[..3] {
        return bad(format!(
            "query {q:?}, key {k:?} and value {v:?} do not fit as [B, H, L, D]"
        ));
    }
    let past = match (inputs.floats("past_key")?, inputs.floats("past_value")?) {
        (None, None) => None,
        (Some(key), Some(value)) => {
            let keys = key.shape.get(2).copied().unwrap_or(0);
            if key.shape != [k[0], k[1], keys, k[3]] || value.shape != [v[0], v[1], keys, v[3]] {
                return bad(format!(
                    "\"past_key\" {:?} and \"past_value\" {:?} do not go in front of {k:?} and {v:?}",
                    key.shape, value.shape
                ));
            }
            Some((key, value))
        }
        _ => return bad("one of \"past_key\" and \"past_value\" is missing"),
    };
    let shape = checked(AttentionShape {
        batch: q[0],
        heads: q[1],
        kv_heads: k[1],
        queries: q[2],
        keys: k[2].saturating_add(past.as_ref().map_or(0, |(key, _)| key.shape[2])),
        head_dim: q[3],
        value_dim: v[3],
    })?;
    let hiding = inputs.hiding(shape.batch, shape.keys)?;
    if past.is_some() && hiding.kv_lengths.is_some() {
        return bad("\"kv_lengths\" and \"past_key\" cannot be given together");
    }
    let sinks = inputs.parameter("sinks", &[shape.heads])?;
    Ok(Sdpa {
        shape,
        options: attention,
        flat,
        query,
        key,
        value,
        past,
        hiding,
        sinks,
        average_weights,
    })
}

fn read_layer(bytes: &[u8], inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Layer> {
    let Some(heads) = options.count("num_heads")? else {
        return bad("option \"num_heads\" is missing");
    };
    let kv_heads = options.count("kv_num_heads")?.unwrap_or(heads);
    let checkpoint = options.take("checkpoint", "a string", |value| {
        value.as_str().map(str::to_owned)
    })?;
    let average_weights = options.flag("average_weights")?;
    let add_zero_attn = options.flag("add_zero_attn")?;
    let attention = options.attention()?;
    let rope = options.rope()?;

    let query = inputs.needed("query")?;
    let [key, value] = [inputs.floats("key")?, inputs.floats("value")?];
    let axes = |what: &str, x: &Floats| match *x.shape.as_slice() {
        [batch, length, size] => Ok([batch, length, size]),
        _ => bad(format!("{what:?} has shape {:?}, needed are 3 axes", x.shape)),
    };
    let q = axes("query", &query)?;
    let k = key.as_ref().map_or(Ok(q), |key| axes("key", key))?;
    let v = value.as_ref().map_or(Ok(k), |value| axes("value", value))?;
    if k[0] != q[0] || v[..2] != k[..2] {
        return bad(format!(
            "query {q:?}, key {k:?} and value {v:?} do not fit as [B, L, size]"
        ));
    }
    let ([batch, queries, embed], keys) = (q, k[1]);
    let (mut config, parameters) = match checkpoint {
        Some(prefix) => read_checkpoint(bytes, inputs, &prefix, heads)?,
        None => {
            let config = MultiHeadAttentionConfig::new(embed, heads).kdim(k[2]).vdim(v[2]);
            read_parameters(inputs, config)?
        }
    };
    config.attention = attention;
    config.add_zero_attn = add_zero_attn;
    if [config.embed_dim, config.kdim, config.vdim] != [embed, k[2], v[2]] {
        return bad(format!(
            "query {q:?}, key {k:?} and value {v:?} do not fit a layer of embed_dim = {}, kdim = {}, vdim = {}",
            config.embed_dim, config.kdim, config.vdim
        ));
    }
    if config.num_kv_heads != kv_heads {
        return bad(format!(
            "the parameters are of {} key heads, option \"kv_num_heads\" says {kv_heads}",
            config.num_kv_heads
        ));
    }
    if let Err(error) = config.validate() {
        return bad(error.to_string());
    }
    let size = config.head_dim();
    checked(AttentionShape {
        batch,
        heads,
        kv_heads,
        queries,
        keys: keys.saturating_add(config.extra_keys()),
        head_dim: size,
        value_dim: size,
    })?;
    let rotary = rope.map(|(base, scaling)| RotaryOptions::new(size).base(base).scaling(scaling));
    if let Some(Err(error)) = rotary.map(|rotary| rotary.validate()) {
        return bad(error.to_string());
    }
    if rotary.is_some() && key.is_some() {
        return unsupported("rotary embedding of a key of its own");
    }
    let hiding = inputs.hiding(batch, keys)?;
    Ok(Layer {
        config,
        parameters,
        batch,
        queries,
        keys,
        query,
        key,
        value,
        hiding,
        average_weights,
        rotary,
    })
}

/// The parameters under the names of a layer in PyTorch, and what they tell about the layer.
fn read_parameters(
    inputs: &mut Inputs<'_>,
    mut config: MultiHeadAttentionConfig,
) -> Result<(MultiHeadAttentionConfig, Parameters)> {
    let (embed, kdim, vdim) = (config.embed_dim, config.kdim, config.vdim);
    // How the file stores the weights is how the layer will hold them.
    let half = |view: &TensorView<'_>| view.dtype() == Dtype::F16;
    if inputs.0.get("out_proj.weight").is_some_and(half) {
        config.dtype = DType::F16;
    }
    let joined = match embed.checked_mul(3) {
        Some(three) => inputs.parameter("in_proj_weight", &[three, embed])?,
        None => return bad(format!("{embed} is too large a size")),
    };
    let [q_weight, k_weight, v_weight] = match joined {
        Some(joined) if kdim == embed && vdim == embed => thirds(&joined),
        Some(_) => return bad("\"in_proj_weight\" needs keys and values of the query's size"),
        None => {
            let mut one = |name: &str, size| match inputs.parameter(name, &[embed, size])? {
                Some(weight) => Ok(weight),
                None => bad(format!("\"in_proj_weight\" and {name:?} are missing")),
            };
            [
                one("q_proj_weight", embed)?,
                one("k_proj_weight", kdim)?,
                one("v_proj_weight", vdim)?,
            ]
        }
    };
    let in_biases = inputs
        .parameter("in_proj_bias", &[3 * embed])?
        .map(|joined| thirds(&joined));
    let Some(out_weight) = inputs.parameter("out_proj.weight", &[embed, embed])? else {
        return bad("\"out_proj.weight\" is missing");
    };
    let out_bias = inputs.parameter("out_proj.bias", &[embed])?;
    let bias_k = inputs.parameter("bias_k", &[1, 1, embed])?;
    let bias_v = inputs.parameter("bias_v", &[1, 1, embed])?;
    let bias_kv = match (bias_k, bias_v) {
        (None, None) => None,
        (Some(k), Some(v)) => Some([k, v]),
        _ => return bad("one of \"bias_k\" and \"bias_v\" is missing"),
    };
    config.bias = in_biases.is_some();
    config.out_bias = out_bias.is_some();
    config.add_bias_kv = bias_kv.is_some();
    let parameters = Parameters {
        q_weight,
        k_weight,
        v_weight,
        in_biases,
        out_weight,
        out_bias,
        bias_kv,
    };
    Ok((config, parameters))
}

/// The parameters under `prefix` as the crate's own loader finds them.
fn read_checkpoint(
    bytes: &[u8],
    inputs: &mut Inputs<'_>,
    prefix: &str,
    heads: usize,
) -> Result<(MultiHeadAttentionConfig, Parameters)> {
    let told = |error: multihead::Error| CaseError::Bad(error.to_string());
    let config = multihead::Parameters::describe(bytes, prefix)
        .map_err(told)?
        .config(heads);
    let found = multihead::Parameters::from_safetensors(&config, bytes, prefix).map_err(told)?;
    let below = format!("{prefix}.");
    inputs.0.retain(|name, _| !name.starts_with(&below));
    let parameters = Parameters {
        q_weight: found.q_proj_weight,
        k_weight: found.k_proj_weight,
        v_weight: found.v_proj_weight,
        in_biases: match (found.q_proj_bias, found.k_proj_bias, found.v_proj_bias) {
            (Some(q), Some(k), Some(v)) => Some([q, k, v]),
            _ => None,
        },
        out_weight: found.out_proj_weight,
        out_bias: found.out_proj_bias,
        bias_kv: match (found.bias_k, found.bias_v) {
            (Some(k), Some(v)) => Some([k, v]),
            _ => None,
        },
    };
    Ok((config, parameters))
}

/// Query's, key's and value's part of a joined parameter.
fn thirds(joined: &[f32]) -> [Vec<f32>; 3] {
    let third = joined.len() / 3;
    std::array::from_fn(|at| joined[at * third..(at + 1) * third].to_vec())
}

fn read_packed(inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Packed> {
    let [heads, kv_heads] = [options.count("num_heads")?, options.count("kv_num_heads")?];
    let attention = options.attention()?;
    let [query, key, value] = [
        inputs.needed("query")?,
        inputs.needed("key")?,
        inputs.needed("value")?,
    ];
    let ([_, h, d], [tk, hkv, dk], [tv, hv, dv]) = (
        three("query", &query)?,
        three("key", &key)?,
        three("value", &value)?,
    );
    let given = |option: Option<usize>, found| option.is_none_or(|option| option == found);
    if dk != d || hv != hkv || tv != tk || !given(heads, h) || !given(kv_heads, hkv) {
        return bad(format!(
            "query {:?}, key {:?} and value {:?} do not fit as [T, H, D]",
            query.shape, key.shape, value.shape
        ));
    }
    checked(AttentionShape {
        batch: 1,
        heads: h,
        kv_heads: hkv,
        queries: query.shape[0],
        keys: tk,
        head_dim: d,
        value_dim: dv,
    })?;
    let mut seams = |name: &str| match inputs.counts(name)? {
        Some((shape, seams)) if shape.len() == 1 => Ok(seams),
        Some((shape, _)) => bad(format!("{name:?} has shape {shape:?}, needed is one axis")),
        None => bad(format!("input {name:?} is missing")),
    };
    let [cu_seqlens_q, cu_seqlens_k] = [seams("cu_seqlens_q")?, seams("cu_seqlens_k")?];
    let sinks = inputs.parameter("sinks", &[h])?;
    Ok(Packed {
        options: attention,
        heads: h,
        kv_heads: hkv,
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        sinks,
    })
}

fn read_rotary(inputs: &mut Inputs<'_>, options: &mut Options) -> Result<Rotary> {
    let heads = options.count("num_heads")?;
    let rotary_dim = options.count("rotary_embedding_dim")?;
    let pairing = if options.flag("interleaved")? {
        RotaryPairing::Interleaved
    } else {
        RotaryPairing::HalfSplit
    };
    let [input, cos, sin] = [
        inputs.needed("input")?,
        inputs.needed("cos_cache")?,
        inputs.needed("sin_cache")?,
    ];
    let positions = inputs.counts("position_ids")?;
    let (shape, flat) = match (input.shape.as_slice(), heads) {
        (&[b, h, l, d], heads) if heads.is_none_or(|heads| heads == h) => ([b, h, l, d], false),
        (&[b, l, wide], Some(heads)) if wide % heads == 0 => ([b, heads, l, wide / heads], true),
        (shape, heads) => {
            return bad(format!(
                "\"input\" has shape {shape:?}, option \"num_heads\" is {heads:?}"
            ));
        }
    };
    let [batch, _, rows, size] = shape;
    let pairs = cos.shape.last().copied().unwrap_or(0);
    let dim = rotary_dim.unwrap_or(size);
    let tables = match &positions {
        Some(_) => vec![cos.shape.first().copied().unwrap_or(0), pairs],
        None => vec![batch, rows, pairs],
    };
    if cos.shape != tables || sin.shape != tables || cos.dtype != sin.dtype {
        return bad(format!(
            "\"cos_cache\" has shape {:?} and \"sin_cache\" {:?}, needed is {tables:?} of one type",
            cos.shape, sin.shape
        ));
    }
    if Some(dim) != pairs.checked_mul(2) || dim > size || cos.data.is_empty() {
        return bad(format!("{pairs} pairs for {dim} of {size} elements"));
    }
    let positions = match positions {
        None => None,
        Some((shape, positions)) => {
            if shape != [batch, rows] || positions.iter().any(|&position| position >= tables[0]) {
                return bad(format!(
                    "\"position_ids\" has shape {shape:?}, needed is [{batch}, {rows}] below {}",
                    tables[0]
                ));
            }
            Some(positions)
        }
    };
    Ok(Rotary {
        shape,
        flat,
        input,
        cos,
        sin,
        positions,
        pairing,
    })
}

fn three(what: &str, x: &Floats) -> Result<[usize; 3]> {
    match *x.shape.as_slice() {
        [a, b, c] => Ok([a, b, c]),
        _ => bad(format!("{what:?} has shape {:?}, needed are 3 axes", x.shape)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// A file with F32 tensors of ones, BOOL tensors of `true` and I32 tensors of 1.
    fn file(about: &str, tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, dtype, shape)| {
                let one: &[u8] = match dtype {
                    Dtype::F32 => &[0, 0, 128, 63],
                    Dtype::I32 => &[1, 0, 0, 0],
                    _ => &[1],
                };
                one.repeat(shape.iter().product())
            })
            .collect();
        let views = tensors.iter().zip(&bytes).map(|((name, dtype, shape), bytes)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
        });
        let metadata = HashMap::from([("case".to_owned(), about.to_owned())]);
        safetensors::serialize(views, Some(metadata)).unwrap()
    }

    const SMALL: &[(&str, Dtype, &[usize])] = &[
        ("query", Dtype::F32, &[1, 2, 3, 4]),
        ("key", Dtype::F32, &[1, 1, 5, 4]),
        ("value", Dtype::F32, &[1, 1, 5, 2]),
        ("attn_mask", Dtype::BOOL, &[3, 4]),
        ("key_mask", Dtype::BOOL, &[1, 5]),
        ("kv_lengths", Dtype::I32, &[1]),
        ("expected.output", Dtype::F32, &[1, 2, 3, 2]),
    ];

    const ABOUT: &str = r#"{"name": "small", "op": "sdpa", "source": "hand",
        "options": {"causal": "bottom_right", "window": [-1, 2], "scale": 0.5, "softcap": null},
        "tolerance": {"output": 1e-5}}"#;

    #[test]
    fn a_case_is_read() {
        let case = Case::parse(&file(ABOUT, SMALL)).unwrap();
        let Op::Sdpa(op) = &case.op else {
            panic!("{:?}", case.op)
        };
        assert_eq!(
            (
                op.shape.heads,
                op.shape.kv_heads,
                op.shape.keys,
                op.shape.value_dim
            ),
            (2, 1, 5, 2)
        );
        let wanted = AttentionOptions::new()
            .causal(Causal::BottomRight)
            .window(None, Some(2))
            .scale(0.5);
        assert_eq!(op.options, wanted);
        assert_eq!(op.hiding.kv_lengths, Some(vec![1]));
        assert!(!case.expects_weights() && case.expected["output"].tolerance == 1e-5);
    }

    #[test]
    fn what_is_unknown_is_unsupported() {
        for about in [
            r#"{"op": "rope", "tolerance": {"output": 1}}"#,
            r#"{"op": "sdpa", "options": {"dropout": 0.1}, "tolerance": {"output": 1}}"#,
        ] {
            let error = Case::parse(&file(about, SMALL)).unwrap_err();
            assert!(matches!(error, CaseError::Unsupported(_)), "{error:?}");
        }
        for input in ["grad_output", "block_mask"] {
            let mut tensors = SMALL.to_vec();
            tensors.push((input, Dtype::F32, &[1]));
            let error = Case::parse(&file(ABOUT, &tensors)).unwrap_err();
            assert!(matches!(error, CaseError::Unsupported(_)), "{error:?}");
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let wrong: &[(&str, Dtype, &[usize])] = &[
            ("query", Dtype::F32, &[1, 2, 3]),
            ("query", Dtype::F32, &[1, 0, 3, 4]),
            ("query", Dtype::I32, &[1, 2, 3, 4]),
            ("key", Dtype::F32, &[2, 1, 5, 4]),
            ("key", Dtype::F32, &[1, 3, 5, 4]),
            ("value", Dtype::F32, &[1, 1, 4, 2]),
            ("key_mask", Dtype::BOOL, &[5]),
            ("kv_lengths", Dtype::F32, &[1]),
            ("past_key", Dtype::F32, &[1, 1, 2, 4]),
            ("sinks", Dtype::F32, &[3]),
        ];
        for row in wrong {
            let mut tensors: Vec<_> = SMALL.iter().filter(|tensor| tensor.0 != row.0).copied().collect();
            tensors.push(*row);
            assert!(
                matches!(Case::parse(&file(ABOUT, &tensors)), Err(CaseError::Bad(_))),
                "{row:?}"
            );
        }
        for options in [
            r#"{"window": [1]}"#,
            r#"{"window": [-2, 0]}"#,
            r#"{"causal": "left"}"#,
            r#"{"num_heads": 0}"#,
            r#"{"num_heads": 3}"#,
            r#"{"alibi_slopes": 1}"#,
            r#"{"tokens": [1]}"#,
            "[]",
        ] {
            let about = format!(r#"{{"op": "sdpa", "options": {options}, "tolerance": {{"output": 1}}}}"#);
            assert!(
                matches!(Case::parse(&file(&about, SMALL)), Err(CaseError::Bad(_))),
                "{options}"
            );
        }
    }

    /// A layer whose parameters have the names of a checkpoint.
    #[test]
    fn a_checkpoint_is_read() {
        let tensors: &[(&str, Dtype, &[usize])] = &[
            ("query", Dtype::F32, &[1, 3, 6]),
            ("l.q_proj.weight", Dtype::F32, &[8, 6]),
            ("l.k_proj.weight", Dtype::F32, &[4, 6]),
            ("l.v_proj.weight", Dtype::F32, &[4, 6]),
            ("l.o_proj.weight", Dtype::F32, &[6, 8]),
        ];
        let read = |options: &str, tensors: &[(&str, Dtype, &[usize])]| {
            let about = format!(r#"{{"op": "mha", "options": {{{options}}}}}"#);
            Case::parse(&file(&about, tensors))
        };
        let right = r#""num_heads": 4, "kv_num_heads": 2, "checkpoint": "l""#;
        let case = read(right, tensors).unwrap();
        let Op::Layer(op) = &case.op else {
            panic!("{:?}", case.op)
        };
        assert_eq!((op.config.num_kv_heads, op.config.head_dim()), (2, 2));
        assert_eq!((op.config.bias, op.config.out_bias), (false, false));
        for wrong in [
            r#""num_heads": 4, "checkpoint": "l""#,
            r#""num_heads": 8, "kv_num_heads": 2, "checkpoint": "l""#,
            r#""num_heads": 4, "kv_num_heads": 2, "checkpoint": "m""#,
            r#""num_heads": 4, "kv_num_heads": 2, "checkpoint": 1"#,
            r#""num_heads": 4, "kv_num_heads": 2"#,
        ] {
            let error = read(wrong, tensors).unwrap_err();
            assert!(matches!(error, CaseError::Bad(_)), "{wrong}: {error:?}");
        }
        let mut narrow = tensors.to_vec();
        narrow[0].2 = &[1, 3, 4];
        assert!(matches!(read(right, &narrow), Err(CaseError::Bad(_))));
    }

    #[test]
    fn damaged_files_are_errors() {
        let good = file(ABOUT, SMALL);
        for length in 0..good.len() {
            assert!(Case::parse(&good[..length]).is_err(), "cut to {length} bytes");
        }
        let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
        for at in 0..header {
            for byte in [0, b'0', b'9', b'-', b'"', b'[', b'}', 0xff] {
                let mut bytes = good.clone();
                bytes[at] = byte;
                // Any answer will do but a panic.
                let _ = Case::parse(&bytes);
            }
        }
    }

    #[test]
    fn differences_count_infinities_and_nan() {
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        assert_eq!(largest_difference(&[-inf, 1.0], &[f32::NEG_INFINITY, 1.5]), 0.5);
        assert_eq!(largest_difference(&[inf], &[f32::NEG_INFINITY]), inf);
        assert_eq!(largest_difference(&[-1e30], &[f32::NEG_INFINITY]), inf);
        assert!(largest_difference(&[nan, 0.0], &[0.0, 0.0]).is_nan());
        assert!(largest_difference(&[0.0, 1.0], &[f32::NAN, 0.0]).is_nan());
        let of = |error| Comparison {
            name: "output".to_owned(),
            error,
            bound: 1.0,
            problem: None,
        };
        assert!(of(1.0).passes() && !of(1.1).passes() && !of(nan).passes() && !of(inf).passes());
    }
}
