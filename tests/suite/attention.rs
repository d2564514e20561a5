//! The operator against the reference: each option, each pair of options, each awkward size.

use half::f16;
use multihead::{
    Align, Attention, AttentionInputs, AttentionOptions, AttentionPath, AttentionShape, Causal, DType, Gpu,
    KvLengths, Mask, Tensor, Wanted, reference,
};
use proptest::prelude::*;

use crate::support::{self, Numbers, check_bound, download, gpu, wide};

/// A mask of one call: values of its own, broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MaskKind {
    None,
    Keep,
    Ignore,
    Bias,
    BiasF16,
}

/// One call, whole: what it is made of and the seed of its numbers.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) shape: AttentionShape,
    pub(crate) past: usize,
    pub(crate) options: AttentionOptions,
    pub(crate) mask: MaskKind,
    /// Which axes of the mask have size 1.
    pub(crate) mask_ones: [bool; 4],
    pub(crate) mask_rank: usize,
    pub(crate) short_mask: bool,
    pub(crate) key_mask: MaskKind,
    pub(crate) lengths: bool,
    pub(crate) sinks: bool,
    pub(crate) dtype: DType,
    /// Strides of the tensors: head-merged rows instead of `[B, H, L, D]`.
    pub(crate) merged: bool,
    /// Factor of the queries: large scores.
    pub(crate) large: f32,
    /// Whether the weights, and the composed path that holds them, are left out.
    pub(crate) fused_only: bool,
    pub(crate) seed: u64,
}

impl Call {
    pub(crate) fn new(shape: AttentionShape) -> Self {
        Self {
            shape,
            past: 0,
            options: AttentionOptions::new(),
            mask: MaskKind::None,
            mask_ones: [false; 4],
            mask_rank: 4,
            short_mask: false,
            key_mask: MaskKind::None,
            lengths: false,
            sinks: false,
            dtype: DType::F32,
            merged: false,
            large: 1.0,
            fused_only: false,
            seed: 1,
        }
    }

