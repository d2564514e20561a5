//! What was measured: as a table, as JSON, and against an earlier run.

use std::collections::HashMap;

use multihead::Gpu;
use serde::{Deserialize, Serialize};

/// One workload's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    /// The line of the chart that it belongs to, if any, and its place there.
    pub(crate) series: Option<String>,
    pub(crate) length: Option<usize>,
    /// By the work model.
    pub(crate) flops: f64,
    pub(crate) bytes: f64,
    /// Calls that count.
    pub(crate) runs: usize,
    pub(crate) median_ms: f64,
    pub(crate) best_ms: f64,
    /// Whether these two are the kernels' own time by the device's clock, or wall clock.
    pub(crate) on_device: bool,
    /// From recording to the end of the wait; median.
    pub(crate) wall_ms: f64,
    /// Recording alone; median.
    pub(crate) record_us: f64,
    /// The most that the crate held beyond what it held before the call's tensors were made.
    pub(crate) peak_bytes: u64,
    /// The largest difference from the reference in f64, on a sample of rows.
    pub(crate) error: f64,
}

/// A run of the benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) version: String,
    pub(crate) adapter: String,
    pub(crate) budget_seconds: f64,
    pub(crate) rows: Vec<Row>,
    /// Names of what was not measured, and why.
    pub(crate) left_out: Vec<(String, String)>,
}

impl Report {
    pub(crate) fn new(gpu: &Gpu, budget_seconds: f64) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            adapter: gpu.description(),
            budget_seconds,
            rows: Vec::new(),
            left_out: Vec::new(),
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    pub(crate) fn json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }
}

/// Medians and best times of an earlier run, by name.
pub(crate) struct Baseline(HashMap<String, [f64; 2]>);

impl Baseline {
    pub(crate) fn new(report: &Report) -> Self {
        Self(
            report
                .rows
                .iter()
                .map(|row| (row.name.clone(), [row.median_ms, row.best_ms]))
                .collect(),
        )
    }

    /// The times now by the times then. Where the two differ, the machine is not quiet.
    pub(crate) fn ratios(&self, row: &Row) -> Option<[f64; 2]> {
        let [median, best] = self.0.get(&row.name)?;
        Some([row.median_ms / median, row.best_ms / best])
    }
}

/// Head of the table.
pub(crate) fn head(baseline: bool) -> String {
    let mut line = format!(
        "{:40} {:>10} {:>10} {:>10} {:>8} {:>7} {:>9} {:>9} {:>8} {:>4}",
        "workload",
        "median ms",
        "best ms",
        "wall ms",
        "GFLOP/s",
        "GB/s",
        "record us",
        "peak MiB",
        "error",
        "runs"
    );
    if baseline {
        line += "  now/then: median, best";
    }
    line
}

impl Row {
    /// Its line of the table.
    pub(crate) fn line(&self, baseline: Option<&Baseline>) -> String {
        let seconds = self.median_ms * 1e-3;
        let mut line = format!(
            "{:40} {:10.3} {:10.3} {:10.3} {:8.2} {:7.2} {:9.1} {:9.2} {:8.1e} {:4}",
            self.name,
            self.median_ms,
            self.best_ms,
            self.wall_ms,
            self.flops / seconds * 1e-9,
            self.bytes / seconds * 1e-9,
            self.record_us,
            self.peak_bytes as f64 / f64::from(1 << 20),
            self.error,
            self.runs
        );
        if let Some(baseline) = baseline {
            line += &match baseline.ratios(self) {
                Some([median, best]) => format!("  {median:16.2}, {best:.2}"),
                None => format!("  {:>16}", "new"),
            };
        }
        line
    }
}
