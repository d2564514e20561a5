//! Parameters from a safetensors file and into one.

use std::collections::HashMap;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};

use super::file::{axes, clip, open};
use super::names::{Layer, dotted};
use super::{CheckpointNames, Parameters, Sizes};
use crate::{DType, Error, MultiHeadAttentionConfig, Result};

/// Unknown tensors that a message names one by one; the rest are counted.
const LISTED: usize = 32;

impl Parameters {
    /// Reads the layer under `prefix` of a safetensors file.
    ///
    /// `prefix` is what stands before the names of [`CheckpointNames`], with or without its last dot, and
    /// empty if the file holds the layer alone. Tensors outside it are ignored. The naming is found out
    /// ([`CheckpointNames::detect`] tells which, [`describe`](Self::describe) the sizes as well); with BERT and Llama
    /// names `kdim` and `vdim` may differ from `embed_dim` as cross-attention layers in that style have it.
    ///
    /// F32, F16 and BF16 become f32 without loss; F64 is rounded to the nearest f32. NaN and infinities are
    /// taken as they are. `config.dtype` plays no part here: it is the type on the GPU.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if `config` is not valid. [`Error::Checkpoint`] if
    /// - `bytes` is no valid safetensors file,
    /// - no attention layer lies under `prefix`: the message lists the prefixes that have one,
    /// - tensors are missing, of another shape or type, of a value beyond f32, unknown, or contradict
    ///   `bias`, `out_bias` and `add_bias_kv`: the message lists them all with what was found and what is wanted.
    ///
    /// ```
    /// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(8, 2);
    /// # let file = Parameters::init(&config, 1)?
    /// #     .to_safetensors(&config, "encoder.layer.0.attention", CheckpointNames::Bert, DType::F32)?;
    /// // let file = std::fs::read("model.safetensors")?;
    /// let parameters = Parameters::from_safetensors(&config, &file, "encoder.layer.0.attention")?;
    /// assert_eq!(parameters.out_proj_weight.len(), 8 * 8);
    ///
    /// let other = MultiHeadAttentionConfig::new(8, 2).bias(false);
    /// let error = Parameters::from_safetensors(&other, &file, "encoder.layer.0.attention").unwrap_err();
    /// assert!(error.to_string().contains(".bias(true)"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn from_safetensors(config: &MultiHeadAttentionConfig, bytes: &[u8], prefix: &str) -> Result<Self> {
        config.validate()?;
        let layer = Layer::find(&open(bytes)?, prefix)?;
        let problems = problems(&layer, config);
        if !problems.is_empty() {
            return Err(refusal(&layer, &problems));
        }
        // Every size is now known to be backed by bytes of the file, so nothing large is reserved in vain.
        let mut parameters = Self::empty();
        let mut problems = Vec::new();
        for stored in layer.names.tensors() {
            let Some(view) = layer.tensors.get(stored.name) else {
                continue;
            };
            match decode(view.dtype(), view.data()) {
                Ok(values) => {
                    for (part, values) in stored.cut(values, &Sizes::from(config)) {
                        parameters.set(part, values);
                    }
                }
                Err(problem) => problems.push(format!("{} {problem}", layer.full_name(stored.name))),
            }
        }
        if !problems.is_empty() {
            return Err(refusal(&layer, &problems));
        }
        parameters.validate(config)?;
        Ok(parameters)
    }

    /// Writes the parameters as a safetensors file under `prefix`, which
    /// [`from_safetensors`](Self::from_safetensors) and PyTorch read.
    ///
    /// The metadata entry `format` is `pt`, which the transformers library asks for. [`DType::F32`] gives
    /// the same values back; [`DType::F16`] rounds to the nearest.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] or [`Error::Shape`] if the parameters do not fit `config`; [`Error::DType`] for a
    /// `dtype` other than F32 and F16; [`Error::Checkpoint`] if
    /// - `names` has no place for the layer: [`CheckpointNames::PyTorch`], [`CheckpointNames::Bert`] and
    ///   [`CheckpointNames::Gpt2`] want projections of one size, `kdim = vdim = embed_dim` and no grouped heads,
    ///   and all but PyTorch's have no `bias_k` and `bias_v`,
    /// - a finite value is beyond the largest f16, 65504.
    ///
    /// ```
    /// use multihead::{CheckpointNames, DType, MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(8, 2).add_bias_kv(true);
    /// let parameters = Parameters::init(&config, 1)?;
    /// let file = parameters.to_safetensors(&config, "", CheckpointNames::PyTorch, DType::F32)?;
    /// assert_eq!(Parameters::from_safetensors(&config, &file, "")?, parameters);
    /// assert!(parameters.to_safetensors(&config, "", CheckpointNames::Bert, DType::F32).is_err());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn to_safetensors(
        &self,
        config: &MultiHeadAttentionConfig,
        prefix: &str,
        names: CheckpointNames,
        dtype: DType,
    ) -> Result<Vec<u8>> {
        self.validate(config)?;
        let stored_as = match dtype {
            DType::F32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            other => {
                return Err(Error::DType(format!(
                    "parameters cannot be written as {other:?}: use F32 or F16"
                )));
            }
        };
        let sizes = Sizes::from(config);
        let mut problems: Vec<String> = names.lacks(&sizes, config.add_bias_kv).into_iter().collect();
        if names == CheckpointNames::Bert && [sizes.kdim, sizes.vdim] != [sizes.embed_dim; 2] {
            // A reader of such a file would build its layer from one hidden size.
            problems.push(format!(
                "BERT layers have one size, while the config has {sizes}: use CheckpointNames::PyTorchSeparate"
            ));
        }
        let mut tensors = Vec::new();
        for stored in names
            .tensors()
            .iter()
            .filter(|stored| stored.option(config).is_none_or(|(_, on)| on))
        {
            let arrays = stored.parts.iter().filter_map(|&part| self.get(part));
            let values = stored.join(arrays.flatten().copied().collect(), &sizes);
            if dtype == DType::F16 {
                let overflows = |x: &&f32| x.is_finite() && f16::from_f32(**x).is_infinite();
                if let Some(value) = values.iter().find(overflows) {
                    problems.push(format!(
                        "{} holds {value}, beyond the largest f16: use F32",
                        stored.name
                    ));
                }
            }
            let bytes: Vec<u8> = match dtype {
                DType::F16 => values
                    .iter()
                    .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                    .collect(),
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            };
            tensors.push((
                format!("{}{}", dotted(prefix), stored.name),
                stored.shape(&sizes),
                bytes,
            ));
        }
        if !problems.is_empty() {
            return Err(Error::Checkpoint(format!(
                "cannot write {}: {}",
                names.describe(),
                problems.join("; ")
            )));
        }
        let refuse = |error: safetensors::SafeTensorError| {
            Error::Checkpoint(format!("cannot write the file: {}", clip(&error.to_string())))
        };
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(stored_as, shape.clone(), bytes)?)))
            .collect::<Result<Vec<_>, _>>()
            .map_err(refuse)?;
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize(views, Some(metadata)).map_err(refuse)
    }
}

