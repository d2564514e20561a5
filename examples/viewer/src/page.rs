//! The page: controls above, the map with its words, and a line below that tells the weight under the pointer.

use crate::colours::heat;
use crate::map::Map;
use crate::scene::{Choice, Scene};
use egui::epaint::TextShape;
use egui::text::{LayoutJob, TextFormat, TextWrapping};
use egui::{
    Align2, Color32, ComboBox, FontDefinitions, FontFamily, Frame, Galley, Key, Margin, Mesh, Modifiers,
    Painter, Panel, Pos2, Rect, RichText, Sense, Stroke, StrokeKind, TextStyle, Ui, pos2, vec2,
};
use std::sync::Arc;
use std::time::Duration;

const INK: Color32 = Color32::from_rgb(34, 32, 44);
const QUIET: Color32 = Color32::from_rgb(118, 115, 130);
const FAINT: Color32 = Color32::from_rgb(190, 186, 197);
pub(crate) const ACCENT: Color32 = Color32::from_rgb(0, 122, 135);

/// Sizes of the words, the largest that fits the cells being taken. Lengths are in points.
const TEXT: [f32; 5] = [16.0, 14.0, 12.0, 10.0, 8.0];
const MARGIN: f32 = 16.0;
/// Between words and map.
const GAP: f32 = 8.0;
const LARGEST_CELL: f32 = 96.0;
/// How steeply the keys' words rise, in radians.
const SLOPE: f32 = 0.9;

/// Where the map lies, in pixels: cells of whole pixels are all of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Layout {
    /// Upper left corner of the map.
    pub(crate) corner: [u32; 2],
    /// Side of a cell.
    pub(crate) cell: u32,
    /// Size of the words in points; none where cells are too small for words.
    text: Option<f32>,
    pixels_per_point: f32,
}

impl Layout {
    /// The largest map of `count` rows and columns that leaves room for words of width `longest` (at the first of the sizes).
    fn new(area: Rect, count: usize, longest: f32, pixels_per_point: f32) -> Self {
        let count = count as f32;
        let fit = |text: Option<f32>| {
            let longest = text.map_or(0.0, |text| longest * text / TEXT[0]);
            let height = text.unwrap_or_default();
            let before = vec2(
                MARGIN + longest + GAP,
                MARGIN + longest * SLOPE.sin() + height + GAP,
            );
            let after = vec2(MARGIN.max(longest * SLOPE.cos()), MARGIN);
            let room = (area.size() - before - after) / count;
            let cell = (room.min_elem().min(LARGEST_CELL) * pixels_per_point).max(1.0);
            let cell = cell.floor();
            let spare = area.size() - before - after - egui::Vec2::splat(cell / pixels_per_point * count);
            let corner = area.min + before + spare.max(egui::Vec2::ZERO) * vec2(0.5, 0.3);
            let corner = (corner.to_vec2() * pixels_per_point).round();
            Self {
                corner: [corner.x as u32, corner.y as u32],
                cell: cell as u32,
                text,
                pixels_per_point,
            }
        };
        TEXT.into_iter()
            .map(|text| (text, fit(Some(text))))
            // The keys' words lie across, and so nearer to each other than the columns.
            .find(|(text, layout)| layout.cell as f32 >= text * 1.35 * pixels_per_point)
            .map_or_else(|| fit(None), |(_, layout)| layout)
    }

    /// Cells `columns` by `rows`, in points.
    fn cells(&self, columns: [usize; 2], rows: [usize; 2]) -> Rect {
        let at = |column: usize, row: usize| {
            let pixel = |corner: u32, place: usize| corner as f32 + self.cell as f32 * place as f32;
            let pixel = pos2(pixel(self.corner[0], column), pixel(self.corner[1], row));
            pixel / self.pixels_per_point
        };
        Rect::from_min_max(at(columns[0], rows[0]), at(columns[1], rows[1]))
    }

    /// The cell of a query and a key, in points.
    pub(crate) fn cell(&self, [query, key]: [usize; 2]) -> Rect {
        self.cells([key, key + 1], [query, query + 1])
    }

