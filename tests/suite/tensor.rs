//! Tensors: views against plain indexing, every element type and odd counts, callers' buffers with guards around
//! what is read and written.

use half::f16;
use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, Causal, DType, Element, Gpu, KvLengths,
    Linear, Mask, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, Tensor,
    wgpu,
};
use proptest::prelude::*;

use crate::{
    device::default_gpu,
    support::{self, Numbers, gpu},
};

/// A view as a list of the numbers of the elements that it shows, in row-major order.
#[derive(Debug, Clone)]
struct Plain {
    shape: Vec<usize>,
    elements: Vec<usize>,
}

impl Plain {
    fn new(shape: &[usize]) -> Self {
        Self {
            shape: shape.to_vec(),
            elements: (0..shape.iter().product()).collect(),
        }
    }

    /// A view of another shape whose element at `index` is this one's at `from(index)`.
    fn gather(&self, shape: &[usize], from: impl Fn(&[usize]) -> Vec<usize>) -> Self {
        let count: usize = shape.iter().product();
        let elements = (0..count).map(|flat| {
            let mut rest = flat;
            let mut index = vec![0; shape.len()];
            for (at, &size) in index.iter_mut().zip(shape).rev() {
                *at = rest % size;
                rest /= size;
            }
            let flat = from(&index)
                .iter()
                .zip(&self.shape)
                .fold(0, |flat, (&at, &size)| {
                    assert!(at < size, "the model reads outside");
                    flat * size + at
                });
            self.elements[flat]
        });
        Self {
            elements: elements.collect(),
            shape: shape.to_vec(),
        }
    }

    fn split_heads(&self, heads: usize) -> Self {
        let whole = if self.shape.len() == 2 {
            self.reshape(&[&[1], &self.shape[..]].concat())
        } else {
            self.clone()
        };
        let [batch, rows, width] = whole.shape[..] else {
            unreachable!()
        };
        let head_dim = width / heads;
        whole.gather(&[batch, heads, rows, head_dim], |i| {
            vec![i[0], i[2], i[1] * head_dim + i[3]]
        })
    }

    fn merge_heads(&self) -> Self {
        let [batch, heads, rows, head_dim] = self.shape[..] else {
            unreachable!()
        };
        self.gather(&[batch, rows, heads * head_dim], |i| {
            vec![i[0], i[2] / head_dim, i[1], i[2] % head_dim]
        })
    }

    fn permute(&self, axes: &[usize]) -> Self {
        let shape: Vec<usize> = axes.iter().map(|&axis| self.shape[axis]).collect();
        self.gather(&shape, |index| {
            let mut from = vec![0; index.len()];
            for (&axis, &at) in axes.iter().zip(index) {
                from[axis] = at;
            }
            from
        })
    }

    fn slice(&self, axis: usize, start: usize, end: usize) -> Self {
        let mut shape = self.shape.clone();
        shape[axis] = end - start;
        self.gather(&shape, |index| {
            let mut from = index.to_vec();
            from[axis] += start;
            from
        })
    }

    fn reshape(&self, shape: &[usize]) -> Self {
        Self {
            shape: shape.to_vec(),
            elements: self.elements.clone(),
        }
    }

    fn broadcast_to(&self, shape: &[usize]) -> Self {
        let missing = shape.len() - self.shape.len();
        self.gather(shape, |index| {
            index[missing..]
                .iter()
                .zip(&self.shape)
                .map(|(&at, &size)| if size == 1 { 0 } else { at })
                .collect()
        })
    }
}

/// The tensor holds its elements' numbers, as far as its type can count.
fn check_view(tensor: &Tensor, plain: &Plain) -> Result<(), TestCaseError> {
    fn compare<T: Element + PartialEq + std::fmt::Debug>(
        tensor: &Tensor,
        plain: &Plain,
        value: impl Fn(usize) -> T,
    ) -> Result<(), TestCaseError> {
        let expected: Vec<T> = plain.elements.iter().map(|&element| value(element)).collect();
        let got = tensor.download::<T>().unwrap();
        prop_assert!(
            got == expected,
            "{:?} shows {:?}, expected {:?}",
            tensor.shape(),
            got,
            expected
        );
        Ok(())
    }
    prop_assert_eq!(tensor.shape(), &plain.shape[..]);
    prop_assert_eq!(tensor.len(), plain.elements.len());
    match tensor.dtype() {
        DType::F32 => compare(tensor, plain, |i| i as f32),
        DType::F16 => compare(tensor, plain, |i| f16::from_f32(i as f32)),
        DType::Bool => compare(tensor, plain, |i| i as u8),
        _ => compare(tensor, plain, |i| i as u32),
    }
}

