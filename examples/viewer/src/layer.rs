//! One layer, with the sentences that it reads.

use crate::Result;
use crate::case::{Case, CaseError, Op};
use crate::gpu::parameters;
use multihead::{
    DType, Gpu, Mask, MultiHeadAttention, MultiHeadInputs, MultiHeadOutputs, Rotary, Tensor, wgpu,
};
use std::path::Path;

pub(crate) struct Layer {
    gpu: Gpu,
    pub(crate) name: String,
    /// Of each sentence; at most `length`.
    pub(crate) tokens: Vec<Vec<String>>,
    pub(crate) heads: usize,
    /// Tokens to which every sentence is padded.
    pub(crate) length: usize,
    layer: MultiHeadAttention,
    x: Tensor,
    y: Tensor,
    /// `[B, H, L, L]`: written by attention, read by the fragment shader.
    weights: Tensor,
    /// `[B, L]`, `true` = attend; the mask holds the same.
    visible: Vec<bool>,
    mask: Mask,
}

impl Layer {
    pub(crate) fn load(gpu: &Gpu, path: &Path) -> Result<Self> {
        let file = path.display();
        let case = Case::read(path).map_err(|error| match error {
            CaseError::Bad(reason) => format!("{file} {reason}"),
            CaseError::Unsupported(reason) => format!("{file} asks for {reason}"),
        })?;
        let Op::Layer(op) = case.op else {
            return Err(format!("{file} holds no layer: the viewer needs a case with op \"mha\"").into());
        };
        if op.key.is_some() || op.value.is_some() {
            return Err(format!("{file} holds cross attention: the viewer shows self-attention").into());
        }
        if op.hiding.mask.is_some() || op.hiding.kv_lengths.is_some() || op.config.extra_keys() > 0 {
            return Err(format!("{file}: the viewer shows a key mask alone, and no added keys").into());
        }
        let (batch, length, heads) = (op.batch, op.queries, op.config.num_heads);
        if batch * length == 0 {
            return Err(format!("{file} holds no tokens").into());
        }
        let tokens = case.tokens.unwrap_or_else(|| {
            let numbers = (1..=length).map(|number| number.to_string());
            vec![numbers.collect(); batch]
        });
        let fits = |tokens: &Vec<String>| (1..=length).contains(&tokens.len());
        if tokens.len() != batch || !tokens.iter().all(fits) {
            return Err(format!("{file}: \"tokens\" needs {batch} lists of 1 to {length} words").into());
        }
        let bytes = (batch * heads * length) as u64 * length as u64 * 4;
        let most = gpu.device().limits().max_storage_buffer_binding_size;
        if bytes > most {
            return Err(format!("{file}: weights of {bytes} bytes; the adapter binds at most {most}").into());
        }
        let mut layer = MultiHeadAttention::new(gpu, op.config.clone(), &parameters(&op)?)?;
        if let Some(options) = op.rotary {
            layer = layer.with_rotary(Rotary::new(gpu, options, length)?)?;
        }
        layer.warm_up(DType::F32)?;
        let visible = op.hiding.key_mask.unwrap_or_else(|| vec![true; batch * length]);
        let rows = [batch, length, op.config.embed_dim];
        Ok(Self {
            name: if case.name.is_empty() {
                file.to_string()
            } else {
                case.name
            },
            x: Tensor::upload(gpu, &op.query.data, &rows)?,
            y: Tensor::zeros(gpu, DType::F32, &rows)?,
            weights: Tensor::zeros(gpu, DType::F32, &[batch, heads, length, length])?,
            mask: Mask::keep_from(gpu, &visible, &[batch, length])?,
            gpu: gpu.clone(),
            tokens,
            heads,
            length,
            layer,
            visible,
        })
    }

    /// Where the weights stay.
    pub(crate) fn weights(&self) -> &wgpu::Buffer {
        self.weights.buffer()
    }

    /// Number of weights before those of a head.
    pub(crate) fn first(&self, sentence: usize, head: usize) -> usize {
        (sentence * self.heads + head) * self.length * self.length
    }

    pub(crate) fn is_visible(&self, sentence: usize, key: usize) -> bool {
        self.visible[sentence * self.length + key]
    }

    /// Hides a key of a sentence, or shows it again, in what is submitted from now on.
    pub(crate) fn toggle(&mut self, sentence: usize, key: usize) {
        let place = sentence * self.length + key;
        self.visible[place] = !self.visible[place];
        // Writes move whole words; the buffer is rounded up to them.
        let mut bytes: Vec<u8> = self.visible.iter().map(|&visible| visible.into()).collect();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let mask = self.mask.tensor();
        self.gpu
            .queue()
            .write_buffer(mask.buffer(), mask.offset(), &bytes);
    }

    pub(crate) fn record(&self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        Ok(self.layer.record(
            encoder,
            &MultiHeadInputs::new(&self.x).key_padding_mask(&self.mask),
            &MultiHeadOutputs::new(&self.y).weights(&self.weights),
        )?)
    }
}
