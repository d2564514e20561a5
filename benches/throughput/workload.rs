//! What is measured, and the work that counts.

use multihead::{AttentionPath, Causal, DType};

/// Heads of an attention call, and the size of one.
pub(crate) const HEADS: usize = 8;
pub(crate) const HEAD_DIM: usize = 64;

/// A call to measure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Workload {
    /// Self-attention of a whole layer, `[batch, length, embed]`.
    Layer {
        batch: usize,
        length: usize,
        embed: usize,
        heads: usize,
    },
    /// `y = x W^T + b`.
    Projection {
        rows: usize,
        outputs: usize,
        inputs: usize,
    },
    /// Attention alone, eight heads of 64.
    Attention { path: AttentionPath, call: Call },
}

/// Sizes of an attention call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Call {
    pub(crate) batch: usize,
    pub(crate) queries: usize,
    pub(crate) keys: usize,
    pub(crate) causal: Causal,
    /// Keys before a query's own that it sees.
    pub(crate) window: Option<u32>,
    pub(crate) dtype: DType,
}

impl Call {
    pub(crate) const fn new(queries: usize, keys: usize) -> Self {
        Self {
            batch: 1,
            queries,
            keys,
            causal: Causal::None,
            window: None,
            dtype: DType::F32,
        }
    }

    /// Pairs of query and key that the work model counts.
    fn pairs(self) -> f64 {
        let all = (self.queries * self.keys) as f64;
        match (self.window, self.causal) {
            (Some(left), _) => self.queries as f64 * (f64::from(left) + 1.0).min(self.keys as f64),
            (None, Causal::None) => all,
            (None, _) => 0.5 * all,
        }
    }

    /// What distinguishes it besides its length.
    fn kind(self) -> String {
        let mut kind = String::new();
        if self.dtype == DType::F16 {
            kind += " f16";
        }
        if self.causal != Causal::None {
            kind += " causal";
        }
        if let Some(left) = self.window {
            kind += &format!(" window {}", left + 1);
        }
        kind
    }
}

/// Lengths of prefill and of the keys of a decoding step.
pub(crate) const LENGTHS: [usize; 8] = [512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536];

impl Workload {
    pub(crate) fn name(&self) -> String {
        match *self {
            Self::Layer {
                batch,
                length,
                embed,
                heads,
            } => format!("layer B{batch} L{length} E{embed} H{heads}"),
            Self::Projection {
                rows,
                outputs,
                inputs,
            } => format!("projection {rows}x{outputs}x{inputs}"),
            Self::Attention { path, call } => {
                let lengths = if call.queries == call.keys {
                    format!("L{}", call.keys)
                } else {
                    format!("Lq{} Lk{}", call.queries, call.keys)
                };
                format!(
                    "{} B{} H{HEADS} {lengths} D{HEAD_DIM}{}",
                    path_name(path),
                    call.batch,
                    call.kind()
                )
            }
        }
    }

    /// The line of the chart that it belongs to, and its place there.
    pub(crate) fn series(&self) -> Option<(String, usize)> {
        let Self::Attention { path, call } = self else {
            return None;
        };
        let kind = call.kind();
        if call.queries == call.keys {
            Some((format!("{}{kind}", path_name(*path)), call.keys))
        } else if call.queries == 1 && *path == AttentionPath::Auto {
            Some((format!("decode B{}{kind}", call.batch), call.keys))
        } else {
            None
        }
    }

    /// Floating-point operations: attention `4 B H Lq Lk D` (half of it if causal), projection `2 M N K`, a layer both.
    pub(crate) fn flops(&self) -> f64 {
        match *self {
            Self::Layer {
                batch, length, embed, ..
            } => {
                8.0 * (batch * length * embed * embed) as f64 + 4.0 * (batch * length * length * embed) as f64
            }
            Self::Projection {
                rows,
                outputs,
                inputs,
            } => 2.0 * (rows * outputs * inputs) as f64,
            Self::Attention { call, .. } => 4.0 * (call.batch * HEADS * HEAD_DIM) as f64 * call.pairs(),
        }
    }

    /// Bytes that have to move once: inputs, weights and outputs.
    pub(crate) fn bytes(&self) -> f64 {
        match *self {
            Self::Layer {
                batch, length, embed, ..
            } => 4.0 * (2 * batch * length * embed + 4 * embed * (embed + 1)) as f64,
            Self::Projection {
                rows,
                outputs,
                inputs,
            } => 4.0 * (rows * inputs + outputs * (inputs + 1) + rows * outputs) as f64,
            Self::Attention { call, .. } => {
                let size = if call.dtype == DType::F16 { 2.0 } else { 4.0 };
                size * (2 * call.batch * HEADS * HEAD_DIM * (call.queries + call.keys)) as f64
            }
        }
    }
}

fn path_name(path: AttentionPath) -> &'static str {
    match path {
        AttentionPath::Fused => "fused",
        AttentionPath::Composed => "composed",
        // What chooses by itself serves the decoding steps here.
        _ => "decode",
    }
}

/// Everything that there is to measure, in the order of the table.
pub(crate) fn all() -> Vec<Workload> {
    let layer = |batch, length, embed, heads| Workload::Layer {
        batch,
        length,
        embed,
        heads,
    };
    let mut workloads = vec![
        layer(1, 128, 512, 8),
        layer(1, 512, 512, 8),
        layer(1, 2048, 512, 8),
        layer(4, 512, 768, 12),
        projection(2048, 512, 512),
        projection(2048, 2048, 2048),
    ];
    workloads.extend(prefill(&LENGTHS));
    let windowed = Call {
        window: Some(255),
        ..Call::new(16_384, 16_384)
    };
    workloads.push(Workload::Attention {
        path: AttentionPath::Fused,
        call: windowed,
    });
    workloads.push(Workload::Attention {
        path: AttentionPath::Composed,
        call: Call::new(1, 4096),
    });
    workloads.extend(decode(&LENGTHS));
    workloads
}

/// One small workload of each kind.
pub(crate) fn quick() -> Vec<Workload> {
    let layer = Workload::Layer {
        batch: 2,
        length: 64,
        embed: 64,
        heads: 4,
    };
    let mut workloads = vec![layer, projection(64, 64, 64)];
    workloads.extend(prefill(&[64, 128]));
    workloads.extend(decode(&[128, 256]));
    workloads
}

fn projection(rows: usize, outputs: usize, inputs: usize) -> Workload {
    Workload::Projection {
        rows,
        outputs,
        inputs,
    }
}

/// As many queries as keys.
fn prefill(lengths: &[usize]) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for path in [AttentionPath::Fused, AttentionPath::Composed] {
        for dtype in [DType::F32, DType::F16] {
            for causal in [Causal::None, Causal::TopLeft] {
                workloads.extend(lengths.iter().map(|&length| {
                    let call = Call {
                        causal,
                        dtype,
                        ..Call::new(length, length)
                    };
                    Workload::Attention { path, call }
                }));
            }
        }
    }
    workloads
}

/// One query of each sequence.
fn decode(lengths: &[usize]) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for dtype in [DType::F32, DType::F16] {
        for batch in [1, 16] {
            workloads.extend(lengths.iter().map(|&keys| {
                let call = Call {
                    batch,
                    dtype,
                    ..Call::new(1, keys)
                };
                Workload::Attention {
                    path: AttentionPath::Auto,
                    call,
                }
            }));
        }
    }
    workloads
}
