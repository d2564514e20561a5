//! Masks: what they hide, of which shapes, and how low a bias may be.

use super::*;

/// A query whose keys are all masked divided 0 by 0, and the NaN spread to other rows.
#[test]
fn f001_rows_without_a_key_are_zero_and_alone() {
    let clean = Sdpa::new(shape(2, 2, 4, 4, 8));
    let masked = clean
        .clone()
        .keep(&[4, 4], |at| at / 4 != 2)
        .key_mask(|b, _| b == 0);
    let (before, after) = (clean.checked(), masked.checked());
    for (row, (b, q)) in (0..2 * 2 * 4).map(|row| (row, (row / 8, row % 4))) {
        let (output, weights) = (&after.output[row * 8..][..8], &after.weights[row * 4..][..4]);
        if b == 1 || q == 2 {
            assert!(
                output.iter().chain(weights).all(|x| x.to_bits() == 0),
                "row {row}"
            );
            assert_eq!(after.lse[row], f32::NEG_INFINITY);
        } else {
            assert!(same_bits(output, &before.output[row * 8..][..8]), "row {row}");
            assert!(same_bits(weights, &before.weights[row * 4..][..4]), "row {row}");
            assert_eq!(after.lse[row].to_bits(), before.lse[row].to_bits());
        }
    }
}

/// A causal band and a long padding tail gave NaN on the fast path and zeros on the slow one.
#[test]
fn f003_a_band_that_ends_in_padding_leaves_zeros_on_every_device() {
    let call = Sdpa::new(shape(1, 4, 16, 16, 8))
        .options(
            AttentionOptions::new()
                .causal(Causal::TopLeft)
                .window(Some(3), None),
        )
        .key_mask(|_, key| key < 4);
    call.checked();
    for gpu in [gpu(), plain()] {
        let got = call.run_on(gpu);
        for (row, output) in got.output.chunks(8).enumerate() {
            assert_eq!(output.iter().all(|&x| x == 0.0), row % 16 >= 7, "row {row}");
        }
    }
}

/// With a finite stand-in for minus infinity a masked row became the mean of the values.
#[test]
fn f005_a_masked_row_is_not_the_mean_of_the_values() {
    let mut call = Sdpa::new(shape(1, 1, 2, 4, 4)).keep(&[2, 4], |at| at >= 4);
    call.value = (0..16).map(|at| (at / 4 + 1) as f32).collect();
    assert_eq!(call.checked().output[..4], [0.0; 4]);
}

/// A masked score of -1e4 won over visible scores below it.
#[test]
fn f007_a_visible_key_far_below_minus_10000_beats_a_masked_one() {
    let mut call = Sdpa::new(shape(1, 1, 2, 2, 1)).options(AttentionOptions::new().scale(1.0));
    (call.query, call.key, call.value) = (vec![-20000.0, 0.0], vec![1.0, 0.0], vec![1.0, 100.0]);
    let got = call.keep(&[1, 2], |key| key == 0).checked();
    assert_eq!(got.output, [1.0, 1.0]);
    assert_eq!(got.weights, [1.0, 0.0, 1.0, 0.0]);
}

/// A row maximum clamped at -1e4 made rows of lower scores vanish.
#[test]
fn f008_equal_scores_share_equally_however_low() {
    for score in [-2e4f32, -1e10, -3e38, 2e4, 1e10, 3e38, 0.0] {
        let got = one_row(&[score; 4], &[1.0, 2.0, 3.0, 4.0]).checked();
        assert_eq!(got.weights, [0.25; 4], "score {score}");
        assert_eq!(got.output, [2.5], "score {score}");
    }
}

/// The lowest float in a mask was below the kernel's own sentinel.
#[test]
fn f010_the_lowest_float_is_a_bias_and_hides_nothing() {
    let call = one_row(&[0.0, 0.0], &[1.0, 3.0]);
    let both = call.clone().bias(&[2], |_| f32::MIN).checked();
    assert_eq!(both.weights, [0.5, 0.5]);
    assert_eq!(both.lse, [f32::MIN]);
    let one = call
        .bias(&[2], |key| if key == 0 { f32::NEG_INFINITY } else { f32::MIN })
        .checked();
    assert_eq!((one.weights, one.output), (vec![0.0, 1.0], vec![3.0]));
}

