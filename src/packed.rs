//! Sequences of different lengths laid end to end: what a packed call reads and writes.

use crate::{
    AttentionOptions, AttentionShape, DType, Error, Gpu, Result, Tensor,
    inputs::{check_device, check_overlaps, check_vector, expect_result},
};

/// Where each sequence of a packed call starts and ends: sequence `b` has queries `q[b]..q[b + 1]` and keys
/// `k[b]..k[b + 1]` (FlashAttention's `cu_seqlens_q` and `cu_seqlens_k`).
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::CuSeqlens;
///
/// // Three sequences, of 5, 0 and 3 tokens, that attend to themselves.
/// let seams = CuSeqlens::new(&gpu, &[0, 5, 5, 8], &[0, 5, 5, 8])?;
/// assert_eq!(seams.sequences(), 3);
/// assert_eq!(seams.queries(), [0, 5, 5, 8]);
/// assert_eq!(seams.keys(), seams.queries());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CuSeqlens {
    queries: Vec<usize>,
    keys: Vec<usize>,
    /// Queries' seams, then keys'.
    tensor: Tensor,
}

impl CuSeqlens {
    /// Seams between sequences, `[sequences + 1]` each, from 0 up; copied to the GPU once.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if they do not start at 0, fall somewhere, or differ in number; else as [`Tensor::upload`].
    pub fn new(gpu: &Gpu, cu_seqlens_q: &[usize], cu_seqlens_k: &[usize]) -> Result<Self> {
        for (what, seams) in [("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)] {
            if seams.first() != Some(&0) || !seams.is_sorted() {
                return Err(Error::Shape(format!(
                    "{what} must start at 0 and never fall, given {seams:?}"
                )));
            }
            if seams.last().is_some_and(|&total| total > crate::shape::MAX_AXIS) {
                return Err(Error::Shape(format!(
                    "{what} ends at {:?}: at most {} tokens are allowed",
                    seams.last(),
                    crate::shape::MAX_AXIS
                )));
            }
        }
        if cu_seqlens_q.len() != cu_seqlens_k.len() {
            return Err(Error::Shape(format!(
                "cu_seqlens_q has {} entries, cu_seqlens_k {}: both need one more than there are sequences",
                cu_seqlens_q.len(),
                cu_seqlens_k.len()
            )));
        }
        let words: Vec<u32> = cu_seqlens_q
            .iter()
            .chain(cu_seqlens_k)
            .map(|&seam| seam as u32)
            .collect();
        Ok(Self {
            queries: cu_seqlens_q.to_vec(),
            keys: cu_seqlens_k.to_vec(),
            tensor: Tensor::upload(gpu, &words, &[words.len()])?,
        })
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.queries.len() - 1
    }

    /// Seams between the sequences' queries, `[sequences + 1]`.
    pub fn queries(&self) -> &[usize] {
        &self.queries
    }

    /// Seams between the sequences' keys, `[sequences + 1]`.
    pub fn keys(&self) -> &[usize] {
        &self.keys
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn longest(seams: &[usize]) -> usize {
        seams.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
    }

    fn total(seams: &[usize]) -> usize {
        seams.last().copied().unwrap_or(0)
    }
}

/// What a packed attention call reads. Tensors may have any strides.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionOptions, CuSeqlens, DType, PackedInputs, Tensor};
///
/// let x = Tensor::zeros(&gpu, DType::F32, &[8, 2, 16])?; // [T, H, D]: 8 tokens of 3 sequences
/// let seams = CuSeqlens::new(&gpu, &[0, 5, 5, 8], &[0, 5, 5, 8])?;
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let output = attention.run_packed(&PackedInputs::new(&x, &x, &x, &seams))?.output;
/// assert_eq!(output.shape(), [8, 2, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PackedInputs<'a> {
    /// `[Tq, H, D]`.
    pub query: &'a Tensor,
    /// `[Tk, Hkv, D]`.
    pub key: &'a Tensor,
    /// `[Tk, Hkv, Dv]`.
    pub value: &'a Tensor,
    /// Where the sequences start and end.
    pub cu_seqlens: &'a CuSeqlens,
    /// One logit per query head, `[H]`, as in [`AttentionInputs::sinks`](crate::AttentionInputs::sinks).
    pub sinks: Option<&'a Tensor>,
}

impl<'a> PackedInputs<'a> {
    /// Queries, keys, values and the seams between their sequences.
    pub fn new(query: &'a Tensor, key: &'a Tensor, value: &'a Tensor, cu_seqlens: &'a CuSeqlens) -> Self {
        Self {
            query,
            key,
            value,
            cu_seqlens,
            sinks: None,
        }
    }

    /// Adds attention sinks.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionOptions, CuSeqlens, DType, PackedInputs, Tensor};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let seams = CuSeqlens::new(&gpu, &[0, 1, 2], &[0, 1, 2])?;
    /// let zeros = Tensor::zeros(&gpu, DType::F32, &[2, 1, 1])?;
    /// let value = Tensor::upload(&gpu, &[2.0f32, 4.0], &[2, 1, 1])?;
    /// let sinks = Tensor::zeros(&gpu, DType::F32, &[1])?; // as heavy as a score of 0
    /// let inputs = PackedInputs::new(&zeros, &zeros, &value, &seams).sinks(&sinks);
    /// assert_eq!(attention.run_packed(&inputs)?.output.download::<f32>()?, [1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn sinks(mut self, sinks: &'a Tensor) -> Self {
        self.sinks = Some(sinks);
        self
    }

    fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("query", Some(self.query)),
            ("key", Some(self.key)),
            ("value", Some(self.value)),
            ("cu_seqlens", Some(&self.cu_seqlens.tensor)),
            ("sinks", self.sinks),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }

    /// Checks everything but the outputs. The shape has a batch entry for each sequence and the longest one's lengths.
    pub(crate) fn check(&self, gpu: &Gpu, options: &AttentionOptions) -> Result<AttentionShape> {
        for (name, tensor) in self.tensors() {
            check_device(gpu, name, tensor)?;
        }
        let axes = |what: &str, tensor: &Tensor, names: &str| {
            <[usize; 3]>::try_from(tensor.shape()).map_err(|_| {
                Error::Shape(format!(
                    "{what} of a packed call has shape {:?}: use {names}",
                    tensor.shape()
                ))
            })
        };
        let [_, heads, head_dim] = axes("query", self.query, "[Tq, H, D]")?;
        let [_, kv_heads, _] = axes("key", self.key, "[Tk, Hkv, D]")?;
        let [.., value_dim] = axes("value", self.value, "[Tk, Hkv, Dv]")?;
        let queries = CuSeqlens::total(&self.cu_seqlens.queries);
        let keys = CuSeqlens::total(&self.cu_seqlens.keys);
        for (what, tensor, expected) in [
            ("query", self.query, [queries, heads, head_dim]),
            ("key", self.key, [keys, kv_heads, head_dim]),
            ("value", self.value, [keys, kv_heads, value_dim]),
        ] {
            if tensor.shape() != expected {
                return Err(Error::Shape(format!(
                    "{what} has shape {:?}, expected {expected:?}: cu_seqlens end at {queries} queries and {keys} keys",
                    tensor.shape()
                )));
            }
        }
        let shape = AttentionShape {
            batch: self.cu_seqlens.sequences(),
            heads,
            kv_heads,
            queries: CuSeqlens::longest(&self.cu_seqlens.queries),
            keys: CuSeqlens::longest(&self.cu_seqlens.keys),
            head_dim,
            value_dim,
        };
        shape.validate()?;
        options.validate(heads)?;
        if options.always_visible_keys != 0 {
            return Err(Error::Option(format!(
                "always_visible_keys = {} in a packed call: must be 0",
                options.always_visible_keys
            )));
        }
        if let Some(sinks) = self.sinks {
            check_vector("sinks", sinks, heads)?;
        }
        Ok(shape)
    }
}

/// Where a packed attention call writes. Each needs a buffer of its own, which no input shares.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionOptions, CuSeqlens, DType, PackedInputs, PackedOutputs, Tensor};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let seams = CuSeqlens::new(&gpu, &[0, 1, 3], &[0, 1, 3])?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[3, 1, 8])?; // [T, H, D]
/// let output = Tensor::zeros(&gpu, DType::F16, &[3, 1, 8])?;
/// let lse = Tensor::zeros(&gpu, DType::F32, &[1, 3])?; // [H, T]
/// let outputs = PackedOutputs::new(&output).lse(&lse);
///
/// let mut encoder = gpu.encoder(); // or your own
/// attention.record_packed(&mut encoder, &PackedInputs::new(&x, &x, &x, &seams), &outputs)?;
/// gpu.submit(encoder)?;
/// let expected = [0.0, 2f32.ln(), 2f32.ln()]; // one key of score 0, and two
/// assert!(lse.download::<f32>()?.iter().zip(expected).all(|(lse, expected)| (lse - expected).abs() < 1e-5));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct PackedOutputs<'a> {
    /// `[Tq, H, Dv]` with any strides, F32 or F16.
    pub output: &'a Tensor,
    /// Log-sum-exp of each row's scores, natural logarithm, `[H, Tq]`, contiguous F32.
    pub lse: Option<&'a Tensor>,
}

impl<'a> PackedOutputs<'a> {
    /// The output alone.
    pub fn new(output: &'a Tensor) -> Self {
        Self { output, lse: None }
    }

    /// Asks for the log-sum-exp.
    pub fn lse(mut self, lse: &'a Tensor) -> Self {
        self.lse = Some(lse);
        self
    }

    /// Checks the outputs against the call.
    pub(crate) fn check(&self, gpu: &Gpu, inputs: &PackedInputs, shape: &AttentionShape) -> Result<()> {
        let outputs = || {
            [("output", Some(self.output)), ("lse", self.lse)]
                .into_iter()
                .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
        };
        for (name, tensor) in outputs() {
            check_device(gpu, name, tensor)?;
        }
        check_overlaps(inputs.tensors(), outputs())?;
        let queries = inputs.query.shape()[0];
        let expected = [queries, shape.heads, shape.value_dim];
        if self.output.shape() != expected {
            return Err(Error::Shape(format!(
                "output has shape {:?}, expected [Tq, H, Dv] = {expected:?}",
                self.output.shape()
            )));
        }
        if self.output.overlaps_itself() {
            return Err(Error::Overlap(format!(
                "output has shape {:?} with strides {:?}: two of its elements share memory",
                self.output.shape(),
                self.output.strides()
            )));
        }
        expect_result("lse", self.lse, &[shape.heads, queries], DType::F32)
    }
}

/// What [`Attention::run_packed`](crate::Attention::run_packed) computed.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionOptions, CuSeqlens, DType, PackedInputs, Tensor};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[8, 2, 16])?; // [T, H, D]
/// let seams = CuSeqlens::new(&gpu, &[0, 5, 8], &[0, 5, 8])?;
/// let result = attention.run_packed(&PackedInputs::new(&x, &x, &x, &seams))?;
/// assert_eq!(result.output.shape(), [8, 2, 16]);
/// assert_eq!(result.lse.shape(), [2, 8]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PackedResult {
    /// `[Tq, H, Dv]`.
    pub output: Tensor,
    /// `[H, Tq]`.
    pub lse: Tensor,
}
