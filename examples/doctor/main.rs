//! Says which adapter, driver and kernels this machine gives, checks every kernel variant against the reference, and
//! prints a block to paste into a bug report.
//!
//! ```text
//! cargo run --release --example doctor
//! cargo run --release --example doctor -- --quick --json
//! ```

mod report;
mod worker;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use multihead::{Gpu, wgpu};
use report::Report;
use std::io::{self, IsTerminal, Write};
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Checks that attention works on this machine's GPU, and reports what there is.
///
/// Exits with 0 if everything that was checked is right, with 1 if something is wrong, with 2 if there is no device.
/// `WGPU_BACKEND` and `WGPU_ADAPTER_NAME` choose among adapters.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Check only the variants that eight usual calls would use
    #[arg(long)]
    quick: bool,
    /// Stop after so many seconds; building all kernels takes many minutes on a software adapter
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    budget: u64,
    /// Print JSON instead of the block
    #[arg(long)]
    json: bool,
    /// Replace a text in every kernel, to see that a broken variant is named
    #[arg(long, hide = true, num_args = 2, value_names = ["FROM", "TO"])]
    break_kernels: Option<Vec<String>>,
    /// Do the work, and print the report as it stands before each step, one line of JSON each
    #[arg(long, hide = true)]
    worker: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.worker {
        let report = examine(&arguments, |report| say(&report.line()));
        say(&report.line());
        return ExitCode::SUCCESS;
    }
    let report = supervise(Duration::from_secs(arguments.budget));
    say(&if arguments.json {
        report.json()
    } else {
        report.block()
    });
    ExitCode::from(report.exit_code())
}

/// Whoever closed the pipe has read enough.
fn say(text: &str) {
    let _ = writeln!(io::stdout().lock(), "{text}");
}

/// The report of a process of its own: a driver that hangs or crashes does not take it along.
fn supervise(budget: Duration) -> Report {
    let Ok(program) = std::env::current_exe() else {
        return Report::without_device("the program's own file cannot be found");
    };
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--worker");
    let bar = progress_bar();
    let report = worker::supervise(command, budget, |report| {
        let (done, all, what) = report.step();
        bar.set_length(all as u64);
        bar.set_position(done as u64);
        bar.set_message(what.to_owned());
        if !io::stderr().is_terminal() && !what.is_empty() {
            let _ = writeln!(io::stderr(), "[{}/{all}] {what}", done + 1);
        }
    });
    bar.finish_and_clear();
    report
}

fn examine(arguments: &Arguments, progress: impl FnMut(&Report)) -> Report {
    let gpu = match Gpu::new() {
        Ok(gpu) => gpu,
        Err(error) => return Report::without_device(&error.to_string()),
    };
    if let Some([from, to]) = arguments.break_kernels.as_deref() {
        gpu.break_kernels(from, to);
    }
    let budget = Duration::from_secs(arguments.budget);
    Report::of(&gpu, adapters(), arguments.quick, budget, progress)
}

/// All adapters of this machine, on one line each.
fn adapters() -> Vec<String> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()))
        .iter()
        .map(|adapter| {
            let info = adapter.get_info();
            format!("{} ({}, {:?})", info.name, info.backend, info.device_type)
        })
        .collect()
}

/// A bar where a terminal shows it.
fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if let Ok(style) = ProgressStyle::with_template("{bar:32.magenta/dim} {pos}/{len}  {elapsed}  {wide_msg}")
    {
        bar.set_style(style.progress_chars("━━╌"));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
