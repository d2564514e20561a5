
// e^x to about one ulp, for x up to 80; below -87 it is 0, which also spares infinite arguments. A NaN passes
// through.
//
// WGSL lets the built-in exp be off by 3 + 2 |x| ulp, and drivers that compute exp2(x * log2(e)) are: 1e-6 of
// the value at x = -30. Here x = k ln 2 + r, with ln 2 in two parts so that r keeps its digits, and Taylor's
// series up to r^7 for |r| <= ln(2) / 2.
fn exponential(x: f32) -> f32 {
    let inside = select(x, -87.0, x < -87.0);
    let k = round(inside * 1.44269504);
    let r = fma(k, -1.42860677e-6, fma(k, -0.693145752, inside));
    let series = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0))));
    let fraction = 1.0 + (r + r * r * (0.5 + r * series));
    let power = bitcast<f32>(u32(i32(k) + 127) << 23u);
    return select(fraction * power, 0.0, x < -87.0);
}
