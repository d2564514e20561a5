// Writes new rows behind those that a cache holds: the last `ends - starts` rows of each sequence of [B, H, L, D], the
// row of position p into slot p % capacity, rotated on the way if there are tables. One thread a pair, or an element
// behind the pairs.

struct Params {
    groups: u32,
    grid_width: u32,
    elements: u32,
    heads: u32,
    rows: u32,
    // Pairs and elements behind them.
    columns: u32,
    capacity: u32,
    input_start: u32,
    input_batch: u32,
    input_head: u32,
    input_row: u32,
    input_column: u32,
    output_batch: u32,
    output_head: u32,
    output_row: u32,
    padding: u32,
    rotation: Rotation,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<input_word>;
@group(0) @binding(2) var<storage, read> starts: array<u32>;
@group(0) @binding(3) var<storage, read> ends: array<u32>;
@group(0) @binding(4) var<storage, read> cosines: array<cosines_word>;
@group(0) @binding(5) var<storage, read> sines: array<sines_word>;
@group(0) @binding(6) var<storage, read_write> output: array<output_word>;

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
    let end = ends[batch];
    if row + (end - starts[batch]) < params.rows {
        return;
    }
    let position = end + row - params.rows;
    let from_row = params.input_start + batch * params.input_batch + head * params.input_head
        + row * params.input_row;
    let to_row = batch * params.output_batch + head * params.output_head
        + position % params.capacity * params.output_row;
    if column >= params.rotation.pairs {
        let at = column + params.rotation.pairs;
        store(to_row + at, load_input(from_row + at * params.input_column));
        return;
    }
    let at = pair_columns(column);
    let x = vec2(load_input(from_row + at.x * params.input_column), load_input(from_row + at.y * params.input_column));
    let y = rotated(x, batch, position, column);
    store(to_row + at.x, y.x);
    store(to_row + at.y, y.y);
}
