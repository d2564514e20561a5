// One tile of a matrix product: A [ROWS x inner] times B [inner x COLS * WORKGROUP].
//
// All threads of a workgroup work on the same ROWS rows of A; each owns COLS
// columns of B, WORKGROUP apart, so that neighbouring threads own neighbouring
// columns. LANES steps of the inner dimension are taken at a time: each lane of
// a subgroup reads one step of every row of A, keeps it in a register, and
// subgroupBroadcast hands it to the others. B is read straight from memory,
// each value once by the one thread which needs it.
//
// Constants the host writes in front:
//   ROWS       4, 8, 12 or 16
//   COLS       1 to 4
//   LANES      4, 8, 16 or 32, at most the smallest subgroup size of the device
//   WORKGROUP  threads of a workgroup (one dimension), a multiple of LANES
// A device may run larger subgroups than LANES: each aligned group of LANES
// lanes then holds the same values, and only the first group is asked for them.
//
// Functions the kernel supplies:
//   fn load_a(row: u32, k: u32) -> f32    0 where k is outside
//   fn load_b(k: u32, col: u32) -> f32    0 where k is outside
//   fn run(group: vec3<u32>, thread: u32, lane: u32)
//     which calls product() and stores `sums`; the entry point is here.
//
// There is no loop but the one over the inner dimension. wgpu gives every loop a
// counter of its own so that none is endless, and a loop with such a counter is
// not unrolled well: this text is much faster written out. Conditions on the
// constants are decided when the pipeline is compiled.

const ROW_GROUPS: u32 = ROWS / 4u;
const TILE_ROWS: u32 = ROWS;
const TILE_COLS: u32 = COLS * WORKGROUP;

// sums[c * ROW_GROUPS + g][i] belongs to row first_row(thread) + 4 * g + i of the
// tile and to its column nth_col(thread, c).
var<private> sums: array<vec4<f32>, COLS * ROW_GROUPS>;

// Step (this lane) of rows 4 * g .. 4 * g + 3.
var<private> chunk_a: array<vec4<f32>, ROW_GROUPS>;
// LANES steps of each of the thread's columns.
var<private> chunk_b: array<f32, COLS * LANES>;

fn read_rows(g: u32, row: u32, k: u32) {
    chunk_a[g] = vec4<f32>(load_a(row, k), load_a(row + 1u, k), load_a(row + 2u, k), load_a(row + 3u, k));
}

fn read_four_steps(at: u32, k: u32, col: u32) {
    chunk_b[at] = load_b(k, col);
    chunk_b[at + 1u] = load_b(k + 1u, col);
    chunk_b[at + 2u] = load_b(k + 2u, col);
    chunk_b[at + 3u] = load_b(k + 3u, col);
}

// All steps of one column before the next column: they share a cache line where
// B lies transposed, and the lines of different columns may evict each other.
fn read_column(c: u32, k: u32, col: u32) {
    let at = c * LANES;
    read_four_steps(at, k, col);
    if LANES > 4u {
        read_four_steps(at + 4u, k + 4u, col);
    }
    if LANES > 8u {
        read_four_steps(at + 8u, k + 8u, col);
        read_four_steps(at + 12u, k + 12u, col);
    }
    if LANES > 16u {
        read_four_steps(at + 16u, k + 16u, col);
        read_four_steps(at + 20u, k + 20u, col);
        read_four_steps(at + 24u, k + 24u, col);
        read_four_steps(at + 28u, k + 28u, col);
    }
}

fn add_to_column(c: u32, g: u32, lane: u32, a: vec4<f32>) {
    let i = c * ROW_GROUPS + g;
    sums[i] = fma(a, vec4<f32>(chunk_b[c * LANES + lane]), sums[i]);
}

fn add_products(g: u32, lane: u32, a: vec4<f32>) {
    add_to_column(0u, g, lane, a);
    if COLS > 1u {
        add_to_column(1u, g, lane, a);
    }
    if COLS > 2u {
        add_to_column(2u, g, lane, a);
    }
    if COLS > 3u {
        add_to_column(3u, g, lane, a);
    }
}

// The lane of a broadcast has to be a constant, hence a line for each.
fn add_step_0_to_3(g: u32) {
    let a = chunk_a[g];
    add_products(g, 0u, subgroupBroadcast(a, 0u));
    add_products(g, 1u, subgroupBroadcast(a, 1u));
    add_products(g, 2u, subgroupBroadcast(a, 2u));
    add_products(g, 3u, subgroupBroadcast(a, 3u));
}

