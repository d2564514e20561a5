//! A model of two attention layers that copies what repeats, its weights set by hand.
//!
//! A token is a one-hot vector in the first half of the stream; the second half is for the token before it.
//!
//! 1. The first layer writes both. Its queries and keys are the same vector at every position, so that rotary embedding
//!    alone tells positions apart: one head looks at its own position, and one, whose query is turned back by a position, at
//!    the one before.
//! 2. The second is an induction head ([Olsson et al. 2022](https://arxiv.org/abs/2209.11895)): its query is the token, its
//!    key the token before, its value the token. It finds where this token was before, and gives what followed.

use multihead::{
    AttentionOptions, DType, Gpu, KvCache, MultiHeadAttention, MultiHeadAttentionConfig, Parameters, Result,
    Rotary, RotaryOptions, Tensor,
};

/// Tokens that there are, and the size of a head.
pub(crate) const VOCABULARY: usize = 64;

/// The token that starts each text, so that the first real one has another before it.
pub(crate) const START: usize = 0;

/// Size of a stream vector: a token, and the token before it.
const EMBED: usize = 2 * VOCABULARY;

/// Scores of what is sought stand out by about this much; `exp` of it drowns millions of others.
const SHARPNESS: f32 = 40.0;

/// The layers, on the GPU.
pub(crate) struct Model {
    gpu: Gpu,
    layers: [MultiHeadAttention; 2],
}

impl Model {
    /// A model for texts of up to `positions` tokens.
    pub(crate) fn new(gpu: &Gpu, positions: usize) -> Result<Self> {
        Ok(Self {
            gpu: gpu.clone(),
            layers: [previous_token(gpu, positions)?, induction(gpu)?],
        })
    }

    /// An empty text of up to `capacity` tokens.
    pub(crate) fn text(&self, capacity: usize) -> Result<Text<'_>> {
        let [first, second] = &self.layers;
        Ok(Text {
            model: self,
            caches: [
                first.kv_cache(1, capacity, DType::F16)?,
                second.kv_cache(1, capacity, DType::F16)?,
            ],
        })
    }
}

/// A text that the model reads and continues. Its past lies on the GPU.
pub(crate) struct Text<'a> {
    model: &'a Model,
    caches: [KvCache; 2],
}

impl Text<'_> {
    /// Reads tokens, a whole prompt or one, and says which follows.
    pub(crate) fn read(&mut self, tokens: &[usize]) -> Result<usize> {
        let gpu = &self.model.gpu;
        let shape = [1, tokens.len(), EMBED];
        let mut one_hot = vec![0.0f32; tokens.len() * EMBED];
        for (row, &token) in one_hot.chunks_mut(EMBED).zip(tokens) {
            row[token] = 1.0;
        }
        let mut stream = Tensor::upload(gpu, &one_hot, &shape)?;

        let mut encoder = gpu.encoder();
        for (layer, cache) in self.model.layers.iter().zip(&mut self.caches) {
            let output = Tensor::zeros(gpu, DType::F32, &shape)?;
            layer.record_step(&mut encoder, &stream, cache, &output)?;
            stream = output;
        }
        gpu.submit(encoder)?;

        // The first half of the last row scores each token; this waits.
        let last = stream.slice(1, tokens.len() - 1..tokens.len())?;
        let scores = last.slice(2, 0..VOCABULARY)?.download::<f32>()?;
        let best = (0..VOCABULARY).max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
        Ok(best.unwrap_or(START))
    }
}

/// Two heads: head 0 copies the token of its own position, head 1 that of the position before.
fn previous_token(gpu: &Gpu, positions: usize) -> Result<MultiHeadAttention> {
    let config = MultiHeadAttentionConfig::new(EMBED, 2).attention(AttentionOptions::new().scale(1.0));
    let rotary = RotaryOptions::new(VOCABULARY);
    let pairs = VOCABULARY / 2;
    let mut parameters = Parameters::zeros(&config)?;

    // Queries and keys are biases alone. Pair i is elements i and `pairs` + i of a head; turned by the position, a query and
    // a key `distance` apart score SHARPNESS * sum of cos(distance * angle), most at 0.
    let (mut query, mut key) = (vec![0.0; EMBED], vec![0.0; EMBED]);
    for pair in 0..pairs {
        let angle = rotary.base.powf(-(pair as f64) / pairs as f64) as f32;
        let size = SHARPNESS.sqrt();
        for (head, back) in [(0, 0.0), (VOCABULARY, angle)] {
            query[head + pair] = size * back.cos();
            query[head + pairs + pair] = -size * back.sin();
            key[head + pair] = size;
        }
    }
    (parameters.q_proj_bias, parameters.k_proj_bias) = (Some(query), Some(key));
    // Both heads read the token; what head 0 gives is the first half of the stream, what head 1 gives the second.
    for token in 0..VOCABULARY {
        parameters.v_proj_weight[token * EMBED + token] = 1.0;
        parameters.v_proj_weight[(VOCABULARY + token) * EMBED + token] = 1.0;
    }
    for column in 0..EMBED {
        parameters.out_proj_weight[column * EMBED + column] = 1.0;
    }
    MultiHeadAttention::new(gpu, config, &parameters)?.with_rotary(Rotary::new(gpu, rotary, positions)?)
}

/// One head: from the token to where it was the token before, and from there the token.
fn induction(gpu: &Gpu) -> Result<MultiHeadAttention> {
    let config = MultiHeadAttentionConfig::new(EMBED, 1)
        .with_head_dim(VOCABULARY)
        .bias(false)
        .attention(AttentionOptions::new().scale(1.0));
    let mut parameters = Parameters::zeros(&config)?;
    for token in 0..VOCABULARY {
        parameters.q_proj_weight[token * EMBED + token] = SHARPNESS;
        parameters.k_proj_weight[token * EMBED + VOCABULARY + token] = 1.0;
        parameters.v_proj_weight[token * EMBED + token] = 1.0;
        parameters.out_proj_weight[token * VOCABULARY + token] = 1.0;
    }
    MultiHeadAttention::new(gpu, config, &parameters)
}
