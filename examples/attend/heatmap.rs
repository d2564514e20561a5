//! Heat maps of attention weights: a panel a head, words on both axes where the case has them.

use super::case::{Answers, Case, Hiding, Op};
use super::colours::{Colour, heat};
use super::paint::{Anchor, Canvas, Fonts};
use image::RgbImage;

/// Drawn twice as large as it is meant to be seen, for sharp screens.
const UNIT: f32 = 2.0;
const PAGE: Colour = [255, 255, 255];
const INK: Colour = [34, 32, 44];
const QUIET: Colour = [118, 115, 130];
const EDGE: Colour = [222, 219, 226];
const ACCENT: Colour = [0, 122, 135];

const MARGIN: f32 = 24.0 * UNIT;
const GAP: f32 = 22.0 * UNIT;
const LABEL: f32 = 15.0 * UNIT;
const HEADING: f32 = 17.0 * UNIT;
const TITLE: f32 = 27.0 * UNIT;
/// From a panel's heading to its map.
const HEADING_SPACE: f32 = 26.0 * UNIT;
/// Largest map and largest cell, of many heads and of one.
const MAP: [f32; 2] = [300.0 * UNIT, 760.0 * UNIT];
const CELL: [f32; 2] = [25.0 * UNIT, 58.0 * UNIT];
/// Least height of the scale.
const BAR: f32 = 110.0 * UNIT;
/// More panels than this are no picture any more.
const MAX_PANELS: usize = 64;
/// Words are cut to this many characters.
const MAX_WORD: usize = 14;

/// The weights of one batch row, cut to the tokens that exist.
pub(crate) struct Maps {
    title: String,
    subtitle: String,
    panels: Vec<Panel>,
    /// Words of the rows and columns; empty without words.
    rows: Vec<String>,
    columns: Vec<String>,
    row_count: usize,
    column_count: usize,
    fonts: Fonts,
}

struct Panel {
    heading: String,
    /// `[rows, columns]`.
    weights: Vec<f64>,
}

/// The strongest weight between two different ordinary words.
#[derive(Clone, Copy)]
struct Link {
    row: usize,
    column: usize,
    weight: f64,
}

impl Maps {
    /// Of batch row `batch`; of one head, counted from 1, if `head` says so.
    pub(crate) fn new(
        case: &Case,
        answers: &Answers,
        label: &str,
        batch: usize,
        head: Option<usize>,
    ) -> Result<Self, String> {
        let Some(weights) = answers.get("weights") else {
            return Err("has no attention weights to draw".to_owned());
        };
        let (batches, heads, queries, keys) = match *weights.shape.as_slice() {
            [b, h, q, k] => (b, Some(h), q, k),
            [b, q, k] => (b, None, q, k),
            _ => {
                return Err(format!(
                    "has weights of shape {:?}, which cannot be drawn",
                    weights.shape
                ));
            }
        };
        if batch >= batches {
            return Err(format!(
                "has {batches} batch rows, counted from 0: --batch {batch} is not one of them"
            ));
        }
        let shown: Vec<usize> = match (heads, head) {
            (Some(heads), Some(head)) if head == 0 || head > heads => {
                return Err(format!(
                    "has {heads} heads, counted from 1: --head {head} is not one of them"
                ));
            }
            (None, Some(_)) => return Err("averages its weights over the heads: leave out --head".to_owned()),
            (_, Some(head)) => vec![head.saturating_sub(1)],
            (heads, None) => (0..heads.unwrap_or(1)).collect(),
        };
        if shown.len() > MAX_PANELS {
            return Err(format!(
                "has {} heads, at most {MAX_PANELS} are drawn: pick one with --head",
                shown.len()
            ));
        }

        let extra = match &case.op {
            Op::Layer(op) => op.config.extra_keys(),
            _ => 0,
        };
        let ordinary = keys.saturating_sub(extra);
        let words = case
            .tokens
            .as_ref()
            .and_then(|rows| rows.get(batch))
            .filter(|words| !words.is_empty() && words.len() <= ordinary);
        let real = match words {
            Some(words) => words.len(),
            None => real_keys(&case.op, batch, ordinary),
        };
        let kept_rows = if queries == ordinary { real } else { queries };
        let kept_columns: Vec<usize> = (0..real).chain(ordinary..keys).collect();
        if kept_rows == 0 || kept_columns.is_empty() {
            return Err(format!(
                "has an empty map, {kept_rows} by {}: nothing to draw",
                kept_columns.len()
            ));
        }
        let named = |count: usize| -> Vec<String> {
            words
                .map(|words| words.iter().take(count).map(|word| shorten(word)).collect())
                .unwrap_or_default()
        };
        let mut columns = named(real);
        if let (Op::Layer(op), false) = (&case.op, columns.is_empty()) {
            columns.extend(op.config.add_bias_kv.then(|| "(bias)".to_owned()));
            columns.extend(op.config.add_zero_attn.then(|| "(zero)".to_owned()));
        }
        let rows = if queries == ordinary {
            named(real)
        } else {
            Vec::new()
        };

        let panels = shown
            .iter()
            .map(|&head| {
                let first = (batch * heads.unwrap_or(1) + head) * queries * keys;
                let cell = |row: usize, column: usize| weights.data[first + row * keys + column];
                Panel {
                    heading: if heads.is_some() {
                        format!("head {}", head + 1)
                    } else {
                        "mean of the heads".to_owned()
                    },
                    weights: (0..kept_rows)
                        .flat_map(|row| kept_columns.iter().map(move |&column| cell(row, column)))
                        .collect(),
                }
            })
            .collect();
        let mut subtitle = if rows.is_empty() || columns.is_empty() {
            "row = query, column = key".to_owned()
        } else {
            "row = the word that looks, column = the word it looks at".to_owned()
        };
        if batches > 1 {
            subtitle = format!("batch row {batch}: {subtitle}");
        }
        Ok(Self {
            title: shorten_to(if case.name.is_empty() { label } else { &case.name }, 60),
            subtitle,
            panels,
            rows,
            columns,
            row_count: kept_rows,
            column_count: kept_columns.len(),
            fonts: Fonts::load()?,
        })
    }

