//! Variants that compute wrongly on a device are found out before they are used.

use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionPath, AttentionShape, DType, Gpu, Linear, Tensor,
    Wanted, wgpu,
};

use crate::{
    attention::Call,
    device::open,
    support::{download, gpu},
};

fn has_subgroup_variants(gpu: &Gpu) -> bool {
    gpu.info().device_type == wgpu::DeviceType::Cpu
        && gpu.features().contains(wgpu::Features::SUBGROUP)
        && gpu.info().subgroup_min_size >= 4
}

fn fresh() -> Gpu {
    open(gpu().features(), gpu().limits().clone())
}

/// Lanes that get a wrong neighbour's numbers, as with a subgroup size that the kernel did not expect.
#[test]
fn a_variant_broken_on_purpose_is_named_and_passed_over() {
    let gpu = fresh();
    if !has_subgroup_variants(&gpu) {
        return;
    }
    gpu.break_kernels("subgroupBroadcast(x, 1u)", "subgroupBroadcast(x, 0u)");
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let shape = AttentionShape::new(1, 2, 40, 32);
    let choice = attention.choice(&shape, DType::F32, false).unwrap();
    assert_eq!(choice.path, AttentionPath::Fused);
    assert!(
        choice.variant.contains("flash") && choice.variant.contains("THREAD_ROWS"),
        "{choice:?}"
    );
    // The variants for 8 and for 4 lanes, or the latter alone.
    assert!(!choice.passed_over.is_empty(), "{choice:?}");
    for text in &choice.passed_over {
        assert!(
            text.contains("flash") && text.contains("LANES") && text.contains("failed its self-check"),
            "{text}"
        );
    }
    // What is left is right.
    Call::new(shape).check(&gpu).unwrap();
    let weight = Tensor::upload(&gpu, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let x = Tensor::upload(&gpu, &[10.0f32, 1.0], &[1, 2]).unwrap();
    let y = Linear::new(weight, None).unwrap().run(&x).unwrap();
    assert_eq!(download(&y), [12.0, 34.0]);
}

/// A driver that refuses a variant is as bad as one that computes it wrongly.
#[test]
fn a_variant_that_does_not_build_is_passed_over() {
    let gpu = fresh();
    if !has_subgroup_variants(&gpu) {
        return;
    }
    gpu.break_kernels("subgroupBroadcast(x, 1u)", "no_such_function(x)");
    let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
    let choice = attention
        .choice(&AttentionShape::new(1, 2, 40, 32), DType::F32, false)
        .unwrap();
    assert!(
        choice
            .passed_over
            .iter()
            .any(|text| text.contains("no_such_function")),
        "{choice:?}"
    );
    let x = Tensor::zeros(&gpu, DType::F32, &[1, 2, 40, 32]).unwrap();
    let output = attention
        .run(&AttentionInputs::new(&x, &x, &x), Wanted::output())
        .unwrap()
        .output;
    assert!(download(&output).iter().all(|&x| x == 0.0));
}

#[test]
fn a_sound_device_passes_nothing_over() {
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    for weights in [false, true] {
        let choice = attention
            .choice(&AttentionShape::new(1, 2, 40, 32), DType::F32, weights)
            .unwrap();
        assert!(choice.passed_over.is_empty(), "{choice:?}");
        assert!(!choice.reason.is_empty(), "{choice:?}");
    }
}
