//! `shaders/shared/attention.wgsl`: what the kernels of the fused path, `flash` and `decode`, read and write.

use std::ops::Range;

use super::{
    EXPONENTIAL, RULE, SINK,
    merge_ranges::Lse,
    scores::{Operand, Rule},
};
use crate::{
    AttentionShape, Gpu,
    kernel::{Binding, Storage, Variant, params},
};

params! {
    /// Keys, sizes, strides and small vectors of a call; WGSL's `Call`.
    CallParams {
        first_key: u32,
        end_key: u32,
        heads: u32,
        group_size: u32,
        head_dim: u32,
        value_dim: u32,
        query_start: u32,
        query_batch: u32,
        query_head: u32,
        query_row: u32,
        query_dim: u32,
        key_start: u32,
        key_batch: u32,
        key_head: u32,
        key_row: u32,
        key_dim: u32,
        value_start: u32,
        value_batch: u32,
        value_head: u32,
        value_row: u32,
        value_dim_stride: u32,
        output_start: u32,
        output_batch: u32,
        output_head: u32,
        output_row: u32,
        output_dim: u32,
        has_lse: u32,
        lse_start: u32,
        lse_batch: u32,
        lse_head: u32,
        partial_range: u32,
        has_sinks: u32,
        slopes_start: u32,
        sinks_start: u32,
        sinks_stride: u32,
        call_padding: u32,
    }
}

/// Storage of query, key, value and output.
pub(crate) type Storages = [Storage; 4];

/// A variant of the kernel `name`: its own text and cores beside what both share.
pub(super) fn variant(
    name: &'static str,
    own: &[&'static str],
    mut constants: Vec<(&'static str, u32)>,
    plain: bool,
    [query, key, value, output]: Storages,
) -> Variant {
    let mut pieces = own.to_vec();
    pieces.extend([
        include_str!("../../shaders/shared/attention.wgsl"),
        RULE,
        SINK,
        EXPONENTIAL,
    ]);
    constants.push(("PLAIN", u32::from(plain)));
    Variant {
        name,
        pieces,
        constants,
        inputs: vec![("query", query), ("key", key), ("value", value)],
        output: Some(output),
        subgroups: false,
    }
}

/// What one dispatch reads and writes, bound.
#[derive(Clone)]
pub(crate) struct Operands {
    pub(crate) keys: Range<usize>,
    /// Whether other keys follow in other dispatches or splits: outputs stay undivided, and `lse` takes maximum and sum.
    pub(crate) partial: bool,
    pub(crate) query: Operand,
    pub(crate) key: Operand,
    pub(crate) value: Operand,
    pub(crate) output: Operand,
    pub(crate) mask: Binding,
    pub(crate) key_mask: Binding,
    /// Lengths or seams, slopes and sinks.
    pub(crate) words: Binding,
    pub(crate) slopes_start: u32,
    /// First word and stride of the sinks.
    pub(crate) sinks: Option<(u32, u32)>,
    pub(crate) lse: Option<Lse>,
    /// With the lengths' place in `words`.
    pub(crate) rule: Rule,
}

impl Operands {
    pub(super) fn storages(&self) -> Storages {
        [&self.query, &self.key, &self.value, &self.output].map(|operand| operand.storage)
    }

    /// The params that both kernels have, and the bindings in the shader's order.
    pub(super) fn bind(self, gpu: &Gpu, shape: &AttentionShape) -> (CallParams, Vec<Binding>) {
        let [query_batch, query_head, query_row, query_dim] = self.query.strides;
        let [key_batch, key_head, key_row, key_dim] = self.key.strides;
        let [value_batch, value_head, value_row, value_dim_stride] = self.value.strides;
        let [output_batch, output_head, output_row, output_dim] = self.output.strides;
        let has_lse = self.lse.is_some();
        let lse = self.lse.unwrap_or_else(|| Lse::absent(gpu));
        let params = CallParams {
            first_key: self.keys.start as u32,
            end_key: self.keys.end as u32,
            heads: shape.heads as u32,
            group_size: shape.group() as u32,
            head_dim: shape.head_dim as u32,
            value_dim: shape.value_dim as u32,
            query_start: self.query.start,
            query_batch,
            query_head,
            query_row,
            query_dim,
            key_start: self.key.start,
            key_batch,
            key_head,
            key_row,
            key_dim,
            value_start: self.value.start,
            value_batch,
            value_head,
            value_row,
            value_dim_stride,
            output_start: self.output.start,
            output_batch,
            output_head,
            output_row,
            output_dim,
            has_lse: u32::from(has_lse),
            lse_start: lse.start,
            lse_batch: lse.batch,
            lse_head: lse.head,
            partial_range: u32::from(self.partial),
            has_sinks: u32::from(self.sinks.is_some()),
            slopes_start: self.slopes_start,
            sinks_start: self.sinks.map_or(0, |(start, _)| start),
            sinks_stride: self.sinks.map_or(0, |(_, stride)| stride),
            call_padding: 0,
        };
        let bindings = vec![
            self.query.binding,
            self.key.binding,
            self.value.binding,
            self.mask,
            self.key_mask,
            self.words,
            self.output.binding,
            lse.binding,
        ];
        (params, bindings)
    }
}
