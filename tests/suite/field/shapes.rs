//! Sizes, strides, grouped heads, and what lies beyond a tile, a grid or a binding.

use super::*;

/// One key more than a multiple of the tile, keys shared by all heads, and a mask: badly wrong.
#[test]
fn f028_one_key_beyond_a_tile_with_one_shared_key_head() {
    let mut rows = Vec::new();
    for keys in [
        9, 13, 16, 17, 31, 32, 33, 34, 63, 64, 65, 97, 127, 128, 129, 1023, 1024, 1025,
    ] {
        let mut numbers = Numbers::new(keys as u64);
        let keeps: Vec<bool> = (0..4 * keys).map(|_| numbers.chance(0.7)).collect();
        let call = Sdpa::new(AttentionShape {
            kv_heads: 1,
            ..shape(1, 8, 4, keys, 16)
        })
        .keep(&[1, 1, 4, keys], |at| keeps[at]);
        rows.push(call.row(format!("{keys} keys")));
    }
    all_rows(rows);
    // The same with one row of keys that a stride of 0 repeats for batch and heads.
    let call = Sdpa::new(shape(1, 1, 4, 33, 16));
    let uploaded = call.upload(gpu());
    let wide = |tensor: &Tensor| tensor.broadcast_to(&[3, 8, tensor.shape()[2], 16]).unwrap();
    let (query, key, value) = (wide(&uploaded.query), wide(&uploaded.key), wide(&uploaded.value));
    let attention = Attention::new(gpu(), AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let result = attention
        .run(&AttentionInputs::new(&query, &key, &value), Wanted::output())
        .unwrap();
    assert!(same_bits(
        &download(&result.output),
        &call.run().output.repeat(24)
    ));
}

/// Averages were all there was, or the flag was ignored on one path.
#[test]
fn f063_weights_per_head_and_their_mean() {
    let call = Sdpa::new(shape(2, 3, 4, 5, 8))
        .options(AttentionOptions::new().causal(Causal::TopLeft))
        .key_mask(|b, j| b == 0 || j > 1);
    let got = call.checked();
    let uploaded = call.upload(gpu());
    let attention = Attention::new(gpu(), call.options.clone()).unwrap();
    for wanted in [
        Wanted::output().mean_weights(),
        Wanted::output().weights().mean_weights(),
    ] {
        let result = attention.run(&uploaded.inputs(), wanted).unwrap();
        assert!(same_bits(&download(&result.output), &got.output));
        let mean = result.mean_weights.unwrap();
        assert_eq!(mean.shape(), [2, 4, 5]);
        let expected: Vec<f64> = (0..2 * 4 * 5)
            .map(|at| {
                let head = |h: usize| f64::from(got.weights[(at / 20 * 3 + h) * 20 + at % 20]);
                (0..3).map(head).sum::<f64>() / 3.0
            })
            .collect();
        assert_close(&download(&mean), &expected, 1e-7);
    }
    for (row, weights) in got.weights.chunks(5).enumerate() {
        let sum: f32 = weights.iter().sum();
        // Batch entry 1 has no key before 2.
        let expected = if row >= 12 && row % 4 < 2 { 0.0 } else { 1.0 };
        assert!((sum - expected).abs() < 1e-6, "row {row}: {sum}");
    }
}

/// Strided views were read as if contiguous.
#[test]
fn f029_views_equal_their_contiguous_copies() {
    let call = Sdpa::new(shape(1, 4, 62, 62, 16));
    call.checked();
    for (gpu, path) in [gpu(), plain()]
        .into_iter()
        .flat_map(|gpu| [(gpu, AttentionPath::Composed), (gpu, AttentionPath::Fused)])
    {
        let expected = if path == AttentionPath::Fused {
            call.fused_on(gpu).0
        } else {
            call.output_on(gpu)
        };
        let attention = Attention::new(gpu, AttentionOptions::new())
            .unwrap()
            .with_path(path);
        let uploaded = call.upload(gpu);
        // Every second element of rows twice as wide.
        let spread: Vec<f32> = call.query.iter().flat_map(|&x| [x, f32::NAN]).collect();
        let spread = Tensor::upload(gpu, &spread, &[4 * 62 * 16, 2]).unwrap();
        let spread = Tensor::from_buffer_strided(
            gpu,
            spread.buffer(),
            0,
            DType::F32,
            &[1, 4, 62, 16],
            &[0, 62 * 32, 32, 2],
        )
        .unwrap();
        // Head-merged rows.
        let merged = reference::merge_heads(&call.key, 1, 62, 4, 16).unwrap();
        let merged = Tensor::upload(gpu, &merged, &[1, 62, 64])
            .unwrap()
            .split_heads(4)
            .unwrap();
        // Channels outermost, behind two rows that do not belong.
        let mut transposed = vec![f32::NAN; 4 * 16 * 64];
        for head in 0..4 {
            for j in 0..62 {
                for d in 0..16 {
                    transposed[(head * 16 + d) * 64 + j + 2] = call.value[(head * 62 + j) * 16 + d];
                }
            }
        }
        let transposed = Tensor::upload(gpu, &transposed, &[1, 4, 16, 64])
            .unwrap()
            .slice(3, 2..64)
            .unwrap()
            .permute(&[0, 1, 3, 2])
            .unwrap();
        let (q, k, v) = (&uploaded.query, &uploaded.key, &uploaded.value);
        let rows = [
            ("query spread", [&spread, k, v]),
            ("key merged", [q, &merged, v]),
            ("value transposed", [q, k, &transposed]),
            ("all", [&spread, &merged, &transposed]),
        ];
        all_rows(rows.into_iter().map(|(name, [q, k, v])| {
            let result = attention
                .run(&AttentionInputs::new(q, k, v), Wanted::output())
                .unwrap();
            let same = same_bits(&download(&result.output), &expected);
            (
                name.to_owned(),
                same.then_some(()).ok_or_else(|| "other bits".to_owned()),
            )
        }));
    }
}

/// No keys, or no queries: hang, NaN, or an error.
#[test]
fn f032_f092_empty_axes_are_legal() {
    for (b, h, q, k, d) in [
        (1, 2, 3, 0, 8),
        (1, 2, 0, 3, 8),
        (0, 2, 3, 4, 8),
        (1, 0, 3, 4, 8),
        (1, 2, 3, 4, 0),
        (1, 2, 0, 0, 8),
    ] {
        let call = Sdpa::new(shape(b, h, q, k, d));
        let got = call.checked();
        assert_eq!(got.output.len(), b * h * q * d);
        assert!(got.output.iter().all(|x| x.to_bits() == 0));
        if k == 0 {
            assert!(got.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
        }
        // Masks of such sizes too.
        call.clone().keep(&[b, h, q, k], |_| true).checked();
        let mut call = call.bias(&[1, 1, q, k], |_| 0.5).key_mask(|_, _| true);
        call.lengths = Some(vec![k; b]);
        call.checked();
    }
    for (d, dv) in [(0, 3), (3, 0)] {
        let got = Sdpa::new(AttentionShape {
            value_dim: dv,
            ..shape(1, 2, 3, 4, d)
        })
        .checked();
        assert_eq!(got.output.len(), 2 * 3 * dv);
    }
}

/// Only a few head sizes worked; a padded size found its way into the scale.
#[test]
fn f034_f035_any_head_size_works() {
    let sizes = [
        1, 2, 3, 5, 7, 8, 31, 33, 63, 64, 65, 72, 80, 96, 128, 160, 192, 256, 512,
    ];
    let mut rows = Vec::new();
    for (at, &d) in sizes.iter().enumerate() {
        for dv in [d, sizes[(at * 7 + 3) % sizes.len()]] {
            for causal in [Causal::None, Causal::TopLeft] {
                let call = Sdpa::new(AttentionShape {
                    value_dim: dv,
                    ..shape(1, 2, 5, 6, d)
                })
                .options(AttentionOptions::new().causal(causal));
                let call = if causal == Causal::None {
                    call
                } else {
                    call.composed_only()
                };
                rows.push(call.row(format!("D {d}, Dv {dv}, {causal:?}")));
                if causal == Causal::None {
                    rows.push(call.half().composed_only().row(format!("f16 D {d}, Dv {dv}")));
                }
            }
        }
    }
    all_rows(rows);
}

/// More than 65535 entries on one axis of a grid: the launch was refused or memory corrupted.
#[test]
fn f036_more_work_than_one_grid_axis_holds() {
    let mut rows = Vec::new();
    for n in [65535, 65536, 65537] {
        for (name, shape) in [("batch", shape(n, 1, 1, 2, 1)), ("heads", shape(1, n, 1, 2, 1))] {
            // A workgroup for each of them is slow on the other device: it has larger tiles.
            let result = Sdpa::new(shape).check_on(&[("", gpu())]);
            rows.push((format!("{name} {n}"), result.map(drop)));
        }
    }
    let result = Sdpa::new(shape(1, 1, 65536 * 12 + 1, 1, 1)).check_on(&[("", gpu())]);
    rows.push(("rows".to_owned(), result.map(drop)));
    all_rows(rows);
    // Element by element: joining keys, and the mean over heads.
    let n = 65535 * 64 + 65;
    let past = Numbers::new(1).normals(n);
    let past = Tensor::upload(gpu(), &past, &[1, 1, n, 1]).unwrap();
    let one = Tensor::upload(gpu(), &[0.5f32], &[1, 1, 1, 1]).unwrap();
    let present = Tensor::zeros(gpu(), DType::F32, &[1, 1, n + 1, 1]).unwrap();
    let present_value = Tensor::zeros(gpu(), DType::F32, &[1, 1, n + 1, 1]).unwrap();
    let output = Tensor::zeros(gpu(), DType::F32, &[1, 1, 0, 1]).unwrap();
    let no_query = Tensor::zeros(gpu(), DType::F32, &[1, 1, 0, 1]).unwrap();
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let mut encoder = gpu().encoder();
    attention
        .record(
            &mut encoder,
            &AttentionInputs::new(&no_query, &one, &one).past(&past, &past),
            &AttentionOutputs::new(&output).present(&present, &present_value),
        )
        .unwrap();
    gpu().submit(encoder).unwrap();
    let mut joined = download(&past);
    joined.push(0.5);
    assert!(same_bits(&download(&present), &joined));
    assert!(same_bits(&download(&present_value), &joined));
    // Equal scores share equally.
    let (queries, keys) = (2050, 2048);
    let query = Tensor::zeros(gpu(), DType::F32, &[1, 1, 1, 1])
        .unwrap()
        .broadcast_to(&[1, 1, queries, 1])
        .unwrap();
    let key = Tensor::zeros(gpu(), DType::F32, &[1, 1, keys, 1]).unwrap();
    let result = attention
        .run(
            &AttentionInputs::new(&query, &key, &key),
            Wanted::output().mean_weights(),
        )
        .unwrap();
    assert!(
        download(&result.mean_weights.unwrap())
            .iter()
            .all(|&w| w == 1.0 / 2048.0)
    );
}

/// A 16-bit column index wrapped: masks were read from the wrong place beyond 32767 keys.
#[test]
fn f037_masks_reach_far_keys() {
    let keys = 40000;
    let call = Sdpa::new(shape(1, 1, 2, keys, 8));
    let masked = call
        .clone()
        .bias(&[1, 1, 1, keys], |j| if j < keys - 100 { -1e4 } else { 0.0 });
    let got = masked.checked();
    assert!(
        got.weights
            .iter()
            .enumerate()
            .all(|(at, &w)| (w != 0.0) == (at % keys >= keys - 100))
    );
    let boolean = call.key_mask(|_, j| j >= keys - 100).checked();
    assert!(same_bits(&boolean.output, &got.output));
}

/// Paths disagreed on whether past keys take part when the joined ones are not asked for.
#[test]
fn f041_past_keys_count_whether_or_not_they_are_returned() {
    let tensor = |x: f32| Tensor::upload(gpu(), &[x; 4], &[1, 1, 1, 4]).unwrap();
    let (query, key, past) = (tensor(1.0), tensor(35.0 / 4.0), tensor(75.0 / 4.0));
    let (value, past_value) = (tensor(1.0), tensor(2.0));
    let attention = Attention::new(gpu(), AttentionOptions::new().scale(1.0)).unwrap();
    let inputs = AttentionInputs::new(&query, &key, &value).past(&past, &past_value);
    let plain = attention.run(&inputs, Wanted::output()).unwrap();
    let returned = attention
        .run(&inputs, Wanted::output().present().weights())
        .unwrap();
    let output = download(&plain.output);
    assert!(same_bits(&output, &download(&returned.output)));
    assert_eq!(output, [2.0; 4]);
    assert_eq!(
        download(&returned.present_value.unwrap()),
        [2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    );
    assert_close(
        &download(&returned.weights.unwrap()),
        &softmax(&[75.0, 35.0]),
        1e-20,
    );
}

/// Query heads were dealt to key heads round robin, or bled into the next group.
#[test]
fn f042_query_head_h_reads_key_head_h_by_group() {
    for (heads, kv_heads) in [(9, 3), (24, 1), (6, 2), (6, 6)] {
        let mut call = Sdpa::new(AttentionShape {
            kv_heads,
            ..shape(2, heads, 3, 5, 8)
        });
        call.checked();
        for (at, value) in call.value.iter_mut().enumerate() {
            *value = (at / 40 % kv_heads) as f32;
        }
        let got = call.checked();
        for (at, got) in got.output.iter().enumerate() {
            let group = (at / 24 % heads / (heads / kv_heads)) as f32;
            assert!(
                (got - group).abs() <= 1e-6 * group,
                "{heads} over {kv_heads}: {got} at {at}"
            );
        }
    }
    let tensor = |heads| Tensor::zeros(gpu(), DType::F32, &[1, heads, 3, 8]).unwrap();
    let (query, key) = (tensor(5), tensor(2));
    let attention = Attention::new(gpu(), AttentionOptions::new()).unwrap();
    let refused = attention.run(&AttentionInputs::new(&query, &key, &key), Wanted::output());
    let text = refused.unwrap_err().to_string();
    assert!(text.contains('5') && text.contains('2'), "{text}");
}

/// Copies of odd byte counts failed or overwrote neighbours.
#[test]
fn f093_f094_f101_odd_sizes_between_poisoned_neighbours() {
    let mut rows = Vec::new();
    for (q, k, d) in [(1, 1, 1), (5, 5, 1), (3, 5, 3), (3, 1, 1), (1, 3, 5), (13, 33, 7)] {
        for half in [false, true] {
            for guard in [1usize, 2, 3, 65] {
                let mut call = Sdpa::new(shape(1, 1, q, k, d)).keep(&[q, k], |at| at % 3 != 1);
                if half {
                    call = call.half();
                }
                for (name, gpu) in [("", gpu()), ("plain device ", plain())] {
                    let result = guarded(&call, gpu, guard);
                    rows.push((format!("{name}{q} {k} {d} half {half} guard {guard}"), result));
                }
            }
        }
    }
    all_rows(rows);
}

/// Runs `call` with every tensor in the middle of a poisoned buffer; compares with the call outside.
fn guarded(call: &Sdpa, gpu: &Gpu, guard: usize) -> Result<(), String> {
    let floats = |values: &[f32], poison: f32| {
        let all: Vec<f32> = [vec![poison; guard], values.to_vec(), vec![poison; guard]].concat();
        let whole = match call.dtype {
            DType::F16 => Tensor::upload(gpu, &halves(&all), &[all.len()]),
            _ => Tensor::upload(gpu, &all, &[all.len()]),
        };
        whole.unwrap()
    };
    let middle = |whole: &Tensor, shape: &[usize]| {
        let len = shape.iter().product::<usize>();
        whole
            .slice(0, guard..guard + len)
            .unwrap()
            .reshape(shape)
            .unwrap()
    };
    let query = middle(&floats(&call.query, f32::NAN), &call.shape.query());
    let key = middle(&floats(&call.key, 1e30), &call.shape.key());
    let value = middle(&floats(&call.value, f32::NAN), &call.shape.value());
    let Some((Bits::Keep(keep), mask_shape)) = &call.mask else {
        return Err("the call needs a boolean mask".to_owned());
    };
    let bytes: Vec<u8> = std::iter::repeat_n(7, guard)
        .chain(keep.iter().map(|&keep| u8::from(keep)))
        .chain(std::iter::repeat_n(7, guard))
        .collect();
    let mask = Tensor::upload(gpu, &bytes, &[bytes.len()]).unwrap();
    let mask = Mask::keep(middle(&mask, mask_shape)).unwrap();
    let count = |shape: &[usize]| shape.iter().product::<usize>();
    let poisoned = |shape: &[usize]| {
        Tensor::upload(
            gpu,
            &vec![-7.0f32; count(shape) + 2 * guard],
            &[count(shape) + 2 * guard],
        )
        .unwrap()
    };
    let output_whole = floats(&vec![-7.0; count(&call.shape.output())], -7.0);
    let weights_whole = poisoned(&call.shape.weights());
    let lse_shape = &call.shape.weights()[..3];
    let lse_whole = poisoned(lse_shape);
    let output = middle(&output_whole, &call.shape.output());
    let weights = middle(&weights_whole, &call.shape.weights());
    let lse = middle(&lse_whole, lse_shape);
    let attention = Attention::new(gpu, call.options.clone()).unwrap();
    let mut encoder = gpu.encoder();
    attention
        .record(
            &mut encoder,
            &AttentionInputs::new(&query, &key, &value).mask(&mask),
            &AttentionOutputs::new(&output).weights(&weights).lse(&lse),
        )
        .map_err(|error| error.to_string())?;
    gpu.submit(encoder).unwrap();
    let expected = call.run_on(gpu);
    for (name, whole, expected) in [
        ("output", &output_whole, &expected.output),
        ("weights", &weights_whole, &expected.weights),
        ("lse", &lse_whole, &expected.lse),
    ] {
        let got = download(whole);
        let end = got.len() - guard;
        if !same_bits(&got[guard..end], expected) {
            return Err(format!("{name} differs: {:?}, {expected:?}", &got[guard..end]));
        }
        if got[..guard].iter().chain(&got[end..]).any(|&x| x != -7.0) {
            return Err(format!("{name} wrote outside: {got:?}"));
        }
    }
    Ok(())
}

/// Some query counts alone were corrupt, with masks that have no row more than the queries.
#[test]
fn f104_every_query_count_with_tight_mask_rows() {
    all_rows((1..=33).map(|n| {
        let mut numbers = Numbers::new(n as u64);
        let keeps: Vec<bool> = (0..3 * n * 40).map(|_| numbers.chance(0.8)).collect();
        Sdpa::new(shape(3, 4, n, 40, 64))
            .keep(&[3, 1, n, 40], |at| keeps[at])
            .row(format!("{n} queries"))
    }));
}

/// Assumed subgroup sizes gave partial sums; fewer rows than a tile made barriers diverge; lost barriers lost sums.
#[test]
fn f076_f077_f078_f100_sizes_around_tiles_and_subgroups() {
    let causal = AttentionOptions::new().causal(Causal::TopLeft);
    let mut rows = vec![
        Sdpa::new(shape(1, 2, 33, 65, 64))
            .options(causal.clone())
            .row("33 x 65"),
        Sdpa::new(shape(1, 1, 5, 7, 4)).row("5 x 7"),
        Sdpa::new(shape(1, 2, 17, 19, 16)).options(causal).row("17 x 19"),
    ];
    for keys in [
        1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 64, 65, 127, 128, 129, 1024, 1025, 2049,
    ] {
        rows.push(Sdpa::new(shape(1, 1, 3, keys, 3)).row(format!("{keys} keys")));
    }
    all_rows(rows);
    // Equal scores and the values 1 to 64: their sum is 2080.
    let mut call = Sdpa::new(shape(1, 1, 4, 64, 4));
    call.query.fill(0.0);
    for (at, value) in call.value.iter_mut().enumerate() {
        *value = (at / 4 + 1) as f32;
    }
    assert_eq!(call.checked().output, [2080.0 / 64.0; 16]);
}

/// Scores beyond a binding's limit failed when they were bound.
#[test]
fn f082_f085_scores_beyond_one_binding_are_cut_and_the_cut_does_not_show() {
    // 134,348,832 bytes of scores, 128 MiB is the default limit. No reference: the heads are alike.
    let one = Sdpa::new(shape(1, 1, 2049, 2049, 8));
    let uploaded = one.upload(plain());
    let wide = |tensor: &Tensor| tensor.broadcast_to(&[1, 8, 2049, 8]).unwrap();
    let (q, k, v) = (wide(&uploaded.query), wide(&uploaded.key), wide(&uploaded.value));
    let inputs = AttentionInputs::new(&q, &k, &v);
    let attention = Attention::new(plain(), AttentionOptions::new())
        .unwrap()
        .with_path(AttentionPath::Composed);
    let before = plain().dispatches();
    let result = attention.run(&inputs, Wanted::output()).unwrap();
    assert!(plain().dispatches() - before >= 6, "cut into chunks");
    let alone = one.run_on(plain());
    assert!(same_bits(&download(&result.output), &alone.output.repeat(8)));
    let refused = attention.run(&inputs, Wanted::output().weights());
    let Err(Error::Limit { needs, allows, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((needs, allows), (8 * 2049 * 2049 * 4, 128 << 20));
    // The same rows against the reference: more than one chunk of scores for one head.
    let (queries, keys) = (2100, 2049);
    let call =
        Sdpa::new(shape(1, 1, queries, keys, 4)).options(AttentionOptions::new().causal(Causal::BottomRight));
    call.checked();
}

// ---- the device --------------------------------------------------------------------------------------
