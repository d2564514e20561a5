//! Causal order, windows, offsets, ALiBi and the soft cap.

use super::*;

/// "Causal" means two different masks when the lengths differ, and one engine changed between them.
#[test]
fn f024_f025_both_causal_alignments_are_what_they_say_at_all_sizes() {
    let seen = |causal, queries, keys| {
        Sdpa::new(shape(1, 1, queries, keys, 4))
            .options(AttentionOptions::new().causal(causal))
            .checked()
            .seen(keys)
    };
    assert_eq!(seen(Causal::TopLeft, 2, 5), ["x....", "xx..."]);
    assert_eq!(seen(Causal::BottomRight, 2, 5), ["xxxx.", "xxxxx"]);
    assert_eq!(seen(Causal::TopLeft, 5, 2), ["x.", "xx", "xx", "xx", "xx"]);
    assert_eq!(seen(Causal::BottomRight, 5, 2), ["..", "..", "..", "x.", "xx"]);
    assert_eq!(seen(Causal::TopLeft, 3, 3), seen(Causal::BottomRight, 3, 3));
    let got = Sdpa::new(shape(1, 1, 5, 2, 4))
        .options(AttentionOptions::new().causal(Causal::BottomRight))
        .run();
    assert_eq!(got.output[..12], [0.0; 12]);
}

/// Decoding one token against a cache under top-left order saw key 0 only.
#[test]
fn f026_one_query_at_the_end_of_the_cache_sees_all_keys() {
    let call = Sdpa::new(shape(1, 2, 1, 8, 8));
    let everything = call.checked();
    for options in [
        AttentionOptions::new().causal(Causal::BottomRight),
        AttentionOptions::new().causal(Causal::TopLeft).query_offset(7),
    ] {
        let got = call.clone().options(options).checked();
        assert!(same_bits(&got.output, &everything.output));
    }
}

/// A window counts the query's own key in some libraries and not in others.
#[test]
fn f045_windows_count_both_sides_without_the_query_itself() {
    let seen = |queries, keys, options| {
        Sdpa::new(shape(1, 1, queries, keys, 4))
            .options(options)
            .checked()
            .seen(keys)
    };
    let window = |left, right| AttentionOptions::new().window(left, right);
    assert_eq!(
        seen(6, 6, window(Some(1), Some(0))),
        ["x.....", "xx....", ".xx...", "..xx..", "...xx.", "....xx"]
    );
    assert_eq!(seen(2, 3, window(Some(0), Some(0))), ["x..", ".x."]);
    assert_eq!(seen(2, 4, window(None, Some(1))), ["xx..", "xxx."]);
    assert_eq!(seen(2, 4, window(Some(0), None)), ["xxxx", ".xxx"]);
    assert_eq!(
        seen(2, 6, window(Some(1), Some(0)).align(Align::BottomRight)),
        ["...xx.", "....xx"]
    );
    assert_eq!(
        seen(2, 6, window(Some(2), Some(1)).causal(Causal::BottomRight)),
        ["..xxx.", "...xxx"]
    );
    assert_eq!(seen(2, 3, window(Some(u32::MAX), Some(u32::MAX))), ["xxx", "xxx"]);
}

/// A small window in decoding left a row without a key.
#[test]
fn f046_a_window_beside_the_keys_gives_zeros() {
    for (offset, left) in [(7, 1), (4, 2), (-1, 5), (-9, 5)] {
        let options = AttentionOptions::new()
            .causal(Causal::TopLeft)
            .window(Some(left), None)
            .query_offset(offset);
        let got = Sdpa::new(shape(1, 1, 1, 2, 8)).options(options).checked();
        assert_eq!(got.output, [0.0; 8], "offset {offset}, left {left}");
        assert_eq!(
            (got.seen(2), got.lse),
            (vec!["..".to_owned()], vec![f32::NEG_INFINITY])
        );
    }
}

