//! Generates text token by token on the GPU, with a model whose right answer is known: it reads a random sequence and its
//! first token again, and goes on repeating the sequence.
//!
//! ```text
//! cargo run --release --example generate -- --length 30 --tokens 200
//! ```

mod model;

use clap::Parser;
use model::{Model, START};
use multihead::Gpu;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

/// Generates text token by token from a key/value cache on the GPU, and checks it.
///
/// Exits with 0 if every token is the right one, with 1 if one is not, with 2 if nothing could be run.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Tokens of the sequence that the prompt holds
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u16).range(1..=62))]
    length: u16,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    tokens: u32,
    /// Which sequence
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// How tokens are printed; the first one starts a text.
const LETTERS: &[u8] = b"^ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            // Nobody is left to tell if the error stream is closed too.
            let _ = writeln!(io::stderr(), "generate: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> multihead::Result<ExitCode> {
    let sequence = shuffled(arguments.seed, usize::from(arguments.length));
    let prompt: Vec<usize> = [START]
        .into_iter()
        .chain(sequence.iter().copied())
        .chain([sequence[0]])
        .collect();
    let tokens = arguments.tokens as usize;

    let gpu = Gpu::new()?;
    let _ = writeln!(io::stderr(), "{}", gpu.description());
    let positions = prompt.len() + tokens;
    let model = Model::new(&gpu, positions)?;
    // Pipelines are built by the first calls of each kind; they belong to no measurement.
    let mut warm = model.text(positions)?;
    for part in [&prompt[..], &prompt[..1]] {
        warm.read(part)?;
    }

    let mut text = model.text(positions)?;
    say(&format!("prompt        {}", letters(&prompt)));
    let start = Instant::now();
    let mut generated = vec![text.read(&prompt)?];
    let read = start.elapsed();
    while generated.len() < tokens {
        let last = generated[generated.len() - 1];
        generated.push(text.read(&[last])?);
    }
    let steps = start.elapsed() - read;
    say(&format!("continuation  {}", letters(&generated)));
    let mut told = format!(
        "prompt of {} tokens in {:.1} ms",
        prompt.len(),
        read.as_secs_f64() * 1e3
    );
    if tokens > 1 {
        let rate = (tokens - 1) as f64 / steps.as_secs_f64().max(1e-9);
        told += &format!(", then {} tokens, {rate:.0} a second", tokens - 1);
    }
    say(&told);

    let expected = sequence.iter().cycle().skip(1);
    let wrong = generated
        .iter()
        .zip(expected)
        .position(|(got, expected)| got != expected);
    Ok(match wrong {
        None => {
            say("right: each token is the one that followed before");
            ExitCode::SUCCESS
        }
        Some(at) => {
            say(&format!("wrong from token {} of the continuation on", at + 1));
            ExitCode::FAILURE
        }
    })
}

/// The first `length` tokens of a random order of all but the start.
fn shuffled(seed: u64, length: usize) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut tokens: Vec<usize> = (1..LETTERS.len()).collect();
    for at in 0..length {
        let from = at + random.next_u64() as usize % (tokens.len() - at);
        tokens.swap(at, from);
    }
    tokens.truncate(length);
    tokens
}

fn letters(tokens: &[usize]) -> String {
    tokens
        .iter()
        .map(|&token| LETTERS.get(token).map_or('?', |&letter| letter.into()))
        .collect()
}

/// Prints a line; whether anybody reads it does not matter to the check.
fn say(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}
