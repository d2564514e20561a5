//! Packed sequences against the reference.

use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionPath, Causal, CuSeqlens, DType, Error, Gpu,
    PackedInputs, PackedOutputs, Tensor, Wanted, reference,
};
use proptest::prelude::*;

use crate::{
    device::open,
    support::{self, Numbers, check_bound, download, gpu, wide},
};

#[derive(Debug, Clone)]
struct Call {
    lengths: Vec<(usize, usize)>,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    value_dim: usize,
    options: AttentionOptions,
    sinks: bool,
    half: bool,
    seed: u64,
}

fn seams(lengths: impl Iterator<Item = usize>) -> Vec<usize> {
    std::iter::once(0)
        .chain(lengths.scan(0, |sum, length| {
            *sum += length;
            Some(*sum)
        }))
        .collect()
}

impl Call {
    fn check(&self, gpu: &Gpu) -> Result<(), String> {
        let mut numbers = Numbers::new(self.seed);
        let heads = self.kv_heads * self.group;
        let q = seams(self.lengths.iter().map(|lengths| lengths.0));
        let k = seams(self.lengths.iter().map(|lengths| lengths.1));
        let (tq, tk) = (q[q.len() - 1], k[k.len() - 1]);
        let mut draw = |count| {
            let values = numbers.normals(count);
            if self.half {
                support::through_f16(&values)
            } else {
                values
            }
        };
        let query = draw(tq * heads * self.head_dim);
        let key = draw(tk * self.kv_heads * self.head_dim);
        let value = draw(tk * self.kv_heads * self.value_dim);
        let sinks: Option<Vec<f32>> = self.sinks.then(|| numbers.normals(heads));
        fn truth<T: reference::Real>(
            call: &Call,
            [query, key, value]: [&[T]; 3],
            [q, k]: [&[usize]; 2],
            sinks: Option<&[f32]>,
        ) -> reference::PackedOutput<T> {
            reference::packed_attention(&reference::Packed {
                heads: call.kv_heads * call.group,
                kv_heads: call.kv_heads,
                head_dim: call.head_dim,
                value_dim: call.value_dim,
                options: &call.options,
                query,
                key,
                value,
                cu_seqlens_q: q,
                cu_seqlens_k: k,
                sinks,
            })
            .unwrap()
        }
        let exact = truth(
            self,
            [&wide(&query), &wide(&key), &wide(&value)],
            [&q, &k],
            sinks.as_deref(),
        );
        let narrow = truth(self, [&query, &key, &value], [&q, &k], sinks.as_deref());

        let upload = |values: &[f32], shape: &[usize]| {
            if self.half {
                Tensor::upload(gpu, &support::halves(values), shape)
            } else {
                Tensor::upload(gpu, values, shape)
            }
            .unwrap()
        };
        let query = upload(&query, &[tq, heads, self.head_dim]);
        let key = upload(&key, &[tk, self.kv_heads, self.head_dim]);
        let value = upload(&value, &[tk, self.kv_heads, self.value_dim]);
        let sinks = sinks.map(|sinks| Tensor::upload(gpu, &sinks, &[heads]).unwrap());
        let seams = CuSeqlens::new(gpu, &q, &k).unwrap();
        let mut inputs = PackedInputs::new(&query, &key, &value, &seams);
        inputs.sinks = sinks.as_ref();
        gpu.poison_scratch().unwrap();
        let attention = Attention::new(gpu, self.options.clone()).map_err(|error| error.to_string())?;
        let result = attention.run_packed(&inputs).map_err(|error| error.to_string())?;
        check_bound(
            "output",
            &download(&result.output),
            &narrow.output,
            &exact.output,
            self.half,
        )?;
        check_bound("lse", &download(&result.lse), &narrow.lse, &exact.lse, false)
    }
}

fn calls() -> impl Strategy<Value = Call> {
    let causal = prop_oneof![
        Just(Causal::None),
        Just(Causal::TopLeft),
        Just(Causal::BottomRight)
    ];
    let window = (
        prop_oneof![Just(None), (0u32..9).prop_map(Some)],
        prop_oneof![Just(None), (0u32..9).prop_map(Some)],
    );
    (
        prop::collection::vec((0usize..40, 0usize..50), 0..6),
        (1usize..3, 1usize..3, 1usize..40, 0usize..40),
        (
            causal,
            window,
            -5i64..20,
            any::<bool>(),
            prop_oneof![Just(None), Just(Some(4.0f32))],
        ),
        any::<[bool; 2]>(),
        any::<u64>(),
    )
        .prop_map(|(lengths, sizes, position, [sinks, half], seed)| {
            let (kv_heads, group, head_dim, value_dim) = sizes;
            let (causal, window, offset, alibi, softcap) = position;
            let mut options = AttentionOptions::new()
                .causal(causal)
                .window(window.0, window.1)
                .query_offset(offset);
            options.softcap = softcap;
            options.alibi_slopes = alibi.then(|| vec![0.25; kv_heads * group]);
            Call {
                lengths,
                kv_heads,
                group,
                head_dim,
                value_dim,
                options,
                sinks,
                half,
                seed,
            }
        })
}

proptest! {
    #![proptest_config(support::property(120))]

    #[test]
    fn any_packed_call_agrees_with_the_reference(call in calls()) {
        call.check(gpu()).map_err(TestCaseError::fail)?;
    }
}

