//! The colours of the heat maps.

/// Red, green and blue.
pub(crate) type Colour = [u8; 3];

/// The colour of `t` in 0 ..= 1, from near white over orange and purple to near black.
///
/// A straight line in lightness and a turn in hue through [OKLCH](https://bottosson.github.io/posts/oklab/),
/// so that equal steps look equal and the order survives in grey.
pub(crate) fn heat(t: f32) -> Colour {
    if t.is_nan() {
        return [150, 150, 150];
    }
    let t = t.clamp(0.0, 1.0);
    let lightness = 0.975 - 0.755 * t;
    let hue = (82.0 - 160.0 * t).to_radians();
    let wanted = 0.006 + 0.20 * (std::f32::consts::PI * t.powf(0.85)).sin().max(0.0) + 0.06 * t * t;
    // The most colourful shade up to the wanted one that a screen shows.
    let (mut low, mut high) = (0.0, wanted);
    if oklch(lightness, wanted, hue)
        .iter()
        .all(|c| (0.0..=1.0).contains(c))
    {
        low = wanted;
    } else {
        for _ in 0..16 {
            let middle = (low + high) / 2.0;
            if oklch(lightness, middle, hue)
                .iter()
                .all(|c| (0.0..=1.0).contains(c))
            {
                low = middle;
            } else {
                high = middle;
            }
        }
    }
    oklch(lightness, low, hue).map(|linear| {
        let encoded = if linear <= 0.003_130_8 {
            12.92 * linear
        } else {
            1.055 * linear.powf(1.0 / 2.4) - 0.055
        };
        (encoded * 255.0).round().clamp(0.0, 255.0) as u8
    })
}

/// Linear red, green and blue, outside of 0 ..= 1 where a screen cannot show the colour.
#[allow(clippy::excessive_precision)]
fn oklch(lightness: f32, chroma: f32, hue: f32) -> [f32; 3] {
    let (a, b) = (chroma * hue.cos(), chroma * hue.sin());
    let l = (lightness + 0.396_337_777 * a + 0.215_803_757 * b).powi(3);
    let m = (lightness - 0.105_561_346 * a - 0.063_854_173 * b).powi(3);
    let s = (lightness - 0.089_484_178 * a - 1.291_485_548 * b).powi(3);
    [
        4.076_741_662 * l - 3.307_711_591 * m + 0.230_969_929 * s,
        -1.268_438_005 * l + 2.609_757_401 * m - 0.341_319_396 * s,
        -0.004_196_086 * l - 0.703_418_615 * m + 1.707_614_701 * s,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heat_darkens_steadily() {
        let grey = |t: f32| {
            let [r, g, b] = heat(t).map(f32::from);
            0.2126 * r + 0.7152 * g + 0.0722 * b
        };
        assert!((0..100).all(|at| grey(at as f32 / 100.0) > grey((at + 1) as f32 / 100.0)));
        assert!(grey(0.0) > 240.0 && grey(1.0) < 40.0);
        assert_eq!((heat(-1.0), heat(2.0)), (heat(0.0), heat(1.0)));
    }
}
