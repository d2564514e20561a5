// Attention sinks: a sink is one more key, without a value. One of -inf is none, and one of +inf counts as the largest
// float: WGSL promises nothing about infinities.

const NO_SINK: u32 = 0xff800000u;

// The maximum that a sink alone makes.
fn sink_top(sink: u32) -> f32 {
    let lowest = 0xff7fffffu;
    let largest = 0x7f7fffffu;
    return bitcast<f32>(select(select(sink, largest, sink == 0x7f800000u), lowest, sink == NO_SINK));
}

// What it adds to a sum relative to `top`.
fn sink_weight(sink: u32, top: f32) -> f32 {
    return select(exponential(sink_top(sink) - top), 0.0, sink == NO_SINK);
}
