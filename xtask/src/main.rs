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

    /// Every command of the README that starts with `cargo`, without what stands for a file.
    fn readme_commands() -> Result<Vec<Vec<String>>> {
        let readme = std::fs::read_to_string(root()?.join("README.md"))?;
        let mut fenced = false;
        let mut commands = Vec::new();
        for line in readme.lines() {
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
                continue;
            }
            let inline = line.split('`').skip(1).step_by(2);
            let found: Vec<&str> = if fenced { vec![line] } else { inline.collect() };
            for text in found {
                let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
                if words.first().is_some_and(|word| word == "cargo") {
                    commands.push(words);
                }
            }
        }
        Ok(commands)
    }

    #[test]
    fn the_readme_names_commands_that_exist() -> Result<()> {
        let commands = readme_commands()?;
        let root = root()?;
        for words in &commands {
            let line = words.join(" ");
            let after = |flag: &str| {
                let place = words.iter().position(|word| word == flag);
                place.and_then(|place| words.get(place + 1))
            };
            match words.get(1).map(String::as_str) {
                Some("xtask") => {
                    Cli::try_parse_from(&words[1..]).with_context(|| line.clone())?;
                }
                Some("run") => {
                    let package =
                        after("-p").map_or(root.clone(), |package| root.join("examples").join(package));
                    let main = match after("--example") {
                        Some(example) => root.join("examples").join(example).join("main.rs"),
                        None => package.join("src").join("main.rs"),
                    };
                    assert!(main.is_file(), "{line}: no {}", main.display());
                }
                Some("bench") => {
                    let bench = after("--bench").with_context(|| line.clone())?;
                    let main = root.join("benches").join(bench).join("main.rs");
                    assert!(main.is_file(), "{line}: no {}", main.display());
                }
                // It only shows.
                Some("tree") => {}
                _ => panic!("{line}: no command that this test knows"),
            }
        }
        let tasks = commands.iter().filter(|words| words[1] == "xtask").count();
        assert!(tasks >= 2, "{commands:?}");
        Ok(())
    }

    /// Word for word, but for what would take minutes. The viewer's own tests run it without a window; the chores of xtask
    /// are run by whoever runs this test.
    #[test]
    fn the_readmes_programs_run() -> Result<()> {
        let root = root()?;
        let mut seen = Vec::new();
        for words in readme_commands()? {
            let Some(program) = words
                .iter()
                .find(|word| !["cargo", "run", "bench"].contains(&word.as_str()) && !word.starts_with('-'))
            else {
                continue;
            };
            let own = ["run", "bench"].contains(&words[1].as_str());
            if !own || program == "viewer" || seen.contains(program) {
                continue;
            }
            let (command, _) =
                words.split_at(words.iter().position(|word| word == "--").unwrap_or(words.len()));
            let shorter: &[&str] = match program.as_str() {
                "attend" => &["--", "tests/data/mha_self.safetensors"],
                "doctor" => &["--", "--quick", "--budget", "20"],
                "throughput" => &["--", "--quick", "--runs", "1"],
                _ => &[],
            };
            let output = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
                .args(
                    command[1..]
                        .iter()
                        .map(String::as_str)
                        .chain(shorter.iter().copied()),
                )
                .current_dir(&root)
                .output()?;
            assert!(output.status.success(), "{command:?} {shorter:?}: {output:?}");
            seen.push(program.clone());
        }
        seen.sort();
        let all = [
            "attend",
            "compare_torch",
            "doctor",
            "embed",
            "generate",
            "throughput",
        ];
        assert_eq!(seen, all, "what the README tells how to run");
        Ok(())
    }
}
