// Rotary position embedding: one thread a pair, or an element behind the pairs, of [B, H, L, D].

struct Params {
    groups: u32,
    grid_width: u32,
    elements: u32,
    heads: u32,
    rows: u32,
    // Pairs and elements behind them.
    columns: u32,
    input_start: u32,
    input_batch: u32,
    input_head: u32,
    input_row: u32,
    input_column: u32,
    output_start: u32,
    output_batch: u32,
    output_head: u32,
    output_row: u32,
    output_column: u32,
    // A row stands at `first`, plus its index if they are `consecutive`, plus a word of `positions` if there are any.
    first: u32,
    consecutive: u32,
    has_positions: u32,
    positions_start: u32,
    positions_batch: u32,
    positions_row: u32,
    padding_0: u32,
    padding_1: u32,
    rotation: Rotation,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<input_word>;
@group(0) @binding(2) var<storage, read> positions: array<u32>;
@group(0) @binding(3) var<storage, read> cosines: array<cosines_word>;
@group(0) @binding(4) var<storage, read> sines: array<sines_word>;
@group(0) @binding(5) var<storage, read_write> output: array<output_word>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    let element = index * WORKGROUP + thread;
    if index >= params.groups || element >= params.elements {
        return;
    }
    let column = element % params.columns;
    let row_of_all = element / params.columns;
    let row = row_of_all % params.rows;
    let head_of_all = row_of_all / params.rows;
    let head = head_of_all % params.heads;
    let batch = head_of_all / params.heads;
    let from_row = params.input_start + batch * params.input_batch + head * params.input_head
        + row * params.input_row;
    let to_row = params.output_start + batch * params.output_batch + head * params.output_head
        + row * params.output_row;
    if column >= params.rotation.pairs {
        let at = column + params.rotation.pairs;
        store(to_row + at * params.output_column, load_input(from_row + at * params.input_column));
        return;
    }
    var position = params.first + row * params.consecutive;
    if params.has_positions != 0u {
        position += positions[params.positions_start + batch * params.positions_batch + row * params.positions_row];
    }
    let at = pair_columns(column);
    let x = vec2(load_input(from_row + at.x * params.input_column), load_input(from_row + at.y * params.input_column));
    let y = rotated(x, batch, position, column);
    store(to_row + at.x * params.output_column, y.x);
    store(to_row + at.y * params.output_column, y.y);
}