/// Sequences too long for a binding, one by one and together.
#[test]
fn packed_calls_are_cut_by_sequence_rows_and_keys() {
    let mut limits = gpu().limits().clone();
    limits.max_storage_buffer_binding_size = 16 << 10;
    let gpu = open(gpu().features(), limits);
    for causal in [Causal::None, Causal::BottomRight] {
        let call = Call {
            lengths: vec![(3, 5), (70, 400), (0, 9), (9, 0), (200, 150), (1, 1)],
            kv_heads: 1,
            group: 2,
            head_dim: 16,
            value_dim: 8,
            options: AttentionOptions::new().causal(causal),
            sinks: true,
            half: false,
            seed: 7,
        };
        call.check(&gpu).unwrap();
        gpu.set_dispatch_work(50_000);
        call.check(&gpu).unwrap();
        gpu.set_dispatch_work(0);
    }
}

/// A packed batch computes what the padded one does, bit for bit.
#[test]
fn packed_equals_padded() {
    let gpu = gpu();
    let mut numbers = Numbers::new(11);
    let x = numbers.normals(2 * 37 * 2 * 16);
    let padded = Tensor::upload(gpu, &x, &[2, 37, 2, 16])
        .unwrap()
        .permute(&[0, 2, 1, 3])
        .unwrap();
    let packed = Tensor::upload(gpu, &x, &[2 * 37, 2, 16]).unwrap();
    let attention = Attention::new(gpu, AttentionOptions::new().causal(Causal::TopLeft))
        .unwrap()
        .with_path(AttentionPath::Fused);
    let seams = CuSeqlens::new(gpu, &[0, 37, 74], &[0, 37, 74]).unwrap();
    let a = attention
        .run(&AttentionInputs::new(&padded, &padded, &padded), Wanted::output())
        .unwrap()
        .output;
    let b = attention
        .run_packed(&PackedInputs::new(&packed, &packed, &packed, &seams))
        .unwrap()
        .output;
    let merged = a.merge_heads().unwrap();
    assert_eq!(download(&merged), download(&b));
}

#[test]
fn what_does_not_fit_a_packed_call_is_refused() {
    let gpu = gpu();
    let zeros = |shape: &[usize]| Tensor::zeros(gpu, DType::F32, shape).unwrap();
    let says = |result: Result<(), Error>, words: &[&str]| {
        let text = result.unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    let seams = |q: &[usize], k: &[usize]| CuSeqlens::new(gpu, q, k);
    says(seams(&[], &[]).map(drop), &["cu_seqlens_q", "start at 0"]);
    says(
        seams(&[0, 5, 4], &[0, 5, 6]).map(drop),
        &["cu_seqlens_q", "[0, 5, 4]"],
    );
    says(seams(&[0, 5], &[1, 5]).map(drop), &["cu_seqlens_k", "[1, 5]"]);
    says(seams(&[0, 5], &[0, 5, 6]).map(drop), &["2 entries", "3"]);
    says(
        seams(&[0, 1 << 30], &[0, 1]).map(drop),
        &["1073741824", "536870912"],
    );

    let (x, output) = (zeros(&[8, 2, 4]), zeros(&[8, 2, 4]));
    let good = seams(&[0, 5, 8], &[0, 5, 8]).unwrap();
    let record = |options: AttentionOptions, path, inputs: PackedInputs, outputs: PackedOutputs| {
        let mut encoder = gpu.encoder();
        let before = gpu.dispatches();
        let result =
            Attention::new(gpu, options)?
                .with_path(path)
                .record_packed(&mut encoder, &inputs, &outputs);
        assert!(result.is_ok() || gpu.dispatches() == before);
        result
    };
    let auto = AttentionPath::Auto;
    let inputs = PackedInputs::new(&x, &x, &x, &good);
    let outputs = PackedOutputs::new(&output);
    record(AttentionOptions::new(), auto, inputs, outputs).unwrap();
    let short = seams(&[0, 5, 7], &[0, 5, 8]).unwrap();
    says(
        record(
            AttentionOptions::new(),
            auto,
            PackedInputs::new(&x, &x, &x, &short),
            outputs,
        ),
        &["query", "[8, 2, 4]", "[7, 2, 4]"],
    );
    says(
        record(AttentionOptions::new(), AttentionPath::Composed, inputs, outputs),
        &["composed", "packed"],
    );
    says(
        record(
            AttentionOptions::new().always_visible_keys(1),
            auto,
            inputs,
            outputs,
        ),
        &["always_visible_keys = 1"],
    );
    says(
        record(AttentionOptions::new(), auto, inputs, PackedOutputs::new(&x)),
        &["one buffer"],
    );
    let wrong = zeros(&[8, 8]);
    says(
        record(AttentionOptions::new(), auto, inputs, PackedOutputs::new(&wrong)),
        &["output", "[8, 8]", "[8, 2, 4]"],
    );
    says(
        record(AttentionOptions::new(), auto, inputs, outputs.lse(&wrong)),
        &["lse", "[2, 8]"],
    );
    says(
        record(AttentionOptions::new(), auto, inputs.sinks(&wrong), outputs),
        &["sinks", "[8, 8]", "[2]"],
    );
    let flat = zeros(&[8, 8]);
    says(
        record(
            AttentionOptions::new(),
            auto,
            PackedInputs::new(&flat, &x, &x, &good),
            outputs,
        ),
        &["query", "[Tq, H, D]"],
    );
}
