// The attention rule from the dot product to the masked score. The kernel binds mask and key_mask and
// supplies load_length(i) and load_slope(head); what is absent is a placeholder that no branch here reads.
//
// WGSL promises nothing about infinities, so an invisible key's score travels as the bits of -inf and is told
// by its bits alone; a visible score never has them.

const HIDDEN: u32 = 0xff800000u;

const MASK_NONE: u32 = 0u;
const MASK_KEEP: u32 = 1u;
const MASK_IGNORE: u32 = 2u;
const MASK_F32: u32 = 3u;
const MASK_F16: u32 = 4u;

// A side of the window from here on hides nothing.
const UNBOUNDED: i32 = 0x40000000;

struct Rule {
    queries: u32,
    // Keys that masks, lengths and positions speak of; those from here on are hidden by nothing.
    maskable: u32,
    // Query position: index + offset, plus length - queries if bottom_right is 1.
    offset: i32,
    bottom_right: u32,
    left: i32,
    right: i32,
    scale: f32,
    // 0 means none.
    softcap: f32,
    has_slopes: u32,
    has_lengths: u32,
    lengths_start: u32,
    lengths_stride: u32,
    mask_kind: u32,
    mask_start: u32,
    // Keys that the mask covers; those from here to maskable are hidden.
    mask_keys: u32,
    mask_batch: u32,
    mask_head: u32,
    mask_query: u32,
    mask_key: u32,
    key_mask_kind: u32,
    key_mask_start: u32,
    key_mask_batch: u32,
    key_mask_key: u32,
    rule_padding: u32,
}

// What is the same for all of a head's rows.
struct Head {
    batch: u32,
    head: u32,
    // Keys of this sequence.
    length: u32,
    // Added to a query's index.
    offset: i32,
    slope: f32,
}

fn rule_head(batch: u32, head: u32) -> Head {
    var length = params.rule.maskable;
    if params.rule.has_lengths != 0u {
        length = min(load_length(params.rule.lengths_start + batch * params.rule.lengths_stride), length);
    }
    var offset = params.rule.offset;
    if params.rule.bottom_right != 0u {
        offset += i32(length) - i32(params.rule.queries);
    }
    var slope = 0.0;
    if params.rule.has_slopes != 0u {
        slope = load_slope(head);
    }
    return Head(batch, head, length, offset, slope);
}

fn keeps(byte_index: u32, word: u32, kind: u32) -> bool {
    let byte = (word >> (8u * (byte_index & 3u))) & 0xffu;
    return (byte != 0u) == (kind == MASK_KEEP);
}

// Not the built-in tanh: drivers' lose digits near 0, where most scores lie, and some give inf / inf far out.
// Taylor's series up to x^11 is right to half an ulp below 0.35; in f32 the value is 1 from about 9 on.
fn hyperbolic_tangent(x: f32) -> f32 {
    let size = abs(x);
    if size < 0.35 {
        let z = x * x;
        let series = -1.0 / 3.0
            + z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0 - z * (1382.0 / 155925.0))));
        return x + x * z * series;
    }
    let far = 1.0 - 2.0 / (exponential(2.0 * select(size, 15.0, size > 15.0)) + 1.0);
    return select(far, -far, x < 0.0);
}

// The nearest finite number: an infinity's bits less one are those of the largest or lowest float. NaN stays.
fn saturated(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>(select(bits, bits - 1u, (bits & 0x7fffffffu) == 0x7f800000u));
}

// The bits of the score of query i and key j, HIDDEN if the key is invisible.
fn rule_score(head: Head, i: u32, j: u32, dot: f32) -> u32 {
    var score = dot * params.rule.scale;
    if params.rule.softcap > 0.0 {
        score = params.rule.softcap * hyperbolic_tangent(score / params.rule.softcap);
    }
    var visible = true;
    if j < params.rule.maskable {
        let p = i32(i) + head.offset;
        let distance = i32(j) - p;
        // Two overflows of opposite sign must not meet.
        score = saturated(score) - saturated(head.slope * f32(abs(distance)));
        // On bools, & and | do not branch as && and || do.
        visible = (j < head.length)
            & ((params.rule.left >= UNBOUNDED) | (distance >= -params.rule.left))
            & ((params.rule.right >= UNBOUNDED) | (distance <= params.rule.right));
        if params.rule.key_mask_kind != MASK_NONE {
            let at = params.rule.key_mask_start + head.batch * params.rule.key_mask_batch + j * params.rule.key_mask_key;
            visible = visible & keeps(at, key_mask[at >> 2u], params.rule.key_mask_kind);
        }
        if params.rule.mask_kind != MASK_NONE {
            // An overflow must not meet the mask's opposite infinity.
            score = saturated(score);
            visible = visible & (j < params.rule.mask_keys);
            if params.rule.mask_keys > 0u {
                let at = params.rule.mask_start + head.batch * params.rule.mask_batch + head.head * params.rule.mask_head
                    + i * params.rule.mask_query + min(j, params.rule.mask_keys - 1u) * params.rule.mask_key;
                if params.rule.mask_kind == MASK_F32 {
                    let bits = mask[at];
                    visible = visible & (bits != HIDDEN);
                    score += saturated(bitcast<f32>(bits));
                } else if params.rule.mask_kind == MASK_F16 {
                    let bits = (mask[at >> 1u] >> (16u * (at & 1u))) & 0xffffu;
                    visible = visible & (bits != 0xfc00u);
                    score += saturated(unpack2x16float(bits).x);
                } else {
                    visible = visible & keeps(at, mask[at >> 2u], params.rule.mask_kind);
                }
            }
        }
    }
    return select(HIDDEN, bitcast<u32>(saturated(score)), visible);
}
