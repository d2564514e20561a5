//! What the tensors of an attention layer are called in checkpoints, and which of them a file holds.

use std::collections::{BTreeMap, BTreeSet};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::file::{axes, clip, open};
use super::{Parameters, Part, Sizes};
use crate::shape::{MAX_AXIS, product};
use crate::{Error, MultiHeadAttentionConfig, Result};

/// How a checkpoint names the tensors of an attention layer; each name stands behind the layer's prefix.
///
/// | | weights of q, k, v | their biases | output projection |
/// |---|---|---|---|
/// | [`PyTorch`](Self::PyTorch) | `in_proj_weight [3E, E]` | `in_proj_bias [3E]` | `out_proj.weight`, `out_proj.bias` |
/// | [`PyTorchSeparate`](Self::PyTorchSeparate) | `q_proj_weight`, `k_proj_weight`, `v_proj_weight` | `in_proj_bias`, all three joined | `out_proj.weight`, `out_proj.bias` |
/// | [`Bert`](Self::Bert) | `self.query.weight`, `self.key.weight`, `self.value.weight` | the same with `bias` | `output.dense.weight`, `output.dense.bias` |
/// | [`Gpt2`](Self::Gpt2) | `c_attn.weight [E, 3E]` | `c_attn.bias [3E]` | `c_proj.weight`, `c_proj.bias` |
/// | [`Llama`](Self::Llama) | `q_proj.weight`, `k_proj.weight`, `v_proj.weight` | the same with `bias` | `o_proj.weight`, `o_proj.bias` |
///
/// Where no shape is given it is that of [`Parameters`]. PyTorch's layers may have `bias_k` and `bias_v` of
/// `[1, 1, E]` as well.
///
/// ```
/// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
///
/// let config = MultiHeadAttentionConfig::new(8, 2);
/// let parameters = Parameters::init(&config, 1)?;
/// for names in [CheckpointNames::PyTorch, CheckpointNames::Bert, CheckpointNames::Gpt2, CheckpointNames::Llama] {
///     let file = parameters.to_safetensors(&config, "layer", names, DType::F32)?;
///     assert_eq!(Parameters::from_safetensors(&config, &file, "layer")?, parameters);
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CheckpointNames {
    /// `torch.nn.MultiheadAttention` whose keys and values have the size of the queries.
    PyTorch,
    /// `torch.nn.MultiheadAttention` with its own `kdim` or `vdim`. Every layer of this crate can be written
    /// under these names; PyTorch itself has neither `num_kv_heads` nor `head_dim`.
    PyTorchSeparate,
    /// `BertAttention` of the transformers library (BERT, RoBERTa, MiniLM, ...); the prefix ends in
    /// `attention`. `output.LayerNorm.*` lies under the same prefix but acts after the layer, on the sum
    /// with the layer's input: it is no part of attention and is skipped.
    Bert,
    /// `GPT2Attention` of the transformers library; the prefix ends in `attn` (`h.0.attn`). Weights are stored
    /// transposed, `[in, out]`, as its `Conv1D` has them. The causal mask that old files hold as `bias` and
    /// `masked_bias` is skipped. The model attends in causal order, which no tensor tells: set
    /// [`Causal::TopLeft`](crate::Causal::TopLeft).
    Gpt2,
    /// `LlamaAttention` of the transformers library and its kin (Llama, Mistral, Qwen2, ...); the prefix ends
    /// in `self_attn` (`model.layers.0.self_attn`). Keys and values may have fewer heads than queries, heads a
    /// size of their own; biases of the output go apart from those of q, k and v (Qwen2 has the latter alone).
    /// `rotary_emb.inv_freq`, which old files hold, is skipped. These models attend in causal order and turn
    /// queries and keys by their positions ([`MultiHeadAttention::with_rotary`](crate::MultiHeadAttention::with_rotary)),
    /// which no tensor tells.
    Llama,
}

/// One tensor of a checkpoint and the arrays that it holds one below the other.
#[derive(Debug)]
pub(super) struct Stored {
    pub(super) name: &'static str,
    pub(super) parts: &'static [Part],
    /// Whether the file has it as `[in, out]`, its arrays side by side.
    transposed: bool,
}

