//! One binary: every kernel and every rule on the GPU against the reference.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod attention;
mod cache;
mod cases;
mod decode;
mod device;
mod docs;
mod errors;
mod examples;
mod field;
mod fused;
mod fuzz;
mod generate;
mod layer;
mod linear;
mod observe;
mod packed;
mod plan;
mod rotary;
mod self_check;
mod soak;
mod support;
mod tensor;
mod throughput;
