//! The attention rule of one call as the kernels take it: params and bindings.

use super::Attention;
use crate::{
    AttentionInputs, AttentionOptions, AttentionShape, Gpu, Mask, Result, Tensor,
    kernel::Binding,
    kernels::{Vector, scores::Rule},
    mask::{UNBOUNDED, Visibility},
};

/// The rule with everything bound but the mask of scores, which is bound for each part of a call.
pub(super) struct BoundRule {
    pub(super) key_mask: Binding,
    pub(super) lengths: Option<Vector>,
    pub(super) slopes: Option<Vector>,
    pub(super) sinks: Option<Vector>,
    pub(super) rule: Rule,
}

impl BoundRule {
    /// No masks, lengths, slopes and sinks.
    pub(super) fn without_masks(gpu: &Gpu, options: &AttentionOptions, shape: &AttentionShape) -> Self {
        Self {
            key_mask: Binding::absent(gpu),
            lengths: None,
            slopes: None,
            sinks: None,
            rule: Rule::new(options, shape),
        }
    }
}

impl Rule {
    /// The rule for a call of this shape without masks and lengths.
    pub(crate) fn new(options: &AttentionOptions, shape: &AttentionShape) -> Self {
        let visibility = Visibility::new(options);
        Self {
            queries: shape.queries as u32,
            maskable: shape.keys.saturating_sub(options.always_visible_keys) as u32,
            offset: visibility.offset,
            bottom_right: u32::from(visibility.bottom_right),
            left: visibility.left,
            right: visibility.right,
            scale: options.scale_for(shape.head_dim),
            softcap: options.softcap.unwrap_or(0.0),
            has_slopes: u32::from(options.alibi_slopes.is_some()),
            ..Self::default()
        }
    }

    /// Whether nothing but the scale and lengths applies to a score.
    pub(crate) fn is_plain(&self) -> bool {
        let positions = self.left >= UNBOUNDED && self.right >= UNBOUNDED && self.has_slopes == 0;
        positions && self.softcap == 0.0 && self.mask_kind == 0 && self.key_mask_kind == 0
    }
}

impl Attention {
    pub(super) fn bind_rule(&self, inputs: &AttentionInputs, shape: &AttentionShape) -> Result<BoundRule> {
        let gpu = &self.gpu;
        let mut rule = Rule::new(&self.options, shape);
        let maskable = rule.maskable as usize;
        if let Some(mask) = inputs.mask {
            rule.mask_kind = mask.kind() as u32;
            rule.mask_keys = mask.covered_keys(maskable) as u32;
            let target = [shape.batch, shape.heads, shape.queries, maskable];
            [rule.mask_batch, rule.mask_head, rule.mask_query, rule.mask_key] =
                mask.strides("mask", target)?.map(|stride| stride as u32);
        }
        let (key_mask, start) = match inputs.key_mask.map(Mask::tensor) {
            Some(tensor) => Binding::tensor(gpu, "key_mask", tensor)?,
            None => (Binding::absent(gpu), 0),
        };
        rule.key_mask_start = start;
        if let Some(mask) = inputs.key_mask {
            rule.key_mask_kind = mask.kind() as u32;
            let strides = mask.tensor().strides();
            [rule.key_mask_batch, rule.key_mask_key] = [strides[0] as u32, strides[1] as u32];
        }
        let lengths = self.vector("kv_lengths", inputs.kv_lengths.map(|lengths| lengths.tensor()))?;
        if let Some(lengths) = &lengths {
            (rule.has_lengths, rule.lengths_start, rule.lengths_stride) = (1, lengths.start, lengths.stride);
        }
        Ok(BoundRule {
            key_mask,
            lengths,
            slopes: self.vector("slopes", self.slopes.as_ref())?,
            sinks: self.vector("sinks", inputs.sinks)?,
            rule,
        })
    }

    pub(super) fn vector(&self, what: &str, tensor: Option<&Tensor>) -> Result<Option<Vector>> {
        tensor
            .filter(|tensor| !tensor.is_empty())
            .map(|tensor| Vector::bind(&self.gpu, what, tensor))
            .transpose()
    }
}
