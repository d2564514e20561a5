//! `shaders/move_sequences.wgsl`: sequences of a cache moved onto each other, in place.

use crate::{
    Result, Tensor,
    kernel::{Batch, Binding, Variant, params},
    tuning::ELEMENTWISE_WORKGROUP,
};

params! {
    MoveSequencesParams {
        groups: u32,
        grid_width: u32,
        heads: u32,
        words: u32,
        moves: u32,
        sequence_words: u32,
        head_words: u32,
        padding: u32,
    }
}

/// Stands for a thread's register in a list of moves.
pub(crate) const HELD: u32 = u32::MAX;

pub(crate) fn variant() -> Variant {
    Variant {
        name: "move_sequences",
        pieces: vec![include_str!("../../shaders/move_sequences.wgsl")],
        constants: vec![("WORKGROUP", ELEMENTWISE_WORKGROUP)],
        inputs: Vec::new(),
        output: None,
        subgroups: false,
    }
}

/// Adds the dispatch that carries out `moves`, `[2 n]` of pairs (from, to), on the first `used` rows of each head of the
/// contiguous `cache`, `[B, H, rows, D]`, whose heads start on whole words.
pub(crate) fn push(batch: &mut Batch, what: &str, cache: &Tensor, used: usize, moves: &Tensor) -> Result<()> {
    let gpu = batch.gpu();
    let (binding, _) = Binding::output(gpu, what, cache)?;
    let (list, _) = Binding::tensor(gpu, "moves", moves)?;
    let ([_, heads, rows, size], _) = cache.four_axes();
    let words = |rows: usize| rows * size as usize * cache.dtype().size() / 4;
    // Rows of halves may end within a word; the half behind belongs to the same head and is in use by nobody.
    let used_words = words(used.next_multiple_of(2)).min(words(rows as usize)) as u32;
    let head_words = words(rows as usize) as u32;
    batch.push(
        &variant(),
        |grid| MoveSequencesParams {
            groups: grid.groups,
            grid_width: grid.width,
            heads,
            words: used_words,
            moves: (moves.len() / 2) as u32,
            sequence_words: heads * head_words,
            head_words,
            padding: 0,
        },
        vec![list, binding],
        (u64::from(heads) * u64::from(used_words)).div_ceil(u64::from(ELEMENTWISE_WORKGROUP)),
    )
}

/// An order of moves after which sequence `i` holds what `sources[i]` held before: who reads a sequence comes before who
/// writes it, and a cycle starts by holding one of its sequences.
pub(crate) fn order(sources: &[usize]) -> Vec<u32> {
    let mut readers = vec![0usize; sources.len()];
    let mut pending: Vec<bool> = sources.iter().enumerate().map(|(to, &from)| to != from).collect();
    for (to, &from) in sources.iter().enumerate() {
        readers[from] += usize::from(pending[to]);
    }
    let mut moves = Vec::new();
    let mut push = |from: u32, to: u32| moves.extend([from, to]);
    let mut ready: Vec<usize> = (0..sources.len())
        .filter(|&to| pending[to] && readers[to] == 0)
        .collect();
    while let Some(to) = ready.pop() {
        let from = sources[to];
        push(from as u32, to as u32);
        pending[to] = false;
        readers[from] -= 1;
        if pending[from] && readers[from] == 0 {
            ready.push(from);
        }
    }
    for start in 0..sources.len() {
        if !pending[start] {
            continue;
        }
        push(start as u32, HELD);
        let mut to = start;
        while sources[to] != start {
            push(sources[to] as u32, to as u32);
            pending[to] = false;
            to = sources[to];
        }
        push(HELD, to as u32);
        pending[to] = false;
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the moves make of sequences that hold their own numbers.
    fn moved(sources: &[usize]) -> Vec<usize> {
        let mut sequences: Vec<usize> = (0..sources.len()).collect();
        let mut held = usize::MAX;
        for pair in order(sources).chunks(2) {
            let word = if pair[0] == HELD {
                held
            } else {
                sequences[pair[0] as usize]
            };
            if pair[1] == HELD {
                held = word;
            } else {
                sequences[pair[1] as usize] = word;
            }
        }
        sequences
    }

    #[test]
    fn every_map_of_up_to_five_sequences_is_carried_out() {
        for count in 0..=5usize {
            for number in 0..count.pow(count as u32) {
                let sources: Vec<usize> = (0..count)
                    .map(|digit| number / count.pow(digit as u32) % count)
                    .collect();
                assert_eq!(moved(&sources), sources);
            }
        }
    }

    #[test]
    fn what_stays_is_not_moved() {
        assert!(order(&[0, 1, 2]).is_empty());
        assert_eq!(order(&[0, 0, 2]), [0, 1]);
        assert_eq!(order(&[1, 0]), [0, HELD, 1, 0, HELD, 1]);
    }
}
