//! The key/value cache against a plain model: what it holds, what attention sees of it, what it refuses.

use half::f16;
use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, AttentionShape, Causal,
    DType, Error, Gpu, KvCache, KvCacheShape, Rotary, RotaryOptions, RotaryPairing, RotaryPositions, Tensor,
    reference, wgpu,
};
use proptest::prelude::*;

use crate::{
    field::{all_rows, plain},
    support::{self, Numbers, check_bound, download, gpu, halves, through_f16, wide},
};

pub(crate) fn upload(gpu: &Gpu, values: &[f32], shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::F16 => Tensor::upload(gpu, &halves(values), shape),
        _ => Tensor::upload(gpu, values, shape),
    }
    .unwrap()
}

/// Fills all memory of an empty cache with NaN: what is not appended must never count.
pub(crate) fn poison(cache: &KvCache) {
    for tensor in [cache.keys(), cache.values()] {
        let bytes = vec![0xff; tensor.buffer().size() as usize];
        cache.gpu().queue().write_buffer(tensor.buffer(), 0, &bytes);
    }
}

/// A cache, the model of it, and the checks that are due once the commands have run.
struct Machine {
    gpu: Gpu,
    cache: KvCache,
    numbers: Numbers,
    heads: usize,
    input: DType,
    /// Keys as appended, `[Hkv, D]` of each position of each sequence.
    keys: Vec<Vec<Vec<f32>>>,
    /// `[Hkv, Dv]`.
    values: Vec<Vec<Vec<f32>>>,
    /// The position that was written last into each slot of each sequence.
    slots: Vec<Vec<Option<usize>>>,
    encoder: Option<wgpu::CommandEncoder>,
    due: Vec<Due>,
}

struct Due {
    output: Tensor,
    /// `[B, H, Lq, Dv]`.
    truth: Vec<f64>,
    narrow: Vec<f32>,
}

impl Machine {
    fn new(gpu: &Gpu, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let shape = KvCacheShape {
            batch: 1 + numbers.below(4),
            kv_heads: 1 + numbers.below(3),
            capacity: 1 + numbers.below(24),
            head_dim: 1 + numbers.below(10),
            value_dim: 1 + numbers.below(6),
        };
        let dtype = |half| if half { DType::F16 } else { DType::F32 };
        let (stored, input) = (dtype(numbers.chance(0.3)), dtype(numbers.chance(0.3)));
        let mut cache = if numbers.chance(0.5) {
            KvCache::new(gpu, shape, stored)
        } else {
            KvCache::rolling(gpu, shape, stored, 1 + numbers.below(shape.capacity))
        }
        .unwrap();
        poison(&cache);
        let pairs = numbers.below(shape.head_dim / 2 + 1);
        if pairs > 0 {
            let pairing = if numbers.chance(0.5) {
                RotaryPairing::HalfSplit
            } else {
                RotaryPairing::Interleaved
            };
            let options = RotaryOptions::new(2 * pairs).base(50.0).pairing(pairing);
            cache = cache
                .with_rotary(Rotary::new(gpu, options, 1000).unwrap())
                .unwrap();
        }
        Self {
            gpu: gpu.clone(),
            heads: shape.kv_heads * (1 + numbers.below(2)),
            input,
            keys: vec![Vec::new(); shape.batch],
            values: vec![Vec::new(); shape.batch],
            slots: vec![vec![None; shape.capacity]; shape.batch],
            encoder: None,
            due: Vec::new(),
            cache,
            numbers,
        }
    }

    fn stored(&self, values: Vec<f32>) -> Vec<f32> {
        if self.input == DType::F16 || self.cache.dtype() == DType::F16 {
            through_f16(&values)
        } else {
            values
        }
    }

    fn encoder(&mut self) -> wgpu::CommandEncoder {
        self.encoder.take().unwrap_or_else(|| self.gpu.encoder())
    }

