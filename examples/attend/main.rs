//! Runs attention case files on the GPU, or on the CPU, and holds the answers against those in the file.
//!
//! ```text
//! cargo run --release --example attend -- examples/data
//! cargo run --release --example attend -- examples/data/coreference.safetensors --heatmap map.png
//! ```

mod case;
mod colours;
mod cpu;
mod files;
mod gpu;
mod heatmap;
mod paint;

use case::{Answers, Case, CaseError};
use clap::{Parser, ValueEnum};
use files::Input;
use image::RgbImage;
use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use indicatif::{ProgressBar, ProgressStyle};
use multihead::Gpu;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Runs attention case files and compares the answers with those in the files.
///
/// Prints a line per file, and as last line "N passed, N failed, N unsupported". Exits with 0 if nothing
/// failed, with 1 if a file failed or could not be read, with 2 if nothing could be run.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Case files (.safetensors), and folders that are searched for them
    #[arg(required = true, value_name = "FILES_OR_DIRS")]
    paths: Vec<PathBuf>,
    /// Where to compute: the kernels on the GPU, or the reference in f64 on the CPU
    #[arg(long, value_enum, default_value = "gpu")]
    device: Device,
    /// How the GPU computes: one pass over the keys (fused), or scores, softmax and weighted sum one after the other
    #[arg(long, value_enum, default_value = "auto")]
    path: PathChoice,
    /// Write what was computed, one safetensors file per case, under the tensors' usual names
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Compute attention weights even where a file has none to compare with
    #[arg(long)]
    weights: bool,
    /// Draw the attention weights of one case
    #[arg(long, value_name = "FILE.png")]
    heatmap: Option<PathBuf>,
    /// Batch row to draw
    #[arg(long, value_name = "N", default_value_t = 0, requires = "heatmap")]
    batch: usize,
    /// Draw one head alone, with numbers where there is room; heads count from 1
    #[arg(long, value_name = "N", requires = "heatmap")]
    head: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PathChoice {
    Auto,
    Fused,
    Composed,
}

impl From<PathChoice> for multihead::AttentionPath {
    fn from(choice: PathChoice) -> Self {
        match choice {
            PathChoice::Auto => Self::Auto,
            PathChoice::Fused => Self::Fused,
            PathChoice::Composed => Self::Composed,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    Gpu,
    Cpu,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            // Nobody is left to tell if the error stream is closed too.
            let _ = writeln!(io::stderr(), "attend: {error}");
            ExitCode::from(2)
        }
    }
}

/// Where the cases run.
enum Engine {
    Gpu(Gpu, multihead::AttentionPath),
    Cpu,
}

impl Engine {
    fn run(&self, case: &Case, weights: bool) -> Result<Answers, CaseError> {
        case.check_size(weights)?;
        match self {
            Self::Gpu(gpu, path) => gpu::run(gpu, case, weights, *path),
            Self::Cpu => cpu::run(case, weights).map_err(|error| CaseError::Bad(error.to_string())),
        }
    }
}

fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let inputs = files::collect(&arguments.paths);
    if arguments.heatmap.is_some() && inputs.len() != 1 {
        return Err(format!(
            "--heatmap draws one case, {} were given: name a single file",
            inputs.len()
        ));
    }
    let engine = match arguments.device {
        Device::Cpu => Engine::Cpu,
        Device::Gpu => Engine::Gpu(
            Gpu::new().map_err(|error| format!("{error} (or use --device cpu)"))?,
            arguments.path.into(),
        ),
    };
    if let Engine::Gpu(gpu, _) = &engine {
        let _ = writeln!(io::stderr(), "{}", gpu.description());
    }

    let bar = progress_bar(inputs.len());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let mut writer = files::Writer::new(arguments.out.as_deref(), &inputs);
    for input in &inputs {
        bar.set_message(input.label.clone());
        let verdict = attend(arguments, &engine, input, &mut writer);
        let (word, text) = match &verdict {
            Ok(report) if report.passes => ("ok", &report.text),
            Ok(report) => ("FAIL", &report.text),
            Err(CaseError::Bad(reason)) => ("FAIL", reason),
            Err(CaseError::Unsupported(reason)) => ("unsupported", reason),
        };
        match word {
            "ok" => passed += 1,
            "FAIL" => failed += 1,
            _ => skipped += 1,
        }
        let line = one_line(&format!("{word:<4} {}  {text}", input.label));
        if !bar.suspend(|| say(&line)) {
            return Ok(ExitCode::FAILURE);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    say(&format!(
        "{passed} passed, {failed} failed, {skipped} unsupported"
    ));
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// How one case went.
struct Report {
    passes: bool,
    text: String,
}

/// Reads, runs, compares, writes and draws one case.
fn attend(
    arguments: &Arguments,
    engine: &Engine,
    input: &Input,
    writer: &mut files::Writer<'_>,
) -> Result<Report, CaseError> {
    if let Some(problem) = &input.problem {
        return Err(CaseError::Bad(problem.clone()));
    }
    let case = Case::read(&input.path)?;
    let weights = case.expects_weights() || arguments.weights || arguments.heatmap.is_some();
    let answers = engine.run(&case, weights)?;
    writer.write(input, &answers).map_err(CaseError::Bad)?;
    if let Some(path) = &arguments.heatmap {
        let map = heatmap::Maps::new(&case, &answers, &input.label, arguments.batch, arguments.head)
            .map_err(CaseError::Bad)?;
        save(path, &map.draw())?;
        if let Some(link) = map.strongest() {
            say(&one_line(&link));
        }
    }
    let comparisons = case.compare(&answers);
    let text: Vec<String> = comparisons.iter().map(ToString::to_string).collect();
    Ok(Report {
        passes: comparisons.iter().all(case::Comparison::passes),
        text: if text.is_empty() {
            "nothing to compare with".to_owned()
        } else {
            text.join(", ")
        },
    })
}

/// Flat colours pack best without a filter.
fn save(path: &Path, image: &RgbImage) -> Result<(), CaseError> {
    let told = |error: &dyn std::fmt::Display| {
        CaseError::Bad(format!("{} cannot be written: {error}", path.display()))
    };
    let file = File::create(path).map_err(|error| told(&error))?;
    let encoder =
        PngEncoder::new_with_quality(BufWriter::new(file), CompressionType::Best, FilterType::NoFilter);
    image.write_with_encoder(encoder).map_err(|error| told(&error))
}

/// A bar where a terminal shows it and there is something to wait for.
fn progress_bar(cases: usize) -> ProgressBar {
    if cases < 2 {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(cases as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:32.magenta/dim} {pos}/{len}  {elapsed}  {msg}") {
        bar.set_style(style.progress_chars("━━╌"));
    }
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    bar
}

/// Names and reasons may hold anything that a file or a driver holds: a report stays one line without
/// control codes.
fn one_line(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    lines
        .join("; ")
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Prints a line; `false` if nobody reads it any more (`attend ... | head`).
fn say(line: &str) -> bool {
    writeln!(io::stdout().lock(), "{line}").is_ok()
}
