//! Calls of whatever shapes, types and options, mostly wrong ones: each is answered, none panics, and one that is refused
//! leaves what the caller owns as it was. Checkpoint files have the same in `src/weights/tests/hostile.rs`.
//! `PROPTEST_CASES=100000` goes on for longer.

use half::f16;
use multihead::{
    Align, Attention, AttentionInputs, AttentionOptions, AttentionOutputs, AttentionPath, AttentionShape,
    Causal, CuSeqlens, DType, Error, Gpu, KvCache, KvCacheShape, KvLengths, Linear, Mask, MultiHeadAttention,
    MultiHeadAttentionConfig, MultiHeadInputs, MultiHeadOutputs, NeedWeights, PackedInputs, Parameters,
    Result, Rotary, RotaryOptions, RotaryPairing, RotaryPositions, RotaryScaling, Tensor, Wanted,
};
use proptest::prelude::*;

use crate::support::{self, Numbers, download, gpu};

/// Draws arguments.
struct Draw(Numbers);

impl Draw {
    fn of<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.0.below(choices.len())].clone()
    }

    fn coin(&mut self, probability: f32) -> bool {
        self.0.chance(probability)
    }

    /// A size that a buffer has.
    fn size(&mut self) -> usize {
        self.of(&[0, 1, 1, 2, 2, 3, 4, 4, 5, 8, 33])
    }

    /// Any size.
    fn count(&mut self) -> usize {
        let large = [
            64,
            65,
            4096,
            1 << 20,
            1 << 31,
            u32::MAX as usize,
            usize::MAX / 2,
            usize::MAX,
        ];
        if self.coin(0.8) {
            self.size()
        } else {
            self.of(&large)
        }
    }

    /// A size that fits in memory, or by far not.
    fn capacity(&mut self) -> usize {
        if self.coin(0.9) {
            self.size()
        } else {
            self.of(&[1 << 40, usize::MAX / 2, usize::MAX])
        }
    }

    fn number(&mut self) -> f64 {
        let numbers = [
            0.0,
            -0.0,
            1.0,
            0.125,
            -3.0,
            1e-30,
            1e30,
            1e300,
            f64::INFINITY,
            f64::NEG_INFINITY,
            f64::NAN,
        ];
        self.of(&numbers)
    }

    /// A shape that begins as `like`, with axes that differ, are missing or too many.
    fn shape(&mut self, like: &[usize]) -> Vec<usize> {
        let mut shape = like.to_vec();
        if self.coin(0.2) {
            let size = self.size();
            if let Some(place) = shape.len().checked_sub(1) {
                let place = self.0.below(place + 1);
                shape[place] = size;
            }
        }
        if self.coin(0.05) {
            shape.pop();
        }
        // A tensor has at most four.
        if self.coin(0.05) && shape.len() < 4 {
            let size = self.size();
            shape.insert(0, size);
        }
        shape
    }

    fn dtype(&mut self) -> DType {
        self.of(&[DType::F32, DType::F32, DType::F32, DType::F16, DType::U32])
    }

    /// A tensor like this, as a view of some kind.
    fn tensor(&mut self, gpu: &Gpu, like: &[usize]) -> Tensor {
        let shape = self.shape(like);
        let count = shape.iter().product();
        let values = self.0.normals(count);
        let tensor = match self.dtype() {
            DType::F16 => {
                let halves: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
                Tensor::upload(gpu, &halves, &shape)
            }
            DType::U32 if self.coin(0.3) => Tensor::upload(gpu, &vec![1u32; count], &shape),
            _ => Tensor::upload(gpu, &values, &shape),
        }
        .unwrap();
        let view = match self.0.below(8) {
            0 => {
                let axes: Vec<usize> = (0..self.size()).map(|_| self.size()).collect();
                tensor.permute(&axes)
            }
            1 => {
                let (axis, from, to) = (self.size(), self.size(), self.size());
                tensor.slice(axis, from..to)
            }
            2 => tensor.split_heads(self.count()),
            3 => tensor.merge_heads(),
            4 => {
                let shape = self.shape(like);
                tensor.broadcast_to(&shape)
            }
            5 => {
                let shape: Vec<usize> = (0..self.size()).map(|_| self.count()).collect();
                tensor.reshape(&shape)
            }
            _ => Ok(tensor.clone()),
        };
        view.unwrap_or(tensor)
    }

    fn mask(&mut self, gpu: &Gpu, like: &[usize]) -> Option<Mask> {
        let mut like = like.to_vec();
        for axis in &mut like {
            if self.coin(0.3) {
                *axis = 1;
            }
        }
        let shape = self.shape(&like);
        let count: usize = shape.iter().product();
        let mask = match self.0.below(4) {
            0 => Mask::keep_from(gpu, &vec![true; count], &shape),
            1 => Mask::ignore_from(gpu, &vec![false; count], &shape),
            2 => Mask::bias_from(gpu, &vec![-1.0; count], &shape),
            _ => {
                let tensor = self.tensor(gpu, &like);
                self.of(&[Mask::keep, Mask::ignore, Mask::bias])(tensor)
            }
        };
        let mask = mask.ok()?;
        Some(if self.coin(0.2) {
            mask.with_short_keys()
        } else {
            mask
        })
    }

    fn lengths(&mut self, gpu: &Gpu, batch: usize) -> Option<KvLengths> {
        let like = self.shape(&[batch]);
        let lengths: Vec<usize> = (0..like.iter().product()).map(|_| self.size()).collect();
        if self.coin(0.5) {
            KvLengths::new(gpu, &lengths).ok()
        } else {
            let lengths: Vec<u32> = lengths.into_iter().map(|_| self.count() as u32).collect();
            KvLengths::from_tensor(Tensor::upload(gpu, &lengths, &like).unwrap()).ok()
        }
    }

    fn options(&mut self) -> AttentionOptions {
        let mut options = AttentionOptions::new()
            .causal(self.of(&[Causal::None, Causal::TopLeft, Causal::BottomRight]))
            .align(self.of(&[Align::TopLeft, Align::BottomRight]));
        let width = [
            None,
            None,
            Some(0),
            Some(1),
            Some(7),
            Some(1 << 31),
            Some(u32::MAX),
        ];
        options = options.window(self.of(&width), self.of(&width));
        if self.coin(0.2) {
            options = options.scale(self.number() as f32);
        }
        if self.coin(0.2) {
            options = options.softcap(self.number() as f32);
        }
        if self.coin(0.2) {
            let slopes: Vec<f32> = (0..self.size()).map(|_| self.number() as f32).collect();
            options = options.alibi(slopes);
        }
        if self.coin(0.2) {
            options = options.query_offset(self.of(&[1, -1, 70, 1 << 29, -(1 << 40), i64::MIN, i64::MAX]));
        }
        if self.coin(0.1) {
            options = options.always_visible_keys(self.count());
        }
        options
    }

    fn wanted(&mut self) -> Wanted {
        let mut wanted = Wanted::output();
        wanted.lse = self.coin(0.3);
        wanted.weights = self.coin(0.2);
        wanted.mean_weights = self.coin(0.2);
        wanted.present = self.coin(0.2);
        wanted
    }

    fn path(&mut self) -> AttentionPath {
        self.of(&[AttentionPath::Auto, AttentionPath::Fused, AttentionPath::Composed])
    }

    fn config(&mut self) -> MultiHeadAttentionConfig {
        let (embed, heads) = if self.coin(0.7) {
            self.of(&[(8, 2), (4, 4), (6, 3), (12, 1)])
        } else {
            (self.size(), self.size())
        };
        let mut config = MultiHeadAttentionConfig::new(embed, heads)
            .bias(self.coin(0.5))
            .add_bias_kv(self.coin(0.2))
            .add_zero_attn(self.coin(0.2));
        if self.coin(0.2) {
            config = config.num_kv_heads(self.size());
        }
        if self.coin(0.2) {
            config = config.with_head_dim(self.size());
        }
        if self.coin(0.2) {
            config = config.kdim(self.size()).vdim(self.size());
        }
        if self.coin(0.2) {
            config = config.dtype(self.dtype());
        }
        if self.coin(0.5) {
            config = config.attention(self.options());
        }
        config
    }

    fn rotary(&mut self) -> RotaryOptions {
        let mut options = RotaryOptions::new(self.size());
        options = options.pairing(self.of(&[RotaryPairing::HalfSplit, RotaryPairing::Interleaved]));
        if self.coin(0.3) {
            options = options.base(self.number());
        }
        if self.coin(0.3) {
            options = options.scaling(RotaryScaling::Linear {
                factor: self.number(),
            });
        }
        if self.coin(0.2) {
            options = options.scaling(RotaryScaling::Llama3 {
                factor: self.number(),
                low_freq_factor: self.number(),
                high_freq_factor: self.number(),
                original_max_positions: self.count(),
            });
        }
        options
    }
}

