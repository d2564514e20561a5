//! Bad input: each kind gets an `Err` of its own kind that names the numbers, nothing is recorded, and the device
//! stays usable.

use half::f16;
use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionOutputs, Causal, DType, Error, Gpu, KvLengths,
    Linear, Mask, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs,
    NeedWeights, Parameters, Result, Tensor, Wanted,
};
use proptest::prelude::*;

use crate::{
    device::{default_gpu, open, open_default},
    support::{self, Numbers, download, gpu},
};

/// What the rows of the tables are made from: two devices, and a call that fits.
struct Bench {
    gpu: Gpu,
    other: Gpu,
    good: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
}

type Encoder<'a> = &'a mut multihead::wgpu::CommandEncoder;

/// One kind of bad input: its name, the kind of error, what the message must contain, and the call.
struct Row {
    name: &'static str,
    kind: fn(&Error) -> bool,
    holds: &'static [&'static str],
    call: fn(&Bench, Encoder) -> Result<()>,
}

macro_rules! row {
    ($name:literal, $kind:ident $holds:expr, $call:expr) => {
        Row {
            name: $name,
            kind: |error| matches!(error, Error::$kind { .. }),
            holds: &$holds,
            call: $call,
        }
    };
}

impl Bench {
    fn new(gpu: Gpu, other: Gpu) -> Self {
        let tensor = |shape: &[usize]| Tensor::zeros(&gpu, DType::F32, shape).unwrap();
        Self {
            good: Attention::new(&gpu, AttentionOptions::new().scale(1.0)).unwrap(),
            query: tensor(&[2, 4, 3, 8]),
            key: tensor(&[2, 2, 5, 8]),
            value: tensor(&[2, 2, 5, 6]),
            output: tensor(&[2, 4, 3, 6]),
            gpu,
            other,
        }
    }

    fn zeros(&self, shape: &[usize]) -> Tensor {
        Tensor::zeros(&self.gpu, DType::F32, shape).unwrap()
    }

    fn typed(&self, dtype: DType, shape: &[usize]) -> Tensor {
        Tensor::zeros(&self.gpu, dtype, shape).unwrap()
    }

    fn inputs(&self) -> AttentionInputs<'_> {
        AttentionInputs::new(&self.query, &self.key, &self.value)
    }

    fn keep(&self, shape: &[usize]) -> Mask {
        Mask::keep(self.typed(DType::Bool, shape)).unwrap()
    }

    /// Records a call with default options.
    fn attend(&self, encoder: Encoder, inputs: &AttentionInputs, outputs: &AttentionOutputs) -> Result<()> {
        self.attend_with(AttentionOptions::new(), encoder, inputs, outputs)
    }

    fn attend_with(
        &self,
        options: AttentionOptions,
        encoder: Encoder,
        inputs: &AttentionInputs,
        outputs: &AttentionOutputs,
    ) -> Result<()> {
        Attention::new(&self.gpu, options)?.record(encoder, inputs, outputs)
    }

    /// Records the call that fits with other options.
    fn option(&self, options: AttentionOptions, encoder: Encoder) -> Result<()> {
        self.attend_with(
            options,
            encoder,
            &self.inputs(),
            &AttentionOutputs::new(&self.output),
        )
    }

    fn buffer(&self, size: u64, usage: multihead::wgpu::BufferUsages) -> multihead::wgpu::Buffer {
        buffer(&self.gpu, size, usage)
    }

    fn layer(&self, config: MultiHeadAttentionConfig) -> MultiHeadAttention {
        MultiHeadAttention::seeded(&self.gpu, config, 1).unwrap()
    }

    /// Records a layer call with embed_dim 8 and 2 heads.
    fn forward(&self, encoder: Encoder, inputs: &MultiHeadInputs, output: &Tensor) -> Result<()> {
        self.layer(MultiHeadAttentionConfig::new(8, 2)).record(
            encoder,
            inputs,
            &MultiHeadOutputs::new(output),
        )
    }

    /// A call whose answer is known: weights 1/4 and 3/4 of the values 0 and 4.
    fn check_usable(&self) -> Result<(), String> {
        let upload = |values: &[f32], rows| Tensor::upload(&self.gpu, values, &[1, 1, rows, 1]);
        let answer = (|| {
            let query = upload(&[1.0], 1)?;
            let key = upload(&[0.0, 3f32.ln()], 2)?;
            let value = upload(&[0.0, 4.0], 2)?;
            let inputs = AttentionInputs::new(&query, &key, &value);
            self.good.run(&inputs, Wanted::output())?.output.download::<f32>()
        })();
        match answer {
            Ok(values) if (values[0] - 3.0).abs() < 1e-5 => Ok(()),
            other => Err(format!("afterwards a good call gave {other:?} instead of 3")),
        }
    }

    fn check(&self, row: &Row) -> Result<(), String> {
        let before = self.gpu.dispatches();
        let mut encoder = self.gpu.encoder();
        let answer = (row.call)(self, &mut encoder);
        let recorded = self.gpu.dispatches() - before;
        let mut faults = Vec::new();
        match answer {
            Ok(()) => faults.push("was accepted".to_owned()),
            Err(error) => {
                let text = error.to_string();
                if !(row.kind)(&error) {
                    faults.push(format!("has the wrong kind: {error:?}"));
                }
                for part in row.holds {
                    if !text.contains(part) {
                        faults.push(format!("does not say {part:?}: {text}"));
                    }
                }
            }
        }
        if recorded != 0 {
            faults.push(format!("recorded {recorded} dispatches"));
        }
        if let Err(error) = self.gpu.submit(encoder) {
            faults.push(format!("left an encoder that does not submit: {error}"));
        }
        faults.extend(self.check_usable().err());
        if faults.is_empty() {
            return Ok(());
        }
        Err(format!("{}: {}", row.name, faults.join("; ")))
    }
}

fn buffer(gpu: &Gpu, size: u64, usage: multihead::wgpu::BufferUsages) -> multihead::wgpu::Buffer {
    gpu.device().create_buffer(&multihead::wgpu::BufferDescriptor {
        label: None,
        size,
        usage,
        mapped_at_creation: false,
    })
}

/// Runs every row and reports all that fail.
fn check_all(bench: &Bench, rows: &[Row]) {
    let failures: Vec<String> = rows.iter().filter_map(|row| bench.check(row).err()).collect();
    assert!(
        failures.is_empty(),
        "{} of {} rows:\n{}",
        failures.len(),
        rows.len(),
        failures.join("\n")
    );
}

