// The core with subgroups, no workgroup memory. See flash.wgsl.
//
// A thread owns four query rows, the components of a vec4, with their queries, maximum, sum and output: the softmax
// needs no other thread. Each lane loads another dim of a key (one load for LANES dims), and each another key's value,
// and subgroupBroadcast hands them to all rows.
//
// Constants the host writes in front:
//   DIM        0 or the largest head size of Q and K that fits, a multiple of 8, at most 256: the tile's queries are
//              kept in private memory; 0: any head size, queries are read again for each block of keys
//   VALUE_DIM  columns of V of a workgroup, a multiple of 8, at most 128
//   KEYS       keys of a block: LANES or 2 * LANES
//   LANES      4 or 8, at most the smallest subgroup size of the device
//   WORKGROUP  threads of a workgroup, a multiple of LANES
//   PLAIN      1: nothing but the scale and lengths applies to a score (no window, softcap, slopes, masks)
// A device may run larger subgroups than LANES: each aligned group of LANES lanes then loads the same, and the first
// one is asked.
//
// What is written out and what is a loop decides how long a software adapter compiles and how fast it runs. `weights`
// is indexed by constants alone, so that it stays in registers. `queries`, `outputs` and `scores` have an index that
// is not constant somewhere and so live in memory, which is wanted: held in registers they made the compiler take
// minutes to spill them. The products with the values are written out: a constant index costs a plain load or store,
// any other a gather or scatter. Loops over the dims of the keys and over the softmax's cells cost no speed and keep
// the text that is compiled small.

const TILE_ROWS: u32 = 4u * WORKGROUP;
const TILE_DIMS: u32 = VALUE_DIM;
const QUERY_DIMS: u32 = max(DIM, LANES);

var<private> queries: array<vec4<f32>, QUERY_DIMS>;
var<private> outputs: array<vec4<f32>, VALUE_DIM>;
// The blocks of FOLD_KEYS keys that are done: their outputs and sum, relative to their maximum.
var<private> totals: array<vec4<f32>, VALUE_DIM>;
var<private> total_sum: vec4<f32>;
var<private> total_top: vec4<f32>;
// Dot products, then weights of the block, and a copy in memory for the loops of the softmax.
var<private> weights: array<vec4<f32>, KEYS>;
var<private> scores: array<vec4<f32>, KEYS>;
var<private> top: vec4<f32>;
var<private> sum: vec4<f32>;
// What the outputs so far are scaled by in this block.
var<private> factor: vec4<f32>;

var<private> tile: Tile;
// Of the thread's four rows.
var<private> query_at: vec4<u32>;
var<private> step: u32;
var<private> last_dim: u32;
var<private> last_value_dim: u32;
var<private> last_key: u32;
var<private> query_dim: u32;
var<private> key_row: u32;
var<private> key_dim: u32;
var<private> value_dim: u32;
// This lane's keys of the block.
var<private> value_at: u32;
var<private> second_value_at: u32;
var<private> not_finite: bool;

fn load_query_dim(at: u32, dim: u32) {
    let offset = min(dim, last_dim) * query_dim;
    let q = vec4<f32>(load_query(query_at.x + offset), load_query(query_at.y + offset),
        load_query(query_at.z + offset), load_query(query_at.w + offset));
    queries[at] = select(vec4<f32>(0.0), q, dim <= last_dim);
}

fn load_queries(at: u32, dim: u32) {
    load_query_dim(at, dim);
    load_query_dim(at + 1u, dim + 1u);
    load_query_dim(at + 2u, dim + 2u);
    load_query_dim(at + 3u, dim + 3u);
    if LANES > 4u {
        load_query_dim(at + 4u, dim + 4u);
        load_query_dim(at + 5u, dim + 5u);
        load_query_dim(at + 6u, dim + 6u);
        load_query_dim(at + 7u, dim + 7u);
    }
}

