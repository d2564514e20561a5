//! What can be seen from outside: profiles, the log, and pipelines that outlive their device.

use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, DType, Error, Gpu, Linear,
    MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor, Wanted,
    wgpu::Features,
};

use crate::{
    device::{open, open_default},
    support::{Numbers, download, gpu, logged},
};

fn fresh() -> Gpu {
    open(gpu().features(), gpu().limits().clone())
}

fn small_layer(gpu: &Gpu) -> (MultiHeadAttention, Tensor) {
    let layer = MultiHeadAttention::seeded(gpu, MultiHeadAttentionConfig::new(64, 4), 1).unwrap();
    let x = Tensor::upload(gpu, &Numbers::new(1).normals(2 * 20 * 64), &[2, 20, 64]).unwrap();
    (layer, x)
}

#[test]
fn a_profile_names_every_dispatch_and_changes_no_bit() {
    let gpu = fresh();
    if !gpu.features().contains(Features::TIMESTAMP_QUERY) {
        return;
    }
    let (layer, x) = small_layer(&gpu);
    gpu.start_profile().unwrap();
    let before = gpu.dispatches();
    let profiled = layer
        .forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)
        .unwrap();
    let dispatches = gpu.dispatches() - before;
    let profile = gpu.finish_profile().unwrap();

    // The self-checks of new variants ran in between and are no part of it.
    let counted: u64 = profile.kernels.iter().map(|time| time.dispatches).sum();
    assert_eq!(counted, dispatches, "{profile}");
    for kernel in ["linear", "scores", "softmax", "weighted_sum"] {
        let time = profile
            .kernels
            .iter()
            .find(|time| time.kernel.contains(&format!(" {kernel} ")))
            .unwrap_or_else(|| panic!("no {kernel} in\n{profile}"));
        assert!(!time.longest.is_zero() && time.longest <= time.total, "{time:?}");
        assert!(profile.to_string().contains(&time.kernel));
    }
    assert!(
        profile.kernels.is_sorted_by(|a, b| a.total >= b.total),
        "{profile}"
    );
    assert!(profile.total().as_secs() < 60, "{profile}");

    let plain = layer
        .forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)
        .unwrap();
    assert_eq!(download(&plain.output), download(&profiled.output));
    assert_eq!(
        gpu.finish_profile(),
        Err(Error::Option(
            "profiling: no profile was started, call Gpu::start_profile before the calls".to_owned()
        ))
    );
}

/// More dispatches than one query set times.
#[test]
fn a_profile_of_thousands_of_dispatches_is_whole() {
    let gpu = fresh();
    if !gpu.features().contains(Features::TIMESTAMP_QUERY) {
        return;
    }
    gpu.set_dispatch_work(1);
    let attention = Attention::new(&gpu, AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let x = Tensor::zeros(&gpu, DType::F32, &[1, 64, 130, 1]).unwrap();
    gpu.start_profile().unwrap();
    let before = gpu.dispatches();
    attention
        .run(&AttentionInputs::new(&x, &x, &x), Wanted::output())
        .unwrap();
    let dispatches = gpu.dispatches() - before;
    assert!(dispatches > 2048, "{dispatches}");
    let profile = gpu.finish_profile().unwrap();
    let counted: u64 = profile.kernels.iter().map(|time| time.dispatches).sum();
    assert_eq!(counted, dispatches);
}

#[test]
fn a_profile_leaves_out_what_was_not_submitted() {
    let gpu = fresh();
    if !gpu.features().contains(Features::TIMESTAMP_QUERY) {
        return;
    }
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let x = Tensor::zeros(&gpu, DType::F32, &[1, 1, 4, 8]).unwrap();
    let y = Tensor::zeros(&gpu, DType::F32, &[1, 1, 4, 8]).unwrap();
    gpu.start_profile().unwrap();
    let mut encoder = gpu.encoder();
    attention
        .record(
            &mut encoder,
            &AttentionInputs::new(&x, &x, &x),
            &AttentionOutputs::new(&y),
        )
        .unwrap();
    drop(encoder);
    assert_eq!(gpu.finish_profile().unwrap().kernels, []);
}

#[test]
fn a_device_without_a_clock_says_so() {
    let error = open_default().start_profile().unwrap_err();
    assert!(error.to_string().contains("TIMESTAMP_QUERY"), "{error}");
}

fn has(lines: &[String], parts: &[&str]) -> bool {
    lines
        .iter()
        .any(|line| parts.iter().all(|part| line.contains(part)))
}

#[test]
fn the_log_tells_of_pipelines_scratch_and_loss() {
    let gpu = fresh();
    let lines = logged(|| {
        let (layer, x) = small_layer(&gpu);
        layer
            .forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)
            .unwrap();
    });
    assert!(
        has(&lines, &["DEBUG multihead linear F32", "was built in"]),
        "{lines:#?}"
    );
    assert!(
        has(&lines, &["DEBUG scratch Projected grows from 0 to"]),
        "{lines:#?}"
    );
    assert!(!has(&lines, &["WARN"]), "{lines:#?}");

    let lines = logged(|| {
        gpu.device().destroy();
        assert!(matches!(
            Tensor::zeros(&gpu, DType::F32, &[4]),
            Err(Error::DeviceLost(_))
        ));
    });
    assert!(has(&lines, &["WARN the device is lost"]), "{lines:#?}");
}

#[test]
fn the_log_tells_of_variants_passed_over() {
    let gpu = fresh();
    gpu.break_kernels("subgroupBroadcast(", "no_such_function(");
    let lines = logged(|| {
        let one = Tensor::upload(&gpu, &[1.0f32], &[1, 1]).unwrap();
        Linear::new(one.clone(), None).unwrap().run(&one).unwrap();
    });
    let subgroups = has(&lines, &["LANES"]);
    assert_eq!(
        subgroups,
        has(
            &lines,
            &["WARN multihead linear", "is passed over", "no_such_function"]
        ),
        "{lines:#?}"
    );
}

#[test]
#[allow(unsafe_code)] // The data are the crate's own, whole or damaged in ways that it must notice.
fn pipelines_outlive_their_device() {
    let gpu = fresh();
    assert_eq!(gpu.pipeline_cache_data(), None);
    if !gpu.start_pipeline_cache().unwrap() {
        return;
    }
    let (layer, x) = small_layer(&gpu);
    let forward = |layer: &MultiHeadAttention, x: &Tensor| {
        let result = layer.forward(&MultiHeadInputs::new(x), NeedWeights::PerHead);
        download(&result.unwrap().output)
    };
    let y = forward(&layer, &x);
    let data = gpu.pipeline_cache_data().unwrap();
    println!("{} bytes", data.len());

    let next = fresh();
    assert_eq!(unsafe { next.load_pipeline_cache(&data) }, Ok(true));
    let (layer, x) = small_layer(&next);
    assert_eq!(forward(&layer, &x), y);

    // Damaged data are refused, and the device goes on without.
    let next = fresh();
    for damaged in [&data[..data.len() - 1], &[], b"no pipeline cache"] {
        let refused = unsafe { next.load_pipeline_cache(damaged) };
        assert!(matches!(refused, Err(Error::PipelineCache(_))), "{refused:?}");
    }
    let (layer, x) = small_layer(&next);
    assert_eq!(forward(&layer, &x), y);

    // A device without the feature.
    let plain = open_default();
    assert_eq!(plain.start_pipeline_cache(), Ok(false));
    assert_eq!(unsafe { plain.load_pipeline_cache(&data) }, Ok(false));
    assert_eq!(plain.pipeline_cache_data(), None);
}
