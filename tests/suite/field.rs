//! Faults that users of attention engines met, each as a test of its smallest trigger: what must come out is
//! stated by the test itself or by the reference, within the project's error bound.

use std::sync::OnceLock;

use half::f16;
use multihead::{
    Align, Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, AttentionShape,
    Causal, DType, Error, Gpu, KvLengths, Mask, Tensor, Wanted, reference, wgpu,
};

use crate::{
    attention::{Call, MaskKind},
    support::{self, Numbers, check_bound, download, gpu, halves, through_f16},
};

/// A device without optional features and with the limits that every WebGPU device has: other kernels run there.
pub(crate) fn plain() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| {
        support::watch_log();
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
        let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))
            .expect("the tests need an adapter");
        let descriptor = wgpu::DeviceDescriptor {
            required_limits: wgpu::Limits::default(),
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
        Gpu::from_device(&device, &queue).unwrap()
    })
}

/// Fails with every failing row, not with the first.
pub(crate) fn all_rows(rows: impl IntoIterator<Item = (String, Result<(), String>)>) {
    let mut count = 0;
    let failures: Vec<String> = rows
        .into_iter()
        .inspect(|_| count += 1)
        .filter_map(|(name, result)| result.err().map(|error| format!("{name}: {error}")))
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {count} rows fail:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

/// Bit for bit equal.
pub(crate) fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[derive(Debug, Clone)]
enum Bits {
    Keep(Vec<bool>),
    Bias(Vec<f32>),
}

/// One call whose numbers the test can set.
#[derive(Debug, Clone)]
struct Sdpa {
    shape: AttentionShape,
    options: AttentionOptions,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    mask: Option<(Bits, Vec<usize>)>,
    /// `true` = attend.
    key_mask: Option<Vec<bool>>,
    lengths: Option<Vec<usize>>,
    dtype: DType,
    /// Whether [`Sdpa::check`] runs the fused path too.
    fused: bool,
}

/// Results of a call, row-major.
#[derive(Debug, Clone)]
struct Got {
    output: Vec<f32>,
    weights: Vec<f32>,
    lse: Vec<f32>,
}

struct Uploaded {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Option<Mask>,
    key_mask: Option<Mask>,
    lengths: Option<KvLengths>,
}

impl Uploaded {
    fn inputs(&self) -> AttentionInputs<'_> {
        let mut inputs = AttentionInputs::new(&self.query, &self.key, &self.value);
        inputs.mask = self.mask.as_ref();
        inputs.key_mask = self.key_mask.as_ref();
        inputs.kv_lengths = self.lengths.as_ref();
        inputs
    }
}

fn shape(batch: usize, heads: usize, queries: usize, keys: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        batch,
        heads,
        kv_heads: heads,
        queries,
        keys,
        head_dim,
        value_dim: head_dim,
    }
}

impl Sdpa {
    /// N(0, 1) everywhere.
    fn new(shape: AttentionShape) -> Self {
        let mut numbers = Numbers::new(7);
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        Self {
            query: numbers.normals(count(shape.query())),
            key: numbers.normals(count(shape.key())),
            value: numbers.normals(count(shape.value())),
            shape,
            options: AttentionOptions::new(),
            mask: None,
            key_mask: None,
            lengths: None,
            dtype: DType::F32,
            fused: true,
        }
    }

    /// Leaves the fused path out of the check: its pipelines take seconds each on a software adapter.
    fn composed_only(mut self) -> Self {
        self.fused = false;
        self
    }

    fn options(mut self, options: AttentionOptions) -> Self {
        self.options = options;
        self
    }

    fn keep(mut self, shape: &[usize], keeps: impl Fn(usize) -> bool) -> Self {
        let values = (0..shape.iter().product()).map(keeps).collect();
        self.mask = Some((Bits::Keep(values), shape.to_vec()));
        self
    }

    fn bias(mut self, shape: &[usize], value: impl FnMut(usize) -> f32) -> Self {
        let values = (0..shape.iter().product()).map(value).collect();
        self.mask = Some((Bits::Bias(values), shape.to_vec()));
        self
    }

    /// By batch entry and key.
    fn key_mask(mut self, keeps: impl Fn(usize, usize) -> bool) -> Self {
        let (batch, keys) = (self.shape.batch, self.shape.keys);
        self.key_mask = Some((0..batch * keys).map(|at| keeps(at / keys, at % keys)).collect());
        self
    }

    /// Stored as f16, the numbers rounded.
    fn half(mut self) -> Self {
        for values in [&mut self.query, &mut self.key, &mut self.value] {
            *values = through_f16(values);
        }
        self.dtype = DType::F16;
        self
    }

    fn reference<T: reference::Real>(&self) -> reference::AttentionOutput<T> {
        let lift = |values: &[f32]| values.iter().map(|&value| T::from_f32(value)).collect::<Vec<T>>();
        let (query, key, value) = (lift(&self.query), lift(&self.key), lift(&self.value));
        let mut call = reference::Attention::new(self.shape, &self.options, &query, &key, &value);
        call.mask = self.mask.as_ref().map(|(bits, shape)| match bits {
            Bits::Keep(values) => reference::Mask::keep(values, shape),
            Bits::Bias(values) => reference::Mask::bias(values, shape),
        });
        call.key_mask = self.key_mask.as_deref();
        call.kv_lengths = self.lengths.as_deref();
        call.run().unwrap()
    }

    fn upload(&self, gpu: &Gpu) -> Uploaded {
        let upload = |values: &[f32], shape: [usize; 4]| {
            match self.dtype {
                DType::F16 => Tensor::upload(gpu, &halves(values), &shape),
                _ => Tensor::upload(gpu, values, &shape),
            }
            .unwrap()
        };
        Uploaded {
            query: upload(&self.query, self.shape.query()),
            key: upload(&self.key, self.shape.key()),
            value: upload(&self.value, self.shape.value()),
            mask: self.mask.as_ref().map(|(bits, shape)| {
                match bits {
                    Bits::Keep(values) => Mask::keep_from(gpu, values, shape),
                    Bits::Bias(values) => Mask::bias_from(gpu, values, shape),
                }
                .unwrap()
            }),
            key_mask: self
                .key_mask
                .as_ref()
                .map(|keep| Mask::keep_from(gpu, keep, &[self.shape.batch, self.shape.keys]).unwrap()),
            lengths: self
                .lengths
                .as_ref()
                .map(|lengths| KvLengths::new(gpu, lengths).unwrap()),
        }
    }

    fn run_on(&self, gpu: &Gpu) -> Got {
        let uploaded = self.upload(gpu);
        let attention = Attention::new(gpu, self.options.clone()).unwrap();
        let result = attention
            .run(&uploaded.inputs(), Wanted::output().weights().lse())
            .unwrap();
        Got {
            output: download(&result.output),
            weights: download(result.weights.as_ref().unwrap()),
            lse: download(result.lse.as_ref().unwrap()),
        }
    }

    fn run(&self) -> Got {
        self.run_on(gpu())
    }

    /// Output and log-sum-exp of the fused path.
    fn fused_on(&self, gpu: &Gpu) -> (Vec<f32>, Vec<f32>) {
        let uploaded = self.upload(gpu);
        let attention = Attention::new(gpu, self.options.clone())
            .unwrap()
            .with_path(AttentionPath::Fused);
        let result = attention.run(&uploaded.inputs(), Wanted::output().lse()).unwrap();
        (download(&result.output), download(&result.lse.unwrap()))
    }

    /// The output alone of the composed path, which then never holds all weights.
    fn output_on(&self, gpu: &Gpu) -> Vec<f32> {
        let uploaded = self.upload(gpu);
        let attention = Attention::new(gpu, self.options.clone())
            .unwrap()
            .with_path(AttentionPath::Composed);
        download(
            &attention
                .run(&uploaded.inputs(), Wanted::output())
                .unwrap()
                .output,
        )
    }

    /// Against the reference, on both devices, with and without weights.
    fn check(&self) -> Result<Got, String> {
        self.check_on(&[("", gpu()), ("plain device, ", plain())])
    }

    fn check_on(&self, devices: &[(&str, &Gpu)]) -> Result<Got, String> {
        let (truth, narrow) = (self.reference::<f64>(), self.reference::<f32>());
        let mut first = None;
        for &(name, gpu) in devices {
            let got = self.run_on(gpu);
            let stored_f16 = self.dtype == DType::F16;
            let bound = |what: &str, got: &[f32], narrow: &[f32], truth: &[f64], half| {
                check_bound(&format!("{name}{what}"), got, narrow, truth, half)
            };
            bound("output", &got.output, &narrow.output, &truth.output, stored_f16)?;
            bound("weights", &got.weights, &narrow.weights, &truth.weights, false)?;
            bound("lse", &got.lse, &narrow.lse, &truth.lse, false)?;
            let hidden = truth.weights.iter().zip(&got.weights);
            if let Some(at) = hidden
                .clone()
                .position(|(truth, got)| *truth == 0.0 && *got != 0.0)
            {
                return Err(format!(
                    "{name}weight {at} is {} of an invisible key",
                    got.weights[at]
                ));
            }
            if !same_bits(&self.output_on(gpu), &got.output) {
                return Err(format!("{name}the output differs when weights are not wanted"));
            }
            if self.fused {
                let (output, lse) = self.fused_on(gpu);
                bound("fused output", &output, &narrow.output, &truth.output, stored_f16)?;
                bound("fused lse", &lse, &narrow.lse, &truth.lse, false)?;
            }
            first.get_or_insert(got);
        }
        first.ok_or_else(|| "no device".to_owned())
    }

    fn checked(&self) -> Got {
        self.check().unwrap_or_else(|error| panic!("{error}"))
    }

    fn row(&self, name: impl Into<String>) -> (String, Result<(), String>) {
        (name.into(), self.check().map(drop))
    }
}

impl Got {
    /// Which keys have weight, a row of `x` and `.` per query.
    fn seen(&self, keys: usize) -> Vec<String> {
        self.weights
            .chunks(keys)
            .map(|row| row.iter().map(|&w| if w == 0.0 { '.' } else { 'x' }).collect())
            .collect()
    }
}

