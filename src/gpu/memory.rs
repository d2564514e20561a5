//! Memory that the crate holds on a device, and its count.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// What scratch memory is used for. One call uses each slot for one purpose at a time, and commands on
/// one queue run in order, so calls can share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scratch {
    /// Scores, then weights, of a chunk of rows.
    Scores,
    /// Past and new keys joined.
    Keys,
    /// Past and new values joined.
    Values,
    /// Projected queries, keys and values of a layer.
    Projected,
    /// Queries and keys of a layer turned by their positions.
    Rotated,
    /// Lengths, slopes and sinks joined.
    Words,
    /// Attention output of a layer before its output projection.
    Context,
    /// Weights per head of a layer that returns their average.
    Weights,
    /// Outputs of ranges of the keys before they are merged.
    RangeOutputs,
    /// Maxima and sums of ranges of the keys.
    RangeSums,
}

/// Bytes of buffers that the crate holds on a device.
#[derive(Debug, Default)]
pub(crate) struct Held {
    now: AtomicU64,
    peak: AtomicU64,
}

impl Held {
    pub(super) fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    pub(super) fn reset_peak(&self) {
        self.peak.store(self.now(), Ordering::Relaxed);
    }

    pub(super) fn add(self: &Arc<Self>, bytes: u64) -> Allocation {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
        Allocation(Arc::new(Share {
            held: Arc::clone(self),
            bytes,
        }))
    }
}

/// Counts a buffer of the crate for as long as somebody holds a clone.
#[derive(Debug, Clone)]
pub(crate) struct Allocation(Arc<Share>);

impl PartialEq for Allocation {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

#[derive(Debug)]
struct Share {
    held: Arc<Held>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.held.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A buffer of the crate with its count.
#[derive(Debug, Clone)]
pub(crate) struct OwnBuffer {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) allocation: Allocation,
}
