// The core for GPUs: queries and weights in workgroup memory. See decode.wgsl.
//
// For the scores each thread takes every WORKGROUP-th key of the split, for the outputs every WORKGROUP-th column, so that
// neighbouring threads load neighbouring values.
//
// Constants the host writes in front:
//   ROWS       4
//   SIZE       the largest size of a query, key or value vector
//   SPLIT      keys of a split at most
//   WORKGROUP  threads, a power of two
//   PLAIN      1: nothing but the scale and lengths applies to a score (no window, softcap, slopes, masks)
// Workgroup memory: 16 (SIZE + SPLIT + WORKGROUP) bytes.

var<workgroup> queries: array<vec4<f32>, SIZE>;
var<workgroup> held: array<vec4<f32>, SPLIT>;
var<workgroup> shared_rows: array<vec4<f32>, WORKGROUP>;

fn highest_of_all(thread: u32, own: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    shared_rows[thread] = own;
    for (var half = WORKGROUP / 2u; half > 0u; half = half / 2u) {
        workgroupBarrier();
        if thread < half {
            shared_rows[thread] = max(shared_rows[thread], shared_rows[thread + half]);
        }
    }
    workgroupBarrier();
    return shared_rows[0];
}

fn sum_of_all(thread: u32, own: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    shared_rows[thread] = own;
    for (var half = WORKGROUP / 2u; half > 0u; half = half / 2u) {
        workgroupBarrier();
        if thread < half {
            shared_rows[thread] += shared_rows[thread + half];
        }
    }
    workgroupBarrier();
    return shared_rows[0];
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let tile = find_tile(index);
    let keys = max(tile.end, tile.first) - tile.first;
    if keys == 0u && params.call.partial_range != 0u {
        if thread == 0u {
            store_lse(tile, Sums(vec4<f32>(LOWEST_FLOAT), vec4<f32>(0.0)));
        }
        return;
    }
    let places = query_places(tile);
    for (var dim = thread; dim < params.call.head_dim; dim += WORKGROUP) {
        queries[dim] = load_queries(places, dim);
    }
    workgroupBarrier();

    var own_top = vec4<f32>(LOWEST_FLOAT);
    for (var k = thread; k < keys; k += WORKGROUP) {
        let at = tile.key_base + (tile.first + k) * params.call.key_row;
        var dots = vec4<f32>(0.0);
        for (var dim = 0u; dim < params.call.head_dim; dim++) {
            dots = fma(queries[dim], vec4<f32>(load_key(at + dim * params.call.key_dim)), dots);
        }
        let bits = masked(tile, tile.first + k, true, dots);
        held[k] = bitcast<vec4<f32>>(bits);
        own_top = raised(own_top, bits);
    }
    let top = highest_of_all(thread, own_top);
    var own_sum = vec4<f32>(0.0);
    for (var k = thread; k < keys; k += WORKGROUP) {
        let weight = weight_of(held[k], top);
        held[k] = weight;
        own_sum += counted(weight);
    }
    let sums = with_sinks(tile, Sums(top, sum_of_all(thread, own_sum)));
    let scale = output_factor(top, sums);
    // The barriers of the sum made the weights known to all.
    for (var col = thread; col < params.call.value_dim; col += WORKGROUP) {
        let at = tile.value_base + tile.first * params.call.value_row + col * params.call.value_dim_stride;
        var x = vec4<f32>(0.0);
        var not_finite = false;
        for (var k = 0u; k < keys; k++) {
            let loaded = load_value(at + k * params.call.value_row);
            let finite = is_finite(loaded);
            not_finite = not_finite || !finite;
            x = fma(counted(held[k]), vec4<f32>(select(0.0, loaded, finite)), x);
        }
        if not_finite {
            for (var k = 0u; k < keys; k++) {
                let loaded = load_value(at + k * params.call.value_row);
                if !is_finite(loaded) {
                    x += surfaced(held[k], loaded);
                }
            }
        }
        store_four(tile, col, x * scale);
    }
    if thread == 0u {
        store_lse(tile, sums);
    }
}
