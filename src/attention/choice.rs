//! Which path computes a call, and why.

use super::Attention;
use crate::{
    AttentionShape, DType, Error, Result,
    kernel::Storage,
    kernels::{
        decode, flash,
        scores::{self, Rule},
    },
};

/// How a call is computed.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionOptions, AttentionPath, AttentionShape, DType};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?.with_path(AttentionPath::Composed);
/// let choice = attention.choice(&AttentionShape::new(1, 2, 10, 16), DType::F32, false)?;
/// assert_eq!(choice.path, AttentionPath::Composed); // not `Fused`, as `Auto` has it where no weights are wanted
/// # Ok(())
/// # }
/// ```
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
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionOptions, AttentionShape, DType};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let one_query = AttentionShape { queries: 1, ..AttentionShape::new(1, 8, 4096, 64) };
/// let choice = attention.choice(&one_query, DType::F32, false)?;
/// println!("{choice}");
/// assert!(choice.variant.contains("decode"));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// [`AttentionPath::Fused`] or [`AttentionPath::Composed`].
    pub path: AttentionPath,
    /// Why this path.
    pub reason: String,
    /// The variant of its main kernel, as labels, profiles and logs have it: its name, how each of its float inputs and its
    /// output is stored (`Packed`: F16 without `SHADER_F16`), and the constants of its tile, which its shader explains
    /// (`PLAIN=1`: nothing but the scale applies to scores). Sizes are those that it is built for: heads of 16 run in
    /// `DIM=64`, and `DIM=0` takes any.
    pub variant: String,
    /// Variants that the table puts first but that failed their self-check on this device, with what was wrong.
    pub passed_over: Vec<String>,
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}, as {}: {}", self.path, self.reason, self.variant)?;
        self.passed_over
            .iter()
            .try_for_each(|passed_over| write!(f, "; passed over: {passed_over}"))
    }
}

impl Attention {
    /// Which path and variant compute a call of this shape without masks, all tensors of `dtype`, and why; `weights` if
    /// its weights or their mean are wanted. A variant that depends on the driver's subgroups is built and checked if
    /// it was not before, which waits for the device.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Attention, AttentionOptions, AttentionPath, AttentionShape, DType, Gpu};
    ///
    /// let attention = Attention::new(&Gpu::new()?, AttentionOptions::new())?;
    /// let shape = AttentionShape::new(1, 8, 512, 64);
    /// assert_eq!(attention.choice(&shape, DType::F32, false)?.path, AttentionPath::Fused);
    /// assert_eq!(attention.choice(&shape, DType::F32, true)?.path, AttentionPath::Composed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for sizes that no call may have; [`Error::Option`] if the fused path is forced and weights are
    /// wanted; [`Error::DType`] for a type that is not of floats; [`Error::DeviceLost`].
    pub fn choice(&self, shape: &AttentionShape, dtype: DType, weights: bool) -> Result<Choice> {
        shape.validate()?;
        self.options.validate_for(shape)?;
        let (path, reason) = self.choose(weights)?;
        let gpu = &self.gpu;
        let storage = Storage::of(gpu, dtype)?;
        let (variant, passed_over) = match path {
            AttentionPath::Fused if self.decode_tile(shape).is_some() => {
                let plain = Rule::new(&self.options, shape).is_plain();
                let tile = self.decode_tile(shape);
                let variant = tile.map(|tile| decode::variant(tile, plain, [storage; 4]));
                return Ok(Choice {
                    path,
                    reason,
                    variant: variant.map_or_else(String::new, |variant| variant.label()),
                    passed_over: Vec::new(),
                });
            }
            AttentionPath::Fused => {
                let plain = Rule::new(&self.options, shape).is_plain();
                let storages = [storage; 4];
                let chosen = gpu.flash_tile(storages, plain, shape.head_dim, shape.value_dim, false)?;
                (flash::variant(chosen.tile, plain, storages), chosen.passed_over)
            }
            _ => {
                let chosen = gpu.scores_tile([storage; 2], shape.head_dim, false)?;
                (scores::variant(chosen.tile, storage, storage), chosen.passed_over)
            }
        };
        Ok(Choice {
            path,
            reason,
            variant: variant.label(),
            passed_over,
        })
    }

    /// The path alone, with nothing built.
    pub(crate) fn chosen_path(&self, shape: &AttentionShape, weights: bool) -> Result<AttentionPath> {
        shape.validate()?;
        Ok(self.choose(weights)?.0)
    }

    pub(super) fn choose(&self, weights: bool) -> Result<(AttentionPath, String)> {
        Ok(match self.path {
            AttentionPath::Fused if weights => {
                return Err(Error::Option(
                    "the fused path never holds the weights: ask for them on AttentionPath::Composed or AttentionPath::Auto"
                        .to_owned(),
                ));
            }
            AttentionPath::Fused => (AttentionPath::Fused, "it was asked for".to_owned()),
            AttentionPath::Composed => (AttentionPath::Composed, "it was asked for".to_owned()),
            AttentionPath::Auto if weights => (AttentionPath::Composed, "the weights are wanted".to_owned()),
            AttentionPath::Auto => (
                AttentionPath::Fused,
                "it is the default where no weights are wanted".to_owned(),
            ),
        })
    }
}
