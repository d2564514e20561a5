//! The parameters of a layer on the host: seeded, read from a checkpoint, written to one.

mod checkpoint;
mod file;
mod init;
mod names;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

pub use names::{CheckpointInfo, CheckpointNames};

use crate::{Error, MultiHeadAttentionConfig, Result};

/// Parameters of a multi-head attention layer in host memory, f32, in PyTorch's layout.
///
/// A weight `[out, in]` is row-major, one row per output: `y = x W^T + b`. With `E = embed_dim`, heads of size
/// `D = head_dim`, `H = num_heads` of them for queries and `Hkv = num_kv_heads` for keys and values (unless the
/// configuration says otherwise, `H * D = Hkv * D = E`):
///
/// | field | shape | present |
/// |---|---|---|
/// | `q_proj_weight` | `[H * D, E]` | always |
/// | `k_proj_weight` | `[Hkv * D, kdim]` | always |
/// | `v_proj_weight` | `[Hkv * D, vdim]` | always |
/// | `out_proj_weight` | `[E, H * D]` | always |
/// | `q_proj_bias` | `[H * D]` | if `bias` |
/// | `k_proj_bias`, `v_proj_bias` | `[Hkv * D]` | if `bias` |
/// | `out_proj_bias` | `[E]` | if `out_bias` |
/// | `bias_k`, `bias_v` | `[Hkv * D]` | if `add_bias_kv` |
///
/// PyTorch's `in_proj_weight [3E, E]` is the three weights one below the other, q, k, v.
///
/// The fields are free to change; [`validate`](Self::validate) says whether they still fit a
/// configuration, and everything that takes a `Parameters` calls it first.
///
/// ```
/// use multihead::{MultiHeadAttentionConfig, Parameters};
///
/// let config = MultiHeadAttentionConfig::new(4, 2).bias(false);
/// let mut parameters = Parameters::zeros(&config)?;
/// for i in 0..4 {
///     parameters.out_proj_weight[i * 4 + i] = 1.0;
/// }
/// assert_eq!(parameters.validate(&config), Ok(()));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Parameters {
    /// Weight of the query projection, `[H * D, E]`.
    pub q_proj_weight: Vec<f32>,
    /// Weight of the key projection, `[Hkv * D, kdim]`.
    pub k_proj_weight: Vec<f32>,
    /// Weight of the value projection, `[Hkv * D, vdim]`.
    pub v_proj_weight: Vec<f32>,
    /// Bias of the query projection, `[H * D]`.
    pub q_proj_bias: Option<Vec<f32>>,
    /// Bias of the key projection, `[Hkv * D]`.
    pub k_proj_bias: Option<Vec<f32>>,
    /// Bias of the value projection, `[Hkv * D]`.
    pub v_proj_bias: Option<Vec<f32>>,
    /// Weight of the output projection, `[E, H * D]`.
    pub out_proj_weight: Vec<f32>,
    /// Bias of the output projection, `[E]`.
    pub out_proj_bias: Option<Vec<f32>>,
    /// The learned key that follows the sequence, after projection, `[Hkv * D]`.
    pub bias_k: Option<Vec<f32>>,
    /// The learned value that follows the sequence, after projection, `[Hkv * D]`.
    pub bias_v: Option<Vec<f32>>,
}

/// One array of [`Parameters`]. Checks, checkpoints and the allocation walk the same list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    QWeight,
    KWeight,
    VWeight,
    QBias,
    KBias,
    VBias,
    OutWeight,
    OutBias,
    BiasK,
    BiasV,
}

impl Part {
    const ALL: [Self; 10] = [
        Self::QWeight,
        Self::KWeight,
        Self::VWeight,
        Self::QBias,
        Self::KBias,
        Self::VBias,
        Self::OutWeight,
        Self::OutBias,
        Self::BiasK,
        Self::BiasV,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::QWeight => "q_proj_weight",
            Self::KWeight => "k_proj_weight",
            Self::VWeight => "v_proj_weight",
            Self::QBias => "q_proj_bias",
            Self::KBias => "k_proj_bias",
            Self::VBias => "v_proj_bias",
            Self::OutWeight => "out_proj_weight",
            Self::OutBias => "out_proj_bias",
            Self::BiasK => "bias_k",
            Self::BiasV => "bias_v",
        }
    }

    /// The option that decides whether a layer has this array, and its value; `None` = it always has.
    fn option(self, config: &MultiHeadAttentionConfig) -> Option<(&'static str, bool)> {
        match self {
            Self::QWeight | Self::KWeight | Self::VWeight | Self::OutWeight => None,
            Self::QBias | Self::KBias | Self::VBias => Some(("bias", config.bias)),
            Self::OutBias => Some(("out_bias", config.out_bias)),
            Self::BiasK | Self::BiasV => Some(("add_bias_kv", config.add_bias_kv)),
        }
    }

    fn wanted(self, config: &MultiHeadAttentionConfig) -> bool {
        self.option(config).is_none_or(|(_, on)| on)
    }

    fn shape(self, sizes: &Sizes) -> Vec<usize> {
        match self {
            Self::QWeight => vec![sizes.q_size, sizes.embed_dim],
            Self::KWeight => vec![sizes.kv_size, sizes.kdim],
            Self::VWeight => vec![sizes.kv_size, sizes.vdim],
            Self::OutWeight => vec![sizes.embed_dim, sizes.q_size],
            Self::QBias => vec![sizes.q_size],
            Self::OutBias => vec![sizes.embed_dim],
            Self::KBias | Self::VBias | Self::BiasK | Self::BiasV => vec![sizes.kv_size],
        }
    }
}

