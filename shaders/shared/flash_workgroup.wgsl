// The core without subgroups: tiles go through workgroup memory. See flash.wgsl.
//
// The threads form a grid of THREAD_ROWS by THREAD_COLS. For a block of TILE_KEYS keys a thread computes ROWS by COLS
// dot products, puts their weights into workgroup memory, and adds ROWS by VALUE_COLS outputs. Threads of a grid
// row share query rows: each keeps the same maximum and a part of the sum, of its own keys.
//
// Constants the host writes in front:
//   THREAD_ROWS, THREAD_COLS   the grid of threads
//   ROWS                       rows of a thread: 4 or 8
//   COLS                       keys of a thread: 1 to 4
//   DEPTH                      steps of a product in workgroup memory at a time, a multiple of 4 that divides TILE_KEYS
//   VALUE_COLS                 value columns of a thread: 1 to 8
//   PLAIN                      1: nothing but the scale and lengths applies to a score (no window, softcap, slopes, masks)
// Workgroup memory: 16 max(DEPTH A, THREAD_ROWS THREAD_COLS ROWS / 4) + 16 TILE_KEYS A + 4 DEPTH B + 4 bytes, where
// A = TILE_ROWS / 4 + 1 and B = max(TILE_KEYS, TILE_DIMS) + 1.

const WORKGROUP: u32 = THREAD_ROWS * THREAD_COLS;
const ROW_GROUPS: u32 = ROWS / 4u;
const TILE_ROWS: u32 = THREAD_ROWS * ROWS;
const TILE_KEYS: u32 = THREAD_COLS * COLS;
const TILE_DIMS: u32 = THREAD_COLS * VALUE_COLS;

// One place more than needed in each step spreads writes along the steps over the banks of the memory.
const STRIDE_A: u32 = THREAD_ROWS * ROW_GROUPS + 1u;
const STRIDE_B: u32 = max(TILE_KEYS, TILE_DIMS) + 1u;

// Queries, [dim][rows / 4]; between the products, what threads of a grid row tell each other.
var<workgroup> tile_a: array<vec4<f32>, max(DEPTH * STRIDE_A, WORKGROUP * ROW_GROUPS)>;
// Keys, [dim][key], or values, [key][column].
var<workgroup> tile_b: array<f32, DEPTH * STRIDE_B>;
// Scores, then weights, [key][rows / 4].
var<workgroup> tile_weights: array<vec4<f32>, TILE_KEYS * STRIDE_A>;
var<workgroup> met_not_finite: atomic<u32>;

// dots[c * ROW_GROUPS + g] belongs to rows 4 * g .. of the thread and its key c; outputs likewise.
var<private> dots: array<vec4<f32>, COLS * ROW_GROUPS>;
var<private> outputs: array<vec4<f32>, VALUE_COLS * ROW_GROUPS>;
var<private> top: array<vec4<f32>, ROW_GROUPS>;
var<private> sum: array<vec4<f32>, ROW_GROUPS>;
// The blocks of FOLD_KEYS keys that are done: their outputs and sum, relative to their maximum.
var<private> totals: array<vec4<f32>, VALUE_COLS * ROW_GROUPS>;
var<private> total_sum: array<vec4<f32>, ROW_GROUPS>;
var<private> total_top: array<vec4<f32>, ROW_GROUPS>;
var<private> not_finite: bool;
var<private> tile: Tile;
var<private> grid_row: u32;
var<private> grid_col: u32;

fn load_query_at(row: u32, dim: u32) -> f32 {
    let last_dim = params.call.head_dim - 1u;
    let x = load_query(tile.query_base + min(row, tile.end_row - 1u) * params.call.query_row + min(dim, last_dim) * params.call.query_dim);
    return select(0.0, x, dim <= last_dim);
}

