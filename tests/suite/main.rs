//! One binary: every kernel and every rule on the GPU against the reference.

mod attention;
mod cases;
mod device;
mod errors;
mod field;
mod layer;
mod linear;
mod support;
mod tensor;
