//! What one attention call reads and writes.

use crate::{
    AttentionOptions, AttentionShape, DType, Error, Gpu, Result, Tensor, shape::broadcast_strides,
    shape::product,
};

/// A mask of scores, on the GPU. Booleans never travel bare: the constructor says what `true` means.
///
/// Any shape of 1 to 4 axes that broadcasts to `[B, H, Lq, Lk]` from the right will do, without a copy.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Mask, Tensor, Wanted};
///
/// // Query 0 must not see key 1, whatever the batch entry and head.
/// let keep = Mask::keep_from(&gpu, &[true, false, true, true], &[2, 2])?;
/// // The same in the polarity of PyTorch's `nn.MultiheadAttention`.
/// let ignore = Mask::ignore_from(&gpu, &[false, true, false, false], &[2, 2])?;
/// // A float mask is added to the scores; -inf hides, any finite value is a bias however low.
/// let bias = Mask::bias_from(&gpu, &[0.0, f32::NEG_INFINITY, 0.0, 0.0], &[2, 2])?;
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[1, 1, 2, 8])?; // [B, H, L, D]
/// for mask in [&keep, &ignore, &bias] {
///     let inputs = AttentionInputs::new(&x, &x, &x).mask(mask);
///     let weights = attention.run(&inputs, Wanted::output().weights())?.weights.unwrap();
///     assert_eq!(weights.download::<f32>()?, [1.0, 0.0, 0.5, 0.5]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Mask {
    tensor: Tensor,
    kind: MaskKind,
    short_keys: bool,
}

/// `MASK_*` in `shaders/shared/rule.wgsl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum MaskKind {
    // 0 in a params struct stands for no mask.
    Keep = 1,
    Ignore = 2,
    BiasF32 = 3,
    BiasF16 = 4,
}

