//! The table of tile sizes and variants per kind of adapter, and nothing else.
//!
//! A row says for which devices and calls it is meant; the first one that fits is taken, the next one if that fails its
//! self-check. `cargo xtask tune` times the candidates on the present adapter and prints the row to put here. Every
//! tile keeps within 256 invocations and 16 KiB of workgroup memory, which WebGPU guarantees.

use crate::{
    Gpu,
    tiles::{DecodeTile, FlashCore, Tile},
};

/// Kinds of adapters that rows distinguish; virtual and unknown ones count as discrete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Adapter {
    Software,
    Integrated,
    Discrete,
}

impl Adapter {
    pub(crate) fn of(gpu: &Gpu) -> Self {
        match gpu.info().device_type {
            wgpu::DeviceType::Cpu => Self::Software,
            wgpu::DeviceType::IntegratedGpu => Self::Integrated,
            _ => Self::Discrete,
        }
    }
}

/// Element types that rows distinguish: what queries, keys and values, or both operands, are stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Elements {
    Any,
    F32,
    F16,
}

/// A row of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row<T> {
    pub(crate) adapter: Adapter,
    pub(crate) elements: Elements,
    /// Largest head size, or inner dimension, that it is meant for.
    pub(crate) head_dim: usize,
    /// Smallest subgroup size that the device must guarantee; 0: needs no subgroups.
    pub(crate) subgroup: u32,
    pub(crate) tile: T,
}

/// Smallest subgroup size of a device; 0 if it has no subgroups.
pub(crate) fn smallest_subgroup(gpu: &Gpu) -> u32 {
    if gpu.features().contains(wgpu::Features::SUBGROUP) {
        gpu.info().subgroup_min_size
    } else {
        0
    }
}

/// The tiles of a table's rows that fit, best first.
pub(crate) fn candidates<T: Copy>(table: &[Row<T>], gpu: &Gpu, halves: bool, head_dim: usize) -> Vec<T> {
    let (adapter, subgroup) = (Adapter::of(gpu), smallest_subgroup(gpu));
    let elements = if halves { Elements::F16 } else { Elements::F32 };
    table
        .iter()
        .filter(|row| {
            row.adapter == adapter
                && (row.elements == Elements::Any || row.elements == elements)
                && row.head_dim >= head_dim
                && row.subgroup <= subgroup
        })
        .map(|row| row.tile)
        .collect()
}

const ANY_SIZE: usize = usize::MAX;

/// Tiles of matrix products.
///
/// Software, with subgroups: measured on Mesa lavapipe 25.0 (AVX2, 8 lanes), 12 by 2 sums are as many as its registers
/// hold, and 16 by 4 run at less than half the speed. Without: the most sums per thread whose pipeline still builds in
/// a second. GPUs: 64 by 64 outputs from 8.4 KiB and 256 threads, not tuned on any yet.
pub(crate) const PRODUCTS: &[Row<Tile>] = &[
    Row {
        adapter: Adapter::Software,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 8,
        tile: Tile::Subgroup {
            rows: 12,
            cols: 2,
            lanes: 8,
            workgroup: 16,
        },
    },
    Row {
        adapter: Adapter::Software,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 4,
        tile: Tile::Subgroup {
            rows: 12,
            cols: 2,
            lanes: 4,
            workgroup: 16,
        },
    },
    Row {
        adapter: Adapter::Software,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 0,
        tile: Tile::Workgroup {
            rows: 8,
            cols: 4,
            thread_rows: 8,
            thread_cols: 8,
            depth: 32,
        },
    },
    Row {
        adapter: Adapter::Integrated,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 0,
        tile: Tile::Workgroup {
            rows: 4,
            cols: 4,
            thread_rows: 16,
            thread_cols: 16,
            depth: 16,
        },
    },
    Row {
        adapter: Adapter::Discrete,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 0,
        tile: Tile::Workgroup {
            rows: 4,
            cols: 4,
            thread_rows: 16,
            thread_cols: 16,
            depth: 16,
        },
    },
];

/// Tiles of the fused kernel.
///
/// Software, with subgroups: measured on Mesa lavapipe 25.0, twice the keys are no faster and build longer. Without:
/// larger tiles are a third faster and build four times as long. GPUs: 64 rows, 32 keys and 64 columns in 14.9 KiB of
/// workgroup memory, not tuned on any yet.
pub(crate) const FLASH: &[Row<FlashCore>] = &[
    Row {
        adapter: Adapter::Software,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 8,
        tile: FlashCore::Subgroup {
            keys: 8,
            lanes: 8,
            workgroup: 8,
        },
    },
    Row {
        adapter: Adapter::Software,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 4,
        tile: FlashCore::Subgroup {
            keys: 8,
            lanes: 4,
            workgroup: 8,
        },
    },
    Row {
        adapter: Adapter::Software,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 0,
        tile: FlashCore::Workgroup {
            thread_rows: 8,
            thread_cols: 8,
            rows: 4,
            cols: 4,
            depth: 8,
            value_cols: 8,
        },
    },
    Row {
        adapter: Adapter::Integrated,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 0,
        tile: FlashCore::Workgroup {
            thread_rows: 16,
            thread_cols: 16,
            rows: 4,
            cols: 2,
            depth: 8,
            value_cols: 4,
        },
    },
    Row {
        adapter: Adapter::Discrete,
        elements: Elements::Any,
        head_dim: ANY_SIZE,
        subgroup: 0,
        tile: FlashCore::Workgroup {
            thread_rows: 16,
            thread_cols: 16,
            rows: 4,
            cols: 2,
            depth: 8,
            value_cols: 4,
        },
    },
];

