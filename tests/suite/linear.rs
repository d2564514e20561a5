//! The projection against the reference: sizes around the tiles, views, element types.

use multihead::{DType, Error, Gpu, Linear, Tensor, reference};
use proptest::prelude::*;

use crate::{
    field::{all_rows, plain, same_bits},
    support::{self, Numbers, check_bound, download, gpu, halves, through_f16, wide},
};

/// One projection and how its tensors are stored.
#[derive(Debug, Clone, Copy)]
struct Case {
    batch: usize,
    rows: usize,
    inputs: usize,
    outputs: usize,
    x: DType,
    weight: DType,
    /// None: no bias.
    bias: Option<DType>,
    output: DType,
    /// `x` and `output` lie transposed, with gaps.
    strided: bool,
    seed: u64,
}

fn stored(values: Vec<f32>, dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F16 => through_f16(&values),
        _ => values,
    }
}

fn upload(gpu: &Gpu, values: &[f32], shape: &[usize], dtype: DType) -> Tensor {
    match dtype {
        DType::F16 => Tensor::upload(gpu, &halves(values), shape),
        _ => Tensor::upload(gpu, values, shape),
    }
    .unwrap()
}

/// A `[B, L, E]` view of memory `[B, E, L + 3]` whose gaps hold `gap`.
fn transposed(gpu: &Gpu, values: &[f32], [b, l, e]: [usize; 3], dtype: DType, gap: f32) -> (Tensor, Tensor) {
    let width = l + 3;
    let mut memory = vec![gap; b * e * width];
    for (at, &value) in values.iter().enumerate() {
        let (batch, row, dim) = (at / e / l, at / e % l, at % e);
        memory[(batch * e + dim) * width + row + 1] = value;
    }
    let whole = upload(gpu, &memory, &[b, e, width], dtype);
    let view = whole.slice(2, 1..1 + l).unwrap().permute(&[0, 2, 1]).unwrap();
    (whole, view)
}

impl Case {
    fn new(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self {
            batch: 1,
            rows,
            inputs,
            outputs,
            x: DType::F32,
            weight: DType::F32,
            bias: Some(DType::F32),
            output: DType::F32,
            strided: false,
            seed: 1,
        }
    }

    fn check(&self) -> Result<(), String> {
        let Self {
            batch,
            rows,
            inputs,
            outputs,
            ..
        } = *self;
        let mut numbers = Numbers::new(self.seed);
        let x = stored(numbers.normals(batch * rows * inputs), self.x);
        let weight = stored(numbers.normals(outputs * inputs), self.weight);
        let bias = self.bias.map(|dtype| stored(numbers.normals(outputs), dtype));
        let all_rows = batch * rows;
        let truth = reference::linear(
            &wide(&x),
            &wide(&weight),
            bias.as_deref().map(wide).as_deref(),
            all_rows,
            inputs,
            outputs,
        )
        .unwrap();
        let narrow = reference::linear(&x, &weight, bias.as_deref(), all_rows, inputs, outputs).unwrap();
        for (name, gpu) in [("", gpu()), ("plain device, ", plain())] {
            let bias = bias
                .as_ref()
                .zip(self.bias)
                .map(|(bias, dtype)| upload(gpu, bias, &[outputs], dtype));
            let linear = Linear::new(upload(gpu, &weight, &[outputs, inputs], self.weight), bias)
                .map_err(|error| error.to_string())?;
            let shapes = [[batch, rows, inputs], [batch, rows, outputs]];
            let unset = vec![-7.0; all_rows * outputs];
            let ((_, x), (whole, output)) = if self.strided {
                (
                    transposed(gpu, &x, shapes[0], self.x, f32::NAN),
                    transposed(gpu, &unset, shapes[1], self.output, -7.0),
                )
            } else {
                let x = upload(gpu, &x, &shapes[0], self.x);
                let output = upload(gpu, &unset, &shapes[1], self.output);
                ((x.clone(), x), (output.clone(), output))
            };
            let mut encoder = gpu.encoder();
            linear
                .record(&mut encoder, &x, &output)
                .map_err(|error| error.to_string())?;
            gpu.submit(encoder).unwrap();
            let got = download(&output);
            check_bound(
                &format!("{name}output"),
                &got,
                &narrow,
                &truth,
                self.output == DType::F16,
            )?;
            if self.strided {
                let memory = download(&whole);
                let gaps = memory
                    .iter()
                    .enumerate()
                    .filter(|(at, _)| !(1..=rows).contains(&(at % (rows + 3))));
                if let Some((at, value)) = gaps.into_iter().find(|(_, value)| **value != -7.0) {
                    return Err(format!("{name}element {at} of the gaps became {value}"));
                }
            }
        }
        Ok(())
    }