/// What stands in an output before a call that may be refused.
const BEFORE: f32 = 77.0;

/// Accepted or refused for a reason that has words. What is refused is the call's fault, never the device's.
fn answered<T>(answer: Result<T>) -> std::result::Result<Option<T>, TestCaseError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(
            error @ (Error::DeviceLost(_)
            | Error::Wgpu { .. }
            | Error::Shader { .. }
            | Error::NoDevice { .. }),
        ) => Err(TestCaseError::fail(format!("a wrong argument gave {error:?}"))),
        Err(error) => {
            prop_assert!(error.to_string().len() > 20, "{error:?}");
            Ok(None)
        }
    }
}

/// A recorded call: if it is refused, its output is what it was, and the encoder still serves.
fn recorded(
    gpu: &Gpu,
    output: &Tensor,
    record: impl FnOnce(&mut multihead::wgpu::CommandEncoder) -> Result<()>,
) -> std::result::Result<(), TestCaseError> {
    let mut encoder = gpu.encoder();
    let accepted = answered(record(&mut encoder))?.is_some();
    gpu.submit(encoder)
        .map_err(|error| TestCaseError::fail(format!("submit: {error}")))?;
    if !accepted && output.dtype() == DType::F32 {
        let after = download(output);
        prop_assert!(
            after.iter().all(|&value| value == BEFORE),
            "a refused call wrote {after:?}"
        );
    }
    Ok(())
}

