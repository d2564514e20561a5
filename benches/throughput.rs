//! Throughput of whole calls: `cargo bench --bench throughput`, or `-- NAME` for the workloads whose name holds NAME.
//!
//! Each call is submitted and waited for; the median of the runs counts. FLOPs by the usual model: attention
//! `4 B H Lq Lk D` (half of it if causal), projection `2 M N K`, a layer both.

// A benchmark's result is what it prints.
#![allow(clippy::print_stdout)]

use std::time::Instant;

use clap::Parser;
use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, Causal, DType, Gpu,
    Linear, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, Result, Tensor,
    wgpu,
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

fn attention(
    path: AttentionPath,
    heads: usize,
    queries: usize,
    keys: usize,
    head_dim: usize,
    causal: Causal,
) -> Workload {
    let order = if causal == Causal::None { "" } else { " causal" };
    let share = if causal == Causal::None { 1.0 } else { 0.5 };
    Workload {
        name: format!("{path:?} H{heads} Lq{queries} Lk{keys} D{head_dim}{order}"),
        flops: share * 4.0 * (heads * queries * keys * head_dim) as f64,
        build: Box::new(move |gpu| {
            let attention = Attention::new(gpu, AttentionOptions::new().causal(causal))?.with_path(path);
            let query = values(gpu, &[1, heads, queries, head_dim])?;
            let (key, value) = (
                values(gpu, &[1, heads, keys, head_dim])?,
                values(gpu, &[1, heads, keys, head_dim])?,
            );
            let output = Tensor::zeros(gpu, DType::F32, &[1, queries, heads * head_dim])?;
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
            workloads.push(attention(path, 8, length, length, 64, Causal::None));
        }
        workloads.push(attention(path, 8, 1024, 1024, 64, Causal::TopLeft));
        workloads.push(attention(path, 8, 4096, 4096, 64, Causal::TopLeft));
        workloads.push(attention(path, 8, 1, 4096, 64, Causal::None));
    }
    workloads
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let gpu = Gpu::new()?;
    println!("{}", gpu.description());
    println!(
        "{:40} {:>12} {:>10} {:>12} {:>12}",
        "workload", "median ms", "GFLOP/s", "best ms", "record us"
    );
    for workload in workloads() {
        if arguments
            .name
            .as_ref()
            .is_some_and(|name| !workload.name.contains(name.as_str()))
        {
            continue;
        }
        let record = (workload.build)(&gpu)?;
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
            "{:40} {:12.3} {:10.2} {:12.3} {:12.1}",
            workload.name,
            time * 1e3,
            workload.flops / time * 1e-9,
            times[0] * 1e3,
            recording * 1e6
        );
    }
    Ok(())
}
