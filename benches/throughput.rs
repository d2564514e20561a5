//! Throughput of whole calls: `cargo bench --bench throughput`, or `-- NAME` for the workloads whose name holds NAME.
//!
//! Each call is submitted and waited for; the median of the runs counts. FLOPs by the usual model: attention
//! `4 B H Lq Lk D` (half of it if causal), projection `2 M N K`, a layer both. GB/s count keys and values once, which is
//! what a decoding step has to read. MiB are the most that the crate holds beyond what it held before the call's tensors
//! were made.

// A benchmark's result is what it prints.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use clap::Parser;
use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, Causal, DType, Error, Gpu,
    Linear, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, Result, Tensor,
    f16, wgpu,
};

#[derive(Parser)]
struct Arguments {
    /// Only workloads whose name holds this.
    name: Option<String>,
    /// Runs that count; one more comes first.
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// `cargo bench` passes it.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A workload: its name, its FLOPs, and what records it.
struct Workload {
    name: String,
    flops: f64,
    /// Bytes of keys and values, if that is what bounds it.
    bytes: f64,
    build: Build,
}

/// Makes the tensors of a call.
type Build = Box<dyn Fn(&Gpu) -> Result<Record>>;

/// Records a call whose tensors exist already.
type Record = Box<dyn Fn(&mut wgpu::CommandEncoder) -> Result<()>>;

fn values(gpu: &Gpu, shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count)
        .map(|i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0)
        .collect();
    Tensor::upload(gpu, &values, shape)
}

fn layer(batch: usize, length: usize, embed: usize, heads: usize) -> Workload {
    let projections = 4.0 * 2.0 * (batch * length * embed * embed) as f64;
    Workload {
        name: format!("layer B{batch} L{length} E{embed} H{heads}"),
        flops: projections + 4.0 * (batch * length * length * embed) as f64,
        bytes: 0.0,
        build: Box::new(move |gpu| {
            let layer = MultiHeadAttention::seeded(gpu, MultiHeadAttentionConfig::new(embed, heads), 1)?;
            let x = values(gpu, &[batch, length, embed])?;
            let y = Tensor::zeros(gpu, DType::F32, x.shape())?;
            Ok(Box::new(move |encoder| {
                layer.record(encoder, &MultiHeadInputs::new(&x), &MultiHeadOutputs::new(&y))
            }))
        }),
    }
}

/// Attention of `queries` to `keys`, eight heads of 64.
#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    queries: usize,
    keys: usize,
    causal: Causal,
    window: Option<u32>,
    dtype: DType,
}

impl Shape {
    fn new(queries: usize, keys: usize) -> Self {
        Self {
            batch: 1,
            queries,
            keys,
            causal: Causal::None,
            window: None,
            dtype: DType::F32,
        }
    }

    fn causal(mut self) -> Self {
        self.causal = Causal::TopLeft;
        self
    }

    fn name(&self, path: AttentionPath) -> String {
        let dtype = if self.dtype == DType::F16 { " f16" } else { "" };
        let causal = if self.causal == Causal::None {
            ""
        } else {
            " causal"
        };
        let window = self
            .window
            .map_or(String::new(), |left| format!(" window {left}"));
        let batch = if self.batch == 1 {
            String::new()
        } else {
            format!("B{} ", self.batch)
        };
        format!(
            "{path:?} {batch}H8 Lq{} Lk{} D64{dtype}{causal}{window}",
            self.queries, self.keys
        )
    }
}