impl Mask {
    /// A boolean mask whose `true` means "attend" (`scaled_dot_product_attention`, ONNX).
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, Mask, Tensor};
    ///
    /// let bytes = Tensor::upload(&gpu, &[1u8, 0, 1, 1], &[2, 2])?; // or a tensor that your own pass fills
    /// let keep = Mask::keep(bytes.clone())?;
    /// let ignore = Mask::ignore(bytes.clone())?; // hides what `keep` shows
    /// assert_eq!(keep.tensor().dtype(), DType::Bool);
    /// assert!(Mask::bias(bytes).is_err()); // no floats
    /// let bias = Mask::bias(Tensor::zeros(&gpu, DType::F16, &[2, 2])?)?;
    /// assert_eq!(bias.tensor().shape(), [2, 2]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::DType`] if the tensor is not [`DType::Bool`].
    pub fn keep(tensor: Tensor) -> Result<Self> {
        Self::boolean(tensor, MaskKind::Keep)
    }

    /// A boolean mask whose `true` means "do not attend" (`nn.MultiheadAttention`'s `attn_mask` and
    /// `key_padding_mask`).
    ///
    /// # Errors
    ///
    /// [`Error::DType`] if the tensor is not [`DType::Bool`].
    pub fn ignore(tensor: Tensor) -> Result<Self> {
        Self::boolean(tensor, MaskKind::Ignore)
    }

    /// A float mask that is added to the scores; `-inf` hides the key.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] if the tensor is not of floats.
    pub fn bias(tensor: Tensor) -> Result<Self> {
        let kind = match tensor.dtype() {
            DType::F32 => MaskKind::BiasF32,
            DType::F16 => MaskKind::BiasF16,
            other => {
                return Err(Error::DType(format!(
                    "Mask::bias of {other:?}: a float mask is F32 or F16; use Mask::keep or Mask::ignore for booleans"
                )));
            }
        };
        Ok(Self {
            tensor,
            kind,
            short_keys: false,
        })
    }

    /// [`Mask::keep`] of values that are uploaded.
    ///
    /// # Errors
    ///
    /// As [`Tensor::upload`].
    pub fn keep_from(gpu: &Gpu, values: &[bool], shape: &[usize]) -> Result<Self> {
        Self::keep(upload_bools(gpu, values, shape)?)
    }

    /// [`Mask::ignore`] of values that are uploaded.
    ///
    /// # Errors
    ///
    /// As [`Tensor::upload`].
    pub fn ignore_from(gpu: &Gpu, values: &[bool], shape: &[usize]) -> Result<Self> {
        Self::ignore(upload_bools(gpu, values, shape)?)
    }

    /// [`Mask::bias`] of values that are uploaded.
    ///
    /// # Errors
    ///
    /// As [`Tensor::upload`].
    pub fn bias_from(gpu: &Gpu, values: &[f32], shape: &[usize]) -> Result<Self> {
        Self::bias(Tensor::upload(gpu, values, shape)?)
    }

    /// Accepts a last axis shorter than the keys (and not 1): the keys beyond it are hidden, as ONNX has it.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Mask, Tensor, Wanted};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let q = Tensor::zeros(&gpu, DType::F32, &[1, 1, 1, 8])?;
    /// let kv = Tensor::zeros(&gpu, DType::F32, &[1, 1, 3, 8])?;
    /// let mask = Mask::keep_from(&gpu, &[true, true], &[1, 2])?.with_short_keys(); // of 3 keys
    /// let result = attention.run(&AttentionInputs::new(&q, &kv, &kv).mask(&mask), Wanted::output().weights())?;
    /// assert_eq!(result.weights.unwrap().download::<f32>()?, [0.5, 0.5, 0.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn with_short_keys(mut self) -> Self {
        self.short_keys = true;
        self
    }

    /// The mask's values.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    fn boolean(tensor: Tensor, kind: MaskKind) -> Result<Self> {
        if tensor.dtype() != DType::Bool {
            return Err(Error::DType(format!(
                "Mask::{} of {:?}: a boolean mask is Bool, one byte each; use Mask::bias for floats",
                if kind == MaskKind::Keep { "keep" } else { "ignore" },
                tensor.dtype()
            )));
        }
        Ok(Self {
            tensor,
            kind,
            short_keys: false,
        })
    }

    /// The same kind of mask over another view.
    pub(crate) fn with_tensor(&self, tensor: Tensor) -> Self {
        Self {
            tensor,
            ..self.clone()
        }
    }

    pub(crate) fn kind(&self) -> MaskKind {
        self.kind
    }

    /// Strides by which it is read as `target`, from its own strides.
    pub(crate) fn strides(&self, what: &str, target: [usize; 4]) -> Result<[usize; 4]> {
        let shape = self.tensor.shape();
        let row_major =
            broadcast_strides(what, shape, target, self.short_keys).map_err(|error| match error {
                Error::Shape(text)
                    if shape.len() == 3 && shape[0] != 1 && shape[0] == target[0] * target[1] =>
                {
                    Error::Shape(format!(
                        "{text}; PyTorch's [B * H, Lq, Lk] is {target:?} here, with the same values"
                    ))
                }
                other => other,
            })?;
        let mut strides = [0; 4];
        for (back, &stride) in self.tensor.strides().iter().rev().enumerate() {
            if row_major[3 - back] != 0 {
                strides[3 - back] = stride;
            }
        }
        Ok(strides)
    }

    /// Checks that it can hide keys, `[batch, keys]`; float masks belong to the argument `bias_name`.
    pub(crate) fn check_keys(&self, name: &str, bias_name: &str, batch: usize, keys: usize) -> Result<()> {
        if !matches!(self.kind, MaskKind::Keep | MaskKind::Ignore) {
            return Err(Error::DType(format!(
                "{name} is a float mask: key padding is boolean; add floats through {bias_name}, shape [B, 1, 1, Lk]"
            )));
        }
        if self.tensor.shape() != [batch, keys] {
            return Err(Error::Shape(format!(
                "{name} has shape {:?}, expected [batch, keys] = [{batch}, {keys}]",
                self.tensor.shape()
            )));
        }
        Ok(())
    }

    /// Keys of `keys` that it covers.
    pub(crate) fn covered_keys(&self, keys: usize) -> usize {
        match self.tensor.shape().last() {
            Some(&last) if last != 1 => last.min(keys),
            _ => keys,
        }
    }
}

fn upload_bools(gpu: &Gpu, values: &[bool], shape: &[usize]) -> Result<Tensor> {
    let bytes: Vec<u8> = values.iter().map(|&value| value.into()).collect();
    Tensor::upload(gpu, &bytes, shape)
}