fn copy_queries(dim0: u32, thread: u32) {
    for (var i = thread; i < DEPTH * THREAD_ROWS * ROW_GROUPS; i += WORKGROUP) {
        let dim = dim0 + i % DEPTH;
        let row = tile.row0 + 4u * (i / DEPTH);
        tile_a[i % DEPTH * STRIDE_A + i / DEPTH] = vec4<f32>(load_query_at(row, dim), load_query_at(row + 1u, dim),
            load_query_at(row + 2u, dim), load_query_at(row + 3u, dim));
    }
}

// Dims outside are 0, keys outside are hidden.
fn copy_keys(dim0: u32, j: u32, last_key: u32, thread: u32) {
    for (var i = thread; i < DEPTH * TILE_KEYS; i += WORKGROUP) {
        let dim = min(dim0 + i % DEPTH, params.call.head_dim - 1u);
        let x = load_key(tile.key_base + min(j + i / DEPTH, last_key) * params.call.key_row + dim * params.call.key_dim);
        tile_b[i % DEPTH * STRIDE_B + i / DEPTH] = select(0.0, x, dim0 + i % DEPTH < params.call.head_dim);
    }
}

fn copy_values(j: u32, last_key: u32, thread: u32) {
    for (var i = thread; i < DEPTH * TILE_DIMS; i += WORKGROUP) {
        let dim = min(tile.col0 + i % TILE_DIMS, max(params.call.value_dim, 1u) - 1u);
        let x = load_value(tile.value_base + min(j + i / TILE_DIMS, last_key) * params.call.value_row + dim * params.call.value_dim_stride);
        let finite = is_finite(x);
        not_finite = not_finite | !finite;
        tile_b[i / TILE_DIMS * STRIDE_B + i % TILE_DIMS] = select(0.0, x, finite);
    }
}

fn add_dot(c: u32, at_b: u32, a: vec4<f32>, second: vec4<f32>) {
    let b = vec4<f32>(tile_b[at_b + c * THREAD_COLS]);
    let i = c * ROW_GROUPS;
    dots[i] = fma(a, b, dots[i]);
    if ROW_GROUPS > 1u {
        dots[i + 1u] = fma(second, b, dots[i + 1u]);
    }
}

fn add_dots(step: u32) {
    let at_a = step * STRIDE_A + grid_row * ROW_GROUPS;
    let at_b = step * STRIDE_B + grid_col;
    let a = tile_a[at_a];
    var second: vec4<f32>;
    if ROW_GROUPS > 1u {
        second = tile_a[at_a + 1u];
    }
    add_dot(0u, at_b, a, second);
    if COLS > 1u {
        add_dot(1u, at_b, a, second);
    }
    if COLS > 2u {
        add_dot(2u, at_b, a, second);
    }
    if COLS > 3u {
        add_dot(3u, at_b, a, second);
    }
}

fn add_value(c: u32, at_b: u32, weight: vec4<f32>, second: vec4<f32>) {
    let b = vec4<f32>(tile_b[at_b + c * THREAD_COLS]);
    let i = c * ROW_GROUPS;
    outputs[i] = fma(weight, b, outputs[i]);
    if ROW_GROUPS > 1u {
        outputs[i + 1u] = fma(second, b, outputs[i + 1u]);
    }
}

fn add_values(k0: u32, step: u32) {
    let at_a = (k0 + step) * STRIDE_A + grid_row * ROW_GROUPS;
    let at_b = step * STRIDE_B + grid_col;
    let weight = tile_weights[at_a];
    var second: vec4<f32>;
    if ROW_GROUPS > 1u {
        second = tile_weights[at_a + 1u];
    }
    add_value(0u, at_b, weight, second);
    if VALUE_COLS > 1u {
        add_value(1u, at_b, weight, second);
    }
    if VALUE_COLS > 2u {
        add_value(2u, at_b, weight, second);
    }
    if VALUE_COLS > 3u {
        add_value(3u, at_b, weight, second);
    }
    if VALUE_COLS > 4u {
        add_value(4u, at_b, weight, second);
    }
    if VALUE_COLS > 5u {
        add_value(5u, at_b, weight, second);
    }
    if VALUE_COLS > 6u {
        add_value(6u, at_b, weight, second);
    }
    if VALUE_COLS > 7u {
        add_value(7u, at_b, weight, second);
    }
}