/// Everything in which the layer's tensors differ from what `config` wants.
fn problems(layer: &Layer<'_>, config: &MultiHeadAttentionConfig) -> Vec<String> {
    const TYPES: &str = "F32, F16, BF16 or F64";
    let sizes = Sizes::from(config);
    let mut problems: Vec<String> = layer
        .names
        .lacks(&sizes, config.add_bias_kv)
        .into_iter()
        .collect();
    let known = layer.names.tensors();
    for stored in known {
        let (name, wanted) = (layer.full_name(stored.name), stored.shape(&sizes));
        match (layer.tensors.get(stored.name), stored.option(config)) {
            (Some(view), Some((option, false))) => problems.push(format!(
                "{name} {} {} is in the file, while the config says {option} = false: use .{option}(true)",
                view.dtype(),
                axes(view.shape())
            )),
            (Some(view), _) => {
                if view.shape() != wanted {
                    problems.push(format!("{name} has shape {}, wanted {wanted:?}", axes(view.shape())));
                }
                if !matches!(view.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64) {
                    problems.push(format!("{name} has type {}, wanted {TYPES}", view.dtype()));
                }
            }
            (None, Some((option, true))) => problems.push(format!(
                "{name} is missing, wanted {wanted:?} of {TYPES}, as the config says {option} = true: use .{option}(false) for a layer without"
            )),
            (None, None) => problems.push(format!("{name} is missing, wanted {wanted:?} of {TYPES}")),
            (None, Some((_, false))) => {}
        }
    }
    let mut unknown = layer.tensors.iter().filter(|(name, _)| {
        !layer.names.skips(name) && !known.iter().any(|stored| stored.name == name.as_str())
    });
    for (name, view) in unknown.by_ref().take(LISTED) {
        problems.push(format!(
            "{} {} {} is unknown to the layer",
            layer.full_name(name),
            view.dtype(),
            axes(view.shape())
        ));
    }
    match unknown.count() {
        0 => {}
        more => problems.push(format!("{more} more tensors are unknown to the layer")),
    }
    // The sizes of the file are what most users need in order to repair the call.
    if let Some(info) = layer.info().ok().filter(|_| !problems.is_empty()) {
        let found = Sizes::from(&info);
        if found != sizes {
            problems.push(format!("the file's sizes are those of {found}"));
        }
    }
    problems
}

fn refusal(layer: &Layer<'_>, problems: &[String]) -> Error {
    Error::Checkpoint(format!(
        "the layer under \"{}\" ({}) does not fit the config:\n- {}",
        clip(layer.prefix.strip_suffix('.').unwrap_or(&layer.prefix)),
        layer.names.describe(),
        problems.join("\n- ")
    ))
}

/// Values in f32, or what is wrong with them. Reads bytes, so alignment does not matter.
fn decode(dtype: Dtype, bytes: &[u8]) -> Result<Vec<f32>, String> {
    Ok(match dtype {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect(),
        Dtype::F16 => bytes
            .chunks_exact(2)
            .map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        Dtype::BF16 => bytes
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect(),
        Dtype::F64 => bytes
            .chunks_exact(8)
            .map(|b| {
                let wide = f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
                let value = wide as f32;
                if value.is_infinite() && wide.is_finite() {
                    return Err(format!("holds {wide:e}, beyond the largest f32"));
                }
                Ok(value)
            })
            .collect::<Result<_, _>>()?,
        other => return Err(format!("has type {other}, wanted F32, F16, BF16 or F64")),
    })
}