/// Elements `0..count` of a type.
fn counted(dtype: DType, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let gpu = gpu();
    match dtype {
        DType::F32 => Tensor::upload(gpu, &(0..count).map(|i| i as f32).collect::<Vec<_>>(), shape),
        DType::F16 => Tensor::upload(
            gpu,
            &(0..count).map(|i| f16::from_f32(i as f32)).collect::<Vec<_>>(),
            shape,
        ),
        DType::Bool => Tensor::upload(gpu, &(0..count).map(|i| i as u8).collect::<Vec<_>>(), shape),
        _ => Tensor::upload(gpu, &(0..count).map(|i| i as u32).collect::<Vec<_>>(), shape),
    }
    .unwrap()
}

const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::Bool, DType::U32];

proptest! {
    #![proptest_config(support::property(300))]

    /// Any chain of views shows what plain indexing shows.
    #[test]
    fn views_agree_with_plain_indexing(seed: u64) {
        let mut numbers = Numbers::new(seed);
        let shape: Vec<usize> = (0..1 + numbers.below(4)).map(|_| numbers.below(6)).collect();
        let mut plain = Plain::new(&shape);
        let mut tensor = counted(TYPES[numbers.below(4)], &shape);
        check_view(&tensor, &plain)?;
        for _ in 0..4 {
            let rank = plain.shape.len();
            match numbers.below(6) {
                0 if rank == 2 || rank == 3 => {
                    let width = plain.shape[rank - 1];
                    let heads = 1 + numbers.below(width.max(3));
                    if width.is_multiple_of(heads) {
                        tensor = tensor.split_heads(heads).unwrap();
                        plain = plain.split_heads(heads);
                    }
                }
                1 if rank == 4 => {
                    // Only some layouts can be merged without a copy; the usual one must.
                    if let Ok(merged) = tensor.merge_heads() {
                        tensor = merged;
                        plain = plain.merge_heads();
                    } else {
                        let usual = tensor.is_contiguous() && plain.shape[2] == 1;
                        prop_assert!(!usual && plain.shape[1] > 1, "{tensor:?}");
                    }
                }
                2 => {
                    let mut axes: Vec<usize> = (0..rank).collect();
                    for i in (1..rank).rev() {
                        axes.swap(i, numbers.below(i + 1));
                    }
                    tensor = tensor.permute(&axes).unwrap();
                    plain = plain.permute(&axes);
                }
                3 => {
                    let axis = numbers.below(rank);
                    let start = numbers.below(plain.shape[axis] + 1);
                    let end = start + numbers.below(plain.shape[axis] - start + 1);
                    tensor = tensor.slice(axis, start..end).unwrap();
                    plain = plain.slice(axis, start, end);
                }
                4 => {
                    let count = plain.elements.len();
                    let shape = if count.is_multiple_of(2) { vec![2, count / 2] } else { vec![1, count, 1] };
                    let reshaped = tensor.reshape(&shape);
                    prop_assert_eq!(reshaped.is_ok(), tensor.is_contiguous());
                    if let Ok(reshaped) = reshaped {
                        tensor = reshaped;
                        plain = plain.reshape(&shape);
                    }
                }
                _ => {
                    let mut shape = plain.shape.clone();
                    for size in &mut shape {
                        if *size == 1 {
                            *size = numbers.below(4);
                        }
                    }
                    if rank < 4 && numbers.chance(0.5) {
                        shape.insert(0, 2);
                    }
                    tensor = tensor.broadcast_to(&shape).unwrap();
                    plain = plain.broadcast_to(&shape);
                }
            }
            check_view(&tensor, &plain)?;
        }
    }
}

