//! Typed, strided views of GPU buffer ranges.

use std::ops::Range;

use futures_intrusive::channel::shared::oneshot_channel;

use crate::{
    DType, Element, Error, Gpu, Result,
    gpu::{Allocation, OwnBuffer},
    shape::product,
};

/// Most axes that a tensor has.
const MAX_RANK: usize = 4;

/// Longest axis. Shaders count in 32 bits; and so no sum or product of two axes overflows on the host, not even
/// those of a tensor without elements.
const MAX_SIZE: usize = u32::MAX as usize;

/// A typed, strided view of a range of a `wgpu::Buffer`. Cloning it, splitting and merging heads, slicing and
/// permuting move no data.
///
/// Buffers that the crate makes have the usages `STORAGE | COPY_SRC | COPY_DST`: write to one each frame with
/// `queue.write_buffer(tensor.buffer(), tensor.offset(), bytes)`, bind it in your own passes, copy from it.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{Gpu, Tensor};
///
/// let gpu = Gpu::new()?;
/// let x = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[1, 3, 2])?; // [B, L, E]
/// let heads = x.split_heads(2)?; // [B, H, L, E / H]
/// assert_eq!(heads.shape(), [1, 2, 3, 1]);
/// assert_eq!(heads.download::<f32>()?, [1.0, 3.0, 5.0, 2.0, 4.0, 6.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    gpu: Gpu,
    buffer: wgpu::Buffer,
    /// Of a buffer that the crate made.
    allocation: Option<Allocation>,
    /// Byte of the buffer at which element 0 lies.
    offset: u64,
    dtype: DType,
    layout: Layout,
}

/// Shape and strides, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [usize; MAX_RANK],
}

impl Layout {
    fn contiguous(shape: &[usize]) -> Result<Self> {
        let mut strides = [0; MAX_RANK];
        let mut stride = 1usize;
        for (axis, &size) in shape.iter().enumerate().rev().take(MAX_RANK) {
            if axis < MAX_RANK {
                strides[axis] = stride;
            }
            stride = stride.saturating_mul(size.max(1));
        }
        Self::strided(shape, &strides[..shape.len().min(MAX_RANK)])
    }

    fn strided(shape: &[usize], strides: &[usize]) -> Result<Self> {
        if shape.len() > MAX_RANK || shape.len() != strides.len() {
            return Err(Error::Shape(format!(
                "shape {shape:?} with strides {strides:?}: a tensor has at most {MAX_RANK} axes and one stride for each"
            )));
        }
        if let Some(size) = shape.iter().find(|&&size| size > MAX_SIZE) {
            return Err(Error::Shape(format!(
                "shape {shape:?}: an axis of {size} entries, at most {MAX_SIZE} are allowed"
            )));
        }
        let mut layout = Self {
            rank: shape.len(),
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        Ok(layout)
    }

    fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    fn strides(&self) -> &[usize] {
        &self.strides[..self.rank]
    }

    fn len(&self) -> u64 {
        product(self.shape())
    }

    /// Elements from the first to the last one, both included; 0 if there is none. Saturates.
    fn extent(&self) -> u64 {
        if self.len() == 0 {
            return 0;
        }
        self.shape()
            .iter()
            .zip(self.strides())
            .fold(1u64, |extent, (&size, &stride)| {
                extent.saturating_add((size as u64 - 1).saturating_mul(stride as u64))
            })
    }

    /// Whether the elements lie row by row without gaps.
    fn is_contiguous(&self) -> bool {
        let mut expected = 1u64;
        self.len() == 0
            || self
                .shape()
                .iter()
                .zip(self.strides())
                .rev()
                .all(|(&size, &stride)| {
                    let fits = size == 1 || stride as u64 == expected;
                    expected = expected.saturating_mul(size as u64);
                    fits
                })
    }

    /// Whether two different elements may share memory (a broadcast view): such a tensor cannot be written.
    fn overlaps(&self) -> bool {
        let mut axes: Vec<(usize, usize)> = self
            .shape()
            .iter()
            .zip(self.strides())
            .filter(|(size, _)| **size > 1)
            .map(|(&size, &stride)| (stride, size))
            .collect();
        axes.sort_unstable();
        let mut reach = 0u64;
        axes.iter().any(|&(stride, size)| {
            let overlaps = stride as u64 <= reach;
            reach = reach.saturating_add((size as u64 - 1).saturating_mul(stride as u64));
            overlaps
        })
    }

    /// Element offsets in row-major order.
    fn offsets(&self) -> impl Iterator<Item = usize> + '_ {
        let [a, b, c, d] = self.shape;
        let [sa, sb, sc, sd] = self.strides;
        (0..a).flat_map(move |i| {
            (0..b).flat_map(move |j| {
                (0..c).flat_map(move |k| (0..d).map(move |l| i * sa + j * sb + k * sc + l * sd))
            })
        })
    }
}

