//! Every variant that can ship: its WGSL holds, translates, fits the guaranteed limits, and its params are
//! those of the host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{io::Write, process::Command};

use naga::{
    back::{hlsl, msl, spv},
    proc::Layouter,
    valid::{Capabilities, ModuleInfo, ValidationFlags, Validator},
};

use super::{
    append, copy, decode, flash, join_words, linear, mean_heads, merge_ranges, move_sequences, rotary,
    scores, softmax, weighted_sum,
};
use crate::{
    kernel::{Params, Storage, Variant},
    tiles::DecodeTile,
    tuning::{Adapter, FLASH, PRODUCTS, SOFTMAX_THREADS},
};

type Fields = Vec<(String, usize)>;

struct Shipped {
    variant: Variant,
    fields: Fields,
    size: usize,
}

fn shipped<P: Params>(variant: Variant) -> Shipped {
    Shipped {
        variant,
        fields: P::fields(),
        size: size_of::<P>(),
    }
}

/// Every combination of tiles and element types that a device can ask for: native and packed halves exclude
/// each other.
fn all() -> Vec<Shipped> {
    let mut all = Vec::new();
    for halves in [Storage::F16, Storage::Packed] {
        let kinds = [Storage::F32, halves];
        for (a, b) in kinds.iter().flat_map(|&a| kinds.map(|b| (a, b))) {
            all.push(shipped::<copy::CopyParams>(copy::variant(a, b)));
            for tables in kinds {
                all.push(shipped::<rotary::RotaryParams>(rotary::variant(a, tables, b)));
                all.push(shipped::<append::AppendParams>(append::variant(a, tables, b)));
            }
            for tile in PRODUCTS.iter().map(|row| row.tile) {
                all.push(shipped::<scores::ScoresParams>(scores::variant(tile, a, b)));
                all.push(shipped::<weighted_sum::WeightedSumParams>(weighted_sum::variant(
                    tile, a, b,
                )));
                for (bias, output) in kinds.iter().flat_map(|&a| kinds.map(|b| (a, b))) {
                    all.push(shipped::<linear::LinearParams>(linear::variant(
                        tile, a, b, bias, output,
                    )));
                }
            }
        }
    }
    for (tile, plain) in FLASH
        .iter()
        .flat_map(|row| row.tile.all_sizes())
        .flat_map(|tile| [(tile, false), (tile, true)])
    {
        // The element types touch nothing but the loads and the store: one of each will do.
        for storages in [[Storage::F32; 4], [Storage::F16; 4], [Storage::Packed; 4]] {
            all.push(shipped::<flash::FlashParams>(flash::variant(
                tile, plain, storages,
            )));
        }
    }
    for output in [Storage::F32, Storage::F16, Storage::Packed] {
        all.push(shipped::<merge_ranges::MergeRangesParams>(merge_ranges::variant(
            output,
        )));
    }
    for tile in [Adapter::Software, Adapter::Integrated, Adapter::Discrete]
        .into_iter()
        .flat_map(DecodeTile::all)
    {
        for plain in [false, true] {
            for storages in [[Storage::F32; 4], [Storage::F16; 4], [Storage::Packed; 4]] {
                all.push(shipped::<decode::DecodeParams>(decode::variant(
                    tile, plain, storages,
                )));
            }
        }
    }
    for threads in SOFTMAX_THREADS {
        all.push(shipped::<softmax::SoftmaxParams>(softmax::variant(threads)));
    }
    all.push(shipped::<mean_heads::MeanHeadsParams>(mean_heads::variant()));
    all.push(shipped::<join_words::JoinWordsParams>(join_words::variant()));
    all.push(shipped::<move_sequences::MoveSequencesParams>(
        move_sequences::variant(),
    ));
    let mut seen = std::collections::HashSet::new();
    all.retain(|shipped| seen.insert(shipped.variant.clone()));
    all
}

fn parse(variant: &Variant) -> (naga::Module, ModuleInfo) {
    let source = variant.source();
    let label = variant.label();
    let module = naga::front::wgsl::parse_str(&source)
        .unwrap_or_else(|error| panic!("{label}: {}", error.emit_to_string(&source)));
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32; // core WebGPU: pack2x16float and its like
    if source.starts_with("enable f16;") {
        capabilities |= Capabilities::SHADER_FLOAT16;
    }
    if variant.subgroups {
        capabilities |= Capabilities::SUBGROUP;
    }
    let info = Validator::new(ValidationFlags::all(), capabilities)
        .validate(&module)
        .unwrap_or_else(|error| panic!("{label}: {}", error.emit_to_string(&source)));
    (module, info)
}

