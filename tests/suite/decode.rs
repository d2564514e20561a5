//! A layer that decodes: steps against a cache equal one pass over the whole sequence, and so does cross-attention to keys
//! and values that were projected once.

use half::f16;
use multihead::{
    AttentionOptions, AttentionPath, AttentionShape, Causal, DType, Error, Gpu, KvCache, KvCacheShape,
    KvLengths, Mask, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs,
    NeedWeights, Parameters, Rotary, RotaryOptions, RotaryPairing, Tensor, reference,
};
use proptest::prelude::*;

use crate::{
    cache::{poison, upload},
    field::{all_rows, plain, same_bits},
    layer::{layer_parameters, parameters, stored},
    support::{self, Numbers, check_bound, download, gpu, through_f16},
};

/// A layer on the GPU, and what the reference needs to know of it.
struct Subject {
    gpu: Gpu,
    config: MultiHeadAttentionConfig,
    rotary: Option<RotaryOptions>,
    parameters: Parameters,
    layer: MultiHeadAttention,
}

impl Subject {
    fn new(gpu: &Gpu, config: MultiHeadAttentionConfig, rotary: Option<RotaryOptions>, seed: u64) -> Self {
        let parameters = parameters(&config, seed);
        let mut layer = MultiHeadAttention::new(gpu, config.clone(), &parameters).unwrap();
        if let Some(options) = rotary {
            layer = layer
                .with_rotary(Rotary::new(gpu, options, 500).unwrap())
                .unwrap();
        }
        Self {
            gpu: gpu.clone(),
            parameters: stored(&parameters, config.dtype),
            config,
            rotary,
            layer,
        }
    }

    /// One causal pass over a whole sequence, `[L, E]`.
    fn whole<T: reference::Real>(&self, x: &[f32]) -> Vec<T> {
        let x: Vec<T> = x.iter().map(|&x| T::from_f32(x)).collect();
        let parameters = layer_parameters(&self.parameters);
        let length = x.len() / self.config.embed_dim;
        reference::MultiHead {
            causal: Some(Causal::TopLeft),
            rotary: self.rotary,
            ..reference::MultiHead::self_attention(&self.config, parameters, 1, length, &x)
        }
        .run_output()
        .unwrap()
        .output
    }

    /// Queries of `x` against keys and values as a cache holds them, `[B, Hkv, Lk, D]`; row `l` of sequence `b` stands at
    /// `ends[b] - rows + l`.
    fn against<T: reference::Real>(
        &self,
        x: &[f32],
        [keys, values]: [&[f32]; 2],
        ends: &[usize],
        causal: Causal,
    ) -> Vec<T> {
        let lift = |values: &[f32]| values.iter().map(|&x| T::from_f32(x)).collect::<Vec<T>>();
        let (config, p) = (&self.config, &self.parameters);
        let (embed, size, batch) = (config.embed_dim, config.head_dim(), ends.len());
        let rows = x.len() / embed / batch;
        let project = |x: &[T], weight: &[f32], bias: &Option<Vec<f32>>, sizes: [usize; 2]| {
            let bias = bias.as_ref().map(|bias| lift(bias));
            reference::linear(
                x,
                &lift(weight),
                bias.as_deref(),
                batch * rows,
                sizes[0],
                sizes[1],
            )
            .unwrap()
        };
        let q = project(
            &lift(x),
            &p.q_proj_weight,
            &p.q_proj_bias,
            [embed, config.q_size()],
        );
        let mut q = reference::split_heads(&q, batch, rows, config.num_heads, size).unwrap();
        if let Some(options) = &self.rotary {
            let (cos, sin) = reference::rotary_tables(options, 500).unwrap();
            let positions: Vec<usize> = ends.iter().flat_map(|end| end - rows..*end).collect();
            let shape = [batch, config.num_heads, rows, size];
            q = reference::rotary(
                &q,
                shape,
                &cos,
                &sin,
                &positions,
                options.rotary_dim,
                options.pairing,
            )
            .unwrap();
        }
        let slots = keys.len() / (batch * config.kv_size());
        let shape = AttentionShape {
            kv_heads: config.num_kv_heads,
            keys: slots,
            ..AttentionShape::new(batch, config.num_heads, rows, size)
        };
        let options = config.attention.clone().causal(causal);
        let (keys, values) = (lift(keys), lift(values));
        let output = reference::Attention {
            kv_lengths: Some(ends),
            ..reference::Attention::new(shape, &options, &q, &keys, &values)
        }
        .run_output()
        .unwrap()
        .output;
        let merged = reference::merge_heads(&output, batch, rows, config.num_heads, size).unwrap();
        project(
            &merged,
            &p.out_proj_weight,
            &p.out_proj_bias,
            [config.q_size(), embed],
        )
    }
}

/// Sequences that a layer decodes, and what is due once the commands have run.
struct Decoder {
    subject: Subject,
    cache: KvCache,
    numbers: Numbers,
    activations: DType,
    /// Tokens of each sequence, `[E]` each.
    tokens: Vec<Vec<Vec<f32>>>,
    encoder: Option<multihead::wgpu::CommandEncoder>,
    due: Vec<Due>,
}

