//! Rotary position embedding.

use super::{Real, check_len};
use crate::{Error, Result, RotaryOptions, RotaryPairing, RotaryScaling};

/// Cosines and sines of the angles of positions `0..positions`, `[positions, rotary_dim / 2]` each.
///
/// The angles are computed in f64 whatever `T` is: position times frequency needs more digits than f32 has.
///
/// ```
/// use multihead::{RotaryOptions, reference::rotary_tables};
///
/// // Two pairs with frequencies 1 and 1/100, three positions.
/// let (cos, sin) = rotary_tables::<f64>(&RotaryOptions::new(4), 3)?;
/// assert_eq!(cos[..2], [1.0, 1.0]);
/// assert_eq!(sin[4..], [2f64.sin(), 0.02f64.sin()]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Option`] for options that are never allowed, [`Error::Shape`] for tables that no memory could hold.
pub fn rotary_tables<T: Real>(options: &RotaryOptions, positions: usize) -> Result<(Vec<T>, Vec<T>)> {
    options.validate()?;
    let pairs = options.rotary_dim / 2;
    let table = || super::reserved("a rotary table", &[positions, pairs]);
    let (mut cos, mut sin) = (table()?, table()?);
    let frequencies: Vec<f64> = (0..pairs).map(|pair| frequency(options, pair)).collect();
    for position in 0..positions {
        for frequency in &frequencies {
            let angle = position as f64 * frequency;
            cos.push(T::from_f64(angle.cos()));
            sin.push(T::from_f64(angle.sin()));
        }
    }
    Ok((cos, sin))
}

/// Radians per position of one pair.
fn frequency(options: &RotaryOptions, pair: usize) -> f64 {
    let plain = options.base.powf(-2.0 * pair as f64 / options.rotary_dim as f64);
    match options.scaling {
        RotaryScaling::None => plain,
        RotaryScaling::Linear { factor } => plain / factor,
        RotaryScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => {
            // Turns of the pair within the length of the training.
            let turns = original_max_positions as f64 * plain / std::f64::consts::TAU;
            let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
            kept * plain + (1.0 - kept) * plain / factor
        }
    }
}

/// Rotates the first `rotary_dim` elements of every row of `x`, `[B, H, L, D]`, pair by pair, and leaves the others.
///
/// `cos` and `sin` are `[positions, rotary_dim / 2]`, and `positions`, `[B, L]`, names the row of the tables for each
/// row of `x`.
///
/// ```
/// use multihead::{RotaryPairing, reference::rotary};
///
/// // One pair and an element behind it, turned by a right angle.
/// let y = rotary(&[3.0, 4.0, 5.0], [1, 1, 1, 3], &[0.0], &[1.0], &[0], 2, RotaryPairing::HalfSplit)?;
/// assert_eq!(y, [-4.0, 3.0, 5.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Shape`] for lengths that do not fit, a `rotary_dim` that is odd or more than `D`, or a position beyond the
/// tables.
pub fn rotary<T: Real>(
    x: &[T],
    shape: [usize; 4],
    cos: &[T],
    sin: &[T],
    positions: &[usize],
    rotary_dim: usize,
    pairing: RotaryPairing,
) -> Result<Vec<T>> {
    let [batch, heads, rows, size] = shape;
    check_len("x", x.len(), &shape)?;
    check_len("positions", positions.len(), &[batch, rows])?;
    if !rotary_dim.is_multiple_of(2) || rotary_dim > size {
        return Err(Error::Shape(format!(
            "rotary_dim = {rotary_dim} of heads of {size}: must be even and at most that"
        )));
    }
    let pairs = rotary_dim / 2;
    let known = cos.len().checked_div(pairs).unwrap_or(usize::MAX);
    if pairs > 0 {
        check_len("cos", cos.len(), &[known, pairs])?;
        check_len("sin", sin.len(), &[known, pairs])?;
    }
    if let Some(position) = positions.iter().find(|&&position| position >= known) {
        return Err(Error::Shape(format!(
            "position {position}: the tables hold {known}, positions start at 0"
        )));
    }
    let mut y = x.to_vec();
    if x.is_empty() {
        // Its other axes may be longer than any loop.
        return Ok(y);
    }
    for b in 0..batch {
        for h in 0..heads {
            for l in 0..rows {
                let row = ((b * heads + h) * rows + l) * size;
                let table = positions[b * rows + l] * pairs;
                for pair in 0..pairs {
                    let (first, second) = match pairing {
                        RotaryPairing::Interleaved => (row + 2 * pair, row + 2 * pair + 1),
                        RotaryPairing::HalfSplit => (row + pair, row + pairs + pair),
                    };
                    let (c, s) = (cos[table + pair], sin[table + pair]);
                    y[first] = c * x[first] - s * x[second];
                    y[second] = s * x[first] + c * x[second];
                }
            }
        }
    }
    Ok(y)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Frequencies of Llama 3.1: `_compute_llama3_parameters` of Hugging Face's transformers, in float64.
    #[test]
    fn llama_3_scales_low_frequencies_alone() {
        let options = RotaryOptions::new(128)
            .base(500_000.0)
            .scaling(RotaryScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_positions: 8192,
            });
        let plain = |pair: i32| 500_000f64.powf(-f64::from(pair) / 64.0);
        // Wavelengths: short ones stay, long ones are stretched, 4096 tokens lie between.
        assert_eq!(frequency(&options, 0), 1.0);
        assert_eq!(frequency(&options, 28), plain(28));
        assert!((frequency(&options, 63) - plain(63) / 8.0).abs() < 1e-20);
        let between = frequency(&options, 31);
        let wavelength = std::f64::consts::TAU / plain(31);
        let smooth = (8192.0 / wavelength - 1.0) / 3.0;
        assert!(smooth > 0.0 && smooth < 1.0);
        let expected = (1.0 - smooth) * plain(31) / 8.0 + smooth * plain(31);
        assert!((between - expected).abs() < 1e-15);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let run = |positions: &[usize], rotary_dim| {
            rotary(
                &[1.0f64; 8],
                [1, 1, 2, 4],
                &[1.0; 6],
                &[0.0; 6],
                positions,
                rotary_dim,
                RotaryPairing::Interleaved,
            )
        };
        assert_eq!(run(&[0, 2], 4), Ok(vec![1.0; 8]));
        assert_eq!(run(&[0, 5], 2), Ok(vec![1.0; 8]));
        assert!(run(&[0, 3], 4).is_err() && run(&[0], 4).is_err());
        assert!(run(&[0, 0], 3).is_err() && run(&[0, 0], 6).is_err());
        assert_eq!(run(&[0, 0], 0), Ok(vec![1.0; 8]));
        assert!(rotary_tables::<f32>(&RotaryOptions::new(4), usize::MAX).is_err());
    }
}
