//! Which path computes a call, and why.

use super::Attention;
use crate::{
    AttentionShape, Error, Result,
    tuning::{FUSED_QUERIES, FlashTile, Product, Tile},
};

/// How a call is computed.
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
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// [`AttentionPath::Fused`] or [`AttentionPath::Composed`].
    pub path: AttentionPath,
    /// Why this path.
    pub reason: String,
    /// Tile sizes of its kernels.
    pub tile: String,
}

impl Attention {
    /// Which path computes a call of this shape, and why; `weights` if its weights or their mean are wanted.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Attention, AttentionOptions, AttentionShape, Gpu, AttentionPath};
    ///
    /// let attention = Attention::new(&Gpu::new()?, AttentionOptions::new())?;
    /// let shape = AttentionShape::new(1, 8, 512, 64);
    /// assert_eq!(attention.choice(&shape, false)?.path, AttentionPath::Fused);
    /// assert_eq!(attention.choice(&shape, true)?.path, AttentionPath::Composed);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for sizes that no call may have; [`Error::Option`] if the fused path is forced and weights are
    /// wanted.
    pub fn choice(&self, shape: &AttentionShape, weights: bool) -> Result<Choice> {
        shape.validate()?;
        let (path, reason) = self.choose(shape, weights)?;
        let tile = match path {
            AttentionPath::Fused => {
                format!("{:?}", FlashTile::of(&self.gpu, shape.head_dim, shape.value_dim))
            }
            _ => format!("{:?}", Tile::of(&self.gpu, Product::Scores)),
        };
        Ok(Choice { path, reason, tile })
    }

    pub(super) fn choose(&self, shape: &AttentionShape, weights: bool) -> Result<(AttentionPath, String)> {
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
            AttentionPath::Auto if shape.queries < FUSED_QUERIES => (
                AttentionPath::Composed,
                format!(
                    "{} queries would leave most of the fused kernel's rows idle",
                    shape.queries
                ),
            ),
            AttentionPath::Auto => (
                AttentionPath::Fused,
                "it is the default where no weights are wanted".to_owned(),
            ),
        })
    }
}
