//! What is found out, and how it is told.

use multihead::{
    Attention, AttentionOptions, AttentionShape, Causal, Choice, DType, Error, Gpu, PendingCheck, wgpu,
};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// All of it. Field names are those of the JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    multihead: String,
    system: String,
    adapters: Vec<String>,
    device: Option<Device>,
    calls: Vec<Call>,
    checks: Vec<Check>,
    /// What is still to be done; in the end, what the time did not suffice for.
    not_reached: Vec<String>,
    /// The step that was at hand when the time was up, and the seconds that it had taken.
    cut_short: Option<(String, f64)>,
    problems: Vec<String>,
    seconds: f64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Device {
    name: String,
    backend: String,
    kind: String,
    driver: String,
    ids: String,
    subgroup_sizes: [u32; 2],
    features: Vec<(String, bool)>,
    limits: Vec<Limit>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Limit {
    name: String,
    value: u64,
    /// What WebGPU guarantees.
    guaranteed: u64,
}

/// What computes a call.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Call {
    call: String,
    path: String,
    reason: String,
    variant: String,
    passed_over: Vec<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Check {
    variant: String,
    /// What was wrong, if something was.
    failure: Option<String>,
    seconds: f64,
}

/// Calls whose path and variant are told.
fn calls() -> Vec<(&'static str, AttentionOptions, AttentionShape, bool)> {
    let causal = || AttentionOptions::new().causal(Causal::BottomRight);
    let long = AttentionShape::new(1, 8, 512, 64);
    let one_query = AttentionShape { queries: 1, ..long };
    vec![
        ("512 tokens", AttentionOptions::new(), long, false),
        ("512 tokens, causal", causal(), long, false),
        ("512 tokens, weights wanted", AttentionOptions::new(), long, true),
        ("1 token, 512 keys", causal(), one_query, false),
    ]
}

impl Report {
    fn new(adapters: Vec<String>) -> Self {
        Self {
            multihead: env!("CARGO_PKG_VERSION").to_owned(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            adapters,
            device: None,
            calls: Vec::new(),
            checks: Vec::new(),
            not_reached: Vec::new(),
            cut_short: None,
            problems: Vec::new(),
            seconds: 0.0,
        }
    }

    /// The report where nothing can run.
    pub(crate) fn without_device(problem: &str) -> Self {
        let mut report = Self::new(Vec::new());
        report.problems.push(problem.to_owned());
        report
    }

    /// Checks the products' kernels, asks which variants calls use, and checks those and, unless `quick`, all others.
    /// After `budget` no further step begins but the first, which always runs. `progress` gets the report as it stands
    /// before each step.
    pub(crate) fn of(
        gpu: &Gpu,
        adapters: Vec<String>,
        quick: bool,
        budget: Duration,
        mut progress: impl FnMut(&Self),
    ) -> Self {
        let mut report = Self::new(adapters);
        report.device = Some(Device::of(gpu));
        let start = Instant::now();
        let mut first = true;
        let result = report.examine(gpu, quick, &mut |report| {
            report.seconds = start.elapsed().as_secs_f64();
            let goes_on = first || start.elapsed() < budget;
            first = false;
            if goes_on {
                progress(report);
            }
            goes_on
        });
        if let Err(error) = result {
            report.problem(error.to_string());
        }
        report.seconds = start.elapsed().as_secs_f64();
        report
    }

    /// The products come first: they build in a second where the kernels of the fused path take many. Ends early if
    /// `goes_on` says that it should.
    fn examine(
        &mut self,
        gpu: &Gpu,
        quick: bool,
        goes_on: &mut dyn FnMut(&mut Self) -> bool,
    ) -> multihead::Result<()> {
        let (products, mut rest): (Vec<_>, Vec<_>) = gpu
            .pending_checks()
            .into_iter()
            .partition(|check| check.is_first_choice() && !is_fused(&check.variant()));
        let calls: Vec<_> = [DType::F32, DType::F16]
            .into_iter()
            .flat_map(|dtype| calls().into_iter().map(move |call| (dtype, call)))
            .collect();
        let name = |dtype, what| format!("{dtype:?}, 8 heads of 64, {what}");
        self.not_reached = products.iter().map(PendingCheck::variant).collect();
        let choices = calls
            .iter()
            .map(|(dtype, call)| format!("choice for {}", name(*dtype, call.0)));
        self.not_reached.extend(choices);
        if !quick {
            self.not_reached.extend(rest.iter().map(PendingCheck::variant));
        }

        for pending in &products {
            if !goes_on(self) {
                return Ok(());
            }
            self.check(pending)?;
        }
        for (dtype, (what, options, shape, weights)) in calls {
            if !goes_on(self) {
                return Ok(());
            }
            let what = name(dtype, what);
            match Attention::new(gpu, options)?.choice(&shape, dtype, weights) {
                Ok(choice) => self.call(what, choice),
                // No variant is left: that is for the report, not the end of it.
                Err(error @ Error::Shader { .. }) => self.problem(format!("{what}: {error}")),
                Err(error) => return Err(error),
            }
            self.not_reached.remove(0);
        }
        let used = |pending: &PendingCheck| self.calls.iter().any(|call| call.variant == pending.variant());
        if quick {
            rest.retain(used);
        } else {
            // Stable, so that the table's order stays.
            rest.sort_by_key(|pending| (!used(pending), !pending.is_first_choice()));
        }
        self.not_reached = rest.iter().map(PendingCheck::variant).collect();
        for pending in &rest {
            if !goes_on(self) {
                return Ok(());
            }
            self.check(pending)?;
        }
        Ok(())
    }

    /// The next check of `not_reached`.
    fn check(&mut self, pending: &PendingCheck) -> multihead::Result<()> {
        let variant = pending.variant();
        let start = Instant::now();
        let failure = pending.run()?.outcome.err();
        if let Some(message) = &failure {
            self.problem(format!("{variant}: {message}"));
        }
        self.checks.push(Check {
            variant,
            failure,
            seconds: start.elapsed().as_secs_f64(),
        });
        self.not_reached.remove(0);
        Ok(())
    }

    /// Steps done, all steps, and the one at hand.
    pub(crate) fn step(&self) -> (usize, usize, &str) {
        let done = self.checks.len() + self.calls.len();
        let now = self.not_reached.first().map_or("", String::as_str);
        (done, done + self.not_reached.len(), now)
    }

    /// Adds that whoever made the report ended in the middle of a step.
    pub(crate) fn ended(&mut self, how: &str) {
        let problem = match self.not_reached.first() {
            Some(step) => format!("{step}: {how}"),
            None => how.to_owned(),
        };
        self.problem(problem);
    }

    /// Notes that the time was up in the middle of a step, `elapsed` after the start.
    pub(crate) fn cut_short(&mut self, elapsed: Duration) {
        let elapsed = elapsed.as_secs_f64();
        if !self.not_reached.is_empty() {
            let step = self.not_reached.remove(0);
            self.cut_short = Some((step, elapsed - self.seconds));
        }
        self.seconds = elapsed;
    }

    fn call(&mut self, call: String, choice: Choice) {
        for passed_over in &choice.passed_over {
            self.problem(passed_over.clone());
        }
        self.calls.push(Call {
            call,
            path: format!("{:?}", choice.path),
            reason: choice.reason,
            variant: choice.variant,
            passed_over: choice.passed_over,
        });
    }

    /// A variant that a call passed over fails its check too; it is told once.
    fn problem(&mut self, problem: String) {
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    /// 0 if all is right, 1 if something is wrong, 2 if there is no device.
    pub(crate) fn exit_code(&self) -> u8 {
        match (&self.device, self.problems.is_empty()) {
            (None, _) => 2,
            (Some(_), false) => 1,
            (Some(_), true) => 0,
        }
    }

    /// A report from one line of JSON.
    pub(crate) fn from_line(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }

    /// As one line of JSON.
    pub(crate) fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// As JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }

    /// As a fenced block for a bug report.
    pub(crate) fn block(&self) -> String {
        let mut text = format!("```text\nmultihead {} on {}\n", self.multihead, self.system);
        // Writing to a string cannot fail.
        let _ = self.write(&mut text);
        text.push_str("```");
        text
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        for adapter in &self.adapters {
            writeln!(out, "found    {}", one_line(adapter))?;
        }
        if let Some(device) = &self.device {
            device.write(out)?;
        }
        for call in &self.calls {
            writeln!(
                out,
                "\n{}\n    {}: {}\n    {}",
                call.call, call.path, call.reason, call.variant
            )?;
            for passed_over in &call.passed_over {
                writeln!(out, "    passed over: {}", one_line(passed_over))?;
            }
        }
        writeln!(out)?;
        for check in &self.checks {
            let word = if check.failure.is_some() { "WRONG" } else { "right" };
            writeln!(out, "{word} {:6.2} s  {}", check.seconds, check.variant)?;
        }
        if let Some((step, seconds)) = &self.cut_short {
            writeln!(out, "cut short after {seconds:.0} s  {step}")?;
        }
        // There are more than a hundred variants: which ones, JSON tells.
        let mut kernels: Vec<(&str, usize)> = Vec::new();
        for step in &self.not_reached {
            match kernel(step) {
                None => writeln!(out, "not reached    {step}")?,
                Some(kernel) => match kernels.iter_mut().find(|(name, _)| *name == kernel) {
                    Some((_, count)) => *count += 1,
                    None => kernels.push((kernel, 1)),
                },
            }
        }
        for (kernel, count) in kernels {
            let variants = if count == 1 { "variant" } else { "variants" };
            writeln!(out, "not reached    {count} {variants} of {kernel}")?;
        }
        writeln!(
            out,
            "\n{} checked in {:.0} s, {} not reached, {} problems",
            self.checks.len(),
            self.seconds,
            self.not_reached.len(),
            self.problems.len()
        )?;
        for problem in &self.problems {
            writeln!(out, "PROBLEM  {}", one_line(problem))?;
        }
        Ok(())
    }
}

impl Device {
    fn of(gpu: &Gpu) -> Self {
        let (info, limits, least) = (gpu.info(), gpu.limits(), wgpu::Limits::default());
        let limit = |name: &str, value: u64, guaranteed: u64| Limit {
            name: name.to_owned(),
            value,
            guaranteed,
        };
        Self {
            name: info.name.clone(),
            backend: info.backend.to_string(),
            kind: format!("{:?}", info.device_type),
            driver: format!("{} {}", info.driver, info.driver_info),
            ids: format!("{:04x}:{:04x}", info.vendor, info.device),
            subgroup_sizes: [info.subgroup_min_size, info.subgroup_max_size],
            features: [
                ("SHADER_F16", wgpu::Features::SHADER_F16),
                ("SUBGROUP", wgpu::Features::SUBGROUP),
                ("TIMESTAMP_QUERY", wgpu::Features::TIMESTAMP_QUERY),
                ("PIPELINE_CACHE", wgpu::Features::PIPELINE_CACHE),
            ]
            .map(|(name, feature)| (name.to_owned(), gpu.features().contains(feature)))
            .to_vec(),
            limits: vec![
                limit("max_buffer_size", limits.max_buffer_size, least.max_buffer_size),
                limit(
                    "max_storage_buffer_binding_size",
                    limits.max_storage_buffer_binding_size,
                    least.max_storage_buffer_binding_size,
                ),
                limit(
                    "max_storage_buffers_per_shader_stage",
                    limits.max_storage_buffers_per_shader_stage.into(),
                    least.max_storage_buffers_per_shader_stage.into(),
                ),
                limit(
                    "max_compute_invocations_per_workgroup",
                    limits.max_compute_invocations_per_workgroup.into(),
                    least.max_compute_invocations_per_workgroup.into(),
                ),
                limit(
                    "max_compute_workgroup_storage_size",
                    limits.max_compute_workgroup_storage_size.into(),
                    least.max_compute_workgroup_storage_size.into(),
                ),
                limit(
                    "max_compute_workgroups_per_dimension",
                    limits.max_compute_workgroups_per_dimension.into(),
                    least.max_compute_workgroups_per_dimension.into(),
                ),
            ],
        }
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "adapter  {} ({}, {})",
            one_line(&self.name),
            self.kind,
            self.ids
        )?;
        writeln!(out, "driver   {}, {}", self.backend, one_line(&self.driver))?;
        let features: Vec<String> = self
            .features
            .iter()
            .map(|(name, there)| format!("{}{name}", if *there { "" } else { "no " }))
            .collect();
        writeln!(out, "features {}", features.join(", "))?;
        let [least, most] = self.subgroup_sizes;
        writeln!(out, "subgroup {least} to {most} lanes")?;
        for limit in &self.limits {
            writeln!(
                out,
                "limit    {} {} (guaranteed {})",
                limit.name, limit.value, limit.guaranteed
            )?;
        }
        Ok(())
    }
}

/// The kernel of a variant's label, `multihead KERNEL ...`.
fn kernel(step: &str) -> Option<&str> {
    step.strip_prefix("multihead ")?.split(' ').next()
}

/// Whether it is a variant of the fused path.
fn is_fused(variant: &str) -> bool {
    matches!(kernel(variant), Some("flash" | "decode"))
}

/// Drivers' and compilers' words may hold anything: a line of the report stays a line, and the fence closed.
fn one_line(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    words
        .join(" ")
        .replace("```", "'''")
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}
