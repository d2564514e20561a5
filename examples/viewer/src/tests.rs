//! The picture's pixels against the reference's weights.

#[path = "../../attend/cpu.rs"]
mod cpu;

use crate::case::{self, Case, Op};
use crate::colours::heat;
use crate::page::{ACCENT, Layout};
use crate::scene::{Choice, Scene};
use crate::viewer::Viewer;
use crate::{Arguments, DATA, Device, Result, run, screenshot};
use clap::Parser;
use egui::{Event, Modifiers, PointerButton, Pos2};
use image::{Rgba, RgbaImage};
use multihead::wgpu;
use std::path::{Path, PathBuf};

const SIZE: [u32; 2] = [700, 640];

/// Unlike the example data: 4 heads, 2 sentences without words, causal order, rotary embedding.
const OTHER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/data/mha_llama_rotary.safetensors"
);

/// A viewer without a window.
struct Headless {
    device: Device,
    viewer: Viewer,
}

impl Headless {
    fn open(files: &[&str]) -> Result<Self> {
        let descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
        let device = Device::open(&wgpu::Instance::new(descriptor), None)?;
        let files: Vec<_> = files.iter().map(PathBuf::from).collect();
        let scene = Scene::new(&device.device, &device.queue, &files)?;
        let viewer = Viewer::new(scene, screenshot::FORMAT);
        Ok(Self { device, viewer })
    }

    fn draw(&mut self, events: Vec<Event>) -> Result<RgbaImage> {
        screenshot::draw(&self.device, &mut self.viewer, SIZE, events)
    }

    fn layout(&self) -> Result<Layout> {
        self.viewer.layout.ok_or_else(|| "nothing was drawn yet".into())
    }

    /// The middle of a cell of the last frame.
    fn middle(&self, cell: [usize; 2]) -> Result<Pos2> {
        Ok(self.layout()?.cell(cell).center())
    }

    /// Holds the middle of every cell of a picture against the colour of the reference's weight.
    fn check(&self, picture: &RgbaImage, case: &Case) -> Result<()> {
        let Choice { head, sentence, .. } = self.viewer.scene.choice();
        let tokens = self.viewer.scene.tokens().len();
        let weights = weights(case, head, sentence)?;
        for (query, key) in (0..tokens).flat_map(|query| (0..tokens).map(move |key| (query, key))) {
            let weight = weights[query][key];
            let pixel = at(picture, self.middle([query, key])?);
            let colour = heat(weight as f32);
            // Two steps of the 256 colours.
            let near = (0..3).all(|channel| pixel[channel].abs_diff(colour[channel]) <= 6);
            assert!(
                near,
                "query {query}, key {key}, weight {weight}: {pixel:?} instead of {colour:?}"
            );
        }
        Ok(())
    }
}

fn read(file: &str) -> Result<Case> {
    Case::read(Path::new(file)).map_err(|error| format!("{error:?}").into())
}

/// The reference's weights of a head, by query and key.
fn weights(case: &Case, head: usize, sentence: usize) -> Result<Vec<Vec<f64>>> {
    let weights = &cpu::run(case, true)?["weights"];
    let [heads, length] = [weights.shape[1], weights.shape[2]];
    let rows = weights.data.chunks(length).map(<[f64]>::to_vec);
    Ok(rows
        .skip((sentence * heads + head) * length)
        .take(length)
        .collect())
}

fn at(picture: &RgbaImage, point: Pos2) -> Rgba<u8> {
    *picture.get_pixel(point.x as u32, point.y as u32)
}

fn pointer(point: Pos2) -> Vec<Event> {
    vec![Event::PointerMoved(point)]
}

fn click(point: Pos2) -> Vec<Event> {
    let button = |pressed| Event::PointerButton {
        pos: point,
        button: PointerButton::Primary,
        pressed,
        modifiers: Modifiers::NONE,
    };
    vec![Event::PointerMoved(point), button(true), button(false)]
}

fn press(key: egui::Key) -> Vec<Event> {
    vec![Event::Key {
        key,
        physical_key: None,
        pressed: true,
        repeat: false,
        modifiers: Modifiers::NONE,
    }]
}

#[test]
fn the_pixels_are_the_references_weights() -> Result<()> {
    let mut headless = Headless::open(&[DATA.0])?;
    let case = read(DATA.0)?;
    for (head, sentence) in [(1, 1), (2, 1), (12, 3)] {
        headless.viewer.scene.begin(1, head, sentence)?;
        let picture = headless.draw(Vec::new())?;
        headless.check(&picture, &case)?;
    }
    Ok(())
}

#[test]
fn a_key_that_is_clicked_on_is_out_of_the_next_frame_and_back_after_another_click() -> Result<()> {
    let mut headless = Headless::open(&[DATA.0])?;
    headless.viewer.scene.begin(1, 2, 1)?;
    let mut case = read(DATA.0)?;
    let whole = case.clone();
    let Op::Layer(layer) = &mut case.op else {
        panic!("the example data hold a layer");
    };
    layer.hiding.key_mask.as_mut().ok_or("no key mask")?[5] = false;

    // egui knows what lies under the pointer from the frame before.
    headless.draw(Vec::new())?;
    let cell = headless.middle([0, 5])?;
    for expected in [&case, &whole] {
        headless.draw(click(cell))?;
        let picture = headless.draw(vec![Event::PointerGone])?;
        headless.check(&picture, expected)?;
    }
    Ok(())
}

