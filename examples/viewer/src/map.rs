//! The heat map: drawn by a fragment shader from the buffer that attention wrote.

use crate::colours::heat;
use crate::page::Layout;
use crate::scene::Scene;
use egui_wgpu::{Callback, CallbackResources, CallbackTrait};
use multihead::wgpu::{self, util::DeviceExt};

pub(crate) struct Map {
    pipeline: wgpu::RenderPipeline,
    view: wgpu::Buffer,
    /// What is bound for each layer.
    groups: Vec<wgpu::BindGroup>,
}

impl Map {
    pub(crate) fn new(scene: &Scene, format: wgpu::TextureFormat) -> Self {
        let device = scene.gpu.device();
        let pipeline = pipeline(device, format);
        let view = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("viewer view"),
            size: 24,
            usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let steps: Vec<u32> = (0..256)
            .map(|step| {
                let [red, green, blue] = heat(step as f32 / 255.0);
                u32::from_le_bytes([red, green, blue, 255])
            })
            .collect();
        let colours = device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
            label: Some("viewer colours"),
            contents: bytemuck::cast_slice(&steps),
            usage: wgpu::BufferUsages::STORAGE,
        });
        let bind = |weights: &wgpu::Buffer| {
            let entries = [(0, &view), (1, weights), (2, &colours)];
            device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some("viewer"),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries.map(|(binding, buffer)| wgpu::BindGroupEntry {
                    binding,
                    resource: buffer.as_entire_binding(),
                }),
            })
        };
        Self {
            groups: scene.layers.iter().map(|layer| bind(layer.weights())).collect(),
            pipeline,
            view,
        }
    }

    /// The map of the chosen layer, to be painted into `area`.
    pub(crate) fn callback(&self, scene: &Scene, area: egui::Rect) -> egui::PaintCallback {
        let paint = Paint {
            pipeline: self.pipeline.clone(),
            group: self.groups[scene.choice().layer].clone(),
        };
        Callback::new_paint_callback(area, paint)
    }

    /// Says what the next submitted frame shows, and where.
    pub(crate) fn place(&self, scene: &Scene, layout: &Layout) {
        let [left, top] = layout.corner;
        // `View` of the shader.
        let view = [
            left,
            top,
            layout.cell,
            scene.tokens().len() as u32,
            scene.first() as u32,
            scene.layer().length as u32,
        ];
        let queue = scene.gpu.queue();
        queue.write_buffer(&self.view, 0, bytemuck::cast_slice(&view));
    }
}

/// Handles alone: wgpu's objects are counted.
struct Paint {
    pipeline: wgpu::RenderPipeline,
    group: wgpu::BindGroup,
}

impl CallbackTrait for Paint {
    fn paint(&self, _: egui::PaintCallbackInfo, pass: &mut wgpu::RenderPass<'static>, _: &CallbackResources) {
        pass.set_pipeline(&self.pipeline);
        pass.set_bind_group(0, &self.group, &[]);
        pass.draw(0..3, 0..1);
    }
}

fn pipeline(device: &wgpu::Device, format: wgpu::TextureFormat) -> wgpu::RenderPipeline {
    let module = device.create_shader_module(wgpu::include_wgsl!("map.wgsl"));
    device.create_render_pipeline(&wgpu::RenderPipelineDescriptor {
        label: Some("viewer"),
        layout: None,
        vertex: wgpu::VertexState {
            module: &module,
            entry_point: Some("vertex"),
            compilation_options: Default::default(),
            buffers: &[],
        },
        primitive: wgpu::PrimitiveState::default(),
        depth_stencil: None,
        multisample: wgpu::MultisampleState::default(),
        fragment: Some(wgpu::FragmentState {
            module: &module,
            entry_point: Some("fragment"),
            compilation_options: Default::default(),
            targets: &[Some(format.into())],
        }),
        multiview_mask: None,
        cache: None,
    })
}
