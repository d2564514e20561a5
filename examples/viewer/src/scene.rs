//! What is looked at: layers, of which one runs each frame, and the choice of head, sentence and cell.

use crate::Result;
use crate::layer::Layer;
use crate::readout::Readout;
use multihead::{Gpu, wgpu};
use std::path::PathBuf;

/// What is shown, counted from 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) layer: usize,
    pub(crate) head: usize,
    pub(crate) sentence: usize,
}

pub(crate) struct Scene {
    pub(crate) gpu: Gpu,
    pub(crate) layers: Vec<Layer>,
    choice: Choice,
    /// Query and key under the pointer.
    pub(crate) hover: Option<[usize; 2]>,
    readout: Readout<(Choice, [usize; 2])>,
}

impl Scene {
    pub(crate) fn new(device: &wgpu::Device, queue: &wgpu::Queue, files: &[PathBuf]) -> Result<Self> {
        let gpu = Gpu::from_device(device, queue)?;
        let layers = files.iter().map(|file| Layer::load(&gpu, file));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            choice: Choice::default(),
            hover: None,
            readout: Readout::new(device),
            gpu,
        })
    }

    /// Chooses by numbers that count from 1.
    pub(crate) fn begin(&mut self, layer: usize, head: usize, sentence: usize) -> Result<()> {
        let layer = chosen("layer", layer, self.layers.len())?;
        let Layer { heads, tokens, .. } = &self.layers[layer];
        self.choose(Choice {
            layer,
            head: chosen("head", head, *heads)?,
            sentence: chosen("sentence", sentence, tokens.len())?,
        });
        Ok(())
    }

    pub(crate) fn choice(&self) -> Choice {
        self.choice
    }

    /// A head or sentence that the layer has not becomes its last.
    pub(crate) fn choose(&mut self, mut choice: Choice) {
        choice.layer = choice.layer.min(self.layers.len() - 1);
        let layer = &self.layers[choice.layer];
        choice.head = choice.head.min(layer.heads - 1);
        choice.sentence = choice.sentence.min(layer.tokens.len() - 1);
        if choice != self.choice {
            self.choice = choice;
            self.hover = None;
        }
    }

    /// The next or previous head and sentence, round and round.
    pub(crate) fn step(&mut self, heads: isize, sentences: isize) {
        let round =
            |at: usize, by: isize, count: usize| (at as isize + by).rem_euclid(count as isize) as usize;
        let layer = self.layer();
        self.choose(Choice {
            head: round(self.choice.head, heads, layer.heads),
            sentence: round(self.choice.sentence, sentences, layer.tokens.len()),
            ..self.choice
        });
    }

    pub(crate) fn layer(&self) -> &Layer {
        &self.layers[self.choice.layer]
    }

    /// The sentence's tokens.
    pub(crate) fn tokens(&self) -> &[String] {
        &self.layer().tokens[self.choice.sentence]
    }

    pub(crate) fn is_visible(&self, key: usize) -> bool {
        self.layer().is_visible(self.choice.sentence, key)
    }

    /// Hides a key of the sentence, or shows it again.
    pub(crate) fn toggle(&mut self, key: usize) {
        self.layers[self.choice.layer].toggle(self.choice.sentence, key);
    }

    /// Number of weights before those that are shown.
    pub(crate) fn first(&self) -> usize {
        self.layer().first(self.choice.sentence, self.choice.head)
    }

    /// Query, key and weight under the pointer.
    pub(crate) fn hovered(&self) -> Option<String> {
        let [query, key] = self.hover?;
        let words = self.tokens();
        let weight = match self.readout.told((self.choice, [query, key])) {
            Some(weight) => format!("{weight:.3}"),
            None => "…".to_owned(),
        };
        Some(format!("{} → {}  {weight}", words.get(query)?, words.get(key)?))
    }

    /// What came to the host since the last frame.
    pub(crate) fn receive(&mut self) {
        self.readout.take();
    }

    /// Records the layer.
    pub(crate) fn record(&mut self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let layer = &self.layers[self.choice.layer];
        layer.record(encoder)?;
        if let Some([query, key]) = self.hover {
            let at = self.first() + query * layer.length + key;
            self.readout
                .ask(encoder, layer.weights(), at, (self.choice, [query, key]));
        }
        Ok(())
    }
}

/// From a number that counts from 1 to one that counts from 0.
fn chosen(what: &str, number: usize, count: usize) -> Result<usize> {
    if (1..=count).contains(&number) {
        return Ok(number - 1);
    }
    Err(format!("{what} {number}: there are {count}, counted from 1").into())
}