/// Offsets, alignments, windows, lengths and past keys each moved the position on a path of its own.
#[test]
fn offsets_meet_windows_lengths_and_alignment() {
    struct Row {
        options: AttentionOptions,
        queries: usize,
        length: Option<usize>,
        expected: &'static [&'static str],
    }
    let new = AttentionOptions::new;
    let rows = [
        Row {
            options: new().causal(Causal::BottomRight).window(Some(1), None),
            queries: 2,
            length: Some(5),
            expected: &["..xx....", "...xx..."],
        },
        Row {
            options: new()
                .causal(Causal::BottomRight)
                .window(Some(1), None)
                .query_offset(-1),
            queries: 2,
            length: Some(5),
            expected: &[".xx.....", "..xx...."],
        },
        Row {
            options: new().align(Align::BottomRight).window(Some(0), Some(1)),
            queries: 2,
            length: Some(5),
            expected: &["...xx...", "....x..."],
        },
        Row {
            options: new().causal(Causal::BottomRight).query_offset(2),
            queries: 2,
            length: Some(3),
            expected: &["xxx.....", "xxx....."],
        },
        Row {
            // More queries than keys exist: the first stand before key 0.
            options: new().causal(Causal::BottomRight),
            queries: 3,
            length: Some(2),
            expected: &["........", "x.......", "xx......"],
        },
        Row {
            options: new().causal(Causal::TopLeft).query_offset(4),
            queries: 2,
            length: None,
            expected: &["xxxxx...", "xxxxxx.."],
        },
        Row {
            options: new().causal(Causal::TopLeft).query_offset(4),
            queries: 2,
            length: Some(3),
            expected: &["xxx.....", "xxx....."],
        },
        Row {
            options: new().window(Some(1), Some(1)).query_offset(-2),
            queries: 4,
            length: None,
            expected: &["........", "x.......", "xx......", "xxx....."],
        },
        Row {
            options: new().causal(Causal::BottomRight),
            queries: 2,
            length: Some(0),
            expected: &["........", "........"],
        },
        Row {
            options: new().window(Some(2), None).query_offset(1 << 29),
            queries: 1,
            length: None,
            expected: &["........"],
        },
        Row {
            options: new().window(None, Some(1 << 29)).query_offset(-(1 << 29)),
            queries: 1,
            length: None,
            expected: &["x......."],
        },
    ];
    all_rows(rows.into_iter().enumerate().map(|(at, row)| {
        let mut call = Sdpa::new(shape(1, 1, row.queries, 8, 4)).options(row.options);
        call.lengths = row.length.map(|length| vec![length]);
        let result = call.check().and_then(|got| {
            if got.seen(8) == row.expected {
                Ok(())
            } else {
                Err(format!("{:?} instead of {:?}", got.seen(8), row.expected))
            }
        });
        (format!("row {at}"), result)
    }));
}

/// ALiBi by column and by distance differ when not causal, and the offset is needed when lengths differ.
#[test]
fn f047_alibi_falls_with_the_distance_from_the_position() {
    let slopes = [0.5f32, 0.25, 0.125, 0.0625];
    let mut call = Sdpa::new(shape(1, 4, 3, 7, 8))
        .options(AttentionOptions::new().alibi(slopes).align(Align::BottomRight));
    call.checked();
    // Without scores the weights are the softmax of the distances.
    call.query.fill(0.0);
    let got = call.checked();
    for (row, weights) in got.weights.chunks(7).enumerate() {
        let (head, position) = (row / 3, row as f64 % 3.0 + 4.0);
        let scores: Vec<f64> = (0..7)
            .map(|j| -f64::from(slopes[head]) * (position - f64::from(j)).abs())
            .collect();
        assert_close(weights, &softmax(&scores), 1e-6);
    }
    // Under causal order a bias by column gives the same weights.
    let causal = Sdpa::new(shape(1, 4, 3, 7, 8)).options(AttentionOptions::new().causal(Causal::BottomRight));
    let columns = causal
        .clone()
        .bias(&[4, 1, 7], |at| slopes[at / 7] * (at % 7) as f32)
        .reference::<f64>();
    let options = causal.options.clone().alibi(slopes);
    let got = causal.options(options).checked();
    assert_close(&got.weights, &columns.weights, 1e-6);
}

