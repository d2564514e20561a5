//! What every test shares: the device, numbers, the error bound.

use std::{cell::RefCell, sync::OnceLock};

use half::f16;
use multihead::{Gpu, Tensor};
use proptest::test_runner::{Config as ProptestConfig, RngSeed};

/// The device of most tests. They share it, and its scratch, from many threads.
pub(crate) fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| {
        watch_log();
        Gpu::new().expect("the tests need a Vulkan, Metal or DX12 adapter; a software one will do")
    })
}

thread_local! {
    /// What the crate logged on this thread, while [`logged`] listens.
    static HEARD: RefCell<Option<Vec<String>>> = const { RefCell::new(None) };
}

/// Makes an error that wgpu logs fail the test that caused it.
pub(crate) fn watch_log() {
    struct Watch;
    impl log::Log for Watch {
        fn enabled(&self, metadata: &log::Metadata) -> bool {
            metadata.level() <= log::Level::Error || metadata.target().starts_with("multihead")
        }
        fn log(&self, record: &log::Record) {
            assert!(record.level() > log::Level::Error, "logged: {}", record.args());
            if record.target().starts_with("multihead") {
                HEARD.with_borrow_mut(|heard| {
                    heard
                        .as_mut()
                        .map(|heard| heard.push(format!("{} {}", record.level(), record.args())))
                });
            }
        }
        fn flush(&self) {}
    }
    // Another test may have set it already.
    let _ = log::set_logger(&Watch);
    log::set_max_level(log::LevelFilter::Debug);
}

/// What the crate logs on this thread meanwhile, each line with its level in front.
pub(crate) fn logged(work: impl FnOnce()) -> Vec<String> {
    watch_log();
    HEARD.set(Some(Vec::new()));
    work();
    HEARD.take().unwrap_or_default()
}

/// Property tests draw the same cases every time, so that a run tells about the change and not about luck.
/// `PROPTEST_CASES` and `PROPTEST_RNG_SEED` explore further.
pub(crate) fn property(cases: u32) -> ProptestConfig {
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = cases;
    }
    if std::env::var_os("PROPTEST_RNG_SEED").is_none() {
        config.rng_seed = RngSeed::Fixed(1);
    }
    config
}

/// A stream of numbers that a seed fixes (splitmix64).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Whether an event of this probability happens.
    pub(crate) fn chance(&mut self, probability: f32) -> bool {
        self.unit() < probability
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    /// About N(0, 1): a sum of uniforms.
    pub(crate) fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.unit()).sum::<f32>() * 1.414 - 4.242
    }

    pub(crate) fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }
}

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

/// Values as f16 storage would hold them.
pub(crate) fn through_f16(values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|&value| f16::from_f32(value).to_f32())
        .collect()
}

pub(crate) fn halves(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&value| f16::from_f32(value)).collect()
}

/// A float tensor's values as f32.
pub(crate) fn download(tensor: &Tensor) -> Vec<f32> {
    match tensor.dtype() {
        multihead::DType::F16 => tensor
            .download::<f16>()
            .unwrap()
            .iter()
            .map(|value| value.to_f32())
            .collect(),
        _ => tensor.download::<f32>().unwrap(),
    }
}

/// Distance to the next float of a 2^-`bits` mantissa above `value`.
fn ulp(value: f64, bits: i32) -> f64 {
    if value == 0.0 {
        0.0
    } else {
        2f64.powi(value.abs().log2().floor() as i32 - bits)
    }
}

/// The project's error bound, over a whole tensor: twice the f32 reference's own distance from f64, plus 8 ulp of
/// the largest value, plus half an ulp of f16 where the result is stored so.
///
/// Infinities must be equal and in the same places.
pub(crate) fn check_bound(
    what: &str,
    got: &[f32],
    f32_reference: &[f32],
    truth: &[f64],
    stored_f16: bool,
) -> Result<(), String> {
    if got.len() != truth.len() || truth.len() != f32_reference.len() {
        return Err(format!("{what}: {} values, expected {}", got.len(), truth.len()));
    }
    let mut largest = 0f64;
    let mut allowance = 0f64;
    for (&reference, &truth) in f32_reference
        .iter()
        .zip(truth)
        .filter(|(_, truth)| truth.is_finite())
    {
        largest = largest.max(truth.abs());
        allowance = allowance.max((f64::from(reference) - truth).abs());
    }
    let half = if stored_f16 {
        0.5 * ulp(largest, 10).max(2f64.powi(-24))
    } else {
        0.0
    };
    // WGSL may flush what is below the smallest normal number.
    let flushed = f64::from(f32::MIN_POSITIVE);
    let bound = 2.0 * allowance + 8.0 * ulp(largest, 23) + half + flushed;
    let mut worst = (0f64, 0usize);
    for (index, (&got, &truth)) in got.iter().zip(truth).enumerate() {
        let error = if f64::from(got) == truth {
            0.0
        } else {
            (f64::from(got) - truth).abs()
        };
        // A NaN is larger than any bound.
        if error > worst.0 || error.is_nan() {
            worst = (error, index);
            if error.is_nan() {
                break;
            }
        }
    }
    if worst.0 <= bound {
        return Ok(());
    }
    Err(format!(
        "{what}: error {:.3e} at {} ({} instead of {}), bound {bound:.3e}, f32 reference {allowance:.3e}",
        worst.0, worst.1, got[worst.1], truth[worst.1]
    ))
}
