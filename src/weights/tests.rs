mod hostile;

use safetensors::tensor::{Dtype, TensorView};

use super::*;
use crate::DType;

fn config(embed_dim: usize) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(embed_dim, 2)
}

/// A file of zeros.
fn zeros(tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8])
        .collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((name, dtype, shape), data)| (*name, TensorView::new(*dtype, shape.to_vec(), data).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

fn refused(config: &MultiHeadAttentionConfig, file: &[u8], prefix: &str, fragments: &[&str]) {
    let error = Parameters::from_safetensors(config, file, prefix).unwrap_err();
    assert!(matches!(error, Error::Checkpoint(_)), "{error}");
    let text = error.to_string();
    for fragment in fragments {
        assert!(text.contains(fragment), "{fragment:?} is not in: {text}");
    }
}

#[test]
fn sizes_beyond_memory_are_refused() {
    let huge = MultiHeadAttentionConfig::new(1 << 29, 1);
    assert!(matches!(Parameters::init(&huge, 0), Err(Error::Option(_))));
    assert!(matches!(Parameters::init(&config(3), 0), Err(Error::Option(_))));
    refused(
        &huge,
        &zeros(&[("in_proj_weight", Dtype::F32, &[6, 2])]),
        "",
        &["shape [6, 2]", "1610612736"],
    );
}

#[test]
fn validation_lists_everything() {
    let mut parameters = Parameters::init(&config(4), 0).unwrap();
    parameters.q_proj_weight.pop();
    parameters.k_proj_bias = None;
    parameters.bias_v = Some(vec![0.0; 4]);
    let error = parameters.validate(&config(4)).unwrap_err();
    assert!(matches!(error, Error::Shape(_)));
    let text = error.to_string();
    for fragment in [
        "q_proj_weight has 15 values, wanted 16 [4, 4]",
        "k_proj_bias [4] is missing",
        ".bias(false)",
        "bias_v is given",
        ".add_bias_kv(true)",
    ] {
        assert!(text.contains(fragment), "{fragment:?} is not in: {text}");
    }
    assert!(
        parameters
            .to_safetensors(&config(4), "", CheckpointNames::PyTorch, DType::F32)
            .is_err()
    );
}

/// The values 0, 1, 2, ... over the tensors in order, stored under BERT names as `f16` or `f32`.
fn bert_file(half: bool) -> (Vec<u8>, Vec<Vec<f32>>) {
    let tensors: [(&str, &[usize]); 11] = [
        ("self.query.weight", &[4, 4]),
        ("self.key.weight", &[4, 4]),
        ("self.value.weight", &[4, 4]),
        ("output.dense.weight", &[4, 4]),
        ("self.query.bias", &[4]),
        ("self.key.bias", &[4]),
        ("self.value.bias", &[4]),
        ("output.dense.bias", &[4]),
        ("output.LayerNorm.weight", &[4]),
        ("output.LayerNorm.bias", &[4]),
        ("../output.dense.weight", &[8, 4]),
    ];
    let mut next = 0f32;
    let values: Vec<Vec<f32>> = tensors
        .iter()
        .map(|(_, shape)| {
            (0..shape.iter().product())
                .map(|_| {
                    next += 1.0;
                    next
                })
                .collect()
        })
        .collect();
    let bytes: Vec<Vec<u8>> = values
        .iter()
        .map(|values| match half {
            true => values
                .iter()
                .flat_map(|&x| half::f16::from_f32(x).to_le_bytes())
                .collect(),
            false => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
        .collect();
    let dtype = if half { Dtype::F16 } else { Dtype::F32 };
    let views = tensors.iter().zip(&bytes).map(|((name, shape), bytes)| {
        // The feed-forward block of a BERT layer has an output.dense.weight of its own.
        let name = match name.strip_prefix("../") {
            Some(rest) => format!("encoder.layer.3.{rest}"),
            None => format!("encoder.layer.3.attention.{name}"),
        };
        (name, TensorView::new(dtype, shape.to_vec(), bytes).unwrap())
    });
    (safetensors::serialize(views, None).unwrap(), values)
}

#[test]
fn bert_names() {
    for half in [false, true] {
        let (file, values) = bert_file(half);
        for prefix in ["encoder.layer.3.attention", "encoder.layer.3.attention."] {
            assert_eq!(CheckpointNames::detect(&file, prefix), Ok(CheckpointNames::Bert));
            let info = Parameters::describe(&file, prefix).unwrap();
            assert_eq!(info.config(2), config(4));
            let p = Parameters::from_safetensors(&config(4), &file, prefix).unwrap();
            let found = [
                p.q_proj_weight,
                p.k_proj_weight,
                p.v_proj_weight,
                p.out_proj_weight,
            ];
            assert_eq!(found[..], values[..4]);
            let found = [p.q_proj_bias, p.k_proj_bias, p.v_proj_bias, p.out_proj_bias].map(Option::unwrap);
            assert_eq!(found[..], values[4..8]);
        }
    }
}

#[test]
fn a_wrong_prefix_lists_the_right_ones() {
    let (file, _) = bert_file(false);
    for prefix in [
        "",
        "encoder.layer.3",
        "encoder.layer.3.attention.self",
        "encoder.layer.3.att",
        "..",
        "é",
    ] {
        refused(
            &config(4),
            &file,
            prefix,
            &["no attention layer", "\"encoder.layer.3.attention\""],
        );
    }
    refused(
        &config(4),
        &zeros(&[]),
        "",
        &["0 of the file's 0 tensors", "nothing in the file"],
    );
    // The prefixes below the one that was asked for come first.
    let file = zeros(&[
        ("a.in_proj_weight", Dtype::F32, &[6, 2]),
        ("z.mha.q_proj_weight", Dtype::F32, &[2, 2]),
        ("notin_proj_weight", Dtype::F32, &[6, 2]),
    ]);
    refused(&config(2), &file, "z", &["attention layers: \"z.mha\", \"a\""]);
    let error = Parameters::from_safetensors(&config(2), &file, "q")
        .unwrap_err()
        .to_string();
    assert!(
        !error.contains("not"[..].repeat(2).as_str()) && error.ends_with("\"a\", \"z.mha\""),
        "{error}"
    );
}

#[test]
fn all_problems_in_one_message() {
    let file = zeros(&[
        ("l.in_proj_weight", Dtype::F32, &[12, 3]),
        ("l.in_proj_bias", Dtype::I64, &[12]),
        ("l.out_proj.weight", Dtype::BOOL, &[4]),
        ("l.bias_k", Dtype::F32, &[1, 1, 4]),
        ("l.lora_a", Dtype::BF16, &[2, 4]),
        ("other", Dtype::F32, &[1]),
    ]);
    refused(
        &config(4),
        &file,
        "l",
        &[
            "l.in_proj_weight has shape [12, 3], wanted [12, 4]",
            "l.in_proj_bias has type I64, wanted F32, F16, BF16 or F64",
            "l.out_proj.weight has shape [4], wanted [4, 4]",
            "l.out_proj.weight has type BOOL",
            "l.out_proj.bias is missing, wanted [4]",
            "l.bias_k F32 [1, 1, 4] is in the file",
            ".add_bias_kv(true)",
            "l.lora_a BF16 [2, 4] is unknown",
        ],
    );
    let error = Parameters::from_safetensors(&config(4), &file, "l")
        .unwrap_err()
        .to_string();
    assert!(!error.contains("other"), "{error}");
    // Many unknown tensors are counted instead of listed.
    let names: Vec<String> = (0..100).map(|i| format!("x{i}")).collect();
    let mut tensors: Vec<(&str, Dtype, &[usize])> = vec![("in_proj_weight", Dtype::F32, &[12, 4])];
    tensors.extend(
        names
            .iter()
            .map(|name| (name.as_str(), Dtype::U8, [1usize].as_slice())),
    );
    refused(
        &config(4),
        &zeros(&tensors),
        "",
        &["x0 U8 [1] is unknown", "68 more tensors"],
    );
}

#[test]
fn options_and_file_must_agree() {
    use CheckpointNames::{Bert, PyTorch};
    for names in [PyTorch, Bert] {
        let with = Parameters::init(&config(4), 0).unwrap();
        let file = with.to_safetensors(&config(4), "", names, DType::F32).unwrap();
        refused(
            &config(4).bias(false),
            &file,
            "",
            &["bias = false", ".bias(true)"],
        );
        refused(
            &config(4).add_bias_kv(true),
            &file,
            "",
            &["bias_k", ".add_bias_kv(false)"],
        );
        refused(
            &config(8),
            &file,
            "",
            &["wanted", "embed_dim = 4, kdim = 4, vdim = 4"],
        );
        let without = Parameters::init(&config(4).bias(false), 0).unwrap();
        let file = without
            .to_safetensors(&config(4).bias(false), "", names, DType::F32)
            .unwrap();
        refused(&config(4), &file, "", &["bias = true", ".bias(false)"]);
        assert!(!Parameters::describe(&file, "").unwrap().bias);
    }
    let file = Parameters::init(&config(4), 0)
        .unwrap()
        .to_safetensors(&config(4), "", PyTorch, DType::F32)
        .unwrap();
    refused(&config(4).kdim(6), &file, "", &["kdim = 6", "k_proj_weight"]);
}

#[test]
fn writing_refuses_what_the_names_cannot_hold() {
    use CheckpointNames::{Bert, PyTorch, PyTorchSeparate};
    let write = |config: &MultiHeadAttentionConfig, names, dtype| {
        Parameters::init(config, 0)
            .unwrap()
            .to_safetensors(config, "x", names, dtype)
    };
    for (config, names) in [
        (config(4).add_bias_kv(true), Bert),
        (config(4).kdim(6), Bert),
        (config(4).vdim(6), PyTorch),
        (config(4).kdim(6), PyTorch),
    ] {
        assert!(
            matches!(write(&config, names, DType::F32), Err(Error::Checkpoint(_))),
            "{config:?} {names:?}"
        );
        if names != Bert || !config.add_bias_kv {
            assert!(write(&config, PyTorchSeparate, DType::F16).is_ok());
        }
    }
    for dtype in [DType::Bool, DType::U32] {
        assert!(matches!(write(&config(4), PyTorch, dtype), Err(Error::DType(_))));
    }
    let mut large = Parameters::init(&config(4), 0).unwrap();
    large.v_proj_weight[3] = 65520.0;
    let error = large
        .to_safetensors(&config(4), "", PyTorch, DType::F16)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("in_proj_weight") && error.contains("65520"),
        "{error}"
    );
    assert!(large.to_safetensors(&config(4), "", PyTorch, DType::F32).is_ok());
}

#[test]
fn element_types() {
    let value = 1.0f64 / 3.0;
    let file = |dtype: Dtype, bytes: &[u8], count: usize| {
        let weight = bytes.repeat(count / 4 * 3);
        let out = bytes.repeat(count / 4);
        let views = [
            (
                "in_proj_weight",
                TensorView::new(dtype, vec![6, 2], &weight).unwrap(),
            ),
            (
                "out_proj.weight",
                TensorView::new(dtype, vec![2, 2], &out).unwrap(),
            ),
        ];
        safetensors::serialize(views, None).unwrap()
    };
    let config = config(2).bias(false);
    let half = half::f16::from_f64(value);
    let brain = half::bf16::from_f64(value);
    for (dtype, bytes, wanted) in [
        (Dtype::F64, value.to_le_bytes().to_vec(), value as f32),
        (Dtype::F32, (value as f32).to_le_bytes().to_vec(), value as f32),
        (Dtype::F16, half.to_le_bytes().to_vec(), half.to_f32()),
        (Dtype::BF16, brain.to_le_bytes().to_vec(), brain.to_f32()),
        (
            Dtype::F64,
            f64::NEG_INFINITY.to_le_bytes().to_vec(),
            f32::NEG_INFINITY,
        ),
    ] {
        let p = Parameters::from_safetensors(&config, &file(dtype, &bytes, 16), "").unwrap();
        assert_eq!(p.v_proj_weight, vec![wanted; 4], "{dtype}");
    }
    refused(
        &config,
        &file(Dtype::F64, &1e300f64.to_le_bytes(), 16),
        "",
        &["in_proj_weight holds 1e300"],
    );
    refused(
        &config,
        &file(Dtype::I32, &[0; 4], 16),
        "",
        &["in_proj_weight has type I32", "out_proj.weight has"],
    );
}