fn scale_column(c: u32, g: u32, factor: vec4<f32>) {
    if VALUE_COLS > c {
        outputs[c * ROW_GROUPS + g] *= factor;
    }
}

fn scale_outputs(g: u32, factor: vec4<f32>) {
    scale_column(0u, g, factor);
    scale_column(1u, g, factor);
    scale_column(2u, g, factor);
    scale_column(3u, g, factor);
    scale_column(4u, g, factor);
    scale_column(5u, g, factor);
    scale_column(6u, g, factor);
    scale_column(7u, g, factor);
}

fn fold_column(c: u32, g: u32, old: vec4<f32>) {
    if VALUE_COLS > c {
        let i = c * ROW_GROUPS + g;
        totals[i] = fma(totals[i], old, outputs[i]);
        outputs[i] = vec4<f32>(0.0);
    }
}

// Adds the block of FOLD_KEYS keys to those before.
fn fold_rows(g: u32) {
    let old = exponentials(total_top[g] - top[g]);
    total_top[g] = top[g];
    total_sum[g] = fma(total_sum[g], old, sum[g]);
    sum[g] = vec4<f32>(0.0);
    fold_column(0u, g, old);
    fold_column(1u, g, old);
    fold_column(2u, g, old);
    fold_column(3u, g, old);
    fold_column(4u, g, old);
    fold_column(5u, g, old);
    fold_column(6u, g, old);
    fold_column(7u, g, old);
}

fn fold() {
    fold_rows(0u);
    if ROW_GROUPS > 1u {
        fold_rows(1u);
    }
}

// A thread's own cells of tile_weights.
fn place(c: u32, g: u32) -> u32 {
    return (c * THREAD_COLS + grid_col) * STRIDE_A + grid_row * ROW_GROUPS + g;
}

fn show_dots(c: u32) {
    if COLS > c {
        tile_weights[place(c, 0u)] = dots[c * ROW_GROUPS];
        if ROW_GROUPS > 1u {
            tile_weights[place(c, 1u)] = dots[c * ROW_GROUPS + 1u];
        }
    }
}

// A part of what one thread of the grid row has, where the others of that row find it.
fn part(col: u32, g: u32) -> u32 {
    return (col * THREAD_ROWS + grid_row) * ROW_GROUPS + g;
}

// Dot products become scores; what of them is the highest goes to the other threads.
fn mask_rows(g: u32, j: u32, stop: u32) {
    var highest = top[g];
    let row = tile.row0 + grid_row * ROWS + 4u * g;
    for (var c = 0u; c < COLS; c++) {
        let key = j + c * THREAD_COLS + grid_col;
        let bits = masked(tile.head, row, key, key < stop, tile_weights[place(c, g)]);
        tile_weights[place(c, g)] = bitcast<vec4<f32>>(bits);
        highest = raised(highest, bits);
    }
    tile_a[part(grid_col, g)] = highest;
}

fn weigh_rows(g: u32) {
    let old_top = top[g];
    var new_top = old_top;
    for (var col = 0u; col < THREAD_COLS; col++) {
        new_top = max(new_top, tile_a[part(col, g)]);
    }
    top[g] = new_top;
    let factor = exponentials(old_top - new_top);
    var total = sum[g] * factor;
    for (var c = 0u; c < COLS; c++) {
        let weight = weight_of(tile_weights[place(c, g)], new_top);
        tile_weights[place(c, g)] = weight;
        total += weight;
    }
    sum[g] = total;
    scale_outputs(g, factor);
}

fn sum_of_all(g: u32) -> vec4<f32> {
    var total = vec4<f32>(0.0);
    for (var col = 0u; col < THREAD_COLS; col++) {
        total += tile_a[part(col, g)];
    }
    return total;
}