    /// The strongest link of all panels, as a line to read.
    pub(crate) fn strongest(&self) -> Option<String> {
        let (panel, link) = self.strongest_panel()?;
        let Link { row, column, weight } = link;
        let heading = &self.panels[panel].heading;
        Some(match (self.rows.get(row), self.columns.get(column)) {
            (Some(from), Some(to)) => format!("{heading}: \"{from}\" -> \"{to}\" {weight:.2}"),
            _ => format!("{heading}: query {row} -> key {column}, {weight:.2}"),
        })
    }

    fn strongest_panel(&self) -> Option<(usize, Link)> {
        self.panels
            .iter()
            .enumerate()
            .filter_map(|(at, panel)| Some((at, self.link(panel)?)))
            .reduce(|best, next| if next.1.weight > best.1.weight { next } else { best })
    }

    /// The strongest link of a panel.
    fn link(&self, panel: &Panel) -> Option<Link> {
        let ordinary = |words: &[String], at: usize| words.get(at).is_none_or(|word| is_ordinary(word));
        let mut best: Option<Link> = None;
        for row in (0..self.row_count).filter(|&row| ordinary(&self.rows, row)) {
            for column in (0..self.column_count).filter(|&column| ordinary(&self.columns, column)) {
                let weight = panel.weights[row * self.column_count + column];
                if row != column && weight > best.map_or(0.0, |best| best.weight) {
                    best = Some(Link { row, column, weight });
                }
            }
        }
        best
    }