/// Splitting and merging heads undo each other and move nothing.
#[test]
fn heads_split_and_merge() {
    let x = counted(DType::F32, &[2, 3, 8]);
    let heads = x.split_heads(4).unwrap();
    assert_eq!(
        (heads.shape(), heads.strides()),
        (&[2, 4, 3, 2][..], &[24, 2, 8, 1][..])
    );
    assert_eq!(heads.buffer(), x.buffer());
    let merged = heads.merge_heads().unwrap();
    assert_eq!(merged, x);
    let row = counted(DType::F32, &[3, 8]).split_heads(2).unwrap();
    assert_eq!(row.shape(), [1, 2, 3, 4]);
    assert_eq!(
        row.slice(1, 1..2).unwrap().download::<f32>().unwrap()[..4],
        [4.0, 5.0, 6.0, 7.0]
    );
}

#[test]
fn odd_counts_and_no_elements_come_back() {
    for count in [0, 1, 2, 3, 4, 5, 7, 255, 257] {
        for dtype in TYPES {
            let tensor = counted(dtype, &[count]);
            assert_eq!((tensor.len(), tensor.is_empty()), (count, count == 0));
            check_view(&tensor, &Plain::new(&[count])).unwrap();
        }
        let zeros = Tensor::zeros(gpu(), DType::F16, &[count]).unwrap();
        assert_eq!(zeros.download::<f16>().unwrap(), vec![f16::ZERO; count]);
    }
    for shape in [&[0, 3][..], &[3, 0], &[2, 0, 5, 7], &[0, 0, 0, 0]] {
        let tensor = Tensor::zeros(gpu(), DType::U32, shape).unwrap();
        assert_eq!((tensor.len(), tensor.download::<u32>().unwrap().len()), (0, 0));
        assert!(tensor.is_contiguous());
    }
    let scalar = Tensor::upload(gpu(), &[7u32], &[]).unwrap();
    assert_eq!((scalar.len(), scalar.download::<u32>()), (1, Ok(vec![7])));
}

/// Bits that stand before, between and behind a tensor's elements: a NaN in f32, in f16 and in neither's way.
const GUARD: u32 = 0x7e5a_7e5a;

/// A buffer full of guards.
fn guards(gpu: &Gpu, bytes: u64) -> wgpu::Buffer {
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let words = vec![GUARD; bytes as usize / 4];
    gpu.queue().write_buffer(&buffer, 0, bytemuck::cast_slice(&words));
    buffer
}

/// A tensor in the middle of a larger buffer, with strides, and guards everywhere else.
struct Guarded {
    tensor: Tensor,
    before: Vec<u8>,
}

impl Guarded {
    /// Room for `shape` with these strides from element `start` on.
    fn room(gpu: &Gpu, dtype: DType, start: usize, shape: &[usize], strides: &[usize]) -> Self {
        let last: usize = shape
            .iter()
            .zip(strides)
            .map(|(size, stride)| size.saturating_sub(1) * stride)
            .sum();
        let bytes = ((start + last + 1) * dtype.size() + 64).next_multiple_of(4) as u64;
        let buffer = guards(gpu, bytes);
        let offset = (start * dtype.size()) as u64;
        let tensor = Tensor::from_buffer_strided(gpu, &buffer, offset, dtype, shape, strides).unwrap();
        let before = bytes_of(&tensor);
        Self { tensor, before }
    }

    /// The values, placed there.
    fn holding<T: Element>(
        gpu: &Gpu,
        values: &[T],
        start: usize,
        shape: &[usize],
        strides: &[usize],
    ) -> Self {
        let mut guarded = Self::room(gpu, T::DTYPE, start, shape, strides);
        let size = T::DTYPE.size();
        for (at, value) in positions(shape, strides).into_iter().zip(values) {
            let byte = (start + at) * size;
            guarded.before[byte..byte + size].copy_from_slice(bytemuck::bytes_of(value));
        }
        gpu.queue()
            .write_buffer(guarded.tensor.buffer(), 0, &guarded.before);
        guarded
    }

    /// Whether all but the tensor's own elements is as it was.
    fn check_guards(&self, what: &str) -> Result<(), String> {
        let size = self.tensor.dtype().size();
        let mut after = bytes_of(&self.tensor);
        let start = self.tensor.offset() as usize;
        for at in positions(self.tensor.shape(), self.tensor.strides()) {
            let own = start + at * size..start + (at + 1) * size;
            after[own.clone()].copy_from_slice(&self.before[own]);
        }
        let changed: Vec<usize> = (0..after.len())
            .filter(|&at| after[at] != self.before[at])
            .collect();
        if changed.is_empty() {
            return Ok(());
        }
        Err(format!("{what}: bytes {changed:?} beside the tensor changed"))
    }

