// Weighted sum of the values, written through the output's strides: head-merged where those say so.
//
//   output[batch, row, head, dim] = sum_j weights[head, row, j] * value[batch, kv_head, j, dim]
//
// An invisible key's value must not count even if it is NaN, and 0 * NaN is NaN. So values that are not finite
// are taken as 0 in the product, and only a tile that met one adds them afterwards, for the keys with weight.

const B_ALONG_COLS: bool = true;

struct Params {
    groups: u32,
    grid_width: u32,
    row_tiles: u32,
    col_tiles: u32,
    first_head: u32,
    first_row: u32,
    rows: u32,
    keys: u32,
    heads: u32,
    group_size: u32,
    value_dim: u32,
    weights_start: u32,
    value_start: u32,
    value_batch: u32,
    value_head: u32,
    value_row: u32,
    value_dim_stride: u32,
    output_start: u32,
    output_batch: u32,
    output_head: u32,
    output_row: u32,
    output_dim: u32,
    padding_a: u32,
    padding_b: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read> value: array<value_word>;
@group(0) @binding(3) var<storage, read_write> output: array<output_word>;

// Keys that are summed in one go; the error grows with BLOCK and with the number of blocks, not with the keys.
const BLOCK: u32 = 512u;

// Sums of the blocks so far.
var<private> totals: array<vec4<f32>, COLS * ROW_GROUPS>;

var<workgroup> met_not_finite: atomic<u32>;

var<private> not_finite: bool;
var<private> weights_base: u32;
var<private> value_base: u32;
var<private> output_base: u32;
var<private> last_row: u32;
var<private> last_key: u32;
var<private> last_dim: u32;
var<private> row_stride: u32;
var<private> value_row: u32;
var<private> value_dim: u32;

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

fn load_a(row: u32, k: u32) -> f32 {
    let weight = weights[weights_base + min(row, last_row) * row_stride + min(k, last_key)];
    return select(0.0, weight, k <= last_key);
}

fn load_b(k: u32, col: u32) -> f32 {
    let loaded = load_value(value_base + min(k, last_key) * value_row + min(col, last_dim) * value_dim);
    // On bools, | and & do not branch as || and && do.
    let finite = is_finite(loaded);
    not_finite = not_finite | !finite;
    return select(0.0, loaded, (k <= last_key) & finite);
}

// Keys whose values are looked at in one round: drivers bound the rounds of loops.
const LOOK_KEYS: u32 = 16u;

fn are_four_finite(at: u32, k: u32) -> bool {
    let end = params.keys - 1u;
    let first = is_finite(load_value(at + min(k, end) * value_row));
    let second = is_finite(load_value(at + min(k + 1u, end) * value_row));
    let third = is_finite(load_value(at + min(k + 2u, end) * value_row));
    let fourth = is_finite(load_value(at + min(k + 3u, end) * value_row));
    return first & second & third & fourth;
}

fn sum_not_finite(row: u32, col: u32) -> f32 {
    var sum = 0.0;
    let at = value_base + col * value_dim;
    for (var k = 0u; k < params.keys; k += LOOK_KEYS) {
        let low = are_four_finite(at, k) & are_four_finite(at, k + 4u);
        let high = are_four_finite(at, k + 8u) & are_four_finite(at, k + 12u);
        if !(low & high) {
            for (var j = k; j < min(k + LOOK_KEYS, params.keys); j++) {
                let weight = weights[weights_base + row * params.keys + j];
                let loaded = load_value(at + j * value_row);
                if weight != 0.0 && !is_finite(loaded) {
                    sum += weight * loaded;
                }
            }
        }
    }
    return sum;
}

fn row_place(row: u32) -> u32 {
    return output_base + row * params.output_row;
}

fn col_place(col: u32) -> u32 {
    return col * params.output_dim;
}

fn store_cell(row: u32, col: u32, place: u32, sum: f32) {
    if row < params.rows && col < params.value_dim {
        var total = sum;
        if not_finite {
            total += sum_not_finite(row, col);
        }
        store(place, total);
    }
}

fn run(group: vec3<u32>, thread: u32, lane: u32) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let col0 = index % params.col_tiles * TILE_COLS;
    let rest = index / params.col_tiles;
    let row0 = rest % params.row_tiles * TILE_ROWS;
    let chunk_head = rest / params.row_tiles;
    let call_head = params.first_head + chunk_head;
    let batch = call_head / params.heads;
    let h = call_head % params.heads;
    weights_base = params.weights_start + chunk_head * params.rows * params.keys;
    value_base = params.value_start + batch * params.value_batch + h / params.group_size * params.value_head;
    output_base = params.output_start + batch * params.output_batch + h * params.output_head
        + params.first_row * params.output_row;
    let first_weight = weights_base;
    let first_value = value_base;
    last_row = params.rows - 1u;
    // Without keys there is nothing to load: inner is 0.
    last_key = max(params.keys, 1u) - 1u;
    last_dim = params.value_dim - 1u;
    row_stride = params.keys;
    value_row = params.value_row;
    value_dim = params.value_dim_stride;
    not_finite = false;
    if thread == 0u {
        atomicStore(&met_not_finite, 0u);
    }
    workgroupBarrier();
    for (var start = 0u; start < params.keys; start += BLOCK) {
        product(row0, col0, min(BLOCK, params.keys - start), thread, lane);
        for (var i = 0u; i < COLS * ROW_GROUPS; i++) {
            totals[i] += sums[i];
            sums[i] = vec4<f32>(0.0);
        }
        weights_base += BLOCK;
        value_base += BLOCK * value_row;
        last_key -= min(BLOCK, last_key);
    }
    sums = totals;
    weights_base = first_weight;
    value_base = first_value;
    if not_finite {
        atomicStore(&met_not_finite, 1u);
    }
    workgroupBarrier();
    not_finite = atomicLoad(&met_not_finite) != 0u;
    store_tile(row0, col0, thread);
}