/// The lowest float plus a negative score fell to minus infinity and became NaN or hid the key.
#[test]
fn f011_the_lowest_float_plus_a_negative_score_saturates() {
    let call = Sdpa::new(shape(1, 1, 3, 4, 4));
    // Row 2 has the lowest float everywhere.
    let got = call
        .clone()
        .bias(&[3, 4], |at| if at % 4 == 3 || at >= 8 { f32::MIN } else { 0.0 })
        .checked();
    assert_eq!(got.weights[8..], [0.25; 4]);
    let padded = call
        .clone()
        .bias(&[3, 4], |_| f32::MIN)
        .key_mask(|_, key| key != 3);
    assert_eq!(padded.checked().seen(4), ["xxx."; 3]);
    // Scores so low that the sum leaves the range of f32.
    let mut call = call;
    call.query.fill(-1e30);
    call.key = [vec![1.0; 8], vec![1e6; 8]].concat();
    for gpu in [gpu(), plain()] {
        let got = call.clone().bias(&[1], |_| f32::MIN).run_on(gpu);
        assert_eq!(got.weights, [0.25; 12]);
        assert_eq!(got.lse, [f32::MIN; 3]);
    }
}

/// Scores, biases and their sums beyond the largest float gave inf - inf.
#[test]
fn f011_scores_that_overflow_upwards_saturate_too() {
    let mut call = Sdpa::new(shape(1, 1, 2, 3, 1)).options(AttentionOptions::new().scale(1e20));
    (call.query, call.key) = (vec![1e20, -1e20], vec![1.0, 1.0, -1.0]);
    let got = call.checked();
    assert_eq!(got.weights, [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]);
    for gpu in [gpu(), plain()] {
        let got = one_row(&[1.0, 2.0, 3e38], &[1.0, 2.0, 3.0])
            .bias(&[3], |key| [f32::INFINITY, f32::MAX, f32::MAX][key])
            .run_on(gpu);
        assert_close(&got.weights, &[1.0 / 3.0; 3], 1e-7);
    }
}

/// A finite bias that is the same for every key produced NaN for one key.
#[test]
fn f013_one_key_with_any_bias_returns_the_value() {
    let biases = [3.5, 0.45, -5.5, 0.0, 1e30, -1e30, f32::MIN, f32::MAX];
    let call = Sdpa::new(shape(1, 8, 1, 1, 64)).bias(&[8, 1, 1], |head| biases[head]);
    let got = call.checked();
    for (got, value) in got.output.iter().zip(&call.value) {
        assert!(
            (got - value).abs() <= 3.0 * f32::EPSILON * value.abs(),
            "{got} instead of {value}"
        );
    }
}

// ---- masks -------------------------------------------------------------------------------------------

/// A float mask of 0 and 1 was taken for a multiplicative one.
#[test]
fn f014_float_masks_are_added_whatever_their_values() {
    let mut numbers = Numbers::new(3);
    Sdpa::new(shape(1, 2, 8, 8, 8))
        .bias(&[8, 8], |_| f32::from(numbers.chance(0.5)))
        .checked();
    let got = one_row(&[0.0, 0.0], &[0.0, 0.0])
        .bias(&[2], |key| key as f32)
        .run();
    assert_close(&got.weights, &softmax(&[0.0, 1.0]), 1e-7);
}