fn store_column(c: u32, g: u32, total: vec4<f32>) {
    if VALUE_COLS > c {
        store_four(tile, tile.row0 + grid_row * ROWS + 4u * g, tile.col0 + c * THREAD_COLS + grid_col,
            divided(totals[c * ROW_GROUPS + g], total));
    }
}

fn store_rows(g: u32) {
    let total = sum_of_all(g);
    store_column(0u, g, total);
    store_column(1u, g, total);
    store_column(2u, g, total);
    store_column(3u, g, total);
    store_column(4u, g, total);
    store_column(5u, g, total);
    store_column(6u, g, total);
    store_column(7u, g, total);
    if grid_col == 0u {
        store_lse(tile, tile.row0 + grid_row * ROWS + 4u * g, top[g], total);
    }
}

fn start_rows(g: u32) {
    let sink = first_key_of_all(tile.head.head);
    top[g] = vec4<f32>(sink.top);
    total_top[g] = top[g];
    total_sum[g] = vec4<f32>(select(0.0, sink.sum, grid_col == 0u));
    sum[g] = vec4<f32>(0.0);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let found = find_tile(index);
    if found.row0 >= found.end_row {
        return;
    }
    tile = found;
    grid_row = thread / THREAD_COLS;
    grid_col = thread % THREAD_COLS;
    not_finite = false;
    start_rows(0u);
    if ROW_GROUPS > 1u {
        start_rows(1u);
    }
    if thread == 0u {
        atomicStore(&met_not_finite, 0u);
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
        dots = array<vec4<f32>, COLS * ROW_GROUPS>();
        for (var dim = 0u; dim < params.call.head_dim; dim += DEPTH) {
            workgroupBarrier();
            copy_queries(dim, thread);
            copy_keys(dim, j, stop - 1u, thread);
            workgroupBarrier();
            for (var step = 0u; step < DEPTH; step += 4u) {
                add_dots(step);
                add_dots(step + 1u);
                add_dots(step + 2u);
                add_dots(step + 3u);
            }
        }
        // All have read the queries, and the weights of the block before.
        workgroupBarrier();
        show_dots(0u);
        show_dots(1u);
        show_dots(2u);
        show_dots(3u);
        mask_rows(0u, j, stop);
        if ROW_GROUPS > 1u {
            mask_rows(1u, j, stop);
        }
        workgroupBarrier();
        weigh_rows(0u);
        if ROW_GROUPS > 1u {
            weigh_rows(1u);
        }
        for (var k = 0u; k < TILE_KEYS; k += DEPTH) {
            workgroupBarrier();
            copy_values(j + k, stop - 1u, thread);
            workgroupBarrier();
            for (var step = 0u; step < DEPTH; step += 4u) {
                add_values(k, step);
                add_values(k, step + 1u);
                add_values(k, step + 2u);
                add_values(k, step + 3u);
            }
        }
        j += TILE_KEYS;
        unfolded += TILE_KEYS;
        if unfolded >= FOLD_KEYS {
            fold();
            unfolded = 0u;
        }
    }

    fold();
    workgroupBarrier();
    tile_a[part(grid_col, 0u)] = total_sum[0u];
    if ROW_GROUPS > 1u {
        tile_a[part(grid_col, 1u)] = total_sum[ROW_GROUPS - 1u];
    }
    if not_finite {
        atomicStore(&met_not_finite, 1u);
    }
    workgroupBarrier();
    store_rows(0u);
    if ROW_GROUPS > 1u {
        store_rows(1u);
    }
    // The rows that write_not_finite writes over were stored by other threads.
    storageBarrier();
    let rows = select(0u, min(TILE_ROWS, tile.end_row - tile.row0), atomicLoad(&met_not_finite) != 0u);
    for (var row = thread; row < rows; row += WORKGROUP) {
        write_not_finite(tile, tile.row0 + row, 1u);
    }
}
