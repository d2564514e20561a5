//! The whole layer.

use super::{
    Attention, Mask, Real, check_len, join_keys, linear, merge_heads, rotary, rotary_tables, split_heads,
};
use crate::{AttentionShape, Causal, Error, MultiHeadAttentionConfig, Result, RotaryOptions};

/// Parameters of a layer, in PyTorch's layout: `y = x W^T + b`. `H = num_heads`, `Hkv = num_kv_heads`, heads of
/// size `D = head_dim`; unless the configuration says otherwise, `H * D = Hkv * D = E`.
///
/// ```
/// use multihead::MultiHeadAttentionConfig;
/// use multihead::reference::{LayerParameters, MultiHead};
///
/// let config = MultiHeadAttentionConfig::new(1, 1).bias(false).out_bias(true);
/// let mut parameters = LayerParameters::new(&[1.0], &[1.0], &[2.0], &[3.0]);
/// parameters.out_bias = Some(&[0.5]);
/// let answer = MultiHead::self_attention(&config, parameters, 1, 1, &[1.0f64]).run()?;
/// assert_eq!(answer.output, [1.0 * 2.0 * 3.0 + 0.5]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerParameters<'a> {
    /// `[H * D, E]`.
    pub q_weight: &'a [f32],
    /// `[Hkv * D, kdim]`.
    pub k_weight: &'a [f32],
    /// `[Hkv * D, vdim]`.
    pub v_weight: &'a [f32],
    /// `[H * D]`.
    pub q_bias: Option<&'a [f32]>,
    /// `[Hkv * D]`.
    pub k_bias: Option<&'a [f32]>,
    /// `[Hkv * D]`.
    pub v_bias: Option<&'a [f32]>,
    /// `[E, H * D]`.
    pub out_weight: &'a [f32],
    /// `[E]`.
    pub out_bias: Option<&'a [f32]>,
    /// `[Hkv * D]`, given exactly if the configuration says `add_bias_kv`.
    pub bias_k: Option<&'a [f32]>,
    /// `[Hkv * D]`, given exactly if the configuration says `add_bias_kv`.
    pub bias_v: Option<&'a [f32]>,
}

/// One call of a layer
/// ([`torch.nn.MultiheadAttention`](https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html),
/// batch first, no dropout):
///
/// `output = concat_h(softmax(q_h k_g^T / sqrt(D)) v_g) W_out^T + b_out`, where `q_h`, `k_g` and `v_g` are the
/// head's columns of the projected query, key and value, `g = h / (H / Hkv)`. `bias_k`, `bias_v` follow the
/// projected keys, a key and value of zeros follows those.
///
/// ```
/// use multihead::MultiHeadAttentionConfig;
/// use multihead::reference::{LayerParameters, MultiHead};
///
/// // Identity projections, two equal tokens: attention gives the token back.
/// let identity = [1.0, 0.0, 0.0, 1.0];
/// let config = MultiHeadAttentionConfig::new(2, 2).bias(false);
/// let parameters = LayerParameters::new(&identity, &identity, &identity, &identity);
/// let x = [0.5f64, -1.0, 0.5, -1.0];
/// let answer = MultiHead::self_attention(&config, parameters, 1, 2, &x).run()?;
/// assert_eq!(answer.output, x);
/// assert_eq!(answer.weights, [0.5; 8]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MultiHead<'a, T> {
    /// Sizes and options.
    pub config: &'a MultiHeadAttentionConfig,
    /// Weights and biases.
    pub parameters: LayerParameters<'a>,
    /// Sequences, B.
    pub batch: usize,
    /// Queries, Lq.
    pub queries: usize,
    /// Keys, Lk, without `bias_k` and the key of zeros.
    pub keys: usize,
    /// `[B, Lq, E]`.
    pub query: &'a [T],
    /// `[B, Lk, kdim]`.
    pub key: &'a [T],
    /// `[B, Lk, vdim]`.
    pub value: &'a [T],
    /// Broadcast to `[B, H, Lq, Lk]`.
    pub mask: Option<Mask<'a>>,
    /// `[B, Lk]`, `true` = attend (PyTorch's `key_padding_mask` is the opposite).
    pub key_mask: Option<&'a [bool]>,
    /// `[B]`.
    pub kv_lengths: Option<&'a [usize]>,
    /// Replaces the configuration's causal order.
    pub causal: Option<Causal>,
    /// Turns row `l` of the projected queries, and of the projected keys, by position `l`; the extra keys are not turned.
    pub rotary: Option<RotaryOptions>,
}