    fn step(&mut self) -> Result<(), String> {
        let batch = self.cache.shape().batch;
        match self.numbers.below(12) {
            0..=5 => {
                let rows = self.append()?;
                if rows > 0 && self.numbers.chance(0.7) {
                    self.attend(rows)?;
                }
            }
            6 => {
                let shortest = self.cache.lens().iter().copied().min().unwrap_or(0);
                let by = self.numbers.below(4);
                let allowed = by <= shortest
                    && (0..batch).all(|b| by == 0 || self.may_shorten(b, self.cache.len(b) - by));
                let lengths: Vec<usize> = self
                    .cache
                    .lens()
                    .iter()
                    .map(|len| len.saturating_sub(by))
                    .collect();
                self.shortened(lengths, allowed, |cache| cache.rewind(by))?;
            }
            7 | 8 => {
                let b = self.numbers.below(batch);
                let to = if self.numbers.chance(0.2) {
                    0
                } else {
                    (self.cache.len(b) + 1).saturating_sub(self.numbers.below(6))
                };
                let len = self.cache.len(b);
                let allowed = to == len || to < len && self.may_shorten(b, to);
                let mut lengths = self.cache.lens().to_vec();
                lengths[b] = to;
                self.shortened(lengths, allowed, |cache| {
                    if to == 0 {
                        cache.clear(b)
                    } else {
                        cache.truncate(b, to)
                    }
                })?;
            }
            9 | 10 => {
                let sources: Vec<usize> = if self.numbers.chance(0.3) {
                    let mut sources: Vec<usize> = (0..batch).collect();
                    sources[self.numbers.below(batch)] = self.numbers.below(batch);
                    let moved = sources.iter().enumerate().find(|(to, from)| to != *from);
                    if let Some((to, &from)) = moved {
                        let mut encoder = self.encoder();
                        self.cache
                            .copy_sequence(&mut encoder, from, to)
                            .map_err(|e| e.to_string())?;
                        self.encoder = Some(encoder);
                    }
                    sources
                } else {
                    let sources: Vec<usize> = (0..batch).map(|_| self.numbers.below(batch)).collect();
                    let mut encoder = self.encoder();
                    self.cache
                        .reorder(&mut encoder, &sources)
                        .map_err(|e| e.to_string())?;
                    self.encoder = Some(encoder);
                    sources
                };
                fn of<T: Clone>(all: &[T], sources: &[usize]) -> Vec<T> {
                    sources.iter().map(|&source| all[source].clone()).collect()
                }
                self.keys = of(&self.keys, &sources);
                self.values = of(&self.values, &sources);
                self.slots = of(&self.slots, &sources);
            }
            _ => {
                let rows = 1 + self.numbers.below(self.cache.max_chunk());
                self.attend(rows)?;
            }
        }
        for (b, keys) in self.keys.iter().enumerate() {
            if self.cache.len(b) != keys.len() {
                return Err(format!(
                    "sequence {b}: length {} instead of {}",
                    self.cache.len(b),
                    keys.len()
                ));
            }
        }
        if self.numbers.chance(0.3) {
            self.settle()?;
        }
        Ok(())
    }

    /// Whether all that position `position` and those up to `length` may see is in its slot.
    fn holds(&self, b: usize, position: usize, length: usize) -> bool {
        let Some(window) = self.cache.window() else {
            return true;
        };
        let capacity = self.cache.shape().capacity;
        ((position + 1).saturating_sub(window)..length).all(|p| self.slots[b][p % capacity] == Some(p))
    }

    fn may_shorten(&self, b: usize, length: usize) -> bool {
        self.holds(b, length, length)
    }

    fn shortened(
        &mut self,
        lengths: Vec<usize>,
        allowed: bool,
        call: impl FnOnce(&mut KvCache) -> multihead::Result<()>,
    ) -> Result<(), String> {
        match call(&mut self.cache) {
            Ok(()) if allowed => {
                for (b, length) in lengths.into_iter().enumerate() {
                    self.keys[b].truncate(length);
                    self.values[b].truncate(length);
                    if length == 0 {
                        self.slots[b].fill(None);
                    }
                }
                Ok(())
            }
            Err(Error::Capacity(_)) if !allowed => Ok(()),
            other => Err(format!(
                "to {lengths:?}, which is allowed: {allowed}, gave {other:?}"
            )),
        }
    }

