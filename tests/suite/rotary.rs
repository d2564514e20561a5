//! Rotary embedding against the reference: pairings, partial dimensions, positions, element types, views.

use half::f16;
use multihead::{
    DType, Error, Gpu, Rotary, RotaryOptions, RotaryPairing, RotaryPositions, RotaryScaling, Tensor,
    reference,
};
use proptest::prelude::*;

use crate::{
    field::{all_rows, plain, same_bits},
    support::{self, Numbers, check_bound, download, gpu, halves, through_f16, wide},
};

/// How a call gets its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Start,
    Starts,
    Ends,
    Each,
    /// Tables of `[B, L, R / 2]`.
    OwnTables,
}

#[derive(Debug, Clone)]
struct Case {
    shape: [usize; 4],
    options: RotaryOptions,
    kind: Kind,
    /// Positions of the tables.
    known: usize,
    input: DType,
    output: DType,
    tables: DType,
    /// `[B, L, H, D]` in memory.
    merged: bool,
    seed: u64,
}

impl Case {
    fn new(shape: [usize; 4], rotary_dim: usize) -> Self {
        Self {
            shape,
            options: RotaryOptions::new(rotary_dim),
            kind: Kind::Start,
            known: shape[2].max(1) + 40,
            input: DType::F32,
            output: DType::F32,
            tables: DType::F32,
            merged: false,
            seed: 1,
        }
    }

    fn check(&self) -> Result<(), String> {
        let [batch, heads, rows, size] = self.shape;
        let mut numbers = Numbers::new(self.seed);
        let mut x = numbers.normals(batch * heads * rows * size);
        if self.input == DType::F16 {
            x = through_f16(&x);
        }
        let pairs = self.options.rotary_dim / 2;
        let (mut wide_cos, mut wide_sin) =
            reference::rotary_tables::<f64>(&self.options, self.known).map_err(|error| error.to_string())?;
        let (mut cos, mut sin) = reference::rotary_tables::<f32>(&self.options, self.known).unwrap();
        if self.tables == DType::F16 {
            (cos, sin) = (through_f16(&cos), through_f16(&sin));
            (wide_cos, wide_sin) = (wide(&cos), wide(&sin));
        }
        let room = self.known - rows;
        let starts: Vec<usize> = (0..batch).map(|_| numbers.below(room + 1)).collect();
        let first = starts.first().copied().unwrap_or(0);
        let positions: Vec<usize> = (0..batch * rows)
            .map(|at| {
                let (b, l) = (at / rows, at % rows);
                match self.kind {
                    Kind::Start => first + l,
                    Kind::Starts | Kind::Ends => starts[b] + l,
                    Kind::Each | Kind::OwnTables => numbers.below(self.known),
                }
            })
            .collect();
        let pairing = self.options.pairing;
        let dim = self.options.rotary_dim;
        let truth = reference::rotary(
            &wide(&x),
            self.shape,
            &wide_cos,
            &wide_sin,
            &positions,
            dim,
            pairing,
        )
        .map_err(|error| error.to_string())?;
        let narrow = reference::rotary(&x, self.shape, &cos, &sin, &positions, dim, pairing).unwrap();

        for (name, gpu) in [("", gpu()), ("plain device, ", plain())] {
            let tables = |values: &[f32]| {
                if self.kind == Kind::OwnTables {
                    let rows_of: Vec<f32> = positions
                        .iter()
                        .flat_map(|&position| values[position * pairs..][..pairs].iter().copied())
                        .collect();
                    upload(gpu, &rows_of, &[batch, rows, pairs], self.tables)
                } else {
                    upload(gpu, values, &[self.known, pairs], self.tables)
                }
            };
            let rotary = if self.tables == DType::F32 && self.kind != Kind::OwnTables {
                Rotary::new(gpu, self.options, self.known)
            } else {
                Rotary::from_tables(pairing, tables(&cos), tables(&sin))
            }
            .map_err(|error| error.to_string())?;
            let words = |values: Vec<usize>, shape: &[usize]| {
                let words: Vec<u32> = values.iter().map(|&value| value as u32).collect();
                Tensor::upload(gpu, &words, shape).unwrap()
            };
            let at = match self.kind {
                Kind::Ends => words(starts.iter().map(|start| start + rows).collect(), &[batch]),
                Kind::Each => words(positions.clone(), &[batch, rows]),
                _ => words(starts.clone(), &[batch]),
            };
            let positions = match self.kind {
                Kind::Start => RotaryPositions::Start(first),
                Kind::Starts => RotaryPositions::Starts(&at),
                Kind::Ends => RotaryPositions::Ends(&at),
                Kind::Each => RotaryPositions::Each(&at),
                Kind::OwnTables => RotaryPositions::Start(0),
            };
            let unset = vec![-7.0; x.len()];
            let (input, output) = if self.merged {
                let merged = reference::merge_heads(&x, batch, rows, heads, size).unwrap();
                let shape = [batch, rows, heads * size];
                (
                    upload(gpu, &merged, &shape, self.input)
                        .split_heads(heads)
                        .unwrap(),
                    upload(gpu, &unset, &shape, self.output)
                        .split_heads(heads)
                        .unwrap(),
                )
            } else {
                (
                    upload(gpu, &x, &self.shape, self.input),
                    upload(gpu, &unset, &self.shape, self.output),
                )
            };
            let mut encoder = gpu.encoder();
            rotary
                .record(&mut encoder, &input, positions, &output)
                .map_err(|error| error.to_string())?;
            gpu.submit(encoder).unwrap();
            let half = self.output == DType::F16;
            check_bound(
                &format!("{name}output"),
                &download(&output),
                &narrow,
                &truth,
                half,
            )?;
        }
        Ok(())
    }
}

