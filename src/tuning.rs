//! The table of tile sizes and variants per kind of adapter, and nothing else.

use crate::Gpu;

/// A tile of the matrix product that `linear`, `scores` and `weighted_sum` share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tile {
    /// `shaders/shared/product_subgroup.wgsl`: A is held in registers across `lanes` lanes and handed round by
    /// subgroup broadcasts, B is read straight from memory. For adapters where a load from workgroup memory
    /// costs as much as one from a buffer: software ones.
    Subgroup {
        /// Rows of the tile.
        rows: u32,
        /// Columns per thread.
        cols: u32,
        /// At most the smallest subgroup size of the device.
        lanes: u32,
        /// Threads, a multiple of `lanes`.
        workgroup: u32,
    },
    /// `shaders/shared/product_workgroup.wgsl`: both operands go through workgroup memory.
    Workgroup {
        /// Rows per thread.
        rows: u32,
        /// Columns per thread.
        cols: u32,
        /// Threads along the rows.
        thread_rows: u32,
        /// Threads along the columns.
        thread_cols: u32,
        /// Steps of the inner dimension in workgroup memory at a time.
        depth: u32,
    },
}

/// Which product a tile is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Product {
    Linear,
    Scores,
    WeightedSum,
}

impl Tile {
    /// The tile for a product on this device.
    pub(crate) fn of(gpu: &Gpu, product: Product) -> Self {
        let software = gpu.info().device_type == wgpu::DeviceType::Cpu;
        let subgroups =
            gpu.features().contains(wgpu::Features::SUBGROUP) && gpu.info().subgroup_min_size >= 4;
        match (software, subgroups) {
            (true, true) => Self::software(product, gpu.info().subgroup_min_size),
            (true, false) => Self::SOFTWARE_WORKGROUP,
            (false, _) => Self::GPU,
        }
    }

    /// Measured on Mesa lavapipe 25.0 (AVX2, 8 lanes): 12 by 2 sums are as many as its registers hold, and 16 by 4
    /// run at less than half the speed. The subgroup's smallest size caps the lanes.
    fn software(_product: Product, subgroup_min_size: u32) -> Self {
        let lanes = if subgroup_min_size >= 8 { 8 } else { 4 };
        Self::Subgroup {
            rows: 12,
            cols: 2,
            lanes,
            workgroup: 16,
        }
    }

    /// Software adapters without subgroups: the most sums per thread whose pipeline still builds in a second.
    const SOFTWARE_WORKGROUP: Self = Self::Workgroup {
        rows: 8,
        cols: 4,
        thread_rows: 8,
        thread_cols: 8,
        depth: 32,
    };

    /// 64 by 64 outputs from 8.4 KiB of workgroup memory and 256 threads: inside the limits that WebGPU
    /// guarantees.
    const GPU: Self = Self::Workgroup {
        rows: 4,
        cols: 4,
        thread_rows: 16,
        thread_cols: 16,
        depth: 16,
    };

    /// Every tile that can be chosen, for tests.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let product = Product::Linear;
        vec![
            Self::software(product, 4),
            Self::software(product, 8),
            Self::SOFTWARE_WORKGROUP,
            Self::GPU,
        ]
    }

    /// Rows of the tile.
    pub(crate) fn rows(self) -> u32 {
        match self {
            Self::Subgroup { rows, .. } => rows,
            Self::Workgroup {
                rows, thread_rows, ..
            } => rows * thread_rows,
        }
    }

    /// Columns of the tile.
    pub(crate) fn cols(self) -> u32 {
        match self {
            Self::Subgroup { cols, workgroup, .. } => cols * workgroup,
            Self::Workgroup {
                cols, thread_cols, ..
            } => cols * thread_cols,
        }
    }

    /// The constants that its shader wants.
    pub(crate) fn constants(self) -> Vec<(&'static str, u32)> {
        match self {
            Self::Subgroup {
                rows,
                cols,
                lanes,
                workgroup,
            } => {
                vec![
                    ("ROWS", rows),
                    ("COLS", cols),
                    ("LANES", lanes),
                    ("WORKGROUP", workgroup),
                ]
            }
            Self::Workgroup {
                rows,
                cols,
                thread_rows,
                thread_cols,
                depth,
            } => vec![
                ("ROWS", rows),
                ("COLS", cols),
                ("THREAD_ROWS", thread_rows),
                ("THREAD_COLS", thread_cols),
                ("DEPTH", depth),
            ],
        }
    }
}