/// The softmax of a few scores, for expectations that are written out.
fn softmax(scores: &[f64]) -> Vec<f64> {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    scores.iter().map(|s| (s - top).exp() / sum).collect()
}

fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!(
            (f64::from(*got) - expected).abs() <= tolerance,
            "{at}: {got} instead of {expected}"
        );
    }
}

/// One query and one channel: scores are the keys, values are given.
fn one_row(keys: &[f32], values: &[f32]) -> Sdpa {
    let mut call = Sdpa::new(shape(1, 1, 1, keys.len(), 1)).options(AttentionOptions::new().scale(1.0));
    call.query = vec![1.0];
    call.key = keys.to_vec();
    call.value = values.to_vec();
    call
}

// ---- rows without a key, and low scores --------------------------------------------------------------

/// A query whose keys are all masked divided 0 by 0, and the NaN spread to other rows.
#[test]
fn f001_rows_without_a_key_are_zero_and_alone() {
    let clean = Sdpa::new(shape(2, 2, 4, 4, 8));
    let masked = clean
        .clone()
        .keep(&[4, 4], |at| at / 4 != 2)
        .key_mask(|b, _| b == 0);
    let (before, after) = (clean.checked(), masked.checked());
    for (row, (b, q)) in (0..2 * 2 * 4).map(|row| (row, (row / 8, row % 4))) {
        let (output, weights) = (&after.output[row * 8..][..8], &after.weights[row * 4..][..4]);
        if b == 1 || q == 2 {
            assert!(
                output.iter().chain(weights).all(|x| x.to_bits() == 0),
                "row {row}"
            );
            assert_eq!(after.lse[row], f32::NEG_INFINITY);
        } else {
            assert!(same_bits(output, &before.output[row * 8..][..8]), "row {row}");
            assert!(same_bits(weights, &before.weights[row * 4..][..4]), "row {row}");
            assert_eq!(after.lse[row].to_bits(), before.lse[row].to_bits());
        }
    }
}

/// A causal band and a long padding tail gave NaN on the fast path and zeros on the slow one.
#[test]
fn f003_a_band_that_ends_in_padding_leaves_zeros_on_every_device() {
    let call = Sdpa::new(shape(1, 4, 16, 16, 8))
        .options(
            AttentionOptions::new()
                .causal(Causal::TopLeft)
                .window(Some(3), None),
        )
        .key_mask(|_, key| key < 4);
    call.checked();
    for gpu in [gpu(), plain()] {
        let got = call.run_on(gpu);
        for (row, output) in got.output.chunks(8).enumerate() {
            assert_eq!(output.iter().all(|&x| x == 0.0), row % 16 >= 7, "row {row}");
        }
    }
}

/// With a finite stand-in for minus infinity a masked row became the mean of the values.
#[test]
fn f005_a_masked_row_is_not_the_mean_of_the_values() {
    let mut call = Sdpa::new(shape(1, 1, 2, 4, 4)).keep(&[2, 4], |at| at >= 4);
    call.value = (0..16).map(|at| (at / 4 + 1) as f32).collect();
    assert_eq!(call.checked().output[..4], [0.0; 4]);
}

/// A masked score of -1e4 won over visible scores below it.
#[test]
fn f007_a_visible_key_far_below_minus_10000_beats_a_masked_one() {
    let mut call = Sdpa::new(shape(1, 1, 2, 2, 1)).options(AttentionOptions::new().scale(1.0));
    (call.query, call.key, call.value) = (vec![-20000.0, 0.0], vec![1.0, 0.0], vec![1.0, 100.0]);
    let got = call.keep(&[1, 2], |key| key == 0).checked();
    assert_eq!(got.output, [1.0, 1.0]);
    assert_eq!(got.weights, [1.0, 0.0, 1.0, 0.0]);
}

/// A row maximum clamped at -1e4 made rows of lower scores vanish.
#[test]
fn f008_equal_scores_share_equally_however_low() {
    for score in [-2e4f32, -1e10, -3e38, 2e4, 1e10, 3e38, 0.0] {
        let got = one_row(&[score; 4], &[1.0, 2.0, 3.0, 4.0]).checked();
        assert_eq!(got.weights, [0.25; 4], "score {score}");
        assert_eq!(got.output, [2.5], "score {score}");
    }
}

/// The lowest float in a mask was below the kernel's own sentinel.
#[test]
fn f010_the_lowest_float_is_a_bias_and_hides_nothing() {
    let call = one_row(&[0.0, 0.0], &[1.0, 3.0]);
    let both = call.clone().bias(&[2], |_| f32::MIN).checked();
    assert_eq!(both.weights, [0.5, 0.5]);
    assert_eq!(both.lse, [f32::MIN]);
    let one = call
        .bias(&[2], |key| if key == 0 { f32::NEG_INFINITY } else { f32::MIN })
        .checked();
    assert_eq!((one.weights, one.output), (vec![0.0, 1.0], vec![3.0]));
}

/// The lowest float plus a negative score fell to minus infinity and became NaN or hid the key.
#[test]
fn f011_the_lowest_float_plus_a_negative_score_saturates() {
    let call = Sdpa::new(shape(1, 1, 3, 4, 4));
    // Row 2 has the lowest float everywhere.
    let got = call
        .clone()
        .bias(&[3, 4], |at| if at % 4 == 3 || at >= 8 { f32::MIN } else { 0.0 })
        .checked();
    assert_eq!(got.weights[8..], [0.25; 4]);
    let padded = call
        .clone()
        .bias(&[3, 4], |_| f32::MIN)
        .key_mask(|_, key| key != 3);
    assert_eq!(padded.checked().seen(4), ["xxx."; 3]);
    // Scores so low that the sum leaves the range of f32.
    let mut call = call;
    call.query.fill(-1e30);
    call.key = [vec![1.0; 8], vec![1e6; 8]].concat();
    for gpu in [gpu(), plain()] {
        let got = call.clone().bias(&[1], |_| f32::MIN).run_on(gpu);
        assert_eq!(got.weights, [0.25; 12]);
        assert_eq!(got.lse, [f32::MIN; 3]);
    }
}

/// Scores, biases and their sums beyond the largest float gave inf - inf.
#[test]
fn f011_scores_that_overflow_upwards_saturate_too() {
    let mut call = Sdpa::new(shape(1, 1, 2, 3, 1)).options(AttentionOptions::new().scale(1e20));
    (call.query, call.key) = (vec![1e20, -1e20], vec![1.0, 1.0, -1.0]);
    let got = call.checked();
    assert_eq!(got.weights, [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]);
    for gpu in [gpu(), plain()] {
        let got = one_row(&[1.0, 2.0, 3e38], &[1.0, 2.0, 3.0])
            .bias(&[3], |key| [f32::INFINITY, f32::MAX, f32::MAX][key])
            .run_on(gpu);
        assert_close(&got.weights, &[1.0 / 3.0; 3], 1e-7);
    }
}

/// A finite bias that is the same for every key produced NaN for one key.
#[test]
fn f013_one_key_with_any_bias_returns_the_value() {
    let biases = [3.5, 0.45, -5.5, 0.0, 1e30, -1e30, f32::MIN, f32::MAX];
    let call = Sdpa::new(shape(1, 8, 1, 1, 64)).bias(&[8, 1, 1], |head| biases[head]);
    let got = call.checked();
    for (got, value) in got.output.iter().zip(&call.value) {
        assert!(
            (got - value).abs() <= 3.0 * f32::EPSILON * value.abs(),
            "{got} instead of {value}"
        );
    }
}

// ---- masks -------------------------------------------------------------------------------------------

/// A float mask of 0 and 1 was taken for a multiplicative one.
#[test]
fn f014_float_masks_are_added_whatever_their_values() {
    let mut numbers = Numbers::new(3);
    Sdpa::new(shape(1, 2, 8, 8, 8))
        .bias(&[8, 8], |_| f32::from(numbers.chance(0.5)))
        .checked();
    let got = one_row(&[0.0, 0.0], &[0.0, 0.0])
        .bias(&[2], |key| key as f32)
        .run();
    assert_close(&got.weights, &softmax(&[0.0, 1.0]), 1e-7);
}