fn upload(gpu: &Gpu, values: &[f32], shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::F16 => Tensor::upload(gpu, &halves(values), shape),
        _ => Tensor::upload(gpu, values, shape),
    }
    .unwrap()
}

fn cases() -> impl Strategy<Value = Case> {
    let dtype = || prop_oneof![Just(DType::F32), Just(DType::F16)];
    let kind = prop_oneof![
        Just(Kind::Start),
        Just(Kind::Starts),
        Just(Kind::Ends),
        Just(Kind::Each),
        Just(Kind::OwnTables)
    ];
    (
        (
            0usize..4,
            0usize..4,
            0usize..20,
            1usize..20,
            0usize..9,
            0usize..70,
        ),
        (dtype(), dtype(), dtype(), any::<bool>(), any::<bool>()),
        kind,
        any::<u64>(),
    )
        .prop_map(|(sizes, kinds, kind, seed)| {
            let (batch, heads, rows, pairs, behind, room) = sizes;
            let (input, output, tables, merged, interleaved) = kinds;
            let mut case = Case::new([batch, heads, rows, 2 * pairs + behind], 2 * pairs);
            if interleaved {
                case.options = case.options.pairing(RotaryPairing::Interleaved);
            }
            case.known = rows.max(1) + room;
            (case.input, case.output, case.tables) = (input, output, tables);
            case.merged = merged && heads > 0;
            // Tables without an element are refused.
            case.kind = if kind == Kind::OwnTables && batch * rows == 0 {
                Kind::Start
            } else {
                kind
            };
            case.seed = seed;
            case
        })
}

proptest! {
    #![proptest_config(support::property(120))]

    #[test]
    fn any_rotation_agrees_with_the_reference(case in cases()) {
        case.check().map_err(TestCaseError::fail)?;
    }
}

#[test]
fn rotations_of_usual_models_agree_with_the_reference() {
    let llama3 = RotaryScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    let mut rows = Vec::new();
    for (name, options) in [
        ("GPT-NeoX", RotaryOptions::new(24)),
        (
            "GPT-J",
            RotaryOptions::new(64).pairing(RotaryPairing::Interleaved),
        ),
        ("Llama 2", RotaryOptions::new(128)),
        (
            "Llama 3.2",
            RotaryOptions::new(64).base(500_000.0).scaling(llama3),
        ),
        (
            "Qwen 2",
            RotaryOptions::new(64)
                .base(1e6)
                .scaling(RotaryScaling::Linear { factor: 4.0 }),
        ),
    ] {
        let head = if name == "GPT-NeoX" {
            96
        } else {
            options.rotary_dim
        };
        for dtype in [DType::F32, DType::F16] {
            let mut case = Case::new([2, 3, 33, head], options.rotary_dim);
            case.options = options;
            case.known = 12_000;
            case.kind = Kind::Ends;
            (case.input, case.output) = (dtype, dtype);
            rows.push((format!("{name} {dtype:?}"), case.check()));
        }
    }
    all_rows(rows);
}