impl Tensor {
    /// A new tensor with the given values in row-major order.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if the number of values is not the product of `shape`; [`Error::Limit`],
    /// [`Error::OutOfMemory`] and [`Error::DeviceLost`] from the device.
    pub fn upload<T: Element>(gpu: &Gpu, values: &[T], shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        if layout.len() != values.len() as u64 {
            return Err(Error::Shape(format!(
                "{} values for shape {shape:?}, which holds {}",
                values.len(),
                layout.len()
            )));
        }
        Self::bytes(gpu, T::DTYPE, shape)?;
        let bytes = bytemuck::cast_slice(values);
        let own = gpu.buffer_with("multihead tensor", 0, own_usages(), bytes)?;
        Ok(Self {
            gpu: gpu.clone(),
            buffer: own.buffer,
            allocation: Some(own.allocation),
            offset: 0,
            dtype: T::DTYPE,
            layout,
        })
    }

    /// A new tensor of zeros.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`], [`Error::OutOfMemory`] and [`Error::DeviceLost`] from the device.
    pub fn zeros(gpu: &Gpu, dtype: DType, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        let bytes = Self::bytes(gpu, dtype, shape)?;
        let own = gpu.buffer("multihead tensor", bytes, own_usages())?;
        Ok(Self {
            gpu: gpu.clone(),
            buffer: own.buffer,
            allocation: Some(own.allocation),
            offset: 0,
            dtype,
            layout,
        })
    }

    /// A view of the caller's buffer from byte `offset` on, row-major. Nothing is copied.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Tensor, wgpu};
    ///
    /// let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
    ///     label: None,
    ///     size: 32,
    ///     usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
    ///     mapped_at_creation: false,
    /// });
    /// let x = Tensor::from_buffer(&gpu, &buffer, 8, DType::F32, &[2, 3])?;
    /// gpu.queue().write_buffer(x.buffer(), x.offset(), &1f32.to_le_bytes());
    /// assert_eq!(x.download::<f32>()?, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Tensor::from_buffer_strided`].
    pub fn from_buffer(
        gpu: &Gpu,
        buffer: &wgpu::Buffer,
        offset: u64,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        Self::from_buffer_strided(gpu, buffer, offset, dtype, shape, layout.strides())
    }