/// Fields of the uniform as WGSL lays them out, and its size.
fn uniform(module: &naga::Module) -> (Fields, usize) {
    fn walk(
        module: &naga::Module,
        ty: naga::Handle<naga::Type>,
        prefix: &str,
        start: usize,
        fields: &mut Fields,
    ) {
        let naga::TypeInner::Struct { members, .. } = &module.types[ty].inner else {
            panic!("params are a struct")
        };
        for member in members {
            let name = format!("{prefix}{}", member.name.as_deref().unwrap());
            let offset = start + member.offset as usize;
            match module.types[member.ty].inner {
                naga::TypeInner::Struct { .. } => {
                    walk(module, member.ty, &format!("{name}."), offset, fields)
                }
                naga::TypeInner::Scalar(naga::Scalar { width: 4, .. }) => fields.push((name, offset)),
                ref other => panic!("{name}: params hold 4-byte scalars alone, not {other:?}"),
            }
        }
    }
    let (_, global) = module
        .global_variables
        .iter()
        .find(|(_, global)| global.space == naga::AddressSpace::Uniform)
        .expect("params are a uniform");
    assert_eq!(
        global.binding.map(|binding| (binding.group, binding.binding)),
        Some((0, 0)),
        "params come first"
    );
    let mut fields = Vec::new();
    walk(module, global.ty, "", 0, &mut fields);
    let naga::TypeInner::Struct { span, .. } = module.types[global.ty].inner else {
        panic!("params are a struct")
    };
    (fields, span as usize)
}

#[test]
fn every_variant_is_valid_and_its_params_match_the_host() {
    let all = all();
    assert!(all.len() > 100, "only {} variants", all.len());
    for Shipped {
        variant,
        fields,
        size,
    } in all
    {
        let (module, _) = parse(&variant);
        assert_eq!(uniform(&module), (fields, size), "{}", variant.label());
    }
}

#[test]
fn every_variant_fits_the_guaranteed_limits() {
    for Shipped { variant, .. } in all() {
        let (module, _) = parse(&variant);
        let mut layouter = Layouter::default();
        layouter.update(module.to_ctx()).unwrap();
        let workgroup_bytes: u32 = module
            .global_variables
            .iter()
            .filter(|(_, global)| global.space == naga::AddressSpace::WorkGroup)
            .map(|(_, global)| layouter[global.ty].size.next_multiple_of(16))
            .sum();
        let storage_buffers = module
            .global_variables
            .iter()
            .filter(|(_, global)| matches!(global.space, naga::AddressSpace::Storage { .. }))
            .count();
        let [entry] = &module.entry_points[..] else {
            panic!("{}: one entry point", variant.label())
        };
        let limits = wgpu::Limits::default();
        assert_eq!(entry.name, "main", "{}", variant.label());
        assert!(
            workgroup_bytes <= limits.max_compute_workgroup_storage_size,
            "{}: {workgroup_bytes}",
            variant.label()
        );
        assert!(
            storage_buffers <= limits.max_storage_buffers_per_shader_stage as usize,
            "{}",
            variant.label()
        );
        let invocations: u32 = entry.workgroup_size.iter().product();
        assert!(
            invocations <= limits.max_compute_invocations_per_workgroup,
            "{}: {invocations}",
            variant.label()
        );
    }
}

/// Whether a program answers on this machine.
fn on_path(program: &str) -> bool {
    Command::new(program).arg("--help").output().is_ok()
}

fn check_with(
    program: &str,
    arguments: &[&str],
    extension: &str,
    name: usize,
    contents: &[u8],
) -> Result<(), String> {
    let path = std::env::temp_dir().join(format!("multihead-{}-{name}.{extension}", std::process::id()));
    std::fs::File::create(&path).unwrap().write_all(contents).unwrap();
    let output = Command::new(program).args(arguments).arg(&path).output().unwrap();
    std::fs::remove_file(&path).unwrap();
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[test]
fn every_variant_translates_to_spirv_msl_and_hlsl() {
    let spirv_val = on_path("spirv-val");
    for (number, Shipped { variant, .. }) in all().into_iter().enumerate() {
        let (module, info) = parse(&variant);
        let label = variant.label();

        let options = spv::Options {
            lang_version: (1, 3),
            ..Default::default()
        };
        let words =
            spv::write_vec(&module, &info, &options, None).unwrap_or_else(|error| panic!("{label}: {error}"));
        if spirv_val {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            check_with("spirv-val", &["--target-env", "vulkan1.1"], "spv", number, &bytes)
                .unwrap_or_else(|error| panic!("{label}: {error}"));
        }

        let options = msl::Options {
            lang_version: (2, 4),
            fake_missing_bindings: true,
            ..Default::default()
        };
        msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
            .unwrap_or_else(|error| panic!("{label}: {error}"));

        let options = hlsl::Options {
            shader_model: hlsl::ShaderModel::V6_2,
            ..Default::default()
        };
        let mut text = String::new();
        hlsl::Writer::new(&mut text, &options, &hlsl::PipelineOptions::default())
            .write(&module, &info, None)
            .unwrap_or_else(|error| panic!("{label}: {error}"));
    }
}

#[test]
fn tint_accepts_every_variant() {
    if !on_path("tint") {
        eprintln!("tint is not on the PATH: nothing was checked with it");
        return;
    }
    for (number, Shipped { variant, .. }) in all().into_iter().enumerate() {
        // naga knows no such extension: it has subgroups without.
        let enable = if variant.subgroups {
            "enable subgroups;\n"
        } else {
            ""
        };
        let source = enable.to_owned() + &variant.source();
        check_with("tint", &["--format", "wgsl"], "wgsl", number, source.as_bytes())
            .unwrap_or_else(|error| panic!("{}: {error}", variant.label()));
    }
}
