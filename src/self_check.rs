//! Small computations with known answers, one for each kernel that has variants.
//!
//! Sizes are odd and just beyond a tile, so that every edge is met.

use crate::{
    Attention, AttentionOptions, AttentionShape, Causal, DType, Error, Gpu, Result, Tensor,
    attention::{check_decode, check_fused},
    kernel::{Batch, Binding, Storage, Variant},
    kernels::{
        Chunk,
        attention::Storages,
        decode, flash, linear as linear_kernel,
        linear::Part,
        scores as scores_kernel,
        scores::{Operand, Rule},
        weighted_sum as weighted_sum_kernel,
    },
    reference,
    tiles::{DecodeTile, FlashTile, Tile},
    tuning::Adapter,
};

/// One variant of a kernel and whether it computed a known answer on this device.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::VariantCheck;
///
/// let check = gpu.pending_checks()[0].run()?;
/// match check {
///     VariantCheck { outcome: Ok(()), .. } => {}
///     VariantCheck { variant, outcome: Err(what), .. } => panic!("{variant}: {what}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VariantCheck {
    /// Kernel, element types and tile sizes.
    pub variant: String,
    /// What was wrong, if something was.
    pub outcome: std::result::Result<(), String>,
}

impl std::fmt::Display for VariantCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.outcome {
            Ok(()) => write!(f, "{}: right", self.variant),
            Err(wrong) => write!(f, "{}: {wrong}", self.variant),
        }
    }
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
    scores_kernel::push(
        &mut batch,
        tile,
        &shape,
        Chunk::whole(&shape),
        &inputs,
        binding,
        start,
    )?;
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
    weighted_sum_kernel::push(
        &mut batch,
        tile,
        &shape,
        Chunk::whole(&shape),
        weights,
        &value,
        &sum,
    )?;
    run(batch)?;
    let truth = reference::weighted_sum(&wide(&w), &wide(&v), &shape)?;
    compare(&variant, &output, &truth)
}

/// Runs a call of an attention kernel that `record` adds and compares its output.
fn attend(
    gpu: &Gpu,
    variant: &Variant,
    shape: AttentionShape,
    plain: bool,
    [query, key, value, output]: Storages,
    record: impl FnOnce(&mut Batch, &AttentionOptions, [&Tensor; 4]) -> Result<()>,
) -> Result<()> {
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
    let query = upload(gpu, query, &mut q, &shape.query())?;
    let key = upload(gpu, key, &mut k, &shape.key())?;
    let value = upload(gpu, value, &mut v, &shape.value())?;
    let output = Tensor::zeros(gpu, dtype(output), &shape.output())?;
    let mut batch = Batch::new(gpu);
    record(&mut batch, &options, [&query, &key, &value, &output])?;
    run(batch)?;
    let (q, k, v) = (wide(&q), wide(&k), wide(&v));
    let truth = reference::Attention::new(shape, &options, &q, &k, &v).run()?;
    compare(variant, &output, &truth.output)
}

pub(crate) fn flash(gpu: &Gpu, tile: FlashTile, plain: bool, storages: Storages) -> Result<()> {
    let variant = flash::variant(tile, plain, storages);
    let (head_dim, value_dim) = tile.awkward_dims();
    let shape = AttentionShape {
        queries: tile.rows() as usize + 3,
        keys: 2 * tile.keys() as usize + 3,
        kv_heads: 1,
        value_dim,
        ..AttentionShape::new(1, 2, 0, head_dim)
    };
    attend(
        gpu,
        &variant,
        shape,
        plain,
        storages,
        |batch, options, tensors| check_fused(batch, tile, options, shape, tensors),
    )
}

fn decode(gpu: &Gpu, tile: DecodeTile, plain: bool, storage: Storage) -> Result<()> {
    let variant = decode::variant(tile, plain, [storage; 4]);
    let one_row = tile.rows() == 1;
    let shape = AttentionShape {
        queries: if one_row { 1 } else { 3 },
        keys: 1100,
        kv_heads: if one_row { 2 } else { 1 },
        ..AttentionShape::new(1, 2, 0, tile.size() as usize - 3)
    };
    attend(
        gpu,
        &variant,
        shape,
        plain,
        [storage; 4],
        |batch, options, tensors| check_decode(batch, options, shape, tensors).map(drop),
    )
}

/// The computation that checks one variant.
#[derive(Debug, Clone, Copy)]
enum Work {
    Linear(Tile, [Storage; 4]),
    Scores(Tile, [Storage; 2]),
    WeightedSum(Tile, [Storage; 2]),
    Decode(DecodeTile, bool, Storage),
    Flash(FlashTile, bool, Storages),
}

/// A variant that [`PendingCheck::run`] checks; [`Gpu::pending_checks`] lists them.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::PendingCheck;
///
/// let checks = gpu.pending_checks();
/// let in_use: Vec<_> = checks.iter().filter(|check| check.is_first_choice()).collect();
/// let linear: &PendingCheck = in_use.iter().find(|check| check.variant().contains("linear")).unwrap();
/// assert_eq!(linear.run()?.outcome, Ok(()));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct PendingCheck {
    gpu: Gpu,
    work: Work,
    variant: Variant,
    first_choice: bool,
}

impl PendingCheck {
    fn new(gpu: &Gpu, work: Work, first_choice: bool) -> Self {
        let variant = match work {
            Work::Linear(tile, [x, weight, bias, output]) => {
                linear_kernel::variant(tile, x, weight, bias, output)
            }
            Work::Scores(tile, [query, key]) => scores_kernel::variant(tile, query, key),
            Work::WeightedSum(tile, [value, output]) => weighted_sum_kernel::variant(tile, value, output),
            Work::Decode(tile, plain, storage) => decode::variant(tile, plain, [storage; 4]),
            Work::Flash(tile, plain, storages) => flash::variant(tile, plain, storages),
        };
        Self {
            gpu: gpu.clone(),
            work,
            variant,
            first_choice,
        }
    }

