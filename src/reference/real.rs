//! The two floats that the reference runs in.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// `f32` or `f64`: what the reference computes in.
///
/// ```
/// use multihead::reference::Real;
///
/// /// `ln(1 + e^x)`, without overflow.
/// fn softplus<T: Real>(x: T) -> T {
///     if x > T::from_f32(30.0) { x } else { (T::ONE + x.exp()).ln() }
/// }
/// assert_eq!(softplus(f32::NEG_INFINITY), f32::ZERO);
/// assert_eq!(softplus(f64::from_f64(0.0)), 2f64.ln());
/// assert_eq!(softplus(f32::MAX.to_f64()), f64::from_f32(f32::MAX));
/// assert_eq!((f64::ONE / f64::ZERO).saturate(), <f64 as Real>::MAX);
/// assert_eq!(<f32 as Real>::NEG_INFINITY.tanh(), -1.0);
/// ```
pub trait Real:
    sealed::Sealed
    + Copy
    + Debug
    + Display
    + Default
    + PartialEq
    + PartialOrd
    + Send
    + Sync
    + Sum
    + Neg<Output = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + MulAssign
    + DivAssign
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// The score of an invisible key.
    const NEG_INFINITY: Self;
    /// Largest finite number.
    const MAX: Self;

    /// Exact.
    fn from_f32(value: f32) -> Self;
    /// Rounded to this type.
    fn from_f64(value: f64) -> Self;
    /// Exact.
    fn to_f64(self) -> f64;
    /// `e^self`.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;

    /// Nearest finite number: an overflow saturates, NaN stays.
    fn saturate(self) -> Self {
        if self > Self::MAX {
            Self::MAX
        } else if self < -Self::MAX {
            -Self::MAX
        } else {
            self
        }
    }
}

macro_rules! real {
    ($float:ident) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $float::NEG_INFINITY;
            const MAX: Self = $float::MAX;

            #[allow(clippy::cast_lossless, clippy::unnecessary_cast)]
            fn from_f32(value: f32) -> Self {
                value as Self
            }
            #[allow(clippy::unnecessary_cast)]
            fn from_f64(value: f64) -> Self {
                value as Self
            }
            #[allow(clippy::cast_lossless, clippy::unnecessary_cast)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln(self) -> Self {
                self.ln()
            }
            fn tanh(self) -> Self {
                self.tanh()
            }
        }
    };
}

real!(f32);
real!(f64);