/// Integer masks were accepted and their polarity changed from path to path.
#[test]
fn f016_masks_are_boolean_or_float_and_say_their_polarity() {
    let gpu = gpu();
    let integers = Tensor::upload(gpu, &[0u32; 8], &[2, 4]).unwrap();
    assert!(matches!(Mask::keep(integers.clone()), Err(Error::DType(_))));
    assert!(matches!(Mask::ignore(integers.clone()), Err(Error::DType(_))));
    assert!(matches!(Mask::bias(integers), Err(Error::DType(_))));
    let floats = Tensor::upload(gpu, &[0.0f32; 8], &[2, 4]).unwrap();
    assert!(matches!(Mask::keep(floats.clone()), Err(Error::DType(_))));
    let bytes = Tensor::upload(gpu, &[0u8; 8], &[2, 4]).unwrap();
    assert!(matches!(Mask::bias(bytes), Err(Error::DType(_))));

    let call = Sdpa::new(shape(2, 1, 4, 4, 4));
    let uploaded = call.upload(gpu);
    // The path that the expectation below takes, so that bits can be compared.
    let attention = Attention::new(gpu, AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let float_padding = Mask::bias(floats).unwrap();
    let refused = attention.run(&uploaded.inputs().key_mask(&float_padding), Wanted::output());
    assert!(matches!(refused, Err(Error::DType(_))), "{refused:?}");

    let keep = [true, true, false, true, false, true, true, false];
    let ignore = keep.map(|keep| !keep);
    let run = |padding: &Mask, mask: &Mask| {
        let inputs = uploaded.inputs().key_mask(padding).mask(mask);
        download(&attention.run(&inputs, Wanted::output()).unwrap().output)
    };
    let keep_mask = Mask::keep_from(gpu, &keep[..4], &[4, 1]).unwrap();
    let ignore_mask = Mask::ignore_from(gpu, &ignore[..4], &[4, 1]).unwrap();
    let kept = run(&Mask::keep_from(gpu, &keep, &[2, 4]).unwrap(), &keep_mask);
    assert!(same_bits(
        &kept,
        &run(&Mask::ignore_from(gpu, &ignore, &[2, 4]).unwrap(), &ignore_mask)
    ));
    let expected = call.keep(&[4, 1], |at| keep[at]).key_mask(|b, j| keep[b * 4 + j]);
    assert!(same_bits(&kept, &expected.checked().output));
    // Any byte but 0 is true.
    let bytes = Tensor::upload(gpu, &keep.map(|keep| if keep { 128u8 } else { 0 }), &[2, 4]).unwrap();
    assert!(same_bits(&kept, &run(&Mask::keep(bytes).unwrap(), &keep_mask)));
}

/// A mask with batch and heads on one axis was tiled the wrong way round.
#[test]
fn f019_batch_and_heads_are_two_axes_of_a_mask() {
    let lengths = [4, 2];
    let call = Sdpa::new(shape(2, 3, 4, 4, 4)).keep(&[2, 3, 4, 4], |at| at % 4 < lengths[at / 48]);
    let got = call.checked();
    assert_eq!(got.seen(4), [vec!["xxxx"; 12], vec!["xx.."; 12]].concat());
    let folded = Mask::keep_from(gpu(), &[true; 96], &[6, 4, 4]).unwrap();
    let uploaded = call.upload(gpu());
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let refused = attention.run(&uploaded.inputs().mask(&folded), Wanted::output());
    assert!(matches!(refused, Err(Error::Shape(_))), "{refused:?}");
}

/// A broadcast mask was applied to head 0 only, or rejected.
#[test]
fn f020_a_broadcast_mask_equals_the_whole_one_bit_for_bit() {
    let (b, h, l) = (2usize, 3usize, 16usize);
    let full = [b, h, l, l];
    let mut rows = Vec::new();
    for ones in [
        [true, true, false, false],
        [false, true, false, false],
        [true, false, false, false],
        [false, true, true, false],
        [true, true, true, false],
        [false, true, false, true],
        [false, false, true, true],
        [true, true, true, true],
    ] {
        let small: Vec<usize> = full
            .iter()
            .zip(ones)
            .map(|(&n, one)| if one { 1 } else { n })
            .collect();
        let index = |at: usize| {
            let place = [at / (h * l * l), at / (l * l) % h, at / l % l, at % l];
            (0..4).fold(0, |index, axis| {
                index * small[axis] + if small[axis] == 1 { 0 } else { place[axis] }
            })
        };
        let mut numbers = Numbers::new(5);
        let bools: Vec<bool> = (0..b * h * l * l).map(|_| numbers.chance(0.6)).collect();
        let floats = numbers.normals(b * h * l * l);
        let call = Sdpa::new(shape(b, h, l, l, 32));
        for (kind, small_call, whole) in [
            (
                "bool",
                call.clone().keep(&small, |at| bools[at]),
                call.clone().keep(&full, |at| bools[index(at)]),
            ),
            (
                "float",
                call.clone().bias(&small, |at| floats[at]),
                call.clone().bias(&full, |at| floats[index(at)]),
            ),
        ] {
            let result = small_call.check().and_then(|got| {
                let whole = whole.run();
                if same_bits(&got.output, &whole.output) && same_bits(&got.weights, &whole.weights) {
                    Ok(())
                } else {
                    Err("other bits than the whole mask".to_owned())
                }
            });
            rows.push((format!("{kind} {small:?}"), result));
        }
    }
    all_rows(rows);
}

/// Grouped heads, non-square masks and few axes each worked alone and failed together.
#[test]
fn f021_masks_of_any_shape_meet_grouped_heads() {
    let mut rows = Vec::new();
    for (queries, keys) in [(7, 45), (45, 7), (16, 16)] {
        for kv_heads in [4, 2, 1] {
            for mask in [vec![queries, keys], vec![1, 4, queries, keys]] {
                for causal in [Causal::None, Causal::TopLeft, Causal::BottomRight] {
                    let mut numbers = Numbers::new(2);
                    let call = Sdpa::new(AttentionShape {
                        kv_heads,
                        ..shape(1, 4, queries, keys, 16)
                    })
                    .options(AttentionOptions::new().causal(causal))
                    .bias(&mask, |_| {
                        if numbers.chance(0.3) {
                            f32::NEG_INFINITY
                        } else {
                            0.0
                        }
                    });
                    rows.push(call.row(format!("{queries} x {keys}, {kv_heads}, {mask:?}, {causal:?}")));
                }
            }
        }
    }
    all_rows(rows);
}

/// An explicit causal mask and the causal option together: ignored, refused, or NaN at some lengths.
#[test]
fn f022_a_causal_mask_and_the_causal_option_intersect() {
    all_rows((1..=130).map(|n| {
        let causal =
            Sdpa::new(shape(1, 2, n, n, 16)).options(AttentionOptions::new().causal(Causal::TopLeft));
        let both = causal.clone().bias(
            &[n, n],
            |at| {
                if at % n > at / n { f32::NEG_INFINITY } else { 0.0 }
            },
        );
        let result = both.check().and_then(|got| {
            if same_bits(&got.output, &causal.run().output) {
                Ok(())
            } else {
                Err("differs from causal alone".to_owned())
            }
        });
        (format!("n = {n}"), result)
    }));
}

/// The causal option was ignored when weights or padding were asked for.
#[test]
fn f023_causal_order_holds_with_weights_and_padding() {
    let causal = Sdpa::new(shape(2, 2, 6, 6, 4)).options(AttentionOptions::new().causal(Causal::TopLeft));
    for call in [causal.clone(), causal.clone().key_mask(|b, j| b == 0 || j != 2)] {
        // This runs each with and without weights.
        let got = call.checked();
        for (row, weights) in got.weights.chunks(6).enumerate() {
            assert!(
                weights[row % 6 + 1..].iter().all(|w| w.to_bits() == 0),
                "row {row}"
            );
        }
    }
}

/// "Causal" means two different masks when the lengths differ, and one engine changed between them.
#[test]
fn f024_f025_both_causal_alignments_are_what_they_say_at_all_sizes() {
    let seen = |causal, queries, keys| {
        Sdpa::new(shape(1, 1, queries, keys, 4))
            .options(AttentionOptions::new().causal(causal))
            .checked()
            .seen(keys)
    };
    assert_eq!(seen(Causal::TopLeft, 2, 5), ["x....", "xx..."]);
    assert_eq!(seen(Causal::BottomRight, 2, 5), ["xxxx.", "xxxxx"]);
    assert_eq!(seen(Causal::TopLeft, 5, 2), ["x.", "xx", "xx", "xx", "xx"]);
    assert_eq!(seen(Causal::BottomRight, 5, 2), ["..", "..", "..", "x.", "xx"]);
    assert_eq!(seen(Causal::TopLeft, 3, 3), seen(Causal::BottomRight, 3, 3));
    let got = Sdpa::new(shape(1, 1, 5, 2, 4))
        .options(AttentionOptions::new().causal(Causal::BottomRight))
        .run();
    assert_eq!(got.output[..12], [0.0; 12]);
}

/// Decoding one token against a cache under top-left order saw key 0 only.
#[test]
fn f026_one_query_at_the_end_of_the_cache_sees_all_keys() {
    let call = Sdpa::new(shape(1, 2, 1, 8, 8));
    let everything = call.checked();
    for options in [
        AttentionOptions::new().causal(Causal::BottomRight),
        AttentionOptions::new().causal(Causal::TopLeft).query_offset(7),
    ] {
        let got = call.clone().options(options).checked();
        assert!(same_bits(&got.output, &everything.output));
    }
}

/// One key more than a multiple of the tile, keys shared by all heads, and a mask: badly wrong.
#[test]
fn f028_one_key_beyond_a_tile_with_one_shared_key_head() {
    let mut rows = Vec::new();
    for keys in [
        9, 13, 16, 17, 31, 32, 33, 34, 63, 64, 65, 97, 127, 128, 129, 1023, 1024, 1025,
    ] {
        let mut numbers = Numbers::new(keys as u64);
        let keeps: Vec<bool> = (0..4 * keys).map(|_| numbers.chance(0.7)).collect();
        let call = Sdpa::new(AttentionShape {
            kv_heads: 1,
            ..shape(1, 8, 4, keys, 16)
        })
        .keep(&[1, 1, 4, keys], |at| keeps[at]);
        rows.push(call.row(format!("{keys} keys")));
    }
    all_rows(rows);
    // The same with one row of keys that a stride of 0 repeats for batch and heads.
    let call = Sdpa::new(shape(1, 1, 4, 33, 16));
    let uploaded = call.upload(gpu());
    let wide = |tensor: &Tensor| tensor.broadcast_to(&[3, 8, tensor.shape()[2], 16]).unwrap();
    let (query, key, value) = (wide(&uploaded.query), wide(&uploaded.key), wide(&uploaded.value));
    let attention = Attention::new(gpu(), AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let result = attention
        .run(&AttentionInputs::new(&query, &key, &value), Wanted::output())
        .unwrap();
    assert!(same_bits(
        &download(&result.output),
        &call.run().output.repeat(24)
    ));
}

/// A mask larger or shorter than the call was read in place.
#[test]
fn f058_masks_that_do_not_fit_are_refused() {
    let call = Sdpa::new(shape(1, 2, 100, 100, 8));
    let uploaded = call.upload(gpu());
    let attention = Attention::new(gpu(), AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    for (shape, fits) in [
        (vec![128usize, 128], false),
        (vec![100, 128], false),
        (vec![128, 100], false),
        (vec![100, 64], false),
        (vec![64, 100], false),
        (vec![3, 100, 100], false),
        (vec![2, 1, 100, 100], false),
        (vec![100, 100], true),
        (vec![100, 1], true),
        (vec![1], true),
        (vec![2, 1, 100], true),
    ] {
        let mask = Mask::keep_from(gpu(), &vec![true; shape.iter().product()], &shape).unwrap();
        let result = attention.run(&uploaded.inputs().mask(&mask), Wanted::output());
        match result {
            Ok(_) => assert!(fits, "{shape:?}"),
            Err(error) => assert!(matches!(error, Error::Shape(_)) && !fits, "{shape:?}: {error}"),
        }
    }
    // Shorter only if it is said.
    let short = Mask::keep_from(gpu(), &[true; 64], &[64])
        .unwrap()
        .with_short_keys();
    let result = attention
        .run(&uploaded.inputs().mask(&short), Wanted::output())
        .unwrap();
    let hidden = call.key_mask(|_, j| j < 64).checked();
    assert!(same_bits(&download(&result.output), &hidden.output));
    let long = Mask::keep_from(gpu(), &[true; 128], &[128])
        .unwrap()
        .with_short_keys();
    assert!(
        attention
            .run(&uploaded.inputs().mask(&long), Wanted::output())
            .is_err()
    );
}

/// Averages were all there was, or the flag was ignored on one path.
#[test]
fn f063_weights_per_head_and_their_mean() {
    let call = Sdpa::new(shape(2, 3, 4, 5, 8))
        .options(AttentionOptions::new().causal(Causal::TopLeft))
        .key_mask(|b, j| b == 0 || j > 1);
    let got = call.checked();
    let uploaded = call.upload(gpu());
    let attention = Attention::new(gpu(), call.options.clone()).unwrap();
    for wanted in [
        Wanted::output().mean_weights(),
        Wanted::output().weights().mean_weights(),
    ] {
        let result = attention.run(&uploaded.inputs(), wanted).unwrap();
        assert!(same_bits(&download(&result.output), &got.output));
        let mean = result.mean_weights.unwrap();
        assert_eq!(mean.shape(), [2, 4, 5]);
        let expected: Vec<f64> = (0..2 * 4 * 5)
            .map(|at| {
                let head = |h: usize| f64::from(got.weights[(at / 20 * 3 + h) * 20 + at % 20]);
                (0..3).map(head).sum::<f64>() / 3.0
            })
            .collect();
        assert_close(&download(&mean), &expected, 1e-7);
    }
    for (row, weights) in got.weights.chunks(5).enumerate() {
        let sum: f32 = weights.iter().sum();
        // Batch entry 1 has no key before 2.
        let expected = if row >= 12 && row % 4 < 2 { 0.0 } else { 1.0 };
        assert!((sum - expected).abs() < 1e-6, "row {row}: {sum}");
    }
}

/// Outputs were trimmed where every sample masks the last tokens.
#[test]
fn f064_padding_in_every_sample_does_not_trim_the_output() {
    let call = Sdpa::new(shape(6, 4, 20, 20, 8)).key_mask(|_, j| j == 0);
    let got = call.checked();
    assert_eq!(got.output.len(), 6 * 4 * 20 * 8);
    for (row, output) in got.output.chunks(8).enumerate() {
        assert_eq!(output, &call.value[row / 20 * 20 * 8..][..8]);
    }
}

/// A transposed mask index goes unseen when sizes coincide.
#[test]
fn f067_no_axis_of_a_mask_stands_for_another() {
    let mut rows = Vec::new();
    for (b, h, q, k, d) in [
        (4, 4, 4, 4, 4),
        (2, 3, 5, 7, 11),
        (7, 2, 3, 5, 13),
        (3, 5, 11, 2, 7),
    ] {
        let mut numbers = Numbers::new(9);
        let padding: Vec<bool> = (0..b * k).map(|_| numbers.chance(0.5)).collect();
        let keeps: Vec<bool> = (0..b * h * q * k).map(|_| numbers.chance(0.7)).collect();
        let floats = numbers.normals(b * h * q * k);
        let call = Sdpa::new(shape(b, h, q, k, d));
        let name = format!("{b} {h} {q} {k} {d}");
        rows.push(
            call.clone()
                .key_mask(|b, j| padding[b * k + j])
                .row(format!("{name} padding")),
        );
        rows.push(
            call.clone()
                .keep(&[b, h, q, k], |at| keeps[at])
                .row(format!("{name} keep")),
        );
        rows.push(
            call.bias(&[b, h, q, k], |at| floats[at])
                .key_mask(|b, j| padding[b * k + j])
                .row(format!("{name} both")),
        );
    }
    all_rows(rows);
}

/// Comparisons with infinity fail on some drivers: only the bits of -inf hide, NaN and the rest do not.
#[test]
fn f068_minus_infinity_hides_and_nothing_else_does() {
    let call = one_row(&[1.0, 2.0, 3.0, 4.0], &[1.0, 2.0, 3.0, 4.0]);
    let inf = f32::NEG_INFINITY;
    let got = call.clone().bias(&[4], |j| [0.0, inf, 0.0, inf][j]).checked();
    assert_eq!(got.seen(4), ["x.x."]);
    let got = call.clone().bias(&[4], |_| inf).checked();
    assert_eq!((got.seen(4), got.output), (vec!["....".to_owned()], vec![0.0]));
    // NaN of either sign is no -inf: it shows.
    for nan in [0xffc0_0000u32, 0x7fc0_0000, 0xff80_0001] {
        let got = call
            .clone()
            .bias(&[4], |j| [0.0, inf, f32::from_bits(nan), 0.0][j])
            .run();
        assert!(
            got.output[0].is_nan() && got.weights[0].is_nan(),
            "{nan:x}: {got:?}"
        );
        assert_eq!(got.weights[1], 0.0, "{nan:x}");
    }
    // The same in f16 masks.
    let (query, key) = (&call.query, &call.key);
    for (mask, expected) in [
        ([0.0, f16::NEG_INFINITY.to_f32(), 1.0, -60000.0], "x.x."),
        ([f16::MIN.to_f32(), inf, f16::MIN.to_f32(), inf], "x.x."),
    ] {
        let mask = Tensor::upload(gpu(), &halves(&mask), &[4]).unwrap();
        let mask = Mask::bias(mask).unwrap();
        let query = Tensor::upload(gpu(), query, &[1, 1, 1, 1]).unwrap();
        let key = Tensor::upload(gpu(), key, &[1, 1, 4, 1]).unwrap();
        let attention = Attention::new(gpu(), call.options.clone()).unwrap();
        let inputs = AttentionInputs::new(&query, &key, &key).mask(&mask);
        let result = attention.run(&inputs, Wanted::output().weights()).unwrap();
        let weights = download(&result.weights.unwrap());
        let seen: String = weights
            .iter()
            .map(|&w| if w == 0.0 { '.' } else { 'x' })
            .collect();
        assert_eq!(seen, expected);
    }
}

// ---- positions ---------------------------------------------------------------------------------------

/// A window counts the query's own key in some libraries and not in others.
#[test]
fn f045_windows_count_both_sides_without_the_query_itself() {
    let seen = |queries, keys, options| {
        Sdpa::new(shape(1, 1, queries, keys, 4))
            .options(options)
            .checked()
            .seen(keys)
    };
    let window = |left, right| AttentionOptions::new().window(left, right);
    assert_eq!(
        seen(6, 6, window(Some(1), Some(0))),
        ["x.....", "xx....", ".xx...", "..xx..", "...xx.", "....xx"]
    );
    assert_eq!(seen(2, 3, window(Some(0), Some(0))), ["x..", ".x."]);
    assert_eq!(seen(2, 4, window(None, Some(1))), ["xx..", "xxx."]);
    assert_eq!(seen(2, 4, window(Some(0), None)), ["xxxx", ".xxx"]);
    assert_eq!(
        seen(2, 6, window(Some(1), Some(0)).align(Align::BottomRight)),
        ["...xx.", "....xx"]
    );
    assert_eq!(
        seen(2, 6, window(Some(2), Some(1)).causal(Causal::BottomRight)),
        ["..xxx.", "...xxx"]
    );
    assert_eq!(seen(2, 3, window(Some(u32::MAX), Some(u32::MAX))), ["xxx", "xxx"]);
}

/// A small window in decoding left a row without a key.
#[test]
fn f046_a_window_beside_the_keys_gives_zeros() {
    for (offset, left) in [(7, 1), (4, 2), (-1, 5), (-9, 5)] {
        let options = AttentionOptions::new()
            .causal(Causal::TopLeft)
            .window(Some(left), None)
            .query_offset(offset);
        let got = Sdpa::new(shape(1, 1, 1, 2, 8)).options(options).checked();
        assert_eq!(got.output, [0.0; 8], "offset {offset}, left {left}");
        assert_eq!(
            (got.seen(2), got.lse),
            (vec!["..".to_owned()], vec![f32::NEG_INFINITY])
        );
    }
}

/// Offsets, alignments, windows, lengths and past keys each moved the position on a path of its own.
#[test]
fn offsets_meet_windows_lengths_and_alignment() {
    struct Row {
        options: AttentionOptions,
        queries: usize,
        length: Option<usize>,
        expected: &'static [&'static str],
    }
    let new = AttentionOptions::new;
    let rows = [
        Row {
            options: new().causal(Causal::BottomRight).window(Some(1), None),
            queries: 2,
            length: Some(5),
            expected: &["..xx....", "...xx..."],
        },
        Row {
            options: new()
                .causal(Causal::BottomRight)
                .window(Some(1), None)
                .query_offset(-1),
            queries: 2,
            length: Some(5),
            expected: &[".xx.....", "..xx...."],
        },
        Row {
            options: new().align(Align::BottomRight).window(Some(0), Some(1)),
            queries: 2,
            length: Some(5),
            expected: &["...xx...", "....x..."],
        },
        Row {
            options: new().causal(Causal::BottomRight).query_offset(2),
            queries: 2,
            length: Some(3),
            expected: &["xxx.....", "xxx....."],
        },
        Row {
            // More queries than keys exist: the first stand before key 0.
            options: new().causal(Causal::BottomRight),
            queries: 3,
            length: Some(2),
            expected: &["........", "x.......", "xx......"],
        },
        Row {
            options: new().causal(Causal::TopLeft).query_offset(4),
            queries: 2,
            length: None,
            expected: &["xxxxx...", "xxxxxx.."],
        },
        Row {
            options: new().causal(Causal::TopLeft).query_offset(4),
            queries: 2,
            length: Some(3),
            expected: &["xxx.....", "xxx....."],
        },
        Row {
            options: new().window(Some(1), Some(1)).query_offset(-2),
            queries: 4,
            length: None,
            expected: &["........", "x.......", "xx......", "xxx....."],
        },
        Row {
            options: new().causal(Causal::BottomRight),
            queries: 2,
            length: Some(0),
            expected: &["........", "........"],
        },
        Row {
            options: new().window(Some(2), None).query_offset(1 << 29),
            queries: 1,
            length: None,
            expected: &["........"],
        },
        Row {
            options: new().window(None, Some(1 << 29)).query_offset(-(1 << 29)),
            queries: 1,
            length: None,
            expected: &["x......."],
        },
    ];
    all_rows(rows.into_iter().enumerate().map(|(at, row)| {
        let mut call = Sdpa::new(shape(1, 1, row.queries, 8, 4)).options(row.options);
        call.lengths = row.length.map(|length| vec![length]);
        let result = call.check().and_then(|got| {
            if got.seen(8) == row.expected {
                Ok(())
            } else {
                Err(format!("{:?} instead of {:?}", got.seen(8), row.expected))
            }
        });
        (format!("row {at}"), result)
    }));
}

/// ALiBi by column and by distance differ when not causal, and the offset is needed when lengths differ.
#[test]
fn f047_alibi_falls_with_the_distance_from_the_position() {
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let mut call = Sdpa::new(shape(1, 4, 3, 7, 8))
        .options(AttentionOptions::new().alibi(slopes).align(Align::BottomRight));
    call.checked();
    // Without scores the weights are the softmax of the distances.
    call.query.fill(0.0);
    let got = call.checked();
    for (row, weights) in got.weights.chunks(7).enumerate() {
        let (head, position) = (row / 3, row as f64 % 3.0 + 4.0);
        let scores: Vec<f64> = (0..7)
            .map(|j| -f64::from(slopes[head]) * (position - f64::from(j)).abs())
            .collect();
        assert_close(weights, &softmax(&scores), 1e-6);
    }
    // Under causal order a bias by column gives the same weights.
    let causal = Sdpa::new(shape(1, 4, 3, 7, 8)).options(AttentionOptions::new().causal(Causal::BottomRight));
    let columns = causal
        .clone()
        .bias(&[4, 1, 7], |at| slopes[at / 7] * (at % 7) as f32)
        .reference::<f64>();
    let options = causal.options.clone().alibi(slopes);
    let got = causal.options(options).checked();
    assert_close(&got.weights, &columns.weights, 1e-6);
}

/// Capping, ALiBi and bias in another order than this one give other weights, all of them plausible.
#[test]
fn the_order_is_scale_cap_alibi_bias() {
    let (scale, cap, slope) = (0.5f64, 2.0f64, 0.75f64);
    let keys = [6.0f32, -4.0, 1.0, 9.0, 0.5];
    let bias = [10.0f32, -1.0, 0.25, -3.0, 12.0];
    let mut call = one_row(&keys, &[1.0, 2.0, 3.0, 4.0, 5.0]).bias(&[5], |j| bias[j]);
    call.query = vec![2.0];
    call.options = AttentionOptions::new()
        .scale(scale as f32)
        .softcap(cap as f32)
        .alibi([slope as f32])
        .query_offset(2);
    let score = |j: usize, order: usize| {
        let dot = 2.0 * f64::from(keys[j]);
        let (distance, bias) = (slope * (2.0 - j as f64).abs(), f64::from(bias[j]));
        let capped = |s: f64| cap * (s / cap).tanh();
        match order {
            0 => capped(scale * dot) - distance + bias,
            1 => capped(scale * dot - distance) + bias,
            2 => capped(scale * dot - distance + bias),
            3 => capped(scale * dot + bias) - distance,
            _ => scale * (capped(dot) - distance + bias),
        }
    };
    let weights = |order| softmax(&(0..5).map(|j| score(j, order)).collect::<Vec<_>>());
    let got = call.checked();
    assert_close(&got.weights, &weights(0), 2e-6);
    for other in 1..5 {
        let differs = weights(other)
            .iter()
            .zip(&got.weights)
            .any(|(a, b)| (a - f64::from(*b)).abs() > 1e-3);
        assert!(differs, "order {other} cannot be told from the right one");
    }
}

/// Capping after masking turned -inf into -cap, so that masked keys leaked weight.
#[test]
fn f043_the_cap_comes_before_the_mask() {
    let mut call = Sdpa::new(shape(1, 1, 1, 2, 4)).options(AttentionOptions::new().softcap(1.0));
    call.query.fill(0.0);
    for call in [
        call.clone().keep(&[2], |j| j == 0),
        call.clone().key_mask(|_, j| j == 0),
        call.bias(&[2], |j| if j == 0 { 0.0 } else { f32::NEG_INFINITY }),
    ] {
        assert_eq!(call.checked().weights, [1.0, 0.0]);
    }
}

/// tanh of a large argument was NaN on some drivers.
#[test]
fn f044_the_cap_saturates() {
    for cap in [1.0f32, 0.01, 30.0] {
        for ratio in [0.1f32, 1.0, 9.0, 20.0, 100.0, 1e4, 1e30] {
            let mut call =
                Sdpa::new(shape(1, 1, 2, 4, 8)).options(AttentionOptions::new().scale(1.0).softcap(cap));
            call.query = [1.0; 8]
                .iter()
                .chain(&[-1.0; 8])
                .map(|sign| sign * cap * ratio / 8.0)
                .collect();
            call.key = [1.0, -1.0, 1.0, 0.0].iter().flat_map(|&x| [x; 8]).collect();
            let got = call.checked();
            if ratio >= 20.0 {
                let cap = f64::from(cap);
                assert_close(&got.weights[..4], &softmax(&[cap, -cap, cap, 0.0]), 1e-6);
            }
        }
    }
}

// ---- layout and sizes --------------------------------------------------------------------------------

/// Strided views were read as if contiguous.
#[test]
fn f029_views_equal_their_contiguous_copies() {
    let call = Sdpa::new(shape(1, 4, 62, 62, 16));
    call.checked();
    for (gpu, path) in [gpu(), plain()]
        .into_iter()
        .flat_map(|gpu| [(gpu, AttentionPath::Composed), (gpu, AttentionPath::Fused)])
    {
        let expected = if path == AttentionPath::Fused {
            call.fused_on(gpu).0
        } else {
            call.output_on(gpu)
        };
        let attention = Attention::new(gpu, AttentionOptions::new())
            .unwrap()
            .with_path(path);
        let uploaded = call.upload(gpu);
        // Every second element of rows twice as wide.
        let spread: Vec<f32> = call.query.iter().flat_map(|&x| [x, f32::NAN]).collect();
        let spread = Tensor::upload(gpu, &spread, &[4 * 62 * 16, 2]).unwrap();
        let spread = Tensor::from_buffer_strided(
            gpu,
            spread.buffer(),
            0,
            DType::F32,
            &[1, 4, 62, 16],
            &[0, 62 * 32, 32, 2],
        )
        .unwrap();
        // Head-merged rows.
        let merged = reference::merge_heads(&call.key, 1, 62, 4, 16).unwrap();
        let merged = Tensor::upload(gpu, &merged, &[1, 62, 64])
            .unwrap()
            .split_heads(4)
            .unwrap();
        // Channels outermost, behind two rows that do not belong.
        let mut transposed = vec![f32::NAN; 4 * 16 * 64];
        for head in 0..4 {
            for j in 0..62 {
                for d in 0..16 {
                    transposed[(head * 16 + d) * 64 + j + 2] = call.value[(head * 62 + j) * 16 + d];
                }
            }
        }
        let transposed = Tensor::upload(gpu, &transposed, &[1, 4, 16, 64])
            .unwrap()
            .slice(3, 2..64)
            .unwrap()
            .permute(&[0, 1, 3, 2])
            .unwrap();
        let (q, k, v) = (&uploaded.query, &uploaded.key, &uploaded.value);
        let rows = [
            ("query spread", [&spread, k, v]),
            ("key merged", [q, &merged, v]),
            ("value transposed", [q, k, &transposed]),
            ("all", [&spread, &merged, &transposed]),
        ];
        all_rows(rows.into_iter().map(|(name, [q, k, v])| {
            let result = attention
                .run(&AttentionInputs::new(q, k, v), Wanted::output())
                .unwrap();
            let same = same_bits(&download(&result.output), &expected);
            (
                name.to_owned(),
                same.then_some(()).ok_or_else(|| "other bits".to_owned()),
            )
        }));
    }
}

/// No keys, or no queries: hang, NaN, or an error.
#[test]
fn f032_f092_empty_axes_are_legal() {
    for (b, h, q, k, d) in [
        (1, 2, 3, 0, 8),
        (1, 2, 0, 3, 8),
        (0, 2, 3, 4, 8),
        (1, 0, 3, 4, 8),
        (1, 2, 3, 4, 0),
        (1, 2, 0, 0, 8),
    ] {
        let call = Sdpa::new(shape(b, h, q, k, d));
        let got = call.checked();
        assert_eq!(got.output.len(), b * h * q * d);
        assert!(got.output.iter().all(|x| x.to_bits() == 0));
        if k == 0 {
            assert!(got.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
        }
        // Masks of such sizes too.
        call.clone().keep(&[b, h, q, k], |_| true).checked();
        let mut call = call.bias(&[1, 1, q, k], |_| 0.5).key_mask(|_, _| true);
        call.lengths = Some(vec![k; b]);
        call.checked();
    }
    for (d, dv) in [(0, 3), (3, 0)] {
        let got = Sdpa::new(AttentionShape {
            value_dim: dv,
            ..shape(1, 2, 3, 4, d)
        })
        .checked();
        assert_eq!(got.output.len(), 2 * 3 * dv);
    }
}

/// Only a few head sizes worked; a padded size found its way into the scale.
#[test]
fn f034_f035_any_head_size_works() {
    let sizes = [
        1, 2, 3, 5, 7, 8, 31, 33, 63, 64, 65, 72, 80, 96, 128, 160, 192, 256, 512,
    ];
    let mut rows = Vec::new();
    for (at, &d) in sizes.iter().enumerate() {
        for dv in [d, sizes[(at * 7 + 3) % sizes.len()]] {
            for causal in [Causal::None, Causal::TopLeft] {
                let call = Sdpa::new(AttentionShape {
                    value_dim: dv,
                    ..shape(1, 2, 5, 6, d)
                })
                .options(AttentionOptions::new().causal(causal));
                let call = if causal == Causal::None {
                    call
                } else {
                    call.composed_only()
                };
                rows.push(call.row(format!("D {d}, Dv {dv}, {causal:?}")));
                if causal == Causal::None {
                    rows.push(call.half().composed_only().row(format!("f16 D {d}, Dv {dv}")));
                }
            }
        }
    }
    all_rows(rows);
}

/// More than 65535 entries on one axis of a grid: the launch was refused or memory corrupted.
#[test]
fn f036_more_work_than_one_grid_axis_holds() {
    let mut rows = Vec::new();
    for n in [65535, 65536, 65537] {
        for (name, shape) in [("batch", shape(n, 1, 1, 2, 1)), ("heads", shape(1, n, 1, 2, 1))] {
            // A workgroup for each of them is slow on the other device: it has larger tiles.
            let result = Sdpa::new(shape).check_on(&[("", gpu())]);
            rows.push((format!("{name} {n}"), result.map(drop)));
        }
    }
    let result = Sdpa::new(shape(1, 1, 65536 * 12 + 1, 1, 1)).check_on(&[("", gpu())]);
    rows.push(("rows".to_owned(), result.map(drop)));
    all_rows(rows);
    // Element by element: joining keys, and the mean over heads.
    let n = 65535 * 64 + 65;
    let past = Numbers::new(1).normals(n);
    let past = Tensor::upload(gpu(), &past, &[1, 1, n, 1]).unwrap();
    let one = Tensor::upload(gpu(), &[0.5f32], &[1, 1, 1, 1]).unwrap();
    let present = Tensor::zeros(gpu(), DType::F32, &[1, 1, n + 1, 1]).unwrap();
    let present_value = Tensor::zeros(gpu(), DType::F32, &[1, 1, n + 1, 1]).unwrap();
    let output = Tensor::zeros(gpu(), DType::F32, &[1, 1, 0, 1]).unwrap();
    let no_query = Tensor::zeros(gpu(), DType::F32, &[1, 1, 0, 1]).unwrap();
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let mut encoder = gpu().encoder();
    attention
        .record(
            &mut encoder,
            &AttentionInputs::new(&no_query, &one, &one).past(&past, &past),
            &AttentionOutputs::new(&output).present(&present, &present_value),
        )
        .unwrap();
    gpu().submit(encoder).unwrap();
    let mut joined = download(&past);
    joined.push(0.5);
    assert!(same_bits(&download(&present), &joined));
    assert!(same_bits(&download(&present_value), &joined));
    // Equal scores share equally.
    let (queries, keys) = (2050, 2048);
    let query = Tensor::zeros(gpu(), DType::F32, &[1, 1, 1, 1])
        .unwrap()
        .broadcast_to(&[1, 1, queries, 1])
        .unwrap();
    let key = Tensor::zeros(gpu(), DType::F32, &[1, 1, keys, 1]).unwrap();
    let result = attention
        .run(
            &AttentionInputs::new(&query, &key, &key),
            Wanted::output().mean_weights(),
        )
        .unwrap();
    assert!(
        download(&result.mean_weights.unwrap())
            .iter()
            .all(|&w| w == 1.0 / 2048.0)
    );
}

/// A 16-bit column index wrapped: masks were read from the wrong place beyond 32767 keys.
#[test]
fn f037_masks_reach_far_keys() {
    let keys = 40000;
    let call = Sdpa::new(shape(1, 1, 2, keys, 8));
    let masked = call
        .clone()
        .bias(&[1, 1, 1, keys], |j| if j < keys - 100 { -1e4 } else { 0.0 });
    let got = masked.checked();
    assert!(
        got.weights
            .iter()
            .enumerate()
            .all(|(at, &w)| (w != 0.0) == (at % keys >= keys - 100))
    );
    let boolean = call.key_mask(|_, j| j >= keys - 100).checked();
    assert!(same_bits(&boolean.output, &got.output));
}

/// NaN in one query is hidden by max() and a floor on the sum, or reaches other rows.
#[test]
fn f040_a_nan_query_shows_in_its_row_alone() {
    let clean = Sdpa::new(shape(1, 2, 3, 4, 8));
    let before = clean.checked();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut call = clean.clone();
        call.query[8] = bad;
        for gpu in [gpu(), plain()] {
            let (after, before) = (call.run_on(gpu), clean.run_on(gpu));
            for (row, output) in after.output.chunks(8).enumerate() {
                if row == 1 {
                    assert!(
                        bad.is_infinite() || output.iter().all(|x| x.is_nan()),
                        "{output:?}"
                    );
                } else {
                    assert!(same_bits(output, &before.output[row * 8..][..8]), "row {row}");
                    assert!(same_bits(
                        &after.weights[row * 4..][..4],
                        &before.weights[row * 4..][..4]
                    ));
                }
            }
        }
    }
    assert_eq!(before.output.len(), 48);
}

/// A value behind a mask reached the output as 0 * NaN; one in sight must not vanish.
#[test]
fn a_nan_or_infinite_value_counts_from_its_key_on() {
    let (length, size) = (70, 3);
    let causal = AttentionOptions::new().causal(Causal::TopLeft);
    let clean = Sdpa::new(shape(1, 2, length, length, size)).options(causal);
    for gpu in [gpu(), plain()] {
        let before = clean.run_on(gpu);
        for j in [0, 1, 11, 12, 13, 23, 24, 31, 32, 33, 63, 64, 65, 69] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                // Head 1, channel 1.
                let at = (length + j) * size + 1;
                let mut call = clean.clone();
                call.value[at] = bad;
                let after = call.run_on(gpu);
                assert!(same_bits(&after.weights, &before.weights));
                for (index, (&after, &before)) in after.output.iter().zip(&before.output).enumerate() {
                    let (row, channel) = (index / size, index % size);
                    let reached = row >= length + j && channel == 1;
                    let right = if !reached {
                        // A value of 0 at the hidden key would give the same bits.
                        after.to_bits() == before.to_bits()
                    } else if bad.is_nan() {
                        after.is_nan()
                    } else {
                        after == bad
                    };
                    assert!(
                        right,
                        "value {j} is {bad}: row {row}, channel {channel} is {after}"
                    );
                }
            }
        }
        // Opposite infinities in sight of one row give NaN there and nowhere before.
        let mut call = clean.clone();
        (call.value[1], call.value[size * 40 + 1]) = (f32::INFINITY, f32::NEG_INFINITY);
        let after = call.run_on(gpu).output;
        assert!(after[1] == f32::INFINITY && after[39 * size + 1] == f32::INFINITY);
        assert!((40..length).all(|row| after[row * size + 1].is_nan()));
    }
}