const fn stored(name: &'static str, parts: &'static [Part]) -> Stored {
    Stored {
        name,
        parts,
        transposed: false,
    }
}

const fn transposed(name: &'static str, parts: &'static [Part]) -> Stored {
    Stored {
        name,
        parts,
        transposed: true,
    }
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

static GPT2: [Stored; 4] = [
    transposed("c_attn.weight", &[Part::QWeight, Part::KWeight, Part::VWeight]),
    stored("c_attn.bias", &[Part::QBias, Part::KBias, Part::VBias]),
    transposed("c_proj.weight", &[Part::OutWeight]),
    stored("c_proj.bias", &[Part::OutBias]),
];
static LLAMA: [Stored; 8] = [
    stored("q_proj.weight", &[Part::QWeight]),
    stored("k_proj.weight", &[Part::KWeight]),
    stored("v_proj.weight", &[Part::VWeight]),
    stored("q_proj.bias", &[Part::QBias]),
    stored("k_proj.bias", &[Part::KBias]),
    stored("v_proj.bias", &[Part::VBias]),
    stored("o_proj.weight", &[Part::OutWeight]),
    stored("o_proj.bias", &[Part::OutBias]),
];

impl Stored {
    /// Its shape in a file.
    pub(super) fn shape(&self, sizes: &Sizes) -> Vec<usize> {
        let mut shape = match self.parts {
            [Part::BiasK | Part::BiasV] => vec![1, 1, sizes.kv_size],
            _ => self.rows(sizes),
        };
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// Shape of its arrays one below the other.
    fn rows(&self, sizes: &Sizes) -> Vec<usize> {
        let mut shapes = self.parts.iter().map(|part| part.shape(sizes));
        let mut joined = shapes.next().unwrap_or_default();
        for shape in shapes {
            joined[0] = joined[0].saturating_add(shape[0]);
        }
        joined
    }

    /// Cuts the values of a file's tensor into its arrays.
    pub(super) fn cut(&self, values: Vec<f32>, sizes: &Sizes) -> Vec<(Part, Vec<f32>)> {
        let mut rest = if self.transposed {
            transpose(&values, &self.shape(sizes))
        } else {
            values
        };
        let mut arrays = Vec::with_capacity(self.parts.len());
        for &part in self.parts {
            let length = product(&part.shape(sizes)).min(rest.len() as u64) as usize;
            let next = rest.split_off(length);
            arrays.push((part, std::mem::replace(&mut rest, next)));
        }
        arrays
    }

    /// Joins arrays, given one behind the other, into the values of a file's tensor.
    pub(super) fn join(&self, values: Vec<f32>, sizes: &Sizes) -> Vec<f32> {
        if self.transposed {
            transpose(&values, &self.rows(sizes))
        } else {
            values
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

/// A row-major matrix of this shape turned on its side.
fn transpose(values: &[f32], shape: &[usize]) -> Vec<f32> {
    let columns = shape.get(1).copied().unwrap_or(1);
    (0..columns)
        .flat_map(|column| values.iter().skip(column).step_by(columns).copied())
        .collect()
}

impl CheckpointNames {
    pub(super) const ALL: [Self; 5] = [
        Self::PyTorch,
        Self::PyTorchSeparate,
        Self::Bert,
        Self::Gpt2,
        Self::Llama,
    ];

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
            Self::Gpt2 => &GPT2,
            Self::Llama => &LLAMA,
        }
    }

    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::PyTorch => "PyTorch names",
            Self::PyTorchSeparate => "PyTorch names with separate q, k, v",
            Self::Bert => "BERT names",
            Self::Gpt2 => "GPT-2 names",
            Self::Llama => "Llama names",
        }
    }

    /// Tensors that lie beside the layer's under the same prefix and are none of its business.
    pub(super) fn skips(self, name: &str) -> bool {
        match self {
            Self::PyTorch | Self::PyTorchSeparate => false,
            Self::Bert => name.starts_with("output.LayerNorm."),
            Self::Gpt2 => matches!(name, "bias" | "masked_bias"),
            Self::Llama => name == "rotary_emb.inv_freq",
        }
    }

    /// What a layer of these sizes has and this naming has no place for.
    pub(super) fn lacks(self, sizes: &Sizes, add_bias_kv: bool) -> Option<String> {
        let joins_one_size = |name: &str, instead: &str| {
            (!sizes.are_one()).then(|| {
                format!("{name} joins projections of one size, not {sizes}: such a layer has {instead}")
            })
        };
        match self {
            Self::PyTorch => joins_one_size(
                "in_proj_weight",
                "q_proj_weight, k_proj_weight and v_proj_weight (CheckpointNames::PyTorchSeparate)",
            ),
            Self::PyTorchSeparate => None,
            _ if add_bias_kv => Some(format!(
                "{} have no bias_k and bias_v: use .add_bias_kv(false), or PyTorch's names",
                self.describe()
            )),
            Self::Bert if [sizes.q_size, sizes.kv_size] != [sizes.embed_dim; 2] => Some(format!(
                "BERT layers have num_kv_heads = num_heads and head_dim = embed_dim / num_heads, not {sizes}: such a layer has Llama's names (CheckpointNames::Llama)"
            )),
            Self::Bert | Self::Llama => None,
            Self::Gpt2 => joins_one_size(
                "c_attn.weight",
                "q_proj.weight, k_proj.weight and v_proj.weight (CheckpointNames::Llama)",
            ),
        }
    }
}

/// What the header of a checkpoint tells about an attention layer; see [`Parameters::describe`].
///
/// The number of query heads is not in a checkpoint's tensors: it stands in the model's own configuration file.
/// That of key and value heads follows from it.
///
/// ```
/// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
///
/// let config = MultiHeadAttentionConfig::new(8, 2).out_bias(false);
/// # let file = Parameters::init(&config, 1)?
/// #     .to_safetensors(&config, "model.layers.0.self_attn", CheckpointNames::Llama, DType::F32)?;
/// // let file = std::fs::read("model.safetensors")?;
/// let info = Parameters::describe(&file, "model.layers.0.self_attn")?;
/// assert_eq!((info.names, info.embed_dim), (CheckpointNames::Llama, 8));
/// assert!(info.bias && !info.out_bias && !info.add_bias_kv);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckpointInfo {
    /// How the tensors are named.
    pub names: CheckpointNames,
    /// Size of a query vector and of an output vector.
    pub embed_dim: usize,
    /// Rows of the query projection, `num_heads * head_dim`.
    pub q_size: usize,
    /// Rows of the key projection and of the value projection, `num_kv_heads * head_dim`.
    pub kv_size: usize,
    /// Size of a key vector.
    pub kdim: usize,
    /// Size of a value vector.
    pub vdim: usize,
    /// Whether the projection of queries, keys or values has a bias.
    pub bias: bool,
    /// Whether the output projection has a bias.
    pub out_bias: bool,
    /// Whether `bias_k` or `bias_v` is there.
    pub add_bias_kv: bool,
}