fn filled(gpu: &Gpu, shape: &[usize]) -> Tensor {
    Tensor::upload(gpu, &vec![BEFORE; shape.iter().product()], shape).unwrap()
}

/// The operator, recorded and run.
fn operator(gpu: &Gpu, draw: &mut Draw) -> std::result::Result<(), TestCaseError> {
    let Some(attention) = answered(Attention::new(gpu, draw.options()))? else {
        return Ok(());
    };
    let attention = attention.with_path(draw.path());
    let [batch, heads, queries, keys, size] = [(); 5].map(|()| draw.size());
    let kv_heads = if draw.coin(0.7) { heads } else { draw.size() };
    let query = draw.tensor(gpu, &[batch, heads, queries, size]);
    let key = draw.tensor(gpu, &[batch, kv_heads, keys, size]);
    let value = draw.tensor(gpu, &[batch, kv_heads, keys, size]);
    let past = [(); 2].map(|()| draw.tensor(gpu, &[batch, kv_heads, 3, size]));
    let sinks = draw.tensor(gpu, &[heads]);
    answered(attention.choice(
        &AttentionShape::new(batch, heads, queries, size),
        draw.dtype(),
        draw.coin(0.3),
    ))?;
    let mask = draw.mask(gpu, &[batch, heads, queries, keys]);
    let key_mask = draw.mask(gpu, &[batch, keys]);
    let lengths = draw.lengths(gpu, batch);
    let mut inputs = AttentionInputs::new(&query, &key, &value);
    inputs.mask = mask.as_ref().filter(|_| draw.coin(0.3));
    inputs.key_mask = key_mask.as_ref().filter(|_| draw.coin(0.3));
    inputs.kv_lengths = lengths.as_ref().filter(|_| draw.coin(0.3));
    inputs.past = draw.coin(0.1).then_some((&past[0], &past[1]));
    inputs.sinks = draw.coin(0.2).then_some(&sinks);
    answered(inputs.shape())?;
    if let Some(result) = answered(attention.run(&inputs, draw.wanted()))? {
        answered(result.output.merge_heads())?;
    }
    let shape = draw.shape(&[batch, heads, queries, size]);
    let output = filled(gpu, &shape);
    let weights_shape = draw.shape(&[batch, heads, queries, keys]);
    let weights = filled(gpu, &weights_shape);
    let mut outputs = AttentionOutputs::new(&output);
    outputs.weights = draw.coin(0.2).then_some(&weights);
    outputs.lse = draw.coin(0.1).then_some(&output);
    outputs.mean_weights = draw.coin(0.1).then_some(&weights);
    outputs.present_key = draw.coin(0.1).then_some(&key);
    recorded(gpu, &output, |encoder| {
        attention.record(encoder, &inputs, &outputs)
    })
}

