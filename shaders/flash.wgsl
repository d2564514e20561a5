// Fused attention: softmax(rule(scale * Q K^T)) V in one pass over the keys; no score reaches memory.
//
//   top = max over the keys so far, sum = sum_j exp(s_j - top), output = sum_j exp(s_j - top) v_j
//
// A block of keys with a higher maximum scales what is there by exp(old top - new top); at the end the output is
// divided by the sum. The core beside this text does that for a tile of TILE_ROWS query rows and TILE_DIMS value
// columns of one head; values with more columns are cut into column tiles, each of which computes the scores anew.
//
// The rows are `rows` rows from `first_row` on of each head from `first_head` on; head n of the call is query head
// n % heads of batch entry n / heads. In a packed call, the batch entries are sequences of different lengths laid end to
// end, and rows and keys count from the start of each.
//
// A call whose keys are cut into ranges leaves out the division: it writes outputs, top and sum of its range, and
// merge_ranges.wgsl puts the ranges together.
//
// One running sum over all keys would drift: outputs and sums are added up in blocks of FOLD_KEYS keys.
//
// WGSL promises nothing about infinities, so top starts at the lowest finite float, and a row without a visible
// key is told by its sum of 0. An invisible key's value must not count even if it is NaN, and 0 * NaN is NaN: values
// that are not finite are taken as 0, and only a tile that met one looks for them again (see write_not_finite).

struct Params {
    groups: u32,
    grid_width: u32,
    row_tiles: u32,
    col_tiles: u32,
    first_head: u32,
    first_row: u32,
    rows: u32,
    // 1 if `small` starts with the seams between packed sequences, first those of the queries, then those of the keys.
    is_packed: u32,
    key_seams: u32,
    padding_a: u32,
    padding_b: u32,
    padding_c: u32,
    call: Call,
    rule: Rule,
}

@group(0) @binding(0) var<uniform> params: Params;

// The error of a sum grows with FOLD_KEYS and with the number of blocks, not with the keys.
const FOLD_KEYS: u32 = 512u;

// What a workgroup works on.
struct Tile {
    head: Head,
    // Rows count from the head's row 0, `end_row` is the first one outside.
    row0: u32,
    end_row: u32,
    col0: u32,
    query_base: u32,
    key_base: u32,
    value_base: u32,
    output_base: u32,
    lse_base: u32,
    // Keys that some row may see: [first, last), then [tail, end).
    first: u32,
    last: u32,
    tail: u32,
    end: u32,
}

fn find_tile(index: u32) -> Tile {
    let rest = index / params.col_tiles;
    let call_head = params.first_head + rest / params.row_tiles;
    let batch = call_head / params.call.heads;
    let h = call_head % params.call.heads;
    var tile: Tile;
    tile.head = rule_head(batch, h);
    // First, last, second, last but one ...: in causal order the last tiles have the most keys, and neighbours in the grid,
    // which often share a core, then have as many as any others.
    let turn = rest % params.row_tiles;
    let row_tile = select(turn / 2u, params.row_tiles - 1u - turn / 2u, (turn & 1u) == 1u);
    tile.row0 = params.first_row + row_tile * TILE_ROWS;
    tile.end_row = params.first_row + params.rows;
    tile.col0 = index % params.col_tiles * TILE_DIMS;
    tile.query_base = params.call.query_start + batch * params.call.query_batch + h * params.call.query_head;
    tile.key_base = params.call.key_start + batch * params.call.key_batch + h / params.call.group_size * params.call.key_head;
    tile.value_base = params.call.value_start + batch * params.call.value_batch + h / params.call.group_size * params.call.value_head;
    tile.output_base = params.call.output_start + batch * params.call.output_batch + h * params.call.output_head;
    tile.lse_base = params.call.lse_start + batch * params.call.lse_batch + h * params.call.lse_head;
    if params.is_packed != 0u {
        let first_query = small[batch];
        let queries = small[batch + 1u] - first_query;
        let first_key = small[params.key_seams + batch];
        tile.head.length = small[params.key_seams + batch + 1u] - first_key;
        tile.head.offset = params.rule.offset;
        if params.rule.bottom_right != 0u {
            tile.head.offset += i32(tile.head.length) - i32(queries);
        }
        tile.end_row = min(tile.end_row, queries);
        tile.query_base += first_query * params.call.query_row;
        tile.key_base += first_key * params.call.key_row;
        tile.value_base += first_key * params.call.value_row;
        tile.output_base += first_query * params.call.output_row;
        tile.lse_base += first_query * lse_words();
    }

    // What the window, the length and a short mask hide from all of the tile's rows is not even looked at.
    let maskable = min(params.rule.maskable, params.call.end_key);
    var last = min(tile.head.length, maskable);
    if params.rule.mask_kind != MASK_NONE {
        last = min(last, params.rule.mask_keys);
    }
    var first = params.call.first_key;
    let last_row = min(tile.row0 + TILE_ROWS, tile.end_row) - 1u;
    if params.rule.left < UNBOUNDED {
        first = max(first, u32(max(shifted(i32(tile.row0) + tile.head.offset, -params.rule.left), 0)));
    }
    if params.rule.right < UNBOUNDED {
        last = min(last, u32(max(shifted(i32(last_row) + tile.head.offset, params.rule.right + 1), 0)));
    }
    tile.first = first;
    tile.last = last;
    tile.tail = max(maskable, params.call.first_key);
    tile.end = params.call.end_key;
    return tile;
}

