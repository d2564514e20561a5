//! A device and its queue, own or the caller's, with what is built once and shared: pipelines and scratch.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

mod adapter;
mod errors;
mod memory;
mod pipeline_cache;
mod profile;

use adapter::{check_limits, choose_adapter};
use errors::{check_alive, guarded};
use memory::Held;
pub(crate) use memory::{Allocation, OwnBuffer, Scratch};
pub use profile::{KernelTime, Profile};
pub(crate) use profile::{MOST_TIMED, Timed};

use crate::{
    Error, Result,
    kernel::{Kernel, Variant},
};

/// How long a blocking wait lasts before it is an error instead of a hang.
const WAIT: Duration = Duration::from_secs(600);

/// A `wgpu` device and queue with the pipelines and scratch memory that calls on it share.
///
/// Cloning is cheap and gives the same device. [`Gpu::new`] opens its own device,
/// [`Gpu::from_device`] joins the caller's and leaves its error handler and callbacks as they are.
///
/// ```
/// # fn main() -> multihead::Result<()> {
/// use multihead::{DType, Gpu, Tensor};
///
/// let gpu = Gpu::new()?;
/// println!("{}", gpu.description());
/// let x = Tensor::zeros(&gpu, DType::F32, &[2, 3])?;
/// assert_eq!(x.gpu(), &gpu);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: wgpu::AdapterInfo,
    features: wgpu::Features,
    limits: wgpu::Limits,
    kernels: Mutex<HashMap<Variant, Arc<Building>>>,
    /// What the self-check said of variants.
    verdicts: Mutex<HashMap<Variant, Verdict>>,
    /// A text in kernels' sources and what stands in its place, for tests that a broken variant is caught.
    fault: Mutex<Option<(String, String)>>,
    scratch: Mutex<HashMap<Scratch, OwnBuffer>>,
    /// What is timed, while a profile is being made.
    profile: Mutex<Option<Vec<Timed>>>,
    pipeline_cache: Mutex<Option<wgpu::PipelineCache>>,
    held: Arc<Held>,
    /// Multiply-adds of one dispatch, at most; 0 stands for the default.
    dispatch_work: AtomicU64,
    /// Bound where an optional input is absent: WebGPU has no empty binding.
    absent: wgpu::Buffer,
    /// The same for outputs; one buffer cannot be read and written in one dispatch.
    absent_output: wgpu::Buffer,
    lost: Arc<Mutex<Option<String>>>,
    counters: Counters,
}

/// A kernel that is built at its first use, by one thread.
type Building = OnceLock<Result<Arc<Kernel>>>;

/// Whether a variant computed a known answer, and what was wrong.
pub(crate) type Verdict = std::result::Result<(), String>;

#[derive(Default)]
struct Counters {
    dispatches: AtomicU64,
    pipelines: AtomicU64,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({})", self.description())
    }
}

impl PartialEq for Gpu {
    /// Whether both are clones of one `Gpu`. `wgpu`'s own comparison takes devices of two instances for one: it
    /// compares numbers that each instance counts for itself.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Gpu {}

/// One for all devices that this crate opens: wgpu tells things of two devices apart, and not those of two instances.
fn instance() -> &'static wgpu::Instance {
    static INSTANCE: OnceLock<wgpu::Instance> = OnceLock::new();
    INSTANCE
        .get_or_init(|| wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env()))
}

