// Row softmax in place: score bits become weights, and the log-sum-exp is written where it is wanted.
//
//   m = max s_j,  w_j = exp(s_j - m) / sum,  sum = sum_j exp(s_j - m),  lse = m + ln(sum)
//
// over the visible keys and the sink. LANES threads share a row and ROWS rows a workgroup. Each thread sums
// every LANES-th key, then the parts are added pairwise: the error grows with keys / LANES, not with keys.

struct Params {
    groups: u32,
    grid_width: u32,
    // Rows of the chunk over all its heads.
    all_rows: u32,
    keys: u32,
    scores_start: u32,
    first_head: u32,
    first_row: u32,
    // Rows per head of the chunk, and of the call.
    rows: u32,
    queries: u32,
    heads: u32,
    has_lse: u32,
    lse_start: u32,
    has_sinks: u32,
    sinks_start: u32,
    sinks_stride: u32,
    padding: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sinks: array<u32>;
@group(0) @binding(2) var<storage, read_write> scores: array<u32>;
@group(0) @binding(3) var<storage, read_write> lse: array<u32>;

const HIDDEN: u32 = 0xff800000u;
const LOWEST_FLOAT: f32 = -3.40282346e38;

var<workgroup> parts: array<f32, ROWS * LANES>;

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) thread: vec3<u32>) {
    let lane = thread.x;
    let slot = thread.y * LANES + lane;
    let index = group.y * params.grid_width + group.x;
    let row = index * ROWS + thread.y;
    let inside = index < params.groups && row < params.all_rows;
    let base = params.scores_start + row * params.keys;
    let h = (params.first_head + row / params.rows) % params.heads;
    let last = select(0u, params.keys, inside);

    var top = LOWEST_FLOAT;
    for (var j = lane; j < last; j += LANES) {
        let bits = scores[base + j];
        if bits != HIDDEN {
            top = max(top, bitcast<f32>(bits));
        }
    }
    var sink = NO_SINK;
    if params.has_sinks != 0u && inside {
        sink = sinks[params.sinks_start + h * params.sinks_stride];
        top = max(top, sink_top(sink));
    }
    parts[slot] = top;
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            parts[slot] = max(parts[slot], parts[slot + step]);
        }
    }
    workgroupBarrier();
    top = parts[thread.y * LANES];
    workgroupBarrier();

    var sum = 0.0;
    for (var j = lane; j < last; j += LANES) {
        let bits = scores[base + j];
        if bits != HIDDEN {
            sum += exponential(bitcast<f32>(bits) - top);
        }
    }
    parts[slot] = sum;
    for (var step = LANES / 2u; step > 0u; step /= 2u) {
        workgroupBarrier();
        if lane < step {
            parts[slot] += parts[slot + step];
        }
    }
    workgroupBarrier();
    sum = parts[thread.y * LANES];
    sum += sink_weight(sink, top);

    for (var j = lane; j < last; j += LANES) {
        let bits = scores[base + j];
        var result = 0.0;
        if bits != HIDDEN {
            result = exponential(bitcast<f32>(bits) - top) / sum;
        }
        scores[base + j] = bitcast<u32>(result);
    }
    if params.has_lse != 0u && inside && lane == 0u {
        let call_row = (params.first_head + row / params.rows) * params.queries + params.first_row + row % params.rows;
        // A row without a key and without a sink has sum 0; any other's is about 1 or more.
        lse[params.lse_start + call_row] = select(bitcast<u32>(top + log(sum)), HIDDEN, sum == 0.0);
    }
}
