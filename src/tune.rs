//! Times the tiles that a table could have on the present adapter and prints the rows to put there.

use std::time::Instant;

use crate::{
    AttentionOptions, AttentionShape, DType, Error, Gpu, Result, Tensor,
    attention::check_fused,
    kernel::{Batch, Binding, Storage},
    kernels::linear,
    self_check,
    tiles::{FlashCore, Tile},
    tuning::{Adapter, smallest_subgroup},
};

/// Runs of a candidate; the fastest counts.
const RUNS: usize = 5;

/// Times candidates for the tables of `src/tuning.rs`, those that pass their self-check, and gives a row of each table
/// for this adapter and element type as source text. The device should be opened with the limits that WebGPU guarantees
/// for workgroups, so that the rows serve everywhere. `progress` gets a line for each candidate; those that the clock has
/// no time for after `seconds` are left out.
#[doc(hidden)]
pub fn tune(gpu: &Gpu, seconds: u64, mut progress: impl FnMut(&str)) -> Result<Vec<String>> {
    let start = Instant::now();
    let mut rows = Vec::new();
    // Half the time for each table, half of that for each element type.
    let mut until = 0.0;
    for dtype in [DType::F32, DType::F16] {
        until += seconds as f64 / 4.0;
        let in_time = || start.elapsed().as_secs_f64() < until;
        if let Some(tile) = best(product_candidates(gpu), in_time, &mut progress, |tile| {
            product(gpu, *tile, dtype)
        })? {
            rows.push(row(
                gpu,
                "PRODUCTS",
                dtype,
                needs_subgroups(tile),
                &format!("Tile::{tile:?}"),
            ));
        }
        until += seconds as f64 / 4.0;
        let in_time = || start.elapsed().as_secs_f64() < until;
        if let Some(core) = best(flash_candidates(gpu), in_time, &mut progress, |core| {
            flash(gpu, *core, dtype)
        })? {
            let subgroup = match core {
                FlashCore::Subgroup { lanes, .. } => lanes,
                FlashCore::Workgroup { .. } => 0,
            };
            rows.push(row(
                gpu,
                "FLASH",
                dtype,
                subgroup,
                &format!("FlashCore::{core:?}"),
            ));
        }
    }
    Ok(rows)
}

fn needs_subgroups(tile: Tile) -> u32 {
    match tile {
        Tile::Subgroup { lanes, .. } => lanes,
        Tile::Workgroup { .. } => 0,
    }
}

fn row(gpu: &Gpu, table: &str, dtype: DType, subgroup: u32, tile: &str) -> String {
    format!(
        "// {table}, measured on {}\nRow {{\n    adapter: Adapter::{:?},\n    elements: Elements::{dtype:?},\n    \
         head_dim: ANY_SIZE,\n    subgroup: {subgroup},\n    tile: {tile},\n}},",
        gpu.description(),
        Adapter::of(gpu)
    )
}

/// The fastest candidate that is right. One that the driver refuses, that needs more than the device allows, or that
/// computes wrongly is no candidate.
fn best<T: Copy + std::fmt::Debug>(
    candidates: Vec<T>,
    in_time: impl Fn() -> bool,
    progress: &mut impl FnMut(&str),
    time: impl Fn(&T) -> Result<f64>,
) -> Result<Option<T>> {
    let mut fastest: Option<(f64, T)> = None;
    for candidate in candidates {
        if !in_time() {
            progress(&format!("no time for {candidate:?}"));
            continue;
        }
        match time(&candidate) {
            Ok(seconds) => {
                progress(&format!("{:10.3} ms  {candidate:?}", seconds * 1e3));
                if fastest.is_none_or(|(least, _)| seconds < least) {
                    fastest = Some((seconds, candidate));
                }
            }
            Err(Error::Shader { message, .. }) => progress(&format!("refused: {candidate:?}: {message}")),
            Err(other) => return Err(other),
        }
    }
    Ok(fastest.map(|(_, candidate)| candidate))
}

/// Seconds of the fastest run of what `record` records.
fn fastest(gpu: &Gpu, record: impl Fn(&mut Batch) -> Result<()>) -> Result<f64> {
    let mut least = f64::INFINITY;
    for _ in 0..RUNS {
        let mut batch = Batch::new(gpu);
        record(&mut batch)?;
        let mut encoder = gpu.encoder();
        batch.record_uncounted(&mut encoder)?;
        gpu.wait()?;
        let start = Instant::now();
        gpu.submit(encoder)?;
        gpu.wait()?;
        least = least.min(start.elapsed().as_secs_f64());
    }
    Ok(least)
}

