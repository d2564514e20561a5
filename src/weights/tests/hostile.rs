//! Files that nobody vouches for, and round trips of random layers.

use proptest::prelude::*;
use safetensors::tensor::Dtype;

use super::super::*;
use super::{config, refused, zeros};
use crate::DType;

/// A file from a header and a number of zero bytes.
fn raw(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    file
}

#[test]
fn hostile_files() {
    let tensor = |name: &str, size: u64, from: u64| {
        format!(
            r#""{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{from},{}]}}"#,
            from.wrapping_add(size)
        )
    };
    // Data and header add up past the end of the address space: an overflow inside the safetensors crate.
    // Sizes in bits must fit, so it takes several tensors.
    let piece = u64::MAX / 8;
    let chain = |last: u64| {
        let mut entries: Vec<String> = (0..8)
            .map(|i| tensor(&format!("t{i}"), piece, i * piece))
            .collect();
        entries.push(tensor("last", last, 8 * piece));
        format!("{{{}}}", entries.join(","))
    };
    let wraps = raw(&chain(7), 4);
    let mut duplicate = zeros(&[
        ("in_proj_weight", Dtype::F32, &[6, 2]),
        ("in_proj_weighT", Dtype::F32, &[6, 2]),
    ]);
    let at = duplicate
        .windows(14)
        .position(|w| w == b"in_proj_weighT")
        .unwrap();
    duplicate[at + 13] = b't';
    let same_twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}"#;
    let mut not_text = raw(r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, 0);
    not_text[10] = 0xff;
    let good = zeros(&[("in_proj_weight", Dtype::F32, &[6, 2])]);
    let mut files = vec![
        Vec::new(),
        vec![0; 7],
        vec![0; 8],
        vec![0xff; 8],
        vec![0xff; 64],
        [100_000_001u64.to_le_bytes().to_vec(), vec![b' '; 8]].concat(),
        raw("", 4),
        raw("{", 0),
        raw("[]", 0),
        raw("null", 0),
        raw(&"[".repeat(10_000), 0),
        raw(&format!("{{\"a\":{}", "{\"a\":".repeat(10_000)), 0),
        wraps,
        duplicate,
        raw(same_twice, 1),
        not_text,
        raw(&format!("{{{},{}}}", tensor("a", 4, 0), tensor("b", 4, 2)), 6),
        raw(&format!("{{{},{}}}", tensor("a", 4, 0), tensor("b", 4, 5)), 9),
        raw(&format!("{{{}}}", tensor("in_proj_weight", 1 << 40, 0)), 16),
        raw(
            r#"{"in_proj_weight":{"dtype":"F32","shape":[6,2],"data_offsets":[48,0]}}"#,
            48,
        ),
        raw(
            r#"{"in_proj_weight":{"dtype":"F32","shape":[-6,2],"data_offsets":[0,48]}}"#,
            48,
        ),
        raw(
            r#"{"in_proj_weight":{"dtype":"F32","shape":[6,2.5],"data_offsets":[0,60]}}"#,
            60,
        ),
        raw(
            r#"{"in_proj_weight":{"dtype":"F99","shape":[6,2],"data_offsets":[0,48]}}"#,
            48,
        ),
        raw(
            r#"{"in_proj_weight":{"dtype":"F32","shape":[0,536870912],"data_offsets":[0,0]}}"#,
            0,
        ),
        raw(
            r#"{"in_proj_weight":{"dtype":"F32","shape":[0,0,4],"data_offsets":[0,0]}}"#,
            0,
        ),
        raw(
            &format!(
                r#"{{"in_proj_weight":{{"dtype":"F32","shape":[{}0],"data_offsets":[0,0]}}}}"#,
                "1,".repeat(9999)
            ),
            0,
        ),
        raw(&format!("{{\"{}in_proj_weight\":0}}", "x".repeat(100_000)), 0),
        [good.clone(), vec![0]].concat(),
    ];
    files.extend((0..good.len()).map(|length| good[..length].to_vec()));
    for file in files {
        for prefix in ["", "a"] {
            for error in [
                Parameters::from_safetensors(&config(4), &file, prefix).unwrap_err(),
                Parameters::describe(&file, prefix)
                    .err()
                    .unwrap_or(Error::Checkpoint(String::new())),
            ] {
                assert!(matches!(error, Error::Checkpoint(_)), "{error}");
                assert!(
                    error.to_string().len() < 3000,
                    "{} bytes of message",
                    error.to_string().len()
                );
            }
        }
    }
    let escaped = raw(
        r#"{"__metadata__":{"\"a\":1":"{:\\"},"a\"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
        1,
    );
    refused(&config(4), &escaped, "", &["1 of the file's 1 tensors"]);
}

#[test]
fn a_name_given_twice() {
    let head = r#"{"in_proj_weight":{"dtype":"F32","shape":[6,2],"data_offsets":[0,48]},"#;
    let entry = r#""out_proj.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[48,64]}"#;
    let other = r#""out_proj.weight":{"dtype":"I32","shape":[2,2],"data_offsets":[48,64]}"#;
    let config = config(2).bias(false);
    assert!(Parameters::from_safetensors(&config, &raw(&format!("{head}{entry}}}"), 64), "").is_ok());
    // Without its own check the last entry would win.
    refused(
        &config,
        &raw(&format!("{head}{other},{entry}}}"), 64),
        "",
        &["a name more than once"],
    );
}