fn add_step_4_to_7(g: u32) {
    let a = chunk_a[g];
    add_products(g, 4u, subgroupBroadcast(a, 4u));
    add_products(g, 5u, subgroupBroadcast(a, 5u));
    add_products(g, 6u, subgroupBroadcast(a, 6u));
    add_products(g, 7u, subgroupBroadcast(a, 7u));
}

fn add_step_8_to_15(g: u32) {
    let a = chunk_a[g];
    add_products(g, 8u, subgroupBroadcast(a, 8u));
    add_products(g, 9u, subgroupBroadcast(a, 9u));
    add_products(g, 10u, subgroupBroadcast(a, 10u));
    add_products(g, 11u, subgroupBroadcast(a, 11u));
    add_products(g, 12u, subgroupBroadcast(a, 12u));
    add_products(g, 13u, subgroupBroadcast(a, 13u));
    add_products(g, 14u, subgroupBroadcast(a, 14u));
    add_products(g, 15u, subgroupBroadcast(a, 15u));
}

fn add_step_16_to_31(g: u32) {
    let a = chunk_a[g];
    add_products(g, 16u, subgroupBroadcast(a, 16u));
    add_products(g, 17u, subgroupBroadcast(a, 17u));
    add_products(g, 18u, subgroupBroadcast(a, 18u));
    add_products(g, 19u, subgroupBroadcast(a, 19u));
    add_products(g, 20u, subgroupBroadcast(a, 20u));
    add_products(g, 21u, subgroupBroadcast(a, 21u));
    add_products(g, 22u, subgroupBroadcast(a, 22u));
    add_products(g, 23u, subgroupBroadcast(a, 23u));
    add_products(g, 24u, subgroupBroadcast(a, 24u));
    add_products(g, 25u, subgroupBroadcast(a, 25u));
    add_products(g, 26u, subgroupBroadcast(a, 26u));
    add_products(g, 27u, subgroupBroadcast(a, 27u));
    add_products(g, 28u, subgroupBroadcast(a, 28u));
    add_products(g, 29u, subgroupBroadcast(a, 29u));
    add_products(g, 30u, subgroupBroadcast(a, 30u));
    add_products(g, 31u, subgroupBroadcast(a, 31u));
}

fn add_chunk_of_rows(g: u32) {
    add_step_0_to_3(g);
    if LANES > 4u {
        add_step_4_to_7(g);
    }
    if LANES > 8u {
        add_step_8_to_15(g);
    }
    if LANES > 16u {
        add_step_16_to_31(g);
    }
}

fn first_row(thread: u32) -> u32 {
    return 0u;
}

fn nth_col(thread: u32, c: u32) -> u32 {
    return c * WORKGROUP + thread;
}

@compute @workgroup_size(WORKGROUP)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    run(group, thread, lane);
}

// `row0` and `col0` are the tile's origin, `thread` the index within the
// workgroup and `lane` the index within the subgroup. `row0`, `col0` and `inner`
// have to be the same in the whole workgroup. The result is left in `sums`.
fn product(row0: u32, col0: u32, inner: u32, thread: u32, lane: u32) {
    let step = lane % LANES;
    let col = col0 + thread;
    for (var k = 0u; k < inner; k += LANES) {
        read_rows(0u, row0, k + step);
        if ROWS > 4u {
            read_rows(1u, row0 + 4u, k + step);
        }
        if ROWS > 8u {
            read_rows(2u, row0 + 8u, k + step);
        }
        if ROWS > 12u {
            read_rows(3u, row0 + 12u, k + step);
        }
        read_column(0u, k, col);
        if COLS > 1u {
            read_column(1u, k, col + WORKGROUP);
        }
        if COLS > 2u {
            read_column(2u, k, col + 2u * WORKGROUP);
        }
        if COLS > 3u {
            read_column(3u, k, col + 3u * WORKGROUP);
        }
        add_chunk_of_rows(0u);
        if ROWS > 4u {
            add_chunk_of_rows(1u);
        }
        if ROWS > 8u {
            add_chunk_of_rows(2u);
        }
        if ROWS > 12u {
            add_chunk_of_rows(3u);
        }
    }
}