fn operator_rows() -> Vec<Row> {
    vec![
        row!("query of 3 axes", Shape ["[4, 3, 8]", "[B, H, Lq, D]"], |b, e| {
            let query = b.zeros(&[4, 3, 8]);
            b.attend(e, &AttentionInputs::new(&query, &b.key, &b.value), &AttentionOutputs::new(&b.output))
        }),
        row!("key of 2 axes", Shape ["key", "[5, 8]"], |b, e| {
            let key = b.zeros(&[5, 8]);
            b.attend(e, &AttentionInputs::new(&b.query, &key, &b.value), &AttentionOutputs::new(&b.output))
        }),
        row!("key of another batch", Shape ["key", "[3, 2, 5, 8]", "[2, 2, 5, 8]"], |b, e| {
            let key = b.zeros(&[3, 2, 5, 8]);
            b.attend(e, &AttentionInputs::new(&b.query, &key, &b.value), &AttentionOutputs::new(&b.output))
        }),
        row!("key of another head size", Shape ["key", "[2, 2, 5, 7]", "[2, 2, 5, 8]"], |b, e| {
            let key = b.zeros(&[2, 2, 5, 7]);
            b.attend(e, &AttentionInputs::new(&b.query, &key, &b.value), &AttentionOutputs::new(&b.output))
        }),
        row!("fewer values than keys", Shape ["value", "[2, 2, 4, 6]", "[2, 2, 5, 6]"], |b, e| {
            let value = b.zeros(&[2, 2, 4, 6]);
            b.attend(e, &AttentionInputs::new(&b.query, &b.key, &value), &AttentionOutputs::new(&b.output))
        }),
        row!("values of other heads", Shape ["value", "[2, 4, 5, 6]", "[2, 2, 5, 6]"], |b, e| {
            let value = b.zeros(&[2, 4, 5, 6]);
            b.attend(e, &AttentionInputs::new(&b.query, &b.key, &value), &AttentionOutputs::new(&b.output))
        }),
        row!("heads that do not divide", Shape ["4 query heads", "3 key/value heads"], |b, e| {
            let (key, value) = (b.zeros(&[2, 3, 5, 8]), b.zeros(&[2, 3, 5, 6]));
            b.attend(e, &AttentionInputs::new(&b.query, &key, &value), &AttentionOutputs::new(&b.output))
        }),
        row!("no key heads", Shape ["4 query heads", "0 key/value heads"], |b, e| {
            let (key, value) = (b.zeros(&[2, 0, 5, 8]), b.zeros(&[2, 0, 5, 6]));
            b.attend(e, &AttentionInputs::new(&b.query, &key, &value), &AttentionOutputs::new(&b.output))
        }),
        row!("past keys of another head size", Shape ["past key", "[2, 2, 3, 7]", "[2, 2, 3, 8]"], |b, e| {
            let (key, value) = (b.zeros(&[2, 2, 3, 7]), b.zeros(&[2, 2, 3, 6]));
            b.attend(e, &b.inputs().past(&key, &value), &AttentionOutputs::new(&b.output))
        }),
        row!("past values of another length", Shape ["past value", "[2, 2, 2, 6]", "[2, 2, 3, 6]"], |b, e| {
            let (key, value) = (b.zeros(&[2, 2, 3, 8]), b.zeros(&[2, 2, 2, 6]));
            b.attend(e, &b.inputs().past(&key, &value), &AttentionOutputs::new(&b.output))
        }),
        row!("output of another shape", Shape ["output", "[2, 4, 3, 5]", "[2, 4, 3, 6]", "[2, 3, 24]"], |b, e| {
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.zeros(&[2, 4, 3, 5])))
        }),
        row!("merged output of another shape", Shape ["output", "[2, 4, 18]", "[2, 3, 24]"], |b, e| {
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.zeros(&[2, 4, 18])))
        }),
        row!("lse of another shape", Shape ["lse", "[2, 4, 5]", "[2, 4, 3]"], |b, e| {
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).lse(&b.zeros(&[2, 4, 5])))
        }),
        row!("lse of f16", DType ["lse", "F16", "F32"], |b, e| {
            let lse = b.typed(DType::F16, &[2, 4, 3]);
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).lse(&lse))
        }),
        row!("weights of another shape", Shape ["weights", "[2, 4, 5, 3]", "[2, 4, 3, 5]"], |b, e| {
            let weights = b.zeros(&[2, 4, 5, 3]);
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).weights(&weights))
        }),
        row!("weights with gaps", Shape ["weights", "strides [75, 15, 5, 1]", "contiguous"], |b, e| {
            let weights = b.zeros(&[2, 5, 3, 5]).slice(1, 0..4)?;
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).weights(&weights))
        }),
        row!("mean weights of another shape", Shape ["mean_weights", "[2, 5, 3]", "[2, 3, 5]"], |b, e| {
            let mean = b.zeros(&[2, 5, 3]);
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).mean_weights(&mean))
        }),
        row!("present key without room", Shape ["present_key", "[2, 2, 5, 8]", "[2, 2, 8, 8]"], |b, e| {
            let (key, value) = (b.zeros(&[2, 2, 3, 8]), b.zeros(&[2, 2, 3, 6]));
            let (new_key, new_value) = (b.zeros(&[2, 2, 5, 8]), b.zeros(&[2, 2, 8, 6]));
            let outputs = AttentionOutputs::new(&b.output).present(&new_key, &new_value);
            b.attend(e, &b.inputs().past(&key, &value), &outputs)
        }),
        row!("present value of another type", DType ["present_value", "F16", "F32"], |b, e| {
            let (key, value) = (b.zeros(&[2, 2, 5, 8]), b.typed(DType::F16, &[2, 2, 5, 6]));
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).present(&key, &value))
        }),
        row!("mask that does not broadcast", Shape ["mask", "[4, 5]", "[2, 4, 3, 5]"], |b, e| {
            b.attend(e, &b.inputs().mask(&b.keep(&[4, 5])), &AttentionOutputs::new(&b.output))
        }),
        row!("mask with too many keys", Shape ["mask", "[3, 128]", "[2, 4, 3, 5]"], |b, e| {
            b.attend(e, &b.inputs().mask(&b.keep(&[3, 128])), &AttentionOutputs::new(&b.output))
        }),
        row!("mask with too few keys", Shape ["mask", "[3, 4]", "with_short_keys"], |b, e| {
            b.attend(e, &b.inputs().mask(&b.keep(&[3, 4])), &AttentionOutputs::new(&b.output))
        }),
        row!("mask with batch times heads in one axis", Shape ["mask", "[8, 3, 5]", "[2, 4, 3, 5]"], |b, e| {
            b.attend(e, &b.inputs().mask(&b.keep(&[8, 3, 5])), &AttentionOutputs::new(&b.output))
        }),
        row!("float tensor as a boolean mask", DType ["F32", "Bool", "Mask::bias"], |b, _| {
            Mask::keep(b.zeros(&[3, 5])).map(|_| ())
        }),
        row!("integer tensor as a boolean mask", DType ["U32", "Bool"], |b, _| {
            Mask::ignore(b.typed(DType::U32, &[3, 5])).map(|_| ())
        }),
        row!("boolean tensor as a float mask", DType ["Bool", "F32 or F16"], |b, _| {
            Mask::bias(b.typed(DType::Bool, &[3, 5])).map(|_| ())
        }),
        row!("float key mask", DType ["key_mask", "boolean", "[B, 1, 1, Lk]"], |b, e| {
            let mask = Mask::bias(b.zeros(&[2, 5])).unwrap();
            b.attend(e, &b.inputs().key_mask(&mask), &AttentionOutputs::new(&b.output))
        }),
        row!("key mask of another shape", Shape ["key_mask", "[2, 3]", "[2, 5]"], |b, e| {
            b.attend(e, &b.inputs().key_mask(&b.keep(&[2, 3])), &AttentionOutputs::new(&b.output))
        }),
        row!("key mask without a batch", Shape ["key_mask", "[5]", "[2, 5]"], |b, e| {
            b.attend(e, &b.inputs().key_mask(&b.keep(&[5])), &AttentionOutputs::new(&b.output))
        }),
        row!("a length beyond the keys", Shape ["6", "5 keys"], |b, e| {
            let lengths = KvLengths::new(&b.gpu, &[5, 6]).unwrap();
            b.attend(e, &b.inputs().kv_lengths(&lengths), &AttentionOutputs::new(&b.output))
        }),
        row!("too many lengths", Shape ["[3]", "batch of 2"], |b, e| {
            let lengths = KvLengths::new(&b.gpu, &[1, 2, 3]).unwrap();
            b.attend(e, &b.inputs().kv_lengths(&lengths), &AttentionOutputs::new(&b.output))
        }),
        row!("a length that no axis has", Shape ["536870913", "536870912"], |b, _| {
            KvLengths::new(&b.gpu, &[(1 << 29) + 1]).map(|_| ())
        }),
        row!("float lengths", DType ["F32", "U32"], |b, _| {
            KvLengths::from_tensor(b.zeros(&[2])).map(|_| ())
        }),
        row!("lengths of two axes", Shape["[2, 1]"], |b, _| {
            KvLengths::from_tensor(b.typed(DType::U32, &[2, 1])).map(|_| ())
        }),
        row!("lengths with past keys", Option ["kv_lengths", "past"], |b, e| {
            let lengths = KvLengths::new(&b.gpu, &[5, 5]).unwrap();
            let (key, value) = (b.zeros(&[2, 2, 3, 8]), b.zeros(&[2, 2, 3, 6]));
            let inputs = b.inputs().past(&key, &value).kv_lengths(&lengths);
            b.attend(e, &inputs, &AttentionOutputs::new(&b.output))
        }),
        row!("sinks of another number", Shape ["sinks", "[3]", "[4]"], |b, e| {
            b.attend(e, &b.inputs().sinks(&b.zeros(&[3])), &AttentionOutputs::new(&b.output))
        }),
        row!("sinks of f16", DType ["sinks", "F16", "F32"], |b, e| {
            b.attend(e, &b.inputs().sinks(&b.typed(DType::F16, &[4])), &AttentionOutputs::new(&b.output))
        }),
        row!("integer queries", DType ["U32", "F32", "F16"], |b, e| {
            let query = b.typed(DType::U32, &[2, 4, 3, 8]);
            b.attend(e, &AttentionInputs::new(&query, &b.key, &b.value), &AttentionOutputs::new(&b.output))
        }),
        row!("boolean keys", DType ["Bool", "F32", "F16"], |b, e| {
            let key = b.typed(DType::Bool, &[2, 2, 5, 8]);
            b.attend(e, &AttentionInputs::new(&b.query, &key, &b.value), &AttentionOutputs::new(&b.output))
        }),
        row!("integer output", DType ["U32", "F32", "F16"], |b, e| {
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.typed(DType::U32, &[2, 4, 3, 6])))
        }),
        row!("query of another device", WrongDevice["query"], |b, e| {
            let query = Tensor::zeros(&b.other, DType::F32, &[2, 4, 3, 8]).unwrap();
            b.attend(
                e,
                &AttentionInputs::new(&query, &b.key, &b.value),
                &AttentionOutputs::new(&b.output),
            )
        }),
        row!("mask of another device", WrongDevice["mask"], |b, e| {
            let mask = Mask::keep_from(&b.other, &[true; 15], &[3, 5]).unwrap();
            b.attend(e, &b.inputs().mask(&mask), &AttentionOutputs::new(&b.output))
        }),
        row!("lengths of another device", WrongDevice["kv_lengths"], |b, e| {
            let lengths = KvLengths::new(&b.other, &[1, 2]).unwrap();
            b.attend(
                e,
                &b.inputs().kv_lengths(&lengths),
                &AttentionOutputs::new(&b.output),
            )
        }),
        row!("output of another device", WrongDevice["output"], |b, e| {
            let output = Tensor::zeros(&b.other, DType::F32, &[2, 4, 3, 6]).unwrap();
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&output))
        }),
        row!("one buffer as value and output", Overlap ["output", "value", "buffer"], |b, e| {
            let both = b.zeros(&[2, 4, 3, 6]);
            let (key, value) = (b.zeros(&[2, 4, 3, 8]), &both);
            b.attend(e, &AttentionInputs::new(&b.query, &key, value), &AttentionOutputs::new(&both))
        }),
        row!("ranges of one buffer as query and output", Overlap ["output", "query", "buffer"], |b, e| {
            let usage = multihead::wgpu::BufferUsages::STORAGE;
            let whole = b.buffer(4096, usage);
            let query = Tensor::from_buffer(&b.gpu, &whole, 0, DType::F32, &[2, 4, 3, 8])?;
            let output = Tensor::from_buffer(&b.gpu, &whole, 2048, DType::F32, &[2, 4, 3, 6])?;
            b.attend(e, &AttentionInputs::new(&query, &b.key, &b.value), &AttentionOutputs::new(&output))
        }),
        row!("mask and output in one buffer", Overlap ["output", "mask", "buffer"], |b, e| {
            let whole = b.buffer(4096, multihead::wgpu::BufferUsages::STORAGE);
            let mask = Mask::keep(Tensor::from_buffer(&b.gpu, &whole, 0, DType::Bool, &[3, 5])?)?;
            let output = Tensor::from_buffer(&b.gpu, &whole, 2048, DType::F32, &[2, 4, 3, 6])?;
            b.attend(e, &b.inputs().mask(&mask), &AttentionOutputs::new(&output))
        }),
        row!("two outputs in one buffer", Overlap ["weights", "lse", "buffer"], |b, e| {
            let whole = b.zeros(&[200]);
            let lse = whole.slice(0, 0..24)?.reshape(&[2, 4, 3])?;
            let weights = whole.slice(0, 64..184)?.reshape(&[2, 4, 3, 5])?;
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&b.output).lse(&lse).weights(&weights))
        }),
        row!("output that overlaps itself", Overlap ["output", "[2, 4, 3, 6]", "[18, 0, 6, 1]"], |b, e| {
            let output = b.zeros(&[2, 1, 3, 6]).broadcast_to(&[2, 4, 3, 6])?;
            b.attend(e, &b.inputs(), &AttentionOutputs::new(&output))
        }),
        row!("softcap of 0", Option["softcap = 0"], |b, e| b
            .option(AttentionOptions::new().softcap(0.0), e)),
        row!("negative softcap", Option["softcap = -3"], |b, e| {
            b.option(AttentionOptions::new().softcap(-3.0), e)
        }),
        row!("softcap of NaN", Option["softcap = NaN"], |b, e| {
            b.option(AttentionOptions::new().softcap(f32::NAN), e)
        }),
        row!("infinite softcap", Option["softcap = inf"], |b, e| {
            b.option(AttentionOptions::new().softcap(f32::INFINITY), e)
        }),
        row!("infinite scale", Option["scale = inf"], |b, e| {
            b.option(AttentionOptions::new().scale(f32::INFINITY), e)
        }),
        row!("scale of NaN", Option["scale = NaN"], |b, e| b
            .option(AttentionOptions::new().scale(f32::NAN), e)),
        row!("too few slopes", Option ["3 ALiBi slopes", "4 query heads"], |b, e| {
            b.option(AttentionOptions::new().alibi([0.5, 0.25, 0.125]), e)
        }),
        row!("infinite slope", Option["slope inf"], |b, e| {
            b.option(AttentionOptions::new().alibi([0.5, f32::INFINITY, 0.1, 0.1]), e)
        }),
        row!("offset out of range", Option ["536870913", "536870912"], |b, e| {
            b.option(AttentionOptions::new().query_offset((1 << 29) + 1), e)
        }),
        row!("the smallest offset", Option ["-9223372036854775808", "536870912"], |b, e| {
            b.option(AttentionOptions::new().query_offset(i64::MIN), e)
        }),
        row!("more always visible keys than keys", Option ["6", "5 keys"], |b, e| {
            b.option(AttentionOptions::new().always_visible_keys(6), e)
        }),
        row!("mask over the always visible keys", Shape ["mask", "[3, 5]", "[2, 4, 3, 3]"], |b, e| {
            b.attend_with(
                AttentionOptions::new().always_visible_keys(2),
                e,
                &b.inputs().mask(&b.keep(&[3, 5])),
                &AttentionOutputs::new(&b.output),
            )
        }),
        row!("length over the always visible keys", Shape ["4", "3 keys"], |b, e| {
            let lengths = KvLengths::new(&b.gpu, &[4, 1]).unwrap();
            b.attend_with(
                AttentionOptions::new().always_visible_keys(2),
                e,
                &b.inputs().kv_lengths(&lengths),
                &AttentionOutputs::new(&b.output),
            )
        }),
        row!("an axis beyond 32-bit positions", Shape ["queries = 536870913", "536870912"], |b, e| {
            let query = b.zeros(&[0, 4, (1 << 29) + 1, 8]);
            let (key, value) = (b.zeros(&[0, 2, 5, 8]), b.zeros(&[0, 2, 5, 6]));
            let output = b.zeros(&[0, 4, (1 << 29) + 1, 6]);
            b.attend(e, &AttentionInputs::new(&query, &key, &value), &AttentionOutputs::new(&output))
        }),
        row!("more rows than 32 bits count", Shape ["query", "4294967296 rows", "4294967295"], |b, e| {
            let empty = b.zeros(&[1 << 16, 1 << 16, 1, 0]);
            b.attend(e, &AttentionInputs::new(&empty, &empty, &empty), &AttentionOutputs::new(&empty))
        }),
    ]
}

