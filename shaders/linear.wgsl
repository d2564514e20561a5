// Linear projection y = x W^T + b with W in PyTorch's [out, in] layout, written where the next kernel reads it.
//
// The columns of y are cut into up to three parts (queries, keys, values), each cut into heads: a part's column
// n goes to head n / head_dim, dim n % head_dim of its own strided output. A tile belongs to one part.
//
// A tile's rows lie in one run of x, `run_rows` rows a constant stride apart: all rows of the batch where its
// entries follow each other without a gap, else those of one entry. Loads then need no division, which costs
// more than the load itself on some adapters.

const B_ALONG_COLS: bool = false;

struct Part {
    // Its first column tile, its first column, and how many columns it has.
    first_tile: u32,
    first_col: u32,
    cols: u32,
    // Where it goes: first element, and from one batch entry, head and row to the next.
    start: u32,
    batch: u32,
    head: u32,
    row: u32,
    part_padding: u32,
}

struct Params {
    groups: u32,
    grid_width: u32,
    row_tiles: u32,
    col_tiles: u32,
    // Rows of a run, and of a batch entry.
    run_rows: u32,
    rows: u32,
    inputs: u32,
    x_start: u32,
    // From one run to the next.
    x_run: u32,
    x_row: u32,
    x_dim: u32,
    weight_start: u32,
    has_bias: u32,
    bias_start: u32,
    head_dim: u32,
    // From one dim of a head to the next.
    output_dim: u32,
    first: Part,
    second: Part,
    third: Part,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<x_word>;
@group(0) @binding(2) var<storage, read> weight: array<weight_word>;
@group(0) @binding(3) var<storage, read> bias: array<bias_word>;
@group(0) @binding(4) var<storage, read_write> output: array<output_word>;

var<private> part: Part;
var<private> batch: u32;
var<private> x_base: u32;
var<private> x_row: u32;
var<private> x_dim: u32;
var<private> weight_base: u32;
var<private> inputs: u32;
var<private> last_row: u32;
var<private> last_col: u32;
var<private> last_input: u32;

// Rows and columns outside are computed from a clamped place and never stored; only inputs outside must count
// as 0.
fn load_a(row: u32, k: u32) -> f32 {
    let value = load_x(x_base + min(row, last_row) * x_row + min(k, last_input) * x_dim);
    return select(0.0, value, k <= last_input);
}

fn load_b(k: u32, col: u32) -> f32 {
    let value = load_weight(weight_base + min(col, last_col) * inputs + min(k, last_input));
    return select(0.0, value, k <= last_input);
}

fn row_place(row: u32) -> u32 {
    return part.start + (batch + row / params.rows) * part.batch + row % params.rows * part.row;
}

fn col_place(col: u32) -> u32 {
    return col / params.head_dim * part.head + col % params.head_dim * params.output_dim;
}

fn store_cell(row: u32, col: u32, place: u32, sum: f32) {
    if row < params.run_rows && col < part.cols {
        var value = sum;
        if params.has_bias != 0u {
            value += load_bias(params.bias_start + part.first_col + col);
        }
        store(place, value);
    }
}

fn run(group: vec3<u32>, thread: u32, lane: u32) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let col_tile = index % params.col_tiles;
    let rest = index / params.col_tiles;
    let row0 = rest % params.row_tiles * TILE_ROWS;
    let this_run = rest / params.row_tiles;
    part = params.first;
    if col_tile >= params.third.first_tile {
        part = params.third;
    } else if col_tile >= params.second.first_tile {
        part = params.second;
    }
    let col0 = (col_tile - part.first_tile) * TILE_COLS;
    // Several runs are one batch entry each; a single one starts at the first.
    batch = this_run;
    x_base = params.x_start + this_run * params.x_run;
    x_row = params.x_row;
    x_dim = params.x_dim;
    inputs = params.inputs;
    weight_base = params.weight_start + part.first_col * params.inputs;
    last_row = params.run_rows - 1u;
    last_col = part.cols - 1u;
    // Without inputs there is nothing to load: inner is 0.
    last_input = max(params.inputs, 1u) - 1u;
    product(row0, col0, params.inputs, thread, lane);
    store_tile(row0, col0, thread);
}
