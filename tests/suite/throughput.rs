//! A short run of the benchmark, with what it writes.

#[path = "../../benches/throughput/main.rs"]
#[allow(dead_code)] // `main`
mod bench;

use std::cell::RefCell;

use bench::{Arguments, run};
use clap::Parser;

/// Runs the benchmark with these arguments; its report and the lines of its table.
fn bench(arguments: &[&str]) -> Result<(bench::report::Report, Vec<String>), String> {
    let arguments = Arguments::try_parse_from([&["throughput"], arguments].concat()).unwrap();
    let lines = RefCell::new(Vec::new());
    // A device of its own, since a profile times all that is recorded on one.
    let own = multihead::Gpu::new().unwrap();
    let report = run(&own, &arguments, |line| lines.borrow_mut().push(line.to_owned()));
    report
        .map(|report| (report, lines.into_inner()))
        .map_err(|error| error.to_string())
}

#[test]
fn a_short_run_measures_right_results_and_writes_them() {
    let folder = std::env::temp_dir().join(format!("multihead-throughput-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [json, chart] = ["run.json", "run.svg"].map(|name| folder.join(name).to_string_lossy().into_owned());

    let (report, lines) = bench(&["--quick", "--runs", "1", "--json", &json, "--chart", &chart]).unwrap();
    assert_eq!(report.left_out, []);
    assert!(report.rows.len() > 20, "{lines:?}");
    for row in &report.rows {
        // Values up to 2 and sums of 64 of their products.
        let allowed = if row.name.contains("f16") { 1e-3 } else { 2e-5 };
        assert!(row.error > 0.0 && row.error < allowed, "{row:?}");
        assert!(row.median_ms > 0.0 && row.best_ms <= row.median_ms, "{row:?}");
        // The kernels' own time is part of the whole.
        assert!(!row.on_device || row.best_ms <= row.wall_ms * 1.5, "{row:?}");
        assert!(
            row.flops > 0.0 && row.bytes > 0.0 && row.peak_bytes > 0,
            "{row:?}"
        );
        assert!(lines.iter().any(|line| line.starts_with(&row.name)), "{row:?}");
    }
    assert!(
        lines.iter().any(|line| line.contains("s of calls, at most")),
        "{lines:?}"
    );
    let svg = std::fs::read_to_string(&chart).unwrap();
    for says in [
        "peak memory, MiB",
        "time of a call, ms",
        "fused causal",
        "decode B16 f16",
    ] {
        assert!(svg.contains(says), "{says}");
    }

    // Against itself.
    let (again, lines) = bench(&["--quick", "--runs", "1", "--baseline", &json, "projection"]).unwrap();
    assert_eq!(again.rows.len(), 1);
    let line = lines.last().unwrap();
    let ratio: f64 = line
        .split_whitespace()
        .nth_back(1)
        .unwrap()
        .trim_end_matches(',')
        .parse()
        .unwrap();
    let then = report
        .rows
        .iter()
        .find(|row| row.name == again.rows[0].name)
        .unwrap();
    assert!(
        (ratio - again.rows[0].median_ms / then.median_ms).abs() < 0.006,
        "{line}"
    );

    for (wrong, says) in [
        (&["--baseline", &chart][..], "was not written by --json"),
        (&["--baseline", "no such file"], "no such file"),
        (&["no such workload"], "no workload's name holds"),
        (&["--budget", "0"], "--budget 0"),
        (
            &["--quick", "projection", "--chart", &chart],
            "no workload that was measured",
        ),
    ] {
        let error = bench(wrong).unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_small_budget_calls_less_often_and_then_leaves_out() {
    use bench::{budget::Schedule, workload};
    let workloads: Vec<_> = workload::quick()
        .into_iter()
        .take(3)
        .zip([1.0, 10.0, 100.0])
        .collect();
    let runs = |budget: f64| {
        let schedule = Schedule::new(workloads.clone(), 5, budget);
        assert!(schedule.seconds() <= budget);
        let runs: Vec<usize> = schedule.planned.iter().map(|planned| planned.runs).collect();
        (runs, schedule.left_out.len())
    };
    assert_eq!(runs(1000.0), (vec![5, 5, 5], 0));
    assert_eq!(runs(400.0), (vec![5, 5, 2], 0));
    assert_eq!(runs(170.0), (vec![5, 5, 0], 0));
    assert_eq!(runs(130.0), (vec![5, 5], 1));
    assert_eq!(runs(50.0), (vec![5, 2], 1));
    assert_eq!(runs(0.5), (vec![], 3));
}

#[test]
fn the_work_is_counted_by_the_usual_model() {
    use bench::workload::{Workload, all};
    let flops = |name: &str| {
        let found: Vec<Workload> = all()
            .into_iter()
            .filter(|workload| workload.name() == name)
            .collect();
        assert_eq!(found.len(), 1, "{name}");
        found[0].flops()
    };
    let full = flops("fused B1 H8 L2048 D64");
    assert_eq!(full, 4.0 * 8.0 * 2048.0 * 2048.0 * 64.0);
    assert_eq!(flops("composed B1 H8 L2048 D64 f16 causal"), full / 2.0);
    assert_eq!(
        flops("fused B1 H8 L16384 D64 window 256"),
        4.0 * 8.0 * 16384.0 * 256.0 * 64.0
    );
    assert_eq!(
        flops("decode B16 H8 Lq1 Lk4096 D64"),
        4.0 * 16.0 * 8.0 * 4096.0 * 64.0
    );
    assert_eq!(flops("projection 2048x512x512"), 2.0 * 2048.0 * 512.0 * 512.0);
    let projections = 4.0 * 2.0 * 2048.0 * 512.0 * 512.0;
    assert_eq!(flops("layer B1 L2048 E512 H8"), projections + full);
}
