//! What is read, and what is refused.

use super::*;
use std::collections::HashMap;

/// A file with F32 tensors of ones, BOOL tensors of `true` and I32 tensors of 1.
fn file(about: &str, tensors: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, dtype, shape)| {
            let one: &[u8] = match dtype {
                Dtype::F32 => &[0, 0, 128, 63],
                Dtype::I32 => &[1, 0, 0, 0],
                _ => &[1],
            };
            one.repeat(shape.iter().product())
        })
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dtype, shape), bytes)| {
        (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
    });
    let metadata = HashMap::from([("case".to_owned(), about.to_owned())]);
    safetensors::serialize(views, Some(metadata)).unwrap()
}

const SMALL: &[(&str, Dtype, &[usize])] = &[
    ("query", Dtype::F32, &[1, 2, 3, 4]),
    ("key", Dtype::F32, &[1, 1, 5, 4]),
    ("value", Dtype::F32, &[1, 1, 5, 2]),
    ("attn_mask", Dtype::BOOL, &[3, 4]),
    ("key_mask", Dtype::BOOL, &[1, 5]),
    ("kv_lengths", Dtype::I32, &[1]),
    ("expected.output", Dtype::F32, &[1, 2, 3, 2]),
];

const ABOUT: &str = r#"{"name": "small", "op": "sdpa", "source": "hand",
    "options": {"causal": "bottom_right", "window": [-1, 2], "scale": 0.5, "softcap": null},
    "tolerance": {"output": 1e-5}}"#;

#[test]
fn a_case_is_read() {
    let case = Case::parse(&file(ABOUT, SMALL)).unwrap();
    let Op::Sdpa(op) = &case.op else {
        panic!("{:?}", case.op)
    };
    assert_eq!(
        (
            op.shape.heads,
            op.shape.kv_heads,
            op.shape.keys,
            op.shape.value_dim
        ),
        (2, 1, 5, 2)
    );
    let wanted = AttentionOptions::new()
        .causal(Causal::BottomRight)
        .window(None, Some(2))
        .scale(0.5);
    assert_eq!(op.options, wanted);
    assert_eq!(op.hiding.kv_lengths, Some(vec![1]));
    assert!(!case.expects_weights() && case.expected["output"].tolerance == 1e-5);
}

