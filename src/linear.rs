//! Linear projection as an operator of its own.

use crate::{
    DType, Error, Gpu, Result, Tensor,
    inputs::{check_device, check_overlaps},
    kernel::{Batch, Binding, Storage},
    kernels::linear::{self, Part},
    tuning::{Product, Tile},
};

/// Batched linear projection `y = x W^T + b`, with `W` in PyTorch's `[out, in]` layout.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{DType, Gpu, Linear, Tensor};
///
/// let gpu = Gpu::new()?;
/// let weight = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// let linear = Linear::new(weight, None)?;
/// let x = Tensor::upload(&gpu, &[10.0f32, 1.0], &[1, 2])?;
/// assert_eq!(linear.run(&x)?.download::<f32>()?, [12.0, 34.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A projection with `weight [out, in]` and `bias [out]`, both contiguous, F32 or F16 each.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::DType`] or [`Error::WrongDevice`] if they do not fit.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let &[outputs, _] = weight.shape() else {
            return Err(Error::Shape(format!(
                "weight has shape {:?}, expected [out, in]",
                weight.shape()
            )));
        };
        Storage::of(weight.gpu(), weight.dtype())?;
        check_contiguous("weight", &weight)?;
        if let Some(bias) = &bias {
            check_device(weight.gpu(), "bias", bias)?;
            Storage::of(bias.gpu(), bias.dtype())?;
            check_contiguous("bias", bias)?;
            if bias.shape() != [outputs] {
                return Err(Error::Shape(format!(
                    "bias has shape {:?}, expected [{outputs}] from weight {:?}",
                    bias.shape(),
                    weight.shape()
                )));
            }
        }
        Ok(Self { weight, bias })
    }

    /// `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        self.weight.gpu()
    }

    /// Records `output = x W^T + b`. `x` is `[B, L, in]` or `[L, in]`, `output` the same with `out`; any strides,
    /// F32 or F16 each.
    ///
    /// # Errors
    ///
    /// Sizes, types, devices and overlaps that do not fit, or more than the device allows; then nothing has
    /// been recorded.
    pub fn record(&self, encoder: &mut wgpu::CommandEncoder, x: &Tensor, output: &Tensor) -> Result<()> {
        let mut batch = Batch::new(self.gpu());
        self.prepare(&mut batch, x, output)?;
        batch.record(encoder)
    }

    /// Allocates the output, of `x`'s type, records and submits. Does not wait.
    ///
    /// # Errors
    ///
    /// As [`Linear::record`].
    pub fn run(&self, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.shape().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.weight.shape()[0];
        }
        let output = Tensor::zeros(self.gpu(), x.dtype(), &shape)?;
        let mut encoder = self.gpu().encoder();
        self.record(&mut encoder, x, &output)?;
        self.gpu().submit(encoder)?;
        Ok(output)
    }

    pub(crate) fn prepare(&self, batch: &mut Batch, x: &Tensor, output: &Tensor) -> Result<()> {
        let gpu = batch.gpu();
        for (name, tensor) in [("x", x), ("output", output)] {
            check_device(gpu, name, tensor)?;
        }
        let (&[outputs, inputs], x_rows) = (self.weight.shape(), rows(x)) else {
            return Err(Error::Shape(format!(
                "weight has shape {:?}, expected [out, in]",
                self.weight.shape()
            )));
        };
        let mut expected = x.shape().to_vec();
        let Some((x_sizes, x_strides)) = x_rows.filter(|(sizes, _)| sizes[2] == inputs) else {
            return Err(Error::Shape(format!(
                "x has shape {:?}: expected [B, L, {inputs}] or [L, {inputs}] for weight {:?}",
                x.shape(),
                self.weight.shape()
            )));
        };
        if let Some(last) = expected.last_mut() {
            *last = outputs;
        }
        let output_rows = rows(output).filter(|_| output.shape() == expected);
        let Some((_, output_strides)) = output_rows else {
            return Err(Error::Shape(format!(
                "output has shape {:?}, expected {expected:?}",
                output.shape()
            )));
        };
        if output.overlaps_itself() {
            return Err(Error::Overlap(format!(
                "output has shape {:?} with strides {:?}: two of its elements share memory",
                output.shape(),
                output.strides()
            )));
        }
        check_float("x", x)?;
        check_float("output", output)?;
        let inputs_named = [("x", x), ("weight", &self.weight)].into_iter();
        let bias_named = self.bias.iter().map(|bias| ("bias", bias));
        check_overlaps(inputs_named.chain(bias_named), [("output", output)].into_iter())?;
        if output.is_empty() {
            // Its other axes may be longer than a dispatch could count.
            return Ok(());
        }
        let (binding, start) = Binding::output(gpu, "output", output)?;
        let part = Part {
            start,
            batch: output_strides[0],
            head: 0,
            row: output_strides[1],
        };
        linear::Linear {
            x: bind(gpu, "x", x)?,
            x_strides,
            batch: x_sizes[0],
            rows: x_sizes[1],
            inputs,
            weight: bind(gpu, "weight", &self.weight)?,
            bias: self
                .bias
                .as_ref()
                .map(|bias| bind(gpu, "bias", bias))
                .transpose()?,
            parts: &[(outputs, part)],
            head_dim: outputs,
            output_dim: output_strides[2],
            output: (binding, Storage::of(gpu, output.dtype())?),
        }
        .push(batch, Tile::of(gpu, Product::Linear))
    }
}

pub(crate) fn check_contiguous(what: &str, tensor: &Tensor) -> Result<()> {
    if tensor.is_contiguous() {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{what} has shape {:?} with strides {:?}: expected contiguous rows",
        tensor.shape(),
        tensor.strides()
    )))
}

/// A tensor as a kernel binds it: binding, storage, first element.
pub(crate) fn bind(gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<(Binding, Storage, u32)> {
    let storage = Storage::of(gpu, tensor.dtype())?;
    let (binding, start) = Binding::tensor(gpu, what, tensor)?;
    Ok((binding, storage, start))
}

/// Sizes and strides of `[B, L, E]`, or of `[L, E]` as one sequence.
pub(crate) fn rows(tensor: &Tensor) -> Option<([usize; 3], [u32; 3])> {
    let narrow = |stride: usize| stride as u32;
    match (tensor.shape(), tensor.strides()) {
        (&[rows, width], &[row, dim]) => Some(([1, rows, width], [0, row, dim].map(narrow))),
        (&[batch, rows, width], &[outer, row, dim]) => {
            Some(([batch, rows, width], [outer, row, dim].map(narrow)))
        }
        _ => None,
    }
}

/// Whether a tensor is of floats, which is what layers compute on.
pub(crate) fn check_float(what: &str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F32 | DType::F16 => Ok(()),
        other => Err(Error::DType(format!("{what} is {other:?}: use F32 or F16"))),
    }
}