    /// Appends; gives the rows of the tensors, 0 if the cache refused.
    fn append(&mut self) -> Result<usize, String> {
        let shape = self.cache.shape();
        let most = self.numbers.below(self.cache.max_chunk().min(7) + 2);
        let ragged = self.numbers.chance(0.5);
        let counts: Vec<usize> = (0..shape.batch)
            .map(|_| {
                if ragged {
                    self.numbers.below(most + 1)
                } else {
                    most
                }
            })
            .collect();
        let rows = most + if ragged { self.numbers.below(3) } else { 0 };
        let allowed = counts
            .iter()
            .enumerate()
            .all(|(b, &count)| match self.cache.window() {
                Some(_) => count <= self.cache.max_chunk(),
                None => self.cache.len(b) + count <= shape.capacity,
            });
        let tensor = |machine: &mut Self, size: usize| {
            let values = machine
                .numbers
                .normals(shape.batch * shape.kv_heads * rows * size);
            machine.stored(values)
        };
        let (mut key, mut value) = (tensor(self, shape.head_dim), tensor(self, shape.value_dim));
        for (b, &count) in counts.iter().enumerate() {
            // Padding may hold anything.
            for (values, size) in [(&mut key, shape.head_dim), (&mut value, shape.value_dim)] {
                for h in 0..shape.kv_heads {
                    let head = (b * shape.kv_heads + h) * rows * size;
                    values[head..head + (rows - count) * size].fill(f32::NAN);
                }
            }
        }
        let sizes = |size| [shape.batch, shape.kv_heads, rows, size];
        let (k, v) = (
            upload(&self.gpu, &key, &sizes(shape.head_dim), self.input),
            upload(&self.gpu, &value, &sizes(shape.value_dim), self.input),
        );
        let mut encoder = self.encoder();
        let result = if ragged {
            self.cache.append_ragged(&mut encoder, &k, &v, &counts)
        } else {
            self.cache.append(&mut encoder, &k, &v)
        };
        self.encoder = Some(encoder);
        match result {
            Ok(()) if allowed => {}
            Err(Error::Capacity(_)) if !allowed => return Ok(0),
            other => {
                return Err(format!(
                    "append of {counts:?}, which is allowed: {allowed}, gave {other:?}"
                ));
            }
        }
        for (b, &count) in counts.iter().enumerate() {
            for row in rows - count..rows {
                let position = self.keys[b].len();
                let token = |values: &[f32], size: usize| -> Vec<f32> {
                    (0..shape.kv_heads)
                        .flat_map(|h| {
                            let at = ((b * shape.kv_heads + h) * rows + row) * size;
                            values[at..at + size].to_vec()
                        })
                        .collect()
                };
                self.keys[b].push(token(&key, shape.head_dim));
                self.values[b].push(token(&value, shape.value_dim));
                self.slots[b][position % shape.capacity] = Some(position);
            }
        }
        Ok(rows)
    }

    /// One row at its position, rotated if the cache rotates.
    fn rotated<T: reference::Real>(&self, row: &[T], heads: usize, position: usize) -> Vec<T> {
        let Some(rotary) = self.cache.rotary() else {
            return row.to_vec();
        };
        let options = RotaryOptions::new(rotary.rotary_dim()).base(50.0);
        let (cos, sin) = reference::rotary_tables::<T>(&options, position + 1).unwrap();
        let shape = [1, heads, 1, self.cache.shape().head_dim];
        let dim = rotary.rotary_dim();
        reference::rotary(row, shape, &cos, &sin, &[position], dim, rotary.pairing()).unwrap()
    }

    /// Attention of one sequence's last `rows` positions, in `T`.
    fn truth<T: reference::Real>(&self, b: usize, rows: usize, query: &[f32]) -> Vec<T> {
        let shape = self.cache.shape();
        let length = self.keys[b].len();
        let narrow = |values: &[f32]| values.iter().map(|&x| T::from_f32(x)).collect::<Vec<T>>();
        let mut q = narrow(query);
        for row in 0..rows {
            let Some(position) = (length + row).checked_sub(rows) else {
                continue;
            };
            for h in 0..self.heads {
                let at = (h * rows + row) * shape.head_dim;
                let turned = self.rotated(&q[at..at + shape.head_dim], 1, position);
                q[at..at + shape.head_dim].copy_from_slice(&turned);
            }
        }
        let (mut k, mut v) = (Vec::new(), Vec::new());
        let turned: Vec<Vec<T>> = self.keys[b]
            .iter()
            .enumerate()
            .map(|(position, row)| self.rotated(&narrow(row), shape.kv_heads, position))
            .collect();
        for h in 0..shape.kv_heads {
            for (position, key) in turned.iter().enumerate() {
                k.extend_from_slice(&key[h * shape.head_dim..][..shape.head_dim]);
                v.extend(narrow(
                    &self.values[b][position][h * shape.value_dim..][..shape.value_dim],
                ));
            }
        }
        let mut options = AttentionOptions::new().causal(Causal::BottomRight);
        if let Some(window) = self.cache.window() {
            options = options.window(Some(window as u32 - 1), None);
        }
        let call = AttentionShape {
            batch: 1,
            heads: self.heads,
            kv_heads: shape.kv_heads,
            queries: rows,
            keys: length,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
        };
        reference::Attention::new(call, &options, &q, &k, &v)
            .run_output()
            .unwrap()
            .output
    }