/// The angle of a far position is right to the last digits of f32: by a formula of the test's own.
#[test]
fn far_positions_keep_their_digits() {
    let far = 1_000_003usize;
    let rotary = Rotary::new(gpu(), RotaryOptions::new(2), far + 1).unwrap();
    let x = Tensor::upload(gpu(), &[1.0f32, 0.0], &[1, 1, 1, 2]).unwrap();
    let got = download(&rotary.run(&x, RotaryPositions::Start(far)).unwrap());
    let angle = far as f64;
    assert!((f64::from(got[0]) - angle.cos()).abs() < 1e-7, "{got:?}");
    assert!((f64::from(got[1]) - angle.sin()).abs() < 1e-7, "{got:?}");
    let scaled = RotaryOptions::new(8)
        .base(100.0)
        .scaling(RotaryScaling::Linear { factor: 2.0 });
    let rotary = Rotary::new(gpu(), scaled, 50).unwrap();
    let x = Tensor::upload(gpu(), &[1.0f32; 8], &[1, 1, 1, 8]).unwrap();
    let got = download(&rotary.run(&x, RotaryPositions::Start(49)).unwrap());
    for pair in 0..4 {
        let angle = 49.0 * 100f64.powf(-(pair as f64) / 4.0) / 2.0;
        assert!((f64::from(got[pair]) - (angle.cos() - angle.sin())).abs() < 1e-6);
        assert!((f64::from(got[4 + pair]) - (angle.cos() + angle.sin())).abs() < 1e-6);
    }
}

/// What makes it an embedding: the dot product of two rotated rows depends on the distance of their positions.
#[test]
fn dot_products_depend_on_distances_alone() {
    let mut numbers = Numbers::new(3);
    let [q, k] = [0; 2].map(|_| Tensor::upload(gpu(), &numbers.normals(64), &[1, 1, 1, 64]).unwrap());
    for pairing in [RotaryPairing::HalfSplit, RotaryPairing::Interleaved] {
        let rotary = Rotary::new(gpu(), RotaryOptions::new(64).pairing(pairing), 5000).unwrap();
        let dot = |m: usize, n: usize| {
            let q = download(&rotary.run(&q, RotaryPositions::Start(m)).unwrap());
            let k = download(&rotary.run(&k, RotaryPositions::Start(n)).unwrap());
            q.iter().zip(&k).map(|(a, b)| f64::from(a * b)).sum::<f64>()
        };
        let near = dot(17, 5);
        assert!((near - dot(4012, 4000)).abs() < 1e-4 && (near - dot(17, 6)).abs() > 1e-3);
    }
}

