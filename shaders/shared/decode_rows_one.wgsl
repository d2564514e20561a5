// One row in a tile of decode.wgsl: the other components of its vec4 are not computed.

alias Rows = f32;

fn all_rows(x: Rows) -> vec4<f32> {
    return vec4<f32>(x);
}

fn own_rows(x: vec4<f32>) -> Rows {
    return x.x;
}
