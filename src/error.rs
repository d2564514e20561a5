//! The one error type. Every message says what was given, what is allowed and what to do.

/// A `Result` whose error is [`Error`].
///
/// ```
/// use multihead::{MultiHeadAttentionConfig, Result};
///
/// fn head_dim(config: &MultiHeadAttentionConfig) -> Result<usize> {
///     config.validate()?;
///     Ok(config.head_dim())
/// }
/// assert_eq!(head_dim(&MultiHeadAttentionConfig::new(512, 8)), Ok(64));
/// assert!(head_dim(&MultiHeadAttentionConfig::new(512, 7)).is_err());
/// ```
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong, from finding an adapter to reading a checkpoint.
///
/// Nothing that the caller owns is touched when a call returns an error: sizes, types and devices
/// are checked before the first command is recorded.
///
/// ```
/// use multihead::{Error, MultiHeadAttentionConfig};
///
/// let error = MultiHeadAttentionConfig::new(512, 7).validate().unwrap_err();
/// assert!(matches!(error, Error::Option(_)));
/// assert!(error.to_string().contains("512") && error.to_string().contains('7'));
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No adapter fits what was asked for.
    #[error("no GPU adapter found: {tried}. {advice}")]
    NoAdapter {
        /// Backends, name and power preference that were tried, and what was there instead.
        tried: String,
        /// What to install or to set.
        advice: String,
    },
    /// The adapter refused to open a device.
    #[error("the adapter {adapter} refused to open a device: {reason}")]
    NoDevice {
        /// Name of the adapter.
        adapter: String,
        /// What the driver said.
        reason: String,
    },
    /// The device was lost or destroyed. Its buffers are gone; make a new [`Gpu`](crate::Gpu).
    #[error("the device is lost ({0}): its buffers are gone, make a new Gpu and upload again")]
    DeviceLost(String),
    /// The device's memory is exhausted.
    #[error(
        "the device is out of memory while {during}: {bytes} bytes were asked for; drop tensors or call Gpu::release_scratch"
    )]
    OutOfMemory {
        /// What was being done.
        during: String,
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// The driver or wgpu refused a kernel's source.
    #[error("kernel {kernel} was refused: {message}")]
    Shader {
        /// Label of the kernel.
        kernel: String,
        /// What the compiler said.
        message: String,
    },
    /// wgpu refused a command for a reason that the checks of this crate do not know.
    #[error("wgpu refused {during}: {message}")]
    Wgpu {
        /// What was being done.
        during: String,
        /// What wgpu said.
        message: String,
    },
    /// Sizes that do not fit each other.
    #[error("shape mismatch: {0}")]
    Shape(String),
    /// An element type that is not accepted there.
    #[error("element type mismatch: {0}")]
    DType(String),
    /// A buffer that cannot serve: usage flags, size or alignment.
    #[error("unsuitable buffer: {0}")]
    Buffer(String),
    /// A tensor or buffer that belongs to another device.
    #[error("wrong device: {0}")]
    WrongDevice(String),
    /// One buffer as input and output of the same call.
    #[error("overlapping buffers: {0}")]
    Overlap(String),
    /// More positions than a key/value cache, or tables of positions, were made for.
    #[error("capacity: {0}")]
    Capacity(String),
    /// More than this device allows.
    #[error("device limit: {what} needs {needs}{unit}, this device allows {allows} ({limit}); {advice}", unit = unit(.limit))]
    Limit {
        /// What needs it.
        what: String,
        /// How much is needed.
        needs: u64,
        /// How much the device allows.
        allows: u64,
        /// Name of the limit in `wgpu::Limits`.
        limit: &'static str,
        /// What to do.
        advice: String,
    },
    /// An option whose value is not allowed.
    #[error("option: {0}")]
    Option(String),
    /// Data of a pipeline cache that are damaged.
    #[error("pipeline cache: {0}")]
    PipelineCache(String),
    /// A checkpoint that cannot be read, or whose tensors do not fit the layer.
    #[error("checkpoint: {0}")]
    Checkpoint(String),
}

/// What a limit counts, where it is not the number of something.
fn unit(limit: &str) -> &'static str {
    if limit.ends_with("_size") { " bytes" } else { "" }
}

impl std::fmt::Debug for Error {
    /// Message and name, so that a program that ends with an error in `main` prints the message as it is.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Self::NoAdapter { .. } => "NoAdapter",
            Self::NoDevice { .. } => "NoDevice",
            Self::DeviceLost(_) => "DeviceLost",
            Self::OutOfMemory { .. } => "OutOfMemory",
            Self::Shader { .. } => "Shader",
            Self::Wgpu { .. } => "Wgpu",
            Self::Shape(_) => "Shape",
            Self::DType(_) => "DType",
            Self::Buffer(_) => "Buffer",
            Self::WrongDevice(_) => "WrongDevice",
            Self::Overlap(_) => "Overlap",
            Self::Capacity(_) => "Capacity",
            Self::Limit { .. } => "Limit",
            Self::Option(_) => "Option",
            Self::PipelineCache(_) => "PipelineCache",
            Self::Checkpoint(_) => "Checkpoint",
        };
        write!(f, "{self} [Error::{name}]")
    }
}