/// What lies behind a mask, a length or a window may be NaN in keys as in values.
#[test]
fn hidden_nan_keys_and_values_change_no_bit() {
    let clean = Sdpa::new(shape(2, 2, 13, 33, 5));
    let hide = |b: usize, j: usize| j >= [20, 33][b] || j == 3 || j == 12;
    for half in [false, true] {
        let clean = if half { clean.clone().half() } else { clean.clone() };
        let mut call = clean.clone().key_mask(|_, j| j != 3).keep(&[33], |j| j != 12);
        call.lengths = Some(vec![20, 33]);
        let mut poisoned = call.clone();
        for (values, size) in [(&mut poisoned.key, 5), (&mut poisoned.value, 5)] {
            for (at, value) in values.iter_mut().enumerate() {
                if hide(at / size / 33 / 2, at / size % 33) {
                    *value = [f32::NAN, f32::INFINITY, -65504.0][at % 3];
                }
            }
        }
        let (before, after) = (call.checked(), poisoned.checked());
        assert!(same_bits(&before.output, &after.output));
        assert!(same_bits(&before.weights, &after.weights));
        assert!(same_bits(&before.lse, &after.lse));
    }
}

/// Paths disagreed on whether past keys take part when the joined ones are not asked for.
#[test]
fn f041_past_keys_count_whether_or_not_they_are_returned() {
    let tensor = |x: f32| Tensor::upload(gpu(), &[x; 4], &[1, 1, 1, 4]).unwrap();
    let (query, key, past) = (tensor(1.0), tensor(35.0 / 4.0), tensor(75.0 / 4.0));
    let (value, past_value) = (tensor(1.0), tensor(2.0));
    let attention = Attention::new(gpu(), AttentionOptions::new().scale(1.0)).unwrap();
    let inputs = AttentionInputs::new(&query, &key, &value).past(&past, &past_value);
    let plain = attention.run(&inputs, Wanted::output()).unwrap();
    let returned = attention
        .run(&inputs, Wanted::output().present().weights())
        .unwrap();
    let output = download(&plain.output);
    assert!(same_bits(&output, &download(&returned.output)));
    assert_eq!(output, [2.0; 4]);
    assert_eq!(
        download(&returned.present_value.unwrap()),
        [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    );
    assert_close(
        &download(&returned.weights.unwrap()),
        &softmax(&[75.0, 35.0]),
        1e-20,
    );
}

/// Query heads were dealt to key heads round robin, or bled into the next group.
#[test]
fn f042_query_head_h_reads_key_head_h_by_group() {
    for (heads, kv_heads) in [(9, 3), (24, 1), (6, 2), (6, 6)] {
        let mut call = Sdpa::new(AttentionShape {
            kv_heads,
            ..shape(2, heads, 3, 5, 8)
        });
        call.checked();
        for (at, value) in call.value.iter_mut().enumerate() {
            *value = (at / 40 % kv_heads) as f32;
        }
        let got = call.checked();
        for (at, got) in got.output.iter().enumerate() {
            let group = (at / 24 % heads / (heads / kv_heads)) as f32;
            assert!(
                (got - group).abs() <= 1e-6 * group,
                "{heads} over {kv_heads}: {got} at {at}"
            );
        }
    }
    let tensor = |heads| Tensor::zeros(gpu(), DType::F32, &[1, heads, 3, 8]).unwrap();
    let (query, key) = (tensor(5), tensor(2));
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let refused = attention.run(&AttentionInputs::new(&query, &key, &key), Wanted::output());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains('5') && text.contains('2'), "{text}");
}

