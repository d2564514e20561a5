//! A program that owns its device and encoder and records attention between its own passes: agents that fly towards
//! those near them and turn as these do. Runs without a window and holds the result against a loop on the CPU.
//!
//! ```text
//! cargo run --release --example embed
//! ```

#![allow(clippy::print_stdout)] // That is what it is for.

use multihead::{Attention, AttentionInputs, AttentionOptions, AttentionOutputs, DType, Gpu, Tensor, wgpu};
use wgpu::util::{BufferInitDescriptor, DeviceExt};

const AGENTS: usize = 1000;
const FRAMES: usize = 20;
/// How fast attention falls off with distance.
const SHARPNESS: f32 = 20.0;

/// An agent is a position and a velocity. As query and key it is placed so that `q.k = -|x_i - x_j|^2` up to a term
/// that all keys of a query share, and that the softmax so ignores.
const SHADER: &str = "
@group(0) @binding(0) var<storage, read_write> agents: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> qkv: array<vec4f>;
@group(0) @binding(2) var<storage, read> seen: array<vec4f>;

@compute @workgroup_size(64) fn look(@builtin(global_invocation_id) id: vec3u) {
    let count = arrayLength(&agents);
    if id.x >= count { return; }
    let agent = agents[id.x];
    qkv[id.x] = vec4f(2.0 * agent.xy, -1.0, 0.0);
    qkv[count + id.x] = vec4f(agent.xy, dot(agent.xy, agent.xy), 0.0);
    qkv[2u * count + id.x] = agent;
}

@compute @workgroup_size(64) fn fly(@builtin(global_invocation_id) id: vec3u) {
    if id.x >= arrayLength(&agents) { return; }
    let agent = agents[id.x];
    let pull = seen[id.x] - agent;
    let velocity = agent.zw + 0.02 * pull.xy + 0.1 * pull.zw;
    agents[id.x] = vec4f(agent.xy + 0.1 * velocity, velocity);
}
";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let difference = run()?;
    println!("{AGENTS} agents, {FRAMES} frames: largest difference from the CPU {difference:.1e}");
    if difference.is_nan() || difference > 1e-4 {
        return Err("the GPU and the CPU disagree".into());
    }
    Ok(())
}

/// The largest difference between what the GPU and the CPU make of the same start.
pub(crate) fn run() -> Result<f64, Box<dyn std::error::Error>> {
    // Your device, opened as you like; these features and limits let attention run at its best.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default()))?;
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: Gpu::useful_features(&adapter),
        required_limits: adapter.limits(),
        ..Default::default()
    }))?;

    // Your buffers. Inputs may share one; an output needs its own.
    let start: Vec<[f32; 4]> = (0..AGENTS).map(agent).collect();
    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
    let agents = device.create_buffer_init(&BufferInitDescriptor {
        label: Some("agents"),
        contents: bytemuck::cast_slice(&start),
        usage,
    });
    let bytes = size_of_val(start.as_slice()) as u64;
    let buffer = |label, size| {
        device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size,
            usage,
            mapped_at_creation: false,
        })
    };
    let (qkv, seen) = (buffer("qkv", 3 * bytes), buffer("seen", bytes));

    // Your passes.
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some("agents"),
        source: wgpu::ShaderSource::Wgsl(SHADER.into()),
    });
    let pass = |entry_point, buffers: [(u32, &wgpu::Buffer); 2]| {
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry_point),
            layout: None,
            module: &module,
            entry_point: Some(entry_point),
            compilation_options: Default::default(),
            cache: None,
        });
        let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(entry_point),
            layout: &pipeline.get_bind_group_layout(0),
            entries: &buffers.map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.as_entire_binding(),
            }),
        });
        move |encoder: &mut wgpu::CommandEncoder| {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            pass.set_pipeline(&pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups(AGENTS.div_ceil(64) as u32, 1, 1);
        }
    };
    let look = pass("look", [(0, &agents), (1, &qkv)]);
    let fly = pass("fly", [(0, &agents), (2, &seen)]);

    // Attention: the device is joined once, the buffers are viewed and not copied, the kernels built before frame one.
    let gpu = Gpu::from_device(&device, &queue)?;
    let attention = Attention::new(&gpu, AttentionOptions::new().scale(SHARPNESS))?;
    attention.warm_up(DType::F32, 4, 4)?;
    let view =
        |buffer, place| Tensor::from_buffer(&gpu, buffer, place * bytes, DType::F32, &[1, 1, AGENTS, 4]);
    let (query, key, value) = (view(&qkv, 0)?, view(&qkv, 1)?, view(&qkv, 2)?);
    let output = view(&seen, 0)?;

    for _ in 0..FRAMES {
        let mut encoder = device.create_command_encoder(&Default::default());
        look(&mut encoder);
        attention.record(
            &mut encoder,
            &AttentionInputs::new(&query, &key, &value),
            &AttentionOutputs::new(&output),
        )?;
        fly(&mut encoder);
        queue.submit([encoder.finish()]); // nothing waits: the next frame is recorded while this one runs
    }

    let end = view(&agents, 0)?.download::<f32>()?; // this waits
    let truth = on_cpu(&start);
    let differences = end.iter().zip(truth.iter().flatten());
    Ok(differences.fold(0.0, |most, (&a, b)| f64::max(most, (f64::from(a) - b).abs())))
}

/// An agent of the start: on a spiral, flying along it.
fn agent(i: usize) -> [f32; 4] {
    let (angle, radius) = (i as f32 * 2.4, (i as f32 / AGENTS as f32).sqrt());
    let (sin, cos) = angle.sin_cos();
    [radius * cos, radius * sin, -sin, cos]
}

/// The same in plain loops.
fn on_cpu(start: &[[f32; 4]]) -> Vec<[f64; 4]> {
    let mut agents: Vec<[f64; 4]> = start.iter().map(|agent| agent.map(f64::from)).collect();
    for _ in 0..FRAMES {
        let fly = |agent: &[f64; 4]| {
            let (mut sum, mut seen) = (0.0, [0.0; 4]);
            for other in &agents {
                let (dx, dy) = (agent[0] - other[0], agent[1] - other[1]);
                let weight = (-f64::from(SHARPNESS) * (dx * dx + dy * dy)).exp();
                sum += weight;
                (0..4).for_each(|axis| seen[axis] += weight * other[axis]);
            }
            let pull: [f64; 4] = std::array::from_fn(|axis| seen[axis] / sum - agent[axis]);
            let velocity = [0, 1].map(|axis| agent[2 + axis] + 0.02 * pull[axis] + 0.1 * pull[2 + axis]);
            [
                agent[0] + 0.1 * velocity[0],
                agent[1] + 0.1 * velocity[1],
                velocity[0],
                velocity[1],
            ]
        };
        agents = agents.iter().map(fly).collect();
    }
    agents
}
