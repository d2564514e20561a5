//! Which workloads fit the time: their cost is estimated from short probes on the adapter at hand.

use super::measure;
use super::workload::{Call, Workload};
use multihead::{AttentionPath, Gpu, Result, wgpu::DeviceType};

/// Seconds that a run takes at most if nothing else is said.
pub(crate) fn default_seconds(gpu: &Gpu) -> f64 {
    if gpu.info().device_type == DeviceType::Cpu {
        900.0
    } else {
        120.0
    }
}

/// A workload, and how often it is called after the first time.
pub(crate) struct Planned {
    pub(crate) workload: Workload,
    pub(crate) runs: usize,
    /// Of all its calls.
    pub(crate) seconds: f64,
}

/// What fits a budget, in the table's order, and what does not.
pub(crate) struct Schedule {
    pub(crate) planned: Vec<Planned>,
    pub(crate) left_out: Vec<Planned>,
}

impl Schedule {
    pub(crate) fn seconds(&self) -> f64 {
        self.planned.iter().map(|planned| planned.seconds).sum()
    }

    /// The most expensive are called less often, and then left out, until the rest fits.
    pub(crate) fn new(workloads: Vec<(Workload, f64)>, runs: usize, budget: f64) -> Self {
        let cost = |runs: usize, one: f64| (runs + 1) as f64 * one;
        let mut schedule = Self {
            planned: workloads
                .into_iter()
                .map(|(workload, one)| Planned {
                    workload,
                    runs,
                    seconds: cost(runs, one),
                })
                .collect(),
            left_out: Vec::new(),
        };
        while schedule.seconds() > budget {
            let seconds = |planned: &Planned| planned.seconds;
            let most = (0..schedule.planned.len())
                .max_by(|&a, &b| seconds(&schedule.planned[a]).total_cmp(&seconds(&schedule.planned[b])));
            let Some(most) = most else { break };
            let planned = &mut schedule.planned[most];
            let one = planned.seconds / cost(planned.runs, 1.0);
            if planned.runs > 0 {
                planned.runs /= 2;
                planned.seconds = cost(planned.runs, one);
            } else {
                let planned = schedule.planned.remove(most);
                schedule.left_out.push(planned);
            }
        }
        schedule
    }
}

/// What the adapter does per second.
pub(crate) struct Speed {
    fused: f64,
    composed: f64,
    projection: f64,
    decode_bytes: f64,
}

impl Speed {
    /// Runs small workloads, doubled until they take long enough to tell.
    pub(crate) fn probe(gpu: &Gpu) -> Result<Self> {
        let attention = |path, queries, keys| Workload::Attention {
            path,
            call: Call::new(queries, keys),
        };
        let rate = |work: fn(&Workload) -> f64, sized: &dyn Fn(usize) -> Workload| {
            let mut size = 256;
            loop {
                let workload = sized(size);
                let prepared = workload.prepare(gpu)?;
                measure::time(gpu, &prepared.record)?; // builds the pipelines
                let seconds = measure::time(gpu, &prepared.record)?.wall_ms * 1e-3;
                if seconds > 0.02 || size >= 8192 {
                    return Ok(work(&workload) / seconds.max(1e-6));
                }
                size *= 2;
            }
        };
        Ok(Self {
            fused: rate(Workload::flops, &|size| {
                attention(AttentionPath::Fused, size, size)
            })?,
            composed: rate(Workload::flops, &|size| {
                attention(AttentionPath::Composed, size, size)
            })?,
            projection: rate(Workload::flops, &|size| Workload::Projection {
                rows: size,
                outputs: 512,
                inputs: 512,
            })?,
            decode_bytes: rate(Workload::bytes, &|size| {
                attention(AttentionPath::Auto, 1, size * 8)
            })?,
        })
    }

    /// Seconds of one call, about.
    pub(crate) fn seconds(&self, workload: &Workload) -> f64 {
        match workload {
            Workload::Attention { call, .. } if call.queries == 1 => workload.bytes() / self.decode_bytes,
            Workload::Attention {
                path: AttentionPath::Composed,
                ..
            } => workload.flops() / self.composed,
            Workload::Attention { .. } => workload.flops() / self.fused,
            // A layer is projections and fused attention; the slower of the two bounds it from above.
            Workload::Layer { .. } => workload.flops() / self.projection.min(self.fused),
            Workload::Projection { .. } => workload.flops() / self.projection,
        }
    }
}