/// Copies of odd byte counts failed or overwrote neighbours.
#[test]
fn f093_f094_f101_odd_sizes_between_poisoned_neighbours() {
    let mut rows = Vec::new();
    for (q, k, d) in [(1, 1, 1), (5, 5, 1), (3, 5, 3), (3, 1, 1), (1, 3, 5), (13, 33, 7)] {
        for half in [false, true] {
            for guard in [1usize, 2, 3, 65] {
                let mut call = Sdpa::new(shape(1, 1, q, k, d)).keep(&[q, k], |at| at % 3 != 1);
                if half {
                    call = call.half();
                }
                for (name, gpu) in [("", gpu()), ("plain device ", plain())] {
                    let result = guarded(&call, gpu, guard);
                    rows.push((format!("{name}{q} {k} {d} half {half} guard {guard}"), result));
                }
            }
        }
    }
    all_rows(rows);
}

/// Runs `call` with every tensor in the middle of a poisoned buffer; compares with the call outside.
fn guarded(call: &Sdpa, gpu: &Gpu, guard: usize) -> Result<(), String> {
    let floats = |values: &[f32], poison: f32| {
        let all: Vec<f32> = [vec![poison; guard], values.to_vec(), vec![poison; guard]].concat();
        let whole = match call.dtype {
            DType::F16 => Tensor::upload(gpu, &halves(&all), &[all.len()]),
            _ => Tensor::upload(gpu, &all, &[all.len()]),
        };
        whole.unwrap()
    };
    let middle = |whole: &Tensor, shape: &[usize]| {
        let len = shape.iter().product::<usize>();
        whole
            .slice(0, guard..guard + len)
            .unwrap()
            .reshape(shape)
            .unwrap()
    };
    let query = middle(&floats(&call.query, f32::NAN), &call.shape.query());
    let key = middle(&floats(&call.key, 1e30), &call.shape.key());
    let value = middle(&floats(&call.value, f32::NAN), &call.shape.value());
    let Some((Bits::Keep(keep), mask_shape)) = &call.mask else {
        return Err("the call needs a boolean mask".to_owned());
    };
    let bytes: Vec<u8> = std::iter::repeat_n(7, guard)
        .chain(keep.iter().map(|&keep| u8::from(keep)))
        .chain(std::iter::repeat_n(7, guard))
        .collect();
    let mask = Tensor::upload(gpu, &bytes, &[bytes.len()]).unwrap();
    let mask = Mask::keep(middle(&mask, mask_shape)).unwrap();
    let count = |shape: &[usize]| shape.iter().product::<usize>();
    let poisoned = |shape: &[usize]| {
        Tensor::upload(
            gpu,
            &vec![-7.0f32; count(shape) + 2 * guard],
            &[count(shape) + 2 * guard],
        )
        .unwrap()
    };
    let output_whole = floats(&vec![-7.0; count(&call.shape.output())], -7.0);
    let weights_whole = poisoned(&call.shape.weights());
    let lse_shape = &call.shape.weights()[..3];
    let lse_whole = poisoned(lse_shape);
    let output = middle(&output_whole, &call.shape.output());
    let weights = middle(&weights_whole, &call.shape.weights());
    let lse = middle(&lse_whole, lse_shape);
    let attention = Attention::new(gpu, call.options.clone()).unwrap();
    let mut encoder = gpu.encoder();
    attention
        .record(
            &mut encoder,
            &AttentionInputs::new(&query, &key, &value).mask(&mask),
            &AttentionOutputs::new(&output).weights(&weights).lse(&lse),
        )
        .map_err(|error| error.to_string())?;
    gpu.submit(encoder).unwrap();
    let expected = call.run_on(gpu);
    for (name, whole, expected) in [
        ("output", &output_whole, &expected.output),
        ("weights", &weights_whole, &expected.weights),
        ("lse", &lse_whole, &expected.lse),
    ] {
        let got = download(whole);
        let end = got.len() - guard;
        if !same_bits(&got[guard..end], expected) {
            return Err(format!("{name} differs: {:?}, {expected:?}", &got[guard..end]));
        }
        if got[..guard].iter().chain(&got[end..]).any(|&x| x != -7.0) {
            return Err(format!("{name} wrote outside: {got:?}"));
        }
    }
    Ok(())
}

