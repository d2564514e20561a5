//! The case files: inputs and right answers from PyTorch and ONNX.

#[path = "../../examples/attend/case/mod.rs"]
mod case;
#[path = "../../examples/attend/gpu.rs"]
mod run;

use std::path::PathBuf;

use case::{Case, CaseError, Comparison};

use multihead::{AttentionPath, CheckpointNames, DType, Parameters};
use safetensors::SafeTensors;

use crate::support::gpu;

fn files() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .collect();
    files.sort();
    files
}

/// Every file, on the library's own device and on one without optional features.
#[test]
fn every_case_file_passes_on_the_gpu() {
    let files = files();
    assert!(files.len() >= 88, "{} case files", files.len());
    let mut failures = Vec::new();
    for path in &files {
        let name = path.file_name().unwrap().to_string_lossy();
        match Case::read(path) {
            Err(error) => failures.push(format!("{name}: {error:?}")),
            Ok(case) => {
                for (device, gpu) in [("own", gpu()), ("plain", crate::field::plain())] {
                    for path in [AttentionPath::Auto, AttentionPath::Fused] {
                        if let Some(problem) = problem(gpu, &case, path) {
                            failures.push(format!("{name} on the {device} device, {path:?}: {problem}"));
                        }
                    }
                }
            }
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {} case files:\n{}",
        failures.len(),
        files.len(),
        failures.join("\n")
    );
    println!("{} case files pass", files.len());
}

/// What is wrong with the GPU's answers; each answer must be there and the kernels must have run.
fn problem(gpu: &multihead::Gpu, case: &Case, path: AttentionPath) -> Option<String> {
    if case.expected.is_empty() {
        return Some("has no answer to compare with".to_owned());
    }
    let before = gpu.dispatches();
    let answers = match run::run(gpu, case, case.expects_weights(), path) {
        Ok(answers) => answers,
        Err(CaseError::Unsupported(reason)) => return Some(format!("unsupported: {reason}")),
        Err(CaseError::Bad(reason)) => return Some(reason),
    };
    let least = if matches!(case.op, case::Op::Rotary(_)) {
        1
    } else {
        3
    };
    if gpu.dispatches() - before < least {
        return Some("no kernel ran".to_owned());
    }
    let wrong: Vec<String> = case
        .compare(&answers)
        .iter()
        .filter(|comparison| !Comparison::passes(comparison))
        .map(ToString::to_string)
        .collect();
    (!wrong.is_empty()).then(|| wrong.join(", "))
}

/// Layers under the names of the transformers library are written back as the files have them.
#[test]
fn checkpoints_are_written_back_as_they_came() {
    let mut seen = Vec::new();
    for path in files() {
        let bytes = std::fs::read(&path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let about = &header.metadata().as_ref().unwrap()["case"];
        let about: serde_json::Value = serde_json::from_str(about).unwrap();
        let Some(prefix) = about["options"]["checkpoint"].as_str() else {
            continue;
        };
        let info = Parameters::describe(&bytes, prefix).unwrap();
        assert_eq!(CheckpointNames::detect(&bytes, prefix), Ok(info.names));
        let config = info.config(about["options"]["num_heads"].as_u64().unwrap() as usize);
        let parameters = Parameters::from_safetensors(&config, &bytes, prefix).unwrap();
        let written = parameters
            .to_safetensors(&config, prefix, info.names, DType::F32)
            .unwrap();
        let (file, written) = (
            SafeTensors::deserialize(&bytes).unwrap(),
            SafeTensors::deserialize(&written).unwrap(),
        );
        let leftovers = [".attn.bias", ".attn.masked_bias", ".inv_freq"];
        let parameter =
            |name: &str| name.starts_with(prefix) && !leftovers.iter().any(|end| name.ends_with(end));
        assert_eq!(
            written.len(),
            file.names().iter().filter(|name| parameter(name)).count(),
            "{path:?}"
        );
        for (name, view) in written.iter() {
            assert_eq!(file.tensor(name).unwrap(), view, "{name} of {path:?}");
        }
        seen.push(info.names);
    }
    let count = |names| seen.iter().filter(|&&found| found == names).count();
    assert_eq!(
        (count(CheckpointNames::Gpt2), count(CheckpointNames::Llama)),
        (2, 7)
    );
}

/// The comparison can fail: an answer that is moved by more than its tolerance is told.
#[test]
fn a_wrong_answer_is_told() {
    let mut case = Case::read(&files()[0]).unwrap();
    assert_eq!(problem(gpu(), &case, AttentionPath::Auto), None);
    let expected = case.expected.get_mut("output").unwrap();
    expected.data[0] += 3.0 * expected.tolerance as f32 + 1e-4;
    assert!(
        problem(gpu(), &case, AttentionPath::Auto)
            .unwrap()
            .contains("output")
    );
}