struct Due {
    output: Tensor,
    counts: Vec<usize>,
    truth: Vec<f64>,
    narrow: Vec<f32>,
}

impl Decoder {
    fn new(gpu: &Gpu, seed: u64) -> Self {
        let mut numbers = Numbers::new(seed);
        let kv_heads = 1 + numbers.below(3);
        let heads = kv_heads * (1 + numbers.below(3));
        let head_dim = 1 + numbers.below(9);
        let rolling = numbers.chance(0.4);
        let mut options = AttentionOptions::new();
        if rolling || numbers.chance(0.3) {
            options = options.window(Some(numbers.below(12) as u32), numbers.chance(0.5).then_some(0));
        }
        if numbers.chance(0.2) {
            options = options.softcap(2.0);
        }
        if !rolling && numbers.chance(0.2) {
            options = options.alibi((0..heads).map(|_| numbers.unit()).collect::<Vec<f32>>());
        }
        let config = MultiHeadAttentionConfig::new(1 + numbers.below(20), heads)
            .num_kv_heads(kv_heads)
            .with_head_dim(head_dim)
            .bias(numbers.chance(0.5))
            .dtype(if numbers.chance(0.2) {
                DType::F16
            } else {
                DType::F32
            })
            .attention(options);
        let pairs = if numbers.chance(0.6) {
            numbers.below(head_dim / 2 + 1)
        } else {
            0
        };
        let rotary = (pairs > 0).then(|| {
            RotaryOptions::new(2 * pairs)
                .base(50.0)
                .pairing(if numbers.chance(0.5) {
                    RotaryPairing::HalfSplit
                } else {
                    RotaryPairing::Interleaved
                })
        });
        let mut subject = Subject::new(gpu, config, rotary, seed);
        if numbers.chance(0.5) {
            let paths = [AttentionPath::Fused, AttentionPath::Composed];
            subject.layer = subject.layer.with_path(paths[numbers.below(2)]);
        }
        let batch = 1 + numbers.below(3);
        let cache = if rolling {
            subject
                .layer
                .rolling_kv_cache(batch, 1 + numbers.below(8), DType::F32)
        } else {
            subject.layer.kv_cache(batch, 1 + numbers.below(40), DType::F32)
        }
        .unwrap();
        poison(&cache);
        Self {
            subject,
            cache,
            activations: if numbers.chance(0.3) {
                DType::F16
            } else {
                DType::F32
            },
            numbers,
            tokens: vec![Vec::new(); batch],
            encoder: None,
            due: Vec::new(),
        }
    }

    fn encoder(&mut self) -> multihead::wgpu::CommandEncoder {
        self.encoder.take().unwrap_or_else(|| self.subject.gpu.encoder())
    }

    fn settle(&mut self) -> Result<(), String> {
        if let Some(encoder) = self.encoder.take() {
            self.subject.gpu.submit(encoder).unwrap();
        }
        for due in self.due.drain(..) {
            let all = download(&due.output);
            let [_, rows, embed] = *due.output.shape() else {
                return Err("not three axes".to_owned());
            };
            let got: Vec<f32> = due
                .counts
                .iter()
                .enumerate()
                .flat_map(|(b, count)| &all[(b * rows + rows - count) * embed..(b + 1) * rows * embed])
                .copied()
                .collect();
            check_bound(
                "a step",
                &got,
                &due.narrow,
                &due.truth,
                due.output.dtype() == DType::F16,
            )?;
        }
        Ok(())
    }

    /// New tokens for some sequences, or what the cache says against them.
    fn step(&mut self) -> Result<(), String> {
        let (batch, embed) = (self.tokens.len(), self.subject.config.embed_dim);
        let most = self.numbers.below(self.cache.max_chunk().min(20) + 2);
        let ragged = self.numbers.chance(0.5);
        let counts: Vec<usize> = (0..batch)
            .map(|_| {
                if ragged {
                    self.numbers.below(most + 1)
                } else {
                    most
                }
            })
            .collect();
        let rows = most + if ragged { self.numbers.below(3) } else { 0 };
        let allowed = counts.iter().zip(&self.tokens).all(|(&count, tokens)| {
            count <= self.cache.max_chunk()
                && (self.cache.window().is_some() || tokens.len() + count <= self.cache.shape().capacity)
        });
        // Padding may hold anything.
        let mut x = vec![f32::NAN; batch * rows * embed];
        for (b, &count) in counts.iter().enumerate() {
            for token in x[b * rows * embed..(b + 1) * rows * embed]
                .chunks_mut(embed)
                .skip(rows - count)
            {
                let values = self.numbers.normals(embed);
                token.copy_from_slice(&match self.activations {
                    DType::F16 => through_f16(&values),
                    _ => values,
                });
            }
        }
        let gpu = self.subject.gpu.clone();
        let input = upload(&gpu, &x, &[batch, rows, embed], self.activations);
        let output = Tensor::zeros(&gpu, self.activations, &[batch, rows, embed]).unwrap();
        let mut encoder = self.encoder();
        let (layer, cache) = (&self.subject.layer, &mut self.cache);
        let result = if ragged {
            layer.record_step_ragged(&mut encoder, &input, &counts, cache, &output)
        } else {
            layer.record_step(&mut encoder, &input, cache, &output)
        };
        self.encoder = Some(encoder);
        match result {
            Ok(()) if allowed => {}
            Err(Error::Capacity(_)) if !allowed => return self.same_lengths(),
            other => return Err(format!("{counts:?}, which is allowed: {allowed}, gave {other:?}")),
        }
        let (mut truth, mut narrow) = (Vec::new(), Vec::new());
        for (b, &count) in counts.iter().enumerate() {
            let rows_of = x[b * rows * embed..(b + 1) * rows * embed].chunks(embed);
            self.tokens[b].extend(rows_of.skip(rows - count).map(<[f32]>::to_vec));
            let whole = self.tokens[b].concat();
            let old = whole.len() - count * embed;
            truth.extend_from_slice(&self.subject.whole::<f64>(&whole)[old..]);
            narrow.extend_from_slice(&self.subject.whole::<f32>(&whole)[old..]);
        }
        self.due.push(Due {
            output,
            counts,
            truth,
            narrow,
        });
        self.same_lengths()
    }

