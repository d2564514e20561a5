//! Rotary position embedding as an operator of its own.

use std::ops::Range;

use crate::{
    DType, Error, Gpu, Result, Tensor,
    inputs::{check_device, check_overlaps},
    kernel::{Batch, Binding, Storage, Variant, warm_up},
    kernels::rotary::{self, Positions, Rotation, Tables},
    linear::{bind, check_contiguous, check_float, pieces},
    reference::rotary_tables,
    shape::MAX_AXIS,
};

/// Which elements of a row form pair `i` of `n`.
///
/// ```
/// use multihead::{RotaryPairing, reference::rotary};
///
/// let turn = |pairing| rotary(&[1.0f64, 2.0, 3.0, 4.0], [1, 1, 1, 4], &[0.0; 2], &[1.0; 2], &[0], 4, pairing);
/// assert_eq!(turn(RotaryPairing::HalfSplit)?, [-3.0, -4.0, 1.0, 2.0]); // right angles
/// assert_eq!(turn(RotaryPairing::Interleaved)?, [-2.0, 1.0, -4.0, 3.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RotaryPairing {
    /// `i` and `n + i` (GPT-NeoX, Hugging Face's Llama; ONNX `interleaved = 0`).
    #[default]
    HalfSplit,
    /// `2 i` and `2 i + 1` (the RoFormer paper, GPT-J, Meta's Llama; ONNX `interleaved = 1`).
    Interleaved,
}

/// How the frequencies of a model that was trained on short sequences are stretched for long ones.
///
/// ```
/// use multihead::{RotaryOptions, RotaryScaling, reference::rotary_tables};
///
/// let linear = RotaryOptions::new(2).scaling(RotaryScaling::Linear { factor: 4.0 });
/// let (cos, _) = rotary_tables::<f64>(&linear, 9)?;
/// assert_eq!(cos[8], 2f64.cos()); // position 8 stands where 2 stood
///
/// let llama_3_1 = RotaryOptions::new(128).base(500_000.0).scaling(RotaryScaling::Llama3 {
///     factor: 8.0,
///     low_freq_factor: 1.0,
///     high_freq_factor: 4.0,
///     original_max_positions: 8192,
/// });
/// assert_eq!(llama_3_1.validate(), Ok(()));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// Not at all.
    #[default]
    None,
    /// All divided by `factor` (position interpolation).
    Linear {
        /// At least 1, usually.
        factor: f64,
    },
    /// Low ones divided by `factor`, high ones kept, those between blended (Llama 3.1, `rope_type: "llama3"`).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Turns within `original_max_positions` below which a frequency is low.
        low_freq_factor: f64,
        /// Turns from which it is high; more than `low_freq_factor`.
        high_freq_factor: f64,
        /// Length of the training's sequences, in positions.
        original_max_positions: usize,
    },
}

/// What a rotary embedding's angles are: pair `i` of `rotary_dim / 2` turns by `position * base^(-2 i / rotary_dim)`
/// radians.
///
/// ```
/// use multihead::{RotaryOptions, RotaryPairing};
///
/// let llama_3 = RotaryOptions::new(128).base(500_000.0);
/// let gpt_j = RotaryOptions::new(64).pairing(RotaryPairing::Interleaved);
/// assert!(llama_3.validate().is_ok() && gpt_j.validate().is_ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct RotaryOptions {
    /// Elements of a row that are rotated, from its start on; even. The others are copied.
    pub rotary_dim: usize,
    /// Base of the frequencies (`rope_theta`).
    pub base: f64,
    /// Which elements form a pair.
    pub pairing: RotaryPairing,
    /// Scaling of the frequencies.
    pub scaling: RotaryScaling,
}

impl RotaryOptions {
    /// Base 10,000, [`RotaryPairing::HalfSplit`], no scaling.
    pub fn new(rotary_dim: usize) -> Self {
        Self {
            rotary_dim,
            base: 10_000.0,
            pairing: RotaryPairing::HalfSplit,
            scaling: RotaryScaling::None,
        }
    }

    /// Sets the base of the frequencies.
    pub fn base(mut self, base: f64) -> Self {
        self.base = base;
        self
    }

    /// Sets which elements form a pair.
    pub fn pairing(mut self, pairing: RotaryPairing) -> Self {
        self.pairing = pairing;
        self
    }

    /// Sets the scaling of the frequencies.
    pub fn scaling(mut self, scaling: RotaryScaling) -> Self {
        self.scaling = scaling;
        self
    }

