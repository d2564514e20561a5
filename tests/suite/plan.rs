//! What a plan says is what a call takes.

use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionPath, AttentionShape, Causal, DType, Gpu,
    MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Plan, Rotary, RotaryOptions,
    Tensor, Wanted,
};

use crate::{
    device::open,
    support::{download, gpu},
};

fn fresh() -> Gpu {
    open(gpu().features(), gpu().limits().clone())
}

/// Runs what was planned on a device where nothing else is held.
fn measured(
    gpu: &Gpu,
    attention: &Attention,
    shape: &AttentionShape,
    wanted: Wanted,
    dtype: DType,
) -> (u64, u64) {
    gpu.release_scratch();
    let base = gpu.held_bytes();
    let tensor = |shape: [usize; 4]| Tensor::zeros(gpu, dtype, &shape).unwrap();
    let (query, key, value) = (tensor(shape.query()), tensor(shape.key()), tensor(shape.value()));
    // Builds and checks the variants, which takes memory of its own once.
    attention.warm_up(dtype, shape.head_dim, shape.value_dim).unwrap();
    gpu.release_scratch();
    gpu.reset_peak_bytes();
    let before = gpu.dispatches();
    let _result = attention
        .run(&AttentionInputs::new(&query, &key, &value), wanted)
        .unwrap();
    (gpu.peak_bytes() - base, gpu.dispatches() - before)
}

#[test]
fn the_planned_peak_and_dispatches_are_the_measured_ones() {
    let gpu = fresh();
    let causal = AttentionOptions::new().causal(Causal::BottomRight);
    let mut grouped = AttentionShape::new(2, 6, 70, 32);
    (grouped.kv_heads, grouped.keys, grouped.value_dim) = (2, 150, 40);
    let rows = [
        (
            AttentionOptions::new(),
            AttentionShape::new(1, 2, 300, 64),
            Wanted::output(),
        ),
        (causal.clone(), grouped, Wanted::output().lse()),
        (
            causal.clone(),
            grouped,
            Wanted::output().lse().weights().mean_weights(),
        ),
        (
            AttentionOptions::new(),
            AttentionShape::new(1, 4, 1, 64),
            Wanted::output().present(),
        ),
        (
            AttentionOptions::new(),
            AttentionShape::new(0, 4, 5, 64),
            Wanted::output(),
        ),
    ];
    for work in [0, 1 << 20] {
        gpu.set_dispatch_work(work);
        for (options, shape, wanted) in &rows {
            for path in [AttentionPath::Auto, AttentionPath::Fused, AttentionPath::Composed] {
                if path == AttentionPath::Fused && (wanted.weights || wanted.mean_weights) {
                    continue;
                }
                for dtype in [DType::F32, DType::F16] {
                    let attention = Attention::new(&gpu, options.clone()).unwrap().with_path(path);
                    let plan = attention.plan(shape, dtype, *wanted).unwrap();
                    let measured = measured(&gpu, &attention, shape, *wanted, dtype);
                    assert_eq!(
                        (plan.peak(), plan.dispatches),
                        measured,
                        "{shape:?} {path:?} {dtype:?}: {plan}"
                    );
                }
            }
        }
    }
    // In ranges of keys, which scratch holds until they are merged.
    let mut limits = gpu.limits().clone();
    limits.max_storage_buffer_binding_size = 32 << 10;
    let gpu = open(gpu.features(), limits);
    let shape = AttentionShape::new(1, 2, 700, 16);
    let attention = Attention::new(&gpu, causal).unwrap();
    let plan = attention
        .plan(&shape, DType::F32, Wanted::output().lse())
        .unwrap();
    let measured = measured(&gpu, &attention, &shape, Wanted::output().lse(), DType::F32);
    assert_eq!((plan.peak(), plan.dispatches), measured, "{plan}");
    assert!(plan.scratch > 0, "{plan}");
}

fn plan(options: AttentionOptions, shape: AttentionShape, path: AttentionPath) -> Plan {
    let attention = Attention::new(gpu(), options).unwrap().with_path(path);
    attention.plan(&shape, DType::F32, Wanted::output()).unwrap()
}

/// Planning allocates, builds and runs nothing, however large the call.
#[test]
fn planning_touches_nothing() {
    let gpu = fresh();
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let (held, pipelines) = (gpu.held_bytes(), gpu.pipelines());
    let plan = attention.plan(
        &AttentionShape::new(1, 8, 131_072, 64),
        DType::F32,
        Wanted::output(),
    );
    assert!(
        plan.is_ok() || gpu.limits().max_buffer_size < 256 << 20,
        "{plan:?}"
    );
    assert_eq!(
        (gpu.held_bytes(), gpu.pipelines(), gpu.dispatches()),
        (held, pipelines, 0)
    );
}

/// Tiles of keys that nobody sees are counted as the kernel skips them.
#[test]
fn hidden_tiles_are_skipped() {
    let fused = |options, length| {
        plan(
            options,
            AttentionShape::new(1, 8, length, 64),
            AttentionPath::Fused,
        )
    };
    let full = fused(AttentionOptions::new(), 4096);
    assert_eq!(full.hidden_key_tiles, 0);
    let causal = fused(AttentionOptions::new().causal(Causal::TopLeft), 4096);
    assert_eq!(causal.key_tiles + causal.hidden_key_tiles, full.key_tiles);
    let share = causal.key_tiles as f64 / full.key_tiles as f64;
    assert!((0.5..0.52).contains(&share), "{share}");
    // A window costs its width for each row, however long the sequence.
    let window = AttentionOptions::new().window(Some(255), Some(0));
    let (short, long) = (fused(window.clone(), 4096), fused(window, 16_384));
    let growth = long.key_tiles as f64 / short.key_tiles as f64;
    assert!((4.0..4.2).contains(&growth), "{growth}");
    let all = fused(AttentionOptions::new(), 16_384);
    let share = long.key_tiles as f64 / all.key_tiles as f64;
    assert!(share < 0.02, "{share}");
}

