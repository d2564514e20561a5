//! Thousands of calls from several threads on two devices, one of which is lost in the middle.

use std::{process::Command, thread};

use multihead::{
    Attention, AttentionOptions, DType, Error, Gpu, MultiHeadAttention, MultiHeadAttentionConfig,
    MultiHeadInputs, MultiHeadOutputs, NeedWeights, Result, Tensor,
};

use crate::support::{Numbers, watch_log};

const ROUNDS: usize = 10;
/// Of each of the two threads in each round.
const CALLS: usize = 500;
const EMBED: usize = 24;

/// A layer, what it reads and writes, and its answer at the beginning.
struct Caller {
    gpu: Gpu,
    layer: MultiHeadAttention,
    attention: Attention,
    inputs: Vec<Tensor>,
    expected: Vec<Vec<f32>>,
}

impl Caller {
    fn new() -> Self {
        let gpu = Gpu::new().unwrap();
        let config = MultiHeadAttentionConfig::new(EMBED, 3);
        let layer = MultiHeadAttention::seeded(&gpu, config, 1).unwrap();
        let attention = Attention::new(&gpu, AttentionOptions::new()).unwrap();
        let inputs = (1..=5).map(|step| {
            let length = 4 * step - 3;
            let values = Numbers::new(step as u64).normals(length * EMBED);
            Tensor::upload(&gpu, &values, &[1, length, EMBED]).unwrap()
        });
        let mut caller = Self {
            inputs: inputs.collect(),
            gpu: gpu.clone(),
            layer,
            attention,
            expected: Vec::new(),
        };
        caller.expected = (0..caller.inputs.len())
            .map(|at| caller.forward(at).unwrap().download().unwrap())
            .collect();
        // What weights and heads alone need has been built before anything is counted.
        caller.call(0).unwrap();
        caller.gpu.wait().unwrap();
        caller
    }

    fn forward(&self, at: usize) -> Result<Tensor> {
        let x = &self.inputs[at % self.inputs.len()];
        Ok(self
            .layer
            .forward(&MultiHeadInputs::new(x), NeedWeights::No)?
            .output)
    }

    /// One forward call, of every kind in turn; now and then the answer is read.
    fn call(&self, number: usize) -> Result<()> {
        let x = &self.inputs[number % self.inputs.len()];
        match number % 4 {
            0 => {
                self.layer
                    .forward(&MultiHeadInputs::new(x), NeedWeights::Averaged)?;
            }
            1 => {
                let y = Tensor::zeros(&self.gpu, DType::F32, x.shape())?;
                let mut encoder = self.gpu.encoder();
                self.layer
                    .record(&mut encoder, &MultiHeadInputs::new(x), &MultiHeadOutputs::new(&y))?;
                self.gpu.submit(encoder)?;
            }
            2 => {
                let heads = x.split_heads(3)?;
                let inputs = multihead::AttentionInputs::new(&heads, &heads, &heads);
                self.attention.run(&inputs, multihead::Wanted::output().lse())?;
            }
            _ => {
                self.forward(number)?;
            }
        }
        if number % 100 == 99 {
            let at = number % self.inputs.len();
            let answer: Vec<f32> = self.forward(at)?.download()?;
            assert_eq!(answer, self.expected[at], "call {number}");
        }
        Ok(())
    }

    /// What the crate holds, what the driver's memory holds for the device, and what the process holds, in bytes.
    fn memory(&self) -> [u64; 3] {
        self.gpu.wait().unwrap();
        let report = self.gpu.device().generate_allocator_report();
        [
            self.gpu.held_bytes(),
            report.map_or(0, |report| report.total_allocated_bytes),
            resident(),
        ]
    }
}

/// Resident memory of this process; 0 where the system does not tell in a file.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Runs [`soak`] in a process of its own, whose memory nothing else moves.
#[test]
fn ten_thousand_calls_keep_nothing_and_a_lost_device_harms_no_other() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["soak::soak", "--exact", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let [said, failed] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{said}{failed}");
    println!("{said}");
}

#[test]
#[ignore = "its neighbour runs it in a process of its own"]
fn soak() {
    watch_log();
    let (steady, doomed) = (Caller::new(), Caller::new());
    let mut memory = Vec::new();
    for round in 0..ROUNDS {
        let lost = round > ROUNDS / 2;
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..CALLS).for_each(|number| steady.call(number).unwrap()));
            }
            scope.spawn(|| {
                for number in 0..CALLS {
                    // Destroyed while the other device's threads record.
                    if round == ROUNDS / 2 && number == CALLS / 2 {
                        doomed.gpu.device().destroy();
                    }
                    let gone = lost || round == ROUNDS / 2 && number >= CALLS / 2;
                    match doomed.call(number) {
                        Ok(()) if !gone => (),
                        Err(Error::DeviceLost(_)) if gone => (),
                        other => panic!("round {round}, call {number}: {other:?}"),
                    }
                }
            });
        });
        memory.push(steady.memory());
        println!("after {:5} calls: {:?}", 2 * CALLS * (round + 1), memory[round]);
    }

    // Two rounds fill caches and pools. After them what the crate holds stays the same to the byte; what is in flight at a
    // time differs a little, so the driver's and the process's memory may, by far less than a byte and a page per call.
    let calls = (2 * CALLS * (ROUNDS - 2)) as u64;
    let grown = |what: usize| {
        let early = memory[1..4].iter().map(|memory| memory[what]).max().unwrap();
        let late = memory[ROUNDS - 3..]
            .iter()
            .map(|memory| memory[what])
            .min()
            .unwrap();
        late.saturating_sub(early)
    };
    assert_eq!(memory[1][0], memory[ROUNDS - 1][0], "held bytes: {memory:?}");
    assert!(grown(1) < calls, "the device's memory grows: {memory:?}");
    assert!(grown(2) < 512 * calls, "the process grows: {memory:?}");
}
