//! What the tensors of an attention layer are called in checkpoints, and which of them a file holds.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::file::{axes, clip, open};
use super::{Parameters, Part};
use crate::shape::MAX_AXIS;
use crate::{Error, MultiHeadAttentionConfig, Result};

/// How a checkpoint names the tensors of an attention layer; each name stands behind the layer's prefix.
///
/// | | [`PyTorch`](Self::PyTorch) | [`PyTorchSeparate`](Self::PyTorchSeparate) | [`Bert`](Self::Bert) |
/// |---|---|---|---|
/// | weights | `in_proj_weight [3E, E]` | `q_proj_weight [E, E]`, `k_proj_weight [E, kdim]`, `v_proj_weight [E, vdim]` | `self.query.weight`, `self.key.weight`, `self.value.weight` |
/// | biases | `in_proj_bias [3E]` | `in_proj_bias [3E]` | `self.query.bias`, `self.key.bias`, `self.value.bias` `[E]` |
/// | output `[E, E]`, `[E]` | `out_proj.weight`, `out_proj.bias` | the same | `output.dense.weight`, `output.dense.bias` |
/// | extra key, value | `bias_k`, `bias_v` `[1, 1, E]` | the same | none |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckpointNames {
    /// `torch.nn.MultiheadAttention` whose keys and values have the size of the queries.
    PyTorch,
    /// `torch.nn.MultiheadAttention` with its own `kdim` or `vdim`.
    PyTorchSeparate,
    /// `BertAttention` of the transformers library (BERT, RoBERTa, MiniLM, ...); the prefix ends in
    /// `attention`. `output.LayerNorm.*` lies under the same prefix but acts after the layer, on the sum
    /// with the layer's input: it is no part of attention and is skipped.
    Bert,
}

/// One tensor of a checkpoint and the arrays that it holds one below the other.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) name: &'static str,
    pub(super) parts: &'static [Part],
}

const fn stored(name: &'static str, parts: &'static [Part]) -> Stored {
    Stored { name, parts }
}

const IN_PROJ_BIAS: Stored = stored("in_proj_bias", &[Part::QBias, Part::KBias, Part::VBias]);
const OUT_PROJ_WEIGHT: Stored = stored("out_proj.weight", &[Part::OutWeight]);
const OUT_PROJ_BIAS: Stored = stored("out_proj.bias", &[Part::OutBias]);
const BIAS_K: Stored = stored("bias_k", &[Part::BiasK]);
const BIAS_V: Stored = stored("bias_v", &[Part::BiasV]);

static PYTORCH: [Stored; 6] = [
    stored("in_proj_weight", &[Part::QWeight, Part::KWeight, Part::VWeight]),
    IN_PROJ_BIAS,
    OUT_PROJ_WEIGHT,
    OUT_PROJ_BIAS,
    BIAS_K,
    BIAS_V,
];
static PYTORCH_SEPARATE: [Stored; 8] = [
    stored("q_proj_weight", &[Part::QWeight]),
    stored("k_proj_weight", &[Part::KWeight]),
    stored("v_proj_weight", &[Part::VWeight]),
    IN_PROJ_BIAS,
    OUT_PROJ_WEIGHT,
    OUT_PROJ_BIAS,
    BIAS_K,
    BIAS_V,
];
static BERT: [Stored; 8] = [
    stored("self.query.weight", &[Part::QWeight]),
    stored("self.key.weight", &[Part::KWeight]),
    stored("self.value.weight", &[Part::VWeight]),
    stored("self.query.bias", &[Part::QBias]),
    stored("self.key.bias", &[Part::KBias]),
    stored("self.value.bias", &[Part::VBias]),
    stored("output.dense.weight", &[Part::OutWeight]),
    stored("output.dense.bias", &[Part::OutBias]),
];

impl Stored {
    pub(super) fn shape(&self, config: &MultiHeadAttentionConfig) -> Vec<usize> {
        match self.parts {
            [Part::BiasK | Part::BiasV] => vec![1, 1, config.embed_dim],
            [first, ..] => {
                let mut shape = first.shape(config);
                shape[0] *= self.parts.len();
                shape
            }
            [] => Vec::new(),
        }
    }

    /// The option that decides whether a layer has this tensor, and its value.
    pub(super) fn option(&self, config: &MultiHeadAttentionConfig) -> Option<(&'static str, bool)> {
        self.parts.first().and_then(|part| part.option(config))
    }

    /// Whether this is one of the weights by which a layer is recognised. The output projection does not
    /// count: a BERT feed-forward block calls its own `output.dense.weight` as well.
    fn marks_a_layer(&self) -> bool {
        matches!(self.parts, [Part::QWeight | Part::KWeight | Part::VWeight, ..])
    }
}

impl CheckpointNames {
    const ALL: [Self; 3] = [Self::PyTorch, Self::PyTorchSeparate, Self::Bert];

