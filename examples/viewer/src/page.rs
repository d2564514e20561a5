//! What is painted on the host: where the map lies, and the words around it. No weight comes by here.

use crate::paint::{Anchor, Canvas, Colour, Fonts};
use image::RgbImage;

const PAGE: Colour = [255, 255, 255];
const INK: Colour = [34, 32, 44];
const FAINT: Colour = [200, 196, 206];
const ACCENT: Colour = [0, 122, 135];

const TEXT: f32 = 17.0;
const TITLE: f32 = 19.0;
const MARGIN: f32 = 18.0;
/// How steeply the keys' words rise, in radians.
const SLOPE: f32 = 0.9;

/// Characters of the weight under the pointer, which the shader writes: `0.123`.
const NUMBER: &str = "0123456789.";

/// What a page shows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Content {
    pub(crate) size: [u32; 2],
    pub(crate) title: String,
    pub(crate) tokens: Vec<String>,
    /// Whether each key is visible.
    pub(crate) visible: Vec<bool>,
    /// Query and key under the pointer.
    pub(crate) hover: Option<[usize; 2]>,
}

/// Where things lie, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Upper left corner of the map.
    pub(crate) corner: [u32; 2],
    /// Side of a cell.
    pub(crate) cell: u32,
    /// Upper left corner of the weight under the pointer.
    pub(crate) number: [u32; 2],
}

/// Fonts, and the size of the number's characters.
pub(crate) struct Painter {
    fonts: Fonts,
    glyph: [u32; 2],
}

impl Painter {
    pub(crate) fn new() -> crate::Result<Self> {
        let fonts = Fonts::load()?;
        let width = fonts.width("0", TITLE).ceil() as u32;
        Ok(Self {
            fonts,
            glyph: [width, (TITLE * 1.3) as u32],
        })
    }

    /// Width and height of a character of the number.
    pub(crate) fn glyph(&self) -> [u32; 2] {
        self.glyph
    }

    /// The characters of [`NUMBER`] side by side.
    pub(crate) fn digits(&self) -> RgbImage {
        let [width, height] = self.glyph;
        let mut canvas = Canvas::new(width * NUMBER.len() as u32, height, PAGE);
        for (place, digit) in NUMBER.chars().enumerate() {
            let at = ((place as f32 + 0.5) * width as f32, TITLE);
            canvas.text(&self.fonts, &digit.to_string(), at, TITLE, Anchor::Middle, ACCENT);
        }
        canvas.image
    }

    pub(crate) fn layout(&self, content: &Content) -> Layout {
        let [width, height] = content.size.map(|size| size as f32);
        let widths = content.tokens.iter().map(|token| self.fonts.width(token, TEXT));
        let longest = widths.fold(0.0, f32::max);
        let left = MARGIN + longest + 10.0;
        let top = MARGIN + TITLE + 14.0 + (longest * SLOPE.sin()) + TEXT;
        let right = MARGIN + longest * SLOPE.cos() * 0.5;
        let footer = 2.0 * TITLE + MARGIN;
        let count = content.tokens.len().max(1) as f32;
        let cell = ((width - left - right) / count)
            .min((height - top - footer) / count)
            .max(1.0) as u32;
        let bottom = top as u32 + cell * content.tokens.len() as u32;
        let label = hovered(content).map_or(0.0, |text| self.fonts.width(&text, TITLE));
        Layout {
            corner: [left as u32, top as u32],
            cell,
            number: [(left + label + 10.0) as u32, bottom + (TITLE * 0.7) as u32],
        }
    }

    /// The page with its words; the map's place stays empty.
    pub(crate) fn paint(&self, content: &Content) -> RgbImage {
        let layout = self.layout(content);
        let [width, height] = content.size;
        let mut canvas = Canvas::new(width, height, PAGE);
        let [left, top] = layout.corner.map(|at| at as f32);
        let cell = layout.cell as f32;
        let title = (MARGIN, MARGIN + TITLE * 0.8);
        canvas.text(&self.fonts, &content.title, title, TITLE, Anchor::Left, INK);
        for (place, token) in content.tokens.iter().enumerate() {
            let middle = (place as f32 + 0.5) * cell;
            let colour = |pointed: bool| if pointed { ACCENT } else { INK };
            let query = colour(content.hover.is_some_and(|[query, _]| query == place));
            let at = (left - 8.0, top + middle + TEXT * 0.35);
            canvas.text(&self.fonts, token, at, TEXT, Anchor::Right, query);
            let key = match content.visible.get(place) {
                Some(false) => FAINT,
                _ => colour(content.hover.is_some_and(|[_, key]| key == place)),
            };
            let at = (left + middle, top - 8.0);
            canvas.rising_text(&self.fonts, token, at, TEXT, Anchor::Left, SLOPE, key);
        }
        if let Some(text) = hovered(content) {
            let at = (left, layout.number[1] as f32 + TITLE);
            canvas.text(&self.fonts, &text, at, TITLE, Anchor::Left, ACCENT);
        }
        canvas.image
    }
}

fn hovered(content: &Content) -> Option<String> {
    let [query, key] = content.hover?;
    Some(format!(
        "{} → {}",
        content.tokens.get(query)?,
        content.tokens.get(key)?
    ))
}
