//! A program that owns its device and encoder and records attention between its own passes: agents that fly towards
//! those near them and turn as these do (`cargo run --release --example embed`). `agents.rs` has its own passes, as a
//! program would have already, and the loop on the CPU that the result is held against.

#![allow(clippy::print_stdout)] // That is what it is for.

mod agents;

use agents::{AGENTS, Agents, FRAMES, SHARPNESS};
use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionOutputs, DType, Gpu, Tensor, wgpu};

/// Runs the frames; the largest difference from the CPU.
pub(crate) fn run() -> Result<f64, Box<dyn std::error::Error>> {
    // Your device, opened as you like; these features and limits let attention run at its best.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default()))?;
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: Gpu::useful_features(&adapter),
        required_limits: adapter.limits(),
        ..Default::default()
    }))?;

    // Your buffers and passes: `look` writes queries, keys and values of the agents, `fly` reads what they have seen.
    let agents = Agents::new(&device);

    // Attention: the device is joined once, buffers are viewed and not copied, kernels are built before the first frame.
    let gpu = Gpu::from_device(&device, &queue)?;
    let attention = Attention::new(&gpu, AttentionOptions::new().scale(SHARPNESS))?;
    attention.warm_up(DType::F32, 4, 4)?;
    let view = |buffer, part| {
        let offset = (part * AGENTS * 4 * size_of::<f32>()) as u64;
        Tensor::from_buffer(&gpu, buffer, offset, DType::F32, &[1, 1, AGENTS, 4]) // [B, H, L, D]
    };
    // Inputs may share a buffer; an output needs one of its own.
    let (query, key, value) = (
        view(&agents.qkv, 0)?,
        view(&agents.qkv, 1)?,
        view(&agents.qkv, 2)?,
    );
    let output = view(&agents.seen, 0)?;

    for _ in 0..FRAMES {
        let mut encoder = device.create_command_encoder(&Default::default());
        agents.look(&mut encoder); // a pass of yours, ended before the next line
        let (inputs, outputs) = (
            AttentionInputs::new(&query, &key, &value),
            AttentionOutputs::new(&output),
        );
        attention.record(&mut encoder, &inputs, &outputs)?;
        agents.fly(&mut encoder); // no barrier of yours: wgpu orders passes that share buffers
        queue.submit([encoder.finish()]); // nothing waits: the next frame is recorded while this one runs
    }

    let end = view(&agents.state, 0)?.download::<f32>()?; // this waits
    Ok(agents::difference_from_cpu(&end))
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let difference = run()?;
    println!("{AGENTS} agents, {FRAMES} frames: largest difference from the CPU {difference:.1e}");
    if difference.is_nan() || difference > 1e-4 {
        return Err("the GPU and the CPU disagree".into());
    }
    Ok(())
}