    /// Which naming the layer under `prefix` follows. Reads the header only.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if `bytes` is no safetensors file or no attention layer lies under `prefix`;
    /// the message lists the prefixes that have one.
    ///
    /// ```
    /// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(8, 2);
    /// let file = Parameters::init(&config, 1)?
    ///     .to_safetensors(&config, "layer.0.attention", CheckpointNames::Bert, DType::F32)?;
    /// assert_eq!(CheckpointNames::detect(&file, "layer.0.attention"), Ok(CheckpointNames::Bert));
    ///
    /// let error = CheckpointNames::detect(&file, "layer.1.attention").unwrap_err();
    /// assert!(error.to_string().contains("layer.0.attention"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn detect(bytes: &[u8], prefix: &str) -> Result<Self> {
        Ok(Layer::find(&open(bytes)?, prefix)?.names)
    }

    pub(super) fn tensors(self) -> &'static [Stored] {
        match self {
            Self::PyTorch => &PYTORCH,
            Self::PyTorchSeparate => &PYTORCH_SEPARATE,
            Self::Bert => &BERT,
        }
    }

    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::PyTorch => "PyTorch names",
            Self::PyTorchSeparate => "PyTorch names with separate q, k, v",
            Self::Bert => "BERT names",
        }
    }

    /// Tensors that lie beside the layer's under the same prefix and are none of its business.
    pub(super) fn skips(self, name: &str) -> bool {
        self == Self::Bert && name.starts_with("output.LayerNorm.")
    }

    /// What `config` asks for and this naming has no place for.
    pub(super) fn lacks(self, config: &MultiHeadAttentionConfig) -> Option<String> {
        let MultiHeadAttentionConfig {
            embed_dim,
            kdim,
            vdim,
            ..
        } = *config;
        match self {
            Self::PyTorch if kdim != embed_dim || vdim != embed_dim => Some(format!(
                "in_proj_weight joins projections of one size, while the config has embed_dim = {embed_dim}, kdim = {kdim}, vdim = {vdim}: such a layer has q_proj_weight, k_proj_weight and v_proj_weight (CheckpointNames::PyTorchSeparate)"
            )),
            Self::Bert if config.add_bias_kv => {
                Some("BERT names have no bias_k and bias_v: use .add_bias_kv(false)".into())
            }
            _ => None,
        }
    }
}

/// What the header of a checkpoint tells about an attention layer; see [`Parameters::describe`].
///
/// The number of heads is not in a checkpoint's tensors: it stands in the model's own configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointInfo {
    /// How the tensors are named.
    pub names: CheckpointNames,
    /// Size of a query vector and of an output vector.
    pub embed_dim: usize,
    /// Size of a key vector.
    pub kdim: usize,
    /// Size of a value vector.
    pub vdim: usize,
    /// Whether any projection has a bias.
    pub bias: bool,
    /// Whether `bias_k` or `bias_v` is there.
    pub add_bias_kv: bool,
}

impl CheckpointInfo {
    /// The configuration of the layer that was found, everything else at its default.
    ///
    /// It is not checked here: what takes the configuration refuses a `num_heads` that does not divide
    /// `embed_dim`.
    pub fn config(&self, num_heads: usize) -> MultiHeadAttentionConfig {
        MultiHeadAttentionConfig::new(self.embed_dim, num_heads)
            .kdim(self.kdim)
            .vdim(self.vdim)
            .bias(self.bias)
            .add_bias_kv(self.add_bias_kv)
    }
}

impl Parameters {
    /// Reads from the header of a safetensors file how large the layer under `prefix` is.
    ///
    /// This looks at the sizes only; [`from_safetensors`](Self::from_safetensors) checks the rest.
    ///
    /// # Errors
    ///
    /// [`Error::Checkpoint`] if `bytes` is no safetensors file, no attention layer lies under `prefix` (the
    /// message lists the prefixes that have one), or the weights of q, k and v give no sizes.
    ///
    /// ```
    /// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(8, 2).kdim(6).bias(false);
    /// let file = Parameters::init(&config, 1)?
    ///     .to_safetensors(&config, "cross", CheckpointNames::PyTorchSeparate, DType::F16)?;
    ///
    /// let info = Parameters::describe(&file, "cross")?;
    /// assert_eq!((info.embed_dim, info.kdim, info.vdim, info.bias), (8, 6, 8, false));
    /// let parameters = Parameters::from_safetensors(&info.config(2), &file, "cross")?;
    /// # assert_eq!(parameters.validate(&config), Ok(()));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn describe(bytes: &[u8], prefix: &str) -> Result<CheckpointInfo> {
        Layer::find(&open(bytes)?, prefix)?
            .info()
            .map_err(Error::Checkpoint)
    }
}

/// The tensors under one prefix, by what follows it.
pub(super) struct Layer<'data> {
    pub(super) names: CheckpointNames,
    /// Empty, or with its dot.
    pub(super) prefix: String,
    pub(super) tensors: BTreeMap<String, TensorView<'data>>,
}