/// Positions of the GPU's own beyond the tables count as the last; rows before the first one disturb no other.
#[test]
fn positions_beyond_the_tables_are_the_last() {
    let rotary = Rotary::new(gpu(), RotaryOptions::new(4), 10).unwrap();
    let row = [1.0f32, 2.0, 3.0, 4.0];
    let x = Tensor::upload(gpu(), &row.repeat(3), &[1, 1, 3, 4]).unwrap();
    let at = |position| {
        let x = Tensor::upload(gpu(), &row, &[1, 1, 1, 4]).unwrap();
        download(&rotary.run(&x, RotaryPositions::Start(position)).unwrap())
    };
    let ids = Tensor::upload(gpu(), &[9u32, 10, u32::MAX], &[1, 3]).unwrap();
    let got = download(&rotary.run(&x, RotaryPositions::Each(&ids)).unwrap());
    assert_eq!(got, at(9).repeat(3));
    let ends = Tensor::upload(gpu(), &[2u32], &[1]).unwrap();
    let got = download(&rotary.run(&x, RotaryPositions::Ends(&ends)).unwrap());
    assert_eq!(got[4..], [at(0), at(1)].concat());
    assert!(got[..4].iter().all(|x| x.is_finite()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let gpu = gpu();
    let options = RotaryOptions::new(4);
    for (options, positions, says) in [
        (RotaryOptions::new(0), 8, "rotary_dim = 0"),
        (RotaryOptions::new(5), 8, "rotary_dim = 5"),
        (options.base(0.0), 8, "base = 0"),
        (options.base(f64::NAN), 8, "NaN"),
        (
            options.scaling(RotaryScaling::Linear { factor: 0.0 }),
            8,
            "factor",
        ),
        (
            options.scaling(RotaryScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 4.0,
                high_freq_factor: 4.0,
                original_max_positions: 8192,
            }),
            8,
            "high_freq_factor = 4",
        ),
        (options, 0, "at least one position"),
    ] {
        let error = Rotary::new(gpu, options, positions).unwrap_err();
        assert!(
            matches!(error, Error::Option(_)) && error.to_string().contains(says),
            "{error}"
        );
    }
    let zeros = |shape: &[usize]| Tensor::zeros(gpu, DType::F32, shape).unwrap();
    let pairing = RotaryPairing::HalfSplit;
    assert!(Rotary::from_tables(pairing, zeros(&[8, 2]), zeros(&[8, 3])).is_err());
    assert!(Rotary::from_tables(pairing, zeros(&[8]), zeros(&[8])).is_err());
    let half = Tensor::upload(gpu, &[f16::ONE; 16], &[8, 2]).unwrap();
    assert!(matches!(
        Rotary::from_tables(pairing, zeros(&[8, 2]), half),
        Err(Error::DType(_))
    ));
    let turned = zeros(&[2, 8]).permute(&[1, 0]).unwrap();
    assert!(Rotary::from_tables(pairing, turned.clone(), turned).is_err());

    let rotary = Rotary::new(gpu, options, 8).unwrap();
    let own = Rotary::from_tables(pairing, zeros(&[3, 8, 2]), zeros(&[3, 8, 2])).unwrap();
    let other = Gpu::from_device(gpu.device(), gpu.queue()).unwrap();
    let input = zeros(&[2, 3, 4, 6]);
    let output = zeros(&[2, 3, 4, 6]);
    let words = |shape: &[usize]| Tensor::zeros(gpu, DType::U32, shape).unwrap();
    let (one_each, wrong, floats) = (words(&[2]), words(&[4]), zeros(&[2]));
    let mut encoder = gpu.encoder();
    let start = RotaryPositions::Start;
    for (rotary, input, positions, output, says) in [
        (&rotary, &zeros(&[2, 4, 18]), start(0), &output, "split_heads"),
        (&rotary, &input, start(0), &zeros(&[2, 3, 4, 7]), "as the input"),
        (&rotary, &input, start(5), &output, "position 9"),
        (&rotary, &input, start(usize::MAX), &output, "hold 8"),
        (
            &rotary,
            &zeros(&[2, 3, 4, 3]),
            start(0),
            &zeros(&[2, 3, 4, 3]),
            "heads have 3",
        ),
        (&rotary, &input, start(0), &input, "one buffer"),
        (
            &rotary,
            &input,
            RotaryPositions::Starts(&wrong),
            &output,
            "expected [2]",
        ),
        (
            &rotary,
            &input,
            RotaryPositions::Each(&one_each),
            &output,
            "expected [2, 4]",
        ),
        (&rotary, &input, RotaryPositions::Ends(&floats), &output, "U32"),
        (&own, &input, start(0), &output, "for a batch of 2"),
        (&rotary, &words(&[2, 3, 4, 6]), start(0), &output, "F32 or F16"),
        (
            &rotary,
            &input,
            start(0),
            &Tensor::zeros(&other, DType::F32, &[2, 3, 4, 6]).unwrap(),
            "another device",
        ),
    ] {
        let error = rotary.record(&mut encoder, input, positions, output).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    }
    let empty = zeros(&[0, 3, 4, 6]);
    rotary
        .record(&mut encoder, &empty, start(0), &zeros(&[0, 3, 4, 6]))
        .unwrap();
    gpu.submit(encoder).unwrap();
}

/// Where one binding does not hold a tensor, the call is cut; the bits are the same.
#[test]
fn small_bindings_cut_the_call_and_change_no_bit() {
    let mut limits = gpu().limits().clone();
    limits.max_storage_buffer_binding_size = 4 << 10;
    let small = crate::device::open(gpu().features(), limits);
    let sizes = [3, 2, 90, 16];
    let values = Numbers::new(5).normals(sizes.iter().product());
    let words: Vec<u32> = (0..3 * 90).map(|i| i * 7 % 100).collect();
    for kind in ["start", "starts", "ends", "each", "tables of each"] {
        let results = [gpu(), &small].map(|gpu| {
            let mut rotary = Rotary::new(gpu, RotaryOptions::new(6).base(50.0), 200).unwrap();
            if kind == "tables of each" {
                let tables = [11, 12].map(|seed| {
                    let table = Numbers::new(seed).normals(3 * 90 * 3);
                    Tensor::upload(gpu, &table, &[3, 90, 3]).unwrap()
                });
                let [cos, sin] = tables;
                rotary = Rotary::from_tables(RotaryPairing::HalfSplit, cos, sin).unwrap();
            }
            let merged = Tensor::upload(gpu, &values, &[3, 90, 32]).unwrap();
            let input = merged.split_heads(2).unwrap();
            let each = Tensor::upload(gpu, &words, &[3, 90]).unwrap();
            let of_sequences = Tensor::upload(gpu, &[100u32, 90, 95], &[3]).unwrap();
            let positions = match kind {
                "start" => RotaryPositions::Start(9),
                "starts" => RotaryPositions::Starts(&of_sequences),
                "ends" => RotaryPositions::Ends(&of_sequences),
                "each" => RotaryPositions::Each(&each),
                _ => RotaryPositions::Start(0),
            };
            let before = gpu.dispatches();
            let output = rotary.run(&input, positions).unwrap();
            assert!(gpu.dispatches() - before >= 1);
            download(&output)
        });
        assert!(same_bits(&results[0], &results[1]), "{kind}");
    }
}
