//! Throughput of whole calls: `cargo bench --bench throughput`, or `-- NAME` for the workloads whose name holds NAME.
//!
//! Each call is submitted and waited for; the median of the runs counts: the kernels' own time by the device's clock where
//! it has one (`TIMESTAMP_QUERY`), else wall clock, which has a column of its own. FLOPs by the usual model: attention
//! `4 B H Lq Lk D` (half of it if causal), projection `2 M N K`, a layer both. GB/s count each input and output once,
//! which is what bounds a decoding step. MiB are the most that the crate holds beyond what it held before the call's
//! tensors were made. The error is the largest difference from the reference in f64 on the first, middle and last row.

// A benchmark's result is what it prints.
#![allow(clippy::print_stdout)]

pub(crate) mod budget;
mod call;
mod chart;
mod measure;
pub(crate) mod report;
pub(crate) mod workload;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use budget::{Schedule, Speed};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use multihead::{Error, Gpu};
use report::{Baseline, Report};

type Failure = Box<dyn std::error::Error>;

/// Measures calls, from short to long ones, within a time that fits the adapter.
///
/// Columns: median and best time of a call by the device's clock (wall clock where it has none), wall clock from recording to
/// the end of the wait, what that makes in GFLOP/s and GB/s, the host's time to record it, the most memory that the crate
/// holds for it, the largest difference from the reference in f64 on a sample of rows, and the calls that count. On a shared
/// machine differences under a quarter mean nothing.
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    /// Only workloads whose name holds this
    name: Option<String>,
    /// Calls that count; one more comes first. Long ones are called less often if time is short
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    runs: u16,
    /// Seconds that all calls may take; building pipelines, uploads and the reference come on top
    #[arg(long, value_name = "SECONDS")]
    budget: Option<f64>,
    /// A few small workloads alone
    #[arg(long)]
    quick: bool,
    /// Write the figures into a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw time and memory against length
    #[arg(long, value_name = "FILE.svg")]
    chart: Option<PathBuf>,
    /// Compare with a file that `--json` wrote
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<(), Failure> {
    let gpu = Gpu::new()?;
    run(&gpu, &Arguments::parse(), |line| println!("{line}"))?;
    Ok(())
}

/// Measures, and says each line of the table as it is known.
pub(crate) fn run(gpu: &Gpu, arguments: &Arguments, say: impl Fn(&str)) -> Result<Report, Failure> {
    let earlier = match &arguments.baseline {
        None => None,
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .map_err(|error| format!("--baseline {}: {error}", path.display()))?;
            let report = Report::parse(&text).map_err(|error| {
                format!("--baseline {} was not written by --json: {error}", path.display())
            })?;
            Some(report)
        }
    };
    let budget = arguments.budget.unwrap_or_else(|| budget::default_seconds(gpu));
    if !(budget > 0.0 && budget.is_finite()) {
        return Err(format!("--budget {budget}: a number of seconds above 0").into());
    }
    // Better now than after the measurements.
    for (flag, path) in [("--json", &arguments.json), ("--chart", &arguments.chart)] {
        if let Some(path) = path {
            std::fs::File::create(path).map_err(|error| format!("{flag} {}: {error}", path.display()))?;
        }
    }
    let name = arguments.name.as_deref().unwrap_or_default();
    let mut workloads = if arguments.quick {
        workload::quick()
    } else {
        workload::all()
    };
    workloads.retain(|workload| workload.name().contains(name));
    if workloads.is_empty() {
        return Err(format!("no workload's name holds {name:?}").into());
    }

    say(&gpu.description());
    if let Some(earlier) = earlier
        .as_ref()
        .filter(|earlier| earlier.adapter != gpu.description())
    {
        say(&format!(
            "the baseline is of another adapter: {}",
            earlier.adapter
        ));
    }
    let speed = Speed::probe(gpu)?;
    let estimated = workloads
        .into_iter()
        .map(|workload| (workload, speed.seconds(&workload)))
        .collect();
    let schedule = Schedule::new(estimated, arguments.runs.into(), budget);
    let clock = if measure::has_timestamps(gpu) {
        "the device's clock"
    } else {
        "wall clock"
    };
    say(&format!(
        "{} workloads by {clock}, about {:.0} s of calls, at most {budget:.0} s",
        schedule.planned.len(),
        schedule.seconds()
    ));
    let mut report = Report::new(gpu, budget);
    if !schedule.left_out.is_empty() {
        say("left out, as one call alone takes too long (--budget SECONDS allows more):");
    }
    for planned in &schedule.left_out {
        let reason = format!("about {:.0} s", planned.seconds);
        say(&format!("    {:40} {reason}", planned.workload.name()));
        report.left_out.push((planned.workload.name(), reason));
    }

    let baseline = earlier.as_ref().map(Baseline::new);
    say(&report::head(baseline.is_some()));
    let bar = progress_bar(schedule.seconds());
    let start = Instant::now();
    for planned in &schedule.planned {
        let name = planned.workload.name();
        bar.set_message(name.clone());
        // The estimate was wrong by much: what is left has no time.
        let measured = if start.elapsed().as_secs_f64() > 2.0 * budget {
            Err("the budget is spent".to_owned())
        } else {
            match measure::measure(gpu, &planned.workload, planned.runs) {
                Ok(row) => Ok(row),
                // A tensor beyond what the device allows for a buffer.
                Err(error @ (Error::Limit { .. } | Error::OutOfMemory { .. })) => Err(error.to_string()),
                Err(error) => return Err(error.into()),
            }
        };
        bar.inc((planned.seconds * 1e3) as u64);
        match measured {
            Ok(row) => {
                bar.suspend(|| say(&row.line(baseline.as_ref())));
                report.rows.push(row);
            }
            Err(reason) => {
                bar.suspend(|| say(&format!("{name:40} {reason}")));
                report.left_out.push((name, reason));
            }
        }
    }
    bar.finish_and_clear();

    if let Some(path) = &arguments.json {
        std::fs::write(path, report.json()?)
            .map_err(|error| format!("--json {}: {error}", path.display()))?;
    }
    if let Some(path) = &arguments.chart {
        chart::write(&report, path).map_err(|error| format!("--chart {}: {error}", path.display()))?;
    }
    Ok(report)
}

/// A bar where a terminal shows it; its length is estimated milliseconds.
fn progress_bar(seconds: f64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new((seconds * 1e3) as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:32.magenta/dim} {percent}%  {elapsed}  {wide_msg}")
    {
        bar.set_style(style.progress_chars("━━╌"));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
