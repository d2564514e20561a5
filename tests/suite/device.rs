//! Devices: chosen by the environment, joined, poor in limits and features, shared, reused, lost.

use std::{
    process::Command,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionShape, Causal, DType, Error,
    Gpu, Linear, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Parameters,
    Tensor, Wanted, reference,
    wgpu::{self, Features, Limits},
};

use crate::{
    attention::{Call, MaskKind},
    support::{self, Numbers, check_bound, download, gpu, wide},
};

/// The adapter of [`gpu`], of an instance that all devices opened here share: `wgpu` cannot tell buffers of two
/// instances apart.
fn adapter() -> wgpu::Adapter {
    static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();
    // wgpu's OpenGL backend panics if two threads ask one instance for adapters.
    static ASKING: Mutex<()> = Mutex::new(());
    let instance = INSTANCE
        .get_or_init(|| wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env()));
    let wanted = gpu().info();
    let _alone = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
    pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()))
        .into_iter()
        .find(|adapter| {
            adapter.get_info().name == wanted.name && adapter.get_info().backend == wanted.backend
        })
        .unwrap()
}

/// A device of the tests' adapter with these features, as far as it has them, and these limits.
pub(crate) fn open_device(features: Features, limits: Limits) -> (wgpu::Device, wgpu::Queue) {
    let adapter = adapter();
    pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: features & adapter.features(),
        required_limits: limits,
        ..Default::default()
    }))
    .unwrap()
}

pub(crate) fn open(features: Features, limits: Limits) -> Gpu {
    let (device, queue) = open_device(features, limits);
    Gpu::from_device(&device, &queue).unwrap()
}

/// What every WebGPU device has: no features, the guaranteed limits.
pub(crate) fn open_default() -> Gpu {
    open(Features::empty(), Limits::default())
}

/// One device of that kind for tests that count nothing on it.
pub(crate) fn default_gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(open_default)
}

const fn shape(
    [batch, heads, kv_heads]: [usize; 3],
    queries: usize,
    keys: usize,
    head_dim: usize,
    value_dim: usize,
) -> AttentionShape {
    AttentionShape {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        head_dim,
        value_dim,
    }
}

/// Attention calls that between them use every kernel and option, with odd counts of halves.
fn calls() -> Vec<(&'static str, Call)> {
    let base = |sizes, queries, keys, head_dim, value_dim| {
        Call::new(shape(sizes, queries, keys, head_dim, value_dim))
    };
    let mut everything = base([2, 4, 2], 7, 13, 5, 3);
    everything.options = AttentionOptions::new()
        .causal(Causal::BottomRight)
        .window(Some(9), None)
        .softcap(20.0)
        .alibi([0.5, 0.25, 0.125, 0.0625])
        .always_visible_keys(1);
    (everything.mask, everything.key_mask, everything.lengths) = (MaskKind::Keep, MaskKind::Ignore, true);
    let mut past = base([1, 3, 1], 5, 71, 7, 9);
    (past.past, past.mask, past.merged, past.sinks) = (3, MaskKind::BiasF16, true, true);
    vec![
        ("one element", base([1, 1, 1], 1, 1, 1, 1)),
        ("tiles and a bit", base([1, 2, 2], 65, 67, 33, 31)),
        ("every option", everything),
        ("past keys and sinks", past),
        ("no keys", base([1, 2, 1], 3, 0, 8, 5)),
        ("no queries", base([1, 2, 1], 0, 3, 8, 5)),
    ]
}

/// Runs the calls in f32 and f16, a projection and a layer on a device, and lists what fails.
fn failures(gpu: &Gpu) -> Vec<String> {
    let mut failures = Vec::new();
    for (name, call) in calls() {
        for dtype in [DType::F32, DType::F16] {
            let call = Call {
                dtype,
                ..call.clone()
            };
            if let Err(error) = call.check(gpu) {
                failures.push(format!("{name}, {dtype:?}: {error}"));
            }
        }
    }
    for dtype in [DType::F32, DType::F16] {
        failures.extend(check_linear(gpu, dtype, [13, 21, 35]).err());
        failures.extend(check_layer(gpu, dtype).err());
    }
    failures
}

fn upload(gpu: &Gpu, dtype: DType, values: &[f32], shape: &[usize]) -> Tensor {
    match dtype {
        DType::F16 => Tensor::upload(gpu, &support::halves(values), shape).unwrap(),
        _ => Tensor::upload(gpu, values, shape).unwrap(),
    }
}

