//! The window.

use crate::scene::Scene;
use crate::{Device, Result};
use multihead::wgpu::{self, CurrentSurfaceTexture};
use std::sync::Arc;
use winit::application::ApplicationHandler;
use winit::dpi::PhysicalSize;
use winit::event::{ElementState, MouseButton, WindowEvent};
use winit::event_loop::{ActiveEventLoop, ControlFlow, EventLoop};
use winit::keyboard::{Key, NamedKey};
use winit::window::{Window, WindowId};

type Begin<'a> = Box<dyn Fn(&Device, wgpu::TextureFormat) -> Result<Scene> + 'a>;

/// Opens a window and draws until it is closed.
pub(crate) fn show(size: [u32; 2], begin: Begin) -> Result<()> {
    let events = EventLoop::new()
        .map_err(|error| format!("no window system: {error} (--screenshot FILE.png needs none)"))?;
    events.set_control_flow(ControlFlow::Poll);
    let mut viewer = Viewer {
        size,
        begin,
        open: None,
        failure: None,
    };
    events.run_app(&mut viewer)?;
    viewer.failure.map_or(Ok(()), Err)
}

struct Viewer<'a> {
    size: [u32; 2],
    begin: Begin<'a>,
    open: Option<Open>,
    failure: Option<Box<dyn std::error::Error>>,
}

/// What exists while there is a window.
struct Open {
    window: Arc<Window>,
    surface: wgpu::Surface<'static>,
    configuration: wgpu::SurfaceConfiguration,
    /// The surface's format without the encoding that a fragment shader's colours have already.
    format: wgpu::TextureFormat,
    device: Device,
    scene: Scene,
}

impl Open {
    fn new(events: &ActiveEventLoop, [width, height]: [u32; 2], begin: &Begin) -> Result<Self> {
        let attributes = Window::default_attributes()
            .with_title("multihead")
            .with_inner_size(PhysicalSize::new(width, height));
        let window = Arc::new(events.create_window(attributes)?);
        let display = Box::new(events.owned_display_handle());
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_with_display_handle_from_env(
            display,
        ));
        let surface = instance.create_surface(Arc::clone(&window))?;
        let device = Device::open(&instance, Some(&surface))?;
        let size = window.inner_size();
        let mut configuration = surface
            .get_default_config(&device.adapter, size.width.max(1), size.height.max(1))
            .ok_or("the adapter cannot draw to this window")?;
        let format = configuration.format.remove_srgb_suffix();
        configuration.view_formats.push(format);
        surface.configure(&device.device, &configuration);
        Ok(Self {
            scene: begin(&device, format)?,
            window,
            surface,
            configuration,
            format,
            device,
        })
    }

    fn size(&self) -> [u32; 2] {
        [self.configuration.width, self.configuration.height]
    }

    fn draw(&mut self) -> Result<()> {
        let texture = match self.surface.get_current_texture() {
            CurrentSurfaceTexture::Success(texture) | CurrentSurfaceTexture::Suboptimal(texture) => texture,
            CurrentSurfaceTexture::Timeout | CurrentSurfaceTexture::Occluded => return Ok(()),
            CurrentSurfaceTexture::Outdated => {
                self.surface.configure(&self.device.device, &self.configuration);
                return Ok(());
            }
            other => return Err(format!("the window cannot be drawn to: {other:?}").into()),
        };
        let view = texture.texture.create_view(&wgpu::TextureViewDescriptor {
            format: Some(self.format),
            ..Default::default()
        });
        let mut encoder = self.device.device.create_command_encoder(&Default::default());
        self.scene.frame(&mut encoder, &view, self.size())?;
        self.device.queue.submit([encoder.finish()]);
        self.device.queue.present(texture);
        Ok(())
    }

    fn resize(&mut self, size: PhysicalSize<u32>) {
        (self.configuration.width, self.configuration.height) = (size.width.max(1), size.height.max(1));
        self.surface.configure(&self.device.device, &self.configuration);
    }
}

impl ApplicationHandler for Viewer<'_> {
    fn resumed(&mut self, events: &ActiveEventLoop) {
        if self.open.is_none() {
            match Open::new(events, self.size, &self.begin) {
                Ok(open) => self.open = Some(open),
                Err(error) => self.fail(events, error),
            }
        }
    }

    fn window_event(&mut self, events: &ActiveEventLoop, _: WindowId, event: WindowEvent) {
        let Some(open) = &mut self.open else { return };
        match event {
            WindowEvent::CloseRequested => events.exit(),
            WindowEvent::Resized(size) => open.resize(size),
            WindowEvent::CursorMoved { position, .. } => {
                open.scene.hover = open.scene.cell_at([position.x, position.y], open.size());
            }
            WindowEvent::CursorLeft { .. } => open.scene.hover = None,
            WindowEvent::MouseInput {
                state: ElementState::Pressed,
                button: MouseButton::Left,
                ..
            } => {
                if let Some([_, key]) = open.scene.hover {
                    open.scene.toggle(key);
                }
            }
            WindowEvent::KeyboardInput { event, .. } if event.state == ElementState::Pressed => {
                match event.logical_key {
                    Key::Named(NamedKey::ArrowUp) => open.scene.step(-1, 0),
                    Key::Named(NamedKey::ArrowDown) => open.scene.step(1, 0),
                    Key::Named(NamedKey::ArrowLeft) => open.scene.step(0, -1),
                    Key::Named(NamedKey::ArrowRight) => open.scene.step(0, 1),
                    Key::Named(NamedKey::Escape) => events.exit(),
                    _ => {}
                }
            }
            WindowEvent::RedrawRequested => {
                if let Err(error) = open.draw() {
                    self.fail(events, error);
                }
            }
            _ => {}
        }
    }

    fn about_to_wait(&mut self, _: &ActiveEventLoop) {
        if let Some(open) = &self.open {
            open.window.request_redraw();
        }
    }
}

impl Viewer<'_> {
    fn fail(&mut self, events: &ActiveEventLoop, error: Box<dyn std::error::Error>) {
        self.failure = Some(error);
        events.exit();
    }
}