    /// Checks the values.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for a `rotary_dim` that is 0, odd or beyond 2^29, a base or factor that is not finite and
    /// above 0, or frequency factors that are not in order.
    pub fn validate(&self) -> Result<()> {
        let refuse = |text: String| Err(Error::Option(text));
        let positive = |x: f64| x.is_finite() && x > 0.0;
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) || self.rotary_dim > MAX_AXIS {
            return refuse(format!(
                "rotary_dim = {}: must be even, above 0 and at most {MAX_AXIS}",
                self.rotary_dim
            ));
        }
        if !positive(self.base) {
            return refuse(format!("rotary base = {}: must be finite and above 0", self.base));
        }
        match self.scaling {
            RotaryScaling::Linear { factor } | RotaryScaling::Llama3 { factor, .. } if !positive(factor) => {
                refuse(format!(
                    "rotary scaling by factor = {factor}: must be finite and above 0"
                ))
            }
            RotaryScaling::Llama3 {
                low_freq_factor,
                high_freq_factor,
                ..
            } if !(positive(low_freq_factor)
                && high_freq_factor.is_finite()
                && high_freq_factor > low_freq_factor) =>
            {
                refuse(format!(
                    "low_freq_factor = {low_freq_factor}, high_freq_factor = {high_freq_factor}: must be finite, \
                     above 0, and the second above the first"
                ))
            }
            _ => Ok(()),
        }
    }
}

/// At which position each row stands, `[B, L]`. Positions from the GPU are not checked: beyond the tables they count
/// as the last one.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Rotary, RotaryOptions, RotaryPositions, Tensor};
///
/// let rotary = Rotary::new(&gpu, RotaryOptions::new(2), 64)?;
/// let x = Tensor::upload(&gpu, &[1.0f32; 4], &[1, 1, 2, 2])?; // [B, H, L, D]
/// let expected = rotary.run(&x, RotaryPositions::Start(5))?.download::<f32>()?; // positions 5 and 6
/// let starts = Tensor::upload(&gpu, &[5u32], &[1])?;
/// let ends = Tensor::upload(&gpu, &[7u32], &[1])?;
/// let each = Tensor::upload(&gpu, &[5u32, 6], &[1, 2])?;
/// for same in [RotaryPositions::Starts(&starts), RotaryPositions::Ends(&ends), RotaryPositions::Each(&each)] {
///     assert_eq!(rotary.run(&x, same)?.download::<f32>()?, expected);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum RotaryPositions<'a> {
    /// Row `l` of every sequence at this position plus `l`.
    Start(usize),
    /// Row `l` of sequence `b` at `starts[b] + l`: `[B]` of [`DType::U32`].
    Starts(&'a Tensor),
    /// The last row of sequence `b` at `ends[b] - 1`, those before it in front: `[B]` of [`DType::U32`]. The lengths of
    /// a cache that holds the rows' keys already are such ends.
    Ends(&'a Tensor),
    /// Row `l` of sequence `b` at `positions[b, l]`: `[B, L]` of [`DType::U32`] (ONNX `position_ids`).
    Each(&'a Tensor),
}

impl RotaryPositions<'_> {
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Start(_) => None,
            Self::Starts(tensor) | Self::Ends(tensor) | Self::Each(tensor) => Some(tensor),
        }
    }
}