/// Some query counts alone were corrupt, with masks that have no row more than the queries.
#[test]
fn f104_every_query_count_with_tight_mask_rows() {
    all_rows((1..=33).map(|n| {
        let mut numbers = Numbers::new(n as u64);
        let keeps: Vec<bool> = (0..3 * n * 40).map(|_| numbers.chance(0.8)).collect();
        Sdpa::new(shape(3, 4, n, 40, 64))
            .keep(&[3, 1, n, 40], |at| keeps[at])
            .row(format!("{n} queries"))
    }));
}

/// NaN for long rows only, with a band in the mask or long stretches of the lowest float.
#[test]
fn f105_bands_and_low_stretches_in_long_rows() {
    let mut band = Sdpa::new(shape(1, 1, 600, 600, 2)).bias(&[600, 600], |at| {
        if (at / 600).abs_diff(at % 600) > 10 {
            f32::NEG_INFINITY
        } else {
            0.0
        }
    });
    for values in [&mut band.query, &mut band.key, &mut band.value] {
        values.fill(1.0);
    }
    assert!(band.checked().output.iter().all(|x| (x - 1.0).abs() < 1e-6));
    let low = Sdpa::new(shape(1, 1, 441, 441, 2)).bias(&[1, 441], |j| if j < 128 { f32::MIN } else { 0.0 });
    let got = low.checked();
    assert!(
        got.weights
            .chunks(441)
            .all(|row| row[..128].iter().all(|&w| w == 0.0))
    );
}