/// How many keys each batch entry has, `[B]`; keys from there on do not exist, and what their memory holds, NaN
/// included, never counts.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, KvLengths, Tensor, Wanted};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let q = Tensor::zeros(&gpu, DType::F32, &[2, 1, 1, 8])?; // [B, H, Lq, D]
/// let kv = Tensor::zeros(&gpu, DType::F32, &[2, 1, 2, 8])?;
/// let known = KvLengths::new(&gpu, &[2, 1])?;
/// let on_gpu = KvLengths::from_tensor(Tensor::upload(&gpu, &[2u32, 1], &[2])?)?; // or what your own pass counts
/// for lengths in [&known, &on_gpu] {
///     let inputs = AttentionInputs::new(&q, &kv, &kv).kv_lengths(lengths);
///     let weights = attention.run(&inputs, Wanted::output().weights())?.weights.unwrap();
///     assert_eq!(weights.download::<f32>()?, [0.5, 0.5, 1.0, 0.0]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct KvLengths {
    tensor: Tensor,
    /// The longest, if the host knows it.
    longest: Option<usize>,
}

impl KvLengths {
    /// Lengths that the host knows. They are checked against the keys of each call.
    ///
    /// # Errors
    ///
    /// As [`Tensor::upload`], and [`Error::Shape`] for a length beyond 2^29.
    pub fn new(gpu: &Gpu, lengths: &[usize]) -> Result<Self> {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        if longest > crate::shape::MAX_AXIS {
            return Err(Error::Shape(format!(
                "key length {longest}: at most {} are allowed",
                crate::shape::MAX_AXIS
            )));
        }
        let words: Vec<u32> = lengths.iter().map(|&length| length as u32).collect();
        let tensor = Tensor::upload(gpu, &words, &[lengths.len()])?;
        Ok(Self {
            tensor,
            longest: Some(longest),
        })
    }

    /// Lengths that only the GPU knows, `[B]` of [`DType::U32`]. Nobody can check them: the kernels take a length
    /// beyond the keys for the number of keys.
    ///
    /// # Errors
    ///
    /// [`Error::DType`] or [`Error::Shape`] if the tensor is not that.
    pub fn from_tensor(tensor: Tensor) -> Result<Self> {
        if tensor.dtype() != DType::U32 {
            return Err(Error::DType(format!(
                "key lengths of {:?}: use U32",
                tensor.dtype()
            )));
        }
        if tensor.shape().len() != 1 {
            return Err(Error::Shape(format!(
                "key lengths of shape {:?}: use [batch]",
                tensor.shape()
            )));
        }
        Ok(Self {
            tensor,
            longest: None,
        })
    }

    /// Lengths in a tensor whose values the host knows too; none of them counts as more than `longest`.
    pub(crate) fn known(tensor: Tensor, longest: usize) -> Self {
        Self {
            tensor,
            longest: Some(longest),
        }
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub(crate) fn check(&self, batch: usize, keys: usize) -> Result<()> {
        if self.tensor.shape() != [batch] {
            return Err(Error::Shape(format!(
                "{:?} key lengths for a batch of {batch}: give one per batch entry",
                self.tensor.shape()
            )));
        }
        match self.longest {
            Some(longest) if longest > keys && batch > 0 => Err(Error::Shape(format!(
                "key length {longest} of a call with {keys} keys: lengths may be at most the number of keys"
            ))),
            _ => Ok(()),
        }
    }
}

/// What an attention call reads. Tensors may have any strides; `[B, L, H D]` is viewed by
/// [`Tensor::split_heads`].
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{AttentionInputs, DType, KvLengths, Tensor};
///
/// let q = Tensor::zeros(&gpu, DType::F32, &[2, 8, 16, 64])?; // [B, H, Lq, D]
/// let kv = Tensor::zeros(&gpu, DType::F32, &[2, 2, 100, 64])?; // [B, Hkv, Lk, D]
/// let lengths = KvLengths::new(&gpu, &[100, 37])?;
/// let inputs = AttentionInputs::new(&q, &kv, &kv).kv_lengths(&lengths);
/// assert_eq!(inputs.shape()?.weights(), [2, 8, 16, 100]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttentionInputs<'a> {
    /// `[B, H, Lq, D]`.
    pub query: &'a Tensor,
    /// `[B, Hkv, Lk, D]`, the always visible keys last.
    pub key: &'a Tensor,
    /// `[B, Hkv, Lk, Dv]`.
    pub value: &'a Tensor,
    /// Broadcasts to `[B, H, Lq, Lk]`, past keys included, always visible keys not.
    pub mask: Option<&'a Mask>,
    /// Boolean, `[B, Lk]`, past keys included, always visible keys not.
    pub key_mask: Option<&'a Mask>,
    /// One length per batch entry. Not together with past keys.
    pub kv_lengths: Option<&'a KvLengths>,
    /// Keys `[B, Hkv, P, D]` and values `[B, Hkv, P, Dv]` that come before `key` and `value`.
    pub past: Option<(&'a Tensor, &'a Tensor)>,
    /// One logit per query head, `[H]` of [`DType::F32`], that takes weight and gives no value: `exp(sink)` is
    /// added to each row's sum. It is not scaled, capped or masked. One of `-inf` is none, one of `+inf` counts as the
    /// largest float.
    pub sinks: Option<&'a Tensor>,
}

