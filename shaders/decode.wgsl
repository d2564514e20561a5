// Attention of a few queries to many keys: the keys are split over workgroups, and the query heads that share a key head
// are rows of one tile, so that its keys and values are loaded once for them.
//
//   top = max_j s_j, sum = sum_j exp(s_j - top), output = sum_j exp(s_j - top) v_j
//
// A tile has four rows, the components of a vec4: row r is query r % queries of head r / queries among those that share
// the key head. Over several splits, outputs stay undivided, with top and sum beside them, and merge_ranges.wgsl puts
// them together. A split has at most SPLIT keys, whose scores are held, so that the maximum is known before the first
// exponential. The core beside this text does that.
//
// An invisible key's value must not count even if it is NaN, and 0 * NaN is NaN: values that are not finite are taken as
// 0, and only who met one looks for them again. A held weight is -1 if its key is invisible.

struct Params {
    groups: u32,
    grid_width: u32,
    row_tiles: u32,
    splits: u32,
    split_keys: u32,
    kv_heads: u32,
    // First key head, counted over the whole batch.
    first_head: u32,
    output_split: u32,
    lse_split: u32,
    padding_a: u32,
    padding_b: u32,
    padding_c: u32,
    call: Call,
    rule: Rule,
}

@group(0) @binding(0) var<uniform> params: Params;

const UNSEEN: f32 = -1.0;

// What a workgroup works on.
struct Tile {
    batch: u32,
    kv_head: u32,
    split: u32,
    row0: u32,
    rows: u32,
    // Keys of this split that some row may see.
    first: u32,
    end: u32,
    key_base: u32,
    value_base: u32,
    // Of the first row's head.
    head: Head,
}

// Head and query of a row; those behind the last are the last.
fn row_head(tile: Tile, c: u32) -> u32 {
    return tile.kv_head * params.call.group_size + min(tile.row0 + c, tile.rows - 1u) / params.rule.queries;
}

fn row_query(tile: Tile, c: u32) -> u32 {
    return min(tile.row0 + c, tile.rows - 1u) % params.rule.queries;
}

fn find_tile(index: u32) -> Tile {
    var tile: Tile;
    tile.split = index % params.splits;
    let rest = index / params.splits;
    tile.row0 = rest % params.row_tiles * 4u;
    let call_head = params.first_head + rest / params.row_tiles;
    tile.batch = call_head / params.kv_heads;
    tile.kv_head = call_head % params.kv_heads;
    tile.rows = params.call.group_size * params.rule.queries;
    tile.key_base = params.call.key_start + tile.batch * params.call.key_batch + tile.kv_head * params.call.key_head;
    tile.value_base = params.call.value_start + tile.batch * params.call.value_batch + tile.kv_head * params.call.value_head;
    tile.head = rule_head(tile.batch, row_head(tile, 0u));

    let start = params.call.first_key + tile.split * params.split_keys;
    let stop = min(start + params.split_keys, params.call.end_key);
    var last = min(tile.head.length, params.rule.maskable);
    if params.rule.mask_kind != MASK_NONE {
        last = min(last, params.rule.mask_keys);
    }
    var first = 0u;
    if params.rule.left < UNBOUNDED {
        first = u32(max(shifted(tile.head.offset, -params.rule.left), 0));
    }
    if params.rule.right < UNBOUNDED {
        let last_query = i32(params.rule.queries) - 1 + tile.head.offset;
        last = min(last, u32(max(shifted(last_query, params.rule.right + 1), 0)));
    }
    if stop > params.rule.maskable {
        // Some are hidden by nothing.
        tile.first = select(start, min(params.rule.maskable, stop), first >= last);
        tile.end = stop;
    } else {
        tile.first = max(start, first);
        tile.end = min(stop, last);
    }
    tile.first = max(tile.first, start);
    return tile;
}

fn row_score(tile: Tile, c: u32, j: u32, dot: f32) -> u32 {
    var head = tile.head;
    head.head = row_head(tile, c);
    if params.rule.has_slopes != 0u {
        head.slope = load_slope(head.head);
    }
    return rule_score(head, row_query(tile, c), j, dot);
}

// The bits of the scores of the tile's rows and one key.
fn masked(tile: Tile, j: u32, inside: bool, dots: vec4<f32>) -> vec4<u32> {
    var bits: vec4<u32>;
    if PLAIN == 1u {
        bits = plain_scores(dots);
    } else {
        bits = vec4<u32>(row_score(tile, 0u, j, dots.x), row_score(tile, 1u, j, dots.y),
            row_score(tile, 2u, j, dots.z), row_score(tile, 3u, j, dots.w));
    }
    // Keys between a sequence's length and those that are always visible do not exist.
    let exists = inside & ((j < tile.head.length) | (j >= params.rule.maskable));
    return select(vec4<u32>(HIDDEN), bits, exists);
}

