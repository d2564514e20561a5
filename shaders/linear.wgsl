
// Linear projection y = x W^T + b with W in PyTorch's [out, in] layout, written where the next kernel reads it.
//
// The columns of y are cut into up to three parts (queries, keys, values), each cut into heads: a part's column
// n goes to head n / head_dim, dim n % head_dim of its own strided output. Rows are (batch, row) pairs.

const B_ALONG_COLS: bool = false;

struct Part {
    start: u32,
    batch: u32,
    head: u32,
    row: u32,
}

struct Params {
    groups: u32,
    grid_width: u32,
    col_tiles: u32,
    // Rows of x over the whole batch, and of one batch entry.
    all_rows: u32,
    rows: u32,
    outputs: u32,
    inputs: u32,
    x_start: u32,
    x_batch: u32,
    x_row: u32,
    x_dim: u32,
    weight_start: u32,
    has_bias: u32,
    bias_start: u32,
    head_dim: u32,
    // Step from one dim of a head to the next.
    output_dim: u32,
    // First column of the second and third part.
    second: u32,
    third: u32,
    first_start: u32,
    first_batch: u32,
    first_head: u32,
    first_row: u32,
    second_start: u32,
    second_batch: u32,
    second_head: u32,
    second_row: u32,
    third_start: u32,
    third_batch: u32,
    third_head: u32,
    third_row: u32,
    padding_a: u32,
    padding_b: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<x_word>;
@group(0) @binding(2) var<storage, read> weight: array<weight_word>;
@group(0) @binding(3) var<storage, read> bias: array<bias_word>;
@group(0) @binding(4) var<storage, read_write> output: array<output_word>;

var<private> last_row: u32;
var<private> last_col: u32;
var<private> last_input: u32;
var<private> rows: u32;
var<private> inputs: u32;
var<private> x_start: u32;
var<private> x_batch: u32;
var<private> x_row: u32;
var<private> x_dim: u32;
var<private> weight_start: u32;

// Rows and columns outside are computed from a clamped place and never stored; only inputs outside must count
// as 0.
fn load_a(row: u32, k: u32) -> f32 {
    let inside = min(row, last_row);
    let value = load_x(x_start + inside / rows * x_batch + inside % rows * x_row + min(k, last_input) * x_dim);
    return select(0.0, value, k <= last_input);
}

fn load_b(k: u32, col: u32) -> f32 {
    let value = load_weight(weight_start + min(col, last_col) * inputs + min(k, last_input));
    return select(0.0, value, k <= last_input);
}

fn store_cell(row: u32, col: u32, sum: f32) {
    if row < params.all_rows && col < params.outputs {
        var value = sum;
        if params.has_bias != 0u {
            value += load_bias(params.bias_start + col);
        }
        var part = Part(params.first_start, params.first_batch, params.first_head, params.first_row);
        var n = col;
        if col >= params.third {
            part = Part(params.third_start, params.third_batch, params.third_head, params.third_row);
            n = col - params.third;
        } else if col >= params.second {
            part = Part(params.second_start, params.second_batch, params.second_head, params.second_row);
            n = col - params.second;
        }
        let at = part.start + row / params.rows * part.batch + row % params.rows * part.row
            + n / params.head_dim * part.head + n % params.head_dim * params.output_dim;
        store(at, value);
    }
}

fn run(group: vec3<u32>, thread: u32, lane: u32) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let col0 = index % params.col_tiles * TILE_COLS;
    let row0 = index / params.col_tiles * TILE_ROWS;
    last_row = params.all_rows - 1u;
    last_col = params.outputs - 1u;
    // Without inputs there is nothing to load: inner is 0.
    last_input = max(params.inputs, 1u) - 1u;
    rows = params.rows;
    inputs = params.inputs;
    x_start = params.x_start;
    x_batch = params.x_batch;
    x_row = params.x_row;
    x_dim = params.x_dim;
    weight_start = params.weight_start;
    product(row0, col0, params.inputs, thread, lane);
    store_tile(row0, col0, thread);
}
