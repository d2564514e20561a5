//! Keys and values of the past, for decoding: written in place, attended without a copy.

use crate::{
    AttentionShape, DType, Error, Gpu, KvLengths, Mask, Result, Rotary, RotaryPositions, Tensor,
    inputs::check_device,
    kernel::{Batch, Storage, Variant, warm_up},
    kernels::{append, move_sequences},
    linear::check_float,
    shape::{MAX_AXIS, product},
};

/// Sizes of a [`KvCache`].
///
/// ```
/// use multihead::KvCacheShape;
///
/// let shape = KvCacheShape::new(4, 8, 4096, 128); // sequences, key/value heads, positions, head size
/// assert_eq!(shape.keys(), [4, 8, 4096, 128]);
/// assert_eq!(KvCacheShape { value_dim: 64, ..shape }.values(), [4, 8, 4096, 64]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvCacheShape {
    /// Sequences in the batch, B.
    pub batch: usize,
    /// Key and value heads, Hkv.
    pub kv_heads: usize,
    /// Positions of each sequence that there is memory for.
    pub capacity: usize,
    /// Size of one key vector, D.
    pub head_dim: usize,
    /// Size of one value vector, Dv.
    pub value_dim: usize,
}

impl KvCacheShape {
    /// `Dv = D`.
    pub const fn new(batch: usize, kv_heads: usize, capacity: usize, head_dim: usize) -> Self {
        Self {
            batch,
            kv_heads,
            capacity,
            head_dim,
            value_dim: head_dim,
        }
    }

    /// Shape of the keys, `[B, Hkv, capacity, D]`.
    pub fn keys(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.capacity, self.head_dim]
    }

    /// Shape of the values, `[B, Hkv, capacity, Dv]`.
    pub fn values(&self) -> [usize; 4] {
        [self.batch, self.kv_heads, self.capacity, self.value_dim]
    }
}