/// What a call would take, for any sizes.
fn plans(gpu: &Gpu, draw: &mut Draw) -> std::result::Result<(), TestCaseError> {
    let Some(attention) = answered(Attention::new(gpu, draw.options()))? else {
        return Ok(());
    };
    let attention = attention.with_path(draw.path());
    let shape = AttentionShape {
        batch: draw.count(),
        heads: draw.count(),
        kv_heads: draw.count(),
        queries: draw.count(),
        keys: draw.count(),
        head_dim: draw.count(),
        value_dim: draw.count(),
    };
    answered(attention.plan(&shape, draw.dtype(), draw.wanted()))?;
    let axes = [(); 4].map(|()| draw.capacity());
    answered(Tensor::zeros(gpu, draw.dtype(), &axes[..draw.size().min(4)]))?;
    let buffer = filled(gpu, &[8]);
    let (offset, axes) = (draw.count() as u64, [(); 2].map(|()| draw.count()));
    answered(Tensor::from_buffer(
        gpu,
        buffer.buffer(),
        offset,
        draw.dtype(),
        &axes,
    ))?;
    let strides = [(); 2].map(|()| draw.count());
    answered(Tensor::from_buffer_strided(
        gpu,
        buffer.buffer(),
        offset,
        draw.dtype(),
        &axes,
        &strides,
    ))?;
    Ok(())
}

/// Sequences end to end.
fn packed(gpu: &Gpu, draw: &mut Draw) -> std::result::Result<(), TestCaseError> {
    let Some(attention) = answered(Attention::new(gpu, draw.options()))? else {
        return Ok(());
    };
    let bounds = |draw: &mut Draw| {
        let mut bounds: Vec<usize> = (0..draw.size()).map(|_| draw.count()).collect();
        if draw.coin(0.7) {
            bounds.retain(|&bound| bound < 40);
            bounds.push(0);
            bounds.sort_unstable();
        }
        bounds
    };
    let (queries, keys) = (bounds(draw), bounds(draw));
    let Some(cu_seqlens) = answered(CuSeqlens::new(gpu, &queries, &keys))? else {
        return Ok(());
    };
    let (heads, size) = (draw.size(), draw.size());
    let last = |bounds: &[usize]| bounds.last().map_or(0, |&last| last.min(50));
    let query = draw.tensor(gpu, &[last(&queries), heads, size]);
    let key = draw.tensor(gpu, &[last(&keys), heads, size]);
    let value = draw.tensor(gpu, &[last(&keys), heads, size]);
    answered(attention.run_packed(&PackedInputs::new(&query, &key, &value, &cu_seqlens)))?;
    Ok(())
}

/// The layer and its caches.
fn layer(gpu: &Gpu, draw: &mut Draw) -> std::result::Result<(), TestCaseError> {
    let config = draw.config();
    let mut parameters = match answered(Parameters::init(&config, 1))? {
        Some(parameters) => parameters,
        None => return Ok(()),
    };
    if draw.coin(0.1) {
        parameters.k_proj_weight.pop();
        parameters.out_proj_bias = None;
    }
    let Some(mut layer) = answered(MultiHeadAttention::new(gpu, config.clone(), &parameters))? else {
        return Ok(());
    };
    if draw.coin(0.3) {
        let Some(rotary) = answered(Rotary::new(gpu, draw.rotary(), draw.size()))? else {
            return Ok(());
        };
        match answered(layer.with_rotary(rotary))? {
            Some(with) => layer = with,
            None => return Ok(()),
        }
    }
    let layer = layer.with_path(draw.path());
    let [batch, queries, keys] = [(); 3].map(|()| draw.size());
    let x = draw.tensor(gpu, &[batch, queries, config.embed_dim]);
    let key = draw.tensor(gpu, &[batch, keys, config.kdim]);
    let value = draw.tensor(gpu, &[batch, keys, config.vdim]);
    let mask = draw.mask(gpu, &[batch, config.num_heads, queries, keys]);
    let padding = draw.mask(gpu, &[batch, keys]);
    let lengths = draw.lengths(gpu, batch);
    let cross = answered(layer.cross_cache(&key, &value, draw.dtype()))?;
    let mut inputs = MultiHeadInputs::new(&x);
    if draw.coin(0.5) {
        inputs = inputs.key_value(&key, &value);
    }
    inputs.cross_cache = cross.as_ref().filter(|_| draw.coin(0.2));
    inputs.attn_mask = mask.as_ref().filter(|_| draw.coin(0.3));
    inputs.key_padding_mask = padding.as_ref().filter(|_| draw.coin(0.3));
    inputs.kv_lengths = lengths.as_ref().filter(|_| draw.coin(0.2));
    answered(layer.forward(
        &inputs,
        draw.of(&[NeedWeights::No, NeedWeights::Averaged, NeedWeights::PerHead]),
    ))?;
    let shape = draw.shape(&[batch, queries, config.embed_dim]);
    let output = filled(gpu, &shape);
    recorded(gpu, &output, |encoder| {
        layer.record(encoder, &inputs, &MultiHeadOutputs::new(&output))
    })?;

    let Some(mut cache) = answered(layer.kv_cache(draw.size(), draw.capacity(), draw.dtype()))? else {
        return Ok(());
    };
    for _ in 0..4 {
        let lens = cache.lens().to_vec();
        let counts: Vec<usize> = (0..draw.size()).map(|_| draw.count()).collect();
        let refused = match draw.0.below(6) {
            0 => answered(layer.step(&x, &mut cache))?.is_none(),
            1 => answered(layer.step_ragged(&x, &counts, &mut cache))?.is_none(),
            2 => answered(cache.rewind(draw.count()))?.is_none(),
            3 => answered(cache.truncate(draw.count(), draw.count()))?.is_none(),
            4 => answered(cache.clear(draw.count()))?.is_none(),
            _ => {
                let mut encoder = gpu.encoder();
                let answer = answered(cache.reorder(&mut encoder, &counts))?;
                answered(gpu.submit(encoder))?;
                answer.is_none()
            }
        };
        prop_assert!(
            !refused || cache.lens() == lens,
            "a refused operation moved the cache"
        );
    }
    Ok(())
}