/// Capping, ALiBi and bias in another order than this one give other weights, all of them plausible.
#[test]
fn the_order_is_scale_cap_alibi_bias() {
    let (scale, cap, slope) = (0.5f64, 2.0f64, 0.75f64);
    let keys = [6.0f32, -4.0, 1.0, 9.0, 0.5];
    let bias = [10.0f32, -1.0, 0.25, -3.0, 12.0];
    let mut call = one_row(&keys, &[1.0, 2.0, 3.0, 4.0, 5.0]).bias(&[5], |j| bias[j]);
    call.query = vec![2.0];
    call.options = AttentionOptions::new()
        .scale(scale as f32)
        .softcap(cap as f32)
        .alibi([slope as f32])
        .query_offset(2);
    let score = |j: usize, order: usize| {
        let dot = 2.0 * f64::from(keys[j]);
        let (distance, bias) = (slope * (2.0 - j as f64).abs(), f64::from(bias[j]));
        let capped = |s: f64| cap * (s / cap).tanh();
        match order {
            0 => capped(scale * dot) - distance + bias,
            1 => capped(scale * dot - distance) + bias,
            2 => capped(scale * dot - distance + bias),
            3 => capped(scale * dot + bias) - distance,
            _ => scale * (capped(dot) - distance + bias),
        }
    };
    let weights = |order| softmax(&(0..5).map(|j| score(j, order)).collect::<Vec<_>>());
    let got = call.checked();
    assert_close(&got.weights, &weights(0), 2e-6);
    for other in 1..5 {
        let differs = weights(other)
            .iter()
            .zip(&got.weights)
            .any(|(a, b)| (a - f64::from(*b)).abs() > 1e-3);
        assert!(differs, "order {other} cannot be told from the right one");
    }
}

/// Capping after masking turned -inf into -cap, so that masked keys leaked weight.
#[test]
fn f043_the_cap_comes_before_the_mask() {
    let mut call = Sdpa::new(shape(1, 1, 1, 2, 4)).options(AttentionOptions::new().softcap(1.0));
    call.query.fill(0.0);
    for call in [
        call.clone().keep(&[2], |j| j == 0),
        call.clone().key_mask(|_, j| j == 0),
        call.bias(&[2], |j| if j == 0 { 0.0 } else { f32::NEG_INFINITY }),
    ] {
        assert_eq!(call.checked().weights, [1.0, 0.0]);
    }
}

/// tanh of a large argument was NaN on some drivers.
#[test]
fn f044_the_cap_saturates() {
    for cap in [1.0f32, 0.01, 30.0] {
        for ratio in [0.1f32, 1.0, 9.0, 20.0, 100.0, 1e4, 1e30] {
            let mut call =
                Sdpa::new(shape(1, 1, 2, 4, 8)).options(AttentionOptions::new().scale(1.0).softcap(cap));
            call.query = [1.0; 8]
                .iter()
                .chain(&[-1.0; 8])
                .map(|sign| sign * cap * ratio / 8.0)
                .collect();
            call.key = [1.0, -1.0, 1.0, 0.0].iter().flat_map(|&x| [x; 8]).collect();
            let got = call.checked();
            if ratio >= 20.0 {
                let cap = f64::from(cap);
                assert_close(&got.weights[..4], &softmax(&[cap, -cap, cap, 0.0]), 1e-6);
            }
        }
    }
}

// ---- layout and sizes --------------------------------------------------------------------------------

/// NaN for long rows only, with a band in the mask or long stretches of the lowest float.
#[test]
fn f105_bands_and_low_stretches_in_long_rows() {
    let mut band = Sdpa::new(shape(1, 1, 600, 600, 2)).bias(&[600, 600], |at| {
        if (at / 600).abs_diff(at % 600) > 10 {
            f32::NEG_INFINITY
        } else {
            0.0
        }
    });
    for values in [&mut band.query, &mut band.key, &mut band.value] {
        values.fill(1.0);
    }
    assert!(band.checked().output.iter().all(|x| (x - 1.0).abs() < 1e-6));
    let low = Sdpa::new(shape(1, 1, 441, 441, 2)).bias(&[1, 441], |j| if j < 128 { f32::MIN } else { 0.0 });
    let got = low.checked();
    assert!(
        got.weights
            .chunks(441)
            .all(|row| row[..128].iter().all(|&w| w == 0.0))
    );
}

// ---- numbers -----------------------------------------------------------------------------------------

/// A running maximum that starts at -inf gave NaN for prompts shorter than a tile.
#[test]
fn f052_short_causal_prompts() {
    for queries in 1..=4 {
        let options = AttentionOptions::new().causal(Causal::BottomRight);
        let call = Sdpa::new(shape(1, 1, queries, 64, 64));
        call.clone().options(options).checked();
        call.options(AttentionOptions::new().causal(Causal::TopLeft))
            .checked();
    }
}