    fn same_lengths(&self) -> Result<(), String> {
        let lengths: Vec<usize> = self.tokens.iter().map(Vec::len).collect();
        if self.cache.lens() == lengths {
            return Ok(());
        }
        Err(format!("lengths {:?} instead of {lengths:?}", self.cache.lens()))
    }

    fn act(&mut self) -> Result<(), String> {
        let batch = self.tokens.len();
        match self.numbers.below(10) {
            0 => {
                let by = self.numbers.below(4);
                // A rolling cache may have forgotten too much, a sequence be too short.
                if self.cache.rewind(by).is_ok() {
                    for tokens in &mut self.tokens {
                        tokens.truncate(tokens.len() - by);
                    }
                }
            }
            1 => {
                let b = self.numbers.below(batch);
                let to = self.numbers.below(self.tokens[b].len() + 1);
                if self.cache.truncate(b, to).is_ok() {
                    self.tokens[b].truncate(to);
                }
            }
            2 => {
                let sources: Vec<usize> = (0..batch).map(|_| self.numbers.below(batch)).collect();
                let mut encoder = self.encoder();
                self.cache.reorder(&mut encoder, &sources).unwrap();
                self.encoder = Some(encoder);
                self.tokens = sources
                    .iter()
                    .map(|&source| self.tokens[source].clone())
                    .collect();
            }
            _ => self.step()?,
        }
        self.same_lengths()?;
        if self.numbers.chance(0.3) {
            self.settle()?;
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(support::property(150))]

    /// Prompts and steps of any sizes, ragged ones too, with grouped heads, windows, rolling caches, rotary embedding,
    /// ALiBi, F16 activations and parameters, after rewinds and reorders, on either path: what one causal pass over each
    /// whole sequence gives. The caches' memory is NaN before.
    #[test]
    fn prompts_and_steps_equal_one_causal_pass(seed in any::<u64>()) {
        for gpu in [gpu(), plain()] {
            let mut decoder = Decoder::new(gpu, seed);
            for number in 0..10 {
                decoder.act().map_err(|error| TestCaseError::fail(format!("action {number}: {error}")))?;
            }
            decoder.settle().map_err(TestCaseError::fail)?;
        }
    }
}

/// The GPU's own whole pass in place of the reference's: prefill and steps of one layer against its `forward`.
#[test]
fn steps_equal_forward() {
    let gpu = gpu();
    let config = MultiHeadAttentionConfig::new(48, 6)
        .num_kv_heads(2)
        .attention(AttentionOptions::new().causal(Causal::TopLeft));
    let subject = Subject::new(gpu, config, Some(RotaryOptions::new(8)), 3);
    let x = Numbers::new(4).normals(40 * 48);
    let whole = subject.layer.forward_host(&x, &[40, 48]).unwrap();
    let (truth, narrow) = (subject.whole::<f64>(&x), subject.whole::<f32>(&x));
    check_bound("forward", &whole, &narrow, &truth, false).unwrap();
    for chunks in [vec![40], vec![1; 40], vec![17, 16, 1, 1, 1, 4], vec![39, 0, 1]] {
        let mut cache = subject.layer.kv_cache(1, 40, DType::F32).unwrap();
        let mut got = Vec::new();
        for &rows in &chunks {
            let first = got.len();
            // Without a batch, as forward takes it too.
            let chunk = Tensor::upload(gpu, &x[first..first + rows * 48], &[rows, 48]).unwrap();
            let y = subject.layer.step(&chunk, &mut cache).unwrap();
            assert_eq!(y.shape(), [rows, 48]);
            got.extend(download(&y));
        }
        check_bound(&format!("{chunks:?}"), &got, &narrow, &truth, false).unwrap();
    }
}

/// What an F16 cache holds is what the reference computes, rounded; and the output is what the reference computes from it.
#[test]
fn halves_in_the_cache_cost_their_rounding_alone() {
    all_rows([gpu(), plain()].into_iter().enumerate().map(|(device, gpu)| {
        let config = MultiHeadAttentionConfig::new(24, 6)
            .num_kv_heads(3)
            .with_head_dim(5)
            .attention(AttentionOptions::new().window(Some(10), None));
        let subject = Subject::new(gpu, config, Some(RotaryOptions::new(4).base(50.0)), 9);
        let mut cache = subject.layer.kv_cache(2, 41, DType::F16).unwrap();
        poison(&cache);
        let mut numbers = Numbers::new(8);
        let check = || {
            for rows in [17, 1, 1, 20, 2] {
                let x = numbers.normals(2 * rows * 24);
                let input = Tensor::upload(gpu, &x, &[2, rows, 24]).unwrap();
                let output = subject
                    .layer
                    .step(&input, &mut cache)
                    .map_err(|error| error.to_string())?;
                let (keys, values) = (download(cache.keys()), download(cache.values()));
                let of = [&keys[..], &values[..]];
                let truth = subject.against::<f64>(&x, of, cache.lens(), Causal::BottomRight);
                let narrow = subject.against::<f32>(&x, of, cache.lens(), Causal::BottomRight);
                check_bound("output", &download(&output), &narrow, &truth, false)?;
            }
            Ok(())
        };
        let mut check = check;
        (format!("device {device}"), check())
    }));
}

/// Nothing that a layer with rotary embedding may be asked for at once is lost: masks, weights, extra keys, parts of a
/// head, both pairings.
#[test]
fn forward_with_rotary_is_the_references() {
    let full = |pairing| RotaryOptions::new(6).base(100.0).pairing(pairing);
    let plain_config = MultiHeadAttentionConfig::new(18, 3).with_head_dim(6);
    let causal = AttentionOptions::new().causal(Causal::TopLeft);
    let rows = [
        (plain_config.clone(), full(RotaryPairing::HalfSplit)),
        (plain_config.clone(), full(RotaryPairing::Interleaved)),
        (plain_config.clone().num_kv_heads(1), RotaryOptions::new(4)),
        (
            plain_config
                .clone()
                .attention(causal.clone().window(Some(4), Some(0))),
            full(RotaryPairing::HalfSplit),
        ),
        (
            plain_config
                .clone()
                .add_bias_kv(true)
                .add_zero_attn(true)
                .attention(causal),
            full(RotaryPairing::HalfSplit),
        ),
    ];
    all_rows(rows.into_iter().enumerate().flat_map(|(row, (config, rotary))| {
        [gpu(), plain()].map(|gpu| {
            let subject = Subject::new(gpu, config.clone(), Some(rotary), row as u64);
            let x = Numbers::new(7).normals(2 * 19 * 18);
            let keep: Vec<bool> = (0..2 * 19).map(|at| at % 5 != 3).collect();
            let lengths = [19, 11];
            let input = Tensor::upload(gpu, &x, &[2, 19, 18]).unwrap();
            let padding = Mask::keep_from(gpu, &keep, &[2, 19]).unwrap();
            let kv_lengths = KvLengths::new(gpu, &lengths).unwrap();
            let inputs = MultiHeadInputs::new(&input)
                .key_padding_mask(&padding)
                .kv_lengths(&kv_lengths);
            let result = subject.layer.forward(&inputs, NeedWeights::PerHead).unwrap();
            let truth = whole_call::<f64>(&subject, &x, &keep, &lengths);
            let narrow = whole_call::<f32>(&subject, &x, &keep, &lengths);
            let output = download(&result.output);
            let weights = download(&result.weights.unwrap());
            let checked = check_bound("output", &output, &narrow.output, &truth.output, false)
                .and_then(|()| check_bound("weights", &weights, &narrow.weights, &truth.weights, false));
            (format!("row {row}"), checked)
        })
    }));
}

fn whole_call<T: reference::Real>(
    subject: &Subject,
    x: &[f32],
    keep: &[bool],
    lengths: &[usize],
) -> reference::LayerOutput<T> {
    let x: Vec<T> = x.iter().map(|&x| T::from_f32(x)).collect();
    let parameters = layer_parameters(&subject.parameters);
    reference::MultiHead {
        rotary: subject.rotary,
        key_mask: Some(keep),
        kv_lengths: Some(lengths),
        ..reference::MultiHead::self_attention(&subject.config, parameters, 2, 19, &x)
    }
    .run()
    .unwrap()
}

/// A step that does not fit records nothing: lengths, memory, output and what comes after are as if it had not been.
#[test]
fn a_step_over_capacity_leaves_everything_as_it_was() {
    let gpu = gpu();
    let subject = Subject::new(
        gpu,
        MultiHeadAttentionConfig::new(16, 2),
        Some(RotaryOptions::new(8)),
        1,
    );
    let x = Numbers::new(2).normals(2 * 8 * 16);
    let mut cache = subject.layer.kv_cache(2, 8, DType::F32).unwrap();
    let prompt: Vec<f32> = x.chunks(8 * 16).flat_map(|x| &x[..6 * 16]).copied().collect();
    let prompt = Tensor::upload(gpu, &prompt, &[2, 6, 16]).unwrap();
    subject.layer.prefill(&prompt, &mut cache).unwrap();
    let before = (
        cache.lens().to_vec(),
        download(cache.keys()),
        download(cache.values()),
    );

    let untouched = Tensor::upload(gpu, &[7.0f32; 2 * 3 * 16], &[2, 3, 16]).unwrap();
    let three = Tensor::upload(gpu, &[1.0f32; 2 * 3 * 16], &[2, 3, 16]).unwrap();
    let mut encoder = gpu.encoder();
    let dispatches = gpu.dispatches();
    for counts in [[3, 3], [0, 3]] {
        let error = subject
            .layer
            .record_step_ragged(&mut encoder, &three, &counts, &mut cache, &untouched)
            .unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Capacity(_)), "{text}");
        assert!(
            text.contains('6') && text.contains('3') && text.contains('8'),
            "{text}"
        );
    }
    assert_eq!(gpu.dispatches(), dispatches);
    // The same encoder goes on.
    let rest: Vec<f32> = x.chunks(8 * 16).flat_map(|x| &x[6 * 16..]).copied().collect();
    let rest = Tensor::upload(gpu, &rest, &[2, 2, 16]).unwrap();
    let output = Tensor::zeros(gpu, DType::F32, &[2, 2, 16]).unwrap();
    gpu.submit(encoder).unwrap();
    assert_eq!(download(&untouched), [7.0; 2 * 3 * 16]);
    assert_eq!(
        (
            cache.lens().to_vec(),
            download(cache.keys()),
            download(cache.values())
        ),
        before
    );
    let mut encoder = gpu.encoder();
    subject
        .layer
        .record_step(&mut encoder, &rest, &mut cache, &output)
        .unwrap();
    gpu.submit(encoder).unwrap();
    let last = |whole: Vec<f64>| whole[6 * 16..].to_vec();
    let truth: Vec<f64> = x.chunks(8 * 16).flat_map(|x| last(subject.whole(x))).collect();
    let narrow: Vec<f32> = x
        .chunks(8 * 16)
        .flat_map(|x| subject.whole::<f32>(x)[6 * 16..].to_vec())
        .collect();
    check_bound("after it", &download(&output), &narrow, &truth, false).unwrap();
    assert!(subject.layer.step(&prompt, &mut cache).is_err());
    // The tables end before the cache does.
    let short = Rotary::new(gpu, RotaryOptions::new(8), 5).unwrap();
    let layer = MultiHeadAttention::seeded(gpu, MultiHeadAttentionConfig::new(16, 2), 1)
        .unwrap()
        .with_rotary(short)
        .unwrap();
    let mut cache = layer.kv_cache(2, 8, DType::F32).unwrap();
    let error = layer.step(&prompt, &mut cache).unwrap_err().to_string();
    assert!(error.contains("tables hold 5") && cache.is_empty(), "{error}");
    let inputs = MultiHeadInputs::new(&prompt);
    let error = layer.forward(&inputs, NeedWeights::No).unwrap_err();
    assert!(matches!(error, Error::Capacity(_)), "{error}");
}

