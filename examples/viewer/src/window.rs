//! The window.

use crate::viewer::Viewer;
use crate::{Device, Result};
use multihead::wgpu::{self, CurrentSurfaceTexture};
use std::sync::Arc;
use std::time::{Duration, Instant};
use winit::application::ApplicationHandler;
use winit::dpi::PhysicalSize;
use winit::event::{ElementState, WindowEvent};
use winit::event_loop::{ActiveEventLoop, ControlFlow, EventLoop};
use winit::keyboard::{Key, NamedKey};
use winit::window::{Window, WindowId};

type Begin<'a> = Box<dyn Fn(&Device, wgpu::TextureFormat) -> Result<Viewer> + 'a>;

/// Opens a window and draws until it is closed.
pub(crate) fn show(size: [u32; 2], begin: Begin) -> Result<()> {
    let events = EventLoop::new()
        .map_err(|error| format!("no window system: {error} (--screenshot FILE.png needs none)"))?;
    events.set_control_flow(ControlFlow::Poll);
    let mut program = Program {
        size,
        begin,
        open: None,
        failure: None,
    };
    events.run_app(&mut program)?;
    program.failure.map_or(Ok(()), Err)
}

struct Program<'a> {
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
    viewer: Viewer,
    /// Turns the window's events into egui's.
    events: egui_winit::State,
    clock: Clock,
}

/// The mean time between frames, told anew twice a second.
struct Clock {
    since: Instant,
    frames: u32,
    told: Option<Duration>,
}

impl Clock {
    fn tick(&mut self) {
        self.frames += 1;
        let passed = self.since.elapsed();
        if passed >= Duration::from_millis(500) {
            self.told = Some(passed / self.frames);
            (self.since, self.frames) = (Instant::now(), 0);
        }
    }
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
        let viewer = begin(&device, format)?;
        let events = egui_winit::State::new(
            viewer.context.clone(),
            egui::ViewportId::ROOT,
            &window,
            Some(window.scale_factor() as f32),
            window.theme(),
            Some(device.device.limits().max_texture_dimension_2d as usize),
        );
        Ok(Self {
            viewer,
            events,
            clock: Clock {
                since: Instant::now(),
                frames: 0,
                told: None,
            },
            window,
            surface,
            configuration,
            format,
            device,
        })
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
        let input = self.events.take_egui_input(&self.window);
        let size = [self.configuration.width, self.configuration.height];
        let output = self
            .viewer
            .frame(input, self.clock.told, &mut encoder, &view, size)?;
        self.events.handle_platform_output(&self.window, output);
        self.device.queue.submit([encoder.finish()]);
        self.device.queue.present(texture);
        self.clock.tick();
        Ok(())
    }

    fn resize(&mut self, size: PhysicalSize<u32>) {
        (self.configuration.width, self.configuration.height) = (size.width.max(1), size.height.max(1));
        self.surface.configure(&self.device.device, &self.configuration);
    }
}

impl ApplicationHandler for Program<'_> {
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
        // There, Escape closes the menu alone.
        let has_menu = egui::Popup::is_any_open(&open.viewer.context);
        // What egui wants with an event is its own affair: each frame is drawn anyway.
        let _ = open.events.on_window_event(&open.window, &event);
        match event {
            WindowEvent::CloseRequested => events.exit(),
            WindowEvent::Resized(size) => open.resize(size),
            WindowEvent::KeyboardInput { event, .. }
                if event.state == ElementState::Pressed
                    && event.logical_key == Key::Named(NamedKey::Escape)
                    && !has_menu =>
            {
                events.exit();
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

impl Program<'_> {
    fn fail(&mut self, events: &ActiveEventLoop, error: Box<dyn std::error::Error>) {
        self.failure = Some(error);
        events.exit();
    }
}