    /// Records attention of the last `rows` positions of each sequence.
    fn attend(&mut self, rows: usize) -> Result<(), String> {
        let shape = self.cache.shape();
        // Which of two neighbouring halves a rotated key is rounded to, f32 does not tell.
        if rows == 0 || self.cache.rotary().is_some() && self.cache.dtype() == DType::F16 {
            return Ok(());
        }
        let query = self
            .numbers
            .normals(shape.batch * self.heads * rows * shape.head_dim);
        let sizes = [shape.batch, self.heads, rows, shape.head_dim];
        let mut q = Tensor::upload(&self.gpu, &query, &sizes).unwrap();
        let mut encoder = self.encoder();
        if let Some(rotary) = self.cache.rotary() {
            let rotated = Tensor::zeros(&self.gpu, DType::F32, &sizes).unwrap();
            rotary
                .record(&mut encoder, &q, self.cache.query_positions(), &rotated)
                .map_err(|error| error.to_string())?;
            q = rotated;
        }
        let output = Tensor::zeros(
            &self.gpu,
            DType::F32,
            &[shape.batch, self.heads, rows, shape.value_dim],
        )
        .unwrap();
        let mut inputs =
            AttentionInputs::new(&q, self.cache.keys(), self.cache.values()).kv_lengths(self.cache.lengths());
        let mask = match self.cache.window() {
            None => None,
            Some(_) => {
                let expected = rows <= self.cache.max_chunk()
                    && (0..shape.batch).all(|b| {
                        let length = self.keys[b].len();
                        self.holds(b, length.saturating_sub(rows), length)
                    });
                match self.cache.mask(rows) {
                    Ok(mask) if expected => Some(mask),
                    Err(Error::Capacity(_)) if !expected => {
                        self.encoder = Some(encoder);
                        return Ok(());
                    }
                    other => {
                        return Err(format!(
                            "a mask of {rows} rows, possible: {expected}, gave {other:?}"
                        ));
                    }
                }
            }
        };
        let mut options = AttentionOptions::new();
        match &mask {
            Some(mask) => inputs = inputs.mask(mask),
            None => options = options.causal(Causal::BottomRight),
        }
        let path = if self.numbers.chance(0.5) {
            AttentionPath::Fused
        } else {
            AttentionPath::Composed
        };
        Attention::new(&self.gpu, options)
            .unwrap()
            .with_path(path)
            .record(&mut encoder, &inputs, &AttentionOutputs::new(&output))
            .map_err(|error| error.to_string())?;
        self.encoder = Some(encoder);
        let (mut truth, mut narrow) = (Vec::new(), Vec::new());
        for (b, query) in query.chunks(self.heads * rows * shape.head_dim).enumerate() {
            truth.extend(self.truth::<f64>(b, rows, query));
            narrow.extend(self.truth::<f32>(b, rows, query));
        }
        self.due.push(Due {
            output,
            truth,
            narrow,
        });
        Ok(())
    }

    /// Submits, and compares what was attended and what the cache holds.
    fn settle(&mut self) -> Result<(), String> {
        if let Some(encoder) = self.encoder.take() {
            self.gpu.submit(encoder).unwrap();
        }
        for due in self.due.drain(..) {
            let got = download(&due.output);
            check_bound("attention", &got, &due.narrow, &due.truth, false)?;
        }
        let shape = self.cache.shape();
        let longest = self.keys.iter().map(Vec::len).max().unwrap_or(0);
        let used = longest.min(shape.capacity);
        let (mut got, mut truth, mut narrow) = (Vec::new(), Vec::new(), Vec::new());
        for (tensor, rows, size, turned) in [
            (self.cache.keys(), &self.keys, shape.head_dim, true),
            (self.cache.values(), &self.values, shape.value_dim, false),
        ] {
            if tensor.shape() != [shape.batch, shape.kv_heads, used, size] {
                return Err(format!("a view of {:?} with {used} slots in use", tensor.shape()));
            }
            let held = download(tensor);
            for (b, rows) in rows.iter().enumerate() {
                for (position, row) in rows.iter().enumerate() {
                    let slot = position % shape.capacity;
                    if self.slots[b][slot] != Some(position) {
                        continue;
                    }
                    let plain: Vec<f64> = wide(row);
                    let (exact, rounded) = if turned {
                        (
                            self.rotated(&plain, shape.kv_heads, position),
                            self.rotated(row, shape.kv_heads, position),
                        )
                    } else {
                        (plain, row.clone())
                    };
                    for h in 0..shape.kv_heads {
                        let at = ((b * shape.kv_heads + h) * used + slot) * size;
                        got.extend_from_slice(&held[at..at + size]);
                        truth.extend_from_slice(&exact[h * size..][..size]);
                        narrow.extend_from_slice(&rounded[h * size..][..size]);
                    }
                }
            }
        }
        if self.cache.rotary().is_none() {
            return match got.iter().zip(&narrow).position(|(got, held)| got != held) {
                Some(at) => Err(format!("element {at} is {} instead of {}", got[at], narrow[at])),
                None => Ok(()),
            };
        }
        check_bound(
            "contents",
            &got,
            &narrow,
            &truth,
            self.cache.dtype() == DType::F16,
        )
    }
}