// ---- numbers -----------------------------------------------------------------------------------------

/// Sums in f16 drift over long rows.
#[test]
fn f051_f16_keeps_its_digits_over_4096_keys() {
    let mut call = Sdpa::new(shape(1, 2, 4, 4096, 64));
    call.value.iter_mut().for_each(|value| *value += 10.0);
    let call = call.half();
    let got = call.checked();
    for (got, truth) in got.output.iter().zip(call.reference::<f64>().output) {
        // f16 has 10 bits behind the point; values lie in [8, 16).
        assert!(
            (f64::from(*got) - truth).abs() <= 2.0 * 8.0 / 1024.0,
            "{got} instead of {truth}"
        );
    }
}

/// A running maximum that starts at -inf gave NaN for prompts shorter than a tile.
#[test]
fn f052_short_causal_prompts() {
    for queries in 1..=4 {
        let options = AttentionOptions::new().causal(Causal::BottomRight);
        let call = Sdpa::new(shape(1, 1, queries, 64, 64));
        call.clone().options(options).checked();
        call.options(AttentionOptions::new().causal(Causal::TopLeft))
            .checked();
    }
}

/// Compensated sums are optimised away; the bound must hold without them.
#[test]
fn f072_long_rows_of_unequal_values() {
    let mut call = Sdpa::new(shape(1, 1, 1, 65536, 4));
    call.query.fill(0.0);
    for (at, value) in call.value.iter_mut().enumerate() {
        *value = if at / 4 % 2 == 0 { 1e4 } else { 1e-4 };
    }
    let got = call.checked();
    assert!(got.weights.iter().all(|&w| w == 1.0 / 65536.0));
    assert_close(&got.output, &[5000.00005; 4], 0.01);
}

/// exp may be off by many digits far from 0, and exp(0) need not be 1.
#[test]
fn f073_one_key_weighs_one_and_small_weights_keep_their_digits() {
    let got = Sdpa::new(shape(1, 1, 1, 1, 4)).checked();
    assert!((got.weights[0] - 1.0).abs() <= 1e-6);
    for low in [-0.5f32, -1.0, -10.0, -30.0, -60.0, -80.0] {
        let got = one_row(&[0.0, low], &[0.0, 1.0]).checked();
        let expected = softmax(&[0.0, low.into()])[1];
        for weight in [got.weights[1], got.output[0]] {
            let relative = (f64::from(weight) - expected).abs() / expected;
            assert!(relative < 1e-6, "{weight:e} instead of {expected:e} at {low}");
        }
    }
}

/// Assumed subgroup sizes gave partial sums; fewer rows than a tile made barriers diverge; lost barriers lost sums.
#[test]
fn f076_f077_f078_f100_sizes_around_tiles_and_subgroups() {
    let causal = AttentionOptions::new().causal(Causal::TopLeft);
    let mut rows = vec![
        Sdpa::new(shape(1, 2, 33, 65, 64))
            .options(causal.clone())
            .row("33 x 65"),
        Sdpa::new(shape(1, 1, 5, 7, 4)).row("5 x 7"),
        Sdpa::new(shape(1, 2, 17, 19, 16)).options(causal).row("17 x 19"),
    ];
    for keys in [
        1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64, 65, 127, 128, 129, 1024, 1025, 2049,
    ] {
        rows.push(Sdpa::new(shape(1, 1, 3, keys, 3)).row(format!("{keys} keys")));
    }
    all_rows(rows);
    // Equal scores and the values 1 to 64: their sum is 2080.
    let mut call = Sdpa::new(shape(1, 1, 4, 64, 4));
    call.query.fill(0.0);
    for (at, value) in call.value.iter_mut().enumerate() {
        *value = (at / 4 + 1) as f32;
    }
    assert_eq!(call.checked().output, [2080.0 / 64.0; 16]);
}

