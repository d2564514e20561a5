// Rotates the pairs of a row by the angles of its position, whose cosines and sines are read from tables.

struct Rotation {
    // Pairs that are rotated; the elements behind them are copied.
    pairs: u32,
    // Whether a pair's elements are neighbours, rather than `pairs` apart.
    interleaved: u32,
    // Positions of the tables.
    positions: u32,
    // Between the tables of two sequences; 0 if they share one.
    batch: u32,
    cos_start: u32,
    sin_start: u32,
    padding_0: u32,
    padding_1: u32,
}

// Where the two elements of a pair lie in their row.
fn pair_columns(pair: u32) -> vec2<u32> {
    if params.rotation.interleaved != 0u {
        return vec2(2u * pair, 2u * pair + 1u);
    }
    return vec2(pair, pair + params.rotation.pairs);
}

fn rotated(x: vec2<f32>, batch: u32, position: u32, pair: u32) -> vec2<f32> {
    // Positions of the GPU's own cannot be refused: beyond the tables they count as the last.
    let row = min(position, params.rotation.positions - 1u);
    let at = batch * params.rotation.batch + row * params.rotation.pairs + pair;
    let c = load_cosines(params.rotation.cos_start + at);
    let s = load_sines(params.rotation.sin_start + at);
    return vec2(c * x.x - s * x.y, s * x.x + c * x.y);
}