/// A tile of the fused kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlashTile {
    /// `shaders/shared/flash_subgroup.wgsl`, for adapters where a load from workgroup memory costs as much as one
    /// from a buffer: software ones.
    Subgroup {
        /// Head size up to which queries stay in registers; 0 reads them again for each block of keys.
        dim: u32,
        /// Columns of V of a workgroup.
        value_dim: u32,
        /// Keys of a block.
        keys: u32,
        /// At most the smallest subgroup size of the device.
        lanes: u32,
        /// Threads, a multiple of `lanes`.
        workgroup: u32,
    },
    /// `shaders/shared/flash_workgroup.wgsl`: tiles go through workgroup memory.
    Workgroup {
        /// Threads along the rows.
        thread_rows: u32,
        /// Threads along the keys and the columns of V.
        thread_cols: u32,
        /// Rows of a thread.
        rows: u32,
        /// Keys of a thread.
        cols: u32,
        /// Steps of a product in workgroup memory at a time.
        depth: u32,
        /// Columns of V of a thread.
        value_cols: u32,
    },
}

impl FlashTile {
    /// The tile for these head sizes on this device.
    pub(crate) fn of(gpu: &Gpu, head_dim: usize, value_dim: usize) -> Self {
        let software = gpu.info().device_type == wgpu::DeviceType::Cpu;
        let smallest = gpu.info().subgroup_min_size;
        let subgroups = gpu.features().contains(wgpu::Features::SUBGROUP) && smallest >= 4;
        match (software, subgroups) {
            (true, true) => Self::software(smallest, head_dim, value_dim),
            (true, false) => Self::SOFTWARE_WORKGROUP,
            (false, _) => Self::GPU,
        }
    }

    /// Measured on Mesa lavapipe 25.0: twice the keys are no faster and build longer. The build time grows with
    /// `value_dim`, which is why wider values are cut into columns.
    fn software(subgroup_min_size: u32, head_dim: usize, value_dim: usize) -> Self {
        let lanes = if subgroup_min_size >= 8 { 8 } else { 4 };
        let dim = match head_dim {
            0..=64 => 64,
            65..=128 => 128,
            129..=256 => 256,
            _ => 0,
        };
        let value_dim = match value_dim {
            0..=16 => 16,
            17..=128 => value_dim.next_multiple_of(32) as u32,
            _ => 64,
        };
        Self::Subgroup {
            dim,
            value_dim,
            keys: 8,
            lanes,
            workgroup: 8,
        }
    }

    /// Software adapters without subgroups: larger tiles are a third faster and build four times as long.
    const SOFTWARE_WORKGROUP: Self = Self::Workgroup {
        thread_rows: 8,
        thread_cols: 8,
        rows: 4,
        cols: 4,
        depth: 8,
        value_cols: 8,
    };

    /// 64 rows, 32 keys and 64 columns in 14.9 KiB of workgroup memory.
    const GPU: Self = Self::Workgroup {
        thread_rows: 16,
        thread_cols: 16,
        rows: 4,
        cols: 2,
        depth: 8,
        value_cols: 4,
    };