/// Scores beyond a binding's limit failed when they were bound.
#[test]
fn f082_f085_scores_beyond_one_binding_are_cut_and_the_cut_does_not_show() {
    // 134,348,832 bytes of scores, 128 MiB is the default limit. No reference: the heads are alike.
    let one = Sdpa::new(shape(1, 1, 2049, 2049, 8));
    let uploaded = one.upload(plain());
    let wide = |tensor: &Tensor| tensor.broadcast_to(&[1, 8, 2049, 8]).unwrap();
    let (q, k, v) = (wide(&uploaded.query), wide(&uploaded.key), wide(&uploaded.value));
    let inputs = AttentionInputs::new(&q, &k, &v);
    let attention = Attention::new(plain(), AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let before = plain().dispatches();
    let result = attention.run(&inputs, Wanted::output()).unwrap();
    assert!(plain().dispatches() - before >= 6, "cut into chunks");
    let alone = one.run_on(plain());
    assert!(same_bits(&download(&result.output), &alone.output.repeat(8)));
    let refused = attention.run(&inputs, Wanted::output().weights());
    let Err(Error::Limit { needs, allows, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((needs, allows), (8 * 2049 * 2049 * 4, 128 << 20));
    // The same rows against the reference: more than one chunk of scores for one head.
    let (queries, keys) = (2100, 2049);
    let call =
        Sdpa::new(shape(1, 1, queries, keys, 4)).options(AttentionOptions::new().causal(Causal::BottomRight));
    call.checked();
}

// ---- the device --------------------------------------------------------------------------------------

/// Float atomics made results change from run to run.
#[test]
fn f066_the_same_bits_from_run_to_run() {
    for dtype in [DType::F32, DType::F16] {
        let mut call =
            Sdpa::new(shape(2, 4, 257, 257, 32)).options(AttentionOptions::new().causal(Causal::TopLeft));
        if dtype == DType::F16 {
            call = call.half();
        }
        for gpu in [gpu(), plain()] {
            let (first, fused) = (call.run_on(gpu), call.fused_on(gpu));
            for _ in 0..4 {
                let again = call.run_on(gpu);
                assert!(same_bits(&fused.0, &call.fused_on(gpu).0));
                assert!(same_bits(&first.output, &again.output));
                assert!(same_bits(&first.weights, &again.weights));
                assert!(same_bits(&first.lse, &again.lse));
            }
        }
    }
}

/// Params and scratch of one call were overwritten by the next before either had run.
#[test]
fn calls_recorded_before_one_submit_keep_their_own_options_and_masks() {
    let a = Sdpa::new(shape(2, 2, 13, 21, 8)).keep(&[13, 21], |at| at % 3 == 0);
    let mut b = Sdpa::new(shape(1, 4, 40, 33, 5))
        .bias(&[4, 1, 33], |at| at as f32 * 0.1)
        .options(AttentionOptions::new().causal(Causal::BottomRight).softcap(2.0));
    b.lengths = Some(vec![29]);
    let c = a.clone().keep(&[13, 21], |at| at % 5 != 0);
    let calls = [&a, &b, &c];
    let expected = calls.map(|call| call.checked());
    for (gpu, path) in [gpu(), plain()]
        .into_iter()
        .flat_map(|gpu| [(gpu, AttentionPath::Composed), (gpu, AttentionPath::Fused)])
    {
        let mut encoder = gpu.encoder();
        let outputs = calls.map(|call| {
            let uploaded = call.upload(gpu);
            let output = Tensor::zeros(gpu, DType::F32, &call.shape.output()).unwrap();
            Attention::new(gpu, call.options.clone())
                .unwrap()
                .with_path(path)
                .record(&mut encoder, &uploaded.inputs(), &AttentionOutputs::new(&output))
                .unwrap();
            output
        });
        gpu.submit(encoder).unwrap();
        for ((call, output), expected) in calls.iter().zip(&outputs).zip(&expected) {
            let alone = if path == AttentionPath::Fused {
                call.fused_on(gpu).0
            } else {
                call.output_on(gpu)
            };
            assert!(same_bits(&download(output), &alone));
            assert!(
                gpu != self::gpu() || path == AttentionPath::Fused || same_bits(&alone, &expected.output)
            );
        }
    }
}

/// Head sizes are padded in the kernels, and 0 times an infinite key is NaN: the padding has to be 0 on both sides.
#[test]
fn an_infinite_key_does_not_meet_the_padding_of_the_head_size() {
    for size in [1usize, 7, 9] {
        let mut call = Sdpa::new(shape(1, 1, 20, 12, size));
        call.query.fill(1.0);
        call.key[4 * size - 1] = f32::NEG_INFINITY;
        for gpu in [gpu(), plain()] {
            let (output, _) = call.fused_on(gpu);
            assert!(output.iter().all(|x| x.is_finite()), "{size}: {output:?}");
            let mut without = call.clone();
            without.key[4 * size - 1] = 0.0;
            let (hidden, _) = without.key_mask(|_, j| j != 3).fused_on(gpu);
            assert_close(&output, &crate::support::wide(&hidden), 1e-6);
        }
    }
}

/// A kernel that never ran leaves zeros that look like an answer: each call runs the kernels that it says.
#[test]
fn a_call_runs_its_kernels() {
    let gpu = Gpu::new().unwrap();
    let call = Sdpa::new(shape(1, 2, 5, 7, 4));
    let uploaded = call.upload(&gpu);
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let count = |wanted, inputs: &AttentionInputs| {
        let before = gpu.dispatches();
        attention.run(inputs, wanted).unwrap();
        gpu.dispatches() - before
    };
    let inputs = uploaded.inputs();
    let past = inputs.past(&uploaded.key, &uploaded.value);
    assert_eq!(count(Wanted::output(), &inputs), 1);
    assert_eq!(count(Wanted::output().weights().lse(), &inputs), 3);
    assert_eq!(count(Wanted::output().mean_weights(), &inputs), 4);
    assert_eq!(count(Wanted::output(), &past), 1 + 4);
    assert_eq!(count(Wanted::output().present(), &inputs), 1 + 2);
}

/// Memory grew until the device was lost when nobody polled.
#[test]
fn f086_thousands_of_calls_need_no_more_memory() {
    let gpu = Gpu::new().unwrap();
    let call = Sdpa::new(shape(1, 2, 64, 64, 16));
    let uploaded = call.upload(&gpu);
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let held = || {
        gpu.wait().unwrap();
        let report = gpu.device().generate_allocator_report();
        (
            gpu.scratch_bytes(),
            report.map(|report| report.total_allocated_bytes),
        )
    };
    let mut after = Vec::new();
    for _ in 0..4 {
        for at in 0..500 {
            attention.run(&uploaded.inputs(), Wanted::output()).unwrap();
            if at % 100 == 0 {
                gpu.wait().unwrap();
            }
        }
        after.push(held());
    }
    // How much is in flight at a time, and so its padding, varies a little; but 500 calls that keep something keep more than
    // a byte each.
    let grown = |from: usize| {
        let bytes = |at: usize| after[at].0 + after[at].1.unwrap_or(0);
        bytes(3).saturating_sub(bytes(from))
    };
    assert!(
        (0..3).any(|from| grown(from) < 500),
        "(scratch, all) bytes grow: {after:?}"
    );
}

/// A pipeline per call cost hundreds of milliseconds each; the first call took seconds.
#[test]
fn f087_f099_pipelines_do_not_grow_with_shapes_and_warm_up_builds_them() {
    let gpu = Gpu::new().unwrap();
    let attention = Attention::new(&gpu, AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    attention.warm_up(DType::F32, 40, 40).unwrap();
    let built = gpu.pipelines();
    let mut numbers = Numbers::new(1);
    for _ in 0..200 {
        let mut size = |end| 1 + numbers.below(end);
        let call = Sdpa::new(shape(size(3), size(4), size(40), size(1500), size(40)));
        let uploaded = call.upload(&gpu);
        let mask = Mask::keep_from(&gpu, &[true], &[1]).unwrap();
        let inputs = uploaded.inputs().mask(&mask);
        attention.run(&inputs, Wanted::output().lse()).unwrap();
    }
    assert_eq!(gpu.pipelines(), built);
}

/// A blocking read that nobody polls for never came back.
#[test]
fn f088_a_download_waits_by_itself() {
    let call = Sdpa::new(shape(1, 1, 2, 2, 4));
    let got = call.checked();
    assert!(got.output.iter().any(|&x| x != 0.0));
}

/// Any call with its tensors in f16 and each kind of mask, and head-merged, on the plain device.
#[test]
fn f083_a_device_with_default_limits_and_no_features_gives_the_same() {
    let mut rows = Vec::new();
    for (at, mask) in [
        MaskKind::None,
        MaskKind::Keep,
        MaskKind::Ignore,
        MaskKind::Bias,
        MaskKind::BiasF16,
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in [DType::F32, DType::F16] {
            let mut call = Call::new(AttentionShape {
                kv_heads: 2,
                value_dim: 9,
                ..shape(2, 4, 27, 35, 14)
            });
            (call.mask, call.dtype, call.merged) = (mask, dtype, at % 2 == 0);
            (call.key_mask, call.lengths, call.sinks) = (MaskKind::Ignore, at > 1, at > 2);
            call.options = AttentionOptions::new()
                .causal(Causal::BottomRight)
                .softcap(5.0)
                .alibi([0.5, 0.25, 0.125, 0.0625]);
            for (name, gpu) in [("own", gpu()), ("plain", plain())] {
                rows.push((format!("{name} {mask:?} {dtype:?}"), call.check(gpu)));
            }
        }
    }
    all_rows(rows);
}
