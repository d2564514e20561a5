// One tile of a matrix product, A [TILE_ROWS x inner] times B [inner x TILE_COLS],
// without subgroup operations: the workgroup copies DEPTH steps of both into
// workgroup memory, then each thread multiplies its ROWS x COLS part.
//
// Constants the host writes in front:
//   ROWS, COLS    outputs of a thread: 4, 8, 12 or 16 rows, 1 to 4 columns
//   THREAD_ROWS, THREAD_COLS
//                 how the threads of the workgroup share out the tile
//   DEPTH         steps kept in workgroup memory, a multiple of 8; DEPTH * TILE_COLS a multiple of 2 * WORKGROUP
// Workgroup memory: 4 * DEPTH * (TILE_ROWS + TILE_COLS + 5) bytes.
//
// The kernel supplies
//   const B_ALONG_COLS: bool    whether neighbouring columns of B (or, if false,
//                               neighbouring steps) are neighbours in memory
//   fn load_a(row: u32, k: u32) -> f32    0 where k is outside
//   fn load_b(k: u32, col: u32) -> f32    0 where k is outside
//   fn run(group: vec3<u32>, thread: u32, lane: u32)
//     which calls product() and stores `sums`; the entry point is here.
//
// Mesa 22.3's software adapter silently ends every loop of an invocation after 65,535 iterations in all, inner
// loops included: the fewer per step, the longer the sums that it gets right.
//
// The products are written out instead of looped over: wgpu gives every loop a
// counter of its own so that none is endless, and a loop with such a counter is
// not unrolled well.

const WORKGROUP: u32 = THREAD_ROWS * THREAD_COLS;
const ROW_GROUPS: u32 = ROWS / 4u;
const TILE_ROWS: u32 = THREAD_ROWS * ROWS;
const TILE_COLS: u32 = THREAD_COLS * COLS;

// One place more than needed in each step, so that writes which run along the
// steps spread over the banks of the memory.
const STRIDE_A: u32 = THREAD_ROWS * ROW_GROUPS + 1u;
const STRIDE_B: u32 = TILE_COLS + 1u;

// tile_a[k * STRIDE_A + q] holds rows 4 * q .. 4 * q + 3.
var<workgroup> tile_a: array<vec4<f32>, DEPTH * STRIDE_A>;
var<workgroup> tile_b: array<f32, DEPTH * STRIDE_B>;

// sums[c * ROW_GROUPS + g][i] belongs to row first_row(thread) + 4 * g + i of the
// tile and to its column nth_col(thread, c).
var<private> sums: array<vec4<f32>, COLS * ROW_GROUPS>;

fn first_row(thread: u32) -> u32 {
    return thread / THREAD_COLS * ROWS;
}

fn nth_col(thread: u32, c: u32) -> u32 {
    return c * THREAD_COLS + thread % THREAD_COLS;
}

fn copy_a(row0: u32, k0: u32, thread: u32) {
    for (var i = thread; i < DEPTH * THREAD_ROWS * ROW_GROUPS; i += WORKGROUP) {
        let step = i % DEPTH;
        let q = i / DEPTH;
        let row = row0 + 4u * q;
        let k = k0 + step;
        tile_a[step * STRIDE_A + q] =
            vec4<f32>(load_a(row, k), load_a(row + 1u, k), load_a(row + 2u, k), load_a(row + 3u, k));
    }
}

fn copy_cell_b(i: u32, col0: u32, k0: u32) {
    let step = select(i % DEPTH, i / TILE_COLS, B_ALONG_COLS);
    let col = select(i / DEPTH, i % TILE_COLS, B_ALONG_COLS);
    tile_b[step * STRIDE_B + col] = load_b(k0 + step, col0 + col);
}

fn copy_b(col0: u32, k0: u32, thread: u32) {
    for (var i = thread; i < DEPTH * TILE_COLS; i += 2u * WORKGROUP) {
        copy_cell_b(i, col0, k0);
        copy_cell_b(i + WORKGROUP, col0, k0);
    }
}

fn add_to_column(c: u32, at_b: u32, a: array<vec4<f32>, 4>) {
    let b = vec4<f32>(tile_b[at_b + c * THREAD_COLS]);
    let i = c * ROW_GROUPS;
    sums[i] = fma(a[0], b, sums[i]);
    if ROWS > 4u {
        sums[i + 1u] = fma(a[1], b, sums[i + 1u]);
    }
    if ROWS > 8u {
        sums[i + 2u] = fma(a[2], b, sums[i + 2u]);
    }
    if ROWS > 12u {
        sums[i + 3u] = fma(a[3], b, sums[i + 3u]);
    }
}

fn add_step(at_a: u32, at_b: u32) {
    var a: array<vec4<f32>, 4>;
    a[0] = tile_a[at_a];
    if ROWS > 4u {
        a[1] = tile_a[at_a + 1u];
    }
    if ROWS > 8u {
        a[2] = tile_a[at_a + 2u];
    }
    if ROWS > 12u {
        a[3] = tile_a[at_a + 3u];
    }
    add_to_column(0u, at_b, a);
    if COLS > 1u {
        add_to_column(1u, at_b, a);
    }
    if COLS > 2u {
        add_to_column(2u, at_b, a);
    }
    if COLS > 3u {
        add_to_column(3u, at_b, a);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    run(group, thread, 0u);
}

// `row0` and `col0` are the tile's origin and `thread` the index within the
// workgroup. `row0`, `col0` and `inner` have to be the same in the whole
// workgroup. `lane` is not used. The result is left in `sums`.
fn product(row0: u32, col0: u32, inner: u32, thread: u32, lane: u32) {
    let from_a = thread / THREAD_COLS * ROW_GROUPS;
    let from_b = thread % THREAD_COLS;
    for (var k0 = 0u; k0 < inner; k0 += DEPTH) {
        copy_a(row0, k0, thread);
        copy_b(col0, k0, thread);
        workgroupBarrier();
        for (var k = 0u; k < DEPTH; k += 8u) {
            let at_a = from_a + k * STRIDE_A;
            let at_b = from_b + k * STRIDE_B;
            add_step(at_a, at_b);
            add_step(at_a + 1u * STRIDE_A, at_b + 1u * STRIDE_B);
            add_step(at_a + 2u * STRIDE_A, at_b + 2u * STRIDE_B);
            add_step(at_a + 3u * STRIDE_A, at_b + 3u * STRIDE_B);
            add_step(at_a + 4u * STRIDE_A, at_b + 4u * STRIDE_B);
            add_step(at_a + 5u * STRIDE_A, at_b + 5u * STRIDE_B);
            add_step(at_a + 6u * STRIDE_A, at_b + 6u * STRIDE_B);
            add_step(at_a + 7u * STRIDE_A, at_b + 7u * STRIDE_B);
        }
        workgroupBarrier();
    }
}
