//! Small computations with known answers, one for each kernel that has variants.
//!
//! Sizes are odd and just beyond a tile, so that every edge is met.

use crate::{
    AttentionOptions, AttentionShape, Causal, DType, Error, Gpu, Result, Tensor,
    attention::{check_decode, check_fused},
    kernel::{Batch, Binding, Storage, Variant},
    kernels::{
        Chunk, decode, flash, linear as linear_kernel,
        linear::Part,
        scores as scores_kernel,
        scores::{Operand, Rule},
        weighted_sum as weighted_sum_kernel,
    },
    reference,
    tuning::{Adapter, DecodeTile, FlashTile, Tile},
};

/// One variant of a kernel and whether it computed a known answer on this device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VariantCheck {
    /// Kernel, element types and tile sizes.
    pub variant: String,
    /// What was wrong, if something was.
    pub outcome: std::result::Result<(), String>,
}

/// Numbers between -1 and 1 in no order.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i + seed * 131) * 7919 % 1999) as f32 / 999.5 - 1.0)
        .collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

fn dtype(storage: Storage) -> DType {
    if storage == Storage::F32 {
        DType::F32
    } else {
        DType::F16
    }
}

/// Uploads values in their storage's type and rounds them to it.
fn upload(gpu: &Gpu, storage: Storage, values: &mut [f32], shape: &[usize]) -> Result<Tensor> {
    if storage == Storage::F32 {
        return Tensor::upload(gpu, values, shape);
    }
    let halves: Vec<half::f16> = values.iter().map(|&value| half::f16::from_f32(value)).collect();
    for (value, half) in values.iter_mut().zip(&halves) {
        *value = half.to_f32();
    }
    Tensor::upload(gpu, &halves, shape)
}

fn operand(gpu: &Gpu, tensor: &Tensor) -> Result<Operand> {
    let (binding, start) = Binding::tensor(gpu, "a self-check's operand", tensor)?;
    Ok(Operand {
        binding,
        storage: Storage::of(gpu, tensor.dtype())?,
        start,
        strides: tensor.four_axes().1,
    })
}

fn run(batch: Batch) -> Result<()> {
    let gpu = batch.gpu();
    let mut encoder = gpu.encoder();
    batch.record_uncounted(&mut encoder)?;
    gpu.submit(encoder)
}

/// Compares with the truth: wrong lanes or lost terms are off by far more than rounding is.
fn compare(variant: &Variant, got: &Tensor, truth: &[f64]) -> Result<()> {
    let (values, allowed) = match got.dtype() {
        DType::F16 => (
            got.download::<half::f16>()?
                .iter()
                .map(|value| value.to_f64())
                .collect(),
            4e-3,
        ),
        _ => (wide(&got.download::<f32>()?), 1e-4),
    };
    let largest = truth
        .iter()
        .fold(1.0f64, |largest, value| largest.max(value.abs()));
    let wrong = values.iter().zip(truth).position(|(value, truth)| {
        (value - truth).abs().partial_cmp(&(allowed * largest)) != Some(std::cmp::Ordering::Less)
    });
    match wrong {
        None => Ok(()),
        Some(at) => Err(Error::Shader {
            kernel: variant.label(),
            message: format!(
                "failed its self-check: element {at} is {} instead of {}",
                values[at], truth[at]
            ),
        }),
    }
}

pub(crate) fn linear(gpu: &Gpu, tile: Tile, storages: [Storage; 4]) -> Result<()> {
    let [x, weight, bias, output] = storages;
    let variant = linear_kernel::variant(tile, x, weight, bias, output);
    let (rows, cols, inner) = (tile.rows() as usize + 1, tile.cols() as usize + 1, 37);
    let (mut a, mut w, mut b) = (
        numbers(rows * inner, 1),
        numbers(cols * inner, 2),
        numbers(cols, 3),
    );
    let a_tensor = upload(gpu, x, &mut a, &[rows, inner])?;
    let w_tensor = upload(gpu, weight, &mut w, &[cols, inner])?;
    let b_tensor = upload(gpu, bias, &mut b, &[cols])?;
    let y = Tensor::zeros(gpu, dtype(output), &[rows, cols])?;
    let bind = |tensor: &Tensor, storage| {
        Binding::tensor(gpu, "a self-check's operand", tensor)
            .map(|(binding, start)| (binding, storage, start))
    };
    let mut batch = Batch::new(gpu);
    linear_kernel::Linear {
        x: bind(&a_tensor, x)?,
        x_strides: [0, inner as u32, 1],
        batch: 1,
        rows,
        inputs: inner,
        weight: bind(&w_tensor, weight)?,
        bias: Some(bind(&b_tensor, bias)?),
        parts: &[(
            cols,
            Part {
                row: cols as u32,
                ..Part::default()
            },
        )],
        head_dim: cols,
        output_dim: 1,
        output: (Binding::output(gpu, "a self-check's output", &y)?.0, output),
    }
    .push_with(&mut batch, tile)?;
    run(batch)?;
    let truth = reference::linear(&wide(&a), &wide(&w), Some(&wide(&b)), rows, inner, cols)?;
    compare(&variant, &y, &truth)
}