    /// Runs it on the GPU and the reference and compares output, weights, log-sum-exp and their agreement with
    /// the run without weights.
    pub(crate) fn check(&self, gpu: &Gpu) -> Result<(), String> {
        let shape = self.shape;
        let mut numbers = Numbers::new(self.seed);
        let store = |values: Vec<f32>| {
            if self.dtype == DType::F16 {
                support::through_f16(&values)
            } else {
                values
            }
        };
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let query = store(
            numbers
                .normals(count(shape.query()))
                .iter()
                .map(|x| x * self.large)
                .collect(),
        );
        let mut key = store(numbers.normals(count(shape.key())));
        let mut value = store(numbers.normals(count(shape.value())));
        let maskable = shape.keys - self.options.always_visible_keys;

        let lengths: Option<Vec<usize>> = self
            .lengths
            .then(|| (0..shape.batch).map(|_| numbers.below(maskable + 1)).collect());
        if let Some(lengths) = &lengths {
            // What lies behind a length may be anything.
            for (b, &length) in lengths.iter().enumerate() {
                for (tensor, size) in [(&mut key, shape.head_dim), (&mut value, shape.value_dim)] {
                    for h in 0..shape.kv_heads {
                        for j in length..maskable {
                            let at = ((b * shape.kv_heads + h) * shape.keys + j) * size;
                            tensor[at..at + size].fill(f32::NAN);
                        }
                    }
                }
            }
        }

        let mut mask_shape = [shape.batch, shape.heads, shape.queries, maskable];
        if self.short_mask && maskable > 2 {
            mask_shape[3] = maskable - 1;
        }
        for (axis, one) in mask_shape.iter_mut().zip(self.mask_ones) {
            *axis = if one { 1 } else { *axis };
        }
        let mask_shape = mask_shape[4 - self.mask_rank..].to_vec();
        let mask_len = mask_shape.iter().product();
        let bools: Vec<bool> = (0..mask_len).map(|_| numbers.chance(0.7)).collect();
        let floats: Vec<f32> = (0..mask_len)
            .map(|_| match numbers.below(8) {
                0 => f32::NEG_INFINITY,
                1 => -40.0,
                _ => f16::from_f32(numbers.normal()).to_f32(),
            })
            .collect();
        let key_bools: Vec<bool> = (0..shape.batch * maskable).map(|_| numbers.chance(0.8)).collect();
        let sinks: Option<Vec<f32>> = self.sinks.then(|| numbers.normals(shape.heads));

        // The truth.
        let reference_mask = match self.mask {
            MaskKind::None => None,
            MaskKind::Keep | MaskKind::Ignore => Some(reference::Mask::keep(&bools, &mask_shape)),
            MaskKind::Bias | MaskKind::BiasF16 => Some(reference::Mask::bias(&floats, &mask_shape)),
        }
        .map(reference::Mask::with_short_keys);
        let key_mask = (self.key_mask != MaskKind::None).then_some(&key_bools[..]);
        fn run<'a, T: reference::Real>(
            call: &'a Call,
            [q, k, v]: [&'a [T]; 3],
            mask: Option<reference::Mask<'a>>,
            key_mask: Option<&'a [bool]>,
            lengths: Option<&'a [usize]>,
            sinks: Option<&'a [f32]>,
        ) -> reference::AttentionOutput<T> {
            let mut reference = reference::Attention::new(call.shape, &call.options, q, k, v);
            (reference.mask, reference.key_mask) = (mask, key_mask);
            (reference.kv_lengths, reference.sinks) = (lengths, sinks);
            reference.run().unwrap()
        }
        let (lengths_ref, sinks_ref) = (lengths.as_deref(), sinks.as_deref());
        let wide = [wide(&query), wide(&key), wide(&value)];
        let truth = run(
            self,
            wide.each_ref().map(|v| &v[..]),
            reference_mask,
            key_mask,
            lengths_ref,
            sinks_ref,
        );
        let narrow = run(
            self,
            [&query, &key, &value],
            reference_mask,
            key_mask,
            lengths_ref,
            sinks_ref,
        );

        // The GPU.
        let upload = |values: &[f32], [b, h, l, d]: [usize; 4]| {
            let merged = self.merged && h > 0;
            let (values, shape) = if merged {
                let merged = reference::merge_heads(values, b, l, h, d).unwrap();
                (merged, vec![b, l, h * d])
            } else {
                (values.to_vec(), vec![b, h, l, d])
            };
            let tensor = match self.dtype {
                DType::F16 => Tensor::upload(gpu, &support::halves(&values), &shape),
                _ => Tensor::upload(gpu, &values, &shape),
            }
            .unwrap();
            if merged {
                tensor.split_heads(h).unwrap()
            } else {
                tensor
            }
        };
        let query = upload(&query, shape.query());
        let key = upload(&key, shape.key());
        let value = upload(&value, shape.value());
        let mask = match self.mask {
            MaskKind::None => None,
            MaskKind::Keep => Some(Mask::keep_from(gpu, &bools, &mask_shape)),
            MaskKind::Ignore => {
                let ignore: Vec<bool> = bools.iter().map(|keep| !keep).collect();
                Some(Mask::ignore_from(gpu, &ignore, &mask_shape))
            }
            MaskKind::Bias => Some(Mask::bias_from(gpu, &floats, &mask_shape)),
            MaskKind::BiasF16 => {
                Some(Tensor::upload(gpu, &support::halves(&floats), &mask_shape).and_then(Mask::bias))
            }
        }
        .map(|mask| mask.unwrap().with_short_keys());
        let key_mask = match self.key_mask {
            MaskKind::None => None,
            MaskKind::Ignore => {
                let ignore: Vec<bool> = key_bools.iter().map(|keep| !keep).collect();
                Some(Mask::ignore_from(gpu, &ignore, &[shape.batch, maskable]).unwrap())
            }
            _ => Some(Mask::keep_from(gpu, &key_bools, &[shape.batch, maskable]).unwrap()),
        };
        let lengths = lengths.map(|lengths| KvLengths::new(gpu, &lengths).unwrap());
        let sinks = sinks.map(|sinks| Tensor::upload(gpu, &sinks, &[shape.heads]).unwrap());
        let halves = |tensor: &Tensor| {
            (
                tensor.slice(2, 0..self.past).unwrap(),
                tensor.slice(2, self.past..shape.keys).unwrap(),
            )
        };
        let ((past_key, new_key), (past_value, new_value)) = (halves(&key), halves(&value));
        let mut inputs = AttentionInputs::new(&query, &new_key, &new_value);
        if self.past > 0 {
            inputs = inputs.past(&past_key, &past_value);
        }
        inputs.mask = mask.as_ref();
        inputs.key_mask = key_mask.as_ref();
        inputs.kv_lengths = lengths.as_ref();
        inputs.sinks = sinks.as_ref();
        let attention = Attention::new(gpu, self.options.clone()).map_err(|error| error.to_string())?;
        let stored_f16 = self.dtype == DType::F16;
        // Nothing may read scratch that it did not write.
        gpu.poison_scratch().unwrap();
        let fused = attention
            .clone()
            .with_path(AttentionPath::Fused)
            .run(&inputs, Wanted::output().lse())
            .map_err(|error| error.to_string())?;
        check_bound(
            "fused output",
            &download(&fused.output),
            &narrow.output,
            &truth.output,
            stored_f16,
        )?;
        check_bound(
            "fused lse",
            &download(fused.lse.as_ref().unwrap()),
            &narrow.lse,
            &truth.lse,
            false,
        )?;
        if self.fused_only {
            return Ok(());
        }
        gpu.poison_scratch().unwrap();
        let wanted = Wanted::output().lse().weights().mean_weights().present();
        let result = attention
            .run(&inputs, wanted)
            .map_err(|error| error.to_string())?;
        gpu.poison_scratch().unwrap();
        let composed = attention
            .clone()
            .with_path(AttentionPath::Composed)
            .run(&inputs, Wanted::output());
        let composed = composed.map_err(|error| error.to_string())?;

        let output = download(&result.output);
        check_bound("output", &output, &narrow.output, &truth.output, stored_f16)?;
        let weights = download(result.weights.as_ref().unwrap());
        check_bound("weights", &weights, &narrow.weights, &truth.weights, false)?;
        if let Some(at) = truth
            .weights
            .iter()
            .zip(&weights)
            .position(|(truth, got)| *truth == 0.0 && *got != 0.0)
        {
            return Err(format!(
                "weight {at} is {} where the key is invisible",
                weights[at]
            ));
        }
        check_bound(
            "lse",
            &download(result.lse.as_ref().unwrap()),
            &narrow.lse,
            &truth.lse,
            false,
        )?;
        let mean = |weights: &reference::AttentionOutput<f64>| {
            reference::mean_heads(&weights.weights, &shape).unwrap()
        };
        let narrow_mean = reference::mean_heads(&narrow.weights, &shape).unwrap();
        check_bound(
            "mean_weights",
            &download(result.mean_weights.as_ref().unwrap()),
            &narrow_mean,
            &mean(&truth),
            false,
        )?;
        for (what, present, whole) in [
            ("present_key", &result.present_key, &key),
            ("present_value", &result.present_value, &value),
        ] {
            let same = download(present.as_ref().unwrap())
                .iter()
                .zip(&download(whole))
                .all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
            if !same {
                return Err(format!("{what} is not past and new joined"));
            }
        }
        if output
            .iter()
            .zip(&download(&composed.output))
            .any(|(a, b)| a.to_bits() != b.to_bits())
        {
            return Err("asking for weights changed the output's bits".to_owned());
        }
        Ok(())
    }
}