#[test]
fn what_is_unknown_is_unsupported() {
    for about in [
        r#"{"op": "rope", "tolerance": {"output": 1}}"#,
        r#"{"op": "sdpa", "options": {"dropout": 0.1}, "tolerance": {"output": 1}}"#,
    ] {
        let error = Case::parse(&file(about, SMALL)).unwrap_err();
        assert!(matches!(error, CaseError::Unsupported(_)), "{error:?}");
    }
    for input in ["grad_output", "block_mask"] {
        let mut tensors = SMALL.to_vec();
        tensors.push((input, Dtype::F32, &[1]));
        let error = Case::parse(&file(ABOUT, &tensors)).unwrap_err();
        assert!(matches!(error, CaseError::Unsupported(_)), "{error:?}");
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let wrong: &[(&str, Dtype, &[usize])] = &[
        ("query", Dtype::F32, &[1, 2, 3]),
        ("query", Dtype::F32, &[1, 0, 3, 4]),
        ("query", Dtype::I32, &[1, 2, 3, 4]),
        ("key", Dtype::F32, &[2, 1, 5, 4]),
        ("key", Dtype::F32, &[1, 3, 5, 4]),
        ("value", Dtype::F32, &[1, 1, 4, 2]),
        ("key_mask", Dtype::BOOL, &[5]),
        ("kv_lengths", Dtype::F32, &[1]),
        ("past_key", Dtype::F32, &[1, 1, 2, 4]),
        ("sinks", Dtype::F32, &[3]),
    ];
    for row in wrong {
        let mut tensors: Vec<_> = SMALL.iter().filter(|tensor| tensor.0 != row.0).copied().collect();
        tensors.push(*row);
        assert!(
            matches!(Case::parse(&file(ABOUT, &tensors)), Err(CaseError::Bad(_))),
            "{row:?}"
        );
    }
    for options in [
        r#"{"window": [1]}"#,
        r#"{"window": [-2, 0]}"#,
        r#"{"causal": "left"}"#,
        r#"{"num_heads": 0}"#,
        r#"{"num_heads": 3}"#,
        r#"{"alibi_slopes": 1}"#,
        r#"{"tokens": [1]}"#,
        "[]",
    ] {
        let about = format!(r#"{{"op": "sdpa", "options": {options}, "tolerance": {{"output": 1}}}}"#);
        assert!(
            matches!(Case::parse(&file(&about, SMALL)), Err(CaseError::Bad(_))),
            "{options}"
        );
    }
}

/// A layer whose parameters have the names of a checkpoint.
#[test]
fn a_checkpoint_is_read() {
    let tensors: &[(&str, Dtype, &[usize])] = &[
        ("query", Dtype::F32, &[1, 3, 6]),
        ("l.q_proj.weight", Dtype::F32, &[8, 6]),
        ("l.k_proj.weight", Dtype::F32, &[4, 6]),
        ("l.v_proj.weight", Dtype::F32, &[4, 6]),
        ("l.o_proj.weight", Dtype::F32, &[6, 8]),
    ];
    let read = |options: &str, tensors: &[(&str, Dtype, &[usize])]| {
        let about = format!(r#"{{"op": "mha", "options": {{{options}}}}}"#);
        Case::parse(&file(&about, tensors))
    };
    let right = r#""num_heads": 4, "kv_num_heads": 2, "checkpoint": "l""#;
    let case = read(right, tensors).unwrap();
    let Op::Layer(op) = &case.op else {
        panic!("{:?}", case.op)
    };
    assert_eq!((op.config.num_kv_heads, op.config.head_dim()), (2, 2));
    assert_eq!((op.config.bias, op.config.out_bias), (false, false));
    for wrong in [
        r#""num_heads": 4, "checkpoint": "l""#,
        r#""num_heads": 8, "kv_num_heads": 2, "checkpoint": "l""#,
        r#""num_heads": 4, "kv_num_heads": 2, "checkpoint": "m""#,
        r#""num_heads": 4, "kv_num_heads": 2, "checkpoint": 1"#,
        r#""num_heads": 4, "kv_num_heads": 2"#,
    ] {
        let error = read(wrong, tensors).unwrap_err();
        assert!(matches!(error, CaseError::Bad(_)), "{wrong}: {error:?}");
    }
    let mut narrow = tensors.to_vec();
    narrow[0].2 = &[1, 3, 4];
    assert!(matches!(read(right, &narrow), Err(CaseError::Bad(_))));
}

#[test]
fn damaged_files_are_errors() {
    let good = file(ABOUT, SMALL);
    for length in 0..good.len() {
        assert!(Case::parse(&good[..length]).is_err(), "cut to {length} bytes");
    }
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    for at in 0..header {
        for byte in [0, b'0', b'9', b'-', b'"', b'[', b'}', 0xff] {
            let mut bytes = good.clone();
            bytes[at] = byte;
            // Any answer will do but a panic.
            let _ = Case::parse(&bytes);
        }
    }
}

#[test]
fn differences_count_infinities_and_nan() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    assert_eq!(largest_difference(&[-inf, 1.0], &[f32::NEG_INFINITY, 1.5]), 0.5);
    assert_eq!(largest_difference(&[inf], &[f32::NEG_INFINITY]), inf);
    assert_eq!(largest_difference(&[-1e30], &[f32::NEG_INFINITY]), inf);
    assert!(largest_difference(&[nan, 0.0], &[0.0, 0.0]).is_nan());
    assert!(largest_difference(&[0.0, 1.0], &[f32::NAN, 0.0]).is_nan());
    let of = |error| Comparison {
        name: "output".to_owned(),
        error,
        bound: 1.0,
        problem: None,
    };
    assert!(of(1.0).passes() && !of(1.1).passes() && !of(nan).passes() && !of(inf).passes());
}
