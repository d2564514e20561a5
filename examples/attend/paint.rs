//! A canvas with text: what the heat maps are painted with.

use super::colours::Colour;
use ab_glyph::{Font, FontRef, GlyphId, PxScale, ScaleFont, point};
use image::{Rgb, RgbImage};

/// Where text stands relative to its point.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Anchor {
    Left,
    Middle,
    Right,
}

/// An image, and the fonts of the crate `epaint_default_fonts`: no system font is needed.
pub(crate) struct Canvas {
    pub(crate) image: RgbImage,
}

/// Fonts in the order in which a character is looked for.
pub(crate) struct Fonts([FontRef<'static>; 3]);

impl Fonts {
    pub(crate) fn load() -> Result<Self, String> {
        let font = |bytes| FontRef::try_from_slice(bytes).map_err(|error| format!("built-in font: {error}"));
        Ok(Self([
            font(epaint_default_fonts::HACK_REGULAR)?,
            font(epaint_default_fonts::UBUNTU_LIGHT)?,
            font(epaint_default_fonts::NOTO_EMOJI_REGULAR)?,
        ]))
    }

    /// The font that has a character; the first one shows its box for a character that none has.
    fn find(&self, c: char) -> (&FontRef<'static>, GlyphId) {
        let [first, ..] = &self.0;
        self.0
            .iter()
            .map(|font| (font, font.glyph_id(c)))
            .find(|(_, id)| id.0 != 0)
            .unwrap_or_else(|| (first, first.glyph_id(c)))
    }

    /// Width of a line of text.
    pub(crate) fn width(&self, text: &str, size: f32) -> f32 {
        text.chars()
            .map(|c| {
                let (font, id) = self.find(c);
                font.as_scaled(PxScale::from(size)).h_advance(id)
            })
            .sum()
    }

    /// Calls `pixel(x, y, coverage)` for the text's pixels, its base line starting at the origin.
    fn outline(&self, text: &str, size: f32, mut pixel: impl FnMut(i32, i32, f32)) {
        let scale = PxScale::from(size);
        let mut x = 0.0;
        for c in text.chars() {
            let (font, id) = self.find(c);
            if let Some(outline) = font.outline_glyph(id.with_scale_and_position(scale, point(x, 0.0))) {
                let corner = outline.px_bounds().min;
                outline.draw(|dx, dy, coverage| {
                    pixel(corner.x as i32 + dx as i32, corner.y as i32 + dy as i32, coverage);
                });
            }
            x += font.as_scaled(scale).h_advance(id);
        }
    }
}

impl Canvas {
    pub(crate) fn new(width: u32, height: u32, colour: Colour) -> Self {
        Self {
            image: RgbImage::from_pixel(width, height, Rgb(colour)),
        }
    }

    /// Fills `[x, x + width) x [y, y + height)`, cut to the canvas.
    pub(crate) fn fill(&mut self, x: f32, y: f32, width: f32, height: f32, colour: Colour) {
        let clip = |at: f32, limit: u32| at.round().clamp(0.0, limit as f32) as u32;
        let (limit_x, limit_y) = self.image.dimensions();
        for y in clip(y, limit_y)..clip(y + height, limit_y) {
            for x in clip(x, limit_x)..clip(x + width, limit_x) {
                self.image.put_pixel(x, y, Rgb(colour));
            }
        }
    }

    /// The edge of a rectangle, `line` thick, outside of it.
    pub(crate) fn frame(&mut self, x: f32, y: f32, width: f32, height: f32, line: f32, colour: Colour) {
        self.fill(x - line, y - line, width + 2.0 * line, line, colour);
        self.fill(x - line, y + height, width + 2.0 * line, line, colour);
        self.fill(x - line, y, line, height, colour);
        self.fill(x + width, y, line, height, colour);
    }

    /// A line of text on the base line through `(x, y)`.
    pub(crate) fn text(
        &mut self,
        fonts: &Fonts,
        text: &str,
        (x, y): (f32, f32),
        size: f32,
        anchor: Anchor,
        colour: Colour,
    ) {
        let x = (x - fonts.width(text, size) * anchor.share()).round() as i32;
        let y = y.round() as i32;
        fonts.outline(text, size, |dx, dy, coverage| {
            self.blend(x + dx, y + dy, coverage, colour)
        });
    }

    /// Text that rises to the right by `angle` (radians), around the anchor on its base line.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn rising_text(
        &mut self,
        fonts: &Fonts,
        text: &str,
        (x, y): (f32, f32),
        size: f32,
        anchor: Anchor,
        angle: f32,
        colour: Colour,
    ) {
        // Drawn upright in a finer raster, then each fine pixel is dropped where it turns to.
        const FINE: f32 = 4.0;
        let (sin, cos) = angle.sin_cos();
        let start = -fonts.width(text, size) * anchor.share();
        let (width, height) = (self.image.width() as usize, self.image.height() as usize);
        let mut sums = std::collections::BTreeMap::<(usize, usize), f32>::new();
        fonts.outline(text, size * FINE, |dx, dy, coverage| {
            // Four samples per fine pixel, so that turning leaves no holes.
            for (ox, oy) in [(0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75)] {
                let u = start + (dx as f32 + ox) / FINE;
                let v = (dy as f32 + oy) / FINE;
                let (px, py) = (x + u * cos + v * sin, y - u * sin + v * cos);
                if px >= 0.0 && py >= 0.0 && (px as usize) < width && (py as usize) < height {
                    *sums.entry((px as usize, py as usize)).or_default() += coverage / (4.0 * FINE * FINE);
                }
            }
        });
        for ((px, py), coverage) in sums {
            self.blend(px as i32, py as i32, coverage, colour);
        }
    }

    fn blend(&mut self, x: i32, y: i32, coverage: f32, colour: Colour) {
        let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else {
            return;
        };
        if let Some(Rgb(under)) = self.image.get_pixel_mut_checked(x, y) {
            let share = coverage.clamp(0.0, 1.0);
            for (under, over) in under.iter_mut().zip(colour) {
                *under = (f32::from(*under) * (1.0 - share) + f32::from(over) * share).round() as u8;
            }
        }
    }
}

impl Anchor {
    fn share(self) -> f32 {
        match self {
            Self::Left => 0.0,
            Self::Middle => 0.5,
            Self::Right => 1.0,
        }
    }
}
