//! Case files: one safetensors file holds the inputs of one attention call, its options and, mostly, the
//! right answers with their tolerances.
//!
//! The metadata entry `case` is a JSON object `{"name", "op", "source", "options", "tolerance"}`; tensors
//! named `expected.*` are the answers, all others are inputs. Nothing in a file is trusted: any bytes
//! give a [`Case`] or a [`CaseError`].

// The crate's tests include this file too; no includer uses all of it.
#![allow(dead_code)]

mod inputs;
mod operators;
mod options;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

use inputs::{Inputs, floats};
use multihead::reference::{LayerParameters, Mask};
use multihead::{
    Align, AttentionOptions, AttentionShape, Causal, DType, MultiHeadAttentionConfig, RotaryOptions,
    RotaryPairing, RotaryScaling,
};
use operators::{read_layer, read_packed, read_rotary, read_sdpa};
use options::Options;
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
