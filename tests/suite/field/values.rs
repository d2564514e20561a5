//! Values that are not finite, and digits.

use super::*;

/// NaN in one query is hidden by max() and a floor on the sum, or reaches other rows.
#[test]
fn f040_a_nan_query_shows_in_its_row_alone() {
    let clean = Sdpa::new(shape(1, 2, 3, 4, 8));
    let before = clean.checked();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut call = clean.clone();
        call.query[8] = bad;
        for gpu in [gpu(), plain()] {
            let (after, before) = (call.run_on(gpu), clean.run_on(gpu));
            for (row, output) in after.output.chunks(8).enumerate() {
                if row == 1 {
                    assert!(
                        bad.is_infinite() || output.iter().all(|x| x.is_nan()),
                        "{output:?}"
                    );
                } else {
                    assert!(same_bits(output, &before.output[row * 8..][..8]), "row {row}");
                    assert!(same_bits(
                        &after.weights[row * 4..][..4],
                        &before.weights[row * 4..][..4]
                    ));
                }
            }
        }
    }
    assert_eq!(before.output.len(), 48);
}

/// A value behind a mask reached the output as 0 * NaN; one in sight must not vanish.
#[test]
fn a_nan_or_infinite_value_counts_from_its_key_on() {
    let (length, size) = (70, 3);
    let causal = AttentionOptions::new().causal(Causal::TopLeft);
    let clean = Sdpa::new(shape(1, 2, length, length, size)).options(causal);
    for gpu in [gpu(), plain()] {
        let before = clean.run_on(gpu);
        for j in [0, 1, 11, 12, 13, 23, 24, 31, 32, 33, 63, 64, 65, 69] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                // Head 1, channel 1.
                let at = (length + j) * size + 1;
                let mut call = clean.clone();
                call.value[at] = bad;
                let after = call.run_on(gpu);
                assert!(same_bits(&after.weights, &before.weights));
                for (index, (&after, &before)) in after.output.iter().zip(&before.output).enumerate() {
                    let (row, channel) = (index / size, index % size);
                    let reached = row >= length + j && channel == 1;
                    let right = if !reached {
                        // A value of 0 at the hidden key would give the same bits.
                        after.to_bits() == before.to_bits()
                    } else if bad.is_nan() {
                        after.is_nan()
                    } else {
                        after == bad
                    };
                    assert!(
                        right,
                        "value {j} is {bad}: row {row}, channel {channel} is {after}"
                    );
                }
            }
        }
        // Opposite infinities in sight of one row give NaN there and nowhere before.
        let mut call = clean.clone();
        (call.value[1], call.value[size * 40 + 1]) = (f32::INFINITY, f32::NEG_INFINITY);
        let after = call.run_on(gpu).output;
        assert!(after[1] == f32::INFINITY && after[39 * size + 1] == f32::INFINITY);
        assert!((40..length).all(|row| after[row * size + 1].is_nan()));
    }
}

/// What lies behind a mask, a length or a window may be NaN in keys as in values.
#[test]
fn hidden_nan_keys_and_values_change_no_bit() {
    let clean = Sdpa::new(shape(2, 2, 13, 33, 5));
    let hide = |b: usize, j: usize| j >= [20, 33][b] || j == 3 || j == 12;
    for half in [false, true] {
        let clean = if half { clean.clone().half() } else { clean.clone() };
        let mut call = clean.clone().key_mask(|_, j| j != 3).keep(&[33], |j| j != 12);
        call.lengths = Some(vec![20, 33]);
        let mut poisoned = call.clone();
        for (values, size) in [(&mut poisoned.key, 5), (&mut poisoned.value, 5)] {
            for (at, value) in values.iter_mut().enumerate() {
                if hide(at / size / 33 / 2, at / size % 33) {
                    *value = [f32::NAN, f32::INFINITY, -65504.0][at % 3];
                }
            }
        }
        let (before, after) = (call.checked(), poisoned.checked());
        assert!(same_bits(&before.output, &after.output));
        assert!(same_bits(&before.weights, &after.weights));
        assert!(same_bits(&before.lse, &after.lse));
    }
}

