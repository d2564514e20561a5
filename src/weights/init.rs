//! Seeded first values, in the distributions of `torch.nn.MultiheadAttention._reset_parameters`.
//!
//! The same seed gives the same bits on every platform and in every version: the words come from
//! ChaCha8, whose output is fixed by its definition, and all arithmetic on them is f64 addition,
//! multiplication, division and square root, which IEEE 754 fixes. The platform's `ln` is not used,
//! because its last bit differs between systems.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

use super::{Parameters, Sizes};
use crate::{MultiHeadAttentionConfig, Result};

impl Parameters {
    /// Seeded random parameters in the distributions of `torch.nn.MultiheadAttention`.
    ///
    /// With `E = embed_dim`, `Q = num_heads * head_dim`, `K = num_kv_heads * head_dim` (both `E` in PyTorch) and U(b)
    /// uniform on (-b, b):
    ///
    /// | parameter | distribution |
    /// |---|---|
    /// | q, k, v weights if `kdim = vdim = E` | U(sqrt(6 / (Q + 2K + E))): Xavier over the packed `[Q + 2K, E]` |
    /// | q, k, v weights otherwise | U(sqrt(6 / (out + in))), `out` = Q, K, K, `in` = E, `kdim`, `vdim`: Xavier one by one |
    /// | `out_proj_weight` | U(1 / sqrt(Q)), what `torch.nn.Linear` starts with |
    /// | all four biases | 0 |
    /// | `bias_k`, `bias_v` | normal, mean 0, standard deviation 1 / sqrt(K) |
    ///
    /// The distributions are PyTorch's, the numbers are not: they are this crate's own, and the same for a
    /// seed on every platform and in every version. The generator is ChaCha8 with the key `seed` (8 bytes,
    /// little-endian, then zeros). A uniform value takes one 32-bit word, of which the upper 24 bits `n`
    /// count: `((n + 0.5) / 2^24 * 2 - 1) * b`, rounded to f32 at the end. A pair of normal values is
    /// Marsaglia's polar method on two such values with `b = 1`. Order: q, k, v, out, `bias_k`, `bias_v`.
    ///
    /// # Errors
    ///
    /// [`Error::Option`](crate::Error::Option) if `config` is not valid or the arrays do not fit this host's memory.
    ///
    /// ```
    /// use multihead::{MultiHeadAttentionConfig, Parameters};
    ///
    /// let config = MultiHeadAttentionConfig::new(64, 8);
    /// let parameters = Parameters::init(&config, 7)?;
    /// assert_eq!(parameters, Parameters::init(&config, 7)?);
    /// assert_ne!(parameters, Parameters::init(&config, 8)?);
    /// assert_eq!(parameters.q_proj_weight.len(), 64 * 64);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn init(config: &MultiHeadAttentionConfig, seed: u64) -> Result<Self> {
        let mut parameters = Self::zeros(config)?;
        let mut random = Random::new(seed);
        let Sizes {
            embed_dim: e,
            q_size,
            kv_size,
            kdim,
            vdim,
        } = Sizes::from(config);
        let xavier = |fan_in: usize, fan_out: usize| (6.0 / (fan_in as f64 + fan_out as f64)).sqrt();
        let (q, k, v) = if kdim == e && vdim == e {
            // PyTorch draws one [3E, E] matrix here, so the fan-out is that of all three.
            let bound = xavier(e, q_size + 2 * kv_size);
            (bound, bound, bound)
        } else {
            (xavier(e, q_size), xavier(kdim, kv_size), xavier(vdim, kv_size))
        };
        random.uniform(&mut parameters.q_proj_weight, q);
        random.uniform(&mut parameters.k_proj_weight, k);
        random.uniform(&mut parameters.v_proj_weight, v);
        // kaiming_uniform with a = sqrt(5): sqrt(6 / ((1 + 5) fan_in)).
        random.uniform(&mut parameters.out_proj_weight, (1.0 / q_size as f64).sqrt());
        // xavier_normal over [1, 1, K]: PyTorch counts axis 2 as the receptive field, so both fans are K
        // and the deviation is sqrt(2 / (K + K)).
        for values in [&mut parameters.bias_k, &mut parameters.bias_v]
            .into_iter()
            .flatten()
        {
            random.normal(values, (1.0 / kv_size as f64).sqrt());
        }
        Ok(parameters)
    }
}