/// Answers of [`MultiHead::run`].
///
/// ```
/// use multihead::MultiHeadAttentionConfig;
/// use multihead::reference::{LayerOutput, LayerParameters, MultiHead, mean_heads};
///
/// let config = MultiHeadAttentionConfig::new(2, 2).bias(false);
/// let zeros = [0.0; 4];
/// let parameters = LayerParameters::new(&zeros, &zeros, &zeros, &zeros);
/// let LayerOutput { weights, shape, .. } = MultiHead::self_attention(&config, parameters, 1, 2, &[1.0f64; 4]).run()?;
/// assert_eq!(shape.weights(), [1, 2, 2, 2]);
/// assert_eq!(mean_heads(&weights, &shape)?, [0.5; 4]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutput<T> {
    /// `[B, Lq, E]`.
    pub output: Vec<T>,
    /// `[B, H, Lq, Lk + extra keys]`; empty after [`MultiHead::run_output`].
    pub weights: Vec<T>,
    /// Sizes of the attention inside, extra keys included:
    /// [`mean_heads`](super::mean_heads())`(&weights, &shape)` averages over the heads.
    pub shape: AttentionShape,
}

impl<'a> LayerParameters<'a> {
    /// The four weights without biases; set the other fields as needed.
    pub const fn new(
        q_weight: &'a [f32],
        k_weight: &'a [f32],
        v_weight: &'a [f32],
        out_weight: &'a [f32],
    ) -> Self {
        Self {
            q_weight,
            k_weight,
            v_weight,
            q_bias: None,
            k_bias: None,
            v_bias: None,
            out_weight,
            out_bias: None,
            bias_k: None,
            bias_v: None,
        }
    }
}

impl<'a, T: Real> MultiHead<'a, T> {
    /// Self-attention over `x [B, L, E]` without masks; set those fields as needed.
    pub const fn self_attention(
        config: &'a MultiHeadAttentionConfig,
        parameters: LayerParameters<'a>,
        batch: usize,
        length: usize,
        x: &'a [T],
    ) -> Self {
        Self {
            config,
            parameters,
            batch,
            queries: length,
            keys: length,
            query: x,
            key: x,
            value: x,
            mask: None,
            key_mask: None,
            kv_lengths: None,
            causal: None,
            rotary: None,
        }
    }

    /// Output and weights.
    ///
    /// # Errors
    ///
    /// [`Error::Shape`] for lengths that do not fit, [`Error::Option`] for options that are not allowed
    /// and parameters that do not belong to the configuration, both with the numbers.
    pub fn run(&self) -> Result<LayerOutput<T>> {
        self.layer(true)
    }

    /// [`run`](Self::run) without the weights.
    ///
    /// ```
    /// use multihead::MultiHeadAttentionConfig;
    /// use multihead::reference::{LayerParameters, MultiHead};
    ///
    /// let config = MultiHeadAttentionConfig::new(1, 1).bias(false);
    /// let parameters = LayerParameters::new(&[1.0], &[1.0], &[2.0], &[3.0]);
    /// let answer = MultiHead::self_attention(&config, parameters, 1, 1, &[1.0f64]).run_output()?;
    /// assert_eq!(answer.output, [6.0]);
    /// assert!(answer.weights.is_empty());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run).
    pub fn run_output(&self) -> Result<LayerOutput<T>> {
        self.layer(false)
    }

