//! The fused path where a call is cut: small bindings, little work for a dispatch, long rows.

use multihead::{
    Attention, AttentionInputs, AttentionOptions, AttentionPath, AttentionShape, Causal, DType, Gpu, Linear,
    Tensor, Wanted,
};
use proptest::prelude::*;

use crate::{
    attention::{Call, MaskKind, calls},
    device::open,
    support::{self, Numbers, download, gpu},
};

/// A device whose bindings hold next to nothing.
fn small_bindings(bytes: u64) -> Gpu {
    let mut limits = gpu().limits().clone();
    limits.max_storage_buffer_binding_size = bytes;
    open(gpu().features(), limits)
}

fn grouped(
    batch: usize,
    kv_heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    dims: [usize; 2],
) -> AttentionShape {
    AttentionShape {
        batch,
        heads: kv_heads * group,
        kv_heads,
        queries,
        keys,
        head_dim: dims[0],
        value_dim: dims[1],
    }
}

/// Each call is too large for the bindings along another axis.
#[test]
fn bindings_beyond_the_limit_are_split_by_batch_head_rows_or_keys() {
    let gpu = small_bindings(16 << 10);
    let base = |shape| Call {
        fused_only: true,
        ..Call::new(shape)
    };
    let causal = |causal| AttentionOptions::new().causal(causal);
    let mut rows = vec![
        ("batch", base(grouped(9, 1, 1, 20, 20, [16, 16]))),
        ("heads", base(grouped(1, 7, 2, 40, 40, [16, 8]))),
        ("rows", base(grouped(1, 1, 1, 1000, 9, [8, 8]))),
        ("keys", base(grouped(1, 1, 2, 33, 900, [16, 8]))),
        ("all of them", base(grouped(2, 2, 2, 300, 500, [16, 8]))),
    ];
    let mut call = base(grouped(2, 2, 2, 70, 300, [16, 8]));
    (call.merged, call.lengths, call.sinks) = (true, true, true);
    call.options = causal(Causal::BottomRight).window(Some(90), None);
    rows.push(("merged heads, lengths, sinks, a window", call.clone()));
    call.lengths = false;
    call.options = causal(Causal::TopLeft)
        .softcap(3.0)
        .alibi([0.5, 0.25, 0.125, 0.0625]);
    (call.mask, call.key_mask) = (MaskKind::Bias, MaskKind::Keep);
    // A tile of rows of it.
    let wider = small_bindings(48 << 10);
    call.check(&wider).unwrap();
    (call.mask, call.short_mask, call.dtype) = (MaskKind::Ignore, true, DType::F16);
    call.options = AttentionOptions::new().always_visible_keys(2);
    rows.push(("a short boolean mask, halves", call.clone()));
    (call.past, call.mask_ones) = (130, [true, true, false, false]);
    rows.push(("past keys, a broadcast mask", call));
    let mut few = base(grouped(3, 4, 2, 2, 120, [16, 8]));
    few.sinks = true;
    rows.push(("few queries, by key heads", few));
    rows.push((
        "one query, by key heads",
        base(grouped(9, 3, 1, 1, 200, [16, 16])),
    ));
    let failures: Vec<String> = rows
        .iter()
        .filter_map(|(name, call)| call.check(&gpu).err().map(|error| format!("{name}: {error}")))
        .collect();
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Garbage behind lengths, and values that are not finite, meet ranges of keys.
#[test]
fn what_is_not_finite_surfaces_across_ranges_of_keys() {
    let gpu = small_bindings(16 << 10);
    let shape = AttentionShape::new(1, 1, 300, 32);
    let mut numbers = Numbers::new(3);
    let mut values = numbers.normals(300 * 32);
    values[250 * 32 + 1] = f32::INFINITY;
    values[299 * 32 + 2] = f32::NAN;
    let x = Tensor::upload(&gpu, &numbers.normals(300 * 32), &shape.query()).unwrap();
    let value = Tensor::upload(&gpu, &values, &shape.value()).unwrap();
    let attention = Attention::new(&gpu, AttentionOptions::new().causal(Causal::TopLeft))
        .unwrap()
        .with_path(AttentionPath::Fused);
    let output = attention
        .run(&AttentionInputs::new(&x, &x, &value), Wanted::output())
        .unwrap()
        .output;
    for (at, x) in download(&output).into_iter().enumerate() {
        let (row, dim) = (at / 32, at % 32);
        let expected = match dim {
            1 if row >= 250 => x == f32::INFINITY,
            2 if row >= 299 => x.is_nan(),
            _ => x.is_finite(),
        };
        assert!(expected, "row {row}, dim {dim}: {x}");
    }
}

/// A few queries whose keys end before those that nothing hides, in one split and in several.
#[test]
fn lengths_end_before_the_keys_that_are_always_visible() {
    for (queries, keys) in [(1, 9), (3, 70), (1, 1300), (20, 40)] {
        for always in [0, 1, 5] {
            for group in [1, 3] {
                let mut call = Call::new(grouped(3, 2, group, queries, keys, [8, 8]));
                call.lengths = true;
                call.options = AttentionOptions::new().always_visible_keys(always);
                call.check(gpu()).unwrap_or_else(|error| {
                    panic!(
                        "{queries} queries, {keys} keys, {always} always visible, groups of {group}: {error}"
                    )
                });
            }
        }
    }
}

/// Cutting by work changes where rows are computed and not what is computed.
#[test]
fn a_call_cut_into_many_dispatches_has_the_same_bits() {
    let gpu = open(gpu().features(), gpu().limits().clone());
    let shape = grouped(2, 2, 2, 100, 70, [24, 40]);
    let mut numbers = Numbers::new(5);
    let mut tensor =
        |shape: [usize; 4]| Tensor::upload(&gpu, &numbers.normals(shape.iter().product()), &shape).unwrap();
    let (query, key, value) = (tensor(shape.query()), tensor(shape.key()), tensor(shape.value()));
    let linear = Linear::new(tensor([1, 1, 33, 70]).reshape(&[33, 70]).unwrap(), None).unwrap();
    let x = tensor([1, 3, 700, 70]).reshape(&[3, 700, 70]).unwrap();
    let run = |work: u64| {
        gpu.set_dispatch_work(work);
        let before = gpu.dispatches();
        let mut bits = Vec::new();
        for path in [AttentionPath::Fused, AttentionPath::Composed] {
            let options = AttentionOptions::new()
                .causal(Causal::BottomRight)
                .window(Some(50), None);
            let attention = Attention::new(&gpu, options).unwrap().with_path(path);
            let inputs = AttentionInputs::new(&query, &key, &value);
            let result = attention.run(&inputs, Wanted::output().lse()).unwrap();
            bits.extend(download(&result.output));
            bits.extend(download(result.lse.as_ref().unwrap()));
        }
        bits.extend(download(&linear.run(&x).unwrap()));
        let bits: Vec<u32> = bits.into_iter().map(f32::to_bits).collect();
        (bits, gpu.dispatches() - before)
    };
    let (whole, few) = run(0);
    assert_eq!(few, 5);
    let (cut, many) = run(100_000);
    assert!(many > 40, "{many}");
    assert!(whole == cut);
    let (finest, most) = run(1);
    assert!(most > many, "{most}");
    assert!(whole == finest);
}

/// The error of long rows grows with blocks of keys, not with keys.
#[test]
fn long_rows_stay_within_the_bound() {
    let rows: Vec<String> = [(1500, 32, 1u64), (3000, 24, 2), (2049, 64, 3), (9000, 8, 4)]
        .into_iter()
        .filter_map(|(keys, dim, seed)| {
            let call = Call {
                seed,
                fused_only: true,
                ..Call::new(grouped(1, 1, 2, 17, keys, [dim, dim]))
            };
            call.check(gpu())
                .err()
                .map(|error| format!("{keys} keys: {error}"))
        })
        .collect();
    assert!(rows.is_empty(), "{rows:#?}");
}

proptest! {
    #![proptest_config(support::property(60))]

    /// Rows of hundreds of keys, with whatever options.
    #[test]
    fn any_long_call_agrees_with_the_reference(call in calls(), keys in 300usize..2500) {
        let mut call = call;
        call.shape.keys += keys;
        call.shape.batch = call.shape.batch.min(1);
        call.shape.queries = call.shape.queries.min(5);
        call.check(gpu()).map_err(TestCaseError::fail)?;
    }

    /// Whatever a call is, bindings of 52 KiB hold its parts: the rows of a tile of a mask are the longest of them.
    #[test]
    fn any_call_is_right_in_small_bindings(call in calls(), keys in 0usize..300) {
        thread_local!(static GPU: Gpu = small_bindings(52 << 10));
        let mut call = call;
        call.shape.keys += keys;
        call.fused_only = true;
        GPU.with(|gpu| call.check(gpu)).map_err(TestCaseError::fail)?;
    }
}

/// 131,072 keys of eight heads that lie side by side: 256 MiB of keys, more than many devices bind at once.
#[test]
fn a_slice_of_131072_queries_runs_over_131072_keys() {
    let gpu = gpu();
    let length = 131_072;
    let attention = Attention::new(gpu, AttentionOptions::new().causal(Causal::BottomRight)).unwrap();
    let shape = AttentionShape::new(1, 8, length, 64);
    let plan = attention.plan(&shape, DType::F32, Wanted::output()).unwrap();
    assert!(plan.scratch <= 64 << 20, "{plan}");
    assert!(plan.dispatches > 8, "{plan}");

    let heads = 2;
    let (width, queries) = (heads * 8, 40);
    let values: Vec<f32> = (0..length * width)
        .map(|i| ((i * 7919) % 2003) as f32 / 1001.5 - 1.0)
        .collect();
    let kv = Tensor::upload(gpu, &values, &[1, length, width]).unwrap();
    let q = kv.slice(1, length - queries..length).unwrap();
    let split = |tensor: &Tensor| tensor.split_heads(heads).unwrap();
    let (q, kv) = (split(&q), split(&kv));
    let output = attention
        .run(&AttentionInputs::new(&q, &kv, &kv), Wanted::output())
        .unwrap()
        .output;
    let output = download(&output);
    // One row against the formula in f64.
    for (head, row) in [(0, 0), (1, 39)] {
        let at = |token: usize, d: usize| f64::from(values[token * width + head * 8 + d]);
        let last = length - queries + row;
        let scores: Vec<f64> = (0..=last)
            .map(|j| (0..8).map(|d| at(last, d) * at(j, d)).sum::<f64>() / 8f64.sqrt())
            .collect();
        let top = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        for d in 0..8 {
            let truth: f64 = scores
                .iter()
                .enumerate()
                .map(|(j, s)| (s - top).exp() / sum * at(j, d))
                .sum();
            let got = f64::from(output[(head * queries + row) * 8 + d]);
            assert!(
                (got - truth).abs() < 1e-6,
                "head {head}, row {row}, {d}: {got} instead of {truth}"
            );
        }
    }
}