    /// The picture.
    pub(crate) fn draw(&self) -> RgbImage {
        let alone = usize::from(self.panels.len() == 1);
        let cell = |count: usize| (MAP[alone] / count as f32).min(CELL[alone]);
        // Whole pixels keep all cells equal; below one pixel, cells share pixels.
        let whole = |size: f32| if size >= 1.0 { size.floor() } else { size };
        let (cell_x, cell_y) = (whole(cell(self.column_count)), whole(cell(self.row_count)));
        let map_x = (cell_x * self.column_count as f32).ceil();
        let map_y = (cell_y * self.row_count as f32).ceil();

        let (across, down) = grid(self.panels.len());
        let widest = |words: &[String]| {
            words
                .iter()
                .map(|w| self.fonts.width(w, LABEL))
                .fold(0.0, f32::max)
        };
        let left = MARGIN
            + if self.rows.is_empty() {
                40.0 * UNIT
            } else {
                widest(&self.rows) + 10.0 * UNIT
            };
        let below = if self.columns.is_empty() {
            26.0 * UNIT
        } else {
            widest(&self.columns) * SLOPE.sin() + 22.0 * UNIT
        };
        let top = MARGIN + TITLE + 54.0 * UNIT;
        let step_x = map_x + GAP;
        let step_y = map_y + HEADING_SPACE + GAP * 0.75;
        let right = left + step_x * across as f32 - GAP;
        let bar = right + 28.0 * UNIT;
        let bottom = (top + step_y * down as f32 - GAP * 0.75).max(top + HEADING_SPACE + BAR);
        let titles = self
            .fonts
            .width(&self.title, TITLE)
            .max(self.fonts.width(&self.subtitle, LABEL));
        let width = (bar + 62.0 * UNIT + MARGIN).max(MARGIN * 2.0 + titles);
        let mut canvas = Canvas::new(
            width.ceil() as u32,
            (bottom + below + MARGIN * 0.5).ceil() as u32,
            PAGE,
        );
        let fonts = &self.fonts;

        canvas.text(
            fonts,
            &self.title,
            (MARGIN, MARGIN + TITLE * 0.8),
            TITLE,
            Anchor::Left,
            INK,
        );
        let line = MARGIN + TITLE * 0.8 + 27.0 * UNIT;
        canvas.text(fonts, &self.subtitle, (MARGIN, line), LABEL, Anchor::Left, QUIET);

        let largest = self
            .panels
            .iter()
            .flat_map(|panel| &panel.weights)
            .fold(0.0f64, |a, &b| a.max(b));
        let (full, tick) = scale_of(largest);
        let strongest = self.strongest_panel();
        for (at, panel) in self.panels.iter().enumerate() {
            let (x, y) = (
                left + step_x * (at % across) as f32,
                top + step_y * (at / across) as f32,
            );
            let y = y + HEADING_SPACE;
            self.heading(
                &mut canvas,
                panel,
                (x, y),
                map_x,
                strongest.is_some_and(|(best, _)| best == at),
            );
            self.cells(&mut canvas, panel, (x, y), (cell_x, cell_y), full);
            canvas.frame(x, y, map_x, map_y, UNIT, EDGE);
            if let Some((_, link)) =
                strongest.filter(|(best, _)| *best == at && cell_x.min(cell_y) >= 6.0 * UNIT)
            {
                let corner = (x + link.column as f32 * cell_x, y + link.row as f32 * cell_y);
                canvas.frame(
                    corner.0,
                    corner.1,
                    cell_x - UNIT,
                    cell_y - UNIT,
                    1.5 * UNIT,
                    ACCENT,
                );
            }
            if at % across == 0 {
                self.row_labels(&mut canvas, (x, y), cell_y);
            }
            if at + across >= self.panels.len() {
                self.column_labels(&mut canvas, (x, y + map_y), cell_x);
            }
        }
        self.scale_bar(
            &mut canvas,
            bar,
            (top + HEADING_SPACE, map_y.max(BAR)),
            full,
            tick,
        );
        canvas.image
    }

    /// The head's name, and at the right its strongest link where there is room for it.
    fn heading(&self, canvas: &mut Canvas, panel: &Panel, (x, y): (f32, f32), width: f32, best: bool) {
        let base = y - 9.0 * UNIT;
        canvas.text(&self.fonts, &panel.heading, (x, base), HEADING, Anchor::Left, INK);
        let Some(Link { row, column, weight }) = self.link(panel) else {
            return;
        };
        let (Some(from), Some(to)) = (self.rows.get(row), self.columns.get(column)) else {
            return;
        };
        let size = LABEL * 0.86;
        let text = format!("{from} → {to} {weight:.2}");
        let room = width - self.fonts.width(&panel.heading, HEADING) - 10.0 * UNIT;
        if self.fonts.width(&text, size) <= room {
            let colour = if best { ACCENT } else { QUIET };
            canvas.text(&self.fonts, &text, (x + width, base), size, Anchor::Right, colour);
        }
    }

