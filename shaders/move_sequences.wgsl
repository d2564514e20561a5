// Moves sequences of a cache onto each other, in place: a thread carries out all moves for one word of every
// sequence, so their order is kept. Words, not elements: rows start on whole words, and so halves need no care.

// Stands for the thread's own register, which breaks cycles.
const HELD: u32 = 0xffffffffu;

struct Params {
    groups: u32,
    grid_width: u32,
    heads: u32,
    // Of each head that are in use.
    words: u32,
    moves: u32,
    sequence_words: u32,
    head_words: u32,
    padding: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// Pairs (from, to).
@group(0) @binding(1) var<storage, read> moves: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let index = group.y * params.grid_width + group.x;
    let element = index * WORKGROUP + thread;
    let head = element / params.words;
    if index >= params.groups || head >= params.heads {
        return;
    }
    let at = head * params.head_words + element % params.words;
    var held = 0u;
    for (var i = 0u; i < params.moves; i++) {
        let from_sequence = moves[2u * i];
        let to_sequence = moves[2u * i + 1u];
        var word = held;
        if from_sequence != HELD {
            word = output[from_sequence * params.sequence_words + at];
        }
        if to_sequence == HELD {
            held = word;
        } else {
            output[to_sequence * params.sequence_words + at] = word;
        }
    }
}