proptest! {
    #![proptest_config(support::property(400))]

    /// Any sequence of operations leaves what the model holds, and attention sees it, also when many operations share an
    /// encoder.
    #[test]
    fn any_operations_agree_with_the_model(seed in any::<u64>(), steps in 1usize..40, on_plain in any::<bool>()) {
        let mut machine = Machine::new(if on_plain { plain() } else { gpu() }, seed);
        for step in 0..steps {
            machine.step().map_err(|error| TestCaseError::fail(format!("step {step}: {error}")))?;
        }
        machine.settle().map_err(TestCaseError::fail)?;
    }
}

/// A sequence of `tokens` in chunks, everything in one encoder, against one causal pass.
fn chunks_agree(
    gpu: &Gpu,
    shape: KvCacheShape,
    heads: usize,
    chunks: &[usize],
    dtype: DType,
    window: Option<usize>,
) -> Result<(), String> {
    let tokens: usize = chunks.iter().sum();
    let call = AttentionShape {
        batch: shape.batch,
        heads,
        kv_heads: shape.kv_heads,
        queries: tokens,
        keys: tokens,
        head_dim: shape.head_dim,
        value_dim: shape.value_dim,
    };
    let mut numbers = Numbers::new(tokens as u64);
    let mut store = |shape: [usize; 4]| {
        let values = numbers.normals(shape.iter().product());
        if dtype == DType::F16 {
            through_f16(&values)
        } else {
            values
        }
    };
    let (q, k, v) = (store(call.query()), store(call.key()), store(call.value()));
    let mut options = AttentionOptions::new().causal(Causal::BottomRight);
    if let Some(window) = window {
        options = options.window(Some(window as u32 - 1), None);
    }
    let (wide_q, wide_k, wide_v) = (wide(&q), wide(&k), wide(&v));
    let truth = reference::Attention::new(call, &options, &wide_q, &wide_k, &wide_v)
        .run_output()
        .unwrap();
    let narrow = reference::Attention::new(call, &options, &q, &k, &v)
        .run_output()
        .unwrap();

    let [q, k, v] = [(&q, call.query()), (&k, call.key()), (&v, call.value())]
        .map(|(values, shape)| upload(gpu, values, &shape, dtype));
    let whole = upload(gpu, &vec![-7.0; call.outputs() as usize], &call.output(), dtype);
    let mut cache = match window {
        Some(window) => KvCache::rolling(gpu, shape, dtype, window),
        None => KvCache::new(gpu, shape, dtype),
    }
    .map_err(|error| error.to_string())?;
    poison(&cache);
    let plain_options = if window.is_some() {
        AttentionOptions::new()
    } else {
        options
    };
    let attention = Attention::new(gpu, plain_options).unwrap();
    let mut encoder = gpu.encoder();
    let mut at = 0;
    for &chunk in chunks {
        let part = |tensor: &Tensor| tensor.slice(2, at..at + chunk).unwrap();
        cache
            .append(&mut encoder, &part(&k), &part(&v))
            .map_err(|error| error.to_string())?;
        let (q, output) = (part(&q), part(&whole));
        let mask = window.map(|_| cache.mask(chunk).unwrap());
        let mut inputs = AttentionInputs::new(&q, cache.keys(), cache.values()).kv_lengths(cache.lengths());
        inputs.mask = mask.as_ref();
        attention
            .record(&mut encoder, &inputs, &AttentionOutputs::new(&output))
            .map_err(|error| error.to_string())?;
        at += chunk;
    }
    gpu.submit(encoder).unwrap();
    let half = dtype == DType::F16;
    check_bound("output", &download(&whole), &narrow.output, &truth.output, half)
}

#[test]
fn prefill_and_steps_equal_one_causal_pass() {
    let mut rows = Vec::new();
    let mut long = vec![70];
    long.extend([1; 20]);
    for (device, gpu) in [("own", gpu()), ("plain", plain())] {
        for dtype in [DType::F32, DType::F16] {
            for (name, chunks) in [
                ("steps", &[1; 9][..]),
                ("prefill and steps", &long),
                ("chunks", &[16, 33, 2, 17, 1]),
                ("one chunk", &[40]),
            ] {
                let tokens = chunks.iter().sum::<usize>();
                for (kind, capacity, window) in [
                    ("as large as used", tokens, None),
                    ("larger", 3 * tokens + 1, None),
                    (
                        "rolling",
                        tokens.min(7) + chunks.iter().max().unwrap() - 1,
                        Some(tokens.min(7)),
                    ),
                ] {
                    let shape = KvCacheShape::new(2, 2, capacity, 13);
                    let result = chunks_agree(gpu, shape, 4, chunks, dtype, window);
                    rows.push((format!("{device}, {dtype:?}, {name}, {kind}"), result));
                }
            }
        }
    }
    all_rows(rows);
}