#[test]
fn a_thousand_steps_build_no_pipeline_and_hold_memory_flat() {
    let gpu = Gpu::new().unwrap();
    let config = MultiHeadAttentionConfig::new(16, 4).num_kv_heads(2);
    let rotary = Rotary::new(&gpu, RotaryOptions::new(4), 1_000).unwrap();
    let layer = MultiHeadAttention::seeded(&gpu, config, 1)
        .unwrap()
        .with_rotary(rotary)
        .unwrap();
    layer.warm_up(DType::F32).unwrap();
    let mut cache = layer.kv_cache(1, 1_000, DType::F32).unwrap();
    cache.warm_up(DType::F32).unwrap();
    let prompt = Tensor::zeros(&gpu, DType::F32, &[1, 1_000, 16]).unwrap();
    let token = Tensor::upload(&gpu, &[0.5f32; 16], &[1, 1, 16]).unwrap();
    // The longest prompt and one step take what memory they need.
    for tokens in [prompt.slice(1, 0..999).unwrap(), token.clone()] {
        layer.step(&tokens, &mut cache).unwrap();
    }
    cache.clear(0).unwrap();
    let output = Tensor::zeros(&gpu, DType::F32, &[1, 1, 16]).unwrap();
    gpu.wait().unwrap();
    let before = (gpu.pipelines(), gpu.held_bytes(), gpu.scratch_bytes());
    for length in 1..=1_000 {
        let mut encoder = gpu.encoder();
        layer
            .record_step(&mut encoder, &token, &mut cache, &output)
            .unwrap();
        gpu.submit(encoder).unwrap();
        assert_eq!(cache.len(0), length);
        assert_eq!(
            (gpu.pipelines(), gpu.held_bytes(), gpu.scratch_bytes()),
            before,
            "step {length}"
        );
    }
    gpu.wait().unwrap();
}

