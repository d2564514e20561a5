// Four rows in a tile of decode.wgsl.

alias Rows = vec4<f32>;

fn all_rows(x: Rows) -> vec4<f32> {
    return x;
}

fn own_rows(x: vec4<f32>) -> Rows {
    return x;
}
