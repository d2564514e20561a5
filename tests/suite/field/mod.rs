//! Faults that users of attention engines met, each as a test of its smallest trigger: what must come out is
//! stated by the test itself or by the reference, within the project's error bound.

mod calls;
mod masks;
mod positions;
mod shapes;
mod values;

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
