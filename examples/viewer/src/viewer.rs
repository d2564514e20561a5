//! Frames: the page, the layer and the picture of its weights, in one encoder of the program's own.

use crate::Result;
use crate::map::Map;
use crate::page::{self, Layout};
use crate::scene::Scene;
use egui_wgpu::{Renderer, RendererOptions, ScreenDescriptor};
use multihead::wgpu;
use std::time::Duration;

pub(crate) struct Viewer {
    pub(crate) scene: Scene,
    pub(crate) context: egui::Context,
    /// Where the last frame's map lies.
    pub(crate) layout: Option<Layout>,
    map: Map,
    renderer: Renderer,
    /// Textures of the last frame that no later one needs.
    unneeded: Vec<egui::TextureId>,
}

impl Viewer {
    pub(crate) fn new(scene: Scene, format: wgpu::TextureFormat) -> Self {
        let context = egui::Context::default();
        page::style(&context);
        let options = RendererOptions {
            dithering: false,
            ..Default::default()
        };
        Self {
            map: Map::new(&scene, format),
            renderer: Renderer::new(scene.gpu.device(), format, options),
            scene,
            context,
            layout: None,
            unneeded: Vec::new(),
        }
    }

    /// Records a frame into `target`, which has `size` pixels.
    pub(crate) fn frame(
        &mut self,
        input: egui::RawInput,
        frame_time: Option<Duration>,
        encoder: &mut wgpu::CommandEncoder,
        target: &wgpu::TextureView,
        size: [u32; 2],
    ) -> Result<egui::PlatformOutput> {
        let device = self.scene.gpu.device().clone();
        let queue = self.scene.gpu.queue().clone();
        for texture in self.unneeded.drain(..) {
            self.renderer.free_texture(&texture);
        }
        self.scene.receive();

        let context = self.context.clone();
        let mut output = context.run_ui(input, |ui| {
            let layout = page::show(ui, &mut self.scene, &self.map, frame_time);
            if self.layout.replace(layout).is_none() {
                // Panels learn how high they are by being shown; without this the first frame would be cut.
                ui.request_discard("the first frame");
            }
        });
        for (id, deltas) in output.textures_delta.set.drain() {
            for delta in deltas {
                self.renderer.update_texture(&device, &queue, id, &delta);
            }
        }
        self.unneeded.extend(output.textures_delta.free.drain());

        self.scene.record(encoder)?;
        if let Some(layout) = &self.layout {
            self.map.place(&self.scene, layout);
        }
        let screen = ScreenDescriptor {
            size_in_pixels: size,
            pixels_per_point: output.pixels_per_point,
        };
        let shapes = context.tessellate(output.shapes, output.pixels_per_point);
        self.renderer
            .update_buffers(&device, &queue, encoder, &shapes, &screen);
        let pass = encoder.begin_render_pass(&wgpu::RenderPassDescriptor {
            label: Some("viewer"),
            color_attachments: &[Some(wgpu::RenderPassColorAttachment {
                view: target,
                depth_slice: None,
                resolve_target: None,
                ops: wgpu::Operations {
                    load: wgpu::LoadOp::Clear(wgpu::Color::WHITE),
                    store: wgpu::StoreOp::Store,
                },
            })],
            ..Default::default()
        });
        self.renderer
            .render(&mut pass.forget_lifetime(), &shapes, &screen);
        Ok(output.platform_output)
    }
}