/// The rest: projections, rotary embedding, caches by themselves.
fn parts(gpu: &Gpu, draw: &mut Draw) -> std::result::Result<(), TestCaseError> {
    let [rows, inputs, outputs] = [(); 3].map(|()| draw.size());
    let x = draw.tensor(gpu, &[rows, inputs]);
    let weight = draw.tensor(gpu, &[outputs, inputs]);
    let bias = draw.coin(0.5).then(|| draw.tensor(gpu, &[outputs]));
    if let Some(linear) = answered(Linear::new(weight, bias))? {
        answered(linear.run(&x))?;
        let shape = draw.shape(&[rows, outputs]);
        let output = filled(gpu, &shape);
        recorded(gpu, &output, |encoder| linear.record(encoder, &x, &output))?;
    }

    let tensor = draw.tensor(gpu, &[2, 2, rows, 8]);
    if let Some(rotary) = answered(Rotary::new(gpu, draw.rotary(), draw.size()))? {
        let positions = draw.tensor(gpu, &[2]);
        let positions = match draw.0.below(4) {
            0 => RotaryPositions::Start(draw.count()),
            1 => RotaryPositions::Starts(&positions),
            2 => RotaryPositions::Ends(&positions),
            _ => RotaryPositions::Each(&positions),
        };
        answered(rotary.run(&tensor, positions))?;
    }
    let tables = [(); 2].map(|()| draw.tensor(gpu, &[5, 2]));
    let [cos, sin] = tables;
    answered(Rotary::from_tables(RotaryPairing::HalfSplit, cos, sin))?;

    let shape = KvCacheShape {
        batch: draw.size(),
        kv_heads: draw.size(),
        capacity: draw.capacity(),
        head_dim: draw.size(),
        value_dim: draw.size(),
    };
    let cache = if draw.coin(0.5) {
        KvCache::new(gpu, shape, draw.dtype())
    } else {
        KvCache::rolling(gpu, shape, draw.dtype(), draw.count())
    };
    if let Some(mut cache) = answered(cache)? {
        let key = draw.tensor(gpu, &[shape.batch, shape.kv_heads, rows, shape.head_dim]);
        let value = draw.tensor(gpu, &[shape.batch, shape.kv_heads, rows, shape.value_dim]);
        let mut encoder = gpu.encoder();
        answered(cache.append(&mut encoder, &key, &value))?;
        answered(cache.copy_sequence(&mut encoder, draw.count(), draw.count()))?;
        answered(cache.mask(draw.count()))?;
        answered(gpu.submit(encoder))?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(support::property(300))]

    #[test]
    fn any_arguments_are_answered(seed in any::<u64>()) {
        let draw = &mut Draw(Numbers::new(seed));
        for part in [operator, plans, packed, layer, parts] {
            part(gpu(), draw)?;
        }
    }
}