// Keys whose values are looked at in one round: drivers bound the rounds of loops.
const LOOK_KEYS: u32 = 16u;

fn are_four_finite(at: u32, j: u32, last_key: u32) -> bool {
    let first = is_finite(load_value(at + min(j, last_key) * params.call.value_row));
    let second = is_finite(load_value(at + min(j + 1u, last_key) * params.call.value_row));
    let third = is_finite(load_value(at + min(j + 2u, last_key) * params.call.value_row));
    let fourth = is_finite(load_value(at + min(j + 3u, last_key) * params.call.value_row));
    return first & second & third & fourth;
}

fn is_visible(tile: Tile, row: u32, j: u32) -> bool {
    return PLAIN == 1u || rule_score(tile.head, row, j, 0.0) != HIDDEN;
}

// What visible values that are not finite add up to, of keys j to stop and `rows` rows.
fn sum_not_finite(tile: Tile, row: u32, rows: u32, at: u32, j: u32, stop: u32) -> vec4<f32> {
    var sums = vec4<f32>(0.0);
    for (var k = j; k < stop; k++) {
        let loaded = load_value(at + k * params.call.value_row);
        if !is_finite(loaded) {
            for (var r = 0u; r < rows; r++) {
                sums[r] += select(0.0, loaded, is_visible(tile, row + r, k));
            }
        }
    }
    return sums;
}

// Over the outputs of up to four rows: what visible values that are not finite add up to. A finite sum changes nothing
// about it.
fn write_not_finite(tile: Tile, row: u32, rows: u32) {
    for (var dim = tile.col0; dim < min(tile.col0 + TILE_DIMS, params.call.value_dim); dim++) {
        let at = tile.value_base + dim * params.call.value_dim_stride;
        var sums = vec4<f32>(0.0);
        var j = tile.first;
        var stop = tile.last;
        var tail = tile.tail;
        loop {
            if j >= stop {
                j = tail;
                stop = tile.end;
                tail = stop;
            }
            if j >= stop {
                break;
            }
            let low = are_four_finite(at, j, stop - 1u) & are_four_finite(at, j + 4u, stop - 1u);
            let high = are_four_finite(at, j + 8u, stop - 1u) & are_four_finite(at, j + 12u, stop - 1u);
            if !(low & high) {
                sums += sum_not_finite(tile, row, rows, at, j, min(j + LOOK_KEYS, stop));
            }
            j += LOOK_KEYS;
        }
        for (var r = 0u; r < rows; r++) {
            if !is_finite(sums[r]) {
                store_cell(tile, row + r, dim, sums[r]);
            }
        }
    }
}

// The bits of the scores of four rows and one key.
fn masked(head: Head, row: u32, j: u32, inside: bool, dots: vec4<f32>) -> vec4<u32> {
    var bits: vec4<u32>;
    if PLAIN == 1u {
        bits = plain_scores(dots);
    } else {
        bits = vec4<u32>(rule_score(head, row, j, dots.x), rule_score(head, row + 1u, j, dots.y),
            rule_score(head, row + 2u, j, dots.z), rule_score(head, row + 3u, j, dots.w));
    }
    return select(vec4<u32>(HIDDEN), bits, inside);
}

// What scores weigh before the division by the sum; an invisible one has the bits of HIDDEN.
fn weight_of(scores: vec4<f32>, top: vec4<f32>) -> vec4<f32> {
    return weights_or(0.0, scores, top);
}

struct Start {
    top: f32,
    sum: f32,
}

// Maximum and sum before the first key. A sink is a key without a value that every row meets first.
fn first_key_of_all(h: u32) -> Start {
    if params.call.has_sinks != 0u {
        let sink = load_sink(h);
        return Start(sink_top(sink), select(1.0, 0.0, sink == NO_SINK));
    }
    return Start(LOWEST_FLOAT, 0.0);
}

// A row without a key and without a sink has sum 0; any other's is about 1 or more.
fn divided(outputs: vec4<f32>, sum: vec4<f32>) -> vec4<f32> {
    let whole = (sum == vec4<f32>(0.0)) | vec4<bool>(params.call.partial_range != 0u);
    return outputs / select(sum, vec4<f32>(1.0), whole);
}

fn store_cell(tile: Tile, row: u32, dim: u32, x: f32) {
    if row < tile.end_row && dim < params.call.value_dim {
        store(tile.output_base + row * params.call.output_row + dim * params.call.output_dim, x);
    }
}

fn store_four(tile: Tile, row: u32, dim: u32, x: vec4<f32>) {
    store_cell(tile, row, dim, x.x);
    store_cell(tile, row + 1u, dim, x.y);
    store_cell(tile, row + 2u, dim, x.z);
    store_cell(tile, row + 3u, dim, x.w);
}

fn store_row_lse(tile: Tile, row: u32, top: f32, sum: f32) {
    if row < tile.end_row {
        store_sums(tile.lse_base + row * lse_words(), top, sum);
    }
}

// The log-sum-exp of four rows, or their top and sum, written by the first column tile alone.
fn store_lse(tile: Tile, row: u32, top: vec4<f32>, sum: vec4<f32>) {
    if params.call.has_lse != 0u && tile.col0 == 0u {
        store_row_lse(tile, row, top.x, sum.x);
        store_row_lse(tile, row + 1u, top.y, sum.y);
        store_row_lse(tile, row + 2u, top.z, sum.z);
        store_row_lse(tile, row + 3u, top.w, sum.w);
    }
}
