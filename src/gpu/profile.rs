//! How long kernels take, by the device's own clock.

use std::{collections::HashMap, fmt, time::Duration};

use super::lock;
use crate::{DType, Error, Gpu, Result, Tensor, gpu::OwnBuffer};

/// Dispatches that one query set can time: each takes two of its queries.
pub(crate) const MOST_TIMED: usize = wgpu::QUERY_SET_MAX_QUERIES as usize / 2;

/// What a kernel took between [`Gpu::start_profile`] and [`Gpu::finish_profile`].
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, KernelTime, Linear, Tensor, wgpu};
///
/// if gpu.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
///     let linear = Linear::new(Tensor::zeros(&gpu, DType::F32, &[4, 4])?, None)?;
///     gpu.start_profile()?;
///     linear.run(&Tensor::zeros(&gpu, DType::F32, &[2, 4])?)?;
///     for KernelTime { kernel, dispatches, total, longest, .. } in gpu.finish_profile()?.kernels {
///         assert!(longest <= total);
///         println!("{kernel}: {:?} on average", total / dispatches as u32);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KernelTime {
    /// The variant: kernel, element types and tile sizes, as in [`Choice::variant`](crate::Choice).
    pub kernel: String,
    /// Its dispatches.
    pub dispatches: u64,
    /// All of them together.
    pub total: Duration,
    /// The longest one.
    pub longest: Duration,
}

/// What each kernel took, the most expensive first. Its `Display` is a small table.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// # let gpu = multihead::Gpu::new()?;
/// use multihead::{DType, Linear, Tensor, wgpu};
///
/// if gpu.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
///     let linear = Linear::new(Tensor::zeros(&gpu, DType::F32, &[4, 4])?, None)?;
///     gpu.start_profile()?;
///     linear.run(&Tensor::zeros(&gpu, DType::F32, &[2, 4])?)?;
///     let profile = gpu.finish_profile()?;
///     assert_eq!(profile.total(), profile.kernels.iter().map(|kernel| kernel.total).sum());
///     println!("{profile}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Profile {
    /// One entry per variant.
    pub kernels: Vec<KernelTime>,
}

impl Profile {
    /// The sum over all kernels.
    pub fn total(&self) -> Duration {
        self.kernels.iter().map(|kernel| kernel.total).sum()
    }

    fn new(dispatches: impl Iterator<Item = (String, Duration)>) -> Self {
        let mut by_kernel: HashMap<String, KernelTime> = HashMap::new();
        for (kernel, time) in dispatches {
            let entry = by_kernel.entry(kernel.clone()).or_insert(KernelTime {
                kernel,
                dispatches: 0,
                total: Duration::ZERO,
                longest: Duration::ZERO,
            });
            entry.dispatches += 1;
            entry.total += time;
            entry.longest = entry.longest.max(time);
        }
        let mut kernels: Vec<KernelTime> = by_kernel.into_values().collect();
        kernels.sort_by(|a, b| b.total.cmp(&a.total).then_with(|| a.kernel.cmp(&b.kernel)));
        Self { kernels }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        writeln!(f, "  total ms  longest ms  dispatches  kernel")?;
        for kernel in &self.kernels {
            writeln!(
                f,
                "{:10.3}  {:10.3}  {:10}  {}",
                ms(kernel.total),
                ms(kernel.longest),
                kernel.dispatches,
                kernel.kernel
            )?;
        }
        write!(f, "{:10.3}  all", ms(self.total()))
    }
}

/// Dispatches whose times the device writes.
#[derive(Debug)]
pub(crate) struct Timed {
    pub(crate) kernels: Vec<String>,
    pub(crate) queries: wgpu::QuerySet,
    /// Beginning and end of each, as the device's ticks.
    pub(crate) ticks: OwnBuffer,
}

impl Gpu {
    /// From now on times each kernel that calls on this device record, until [`Gpu::finish_profile`]. Each dispatch then
    /// has a compute pass of its own, which costs a little; nothing else changes. Calls of all clones count.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor, wgpu};
    ///
    /// let gpu = Gpu::new()?;
    /// if gpu.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
    ///     let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(64, 4), 42)?;
    ///     let x = Tensor::zeros(&gpu, DType::F32, &[1, 20, 64])?;
    ///     gpu.start_profile()?;
    ///     layer.forward(&MultiHeadInputs::new(&x), NeedWeights::PerHead)?;
    ///     let profile = gpu.finish_profile()?;
    ///     assert!(profile.kernels.iter().any(|time| time.kernel.contains("softmax")));
    ///     println!("{profile}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the device was opened without `TIMESTAMP_QUERY`, which [`Gpu::useful_features`] has where
    /// the adapter has it, or if a profile is being made already.
    pub fn start_profile(&self) -> Result<()> {
        if !self.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return Err(Error::Option(
                "profiling: this device was opened without TIMESTAMP_QUERY, ask for Gpu::useful_features"
                    .to_owned(),
            ));
        }
        let mut profile = lock(&self.inner.profile);
        if profile.is_some() {
            return Err(Error::Option(
                "profiling: a profile is being made already, call Gpu::finish_profile first".to_owned(),
            ));
        }
        *profile = Some(Vec::new());
        Ok(())
    }

    /// Waits for everything that was submitted and tells what the kernels took since [`Gpu::start_profile`]; nothing is
    /// timed any more. Calls whose encoder was not submitted are left out, and so are dispatches whose clock the device
    /// did not read.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if no profile was started; [`Error::DeviceLost`].
    pub fn finish_profile(&self) -> Result<Profile> {
        let Some(batches) = lock(&self.inner.profile).take() else {
            return Err(Error::Option(
                "profiling: no profile was started, call Gpu::start_profile before the calls".to_owned(),
            ));
        };
        let tick = f64::from(self.queue().get_timestamp_period());
        let mut dispatches = Vec::new();
        for batch in batches {
            let count = batch.kernels.len();
            let words = Tensor::from_buffer(self, &batch.ticks.buffer, 0, DType::U32, &[count, 2, 2])?
                .download::<u32>()?;
            let ticks = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
            for (kernel, words) in batch.kernels.into_iter().zip(words.chunks_exact(4)) {
                let (begin, end) = (ticks(words[0], words[1]), ticks(words[2], words[3]));
                // A buffer that no submit has filled holds zeros.
                if begin != 0 && end >= begin {
                    let time = Duration::from_nanos(((end - begin) as f64 * tick) as u64);
                    dispatches.push((kernel, time));
                }
            }
        }
        Ok(Profile::new(dispatches.into_iter()))
    }

    pub(crate) fn is_profiling(&self) -> bool {
        lock(&self.inner.profile).is_some()
    }

    /// Queries for these kernels, at most [`MOST_TIMED`].
    pub(crate) fn timed(&self, kernels: Vec<String>) -> Result<Timed> {
        let count = 2 * kernels.len() as u32;
        let queries = self.guarded("creating timestamp queries", 0, || {
            self.device().create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("multihead profile"),
                ty: wgpu::QueryType::Timestamp,
                count,
            })
        })?;
        let ticks = self.buffer(
            "multihead profile",
            u64::from(count * wgpu::QUERY_SIZE),
            wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::STORAGE,
        )?;
        Ok(Timed {
            kernels,
            queries,
            ticks,
        })
    }

    /// Keeps what was recorded for [`Gpu::finish_profile`].
    pub(crate) fn keep_timed(&self, timed: Timed) {
        if let Some(batches) = &mut *lock(&self.inner.profile) {
            batches.push(timed);
        }
    }
}
