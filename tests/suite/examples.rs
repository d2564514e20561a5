//! The examples, run in this process with their results checked.

#[path = "../../examples/compare_torch/main.rs"]
#[allow(dead_code)] // `main`
mod compare_torch;
#[path = "../../examples/doctor/report.rs"]
mod doctor;
#[path = "../../examples/embed/main.rs"]
#[allow(dead_code)]
mod embed;

use std::{cell::RefCell, time::Duration};

use doctor::{Progress, Report};

use crate::{device::open, support::gpu};

/// What a progress heard.
#[derive(Default)]
struct Heard(RefCell<Vec<String>>);

impl Progress for Heard {
    fn step(&self, done: usize, all: usize, what: &str) {
        assert!(done < all, "{done} of {all}");
        self.0.borrow_mut().push(what.to_owned());
    }
}

/// A kernel that subtracts the bias: the variant is named, with what was wrong.
#[test]
fn doctor_names_a_variant_that_is_broken_on_purpose() {
    let gpu = open(gpu().features(), gpu().limits().clone());
    gpu.break_kernels("value += load_bias(", "value -= load_bias(");
    let heard = Heard::default();
    let report = Report::of(&gpu, vec![], true, Duration::ZERO, &heard);
    assert_eq!(report.exit_code(), 1);
    assert_eq!(heard.0.borrow().len(), 1, "the budget of 0 s allows one check");
    let block = report.block();
    assert!(
        block.starts_with("```text\n") && block.ends_with("\n```"),
        "{block}"
    );
    assert_eq!(block.matches("```").count(), 2);
    let problem = block
        .lines()
        .find(|line| line.starts_with("PROBLEM  multihead linear"))
        .unwrap();
    assert!(problem.contains("failed its self-check"), "{problem}");
    assert!(
        block.contains("WRONG") && block.contains("not reached    multihead scores"),
        "{block}"
    );
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert!(json["checks"][0]["failure"].is_string(), "{json}");
    assert!(!json["not_reached"].as_array().unwrap().is_empty());
}

#[test]
fn doctor_finds_nothing_wrong_here() {
    let report = Report::of(
        gpu(),
        vec!["an adapter".to_owned()],
        true,
        Duration::from_secs(3),
        &Heard::default(),
    );
    let block = report.block();
    assert_eq!(report.exit_code(), 0, "{block}");
    for says in [
        "adapter  ",
        "driver   ",
        "features ",
        "limit    max_buffer_size",
        "0 problems",
    ] {
        assert!(block.contains(says), "{says}: {block}");
    }
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["device"]["name"], gpu().info().name);
    assert_eq!(json["problems"], serde_json::json!([]));
}

#[test]
fn doctor_tells_that_there_is_no_device() {
    let error = multihead::Error::NoAdapter {
        tried: "backends GL".to_owned(),
        advice: "install a driver".to_owned(),
    };
    let report = Report::without_device(&error);
    assert_eq!(report.exit_code(), 2);
    assert!(report.block().contains("install a driver"));
}

#[test]
fn compare_torch_finds_rounding_alone() {
    let file = std::fs::read(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/examples/data/torch_layer.safetensors"
    ))
    .unwrap();
    for (what, difference) in compare_torch::compare(gpu(), &file).unwrap() {
        assert!(difference <= 2e-6, "{what}: {difference:e}");
    }
    assert!(compare_torch::compare(gpu(), &file[..1000]).is_err());
}

#[test]
fn embed_agrees_with_its_loop_on_the_cpu() {
    let difference = embed::run().unwrap();
    assert!(difference <= 1e-4, "{difference:e}");
}