impl<'a> AttentionInputs<'a> {
    /// Queries, keys and values alone.
    pub fn new(query: &'a Tensor, key: &'a Tensor, value: &'a Tensor) -> Self {
        Self {
            query,
            key,
            value,
            mask: None,
            key_mask: None,
            kv_lengths: None,
            past: None,
            sinks: None,
        }
    }

    /// Adds a mask of scores.
    pub fn mask(mut self, mask: &'a Mask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Adds a boolean mask of keys, `[B, Lk]`.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Mask, Tensor, Wanted};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let q = Tensor::zeros(&gpu, DType::F32, &[2, 1, 1, 8])?; // [B, H, Lq, D]
    /// let kv = Tensor::zeros(&gpu, DType::F32, &[2, 1, 2, 8])?;
    /// let padding = Mask::keep_from(&gpu, &[true, true, false, true], &[2, 2])?;
    /// let inputs = AttentionInputs::new(&q, &kv, &kv).key_mask(&padding);
    /// let weights = attention.run(&inputs, Wanted::output().weights())?.weights.unwrap();
    /// assert_eq!(weights.download::<f32>()?, [0.5, 0.5, 0.0, 1.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn key_mask(mut self, mask: &'a Mask) -> Self {
        self.key_mask = Some(mask);
        self
    }

    /// Adds key lengths.
    pub fn kv_lengths(mut self, lengths: &'a KvLengths) -> Self {
        self.kv_lengths = Some(lengths);
        self
    }

