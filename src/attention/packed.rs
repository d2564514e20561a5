//! Packed calls: sequences of different lengths laid end to end.

use super::{Attention, AttentionPath, fused::FusedCall, rule::BoundRule};
use crate::{DType, Error, PackedInputs, PackedOutputs, PackedResult, Result, Tensor, kernel::Batch};

impl Attention {
    /// Records a packed call into `encoder`, as [`Attention::record`] does. Each sequence attends to itself; positions
    /// and alignment start anew in each. Always on the fused path.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Attention, AttentionOptions, CuSeqlens, DType, Gpu, PackedInputs, PackedOutputs, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let seams = CuSeqlens::new(&gpu, &[0, 1, 3], &[0, 1, 3])?; // two sequences, of 1 and of 2 tokens
    /// let zeros = Tensor::zeros(&gpu, DType::F32, &[3, 1, 1])?; // [T, H, D]
    /// let value = Tensor::upload(&gpu, &[1.0f32, 2.0, 4.0], &[3, 1, 1])?;
    /// let output = Tensor::zeros(&gpu, DType::F32, &[3, 1, 1])?;
    ///
    /// let mut encoder = gpu.encoder(); // or your own
    /// let inputs = PackedInputs::new(&zeros, &zeros, &value, &seams);
    /// attention.record_packed(&mut encoder, &inputs, &PackedOutputs::new(&output))?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(output.download::<f32>()?, [1.0, 3.0, 3.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Sizes, types, devices and overlaps that do not fit, or more than the device allows; [`Error::Option`] if the
    /// composed path is forced or `always_visible_keys` is not 0. Then nothing has been recorded.
    pub fn record_packed(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        inputs: &PackedInputs,
        outputs: &PackedOutputs,
    ) -> Result<()> {
        let mut batch = Batch::new(&self.gpu);
        self.prepare_packed(&mut batch, inputs, outputs)?;
        batch.record(encoder)
    }

    /// Allocates the outputs of a packed call, records it, and submits it. Does not wait; downloads do.
    ///
    /// # Errors
    ///
    /// As [`Attention::record_packed`].
    pub fn run_packed(&self, inputs: &PackedInputs) -> Result<PackedResult> {
        let gpu = &self.gpu;
        let shape = inputs.check(gpu, &self.options)?;
        let queries = inputs.query.shape()[0];
        let output = Tensor::zeros(
            gpu,
            inputs.query.dtype(),
            &[queries, shape.heads, shape.value_dim],
        )?;
        let lse = Tensor::zeros(gpu, DType::F32, &[shape.heads, queries])?;
        let mut encoder = gpu.encoder();
        self.record_packed(&mut encoder, inputs, &PackedOutputs::new(&output).lse(&lse))?;
        gpu.submit(encoder)?;
        Ok(PackedResult { output, lse })
    }

    fn prepare_packed(
        &self,
        batch: &mut Batch,
        inputs: &PackedInputs,
        outputs: &PackedOutputs,
    ) -> Result<()> {
        let gpu = &self.gpu;
        let shape = inputs.check(gpu, &self.options)?;
        outputs.check(gpu, inputs, &shape)?;
        if self.path == AttentionPath::Composed {
            return Err(Error::Option(
                "the composed path has no packed calls: use AttentionPath::Auto or AttentionPath::Fused, or pad the \
                 sequences and give kv_lengths"
                    .to_owned(),
            ));
        }
        if shape.batch == 0 || shape.heads == 0 || shape.queries == 0 {
            return Ok(());
        }
        // [T, H, D] as [1, H, T, D]; the kernels find a sequence by its first row.
        let view = |tensor: &Tensor| {
            let by_head = tensor.permute(&[1, 0, 2])?;
            by_head.broadcast_to(&[&[1], by_head.shape()].concat())
        };
        let bound = BoundRule {
            slopes: self.vector("slopes", self.slopes.as_ref())?,
            sinks: self.vector("sinks", inputs.sinks)?,
            ..BoundRule::without_masks(gpu, &self.options, &shape)
        };
        self.fused(
            batch,
            &FusedCall {
                shape,
                packed: Some(inputs.cu_seqlens),
                query: &view(inputs.query)?,
                key: &view(inputs.key)?,
                value: &view(inputs.value)?,
                output: &view(outputs.output)?,
                lse: outputs.lse,
                mask: None,
                bound: &bound,
            },
        )
    }
}