fn tensor_rows() -> Vec<Row> {
    use multihead::wgpu::BufferUsages;
    const STORAGE: BufferUsages = BufferUsages::STORAGE;
    vec![
        row!("too few values", Shape ["5 values", "[2, 3]", "6"], |b, _| {
            Tensor::upload(&b.gpu, &[0f32; 5], &[2, 3]).map(|_| ())
        }),
        row!("values for no axis", Shape ["2 values", "[]", "1"], |b, _| {
            Tensor::upload(&b.gpu, &[0u32; 2], &[]).map(|_| ())
        }),
        row!("5 axes", Shape ["[1, 1, 1, 1, 1]", "at most 4 axes"], |b, _| {
            Tensor::upload(&b.gpu, &[0f32], &[1; 5]).map(|_| ())
        }),
        row!("zeros of 5 axes", Shape ["[2, 2, 2, 2, 2]", "at most 4 axes"], |b, _| {
            Tensor::zeros(&b.gpu, DType::F16, &[2; 5]).map(|_| ())
        }),
        row!(
            "more elements than any buffer",
            Limit["max_buffer_size"],
            |b, _| { Tensor::zeros(&b.gpu, DType::F32, &[u32::MAX as usize; 2]).map(|_| ()) }
        ),
        row!("a buffer without STORAGE", Buffer ["STORAGE", "COPY_SRC"], |b, _| {
            let buffer = b.buffer(64, BufferUsages::COPY_SRC);
            Tensor::from_buffer(&b.gpu, &buffer, 0, DType::F32, &[4]).map(|_| ())
        }),
        row!("a buffer that is too small", Buffer ["[17]", "68", "64 bytes"], |b, _| {
            Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 0, DType::F32, &[17]).map(|_| ())
        }),
        row!("an offset that leaves too little", Buffer ["[15]", "byte 8", "68", "64 bytes"], |b, _| {
            Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 8, DType::F32, &[15]).map(|_| ())
        }),
        row!("an offset behind the end", Buffer ["128", "64 bytes"], |b, _| {
            Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 128, DType::F32, &[0]).map(|_| ())
        }),
        row!("strides that leave the buffer", Buffer ["[3, 2]", "[9, 1]", "80", "64 bytes"], |b, _| {
            let buffer = b.buffer(64, STORAGE);
            Tensor::from_buffer_strided(&b.gpu, &buffer, 0, DType::F32, &[3, 2], &[9, 1]).map(|_| ())
        }),
        row!("a size beyond 64 bits", Buffer ["18446744073709551615", "64 bytes"], |b, _| {
            let shape = [1 << 31, 1 << 31, 8];
            Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 0, DType::F32, &shape).map(|_| ())
        }),
        row!("an f32 at half a word", Buffer ["offset 6", "4"], |b, _| {
            Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 6, DType::F32, &[4]).map(|_| ())
        }),
        row!("an f16 at an odd byte", Buffer ["offset 3", "2"], |b, _| {
            Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 3, DType::F16, &[4]).map(|_| ())
        }),
        row!("a buffer of half words", Buffer ["6 bytes", "8"], |b, _| {
            Tensor::from_buffer(&b.gpu, &b.buffer(6, STORAGE), 0, DType::F16, &[3]).map(|_| ())
        }),
        row!("an axis beyond 32 bits", Shape ["[0, 4294967296]", "4294967295"], |b, _| {
            Tensor::zeros(&b.gpu, DType::F32, &[0, 1 << 32]).map(|_| ())
        }),
        row!("a stride too few", Shape ["[2, 3]", "[3]"], |b, _| {
            let buffer = b.buffer(64, STORAGE);
            Tensor::from_buffer_strided(&b.gpu, &buffer, 0, DType::F32, &[2, 3], &[3]).map(|_| ())
        }),
        row!(
            "a buffer of another device",
            WrongDevice["the device of the same Gpu"],
            |b, _| {
                let buffer = buffer(&b.other, 64, STORAGE);
                Tensor::from_buffer(&b.gpu, &buffer, 0, DType::F32, &[4]).map(|_| ())
            }
        ),
        row!("a destroyed buffer", WrongDevice["still exist"], |b, _| {
            let buffer = b.buffer(64, STORAGE);
            buffer.destroy();
            Tensor::from_buffer(&b.gpu, &buffer, 0, DType::F32, &[4]).map(|_| ())
        }),
        row!(
            "a buffer destroyed after it was wrapped",
            Wgpu["destroyed"],
            |b, e| {
                let buffer = b.buffer(1024, STORAGE);
                let query = Tensor::from_buffer(&b.gpu, &buffer, 0, DType::F32, &[2, 4, 3, 8])?;
                buffer.destroy();
                b.attend(
                    e,
                    &AttentionInputs::new(&query, &b.key, &b.value),
                    &AttentionOutputs::new(&b.output),
                )
            }
        ),
        row!("download as another type", DType ["F16", "F32"], |b, _| {
            b.zeros(&[3]).download::<f16>().map(|_| ())
        }),
        row!("download of floats as bytes", DType ["Bool", "F32"], |b, _| {
            b.zeros(&[3]).download::<u8>().map(|_| ())
        }),
        row!("download without COPY_SRC", Buffer["COPY_SRC"], |b, _| {
            let tensor = Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 0, DType::F32, &[4])?;
            tensor.download::<f32>().map(|_| ())
        }),
        row!("async download without COPY_SRC", Buffer["COPY_SRC"], |b, _| {
            let tensor = Tensor::from_buffer(&b.gpu, &b.buffer(64, STORAGE), 0, DType::F32, &[4])?;
            pollster::block_on(tensor.download_async::<f32>()).map(|_| ())
        }),
        row!("heads that do not divide a row", Shape ["8", "3 heads"], |b, _| {
            b.zeros(&[2, 5, 8]).split_heads(3).map(|_| ())
        }),
        row!("no heads", Shape ["8", "0 heads"], |b, _| b.zeros(&[2, 5, 8]).split_heads(0).map(|_| ())),
        row!("split_heads of 4 axes", Shape["[2, 5, 8, 1]"], |b, _| {
            b.zeros(&[2, 5, 8, 1]).split_heads(2).map(|_| ())
        }),
        row!("merge_heads of 3 axes", Shape["[2, 5, 8]"], |b, _| b
            .zeros(&[2, 5, 8])
            .merge_heads()
            .map(|_| ())),
        row!("heads that do not follow each other", Shape ["40 elements apart", "8 entries"], |b, _| {
            b.zeros(&[2, 3, 5, 8]).merge_heads().map(|_| ())
        }),
        row!("heads that merge beyond any size", Shape ["4611686018427387904", "4294967295"], |b, _| {
            b.zeros(&[0, 1 << 31, 0, 1 << 31]).merge_heads().map(|_| ())
        }),
        row!("an axis twice", Shape ["[0, 0]", "[2, 3]"], |b, _| b.zeros(&[2, 3]).permute(&[0, 0]).map(|_| ())),
        row!("an axis too few", Shape ["[1]", "[2, 3]"], |b, _| b.zeros(&[2, 3]).permute(&[1]).map(|_| ())),
        row!("slice of no axis", Shape ["axis 2", "[2, 3]"], |b, _| b.zeros(&[2, 3]).slice(2, 0..1).map(|_| ())),
        row!("slice beyond the axis", Shape ["1..4", "[2, 3]"], |b, _| b.zeros(&[2, 3]).slice(1, 1..4).map(|_| ())),
        row!("slice backwards", Shape ["2..1", "[2, 3]"], |b, _| {
            #[allow(clippy::reversed_empty_ranges)]
            b.zeros(&[2, 3]).slice(1, 2..1).map(|_| ())
        }),
        row!("reshape to another size", Shape ["[2, 3]", "[7]"], |b, _| b.zeros(&[2, 3]).reshape(&[7]).map(|_| ())),
        row!("reshape of a transposed view", Shape ["[3, 2]", "[1, 3]", "contiguous"], |b, _| {
            b.zeros(&[2, 3]).permute(&[1, 0])?.reshape(&[6]).map(|_| ())
        }),
        row!("broadcast of an axis that is not 1", Shape ["[2, 3]", "[4, 3]"], |b, _| {
            b.zeros(&[2, 3]).broadcast_to(&[4, 3]).map(|_| ())
        }),
        row!("broadcast to fewer axes", Shape ["[2, 3]", "[3]"], |b, _| {
            b.zeros(&[2, 3]).broadcast_to(&[3]).map(|_| ())
        }),
        row!("broadcast to 5 axes", Shape ["[1, 1, 1, 2, 3]", "4 axes"], |b, _| {
            b.zeros(&[2, 3]).broadcast_to(&[1, 1, 1, 2, 3]).map(|_| ())
        }),
    ]
}