    /// A view of the caller's buffer from byte `offset` on, with strides in elements. Nothing is copied.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Tensor};
    ///
    /// let queries_and_keys = Tensor::upload(&gpu, &[1.0f32, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0], &[2, 4])?;
    /// let buffer = queries_and_keys.buffer(); // or your own
    /// let keys = Tensor::from_buffer_strided(&gpu, buffer, 2 * 4, DType::F32, &[2, 2], &[4, 1])?;
    /// assert_eq!(keys.download::<f32>()?, [10.0, 20.0, 30.0, 40.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Buffer`] if the buffer lacks `BufferUsages::STORAGE`, is too small, is not a whole number of
    /// 32-bit words, or `offset` is not a multiple of the element's size; [`Error::WrongDevice`] if it
    /// belongs to another device of the same `wgpu::Instance`. `wgpu` numbers buffers per instance and cannot tell
    /// a buffer of another instance: it panics, or takes its own of the same number.
    pub fn from_buffer_strided(
        gpu: &Gpu,
        buffer: &wgpu::Buffer,
        offset: u64,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
    ) -> Result<Self> {
        let layout = Layout::strided(shape, strides)?;
        let refuse = |text: String| Err(Error::Buffer(text));
        if !buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            return refuse(format!(
                "its usage is {:?}: add BufferUsages::STORAGE (and COPY_SRC for downloads)",
                buffer.usage()
            ));
        }
        if !offset.is_multiple_of(dtype.size() as u64) {
            return refuse(format!(
                "offset {offset} bytes: must be a multiple of {}, the size of a {dtype:?}",
                dtype.size()
            ));
        }
        let end = layout
            .extent()
            .saturating_mul(dtype.size() as u64)
            .saturating_add(offset);
        if end > buffer.size() {
            return refuse(format!(
                "shape {shape:?} of {dtype:?} with strides {strides:?} at byte {offset} ends at byte {end}, \
                 the buffer has {} bytes",
                buffer.size()
            ));
        }
        if !buffer.size().is_multiple_of(4) {
            return refuse(format!(
                "it has {} bytes: shaders read whole 32-bit words, round its size up to {}",
                buffer.size(),
                buffer.size().next_multiple_of(4)
            ));
        }
        let tensor = Self {
            gpu: gpu.clone(),
            buffer: buffer.clone(),
            allocation: None,
            offset,
            dtype,
            layout,
        };
        if buffer.size() != 0 {
            tensor.check_device()?;
        }
        Ok(tensor)
    }

    /// A buffer does not tell its device; binding it does.
    fn check_device(&self) -> Result<()> {
        let device = self.gpu.device();
        self.gpu.check_alive("binding a caller's buffer")?;
        self.gpu
            .guarded("binding a caller's buffer", 0, || {
                let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                    label: Some("multihead device check"),
                    entries: &[wgpu::BindGroupLayoutEntry {
                        binding: 0,
                        visibility: wgpu::ShaderStages::COMPUTE,
                        ty: wgpu::BindingType::Buffer {
                            ty: wgpu::BufferBindingType::Storage { read_only: true },
                            has_dynamic_offset: false,
                            min_binding_size: None,
                        },
                        count: None,
                    }],
                });
                let size = self.buffer.size().min(self.gpu.limits().max_storage_buffer_binding_size) & !3;
                device.create_bind_group(&wgpu::BindGroupDescriptor {
                    label: Some("multihead device check"),
                    layout: &layout,
                    entries: &[wgpu::BindGroupEntry {
                        binding: 0,
                        resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                            buffer: &self.buffer,
                            offset: 0,
                            size: std::num::NonZeroU64::new(size),
                        }),
                    }],
                })
            })
            .map(|_| ())
            .map_err(|error| match error {
                Error::Wgpu { message, .. } => Error::WrongDevice(format!(
                    "the buffer cannot be bound on {}; it must come from the device of the same Gpu, and still exist ({})",
                    self.gpu.description(),
                    message.trim()
                )),
                other => other,
            })
    }

    /// A row-major view of memory of this crate's own, from byte `offset` on.
    pub(crate) fn of_scratch(
        gpu: &Gpu,
        buffer: wgpu::Buffer,
        offset: u64,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            buffer,
            allocation: None,
            offset,
            dtype,
            layout: Layout::contiguous(shape)?,
        })
    }

    /// Stands for a tensor of this shape in a call that is planned and not run; `number` tells it from others.
    pub(crate) fn planned(gpu: &Gpu, number: u64, dtype: DType, shape: &[usize]) -> Result<Self> {
        let alignment = u64::from(gpu.limits().min_storage_buffer_offset_alignment).max(4);
        Self::of_scratch(gpu, gpu.absent().clone(), number * alignment, dtype, shape)
    }

    /// Bytes of the buffer that a tensor of this type and shape gets.
    pub(crate) fn bytes(gpu: &Gpu, dtype: DType, shape: &[usize]) -> Result<u64> {
        gpu.check_size(
            &format!("a tensor {shape:?} of {dtype:?}"),
            product(shape).saturating_mul(dtype.size() as u64),
        )
    }

    /// The device that it lives on.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Tensor};
    ///
    /// let x = Tensor::zeros(&gpu, DType::F16, &[2, 3, 4])?;
    /// assert_eq!((x.shape(), x.strides()), (&[2, 3, 4][..], &[12, 4, 1][..]));
    /// assert_eq!((x.dtype(), x.len(), x.is_empty()), (DType::F16, 24, false));
    /// let last = x.slice(0, 1..2)?;
    /// assert_eq!((last.offset(), last.buffer()), (12 * 2, x.buffer())); // in bytes
    /// assert!(last.is_contiguous() && !x.slice(2, 0..1)?.is_contiguous());
    /// assert_eq!(x.gpu(), &gpu);
    /// # Ok(())
    /// # }
    /// ```
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The buffer that it is a view of.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// Byte of the buffer at which element 0 lies.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Axes.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Strides in elements, one per axis.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.layout.len() as usize
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.layout.len() == 0
    }

    /// Whether the elements lie row by row without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// `[B, L, H D]` as `[B, H, L, D]`: each row's `heads` parts become an axis of their own. `[L, H D]` is one
    /// sequence and becomes `[1, H, L, D]`.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there are other than 2 or 3 axes, or `heads` does not divide the last.
    pub fn split_heads(&self, heads: usize) -> Result<Self> {
        let (batch, batch_stride, rows, row_stride, width, stride) = match (self.shape(), self.strides()) {
            (&[rows, width], &[row, one]) => (1, 0, rows, row, width, one),
            (&[batch, rows, width], &[outer, row, one]) => (batch, outer, rows, row, width, one),
            (shape, _) => {
                return Err(Error::Shape(format!(
                    "split_heads of shape {shape:?}: use [B, L, H D] or [L, H D]"
                )));
            }
        };
        if heads == 0 || width % heads != 0 {
            return Err(Error::Shape(format!(
                "split_heads: a last axis of {width} does not divide into {heads} heads"
            )));
        }
        let head_dim = width / heads;
        self.with_layout(Layout::strided(
            &[batch, heads, rows, head_dim],
            &[batch_stride, head_dim.saturating_mul(stride), row_stride, stride],
        )?)
    }

    /// `[B, H, L, D]` as `[B, L, H D]`, the inverse of [`Tensor::split_heads`].
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if there are other than 4 axes, or a row's heads do not follow each other in memory (as
    /// they do in the operator's and the layer's outputs).
    pub fn merge_heads(&self) -> Result<Self> {
        let (&[batch, heads, rows, head_dim], &[outer, head, row, stride]) = (self.shape(), self.strides())
        else {
            return Err(Error::Shape(format!(
                "merge_heads of shape {:?}: use [B, H, L, D]",
                self.shape()
            )));
        };
        // Strides of axes of size 1 do not count.
        let stride = if head_dim == 1 { head } else { stride };
        let follows = heads <= 1 || self.is_empty() || head == head_dim.saturating_mul(stride);
        if !follows {
            return Err(Error::Shape(format!(
                "merge_heads: heads lie {head} elements apart, {head_dim} entries with stride {stride} each; \
                 only a head-merged layout [B, L, H, D] can be viewed as [B, L, H D]"
            )));
        }
        self.with_layout(Layout::strided(
            &[batch, rows, heads.saturating_mul(head_dim)],
            &[outer, row, stride],
        )?)
    }

    /// The same elements with the axes in another order: axis `i` of the result is axis `axes[i]` of this one.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::Tensor;
    ///
    /// let x = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
    /// assert_eq!(x.permute(&[1, 0])?.download::<f32>()?, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if `axes` does not name each axis once.
    pub fn permute(&self, axes: &[usize]) -> Result<Self> {
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..self.layout.rank) {
            return Err(Error::Shape(format!(
                "permute{axes:?} of shape {:?}: name each axis once",
                self.shape()
            )));
        }
        let shape: Vec<usize> = axes.iter().map(|&axis| self.shape()[axis]).collect();
        let strides: Vec<usize> = axes.iter().map(|&axis| self.strides()[axis]).collect();
        self.with_layout(Layout::strided(&shape, &strides)?)
    }

    /// The entries `range` of one axis.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::Tensor;
    ///
    /// let x = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
    /// assert_eq!(x.slice(1, 1..3)?.download::<f32>()?, [2.0, 3.0, 5.0, 6.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if the axis is not there or the range leaves it.
    pub fn slice(&self, axis: usize, range: Range<usize>) -> Result<Self> {
        let size = self.shape().get(axis).copied().unwrap_or(0);
        if axis >= self.layout.rank || range.start > range.end || range.end > size {
            return Err(Error::Shape(format!(
                "slice of axis {axis}, {range:?}, of shape {:?}: the range must lie inside the axis",
                self.shape()
            )));
        }
        let mut view = self.clone();
        view.layout.shape[axis] = range.len();
        if !view.is_empty() {
            view.offset += (range.start * self.layout.strides[axis] * self.dtype.size()) as u64;
        }
        Ok(view)
    }

    /// The same elements in row-major order under another shape.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::Tensor;
    ///
    /// let x = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
    /// assert_eq!(x.reshape(&[3, 2])?.slice(0, 2..3)?.download::<f32>()?, [5.0, 6.0]);
    /// assert!(x.permute(&[1, 0])?.reshape(&[6]).is_err());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if the number of elements differs or this view is not contiguous.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        let layout = Layout::contiguous(shape)?;
        if layout.len() != self.layout.len() || !self.is_contiguous() {
            return Err(Error::Shape(format!(
                "reshape of shape {:?} with strides {:?} to {shape:?}: the number of elements must agree and the \
                 view be contiguous",
                self.shape(),
                self.strides()
            )));
        }
        self.with_layout(layout)
    }

    /// Repeats axes of size 1 (or missing ones, on the left) by reading them again: stride 0, no copy.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::Tensor;
    ///
    /// let x = Tensor::upload(&gpu, &[1.0f32, 2.0], &[2, 1])?;
    /// assert_eq!(x.broadcast_to(&[2, 3])?.download::<f32>()?, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if an axis is neither 1 nor equal.
    pub fn broadcast_to(&self, shape: &[usize]) -> Result<Self> {
        let missing = shape.len().checked_sub(self.layout.rank);
        let mut strides = vec![0; shape.len()];
        let fits = missing.is_some_and(|missing| {
            self.shape()
                .iter()
                .zip(self.strides())
                .zip(&shape[missing..])
                .enumerate()
                .all(|(axis, ((&size, &stride), &wanted))| {
                    strides[missing + axis] = if size == wanted { stride } else { 0 };
                    size == wanted || size == 1
                })
        });
        if !fits {
            return Err(Error::Shape(format!(
                "shape {:?} does not broadcast to {shape:?}: each axis must be 1 or equal, from the right",
                self.shape()
            )));
        }
        self.with_layout(Layout::strided(shape, &strides)?)
    }

    fn with_layout(&self, layout: Layout) -> Result<Self> {
        Ok(Self {
            layout,
            ..self.clone()
        })
    }

    /// Copies the values to the host in row-major order. Submits, and waits for all that was submitted before.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] if `T` is not its type, [`Error::Buffer`] if the buffer lacks `COPY_SRC`,
    /// [`Error::DeviceLost`].
    pub fn download<T: Element>(&self) -> Result<Vec<T>> {
        let pending = self.start_download::<T>()?;
        if pending.is_some() {
            self.gpu.wait()?;
        }
        pollster::block_on(self.finish_download(pending))
    }

    /// [`Tensor::download`] without blocking. The copy is submitted by this call, so that the values are those of now
    /// whenever the future is polled first. The future is ready once the device is polled after the copy has
    /// run: by the caller's own submits, or by [`Gpu::poll`] from its loop. Nothing polls in its stead, so
    /// blocking on it without that never returns; [`Tensor::download`] is for that.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Gpu, Tensor};
    /// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
    ///
    /// let gpu = Gpu::new()?;
    /// let x = Tensor::upload(&gpu, &[1.0f32, 2.0], &[2])?;
    /// let mut download = pin!(x.download_async::<f32>()); // or `.await` it where your program polls the device
    /// let values = loop {
    ///     match download.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
    ///         Poll::Ready(values) => break values?,
    ///         Poll::Pending => gpu.poll()?, // and draw a frame
    ///     }
    /// };
    /// assert_eq!(values, [1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Tensor::download`].
    pub fn download_async<T: Element>(&self) -> impl Future<Output = Result<Vec<T>>> + Send + use<T> {
        let (tensor, started) = (self.clone(), self.start_download::<T>());
        async move { tensor.finish_download(started?).await }
    }

    fn start_download<T: Element>(&self) -> Result<Option<Pending>> {
        if T::DTYPE != self.dtype {
            return Err(Error::DType(format!(
                "download as {:?} of a tensor of {:?}: ask for its own type",
                T::DTYPE,
                self.dtype
            )));
        }
        if self.is_empty() {
            return Ok(None);
        }
        if !self.buffer.usage().contains(wgpu::BufferUsages::COPY_SRC) {
            return Err(Error::Buffer(format!(
                "its usage is {:?}: a download needs BufferUsages::COPY_SRC",
                self.buffer.usage()
            )));
        }
        // Copies move whole 32-bit words.
        let start = self.offset & !3;
        let end = (self.offset + self.layout.extent() * self.dtype.size() as u64).next_multiple_of(4);
        let bytes = end - start;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging = self.gpu.buffer("multihead download", bytes, usage)?;
        let (sender, receiver) = oneshot_channel();
        let mut encoder = self.gpu.encoder();
        encoder.copy_buffer_to_buffer(&self.buffer, start, &staging.buffer, 0, bytes);
        self.gpu.submit(encoder)?;
        self.gpu.guarded("mapping a download", bytes, || {
            staging
                .buffer
                .map_async(wgpu::MapMode::Read, ..bytes, move |result| {
                    // The receiver is gone if the caller dropped the future; then nobody wants the result.
                    let _ = sender.send(result);
                });
        })?;
        Ok(Some(Pending {
            staging,
            bytes,
            skip: (self.offset - start) as usize,
            receiver,
        }))
    }

    async fn finish_download<T: Element>(&self, pending: Option<Pending>) -> Result<Vec<T>> {
        let Some(Pending {
            staging,
            bytes,
            skip,
            receiver,
        }) = pending
        else {
            return Ok(Vec::new());
        };
        let during = "downloading a tensor";
        match receiver.receive().await {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(self.gpu.refused(during, error.to_string())),
            None => return Err(self.gpu.refused(during, "the mapping was dropped".to_owned())),
        }
        let view = staging
            .buffer
            .get_mapped_range(..bytes)
            .map_err(|error| self.gpu.refused(during, error.to_string()))?;
        let size = self.dtype.size();
        let values = &view[skip..];
        if self.is_contiguous() {
            // The mapped bytes need not be aligned for T.
            return Ok(bytemuck::pod_collect_to_vec(&values[..self.len() * size]));
        }
        Ok(self
            .layout
            .offsets()
            .map(|at| bytemuck::pod_read_unaligned(&values[at * size..][..size]))
            .collect())
    }

    /// Shape and strides as a kernel takes them: padded with axes of 1 on the right. Sizes were checked against
    /// a binding, whose elements 32 bits count.
    pub(crate) fn four_axes(&self) -> ([u32; MAX_RANK], [u32; MAX_RANK]) {
        (
            self.layout.shape.map(|size| size as u32),
            self.layout.strides.map(|stride| stride as u32),
        )
    }

    /// Elements from the first to the last one in memory, both included.
    pub(crate) fn extent(&self) -> u64 {
        self.layout.extent()
    }

    /// Whether two elements share memory.
    pub(crate) fn overlaps_itself(&self) -> bool {
        self.layout.overlaps()
    }
}

struct Pending {
    staging: OwnBuffer,
    bytes: u64,
    skip: usize,
    receiver: futures_intrusive::channel::shared::OneshotReceiver<Result<(), wgpu::BufferAsyncError>>,
}

fn own_usages() -> wgpu::BufferUsages {
    wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST
}