    fn layer(&self, keep_weights: bool) -> Result<LayerOutput<T>> {
        let Self {
            config,
            parameters,
            batch,
            queries,
            keys,
            ..
        } = *self;
        config.validate()?;
        self.check_optional()?;
        let (embed, size) = (config.embed_dim, config.head_dim());
        let (heads, kv_heads) = (config.num_heads, config.num_kv_heads);
        check_len("query", self.query.len(), &[batch, queries, embed])?;
        check_len("key", self.key.len(), &[batch, keys, config.kdim])?;
        check_len("value", self.value.len(), &[batch, keys, config.vdim])?;

        let project = |what: &str,
                       x: &[T],
                       weight: &[f32],
                       bias: Option<&[f32]>,
                       rows,
                       [outputs, inputs]: [usize; 2]| {
            check_len(what, weight.len(), &[outputs, inputs])?;
            let (weight, bias) = (lift::<T>(weight), bias.map(lift::<T>));
            linear(x, &weight, bias.as_deref(), rows, inputs, outputs)
        };
        let p = parameters;
        let (q_size, kv_size) = (config.q_size(), config.kv_size());
        let (q_rows, k_rows) = (batch * queries, batch * keys);
        let q = project(
            "q_weight",
            self.query,
            p.q_weight,
            p.q_bias,
            q_rows,
            [q_size, embed],
        )?;
        let k = project(
            "k_weight",
            self.key,
            p.k_weight,
            p.k_bias,
            k_rows,
            [kv_size, config.kdim],
        )?;
        let v = project(
            "v_weight",
            self.value,
            p.v_weight,
            p.v_bias,
            k_rows,
            [kv_size, config.vdim],
        )?;

        let q = split_heads(&q, batch, queries, heads, size)?;
        let k = split_heads(&k, batch, keys, kv_heads, size)?;
        let v = split_heads(&v, batch, keys, kv_heads, size)?;
        let [q, k] = match &self.rotary {
            None => [q, k],
            Some(options) => [
                turned(&q, [batch, heads, queries, size], options)?,
                turned(&k, [batch, kv_heads, keys, size], options)?,
            ],
        };

        let extra = config.extra_keys();
        // A row of [B, Hkv] is followed by its head's part of the extra keys.
        let append = |x: Vec<T>, learned: Option<&[f32]>| {
            let mut tail = Vec::with_capacity(batch * kv_heads * extra * size);
            for head in (0..batch).flat_map(|_| 0..kv_heads) {
                if let Some(learned) = learned {
                    tail.extend(lift::<T>(&learned[head * size..][..size]));
                }
                if config.add_zero_attn {
                    tail.extend(std::iter::repeat_n(T::ZERO, size));
                }
            }
            join_keys(&x, &tail, batch * kv_heads, keys, extra, size)
        };
        let k = append(k, p.bias_k)?;
        let v = append(v, p.bias_v)?;

        let mut options = config.attention.clone().always_visible_keys(extra);
        if let Some(causal) = self.causal {
            options.causal = causal;
        }
        let shape = AttentionShape {
            batch,
            heads,
            kv_heads,
            queries,
            keys: keys + extra,
            head_dim: size,
            value_dim: size,
        };
        let call = Attention {
            mask: self.mask,
            key_mask: self.key_mask,
            kv_lengths: self.kv_lengths,
            ..Attention::new(shape, &options, &q, &k, &v)
        };
        let answer = if keep_weights {
            call.run()?
        } else {
            call.run_output()?
        };
        let merged = merge_heads(&answer.output, batch, queries, heads, size)?;
        let output = project(
            "out_weight",
            &merged,
            p.out_weight,
            p.out_bias,
            q_rows,
            [embed, q_size],
        )?;
        Ok(LayerOutput {
            output,
            weights: answer.weights,
            shape,
        })
    }

