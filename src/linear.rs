//! Linear projection as an operator of its own.

use std::ops::Range;

use crate::{
    DType, Error, Gpu, Result, Tensor,
    inputs::{check_device, check_overlaps},
    kernel::{Batch, Binding, Storage},
    kernels::linear::{self, Part},
    shape::product,
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
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Linear, Tensor};
    ///
    /// let weight = Tensor::zeros(&gpu, DType::F16, &[3, 2])?;
    /// let linear = Linear::new(weight.clone(), None)?;
    /// assert_eq!(linear.weight(), &weight);
    /// assert!(linear.bias().is_none());
    /// assert_eq!(linear.gpu(), &gpu);
    /// # Ok(())
    /// # }
    /// ```
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
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Linear, Tensor};
    ///
    /// let weight = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let bias = Tensor::upload(&gpu, &[0.5f32, -0.5], &[2])?;
    /// let linear = Linear::new(weight, Some(bias))?;
    /// let x = Tensor::upload(&gpu, &[10.0f32, 1.0], &[1, 2])?;
    /// let y = Tensor::zeros(&gpu, DType::F32, &[1, 2])?;
    ///
    /// let mut encoder = gpu.encoder(); // or your own
    /// linear.record(&mut encoder, &x, &y)?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(y.download::<f32>()?, [12.5, 33.5]);
    /// # Ok(())
    /// # }
    /// ```
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
        if !batch.is_planned() {
            check_overlaps(inputs_named.chain(bias_named), [("output", output)].into_iter())?;
        }
        if output.is_empty() {
            // Its other axes may be longer than a dispatch could count.
            return Ok(());
        }
        let weight = bind(gpu, "weight", &self.weight)?;
        let bias = self
            .bias
            .as_ref()
            .map(|bias| bind(gpu, "bias", bias))
            .transpose()?;
        let both = [x, output];
        for [batches, rows_of_each] in pieces(gpu, [x_sizes[0], x_sizes[1]], inputs * outputs, |piece| {
            both.iter().all(|tensor| fits(gpu, tensor, piece))
        }) {
            let part = [batches, rows_of_each];
            let (x, output) = (slice(x, &part)?, slice(output, &part)?);
            let (binding, start) = Binding::output(gpu, "output", &output)?;
            let [batches, rows_of_each] = part;
            linear::Linear {
                x: bind(gpu, "x", &x)?,
                x_strides,
                batch: batches.len(),
                rows: rows_of_each.len(),
                inputs,
                weight: weight.clone(),
                bias: bias.clone(),
                parts: &[(
                    outputs,
                    Part {
                        start,
                        batch: output_strides[0],
                        head: 0,
                        row: output_strides[1],
                    },
                )],
                head_dim: outputs,
                output_dim: output_strides[2],
                output: (binding, Storage::of(gpu, output.dtype())?),
            }
            .push(batch)?;
        }
        Ok(())
    }
}

/// Cuts `[batch, rows]` of a projection of `work` multiply-adds a row into pieces that a dispatch may have the work of and
/// that `fits` says can be bound; a single row that cannot is an error when it is bound.
pub(crate) fn pieces(
    gpu: &Gpu,
    [batch, rows]: [usize; 2],
    work: usize,
    fits: impl Fn(&[Range<usize>; 2]) -> bool,
) -> Vec<[Range<usize>; 2]> {
    let mut pieces = Vec::new();
    let mut left = vec![[0..batch, 0..rows]];
    while let Some(piece) = left.pop() {
        let axes = [piece[0].len(), piece[1].len()];
        let within = product(&[axes[0], axes[1], work]) <= gpu.dispatch_work();
        let axis = usize::from(axes[0] <= 1);
        if within && fits(&piece) || axes[axis] <= 1 {
            pieces.push(piece);
            continue;
        }
        // Whole tiles of rows, if there are several.
        let half = axes[axis] / 2;
        let half = if axis == 1 && half >= 256 {
            half.next_multiple_of(256)
        } else {
            half.max(1)
        };
        let middle = piece[axis].start + half;
        let (mut first, mut second) = (piece.clone(), piece);
        first[axis].end = middle;
        second[axis].start = middle;
        left.push(second);
        left.push(first);
    }
    pieces
}

/// A piece of `[B, L, E]`, or of `[L, E]` as one sequence.
pub(crate) fn slice(tensor: &Tensor, [batches, rows]: &[Range<usize>; 2]) -> Result<Tensor> {
    match tensor.shape().len() {
        2 => tensor.slice(0, rows.clone()),
        _ => tensor.slice(0, batches.clone())?.slice(1, rows.clone()),
    }
}

pub(crate) fn fits(gpu: &Gpu, tensor: &Tensor, piece: &[Range<usize>; 2]) -> bool {
    slice(tensor, piece).is_ok_and(|part| Binding::fits(gpu, &part, &(0..part.extent())))
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
