//! What a call takes before anything is allocated: the calls' own code run over sizes alone.

use std::fmt;

use crate::{
    Attention, AttentionInputs, AttentionOutputs, AttentionPath, AttentionShape, DType, Gpu, Result, Tensor,
    Wanted, kernel::Batch,
};

/// Bytes and dispatches of one call. Its `Display` is one line. The first call of a variant that is checked when it is built
/// holds a little more for that.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{Attention, AttentionOptions, AttentionPath, AttentionShape, DType, Gpu, Wanted};
///
/// let attention = Attention::new(&Gpu::new()?, AttentionOptions::new())?;
/// let shape = AttentionShape::new(1, 8, 2048, 64);
/// let fused = attention.plan(&shape, DType::F32, Wanted::output())?;
/// assert_eq!(fused.scratch, 0);
/// assert_eq!(fused.peak(), fused.inputs + fused.outputs + fused.params);
///
/// // All scores at once, as weights want them: 8 heads, 2048 x 2048, 4 bytes each.
/// let weights = attention.plan(&shape, DType::F32, Wanted::output().weights())?;
/// assert_eq!(weights.outputs - fused.outputs, 8 * 2048 * 2048 * 4);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// The path that would run.
    pub path: AttentionPath,
    /// Bytes of the inputs' buffers, masks not counted.
    pub inputs: u64,
    /// Bytes of the outputs' buffers.
    pub outputs: u64,
    /// Bytes of scratch memory that calls on a device share.
    pub scratch: u64,
    /// Bytes of sizes and strides that go along with the dispatches, until these have run.
    pub params: u64,
    /// Kernel dispatches.
    pub dispatches: u64,
    /// Kernel `flash`: tiles of keys that are looked at, for each tile of rows and of value columns.
    pub key_tiles: u64,
    /// Kernel `flash`: tiles of keys that window, causal order or the rows' range hide, and that cost nothing.
    pub hidden_key_tiles: u64,
}

impl Plan {
    /// Bytes that are held at once, at most.
    pub fn peak(&self) -> u64 {
        [self.outputs, self.scratch, self.params]
            .into_iter()
            .fold(self.inputs, u64::saturating_add)
    }

    pub(crate) fn new(path: AttentionPath, batch: Batch, inputs: u64, outputs: u64) -> Self {
        let (counted, params) = batch.counted();
        Self {
            path,
            inputs,
            outputs,
            scratch: counted.scratch.values().copied().fold(0, u64::saturating_add),
            params,
            dispatches: counted.dispatches,
            key_tiles: counted.key_tiles,
            hidden_key_tiles: counted.hidden_key_tiles,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{:?}: inputs {:.2} MiB, outputs {:.2} MiB, scratch {:.2} MiB, peak {:.2} MiB, {} {}",
            self.path,
            mib(self.inputs),
            mib(self.outputs),
            mib(self.scratch),
            mib(self.peak()),
            self.dispatches,
            if self.dispatches == 1 {
                "dispatch"
            } else {
                "dispatches"
            }
        )?;
        if self.key_tiles + self.hidden_key_tiles > 0 {
            write!(
                f,
                ", {} of {} key tiles",
                self.key_tiles,
                self.key_tiles + self.hidden_key_tiles
            )?;
        }
        Ok(())
    }
}

/// Sums the bytes of buffers that a call has, and stands in for their tensors.
pub(crate) struct Planned<'a> {
    gpu: &'a Gpu,
    count: u64,
    pub(crate) bytes: u64,
}

impl<'a> Planned<'a> {
    pub(crate) fn new(gpu: &'a Gpu) -> Self {
        Self {
            gpu,
            count: 0,
            bytes: 0,
        }
    }

    pub(crate) fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let bytes = Tensor::bytes(self.gpu, dtype, shape)?;
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        Tensor::planned(self.gpu, self.count, dtype, shape)
    }

    pub(crate) fn if_wanted(
        &mut self,
        wanted: bool,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Option<Tensor>> {
        if wanted {
            self.tensor(dtype, shape).map(Some)
        } else {
            Ok(None)
        }
    }
}

impl Attention {
    /// What [`Attention::run`] would take for a call of this shape, whose query, key and value are contiguous tensors
    /// `[B, H, L, D]` of `dtype`, without masks, past keys and sinks. Nothing is allocated, built or run.
    ///
    /// # Errors
    ///
    /// As [`Attention::run`].
    pub fn plan(&self, shape: &AttentionShape, dtype: DType, wanted: Wanted) -> Result<Plan> {
        let gpu = self.gpu();
        let mut inputs = Planned::new(gpu);
        let query = inputs.tensor(dtype, &shape.query())?;
        let key = inputs.tensor(dtype, &shape.key())?;
        let value = inputs.tensor(dtype, &shape.value())?;
        let mut outputs = Planned::new(gpu);
        let [batch, heads, queries, keys] = shape.weights();
        let merged = [batch, queries, heads, shape.value_dim];
        let output = outputs.tensor(dtype, &merged)?.permute(&[0, 2, 1, 3])?;
        let lse = outputs.if_wanted(wanted.lse, DType::F32, &[batch, heads, queries])?;
        let weights = outputs.if_wanted(wanted.weights, DType::F32, &shape.weights())?;
        let mean_weights = outputs.if_wanted(wanted.mean_weights, DType::F32, &[batch, queries, keys])?;
        let present_key = outputs.if_wanted(wanted.present, dtype, &shape.key())?;
        let present_value = outputs.if_wanted(wanted.present, dtype, &shape.value())?;

        let weights_wanted = wanted.weights || wanted.mean_weights;
        let path = self.chosen_path(shape, weights_wanted)?;
        let mut planned = Batch::planned(gpu);
        self.prepare(
            &mut planned,
            &AttentionInputs::new(&query, &key, &value),
            &AttentionOutputs {
                output: &output,
                lse: lse.as_ref(),
                weights: weights.as_ref(),
                mean_weights: mean_weights.as_ref(),
                present_key: present_key.as_ref(),
                present_value: present_value.as_ref(),
            },
        )?;
        Ok(Plan::new(path, planned, inputs.bytes, outputs.bytes))
    }
}