impl CheckpointInfo {
    /// The configuration of the layer that was found, everything else at its default.
    ///
    /// The size of a head and the number of key and value heads follow from the rows of the projections. They are
    /// not checked here: [`from_safetensors`](Parameters::from_safetensors) refuses a `num_heads` that does not fit
    /// the rows, but no file tells a wrong one that does.
    ///
    /// ```
    /// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(24, 6).num_kv_heads(2).bias(false);
    /// # let file = Parameters::init(&config, 1)?
    /// #     .to_safetensors(&config, "model.layers.0.self_attn", CheckpointNames::Llama, DType::F32)?;
    /// // let file = std::fs::read("model.safetensors")?;
    /// let found = Parameters::describe(&file, "model.layers.0.self_attn")?;
    /// assert_eq!((found.q_size, found.kv_size), (24, 8));
    /// assert_eq!(found.config(6), config); // 8 rows of keys are 2 heads of 24 / 6
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn config(&self, num_heads: usize) -> MultiHeadAttentionConfig {
        let mut config = MultiHeadAttentionConfig::new(self.embed_dim, num_heads)
            .kdim(self.kdim)
            .vdim(self.vdim)
            .bias(self.bias)
            .out_bias(self.out_bias)
            .add_bias_kv(self.add_bias_kv);
        let head_dim = self.q_size.checked_div(num_heads).unwrap_or(0);
        if self.q_size != self.embed_dim {
            config.head_dim = Some(head_dim);
        }
        // Where nothing fits, the shapes that a reader of the file then wants tell more than a count made up here.
        let fits = config.q_size() == self.q_size && self.kv_size.checked_rem(head_dim) == Some(0);
        if fits {
            config.num_kv_heads = self.kv_size / head_dim;
        }
        config
    }
}