fn whole(shape: &AttentionShape) -> Chunk {
    Chunk {
        first_head: 0,
        head_count: shape.batch * shape.heads,
        first_row: 0,
        rows: shape.queries,
    }
}

pub(crate) fn scores(gpu: &Gpu, tile: Tile, storages: [Storage; 2]) -> Result<()> {
    let variant = scores_kernel::variant(tile, storages[0], storages[1]);
    let shape = AttentionShape {
        queries: tile.rows() as usize + 1,
        keys: tile.cols() as usize + 1,
        kv_heads: 1,
        ..AttentionShape::new(1, 2, 0, 37)
    };
    let options = AttentionOptions::new();
    let (mut q, mut k) = (
        numbers(shape.query().iter().product(), 1),
        numbers(shape.key().iter().product(), 2),
    );
    let query = upload(gpu, storages[0], &mut q, &shape.query())?;
    let key = upload(gpu, storages[1], &mut k, &shape.key())?;
    let output = Tensor::zeros(gpu, DType::F32, &shape.weights())?;
    let absent = Binding::absent(gpu);
    let inputs = scores_kernel::Inputs {
        query: &operand(gpu, &query)?,
        key: &operand(gpu, &key)?,
        mask: &absent,
        key_mask: &absent,
        lengths: &absent,
        slopes: &absent,
        rule: Rule::new(&options, &shape),
    };
    let mut batch = Batch::new(gpu);
    let (binding, start) = Binding::output(gpu, "a self-check's output", &output)?;
    scores_kernel::push(&mut batch, tile, &shape, whole(&shape), &inputs, binding, start)?;
    run(batch)?;
    let (q, k) = (wide(&q), wide(&k));
    let v = vec![0.0; k.len()];
    let truth = reference::scores(&reference::Attention::new(shape, &options, &q, &k, &v))?;
    compare(&variant, &output, &truth)
}

pub(crate) fn weighted_sum(gpu: &Gpu, tile: Tile, storages: [Storage; 2]) -> Result<()> {
    let variant = weighted_sum_kernel::variant(tile, storages[0], storages[1]);
    let shape = AttentionShape {
        queries: tile.rows() as usize + 1,
        keys: 37,
        kv_heads: 1,
        value_dim: tile.cols() as usize + 1,
        ..AttentionShape::new(1, 2, 0, 1)
    };
    let (mut w, mut v) = (
        numbers(shape.weights().iter().product(), 1),
        numbers(shape.value().iter().product(), 2),
    );
    let weights = upload(gpu, Storage::F32, &mut w, &shape.weights())?;
    let value = upload(gpu, storages[0], &mut v, &shape.value())?;
    let output = Tensor::zeros(gpu, dtype(storages[1]), &shape.output())?;
    let mut batch = Batch::new(gpu);
    let weights = Binding::tensor(gpu, "a self-check's operand", &weights)?;
    let (value, sum) = (operand(gpu, &value)?, operand(gpu, &output)?);
    weighted_sum_kernel::push(&mut batch, tile, &shape, whole(&shape), weights, &value, &sum)?;
    run(batch)?;
    let truth = reference::weighted_sum(&wide(&w), &wide(&v), &shape)?;
    compare(&variant, &output, &truth)
}

pub(crate) fn flash(gpu: &Gpu, tile: FlashTile, plain: bool, storages: flash::Storages) -> Result<()> {
    let variant = flash::variant(tile, plain, storages);
    let (head_dim, value_dim) = tile.awkward_dims();
    let shape = AttentionShape {
        queries: tile.rows() as usize + 3,
        keys: 2 * tile.keys() as usize + 3,
        kv_heads: 1,
        value_dim,
        ..AttentionShape::new(1, 2, 0, head_dim)
    };
    let options = if plain {
        AttentionOptions::new()
    } else {
        AttentionOptions::new().causal(Causal::BottomRight).softcap(5.0)
    };
    let [query, key, value, output] = storages;
    let (mut q, mut k, mut v) = (
        numbers(shape.query().iter().product(), 1),
        numbers(shape.key().iter().product(), 2),
        numbers(shape.value().iter().product(), 3),
    );
    let query = upload(gpu, query, &mut q, &shape.query())?;
    let key = upload(gpu, key, &mut k, &shape.key())?;
    let value = upload(gpu, value, &mut v, &shape.value())?;
    let output = Tensor::zeros(gpu, dtype(output), &shape.output())?;
    let mut batch = Batch::new(gpu);
    check_fused(&mut batch, tile, &options, shape, [&query, &key, &value, &output])?;
    run(batch)?;
    let (q, k, v) = (wide(&q), wide(&k), wide(&v));
    let truth = reference::Attention::new(shape, &options, &q, &k, &v).run()?;
    compare(&variant, &output, &truth.output)
}