    fn row(self) -> (String, Result<(), String>) {
        (format!("{self:?}"), self.check())
    }
}

#[test]
fn sizes_around_the_tiles() {
    let sizes = [1, 2, 3, 4, 7, 8, 11, 12, 13, 23, 24, 25, 31, 32, 33, 63, 64, 65];
    let mut cases = Vec::new();
    for size in sizes {
        cases.push(Case::new(size, 5, 3));
        cases.push(Case::new(3, size, 5));
        cases.push(Case::new(5, 3, size));
        cases.push(Case::new(size, size, size));
        cases.push(Case {
            batch: 3,
            ..Case::new(size, 9, 66 - size)
        });
    }
    cases.push(Case::new(129, 257, 97));
    all_rows(cases.into_iter().map(Case::row));
}

#[test]
fn views_and_their_gaps() {
    let mut cases = Vec::new();
    for (batch, rows, inputs, outputs) in [
        (1, 1, 1, 1),
        (1, 13, 33, 17),
        (2, 12, 8, 32),
        (3, 5, 7, 65),
        (2, 65, 3, 2),
    ] {
        for output in [DType::F32, DType::F16] {
            cases.push(Case {
                batch,
                strided: true,
                output,
                ..Case::new(rows, inputs, outputs)
            });
        }
    }
    all_rows(cases.into_iter().map(Case::row));
}

#[test]
fn every_mix_of_element_types() {
    let types = [DType::F32, DType::F16];
    let mut cases = Vec::new();
    for x in types {
        for weight in types {
            for bias in [None, Some(DType::F32), Some(DType::F16)] {
                for output in types {
                    for strided in [false, true] {
                        cases.push(Case {
                            batch: 2,
                            x,
                            weight,
                            bias,
                            output,
                            strided,
                            ..Case::new(13, 19, 35)
                        });
                    }
                }
            }
        }
    }
    all_rows(cases.into_iter().map(Case::row));
}

#[test]
fn empty_axes() {
    let mut cases = Vec::new();
    for (batch, rows, inputs, outputs) in [
        (0, 3, 4, 5),
        (2, 0, 4, 5),
        (2, 3, 0, 5),
        (2, 3, 4, 0),
        (0, 0, 0, 0),
    ] {
        for bias in [None, Some(DType::F32), Some(DType::F16)] {
            cases.push(Case {
                batch,
                bias,
                ..Case::new(rows, inputs, outputs)
            });
        }
    }
    all_rows(cases.into_iter().map(Case::row));
}

#[test]
fn more_tiles_than_one_grid_axis_holds() {
    let case = Case {
        bias: None,
        ..Case::new(65536 * 12 + 7, 1, 1)
    };
    let x = Numbers::new(1).normals(case.rows);
    let linear = Linear::new(upload(gpu(), &[3.0], &[1, 1], DType::F32), None).unwrap();
    let y = linear
        .run(&upload(gpu(), &x, &[case.rows, 1], DType::F32))
        .unwrap();
    let expected: Vec<f32> = x.iter().map(|x| 3.0 * x).collect();
    assert!(same_bits(&download(&y), &expected));
}

/// `x I = x` and `x 0 + b = b`, bit for bit; a permuted identity permutes.
#[test]
fn the_identity_changes_nothing() {
    for gpu in [gpu(), plain()] {
        for size in [1, 5, 12, 32, 33, 70] {
            let x = Numbers::new(2).normals(17 * size);
            let input = upload(gpu, &x, &[17, size], DType::F32);
            let square = |one: &dyn Fn(usize) -> usize| {
                let weight: Vec<f32> = (0..size * size)
                    .map(|at| f32::from(at % size == one(at / size)))
                    .collect();
                upload(gpu, &weight, &[size, size], DType::F32)
            };
            let y = Linear::new(square(&|row| row), None)
                .unwrap()
                .run(&input)
                .unwrap();
            assert!(same_bits(&download(&y), &x));
            let y = Linear::new(square(&|row| size - 1 - row), None)
                .unwrap()
                .run(&input)
                .unwrap();
            let reversed: Vec<f32> = x.chunks(size).flat_map(|row| row.iter().rev().copied()).collect();
            assert!(same_bits(&download(&y), &reversed));
            let bias = Numbers::new(3).normals(size);
            let y = Linear::new(square(&|_| size), Some(upload(gpu, &bias, &[size], DType::F32)))
                .unwrap()
                .run(&input)
                .unwrap();
            assert!(same_bits(&download(&y), &bias.repeat(17)));
        }
    }
}

