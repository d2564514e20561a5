//! One binary: every kernel and every rule on the GPU against the reference.

mod attention;
mod support;
