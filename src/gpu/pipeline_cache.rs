//! Built pipelines that outlive the process, where the backend can hand them out.
//!
//! The data are a header of this crate's (magic, format, length and checksum of what follows) around wgpu's own, which
//! names backend, adapter and driver version.

#![allow(
    unsafe_code,
    reason = "wgpu's constructor of a pipeline cache is unsafe: drivers may trust the bytes"
)]

use super::lock;
use crate::{Error, Gpu, Result};

/// First bytes of the data; the last one is the format's number.
const MAGIC: [u8; 8] = *b"mhpipe\0\x01";

/// Magic, length and checksum.
const HEADER: usize = 24;

/// FNV-1a: damage is to be noticed, not malice.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn wrap(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&MAGIC, &length, &checksum(data).to_le_bytes(), data].concat()
}

/// What [`wrap`] wrapped, if not a byte of it has changed.
fn unwrap(bytes: &[u8]) -> Option<&[u8]> {
    let (header, data) = bytes.split_at_checked(HEADER)?;
    (header == &wrap(data)[..HEADER]).then_some(data)
}

impl Gpu {
    /// Collects the pipelines that are built from now on for [`Gpu::pipeline_cache_data`]: call it before the first
    /// kernel is built, those that exist are not collected. A second call begins anew. `false`, and nothing happens, if the device was opened without `PIPELINE_CACHE`, which only
    /// Vulkan has and [`Gpu::useful_features`] asks for.
    ///
    /// Drivers of desktop systems keep built pipelines on disk themselves; this is for those that do not.
    ///
    /// ```
    /// # fn main() -> multihead::Result<()> {
    /// use multihead::{DType, Error, Gpu, Linear, Tensor};
    ///
    /// let gpu = Gpu::new()?;
    /// if gpu.start_pipeline_cache()? {
    ///     let linear = Linear::new(Tensor::zeros(&gpu, DType::F32, &[4, 4])?, None)?;
    ///     linear.run(&Tensor::zeros(&gpu, DType::F32, &[2, 4])?)?;
    ///     let data = gpu.pipeline_cache_data().unwrap(); // into a file, for the next run of the program
    ///
    ///     let next = Gpu::new()?;
    ///     // SAFETY: the data are from above; what is cut off is noticed.
    ///     assert!(unsafe { next.load_pipeline_cache(&data) }?);
    ///     let cut = unsafe { next.load_pipeline_cache(&data[..data.len() - 1]) };
    ///     assert!(matches!(cut, Err(Error::PipelineCache(_))));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::DeviceLost`], [`Error::OutOfMemory`].
    pub fn start_pipeline_cache(&self) -> Result<bool> {
        if !self.has_pipeline_cache() {
            return Ok(false);
        }
        // SAFETY: there are no data.
        let cache = unsafe { self.create_pipeline_cache(None) }?;
        *lock(&self.inner.pipeline_cache) = Some(cache);
        Ok(true)
    }

    /// [`Gpu::start_pipeline_cache`] with what [`Gpu::pipeline_cache_data`] gave in an earlier run. `true` if the driver
    /// took it; `false` if it is of another adapter, driver or version of wgpu, or the device has no `PIPELINE_CACHE`:
    /// then the pipelines are built and, if it can, collected anew.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let gpu = multihead::Gpu::new()?;
    /// let file = std::path::Path::new("/var/cache/my-program/pipelines");
    /// let data = std::fs::read(file).unwrap_or_default();
    /// // SAFETY: only this program writes there.
    /// if let Err(error) = unsafe { gpu.load_pipeline_cache(&data) } {
    ///     eprintln!("the kernels are built anew: {error}"); // the first run, or a damaged file
    ///     gpu.start_pipeline_cache()?;
    /// }
    /// // ... build layers, warm them up ...
    /// if let Some(data) = gpu.pipeline_cache_data() {
    ///     std::fs::write(file.with_extension("new"), data)?;
    ///     std::fs::rename(file.with_extension("new"), file)?; // never half a file
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Safety
    ///
    /// `data` must be what [`Gpu::pipeline_cache_data`] returned, of this or another run: drivers may trust the machine
    /// code in it. A file that was cut or damaged is noticed, by a header with length and checksum, and refused; one that
    /// somebody forged is not. Keep it where only your program writes.
    ///
    /// # Errors
    ///
    /// [`Error::PipelineCache`] if the data are damaged: delete the file and call [`Gpu::start_pipeline_cache`];
    /// [`Error::DeviceLost`], [`Error::OutOfMemory`].
    pub unsafe fn load_pipeline_cache(&self, data: &[u8]) -> Result<bool> {
        let Some(inner) = unwrap(data) else {
            return Err(Error::PipelineCache(format!(
                "{} bytes that are damaged, or not what Gpu::pipeline_cache_data gave; delete the file",
                data.len()
            )));
        };
        if !self.has_pipeline_cache() {
            return Ok(false);
        }
        // SAFETY: the caller vouches for the origin of the data.
        match unsafe { self.create_pipeline_cache(Some(inner)) } {
            Ok(cache) => {
                *lock(&self.inner.pipeline_cache) = Some(cache);
                Ok(true)
            }
            Err(Error::Wgpu { message, .. }) => {
                log::debug!("the pipeline cache is not used: {message}");
                self.start_pipeline_cache().map(|_| false)
            }
            Err(other) => Err(other),
        }
    }

    /// The pipelines collected since [`Gpu::start_pipeline_cache`], for [`Gpu::load_pipeline_cache`] in a later run of the
    /// program; `None` if none are collected.
    pub fn pipeline_cache_data(&self) -> Option<Vec<u8>> {
        let cache = self.pipeline_cache()?;
        Some(wrap(&cache.get_data()?))
    }

    pub(crate) fn pipeline_cache(&self) -> Option<wgpu::PipelineCache> {
        lock(&self.inner.pipeline_cache).clone()
    }

    fn has_pipeline_cache(&self) -> bool {
        self.features().contains(wgpu::Features::PIPELINE_CACHE)
    }

    /// # Safety
    ///
    /// `data` must come from `PipelineCache::get_data`.
    unsafe fn create_pipeline_cache(&self, data: Option<&[u8]>) -> Result<wgpu::PipelineCache> {
        self.guarded("creating a pipeline cache", 0, || {
            // SAFETY: as the caller promises.
            unsafe {
                self.device()
                    .create_pipeline_cache(&wgpu::PipelineCacheDescriptor {
                        label: Some("multihead"),
                        data,
                        // Data that do not fit are told, so that the caller can be.
                        fallback: false,
                    })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damage_is_noticed() {
        let whole = wrap(b"pipelines");
        assert_eq!(unwrap(&whole), Some(&b"pipelines"[..]));
        assert_eq!(unwrap(&wrap(b"")), Some(&b""[..]));
        for cut in 0..whole.len() {
            assert_eq!(unwrap(&whole[..cut]), None, "{cut}");
        }
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 0x10;
            assert_eq!(unwrap(&damaged), None, "{byte}");
        }
    }
}