fn product(gpu: &Gpu, tile: Tile, dtype: DType) -> Result<f64> {
    let storage = Storage::of(gpu, dtype)?;
    self_check::linear(gpu, tile, [storage; 4])?;
    let (rows, inner, cols) = (1024, 512, 512);
    let x = Tensor::zeros(gpu, dtype, &[rows, inner])?;
    let weight = Tensor::zeros(gpu, dtype, &[cols, inner])?;
    let y = Tensor::zeros(gpu, dtype, &[rows, cols])?;
    let bind = |tensor: &Tensor| {
        Binding::tensor(gpu, "an operand", tensor).map(|(binding, start)| (binding, storage, start))
    };
    fastest(gpu, |batch| {
        linear::Linear {
            x: bind(&x)?,
            x_strides: [0, inner as u32, 1],
            batch: 1,
            rows,
            inputs: inner,
            weight: bind(&weight)?,
            bias: None,
            parts: &[(
                cols,
                linear::Part {
                    row: cols as u32,
                    ..linear::Part::default()
                },
            )],
            head_dim: cols,
            output_dim: 1,
            output: (Binding::output(gpu, "the output", &y)?.0, storage),
        }
        .push_with(batch, tile)
    })
}

fn flash(gpu: &Gpu, core: FlashCore, dtype: DType) -> Result<f64> {
    let storage = Storage::of(gpu, dtype)?;
    let shape = AttentionShape::new(1, 8, 1024, 64);
    let tile = core.sized(shape.head_dim, shape.value_dim);
    self_check::flash(gpu, tile, true, [storage; 4])?;
    let tensor = |shape: [usize; 4]| Tensor::zeros(gpu, dtype, &shape);
    let (query, key, value, output) = (
        tensor(shape.query())?,
        tensor(shape.key())?,
        tensor(shape.value())?,
        tensor(shape.output())?,
    );
    let options = AttentionOptions::new();
    fastest(gpu, |batch| {
        check_fused(batch, tile, &options, shape, [&query, &key, &value, &output])
    })
}

/// Lanes that a subgroup core can have on this device.
fn lanes(gpu: &Gpu) -> impl Iterator<Item = u32> {
    let smallest = smallest_subgroup(gpu);
    [8, 4].into_iter().filter(move |&lanes| lanes <= smallest)
}

fn product_candidates(gpu: &Gpu) -> Vec<Tile> {
    let mut all = Vec::new();
    for lanes in lanes(gpu) {
        for (rows, cols) in [(12, 2), (8, 2), (16, 2), (8, 4), (12, 1)] {
            for workgroup in [16, 32] {
                all.push(Tile::Subgroup {
                    rows,
                    cols,
                    lanes,
                    workgroup,
                });
            }
        }
    }
    for (thread_rows, thread_cols) in [(16, 16), (8, 8), (8, 16), (16, 8)] {
        for (rows, cols) in [(4, 4), (8, 4), (4, 2)] {
            for depth in [16, 32, 8] {
                all.push(Tile::Workgroup {
                    rows,
                    cols,
                    thread_rows,
                    thread_cols,
                    depth,
                });
            }
        }
    }
    all
}

fn flash_candidates(gpu: &Gpu) -> Vec<FlashCore> {
    let mut all = Vec::new();
    for lanes in lanes(gpu) {
        for (keys, workgroup) in [(lanes, 8), (2 * lanes, 8), (lanes, 16)] {
            all.push(FlashCore::Subgroup {
                keys,
                lanes,
                workgroup,
            });
        }
    }
    for (thread_rows, thread_cols) in [(16, 16), (8, 8), (8, 16), (16, 8)] {
        for (rows, cols, value_cols) in [(4, 2, 4), (4, 4, 8), (4, 4, 4), (8, 2, 4), (8, 2, 8), (4, 1, 4)] {
            for depth in [8, 16] {
                all.push(FlashCore::Workgroup {
                    thread_rows,
                    thread_cols,
                    rows,
                    cols,
                    depth,
                    value_cols,
                });
            }
        }
    }
    all
}
