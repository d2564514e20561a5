//! The agents' buffers and passes, and the same on the CPU. Nothing here knows of attention.

use multihead::wgpu;
use wgpu::util::{BufferInitDescriptor, DeviceExt};

pub(crate) const AGENTS: usize = 1000;
pub(crate) const FRAMES: usize = 20;
/// How fast attention falls off with distance.
pub(crate) const SHARPNESS: f32 = 20.0;

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

pub(crate) struct Agents {
    /// `[AGENTS, 4]`.
    pub(crate) state: wgpu::Buffer,
    /// `[3, AGENTS, 4]`: queries, keys, values.
    pub(crate) qkv: wgpu::Buffer,
    /// `[AGENTS, 4]`: the mean of the agents that each attends to.
    pub(crate) seen: wgpu::Buffer,
    look: Pass,
    fly: Pass,
}

type Pass = (wgpu::ComputePipeline, wgpu::BindGroup);

impl Agents {
    pub(crate) fn new(device: &wgpu::Device) -> Self {
        let start: Vec<[f32; 4]> = (0..AGENTS).map(agent).collect();
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC;
        let state = device.create_buffer_init(&BufferInitDescriptor {
            label: Some("agents"),
            contents: bytemuck::cast_slice(&start),
            usage,
        });
        let buffer = |label, size| {
            device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: false,
            })
        };
        let (qkv, seen) = (buffer("qkv", 3 * state.size()), buffer("seen", state.size()));
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
            (pipeline, group)
        };
        Self {
            look: pass("look", [(0, &state), (1, &qkv)]),
            fly: pass("fly", [(0, &state), (2, &seen)]),
            state,
            qkv,
            seen,
        }
    }

    pub(crate) fn look(&self, encoder: &mut wgpu::CommandEncoder) {
        record(encoder, &self.look);
    }

    pub(crate) fn fly(&self, encoder: &mut wgpu::CommandEncoder) {
        record(encoder, &self.fly);
    }
}

fn record(encoder: &mut wgpu::CommandEncoder, (pipeline, group): &Pass) {
    let mut pass = encoder.begin_compute_pass(&Default::default());
    pass.set_pipeline(pipeline);
    pass.set_bind_group(0, group, &[]);
    pass.dispatch_workgroups(AGENTS.div_ceil(64) as u32, 1, 1);
}

/// An agent of the start: on a spiral, flying along it.
fn agent(i: usize) -> [f32; 4] {
    let (angle, radius) = (i as f32 * 2.4, (i as f32 / AGENTS as f32).sqrt());
    let (sin, cos) = angle.sin_cos();
    [radius * cos, radius * sin, -sin, cos]
}

/// The largest difference of the agents at the end from what plain loops make of the same start.
pub(crate) fn difference_from_cpu(end: &[f32]) -> f64 {
    let truth = on_cpu();
    if end.len() != 4 * truth.len() || end.iter().any(|value| value.is_nan()) {
        return f64::NAN;
    }
    let pairs = end.iter().zip(truth.iter().flatten());
    pairs.fold(0.0, |most, (&a, b)| f64::max(most, (f64::from(a) - b).abs()))
}

fn on_cpu() -> Vec<[f64; 4]> {
    let mut agents: Vec<[f64; 4]> = (0..AGENTS).map(|i| agent(i).map(f64::from)).collect();
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