    /// Every tile that can be chosen, for tests.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let mut all = vec![Self::SOFTWARE_WORKGROUP, Self::GPU];
        for subgroup_min_size in [4, 8] {
            for head_dim in [64, 128, 256, 257] {
                for value_dim in (16..=144).step_by(16) {
                    all.push(Self::software(subgroup_min_size, head_dim, value_dim));
                }
            }
        }
        all
    }

    /// Keys that one dispatch may go through on a device whose driver ends long loops, a multiple of 512; `None` where
    /// it does not. Loop rounds of one invocation count, those of inner loops and of the search for values that are
    /// not finite among them.
    pub(crate) fn most_keys(self, gpu: &Gpu, head_dim: usize) -> Option<usize> {
        if !ends_loops(gpu) {
            return None;
        }
        let head_dim = head_dim as u64;
        // Rounds once, and for every 512 keys: those are folded into the totals.
        let (once, each) = match self {
            Self::Subgroup {
                keys: block,
                lanes,
                value_dim,
                ..
            } => {
                let (block, value_dim) = (u64::from(block), u64::from(value_dim));
                let dims = head_dim.div_ceil(u64::from(lanes));
                let look = value_dim * (512 / LOOK_KEYS);
                (
                    dims + 4 * value_dim,
                    512 / block * (1 + dims + 2 * block) + value_dim + look,
                )
            }
            Self::Workgroup {
                thread_cols,
                cols,
                depth,
                rows,
                value_cols,
                ..
            } => {
                let block = u64::from(thread_cols * cols);
                let depth = u64::from(depth);
                let copies = u64::from(rows + cols + value_cols);
                let rounds = head_dim.div_ceil(depth) * (1 + depth / 4 + copies)
                    + (block / depth) * (1 + depth / 4 + copies)
                    + u64::from(rows) * (u64::from(cols) + u64::from(thread_cols));
                let columns = u64::from(thread_cols * value_cols);
                (
                    4 * columns,
                    512 / block * (1 + rounds) + columns * (512 / LOOK_KEYS),
                )
            }
        };
        let folds = SOFTWARE_ITERATIONS.saturating_sub(once) / each;
        Some(folds.max(1) as usize * 512)
    }

    /// Keys of a block.
    pub(crate) fn keys(self) -> u32 {
        match self {
            Self::Subgroup { keys, .. } => keys,
            Self::Workgroup {
                thread_cols, cols, ..
            } => thread_cols * cols,
        }
    }

    /// Query rows of the tile.
    pub(crate) fn rows(self) -> u32 {
        match self {
            Self::Subgroup { workgroup, .. } => 4 * workgroup,
            Self::Workgroup {
                thread_rows, rows, ..
            } => thread_rows * rows,
        }
    }

    /// Columns of V of the tile.
    pub(crate) fn value_cols(self) -> u32 {
        match self {
            Self::Subgroup { value_dim, .. } => value_dim,
            Self::Workgroup {
                thread_cols,
                value_cols,
                ..
            } => thread_cols * value_cols,
        }
    }

    /// The constants that its shader wants.
    pub(crate) fn constants(self) -> Vec<(&'static str, u32)> {
        match self {
            Self::Subgroup {
                dim,
                value_dim,
                keys,
                lanes,
                workgroup,
            } => vec![
                ("DIM", dim),
                ("VALUE_DIM", value_dim),
                ("KEYS", keys),
                ("LANES", lanes),
                ("WORKGROUP", workgroup),
            ],
            Self::Workgroup {
                thread_rows,
                thread_cols,
                rows,
                cols,
                depth,
                value_cols,
            } => vec![
                ("THREAD_ROWS", thread_rows),
                ("THREAD_COLS", thread_cols),
                ("ROWS", rows),
                ("COLS", cols),
                ("DEPTH", depth),
                ("VALUE_COLS", value_cols),
            ],
        }
    }
}

/// Loop rounds of one invocation that software adapters surely run: Mesa's ends every loop after 65,535 rounds, inner
/// loops counted in.
pub(crate) const SOFTWARE_ITERATIONS: u64 = 60_000;

/// `LOOK_KEYS` in `shaders/flash.wgsl`.
const LOOK_KEYS: u64 = 16;

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
    match Tile::of(gpu, Product::WeightedSum) {
        Tile::Subgroup { .. } => Some(400_000),
        Tile::Workgroup { .. } => Some(80_000),
    }
}

/// Queries from which the fused kernel is worth it: its tile has 32 rows or more, the composed path's 12 or more.
pub(crate) const FUSED_QUERIES: usize = 16;

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

/// Multiply-adds of a dispatch: a tenth of a second or less on a slow device of each kind.
pub(crate) fn dispatch_work(kind: wgpu::DeviceType) -> u64 {
    match kind {
        wgpu::DeviceType::DiscreteGpu | wgpu::DeviceType::VirtualGpu => 1 << 36,
        _ => 1 << 33,
    }
}