impl<'data> Layer<'data> {
    pub(super) fn find(file: &SafeTensors<'data>, prefix: &str) -> Result<Self> {
        let prefix = dotted(prefix);
        let tensors: BTreeMap<_, _> = file
            .iter()
            .filter_map(|(name, view)| Some((name.strip_prefix(prefix.as_str())?.to_owned(), view)))
            .collect();
        let has = |names: &CheckpointNames| {
            names
                .tensors()
                .iter()
                .any(|stored| stored.marks_a_layer() && tensors.contains_key(stored.name))
        };
        match CheckpointNames::ALL.into_iter().find(has) {
            Some(names) => Ok(Self {
                names,
                prefix,
                tensors,
            }),
            None => Err(Error::Checkpoint(not_found(file, &prefix, tensors.len()))),
        }
    }

    /// Name of a tensor as the file spells it, for messages.
    pub(super) fn full_name(&self, name: &str) -> String {
        clip(&format!("{}{name}", self.prefix))
    }

    pub(super) fn info(&self) -> Result<CheckpointInfo, String> {
        let size = |name: &str| match self.tensors.get(name).map(|view| view.shape()) {
            Some(&[rows, columns]) if (1..=MAX_AXIS).contains(&columns) => Ok((rows, columns)),
            Some(shape) => Err(format!(
                "{} has shape {}, which is no weight [out, in]",
                self.full_name(name),
                axes(shape)
            )),
            None => Err(format!("{} is missing", self.full_name(name))),
        };
        let (embed_dim, kdim, vdim) = match self.names {
            CheckpointNames::PyTorch => {
                let (_, columns) = size("in_proj_weight")?;
                (columns, columns, columns)
            }
            CheckpointNames::PyTorchSeparate => (
                size("q_proj_weight")?.1,
                size("k_proj_weight")?.1,
                size("v_proj_weight")?.1,
            ),
            CheckpointNames::Bert => (
                size("self.query.weight")?.1,
                size("self.key.weight")?.1,
                size("self.value.weight")?.1,
            ),
        };
        let mut info = CheckpointInfo {
            names: self.names,
            embed_dim,
            kdim,
            vdim,
            bias: false,
            add_bias_kv: false,
        };
        for stored in self
            .names
            .tensors()
            .iter()
            .filter(|stored| self.tensors.contains_key(stored.name))
        {
            match stored.parts {
                [Part::BiasK | Part::BiasV] => info.add_bias_kv = true,
                [Part::QBias | Part::KBias | Part::VBias | Part::OutBias, ..] => info.bias = true,
                _ => {}
            }
        }
        let config = info.config(1);
        for stored in self
            .names
            .tensors()
            .iter()
            .filter(|stored| stored.marks_a_layer())
        {
            let wanted = stored.shape(&config);
            let (rows, columns) = size(stored.name)?;
            if wanted != [rows, columns] {
                return Err(format!(
                    "{} has shape [{rows}, {columns}], wanted {wanted:?} for embed_dim = {embed_dim}",
                    self.full_name(stored.name)
                ));
            }
        }
        Ok(info)
    }
}

/// `prefix` with the dot that separates it from a name; nothing if it is empty.
pub(super) fn dotted(prefix: &str) -> String {
    if prefix.is_empty() || prefix.ends_with('.') {
        prefix.to_owned()
    } else {
        format!("{prefix}.")
    }
}

fn not_found(file: &SafeTensors<'_>, prefix: &str, under: usize) -> String {
    const LISTED: usize = 32;
    let markers = || {
        CheckpointNames::ALL
            .into_iter()
            .flat_map(CheckpointNames::tensors)
            .filter(|s| s.marks_a_layer())
    };
    let found: BTreeSet<&str> = file
        .names()
        .into_iter()
        .flat_map(|name| markers().filter_map(move |stored| name.strip_suffix(stored.name)))
        .filter(|prefix| prefix.is_empty() || prefix.ends_with('.'))
        .map(|prefix| prefix.strip_suffix('.').unwrap_or(prefix))
        .collect();
    // Whoever stopped one level too high looks for the layers below first.
    let mut found: Vec<&str> = found.into_iter().collect();
    found.sort_by_key(|name| !name.starts_with(prefix));
    let listed: Vec<String> = found
        .iter()
        .take(LISTED)
        .map(|name| format!("\"{}\"", clip(name)))
        .collect();
    let more = found.len().saturating_sub(LISTED);
    format!(
        "no attention layer under the prefix \"{}\" ({under} of the file's {} tensors lie there, none is in_proj_weight, q_proj_weight or self.query.weight); {}{}",
        clip(prefix.strip_suffix('.').unwrap_or(prefix)),
        file.len(),
        if listed.is_empty() {
            "nothing in the file looks like an attention layer".to_owned()
        } else {
            format!("prefixes that look like attention layers: {}", listed.join(", "))
        },
        if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        },
    )
}
