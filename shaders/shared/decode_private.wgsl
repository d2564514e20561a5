// The core for adapters where a load from workgroup memory costs as much as one from a buffer: software ones. See
// decode.wgsl.
//
// Each thread takes every WORKGROUP-th key of the split, whole: queries, scores and outputs are in private memory, and
// threads meet only at the end. `queries` and `outputs` are indexed by constants in the loops over the keys, which is a
// plain load or store; any other index is a gather or scatter there.
//
// Constants the host writes in front:
//   ROWS       rows of the tile that are computed: 1 or 4
//   SIZE       the largest size of a query, key or value vector, a multiple of 32, at most 256
//   SPLIT      keys of a split at most, a multiple of WORKGROUP
//   WORKGROUP  threads
//   PLAIN      1: nothing but the scale and lengths applies to a score (no window, softcap, slopes, masks)

const SLOTS: u32 = SPLIT / WORKGROUP;
// Columns that the threads add up at a time.
const MEET_COLS: u32 = 32u;

// Rows is f32 or vec4<f32>: decode_rows_one.wgsl or decode_rows_four.wgsl stands beside this text.
var<private> queries: array<Rows, SIZE>;
var<private> outputs: array<Rows, SIZE>;
var<private> held: array<vec4<f32>, SLOTS>;

var<private> last_dim: u32;
var<private> key_dim: u32;
var<private> last_value_dim: u32;
var<private> value_dim: u32;
var<private> not_finite: bool;

var<workgroup> tops: array<vec4<f32>, WORKGROUP>;
var<workgroup> totals: array<vec4<f32>, WORKGROUP>;
var<workgroup> columns: array<vec4<f32>, WORKGROUP * MEET_COLS>;

fn add_dim(at: u32, dim: u32, sum: Rows) -> Rows {
    // Queries are 0 outside, but 0 times an infinite key is not.
    let x = select(0.0, load_key(at + min(dim, last_dim) * key_dim), dim <= last_dim);
    return fma(queries[dim], Rows(x), sum);
}

fn add_dims(at: u32, dim: u32, start: Rows) -> Rows {
    var sum = start;
    sum = add_dim(at, dim, sum);
    sum = add_dim(at, dim + 1u, sum);
    sum = add_dim(at, dim + 2u, sum);
    sum = add_dim(at, dim + 3u, sum);
    sum = add_dim(at, dim + 4u, sum);
    sum = add_dim(at, dim + 5u, sum);
    sum = add_dim(at, dim + 6u, sum);
    return add_dim(at, dim + 7u, sum);
}

fn add_many_dims(at: u32, dim: u32, start: Rows) -> Rows {
    let first = add_dims(at, dim + 8u, add_dims(at, dim, start));
    return add_dims(at, dim + 24u, add_dims(at, dim + 16u, first));
}

fn dot_products(at: u32) -> Rows {
    var sum = add_many_dims(at, 0u, Rows(0.0));
    if SIZE > 32u {
        sum = add_many_dims(at, 32u, sum);
    }
    if SIZE > 64u {
        sum = add_many_dims(at, 64u, sum);
        sum = add_many_dims(at, 96u, sum);
    }
    if SIZE > 128u {
        sum = add_many_dims(at, 128u, sum);
        sum = add_many_dims(at, 160u, sum);
        sum = add_many_dims(at, 192u, sum);
        sum = add_many_dims(at, 224u, sum);
    }
    return sum;
}

fn add_value(at: u32, dim: u32, weight: Rows) {
    let x = load_value(at + min(dim, last_value_dim) * value_dim);
    let finite = is_finite(x);
    not_finite = not_finite || !finite;
    outputs[dim] = fma(weight, Rows(select(0.0, x, finite)), outputs[dim]);
}

fn add_values(at: u32, dim: u32, weight: Rows) {
    add_value(at, dim, weight);
    add_value(at, dim + 1u, weight);
    add_value(at, dim + 2u, weight);
    add_value(at, dim + 3u, weight);
    add_value(at, dim + 4u, weight);
    add_value(at, dim + 5u, weight);
    add_value(at, dim + 6u, weight);
    add_value(at, dim + 7u, weight);
}

