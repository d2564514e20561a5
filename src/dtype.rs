//! Element types.

use half::f16;

/// Element type of a tensor.
///
/// ```
/// use multihead::DType;
///
/// let sizes = [DType::F32, DType::F16, DType::Bool, DType::U32].map(DType::size);
/// assert_eq!(sizes, [4, 2, 1, 4]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16, two to a 32-bit word, low half first.
    F16,
    /// One byte each, four to a 32-bit word, lowest byte first; 0 is false, all else true.
    Bool,
    /// Unsigned 32-bit integers (lengths).
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 => 2,
            Self::Bool => 1,
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for u8 {}
    impl Sealed for u32 {}
}

/// Host types that a tensor can be uploaded from and downloaded to.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, Element, Gpu, Result, Tensor, f16};
///
/// fn there_and_back<T: Element>(gpu: &Gpu, values: &[T]) -> Result<Vec<T>> {
///     let tensor = Tensor::upload(gpu, values, &[values.len()])?;
///     assert_eq!(tensor.dtype(), T::DTYPE);
///     tensor.download()
/// }
/// assert_eq!(there_and_back(&gpu, &[f16::ONE; 3])?, [f16::ONE; 3]);
/// assert_eq!(u8::DTYPE, DType::Bool);
/// # Ok(())
/// # }
/// ```
pub trait Element: bytemuck::Pod + sealed::Sealed + Send + Sync {
    /// The element type on the GPU.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
}

/// Booleans travel as bytes, as PyTorch and safetensors store them.
impl Element for u8 {
    const DTYPE: DType = DType::Bool;
}

impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
