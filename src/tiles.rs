//! What a tile of each kernel is: its sizes, and the constants that its shader wants of them.

use crate::{
    Gpu,
    tuning::{
        Adapter, DECODE, FLASH, FLASH_DIMS, FLASH_VALUE_DIMS, PRODUCTS, SOFTWARE_ITERATIONS, candidates,
        ends_loops,
    },
};

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

impl Tile {
    /// The tiles for a product on this device, best first; `halves` if both operands are stored as f16.
    pub(crate) fn candidates(gpu: &Gpu, halves: bool, inner: usize) -> Vec<Self> {
        candidates(PRODUCTS, gpu, halves, inner)
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

/// A tile of the fused kernel without the sizes that a call's heads decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlashCore {
    /// [`FlashTile::Subgroup`].
    Subgroup { keys: u32, lanes: u32, workgroup: u32 },
    /// [`FlashTile::Workgroup`].
    Workgroup {
        thread_rows: u32,
        thread_cols: u32,
        rows: u32,
        cols: u32,
        depth: u32,
        value_cols: u32,
    },
}

impl FlashCore {
    /// The tile for these head sizes.
    pub(crate) fn sized(self, head_dim: usize, value_dim: usize) -> FlashTile {
        match self {
            Self::Subgroup {
                keys,
                lanes,
                workgroup,
            } => {
                let holds =
                    |sizes: &[u32], size: usize| sizes.iter().copied().find(|&most| most as usize >= size);
                FlashTile::Subgroup {
                    dim: holds(&FLASH_DIMS, head_dim).unwrap_or(0),
                    value_dim: holds(&FLASH_VALUE_DIMS, value_dim).unwrap_or(64),
                    keys,
                    lanes,
                    workgroup,
                }
            }
            Self::Workgroup {
                thread_rows,
                thread_cols,
                rows,
                cols,
                depth,
                value_cols,
            } => FlashTile::Workgroup {
                thread_rows,
                thread_cols,
                rows,
                cols,
                depth,
                value_cols,
            },
        }
    }

    /// Every tile that it can become.
    pub(crate) fn all_sizes(self) -> Vec<FlashTile> {
        let mut all = Vec::new();
        for dim in FLASH_DIMS
            .into_iter()
            .chain([FLASH_DIMS[FLASH_DIMS.len() - 1] + 1])
        {
            for value_dim in FLASH_VALUE_DIMS {
                let tile = self.sized(dim as usize, value_dim as usize);
                if !all.contains(&tile) {
                    all.push(tile);
                }
            }
        }
        all
    }
}

impl FlashTile {
    /// The tiles for these head sizes on this device, best first; `halves` if queries, keys and values are stored as
    /// f16.
    pub(crate) fn candidates(gpu: &Gpu, halves: bool, head_dim: usize, value_dim: usize) -> Vec<Self> {
        candidates(FLASH, gpu, halves, head_dim)
            .into_iter()
            .map(|core| core.sized(head_dim, value_dim))
            .collect()
    }

    /// Every tile that a call on this device can ask for, best core first.
    pub(crate) fn all_candidates(gpu: &Gpu, halves: bool) -> Vec<Self> {
        candidates(FLASH, gpu, halves, 0)
            .into_iter()
            .flat_map(FlashCore::all_sizes)
            .collect()
    }

    /// A head size and a number of value columns that it is built for and does not divide.
    pub(crate) fn awkward_dims(self) -> (usize, usize) {
        match self {
            Self::Subgroup {
                dim: 0, value_dim, ..
            } => (
                FLASH_DIMS[FLASH_DIMS.len() - 1] as usize + 3,
                value_dim as usize - 1,
            ),
            Self::Subgroup { dim, value_dim, .. } => (dim as usize - 3, value_dim as usize - 1),
            Self::Workgroup { .. } => (37, self.value_cols() as usize + 1),
        }
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

/// `LOOK_KEYS` in `shaders/flash.wgsl`.
const LOOK_KEYS: u64 = 16;

/// A variant of the kernel for few queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DecodeTile {
    /// `shaders/shared/decode_private.wgsl`: each thread has whole keys, for software adapters.
    Private {
        /// Rows of a tile: 1 or 4.
        rows: u32,
        /// Largest size of a query, key or value vector.
        size: u32,
        /// Keys of a split at most.
        split: u32,
        /// Threads.
        workgroup: u32,
    },
    /// `shaders/shared/decode_workgroup.wgsl`: queries and weights in workgroup memory.
    Workgroup {
        /// Largest size of a query, key or value vector.
        size: u32,
        /// Keys of a split at most.
        split: u32,
        /// Threads, a power of two.
        workgroup: u32,
    },
}

impl DecodeTile {
    /// The tile for so many rows (queries times heads that share a key head) and these sizes on this device, if there is
    /// one.
    pub(crate) fn of(gpu: &Gpu, rows: usize, head_dim: usize, value_dim: usize) -> Option<Self> {
        let adapter = Adapter::of(gpu);
        DECODE
            .iter()
            .filter(|(of, _)| *of == adapter)
            .map(|(_, tile)| *tile)
            .find(|tile| tile.size() as usize >= head_dim.max(value_dim) && (rows == 1 || tile.rows() == 4))
    }

    /// Every tile that can be chosen on a device.
    pub(crate) fn all(adapter: Adapter) -> impl Iterator<Item = Self> {
        DECODE
            .iter()
            .filter(move |(of, _)| *of == adapter)
            .map(|(_, tile)| *tile)
    }

    /// Rows of a tile that are computed; it always counts as four.
    pub(crate) fn rows(self) -> u32 {
        match self {
            Self::Private { rows, .. } => rows,
            Self::Workgroup { .. } => 4,
        }
    }

    pub(crate) fn size(self) -> u32 {
        match self {
            Self::Private { size, .. } | Self::Workgroup { size, .. } => size,
        }
    }

    /// Keys of a split, for as many keys over all tiles of rows: short enough that every one of `groups` has some.
    pub(crate) fn split_keys(self, keys: usize, groups: usize) -> usize {
        let (Self::Private { split, .. } | Self::Workgroup { split, .. }) = self;
        (keys / groups).next_multiple_of(64).clamp(64, split as usize)
    }

    /// Splits at most, for any number of keys up to `keys` over `tiles` tiles of rows.
    pub(crate) fn most_splits(self, keys: usize, tiles: usize, groups: usize) -> usize {
        let (Self::Private { split, .. } | Self::Workgroup { split, .. }) = self;
        let short = keys.div_ceil(64).min(groups.div_ceil(tiles.max(1)) + 1);
        keys.div_ceil(split as usize).max(short)
    }

    /// The constants that its shader wants.
    pub(crate) fn constants(self) -> Vec<(&'static str, u32)> {
        let (Self::Private {
            size,
            split,
            workgroup,
            ..
        }
        | Self::Workgroup {
            size,
            split,
            workgroup,
        }) = self;
        vec![
            ("ROWS", self.rows()),
            ("SIZE", size),
            ("SPLIT", split),
            ("WORKGROUP", workgroup),
        ]
    }
}
