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
fn gpt2_names() {
    // c_attn.weight is [in, out]: row 0 holds the weights of input 0.
    let file = |dtype, weight: &[u8], leftovers: bool| {
        let out = [1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
        let mut views = vec![
            (
                "h.0.attn.c_attn.weight",
                TensorView::new(dtype, vec![2, 6], weight).unwrap(),
            ),
            (
                "h.0.attn.c_proj.weight",
                TensorView::new(Dtype::F32, vec![2, 2], &out).unwrap(),
            ),
        ];
        if leftovers {
            views.push((
                "h.0.attn.bias",
                TensorView::new(Dtype::U8, vec![1, 1, 2, 2], &[1; 4]).unwrap(),
            ));
            views.push((
                "h.0.attn.masked_bias",
                TensorView::new(Dtype::F32, vec![], &[0; 4]).unwrap(),
            ));
        }
        safetensors::serialize(views, None).unwrap()
    };
    let numbers: Vec<f32> = (0..12u8).map(f32::from).collect();
    let single: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let double: Vec<u8> = numbers.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect();
    for (dtype, bytes) in [(Dtype::F32, &single), (Dtype::F64, &double)] {
        for leftovers in [false, true] {
            let file = file(dtype, bytes, leftovers);
            let info = Parameters::describe(&file, "h.0.attn").unwrap();
            assert_eq!(info.names, CheckpointNames::Gpt2);
            assert_eq!(info.config(2), config(2).bias(false));
            let p = Parameters::from_safetensors(&info.config(2), &file, "h.0.attn").unwrap();
            assert_eq!(p.q_proj_weight, [0.0, 6.0, 1.0, 7.0]);
            assert_eq!(p.k_proj_weight, [2.0, 8.0, 3.0, 9.0]);
            assert_eq!(p.v_proj_weight, [4.0, 10.0, 5.0, 11.0]);
            assert_eq!(p.out_proj_weight, [1.0, 3.0, 2.0, 4.0]);
        }
    }
    // Cross attention of GPT-2 joins keys and values alone.
    let cross = zeros(&[
        ("c_attn.weight", Dtype::F32, &[4, 8]),
        ("q_attn.weight", Dtype::F32, &[4, 4]),
    ]);
    let text = Parameters::describe(&cross, "").unwrap_err().to_string();
    assert!(
        text.contains("c_attn.weight has shape [4, 8], wanted [4, 12]"),
        "{text}"
    );
    refused(
        &config(4),
        &cross,
        "",
        &[
            "c_attn.weight has shape [4, 8], wanted [4, 12]",
            "q_attn.weight F32 [4, 4] is unknown",
        ],
    );
}

#[test]
fn llama_names() {
    let l = "model.layers.0.self_attn";
    let names = [
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "o_proj.weight",
        "q_proj.bias",
        "k_proj.bias",
        "v_proj.bias",
        "rotary_emb.inv_freq",
    ]
    .map(|name| format!("{l}.{name}"));
    let shapes: [&[usize]; 8] = [&[24, 10], &[8, 10], &[8, 10], &[10, 24], &[24], &[8], &[8], &[2]];
    let tensors: Vec<(&str, Dtype, &[usize])> = names
        .iter()
        .zip(shapes)
        .map(|(name, shape)| (name.as_str(), Dtype::BF16, shape))
        .collect();
    let file = zeros(&tensors);
    let info = Parameters::describe(&file, l).unwrap();
    assert_eq!(info.names, CheckpointNames::Llama);
    assert_eq!((info.embed_dim, info.q_size, info.kv_size), (10, 24, 8));
    let wanted = MultiHeadAttentionConfig::new(10, 6)
        .num_kv_heads(2)
        .with_head_dim(4)
        .out_bias(false);
    assert_eq!(info.config(6), wanted);
    for (heads, kv_heads, size) in [(3, 1, 8), (6, 2, 4), (12, 4, 2), (24, 8, 1)] {
        let config = info.config(heads);
        assert_eq!((config.num_kv_heads, config.head_dim()), (kv_heads, size));
        assert!(Parameters::from_safetensors(&config, &file, l).is_ok(), "{heads}");
    }
    // Head counts that the rows rule out: by the configuration, or by the shapes.
    for heads in [0, 1, 2, 4, 5, 7, 8, 16, 25, 48] {
        let error = Parameters::from_safetensors(&info.config(heads), &file, l).unwrap_err();
        match error {
            Error::Option(_) => assert!(heads == 0 || heads > 24, "{heads}: {error}"),
            Error::Checkpoint(text) => assert!(text.contains("num_kv_heads * head_dim = 8"), "{text}"),
            other => panic!("{heads}: {other}"),
        }
    }
    refused(
        &info.config(5),
        &file,
        l,
        &[
            "q_proj.weight has shape [24, 10], wanted [20, 10]",
            "num_heads * head_dim = 24, num_kv_heads * head_dim = 8",
        ],
    );
    refused(
        &wanted.clone().out_bias(true),
        &file,
        l,
        &["o_proj.bias is missing", "out_bias = true", ".out_bias(false)"],
    );
    refused(
        &wanted.clone().bias(false),
        &file,
        l,
        &["q_proj.bias BF16 [24] is in the file", ".bias(true)"],
    );
    refused(
        &wanted,
        &file,
        "model.layers.0",
        &["q_proj.weight", "\"model.layers.0.self_attn\""],
    );
    // The norms that some of its kin put behind the projections would change the result.
    let mut more = tensors.clone();
    let norm = format!("{l}.q_norm.weight");
    more.push((&norm, Dtype::BF16, &[4]));
    refused(
        &wanted,
        &zeros(&more),
        l,
        &["q_norm.weight BF16 [4] is unknown to the layer"],
    );
    // Keys and values of different rows are no layer.
    let mut uneven = tensors;
    uneven[2].2 = &[4, 10];
    let text = Parameters::describe(&zeros(&uneven), l).unwrap_err().to_string();
    assert!(
        text.contains("v_proj.weight has shape [4, 10], wanted [8, 10]"),
        "{text}"
    );
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
    use CheckpointNames::{Bert, Gpt2, Llama, PyTorch};
    for names in [PyTorch, Bert, Gpt2, Llama] {
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
    use CheckpointNames::{Bert, Gpt2, Llama, PyTorch, PyTorchSeparate};
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
        (config(4).num_kv_heads(1), PyTorch),
        (config(4).num_kv_heads(1), Bert),
        (config(4).num_kv_heads(1), Gpt2),
        (config(4).with_head_dim(3), PyTorch),
        (config(4).with_head_dim(3), Bert),
        (config(4).with_head_dim(3), Gpt2),
        (config(4).add_bias_kv(true), Gpt2),
        (config(4).add_bias_kv(true), Llama),
    ] {
        assert!(
            matches!(write(&config, names, DType::F32), Err(Error::Checkpoint(_))),
            "{config:?} {names:?}"
        );
        assert!(write(&config, PyTorchSeparate, DType::F16).is_ok());
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