/// A rolling cache as large as its window needs no mask for one query at a time, and runs on for ever.
#[test]
fn single_steps_of_a_full_rolling_cache_need_no_mask() {
    let (window, tokens) = (5, 23);
    let mut numbers = Numbers::new(8);
    let mut cache = KvCache::rolling(gpu(), KvCacheShape::new(1, 1, window, 4), DType::F32, window).unwrap();
    poison(&cache);
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let [q, k, v] = [0; 3].map(|_| numbers.normals(tokens * 4));
    let mut got = Vec::new();
    for at in 0..tokens {
        let [q, k, v] =
            [&q, &k, &v].map(|x| Tensor::upload(gpu(), &x[at * 4..][..4], &[1, 1, 1, 4]).unwrap());
        let mut encoder = gpu().encoder();
        cache.append(&mut encoder, &k, &v).unwrap();
        let output = Tensor::zeros(gpu(), DType::F32, &[1, 1, 1, 4]).unwrap();
        let inputs = AttentionInputs::new(&q, cache.keys(), cache.values()).kv_lengths(cache.lengths());
        attention
            .record(&mut encoder, &inputs, &AttentionOutputs::new(&output))
            .unwrap();
        gpu().submit(encoder).unwrap();
        got.extend(download(&output));
    }
    let options = AttentionOptions::new()
        .causal(Causal::TopLeft)
        .window(Some(window as u32 - 1), None);
    let shape = AttentionShape::new(1, 1, tokens, 4);
    let (wq, wk, wv) = (wide(&q), wide(&k), wide(&v));
    let truth = reference::Attention::new(shape, &options, &wq, &wk, &wv)
        .run_output()
        .unwrap();
    let narrow = reference::Attention::new(shape, &options, &q, &k, &v)
        .run_output()
        .unwrap();
    check_bound("output", &got, &narrow.output, &truth.output, false).unwrap();
    assert_eq!((cache.len(0), cache.keys().shape()[2]), (tokens, window));
}

/// Steps build nothing anew and hold what scratch the capacity asks for from the first one on.
#[test]
fn a_thousand_steps_build_no_pipeline_and_hold_scratch_flat() {
    let gpu = Gpu::new().unwrap();
    let attention = Attention::new(&gpu, AttentionOptions::new().causal(Causal::BottomRight)).unwrap();
    attention.warm_up(DType::F32, 8, 8).unwrap();
    let mut pipelines = Vec::new();
    for capacity in [1_000, 50_000] {
        gpu.release_scratch();
        let mut cache = KvCache::new(&gpu, KvCacheShape::new(1, 1, capacity, 8), DType::F32).unwrap();
        let rotary = Rotary::new(&gpu, RotaryOptions::new(8), 1_000).unwrap();
        cache = cache.with_rotary(rotary).unwrap();
        cache.warm_up(DType::F32).unwrap();
        let token = Tensor::upload(&gpu, &[0.5f32; 8], &[1, 1, 1, 8]).unwrap();
        let output = Tensor::zeros(&gpu, DType::F32, &[1, 2, 1, 8]).unwrap();
        let q = token.broadcast_to(&[1, 2, 1, 8]).unwrap();
        let step = |cache: &mut KvCache, tokens: &Tensor| {
            let mut encoder = gpu.encoder();
            cache.append(&mut encoder, tokens, tokens).unwrap();
            let inputs = AttentionInputs::new(&q, cache.keys(), cache.values()).kv_lengths(cache.lengths());
            attention
                .record(&mut encoder, &inputs, &AttentionOutputs::new(&output))
                .unwrap();
            gpu.submit(encoder).unwrap();
        };
        step(&mut cache, &token);
        cache.clear(0).unwrap();
        let before = (gpu.pipelines(), gpu.scratch_bytes());
        for length in 1..=1_000 {
            step(&mut cache, &token);
            assert_eq!(cache.keys().shape()[2], length);
        }
        assert_eq!((gpu.pipelines(), gpu.scratch_bytes()), before);
        pipelines.push(before.0);
    }
    assert_eq!(pipelines[0], pipelines[1]);
    gpu.wait().unwrap();
}

