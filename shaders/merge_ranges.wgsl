// Puts together what flash.wgsl or decode.wgsl computed of ranges of the keys: each range has, for a row, its outputs before the
// division, and the maximum (top) and sum that they are relative to.
//
//   top = max top_r, factor_r = exp(top_r - top), output = sum_r factor_r output_r / sum_r factor_r sum_r
//
// A range in which a row sees no key has sum 0 and changes nothing; its outputs may hold anything. A sink is one more range, without outputs.

struct Params {
    groups: u32,
    grid_width: u32,
    // Of the heads and rows of this dispatch; their first ones in the call.
    elements: u32,
    first_head: u32,
    first_row: u32,
    rows: u32,
    all_rows: u32,
    ranges: u32,
    heads: u32,
    value_dim: u32,
    // Columns to compute: value_dim, or 1 where there is no value but a log-sum-exp.
    cols: u32,
    output_start: u32,
    output_batch: u32,
    output_head: u32,
    output_row: u32,
    output_dim: u32,
    has_lse: u32,
    lse_start: u32,
    lse_batch: u32,
    lse_head: u32,
    has_sinks: u32,
    sinks_start: u32,
    sinks_stride: u32,
    padding: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// [range][row over all heads][value_dim]
@group(0) @binding(1) var<storage, read> partial_outputs: array<f32>;
// [range][row over all heads][top, sum]
@group(0) @binding(2) var<storage, read> partial_sums: array<f32>;
@group(0) @binding(3) var<storage, read> sinks: array<u32>;
@group(0) @binding(4) var<storage, read_write> output: array<output_word>;
@group(0) @binding(5) var<storage, read_write> lse: array<u32>;

const LOWEST_FLOAT: f32 = -3.40282346e38;
const HIDDEN: u32 = 0xff800000u;

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    let element = index * WORKGROUP + thread;
    if index >= params.groups || element >= params.elements {
        return;
    }
    let dim = element % params.cols;
    let local_row = element / params.cols;
    let call_head = params.first_head + local_row / params.rows;
    let row = params.first_row + local_row % params.rows;
    let batch = call_head / params.heads;
    let h = call_head % params.heads;

    var top = LOWEST_FLOAT;
    for (var r = 0u; r < params.ranges; r++) {
        let at = 2u * (r * params.all_rows + local_row);
        if partial_sums[at + 1u] != 0.0 {
            top = max(top, partial_sums[at]);
        }
    }
    var sink = NO_SINK;
    if params.has_sinks != 0u {
        sink = sinks[params.sinks_start + h * params.sinks_stride];
        top = max(top, sink_top(sink));
    }
    var sum = sink_weight(sink, top);
    var total = 0.0;
    for (var r = 0u; r < params.ranges; r++) {
        let at = r * params.all_rows + local_row;
        let range_sum = partial_sums[2u * at + 1u];
        let factor = select(exponential(partial_sums[2u * at] - top), 0.0, range_sum == 0.0);
        sum = fma(factor, range_sum, sum);
        let loaded = partial_outputs[at * params.value_dim + min(dim, max(params.value_dim, 1u) - 1u)];
        let x = select(loaded, 0.0, range_sum == 0.0);
        // A visible value that is not finite stays what it is however little it weighs.
        total = select(x + total, fma(factor, x, total), is_finite(x));
    }
    if params.value_dim > 0u {
        let at = params.output_start + batch * params.output_batch + h * params.output_head
            + row * params.output_row + dim * params.output_dim;
        store(at, total / select(sum, 1.0, sum == 0.0));
    }
    if params.has_lse != 0u && dim == 0u {
        let at = params.lse_start + batch * params.lse_batch + h * params.lse_head + row;
        lse[at] = select(bitcast<u32>(top + log(sum)), HIDDEN, sum == 0.0);
    }
}
