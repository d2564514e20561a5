// e^x to about one ulp, for x up to 80; below -87 it is 0, which also spares infinite arguments. A NaN passes
// through.
//
// WGSL lets the built-in exp be off by 3 + 2 |x| ulp, and drivers that compute exp2(x * log2(e)) are: 1e-6 of
// the value at x = -30. Here x = k ln 2 + r, and Taylor's series up to r^7 for |r| <= ln(2) / 2. The reduction is
// done in integers of 2^-24: ln 2 is 11629080 of them, less 0.032. In floats, with ln 2 in two parts, drivers are
// free to add the two parts up first, and Mesa does.
fn exponential(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    let inside = select(x, -87.0, is_nan || x < -87.0);
    let k = i32(round(inside * 1.44269504));
    let rest = i32(round(inside * 16777216.0)) - k * 11629080;
    let r = f32(rest) * 5.9604644775390625e-8 + f32(k) * 1.9046495e-9;
    let series = 1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0))));
    let fraction = 1.0 + (r + r * r * (0.5 + r * series));
    let power = bitcast<f32>(u32(k + 127) << 23u);
    return select(select(fraction * power, 0.0, x < -87.0), x, is_nan);
}