fn layer_rows() -> Vec<Row> {
    vec![
        row!("weight of one axis", Shape ["weight", "[6]", "[out, in]"], |b, _| {
            Linear::new(b.zeros(&[6]), None).map(|_| ())
        }),
        row!("integer weight", DType["U32"], |b, _| Linear::new(
            b.typed(DType::U32, &[6, 4]),
            None
        )
        .map(|_| ())),
        row!("transposed weight", Shape ["weight", "[1, 6]", "contiguous"], |b, _| {
            Linear::new(b.zeros(&[4, 6]).permute(&[1, 0])?, None).map(|_| ())
        }),
        row!("bias of another size", Shape ["bias", "[5]", "[6]"], |b, _| {
            Linear::new(b.zeros(&[6, 4]), Some(b.zeros(&[5]))).map(|_| ())
        }),
        row!("bias of another device", WrongDevice["bias"], |b, _| {
            let bias = Tensor::zeros(&b.other, DType::F32, &[6]).unwrap();
            Linear::new(b.zeros(&[6, 4]), Some(bias)).map(|_| ())
        }),
        row!("x of another width", Shape ["x", "[3, 5]", "[L, 4]"], |b, e| {
            let linear = Linear::new(b.zeros(&[6, 4]), None)?;
            linear.record(e, &b.zeros(&[3, 5]), &b.zeros(&[3, 6]))
        }),
        row!("x of one axis", Shape ["x", "[4]"], |b, e| {
            Linear::new(b.zeros(&[6, 4]), None)?.record(e, &b.zeros(&[4]), &b.zeros(&[6]))
        }),
        row!("projection into another shape", Shape ["output", "[3, 5]", "[3, 6]"], |b, e| {
            Linear::new(b.zeros(&[6, 4]), None)?.record(e, &b.zeros(&[3, 4]), &b.zeros(&[3, 5]))
        }),
        row!("boolean x", DType ["x", "Bool"], |b, e| {
            Linear::new(b.zeros(&[6, 4]), None)?.record(e, &b.typed(DType::Bool, &[3, 4]), &b.zeros(&[3, 6]))
        }),
        row!("boolean projection", DType ["output", "Bool"], |b, e| {
            Linear::new(b.zeros(&[6, 4]), None)?.record(e, &b.zeros(&[3, 4]), &b.typed(DType::Bool, &[3, 6]))
        }),
        row!("integer x without rows", DType ["x", "U32"], |b, _| {
            Linear::new(b.zeros(&[6, 4]), None)?.run(&b.typed(DType::U32, &[0, 4])).map(|_| ())
        }),
        row!("x of another device", WrongDevice["x"], |b, e| {
            let x = Tensor::zeros(&b.other, DType::F32, &[3, 4]).unwrap();
            Linear::new(b.zeros(&[6, 4]), None)?.record(e, &x, &b.zeros(&[3, 6]))
        }),
        row!("projection onto its weight", Overlap ["output", "weight", "buffer"], |b, e| {
            let weight = b.zeros(&[4, 4]);
            Linear::new(weight.clone(), None)?.record(e, &b.zeros(&[4, 4]), &weight)
        }),
        row!("projection that overlaps itself", Overlap ["[3, 6]", "[0, 1]"], |b, e| {
            let output = b.zeros(&[1, 6]).broadcast_to(&[3, 6])?;
            Linear::new(b.zeros(&[6, 4]), None)?.record(e, &b.zeros(&[3, 4]), &output)
        }),
        row!("embed_dim that does not divide", Option ["512", "7"], |b, _| {
            MultiHeadAttention::seeded(&b.gpu, MultiHeadAttentionConfig::new(512, 7), 1).map(|_| ())
        }),
        row!("a layer without heads", Option ["8", "num_heads = 0"], |b, _| {
            MultiHeadAttention::seeded(&b.gpu, MultiHeadAttentionConfig::new(8, 0), 1).map(|_| ())
        }),
        row!("a layer without width", Option["embed_dim = 0"], |b, _| {
            MultiHeadAttention::seeded(&b.gpu, MultiHeadAttentionConfig::new(0, 1), 1).map(|_| ())
        }),
        row!("kdim of 0", Option["kdim = 0"], |b, _| {
            MultiHeadAttention::seeded(&b.gpu, MultiHeadAttentionConfig::new(8, 2).kdim(0), 1).map(|_| ())
        }),
        row!("parameters of integers", Option ["U32", "F16"], |b, _| {
            let config = MultiHeadAttentionConfig::new(8, 2).dtype(DType::U32);
            MultiHeadAttention::seeded(&b.gpu, config, 1).map(|_| ())
        }),
        row!(
            "always visible keys of a layer",
            Option["always_visible_keys = 3"],
            |b, _| {
                let options = AttentionOptions::new().always_visible_keys(3);
                let config = MultiHeadAttentionConfig::new(8, 2).attention(options);
                MultiHeadAttention::seeded(&b.gpu, config, 1).map(|_| ())
            }
        ),
        row!("slopes for other heads", Option ["3 ALiBi slopes", "2 query heads"], |b, _| {
            let options = AttentionOptions::new().alibi([0.1, 0.2, 0.3]);
            let config = MultiHeadAttentionConfig::new(8, 2).attention(options);
            MultiHeadAttention::seeded(&b.gpu, config, 1).map(|_| ())
        }),
        row!("query of another width", Shape ["query", "[2, 3, 9]", "8"], |b, e| {
            let x = b.zeros(&[2, 3, 9]);
            b.forward(e, &MultiHeadInputs::new(&x), &b.zeros(&[2, 3, 9]))
        }),
        row!("query of one axis", Shape ["query", "[8]"], |b, e| {
            let x = b.zeros(&[8]);
            b.forward(e, &MultiHeadInputs::new(&x), &b.zeros(&[8]))
        }),
        row!("query with a batch, key without", Shape ["key", "[5, 8]", "[2, 5, 8]"], |b, e| {
            let (x, key) = (b.zeros(&[2, 3, 8]), b.zeros(&[5, 8]));
            b.forward(e, &MultiHeadInputs::new(&x).key_value(&key, &key), &b.zeros(&[2, 3, 8]))
        }),
        row!("key with a batch, query without", Shape ["key", "[1, 5, 8]", "[5, 8]"], |b, e| {
            let (x, key) = (b.zeros(&[3, 8]), b.zeros(&[1, 5, 8]));
            b.forward(e, &MultiHeadInputs::new(&x).key_value(&key, &key), &b.zeros(&[3, 8]))
        }),
        row!("key of another batch for a layer", Shape ["key", "[3, 5, 8]", "[2, 5, 8]"], |b, e| {
            let (x, key) = (b.zeros(&[2, 3, 8]), b.zeros(&[3, 5, 8]));
            b.forward(e, &MultiHeadInputs::new(&x).key_value(&key, &key), &b.zeros(&[2, 3, 8]))
        }),
        row!("value of another length", Shape ["value", "[2, 4, 8]", "[2, 5, 8]"], |b, e| {
            let (x, key, value) = (b.zeros(&[2, 3, 8]), b.zeros(&[2, 5, 8]), b.zeros(&[2, 4, 8]));
            b.forward(e, &MultiHeadInputs::new(&x).key_value(&key, &value), &b.zeros(&[2, 3, 8]))
        }),
        row!("key that is not kdim wide", Shape ["key", "[2, 3, 8]", "kdim 6"], |b, e| {
            let x = b.zeros(&[2, 3, 8]);
            let layer = b.layer(MultiHeadAttentionConfig::new(8, 2).kdim(6));
            let output = b.zeros(&[2, 3, 8]);
            layer.record(e, &MultiHeadInputs::new(&x), &MultiHeadOutputs::new(&output))
        }),
        row!("integer activations", DType ["query", "U32"], |b, e| {
            let x = b.typed(DType::U32, &[2, 3, 8]);
            b.forward(e, &MultiHeadInputs::new(&x), &b.zeros(&[2, 3, 8]))
        }),
        row!("integer output of a layer", DType ["output", "U32"], |b, e| {
            let x = b.zeros(&[2, 3, 8]);
            b.forward(e, &MultiHeadInputs::new(&x), &b.typed(DType::U32, &[2, 3, 8]))
        }),
        row!("output without a batch", Shape ["output", "[3, 8]", "[1, 3, 8]"], |b, e| {
            let x = b.zeros(&[1, 3, 8]);
            b.forward(e, &MultiHeadInputs::new(&x), &b.zeros(&[3, 8]))
        }),
        row!("layer output onto its input", Overlap ["output", "query", "buffer"], |b, e| {
            let x = b.zeros(&[2, 3, 8]);
            b.forward(e, &MultiHeadInputs::new(&x), &x)
        }),
        row!("layer output that overlaps itself", Overlap ["[2, 3, 8]", "[0, 8, 1]"], |b, e| {
            let x = b.zeros(&[2, 3, 8]);
            let output = b.zeros(&[1, 3, 8]).broadcast_to(&[2, 3, 8])?;
            b.forward(e, &MultiHeadInputs::new(&x), &output)
        }),
        row!("padding mask without a batch", Shape ["[3]", "[2, 3]"], |b, e| {
            let (x, mask) = (b.zeros(&[2, 3, 8]), b.keep(&[3]));
            b.forward(e, &MultiHeadInputs::new(&x).key_padding_mask(&mask), &b.zeros(&[2, 3, 8]))
        }),
        row!("padding mask of another length", Shape ["[4]", "3"], |b, e| {
            let (x, mask) = (b.zeros(&[3, 8]), b.keep(&[4]));
            b.forward(e, &MultiHeadInputs::new(&x).key_padding_mask(&mask), &b.zeros(&[3, 8]))
        }),
        row!("float padding mask", DType["boolean"], |b, e| {
            let (x, mask) = (b.zeros(&[2, 3, 8]), Mask::bias(b.zeros(&[2, 3]))?);
            b.forward(
                e,
                &MultiHeadInputs::new(&x).key_padding_mask(&mask),
                &b.zeros(&[2, 3, 8]),
            )
        }),
        row!("attention mask of batch times heads", Shape ["[4, 3, 3]", "[2, 2, 3, 3]"], |b, e| {
            let (x, mask) = (b.zeros(&[2, 3, 8]), b.keep(&[4, 3, 3]));
            b.forward(e, &MultiHeadInputs::new(&x).attn_mask(&mask), &b.zeros(&[2, 3, 8]))
        }),
        row!("attention mask over the learned key", Shape ["[3, 4]", "[2, 2, 3, 3]"], |b, e| {
            let (x, mask) = (b.zeros(&[2, 3, 8]), b.keep(&[3, 4]));
            let layer = b.layer(MultiHeadAttentionConfig::new(8, 2).add_bias_kv(true));
            let output = b.zeros(&[2, 3, 8]);
            layer.record(e, &MultiHeadInputs::new(&x).attn_mask(&mask), &MultiHeadOutputs::new(&output))
        }),
        row!("lengths beyond the sequence", Shape ["4", "3 keys"], |b, e| {
            let (x, lengths) = (b.zeros(&[2, 3, 8]), KvLengths::new(&b.gpu, &[3, 4])?);
            b.forward(e, &MultiHeadInputs::new(&x).kv_lengths(&lengths), &b.zeros(&[2, 3, 8]))
        }),
        row!("layer weights without the learned key", Shape ["weights", "[2, 2, 3, 3]", "[2, 2, 3, 4]"], |b, e| {
            let x = b.zeros(&[2, 3, 8]);
            let layer = b.layer(MultiHeadAttentionConfig::new(8, 2).add_bias_kv(true));
            let (output, weights) = (b.zeros(&[2, 3, 8]), b.zeros(&[2, 2, 3, 3]));
            layer.record(e, &MultiHeadInputs::new(&x), &MultiHeadOutputs::new(&output).weights(&weights))
        }),
        row!("activations of another device", WrongDevice["query"], |b, e| {
            let x = Tensor::zeros(&b.other, DType::F32, &[2, 3, 8]).unwrap();
            b.forward(e, &MultiHeadInputs::new(&x), &b.zeros(&[2, 3, 8]))
        }),
        row!("host data of another size", Shape ["5 values", "[1, 8]"], |b, _| {
            let layer = b.layer(MultiHeadAttentionConfig::new(8, 2));
            layer.forward_host(&[0.0; 5], &[1, 8]).map(|_| ())
        }),
        row!("a key of endless length", Shape ["4294967296", "4294967295"], |b, e| {
            let (x, key) = (b.zeros(&[0, 3, 8]), b.zeros(&[0, u32::MAX as usize, 8]));
            let layer = b.layer(MultiHeadAttentionConfig::new(8, 2).add_bias_kv(true));
            let output = b.zeros(&[0, 3, 8]);
            layer.record(e, &MultiHeadInputs::new(&x).key_value(&key, &key), &MultiHeadOutputs::new(&output))
        }),
    ]
}