fn any_config() -> impl Strategy<Value = MultiHeadAttentionConfig> {
    let heads = (1..4usize, prop::sample::select(vec![1usize, 1, 2, 3]));
    let own_size = prop::option::weighted(0.3, 1..9usize);
    (
        heads,
        1..4usize,
        own_size,
        1..9usize,
        1..9usize,
        any::<[bool; 4]>(),
    )
        .prop_map(|((kv_heads, group), size, own_size, k, v, flags)| {
            let heads = kv_heads * group;
            let mut config = MultiHeadAttentionConfig::new(heads * size, heads)
                .num_kv_heads(kv_heads)
                .bias(flags[0])
                .out_bias(flags[1])
                .add_bias_kv(flags[2]);
            // A size that heads have anyway is one that no file tells.
            config.head_dim = own_size.filter(|own| *own != size);
            if flags[3] { config.kdim(k).vdim(v) } else { config }
        })
}

/// A call may succeed or fail, but only with the error of a bad checkpoint, and never panic.
fn survives(config: &MultiHeadAttentionConfig, file: &[u8], prefix: &str) {
    match Parameters::from_safetensors(config, file, prefix) {
        Ok(parameters) => assert_eq!(parameters.validate(config), Ok(())),
        Err(error) => assert!(matches!(error, Error::Checkpoint(_)), "{error}"),
    }
    if let Err(error) = Parameters::describe(file, prefix) {
        assert!(matches!(error, Error::Checkpoint(_)), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn round_trips(config in any_config(), seed: u64, prefix in "([a-z\"\\\\é.]{0,8}\\.)?") {
        let parameters = Parameters::init(&config, seed).unwrap();
        let one_size = Sizes::from(&config).are_one();
        for (names, holds) in [
            (CheckpointNames::PyTorch, one_size),
            (CheckpointNames::PyTorchSeparate, true),
            (CheckpointNames::Bert, one_size && !config.add_bias_kv),
            (CheckpointNames::Gpt2, one_size && !config.add_bias_kv),
            (CheckpointNames::Llama, !config.add_bias_kv),
        ] {
            let written = parameters.to_safetensors(&config, &prefix, names, DType::F32);
            prop_assert_eq!(written.is_ok(), holds);
            let Ok(file) = written else { continue };
            prop_assert_eq!(&Parameters::from_safetensors(&config, &file, &prefix).unwrap(), &parameters);
            let info = Parameters::describe(&file, &prefix).unwrap();
            prop_assert_eq!(info.names, names);
            prop_assert_eq!(info.config(config.num_heads), config.clone());
            // Halves come back as the nearest half of each value.
            let halves = parameters.to_safetensors(&config, &prefix, names, DType::F16).unwrap();
            let back = Parameters::from_safetensors(&config, &halves, &prefix).unwrap();
            for part in Part::ALL {
                for (x, y) in parameters.get(part).iter().zip(back.get(part)) {
                    prop_assert!(x.iter().zip(y).all(|(x, y)| half::f16::from_f32(*x).to_f32() == *y));
                }
            }
        }
    }

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), length in 0..300u64) {
        survives(&config(4), &bytes, "");
        survives(&config(4), &[&length.to_le_bytes(), bytes.as_slice()].concat(), "");
    }

    #[test]
    fn random_headers(
        entries in prop::collection::vec((
            prop::sample::select(vec!["in_proj_weight", "q_proj_weight", "self.key.weight", "out_proj.weight", "bias_k",
                "c_attn.weight", "k_proj.weight", "é"]),
            prop::sample::select(vec!["F32", "F16", "F64", "I64", "F4", "BOOL", "X"]),
            prop::collection::vec(prop_oneof![0..9u64, Just(u64::MAX), Just(1 << 61), Just((1 << 61) - 1)], 0..4),
            prop_oneof![0..100u64, any::<u64>()],
            prop_oneof![0..100u64, any::<u64>()],
        ), 0..5),
        data in 0..200usize,
    ) {
        let entries: Vec<String> = entries
            .iter()
            .map(|(name, dtype, shape, from, to)| {
                format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#)
            })
            .collect();
        survives(&config(4), &raw(&format!("{{{}}}", entries.join(",")), data), "");
    }

    #[test]
    fn random_shapes(
        shapes in prop::collection::vec(prop::collection::vec(0..7usize, 0..4), 16),
        present: [bool; 16],
        config in any_config(),
    ) {
        let names = ["in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
            "out_proj.weight", "out_proj.bias", "bias_k", "bias_v", "self.query.weight", "self.key.weight",
            "c_attn.weight", "c_attn.bias", "q_proj.weight", "k_proj.weight", "v_proj.weight"];
        let tensors: Vec<(&str, Dtype, &[usize])> = names
            .iter()
            .zip(&shapes)
            .zip(present)
            .filter(|(_, present)| *present)
            .map(|((name, shape), _)| (*name, Dtype::F16, shape.as_slice()))
            .collect();
        survives(&config, &zeros(&tensors), "");
    }

    #[test]
    fn mutated_files(
        config in any_config(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        in_header: bool,
        names in prop::sample::select(CheckpointNames::ALL.to_vec()),
    ) {
        let parameters = Parameters::init(&config, 0).unwrap();
        let file = parameters.to_safetensors(&config, "l", names, DType::F16);
        prop_assume!(file.is_ok());
        let mut file = file.unwrap();
        let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        for (at, byte) in changes {
            let end = if in_header { header } else { file.len() };
            file[at.index(end)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        survives(&config, &file, "l");
    }
}