/// Each refusal says what was given and what to do, and leaves the cache as it was.
#[test]
fn what_does_not_fit_is_refused() {
    let gpu = gpu();
    let base = || MultiHeadAttentionConfig::new(16, 4).num_kv_heads(2);
    let layer = |config| MultiHeadAttention::seeded(gpu, config, 1).unwrap();
    let options = AttentionOptions::new;
    let window = || options().window(Some(3), Some(0));
    let rotary = || Rotary::new(gpu, RotaryOptions::new(4), 32).unwrap();
    let shape = KvCacheShape::new(2, 2, 8, 4);
    let cache = |shape| KvCache::new(gpu, shape, DType::F32).unwrap();
    let rolling = |window| KvCache::rolling(gpu, shape, DType::F32, window).unwrap();
    let x = Tensor::zeros(gpu, DType::F32, &[2, 2, 16]).unwrap();
    let y = Tensor::zeros(gpu, DType::F32, &[2, 2, 16]).unwrap();
    let one = Tensor::zeros(gpu, DType::F32, &[2, 16]).unwrap();
    let narrow = Tensor::zeros(gpu, DType::F32, &[2, 2, 15]).unwrap();
    let words = Tensor::zeros(gpu, DType::U32, &[2, 2, 16]).unwrap();
    let slopes = window().alibi(vec![0.5; 4]);
    let inside = {
        let held = cache(KvCacheShape::new(2, 2, 8, 4));
        let view = Tensor::from_buffer(gpu, held.keys().buffer(), 0, DType::F32, &[2, 2, 16]).unwrap();
        (held, view)
    };
    let plain_cache = || cache(shape);
    let rows = [
        (
            layer(base().add_bias_kv(true)),
            plain_cache(),
            &x,
            &y,
            "add_bias_kv = true",
        ),
        (
            layer(base().add_zero_attn(true)),
            plain_cache(),
            &x,
            &y,
            "add_zero_attn = true",
        ),
        (
            layer(base().attention(options().query_offset(3))),
            plain_cache(),
            &x,
            &y,
            "query_offset = 3",
        ),
        (
            layer(base()),
            cache(KvCacheShape::new(3, 2, 8, 4)),
            &x,
            &y,
            "[3, 2, 8, 4]",
        ),
        (
            layer(base()),
            cache(KvCacheShape::new(2, 4, 8, 4)),
            &x,
            &y,
            "[2, 4, 8, 4]",
        ),
        (
            layer(base()),
            cache(KvCacheShape::new(2, 2, 8, 5)),
            &x,
            &y,
            "[2, 2, 8, 5]",
        ),
        (layer(base()), plain_cache(), &one, &one, "x of 1 sequences"),
        (
            layer(base()),
            plain_cache().with_rotary(rotary()).unwrap(),
            &x,
            &y,
            "the layer has no rotary embedding and the cache has a rotary embedding",
        ),
        (
            layer(base()).with_rotary(rotary()).unwrap(),
            plain_cache(),
            &x,
            &y,
            "the layer has a rotary embedding of its own and the cache has no rotary embedding",
        ),
        (
            layer(base()).with_rotary(rotary()).unwrap(),
            plain_cache().with_rotary(rotary()).unwrap(),
            &x,
            &y,
            "clone of one Rotary",
        ),
        (layer(base()), rolling(4), &x, &y, "unbounded"),
        (
            layer(base().attention(window())),
            rolling(5),
            &x,
            &y,
            "window of 5 positions, the layer's is 4",
        ),
        (layer(base().attention(slopes)), rolling(4), &x, &y, "ALiBi"),
        (layer(base().kdim(8)), plain_cache(), &x, &y, "kdim 8"),
        (layer(base()), plain_cache(), &narrow, &narrow, "[B, L, 16]"),
        (layer(base()), plain_cache(), &words, &y, "U32"),
        (layer(base()), plain_cache(), &x, &words, "U32"),
        (layer(base()), plain_cache(), &x, &narrow, "[2, 2, 15]"),
        (layer(base()), plain_cache(), &x, &x, "one buffer"),
        (layer(base()), inside.0, &x, &inside.1, "cached keys"),
    ];
    all_rows(rows.into_iter().map(|(layer, mut cache, x, output, says)| {
        let mut encoder = gpu.encoder();
        let told = match layer.record_step(&mut encoder, x, &mut cache, output) {
            Ok(()) => Err("was recorded".to_owned()),
            Err(error) if error.to_string().contains(says) && cache.is_empty() => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        (says.to_owned(), told)
    }));

    let mut held = plain_cache();
    let subject = layer(base());
    for (counts, says) in [
        (&[1][..], "1 counts for 2"),
        (&[1, 3], "3 positions for sequence 1"),
    ] {
        let error = subject
            .step_ragged(&x, counts, &mut held)
            .unwrap_err()
            .to_string();
        assert!(error.contains(says) && held.is_empty(), "{error}");
    }
    let elsewhere = KvCache::new(plain(), shape, DType::F32).unwrap();
    let error = subject.step(&x, &mut { elsewhere }).unwrap_err();
    assert!(matches!(error, Error::WrongDevice(_)), "{error}");
    let no_window = subject
        .rolling_kv_cache(1, 4, DType::F32)
        .unwrap_err()
        .to_string();
    assert!(no_window.contains("AttentionOptions::window"), "{no_window}");
    let layer_with = layer(base().attention(window()));
    assert!(layer_with.rolling_kv_cache(1, 0, DType::F32).is_err());
    assert_eq!(
        layer_with.rolling_kv_cache(1, 2, DType::F32).unwrap().window(),
        Some(4)
    );

    // Rotary embedding of a layer.
    let wide = Rotary::new(gpu, RotaryOptions::new(6), 4).unwrap();
    assert!(matches!(layer(base()).with_rotary(wide), Err(Error::Shape(_))));
    let table = Tensor::zeros(gpu, DType::F32, &[2, 8, 2]).unwrap();
    let each = Rotary::from_tables(RotaryPairing::HalfSplit, table.clone(), table).unwrap();
    assert!(matches!(layer(base()).with_rotary(each), Err(Error::Shape(_))));
    let other = Rotary::new(plain(), RotaryOptions::new(4), 4).unwrap();
    assert!(matches!(
        layer(base()).with_rotary(other),
        Err(Error::WrongDevice(_))
    ));
    let offset = layer(base().attention(options().query_offset(1)));
    assert!(matches!(offset.with_rotary(rotary()), Err(Error::Option(_))));
    let turned = layer(base()).with_rotary(rotary()).unwrap();
    assert_eq!(turned.rotary().unwrap().rotary_dim(), 4);
    let lengths = KvLengths::new(gpu, &[2, 1]).unwrap();
    for inputs in [
        MultiHeadInputs::new(&x).key_value(&y, &y),
        MultiHeadInputs::new(&x)
            .causal(Causal::BottomRight)
            .kv_lengths(&lengths),
    ] {
        let error = turned.forward(&inputs, NeedWeights::No).unwrap_err();
        assert!(matches!(error, Error::Option(_)), "{error}");
    }
    assert!(
        turned
            .forward(&MultiHeadInputs::new(&x).key_value(&x, &x), NeedWeights::No)
            .is_ok()
    );
    assert!(matches!(
        turned.cross_cache(&x, &x, DType::F32),
        Err(Error::Option(_))
    ));
}

/// Keys and values that were projected once give what a call that projects them gives, to the bit: with masks, lengths,
/// weights, causal order, extra keys and sizes of their own.
#[test]
fn a_cross_cache_equals_its_keys_and_values() {
    let base = MultiHeadAttentionConfig::new(18, 6)
        .num_kv_heads(2)
        .with_head_dim(5);
    let rows = [
        (base.clone(), None, false),
        (base.clone().kdim(7).vdim(11), None, false),
        (
            base.clone().kdim(7).vdim(7).bias(false),
            Some(Causal::BottomRight),
            true,
        ),
        (
            base.clone().add_bias_kv(true).add_zero_attn(true),
            Some(Causal::TopLeft),
            true,
        ),
        (base.clone().dtype(DType::F16).kdim(7), None, true),
    ];
    all_rows(
        rows.into_iter()
            .enumerate()
            .flat_map(|(row, (config, causal, hidden))| {
                [gpu(), plain()].map(|gpu| {
                    let parameters = parameters(&config, row as u64);
                    let layer = MultiHeadAttention::new(gpu, config.clone(), &parameters).unwrap();
                    let mut numbers = Numbers::new(row as u64);
                    let mut tensor = |rows: usize, width: usize| {
                        Tensor::upload(gpu, &numbers.normals(2 * rows * width), &[2, rows, width]).unwrap()
                    };
                    let (key, value) = (tensor(13, config.kdim), tensor(13, config.vdim));
                    let value = if config.kdim == config.vdim {
                        key.clone()
                    } else {
                        value
                    };
                    let cache = layer.cross_cache(&key, &value, DType::F32).unwrap();
                    let extra = config.extra_keys();
                    assert_eq!((cache.len(), cache.keys().shape()[2]), (13, 13 + extra));
                    let keep: Vec<bool> = (0..26).map(|at| at % 4 != 1).collect();
                    let padding = Mask::keep_from(gpu, &keep, &[2, 13]).unwrap();
                    let bias = Mask::bias_from(gpu, &Numbers::new(3).normals(13), &[1, 1, 1, 13]).unwrap();
                    let lengths = KvLengths::new(gpu, &[13, 9]).unwrap();
                    let mut checked = Ok(());
                    for queries in [1, 4, 20] {
                        let x = tensor(queries, 18);
                        let mut inputs = MultiHeadInputs::new(&x);
                        if hidden {
                            inputs = inputs
                                .key_padding_mask(&padding)
                                .attn_mask(&bias)
                                .kv_lengths(&lengths);
                        }
                        inputs.causal = causal;
                        let run = |inputs: &MultiHeadInputs| {
                            let result = layer.forward(inputs, NeedWeights::PerHead).unwrap();
                            let fast = layer.forward(inputs, NeedWeights::No).unwrap();
                            (
                                download(&result.output),
                                download(&result.weights.unwrap()),
                                download(&fast.output),
                            )
                        };
                        let expected = run(&inputs.key_value(&key, &value));
                        let got = run(&inputs.cross_cache(&cache));
                        let same = same_bits(&got.0, &expected.0)
                            && same_bits(&got.1, &expected.1)
                            && same_bits(&got.2, &expected.2);
                        if !same {
                            checked = Err(format!("{queries} queries: {got:?} instead of {expected:?}"));
                        }
                    }
                    (format!("row {row}"), checked)
                })
            }),
    );
}

/// Keys and values in F16, in an encoder of the caller's, filled and attended to in one submit.
#[test]
fn a_cross_cache_of_halves_costs_their_rounding_alone() {
    for gpu in [gpu(), plain()] {
        let config = MultiHeadAttentionConfig::new(18, 6)
            .num_kv_heads(3)
            .with_head_dim(5)
            .kdim(8)
            .vdim(8);
        let subject = Subject::new(gpu, config, None, 4);
        let mut numbers = Numbers::new(1);
        let encoded = numbers.normals(2 * 7 * 8);
        let key = Tensor::upload(gpu, &encoded, &[2, 7, 8]).unwrap();
        let x = numbers.normals(2 * 3 * 18);
        let input = Tensor::upload(gpu, &x, &[2, 3, 18]).unwrap();
        let output = Tensor::zeros(gpu, DType::F32, &[2, 3, 18]).unwrap();
        let mut encoder = gpu.encoder();
        let cache = subject
            .layer
            .record_cross_cache(&mut encoder, &key, &key, DType::F16)
            .unwrap();
        let inputs = MultiHeadInputs::new(&input).cross_cache(&cache);
        subject
            .layer
            .record(&mut encoder, &inputs, &MultiHeadOutputs::new(&output))
            .unwrap();
        gpu.submit(encoder).unwrap();
        assert_eq!(cache.keys().dtype(), DType::F16);
        let (keys, values) = (download(cache.keys()), download(cache.values()));
        let whole = subject.layer.cross_cache(&key, &key, DType::F32).unwrap();
        for (half, whole) in [(&keys, whole.keys()), (&values, whole.values())] {
            for (half, whole) in half.iter().zip(download(whole)) {
                let error = (half - whole).abs();
                assert!(
                    error <= f32::from(f16::EPSILON) * whole.abs().max(1e-3),
                    "{half} {whole}"
                );
            }
        }
        let of = [&keys[..], &values[..]];
        let truth = subject.against::<f64>(&x, of, &[7, 7], Causal::None);
        let narrow = subject.against::<f32>(&x, of, &[7, 7], Causal::None);
        check_bound("output", &download(&output), &narrow, &truth, false).unwrap();
    }
}

#[test]
fn a_cross_cache_that_does_not_fit_is_refused() {
    let gpu = gpu();
    let config = || MultiHeadAttentionConfig::new(16, 4).kdim(8).vdim(6);
    let layer = MultiHeadAttention::seeded(gpu, config(), 1).unwrap();
    let zeros = |shape: &[usize]| Tensor::zeros(gpu, DType::F32, shape).unwrap();
    let (key, value) = (zeros(&[2, 5, 8]), zeros(&[2, 5, 6]));
    for (key, value, says) in [
        (&zeros(&[5, 8]), &value, "[B, L, 8]"),
        (&zeros(&[2, 5, 9]), &value, "[2, 5, 9]"),
        (&key, &zeros(&[2, 4, 6]), "[2, 4, 6]"),
        (&key, &key, "expected [2, 5, 6]"),
    ] {
        let error = layer.cross_cache(key, value, DType::F32).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let error = layer.cross_cache(&key, &value, DType::U32).unwrap_err();
    assert!(matches!(error, Error::DType(_)), "{error}");
    let cache = layer.cross_cache(&key, &value, DType::F32).unwrap();
    let x = zeros(&[2, 1, 16]);
    let other = MultiHeadAttention::seeded(gpu, config(), 1).unwrap();
    let short = KvLengths::new(gpu, &[6, 1]).unwrap();
    let (three, one) = (zeros(&[3, 1, 16]), zeros(&[1, 16]));
    for (layer, inputs, says) in [
        (
            &other,
            MultiHeadInputs::new(&x).cross_cache(&cache),
            "another layer",
        ),
        (
            &layer,
            MultiHeadInputs::new(&x)
                .key_value(&key, &value)
                .cross_cache(&cache),
            "one or the other",
        ),
        (
            &layer,
            MultiHeadInputs::new(&three).cross_cache(&cache),
            "a batch of 2",
        ),
        (
            &layer,
            MultiHeadInputs::new(&one).cross_cache(&cache),
            "a batch of 2",
        ),
        (
            &layer,
            MultiHeadInputs::new(&x).cross_cache(&cache).kv_lengths(&short),
            "key length 6",
        ),
    ] {
        let error = layer.forward(&inputs, NeedWeights::No).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    // A clone is the same layer; a sequence without keys gives the output's bias.
    let inputs = MultiHeadInputs::new(&x).cross_cache(&cache);
    assert!(layer.clone().forward(&inputs, NeedWeights::No).is_ok());
    let empty = layer
        .cross_cache(&zeros(&[2, 0, 8]), &zeros(&[2, 0, 6]), DType::F16)
        .unwrap();
    assert!(empty.is_empty());
    let inputs = MultiHeadInputs::new(&x).cross_cache(&empty);
    let output = layer.forward(&inputs, NeedWeights::No).unwrap().output;
    assert_eq!(download(&output), [0.0; 32]);
}
