//! A workload's tensors, its recorded call, and the reference's answer on a sample of its rows.

use super::workload::{Call, HEAD_DIM, HEADS, Workload};
use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, AttentionShape, Causal,
    DType, Gpu, Linear, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs,
    Parameters, Result, Tensor, f16,
    reference::{self, LayerParameters, MultiHead},
    wgpu::CommandEncoder,
};

type Record = Box<dyn Fn(&mut CommandEncoder) -> Result<()>>;
type Check = Box<dyn Fn() -> Result<f64>>;

/// A call whose tensors exist.
pub(crate) struct Prepared {
    /// Records it.
    pub(crate) record: Record,
    /// Once it has run: the largest difference from the reference in f64, on a sample of rows.
    pub(crate) error: Check,
}

impl Workload {
    pub(crate) fn prepare(&self, gpu: &Gpu) -> Result<Prepared> {
        match *self {
            Self::Layer {
                batch,
                length,
                embed,
                heads,
            } => layer(gpu, batch, length, MultiHeadAttentionConfig::new(embed, heads)),
            Self::Projection {
                rows,
                outputs,
                inputs,
            } => projection(gpu, rows, outputs, inputs),
            Self::Attention { path, call } => attention(gpu, path, call),
        }
    }
}

/// Numbers between -2 and 2, as the storage type holds them. Each tensor has its own seed, and each range of it can be
/// had alone.
#[derive(Clone, Copy)]
struct Values {
    seed: u64,
    dtype: DType,
}

impl Values {
    const fn new(seed: u64) -> Self {
        Self {
            seed,
            dtype: DType::F32,
        }
    }

    fn at(self, index: usize) -> f32 {
        // splitmix64
        let z = (self.seed << 40 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z >> 40) as f32 / (1 << 22) as f32 - 2.0
    }

    fn upload(self, gpu: &Gpu, shape: &[usize]) -> Result<Tensor> {
        let numbers = (0..shape.iter().product()).map(|index| self.at(index));
        if self.dtype == DType::F16 {
            let halves: Vec<f16> = numbers.map(f16::from_f32).collect();
            return Tensor::upload(gpu, &halves, shape);
        }
        Tensor::upload(gpu, &numbers.collect::<Vec<f32>>(), shape)
    }

    /// `count` of them from `start`, for the reference.
    fn wide(self, start: usize, count: usize) -> Vec<f64> {
        let stored = |value: f32| match self.dtype {
            DType::F16 => f16::from_f32(value).to_f64(),
            _ => value.into(),
        };
        (start..start + count)
            .map(|index| stored(self.at(index)))
            .collect()
    }
}

/// First, middle and last row.
fn sample(rows: usize) -> Vec<usize> {
    let mut sample = vec![0, rows / 2, rows.saturating_sub(1)];
    sample.dedup();
    sample
}

/// The largest difference of a contiguous tensor from the truth.
fn largest_difference(got: &Tensor, truth: &[f64]) -> Result<f64> {
    let got: Vec<f64> = if got.dtype() == DType::F16 {
        got.download::<f16>()?.into_iter().map(f16::to_f64).collect()
    } else {
        got.download::<f32>()?.into_iter().map(f64::from).collect()
    };
    let differences = got.iter().zip(truth).map(|(got, truth)| (got - truth).abs());
    Ok(differences.fold(0.0, worse))
}

/// The larger one, NaN being the largest of all, which `f64::max` passes over.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b <= a { a } else { b }
}

fn layer(gpu: &Gpu, batch: usize, length: usize, config: MultiHeadAttentionConfig) -> Result<Prepared> {
    let embed = config.embed_dim;
    let parameters = Parameters::init(&config, 1)?;
    let layer = MultiHeadAttention::new(gpu, config.clone(), &parameters)?;
    let values = Values::new(1);
    let x = values.upload(gpu, &[batch, length, embed])?;
    let y = Tensor::zeros(gpu, DType::F32, x.shape())?;
    let output = y.clone();
    let error = move || {
        // The last sequence's sampled rows attend to the whole of it.
        let first = (batch - 1) * length;
        let keys = values.wide(first * embed, length * embed);
        let rows = sample(length);
        let query: Vec<f64> = rows
            .iter()
            .flat_map(|row| &keys[row * embed..][..embed])
            .copied()
            .collect();
        let mut weights = LayerParameters::new(
            &parameters.q_proj_weight,
            &parameters.k_proj_weight,
            &parameters.v_proj_weight,
            &parameters.out_proj_weight,
        );
        weights.q_bias = parameters.q_proj_bias.as_deref();
        weights.k_bias = parameters.k_proj_bias.as_deref();
        weights.v_bias = parameters.v_proj_bias.as_deref();
        weights.out_bias = parameters.out_proj_bias.as_deref();
        let mut call = MultiHead::self_attention(&config, weights, 1, length, &keys);
        (call.queries, call.query) = (rows.len(), &query);
        let truth = call.run_output()?.output;
        let mut largest = 0f64;
        for (row, truth) in rows.into_iter().zip(truth.chunks(embed)) {
            let got = output.slice(0, batch - 1..batch)?.slice(1, row..row + 1)?;
            largest = worse(largest, largest_difference(&got, truth)?);
        }
        Ok(largest)
    };
    Ok(Prepared {
        record: Box::new(move |encoder| {
            layer.record(encoder, &MultiHeadInputs::new(&x), &MultiHeadOutputs::new(&y))
        }),
        error: Box::new(error),
    })
}