pub(crate) fn calls() -> impl Strategy<Value = Call> {
    let shape = (
        0usize..3,
        0usize..3,
        1usize..4,
        0usize..40,
        0usize..70,
        0usize..40,
        0usize..40,
    );
    let position = (
        prop_oneof![
            Just(Causal::None),
            Just(Causal::TopLeft),
            Just(Causal::BottomRight)
        ],
        prop_oneof![Just(Align::TopLeft), Just(Align::BottomRight)],
        prop_oneof![Just(None), (0u32..12).prop_map(Some)],
        prop_oneof![Just(None), (0u32..12).prop_map(Some)],
        prop_oneof![Just(0i64), -20i64..40],
    );
    let score = (
        prop_oneof![Just(None), Just(Some(1.0f32)), Just(Some(0.0)), Just(Some(-0.3))],
        prop_oneof![Just(None), Just(Some(2.0f32)), Just(Some(30.0))],
        any::<bool>(),
        prop_oneof![3 => Just(0usize), 1 => 1usize..3],
    );
    let kind = || {
        prop_oneof![
            2 => Just(MaskKind::None),
            1 => Just(MaskKind::Keep),
            1 => Just(MaskKind::Ignore),
            1 => Just(MaskKind::Bias),
            1 => Just(MaskKind::BiasF16)
        ]
    };
    let mask = (kind(), any::<[bool; 4]>(), 1usize..=4, any::<bool>(), kind());
    let rest = (
        any::<[bool; 5]>(),
        prop_oneof![3 => Just(1.0f32), 1 => Just(30.0)],
        any::<u64>(),
        0usize..20,
    );
    (shape, position, score, mask, rest).prop_map(|(shape, position, score, mask, rest)| {
        let (batch, kv_heads, group, queries, keys, head_dim, value_dim) = shape;
        let (flags, large, seed, past) = rest;
        let [lengths, sinks, merged, half, has_past] = flags;
        let (scale, softcap, alibi, always) = score;
        let (causal, align, left, right, offset) = position;
        let heads = kv_heads * group;
        let mut options = AttentionOptions::new()
            .causal(causal)
            .align(align)
            .window(left, right)
            .query_offset(offset);
        options.scale = scale;
        options.softcap = softcap;
        options.alibi_slopes = alibi.then(|| (0..heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect());
        let past = if has_past && !lengths { past } else { 0 };
        let keys = keys + past;
        options.always_visible_keys = always.min(keys - past);
        Call {
            shape: AttentionShape {
                batch,
                heads,
                kv_heads,
                queries,
                keys,
                head_dim,
                value_dim,
            },
            past,
            options,
            mask: mask.0,
            mask_ones: mask.1,
            mask_rank: mask.2,
            short_mask: mask.3,
            key_mask: mask.4,
            lengths,
            sinks,
            dtype: if half { DType::F16 } else { DType::F32 },
            merged,
            large,
            fused_only: false,
            seed,
        }
    })
}

proptest! {
    #![proptest_config(support::property(400))]

    /// Any combination of sizes and options agrees with the reference.
    #[test]
    fn any_call_agrees_with_the_reference(call in calls()) {
        call.check(gpu()).map_err(TestCaseError::fail)?;
    }
}