    /// Biases and `bias_k`, `bias_v`: there exactly when the configuration says so, one number per row.
    fn check_optional(&self) -> Result<()> {
        let (config, p) = (self.config, &self.parameters);
        let (q_size, kv_size) = (config.q_size(), config.kv_size());
        for (what, given, expected, size) in [
            ("q_bias", p.q_bias, config.bias, q_size),
            ("k_bias", p.k_bias, config.bias, kv_size),
            ("v_bias", p.v_bias, config.bias, kv_size),
            ("out_bias", p.out_bias, config.out_bias, config.embed_dim),
            ("bias_k", p.bias_k, config.add_bias_kv, kv_size),
            ("bias_v", p.bias_v, config.add_bias_kv, kv_size),
        ] {
            match given {
                Some(given) if expected => check_len(what, given.len(), &[size])?,
                None if !expected => {}
                // A layer may have some biases alone: the missing ones are zeros.
                None if what.ends_with("_bias") => {}
                _ => {
                    return Err(Error::Option(format!(
                        "{what} is {}, but the configuration has bias = {}, out_bias = {}, add_bias_kv = {}",
                        if given.is_some() { "given" } else { "missing" },
                        config.bias,
                        config.out_bias,
                        config.add_bias_kv
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Rows `[B, H, L, D]` turned by their positions.
fn turned<T: Real>(x: &[T], shape: [usize; 4], options: &RotaryOptions) -> Result<Vec<T>> {
    let [batch, _, rows, _] = shape;
    let (cos, sin) = rotary_tables(options, rows)?;
    let positions: Vec<usize> = (0..batch).flat_map(|_| 0..rows).collect();
    rotary(
        x,
        shape,
        &cos,
        &sin,
        &positions,
        options.rotary_dim,
        options.pairing,
    )
}

/// The parameters in `T`.
fn lift<T: Real>(x: &[f32]) -> Vec<T> {
    x.iter().map(|&x| T::from_f32(x)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::mean_heads;
    use super::*;

    /// `[n, n]`, ones on the diagonal.
    fn identity(n: usize) -> Vec<f32> {
        (0..n * n)
            .map(|at| if at % (n + 1) == 0 { 1.0 } else { 0.0 })
            .collect()
    }

    #[test]
    fn cross_attention_with_other_sizes() {
        // Keys of 1, values of 3 numbers; the value weight sums them into the first column.
        let config = MultiHeadAttentionConfig::new(2, 1).kdim(1).vdim(3).bias(false);
        let i = identity(2);
        let parameters = LayerParameters::new(&i, &[1.0, 0.0], &[1.0, 1.0, 1.0, 0.0, 0.0, 0.0], &i);
        let layer = MultiHead {
            queries: 1,
            keys: 2,
            query: &[0.0f64, 0.0],
            key: &[5.0, -5.0],
            value: &[1.0, 2.0, 3.0, 4.0, 5.0, 9.0],
            ..MultiHead::self_attention(&config, parameters, 1, 0, &[])
        };
        let answer = layer.run().unwrap();
        assert_eq!((answer.output, answer.weights), (vec![12.0, 0.0], vec![0.5, 0.5]));
    }

    #[test]
    fn nothing_hides_the_extra_keys() {
        let config = MultiHeadAttentionConfig {
            add_bias_kv: true,
            add_zero_attn: true,
            ..MultiHeadAttentionConfig::new(2, 2)
        }
        .bias(false);
        let i = identity(2);
        let mut parameters = LayerParameters::new(&i, &i, &i, &i);
        parameters.bias_k = Some(&[0.0, 0.0]);
        parameters.bias_v = Some(&[4.0, 8.0]);
        let x = [1.0f64, 1.0, 1.0, 1.0];
        let mut layer = MultiHead::self_attention(&config, parameters, 1, 2, &x);
        layer.key_mask = Some(&[false, false]);
        let answer = layer.run().unwrap();
        // bias_v and the zeros, half each.
        assert_eq!(answer.output, [2.0, 4.0, 2.0, 4.0]);
        assert_eq!(answer.weights, [0.0, 0.0, 0.5, 0.5].repeat(4));
        assert_eq!(
            mean_heads(&answer.weights, &answer.shape).unwrap(),
            [0.0, 0.0, 0.5, 0.5].repeat(2)
        );
        layer.key_mask = None;
        layer.causal = Some(Causal::TopLeft);
        let causal = layer.run().unwrap();
        assert_eq!(causal.weights[1], 0.0);
        assert!(causal.weights[0] > 0.5 && causal.weights[2] == causal.weights[3]);
    }

    #[test]
    fn query_heads_share_key_heads() {
        // Four heads of one number over two key heads: queries of zeros give the mean of the head's values.
        let config = MultiHeadAttentionConfig::new(2, 4)
            .num_kv_heads(2)
            .with_head_dim(1)
            .bias(false);
        let i = identity(2);
        // The output sums heads 0 and 1 into the first column, 2 and 3 into the second.
        let out = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0];
        let parameters = LayerParameters::new(&[0.0; 8], &i, &i, &out);
        let x = [1.0f64, 10.0, 3.0, 30.0];
        let answer = MultiHead::self_attention(&config, parameters, 1, 2, &x)
            .run()
            .unwrap();
        assert_eq!(answer.output, [4.0, 40.0, 4.0, 40.0]);
        assert_eq!(
            (answer.shape.heads, answer.shape.kv_heads, answer.shape.head_dim),
            (4, 2, 1)
        );
        assert_eq!(answer.weights, [0.5; 16]);
        let short = LayerParameters {
            out_weight: &out[1..],
            ..parameters
        };
        let text = MultiHead::self_attention(&config, short, 1, 2, &x)
            .run()
            .unwrap_err()
            .to_string();
        assert!(text.contains("out_weight") && text.contains("[2, 4]"), "{text}");
    }

    #[test]
    fn rotary_scores_depend_on_distances_alone() {
        // One pair a head; a query and a key of equal direction score cos(distance).
        let config = MultiHeadAttentionConfig::new(2, 1)
            .bias(false)
            .attention(crate::AttentionOptions::new().scale(1.0));
        let i = identity(2);
        let parameters = LayerParameters::new(&i, &i, &i, &i);
        let x = [1.0f64, 0.0].repeat(4);
        let layer = MultiHead {
            rotary: Some(RotaryOptions::new(2)),
            ..MultiHead::self_attention(&config, parameters, 1, 4, &x)
        };
        let answer = layer.run().unwrap();
        // Values are not turned.
        assert!(
            answer
                .output
                .iter()
                .zip(&x)
                .all(|(got, x)| (got - x).abs() < 1e-12)
        );
        let row = |p: usize| (0..4).map(move |j| (p as f64 - j as f64).cos().exp());
        for p in 0..4 {
            let sum: f64 = row(p).sum();
            for (got, expected) in answer.weights[4 * p..].iter().zip(row(p)) {
                assert!((got - expected / sum).abs() < 1e-12);
            }
        }
        let wide = MultiHead {
            rotary: Some(RotaryOptions::new(4)),
            ..layer
        };
        assert!(wide.run().is_err());
    }

    #[test]
    fn biases_are_added_and_checked() {
        let config = MultiHeadAttentionConfig::new(2, 1);
        let i = identity(2);
        let mut parameters = LayerParameters::new(&i, &i, &i, &i);
        parameters.v_bias = Some(&[1.0, 2.0]);
        parameters.out_bias = Some(&[10.0, 20.0]);
        let x = [0.5f64, -0.5];
        let layer = MultiHead::self_attention(&config, parameters, 1, 1, &x);
        assert_eq!(layer.run_output().unwrap().output, [11.5, 21.5]);
        let without = MultiHeadAttentionConfig::new(2, 1).bias(false);
        assert!(
            MultiHead {
                config: &without,
                ..layer.clone()
            }
            .run()
            .is_err()
        );
        parameters.out_bias = Some(&[1.0]);
        let text = MultiHead { parameters, ..layer }.run().unwrap_err().to_string();
        assert!(
            text.contains("out_bias") && text.contains('1') && text.contains('2'),
            "{text}"
        );
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let config = MultiHeadAttentionConfig::new(4, 3);
        let i = identity(4);
        let parameters = LayerParameters::new(&i, &i, &i, &i);
        assert!(
            MultiHead::self_attention(&config, parameters, 1, 1, &[0.0f64; 4])
                .run()
                .is_err()
        );
        let config = MultiHeadAttentionConfig::new(4, 2);
        assert!(
            MultiHead::self_attention(&config, parameters, 1, 1, &[0.0f64; 3])
                .run()
                .is_err()
        );
        let short = LayerParameters {
            k_weight: &i[1..],
            ..parameters
        };
        assert!(
            MultiHead::self_attention(&config, short, 1, 1, &[0.0f64; 4])
                .run()
                .is_err()
        );
        let stray = LayerParameters {
            bias_k: Some(&[0.0; 4]),
            ..parameters
        };
        assert!(
            MultiHead::self_attention(&config, stray, 1, 1, &[0.0f64; 4])
                .run()
                .is_err()
        );
    }
}
