//! Says which adapter, driver and kernels this machine gives, checks every kernel variant against the reference, and
//! prints a block to paste into a bug report.
//!
//! ```text
//! cargo run --release --example doctor
//! cargo run --release --example doctor -- --quick --json
//! ```

mod report;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use multihead::{Gpu, wgpu};
use report::{Progress, Report};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

/// Checks that attention works on this machine's GPU, and reports what there is.
///
/// Exits with 0 if everything that was checked is right, with 1 if something is wrong, with 2 if there is no device.
/// `WGPU_BACKEND` and `WGPU_ADAPTER_NAME` choose among adapters.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Check only the variants that calls would use
    #[arg(long)]
    quick: bool,
    /// Start no further check after so many seconds; building kernels takes minutes on a software adapter
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    budget: u64,
    /// Print JSON instead of the block
    #[arg(long)]
    json: bool,
    /// Replace a text in every kernel, to see that a broken variant is named
    #[arg(long, hide = true, num_args = 2, value_names = ["FROM", "TO"])]
    break_kernels: Option<Vec<String>>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let report = examine(&arguments);
    let text = if arguments.json {
        report.json()
    } else {
        report.block()
    };
    // Whoever closed the pipe has read enough.
    let _ = writeln!(io::stdout().lock(), "{text}");
    ExitCode::from(report.exit_code())
}

fn examine(arguments: &Arguments) -> Report {
    let gpu = match Gpu::new() {
        Ok(gpu) => gpu,
        Err(error) => return Report::without_device(&error),
    };
    if let Some([from, to]) = arguments.break_kernels.as_deref() {
        gpu.break_kernels(from, to);
    }
    let _ = writeln!(io::stderr(), "{}", gpu.description());
    let bar = Bar::new();
    let report = Report::of(
        &gpu,
        adapters(),
        arguments.quick,
        Duration::from_secs(arguments.budget),
        &bar,
    );
    bar.0.finish_and_clear();
    report
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

/// A bar where a terminal shows it; a line per step elsewhere.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        let bar = ProgressBar::new(0);
        let template = "{bar:32.magenta/dim} {pos}/{len}  {elapsed}  {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━━╌"));
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }
}

impl Progress for Bar {
    fn step(&self, done: usize, all: usize, what: &str) {
        self.0.set_length(all as u64);
        self.0.set_position(done as u64);
        self.0.set_message(what.to_owned());
        if !io::stderr().is_terminal() {
            let _ = writeln!(io::stderr(), "[{}/{all}] {what}", done + 1);
        }
    }
}
