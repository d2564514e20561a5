// Strided copy of up to four axes, from one element type to another: joins past and new keys, appends the keys
// that follow a sequence, gathers a view.

struct Params {
    groups: u32,
    grid_width: u32,
    elements: u32,
    size_1: u32,
    size_2: u32,
    size_3: u32,
    source_start: u32,
    source_0: u32,
    source_1: u32,
    source_2: u32,
    source_3: u32,
    output_start: u32,
    output_0: u32,
    output_1: u32,
    output_2: u32,
    output_3: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> source: array<source_word>;
@group(0) @binding(2) var<storage, read_write> output: array<output_word>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    let element = index * WORKGROUP + thread;
    if index >= params.groups || element >= params.elements {
        return;
    }
    let i3 = element % params.size_3;
    let rest_2 = element / params.size_3;
    let i2 = rest_2 % params.size_2;
    let rest_1 = rest_2 / params.size_2;
    let i1 = rest_1 % params.size_1;
    let i0 = rest_1 / params.size_1;
    let from_index = params.source_start + i0 * params.source_0 + i1 * params.source_1 + i2 * params.source_2
        + i3 * params.source_3;
    let to_index = params.output_start + i0 * params.output_0 + i1 * params.output_1 + i2 * params.output_2
        + i3 * params.output_3;
    store(to_index, load_source(from_index));
}