fn decode(gpu: &Gpu, tile: DecodeTile, plain: bool, storage: Storage) -> Result<()> {
    let variant = decode::variant(tile, plain, [storage; 4]);
    let size = tile.size() as usize - 3;
    let shape = AttentionShape {
        queries: if tile.rows() == 1 { 1 } else { 3 },
        keys: 1100,
        kv_heads: if tile.rows() == 1 { 2 } else { 1 },
        ..AttentionShape::new(1, 2, 0, size)
    };
    let options = if plain {
        AttentionOptions::new()
    } else {
        AttentionOptions::new().causal(Causal::BottomRight).softcap(5.0)
    };
    let (mut q, mut k, mut v) = (
        numbers(shape.query().iter().product(), 1),
        numbers(shape.key().iter().product(), 2),
        numbers(shape.value().iter().product(), 3),
    );
    let query = upload(gpu, storage, &mut q, &shape.query())?;
    let key = upload(gpu, storage, &mut k, &shape.key())?;
    let value = upload(gpu, storage, &mut v, &shape.value())?;
    let output = Tensor::zeros(gpu, dtype(storage), &shape.output())?;
    let mut batch = Batch::new(gpu);
    check_decode(&mut batch, &options, shape, [&query, &key, &value, &output])?;
    run(batch)?;
    let (q, k, v) = (wide(&q), wide(&k), wide(&v));
    let truth = reference::Attention::new(shape, &options, &q, &k, &v).run()?;
    compare(&variant, &output, &truth.output)
}

impl Gpu {
    /// Checks every variant of every kernel that can run on this device, those of the table's other rows for the device
    /// too, against the reference on awkward sizes. Builds them all, runs them and waits: seconds to minutes, most of
    /// it in the driver's compiler. `progress` gets each result as it comes.
    ///
    /// ```no_run
    /// # fn main() -> multihead::Result<()> {
    /// let gpu = multihead::Gpu::new()?;
    /// let checks = gpu.self_check(|check| println!("{}: {:?}", check.variant, check.outcome))?;
    /// assert!(checks.iter().all(|check| check.outcome.is_ok()));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// What hinders a check from running, such as [`Error::DeviceLost`]; a wrong answer is an outcome, not an error.
    pub fn self_check(&self, mut progress: impl FnMut(&VariantCheck)) -> Result<Vec<VariantCheck>> {
        let halves = Storage::of(self, DType::F16)?;
        let mut checks = Vec::new();
        let mut note = |gpu: &Gpu, variant: Variant, result: Result<()>| -> Result<()> {
            let outcome = match result {
                Ok(()) => Ok(()),
                Err(Error::Shader { message, .. }) => Err(message),
                Err(other) => return Err(other),
            };
            gpu.set_verdict(variant.clone(), outcome.clone());
            let check = VariantCheck {
                variant: variant.label(),
                outcome,
            };
            progress(&check);
            checks.push(check);
            Ok(())
        };
        for storage in [Storage::F32, halves] {
            let pair = [storage; 2];
            for tile in Tile::candidates(self, storage != Storage::F32, 0) {
                let variant = linear_kernel::variant(tile, storage, storage, storage, storage);
                note(self, variant, linear(self, tile, [storage; 4]))?;
                let variant = scores_kernel::variant(tile, storage, storage);
                note(self, variant, scores(self, tile, pair))?;
                let variant = weighted_sum_kernel::variant(tile, storage, storage);
                note(self, variant, weighted_sum(self, tile, pair))?;
            }
            for tile in DecodeTile::all(Adapter::of(self)) {
                for plain in [false, true] {
                    let variant = decode::variant(tile, plain, [storage; 4]);
                    note(self, variant, decode(self, tile, plain, storage))?;
                }
            }
            for tile in FlashTile::all_candidates(self, storage != Storage::F32) {
                for plain in [false, true] {
                    let variant = flash::variant(tile, plain, [storage; 4]);
                    note(self, variant, flash(self, tile, plain, [storage; 4]))?;
                }
            }
        }
        Ok(checks)
    }
}