/// A refused append records nothing and leaves lengths and contents as they were.
#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let gpu = gpu();
    let shape = KvCacheShape {
        value_dim: 3,
        ..KvCacheShape::new(2, 2, 6, 4)
    };
    let zeros = |shape: &[usize]| Tensor::zeros(gpu, DType::F32, shape).unwrap();
    let ones = |shape: &[usize]| Tensor::upload(gpu, &vec![1.0f32; shape.iter().product()], shape).unwrap();
    let rotary = |positions| Rotary::new(gpu, RotaryOptions::new(4), positions).unwrap();
    let mut cache = KvCache::new(gpu, shape, DType::F32).unwrap();
    let mut encoder = gpu.encoder();
    cache
        .append_ragged(&mut encoder, &ones(&[2, 2, 4, 4]), &ones(&[2, 2, 4, 3]), &[4, 2])
        .unwrap();
    gpu.submit(encoder).unwrap();
    let held = |cache: &KvCache| {
        (
            cache.lens().to_vec(),
            download(cache.keys()),
            download(cache.values()),
        )
    };
    let before = held(&cache);
    let other = Gpu::from_device(gpu.device(), gpu.queue()).unwrap();
    let foreign = Tensor::zeros(&other, DType::F32, &[2, 2, 1, 4]).unwrap();
    let mut encoder = gpu.encoder();
    let (k, v) = (zeros(&[2, 2, 3, 4]), zeros(&[2, 2, 3, 3]));
    let own = cache.keys().slice(2, 0..1).unwrap();
    for (key, value, counts, says) in [
        (
            &k,
            &v,
            vec![3, 3],
            "sequence 0 holds 4 positions and would get 3 more",
        ),
        (
            &k,
            &v,
            vec![0, 4],
            "4 positions for sequence 1 from tensors of 3 rows",
        ),
        (&k, &v, vec![1], "1 counts for 2 sequences"),
        (
            &k,
            &zeros(&[2, 2, 2, 3]),
            vec![1, 1],
            "value has shape [2, 2, 2, 3]",
        ),
        (
            &zeros(&[2, 1, 3, 4]),
            &v,
            vec![1, 1],
            "key has shape [2, 1, 3, 4]",
        ),
        (&zeros(&[2, 3, 4]), &v, vec![1, 1], "key has shape [2, 3, 4]"),
        (&foreign, &zeros(&[2, 2, 1, 3]), vec![1, 1], "another device"),
        (
            &Tensor::zeros(gpu, DType::U32, &[2, 2, 3, 4]).unwrap(),
            &v,
            vec![1, 1],
            "F32 or F16",
        ),
        (&own, &zeros(&[2, 2, 1, 3]), vec![1, 1], "the cache's own memory"),
    ] {
        let error = cache
            .append_ragged(&mut encoder, key, value, &counts)
            .unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    for (result, says) in [
        (cache.append(&mut encoder, &k, &v), "the cache was made for 6"),
        (cache.rewind(3), "sequence 1, which has 2"),
        (cache.truncate(1, 3), "it has 2"),
        (cache.truncate(2, 0), "sequence 2 of a cache of 2"),
        (cache.clear(9), "sequence 9"),
        (cache.reorder(&mut encoder, &[0]), "1 sources for 2 sequences"),
        (cache.reorder(&mut encoder, &[0, 2]), "sequence 2"),
        (cache.copy_sequence(&mut encoder, 5, 0), "sequence 5"),
        (cache.copy_sequence(&mut encoder, 0, 5), "sequence 5"),
        (cache.mask(1).map(|_| ()), "not rolling"),
    ] {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    gpu.submit(encoder).unwrap();
    assert_eq!(held(&cache), before);
    assert!(
        cache
            .with_rotary(rotary(8))
            .unwrap_err()
            .to_string()
            .contains("empty cache")
    );

    let new = |window| KvCache::rolling(gpu, shape, DType::F32, window);
    for window in [0, 7] {
        assert!(matches!(new(window), Err(Error::Option(_))));
    }
    let mut rolling = new(4).unwrap().with_rotary(rotary(8)).unwrap();
    let mut encoder = gpu.encoder();
    let (one_k, one_v) = (ones(&[2, 2, 1, 4]), ones(&[2, 2, 1, 3]));
    let too_long = rolling.append(&mut encoder, &zeros(&[2, 2, 4, 4]), &zeros(&[2, 2, 4, 3]));
    assert!(too_long.unwrap_err().to_string().contains("at most 3 new ones"));
    for _ in 0..8 {
        rolling.append(&mut encoder, &one_k, &one_v).unwrap();
    }
    let beyond = rolling.append(&mut encoder, &one_k, &one_v).unwrap_err();
    assert!(beyond.to_string().contains("rotary tables hold 8"), "{beyond}");
    assert!(rolling.mask(4).unwrap_err().to_string().contains("at most 3"));
    let back = rolling.rewind(4).unwrap_err();
    assert!(back.to_string().contains("go back by less"), "{back}");
    rolling.rewind(3).unwrap();
    assert_eq!(rolling.lens(), [5, 5]);
    gpu.submit(encoder).unwrap();

    let own_tables =
        Rotary::from_tables(RotaryPairing::HalfSplit, zeros(&[2, 6, 2]), zeros(&[2, 6, 2])).unwrap();
    let empty = || KvCache::new(gpu, shape, DType::F32).unwrap();
    assert!(empty().with_rotary(own_tables).is_err());
    let wide_rotary = Rotary::new(gpu, RotaryOptions::new(6), 8).unwrap();
    assert!(empty().with_rotary(wide_rotary).is_err());
    assert!(matches!(
        KvCache::new(gpu, shape, DType::U32),
        Err(Error::DType(_))
    ));
    let huge = KvCacheShape::new(1 << 10, 1 << 10, 1 << 20, 128);
    assert!(matches!(
        KvCache::new(gpu, huge, DType::F16),
        Err(Error::Limit { .. })
    ));
    let endless = KvCacheShape::new(1, 1, 1 << 30, 1);
    assert!(matches!(
        KvCache::new(gpu, endless, DType::F16),
        Err(Error::Shape(_))
    ));
}

/// Sizes without elements are allowed everywhere.
#[test]
fn empty_caches_do_nothing() {
    for shape in [
        KvCacheShape::new(0, 2, 8, 4),
        KvCacheShape::new(2, 0, 8, 4),
        KvCacheShape::new(2, 2, 0, 4),
        KvCacheShape::new(2, 2, 8, 0),
    ] {
        let mut cache = KvCache::new(gpu(), shape, DType::F16).unwrap();
        let tokens = 2.min(shape.capacity);
        let kv = Tensor::zeros(
            gpu(),
            DType::F32,
            &[shape.batch, shape.kv_heads, tokens, shape.head_dim],
        )
        .unwrap();
        let mut encoder = gpu().encoder();
        cache.append(&mut encoder, &kv, &kv).unwrap();
        cache.reorder(&mut encoder, &vec![0; shape.batch]).unwrap();
        let inputs = AttentionInputs::new(&kv, cache.keys(), cache.values()).kv_lengths(cache.lengths());
        let output = Tensor::zeros(gpu(), DType::F32, kv.shape()).unwrap();
        Attention::new(gpu(), AttentionOptions::new())
            .unwrap()
            .record(&mut encoder, &inputs, &AttentionOutputs::new(&output))
            .unwrap();
        gpu().submit(encoder).unwrap();
        assert_eq!(cache.lens(), vec![tokens; shape.batch]);
    }
}

/// Halves of odd rows share words between heads and sequences: neither appending nor moving disturbs a neighbour.
#[test]
fn odd_rows_of_halves_keep_to_themselves() {
    for gpu in [gpu(), plain()] {
        let shape = KvCacheShape::new(3, 3, 3, 1);
        let mut cache = KvCache::new(gpu, shape, DType::F16).unwrap();
        let row = |at: usize| {
            let values: Vec<f16> = (0..9)
                .map(|head| f16::from_f32((head * 10 + at) as f32))
                .collect();
            Tensor::upload(gpu, &values, &[3, 3, 1, 1]).unwrap()
        };
        let mut encoder = gpu.encoder();
        for at in 0..3 {
            cache.append(&mut encoder, &row(at), &row(at)).unwrap();
        }
        cache.reorder(&mut encoder, &[1, 2, 0]).unwrap();
        gpu.submit(encoder).unwrap();
        let expected: Vec<f32> = (0..27)
            .map(|at| ((at / 3 + 3) % 9 * 10 + at % 3) as f32)
            .collect();
        assert_eq!(download(cache.keys()), expected);
        assert_eq!(download(cache.values()), expected);
    }
}

/// Queries stand at the end of their sequence, each sequence for itself.
#[test]
fn query_positions_are_the_last() {
    let mut cache = KvCache::new(gpu(), KvCacheShape::new(2, 1, 8, 2), DType::F32).unwrap();
    let kv = Tensor::zeros(gpu(), DType::F32, &[2, 1, 5, 2]).unwrap();
    let mut encoder = gpu().encoder();
    cache.append_ragged(&mut encoder, &kv, &kv, &[5, 3]).unwrap();
    gpu().submit(encoder).unwrap();
    let rotary = Rotary::new(gpu(), RotaryOptions::new(2), 8).unwrap();
    let q = Tensor::upload(gpu(), &[1.0f32, 0.0].repeat(4), &[2, 1, 2, 2]).unwrap();
    let got = download(&rotary.run(&q, cache.query_positions()).unwrap());
    for (row, position) in [3, 4, 1, 2].into_iter().enumerate() {
        let one = q.slice(0, 0..1).unwrap().slice(2, 0..1).unwrap();
        let expected = download(&rotary.run(&one, RotaryPositions::Start(position)).unwrap());
        assert_eq!(got[2 * row..][..2], expected);
    }
}