fn typed(gpu: &Gpu, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    if dtype == DType::F32 {
        return values(gpu, shape);
    }
    let count = shape.iter().product();
    let halves: Vec<f16> = (0..count)
        .map(|i: usize| f16::from_f32(((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0))
        .collect();
    Tensor::upload(gpu, &halves, shape)
}

fn attention(path: AttentionPath, shape: Shape) -> Workload {
    let (heads, head_dim) = (8, 64);
    let Shape {
        batch,
        queries,
        keys,
        causal,
        window,
        dtype,
    } = shape;
    let pairs = match (window, causal) {
        (Some(left), _) => queries as f64 * (f64::from(left) + 1.0).min(keys as f64),
        (None, Causal::None) => (queries * keys) as f64,
        (None, _) => 0.5 * (queries * keys) as f64,
    };
    let size = if dtype == DType::F16 { 2 } else { 4 };
    Workload {
        name: shape.name(path),
        flops: 4.0 * (batch * heads * head_dim) as f64 * pairs,
        bytes: (2 * batch * heads * keys * head_dim * size) as f64,
        build: Box::new(move |gpu| {
            let options = AttentionOptions::new()
                .causal(causal)
                .window(window, window.map(|_| 0));
            let attention = Attention::new(gpu, options)?.with_path(path);
            let query = typed(gpu, dtype, &[batch, heads, queries, head_dim])?;
            let key = typed(gpu, dtype, &[batch, heads, keys, head_dim])?;
            let value = typed(gpu, dtype, &[batch, heads, keys, head_dim])?;
            let output = Tensor::zeros(gpu, dtype, &[batch, queries, heads * head_dim])?;
            Ok(Box::new(move |encoder| {
                attention.record(
                    encoder,
                    &AttentionInputs::new(&query, &key, &value),
                    &AttentionOutputs::new(&output),
                )
            }))
        }),
    }
}

fn projection(rows: usize, outputs: usize, inputs: usize) -> Workload {
    Workload {
        name: format!("projection {rows}x{outputs}x{inputs}"),
        flops: 2.0 * (rows * outputs * inputs) as f64,
        bytes: 0.0,
        build: Box::new(move |gpu| {
            let linear = Linear::new(values(gpu, &[outputs, inputs])?, Some(values(gpu, &[outputs])?))?;
            let x = values(gpu, &[rows, inputs])?;
            let y = Tensor::zeros(gpu, DType::F32, &[rows, outputs])?;
            Ok(Box::new(move |encoder| linear.record(encoder, &x, &y)))
        }),
    }
}

fn workloads() -> Vec<Workload> {
    let mut workloads = vec![
        layer(1, 128, 512, 8),
        layer(1, 512, 512, 8),
        layer(1, 2048, 512, 8),
        layer(4, 512, 768, 12),
        projection(2048, 512, 512),
        projection(2048, 2048, 2048),
    ];
    for path in [AttentionPath::Fused, AttentionPath::Composed] {
        for length in [512, 1024, 2048, 4096] {
            workloads.push(attention(path, Shape::new(length, length)));
        }
        for length in [1024, 2048, 4096] {
            workloads.push(attention(path, Shape::new(length, length).causal()));
        }
        let halves = Shape {
            dtype: DType::F16,
            ..Shape::new(2048, 2048)
        };
        workloads.push(attention(path, halves));
        workloads.push(attention(path, Shape::new(1, 4096)));
    }
    let fused = AttentionPath::Fused;
    for length in [8192, 16_384] {
        workloads.push(attention(fused, Shape::new(length, length)));
    }
    let windowed = Shape {
        window: Some(255),
        ..Shape::new(16_384, 16_384)
    };
    workloads.push(attention(fused, windowed));
    for dtype in [DType::F32, DType::F16] {
        for batch in [1, 16] {
            for keys in [1024, 4096, 16_384, 65_536] {
                let step = Shape {
                    batch,
                    dtype,
                    ..Shape::new(1, keys)
                };
                workloads.push(attention(AttentionPath::Auto, step));
            }
        }
    }
    workloads
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let gpu = Gpu::new()?;
    println!("{}", gpu.description());
    println!(
        "{:44} {:>10} {:>8} {:>8} {:>10} {:>9} {:>9}",
        "workload", "median ms", "GFLOP/s", "GB/s", "best ms", "record us", "peak MiB"
    );
    for workload in workloads() {
        if arguments
            .name
            .as_ref()
            .is_some_and(|name| !workload.name.contains(name.as_str()))
        {
            continue;
        }
        gpu.release_scratch();
        gpu.reset_peak_bytes();
        let base = gpu.held_bytes();
        let record = match (workload.build)(&gpu) {
            Ok(record) => record,
            // A tensor beyond what the device allows for a buffer.
            Err(error @ (Error::Limit { .. } | Error::OutOfMemory { .. })) => {
                println!("{:44} {error}", workload.name);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let mut times = Vec::new();
        let mut recording = Vec::new();
        for _ in 0..=arguments.runs {
            gpu.wait()?;
            let mut encoder = gpu.encoder();
            let start = Instant::now();
            record(&mut encoder)?;
            recording.push(start.elapsed().as_secs_f64());
            gpu.submit(encoder)?;
            gpu.wait()?;
            times.push(start.elapsed().as_secs_f64());
        }
        let median = |times: &mut Vec<f64>| {
            times.remove(0);
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let (time, recording) = (median(&mut times), median(&mut recording));
        println!(
            "{:44} {:10.3} {:8.2} {:8.2} {:10.3} {:9.1} {:9.2}",
            workload.name,
            time * 1e3,
            workload.flops / time * 1e-9,
            workload.bytes / time * 1e-9,
            times[0] * 1e3,
            recording * 1e6,
            (gpu.peak_bytes() - base) as f64 / f64::from(1 << 20),
        );
    }
    Ok(())
}