fn add_key(k: u32, at: u32, offset: u32, j: u32, inside: bool) {
    // Queries are 0 outside, but 0 times an infinite key is not.
    let x = select(0.0, load_key(offset + min(j + k, last_key) * key_row), inside);
    var sum = weights[k];
    sum = fma(queries[at], vec4<f32>(subgroupBroadcast(x, 0u)), sum);
    sum = fma(queries[at + 1u], vec4<f32>(subgroupBroadcast(x, 1u)), sum);
    sum = fma(queries[at + 2u], vec4<f32>(subgroupBroadcast(x, 2u)), sum);
    sum = fma(queries[at + 3u], vec4<f32>(subgroupBroadcast(x, 3u)), sum);
    if LANES > 4u {
        sum = fma(queries[at + 4u], vec4<f32>(subgroupBroadcast(x, 4u)), sum);
        sum = fma(queries[at + 5u], vec4<f32>(subgroupBroadcast(x, 5u)), sum);
        sum = fma(queries[at + 6u], vec4<f32>(subgroupBroadcast(x, 6u)), sum);
        sum = fma(queries[at + 7u], vec4<f32>(subgroupBroadcast(x, 7u)), sum);
    }
    weights[k] = sum;
}

fn add_scores(at: u32, dim: u32, j: u32) {
    let offset = tile.key_base + min(dim + step, last_dim) * key_dim;
    let inside = dim + step <= last_dim;
    add_key(0u, at, offset, j, inside);
    add_key(1u, at, offset, j, inside);
    add_key(2u, at, offset, j, inside);
    add_key(3u, at, offset, j, inside);
    if KEYS > 4u {
        add_key(4u, at, offset, j, inside);
        add_key(5u, at, offset, j, inside);
        add_key(6u, at, offset, j, inside);
        add_key(7u, at, offset, j, inside);
    }
    if KEYS > 8u {
        add_key(8u, at, offset, j, inside);
        add_key(9u, at, offset, j, inside);
        add_key(10u, at, offset, j, inside);
        add_key(11u, at, offset, j, inside);
        add_key(12u, at, offset, j, inside);
        add_key(13u, at, offset, j, inside);
        add_key(14u, at, offset, j, inside);
        add_key(15u, at, offset, j, inside);
    }
}

// A dim of the values of LANES keys, this lane's.
fn load_values(key_at: u32, offset: u32) -> f32 {
    let x = load_value(key_at + offset);
    let finite = is_finite(x);
    not_finite = not_finite || !finite;
    return select(0.0, x, finite);
}

fn add_weighted(k: u32, x: f32, start: vec4<f32>) -> vec4<f32> {
    var sum = start;
    sum = fma(weights[k], vec4<f32>(subgroupBroadcast(x, 0u)), sum);
    sum = fma(weights[k + 1u], vec4<f32>(subgroupBroadcast(x, 1u)), sum);
    sum = fma(weights[k + 2u], vec4<f32>(subgroupBroadcast(x, 2u)), sum);
    sum = fma(weights[k + 3u], vec4<f32>(subgroupBroadcast(x, 3u)), sum);
    if LANES > 4u {
        sum = fma(weights[k + 4u], vec4<f32>(subgroupBroadcast(x, 4u)), sum);
        sum = fma(weights[k + 5u], vec4<f32>(subgroupBroadcast(x, 5u)), sum);
        sum = fma(weights[k + 6u], vec4<f32>(subgroupBroadcast(x, 6u)), sum);
        sum = fma(weights[k + 7u], vec4<f32>(subgroupBroadcast(x, 7u)), sum);
    }
    return sum;
}

fn add_value(at: u32) {
    let offset = min(tile.col0 + at, last_value_dim) * value_dim;
    var sum = outputs[at] * factor;
    sum = add_weighted(0u, load_values(value_at, offset), sum);
    if KEYS > LANES {
        sum = add_weighted(LANES, load_values(second_value_at, offset), sum);
    }
    outputs[at] = sum;
}

fn add_values(at: u32) {
    add_value(at);
    add_value(at + 1u);
    add_value(at + 2u);
    add_value(at + 3u);
    add_value(at + 4u);
    add_value(at + 5u);
    add_value(at + 6u);
    add_value(at + 7u);
}

fn add_many_values(at: u32) {
    if VALUE_DIM > at {
        add_values(at);
    }
    if VALUE_DIM > at + 8u {
        add_values(at + 8u);
    }
    if VALUE_DIM > at + 16u {
        add_values(at + 16u);
    }
    if VALUE_DIM > at + 24u {
        add_values(at + 24u);
    }
}

fn add_all_values() {
    add_many_values(0u);
    if VALUE_DIM > 32u {
        add_many_values(32u);
    }
    if VALUE_DIM > 64u {
        add_many_values(64u);
    }
    if VALUE_DIM > 96u {
        add_many_values(96u);
    }
}