    fn cells(
        &self,
        canvas: &mut Canvas,
        panel: &Panel,
        (x, y): (f32, f32),
        (cell_x, cell_y): (f32, f32),
        full: f64,
    ) {
        let line = if cell_x.min(cell_y) >= 6.0 * UNIT {
            UNIT
        } else {
            0.0
        };
        // A pixel that several cells share shows the largest of them.
        let spans = |count: usize, cell: f32| -> Vec<(usize, usize)> {
            let steps = ((count as f32 * cell).ceil() as usize).clamp(1, count);
            (0..steps)
                .map(|s| {
                    (
                        s * count / steps,
                        ((s + 1) * count / steps).max(s * count / steps + 1),
                    )
                })
                .collect()
        };
        let (across, down) = (spans(self.column_count, cell_x), spans(self.row_count, cell_y));
        let (step_x, step_y) = (cell_x.max(1.0), cell_y.max(1.0));
        let numbers = cell_x.min(cell_y) >= 34.0 * UNIT;
        for (row, &(row0, row1)) in down.iter().enumerate() {
            for (column, &(column0, column1)) in across.iter().enumerate() {
                let weight = (row0..row1)
                    .flat_map(|row| &panel.weights[row * self.column_count..][column0..column1])
                    .fold(f64::NEG_INFINITY, |a, &b| {
                        if a.is_nan() || b.is_nan() {
                            f64::NAN
                        } else {
                            a.max(b)
                        }
                    });
                let share = (weight / full) as f32;
                let (at_x, at_y) = (x + column as f32 * step_x, y + row as f32 * step_y);
                canvas.fill(at_x, at_y, step_x - line, step_y - line, heat(share));
                if numbers && (weight >= 0.005 || weight.is_nan()) {
                    let colour = if share > 0.5 { PAGE } else { INK };
                    let middle = (at_x + (step_x - line) / 2.0, at_y + step_y / 2.0 + LABEL * 0.32);
                    let text = format!("{weight:.2}");
                    let text = text.strip_prefix('0').unwrap_or(&text);
                    canvas.text(&self.fonts, text, middle, LABEL, Anchor::Middle, colour);
                }
            }
        }
    }

    fn row_labels(&self, canvas: &mut Canvas, (x, y): (f32, f32), cell: f32) {
        let x = x - 8.0 * UNIT;
        for at in (0..self.row_count).step_by(step(cell, LABEL * 1.05, self.rows.is_empty())) {
            let base = y + (at as f32 + 0.5) * cell + LABEL * 0.3;
            let index = at.to_string();
            let word = self.rows.get(at).unwrap_or(&index);
            canvas.text(
                &self.fonts,
                word,
                (x, base),
                LABEL,
                Anchor::Right,
                word_colour(word),
            );
        }
    }

    fn column_labels(&self, canvas: &mut Canvas, (x, y): (f32, f32), cell: f32) {
        let middle = |at: usize| x + (at as f32 + 0.5) * cell;
        if self.columns.is_empty() {
            let room = self.fonts.width(&self.column_count.to_string(), LABEL) + LABEL * 0.7;
            for at in (0..self.column_count).step_by(step(cell, room, true)) {
                let point = (middle(at), y + LABEL * 1.15);
                canvas.text(&self.fonts, &at.to_string(), point, LABEL, Anchor::Middle, INK);
            }
            return;
        }
        for (at, word) in self
            .columns
            .iter()
            .enumerate()
            .step_by(step(cell, LABEL * 1.05, false))
        {
            let point = (middle(at) + LABEL * 0.3, y + LABEL * 0.75);
            let colour = word_colour(word);
            canvas.rising_text(&self.fonts, word, point, LABEL, Anchor::Right, SLOPE, colour);
        }
    }

    fn scale_bar(&self, canvas: &mut Canvas, x: f32, (top, height): (f32, f32), full: f64, tick: f64) {
        let width = 14.0 * UNIT;
        let bottom = top + height;
        for y in 0..height as u32 {
            canvas.fill(
                x,
                top + y as f32,
                width,
                1.0,
                heat(1.0 - (y as f32 + 0.5) / height),
            );
        }
        canvas.frame(x, top, width, height, UNIT, EDGE);
        let digits = if tick < 0.01 {
            4
        } else if tick < 0.1 {
            2
        } else {
            1
        };
        for at in 0..=(full / tick).round() as u32 {
            let value = f64::from(at) * tick;
            let y = bottom - height * (value / full) as f32;
            canvas.fill(x + width, y - UNIT * 0.5, 5.0 * UNIT, UNIT, QUIET);
            let point = (x + width + 9.0 * UNIT, y + LABEL * 0.3);
            canvas.text(
                &self.fonts,
                &format!("{value:.digits$}"),
                point,
                LABEL,
                Anchor::Left,
                QUIET,
            );
        }
        canvas.text(
            &self.fonts,
            "weight",
            (x, top - 15.0 * UNIT),
            LABEL,
            Anchor::Left,
            QUIET,
        );
    }
}

/// How steeply the words of the columns rise.
const SLOPE: f32 = 0.9;

/// Panels across and down, about 4 to 3.
fn grid(panels: usize) -> (usize, usize) {
    let across = ((panels as f32 * 4.0 / 3.0).sqrt().ceil() as usize).max(1);
    let down = panels.div_ceil(across).max(1);
    (panels.div_ceil(down).max(1), down)
}

