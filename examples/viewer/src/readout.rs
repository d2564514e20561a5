//! The weight under the pointer, for its text: four bytes that reach the host a frame or so later. Nothing waits for them.

use multihead::wgpu;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

pub(crate) struct Readout<Place> {
    buffer: wgpu::Buffer,
    /// What is on its way.
    asked: Option<(Place, Receiver<bool>)>,
    /// What came last.
    told: Option<(Place, f32)>,
}

impl<Place: Copy + PartialEq> Readout<Place> {
    pub(crate) fn new(device: &wgpu::Device) -> Self {
        Self {
            buffer: device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("viewer weight"),
                size: 4,
                usage: wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::MAP_READ,
                mapped_at_creation: false,
            }),
            asked: None,
            told: None,
        }
    }

    /// Records a copy of element `at` of `weights`, unless one is still on its way.
    pub(crate) fn ask(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        weights: &wgpu::Buffer,
        at: usize,
        place: Place,
    ) {
        if self.asked.is_none() {
            let (sender, receiver) = channel();
            encoder.copy_buffer_to_buffer(weights, at as u64 * 4, &self.buffer, 0, 4);
            encoder.map_buffer_on_submit(&self.buffer, wgpu::MapMode::Read, .., move |result| {
                // Nobody listens any more when the window was closed.
                let _ = sender.send(result.is_ok());
            });
            self.asked = Some((place, receiver));
        }
    }

    /// Takes what has come.
    pub(crate) fn take(&mut self) {
        let Some((place, receiver)) = &self.asked else {
            return;
        };
        match receiver.try_recv() {
            Err(TryRecvError::Empty) => return,
            Ok(true) => {
                if let Ok(bytes) = self.buffer.get_mapped_range(..) {
                    self.told = Some((*place, bytemuck::pod_read_unaligned(&bytes)));
                }
                self.buffer.unmap();
            }
            // A lost device, or an encoder that was never submitted.
            Ok(false) | Err(TryRecvError::Disconnected) => {}
        }
        self.asked = None;
    }

    /// The weight of a place, once it has come.
    pub(crate) fn told(&self, place: Place) -> Option<f32> {
        self.told
            .filter(|(told, _)| *told == place)
            .map(|(_, weight)| weight)
    }
}
