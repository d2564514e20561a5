//! What a call leaves behind: the same bits, memory, pipelines, waiting.

use super::*;

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

/// The first call of any kind builds nothing after its warm-up, with added and always visible keys and mixed types too.
#[test]
fn warm_ups_leave_nothing_to_build() {
    use multihead::{
        MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Rotary, RotaryOptions,
    };
    for gpu in [Gpu::new().unwrap(), crate::device::open_default()] {
        let config = MultiHeadAttentionConfig::new(8, 2)
            .add_bias_kv(true)
            .add_zero_attn(true);
        let layer = MultiHeadAttention::seeded(&gpu, config, 1).unwrap();
        layer.warm_up(DType::F32).unwrap();
        let built = gpu.pipelines();
        let x = Tensor::zeros(&gpu, DType::F32, &[1, 9, 8]).unwrap();
        for weights in [NeedWeights::No, NeedWeights::Averaged, NeedWeights::PerHead] {
            layer.forward(&MultiHeadInputs::new(&x), weights).unwrap();
        }
        assert_eq!(gpu.pipelines(), built, "a layer");

        let options = AttentionOptions::new().always_visible_keys(3);
        let attention = Attention::new(&gpu, options).unwrap();
        attention.warm_up(DType::F32, 8, 8).unwrap();
        let built = gpu.pipelines();
        let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 9, 8]).unwrap();
        let lengths = KvLengths::new(&gpu, &[4]).unwrap();
        let sinks = Tensor::zeros(&gpu, DType::F32, &[2]).unwrap();
        let inputs = AttentionInputs::new(&x, &x, &x)
            .kv_lengths(&lengths)
            .sinks(&sinks);
        attention
            .run(&inputs, Wanted::output().lse().mean_weights())
            .unwrap();
        attention.run(&inputs, Wanted::output().lse()).unwrap();
        let inputs = AttentionInputs::new(&x, &x, &x).past(&x, &x);
        attention.run(&inputs, Wanted::output().present()).unwrap();
        assert_eq!(gpu.pipelines(), built, "an operator");

        for (dtype, activations) in [(DType::F16, DType::F32), (DType::F32, DType::F16)] {
            let options = AttentionOptions::new().window(Some(7), Some(0));
            let config = MultiHeadAttentionConfig::new(16, 4)
                .num_kv_heads(2)
                .attention(options);
            let rotary = Rotary::new(&gpu, RotaryOptions::new(4), 64).unwrap();
            let layer = MultiHeadAttention::seeded(&gpu, config, 1)
                .unwrap()
                .with_rotary(rotary)
                .unwrap();
            for mut cache in [
                layer.kv_cache(1, 64, dtype).unwrap(),
                layer.rolling_kv_cache(1, 8, dtype).unwrap(),
            ] {
                layer.warm_up_steps(&cache, activations).unwrap();
                let built = gpu.pipelines();
                for tokens in [5, 1, 1, 8] {
                    let x = Tensor::zeros(&gpu, activations, &[1, tokens, 16]).unwrap();
                    layer.step(&x, &mut cache).unwrap();
                }
                assert_eq!(
                    gpu.pipelines(),
                    built,
                    "steps of {activations:?} on a cache of {dtype:?}"
                );
            }
        }
    }
}

/// Sizes that no memory holds are refused before anything is computed or reserved.
#[test]
fn sizes_beyond_any_memory_are_refused() {
    use multihead::{KvCache, KvCacheShape, Rotary, RotaryOptions};
    let refused = |what: &str, error: Option<Error>| {
        let text = error.unwrap_or_else(|| panic!("{what} was accepted")).to_string();
        assert!(text.len() > 30, "{what}: {text}");
    };
    let start = std::time::Instant::now();
    refused(
        "tables",
        Rotary::new(gpu(), RotaryOptions::new(128), 1 << 40).err(),
    );
    refused(
        "wide tables",
        Rotary::new(gpu(), RotaryOptions::new(1 << 29), 1 << 29).err(),
    );
    let tables = reference::rotary_tables::<f64>(&RotaryOptions::new(128), 1 << 45);
    refused("the reference's tables", tables.err());
    let shape = AttentionShape {
        heads: 1,
        kv_heads: 1,
        queries: 1 << 20,
        ..AttentionShape::new(1 << 29, 1, 0, 0)
    };
    let options = AttentionOptions::new();
    refused(
        "rows",
        reference::Attention::<f64>::new(shape, &options, &[], &[], &[])
            .run()
            .err(),
    );
    let cache = KvCache::new(gpu(), KvCacheShape::new(1 << 29, 1, 0, 1), DType::F32);
    refused("a cache", cache.err());
    assert!(
        start.elapsed() < std::time::Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );

    let options = AttentionOptions::new().always_visible_keys(30);
    let choice =
        Attention::new(gpu(), options)
            .unwrap()
            .choice(&super::shape(1, 1, 4, 4, 8), DType::F32, false);
    refused("more visible keys than keys", choice.err());
}
