//! Runs a workload and times it.

use std::time::Instant;

use super::report::Row;
use super::workload::Workload;
use multihead::{Gpu, Result, wgpu::Features};

/// Whether the device's own clock is read. Otherwise, or where it read nothing, wall clock counts.
pub(crate) fn has_timestamps(gpu: &Gpu) -> bool {
    gpu.features().contains(Features::TIMESTAMP_QUERY)
}

/// Medians of `runs` calls, each submitted and waited for, after one more that builds the pipelines. A call of its own
/// `first` counts if `runs` is 0: there is time for one only.
pub(crate) fn measure(gpu: &Gpu, workload: &Workload, runs: usize) -> Result<Row> {
    gpu.release_scratch();
    gpu.reset_peak_bytes();
    let held = gpu.held_bytes();
    let prepared = workload.prepare(gpu)?;

    let mut calls = Vec::new();
    for _ in 0..=runs {
        calls.push(time(gpu, &prepared.record)?);
    }
    let peak_bytes = gpu.peak_bytes() - held;
    if runs > 0 {
        calls.remove(0);
    }
    let wall_ms = median(calls.iter().map(|call| call.wall_ms).collect());
    let mut device: Vec<f64> = calls.iter().filter_map(|call| call.device_ms).collect();
    if device.len() < calls.len() {
        device.clear();
    }
    let on_device = !device.is_empty();
    let times = if on_device {
        device
    } else {
        calls.iter().map(|call| call.wall_ms).collect()
    };
    let best_ms = times.iter().copied().fold(f64::INFINITY, f64::min);

    // Into encoders that are never submitted.
    let mut recording = Vec::new();
    for _ in 0..5 {
        let mut encoder = gpu.encoder();
        let start = Instant::now();
        (prepared.record)(&mut encoder)?;
        recording.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let (series, length) = workload.series().unzip();
    Ok(Row {
        name: workload.name(),
        series,
        length,
        flops: workload.flops(),
        bytes: workload.bytes(),
        runs: runs.max(1),
        median_ms: median(times),
        best_ms,
        on_device,
        wall_ms,
        record_us: median(recording),
        peak_bytes,
        error: (prepared.error)()?,
    })
}

/// What one call took.
pub(crate) struct Timed {
    pub(crate) wall_ms: f64,
    /// The kernels' own time.
    device_ms: Option<f64>,
}

pub(crate) fn time(
    gpu: &Gpu,
    record: &dyn Fn(&mut multihead::wgpu::CommandEncoder) -> Result<()>,
) -> Result<Timed> {
    gpu.wait()?;
    if has_timestamps(gpu) {
        gpu.start_profile()?;
    }
    let start = Instant::now();
    let mut encoder = gpu.encoder();
    record(&mut encoder)?;
    gpu.submit(encoder)?;
    gpu.wait()?;
    let wall_ms = start.elapsed().as_secs_f64() * 1e3;
    let device_ms = if has_timestamps(gpu) {
        let total = gpu.finish_profile()?.total().as_secs_f64() * 1e3;
        (total > 0.0).then_some(total)
    } else {
        None
    };
    Ok(Timed { wall_ms, device_ms })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
