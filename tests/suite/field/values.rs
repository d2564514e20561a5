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