/// A projection of rows by `[outputs, inputs]` against the reference.
fn check_linear(gpu: &Gpu, dtype: DType, [rows, inputs, outputs]: [usize; 3]) -> Result<(), String> {
    let mut numbers = Numbers::new(5);
    let mut draw = |count| support::through_f16(&numbers.normals(count));
    let (x, weight, bias) = (draw(rows * inputs), draw(outputs * inputs), draw(outputs));
    let linear = Linear::new(
        upload(gpu, dtype, &weight, &[outputs, inputs]),
        Some(upload(gpu, dtype, &bias, &[outputs])),
    );
    let y = linear
        .unwrap()
        .run(&upload(gpu, dtype, &x, &[rows, inputs]))
        .map_err(|error| error.to_string())?;
    let narrow = reference::linear(&x, &weight, Some(&bias), rows, inputs, outputs).unwrap();
    let truth = reference::linear(
        &wide(&x),
        &wide(&weight),
        Some(&wide(&bias)),
        rows,
        inputs,
        outputs,
    )
    .unwrap();
    check_bound(
        &format!("linear {dtype:?}"),
        &download(&y),
        &narrow,
        &truth,
        dtype == DType::F16,
    )
}

/// A layer with a learned key, a key of zeros and a causal order against the reference.
fn check_layer(gpu: &Gpu, dtype: DType) -> Result<(), String> {
    let config = MultiHeadAttentionConfig::new(15, 3)
        .add_bias_kv(true)
        .add_zero_attn(true)
        .attention(AttentionOptions::new().causal(Causal::TopLeft));
    check_layer_of(gpu, dtype, config, [3, 11], NeedWeights::PerHead)
}

fn check_layer_of(
    gpu: &Gpu,
    dtype: DType,
    config: MultiHeadAttentionConfig,
    [batch, length]: [usize; 2],
    need: NeedWeights,
) -> Result<(), String> {
    let embed = config.embed_dim;
    let parameters = Parameters::init(&config, 2).unwrap();
    let x = support::through_f16(&Numbers::new(6).normals(batch * length * embed));
    let layer =
        MultiHeadAttention::new(gpu, config.clone(), &parameters).map_err(|error| error.to_string())?;
    let on_gpu = upload(gpu, dtype, &x, &[batch, length, embed]);
    let got = layer
        .forward(&MultiHeadInputs::new(&on_gpu), need)
        .map_err(|error| error.to_string())?;
    let p = &parameters;
    let mut parts = reference::LayerParameters::new(
        &p.q_proj_weight,
        &p.k_proj_weight,
        &p.v_proj_weight,
        &p.out_proj_weight,
    );
    parts.q_bias = p.q_proj_bias.as_deref();
    parts.k_bias = p.k_proj_bias.as_deref();
    parts.v_bias = p.v_proj_bias.as_deref();
    parts.out_bias = p.out_proj_bias.as_deref();
    (parts.bias_k, parts.bias_v) = (p.bias_k.as_deref(), p.bias_v.as_deref());
    let narrow = reference::MultiHead::self_attention(&config, parts, batch, length, &x)
        .run()
        .unwrap();
    let wide_x = wide(&x);
    let truth = reference::MultiHead::self_attention(&config, parts, batch, length, &wide_x)
        .run()
        .unwrap();
    let f16 = dtype == DType::F16;
    let name = format!("layer {dtype:?}");
    check_bound(&name, &download(&got.output), &narrow.output, &truth.output, f16)?;
    match got.weights {
        Some(weights) => check_bound(&name, &download(&weights), &narrow.weights, &truth.weights, false),
        None => Ok(()),
    }
}

