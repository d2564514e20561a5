//! One module per shader: its params, its variants, its grid.

pub(crate) mod append;
pub(crate) mod attention;
pub(crate) mod copy;
pub(crate) mod decode;
pub(crate) mod flash;
pub(crate) mod join_words;
pub(crate) mod linear;
pub(crate) mod mean_heads;
pub(crate) mod merge_ranges;
pub(crate) mod move_sequences;
pub(crate) mod rotary;
pub(crate) mod scores;
pub(crate) mod softmax;
pub(crate) mod weighted_sum;

#[cfg(test)]
mod tests;

use crate::{
    AttentionShape, Gpu, Result, Tensor,
    kernel::{Binding, Storage, Variant},
    tiles::Tile,
};

const PRODUCT_SUBGROUP: &str = include_str!("../../shaders/shared/product_subgroup.wgsl");
const PRODUCT_WORKGROUP: &str = include_str!("../../shaders/shared/product_workgroup.wgsl");
const TILE: &str = include_str!("../../shaders/shared/tile.wgsl");
const EXPONENTIAL: &str = include_str!("../../shaders/shared/exponential.wgsl");
const ROTATE: &str = include_str!("../../shaders/shared/rotate.wgsl");
const RULE: &str = include_str!("../../shaders/shared/rule.wgsl");
const SINK: &str = include_str!("../../shaders/shared/sink.wgsl");

/// A kernel built around the matrix product.
fn product_variant(
    name: &'static str,
    tile: Tile,
    mut pieces: Vec<&'static str>,
    inputs: Vec<(&'static str, Storage)>,
    output: Option<Storage>,
) -> Variant {
    let subgroups = matches!(tile, Tile::Subgroup { .. });
    pieces.push(TILE);
    pieces.push(if subgroups {
        PRODUCT_SUBGROUP
    } else {
        PRODUCT_WORKGROUP
    });
    Variant {
        name,
        pieces,
        constants: tile.constants(),
        inputs,
        output,
        subgroups,
    }
}

/// Rows of the score matrix that are computed together: rows `first_row..first_row + rows` of `head_count` heads
/// from `first_head` on, heads counted over the whole batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) first_head: usize,
    pub(crate) head_count: usize,
    pub(crate) first_row: usize,
    pub(crate) rows: usize,
}

impl Chunk {
    /// All rows of a call.
    pub(crate) fn whole(shape: &AttentionShape) -> Self {
        Self {
            first_head: 0,
            head_count: shape.batch * shape.heads,
            first_row: 0,
            rows: shape.queries,
        }
    }

    /// Rows over all its heads.
    pub(crate) fn all_rows(&self) -> u64 {
        self.head_count as u64 * self.rows as u64
    }
}

/// A bound vector of words: where it starts, how far apart its words lie, and how many there are.
#[derive(Debug, Clone)]
pub(crate) struct Vector {
    pub(crate) binding: Binding,
    pub(crate) start: u32,
    pub(crate) stride: u32,
    pub(crate) len: u32,
}

impl Vector {
    pub(crate) fn bind(gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<Self> {
        let (binding, start) = Binding::tensor(gpu, what, tensor)?;
        let (shape, strides) = tensor.four_axes();
        Ok(Self {
            binding,
            start,
            stride: strides[0],
            len: shape[0],
        })
    }
}

/// Tiles that cover `size`.
pub(crate) fn tiles(size: usize, tile: u32) -> u64 {
    (size as u64).div_ceil(u64::from(tile))
}
