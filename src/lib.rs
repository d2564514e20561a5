#![doc = include_str!("../README.md")]

pub use half::f16;
pub use wgpu;

mod attention;
mod cache;
mod choose;
mod config;
mod dtype;
mod error;
mod gpu;
pub mod guide;
mod inputs;
mod kernel;
mod kernels;
mod linear;
mod mask;
mod multi_head;
mod options;
mod packed;
mod plan;
pub mod reference;
mod rotary;
mod self_check;
mod shape;
mod tensor;
mod tiles;
mod tune;
mod tuning;
mod weights;

pub use attention::{Attention, AttentionPath, AttentionResult, Choice, Wanted};
pub use cache::{KvCache, KvCacheShape};
pub use config::MultiHeadAttentionConfig;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use gpu::{Gpu, KernelTime, Profile};
pub use inputs::{AttentionInputs, AttentionOutputs, KvLengths, Mask};
pub use linear::Linear;
pub use multi_head::{
    CrossCache, MultiHeadAttention, MultiHeadInputs, MultiHeadOutputs, MultiHeadResult, NeedWeights,
};
pub use options::{Align, AttentionOptions, Causal};
pub use packed::{CuSeqlens, PackedInputs, PackedOutputs, PackedResult};
pub use plan::Plan;
pub use rotary::{Rotary, RotaryOptions, RotaryPairing, RotaryPositions, RotaryScaling};
pub use self_check::{PendingCheck, VariantCheck};
pub use shape::{AttentionShape, MAX_AXIS};
pub use tensor::Tensor;
#[doc(hidden)]
pub use tune::tune;
pub use weights::{CheckpointInfo, CheckpointNames, Parameters};