fn projection(gpu: &Gpu, rows: usize, outputs: usize, inputs: usize) -> Result<Prepared> {
    let [x_values, weight_values, bias_values] = [1, 2, 3].map(Values::new);
    let weight = weight_values.upload(gpu, &[outputs, inputs])?;
    let linear = Linear::new(weight, Some(bias_values.upload(gpu, &[outputs])?))?;
    let x = x_values.upload(gpu, &[rows, inputs])?;
    let y = Tensor::zeros(gpu, DType::F32, &[rows, outputs])?;
    let output = y.clone();
    let error = move || {
        let weight = weight_values.wide(0, outputs * inputs);
        let bias = bias_values.wide(0, outputs);
        let mut largest = 0f64;
        for row in sample(rows) {
            let x = x_values.wide(row * inputs, inputs);
            let truth = reference::linear(&x, &weight, Some(&bias), 1, inputs, outputs)?;
            largest = worse(
                largest,
                largest_difference(&output.slice(0, row..row + 1)?, &truth)?,
            );
        }
        Ok(largest)
    };
    Ok(Prepared {
        record: Box::new(move |encoder| linear.record(encoder, &x, &y)),
        error: Box::new(error),
    })
}

fn attention(gpu: &Gpu, path: AttentionPath, call: Call) -> Result<Prepared> {
    let Call {
        batch,
        queries,
        keys,
        causal,
        window,
        dtype,
    } = call;
    let options = AttentionOptions::new()
        .causal(causal)
        .window(window, window.map(|_| 0));
    let attention = Attention::new(gpu, options.clone())?.with_path(path);
    let values = [1, 2, 3].map(|seed| Values { seed, dtype });
    let query = values[0].upload(gpu, &[batch, HEADS, queries, HEAD_DIM])?;
    let key = values[1].upload(gpu, &[batch, HEADS, keys, HEAD_DIM])?;
    let value = values[2].upload(gpu, &[batch, HEADS, keys, HEAD_DIM])?;
    let output = Tensor::zeros(gpu, dtype, &[batch, queries, HEADS * HEAD_DIM])?;
    let result = output.clone();
    let error = move || {
        // The last head of the last sequence.
        let head = batch * HEADS - 1;
        let key = values[1].wide(head * keys * HEAD_DIM, keys * HEAD_DIM);
        let value = values[2].wide(head * keys * HEAD_DIM, keys * HEAD_DIM);
        let mut largest = 0f64;
        for row in sample(queries) {
            let query = values[0].wide((head * queries + row) * HEAD_DIM, HEAD_DIM);
            let mut shape = AttentionShape::new(1, 1, keys, HEAD_DIM);
            shape.queries = 1;
            let options = match causal {
                Causal::BottomRight => options.clone(),
                _ => options.clone().query_offset(row as i64),
            };
            let truth = reference::Attention::new(shape, &options, &query, &key, &value).run_output()?;
            let columns = (HEADS - 1) * HEAD_DIM..HEADS * HEAD_DIM;
            let got = result
                .slice(0, batch - 1..batch)?
                .slice(1, row..row + 1)?
                .slice(2, columns)?;
            largest = worse(largest, largest_difference(&got, &truth.output)?);
        }
        Ok(largest)
    };
    Ok(Prepared {
        record: Box::new(move |encoder| {
            attention.record(
                encoder,
                &AttentionInputs::new(&query, &key, &value),
                &AttentionOutputs::new(&output),
            )
        }),
        error: Box::new(error),
    })
}