#[test]
fn the_pointer_finds_its_cell_and_its_weight() -> Result<()> {
    let mut headless = Headless::open(&[DATA.0])?;
    headless.viewer.scene.begin(1, 2, 1)?;
    let without = headless.draw(Vec::new())?;
    assert_eq!(headless.viewer.scene.hovered(), None);
    // "they" and "apples".
    let cell = [7, 5];
    headless.draw(pointer(headless.middle(cell)?))?;
    assert_eq!(headless.viewer.scene.hover, Some(cell));
    // The weight is on its way; the next frame tells it.
    assert_eq!(
        headless.viewer.scene.hovered().as_deref(),
        Some("they → apples  …")
    );
    let with = headless.draw(Vec::new())?;
    let text = headless.viewer.scene.hovered().ok_or("no cell is hovered")?;
    let weight: f64 = text
        .strip_prefix("they → apples  ")
        .ok_or(text.clone())?
        .parse()?;
    let expected = weights(&read(DATA.0)?, 1, 0)?[7][5];
    assert!((weight - expected).abs() < 6e-4, "{text}, expected {expected}");

    // No character of it is a box.
    let font = egui::FontId::proportional(15.0);
    let context = &headless.viewer.context;
    assert!(context.fonts_mut(|fonts| fonts.has_glyphs(&font, &text)));

    // The cell has a frame, and the line below another text.
    let corner = headless.layout()?.cell(cell).left_top();
    let frame = at(&with, corner + egui::vec2(1.0, 10.0));
    let near = (0..3).all(|channel| frame[channel].abs_diff(ACCENT.to_array()[channel]) <= 3);
    assert!(near, "{frame:?}");
    let line = |picture: &RgbaImage| -> Vec<_> {
        let below = picture.rows().skip(SIZE[1] as usize - 40).flatten();
        below.copied().collect()
    };
    assert_ne!(line(&with), line(&without));

    // Off the map there is nothing.
    headless.draw(pointer(Pos2::new(2.0, corner.y)))?;
    assert_eq!(headless.viewer.scene.hover, None);
    headless.draw(pointer(headless.middle(cell)?))?;
    headless.draw(vec![Event::PointerGone])?;
    assert_eq!(headless.viewer.scene.hover, None);
    Ok(())
}

#[test]
fn arrows_change_head_and_sentence_round_and_round() -> Result<()> {
    let mut headless = Headless::open(&[DATA.0])?;
    let case = read(DATA.0)?;
    let choices = [
        (egui::Key::ArrowUp, [11, 0]),
        (egui::Key::ArrowDown, [0, 0]),
        (egui::Key::ArrowLeft, [0, 2]),
        (egui::Key::ArrowRight, [0, 0]),
        (egui::Key::ArrowDown, [1, 0]),
    ];
    for (key, expected) in choices {
        let picture = headless.draw(press(key))?;
        let Choice { head, sentence, .. } = headless.viewer.scene.choice();
        assert_eq!([head, sentence], expected);
        headless.check(&picture, &case)?;
    }
    Ok(())
}

#[test]
fn each_file_is_a_layer() -> Result<()> {
    let mut headless = Headless::open(&[DATA.0, OTHER])?;
    headless.viewer.scene.begin(1, 12, 3)?;
    let picture = headless.draw(Vec::new())?;
    headless.check(&picture, &read(DATA.0)?)?;

    // What the other layer has not becomes its last.
    headless.viewer.scene.choose(Choice {
        layer: 1,
        ..headless.viewer.scene.choice()
    });
    let layer = headless.viewer.scene.layer();
    let last = Choice {
        layer: 1,
        head: layer.heads - 1,
        sentence: layer.tokens.len() - 1,
    };
    assert_eq!(headless.viewer.scene.choice(), last);
    let picture = headless.draw(Vec::new())?;
    headless.check(&picture, &read(OTHER)?)
}

#[test]
fn the_page_fits_any_size() -> Result<()> {
    let mut headless = Headless::open(&[DATA.0])?;
    for size in [[1, 1], [40, 900], [900, 40], [160, 120], [500, 400], [1200, 700]] {
        let picture = screenshot::draw(&headless.device, &mut headless.viewer, size, Vec::new())?;
        assert_eq!(picture.dimensions(), (size[0], size[1]));
    }
    let error = screenshot::draw(&headless.device, &mut headless.viewer, [0, 5], Vec::new()).unwrap_err();
    assert!(error.to_string().contains("--size 0 5"), "{error}");
    Ok(())
}

#[test]
fn a_screenshot_needs_no_window_system() -> Result<()> {
    let path = std::env::temp_dir().join(format!("multihead-viewer-{}.png", std::process::id()));
    let path_text = path.to_string_lossy();
    let arguments = ["viewer", "--size", "300", "280", "--screenshot", &path_text];
    run(&Arguments::try_parse_from(arguments)?)?;
    // The crate reads no PNG here; its size and end tell that it is whole.
    let png = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    assert!(png.starts_with(b"\x89PNG") && png.ends_with(b"IEND\xaeB`\x82"));

    let cross = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/data/mha_cross.safetensors"
    );
    let wrong: [(&[&str], &str); 7] = [
        (&["--head", "13"], "head 13: there are 12, counted from 1"),
        (&["--sentence", "0"], "sentence 0: there are 3, counted from 1"),
        (&["--layer", "2"], "layer 2: there are 1, counted from 1"),
        (
            &[DATA.0, OTHER, "--layer", "3"],
            "layer 3: there are 2, counted from 1",
        ),
        (&[OTHER, cross], "shows self-attention"),
        (&["nowhere"], "nowhere cannot be read"),
        (
            &[concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")],
            "is no safetensors file",
        ),
    ];
    for (wrong, reason) in wrong {
        let arguments = arguments.iter().chain(wrong);
        let error = run(&Arguments::try_parse_from(arguments)?).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
    for wrong in [&["--size", "1"][..], &["--size", "-1", "5"], &["--head", "one"]] {
        assert!(Arguments::try_parse_from(["viewer"].iter().chain(wrong)).is_err());
    }
    Ok(())
}
