//! Which adapter is opened, and what a device must allow.

use crate::{Error, Result};

/// Every kernel stays within what WebGPU guarantees (a test of all variants holds them to it); a device may have been
/// opened with less.
pub(super) fn check_limits(limits: &wgpu::Limits) -> Result<()> {
    let guaranteed = wgpu::Limits::default();
    for (limit, needs, allows) in [
        (
            "max_storage_buffers_per_shader_stage",
            guaranteed.max_storage_buffers_per_shader_stage,
            limits.max_storage_buffers_per_shader_stage,
        ),
        (
            "max_compute_invocations_per_workgroup",
            guaranteed.max_compute_invocations_per_workgroup,
            limits.max_compute_invocations_per_workgroup,
        ),
        (
            "max_compute_workgroup_storage_size",
            guaranteed.max_compute_workgroup_storage_size,
            limits.max_compute_workgroup_storage_size,
        ),
        (
            "max_compute_workgroup_size_x",
            guaranteed.max_compute_workgroup_size_x,
            limits.max_compute_workgroup_size_x,
        ),
        // One group of params and at most eight tensors; WebGPU guarantees far more.
        ("max_bind_groups", 1, limits.max_bind_groups),
        (
            "max_bindings_per_bind_group",
            9,
            limits.max_bindings_per_bind_group,
        ),
        (
            "max_uniform_buffers_per_shader_stage",
            1,
            limits.max_uniform_buffers_per_shader_stage,
        ),
    ] {
        if allows < needs {
            return Err(Error::Limit {
                what: "the kernels".to_owned(),
                needs: needs.into(),
                allows: allows.into(),
                limit,
                advice: "open the device with wgpu::Limits::default() or the adapter's own limits".to_owned(),
            });
        }
    }
    Ok(())
}

/// The adapter that the environment asks for, or the fastest.
pub(super) async fn choose_adapter(instance: &wgpu::Instance) -> Result<wgpu::Adapter> {
    let backends = wgpu::Backends::from_env().unwrap_or(wgpu::Backends::all());
    let power = wgpu::PowerPreference::from_env().unwrap_or(wgpu::PowerPreference::HighPerformance);
    let name = std::env::var("WGPU_ADAPTER_NAME")
        .ok()
        .filter(|name| !name.is_empty());
    let found = match &name {
        Some(name) => {
            let adapters = instance.enumerate_adapters(backends).await;
            let wanted = name.to_lowercase();
            adapters
                .into_iter()
                .find(|adapter| adapter.get_info().name.to_lowercase().contains(&wanted))
        }
        None => instance
            .request_adapter(&wgpu::RequestAdapterOptions {
                power_preference: power,
                ..Default::default()
            })
            .await
            .ok(),
    };
    if let Some(adapter) = found {
        return Ok(adapter);
    }
    let there: Vec<String> = instance
        .enumerate_adapters(wgpu::Backends::all())
        .await
        .iter()
        .map(|adapter| format!("{} ({})", adapter.get_info().name, adapter.get_info().backend))
        .collect();
    let named = name.map_or(String::new(), |name| format!(", WGPU_ADAPTER_NAME={name}"));
    Err(Error::NoAdapter {
        tried: format!("backends {backends:?}, power preference {power:?}{named}"),
        advice: if there.is_empty() {
            "No adapter is there at all: install a graphics driver (on Linux a Vulkan driver, for instance \
             the package mesa-vulkan-drivers, which also holds one that runs on the CPU)"
                .to_owned()
        } else {
            format!(
                "There are: {}. Change or unset WGPU_BACKEND and WGPU_ADAPTER_NAME",
                there.join(", ")
            )
        },
    })
}