    /// Adds keys and values of the past.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Tensor, Wanted};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let past = Tensor::zeros(&gpu, DType::F32, &[1, 2, 5, 8])?; // [B, Hkv, P, D]
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 1, 8])?;
    /// let inputs = AttentionInputs::new(&x, &x, &x).past(&past, &past);
    /// assert_eq!(inputs.shape()?.keys, 6);
    /// let result = attention.run(&inputs, Wanted::output().present())?;
    /// assert_eq!(result.present_key.unwrap().shape(), [1, 2, 6, 8]); // the next call's past
    /// # Ok(())
    /// # }
    /// ```
    pub fn past(mut self, key: &'a Tensor, value: &'a Tensor) -> Self {
        self.past = Some((key, value));
        self
    }

    /// Adds attention sinks.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, DType, Tensor, Wanted};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 1, 8])?; // two heads, one key
    /// let sinks = Tensor::upload(&gpu, &[0.0f32, f32::NEG_INFINITY], &[2])?; // as heavy as a score of 0, and none
    /// let inputs = AttentionInputs::new(&x, &x, &x).sinks(&sinks);
    /// let weights = attention.run(&inputs, Wanted::output().weights())?.weights.unwrap();
    /// assert_eq!(weights.download::<f32>()?, [0.5, 1.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn sinks(mut self, sinks: &'a Tensor) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Every tensor with its name.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("query", Some(self.query)),
            ("key", Some(self.key)),
            ("value", Some(self.value)),
            ("mask", self.mask.map(Mask::tensor)),
            ("key_mask", self.key_mask.map(Mask::tensor)),
            ("kv_lengths", self.kv_lengths.map(KvLengths::tensor)),
            ("past key", self.past.map(|(key, _)| key)),
            ("past value", self.past.map(|(_, value)| value)),
            ("sinks", self.sinks),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }

    /// The sizes of the call, from the tensors' shapes.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] with the shapes that do not fit each other.
    pub fn shape(&self) -> Result<AttentionShape> {
        let axes = |what: &str, tensor: &Tensor, names: &str| {
            <[usize; 4]>::try_from(tensor.shape()).map_err(|_| {
                Error::Shape(format!(
                    "{what} has shape {:?}: use {names}; Tensor::split_heads views [B, L, H D] so",
                    tensor.shape()
                ))
            })
        };
        let [batch, heads, queries, head_dim] = axes("query", self.query, "[B, H, Lq, D]")?;
        let [_, kv_heads, keys, _] = axes("key", self.key, "[B, Hkv, Lk, D]")?;
        let [.., value_dim] = axes("value", self.value, "[B, Hkv, Lk, Dv]")?;
        let past = match self.past {
            Some((key, _)) => axes("past key", key, "[B, Hkv, P, D]")?[2],
            None => 0,
        };
        let expect = |what: &str, tensor: &Tensor, expected: [usize; 4]| {
            if tensor.shape() == expected {
                return Ok(());
            }
            Err(Error::Shape(format!(
                "{what} has shape {:?}, expected {expected:?} from query {:?}, key {:?} and value {:?}",
                tensor.shape(),
                self.query.shape(),
                self.key.shape(),
                self.value.shape()
            )))
        };
        expect("key", self.key, [batch, kv_heads, keys, head_dim])?;
        expect("value", self.value, [batch, kv_heads, keys, value_dim])?;
        if let Some((key, value)) = self.past {
            expect("past key", key, [batch, kv_heads, past, head_dim])?;
            expect("past value", value, [batch, kv_heads, past, value_dim])?;
        }
        let shape = AttentionShape {
            batch,
            heads,
            kv_heads,
            queries,
            keys: past + keys,
            head_dim,
            value_dim,
        };
        shape.validate()?;
        // Kernels count rows in 32 bits. More than fit in any memory are possible if each has no element.
        let rows = product(&[batch, heads, queries]);
        if rows > u64::from(u32::MAX) {
            return Err(Error::Shape(format!(
                "query has shape {:?}: {rows} rows, at most {} are allowed",
                self.query.shape(),
                u32::MAX
            )));
        }
        Ok(shape)
    }

    /// Checks everything but the outputs.
    pub(crate) fn check(&self, gpu: &Gpu, options: &AttentionOptions) -> Result<AttentionShape> {
        for (name, tensor) in self.tensors() {
            check_device(gpu, name, tensor)?;
        }
        let shape = self.shape()?;
        options.validate_for(&shape)?;
        let maskable = shape.keys - options.always_visible_keys;
        if let Some(mask) = self.mask {
            mask.strides("mask", [shape.batch, shape.heads, shape.queries, maskable])?;
        }
        if let Some(mask) = self.key_mask {
            mask.check_keys("key_mask", "mask", shape.batch, maskable)?;
        }
        if let Some(lengths) = self.kv_lengths {
            if self.past.is_some() {
                return Err(Error::Option(
                    "kv_lengths together with past keys: their order would be ambiguous; write the new keys behind \
                     the past ones and give one length"
                        .to_owned(),
                ));
            }
            lengths.check(shape.batch, maskable)?;
        }
        if let Some(sinks) = self.sinks {
            check_vector("sinks", sinks, shape.heads)?;
        }
        Ok(shape)
    }
}

pub(crate) fn check_vector(what: &str, tensor: &Tensor, len: usize) -> Result<()> {
    if tensor.dtype() != DType::F32 {
        return Err(Error::DType(format!("{what} of {:?}: use F32", tensor.dtype())));
    }
    if tensor.shape() != [len] {
        return Err(Error::Shape(format!(
            "{what} has shape {:?}, expected [{len}]",
            tensor.shape()
        )));
    }
    Ok(())
}

