// Joins lengths, slopes and sinks, each a strided vector of words, one behind the other: the fused kernel has one
// binding for the three.

struct Params {
    groups: u32,
    grid_width: u32,
    // Words of each, and where they start and how far apart they lie.
    first_len: u32,
    first_start: u32,
    first_stride: u32,
    second_len: u32,
    second_start: u32,
    second_stride: u32,
    third_len: u32,
    third_start: u32,
    third_stride: u32,
    padding: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> first: array<u32>;
@group(0) @binding(2) var<storage, read> second: array<u32>;
@group(0) @binding(3) var<storage, read> third: array<u32>;
@group(0) @binding(4) var<storage, read_write> output: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    let i = index * WORKGROUP + thread;
    let two = params.first_len + params.second_len;
    if index >= params.groups || i >= two + params.third_len {
        return;
    }
    var word: u32;
    if i < params.first_len {
        word = first[params.first_start + i * params.first_stride];
    } else if i < two {
        word = second[params.second_start + (i - params.first_len) * params.second_stride];
    } else {
        word = third[params.third_start + (i - two) * params.third_stride];
    }
    output[i] = word;
}
