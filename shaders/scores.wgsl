// Masked scores of a chunk of query rows: scores[head, row, key] = rule(scale * q . k), as bits.
//
// A workgroup computes one tile of one head. The rows of the chunk are `rows` rows from `first_row` on of each
// head from `first_head` on; head n of the call is query head n % heads of batch entry n / heads.

const B_ALONG_COLS: bool = false;

struct Params {
    groups: u32,
    grid_width: u32,
    row_tiles: u32,
    col_tiles: u32,
    first_head: u32,
    first_row: u32,
    rows: u32,
    keys: u32,
    heads: u32,
    // Query heads that share a key head.
    group_size: u32,
    head_dim: u32,
    scores_start: u32,
    query_start: u32,
    query_batch: u32,
    query_head: u32,
    query_row: u32,
    query_dim: u32,
    key_start: u32,
    key_batch: u32,
    key_head: u32,
    key_row: u32,
    key_dim: u32,
    padding_a: u32,
    padding_b: u32,
    rule: Rule,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> query: array<query_word>;
@group(0) @binding(2) var<storage, read> key: array<key_word>;
@group(0) @binding(3) var<storage, read> mask: array<u32>;
@group(0) @binding(4) var<storage, read> key_mask: array<u32>;
@group(0) @binding(5) var<storage, read> lengths: array<u32>;
@group(0) @binding(6) var<storage, read> slopes: array<f32>;
@group(0) @binding(7) var<storage, read_write> scores: array<u32>;

fn load_length(i: u32) -> u32 {
    return lengths[i];
}

fn load_slope(h: u32) -> f32 {
    return slopes[h];
}

var<private> head: Head;
var<private> query_base: u32;
var<private> key_base: u32;
var<private> scores_base: u32;
var<private> last_row: u32;
var<private> last_key: u32;
var<private> last_dim: u32;
var<private> query_row: u32;
var<private> query_dim: u32;
var<private> key_row: u32;
var<private> key_dim: u32;

// Rows and keys outside are computed from a clamped place and never stored; only dims outside must count as 0.
fn load_a(row: u32, k: u32) -> f32 {
    let value = load_query(query_base + min(row, last_row) * query_row + min(k, last_dim) * query_dim);
    return select(0.0, value, k <= last_dim);
}

fn load_b(k: u32, col: u32) -> f32 {
    let value = load_key(key_base + min(col, last_key) * key_row + min(k, last_dim) * key_dim);
    return select(0.0, value, k <= last_dim);
}

fn row_place(row: u32) -> u32 {
    return scores_base + row * params.keys;
}

fn col_place(col: u32) -> u32 {
    return col;
}

fn store_cell(row: u32, col: u32, place: u32, value: f32) {
    if row < params.rows && col < params.keys {
        scores[place] = rule_score(head, params.first_row + row, col, value);
    }
}

fn run(group: vec3<u32>, thread: u32, lane: u32) {
    let index = group.y * params.grid_width + group.x;
    if index >= params.groups {
        return;
    }
    let col0 = index % params.col_tiles * TILE_COLS;
    let rest = index / params.col_tiles;
    let row0 = rest % params.row_tiles * TILE_ROWS;
    let chunk_head = rest / params.row_tiles;
    let call_head = params.first_head + chunk_head;
    let batch = call_head / params.heads;
    let h = call_head % params.heads;
    head = rule_head(batch, h);
    query_base = params.query_start + batch * params.query_batch + h * params.query_head
        + params.first_row * params.query_row;
    key_base = params.key_start + batch * params.key_batch + h / params.group_size * params.key_head;
    scores_base = params.scores_start + chunk_head * params.rows * params.keys;
    last_row = params.rows - 1u;
    last_key = params.keys - 1u;
    // Without dims there is nothing to load: inner is 0.
    last_dim = max(params.head_dim, 1u) - 1u;
    query_row = params.query_row;
    query_dim = params.query_dim;
    key_row = params.key_row;
    key_dim = params.key_dim;
    product(row0, col0, params.head_dim, thread, lane);
    store_tile(row0, col0, thread);
}