pub(crate) fn check_device(gpu: &Gpu, name: &str, tensor: &Tensor) -> Result<()> {
    if tensor.gpu() == gpu {
        return Ok(());
    }
    Err(Error::WrongDevice(format!(
        "{name} lives on {}, the call runs on another device or Gpu, {}: make all tensors of a call with one Gpu; a device \
         that was joined twice is two of them, so clone the first instead",
        tensor.gpu().description(),
        gpu.description()
    )))
}

/// Where an attention call writes. Each needs a buffer of its own, which no input shares: wgpu tracks whole
/// buffers.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionOutputs, DType, Tensor};
///
/// let attention = Attention::new(&gpu, AttentionOptions::new())?;
/// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4, 8])?; // [B, H, L, D]
/// let output = Tensor::zeros(&gpu, DType::F16, &[1, 4, 2 * 8])?; // heads merged
/// let lse = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4])?;
/// let weights = Tensor::zeros(&gpu, DType::F32, &[1, 2, 4, 4])?;
/// let mean = Tensor::zeros(&gpu, DType::F32, &[1, 4, 4])?;
/// let outputs = AttentionOutputs::new(&output).lse(&lse).weights(&weights).mean_weights(&mean);
///
/// let mut encoder = gpu.encoder(); // or your own
/// attention.record(&mut encoder, &AttentionInputs::new(&x, &x, &x), &outputs)?;
/// gpu.submit(encoder)?;
/// assert_eq!(mean.download::<f32>()?, [0.25; 4 * 4]); // equal scores
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct AttentionOutputs<'a> {
    /// `[B, H, Lq, Dv]` with any strides, or head-merged `[B, Lq, H Dv]`; F32 or F16.
    pub output: &'a Tensor,
    /// Log-sum-exp of each row's scores, natural logarithm, `[B, H, Lq]`, contiguous F32. `-inf` where a query
    /// sees no key.
    pub lse: Option<&'a Tensor>,
    /// Softmax weights, `[B, H, Lq, Lk]`, contiguous F32; exactly 0 for an invisible key.
    pub weights: Option<&'a Tensor>,
    /// Their mean over the heads, `[B, Lq, Lk]`, contiguous F32.
    pub mean_weights: Option<&'a Tensor>,
    /// Past and new keys joined, `[B, Hkv, Lk, D]`, of `key`'s type.
    pub present_key: Option<&'a Tensor>,
    /// Past and new values joined, `[B, Hkv, Lk, Dv]`, of `value`'s type.
    pub present_value: Option<&'a Tensor>,
}

impl<'a> AttentionOutputs<'a> {
    /// The output alone.
    pub fn new(output: &'a Tensor) -> Self {
        Self {
            output,
            lse: None,
            weights: None,
            mean_weights: None,
            present_key: None,
            present_value: None,
        }
    }

    /// Asks for the log-sum-exp.
    pub fn lse(mut self, lse: &'a Tensor) -> Self {
        self.lse = Some(lse);
        self
    }

    /// Asks for the weights of each head.
    pub fn weights(mut self, weights: &'a Tensor) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Asks for the mean of the weights over the heads.
    pub fn mean_weights(mut self, weights: &'a Tensor) -> Self {
        self.mean_weights = Some(weights);
        self
    }

    /// Asks for past and new keys and values joined.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionOutputs, DType, Tensor};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let past = Tensor::upload(&gpu, &[1.0f32, 2.0], &[1, 1, 2, 1])?; // [B, Hkv, P, D]
    /// let x = Tensor::upload(&gpu, &[3.0f32], &[1, 1, 1, 1])?;
    /// let output = Tensor::zeros(&gpu, DType::F32, &[1, 1, 1, 1])?;
    /// let keys = Tensor::zeros(&gpu, DType::F32, &[1, 1, 3, 1])?;
    /// let values = Tensor::zeros(&gpu, DType::F32, &[1, 1, 3, 1])?;
    ///
    /// let mut encoder = gpu.encoder(); // or your own
    /// let inputs = AttentionInputs::new(&x, &x, &x).past(&past, &past);
    /// attention.record(&mut encoder, &inputs, &AttentionOutputs::new(&output).present(&keys, &values))?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(keys.download::<f32>()?, [1.0, 2.0, 3.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn present(mut self, key: &'a Tensor, value: &'a Tensor) -> Self {
        self.present_key = Some(key);
        self.present_value = Some(value);
        self
    }