/// Sums in f16 drift over long rows.
#[test]
fn f051_f16_keeps_its_digits_over_4096_keys() {
    let mut call = Sdpa::new(shape(1, 2, 4, 4096, 64));
    call.value.iter_mut().for_each(|value| *value += 10.0);
    let call = call.half();
    let got = call.checked();
    for (got, truth) in got.output.iter().zip(call.reference::<f64>().output) {
        // f16 has 10 bits behind the point; values lie in [8, 16).
        assert!(
            (f64::from(*got) - truth).abs() <= 2.0 * 8.0 / 1024.0,
            "{got} instead of {truth}"
        );
    }
}

/// Compensated sums are optimised away; the bound must hold without them.
#[test]
fn f072_long_rows_of_unequal_values() {
    let mut call = Sdpa::new(shape(1, 1, 1, 65536, 4));
    call.query.fill(0.0);
    for (at, value) in call.value.iter_mut().enumerate() {
        *value = if at / 4 % 2 == 0 { 1e4 } else { 1e-4 };
    }
    let got = call.checked();
    assert!(got.weights.iter().all(|&w| w == 1.0 / 65536.0));
    assert_close(&got.output, &[5000.00005; 4], 0.01);
}

/// exp may be off by many digits far from 0, and exp(0) need not be 1.
#[test]
fn f073_one_key_weighs_one_and_small_weights_keep_their_digits() {
    let got = Sdpa::new(shape(1, 1, 1, 1, 4)).checked();
    assert!((got.weights[0] - 1.0).abs() <= 1e-6);
    for low in [-0.5f32, -1.0, -10.0, -30.0, -60.0, -80.0] {
        let got = one_row(&[0.0, low], &[0.0, 1.0]).checked();
        let expected = softmax(&[0.0, low.into()])[1];
        for weight in [got.weights[1], got.output[0]] {
            let relative = (f64::from(weight) - expected).abs() / expected;
            assert!(relative < 1e-6, "{weight:e} instead of {expected:e} at {low}");
        }
    }
}

/// Head sizes are padded in the kernels, and 0 times an infinite key is NaN: the padding has to be 0 on both sides.
#[test]
fn an_infinite_key_does_not_meet_the_padding_of_the_head_size() {
    for size in [1usize, 7, 9] {
        let mut call = Sdpa::new(shape(1, 1, 20, 12, size));
        call.query.fill(1.0);
        call.key[4 * size - 1] = f32::NEG_INFINITY;
        for gpu in [gpu(), plain()] {
            let (output, _) = call.fused_on(gpu);
            assert!(output.iter().all(|x| x.is_finite()), "{size}: {output:?}");
            let mut without = call.clone();
            without.key[4 * size - 1] = 0.0;
            let (hidden, _) = without.key_mask(|_, j| j != 3).fused_on(gpu);
            assert_close(&output, &crate::support::wide(&hidden), 1e-6);
        }
    }
}