fn rows() -> Vec<Row> {
    let mut rows = operator_rows();
    rows.extend(tensor_rows());
    rows.extend(layer_rows());
    rows
}

#[test]
fn bad_input_is_refused_on_the_adapters_own_limits() {
    support::watch_log();
    let same = open(gpu().features(), gpu().limits().clone());
    check_all(&Bench::new(same, default_gpu().clone()), &rows());
}

#[test]
fn bad_input_is_refused_on_a_device_with_default_limits() {
    support::watch_log();
    let bench = Bench::new(open_default(), default_gpu().clone());
    check_all(&bench, &rows());

    let limits = [
        row!("weights beyond a binding", Limit ["weights", "134348832", "134217728", "max_storage_buffer_binding_size"], |b, e| {
            let x = b.zeros(&[1, 8, 2049, 1]);
            let (output, weights) = (b.zeros(&[1, 8, 2049, 1]), b.zeros(&[1, 8, 2049, 2049]));
            b.attend(e, &AttentionInputs::new(&x, &x, &x), &AttentionOutputs::new(&output).weights(&weights))
        }),
        row!("a tensor beyond a buffer", Limit ["268435472", "268435456", "max_buffer_size"], |b, _| {
            Tensor::zeros(&b.gpu, DType::F32, &[(1 << 26) + 1]).map(|_| ())
        }),
    ];
    check_all(&bench, &limits);
    // A small view of a large buffer fits.
    let large = bench.zeros(&[1, 1, (1 << 22) + 1, 8]);
    let view = large.slice(2, 1 << 22..(1 << 22) + 1).unwrap();
    let inputs = AttentionInputs::new(&view, &view, &view);
    let output = bench.good.run(&inputs, Wanted::output()).unwrap().output;
    assert_eq!(download(&output), [0.0; 8]);
}

