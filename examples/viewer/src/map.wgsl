// The page, with the weights of one head drawn into it straight from where attention wrote them.

struct View {
    corner: vec2u,
    // Upper left corner of the weight under the pointer, and the size of its characters.
    number: vec2u,
    glyph: vec2u,
    // Query and key under the pointer; from `tokens` on: none.
    hover: vec2u,
    cell: u32,
    tokens: u32,
    // Element at which the head's weights start, and elements of a row.
    first: u32,
    row: u32,
}

@group(0) @binding(0) var<uniform> view: View;
@group(0) @binding(1) var<storage, read> weights: array<f32>;
@group(0) @binding(2) var<storage, read> colours: array<u32, 256>;
@group(0) @binding(3) var page: texture_2d<f32>;
@group(0) @binding(4) var digits: texture_2d<f32>;

fn weight(query: u32, key: u32) -> f32 {
    return clamp(weights[view.first + query * view.row + key], 0.0, 1.0);
}

@vertex
fn vertex(@builtin(vertex_index) index: u32) -> @builtin(position) vec4f {
    return vec4f(f32(index & 1u) * 4.0 - 1.0, f32(index >> 1u) * 4.0 - 1.0, 0.0, 1.0);
}

@fragment
fn fragment(@builtin(position) position: vec4f) -> @location(0) vec4f {
    let pixel = vec2u(position.xy);
    if all(pixel >= view.corner) && all(pixel < view.corner + view.cell * view.tokens) {
        let place = (pixel - view.corner) / view.cell;
        let within = (pixel - view.corner) % view.cell;
        let is_hovered = all(place.yx == view.hover);
        if is_hovered && (any(within < vec2u(2u)) || any(within + 2u >= vec2u(view.cell))) {
            return vec4f(0.0, 0.478, 0.529, 1.0);
        }
        return unpack4x8unorm(colours[u32(weight(place.y, place.x) * 255.0 + 0.5)]);
    }
    let has_number = all(view.hover < vec2u(view.tokens));
    let number = pixel - view.number;
    if has_number && all(pixel >= view.number) && number.x < 5u * view.glyph.x && number.y < view.glyph.y {
        let thousandths = u32(weight(view.hover.x, view.hover.y) * 1000.0 + 0.5);
        var glyphs = array(thousandths / 1000u, 10u, thousandths / 100u % 10u, thousandths / 10u % 10u, thousandths % 10u);
        let glyph = glyphs[number.x / view.glyph.x];
        return textureLoad(digits, vec2u(glyph * view.glyph.x + number.x % view.glyph.x, number.y), 0);
    }
    return textureLoad(page, pixel, 0);
}