    fn tensors(&self) -> impl Iterator<Item = (&'static str, &'a Tensor)> {
        [
            ("output", Some(self.output)),
            ("lse", self.lse),
            ("weights", self.weights),
            ("mean_weights", self.mean_weights),
            ("present_key", self.present_key),
            ("present_value", self.present_value),
        ]
        .into_iter()
        .filter_map(|(name, tensor)| tensor.map(|tensor| (name, tensor)))
    }

    /// Checks the outputs against the call; gives the output as `[B, H, Lq, Dv]`. Buffers of a planned call do not exist
    /// and so overlap nothing.
    pub(crate) fn check(
        &self,
        gpu: &Gpu,
        inputs: &AttentionInputs,
        shape: &AttentionShape,
        planned: bool,
    ) -> Result<Tensor> {
        for (name, tensor) in self.tensors() {
            check_device(gpu, name, tensor)?;
        }
        if !planned {
            check_overlaps(inputs.tensors(), self.tensors())?;
        }
        let merged = [shape.batch, shape.queries, shape.heads * shape.value_dim];
        let output = if self.output.shape() == merged && shape.heads > 0 {
            self.output.split_heads(shape.heads)?
        } else {
            self.output.clone()
        };
        if output.shape() != shape.output() {
            return Err(Error::Shape(format!(
                "output has shape {:?}, expected [B, H, Lq, Dv] = {:?} or [B, Lq, H Dv] = {merged:?}",
                self.output.shape(),
                shape.output()
            )));
        }
        if output.overlaps_itself() {
            return Err(Error::Overlap(format!(
                "output has shape {:?} with strides {:?}: two of its elements share memory",
                output.shape(),
                output.strides()
            )));
        }
        let full = shape.weights();
        let [batch, heads, queries, keys] = full;
        expect_result("lse", self.lse, &[batch, heads, queries], DType::F32)?;
        expect_result("weights", self.weights, &full, DType::F32)?;
        expect_result(
            "mean_weights",
            self.mean_weights,
            &[batch, queries, keys],
            DType::F32,
        )?;
        expect_result("present_key", self.present_key, &shape.key(), inputs.key.dtype())?;
        expect_result(
            "present_value",
            self.present_value,
            &shape.value(),
            inputs.value.dtype(),
        )?;
        Ok(output)
    }
}

pub(crate) fn expect_result(
    what: &str,
    tensor: Option<&Tensor>,
    shape: &[usize],
    dtype: DType,
) -> Result<()> {
    let Some(tensor) = tensor else { return Ok(()) };
    if tensor.shape() != shape || !tensor.is_contiguous() {
        return Err(Error::Shape(format!(
            "{what} has shape {:?} with strides {:?}, expected {shape:?}, contiguous",
            tensor.shape(),
            tensor.strides()
        )));
    }
    if tensor.dtype() != dtype {
        return Err(Error::DType(format!(
            "{what} is {:?}, expected {dtype:?}",
            tensor.dtype()
        )));
    }
    Ok(())
}

/// Refuses one buffer as input and output, or as two outputs.
pub(crate) fn check_overlaps<'t>(
    inputs: impl Iterator<Item = (&'static str, &'t Tensor)>,
    outputs: impl Iterator<Item = (&'static str, &'t Tensor)>,
) -> Result<()> {
    let mut seen: Vec<(&str, &Tensor)> = inputs.filter(|(_, tensor)| !tensor.is_empty()).collect();
    for (name, tensor) in outputs.filter(|(_, tensor)| !tensor.is_empty()) {
        if let Some((other, _)) = seen.iter().find(|(_, input)| input.buffer() == tensor.buffer()) {
            return Err(Error::Overlap(format!(
                "{name} and {other} lie in one buffer: wgpu tracks whole buffers, so each output needs a buffer \
                 that no input and no other output shares"
            )));
        }
        seen.push((name, tensor));
    }
    Ok(())
}