/// What the shapes of all arrays follow from. A file tells these, but not how many heads share the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    embed_dim: usize,
    q_size: usize,
    kv_size: usize,
    kdim: usize,
    vdim: usize,
}

impl Sizes {
    /// Whether queries, keys and values have one size throughout.
    fn are_one(&self) -> bool {
        [self.q_size, self.kv_size, self.kdim, self.vdim] == [self.embed_dim; 4]
    }
}

impl From<&MultiHeadAttentionConfig> for Sizes {
    fn from(config: &MultiHeadAttentionConfig) -> Self {
        Self {
            embed_dim: config.embed_dim,
            q_size: config.q_size(),
            kv_size: config.kv_size(),
            kdim: config.kdim,
            vdim: config.vdim,
        }
    }
}

impl std::fmt::Display for Sizes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            embed_dim,
            q_size,
            kv_size,
            kdim,
            vdim,
        } = self;
        write!(f, "embed_dim = {embed_dim}, kdim = {kdim}, vdim = {vdim}")?;
        if [q_size, kv_size] != [embed_dim; 2] {
            write!(
                f,
                ", num_heads * head_dim = {q_size}, num_kv_heads * head_dim = {kv_size}"
            )?;
        }
        Ok(())
    }
}

impl Parameters {
    /// Parameters that are all zero, of the sizes that `config` asks for: the way to fill them by hand.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if `config` is not valid or the arrays do not fit this host's memory.
    pub fn zeros(config: &MultiHeadAttentionConfig) -> Result<Self> {
        config.validate()?;
        let sizes = Sizes::from(config);
        let mut parameters = Self::empty();
        for part in Part::ALL.into_iter().filter(|part| part.wanted(config)) {
            let shape = part.shape(&sizes);
            let refuse = || {
                Error::Option(format!(
                    "{} {shape:?} in f32 does not fit this host's memory",
                    part.name()
                ))
            };
            // A plain vec! would abort the program on sizes that pass the configuration's own checks.
            let length = shape
                .iter()
                .try_fold(1usize, |n, &axis| n.checked_mul(axis))
                .ok_or_else(refuse)?;
            let mut values = Vec::new();
            values.try_reserve_exact(length).map_err(|_| refuse())?;
            values.resize(length, 0.0);
            parameters.set(part, values);
        }
        Ok(parameters)
    }

    /// Checks every array against the sizes and options of `config`.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if `config` itself is not valid; [`Error::Shape`] that lists every array of a wrong
    /// length, every missing one and every one that the options leave out.
    ///
    /// ```
    /// use multihead::{Error, MultiHeadAttentionConfig, Parameters};
    ///
    /// let parameters = Parameters::zeros(&MultiHeadAttentionConfig::new(8, 2))?;
    /// let error = parameters.validate(&MultiHeadAttentionConfig::new(8, 2).kdim(6)).unwrap_err();
    /// assert!(matches!(error, Error::Shape(_)));
    /// assert!(error.to_string().contains("k_proj_weight"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn validate(&self, config: &MultiHeadAttentionConfig) -> Result<()> {
        config.validate()?;
        let sizes = Sizes::from(config);
        let mut problems = Vec::new();
        for part in Part::ALL {
            let (name, shape) = (part.name(), part.shape(&sizes));
            match (self.get(part), part.option(config)) {
                (Some(_), Some((option, false))) => problems.push(format!(
                    "{name} is given, while the config says {option} = false: set it to None or use .{option}(true)"
                )),
                (None, Some((option, true))) => problems.push(format!(
                    "{name} {shape:?} is missing, while the config says {option} = true: give it or use .{option}(false)"
                )),
                (Some(values), _) if values.len() as u64 != crate::shape::product(&shape) => problems.push(format!(
                    "{name} has {} values, wanted {} {shape:?}",
                    values.len(),
                    crate::shape::product(&shape)
                )),
                _ => {}
            }
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(Error::Shape(format!(
            "the parameters do not fit the config: {}",
            problems.join("; ")
        )))
    }

    /// Fits no configuration: the start for what fills every array.
    fn empty() -> Self {
        Self {
            q_proj_weight: Vec::new(),
            k_proj_weight: Vec::new(),
            v_proj_weight: Vec::new(),
            q_proj_bias: None,
            k_proj_bias: None,
            v_proj_bias: None,
            out_proj_weight: Vec::new(),
            out_proj_bias: None,
            bias_k: None,
            bias_v: None,
        }
    }

    fn get(&self, part: Part) -> Option<&[f32]> {
        match part {
            Part::QWeight => Some(&self.q_proj_weight),
            Part::KWeight => Some(&self.k_proj_weight),
            Part::VWeight => Some(&self.v_proj_weight),
            Part::OutWeight => Some(&self.out_proj_weight),
            Part::QBias => self.q_proj_bias.as_deref(),
            Part::KBias => self.k_proj_bias.as_deref(),
            Part::VBias => self.v_proj_bias.as_deref(),
            Part::OutBias => self.out_proj_bias.as_deref(),
            Part::BiasK => self.bias_k.as_deref(),
            Part::BiasV => self.bias_v.as_deref(),
        }
    }

    fn set(&mut self, part: Part, values: Vec<f32>) {
        match part {
            Part::QWeight => self.q_proj_weight = values,
            Part::KWeight => self.k_proj_weight = values,
            Part::VWeight => self.v_proj_weight = values,
            Part::OutWeight => self.out_proj_weight = values,
            Part::QBias => self.q_proj_bias = Some(values),
            Part::KBias => self.k_proj_bias = Some(values),
            Part::VBias => self.v_proj_bias = Some(values),
            Part::OutBias => self.out_proj_bias = Some(values),
            Part::BiasK => self.bias_k = Some(values),
            Part::BiasV => self.bias_v = Some(values),
        }
    }
}
