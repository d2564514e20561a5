// The weights of one head, drawn straight from where attention wrote them. The viewport is the map's place on the page.

struct View {
    // Upper left corner of the map and side of a cell, in pixels.
    corner: vec2u,
    cell: u32,
    // Tokens of the sentence: cells of a row.
    tokens: u32,
    // Element at which the head's weights start, and elements of a row.
    first: u32,
    row: u32,
}

@group(0) @binding(0) var<uniform> view: View;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read> colours: array<u32, 256>;

@vertex
fn vertex(@builtin(vertex_index) index: u32) -> @builtin(position) vec4f {
    return vec4f(f32(index & 1u) * 4.0 - 1.0, f32(index >> 1u) * 4.0 - 1.0, 0.0, 1.0);
}

@fragment
fn fragment(@builtin(position) position: vec4f) -> @location(0) vec4f {
    let place = min((vec2u(position.xy) - view.corner) / view.cell, vec2u(view.tokens - 1u));
    let weight = clamp(weights[view.first + place.y * view.row + place.x], 0.0, 1.0);
    return unpack4x8unorm(colours[u32(weight * 255.0 + 0.5)]);
}
