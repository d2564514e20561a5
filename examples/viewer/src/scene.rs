//! A layer that runs each frame, and the picture of its weights.

use crate::Result;
use crate::case::{Case, CaseError, Op};
use crate::gpu::parameters;
use crate::page::{Content, Layout, Painter};
use crate::paint::heat;
use image::RgbImage;
use multihead::{
    DType, Gpu, Mask, MultiHeadAttention, MultiHeadInputs, MultiHeadOutputs, Tensor,
    wgpu::{self, util::DeviceExt},
};

pub(crate) struct Scene {
    gpu: Gpu,
    name: String,
    tokens: Vec<Vec<String>>,
    layer: MultiHeadAttention,
    x: Tensor,
    y: Tensor,
    /// `[B, H, L, L]`: written by attention, read by the fragment shader, never on the host.
    weights: Tensor,
    heads: usize,
    length: usize,
    /// `[B, L]`, `true` = attend; the mask holds the same.
    visible: Vec<bool>,
    mask: Mask,
    head: usize,
    sentence: usize,
    pub(crate) hover: Option<[usize; 2]>,
    painter: Painter,
    pipeline: wgpu::RenderPipeline,
    view: wgpu::Buffer,
    colours: wgpu::Buffer,
    digits: wgpu::TextureView,
    /// What is bound, and the page that it was made for.
    page: Option<(Content, wgpu::BindGroup)>,
}