/// A mutex whose data stay valid whatever a panicking thread did: every update is a single insert.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Opens a device on the adapter that wgpu programs choose: `WGPU_BACKEND`, `WGPU_ADAPTER_NAME` (part of
    /// the name, any case) and `WGPU_POWER_PREF` are honoured; without them, the fastest adapter.
    ///
    /// Asks for the adapter's own limits and, where it has them, for [`Gpu::useful_features`]. All devices that this opens
    /// are of one `wgpu::Instance`, made by the first call, with the backends that the environment named then.
    ///
    /// # Errors
    ///
    /// [`Error::NoAdapter`] names what was tried, what is there, and what to install;
    /// [`Error::NoDevice`] if the driver refuses.
    pub fn new() -> Result<Self> {
        pollster::block_on(Self::new_async())
    }

    /// [`Gpu::new`] for callers that are async already.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::Gpu;
    ///
    /// let gpu = pollster::block_on(Gpu::new_async())?; // `.await` where you are async
    /// assert_eq!(gpu.device(), gpu.clone().device());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Gpu::new`].
    pub async fn new_async() -> Result<Self> {
        let adapter = {
            // wgpu's OpenGL backend panics if two threads ask one instance for adapters. Blocking costs nothing: native
            // backends answer at once.
            static ASKING: Mutex<()> = Mutex::new(());
            let _alone = lock(&ASKING);
            pollster::block_on(choose_adapter(instance()))?
        };
        let descriptor = |required_limits| wgpu::DeviceDescriptor {
            label: Some("multihead"),
            required_features: Self::useful_features(&adapter),
            required_limits,
            ..Default::default()
        };
        // Some drivers report limits that they then refuse to grant; the guaranteed ones must do there.
        let opened = match adapter.request_device(&descriptor(adapter.limits())).await {
            Ok(opened) => Ok(opened),
            Err(_) => adapter.request_device(&descriptor(wgpu::Limits::default())).await,
        };
        let (device, queue) = opened.map_err(|error| Error::NoDevice {
            adapter: adapter.get_info().name,
            reason: error.to_string(),
        })?;
        let gpu = Self::from_device(&device, &queue)?;
        let lost = Arc::clone(&gpu.inner.lost);
        device.set_device_lost_callback(move |reason, message| {
            log::warn!("the device is lost: {reason:?}: {message}");
            *lock(&lost) = Some(format!("{reason:?}: {message}"));
        });
        Ok(gpu)
    }

    /// The features of `adapter` that make calls faster, to ask for when you open a device of your own: without
    /// `SUBGROUP` a software adapter takes the workgroup-memory kernels, which are several times slower there, and
    /// without `SHADER_F16` halves are unpacked by hand. `TIMESTAMP_QUERY` serves [`Gpu::start_profile`],
    /// `PIPELINE_CACHE` [`Gpu::start_pipeline_cache`].
    pub fn useful_features(adapter: &wgpu::Adapter) -> wgpu::Features {
        let faster = wgpu::Features::SHADER_F16 | wgpu::Features::SUBGROUP;
        let tools = wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::PIPELINE_CACHE;
        adapter.features() & (faster | tools)
    }

    /// Joins a device that the caller owns. Its limits and features are respected as they are, and its error
    /// handler, lost-device callback and error scopes are left alone.
    ///
    /// Join a device once and clone the `Gpu`: tensors of one are refused by another.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`] if the device is lost already; [`Error::Limit`] if it allows less than WebGPU guarantees of
    /// what the kernels need: 8 storage buffers per stage, 9 bindings in a group, 256 invocations along one axis and 16 KiB
    /// of memory per workgroup.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use multihead::wgpu;
    ///
    /// // The device of your own program.
    /// let instance = wgpu::Instance::default();
    /// let adapter = pollster::block_on(instance.request_adapter(&wgpu::RequestAdapterOptions::default()))?;
    /// let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
    ///     required_features: multihead::Gpu::useful_features(&adapter),
    ///     required_limits: adapter.limits(), // larger tensors than the defaults allow
    ///     ..Default::default()
    /// }))?;
    ///
    /// let gpu = multihead::Gpu::from_device(&device, &queue)?;
    /// assert_eq!((gpu.device(), gpu.queue()), (&device, &queue));
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_device(device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Self> {
        let lost = Arc::new(Mutex::new(None));
        check_limits(&device.limits())?;
        let placeholder = |label| {
            guarded(device, &lost, "creating a placeholder buffer", 16, || {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(label),
                    size: 16,
                    usage: wgpu::BufferUsages::STORAGE,
                    mapped_at_creation: false,
                })
            })
        };
        let absent = placeholder("multihead absent input")?;
        let absent_output = placeholder("multihead absent output")?;
        check_alive(device, &lost, "joining it")?;
        Ok(Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                queue: queue.clone(),
                info: device.adapter_info(),
                features: device.features(),
                limits: device.limits(),
                kernels: Mutex::default(),
                verdicts: Mutex::default(),
                fault: Mutex::default(),
                scratch: Mutex::default(),
                profile: Mutex::default(),
                pipeline_cache: Mutex::default(),
                held: Arc::default(),
                dispatch_work: AtomicU64::new(0),
                absent,
                absent_output,
                lost,
                counters: Counters::default(),
            }),
        })
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// The adapter that the device runs on.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::Gpu;
    ///
    /// let gpu = Gpu::new()?;
    /// assert!(gpu.description().starts_with(&gpu.info().name));
    /// assert!(gpu.limits().max_storage_buffers_per_shader_stage >= 8);
    /// println!("{:?}", gpu.features());
    /// # Ok(())
    /// # }
    /// ```
    pub fn info(&self) -> &wgpu::AdapterInfo {
        &self.inner.info
    }

    /// The device's limits, read once.
    pub fn limits(&self) -> &wgpu::Limits {
        &self.inner.limits
    }

    /// The device's features, read once.
    pub fn features(&self) -> wgpu::Features {
        self.inner.features
    }

    /// Adapter, backend and driver on one line.
    pub fn description(&self) -> String {
        let info = &self.inner.info;
        format!(
            "{} ({}, {} {})",
            info.name, info.backend, info.driver, info.driver_info
        )
    }

    /// A new command encoder.
    pub fn encoder(&self) -> wgpu::CommandEncoder {
        self.inner
            .device
            .create_command_encoder(&wgpu::CommandEncoderDescriptor {
                label: Some("multihead"),
            })
    }

    /// Finishes and submits an encoder, and frees what earlier submissions no longer need. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::Wgpu`] if something recorded in the encoder is invalid, such as a buffer of another device;
    /// [`Error::DeviceLost`]. An encoder of another device reports to that device: without an error handler of yours there,
    /// wgpu panics.
    pub fn submit(&self, encoder: wgpu::CommandEncoder) -> Result<()> {
        self.guarded("submitting commands", 0, || {
            self.inner.queue.submit([encoder.finish()]);
        })?;
        // Dropped buffers are freed when the device is polled, and nobody else may do so.
        self.poll()
    }

    /// Frees what finished work no longer needs and runs due callbacks. Does not wait.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::Gpu;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    ///
    /// static DONE: AtomicBool = AtomicBool::new(false);
    /// let gpu = Gpu::new()?;
    /// gpu.submit(gpu.encoder())?;
    /// gpu.queue().on_submitted_work_done(|| DONE.store(true, Ordering::Relaxed));
    /// while !DONE.load(Ordering::Relaxed) {
    ///     gpu.poll()?; // once in each turn of your loop
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`].
    pub fn poll(&self) -> Result<()> {
        self.inner
            .device
            .poll(wgpu::PollType::Poll)
            .map_err(|error| self.refused("polling", error.to_string()))?;
        self.check_alive("polling")
    }

    /// Waits until everything that was submitted has run.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::Gpu;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    ///
    /// static DONE: AtomicBool = AtomicBool::new(false);
    /// let gpu = Gpu::new()?;
    /// gpu.submit(gpu.encoder())?;
    /// gpu.queue().on_submitted_work_done(|| DONE.store(true, Ordering::Relaxed));
    /// gpu.wait()?;
    /// assert!(DONE.load(Ordering::Relaxed));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`]; [`Error::Wgpu`] after ten minutes.
    pub fn wait(&self) -> Result<()> {
        self.inner
            .device
            .poll(wgpu::PollType::Wait {
                submission_index: None,
                timeout: Some(WAIT),
            })
            .map_err(|error| self.refused("waiting for the device", error.to_string()))?;
        self.check_alive("waiting for the device")
    }

    /// Frees the scratch memory that calls share. It comes back as calls need it.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadInputs, NeedWeights, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let layer = MultiHeadAttention::seeded(&gpu, MultiHeadAttentionConfig::new(8, 2), 1)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[1, 4, 8])?;
    /// layer.forward(&MultiHeadInputs::new(&x), NeedWeights::No)?;
    /// assert!(gpu.scratch_bytes() > 0);
    /// gpu.release_scratch();
    /// assert_eq!(gpu.scratch_bytes(), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn release_scratch(&self) {
        lock(&self.inner.scratch).clear();
    }

    /// Bytes of scratch memory that are held now.
    pub fn scratch_bytes(&self) -> u64 {
        lock(&self.inner.scratch)
            .values()
            .map(|scratch| scratch.buffer.size())
            .sum()
    }

    /// Bytes of all buffers that the crate made on this device and still holds: tensors that are not views of the
    /// caller's buffers, and scratch. wgpu itself may hold a dropped buffer until the work that uses it has run.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let before = gpu.held_bytes();
    /// let x = Tensor::zeros(&gpu, DType::F32, &[256, 4])?;
    /// assert_eq!(gpu.held_bytes(), before + 256 * 4 * 4);
    /// drop(x);
    /// assert_eq!(gpu.held_bytes(), before);
    /// assert!(gpu.peak_bytes() >= before + 256 * 4 * 4);
    /// gpu.reset_peak_bytes();
    /// assert_eq!(gpu.peak_bytes(), before);
    /// # Ok(())
    /// # }
    /// ```
    pub fn held_bytes(&self) -> u64 {
        self.inner.held.now()
    }

    /// The most that [`Gpu::held_bytes`] has been since the device was joined or [`Gpu::reset_peak_bytes`].
    pub fn peak_bytes(&self) -> u64 {
        self.inner.held.peak()
    }

    /// Starts counting [`Gpu::peak_bytes`] anew, from what is held now.
    pub fn reset_peak_bytes(&self) {
        self.inner.held.reset_peak();
    }

    /// Multiply-adds of one dispatch, about and at most. Longer calls are cut into several dispatches, so that an
    /// operating system's watchdog, which resets a GPU whose work does not end within a second or two, stays quiet and
    /// other programs get their turn. One tile of rows is never cut.
    pub fn dispatch_work(&self) -> u64 {
        match self.inner.dispatch_work.load(Ordering::Relaxed) {
            0 => crate::tuning::dispatch_work(self.info().device_type),
            work => work,
        }
    }

    /// Sets [`Gpu::dispatch_work`] for this device; 0 goes back to the default for its kind.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{Attention, AttentionOptions, AttentionShape, DType, Gpu, Wanted};
    ///
    /// let gpu = Gpu::new()?;
    /// let attention = Attention::new(&gpu, AttentionOptions::new())?;
    /// let dispatches = || {
    ///     let plan = attention.plan(&AttentionShape::new(1, 8, 2048, 64), DType::F32, Wanted::output())?;
    ///     Ok::<_, multihead::Error>(plan.dispatches)
    /// };
    /// let default = gpu.dispatch_work();
    /// gpu.set_dispatch_work(u64::MAX);
    /// let most = dispatches()?;
    /// gpu.set_dispatch_work(100_000_000);
    /// assert!(dispatches()? > most); // shorter ones, so more of them
    /// gpu.set_dispatch_work(0);
    /// assert_eq!(gpu.dispatch_work(), default);
    /// # Ok(())
    /// # }
    /// ```
    pub fn set_dispatch_work(&self, multiply_adds: u64) {
        self.inner.dispatch_work.store(multiply_adds, Ordering::Relaxed);
    }

    /// Overwrites all scratch memory with the bytes `0xff`, NaN in any float type, for tests that nothing reads what
    /// it did not write.
    #[doc(hidden)]
    pub fn poison_scratch(&self) -> Result<()> {
        for scratch in lock(&self.inner.scratch).values() {
            let junk = vec![0xff; scratch.buffer.size() as usize];
            self.guarded("poisoning scratch", 0, || {
                self.inner.queue.write_buffer(&scratch.buffer, 0, &junk);
            })?;
        }
        Ok(())
    }

    /// Kernel dispatches recorded on this device so far.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Gpu, Linear, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// let linear = Linear::new(Tensor::zeros(&gpu, DType::F32, &[4, 4])?, None)?;
    /// let x = Tensor::zeros(&gpu, DType::F32, &[2, 4])?;
    /// linear.run(&x)?; // builds its kernel
    /// let (dispatches, pipelines) = (gpu.dispatches(), gpu.pipelines());
    /// linear.run(&x)?;
    /// assert_eq!((gpu.dispatches(), gpu.pipelines()), (dispatches + 1, pipelines));
    /// # Ok(())
    /// # }
    /// ```
    pub fn dispatches(&self) -> u64 {
        self.inner.counters.dispatches.load(Ordering::Relaxed)
    }

    /// Pipelines built on this device so far.
    pub fn pipelines(&self) -> u64 {
        self.inner.counters.pipelines.load(Ordering::Relaxed)
    }

    pub(crate) fn count_dispatches(&self, dispatches: u64) {
        self.inner
            .counters
            .dispatches
            .fetch_add(dispatches, Ordering::Relaxed);
    }

    pub(crate) fn absent(&self) -> &wgpu::Buffer {
        &self.inner.absent
    }

    pub(crate) fn absent_output(&self) -> &wgpu::Buffer {
        &self.inner.absent_output
    }

    /// The kernel of a variant, built at its first use. Two threads that ask for the same one build it once,
    /// and others are not held up.
    pub(crate) fn kernel(&self, variant: &Variant) -> Result<Arc<Kernel>> {
        let cell = {
            let mut kernels = lock(&self.inner.kernels);
            match kernels.get(variant) {
                Some(cell) => Arc::clone(cell),
                None => Arc::clone(kernels.entry(variant.clone()).or_default()),
            }
        };
        let built = cell.get_or_init(|| {
            self.inner.counters.pipelines.fetch_add(1, Ordering::Relaxed);
            let start = Instant::now();
            let built = Kernel::build(self, variant).map(Arc::new);
            match &built {
                Ok(_) => log::debug!("{} was built in {:.1?}", variant.label(), start.elapsed()),
                Err(error) => log::warn!("{} was not built: {error}", variant.label()),
            }
            built
        });
        if built.is_err() {
            // A lost device or exhausted memory need not last: the next call tries again.
            lock(&self.inner.kernels).remove(variant);
        }
        built.clone()
    }

    pub(crate) fn verdict(&self, variant: &Variant) -> Option<Verdict> {
        lock(&self.inner.verdicts).get(variant).cloned()
    }

    pub(crate) fn set_verdict(&self, variant: Variant, verdict: Verdict) {
        lock(&self.inner.verdicts).insert(variant, verdict);
    }

    /// From now on builds kernels with `to` in place of `from`, for tests that a variant which computes wrongly is
    /// caught. Kernels that exist already stay.
    #[doc(hidden)]
    pub fn break_kernels(&self, from: &str, to: &str) {
        *lock(&self.inner.fault) = Some((from.to_owned(), to.to_owned()));
    }

    /// A kernel's source, with the fault of [`Gpu::break_kernels`] in it.
    pub(crate) fn with_fault(&self, source: String) -> String {
        match &*lock(&self.inner.fault) {
            Some((from, to)) => source.replace(from, to),
            None => source,
        }
    }

    /// At least `bytes` of scratch memory. A larger request replaces the buffer; commands recorded with the old
    /// one keep it alive.
    pub(crate) fn scratch(&self, slot: Scratch, bytes: u64) -> Result<wgpu::Buffer> {
        let mut scratch = lock(&self.inner.scratch);
        if let Some(found) = scratch.get(&slot).filter(|found| found.buffer.size() >= bytes) {
            return Ok(found.buffer.clone());
        }
        let before = scratch.remove(&slot).map_or(0, |found| found.buffer.size());
        log::debug!("scratch {slot:?} grows from {before} to {bytes} bytes");
        let made = self.buffer(
            &format!("multihead scratch {slot:?}"),
            bytes,
            // The second for `poison_scratch` alone.
            wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
        )?;
        let buffer = made.buffer.clone();
        scratch.insert(slot, made);
        Ok(buffer)
    }

    /// A new buffer of `bytes`, rounded up to whole 16-byte units so that any binding of it is legal.
    pub(crate) fn buffer(&self, label: &str, bytes: u64, usage: wgpu::BufferUsages) -> Result<OwnBuffer> {
        let size = self.check_size(label, bytes)?;
        let during = format!("creating {label}");
        let buffer = self.guarded(&during, size, || {
            self.inner.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: false,
            })
        })?;
        self.check_alive(&during)?;
        Ok(self.own(buffer))
    }

    fn own(&self, buffer: wgpu::Buffer) -> OwnBuffer {
        let allocation = self.inner.held.add(buffer.size());
        OwnBuffer { buffer, allocation }
    }

    /// A new buffer that starts with what `fill` writes into its bytes; they are zero before.
    pub(crate) fn buffer_with(
        &self,
        label: &str,
        bytes: u64,
        usage: wgpu::BufferUsages,
        contents: &[u8],
    ) -> Result<OwnBuffer> {
        let size = self.check_size(label, bytes.max(contents.len() as u64))?;
        let during = format!("creating {label}");
        let (buffer, written) = self.guarded(&during, size, || {
            let buffer = self.inner.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage,
                mapped_at_creation: true,
            });
            let written = match buffer.get_mapped_range_mut(..) {
                Ok(mut view) => {
                    view.slice(..contents.len()).copy_from_slice(contents);
                    Ok(())
                }
                Err(error) => Err(error.to_string()),
            };
            if written.is_ok() {
                buffer.unmap();
            }
            (buffer, written)
        })?;
        written.map_err(|message| self.refused(&during, message))?;
        Ok(self.own(buffer))
    }

    /// The bytes that a buffer for `bytes` takes, if the device allows them.
    pub(crate) fn check_size(&self, label: &str, bytes: u64) -> Result<u64> {
        let size = bytes.max(1).checked_next_multiple_of(16).unwrap_or(u64::MAX);
        if size > self.inner.limits.max_buffer_size {
            return Err(Error::Limit {
                what: label.to_owned(),
                needs: size,
                allows: self.inner.limits.max_buffer_size,
                limit: "max_buffer_size",
                advice:
                    "make the call smaller, or open the device with more if the adapter has it (Gpu::new asks for all)"
                        .to_owned(),
            });
        }
        Ok(size)
    }

    /// Runs `work` and turns what wgpu reports meanwhile into an error, so that nothing of this crate's doing
    /// reaches the caller's error handler.
    pub(crate) fn guarded<T>(&self, during: &str, bytes: u64, work: impl FnOnce() -> T) -> Result<T> {
        guarded(&self.inner.device, &self.inner.lost, during, bytes, work)
    }

    /// The error for something that wgpu refused outside a scope; a lost device is the usual reason.
    pub(crate) fn refused(&self, during: &str, message: String) -> Error {
        match self.check_alive(during) {
            Err(lost) => lost,
            Ok(()) => Error::Wgpu {
                during: during.to_owned(),
                message,
            },
        }
    }

    pub(crate) fn check_alive(&self, during: &str) -> Result<()> {
        check_alive(&self.inner.device, &self.inner.lost, during)
    }
}