// Adds the block of FOLD_KEYS keys to those before.
fn fold() {
    let old = exponentials(total_top - top);
    total_top = top;
    total_sum = fma(total_sum, old, sum);
    sum = vec4<f32>(0.0);
    for (var at = 0u; at < VALUE_DIM; at++) {
        totals[at] = fma(totals[at], old, outputs[at]);
        outputs[at] = vec4<f32>(0.0);
    }
}

fn mask_key(k: u32, row: u32, j: u32, stop: u32) {
    let bits = masked(tile.head, row, j + k, j + k < stop, scores[k]);
    scores[k] = bitcast<vec4<f32>>(bits);
    top = raised(top, bits);
}

fn weigh_key(k: u32) {
    let weight = weight_of(scores[k], top);
    scores[k] = weight;
    sum += weight;
}

fn keep_four(k: u32) {
    scores[k] = weights[k];
    scores[k + 1u] = weights[k + 1u];
    scores[k + 2u] = weights[k + 2u];
    scores[k + 3u] = weights[k + 3u];
}

fn fetch_four(k: u32) {
    weights[k] = scores[k];
    weights[k + 1u] = scores[k + 1u];
    weights[k + 2u] = scores[k + 2u];
    weights[k + 3u] = scores[k + 3u];
}

fn weigh_block(row: u32, j: u32, stop: u32) {
    keep_four(0u);
    if KEYS > 4u {
        keep_four(4u);
    }
    if KEYS > 8u {
        keep_four(8u);
        keep_four(12u);
    }
    let old_top = top;
    for (var k = 0u; k < KEYS; k++) {
        mask_key(k, row, j, stop);
    }
    factor = exponentials(old_top - top);
    sum *= factor;
    for (var k = 0u; k < KEYS; k++) {
        weigh_key(k);
    }
    fetch_four(0u);
    if KEYS > 4u {
        fetch_four(4u);
    }
    if KEYS > 8u {
        fetch_four(8u);
        fetch_four(12u);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let found = find_tile(index);
    if found.row0 >= found.end_row {
        return;
    }
    tile = found;
    let row = tile.row0 + 4u * thread;
    let last_row = tile.end_row - 1u;
    query_at = tile.query_base + params.call.query_row
        * vec4<u32>(min(row, last_row), min(row + 1u, last_row), min(row + 2u, last_row), min(row + 3u, last_row));
    step = lane % LANES;
    last_dim = max(params.call.head_dim, 1u) - 1u;
    last_value_dim = max(params.call.value_dim, 1u) - 1u;
    query_dim = params.call.query_dim;
    key_row = params.call.key_row;
    key_dim = params.call.key_dim;
    value_dim = params.call.value_dim_stride;
    not_finite = false;
    let start = first_key_of_all(tile.head.head);
    top = vec4<f32>(start.top);
    total_top = top;
    total_sum = vec4<f32>(start.sum);
    sum = vec4<f32>(0.0);
    if DIM > 0u {
        for (var dim = 0u; dim < params.call.head_dim; dim += LANES) {
            load_queries(dim, dim);
        }
    }

    var j = found.first;
    var stop = found.last;
    var tail = found.tail;
    var unfolded = 0u;
    loop {
        if j >= stop {
            j = tail;
            stop = found.end;
            tail = stop;
        }
        if j >= stop {
            break;
        }
        last_key = stop - 1u;
        value_at = tile.value_base + min(j + step, last_key) * params.call.value_row;
        if KEYS > LANES {
            second_value_at = tile.value_base + min(j + LANES + step, last_key) * params.call.value_row;
        }
        weights = array<vec4<f32>, KEYS>();
        for (var dim = 0u; dim < params.call.head_dim; dim += LANES) {
            if DIM == 0u {
                load_queries(0u, dim);
                add_scores(0u, dim, j);
            } else {
                add_scores(dim, dim, j);
            }
        }
        weigh_block(row, j, stop);
        add_all_values();
        j += KEYS;
        unfolded += KEYS;
        if unfolded >= FOLD_KEYS {
            fold();
            unfolded = 0u;
        }
    }

    fold();
    for (var at = 0u; at < VALUE_DIM; at++) {
        store_four(tile, row, tile.col0 + at, divided(totals[at], total_sum));
    }
    store_lse(tile, row, top, total_sum);
    // Each lane has met other keys' values.
    if subgroupAny(not_finite) {
        write_not_finite(tile, row, 4u);
    }
}