impl Scene {
    pub(crate) fn new(
        device: &wgpu::Device,
        queue: &wgpu::Queue,
        format: wgpu::TextureFormat,
        file: &[u8],
    ) -> Result<Self> {
        let case = Case::parse(file).map_err(|error| match error {
            CaseError::Bad(reason) => format!("the file {reason}"),
            CaseError::Unsupported(reason) => format!("the file asks for {reason}"),
        })?;
        let Op::Layer(op) = case.op else {
            return Err("the file holds no layer: the viewer needs a case with op \"mha\"".into());
        };
        if op.key.is_some() || op.hiding.mask.is_some() || op.hiding.kv_lengths.is_some() {
            return Err("the viewer shows self-attention with a key mask alone".into());
        }
        let gpu = Gpu::from_device(device, queue)?;
        let (batch, length) = (op.batch, op.queries);
        let layer = MultiHeadAttention::new(&gpu, op.config.clone(), &parameters(&op)?)?;
        layer.warm_up(DType::F32)?;
        let tokens = case.tokens.unwrap_or_else(|| {
            let numbers = (1..=length).map(|number| number.to_string());
            vec![numbers.collect(); batch]
        });
        let visible = op.hiding.key_mask.unwrap_or_else(|| vec![true; batch * length]);
        let painter = Painter::new()?;
        let colours: Vec<u32> = (0..256)
            .map(|step| {
                let [red, green, blue] = heat(step as f32 / 255.0);
                u32::from_le_bytes([red, green, blue, 255])
            })
            .collect();
        Ok(Self {
            x: Tensor::upload(&gpu, &op.query.data, &[batch, length, op.config.embed_dim])?,
            y: Tensor::zeros(&gpu, DType::F32, &[batch, length, op.config.embed_dim])?,
            weights: Tensor::zeros(&gpu, DType::F32, &[batch, op.config.num_heads, length, length])?,
            mask: Mask::keep_from(&gpu, &visible, &[batch, length])?,
            digits: texture(device, queue, &painter.digits()),
            pipeline: pipeline(device, format),
            view: device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("viewer view"),
                size: 48,
                usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            }),
            colours: device.create_buffer_init(&wgpu::util::BufferInitDescriptor {
                label: Some("viewer colours"),
                contents: bytemuck::cast_slice(&colours),
                usage: wgpu::BufferUsages::STORAGE,
            }),
            heads: op.config.num_heads,
            length,
            name: case.name,
            layer,
            tokens,
            visible,
            head: 0,
            sentence: 0,
            hover: None,
            painter,
            page: None,
            gpu,
        })
    }

    /// Heads count from 1.
    pub(crate) fn choose_head(&mut self, head: usize) -> Result<()> {
        self.head = chosen("head", head, self.heads)?;
        Ok(())
    }

    /// Sentences count from 1.
    pub(crate) fn choose_sentence(&mut self, sentence: usize) -> Result<()> {
        self.sentence = chosen("sentence", sentence, self.tokens.len())?;
        Ok(())
    }

    /// The next or previous head and sentence, round and round.
    pub(crate) fn step(&mut self, heads: isize, sentences: isize) {
        let round =
            |at: usize, by: isize, count: usize| (at as isize + by).rem_euclid(count as isize) as usize;
        self.head = round(self.head, heads, self.heads);
        self.sentence = round(self.sentence, sentences, self.tokens.len());
        self.hover = None;
    }

    /// Hides a key of the sentence, or shows it again, from the next frame on.
    pub(crate) fn toggle(&mut self, key: usize) {
        let place = self.sentence * self.length + key;
        if key < self.tokens[self.sentence].len() {
            self.visible[place] = !self.visible[place];
        }
        // Writes move whole words; the buffer is rounded up to them.
        let mut bytes: Vec<u8> = self.visible.iter().map(|&visible| visible.into()).collect();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        let mask = self.mask.tensor();
        self.gpu
            .queue()
            .write_buffer(mask.buffer(), mask.offset(), &bytes);
    }

    /// Query and key whose cell holds a pixel.
    pub(crate) fn cell_at(&self, [x, y]: [f64; 2], size: [u32; 2]) -> Option<[usize; 2]> {
        let Layout { corner, cell, .. } = self.layout(size);
        let count = self.tokens[self.sentence].len();
        let place = |at: f64, corner: u32| {
            let place = (at - f64::from(corner)) / f64::from(cell);
            (place >= 0.0 && place < count as f64).then_some(place as usize)
        };
        Some([place(y, corner[1])?, place(x, corner[0])?])
    }

    pub(crate) fn layout(&self, size: [u32; 2]) -> Layout {
        self.painter.layout(&self.content(size))
    }

    fn content(&self, size: [u32; 2]) -> Content {
        let tokens = self.tokens[self.sentence].clone();
        let start = self.sentence * self.length;
        Content {
            size,
            title: format!(
                "{}: head {} of {}, sentence {} of {}",
                self.name,
                self.head + 1,
                self.heads,
                self.sentence + 1,
                self.tokens.len()
            ),
            visible: self.visible[start..start + tokens.len()].to_vec(),
            tokens,
            hover: self.hover,
        }
    }

    /// Records a frame: the layer, then the picture of its weights into `target`.
    pub(crate) fn frame(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        target: &wgpu::TextureView,
        size: [u32; 2],
    ) -> Result<()> {
        self.layer.record(
            encoder,
            &MultiHeadInputs::new(&self.x).key_padding_mask(&self.mask),
            &MultiHeadOutputs::new(&self.y).weights(&self.weights),
        )?;
        let content = self.content(size);
        self.write_view(&content);
        if self.page.as_ref().is_none_or(|(painted, _)| *painted != content) {
            let page = texture(self.gpu.device(), self.gpu.queue(), &self.painter.paint(&content));
            self.page = Some((content, self.bind(&page)));
        }
        let mut pass = encoder.begin_render_pass(&wgpu::RenderPassDescriptor {
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
        pass.set_pipeline(&self.pipeline);
        if let Some((_, group)) = &self.page {
            pass.set_bind_group(0, group, &[]);
            pass.draw(0..3, 0..1);
        }
        Ok(())
    }

    /// `View` of the shader.
    fn write_view(&self, content: &Content) {
        let Layout { corner, cell, number } = self.painter.layout(content);
        let [query, key] = content
            .hover
            .map_or([u32::MAX; 2], |hover| hover.map(|at| at as u32));
        let glyph = self.painter.glyph();
        let first = (self.sentence * self.heads + self.head) * self.length * self.length;
        let words: [u32; 12] = [
            corner[0],
            corner[1],
            number[0],
            number[1],
            glyph[0],
            glyph[1],
            query,
            key,
            cell,
            content.tokens.len() as u32,
            first as u32,
            self.length as u32,
        ];
        let queue = self.gpu.queue();
        queue.write_buffer(&self.view, 0, bytemuck::cast_slice(&words));
    }

    fn bind(&self, page: &wgpu::TextureView) -> wgpu::BindGroup {
        let entries = [
            self.view.as_entire_binding(),
            self.weights.buffer().as_entire_binding(),
            self.colours.as_entire_binding(),
            wgpu::BindingResource::TextureView(page),
            wgpu::BindingResource::TextureView(&self.digits),
        ];
        let entries: Vec<wgpu::BindGroupEntry> = (0..)
            .zip(entries)
            .map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource })
            .collect();
        self.gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some("viewer"),
            layout: &self.pipeline.get_bind_group_layout(0),
            entries: &entries,
        })
    }
}

fn chosen(what: &str, number: usize, count: usize) -> Result<usize> {
    if (1..=count).contains(&number) {
        return Ok(number - 1);
    }
    Err(format!("{what} {number}: there are {count}, counted from 1").into())
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

fn texture(device: &wgpu::Device, queue: &wgpu::Queue, image: &RgbImage) -> wgpu::TextureView {
    let (width, height) = image.dimensions();
    let pixels: Vec<u8> = image
        .pixels()
        .flat_map(|pixel| [pixel[0], pixel[1], pixel[2], 255])
        .collect();
    let descriptor = wgpu::TextureDescriptor {
        label: Some("viewer words"),
        size: wgpu::Extent3d {
            width,
            height,
            depth_or_array_layers: 1,
        },
        mip_level_count: 1,
        sample_count: 1,
        dimension: wgpu::TextureDimension::D2,
        format: wgpu::TextureFormat::Rgba8Unorm,
        usage: wgpu::TextureUsages::TEXTURE_BINDING,
        view_formats: &[],
    };
    device
        .create_texture_with_data(
            queue,
            &descriptor,
            wgpu::util::TextureDataOrder::LayerMajor,
            &pixels,
        )
        .create_view(&Default::default())
}
