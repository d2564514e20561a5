//! The process that does the work, watched.

use super::report::Report;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// What a worker that keeps to its budget may need to say so.
const GRACE: Duration = Duration::from_secs(2);

/// Runs `command`, which prints its report as it stands, one line each, and gives the last one. If it is still at it
/// after `budget`, it is ended; if it ends badly, the report says at which step.
pub(crate) fn supervise(mut command: Command, budget: Duration, mut progress: impl FnMut(&Report)) -> Report {
    let start = Instant::now();
    let mut child = match command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn() {
        Ok(child) => child,
        Err(error) => return Report::without_device(&format!("the worker cannot be started: {error}")),
    };
    let (sender, lines) = mpsc::channel();
    let output = child.stdout.take();
    std::thread::spawn(move || {
        for line in output
            .into_iter()
            .flat_map(|output| BufReader::new(output).lines())
        {
            // The receiver is gone once the time is up.
            if line.is_ok_and(|line| sender.send(line).is_err()) {
                break;
            }
        }
    });
    let mut last = None;
    loop {
        let left = (budget + GRACE).saturating_sub(start.elapsed());
        match lines.recv_timeout(left) {
            Ok(line) => {
                if let Some(report) = Report::from_line(&line) {
                    progress(&report);
                    last = Some(report);
                }
            }
            Err(RecvTimeoutError::Timeout) => {
                // It may have ended by itself in the meantime.
                let _ = child.kill();
                let _ = child.wait();
                return match last {
                    Some(mut report) => {
                        report.cut_short(start.elapsed());
                        report
                    }
                    None => Report::without_device(
                        "no device answered in time: raise --budget, or the driver hangs",
                    ),
                };
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let ended = match child.wait() {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("the driver or the program crashed ({status})")),
        Err(error) => Some(format!("the worker cannot be waited for: {error}")),
    };
    let mut report = last.unwrap_or_else(|| Report::without_device("the worker told nothing"));
    if let Some(how) = ended {
        report.ended(&how);
    }
    report
}
