//! Pages to read in order or one at a time: how it works, which mask to take, how to live in a program of yours, what to
//! expect of the numbers, and how to add a kernel.

#[doc = include_str!("../docs/algorithm.md")]
pub mod algorithm {}

#[doc = include_str!("../docs/masks.md")]
pub mod masks {}

#[doc = include_str!("../docs/embedding.md")]
pub mod embedding {}

#[doc = include_str!("../docs/numerics.md")]
pub mod numerics {}

#[doc = include_str!("../docs/kernels.md")]
pub mod kernels {}
