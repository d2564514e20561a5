//! Picks the best variant of the table that this device runs rightly.
//!
//! A variant that depends on the driver's subgroups is checked when it is first built: it computes something small whose
//! answer is known. Where it is wrong, or the driver refuses it, the next one of the table is taken.

use crate::{
    Error, Gpu, Result,
    kernel::{Storage, Variant},
    kernels::{attention::Storages, flash, linear, scores, weighted_sum},
    self_check,
    tiles::{FlashTile, Tile},
};

/// A tile that was chosen, and what was passed over before it and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Chosen<T> {
    pub(crate) tile: T,
    pub(crate) passed_over: Vec<String>,
}

impl Gpu {
    /// Tile of a projection between these storages; `ahead` if it is only planned, and nothing is built or run.
    pub(crate) fn linear_tile(
        &self,
        storages: [Storage; 4],
        inner: usize,
        ahead: bool,
    ) -> Result<Chosen<Tile>> {
        let [x, weight, bias, output] = storages;
        let halves = x != Storage::F32 && weight != Storage::F32;
        self.first_right(
            Tile::candidates(self, halves, inner),
            ahead,
            |tile| linear::variant(tile, x, weight, bias, output),
            |tile| self_check::linear(self, tile, storages),
        )
    }

    /// Tile of the product of queries and keys.
    pub(crate) fn scores_tile(
        &self,
        storages: [Storage; 2],
        inner: usize,
        ahead: bool,
    ) -> Result<Chosen<Tile>> {
        let [query, key] = storages;
        let halves = query != Storage::F32 && key != Storage::F32;
        self.first_right(
            Tile::candidates(self, halves, inner),
            ahead,
            |tile| scores::variant(tile, query, key),
            |tile| self_check::scores(self, tile, storages),
        )
    }

    /// Tile of the product of weights, which are f32, and values.
    pub(crate) fn weighted_sum_tile(&self, storages: [Storage; 2], ahead: bool) -> Result<Chosen<Tile>> {
        let [value, output] = storages;
        self.first_right(
            Tile::candidates(self, false, 0),
            ahead,
            |tile| weighted_sum::variant(tile, value, output),
            |tile| self_check::weighted_sum(self, tile, storages),
        )
    }

    /// Tile of the fused kernel.
    pub(crate) fn flash_tile(
        &self,
        storages: Storages,
        plain: bool,
        head_dim: usize,
        value_dim: usize,
        ahead: bool,
    ) -> Result<Chosen<FlashTile>> {
        let halves = storages[..3].iter().all(|&storage| storage != Storage::F32);
        self.first_right(
            FlashTile::candidates(self, halves, head_dim, value_dim),
            ahead,
            |tile| flash::variant(tile, plain, storages),
            |tile| self_check::flash(self, tile, plain, storages),
        )
    }

    fn first_right<T: Copy>(
        &self,
        candidates: Vec<T>,
        ahead: bool,
        variant: impl Fn(T) -> Variant,
        check: impl Fn(T) -> Result<()>,
    ) -> Result<Chosen<T>> {
        let mut passed_over = Vec::new();
        for tile in candidates {
            let variant = variant(tile);
            let verdict = match self.verdict(&variant) {
                Some(verdict) => verdict,
                None if ahead || !variant.subgroups => Ok(()),
                None => {
                    let verdict = match check(tile) {
                        Ok(()) => Ok(()),
                        // What is wrong with the variant, as opposed to the device.
                        Err(Error::Shader { message, .. }) => Err(message),
                        Err(other) => return Err(other),
                    };
                    match &verdict {
                        Ok(()) => log::debug!("{} passed its self-check", variant.label()),
                        Err(message) => log::warn!("{} is passed over: {message}", variant.label()),
                    }
                    self.set_verdict(variant.clone(), verdict.clone());
                    verdict
                }
            };
            match verdict {
                Ok(()) => {
                    log::trace!("{} is chosen", variant.label());
                    return Ok(Chosen { tile, passed_over });
                }
                Err(message) => passed_over.push(format!("{}: {message}", variant.label())),
            }
        }
        Err(Error::Shader {
            kernel: "every variant".to_owned(),
            message: passed_over.join("; "),
        })
    }
}