/// A sink of -inf is none, one of +inf takes all: also in rows, tiles and sequences without a key, on each path.
#[test]
fn infinite_sinks_are_none_or_all() {
    let (heads, size) = (3, 8);
    let sinks = [f32::NEG_INFINITY, f32::INFINITY, 0.5];
    let hidden = AttentionOptions::new().causal(Causal::TopLeft).query_offset(-36);
    let beside = AttentionOptions::new()
        .window(Some(0), Some(0))
        .query_offset(1000);
    let mut rows = Vec::new();
    for (device, gpu) in [("own", gpu()), ("plain", plain())] {
        for path in [AttentionPath::Fused, AttentionPath::Composed] {
            for (what, queries, keys, length, options) in [
                ("an empty sequence", 9, 64, Some(0), AttentionOptions::new()),
                ("no keys", 9, 0, None, AttentionOptions::new()),
                (
                    "one query of an empty sequence",
                    1,
                    700,
                    Some(0),
                    AttentionOptions::new(),
                ),
                ("one query", 1, 700, None, AttentionOptions::new()),
                ("a window beside the keys", 9, 64, None, beside.clone()),
                ("a tile before the keys", 40, 64, None, hidden.clone()),
                ("all keys", 40, 64, None, AttentionOptions::new()),
            ] {
                let mut shape = shape(1, heads, queries, keys, size);
                shape.value_dim = size;
                let mut numbers = Numbers::new(7);
                let mut draw = |shape: [usize; 4]| numbers.normals(shape.iter().product());
                let [q, k, v] = [shape.query(), shape.key(), shape.value()].map(&mut draw);
                let upload = |values: &[f32], shape: &[usize]| Tensor::upload(gpu, values, shape).unwrap();
                let [query, key, value] = [
                    upload(&q, &shape.query()),
                    upload(&k, &shape.key()),
                    upload(&v, &shape.value()),
                ];
                let bound = upload(&sinks, &[heads]);
                let lengths = length.map(|length| KvLengths::new(gpu, &[length]).unwrap());
                let mut inputs = AttentionInputs::new(&query, &key, &value).sinks(&bound);
                inputs.kv_lengths = lengths.as_ref();
                let attention = Attention::new(gpu, options.clone()).unwrap().with_path(path);
                let got = attention.run(&inputs, Wanted::output().lse()).unwrap();

                let [wide_q, wide_k, wide_v] = [&q, &k, &v].map(|values| support::wide(values));
                let mut truth = reference::Attention::new(shape, &options, &wide_q, &wide_k, &wide_v);
                truth.sinks = Some(&sinks);
                let length = length.map(|length| [length]);
                let truth_lengths = length.as_ref().map(|length| &length[..]);
                truth.kv_lengths = truth_lengths;
                let truth = truth.run().unwrap();
                let mut narrow = reference::Attention::new(shape, &options, &q, &k, &v);
                narrow.sinks = Some(&sinks);
                narrow.kv_lengths = truth_lengths;
                let narrow = narrow.run().unwrap();
                let name = format!("{device}, {path:?}, {what}");
                let output = download(&got.output);
                rows.push((
                    format!("{name}, output"),
                    check_bound("output", &output, &narrow.output, &truth.output, false),
                ));
                let lse = download(got.lse.as_ref().unwrap());
                rows.push((
                    format!("{name}, lse"),
                    check_bound("lse", &lse, &narrow.lse, &truth.lse, false),
                ));
            }
        }
        // A packed sequence with queries and no key.
        let cu_seqlens = multihead::CuSeqlens::new(gpu, &[0, 3, 5], &[0, 0, 5]).unwrap();
        let x = Tensor::upload(gpu, &Numbers::new(8).normals(5 * 8), &[5, 1, 8]).unwrap();
        let none = Tensor::upload(gpu, &sinks[..1], &[1]).unwrap();
        let inputs = multihead::PackedInputs::new(&x, &x, &x, &cu_seqlens).sinks(&none);
        let attention = Attention::new(gpu, AttentionOptions::new()).unwrap();
        let got = attention.run_packed(&inputs).unwrap();
        let lse = download(&got.lse);
        let right = download(&got.output)[..24].iter().all(|&value| value == 0.0)
            && lse[..3].iter().all(|&value| value == f32::NEG_INFINITY)
            && lse[3..].iter().all(|value| value.is_finite());
        rows.push((
            format!("{device}, packed"),
            right.then_some(()).ok_or(format!("{lse:?}")),
        ));
    }
    all_rows(rows);
}

/// A score that overflows meets a distance that overflows the other way: the lowest number, not NaN.
#[test]
fn overflows_of_score_and_alibi_do_not_meet() {
    for path in [AttentionPath::Fused, AttentionPath::Composed] {
        let options = AttentionOptions::new().scale(1.0).alibi([1e38]).query_offset(10);
        let attention = Attention::new(gpu(), options).unwrap().with_path(path);
        let upload = |values: &[f32]| Tensor::upload(gpu(), values, &[1, 1, values.len(), 1]).unwrap();
        let (query, key, value) = (upload(&[1e20]), upload(&[1e20, -1e20]), upload(&[1.0, 5.0]));
        let inputs = AttentionInputs::new(&query, &key, &value);
        let got = attention.run(&inputs, Wanted::output()).unwrap();
        assert_eq!(download(&got.output), [1.0], "{path:?}");
    }
}