/// Keys and values of the past of a batch of sequences, on the GPU, for decoding token by token or chunk by chunk.
///
/// [`KvCache::append`] writes new keys and values behind those that are there, in your encoder: nothing of the past is
/// copied, and no more is uploaded than the lengths. [`KvCache::keys`], [`KvCache::values`] and [`KvCache::lengths`] are
/// what [`AttentionInputs`](crate::AttentionInputs) takes. They cover the longest sequence, not the capacity, so a step
/// costs what the used part costs. What lies behind a sequence's length never counts, NaN included. A whole layer does
/// all of it in [`MultiHeadAttention::step`](crate::MultiHeadAttention::step).
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{
///     Attention, AttentionInputs, AttentionOptions, AttentionOutputs, Causal, DType, Gpu, KvCache, KvCacheShape, Tensor,
/// };
///
/// let gpu = Gpu::new()?;
/// let attention = Attention::new(&gpu, AttentionOptions::new().causal(Causal::BottomRight))?;
/// let mut cache = KvCache::new(&gpu, KvCacheShape::new(1, 2, 1024, 64), DType::F32)?;
///
/// let mut encoder = gpu.encoder(); // or your own
/// for tokens in [7, 1, 1] {
///     // A prompt, then token by token; several steps may share an encoder.
///     let q = Tensor::zeros(&gpu, DType::F32, &[1, 8, tokens, 64])?;
///     let kv = Tensor::zeros(&gpu, DType::F32, &[1, 2, tokens, 64])?;
///     let output = Tensor::zeros(&gpu, DType::F32, &[1, 8, tokens, 64])?;
///     cache.append(&mut encoder, &kv, &kv)?;
///     let inputs = AttentionInputs::new(&q, cache.keys(), cache.values()).kv_lengths(cache.lengths());
///     attention.record(&mut encoder, &inputs, &AttentionOutputs::new(&output))?;
/// }
/// gpu.submit(encoder)?;
/// assert_eq!(cache.len(0), 9);
/// # Ok(())
/// # }
/// ```
///
/// Lengths are the host's: they count what was recorded, in the order of the calls. Submit encoders in that order, to
/// one queue; one that is thrown away leaves its positions unwritten, until [`KvCache::truncate`] takes them back.
///
/// # Rolling
///
/// For attention within a window, [`KvCache::rolling`] needs memory for the window alone, however long the sequence:
/// position `p` lies in slot `p % capacity`. Softmax does not mind in which order the keys lie, but the causal order and
/// the window count positions, so a rolling cache brings a mask of its own: attend without causal order and without a
/// window in the options, with [`KvCache::mask`]. See there.
#[derive(Debug)]
pub struct KvCache {
    gpu: Gpu,
    shape: KvCacheShape,
    dtype: DType,
    /// Positions that a query sees, its own included, if the cache is rolling.
    window: Option<usize>,
    rotary: Option<Rotary>,
    /// `[B, Hkv, rows, D]` and `[B, Hkv, rows, Dv]`, whole.
    keys: Tensor,
    values: Tensor,
    state: State,
}

/// What a call changes, and how attention sees it.
#[derive(Debug, Clone)]
pub(crate) struct State {
    /// Positions of each sequence, those that a rolling cache has forgotten included.
    lengths: Vec<usize>,
    /// The position of each sequence from which on all are held: a rolling cache overwrites the older ones, also with
    /// positions that are then taken back.
    held: Vec<usize>,
    /// `lengths` on the GPU. Every state has a buffer of its own: calls that were recorded before keep theirs.
    pub(crate) on_gpu: KvLengths,
    /// The slots in use by the longest sequence.
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
}

impl KvCache {
    /// An empty cache of F32 or F16. Appended tensors may be of either type.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for sizes beyond 2^29, [`Error::DType`] for a type that is not of floats, [`Error::Limit`] if the
    /// keys or the values do not fit one storage binding of the device, [`Error::OutOfMemory`], [`Error::DeviceLost`].
    pub fn new(gpu: &Gpu, shape: KvCacheShape, dtype: DType) -> Result<Self> {
        Self::build(gpu, shape, dtype, None)
    }

    /// An empty cache that remembers what a window of `window` positions sees, the query's own included
    /// (`window_left + 1`), in memory for `shape.capacity` positions.
    ///
    /// A chunk's first query still needs the window before it when the chunk's last key is written. So one append takes
    /// at most `capacity - window + 1` positions ([`KvCache::max_chunk`]): as large as the window for one at a time, larger
    /// by `n - 1` for chunks of `n`. Longer prompts are appended and attended in several chunks.
    ///
    /// # Errors
    ///
    /// As [`KvCache::new`], and [`Error::Option`] for a window of 0 or beyond the capacity.
    pub fn rolling(gpu: &Gpu, shape: KvCacheShape, dtype: DType, window: usize) -> Result<Self> {
        if window == 0 || window > shape.capacity {
            return Err(Error::Option(format!(
                "a window of {window} positions in a rolling cache of {}: use at least 1 and at most the capacity, \
                 which is window + longest chunk - 1",
                shape.capacity
            )));
        }
        Self::build(gpu, shape, dtype, Some(window))
    }

    fn build(gpu: &Gpu, shape: KvCacheShape, dtype: DType, window: Option<usize>) -> Result<Self> {
        AttentionShape {
            batch: shape.batch,
            heads: shape.kv_heads,
            kv_heads: shape.kv_heads,
            queries: 0,
            keys: shape.capacity,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
        }
        .validate()?;
        Storage::of(gpu, dtype)?;
        // Heads start on whole words, so that sequences are moved word by word.
        let rows = if dtype == DType::F16 {
            shape.capacity.next_multiple_of(2)
        } else {
            shape.capacity
        };
        let tensor = |what: &str, [batch, heads, _, size]: [usize; 4]| {
            let all = [batch, heads, rows, size];
            let needs = product(&all).saturating_mul(dtype.size() as u64);
            // Shaders count elements in 32 bits.
            let allows = gpu
                .limits()
                .max_storage_buffer_binding_size
                .min(u64::from(u32::MAX));
            if needs > allows {
                return Err(Error::Limit {
                    what: format!("a cache of {what} {:?}", [batch, heads, shape.capacity, size]),
                    needs,
                    allows,
                    limit: "max_storage_buffer_binding_size",
                    advice:
                        "use a smaller capacity, F16, or one cache for each part of the batch or of the heads"
                            .to_owned(),
                });
            }
            Tensor::zeros(gpu, dtype, &all)
        };
        let keys = tensor("keys", shape.keys())?;
        let values = tensor("values", shape.values())?;
        // Before the host makes as many counts.
        Tensor::bytes(gpu, DType::U32, &[shape.batch])?;
        let empty = vec![0; shape.batch];
        let state = State::new(gpu, &keys, &values, shape.capacity, empty.clone(), empty)?;
        Ok(Self {
            gpu: gpu.clone(),
            shape,
            dtype,
            window,
            rotary: None,
            keys,
            values,
            state,
        })
    }

    /// Rotates keys by their position as they are appended. Queries are rotated with the same [`Rotary`], by
    /// [`KvCache::query_positions`].
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, KvCache, KvCacheShape, Rotary, RotaryOptions, Tensor};
    ///
    /// let rotary = Rotary::new(&gpu, RotaryOptions::new(4), 64)?;
    /// let shape = KvCacheShape::new(1, 2, 64, 4);
    /// let mut cache = KvCache::new(&gpu, shape, DType::F32)?.with_rotary(rotary.clone())?;
    /// let x = Tensor::upload(&gpu, &[1.0f32; 2 * 3 * 4], &[1, 2, 3, 4])?; // queries and keys
    ///
    /// let mut encoder = gpu.encoder(); // or your own
    /// cache.append(&mut encoder, &x, &x)?; // positions 0, 1 and 2
    /// gpu.submit(encoder)?;
    /// let queries = rotary.run(&x, cache.query_positions())?.download::<f32>()?;
    /// let keys = cache.keys().download::<f32>()?;
    /// assert!(queries.iter().zip(keys).all(|(q, k)| (q - k).abs() < 1e-6));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] if it rotates more than a head has, or has tables for each sequence; [`Error::WrongDevice`];
    /// [`Error::Option`] if the cache holds keys already.
    pub fn with_rotary(mut self, rotary: Rotary) -> Result<Self> {
        rotary.check_positions(&self.gpu, self.shape.head_dim)?;
        if self.longest() > 0 {
            return Err(Error::Option(
                "with_rotary on a cache that holds keys: give it to the empty cache".to_owned(),
            ));
        }
        self.rotary = Some(rotary);
        Ok(self)
    }

    /// Builds the pipelines that append tensors of this type ahead of the first call.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, KvCache, KvCacheShape, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let mut cache = KvCache::new(&gpu, KvCacheShape::new(1, 2, 64, 4), DType::F16)?;
    /// cache.warm_up(DType::F32)?;
    /// let built = gpu.pipelines();
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 3, 4])?;
    /// let mut encoder = gpu.encoder();
    /// cache.append(&mut encoder, &x, &x)?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(gpu.pipelines(), built); // the append built none
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shader`] or [`Error::DeviceLost`]; [`Error::DType`] for a type that is not of floats.
    pub fn warm_up(&self, dtype: DType) -> Result<()> {
        warm_up(&self.gpu, &self.variants(dtype)?)
    }

    /// The kernels of appends of tensors of `dtype`.
    pub(crate) fn variants(&self, dtype: DType) -> Result<Vec<Variant>> {
        let input = Storage::of(&self.gpu, dtype)?;
        let output = Storage::of(&self.gpu, self.dtype)?;
        let mut tables = vec![Storage::F32];
        if let Some(rotary) = &self.rotary {
            tables.push(Storage::of(&self.gpu, rotary.tables().0.dtype())?);
        }
        tables.dedup();
        Ok(tables
            .into_iter()
            .map(|tables| append::variant(input, tables, output))
            .collect())
    }

    /// Its device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Its sizes.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, KvCache, KvCacheShape};
    ///
    /// let cache = KvCache::rolling(&gpu, KvCacheShape::new(2, 4, 32, 16), DType::F16, 24)?;
    /// assert_eq!((cache.shape().capacity, cache.dtype()), (32, DType::F16));
    /// assert_eq!((cache.window(), cache.max_chunk()), (Some(24), 32 - 24 + 1));
    /// assert_eq!(cache.bytes(), 2 * (2 * 4 * 32 * 16) * 2); // keys and values
    /// assert_eq!(cache.lens(), [0, 0]);
    /// assert!(cache.is_empty() && cache.rotary().is_none());
    /// assert_eq!(cache.gpu(), &gpu);
    /// # Ok(())
    /// # }
    /// ```
    pub fn shape(&self) -> KvCacheShape {
        self.shape
    }

    /// Element type of keys and values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Bytes of GPU memory that keys and values take.
    pub fn bytes(&self) -> u64 {
        self.keys.buffer().size() + self.values.buffer().size()
    }

    /// Positions that a query of a rolling cache sees, its own included.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// What rotates the keys.
    pub fn rotary(&self) -> Option<&Rotary> {
        self.rotary.as_ref()
    }

    /// Most positions that one append may add to a sequence, if there is room for them.
    pub fn max_chunk(&self) -> usize {
        match self.window {
            Some(window) => self.shape.capacity - window + 1,
            None => self.shape.capacity,
        }
    }

    /// Positions of a sequence, those that a rolling cache has forgotten included; 0 for a sequence that is not there.
    pub fn len(&self, sequence: usize) -> usize {
        self.state.lengths.get(sequence).copied().unwrap_or(0)
    }

    /// Whether no sequence has any position.
    pub fn is_empty(&self) -> bool {
        self.longest() == 0
    }

    /// Positions of every sequence, `[B]`.
    pub fn lens(&self) -> &[usize] {
        &self.state.lengths
    }

    /// Keys, `[B, Hkv, n, D]` with `n` slots in use by the longest sequence. A view of the cache's own memory.
    pub fn keys(&self) -> &Tensor {
        &self.state.keys
    }

    /// Values, `[B, Hkv, n, Dv]`. A view of the cache's own memory.
    pub fn values(&self) -> &Tensor {
        &self.state.values
    }

    /// How many keys each sequence has, for [`AttentionInputs::kv_lengths`](crate::AttentionInputs::kv_lengths).
    pub fn lengths(&self) -> &KvLengths {
        &self.state.on_gpu
    }

    /// Where queries stand whose keys were appended last: the last one at its sequence's last position.
    pub fn query_positions(&self) -> RotaryPositions<'_> {
        self.state.positions()
    }

    /// Which keys of a rolling cache the last `queries` positions of each sequence see, `[B, 1, queries, n]`: those of the
    /// window before each, and none after it. The options then have neither causal order nor window; ALiBi would count
    /// slots for positions and is not possible.
    ///
    /// One query at a time on a cache whose capacity is the window needs no mask: what it must not see is gone.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{
    ///     Attention, AttentionInputs, AttentionOptions, AttentionOutputs, DType, Gpu, KvCache, KvCacheShape, Tensor,
    /// };
    ///
    /// let gpu = Gpu::new()?;
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// // A window of 16, chunks of up to 4.
    /// let mut cache = KvCache::rolling(&gpu, KvCacheShape::new(1, 2, 16 + 4 - 1, 64), DType::F32, 16)?;
    ///
    /// let mut encoder = gpu.encoder();
    /// for tokens in [4, 4, 4, 4, 4, 4, 1, 1] {
    ///     let q = Tensor::zeros(&gpu, DType::F32, &[1, 8, tokens, 64])?;
    ///     let kv = Tensor::zeros(&gpu, DType::F32, &[1, 2, tokens, 64])?;
    ///     let output = Tensor::zeros(&gpu, DType::F32, &[1, 8, tokens, 64])?;
    ///     cache.append(&mut encoder, &kv, &kv)?;
    ///     let mask = cache.mask(tokens)?;
    ///     let inputs = AttentionInputs::new(&q, cache.keys(), cache.values())
    ///         .kv_lengths(cache.lengths())
    ///         .mask(&mask);
    ///     attention.record(&mut encoder, &inputs, &AttentionOutputs::new(&output))?;
    /// }
    /// gpu.submit(encoder)?;
    /// assert_eq!((cache.len(0), cache.keys().shape()[2]), (26, 19));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the cache is not rolling; [`Error::Capacity`] for more queries than [`KvCache::max_chunk`], or
    /// for queries whose window is not there any more; the errors of [`Tensor::upload`].
    pub fn mask(&self, queries: usize) -> Result<Mask> {
        let Some(window) = self.window else {
            return Err(Error::Option(
                "the mask of a cache that is not rolling: its keys lie in the order of their positions, use \
                 Causal::BottomRight and AttentionOptions::window"
                    .to_owned(),
            ));
        };
        if queries > self.max_chunk() {
            return Err(Error::Capacity(format!(
                "a mask of {queries} queries: a rolling cache of {} positions serves a window of {window} for at most {} at \
                 a time",
                self.shape.capacity,
                self.max_chunk()
            )));
        }
        for (sequence, &length) in self.state.lengths.iter().enumerate() {
            let held = self.state.held[sequence];
            self.check_window(sequence, held, length, length.saturating_sub(queries), window)?;
        }
        self.mask_of(&self.state, queries, &vec![queries; self.shape.batch], window)
    }

    /// Which keys of a rolling cache in this state the last `counts[b]` positions of each sequence see, in the last rows of
    /// `[B, 1, queries, n]`. The rows before them, and before a sequence's first position, see none.
    pub(crate) fn mask_of(
        &self,
        state: &State,
        queries: usize,
        counts: &[usize],
        window: usize,
    ) -> Result<Mask> {
        let slots = state.keys.shape()[2];
        let mut keep = Vec::with_capacity(self.shape.batch * queries * slots);
        for (&length, &count) in state.lengths.iter().zip(counts) {
            let count = count.min(length);
            keep.extend(std::iter::repeat_n(false, (queries - count) * slots));
            for position in length - count..length {
                keep.extend((0..slots).map(|slot| {
                    // How far the slot's position lies before the query's; slots of later ones count as a whole round
                    // before, which no window reaches.
                    let back = (position + self.shape.capacity - slot) % self.shape.capacity;
                    back <= position && back < window
                }));
            }
        }
        Mask::keep_from(&self.gpu, &keep, &[self.shape.batch, 1, queries, slots])
    }

    /// Appends `k` positions to every sequence: `key` is `[B, Hkv, k, D]`, `value` `[B, Hkv, k, Dv]`, any strides, F32 or
    /// F16. What is recorded after it, also in the same encoder, sees them.
    ///
    /// # Errors
    ///
    /// [`Error::Capacity`] if a sequence has no room for them, or the rotary tables do not reach so far; sizes, types,
    /// devices and overlaps that do not fit, or more than the device allows. Then nothing has been recorded and the
    /// lengths are as they were.
    pub fn append(&mut self, encoder: &mut wgpu::CommandEncoder, key: &Tensor, value: &Tensor) -> Result<()> {
        let counts = vec![key.shape().get(2).copied().unwrap_or(0); self.shape.batch];
        self.append_ragged(encoder, key, value, &counts)
    }

    /// [`KvCache::append`] where sequence `b` gets `counts[b]` positions: the last `counts[b]` rows of `key` and `value`.
    /// The rows before them are padding and not read, so that queries in the same rows stand where
    /// [`Causal::BottomRight`](crate::Causal::BottomRight) and [`KvCache::query_positions`] have them:
    ///
    /// ```text
    ///  counts   rows 0 1 2
    ///       3        a b c
    ///       1        . . d
    ///       0        . . .
    /// ```
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, KvCache, KvCacheShape, Tensor};
    ///
    /// let mut cache = KvCache::new(&gpu, KvCacheShape::new(3, 1, 64, 1), DType::F32)?;
    /// let rows = [1.0f32, 2.0, 3.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0]; // those of the picture
    /// let x = Tensor::upload(&gpu, &rows, &[3, 1, 3, 1])?;
    /// let mut encoder = gpu.encoder(); // or your own
    /// cache.append_ragged(&mut encoder, &x, &x, &[3, 1, 0])?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(cache.lens(), [3, 1, 0]);
    /// assert_eq!(cache.keys().slice(0, 1..2)?.slice(2, 0..1)?.download::<f32>()?, [4.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`KvCache::append`], and [`Error::Shape`] for counts that do not fit.
    pub fn append_ragged(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        key: &Tensor,
        value: &Tensor,
        counts: &[usize],
    ) -> Result<()> {
        let mut batch = Batch::new(&self.gpu);
        let next = self.prepare_append(&mut batch, key, value, counts)?;
        batch.record(encoder)?;
        self.commit(next);
        Ok(())
    }

    /// All memory of keys and values, used or not.
    pub(crate) fn memory(&self) -> [&Tensor; 2] {
        [&self.keys, &self.values]
    }

    /// Takes the state that an append leaves behind, once it is recorded.
    pub(crate) fn commit(&mut self, next: State) {
        self.state = next;
    }

    /// Checks an append and adds its dispatches. Attention in the same batch reads the state that it gives.
    pub(crate) fn prepare_append(
        &self,
        batch: &mut Batch,
        key: &Tensor,
        value: &Tensor,
        counts: &[usize],
    ) -> Result<State> {
        let rows = key.shape().get(2).copied().unwrap_or(0);
        for (name, tensor, mut expected) in [
            ("key", key, self.shape.keys()),
            ("value", value, self.shape.values()),
        ] {
            check_device(&self.gpu, name, tensor)?;
            expected[2] = rows;
            if tensor.shape() != expected {
                return Err(Error::Shape(format!(
                    "{name} has shape {:?}, expected {expected:?} from the key {:?} and a cache of keys {:?} and values {:?}",
                    tensor.shape(),
                    key.shape(),
                    self.shape.keys(),
                    self.shape.values()
                )));
            }
            check_float(name, tensor)?;
            for own in [&self.keys, &self.values] {
                if !tensor.is_empty() && tensor.buffer() == own.buffer() {
                    return Err(Error::Overlap(format!(
                        "{name} lies in the cache's own memory: copy it first, or use KvCache::copy_sequence"
                    )));
                }
            }
        }
        if counts.len() != self.shape.batch {
            return Err(Error::Shape(format!(
                "{} counts for {} sequences: give one per sequence",
                counts.len(),
                self.shape.batch
            )));
        }
        let mut lengths = self.state.lengths.clone();
        let mut held = self.state.held.clone();
        for (sequence, &count) in counts.iter().enumerate() {
            if count > rows {
                return Err(Error::Shape(format!(
                    "{count} positions for sequence {sequence} from tensors of {rows} rows: use at most all of them"
                )));
            }
            let length = lengths[sequence].saturating_add(count);
            self.check_room(sequence, count, length)?;
            lengths[sequence] = length;
            held[sequence] = held[sequence].max(length.saturating_sub(self.shape.capacity));
        }
        let next = self.state_of(lengths, held)?;
        let most = counts.iter().copied().max().unwrap_or(0);
        let tables = self.rotary.as_ref().map(Rotary::bind).transpose()?;
        for (name, input, tables, output) in [
            ("key", key, tables.as_ref(), &self.keys),
            ("value", value, None, &self.values),
        ] {
            let input = input.slice(2, rows - most..rows)?;
            if input.is_empty() {
                continue;
            }
            let lengths = [self.state.on_gpu.tensor(), next.on_gpu.tensor()];
            append::push(batch, name, &input, lengths, tables, output, self.shape.capacity)?;
        }
        Ok(next)
    }

    fn check_room(&self, sequence: usize, count: usize, length: usize) -> Result<()> {
        let held = self.len(sequence);
        let capacity = self.shape.capacity;
        match self.window {
            None if length > capacity => {
                return Err(Error::Capacity(format!(
                    "sequence {sequence} holds {held} positions and would get {count} more, the cache was made for {capacity}: \
                     make it larger, truncate the sequence, or use KvCache::rolling"
                )));
            }
            Some(window) if count > self.max_chunk() => {
                return Err(Error::Capacity(format!(
                    "{count} positions at once for sequence {sequence} of a rolling cache: {capacity} positions hold a window of \
                     {window} and at most {} new ones, append and attend in chunks",
                    self.max_chunk()
                )));
            }
            _ if length > MAX_AXIS => {
                return Err(Error::Capacity(format!(
                    "sequence {sequence} would have {length} positions: at most {MAX_AXIS} are counted"
                )));
            }
            _ => {}
        }
        match &self.rotary {
            Some(rotary) if length > rotary.max_positions() && count > 0 => Err(Error::Capacity(format!(
                "sequence {sequence} would have {length} positions, the rotary tables hold {}: make them with more",
                rotary.max_positions()
            ))),
            _ => Ok(()),
        }
    }

    /// Takes back the last `n` positions of every sequence (tokens that were proposed and refused). Concerns what is
    /// recorded from now on.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, KvCache, KvCacheShape, Tensor};
    ///
    /// let mut cache = KvCache::new(&gpu, KvCacheShape::new(2, 1, 64, 4), DType::F32)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[2, 1, 5, 4])?;
    /// let mut encoder = gpu.encoder();
    /// cache.append(&mut encoder, &x, &x)?;
    /// gpu.submit(encoder)?;
    /// cache.rewind(2)?;
    /// assert_eq!(cache.lens(), [3, 3]);
    /// cache.truncate(0, 1)?;
    /// cache.clear(1)?;
    /// assert_eq!(cache.lens(), [1, 0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Capacity`] if a sequence is shorter, and those of [`KvCache::truncate`]; then nothing has changed.
    pub fn rewind(&mut self, n: usize) -> Result<()> {
        let mut lengths = self.state.lengths.clone();
        for (sequence, length) in lengths.iter_mut().enumerate() {
            let Some(left) = length.checked_sub(n) else {
                return Err(Error::Capacity(format!(
                    "rewind by {n} positions of sequence {sequence}, which has {length}: use at most those of the \
                     shortest, or KvCache::truncate"
                )));
            };
            *length = left;
        }
        self.shorten(lengths)
    }

    /// Takes back the positions of one sequence from `length` on. Concerns what is recorded from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Capacity`] if it is shorter, or if a rolling cache has forgotten what the next position would see (to go
    /// back by `max_chunk` positions in all, or to 0, is always possible); [`Error::Shape`] for a sequence that is not there;
    /// [`Error::OutOfMemory`] and [`Error::DeviceLost`]. Then nothing has changed.
    pub fn truncate(&mut self, sequence: usize, length: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        let mut lengths = self.state.lengths.clone();
        if length > lengths[sequence] {
            return Err(Error::Capacity(format!(
                "truncate sequence {sequence} to {length} positions: it has {}",
                lengths[sequence]
            )));
        }
        lengths[sequence] = length;
        self.shorten(lengths)
    }

    /// Takes back all positions of one sequence.
    ///
    /// # Errors
    ///
    /// As [`KvCache::truncate`].
    pub fn clear(&mut self, sequence: usize) -> Result<()> {
        self.truncate(sequence, 0)
    }

    fn shorten(&mut self, lengths: Vec<usize>) -> Result<()> {
        let mut held = self.state.held.clone();
        for (sequence, &length) in lengths.iter().enumerate() {
            if let Some(window) = self.window.filter(|_| length < self.state.lengths[sequence]) {
                self.check_window(sequence, held[sequence], length, length, window)?;
            }
            held[sequence] = held[sequence].min(length);
        }
        self.state = self.state_of(lengths, held)?;
        Ok(())
    }

    /// Whether a rolling cache that holds the positions from `first_held` on has what position `position` of a sequence
    /// sees before `length`.
    fn check_window(
        &self,
        sequence: usize,
        first_held: usize,
        length: usize,
        position: usize,
        window: usize,
    ) -> Result<()> {
        let first_seen = (position + 1).saturating_sub(window);
        if first_seen >= first_held || first_seen >= length {
            return Ok(());
        }
        Err(Error::Capacity(format!(
            "position {position} of sequence {sequence} sees positions from {first_seen} on, the rolling cache holds those \
             from {first_held} on: go back by less, or clear the sequence"
        )))
    }

    /// Makes each sequence `i` a copy of what sequence `sources[i]` was (beam search), in your encoder. Only what moves
    /// is copied, and only as far as it is used.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, KvCache, KvCacheShape, Tensor};
    ///
    /// let mut cache = KvCache::new(&gpu, KvCacheShape::new(3, 1, 64, 1), DType::F32)?;
    /// let x = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0], &[3, 1, 1, 1])?;
    /// let mut encoder = gpu.encoder(); // or your own
    /// cache.append(&mut encoder, &x, &x)?;
    /// cache.reorder(&mut encoder, &[2, 0, 2])?; // two beams go on from the last, one from the first
    /// gpu.submit(encoder)?;
    /// assert_eq!(cache.keys().download::<f32>()?, [3.0, 1.0, 3.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for a number of sources other than the sequences', or a source that is not there; the device's
    /// errors. Then nothing has been recorded and nothing has changed.
    pub fn reorder(&mut self, encoder: &mut wgpu::CommandEncoder, sources: &[usize]) -> Result<()> {
        if sources.len() != self.shape.batch {
            return Err(Error::Shape(format!(
                "{} sources for {} sequences: name one per sequence",
                sources.len(),
                self.shape.batch
            )));
        }
        for &source in sources {
            self.check_sequence(source)?;
        }
        let moves = move_sequences::order(sources);
        if moves.is_empty() {
            return Ok(());
        }
        let of = |values: &[usize]| sources.iter().map(|&source| values[source]).collect::<Vec<_>>();
        let next = self.state_of(of(&self.state.lengths), of(&self.state.held))?;
        let used = sources
            .iter()
            .enumerate()
            .filter(|(to, from)| to != *from)
            .map(|(_, &from)| self.state.lengths[from].min(self.shape.capacity))
            .max()
            .unwrap_or(0);
        let moves = Tensor::upload(&self.gpu, &moves, &[moves.len()])?;
        let mut batch = Batch::new(&self.gpu);
        for (what, tensor) in [("cached keys", &self.keys), ("cached values", &self.values)] {
            if !tensor.is_empty() {
                move_sequences::push(&mut batch, what, tensor, used, &moves)?;
            }
        }
        batch.record(encoder)?;
        self.commit(next);
        Ok(())
    }

    /// Makes sequence `to` a copy of sequence `from` (a prompt that several share: append it once, copy it, and
    /// [`KvCache::truncate`] the copies to what is shared).
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{DType, KvCache, KvCacheShape, Tensor};
    ///
    /// let mut cache = KvCache::new(&gpu, KvCacheShape::new(2, 1, 64, 1), DType::F32)?;
    /// let x = Tensor::upload(&gpu, &[0.0f32, 0.0, 1.0, 2.0], &[2, 1, 2, 1])?;
    /// let mut encoder = gpu.encoder(); // or your own
    /// cache.append_ragged(&mut encoder, &x, &x, &[0, 2])?; // the prompt, into sequence 1
    /// cache.copy_sequence(&mut encoder, 1, 0)?;
    /// gpu.submit(encoder)?;
    /// assert_eq!(cache.lens(), [2, 2]);
    /// assert_eq!(cache.keys().download::<f32>()?, [1.0, 2.0, 1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`KvCache::reorder`].
    pub fn copy_sequence(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        from: usize,
        to: usize,
    ) -> Result<()> {
        self.check_sequence(to)?;
        let mut sources: Vec<usize> = (0..self.shape.batch).collect();
        sources[to] = from;
        self.reorder(encoder, &sources)
    }

    fn check_sequence(&self, sequence: usize) -> Result<()> {
        if sequence < self.shape.batch {
            return Ok(());
        }
        Err(Error::Shape(format!(
            "sequence {sequence} of a cache of {}: they count from 0",
            self.shape.batch
        )))
    }

    fn longest(&self) -> usize {
        self.state.lengths.iter().copied().max().unwrap_or(0)
    }

    fn state_of(&self, lengths: Vec<usize>, held: Vec<usize>) -> Result<State> {
        State::new(
            &self.gpu,
            &self.keys,
            &self.values,
            self.shape.capacity,
            lengths,
            held,
        )
    }
}

impl State {
    /// Where queries stand whose keys came last.
    pub(crate) fn positions(&self) -> RotaryPositions<'_> {
        RotaryPositions::Ends(self.on_gpu.tensor())
    }

    fn new(
        gpu: &Gpu,
        keys: &Tensor,
        values: &Tensor,
        capacity: usize,
        lengths: Vec<usize>,
        held: Vec<usize>,
    ) -> Result<Self> {
        let words: Vec<u32> = lengths.iter().map(|&length| length as u32).collect();
        // Attention takes the length of a sequence that has gone round for the number of slots.
        let used = lengths.iter().copied().max().unwrap_or(0).min(capacity);
        Ok(Self {
            on_gpu: KvLengths::known(Tensor::upload(gpu, &words, &[words.len()])?, used),
            keys: keys.slice(2, 0..used)?,
            values: values.slice(2, 0..used)?,
            lengths,
            held,
        })
    }
}
