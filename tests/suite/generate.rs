//! The model of the example `generate`: what it must say is known.

#[path = "../../examples/generate/model.rs"]
mod model;

use model::{Model, START, VOCABULARY};

use crate::{field::plain, support::gpu};

/// It repeats sequences of any length, read at once or token by token, on either device.
#[test]
fn the_model_repeats_what_it_has_read() {
    for gpu in [gpu(), plain()] {
        let model = Model::new(gpu, 400).unwrap();
        for (length, chunk) in [(1, 8), (2, 1), (7, 3), (20, 100), (63, 16)] {
            // Steps of 19 through 63 tokens meet each once.
            let sequence: Vec<usize> = (0..length).map(|at| 1 + (at * 19) % (VOCABULARY - 1)).collect();
            let prompt = [&[START], &sequence[..], &sequence[..1]].concat();
            let mut text = model.text(prompt.len() + 2 * length + 1).unwrap();
            let mut next = START;
            for part in prompt.chunks(chunk) {
                next = text.read(part).unwrap();
            }
            for at in 1..2 * length + 1 {
                assert_eq!(
                    next,
                    sequence[at % length],
                    "token {at} of {length}, chunks of {chunk}"
                );
                next = text.read(&[next]).unwrap();
            }
        }
    }
}