    /// Whether nothing changed at all.
    fn check_unchanged(&self, what: &str) -> Result<(), String> {
        if bytes_of(&self.tensor) == self.before {
            return Ok(());
        }
        Err(format!("{what}: an input changed"))
    }
}

/// The whole buffer under a tensor.
fn bytes_of(tensor: &Tensor) -> Vec<u8> {
    let words = tensor.buffer().size() as usize / 4;
    let whole = Tensor::from_buffer(tensor.gpu(), tensor.buffer(), 0, DType::U32, &[words]).unwrap();
    bytemuck::cast_slice(&whole.download::<u32>().unwrap()).to_vec()
}

/// Element offsets of a strided shape in row-major order.
fn positions(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    shape
        .iter()
        .zip(strides)
        .fold(vec![0], |outer, (&size, &stride)| {
            outer
                .iter()
                .flat_map(|at| (0..size).map(move |i| at + i * stride))
                .collect()
        })
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

/// Downloads of the middle of a buffer: the elements and nothing else, at every odd offset.
#[test]
fn callers_buffers_are_read_at_any_offset() {
    fn check<T: Element + PartialEq + std::fmt::Debug>(values: &[T]) {
        for start in [0, 1, 2, 3, 5, 64, 127, 301] {
            for shape in [[1, 1], [1, 3], [3, 1], [5, 3]] {
                let count = shape[0] * shape[1];
                for strides in [row_major(&shape), vec![7, 2], vec![1, 6]] {
                    let guarded = Guarded::holding(gpu(), &values[..count], start, &shape, &strides);
                    assert_eq!(
                        guarded.tensor.download::<T>().unwrap(),
                        &values[..count],
                        "{start} {shape:?} {strides:?}"
                    );
                    guarded.check_unchanged("download").unwrap();
                }
            }
        }
    }
    let values = Numbers::new(2).normals(15);
    check(&values);
    check(&support::halves(&values));
    check(&(1u8..=15).collect::<Vec<_>>());
    check(&(1u32..=15).collect::<Vec<_>>());
}

/// How the tensors of one call lie in memory: start and strides of query, key, value and output.
struct Layout {
    name: &'static str,
    starts: [usize; 4],
    strides: [fn([usize; 4]) -> Vec<usize>; 4],
}

fn dense(shape: [usize; 4]) -> Vec<usize> {
    row_major(&shape)
}

/// Every other element: gaps in the last axis.
fn gaps(shape: [usize; 4]) -> Vec<usize> {
    row_major(&shape).into_iter().map(|stride| stride * 2).collect()
}

/// The last two axes the other way round.
fn transposed([_, heads, rows, dim]: [usize; 4]) -> Vec<usize> {
    vec![heads * rows * dim, rows * dim, 1, rows]
}

/// `[B, L, H, D]`.
fn merged([_, heads, rows, dim]: [usize; 4]) -> Vec<usize> {
    vec![rows * heads * dim, dim, heads * dim, 1]
}

/// Rows, heads and batches with room behind each.
fn roomy([_, heads, rows, dim]: [usize; 4]) -> Vec<usize> {
    let row = dim + 3;
    let head = rows * row + 5;
    vec![heads * head + 7, head, row, 1]
}

const LAYOUTS: [Layout; 6] = [
    Layout {
        name: "dense",
        starts: [0; 4],
        strides: [dense; 4],
    },
    Layout {
        name: "at odd starts",
        starts: [1, 3, 77, 131],
        strides: [dense; 4],
    },
    Layout {
        name: "with gaps",
        starts: [3, 1, 5, 1],
        strides: [gaps, gaps, gaps, gaps],
    },
    Layout {
        name: "value and output transposed",
        starts: [0, 2, 1, 9],
        strides: [dense, dense, transposed, transposed],
    },
    Layout {
        name: "heads merged",
        starts: [5, 0, 129, 1],
        strides: [merged; 4],
    },
    Layout {
        name: "a bit of each",
        starts: [129, 7, 2, 3],
        strides: [gaps, roomy, transposed, roomy],
    },
];

/// One call with everything that a call can read and write, each tensor in the middle of guards.
fn guarded_call(gpu: &Gpu, dtype: DType, layout: &Layout) -> Result<Vec<Vec<u32>>, String> {
    let (batch, heads, kv_heads, queries, keys, head_dim, value_dim) = (2, 4, 2, 5, 7, 3, 5);
    let shapes = [
        [batch, heads, queries, head_dim],
        [batch, kv_heads, keys, head_dim],
        [batch, kv_heads, keys, value_dim],
        [batch, heads, queries, value_dim],
    ];
    let mut numbers = Numbers::new(11);
    let mut input = |index: usize| {
        let (shape, start) = (shapes[index], layout.starts[index]);
        let strides = layout.strides[index](shape);
        let values = support::through_f16(&numbers.normals(shape.iter().product()));
        match dtype {
            DType::F16 => Guarded::holding(gpu, &support::halves(&values), start, &shape, &strides),
            _ => Guarded::holding(gpu, &values, start, &shape, &strides),
        }
    };
    let [query, key, value] = [input(0), input(1), input(2)];
    let room =
        |dtype, start, shape: &[usize], strides: &[usize]| Guarded::room(gpu, dtype, start, shape, strides);
    let plain_room = |start: usize, shape: &[usize]| room(DType::F32, start, shape, &row_major(shape));
    let output = room(dtype, layout.starts[3], &shapes[3], &layout.strides[3](shapes[3]));
    let odd = layout.starts[3];
    let lse = plain_room(odd, &[batch, heads, queries]);
    let weights = plain_room(odd, &[batch, heads, queries, keys]);
    let mean = plain_room(odd + 2, &[batch, queries, keys]);
    let present_shapes = [
        [batch, kv_heads, keys, head_dim],
        [batch, kv_heads, keys, value_dim],
    ];
    let present = present_shapes.map(|shape| room(dtype, odd, &shape, &row_major(&shape)));

    let keep: Vec<u8> = (0..queries * keys).map(|_| numbers.chance(0.7).into()).collect();
    let keep = Guarded::holding(gpu, &keep, odd, &[queries, keys], &[keys * 2 + 1, 2]);
    let key_keep: Vec<u8> = (0..batch * keys).map(|_| numbers.chance(0.8).into()).collect();
    let key_keep = Guarded::holding(gpu, &key_keep, odd + 1, &[batch, keys], &[1, batch]);
    let lengths = Guarded::holding(gpu, &[5u32, 6], odd, &[batch], &[3]);
    let sinks = Guarded::holding(gpu, &numbers.normals(heads), odd, &[heads], &[2]);

    let mask = Mask::keep(keep.tensor.clone()).unwrap();
    let key_mask = Mask::ignore(key_keep.tensor.clone()).unwrap();
    let kv_lengths = KvLengths::from_tensor(lengths.tensor.clone()).unwrap();
    let inputs = AttentionInputs::new(&query.tensor, &key.tensor, &value.tensor)
        .mask(&mask)
        .key_mask(&key_mask)
        .kv_lengths(&kv_lengths)
        .sinks(&sinks.tensor);
    let outputs = AttentionOutputs::new(&output.tensor)
        .lse(&lse.tensor)
        .weights(&weights.tensor)
        .mean_weights(&mean.tensor)
        .present(&present[0].tensor, &present[1].tensor);
    let attention = Attention::new(gpu, AttentionOptions::new().causal(Causal::BottomRight)).unwrap();
    let mut encoder = gpu.encoder();
    attention
        .record(&mut encoder, &inputs, &outputs)
        .map_err(|error| error.to_string())?;
    gpu.submit(encoder).map_err(|error| error.to_string())?;

    for (name, guarded) in [
        ("query", &query),
        ("key", &key),
        ("value", &value),
        ("mask", &keep),
        ("key mask", &key_keep),
        ("lengths", &lengths),
        ("sinks", &sinks),
    ] {
        guarded.check_unchanged(name)?;
    }
    let written = [
        ("output", &output),
        ("lse", &lse),
        ("weights", &weights),
        ("mean weights", &mean),
        ("present key", &present[0]),
        ("present value", &present[1]),
    ];
    let mut results = Vec::new();
    for (name, guarded) in written {
        guarded.check_guards(name)?;
        let values = support::download(&guarded.tensor);
        // Guards are NaN: one that was read, or an element that was not written, shows.
        if let Some(at) = values.iter().position(|value| value.is_nan()) {
            return Err(format!("{name}: element {at} is NaN"));
        }
        results.push(values.into_iter().map(f32::to_bits).collect());
    }
    Ok(results)
}

/// Whatever the strides and starts of inputs and outputs: the bits of the contiguous call, and not a byte beside.
#[test]
fn strided_calls_agree_with_contiguous_ones_and_keep_to_their_elements() {
    let mut failures = Vec::new();
    for (device, gpu) in [("own device", gpu()), ("device without features", default_gpu())] {
        for dtype in [DType::F32, DType::F16] {
            let contiguous = guarded_call(gpu, dtype, &LAYOUTS[0]).unwrap();
            for layout in &LAYOUTS {
                let answer = guarded_call(gpu, dtype, layout);
                if answer.as_ref() != Ok(&contiguous) {
                    let error = answer
                        .err()
                        .unwrap_or("other bits than the contiguous call".to_owned());
                    failures.push(format!("{device}, {dtype:?}, {}: {error}", layout.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The same for projections and layers.
#[test]
fn strided_projections_and_layers_keep_to_their_elements() {
    let mut failures = Vec::new();
    for (device, gpu) in [("own device", gpu()), ("device without features", default_gpu())] {
        let layer = MultiHeadAttention::seeded(gpu, MultiHeadAttentionConfig::new(6, 2), 3).unwrap();
        for dtype in [DType::F32, DType::F16] {
            let mut contiguous = None;
            for (start, strides_in, strides_out) in [
                (0, [18, 6, 1], [18, 6, 1]),
                (1, [18, 6, 1], [18, 6, 1]),
                (3, [50, 16, 2], [61, 19, 3]),
                (130, [18, 1, 3], [19, 1, 3]),
                (7, [6, 12, 1], [7, 15, 1]),
            ] {
                let call = || -> Result<_, String> {
                    let text = |error: multihead::Error| error.to_string();
                    let mut numbers = Numbers::new(12);
                    let mut holding = |start, shape: &[usize], strides: &[usize]| {
                        let values = support::through_f16(&numbers.normals(shape.iter().product()));
                        match dtype {
                            DType::F16 => {
                                Guarded::holding(gpu, &support::halves(&values), start, shape, strides)
                            }
                            _ => Guarded::holding(gpu, &values, start, shape, strides),
                        }
                    };
                    let x = holding(start, &[2, 3, 6], &strides_in);
                    let weight = holding(start, &[6, 6], &[6, 1]);
                    let bias = holding(start + 2, &[6], &[1]);
                    let projected = Guarded::room(gpu, dtype, start, &[2, 3, 6], &strides_out);
                    let attended = Guarded::room(gpu, dtype, start, &[2, 3, 6], &strides_out);
                    let weights = Guarded::room(gpu, DType::F32, start, &[2, 3, 3], &[9, 3, 1]);
                    let linear =
                        Linear::new(weight.tensor.clone(), Some(bias.tensor.clone())).map_err(text)?;
                    let mut encoder = gpu.encoder();
                    linear
                        .record(&mut encoder, &x.tensor, &projected.tensor)
                        .map_err(text)?;
                    let outputs = MultiHeadOutputs::new(&attended.tensor).mean_weights(&weights.tensor);
                    layer
                        .record(&mut encoder, &MultiHeadInputs::new(&x.tensor), &outputs)
                        .map_err(text)?;
                    gpu.submit(encoder).map_err(text)?;
                    for input in [&x, &weight, &bias] {
                        input.check_unchanged("input")?;
                    }
                    let mut results = Vec::new();
                    for (name, output) in [
                        ("projected", &projected),
                        ("attended", &attended),
                        ("weights", &weights),
                    ] {
                        output.check_guards(name)?;
                        let values = support::download(&output.tensor);
                        if values.iter().any(|value| value.is_nan()) {
                            return Err(format!("{name} holds NaN"));
                        }
                        results.push(values);
                    }
                    Ok(results)
                };
                match call() {
                    Ok(results) if contiguous.get_or_insert_with(|| results.clone()) == &results => {}
                    other => failures.push(format!("{device}, {dtype:?}, start {start}: {other:?}")),
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