#[track_caller]
fn assert_none(failures: &[String]) {
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn public_types_are_send_and_sync() {
    const fn shared<T: Send + Sync>() {}
    const _: () = {
        shared::<Gpu>();
        shared::<Tensor>();
        shared::<Attention>();
        shared::<AttentionInputs>();
        shared::<AttentionOutputs>();
        shared::<multihead::AttentionResult>();
        shared::<AttentionOptions>();
        shared::<AttentionShape>();
        shared::<multihead::KvLengths>();
        shared::<multihead::Mask>();
        shared::<Linear>();
        shared::<MultiHeadAttention>();
        shared::<MultiHeadAttentionConfig>();
        shared::<MultiHeadInputs>();
        shared::<multihead::MultiHeadOutputs>();
        shared::<multihead::MultiHeadResult>();
        shared::<Parameters>();
        shared::<multihead::CheckpointInfo>();
        shared::<multihead::CheckpointNames>();
        shared::<DType>();
        shared::<Wanted>();
        shared::<Error>();
        shared::<reference::Attention<f64>>();
        shared::<reference::MultiHead<f64>>();
    };
}

/// Run in a process of its own by [`the_environment_chooses_the_adapter`]: the environment belongs to the process.
#[test]
#[ignore = "says on stderr which adapter the environment chooses"]
fn says_which_adapter() {
    match Gpu::new() {
        Ok(gpu) => eprintln!("opened: {} {:?}", gpu.description(), gpu.limits().max_buffer_size),
        Err(error) => eprintln!("{error:?}\nrefused: {error}"),
    }
}

/// What `Gpu::new` says under these variables.
fn under(variables: &[(&str, &str)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([
        "device::says_which_adapter",
        "--exact",
        "--ignored",
        "--nocapture",
    ]);
    for name in ["WGPU_BACKEND", "WGPU_ADAPTER_NAME", "WGPU_POWER_PREF"] {
        child.env_remove(name);
    }
    let output = child.envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_environment_chooses_the_adapter() {
    let name = gpu().info().name.clone();
    let backend = gpu().info().backend.to_str();
    let elsewhere = if cfg!(windows) { "metal" } else { "dx12" };
    let part = name.chars().take(4).collect::<String>().to_uppercase();
    let opened = format!("opened: {name}");
    /// Variables, and what must be said under them.
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);
    let rows: [Row; 6] = [
        (
            &[("WGPU_ADAPTER_NAME", &part), ("WGPU_BACKEND", backend)],
            &[&opened],
        ),
        (
            &[("WGPU_ADAPTER_NAME", ""), ("WGPU_BACKEND", backend)],
            &["opened: "],
        ),
        (
            &[("WGPU_BACKEND", backend), ("WGPU_POWER_PREF", "low")],
            &["opened: "],
        ),
        (
            &[("WGPU_ADAPTER_NAME", "no such adapter")],
            &[
                "refused: ",
                "NoAdapter",
                "WGPU_ADAPTER_NAME=no such adapter",
                "power preference",
                &name,
            ],
        ),
        (
            &[("WGPU_BACKEND", elsewhere)],
            &[
                "refused: ",
                "NoAdapter",
                &elsewhere.to_uppercase(),
                "install a graphics driver",
            ],
        ),
        (
            &[("WGPU_BACKEND", elsewhere), ("WGPU_POWER_PREF", "low")],
            &["refused: ", "LowPower"],
        ),
    ];
    let failures: Vec<String> = rows
        .iter()
        .filter_map(|(variables, holds)| {
            let said = under(variables);
            let missing: Vec<_> = holds.iter().filter(|part| !said.contains(**part)).collect();
            (!missing.is_empty()).then(|| format!("{variables:?}: {missing:?} not in {said}"))
        })
        .collect();
    assert_none(&failures);
}

#[test]
fn a_new_device_has_the_adapters_limits_and_features() {
    let gpu = gpu();
    let adapter = adapter();
    let wanted =
        Features::SHADER_F16 | Features::SUBGROUP | Features::TIMESTAMP_QUERY | Features::PIPELINE_CACHE;
    assert_eq!(gpu.features() & wanted, adapter.features() & wanted);
    assert_eq!(gpu.limits().max_buffer_size, adapter.limits().max_buffer_size);
    assert_eq!(
        gpu.limits().max_storage_buffer_binding_size,
        adapter.limits().max_storage_buffer_binding_size
    );
    assert!(gpu.description().contains(&gpu.info().name));
}

#[test]
fn a_device_without_features_and_with_default_limits_is_right() {
    support::watch_log();
    let gpu = default_gpu();
    assert_eq!(
        gpu.features() & (Features::SHADER_F16 | Features::SUBGROUP),
        Features::empty()
    );
    assert_eq!(gpu.limits().max_storage_buffer_binding_size, 128 << 20);
    assert_none(&failures(gpu));
}

#[test]
fn a_device_without_subgroups_is_right() {
    let gpu = open(Features::SHADER_F16, gpu().limits().clone());
    assert!(!gpu.features().contains(Features::SUBGROUP));
    assert_none(&failures(&gpu));
}

#[test]
fn a_device_without_f16_is_right() {
    let gpu = open(Features::SUBGROUP, gpu().limits().clone());
    assert!(!gpu.features().contains(Features::SHADER_F16));
    assert_none(&failures(&gpu));
}

/// A quarter of the guaranteed limits and worse: calls are cut into more pieces, or refused with the numbers.
#[test]
fn a_starved_device_is_right_or_says_why_not() {
    let limits = Limits {
        max_storage_buffer_binding_size: 1 << 20,
        max_buffer_size: 1 << 20,
        max_compute_workgroups_per_dimension: 64,
        ..Limits::default()
    };
    let gpu = open(Features::empty(), limits);
    let mut failures = failures(&gpu);
    let right = |name: &str, result: Result<(), String>| result.err().map(|error| format!("{name}: {error}"));
    // Output alone: 4 MiB of scores go through 1 MiB, and 65 workgroups need two rows of the grid.
    let shape_of = |heads, length, dim| AttentionShape::new(1, heads, length, dim);
    let alone = |shape: AttentionShape| -> multihead::Result<Vec<f32>> {
        let ones = Tensor::upload(
            &gpu,
            &vec![1.0f32; shape.query().iter().product()],
            &shape.query(),
        )?;
        let attention = Attention::new(&gpu, AttentionOptions::new())?;
        attention
            .run(&AttentionInputs::new(&ones, &ones, &ones), Wanted::output())?
            .output
            .download()
    };
    for shape in [
        shape_of(1, 1024, 3),
        shape_of(2, 600, 5),
        shape_of(65, 1, 1),
        shape_of(300, 2, 1),
    ] {
        match alone(shape) {
            Ok(values) if values.iter().all(|value| (value - 1.0).abs() < 1e-5) => {}
            other => failures.push(format!("{shape:?}: {other:?}")),
        }
    }
    failures.extend(right(
        "300 heads",
        Call::new(shape([4, 75, 25], 3, 5, 4, 2)).check(&gpu),
    ));
    // Projected queries of 768 KiB, keys and values of 384 KiB each: one binding does not hold all three.
    let grouped = MultiHeadAttentionConfig::new(16, 8)
        .num_kv_heads(4)
        .with_head_dim(16)
        .attention(
            AttentionOptions::new()
                .causal(Causal::TopLeft)
                .window(Some(100), None),
        );
    failures.extend(right(
        "projections apart",
        check_layer_of(&gpu, DType::F32, grouped, [1, 1500], NeedWeights::No),
    ));
    failures.extend(right("many rows", check_linear(&gpu, DType::F32, [5000, 3, 5])));
    // More than there is.
    for (what, result) in [
        ("4 MiB of weights", {
            let x = Tensor::zeros(&gpu, DType::F32, &[1, 1, 1024, 1]).unwrap();
            let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
            attention
                .run(&AttentionInputs::new(&x, &x, &x), Wanted::output().weights())
                .map(|_| ())
        }),
        ("a grid of more than 64 by 64", {
            let linear = Linear::new(Tensor::zeros(&gpu, DType::F32, &[1, 1]).unwrap(), None).unwrap();
            let rows = 300_000;
            let x = Tensor::zeros(&gpu, DType::F16, &[1, 1])
                .unwrap()
                .broadcast_to(&[rows, 1])
                .unwrap();
            linear.run(&x).map(|_| ())
        }),
    ] {
        match result {
            Err(Error::Limit { needs, allows, .. }) if needs > allows => {}
            other => failures.push(format!("{what}: {other:?}")),
        }
    }
    assert_none(&failures);
}

/// A device that was opened with less than every kernel needs is refused when it is joined, by the name of the limit.
#[test]
fn a_device_with_less_than_the_kernels_need_is_refused() {
    /// Name of a limit, and what sets it too low.
    type Less = (&'static str, fn(&mut Limits));
    let less: [Less; 4] = [
        ("max_compute_workgroup_size_x", |limits| {
            limits.max_compute_workgroup_size_x = 128;
        }),
        ("max_bindings_per_bind_group", |limits| {
            limits.max_bindings_per_bind_group = 8;
        }),
        ("max_bind_groups", |limits| limits.max_bind_groups = 0),
        ("max_uniform_buffers_per_shader_stage", |limits| {
            limits.max_uniform_buffers_per_shader_stage = 0;
        }),
    ];
    for (name, lower) in less {
        let mut limits = Limits::default();
        lower(&mut limits);
        let (device, queue) = open_device(Features::empty(), limits);
        match Gpu::from_device(&device, &queue) {
            Err(Error::Limit {
                limit, needs, allows, ..
            }) => assert!(limit == name && needs > allows, "{limit} for {name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
}

/// Devices are opened from many threads at once.
#[test]
fn threads_open_devices_at_once() {
    let opened: Vec<Gpu> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| Gpu::new().unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(opened.windows(2).all(|pair| pair[0] != pair[1]));
}

/// More workgroups than an axis of the grid has.
#[test]
fn grids_beyond_one_axis_are_folded() {
    let mut failures = Vec::new();
    for (batch, heads) in [(65_535, 1), (65_537, 1), (257, 257)] {
        let call = Call::new(shape([batch, heads, heads], 1, 2, 1, 1));
        if let Err(error) = call.check(gpu()) {
            failures.push(format!("{batch} x {heads}: {error}"));
        }
    }
    failures.extend(check_linear(gpu(), DType::F32, [65_537, 2, 3]).err());
    assert_none(&failures);

    // As many heads: equal scores, so head h gives the mean of h and h + 2.
    let heads = 65_537;
    let zeros = |rows| Tensor::zeros(gpu(), DType::F32, &[1, heads, rows, 1]).unwrap();
    let values: Vec<f32> = (0..heads)
        .flat_map(|head| [head as f32, head as f32 + 2.0])
        .collect();
    let value = Tensor::upload(gpu(), &values, &[1, heads, 2, 1]).unwrap();
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let (query, key) = (zeros(1), zeros(2));
    let result = attention
        .run(&AttentionInputs::new(&query, &key, &value), Wanted::output())
        .unwrap();
    for (head, got) in download(&result.output).into_iter().enumerate() {
        let expected = head as f32 + 1.0;
        assert!(
            (got - expected).abs() <= 4.0 * f32::EPSILON * expected,
            "head {head}: {got}"
        );
    }
}

/// A call of a handful of numbers, recorded and submitted.
fn small_call(gpu: &Gpu) -> multihead::Result<Vec<f32>> {
    let values = Numbers::new(3).normals(2 * 3 * 4);
    let x = Tensor::upload(gpu, &values, &[1, 2, 3, 4])?;
    let attention = Attention::new(gpu, AttentionOptions::new())?;
    attention
        .run(&AttentionInputs::new(&x, &x, &x), Wanted::output())?
        .output
        .download()
}

/// A lost device answers every call with `DeviceLost`, whoever opened it; others go on; and the caller's handler and
/// callback stay the caller's.
#[test]
fn a_lost_device_is_an_error_and_nothing_else() {
    let own = Gpu::new().unwrap();
    let (device, queue) = open_device(Features::empty(), Limits::default());
    let reports = Arc::new(AtomicU32::new(0));
    let losses = Arc::new(AtomicU32::new(0));
    let (seen, lost) = (Arc::clone(&reports), Arc::clone(&losses));
    device.on_uncaptured_error(Arc::new(move |_| {
        seen.fetch_add(1, Ordering::Relaxed);
    }));
    device.set_device_lost_callback(move |_, _| {
        lost.fetch_add(1, Ordering::Relaxed);
    });
    let joined = Gpu::from_device(&device, &queue).unwrap();
    let other = default_gpu();
    let expected = small_call(other).unwrap();

    let mut failures = Vec::new();
    for (whose, gpu) in [("own", &own), ("the caller's", &joined)] {
        assert_eq!(small_call(gpu).unwrap().len(), expected.len());
        let x = Tensor::upload(gpu, &[1.0f32; 24], &[1, 2, 3, 4]).unwrap();
        let output = Tensor::zeros(gpu, DType::F32, &[1, 2, 3, 4]).unwrap();
        let inputs = AttentionInputs::new(&x, &x, &x);
        let attention = Attention::new(gpu, AttentionOptions::new()).unwrap();
        let layer = MultiHeadAttention::seeded(gpu, MultiHeadAttentionConfig::new(4, 2), 1).unwrap();
        let linear = Linear::new(Tensor::zeros(gpu, DType::F32, &[4, 4]).unwrap(), None).unwrap();
        let rows = x.slice(1, 0..1).unwrap().reshape(&[3, 4]).unwrap();
        // Recorded, but not submitted before the loss.
        let mut early = gpu.encoder();
        attention
            .record(&mut early, &inputs, &AttentionOutputs::new(&output))
            .unwrap();

        gpu.device().destroy();

        let mut late = gpu.encoder();
        let answers: Vec<(&str, multihead::Result<()>)> = vec![
            ("submit", gpu.submit(early)),
            (
                "record",
                attention.record(&mut late, &inputs, &AttentionOutputs::new(&output)),
            ),
            ("submit of nothing", gpu.submit(gpu.encoder())),
            ("run", attention.run(&inputs, Wanted::output()).map(|_| ())),
            (
                "run of a new kernel",
                attention
                    .run(&inputs, Wanted::output().mean_weights())
                    .map(|_| ()),
            ),
            ("linear", linear.run(&rows).map(|_| ())),
            (
                "forward",
                layer
                    .forward(&MultiHeadInputs::new(&rows), NeedWeights::No)
                    .map(|_| ()),
            ),
            (
                "a new layer",
                MultiHeadAttention::seeded(gpu, MultiHeadAttentionConfig::new(4, 2), 1).map(|_| ()),
            ),
            ("warm_up", attention.warm_up(DType::F32, 9, 9)),
            ("upload", Tensor::upload(gpu, &[1.0f32], &[1]).map(|_| ())),
            ("zeros", Tensor::zeros(gpu, DType::F32, &[5]).map(|_| ())),
            (
                "wrap",
                Tensor::from_buffer(gpu, x.buffer(), 0, DType::F32, &[4]).map(|_| ()),
            ),
            ("download", output.download::<f32>().map(|_| ())),
            (
                "download_async",
                pollster::block_on(output.download_async::<f32>()).map(|_| ()),
            ),
            ("poll", gpu.poll()),
            ("wait", gpu.wait()),
            ("join", Gpu::from_device(gpu.device(), gpu.queue()).map(|_| ())),
        ];
        for (what, answer) in answers {
            // Pipelines that were built before the loss need nothing from the device.
            let ready = what == "warm_up" && answer.is_ok();
            if !ready && !matches!(answer, Err(Error::DeviceLost(_))) {
                failures.push(format!("{whose} device, {what}: {answer:?}"));
            }
        }
        gpu.release_scratch();
        if small_call(other).as_ref() != Ok(&expected) {
            failures.push(format!("{whose} device took another one with it"));
        }
    }
    assert_none(&failures);
    assert_eq!(
        reports.load(Ordering::Relaxed),
        0,
        "the caller's error handler was called"
    );
    assert_eq!(
        losses.load(Ordering::Relaxed),
        1,
        "the caller's lost-device callback was not its own"
    );
}

/// Errors that this crate provokes stay inside it; those of the caller reach the caller.
#[test]
fn the_callers_error_handler_stays_the_callers() {
    let (device, queue) = open_device(Features::empty(), Limits::default());
    let reports = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&reports);
    device.on_uncaptured_error(Arc::new(move |_| {
        seen.fetch_add(1, Ordering::Relaxed);
    }));
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let joined = Gpu::from_device(&device, &queue).unwrap();
    assert!(small_call(&joined).is_ok());

    // A buffer of another device, a destroyed one, an encoder that is invalid.
    let foreign = Tensor::zeros(default_gpu(), DType::F32, &[4]).unwrap();
    let wrapped = Tensor::from_buffer(&joined, foreign.buffer(), 0, DType::F32, &[4]);
    assert!(matches!(wrapped, Err(Error::WrongDevice(_))), "{wrapped:?}");
    let x = Tensor::upload(&joined, &[1.0f32; 4], &[1, 1, 2, 2]).unwrap();
    x.buffer().destroy();
    let attention = Attention::new(&joined, AttentionOptions::new()).unwrap();
    assert!(
        attention
            .run(&AttentionInputs::new(&x, &x, &x), Wanted::output())
            .is_err()
    );
    assert!(x.download::<f32>().is_err());
    let mut encoder = joined.encoder();
    encoder.pop_debug_group();
    let submitted = joined.submit(encoder);
    assert!(matches!(submitted, Err(Error::Wgpu { .. })), "{submitted:?}");
    assert_eq!(
        pollster::block_on(scope.pop()).map(|error| error.to_string()),
        None
    );
    assert_eq!(reports.load(Ordering::Relaxed), 0);

    // The handler is still the caller's, and the device still works.
    let _ = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: !3,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    assert_eq!(reports.load(Ordering::Relaxed), 1);
    assert_eq!(small_call(&joined), small_call(default_gpu()));
}

#[test]
fn two_devices_work_side_by_side() {
    let joined = open_default();
    // Of one instance, of another one, and the same device joined again.
    let others = [
        open_default(),
        Gpu::new().unwrap(),
        Gpu::from_device(joined.device(), joined.queue()).unwrap(),
    ];
    let expected = small_call(&joined).unwrap();
    assert_eq!(joined, joined.clone());
    let x = Tensor::zeros(&joined, DType::F32, &[1, 1, 2, 2]).unwrap();
    for other in others {
        assert_ne!(joined, other);
        let answer = small_call(&other).unwrap();
        assert!(answer.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
        let attention = Attention::new(&other, AttentionOptions::new()).unwrap();
        let refused = attention.run(&AttentionInputs::new(&x, &x, &x), Wanted::output());
        assert!(matches!(refused, Err(Error::WrongDevice(_))), "{refused:?}");
        drop((attention, other));
        assert_eq!(small_call(&joined).as_ref(), Ok(&expected));
    }
}

/// Threads that record and submit at once share pipelines and scratch, and disturb neither each other's numbers
/// nor a submission order in which scratch is reused.
#[test]
fn threads_record_at_once() {
    let gpu = Gpu::new().unwrap();
    let attention = Attention::new(&gpu, AttentionOptions::new().causal(Causal::TopLeft)).unwrap();
    let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(12, 3), 4).unwrap();
    let run = |seed: u64, length: usize| {
        let x = Tensor::upload(&gpu, &Numbers::new(seed).normals(12 * length), &[1, 3, length, 4]).unwrap();
        let wanted = Wanted::output().mean_weights();
        let result = attention.run(&AttentionInputs::new(&x, &x, &x), wanted).unwrap();
        let merged = x.permute(&[0, 2, 1, 3]).unwrap();
        let rows = Tensor::upload(&gpu, &download(&merged), &[length, 12]).unwrap();
        let forward = layer
            .forward(&MultiHeadInputs::new(&rows), NeedWeights::No)
            .unwrap();
        [
            &result.output,
            result.mean_weights.as_ref().unwrap(),
            &forward.output,
        ]
        .map(|tensor| download(tensor).into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    let calls: Vec<(u64, usize)> = (0..4).map(|thread| (thread, 3 + 17 * thread as usize)).collect();
    let together: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = calls
            .iter()
            .map(|&(seed, length)| scope.spawn(move || (0..8).map(|_| run(seed, length)).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (&(seed, length), answers) in calls.iter().zip(&together) {
        let alone = run(seed, length);
        assert!(answers.iter().all(|answer| *answer == alone), "length {length}");
    }
}

/// Tensors may be dropped as soon as the call is recorded; scratch that is outgrown or released lives on in what
/// was recorded with it.
#[test]
fn tensors_and_scratch_are_dropped_while_commands_are_in_flight() {
    let gpu = Gpu::new().unwrap();
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let expected: Vec<Vec<f32>> = (1..6)
        .map(|length| {
            let x = Tensor::upload(
                &gpu,
                &Numbers::new(length).normals(40 * length as usize),
                &[1, 2, 5 * length as usize, 4],
            );
            let x = x.unwrap();
            download(
                &attention
                    .run(&AttentionInputs::new(&x, &x, &x), Wanted::output())
                    .unwrap()
                    .output,
            )
        })
        .collect();
    gpu.release_scratch();
    let mut encoder = gpu.encoder();
    let outputs: Vec<Tensor> = (1..6)
        .map(|length| {
            let rows = 5 * length as usize;
            let x = Tensor::upload(&gpu, &Numbers::new(length).normals(8 * rows), &[1, 2, rows, 4]).unwrap();
            let output = Tensor::zeros(&gpu, DType::F32, &[1, 2, rows, 4]).unwrap();
            attention
                .record(
                    &mut encoder,
                    &AttentionInputs::new(&x, &x, &x),
                    &AttentionOutputs::new(&output),
                )
                .unwrap();
            if length == 3 {
                gpu.release_scratch();
            }
            output
        })
        .collect();
    drop(attention);
    gpu.submit(encoder).unwrap();
    gpu.release_scratch();
    assert_eq!(gpu.scratch_bytes(), 0);
    for (length, (output, expected)) in outputs.iter().zip(&expected).enumerate() {
        assert_eq!(&download(output), expected, "call {length}");
    }
}

/// Pipelines are told apart by element types and tiles, never by sizes; scratch does not grow from call to call.
#[test]
fn pipelines_and_scratch_are_bounded() {
    let gpu = Gpu::new().unwrap();
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    attention.warm_up(DType::F32, 9, 9).unwrap();
    let warm = gpu.pipelines();
    assert!((1..16).contains(&warm), "{warm} pipelines");
    for index in 0..200usize {
        let (heads, queries, keys) = (1 + index % 3, 1 + index % 70, 1 + index * 11);
        let [batch, head_dim] = [1 + index % 2, 1 + index % 9];
        let query = Tensor::zeros(&gpu, DType::F32, &[batch, heads, queries, head_dim]).unwrap();
        let key = Tensor::zeros(&gpu, DType::F32, &[batch, heads, keys, head_dim]).unwrap();
        attention
            .run(&AttentionInputs::new(&query, &key, &key), Wanted::output())
            .unwrap();
    }
    gpu.wait().unwrap();
    assert_eq!(gpu.pipelines(), warm, "warm_up built all that 200 shapes need");

    let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(16, 4), 1).unwrap();
    let x = Tensor::upload(&gpu, &[0.5f32; 2 * 9 * 16], &[2, 9, 16]).unwrap();
    let forward = || {
        layer
            .forward(&MultiHeadInputs::new(&x), NeedWeights::Averaged)
            .unwrap()
    };
    forward();
    let (pipelines, scratch) = (gpu.pipelines(), gpu.scratch_bytes());
    assert!(scratch > 0);
    let buffers = |gpu: &Gpu| {
        gpu.device()
            .generate_allocator_report()
            .map(|report| report.allocations.len())
    };
    gpu.wait().unwrap();
    let before = buffers(&gpu);
    for _ in 0..300 {
        forward();
    }
    assert_eq!((gpu.pipelines(), gpu.scratch_bytes()), (pipelines, scratch));
    gpu.wait().unwrap();
    gpu.poll().unwrap();
    if let (Some(before), Some(after)) = (before, buffers(&gpu)) {
        assert!(after <= before + 4, "{before} live allocations became {after}");
    }
    gpu.release_scratch();
    assert_eq!(gpu.scratch_bytes(), 0);
    forward();
    assert!((1..=scratch).contains(&gpu.scratch_bytes()));
    assert_eq!(gpu.pipelines(), pipelines);
}

/// The future is ready once somebody polls the device.
#[test]
fn an_async_download_is_woken_by_polls_from_another_thread() {
    let gpu = Gpu::new().unwrap();
    let values = Numbers::new(8).normals(1001);
    let tensor = Tensor::upload(&gpu, &values, &[7, 143]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let poller = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                gpu.poll().unwrap();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        for _ in 0..5 {
            assert_eq!(
                pollster::block_on(tensor.download_async::<f32>()).as_ref(),
                Ok(&values)
            );
        }
        // A future that is dropped half-way leaves nothing behind that hurts.
        drop(tensor.download_async::<f32>());
        done.store(true, Ordering::Relaxed);
        poller.join().unwrap();
    });
    assert_eq!(tensor.download::<f32>(), Ok(values));
}

/// What an earlier, larger, poisoned call left in scratch does not show in a later one.
#[test]
fn what_scratch_held_before_does_not_matter() {
    let gpu = Gpu::new().unwrap();
    let mut options = AttentionOptions::new();
    options.window_left = Some(2);
    let attention = Attention::new(&gpu, options).unwrap();
    let layer =
        MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2).add_zero_attn(true), 4).unwrap();
    let run = |length: usize, past: usize, poison: bool| {
        let fill = |count: usize| {
            if poison {
                vec![f32::NAN; count]
            } else {
                Numbers::new(9).normals(count)
            }
        };
        let x = Tensor::upload(&gpu, &fill(8 * length), &[1, 2, length, 4]).unwrap();
        let behind = Tensor::upload(&gpu, &fill(8 * past), &[1, 2, past, 4]).unwrap();
        let inputs = AttentionInputs::new(&x, &x, &x).past(&behind, &behind);
        let result = attention.run(&inputs, Wanted::output().mean_weights()).unwrap();
        let alone = attention.run(&inputs, Wanted::output()).unwrap();
        let rows = Tensor::upload(&gpu, &fill(8 * length), &[length, 8]).unwrap();
        let forward = layer
            .forward(&MultiHeadInputs::new(&rows), NeedWeights::Averaged)
            .unwrap();
        [
            &result.output,
            &alone.output,
            &forward.output,
            forward.weights.as_ref().unwrap(),
        ]
        .map(|tensor| download(tensor).into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    let fresh = run(5, 3, false);
    assert!(
        fresh
            .iter()
            .flatten()
            .all(|bits| f32::from_bits(*bits).is_finite())
    );
    for poison in [false, true] {
        run(40, 33, poison);
        assert!(
            run(5, 3, false) == fresh,
            "after a larger call, poisoned: {poison}"
        );
    }
}