    /// Kernel, element types and tile sizes, as in [`VariantCheck::variant`] and [`Choice::variant`](crate::Choice).
    pub fn variant(&self) -> String {
        self.variant.label()
    }

    /// Whether the table puts this variant first on this device, so that calls use it unless it fails.
    pub fn is_first_choice(&self) -> bool {
        self.first_choice
    }

    /// Builds the variant if it is not built yet, runs it on awkward sizes, waits, and compares with the reference.
    /// Calls choose by the outcome from then on.
    ///
    /// # Errors
    ///
    /// What hinders the check from running, such as [`Error::DeviceLost`]; a wrong answer is an outcome, not an error.
    pub fn run(&self) -> Result<VariantCheck> {
        let gpu = &self.gpu;
        let result = match self.work {
            Work::Linear(tile, storages) => linear(gpu, tile, storages),
            Work::Scores(tile, storages) => scores(gpu, tile, storages),
            Work::WeightedSum(tile, storages) => weighted_sum(gpu, tile, storages),
            Work::Decode(tile, plain, storage) => decode(gpu, tile, plain, storage),
            Work::Flash(tile, plain, storages) => flash(gpu, tile, plain, storages),
        };
        let outcome = match result {
            Ok(()) => Ok(()),
            Err(Error::Shader { message, .. }) => Err(message),
            Err(other) => return Err(other),
        };
        gpu.set_verdict(self.variant.clone(), outcome.clone());
        Ok(VariantCheck {
            variant: self.variant(),
            outcome,
        })
    }
}

impl Attention {
    /// Checks the variants that calls with tensors of `dtype` and these head sizes use, those that [`Attention::warm_up`]
    /// builds, against the reference on awkward sizes, and waits: what a program may do at its start. Kernels without
    /// variants are not among them.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// # let gpu = multihead::Gpu::new()?;
    /// use multihead::{Attention, AttentionOptions, AttentionPath, DType};
    ///
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?.with_path(AttentionPath::Composed);
    /// for check in attention.self_check(DType::F32, 64, 64)? {
    ///     assert_eq!(check.outcome, Ok(()), "{check}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// What hinders a check from running, such as [`Error::DeviceLost`]; a wrong answer is an outcome, not an error.
    pub fn self_check(&self, dtype: DType, head_dim: usize, value_dim: usize) -> Result<Vec<VariantCheck>> {
        let used = self.variants([Storage::of(self.gpu(), dtype)?; 4], head_dim, value_dim)?;
        let mut checks = self.gpu().pending_checks();
        checks.retain(|check| used.contains(&check.variant));
        checks.iter().map(PendingCheck::run).collect()
    }
}

/// A check of the projection between these storages.
pub(crate) fn check_linear(gpu: &Gpu, tile: Tile, storages: [Storage; 4]) -> Result<VariantCheck> {
    PendingCheck::new(gpu, Work::Linear(tile, storages), true).run()
}

impl Gpu {
    /// A check for every variant of every kernel that can run on this device, those of the table's other rows for the
    /// device too, for programs that choose among them or bound their time. [`Gpu::self_check`] runs them all,
    /// [`Attention::self_check`](crate::Attention::self_check) those that certain calls use.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// let gpu = multihead::Gpu::new()?;
    /// let checks = gpu.pending_checks();
    /// let linear = checks.iter().find(|check| check.variant().contains("linear")).unwrap();
    /// assert!(linear.is_first_choice());
    /// assert_eq!(linear.run()?.outcome, Ok(()));
    /// # Ok(())
    /// # }
    /// ```
    pub fn pending_checks(&self) -> Vec<PendingCheck> {
        let mut checks = Vec::new();
        let mut add = |work, first| checks.push(PendingCheck::new(self, work, first));
        let storages = [DType::F32, DType::F16]
            .into_iter()
            .filter_map(|dtype| Storage::of(self, dtype).ok());
        for storage in storages {
            let pair = [storage; 2];
            for (place, tile) in Tile::candidates(self, storage != Storage::F32, 0)
                .into_iter()
                .enumerate()
            {
                add(Work::Linear(tile, [storage; 4]), place == 0);
                add(Work::Scores(tile, pair), place == 0);
                add(Work::WeightedSum(tile, pair), place == 0);
            }
            for tile in DecodeTile::all(Adapter::of(self)) {
                for plain in [false, true] {
                    add(Work::Decode(tile, plain, storage), true);
                }
            }
            let tiles = FlashTile::all_candidates(self, storage != Storage::F32);
            for &tile in &tiles {
                let (head_dim, value_dim) = tile.awkward_dims();
                let best = FlashTile::candidates(self, storage != Storage::F32, head_dim, value_dim);
                for plain in [false, true] {
                    add(
                        Work::Flash(tile, plain, [storage; 4]),
                        best.first() == Some(&tile),
                    );
                }
            }
        }
        checks
    }

    /// Checks every variant of every kernel that can run on this device, those of the table's other rows for the device
    /// too, against the reference on awkward sizes. Builds them all, runs them and waits; most of the time is the driver's
    /// compiler's: seconds on a GPU, many minutes on a software adapter. `progress` gets each result as it comes.
    /// [`Gpu::pending_checks`] lets a program choose among them, and stop.
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
        self.pending_checks()
            .iter()
            .map(|pending| {
                let check = pending.run()?;
                progress(&check);
                Ok(check)
            })
            .collect()
    }
}
