//! A frame without a window.

use crate::viewer::Viewer;
use crate::{Device, Result};
use image::RgbaImage;
use multihead::wgpu;

pub(crate) const FORMAT: wgpu::TextureFormat = wgpu::TextureFormat::Rgba8Unorm;

/// Draws one frame, in which `events` happen, and reads the picture back.
pub(crate) fn draw(
    device: &Device,
    viewer: &mut Viewer,
    [width, height]: [u32; 2],
    events: Vec<egui::Event>,
) -> Result<RgbaImage> {
    let limits = device.device.limits();
    let most = limits.max_texture_dimension_2d;
    if width == 0 || height == 0 || width > most || height > most {
        return Err(format!("--size {width} {height}: each must be 1 to {most}").into());
    }
    let row = (width * 4).next_multiple_of(wgpu::COPY_BYTES_PER_ROW_ALIGNMENT);
    let bytes = u64::from(row) * u64::from(height);
    if bytes > limits.max_buffer_size {
        return Err(format!("--size {width} {height}: too large for the adapter").into());
    }
    let size = wgpu::Extent3d {
        width,
        height,
        depth_or_array_layers: 1,
    };
    let target = device.device.create_texture(&wgpu::TextureDescriptor {
        label: Some("viewer screenshot"),
        size,
        mip_level_count: 1,
        sample_count: 1,
        dimension: wgpu::TextureDimension::D2,
        format: FORMAT,
        usage: wgpu::TextureUsages::RENDER_ATTACHMENT | wgpu::TextureUsages::COPY_SRC,
        view_formats: &[],
    });
    let pixels = device.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("viewer screenshot"),
        size: bytes,
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let input = egui::RawInput {
        screen_rect: Some(egui::Rect::from_min_size(
            egui::Pos2::ZERO,
            egui::vec2(width as f32, height as f32),
        )),
        max_texture_side: Some(most as usize),
        events,
        ..Default::default()
    };
    let mut encoder = device.device.create_command_encoder(&Default::default());
    viewer.frame(
        input,
        None,
        &mut encoder,
        &target.create_view(&Default::default()),
        [width, height],
    )?;
    encoder.copy_texture_to_buffer(
        target.as_image_copy(),
        wgpu::TexelCopyBufferInfo {
            buffer: &pixels,
            layout: wgpu::TexelCopyBufferLayout {
                offset: 0,
                bytes_per_row: Some(row),
                rows_per_image: None,
            },
        },
        size,
    );
    device.queue.submit([encoder.finish()]);
    // An error of the mapping shows when the range is asked for.
    pixels.map_async(wgpu::MapMode::Read, .., |_| ());
    device.device.poll(wgpu::PollType::wait_indefinitely())?;
    let bytes = pixels.get_mapped_range(..)?;
    let rows = bytes
        .chunks_exact(row as usize)
        .flat_map(|bytes| &bytes[..width as usize * 4]);
    RgbaImage::from_raw(width, height, rows.copied().collect())
        .ok_or_else(|| "the picture is smaller than its size".into())
}