/// Integer masks were accepted and their polarity changed from path to path.
#[test]
fn f016_masks_are_boolean_or_float_and_say_their_polarity() {
    let gpu = gpu();
    let integers = Tensor::upload(gpu, &[0u32; 8], &[2, 4]).unwrap();
    assert!(matches!(Mask::keep(integers.clone()), Err(Error::DType(_))));
    assert!(matches!(Mask::ignore(integers.clone()), Err(Error::DType(_))));
    assert!(matches!(Mask::bias(integers), Err(Error::DType(_))));
    let floats = Tensor::upload(gpu, &[0.0f32; 8], &[2, 4]).unwrap();
    assert!(matches!(Mask::keep(floats.clone()), Err(Error::DType(_))));
    let bytes = Tensor::upload(gpu, &[0u8; 8], &[2, 4]).unwrap();
    assert!(matches!(Mask::bias(bytes), Err(Error::DType(_))));

    let call = Sdpa::new(shape(2, 1, 4, 4, 4));
    let uploaded = call.upload(gpu);
    // The path that the expectation below takes, so that bits can be compared.
    let attention = Attention::new(gpu, AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let float_padding = Mask::bias(floats).unwrap();
    let refused = attention.run(&uploaded.inputs().key_mask(&float_padding), Wanted::output());
    assert!(matches!(refused, Err(Error::DType(_))), "{refused:?}");

    let keep = [true, true, false, true, false, true, true, false];
    let ignore = keep.map(|keep| !keep);
    let run = |padding: &Mask, mask: &Mask| {
        let inputs = uploaded.inputs().key_mask(padding).mask(mask);
        download(&attention.run(&inputs, Wanted::output()).unwrap().output)
    };
    let keep_mask = Mask::keep_from(gpu, &keep[..4], &[4, 1]).unwrap();
    let ignore_mask = Mask::ignore_from(gpu, &ignore[..4], &[4, 1]).unwrap();
    let kept = run(&Mask::keep_from(gpu, &keep, &[2, 4]).unwrap(), &keep_mask);
    assert!(same_bits(
        &kept,
        &run(&Mask::ignore_from(gpu, &ignore, &[2, 4]).unwrap(), &ignore_mask)
    ));
    let expected = call.keep(&[4, 1], |at| keep[at]).key_mask(|b, j| keep[b * 4 + j]);
    assert!(same_bits(&kept, &expected.checked().output));
    // Any byte but 0 is true.
    let bytes = Tensor::upload(gpu, &keep.map(|keep| if keep { 128u8 } else { 0 }), &[2, 4]).unwrap();
    assert!(same_bits(&kept, &run(&Mask::keep(bytes).unwrap(), &keep_mask)));
}

/// A mask with batch and heads on one axis was tiled the wrong way round.
#[test]
fn f019_batch_and_heads_are_two_axes_of_a_mask() {
    let lengths = [4, 2];
    let call = Sdpa::new(shape(2, 3, 4, 4, 4)).keep(&[2, 3, 4, 4], |at| at % 4 < lengths[at / 48]);
    let got = call.checked();
    assert_eq!(got.seen(4), [vec!["xxxx"; 12], vec!["xx.."; 12]].concat());
    let folded = Mask::keep_from(gpu(), &[true; 96], &[6, 4, 4]).unwrap();
    let uploaded = call.upload(gpu());
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let refused = attention.run(&uploaded.inputs().mask(&folded), Wanted::output());
    assert!(matches!(refused, Err(Error::Shape(_))), "{refused:?}");
}

/// A broadcast mask was applied to head 0 only, or rejected.
#[test]
fn f020_a_broadcast_mask_equals_the_whole_one_bit_for_bit() {
    let (b, h, l) = (2usize, 3usize, 16usize);
    let full = [b, h, l, l];
    let mut rows = Vec::new();
    for ones in [
        [true, true, false, false],
        [false, true, false, false],
        [true, false, false, false],
        [false, true, true, false],
        [true, true, true, false],
        [false, true, false, true],
        [false, false, true, true],
        [true, true, true, true],
    ] {
        let small: Vec<usize> = full
            .iter()
            .zip(ones)
            .map(|(&n, one)| if one { 1 } else { n })
            .collect();
        let index = |at: usize| {
            let place = [at / (h * l * l), at / (l * l) % h, at / l % l, at % l];
            (0..4).fold(0, |index, axis| {
                index * small[axis] + if small[axis] == 1 { 0 } else { place[axis] }
            })
        };
        let mut numbers = Numbers::new(5);
        let bools: Vec<bool> = (0..b * h * l * l).map(|_| numbers.chance(0.6)).collect();
        let floats = numbers.normals(b * h * l * l);
        let call = Sdpa::new(shape(b, h, l, l, 32));
        for (kind, small_call, whole) in [
            (
                "bool",
                call.clone().keep(&small, |at| bools[at]),
                call.clone().keep(&full, |at| bools[index(at)]),
            ),
            (
                "float",
                call.clone().bias(&small, |at| floats[at]),
                call.clone().bias(&full, |at| floats[index(at)]),
            ),
        ] {
            let result = small_call.check().and_then(|got| {
                let whole = whole.run();
                if same_bits(&got.output, &whole.output) && same_bits(&got.weights, &whole.weights) {
                    Ok(())
                } else {
                    Err("other bits than the whole mask".to_owned())
                }
            });
            rows.push((format!("{kind} {small:?}"), result));
        }
    }
    all_rows(rows);
}

/// Grouped heads, non-square masks and few axes each worked alone and failed together.
#[test]
fn f021_masks_of_any_shape_meet_grouped_heads() {
    let mut rows = Vec::new();
    for (queries, keys) in [(7, 45), (45, 7), (16, 16)] {
        for kv_heads in [4, 2, 1] {
            for mask in [vec![queries, keys], vec![1, 4, queries, keys]] {
                for causal in [Causal::None, Causal::TopLeft, Causal::BottomRight] {
                    let mut numbers = Numbers::new(2);
                    let call = Sdpa::new(AttentionShape {
                        kv_heads,
                        ..shape(1, 4, queries, keys, 16)
                    })
                    .options(AttentionOptions::new().causal(causal))
                    .bias(&mask, |_| {
                        if numbers.chance(0.3) {
                            f32::NEG_INFINITY
                        } else {
                            0.0
                        }
                    });
                    rows.push(call.row(format!("{queries} x {keys}, {kv_heads}, {mask:?}, {causal:?}")));
                }
            }
        }
    }
    all_rows(rows);
}

/// An explicit causal mask and the causal option together: ignored, refused, or NaN at some lengths.
#[test]
fn f022_a_causal_mask_and_the_causal_option_intersect() {
    all_rows((1..=130).map(|n| {
        let causal =
            Sdpa::new(shape(1, 2, n, n, 16)).options(AttentionOptions::new().causal(Causal::TopLeft));
        let both = causal.clone().bias(
            &[n, n],
            |at| {
                if at % n > at / n { f32::NEG_INFINITY } else { 0.0 }
            },
        );
        let result = both.check().and_then(|got| {
            if same_bits(&got.output, &causal.run().output) {
                Ok(())
            } else {
                Err("differs from causal alone".to_owned())
            }
        });
        (format!("n = {n}"), result)
    }));
}

/// The causal option was ignored when weights or padding were asked for.
#[test]
fn f023_causal_order_holds_with_weights_and_padding() {
    let causal = Sdpa::new(shape(2, 2, 6, 6, 4)).options(AttentionOptions::new().causal(Causal::TopLeft));
    for call in [causal.clone(), causal.clone().key_mask(|b, j| b == 0 || j != 2)] {
        // This runs each with and without weights.
        let got = call.checked();
        for (row, weights) in got.weights.chunks(6).enumerate() {
            assert!(
                weights[row % 6 + 1..].iter().all(|w| w.to_bits() == 0),
                "row {row}"
            );
        }
    }
}

/// A mask larger or shorter than the call was read in place.
#[test]
fn f058_masks_that_do_not_fit_are_refused() {
    let call = Sdpa::new(shape(1, 2, 100, 100, 8));
    let uploaded = call.upload(gpu());
    let attention = Attention::new(gpu(), AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    for (shape, fits) in [
        (vec![128usize, 128], false),
        (vec![100, 128], false),
        (vec![128, 100], false),
        (vec![100, 64], false),
        (vec![64, 100], false),
        (vec![3, 100, 100], false),
        (vec![2, 1, 100, 100], false),
        (vec![100, 100], true),
        (vec![100, 1], true),
        (vec![1], true),
        (vec![2, 1, 100], true),
    ] {
        let mask = Mask::keep_from(gpu(), &vec![true; shape.iter().product()], &shape).unwrap();
        let result = attention.run(&uploaded.inputs().mask(&mask), Wanted::output());
        match result {
            Ok(_) => assert!(fits, "{shape:?}"),
            Err(error) => assert!(matches!(error, Error::Shape(_)) && !fits, "{shape:?}: {error}"),
        }
    }
    // Shorter only if it is said.
    let short = Mask::keep_from(gpu(), &[true; 64], &[64])
        .unwrap()
        .with_short_keys();
    let result = attention
        .run(&uploaded.inputs().mask(&short), Wanted::output())
        .unwrap();
    let hidden = call.key_mask(|_, j| j < 64).checked();
    assert!(same_bits(&download(&result.output), &hidden.output));
    let long = Mask::keep_from(gpu(), &[true; 128], &[128])
        .unwrap()
        .with_short_keys();
    assert!(
        attention
            .run(&uploaded.inputs().mask(&long), Wanted::output())
            .is_err()
    );
}

/// Outputs were trimmed where every sample masks the last tokens.
#[test]
fn f064_padding_in_every_sample_does_not_trim_the_output() {
    let call = Sdpa::new(shape(6, 4, 20, 20, 8)).key_mask(|_, j| j == 0);
    let got = call.checked();
    assert_eq!(got.output.len(), 6 * 4 * 20 * 8);
    for (row, output) in got.output.chunks(8).enumerate() {
        assert_eq!(output, &call.value[row / 20 * 20 * 8..][..8]);
    }
}

/// A transposed mask index goes unseen when sizes coincide.
#[test]
fn f067_no_axis_of_a_mask_stands_for_another() {
    let mut rows = Vec::new();
    for (b, h, q, k, d) in [
        (4, 4, 4, 4, 4),
        (2, 3, 5, 7, 11),
        (7, 2, 3, 5, 13),
        (3, 5, 11, 2, 7),
    ] {
        let mut numbers = Numbers::new(9);
        let padding: Vec<bool> = (0..b * k).map(|_| numbers.chance(0.5)).collect();
        let keeps: Vec<bool> = (0..b * h * q * k).map(|_| numbers.chance(0.7)).collect();
        let floats = numbers.normals(b * h * q * k);
        let call = Sdpa::new(shape(b, h, q, k, d));
        let name = format!("{b} {h} {q} {k} {d}");
        rows.push(
            call.clone()
                .key_mask(|b, j| padding[b * k + j])
                .row(format!("{name} padding")),
        );
        rows.push(
            call.clone()
                .keep(&[b, h, q, k], |at| keeps[at])
                .row(format!("{name} keep")),
        );
        rows.push(
            call.bias(&[b, h, q, k], |at| floats[at])
                .key_mask(|b, j| padding[b * k + j])
                .row(format!("{name} both")),
        );
    }
    all_rows(rows);
}

/// Comparisons with infinity fail on some drivers: only the bits of -inf hide, NaN and the rest do not.
#[test]
fn f068_minus_infinity_hides_and_nothing_else_does() {
    let call = one_row(&[1.0, 2.0, 3.0, 4.0], &[1.0, 2.0, 3.0, 4.0]);
    let inf = f32::NEG_INFINITY;
    let got = call.clone().bias(&[4], |j| [0.0, inf, 0.0, inf][j]).checked();
    assert_eq!(got.seen(4), ["x.x."]);
    let got = call.clone().bias(&[4], |_| inf).checked();
    assert_eq!((got.seen(4), got.output), (vec!["....".to_owned()], vec![0.0]));
    // NaN of either sign is no -inf: it shows.
    for nan in [0xffc0_0000u32, 0x7fc0_0000, 0xff80_0001] {
        let got = call
            .clone()
            .bias(&[4], |j| [0.0, inf, f32::from_bits(nan), 0.0][j])
            .run();
        assert!(
            got.output[0].is_nan() && got.weights[0].is_nan(),
            "{nan:x}: {got:?}"
        );
        assert_eq!(got.weights[1], 0.0, "{nan:x}");
    }
    // The same in f16 masks.
    let (query, key) = (&call.query, &call.key);
    for (mask, expected) in [
        ([0.0, f16::NEG_INFINITY.to_f32(), 1.0, -60000.0], "x.x."),
        ([f16::MIN.to_f32(), inf, f16::MIN.to_f32(), inf], "x.x."),
    ] {
        let mask = Tensor::upload(gpu(), &halves(&mask), &[4]).unwrap();
        let mask = Mask::bias(mask).unwrap();
        let query = Tensor::upload(gpu(), query, &[1, 1, 1, 1]).unwrap();
        let key = Tensor::upload(gpu(), key, &[1, 1, 4, 1]).unwrap();
        let attention = Attention::new(gpu(), call.options.clone()).unwrap();
        let inputs = AttentionInputs::new(&query, &key, &key).mask(&mask);
        let result = attention.run(&inputs, Wanted::output().weights()).unwrap();
        let weights = download(&result.weights.unwrap());
        let seen: String = weights
            .iter()
            .map(|&w| if w == 0.0 { '.' } else { 'x' })
            .collect();
        assert_eq!(seen, expected);
    }
}

// ---- positions ---------------------------------------------------------------------------------------