/// For the 2,048 tokens of the tutorial: all scores would be 128 MiB.
#[test]
fn fused_scratch_does_not_grow_with_the_square_of_the_length() {
    for length in [2048, 4096, 16_384] {
        let shape = AttentionShape::new(1, 8, length, 64);
        // Drivers that end long loops take the keys in ranges, whose outputs wait in scratch that is bounded.
        let fused = plan(AttentionOptions::new(), shape, AttentionPath::Fused).scratch;
        assert!(
            fused <= if length <= 4096 { 0 } else { 4 << 20 },
            "{length}: {fused}"
        );
        let composed = plan(AttentionOptions::new(), shape, AttentionPath::Composed);
        assert_eq!(composed.scratch, 16 << 20);
    }
    let shape = AttentionShape::new(1, 8, 2048, 64);
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    if gpu().limits().max_storage_buffer_binding_size >= 128 << 20 {
        let weights = attention
            .plan(&shape, DType::F32, Wanted::output().weights())
            .unwrap();
        assert_eq!(weights.outputs, 2048 * 512 * 4 + (128 << 20));
    }
}

/// What the crate itself counts of its buffers, not what a plan says.
#[test]
fn no_buffer_of_a_layer_holds_all_scores() {
    let gpu = fresh();
    let (length, embed, heads) = (1500, 64, 8);
    let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(embed, heads), 1).unwrap();
    layer.warm_up(DType::F32).unwrap();
    let x = Tensor::zeros(&gpu, DType::F32, &[1, length, embed]).unwrap();
    gpu.reset_peak_bytes();
    let base = gpu.held_bytes();
    layer.forward(&MultiHeadInputs::new(&x), NeedWeights::No).unwrap();
    let taken = gpu.peak_bytes() - base;
    let row = (length * embed * 4) as u64;
    // Queries, keys and values, the attention output, the layer's output, and a few params.
    assert!(
        taken >= 5 * row && taken < 5 * row + 4096,
        "{taken} bytes, {row} a row of E"
    );
    assert!(taken < (length * length * 4) as u64);
}

/// The layer's plan, with one binding for the projections and, in small bindings, cut into pieces of rows; the results
/// are the same.
#[test]
fn a_layers_plan_is_what_it_takes() {
    for rotary in [None, Some(RotaryOptions::new(6))] {
        check_layer_plan(rotary);
    }
}

fn check_layer_plan(rotary: Option<RotaryOptions>) {
    let (length, embed, heads) = (200, 32, 4);
    let mut outputs = Vec::new();
    let mut limits = gpu().limits().clone();
    limits.max_storage_buffer_binding_size = 24 << 10;
    for gpu in [fresh(), open(gpu().features(), limits)] {
        let config = MultiHeadAttentionConfig::new(embed, heads).num_kv_heads(2);
        let layer = MultiHeadAttention::seeded(&gpu, config, 1)
            .unwrap()
            .with_path(AttentionPath::Fused);
        let layer = match rotary {
            Some(options) => layer
                .with_rotary(Rotary::new(&gpu, options, length).unwrap())
                .unwrap(),
            None => layer,
        };
        layer.warm_up(DType::F32).unwrap();
        let values: Vec<f32> = (0..2 * length * embed)
            .map(|i| ((i * 7919) % 2003) as f32 / 1001.5 - 1.0)
            .collect();
        let x = Tensor::upload(&gpu, &values, &[2, length, embed]).unwrap();
        gpu.release_scratch();
        gpu.reset_peak_bytes();
        let (base, before) = (gpu.held_bytes(), gpu.dispatches());
        let output = layer
            .forward(&MultiHeadInputs::new(&x), NeedWeights::No)
            .unwrap()
            .output;
        let taken = (gpu.peak_bytes() - base, gpu.dispatches() - before);
        let plan = layer.plan(2, length, None, DType::F32, NeedWeights::No).unwrap();
        assert_eq!((plan.peak() - plan.inputs, plan.dispatches), taken, "{plan}");
        outputs.push((plan.dispatches, download(&output)));
    }
    assert_eq!(outputs[0].0, if rotary.is_some() { 5 } else { 3 });
    assert!(outputs[1].0 > 10, "{}", outputs[1].0);
    let largest = outputs[0]
        .1
        .iter()
        .zip(&outputs[1].1)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(largest < 1e-6, "{largest}");
}

#[test]
fn dropped_tensors_are_not_held() {
    let gpu = fresh();
    let base = gpu.held_bytes();
    let x = Tensor::zeros(&gpu, DType::F32, &[1000]).unwrap();
    let view = x.slice(0, 5..10).unwrap();
    drop(x);
    assert_eq!(gpu.held_bytes() - base, 4000);
    drop(view.clone());
    assert_eq!(gpu.held_bytes() - base, 4000);
    drop(view);
    assert_eq!(gpu.held_bytes(), base);
    assert_eq!(gpu.peak_bytes() - base, 4000);
}
