//! The examples, run in this process with their results checked.

#[path = "../../examples/compare_torch/main.rs"]
#[allow(dead_code)] // `main`
mod compare_torch;
#[path = "../../examples/doctor"]
mod doctor {
    pub(crate) mod report;
    pub(crate) mod worker;
}
#[path = "../../examples/embed/main.rs"]
#[allow(dead_code)]
mod embed;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use doctor::{report::Report, worker::supervise};

use crate::{device::open, support::gpu};

/// A kernel that subtracts the bias: the variant is named, with what was wrong.
#[test]
fn doctor_names_a_variant_that_is_broken_on_purpose() {
    let gpu = open(gpu().features(), gpu().limits().clone());
    gpu.break_kernels("value += load_bias(", "value -= load_bias(");
    let mut steps = 0;
    let report = Report::of(&gpu, vec![], true, Duration::ZERO, |_| steps += 1);
    assert_eq!(report.exit_code(), 1);
    assert_eq!(steps, 1, "the budget of 0 s allows one check");
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
        block.contains("WRONG") && block.contains("not reached    2 variants of scores"),
        "{block}"
    );
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert!(json["checks"][0]["failure"].is_string(), "{json}");
    assert!(!json["not_reached"].as_array().unwrap().is_empty());
}

#[test]
fn doctor_finds_nothing_wrong_here() {
    let mut steps = 0;
    let report = Report::of(
        gpu(),
        vec!["an adapter".to_owned()],
        true,
        Duration::from_secs(3),
        |report| {
            let (done, all, what) = report.step();
            assert!(
                done == steps && done < all && !what.is_empty(),
                "{done} of {all}: {what}"
            );
            steps += 1;
        },
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
    let report = Report::without_device("no GPU adapter found: install a driver");
    assert_eq!(report.exit_code(), 2);
    assert!(report.block().contains("install a driver"));
}

/// Workers that crash, hang, tell nothing, and end as they should, played by a shell.
#[test]
#[cfg(unix)]
fn doctor_survives_a_driver_that_crashes_or_hangs() {
    let mut line = None;
    Report::of(gpu(), vec![], true, Duration::ZERO, |report| {
        line = Some(report.line())
    });
    let line = line.unwrap();
    let run = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh", &line]);
        let mut heard = 0;
        let start = Instant::now();
        let report = supervise(command, Duration::ZERO, |_| heard += 1);
        assert!(start.elapsed() < Duration::from_secs(20), "{script}");
        (report, heard)
    };
    let (crashed, heard) = run("echo noise; echo \"$1\"; kill -11 $$");
    assert_eq!((crashed.exit_code(), heard), (1, 1));
    let block = crashed.block();
    assert!(
        block.contains("PROBLEM  multihead linear") && block.contains("crashed"),
        "{block}"
    );
    let (hung, heard) = run("echo \"$1\"; exec sleep 60");
    assert_eq!((hung.exit_code(), heard), (0, 1));
    let block = hung.block();
    assert!(
        block.contains("cut short after") && block.contains("s  multihead linear"),
        "{block}"
    );
    assert_eq!(run("exit 0").0.exit_code(), 2);
    assert_eq!(run("exec sleep 60").0.exit_code(), 2);
    assert_eq!(run("echo \"$1\"").0.exit_code(), 0);
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