    /// Query and key of `count` whose cell holds a point.
    pub(crate) fn cell_at(&self, point: Pos2, count: usize) -> Option<[usize; 2]> {
        let place = |at: f32, corner: u32| {
            let place = (at * self.pixels_per_point - corner as f32) / self.cell as f32;
            (place >= 0.0 && place < count as f32).then_some(place as usize)
        };
        Some([place(point.y, self.corner[1])?, place(point.x, self.corner[0])?])
    }
}

/// Sets the looks: a white page, text a little larger than egui's.
pub(crate) fn style(context: &egui::Context) {
    // Arrows and the marks that tokenizers put for spaces are in the fixed-width font alone.
    let mut fonts = FontDefinitions::default();
    let fixed = fonts.families.get(&FontFamily::Monospace).cloned();
    let usual = fonts.families.entry(FontFamily::Proportional).or_default();
    usual.extend(fixed.unwrap_or_default());
    context.set_fonts(fonts);
    context.set_theme(egui::Theme::Light);
    context.all_styles_mut(|style| {
        style.visuals.panel_fill = Color32::WHITE;
        style.visuals.override_text_color = Some(INK);
        style.spacing.item_spacing = vec2(8.0, 6.0);
        style.spacing.interact_size.y = 26.0;
        for (text, font) in &mut style.text_styles {
            if matches!(text, TextStyle::Body | TextStyle::Button) {
                font.size = 15.0;
            }
        }
    });
}

/// Shows the page and does what keys and pointer ask for.
pub(crate) fn show(ui: &mut Ui, scene: &mut Scene, map: &Map, frame_time: Option<Duration>) -> Layout {
    keys(ui, scene);
    let line = |margin| Frame::new().fill(Color32::WHITE).inner_margin(margin);
    let side = MARGIN as i8;
    Panel::top("controls")
        .frame(line(Margin::symmetric(side, 10)))
        .show(ui, |ui| controls(ui, scene, frame_time));
    Panel::bottom("weight")
        .frame(line(Margin::symmetric(side, 10)))
        .show_separator_line(false)
        .show(ui, |ui| {
            ui.with_layout(egui::Layout::right_to_left(egui::Align::Center), |ui| {
                if ui.available_width() > 440.0 {
                    scale(ui);
                }
                ui.with_layout(egui::Layout::left_to_right(egui::Align::Center), |ui| {
                    ui.add(egui::Label::new(below(scene)).truncate());
                });
            });
        });
    egui::CentralPanel::default()
        .frame(line(Margin::ZERO))
        .show(ui, |ui| picture(ui, scene, map))
        .inner
}

/// Before any widget sees them, so that the arrows mean the same wherever the focus is.
fn keys(ui: &Ui, scene: &mut Scene) {
    let pressed = |key| ui.input_mut(|input| input.consume_key(Modifiers::NONE, key));
    let arrows = [
        (Key::ArrowUp, [-1, 0]),
        (Key::ArrowDown, [1, 0]),
        (Key::ArrowLeft, [0, -1]),
        (Key::ArrowRight, [0, 1]),
    ];
    for (key, [heads, sentences]) in arrows {
        if pressed(key) {
            scene.step(heads, sentences);
        }
    }
}

fn controls(ui: &mut Ui, scene: &mut Scene, frame_time: Option<Duration>) {
    ui.horizontal_wrapped(|ui| {
        let Choice {
            mut layer,
            mut head,
            mut sentence,
        } = scene.choice();
        let layers = &scene.layers;
        select(ui, "layer", &mut layer, layers.len(), |at| {
            layers[at].name.clone()
        });
        let heads = scene.layer().heads;
        select(ui, "head", &mut head, heads, |at| {
            format!("Head {} of {heads}", at + 1)
        });
        let sentences = scene.layer().tokens.len();
        select(ui, "sentence", &mut sentence, sentences, |at| {
            format!("Sentence {} of {sentences}", at + 1)
        });
        if let Some(time) = frame_time {
            let text = format!("{:.1} ms a frame", time.as_secs_f64() * 1e3);
            ui.label(RichText::new(text).color(QUIET));
        }
        scene.choose(Choice {
            layer,
            head,
            sentence,
        });
    });
}

fn select(ui: &mut Ui, name: &str, choice: &mut usize, count: usize, text: impl Fn(usize) -> String) {
    ComboBox::from_id_salt(name)
        .width(0.0)
        .height(420.0)
        .show_index(ui, choice, count, text);
}