impl From<&CheckpointInfo> for Sizes {
    fn from(info: &CheckpointInfo) -> Self {
        Self {
            embed_dim: info.embed_dim,
            q_size: info.q_size,
            kv_size: info.kv_size,
            kdim: info.kdim,
            vdim: info.vdim,
        }
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
            Some(&[rows, columns]) if [rows, columns].iter().all(|axis| (1..=MAX_AXIS).contains(axis)) => {
                Ok((rows, columns))
            }
            Some(shape) => Err(format!(
                "{} has shape {}, which is no weight {}",
                self.full_name(name),
                axes(shape),
                if self.names == CheckpointNames::Gpt2 {
                    "[in, out]"
                } else {
                    "[out, in]"
                }
            )),
            None => Err(format!("{} is missing", self.full_name(name))),
        };
        let one = |embed_dim| Sizes {
            embed_dim,
            q_size: embed_dim,
            kv_size: embed_dim,
            kdim: embed_dim,
            vdim: embed_dim,
        };
        let separate = |q: &str, k: &str, v: &str| {
            let ((q_size, embed_dim), (kv_size, kdim), (_, vdim)) = (size(q)?, size(k)?, size(v)?);
            Ok::<_, String>(Sizes {
                embed_dim,
                q_size,
                kv_size,
                kdim,
                vdim,
            })
        };
        let sizes = match self.names {
            CheckpointNames::PyTorch => one(size("in_proj_weight")?.1),
            CheckpointNames::PyTorchSeparate => separate("q_proj_weight", "k_proj_weight", "v_proj_weight")?,
            CheckpointNames::Bert => separate("self.query.weight", "self.key.weight", "self.value.weight")?,
            CheckpointNames::Gpt2 => one(size("c_attn.weight")?.0),
            CheckpointNames::Llama => separate("q_proj.weight", "k_proj.weight", "v_proj.weight")?,
        };
        let has = |parts: &[Part]| {
            let stored = self.names.tensors().iter();
            stored
                .filter(|stored| self.tensors.contains_key(stored.name))
                .any(|stored| stored.parts.iter().any(|part| parts.contains(part)))
        };
        let info = CheckpointInfo {
            names: self.names,
            embed_dim: sizes.embed_dim,
            q_size: sizes.q_size,
            kv_size: sizes.kv_size,
            kdim: sizes.kdim,
            vdim: sizes.vdim,
            bias: has(&[Part::QBias, Part::KBias, Part::VBias]),
            out_bias: has(&[Part::OutBias]),
            add_bias_kv: has(&[Part::BiasK, Part::BiasV]),
        };
        for stored in self
            .names
            .tensors()
            .iter()
            .filter(|stored| stored.marks_a_layer())
        {
            let wanted = stored.shape(&sizes);
            let (rows, columns) = size(stored.name)?;
            if wanted != [rows, columns] {
                return Err(format!(
                    "{} has shape [{rows}, {columns}], wanted {wanted:?} for {sizes}",
                    self.full_name(stored.name)
                ));
            }
        }
        match self.names.lacks(&sizes, info.add_bias_kv) {
            Some(problem) => Err(problem),
            None => Ok(info),
        }
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
        "no attention layer under the prefix \"{}\" ({under} of the file's {} tensors lie there, none is in_proj_weight, q_proj_weight, self.query.weight, c_attn.weight or q_proj.weight); {}{}",
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
