//! `cargo xtask demo | test | bench | tune | check`: the chores of this repository, each in one command.
//!
//! What xtask itself has to say goes to stderr; stdout belongs to the command that it runs.

mod driver;
mod steps;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};

use steps::Step;

#[derive(Parser)]
#[command(bin_name = "cargo xtask", about = "Chores of the multihead repository")]
struct Cli {
    /// Fail if no Vulkan driver is found, instead of installing one (Linux)
    #[arg(long, global = true)]
    no_install: bool,
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run the example on the data it ships with and write a heatmap
    Demo,
    /// Run every test: unit tests, integration tests and doc tests
    Test {
        /// Arguments for `cargo test`, e.g. `-- --test NAME` or `-- NAME -- --nocapture`
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Run the throughput benchmark
    Bench {
        /// Arguments for the benchmark itself
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Time the kernels' tile sizes on the present adapter and print the rows for src/tuning.rs
    Tune {
        /// Arguments for the example itself, e.g. `-- --seconds 1200`
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Check formatting, lints and documentation
    Check,
}

fn main() -> ExitCode {
    match work(&Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work(cli: &Cli) -> Result<ExitCode> {
    let root = root()?;
    if !matches!(cli.task, Task::Check) {
        driver::ensure(!cli.no_install)?;
    }
    match &cli.task {
        Task::Demo => {
            let picture = root.join(steps::PICTURE);
            if let Some(folder) = picture.parent() {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("cannot make {}", folder.display()))?;
            }
            let code = run(&root, &[steps::demo()])?;
            if code == ExitCode::SUCCESS {
                eprintln!("xtask: the picture is {}", picture.display());
            }
            Ok(code)
        }
        Task::Test { args } => run(&root, &[steps::test(args)]),
        Task::Bench { args } => run(&root, &[steps::bench(args)]),
        Task::Tune { args } => run(&root, &[steps::tune(args)]),
        Task::Check => {
            let path = env::var_os("PATH").unwrap_or_default();
            for tool in ["tint", "spirv-val"] {
                if driver::on_path(tool, &path).is_some() {
                    eprintln!("xtask: {tool} is on PATH: the tests run the shaders through it");
                } else {
                    eprintln!("xtask: {tool} is not on PATH: the tests do without it");
                }
            }
            run(&root, &steps::check())
        }
    }
}

/// The workspace root: the folder above this package.
fn root() -> Result<PathBuf> {
    let package = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = package
        .parent()
        .context("the xtask package has no parent folder")?;
    Ok(root.to_path_buf())
}

/// Runs the steps in order and stops at the first that fails. Its exit code is the answer.
fn run(root: &Path, steps: &[Step]) -> Result<ExitCode> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    for step in steps {
        eprintln!("xtask: {step}");
        let status = Command::new(&cargo)
            .args(&step.args)
            .envs(step.env.iter().copied())
            .current_dir(root)
            .status()
            .with_context(|| format!("cannot start {}", Path::new(&cargo).display()))?;
        if !status.success() {
            eprintln!("xtask: `{step}` failed ({status})");
            return Ok(exit_code(status.code()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A failed command's exit code as ours; 1 where it has none that fits (ended by a signal).
fn exit_code(code: Option<i32>) -> ExitCode {
    match code.and_then(|code| u8::try_from(code).ok()) {
        Some(code) if code != 0 => ExitCode::from(code),
        _ => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_dashes_is_passed_on() {
        let cli = Cli::parse_from([
            "xtask",
            "test",
            "--no-install",
            "--",
            "--test",
            "a",
            "--",
            "--nocapture",
        ]);
        assert!(cli.no_install);
        let Task::Test { args } = cli.task else {
            panic!("not `test`")
        };
        assert_eq!(args, ["--test", "a", "--", "--nocapture"]);

        let cli = Cli::parse_from(["xtask", "--no-install", "bench", "--", "--json"]);
        assert!(cli.no_install);
        let Task::Bench { args } = cli.task else {
            panic!("not `bench`")
        };
        assert_eq!(args, ["--json"]);
    }

    #[test]
    fn exit_codes_are_passed_on() {
        assert_eq!(exit_code(Some(101)), ExitCode::from(101));
        assert_eq!(exit_code(None), ExitCode::FAILURE);
        assert_eq!(exit_code(Some(-1)), ExitCode::FAILURE);
        assert_eq!(exit_code(Some(0)), ExitCode::FAILURE);
    }

    #[test]
    fn the_root_is_the_folder_above() -> Result<()> {
        assert!(root()?.join("xtask").join("Cargo.toml").is_file());
        Ok(())
    }
}