/// NaN and infinity in weights and inputs are data: they are computed with, and touch what they should.
#[test]
fn numbers_that_are_not_finite_are_computed_not_refused() {
    let gpu = gpu();
    let weight = Tensor::upload(gpu, &[1.0, f32::NAN, 3.0, 4.0, f32::INFINITY, 0.5], &[3, 2]).unwrap();
    let linear = Linear::new(weight, None).unwrap();
    let x = Tensor::upload(gpu, &[1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let y = linear.run(&x).unwrap().download::<f32>().unwrap();
    assert!(
        !y[0].is_finite() && !y[2].is_finite() && !y[3].is_finite() && !y[5].is_finite(),
        "{y:?}"
    );
    assert_eq!([y[1], y[4]], [11.0, 25.0]);

    let config = MultiHeadAttentionConfig::new(4, 2);
    let mut parameters = Parameters::init(&config, 3).unwrap();
    parameters.out_proj_weight[5] = f32::NAN;
    parameters.q_proj_weight[0] = f32::INFINITY;
    let layer = MultiHeadAttention::new(gpu, config, &parameters).unwrap();
    let y = layer.forward_host(&[0.5; 12], &[1, 3, 4]).unwrap();
    assert!(
        y.iter().skip(1).step_by(4).all(|value| !value.is_finite()),
        "{y:?}"
    );

    // One NaN in query row 1 of head 0: that row alone.
    let mut numbers = Numbers::new(1);
    let shape = [1, 2, 3, 8];
    let mut values = numbers.normals(48);
    let key = Tensor::upload(gpu, &numbers.normals(48), &shape).unwrap();
    let attention = Attention::new(gpu, AttentionOptions::new()).unwrap();
    let run = |values: &[f32]| {
        let query = Tensor::upload(gpu, values, &shape).unwrap();
        let inputs = AttentionInputs::new(&query, &key, &key);
        download(&attention.run(&inputs, Wanted::output()).unwrap().output)
    };
    let clean = run(&values);
    values[8] = f32::NAN;
    let spoilt = run(&values);
    for (index, (spoilt, clean)) in spoilt.iter().zip(&clean).enumerate() {
        if (8..16).contains(&index) {
            assert!(!spoilt.is_finite(), "row 1 of head 0 hides the NaN: {spoilt}");
        } else {
            assert_eq!(spoilt.to_bits(), clean.to_bits(), "element {index}");
        }
    }
}

/// Sizes out of the numbers that calls are made of, mostly small.
fn axis(numbers: &mut Numbers) -> usize {
    const SIZES: [usize; 8] = [0, 1, 1, 2, 2, 3, 4, 5];
    SIZES[numbers.below(SIZES.len())]
}

/// A size that no memory holds, now and then.
fn any_axis(numbers: &mut Numbers) -> usize {
    const HUGE: [usize; 5] = [1 << 20, 1 << 29, (1 << 29) + 1, 1 << 33, usize::MAX];
    if numbers.chance(0.2) {
        HUGE[numbers.below(HUGE.len())]
    } else {
        axis(numbers)
    }
}

fn any_dtype(numbers: &mut Numbers) -> DType {
    const KINDS: [DType; 8] = [
        DType::F32,
        DType::F32,
        DType::F32,
        DType::F32,
        DType::F16,
        DType::F16,
        DType::Bool,
        DType::U32,
    ];
    KINDS[numbers.below(KINDS.len())]
}

/// The given shape, or with some chance another one.
fn near(numbers: &mut Numbers, shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if numbers.chance(0.08) {
        let at = numbers.below(shape.len());
        if let Some(size) = shape.get_mut(at) {
            *size = axis(numbers);
        }
    }
    if numbers.chance(0.02) {
        shape.pop();
    }
    if numbers.chance(0.02) {
        shape.insert(0, 1);
    }
    shape
}

/// A tensor of about that shape and mostly of f32, if there is one.
fn near_tensor(numbers: &mut Numbers, shape: &[usize]) -> Option<Tensor> {
    let dtype = if numbers.chance(0.8) {
        DType::F32
    } else {
        any_dtype(numbers)
    };
    let shape = near(numbers, shape);
    Tensor::zeros(gpu(), dtype, &shape).ok()
}

fn any_options(numbers: &mut Numbers, heads: usize) -> AttentionOptions {
    let mut options = AttentionOptions::new();
    let float =
        |numbers: &mut Numbers| [0.5, 2.0, 1e30, -1.0, 0.0, f32::NAN, f32::INFINITY][numbers.below(7)];
    if numbers.chance(0.2) {
        options.scale = Some(float(numbers));
    }
    if numbers.chance(0.2) {
        options.softcap = Some(float(numbers));
    }
    if numbers.chance(0.2) {
        options.alibi_slopes = Some(vec![
            float(numbers);
            near(numbers, &[heads]).first().copied().unwrap_or(0)
        ]);
    }
    options.causal = [Causal::None, Causal::TopLeft, Causal::BottomRight][numbers.below(3)];
    if numbers.chance(0.3) {
        options.window_left = Some([0, 3, u32::MAX][numbers.below(3)]);
        options.window_right = Some([0, 3, u32::MAX][numbers.below(3)]);
    }
    if numbers.chance(0.3) {
        options.query_offset = [1, -7, 1 << 29, i64::MAX, i64::MIN][numbers.below(5)];
    }
    if numbers.chance(0.2) {
        options.always_visible_keys = [1, 2, usize::MAX][numbers.below(3)];
    }
    options
}

fn any_mask(numbers: &mut Numbers, shape: [usize; 4]) -> Option<Mask> {
    let shape: Vec<usize> = shape
        .iter()
        .map(|&size| if numbers.chance(0.4) { 1 } else { size })
        .collect();
    let rank = numbers.below(5);
    let shape = near(numbers, &shape[4 - rank..]);
    let dtype = any_dtype(numbers);
    let tensor = Tensor::zeros(gpu(), dtype, &shape).ok()?;
    let mask = match numbers.below(3) {
        0 => Mask::keep(tensor),
        1 => Mask::ignore(tensor),
        _ => Mask::bias(tensor),
    }
    .ok()?;
    Some(if numbers.chance(0.3) {
        mask.with_short_keys()
    } else {
        mask
    })
}

/// How the calls of a property ended, so that it shows that it reached both ends.
#[derive(Default)]
struct Ends {
    accepted: std::cell::Cell<u32>,
    refused: std::cell::Cell<u32>,
}

impl Ends {
    fn count<T>(&self, result: &Result<T>) {
        let end = if result.is_ok() {
            &self.accepted
        } else {
            &self.refused
        };
        end.set(end.get() + 1);
    }
}

/// Throws `cases` seeds at `throw`; a panic fails the test and names the seed.
fn throw(cases: u32, throw: impl Fn(&mut Numbers, &Ends)) {
    let ends = Ends::default();
    let mut runner = proptest::test_runner::TestRunner::new(support::property(cases));
    let result = runner.run(&any::<u64>().no_shrink(), |seed| {
        throw(&mut Numbers::new(seed), &ends);
        Ok(())
    });
    assert!(result.is_ok(), "{result:?}");
    gpu().wait().unwrap();
    let (accepted, refused) = (ends.accepted.get(), ends.refused.get());
    assert!(
        accepted * 10 > cases && refused * 10 > cases,
        "{accepted} accepted, {refused} refused"
    );
}

#[test]
fn no_attention_call_panics() {
    throw(600, |numbers, ends| {
        let [batch, kv_heads, queries, keys, head_dim, value_dim] = std::array::from_fn(|_| axis(numbers));
        let heads = kv_heads * (1 + numbers.below(3));
        let options = any_options(numbers, heads);
        let Ok(attention) = Attention::new(gpu(), options) else {
            return ends.count::<()>(&Err(Error::Option(String::new())));
        };
        let Some((query, key, value)) = (|| {
            Some((
                near_tensor(numbers, &[batch, heads, queries, head_dim])?,
                near_tensor(numbers, &[batch, kv_heads, keys, head_dim])?,
                near_tensor(numbers, &[batch, kv_heads, keys, value_dim])?,
            ))
        })() else {
            return;
        };
        let mut inputs = AttentionInputs::new(&query, &key, &value);
        let past = numbers.chance(0.3).then(|| axis(numbers));
        let all_keys = keys + past.unwrap_or(0);
        let past = past.and_then(|past| {
            Some((
                near_tensor(numbers, &[batch, kv_heads, past, head_dim])?,
                near_tensor(numbers, &[batch, kv_heads, past, value_dim])?,
            ))
        });
        inputs.past = past.as_ref().map(|(key, value)| (key, value));
        let mask = numbers
            .chance(0.5)
            .then(|| any_mask(numbers, [batch, heads, queries, all_keys]))
            .flatten();
        inputs.mask = mask.as_ref();
        let key_mask = numbers
            .chance(0.2)
            .then(|| near_tensor(numbers, &[batch, all_keys]))
            .flatten()
            .and_then(|tensor| match tensor.dtype() {
                DType::Bool => Mask::keep(tensor).ok(),
                _ => Mask::ignore_from(gpu(), &vec![false; tensor.len()], tensor.shape()).ok(),
            });
        inputs.key_mask = key_mask.as_ref();
        let lengths = numbers.chance(0.2).then(|| {
            let count = near(numbers, &[batch]).first().copied().unwrap_or(0);
            let lengths: Vec<usize> = (0..count).map(|_| numbers.below(all_keys + 1)).collect();
            KvLengths::new(gpu(), &lengths).unwrap()
        });
        inputs.kv_lengths = lengths.as_ref();
        let sinks = numbers
            .chance(0.2)
            .then(|| near_tensor(numbers, &[heads]))
            .flatten();
        inputs.sinks = sinks.as_ref();
        let mut wanted = Wanted::output();
        (wanted.lse, wanted.weights) = (numbers.chance(0.5), numbers.chance(0.5));
        (wanted.mean_weights, wanted.present) = (numbers.chance(0.5), numbers.chance(0.5));
        ends.count(&attention.run(&inputs, wanted));
    });
}

#[test]
fn no_linear_call_panics() {
    throw(400, |numbers, ends| {
        let [batch, rows, inputs, outputs] = std::array::from_fn(|_| axis(numbers));
        let Some(weight) = near_tensor(numbers, &[outputs, inputs]) else {
            return;
        };
        let bias = numbers
            .chance(0.5)
            .then(|| near_tensor(numbers, &[outputs]))
            .flatten();
        let shape = if numbers.chance(0.5) {
            vec![rows, inputs]
        } else {
            vec![batch, rows, inputs]
        };
        let Some(x) = near_tensor(numbers, &shape) else {
            return;
        };
        ends.count(&Linear::new(weight, bias).and_then(|linear| linear.run(&x)));
    });
}

#[test]
fn no_layer_call_panics() {
    let layers: Vec<MultiHeadAttention> = [
        MultiHeadAttentionConfig::new(4, 2),
        MultiHeadAttentionConfig::new(4, 2).kdim(3).vdim(5).bias(false),
        MultiHeadAttentionConfig::new(4, 1)
            .add_bias_kv(true)
            .add_zero_attn(true),
        MultiHeadAttentionConfig::new(4, 4).dtype(DType::F16),
    ]
    .map(|config| MultiHeadAttention::seeded(gpu(), config, 1).unwrap())
    .into();
    throw(400, |numbers, ends| {
        let layer = &layers[numbers.below(layers.len())];
        let config = layer.config();
        let [batch, queries, keys] = std::array::from_fn(|_| axis(numbers));
        let batched = numbers.chance(0.7);
        let shape = |rows: usize, width: usize| {
            if batched {
                vec![batch, rows, width]
            } else {
                vec![rows, width]
            }
        };
        let self_attention = numbers.chance(0.5) && config.kdim == 4;
        let keys = if self_attention { queries } else { keys };
        let Some((query, key, value)) = (|| {
            Some((
                near_tensor(numbers, &shape(queries, 4))?,
                near_tensor(numbers, &shape(keys, config.kdim))?,
                near_tensor(numbers, &shape(keys, config.vdim))?,
            ))
        })() else {
            return;
        };
        let mut inputs = MultiHeadInputs::new(&query);
        if !self_attention {
            inputs = inputs.key_value(&key, &value);
        }
        let batch = if batched { batch } else { 1 };
        let mask = numbers
            .chance(0.4)
            .then(|| any_mask(numbers, [batch, config.num_heads, queries, keys]))
            .flatten();
        inputs.attn_mask = mask.as_ref();
        let padding_shape = if batched { vec![batch, keys] } else { vec![keys] };
        let padding = numbers.chance(0.3).then(|| {
            let shape = near(numbers, &padding_shape);
            Tensor::zeros(gpu(), DType::Bool, &shape)
                .and_then(Mask::ignore)
                .ok()
        });
        let padding = padding.flatten();
        inputs.key_padding_mask = padding.as_ref();
        let lengths = numbers.chance(0.2).then(|| {
            let lengths: Vec<usize> = (0..batch).map(|_| numbers.below(keys + 2)).collect();
            KvLengths::new(gpu(), &lengths).unwrap()
        });
        inputs.kv_lengths = lengths.as_ref();
        if numbers.chance(0.5) {
            inputs.causal = Some([Causal::TopLeft, Causal::BottomRight][numbers.below(2)]);
        }
        let weights = [NeedWeights::No, NeedWeights::Averaged, NeedWeights::PerHead][numbers.below(3)];
        ends.count(&layer.forward(&inputs, weights));
    });
}

#[test]
fn no_tensor_constructor_or_view_panics() {
    use multihead::wgpu::BufferUsages;
    let buffers: Vec<multihead::wgpu::Buffer> = [0, 4, 6, 16, 256, 1024]
        .into_iter()
        .flat_map(|size| {
            [
                BufferUsages::STORAGE | BufferUsages::COPY_SRC,
                BufferUsages::COPY_SRC,
            ]
            .map(|usage| (size, usage))
        })
        .map(|(size, usage)| buffer(gpu(), size, usage))
        .collect();
    throw(2000, |numbers, ends| {
        let rank = numbers.below(6);
        let shape: Vec<usize> = (0..rank).map(|_| any_axis(numbers)).collect();
        let other: Vec<usize> = (0..numbers.below(6)).map(|_| any_axis(numbers)).collect();
        let dtype = any_dtype(numbers);
        let tensor = match numbers.below(4) {
            0 => Tensor::upload(gpu(), &vec![0f32; numbers.below(7)], &shape),
            // Not of the sizes that fit and would be slow to make.
            1 if shape.iter().all(|&size| !(1 << 20..=1 << 30).contains(&size)) || shape.contains(&0) => {
                Tensor::zeros(gpu(), dtype, &shape)
            }
            _ => {
                let strides: Vec<usize> = (0..rank).map(|_| any_axis(numbers)).collect();
                let buffer = &buffers[numbers.below(buffers.len())];
                let offset = [0, 1, 2, 4, 6, 8, 64, u64::MAX, u64::MAX - 3][numbers.below(9)];
                if numbers.chance(0.5) {
                    Tensor::from_buffer(gpu(), buffer, offset, dtype, &shape)
                } else {
                    Tensor::from_buffer_strided(gpu(), buffer, offset, dtype, &shape, &strides)
                }
            }
        };
        ends.count(&tensor);
        let Ok(mut tensor) = tensor else { return };
        for _ in 0..4 {
            let start = any_axis(numbers);
            let view = match numbers.below(6) {
                0 => tensor.split_heads(any_axis(numbers)),
                1 => tensor.merge_heads(),
                2 => tensor.permute(&other),
                3 => tensor.slice(numbers.below(5), start..start.saturating_add(axis(numbers))),
                4 => tensor.reshape(&other),
                _ => tensor.broadcast_to(&other),
            };
            tensor = view.unwrap_or(tensor);
        }
        // A broadcast view may be of any size; only small ones are worth reading.
        if tensor.len() < 4096 {
            let _ = (
                tensor.download::<f32>(),
                tensor.download::<f16>(),
                tensor.download::<u8>(),
            );
        }
        let _ = (tensor.is_contiguous(), tensor.len(), tensor.is_empty());
        let _ = (Mask::bias(tensor.clone()), KvLengths::from_tensor(tensor));
    });
}
