//! What wgpu reports, turned into errors; whether a device is still there.

use std::sync::Mutex;

use super::lock;
use crate::{Error, Result};

/// Whether the device can still be used. A loss that was seen once is remembered.
pub(super) fn check_alive(device: &wgpu::Device, lost: &Mutex<Option<String>>, during: &str) -> Result<()> {
    let known = lock(lost).clone();
    let reason = match known {
        Some(reason) => reason,
        None if alive(device) => return Ok(()),
        // Not under the lock: a lost-device callback may want it while wgpu creates the probe.
        None => lock(lost)
            .get_or_insert_with(|| {
                log::warn!("the device is lost: noticed while {during}");
                format!("noticed while {during}")
            })
            .clone(),
    };
    Err(Error::DeviceLost(reason))
}

/// A lost device makes buffers that cannot be mapped, and reports no error at all, whatever is asked of it: wgpu
/// tells of the loss through a callback that belongs to the caller.
fn alive(device: &wgpu::Device) -> bool {
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let probe = device.create_buffer(&wgpu::BufferDescriptor {
        label: Some("multihead probe"),
        size: 16,
        usage: wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: true,
    });
    let mapped = probe.get_mapped_range_mut(..).is_ok();
    // Who reports an error is alive, if short of memory.
    let memory = pollster::block_on(memory.pop()).is_some();
    let internal = pollster::block_on(internal.pop()).is_some();
    drop(validation);
    mapped || memory || internal
}

/// Runs `work` in error scopes of its own.
pub(super) fn guarded<T>(
    device: &wgpu::Device,
    lost: &Mutex<Option<String>>,
    during: &str,
    bytes: u64,
    work: impl FnOnce() -> T,
) -> Result<T> {
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let internal = device.push_error_scope(wgpu::ErrorFilter::Internal);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let value = work();
    // On native backends the futures are ready at once.
    let memory = pollster::block_on(memory.pop());
    let internal = pollster::block_on(internal.pop());
    let validation = pollster::block_on(validation.pop());
    if memory.is_some() {
        return Err(Error::OutOfMemory {
            during: during.to_owned(),
            bytes,
        });
    }
    let Some(error) = internal.or(validation) else {
        return Ok(value);
    };
    check_alive(device, lost, during)?;
    Err(Error::Wgpu {
        during: during.to_owned(),
        message: error.to_string(),
    })
}
