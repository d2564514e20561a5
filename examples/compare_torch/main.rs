//! Loads an `nn.MultiheadAttention` that `export.py` wrote, runs it on the same input, and prints how far the results are
//! apart. Without a path it takes the exported file in `examples/data`.
//!
//! ```text
//! cargo run --release --example compare_torch
//! ```

#![allow(clippy::print_stdout)] // That is what it is for.

use multihead::{Gpu, MultiHeadAttention, MultiHeadInputs, NeedWeights, Parameters, Tensor};
use safetensors::{Dtype, SafeTensors};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const EXPORTED: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/examples/data/torch_layer.safetensors"
);

fn main() -> Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| EXPORTED.to_owned());
    let file = std::fs::read(&path).map_err(|error| format!("{path} cannot be read: {error}"))?;
    let gpu = Gpu::new()?;
    println!("{}", gpu.description());
    let mut agree = true;
    for (what, difference) in compare(&gpu, &file)? {
        println!("{what:<8} largest difference {difference:.1e}");
        agree &= difference <= 1e-5;
    }
    if !agree {
        return Err("this is more than rounding".into());
    }
    Ok(())
}

/// How far output and weights are from PyTorch's.
pub(crate) fn compare(gpu: &Gpu, file: &[u8]) -> Result<[(&'static str, f64); 2]> {
    let tensors = SafeTensors::deserialize(file)?;
    let (_, header) = SafeTensors::read_metadata(file)?;
    let num_heads = header
        .metadata()
        .as_ref()
        .and_then(|entries| entries.get("num_heads"))
        .ok_or("the file does not tell `num_heads`: write it with export.py")?;
    let config = Parameters::describe(file, "attention")?.config(num_heads.parse()?);
    let layer = MultiHeadAttention::from_safetensors(gpu, config, file, "attention")?;

    let (input, shape) = floats(&tensors, "input")?;
    let x = Tensor::upload(gpu, &input, &shape)?;
    let result = layer.forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)?;
    let output = result.output.download::<f32>()?;
    let weights = result
        .weights
        .ok_or("the weights were not computed")?
        .download::<f32>()?;
    Ok([
        (
            "output",
            largest_difference(&output, &floats(&tensors, "output")?.0)?,
        ),
        (
            "weights",
            largest_difference(&weights, &floats(&tensors, "weights")?.0)?,
        ),
    ])
}

/// A tensor of the file with its shape.
fn floats(tensors: &SafeTensors, name: &str) -> Result<(Vec<f32>, Vec<usize>)> {
    let tensor = tensors.tensor(name)?;
    if tensor.dtype() != Dtype::F32 {
        return Err(format!("{name} is {:?}, export.py writes F32", tensor.dtype()).into());
    }
    let values = tensor.data().chunks_exact(4).map(bytemuck::pod_read_unaligned);
    Ok((values.collect(), tensor.shape().to_vec()))
}

/// Between two tensors of one size; a NaN counts as infinitely far.
fn largest_difference(a: &[f32], b: &[f32]) -> Result<f64> {
    if a.len() != b.len() {
        return Err(format!("{} values, PyTorch has {}", a.len(), b.len()).into());
    }
    let difference = |(&a, &b): (&f32, &f32)| (f64::from(a) - f64::from(b)).abs();
    let far = |difference: f64| {
        if difference.is_nan() {
            f64::INFINITY
        } else {
            difference
        }
    };
    Ok(a.iter().zip(b).map(difference).map(far).fold(0.0, f64::max))
}