/// Head sizes that the fused kernel's subgroup core is built for; larger ones are read again for each block of keys.
pub(crate) const FLASH_DIMS: [u32; 3] = [64, 128, 256];

/// Value columns that it is built for: its build time grows with them. Wider values are cut into columns of 64.
pub(crate) const FLASH_VALUE_DIMS: [u32; 4] = [16, 32, 64, 128];

/// Loop rounds of one invocation that software adapters surely run: Mesa's ends every loop after 65,535 rounds, inner
/// loops counted in.
pub(crate) const SOFTWARE_ITERATIONS: u64 = 60_000;

/// Whether the driver ends an invocation's loops after [`SOFTWARE_ITERATIONS`] rounds and some: Mesa 22.3 does, 25.0
/// does not.
pub(crate) fn ends_loops(gpu: &Gpu) -> bool {
    let info = gpu.info();
    let mesa = info
        .driver_info
        .strip_prefix("Mesa ")
        .and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
    info.device_type == wgpu::DeviceType::Cpu && mesa.is_none_or(|major| major < 25)
}

/// Keys up to which the composed path is right on a driver that ends long loops; `None` on others.
pub(crate) fn composed_keys(gpu: &Gpu) -> Option<usize> {
    if !ends_loops(gpu) {
        return None;
    }
    Some(if smallest_subgroup(gpu) >= 4 {
        400_000
    } else {
        80_000
    })
}

/// Whether a call's keys are rather split over workgroups than its rows. On a CPU a tile of four rows of the kernel for few
/// queries takes about four sevenths of the time of a tile of the fused one, which has rows of one head alone; on a GPU
/// so few rows would leave most of it idle.
pub(crate) fn decode_pays(gpu: &Gpu, group: usize, queries: usize) -> bool {
    match Adapter::of(gpu) {
        Adapter::Software => 4 * (group * queries).div_ceil(4) <= 7 * group,
        _ => queries <= 16,
    }
}

/// Tiles of the kernel for few queries, by kind of adapter and the largest size of a vector; no row, no such kernel.
/// Software: sizes are written out, so that the build time grows with them.
pub(crate) const DECODE: &[(Adapter, DecodeTile)] = &[
    (Adapter::Software, private(1, 32)),
    (Adapter::Software, private(4, 32)),
    (Adapter::Software, private(1, 64)),
    (Adapter::Software, private(4, 64)),
    (Adapter::Software, private(1, 128)),
    (Adapter::Software, private(4, 128)),
    (Adapter::Software, private(1, 256)),
    (Adapter::Software, private(4, 256)),
    (Adapter::Integrated, DECODE_GPU),
    (Adapter::Discrete, DECODE_GPU),
];

const fn private(rows: u32, size: u32) -> DecodeTile {
    DecodeTile::Private {
        rows,
        size,
        split: 512,
        workgroup: 8,
    }
}

/// Not tuned on any GPU yet.
const DECODE_GPU: DecodeTile = DecodeTile::Workgroup {
    size: 256,
    split: 512,
    workgroup: 64,
};

/// Workgroups that a device wants at least before splits get longer.
pub(crate) fn decode_groups(gpu: &Gpu) -> usize {
    match Adapter::of(gpu) {
        Adapter::Software => 16,
        Adapter::Integrated => 128,
        Adapter::Discrete => 512,
    }
}

/// Threads of the kernels that treat each element by itself.
pub(crate) const ELEMENTWISE_WORKGROUP: u32 = 64;

/// Threads that share a softmax row, and rows of a workgroup, for rows of `keys`: enough threads to load a long
/// row side by side, not so many that most of them idle on a short one.
pub(crate) fn softmax_threads(keys: usize) -> (u32, u32) {
    match keys {
        0..=64 => SOFTMAX_THREADS[0],
        65..=1024 => SOFTMAX_THREADS[1],
        _ => SOFTMAX_THREADS[2],
    }
}

/// Every pair that [`softmax_threads`] can choose.
pub(crate) const SOFTMAX_THREADS: [(u32, u32); 3] = [(8, 8), (32, 2), (128, 1)];

/// Bytes of scores that the composed path computes at a time when nobody asks for the weights. Small enough to
/// stay in a large cache, large enough to fill the device.
pub(crate) const SCORES_CHUNK: u64 = 16 << 20;

/// Bytes of outputs of ranges of keys that wait for their merge.
pub(crate) const RANGES_CHUNK: u64 = 64 << 20;

/// Multiply-adds of a dispatch: a tenth of a second or less on a slow GPU of each kind, about a second on a CPU.
pub(crate) fn dispatch_work(kind: wgpu::DeviceType) -> u64 {
    match kind {
        wgpu::DeviceType::DiscreteGpu | wgpu::DeviceType::VirtualGpu => 1 << 36,
        _ => 1 << 33,
    }
}
