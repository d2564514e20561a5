// What the two kernels of the fused path share: bindings, the call's sizes and strides, and the steps of a softmax over
// scores that are not held all at once. Their params have a `call` and a `rule`; rule.wgsl and sink.wgsl stand beside.

struct Call {
    // The keys to attend to: first_key and the one after the last.
    first_key: u32,
    end_key: u32,
    heads: u32,
    // Query heads that share a key head.
    group_size: u32,
    head_dim: u32,
    value_dim: u32,
    query_start: u32,
    query_batch: u32,
    query_head: u32,
    query_row: u32,
    query_dim: u32,
    key_start: u32,
    key_batch: u32,
    key_head: u32,
    key_row: u32,
    key_dim: u32,
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
    has_lse: u32,
    lse_start: u32,
    lse_batch: u32,
    lse_head: u32,
    // 1 if outputs are left undivided, and top and sum take the place of the log-sum-exp.
    partial_range: u32,
    has_sinks: u32,
    // Of slopes and sinks in `small`; the rule has those of lengths.
    slopes_start: u32,
    sinks_start: u32,
    sinks_stride: u32,
    call_padding: u32,
}

@group(0) @binding(1) var<storage, read> query: array<query_word>;
@group(0) @binding(2) var<storage, read> key: array<key_word>;
@group(0) @binding(3) var<storage, read> value: array<value_word>;
@group(0) @binding(4) var<storage, read> mask: array<u32>;
@group(0) @binding(5) var<storage, read> key_mask: array<u32>;
// Lengths, slopes and sinks in one: WebGPU guarantees eight storage buffers.
@group(0) @binding(6) var<storage, read> small: array<u32>;
@group(0) @binding(7) var<storage, read_write> output: array<output_word>;
@group(0) @binding(8) var<storage, read_write> lse: array<u32>;

const LOWEST_FLOAT: f32 = -3.40282346e38;

fn load_length(i: u32) -> u32 {
    return small[i];
}

fn load_slope(head: u32) -> f32 {
    return bitcast<f32>(small[params.call.slopes_start + head]);
}

fn load_sink(head: u32) -> u32 {
    return small[params.call.sinks_start + head * params.call.sinks_stride];
}

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u;
}

// a + b where a side of the window may be unbounded; positions stay within +-2^30.
fn shifted(p: i32, by: i32) -> i32 {
    return clamp(p, -UNBOUNDED, UNBOUNDED) + by;
}

// The bits of four scores to which nothing but the scale applies.
fn plain_scores(dots: vec4<f32>) -> vec4<u32> {
    let scores = dots * params.rule.scale;
    return bitcast<vec4<u32>>(vec4<f32>(saturated(scores.x), saturated(scores.y), saturated(scores.z),
        saturated(scores.w)));
}

// The higher of a maximum and the scores that are visible.
fn raised(top: vec4<f32>, bits: vec4<u32>) -> vec4<f32> {
    return max(top, select(bitcast<vec4<f32>>(bits), vec4<f32>(LOWEST_FLOAT), bits == vec4<u32>(HIDDEN)));
}

fn exponentials(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(exponential(x.x), exponential(x.y), exponential(x.z), exponential(x.w));
}

// What scores weigh before the division by the sum, `unseen` where the bits are HIDDEN.
fn weights_or(unseen: f32, scores: vec4<f32>, top: vec4<f32>) -> vec4<f32> {
    return select(exponentials(scores - top), vec4<f32>(unseen), bitcast<vec4<u32>>(scores) == vec4<u32>(HIDDEN));
}

// Words of a row in `lse`.
fn lse_words() -> u32 {
    return 1u + params.call.partial_range;
}

// A row's log-sum-exp, or its top and sum.
fn store_sums(at: u32, top: f32, sum: f32) {
    if params.call.partial_range != 0u {
        lse[at] = bitcast<u32>(top);
        lse[at + 1u] = bitcast<u32>(sum);
    } else {
        lse[at] = select(bitcast<u32>(top + log(sum)), HIDDEN, sum == 0.0);
    }
}