/// Every how many cells a label has room; round numbers for indices.
fn step(cell: f32, room: f32, round: bool) -> usize {
    let needed = (room / cell).ceil().max(1.0) as usize;
    if !round {
        return needed;
    }
    let mut power = 1;
    loop {
        for factor in [1, 2, 5] {
            if factor * power >= needed {
                return factor * power;
            }
        }
        power *= 10;
    }
}

/// Upper end of the colour scale and its ticks.
fn scale_of(largest: f64) -> (f64, f64) {
    for (full, tick) in [
        (0.001, 0.0005),
        (0.002, 0.001),
        (0.005, 0.001),
        (0.01, 0.005),
        (0.02, 0.01),
        (0.05, 0.01),
        (0.1, 0.05),
        (0.2, 0.05),
        (0.4, 0.1),
        (0.6, 0.2),
        (0.8, 0.2),
    ] {
        if largest > 0.0 && largest <= full {
            return (full, tick);
        }
    }
    (1.0, 0.2)
}

/// Keys of a batch row up to the last that padding leaves.
fn real_keys(op: &Op, batch: usize, keys: usize) -> usize {
    let hiding: &Hiding = match op {
        Op::Sdpa(op) => &op.hiding,
        Op::Layer(op) => &op.hiding,
        Op::Packed(_) | Op::Rotary(_) => return keys,
    };
    let by_length = hiding
        .kv_lengths
        .as_ref()
        .and_then(|lengths| lengths.get(batch).copied());
    let by_mask = hiding
        .key_mask
        .as_ref()
        .and_then(|keep| keep.get(batch * keys..(batch + 1) * keys))
        .map(|keep| keep.iter().rposition(|&keep| keep).map_or(0, |last| last + 1));
    let real = by_length.unwrap_or(keys).min(by_mask.unwrap_or(keys)).min(keys);
    // A row that attends to nothing is drawn whole: that is what it shows.
    if real == 0 { keys } else { real }
}

/// Neither punctuation nor a marker such as `[CLS]` or `</s>`.
fn is_ordinary(word: &str) -> bool {
    let marked = [('[', ']'), ('<', '>'), ('(', ')')]
        .iter()
        .any(|&(open, close)| word.len() > 1 && word.starts_with(open) && word.ends_with(close));
    !marked && word.chars().any(char::is_alphanumeric)
}

fn word_colour(word: &str) -> Colour {
    if is_ordinary(word) { INK } else { QUIET }
}

fn shorten(word: &str) -> String {
    shorten_to(word, MAX_WORD)
}

/// At most `limit` characters, none of them a control code.
fn shorten_to(text: &str, limit: usize) -> String {
    let mut kept: String = text.chars().filter(|c| !c.is_control()).take(limit + 1).collect();
    if let Some((cut, _)) = kept.char_indices().nth(limit) {
        kept.truncate(cut);
        kept.pop();
        kept.push('…');
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_stand_about_four_to_three() {
        assert_eq!(
            [1, 2, 4, 8, 12, 16].map(grid),
            [(1, 1), (2, 1), (2, 2), (4, 2), (4, 3), (4, 4)]
        );
        assert!((1..=MAX_PANELS).all(|panels| grid(panels).0 * grid(panels).1 >= panels));
    }

    #[test]
    fn labels_keep_their_distance() {
        assert_eq!(
            (
                step(50.0, 30.0, true),
                step(10.0, 30.0, false),
                step(10.0, 30.0, true)
            ),
            (1, 3, 5)
        );
        assert_eq!((step(0.1, 30.0, true), step(3.0, 33.0, true)), (500, 20));
    }

    #[test]
    fn markers_and_punctuation_are_no_words() {
        assert!(["they", "##s", "3", "été"].into_iter().all(is_ordinary));
        assert!(
            [
                "[CLS]", "[SEP]", "<s>", "</s>", "<|end|>", ".", "...", "(bias)", ""
            ]
            .iter()
            .all(|w| !is_ordinary(w))
        );
        assert_eq!(
            (shorten("attention").as_str(), shorten_to("attention", 4).as_str()),
            ("attention", "att…")
        );
        assert_eq!(shorten("a\u{1b}[2J"), "a[2J");
    }

    #[test]
    fn the_scale_holds_the_largest_weight() {
        for largest in [1e-5, 0.004, 0.03, 0.2, 0.21, 0.75, 1.0] {
            let (full, tick) = scale_of(largest);
            assert!(largest <= full && full / tick <= 5.5, "{largest}: {full} {tick}");
        }
        assert_eq!(scale_of(0.0), (1.0, 0.2));
    }
}
