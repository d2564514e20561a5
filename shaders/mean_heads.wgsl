// Mean of the weights over the heads: mean[batch, row, key] = sum_h weights[batch, h, row, key] / heads.

struct Params {
    groups: u32,
    grid_width: u32,
    elements: u32,
    // Rows times keys of one head.
    head_size: u32,
    heads: u32,
    weights_start: u32,
    mean_start: u32,
    padding: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read_write> mean: array<f32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    let element = index * WORKGROUP + thread;
    if index >= params.groups || element >= params.elements {
        return;
    }
    let batch = element / params.head_size;
    let base = params.weights_start + batch * params.heads * params.head_size + element % params.head_size;
    // In parts, so that the error does not grow with the number of heads.
    var sum = 0.0;
    for (var first = 0u; first < params.heads; first += 64u) {
        var part = 0.0;
        for (var h = first; h < min(first + 64u, params.heads); h++) {
            part += weights[base + h * params.head_size];
        }
        sum += part;
    }
    mean[params.mean_start + element] = sum / f32(params.heads);
}
