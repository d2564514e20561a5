//! A window in which a layer's attention runs each frame, on the window's own device, and its weights are drawn straight
//! from the GPU's memory, between controls of egui.
//!
//! ```text
//! cargo run --release -p viewer
//! cargo run --release -p viewer -- first.safetensors second.safetensors --layer 2
//! cargo run --release -p viewer -- --screenshot weights.png
//! ```

// Shared with the example `attend`.
#[path = "../../attend/case/mod.rs"]
mod case;
#[path = "../../attend/colours.rs"]
mod colours;
#[path = "../../attend/gpu.rs"]
#[allow(dead_code)] // `parameters` is what is used.
mod gpu;

mod layer;
mod map;
mod page;
mod readout;
mod scene;
mod screenshot;
#[cfg(test)]
mod tests;
mod viewer;
mod window;

use clap::Parser;
use multihead::wgpu;
use scene::Scene;
use std::path::PathBuf;
use std::process::ExitCode;
use viewer::Viewer;

/// The example data of the repository, and the head that it is known for.
const DATA: (&str, usize) = (
    concat!(env!("CARGO_MANIFEST_DIR"), "/../data/coreference.safetensors"),
    2,
);

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Draws the attention weights of a layer while it runs.
///
/// Point at a cell to read query, key and weight. Click on a column to hide its key, or to show it again. Up and down
/// change the head, left and right the sentence; Escape leaves.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Case files, each of one layer (format: tests/data/README.md); none: the example data
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Layer to begin with; the files count from 1
    #[arg(long, value_name = "N", default_value_t = 1)]
    layer: usize,
    /// Head to begin with; heads count from 1 [default: 1; of the example data: 2]
    #[arg(long, value_name = "N")]
    head: Option<usize>,
    /// Sentence to begin with; sentences count from 1
    #[arg(long, value_name = "N", default_value_t = 1)]
    sentence: usize,
    /// Width and height in pixels
    #[arg(long, num_args = 2, value_names = ["WIDTH", "HEIGHT"], default_values_t = [900, 900])]
    size: Vec<u32>,
    /// Draw one frame into a file and leave; needs no window system
    #[arg(long, value_name = "FILE.png")]
    screenshot: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("viewer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let (files, head) = match &arguments.files[..] {
        [] => (vec![PathBuf::from(DATA.0)], DATA.1),
        files => (files.to_vec(), 1),
    };
    let begin = |device: &Device, format| {
        let mut scene = Scene::new(&device.device, &device.queue, &files)?;
        let head = arguments.head.unwrap_or(head);
        scene.begin(arguments.layer, head, arguments.sentence)?;
        Ok(Viewer::new(scene, format))
    };
    let [width, height] = arguments.size[..] else {
        return Err("--size takes a width and a height".into());
    };
    match &arguments.screenshot {
        None => window::show([width, height], Box::new(begin)),
        Some(path) => {
            let descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
            let device = Device::open(&wgpu::Instance::new(descriptor), None)?;
            let mut viewer = begin(&device, screenshot::FORMAT)?;
            let picture = screenshot::draw(&device, &mut viewer, [width, height], Vec::new())?;
            picture
                .save(path)
                .map_err(|error| format!("{} cannot be written: {error}", path.display()).into())
        }
    }
}

/// The program's own device.
struct Device {
    adapter: wgpu::Adapter,
    device: wgpu::Device,
    queue: wgpu::Queue,
}

impl Device {
    /// The fastest adapter that can draw to `surface`, with what makes attention fast.
    fn open(instance: &wgpu::Instance, surface: Option<&wgpu::Surface>) -> Result<Self> {
        let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions {
            power_preference: wgpu::PowerPreference::HighPerformance,
            compatible_surface: surface,
            ..Default::default()
        }))?;
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("viewer"),
            required_features: multihead::Gpu::useful_features(&adapter),
            required_limits: adapter.limits(),
            ..Default::default()
        }))?;
        Ok(Self {
            adapter,
            device,
            queue,
        })
    }
}