/// A NaN in one row of `x` reaches that row alone, in a weight that column alone.
#[test]
fn nan_stays_in_its_row_and_column() {
    let (rows, inputs, outputs) = (40, 21, 37);
    let mut numbers = Numbers::new(4);
    let (x, weight) = (numbers.normals(rows * inputs), numbers.normals(outputs * inputs));
    for gpu in [gpu(), plain()] {
        let run = |x: &[f32], weight: &[f32]| {
            let linear = Linear::new(upload(gpu, weight, &[outputs, inputs], DType::F32), None).unwrap();
            download(&linear.run(&upload(gpu, x, &[rows, inputs], DType::F32)).unwrap())
        };
        let clean = run(&x, &weight);
        for (row, input) in [(0, 0), (11, 20), (12, 3), (23, 7), (31, 8), (39, 20)] {
            let mut bad = x.clone();
            bad[row * inputs + input] = f32::NAN;
            for (at, (got, clean)) in run(&bad, &weight).iter().zip(&clean).enumerate() {
                let right = if at / outputs == row {
                    got.is_nan()
                } else {
                    got.to_bits() == clean.to_bits()
                };
                assert!(right, "x row {row}: {got} at {at}");
            }
            let column = row.min(outputs - 1);
            let mut bad = weight.clone();
            bad[column * inputs + input] = f32::NAN;
            for (at, (got, clean)) in run(&x, &bad).iter().zip(&clean).enumerate() {
                let right = if at % outputs == column {
                    got.is_nan()
                } else {
                    got.to_bits() == clean.to_bits()
                };
                assert!(right, "column {column}: {got} at {at}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let gpu = gpu();
    let zeros = |shape: &[usize]| Tensor::zeros(gpu, DType::F32, shape).unwrap();
    let square = zeros(&[4, 4]);
    let rows = [
        ("weight of one axis", Linear::new(zeros(&[4]), None).err()),
        (
            "bias of another length",
            Linear::new(zeros(&[4, 2]), Some(zeros(&[2]))).err(),
        ),
        (
            "weight that is a view",
            Linear::new(square.permute(&[1, 0]).unwrap(), None).err(),
        ),
        (
            "x of another width",
            Linear::new(zeros(&[4, 2]), None)
                .unwrap()
                .run(&zeros(&[3, 4]))
                .err(),
        ),
        (
            "x of one axis",
            Linear::new(zeros(&[4, 2]), None).unwrap().run(&zeros(&[2])).err(),
        ),
    ];
    for (name, error) in rows {
        assert!(matches!(error, Some(Error::Shape(_))), "{name}: {error:?}");
    }
    let linear = Linear::new(square, None).unwrap();
    let mut encoder = gpu.encoder();
    let (x, y) = (zeros(&[3, 4]), zeros(&[3, 5]));
    assert!(matches!(
        linear.record(&mut encoder, &x, &y),
        Err(Error::Shape(_))
    ));
    assert!(matches!(
        linear.record(&mut encoder, &x, &x),
        Err(Error::Overlap(_))
    ));
    let repeated = zeros(&[1, 4]).broadcast_to(&[3, 4]).unwrap();
    assert!(matches!(
        linear.record(&mut encoder, &x, &repeated),
        Err(Error::Overlap(_))
    ));
}

fn cases() -> impl Strategy<Value = Case> {
    let dtype = || prop_oneof![Just(DType::F32), Just(DType::F16)];
    let sizes = (0usize..4, 0usize..70, 0usize..70, 0usize..70);
    let types = (dtype(), dtype(), proptest::option::of(dtype()), dtype());
    (sizes, types, any::<bool>(), any::<u64>()).prop_map(|(sizes, types, strided, seed)| Case {
        batch: sizes.0,
        rows: sizes.1,
        inputs: sizes.2,
        outputs: sizes.3,
        x: types.0,
        weight: types.1,
        bias: types.2,
        output: types.3,
        strided,
        seed,
    })
}

proptest! {
    #![proptest_config(support::property(150))]

    /// Any sizes, element types and views agree with the reference.
    #[test]
    fn any_projection_agrees_with_the_reference(case in cases()) {
        case.check().map_err(TestCaseError::fail)?;
    }
}