/// What the line below says.
fn below(scene: &Scene) -> RichText {
    match scene.hovered() {
        Some(text) => RichText::new(text).color(ACCENT),
        None => RichText::new("Point at a cell to read it; click to hide its key.").color(QUIET),
    }
}

/// The colours of the weights from 0 to 1, laid out from the right.
fn scale(ui: &mut Ui) {
    const STEPS: u32 = 64;
    ui.label(RichText::new("1").color(QUIET));
    let (bar, _) = ui.allocate_exact_size(vec2(96.0, 10.0), Sense::hover());
    let mut mesh = Mesh::default();
    for step in 0..=STEPS {
        let share = step as f32 / STEPS as f32;
        let [red, green, blue] = heat(share);
        let x = bar.left() + bar.width() * share;
        for y in [bar.top(), bar.bottom()] {
            mesh.colored_vertex(pos2(x, y), Color32::from_rgb(red, green, blue));
        }
        if step > 0 {
            let [a, b, c, d] = [2 * step - 2, 2 * step - 1, 2 * step, 2 * step + 1];
            mesh.add_triangle(a, b, c);
            mesh.add_triangle(b, c, d);
        }
    }
    ui.painter().add(mesh);
    ui.label(RichText::new("0").color(QUIET));
}

/// The map, with its words beside and above.
fn picture(ui: &mut Ui, scene: &mut Scene, map: &Map) -> Layout {
    let area = ui.available_rect_before_wrap();
    let painter = ui.painter().with_clip_rect(area);
    let tokens = scene.tokens().to_vec();
    let count = tokens.len();
    let width = area.width() / 4.0;
    let wide = |token: &String| word(&painter, token, TEXT[0], width, false).size().x;
    let longest = tokens.iter().map(wide).fold(0.0, f32::max);
    let layout = Layout::new(area, count, longest, ui.pixels_per_point());
    let whole = layout.cells([0, count], [0, count]);

    let response = ui.interact(whole.intersect(area), ui.scope_id().with("map"), Sense::click());
    scene.hover = response
        .hover_pos()
        .and_then(|point| layout.cell_at(point, count));
    if let (true, Some([_, key])) = (response.clicked(), scene.hover) {
        scene.toggle(key);
    }

    painter.add(map.callback(scene, whole));
    if let Some(cell) = scene.hover {
        let frame = Stroke::new(2.0, ACCENT);
        painter.rect_stroke(layout.cell(cell), 0.0, frame, StrokeKind::Inside);
    }
    let Some(text) = layout.text else {
        return layout;
    };
    let [query, key] = scene
        .hover
        .map_or([None, None], |[query, key]| [Some(query), Some(key)]);
    for (place, token) in tokens.iter().enumerate() {
        let cell = layout.cell([place, place]);
        let galley = word(&painter, token, text, width * text / TEXT[0], false);
        let colour = if query == Some(place) { ACCENT } else { INK };
        let corner = pos2(whole.left() - GAP, cell.center().y) - vec2(galley.size().x, galley.size().y / 2.0);
        painter.galley_with_override_text_color(corner, galley, colour);

        let is_visible = scene.is_visible(place);
        let galley = word(&painter, token, text, width * text / TEXT[0], !is_visible);
        let colour = match (key == Some(place), is_visible) {
            (true, _) => ACCENT,
            (false, true) => INK,
            (false, false) => FAINT,
        };
        // The word's left end, at half its height, stands above the middle of the column.
        let end = pos2(cell.center().x, whole.top() - GAP);
        let corner = end - vec2(0.0, galley.size().y / 2.0);
        painter.add(
            TextShape::new(corner, galley, colour)
                .with_override_text_color(colour)
                .with_angle_and_anchor(-SLOPE, Align2::LEFT_CENTER),
        );
    }
    layout
}

/// A word on one line, cut where it is too wide.
fn word(painter: &Painter, text: &str, size: f32, width: f32, is_struck: bool) -> Arc<Galley> {
    let mut format = TextFormat::simple(egui::FontId::proportional(size), INK);
    if is_struck {
        format.strikethrough = Stroke::new(1.0, FAINT);
    }
    let mut job = LayoutJob::single_section(text.to_owned(), format);
    job.break_on_newline = false;
    job.wrap = TextWrapping::truncate_at_width(width);
    painter.layout_job(job)
}
