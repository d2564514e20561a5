//! The cargo commands behind each task.

use std::fmt;

/// Where the demo's picture goes, from the workspace root.
pub const PICTURE: &str = "target/coreference.png";

/// One call of cargo.
#[derive(Debug, PartialEq, Eq)]
pub struct Step {
    pub args: Vec<String>,
    pub env: Vec<(&'static str, &'static str)>,
}

impl Step {
    fn new(args: &[&str]) -> Self {
        Self {
            args: args.iter().map(|&arg| arg.to_owned()).collect(),
            env: Vec::new(),
        }
    }

    fn with(mut self, more: &[String]) -> Self {
        self.args.extend_from_slice(more);
        self
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.env {
            write!(f, "{name}=\"{value}\" ")?;
        }
        write!(f, "cargo {}", self.args.join(" "))
    }
}

pub fn demo() -> Step {
    let data = "examples/data/coreference.safetensors";
    Step::new(&[
        "run",
        "--release",
        "--example",
        "attend",
        "--",
        data,
        "--heatmap",
        PICTURE,
    ])
}

pub fn test(args: &[String]) -> Step {
    Step::new(&["test", "--workspace", "--release"]).with(args)
}

pub fn bench(args: &[String]) -> Step {
    Step::new(&["bench", "--bench", "throughput", "--"]).with(args)
}

pub fn tune(args: &[String]) -> Step {
    Step::new(&["run", "--release", "--example", "tune", "--"]).with(args)
}

/// All in the release profile, so that the documentation reuses what the lints have built.
pub fn check() -> Vec<Step> {
    let mut doc = Step::new(&["doc", "--workspace", "--no-deps", "--release"]);
    doc.env.push(("RUSTDOCFLAGS", "-D warnings"));
    vec![
        Step::new(&["fmt", "--all", "--check"]),
        Step::new(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--release",
            "--",
            "-D",
            "warnings",
        ]),
        doc,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(args: &[&str]) -> Vec<String> {
        args.iter().map(|&arg| arg.to_owned()).collect()
    }

    #[test]
    fn the_demo_writes_the_picture_that_it_names() {
        assert_eq!(
            demo().to_string(),
            "cargo run --release --example attend -- examples/data/coreference.safetensors \
             --heatmap target/coreference.png"
        );
    }

    #[test]
    fn tests_cover_the_workspace_in_release() {
        assert_eq!(test(&[]).to_string(), "cargo test --workspace --release");
        assert_eq!(
            test(&owned(&["--test", "x", "--", "--nocapture"])).args,
            owned(&[
                "test",
                "--workspace",
                "--release",
                "--test",
                "x",
                "--",
                "--nocapture"
            ])
        );
    }

    #[test]
    fn bench_arguments_reach_the_benchmark() {
        assert_eq!(
            bench(&owned(&["--json"])).to_string(),
            "cargo bench --bench throughput -- --json"
        );
    }

    #[test]
    fn tune_arguments_reach_the_example() {
        assert_eq!(
            tune(&owned(&["--seconds", "60"])).to_string(),
            "cargo run --release --example tune -- --seconds 60"
        );
    }

    #[test]
    fn check_is_formatting_lints_and_documentation() {
        let lines: Vec<String> = check().iter().map(Step::to_string).collect();
        assert_eq!(
            lines,
            [
                "cargo fmt --all --check",
                "cargo clippy --workspace --all-targets --release -- -D warnings",
                "RUSTDOCFLAGS=\"-D warnings\" cargo doc --workspace --no-deps --release",
            ]
        );
    }
}