// What a score weighs, UNSEEN if its key is invisible.
fn weight_of(scores: vec4<f32>, top: vec4<f32>) -> vec4<f32> {
    return weights_or(UNSEEN, scores, top);
}

// A held weight as it counts in sums; NaN stays.
fn counted(held: vec4<f32>) -> vec4<f32> {
    return select(held, vec4<f32>(0.0), held < vec4<f32>(0.0));
}

// A value that is not finite, for the rows that see its key.
fn surfaced(held: vec4<f32>, x: f32) -> vec4<f32> {
    return select(vec4<f32>(x), vec4<f32>(0.0), held < vec4<f32>(0.0));
}

fn query_place(tile: Tile, c: u32) -> u32 {
    return params.call.query_start + tile.batch * params.call.query_batch + row_head(tile, c) * params.call.query_head
        + row_query(tile, c) * params.call.query_row;
}

// A dim of the tile's queries.
fn load_queries(places: vec4<u32>, dim: u32) -> vec4<f32> {
    let offset = dim * params.call.query_dim;
    return vec4<f32>(load_query(places.x + offset), load_query(places.y + offset),
        load_query(places.z + offset), load_query(places.w + offset));
}

fn query_places(tile: Tile) -> vec4<u32> {
    return vec4<u32>(query_place(tile, 0u), query_place(tile, 1u), query_place(tile, 2u), query_place(tile, 3u));
}

struct Sums {
    top: vec4<f32>,
    sum: vec4<f32>,
}

// With the sinks, if they belong to this dispatch: keys without a value.
fn with_sinks(tile: Tile, sums: Sums) -> Sums {
    if params.call.has_sinks == 0u {
        return sums;
    }
    let sinks = vec4<u32>(load_sink(row_head(tile, 0u)), load_sink(row_head(tile, 1u)),
        load_sink(row_head(tile, 2u)), load_sink(row_head(tile, 3u)));
    let tops = vec4<f32>(sink_top(sinks.x), sink_top(sinks.y), sink_top(sinks.z), sink_top(sinks.w));
    let top = max(sums.top, tops);
    let weights = vec4<f32>(sink_weight(sinks.x, top.x), sink_weight(sinks.y, top.y), sink_weight(sinks.z, top.z),
        sink_weight(sinks.w, top.w));
    return Sums(top, sums.sum * exponentials(sums.top - top) + weights);
}

// What outputs relative to `top` are multiplied by before they are stored. A row without a key has sum 0.
fn output_factor(top: vec4<f32>, sums: Sums) -> vec4<f32> {
    let whole = (sums.sum == vec4<f32>(0.0)) | vec4<bool>(params.call.partial_range != 0u);
    return select(exponentials(top - sums.top) / sums.sum, vec4<f32>(1.0), whole);
}

fn store_cell(tile: Tile, c: u32, dim: u32, x: f32) {
    if tile.row0 + c < tile.rows && dim < params.call.value_dim {
        store(params.call.output_start + tile.split * params.output_split + tile.batch * params.call.output_batch
            + row_head(tile, c) * params.call.output_head + row_query(tile, c) * params.call.output_row + dim * params.call.output_dim, x);
    }
}

fn store_four(tile: Tile, dim: u32, x: vec4<f32>) {
    store_cell(tile, 0u, dim, x.x);
    store_cell(tile, 1u, dim, x.y);
    store_cell(tile, 2u, dim, x.z);
    store_cell(tile, 3u, dim, x.w);
}

fn store_row_lse(tile: Tile, c: u32, top: f32, sum: f32) {
    if tile.row0 + c < tile.rows {
        store_sums(params.call.lse_start + tile.split * params.lse_split + tile.batch * params.call.lse_batch
            + row_head(tile, c) * params.call.lse_head + row_query(tile, c) * lse_words(), top, sum);
    }
}

// The log-sum-exps, or tops and sums.
fn store_lse(tile: Tile, sums: Sums) {
    if params.call.has_lse != 0u {
        store_row_lse(tile, 0u, sums.top.x, sums.sum.x);
        store_row_lse(tile, 1u, sums.top.y, sums.sum.y);
        store_row_lse(tile, 2u, sums.top.z, sums.sum.z);
        store_row_lse(tile, 3u, sums.top.w, sums.sum.w);
    }
}
