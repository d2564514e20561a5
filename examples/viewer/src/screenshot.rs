//! A frame without a window.

use crate::scene::Scene;
use crate::{Device, Result};
use image::RgbaImage;
use multihead::wgpu;

pub(crate) const FORMAT: wgpu::TextureFormat = wgpu::TextureFormat::Rgba8Unorm;

/// Draws one frame and reads the picture back.
pub(crate) fn draw(device: &Device, scene: &mut Scene, [width, height]: [u32; 2]) -> Result<RgbaImage> {
    let most = device.device.limits().max_texture_dimension_2d;
    if width == 0 || height == 0 || width > most || height > most {
        return Err(format!("--size {width} {height}: each must be 1 to {most}").into());
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
    let row = (width * 4).next_multiple_of(wgpu::COPY_BYTES_PER_ROW_ALIGNMENT);
    let pixels = device.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("viewer screenshot"),
        size: u64::from(row) * u64::from(height),
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = device.device.create_command_encoder(&Default::default());
    scene.frame(
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