/// Rotary position embedding ([RoFormer](https://arxiv.org/abs/2104.09864); ONNX `RotaryEmbedding`) of queries or keys
/// that are on the GPU: each pair `(x, y)` of a row becomes `(cos x - sin y, sin x + cos y)`.
///
/// Cosines and sines come from tables on the GPU, whose angles were computed in f64: in f32 the angle of position
/// 100,000 would be off by a hundredth of a radian. Tables of `P` positions take `4 P rotary_dim` bytes.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{DType, Gpu, Rotary, RotaryOptions, RotaryPositions, Tensor};
///
/// let gpu = Gpu::new()?;
/// let rotary = Rotary::new(&gpu, RotaryOptions::new(2), 4096)?; // positions 0..4096
/// let q = Tensor::upload(&gpu, &[1.0f32, 0.0, 7.0, 1.0, 0.0, 7.0], &[1, 1, 2, 3])?; // [B, H, L, D]
/// let rotated = Tensor::zeros(&gpu, DType::F32, &[1, 1, 2, 3])?;
///
/// let mut encoder = gpu.encoder(); // or your own
/// rotary.record(&mut encoder, &q, RotaryPositions::Start(1), &rotated)?;
/// gpu.submit(encoder)?;
/// let expected = [1f32.cos(), 1f32.sin(), 7.0, 2f32.cos(), 2f32.sin(), 7.0];
/// for (got, expected) in rotated.download::<f32>()?.iter().zip(expected) {
///     assert!((got - expected).abs() < 1e-6);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    pairing: RotaryPairing,
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Computes the tables of positions `0..max_positions` and uploads them, as f32.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] for options that are never allowed, or no positions; [`Error::Limit`] and the others of
    /// [`Tensor::upload`].
    pub fn new(gpu: &Gpu, options: RotaryOptions, max_positions: usize) -> Result<Self> {
        let shape = [max_positions, options.rotary_dim / 2];
        // Before the host computes what the device could not take.
        Tensor::bytes(gpu, DType::F32, &shape)?;
        let (cos, sin) = rotary_tables::<f32>(&options, max_positions)?;
        Self::from_tables(
            options.pairing,
            Tensor::upload(gpu, &cos, &shape)?,
            Tensor::upload(gpu, &sin, &shape)?,
        )
    }

    /// Takes tables as they are, contiguous, F32 or F16: `[positions, rotary_dim / 2]`, or
    /// `[B, positions, rotary_dim / 2]` where each sequence has its own (ONNX's `cos_cache` and `sin_cache` with and
    /// without `position_ids`; without them use [`RotaryPositions::Start`] of 0).
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Rotary, RotaryPairing, RotaryPositions, Tensor};
    ///
    /// let cos = Tensor::upload(&gpu, &[1.0f32, 0.0], &[2, 1])?; // position 1 is a right angle
    /// let sin = Tensor::upload(&gpu, &[0.0f32, 1.0], &[2, 1])?;
    /// let rotary = Rotary::from_tables(RotaryPairing::Interleaved, cos, sin)?;
    /// let x = Tensor::upload(&gpu, &[3.0f32, 4.0, 3.0, 4.0], &[1, 1, 2, 2])?;
    /// assert_eq!(rotary.run(&x, RotaryPositions::Start(0))?.download::<f32>()?, [3.0, 4.0, -4.0, 3.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`], [`Error::DType`] or [`Error::WrongDevice`] if they do not fit; [`Error::Option`] if they hold
    /// nothing.
    pub fn from_tables(pairing: RotaryPairing, cos: Tensor, sin: Tensor) -> Result<Self> {
        check_device(cos.gpu(), "sin", &sin)?;
        check_float("cos", &cos)?;
        if sin.dtype() != cos.dtype() {
            return Err(Error::DType(format!(
                "cos is {:?}, sin is {:?}: use one type for both",
                cos.dtype(),
                sin.dtype()
            )));
        }
        if !matches!(cos.shape().len(), 2 | 3) || sin.shape() != cos.shape() {
            return Err(Error::Shape(format!(
                "cos has shape {:?}, sin has shape {:?}: expected [positions, rotary_dim / 2] or [B, positions, rotary_dim / 2] for both",
                cos.shape(),
                sin.shape()
            )));
        }
        check_contiguous("cos", &cos)?;
        check_contiguous("sin", &sin)?;
        if cos.is_empty() {
            return Err(Error::Option(format!(
                "rotary tables of shape {:?}: they need at least one position and one pair",
                cos.shape()
            )));
        }
        Ok(Self { pairing, cos, sin })
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        self.cos.gpu()
    }

    /// Elements of a row that are rotated, from its start on.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Rotary, RotaryOptions, RotaryPairing};
    ///
    /// let rotary = Rotary::new(&gpu, RotaryOptions::new(8), 64)?;
    /// assert_eq!((rotary.rotary_dim(), rotary.max_positions()), (8, 64));
    /// assert_eq!(rotary.pairing(), RotaryPairing::HalfSplit);
    /// let (cos, sin) = rotary.tables();
    /// assert_eq!((cos.shape(), sin.shape()), (&[64, 4][..], &[64, 4][..]));
    /// assert_eq!(rotary.gpu(), &gpu);
    /// # Ok(())
    /// # }
    /// ```
    pub fn rotary_dim(&self) -> usize {
        2 * self.pairs()
    }

    /// Positions that the tables hold.
    pub fn max_positions(&self) -> usize {
        self.cos.shape()[self.cos.shape().len() - 2]
    }

    /// Which elements form a pair.
    pub fn pairing(&self) -> RotaryPairing {
        self.pairing
    }

    /// Cosines and sines.
    pub fn tables(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }

    /// Builds the pipeline for tensors of this type ahead of the first call.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, Rotary, RotaryOptions, RotaryPositions, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let rotary = Rotary::new(&gpu, RotaryOptions::new(8), 64)?;
    /// rotary.warm_up(DType::F16)?;
    /// let built = gpu.pipelines();
    /// rotary.run(&Tensor::zeros(&gpu, DType::F16, &[1, 2, 3, 8])?, RotaryPositions::Start(0))?;
    /// assert_eq!(gpu.pipelines(), built); // the call built none
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] or [`Error::DeviceLost`]; [`Error::DType`] for a type that is not of floats.
    pub fn warm_up(&self, dtype: DType) -> Result<()> {
        warm_up(self.gpu(), &[self.variant(dtype)?])
    }

    /// The kernel that turns tensors of `dtype`.
    pub(crate) fn variant(&self, dtype: DType) -> Result<Variant> {
        let storage = Storage::of(self.gpu(), dtype)?;
        let tables = Storage::of(self.gpu(), self.cos.dtype())?;
        Ok(rotary::variant(storage, tables, storage))
    }

    /// Records the rotation of `input` into `output`, both `[B, H, L, D]` with any strides ([`Tensor::split_heads`] views
    /// `[B, L, H D]` so), F32 or F16 each. Nothing is submitted or waited for.
    ///
    /// # Errors
    ///
    /// Sizes, types, devices, positions and overlaps that do not fit, or more than the device allows; then nothing has
    /// been recorded.
    pub fn record(
        &self,
        encoder: &mut wgpu::CommandEncoder,
        input: &Tensor,
        positions: RotaryPositions<'_>,
        output: &Tensor,
    ) -> Result<()> {
        let mut batch = Batch::new(self.gpu());
        self.prepare(&mut batch, input, positions, output)?;
        batch.record(encoder)
    }

    /// Allocates the output, of `input`'s type, records and submits. Does not wait.
    ///
    /// # Errors
    ///
    /// As [`Rotary::record`].
    pub fn run(&self, input: &Tensor, positions: RotaryPositions<'_>) -> Result<Tensor> {
        let output = Tensor::zeros(self.gpu(), input.dtype(), input.shape())?;
        let mut encoder = self.gpu().encoder();
        self.record(&mut encoder, input, positions, &output)?;
        self.gpu().submit(encoder)?;
        Ok(output)
    }

    /// Checks the call and adds its dispatch.
    pub(crate) fn prepare(
        &self,
        batch: &mut Batch,
        input: &Tensor,
        positions: RotaryPositions<'_>,
        output: &Tensor,
    ) -> Result<()> {
        let gpu = batch.gpu();
        let words = positions.tensor();
        let tables = [("cos", &self.cos), ("sin", &self.sin)];
        let inputs = || {
            [("input", input)]
                .into_iter()
                .chain(words.map(|words| ("positions", words)))
                .chain(tables)
        };
        for (name, tensor) in inputs().chain([("output", output)]) {
            check_device(gpu, name, tensor)?;
        }
        let &[sequences, _, rows, size] = input.shape() else {
            return Err(Error::Shape(format!(
                "input has shape {:?}: use [B, H, L, D]; Tensor::split_heads views [B, L, H D] so",
                input.shape()
            )));
        };
        if output.shape() != input.shape() {
            return Err(Error::Shape(format!(
                "output has shape {:?}, expected {:?} as the input",
                output.shape(),
                input.shape()
            )));
        }
        if output.overlaps_itself() {
            return Err(Error::Overlap(format!(
                "output has shape {:?} with strides {:?}: two of its elements share memory",
                output.shape(),
                output.strides()
            )));
        }
        check_float("input", input)?;
        check_float("output", output)?;
        self.check_head(size)?;
        if self.is_per_sequence() && self.cos.shape()[0] != sequences {
            return Err(Error::Shape(format!(
                "rotary tables of shape {:?} for a batch of {sequences}: give each sequence its own, or one of [positions, rotary_dim / 2] for all",
                self.cos.shape()
            )));
        }
        if !batch.is_planned() {
            check_overlaps(inputs(), [("output", output)].into_iter())?;
        }
        let positions = self.bind_positions(positions, sequences, rows)?;
        if output.is_empty() {
            // Its other axes may be longer than a dispatch could count.
            return Ok(());
        }
        let tables = self.bind()?;
        let part = |tensor: &Tensor, heads: &Range<usize>, [batches, rows]: &[Range<usize>; 2]| {
            tensor
                .slice(0, batches.clone())?
                .slice(1, heads.clone())?
                .slice(2, rows.clone())
        };
        let all_fit = |heads: &Range<usize>, piece: &[Range<usize>; 2]| {
            [input, output].into_iter().all(|tensor| {
                part(tensor, heads, piece).is_ok_and(|part| Binding::fits(gpu, &part, &(0..part.extent())))
            })
        };
        // Where a head's rows lie together, one row of all heads may reach farther than a binding.
        let heads = input.shape()[1];
        let together = if all_fit(&(0..heads), &[0..1, 0..1]) {
            heads
        } else {
            1
        };
        for first_head in (0..heads).step_by(together) {
            let heads = first_head..first_head + together;
            let work = together * size;
            for piece in pieces(gpu, [sequences, rows], work, |piece| all_fit(&heads, piece)) {
                let first = piece.each_ref().map(|axis| axis.start as u32);
                rotary::push(
                    batch,
                    &part(input, &heads, &piece)?,
                    &part(output, &heads, &piece)?,
                    &tables.starting_at(first[0]),
                    positions.starting_at(first),
                )?;
            }
        }
        Ok(())
    }

    fn bind_positions(&self, positions: RotaryPositions<'_>, batch: usize, rows: usize) -> Result<Positions> {
        let shape: &[usize] = match positions {
            RotaryPositions::Start(start) => {
                let end = start.saturating_add(rows);
                if end > self.max_positions() && rows > 0 {
                    return Err(Error::Capacity(format!(
                        "{rows} rows from position {start} on end at position {end}, the rotary tables hold {}: make them with more",
                        self.max_positions()
                    )));
                }
                return Ok(Positions {
                    first: start as u32,
                    consecutive: true,
                    words: None,
                });
            }
            RotaryPositions::Starts(_) | RotaryPositions::Ends(_) => &[batch],
            RotaryPositions::Each(_) => &[batch, rows],
        };
        let words = match positions.tensor() {
            Some(tensor) if tensor.shape() != shape => {
                return Err(Error::Shape(format!(
                    "positions have shape {:?}, expected {shape:?}",
                    tensor.shape()
                )));
            }
            Some(tensor) if tensor.dtype() != DType::U32 => {
                return Err(Error::DType(format!(
                    "positions are {:?}: use U32",
                    tensor.dtype()
                )));
            }
            Some(tensor) => {
                let (binding, start) = Binding::tensor(self.gpu(), "positions", tensor)?;
                let (_, [outer, inner, ..]) = tensor.four_axes();
                Some((binding, start, [outer, inner]))
            }
            None => None,
        };
        let each = matches!(positions, RotaryPositions::Each(_));
        Ok(Positions {
            first: match positions {
                // The kernel counts modulo 2^32.
                RotaryPositions::Ends(_) => (rows as u32).wrapping_neg(),
                _ => 0,
            },
            consecutive: !each,
            words: words.map(|(binding, start, [outer, inner])| {
                (binding, start, [outer, if each { inner } else { 0 }])
            }),
        })
    }

    /// Refuses to serve heads of this size whose rows are known by their position alone.
    pub(crate) fn check_positions(&self, gpu: &Gpu, head_dim: usize) -> Result<()> {
        check_device(gpu, "rotary", &self.cos)?;
        self.check_head(head_dim)?;
        if self.is_per_sequence() {
            return Err(Error::Shape(format!(
                "rotary tables of shape {:?}: rows are known by their position alone here, use [positions, rotary_dim / 2]",
                self.cos.shape()
            )));
        }
        Ok(())
    }

    /// Refuses heads that are smaller than what is rotated of them.
    fn check_head(&self, head_dim: usize) -> Result<()> {
        if self.rotary_dim() <= head_dim {
            return Ok(());
        }
        Err(Error::Shape(format!(
            "rotary tables of {} pairs rotate {} elements, heads have {head_dim}: at most all of them",
            self.pairs(),
            self.rotary_dim()
        )))
    }

    /// The tables as kernels bind them.
    pub(crate) fn bind(&self) -> Result<Tables> {
        let (cos, storage, cos_start) = bind(self.gpu(), "cos", &self.cos)?;
        let (sin, _, sin_start) = bind(self.gpu(), "sin", &self.sin)?;
        Ok(Tables {
            cos,
            sin,
            storage,
            rotation: Rotation {
                pairs: self.pairs() as u32,
                interleaved: u32::from(self.pairing == RotaryPairing::Interleaved),
                positions: self.max_positions() as u32,
                batch: if self.is_per_sequence() {
                    (self.max_positions() * self.pairs()) as u32
                } else {
                    0
                },
                cos_start,
                sin_start,
                ..Rotation::default()
            },
        })
    }

    /// Whether each sequence has tables of its own.
    fn is_per_sequence(&self) -> bool {
        self.cos.shape().len() == 3
    }

    fn pairs(&self) -> usize {
        self.cos.shape().last().copied().unwrap_or(0)
    }
}