fn add_many_values(at: u32, dim: u32, weight: Rows) {
    add_values(at, dim, weight);
    add_values(at, dim + 8u, weight);
    add_values(at, dim + 16u, weight);
    add_values(at, dim + 24u, weight);
}

fn add_all_values(at: u32, weight: Rows) {
    add_many_values(at, 0u, weight);
    if SIZE > 32u {
        add_many_values(at, 32u, weight);
    }
    if SIZE > 64u {
        add_many_values(at, 64u, weight);
        add_many_values(at, 96u, weight);
    }
    if SIZE > 128u {
        add_many_values(at, 128u, weight);
        add_many_values(at, 160u, weight);
        add_many_values(at, 192u, weight);
        add_many_values(at, 224u, weight);
    }
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
    last_dim = max(params.call.head_dim, 1u) - 1u;
    key_dim = params.call.key_dim;
    last_value_dim = max(params.call.value_dim, 1u) - 1u;
    value_dim = params.call.value_dim_stride;
    not_finite = false;
    let places = query_places(tile);
    for (var dim = 0u; dim < params.call.head_dim; dim++) {
        queries[dim] = own_rows(load_queries(places, dim));
    }

    var top = vec4<f32>(LOWEST_FLOAT);
    let slots = (keys + WORKGROUP - 1u) / WORKGROUP;
    for (var slot = 0u; slot < slots; slot++) {
        let j = tile.first + slot * WORKGROUP + thread;
        let dots = dot_products(tile.key_base + min(j, tile.end - 1u) * params.call.key_row);
        let bits = masked(tile, j, j < tile.end, all_rows(dots));
        held[slot] = bitcast<vec4<f32>>(bits);
        top = raised(top, bits);
    }
    var sum = vec4<f32>(0.0);
    for (var slot = 0u; slot < slots; slot++) {
        let weight = weight_of(held[slot], top);
        held[slot] = weight;
        sum += counted(weight);
    }
    for (var slot = 0u; slot < slots; slot++) {
        let j = min(tile.first + slot * WORKGROUP + thread, tile.end - 1u);
        add_all_values(tile.value_base + j * params.call.value_row, own_rows(counted(held[slot])));
    }
    if not_finite {
        for (var dim = 0u; dim < params.call.value_dim; dim++) {
            for (var slot = 0u; slot < slots; slot++) {
                let j = min(tile.first + slot * WORKGROUP + thread, tile.end - 1u);
                let x = load_value(tile.value_base + j * params.call.value_row + dim * value_dim);
                if !is_finite(x) {
                    outputs[dim] += own_rows(surfaced(held[slot], x));
                }
            }
        }
    }

    // What the threads have, relative to the highest top.
    tops[thread] = top;
    workgroupBarrier();
    var highest = top;
    for (var other = 0u; other < WORKGROUP; other++) {
        highest = max(highest, tops[other]);
    }
    let factor = exponentials(top - highest);
    totals[thread] = sum * factor;
    workgroupBarrier();
    var total = vec4<f32>(0.0);
    for (var other = 0u; other < WORKGROUP; other++) {
        total += totals[other];
    }
    let sums = with_sinks(tile, Sums(highest, total));
    let scale = output_factor(highest, sums);
    for (var col0 = 0u; col0 < params.call.value_dim; col0 += MEET_COLS) {
        workgroupBarrier();
        for (var col = 0u; col < MEET_COLS; col++) {
            // A value that is not finite stays what it is however little it weighs.
            let x = all_rows(outputs[min(col0 + col, SIZE - 1u)]);
            let finite = vec4<bool>(is_finite(x.x), is_finite(x.y), is_finite(x.z), is_finite(x.w));
            columns[col * WORKGROUP + thread] = select(x, x * factor, finite);
        }
        workgroupBarrier();
        for (var col = thread; col < MEET_COLS; col += WORKGROUP) {
            var x = vec4<f32>(0.0);
            for (var other = 0u; other < WORKGROUP; other++) {
                x += columns[col * WORKGROUP + other];
            }
            store_four(tile, col0 + col, x * scale);
        }
    }
    if thread == 0u {
        store_lse(tile, sums);
    }
}