/// The generator that [`Parameters::init`] describes.
struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64) -> Self {
        // Not seed_from_u64: how that stretches the seed is the business of another crate.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        Self(ChaCha8Rng::from_seed(key))
    }

    fn word(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// Uniform on (-1, 1), symmetric, never an end and never 0.
    fn signed_unit(&mut self) -> f64 {
        (f64::from(self.word() >> 8) + 0.5) / 16_777_216.0 * 2.0 - 1.0
    }

    fn uniform(&mut self, values: &mut [f32], bound: f64) {
        for value in values {
            *value = (self.signed_unit() * bound) as f32;
        }
    }

    fn normal(&mut self, values: &mut [f32], deviation: f64) {
        for pair in values.chunks_mut(2) {
            let (x, y, square) = loop {
                let (x, y) = (self.signed_unit(), self.signed_unit());
                let square = x * x + y * y;
                if square < 1.0 {
                    break (x, y, square);
                }
            };
            let factor = (-2.0 * ln(square) / square).sqrt() * deviation;
            for (value, unit) in pair.iter_mut().zip([x, y]) {
                *value = (unit * factor) as f32;
            }
        }
    }
}

/// Natural logarithm of a positive normal number, in operations that IEEE 754 fixes.
///
/// `x = 2^k m` with `m` in [1/sqrt(2), sqrt(2)), and `ln m = 2 atanh z` with `z = (m - 1) / (m + 1)`,
/// `|z| < 0.172`: the first term left out, `2 z^25 / 25`, is below 1e-20.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i32 - 1023;
    let mut m = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000);
    if m >= std::f64::consts::SQRT_2 {
        m /= 2.0;
        exponent += 1;
    }
    let z = (m - 1.0) / (m + 1.0);
    let series = (0..12)
        .rev()
        .fold(0.0, |sum, n| sum * z * z + 1.0 / f64::from(2 * n + 1));
    f64::from(exponent) * std::f64::consts::LN_2 + 2.0 * z * series
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn config(embed_dim: usize) -> MultiHeadAttentionConfig {
        MultiHeadAttentionConfig::new(embed_dim, 2)
    }

    #[test]
    fn stream_is_chacha8() {
        // First bytes of ChaCha8 with a key and nonce of zeros: 3e 00 ef 2f 89 5f 40 d6.
        let mut random = Random::new(0);
        assert_eq!([random.word(), random.word()], [0x2fef_003e, 0xd640_5f89]);
    }

    #[test]
    fn first_values_are_pinned() {
        // From a separate program after the words of the docs; bits, so that no rounding of decimals hides in.
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let parameters = Parameters::init(&config(4).add_bias_kv(true), 42).unwrap();
        assert_eq!(
            bits(&parameters.q_proj_weight[..4]),
            [0xbefa_ec42, 0xbe3e_4f59, 0xbf01_1135, 0xbe86_61c2]
        );
        assert_eq!(bits(&parameters.v_proj_weight[15..]), [0x3c8e_ca45]);
        assert_eq!(bits(&parameters.out_proj_weight[..2]), [0x3db0_8074, 0xbec9_9123]);
        assert_eq!(
            bits(&parameters.bias_k.unwrap()),
            [0xbef4_f9f9, 0x3e29_6c54, 0xbf34_f242, 0x3f14_f29d]
        );
        assert_eq!(
            bits(&parameters.bias_v.unwrap()),
            [0x3e4f_e08c, 0x3d10_4a8d, 0xbf91_a89c, 0xbef0_0a28]
        );
    }

    #[test]
    fn own_logarithm() {
        for exponent in -60..0 {
            for step in 0..1000 {
                let x = (1.0 + f64::from(step) / 1000.0) * 2f64.powi(exponent);
                let difference = (ln(x) - x.ln()).abs();
                assert!(
                    difference <= 4.0 * f64::EPSILON * x.ln().abs(),
                    "ln {x} is off by {difference}"
                );
            }
        }
    }

    /// Every value inside the bound and near it somewhere, mean 0 and variance bound^2 / 3 within 5 deviations.
    fn uniform(what: &str, values: &[f32], bound: f64) {
        let n = values.len() as f64;
        let largest = values.iter().fold(0f64, |m, &x| m.max(f64::from(x).abs()));
        assert!(
            largest <= bound * (1.0 + 1e-7) && largest > bound * 0.99,
            "{what}: {largest} of {bound}"
        );
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n;
        let wanted = bound * bound / 3.0;
        assert!(mean.abs() < 5.0 * (wanted / n).sqrt(), "{what}: mean {mean}");
        // Of a uniform variable, x^2 has the deviation sqrt(4/45) bound^2.
        assert!(
            (variance - wanted).abs() < 5.0 * bound * bound * (4.0 / 45.0 / n).sqrt(),
            "{what}: {variance}"
        );
    }

    #[test]
    fn distributions_of_pytorch() {
        let packed = Parameters::init(&config(128), 1).unwrap();
        let bound = (6.0f64 / 512.0).sqrt();
        uniform("q", &packed.q_proj_weight, bound);
        uniform("k", &packed.k_proj_weight, bound);
        uniform("v", &packed.v_proj_weight, bound);
        uniform("out", &packed.out_proj_weight, (1.0f64 / 128.0).sqrt());
        for bias in [
            &packed.q_proj_bias,
            &packed.k_proj_bias,
            &packed.v_proj_bias,
            &packed.out_proj_bias,
        ] {
            assert_eq!(bias.as_deref(), Some([0.0; 128].as_slice()));
        }
        assert_eq!((packed.bias_k, packed.bias_v), (None, None));

        let separate = Parameters::init(&config(128).kdim(64).vdim(256).bias(false), 1).unwrap();
        uniform("q", &separate.q_proj_weight, (6.0f64 / 256.0).sqrt());
        uniform("k", &separate.k_proj_weight, (6.0f64 / 192.0).sqrt());
        uniform("v", &separate.v_proj_weight, (6.0f64 / 384.0).sqrt());
        assert_eq!((&separate.q_proj_bias, &separate.out_proj_bias), (&None, &None));

        let grouped = config(128).num_kv_heads(1).with_head_dim(100);
        let p = Parameters::init(&grouped, 1).unwrap();
        let bound = (6.0f64 / (200.0 + 2.0 * 100.0 + 128.0)).sqrt();
        uniform("q", &p.q_proj_weight, bound);
        uniform("v", &p.v_proj_weight, bound);
        uniform("out", &p.out_proj_weight, (1.0f64 / 200.0).sqrt());
        let p = Parameters::init(&grouped.kdim(64), 1).unwrap();
        uniform("q", &p.q_proj_weight, (6.0f64 / 328.0).sqrt());
        uniform("k", &p.k_proj_weight, (6.0f64 / 164.0).sqrt());

        let mut squares = Vec::new();
        for seed in 0..40 {
            let p = Parameters::init(&config(130).add_bias_kv(true), seed).unwrap();
            squares.extend(
                [p.bias_k.unwrap(), p.bias_v.unwrap()]
                    .concat()
                    .into_iter()
                    .map(f64::from),
            );
        }
        let n = squares.len() as f64;
        let moment = |k: i32| squares.iter().map(|x| (x * 130f64.sqrt()).powi(k)).sum::<f64>() / n;
        // Moments of the standard normal, each within 5 deviations of its estimate.
        for (k, wanted, variance) in [(1, 0.0, 1.0f64), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)] {
            let off = moment(k) - wanted;
            assert!(
                off.abs() < 5.0 * (variance / n).sqrt(),
                "moment {k} is off by {off}"
            );
        }
    }
}
