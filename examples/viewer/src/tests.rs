//! The picture's pixels against the reference's weights.

#[path = "../../attend/cpu.rs"]
mod cpu;

use crate::case::{self, Case, Op};
use crate::paint::heat;
use crate::scene::Scene;
use crate::{Arguments, DATA, Device, Result, run, screenshot};
use clap::Parser;
use image::RgbaImage;
use multihead::wgpu;

const SIZE: [u32; 2] = [700, 640];

fn open() -> Result<(Device, Scene)> {
    let descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    let device = Device::open(&wgpu::Instance::new(descriptor), None)?;
    let scene = Scene::new(
        &device.device,
        &device.queue,
        screenshot::FORMAT,
        &std::fs::read(DATA)?,
    )?;
    Ok((device, scene))
}

fn example() -> Result<Case> {
    Case::parse(&std::fs::read(DATA)?).map_err(|error| format!("{error:?}").into())
}

/// Holds the middle of every cell of the picture against the colour of its weight, head and sentence counted from 0.
fn check(picture: &RgbaImage, scene: &Scene, case: &Case, head: usize, sentence: usize) -> Result<()> {
    let weights = &cpu::run(case, true)?["weights"];
    let [heads, length] = [weights.shape[1], weights.shape[2]];
    let tokens = case
        .tokens
        .as_ref()
        .map_or(length, |tokens| tokens[sentence].len());
    let layout = scene.layout(SIZE);
    for (query, key) in (0..tokens).flat_map(|query| (0..tokens).map(move |key| (query, key))) {
        let weight = weights.data[((sentence * heads + head) * length + query) * length + key];
        let middle = |at: usize, corner: u32| corner + at as u32 * layout.cell + layout.cell / 2;
        let pixel = picture.get_pixel(middle(key, layout.corner[0]), middle(query, layout.corner[1]));
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

#[test]
fn the_pixels_are_the_references_weights() -> Result<()> {
    let (device, mut scene) = open()?;
    let mut case = example()?;
    for (head, sentence) in [(1, 1), (2, 1), (12, 3)] {
        scene.choose_head(head)?;
        scene.choose_sentence(sentence)?;
        let picture = screenshot::draw(&device, &mut scene, SIZE)?;
        check(&picture, &scene, &case, head - 1, sentence - 1)?;
    }

    // A key that is hidden in one frame is out of the next.
    let Op::Layer(layer) = &mut case.op else {
        panic!("the example data hold a layer");
    };
    let length = layer.queries;
    let mask = layer.hiding.key_mask.as_mut().ok_or("no key mask")?;
    mask[2 * length + 3] = false;
    scene.toggle(3);
    let picture = screenshot::draw(&device, &mut scene, SIZE)?;
    check(&picture, &scene, &case, 11, 2)
}

#[test]
fn the_pointer_finds_its_cell_and_its_weight() -> Result<()> {
    let (device, mut scene) = open()?;
    let without = screenshot::draw(&device, &mut scene, SIZE)?;
    let layout = scene.layout(SIZE);
    let [x, y] = [(4, 0), (2, 1)].map(|(at, axis)| f64::from(layout.corner[axis] + at * layout.cell + 3));
    assert_eq!(scene.cell_at([x, y], SIZE), Some([2, 4]));
    assert_eq!(scene.cell_at([0.0, y], SIZE), None);
    assert_eq!(scene.cell_at([x, f64::from(SIZE[1])], SIZE), None);

    scene.hover = scene.cell_at([x, y], SIZE);
    let with = screenshot::draw(&device, &mut scene, SIZE)?;
    // The number stands where nothing was before, and the cell has a frame.
    let number = scene.layout(SIZE).number;
    let changed = (0..40).flat_map(|dx| (0..20).map(move |dy| (number[0] + dx, number[1] + dy)));
    assert!(
        changed
            .clone()
            .any(|(x, y)| with.get_pixel(x, y) != without.get_pixel(x, y))
    );
    let corner = [4, 2].map(|at| at * layout.cell);
    let frame = with.get_pixel(layout.corner[0] + corner[0], layout.corner[1] + corner[1]);
    assert_eq!(frame.0, [0, 122, 135, 255]);
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
    for wrong in [["--head", "13"], ["--sentence", "0"]] {
        let arguments = arguments.into_iter().chain(wrong);
        let error = run(&Arguments::try_parse_from(arguments)?).unwrap_err();
        assert!(error.to_string().contains("counted from 1"), "{error}");
    }
    Ok(())
}
