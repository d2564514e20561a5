//! Times the kernels' tile sizes on the present adapter and prints the rows to put into `src/tuning.rs`:
//! `cargo xtask tune`.

// What it finds is what it prints.
#![allow(clippy::print_stdout)]

use clap::Parser;
use multihead::{Gpu, wgpu};

#[derive(Parser)]
#[command(about = "Times tile sizes on the present adapter and prints the rows for src/tuning.rs")]
struct Arguments {
    /// Time for all candidates; what it does not suffice for is left out.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
}

/// A device with what WebGPU guarantees to workgroups, so that what is found serves everywhere.
fn open() -> Result<Gpu, Box<dyn std::error::Error>> {
    let own = Gpu::new()?;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let same = |adapter: &wgpu::Adapter| adapter.get_info().name == own.info().name;
    let adapter = adapters.into_iter().find(same).ok_or("the adapter is gone")?;
    let guaranteed = wgpu::Limits::default();
    let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        required_features: Gpu::useful_features(&adapter),
        required_limits: wgpu::Limits {
            max_compute_workgroup_storage_size: guaranteed.max_compute_workgroup_storage_size,
            max_compute_invocations_per_workgroup: guaranteed.max_compute_invocations_per_workgroup,
            ..adapter.limits()
        },
        ..Default::default()
    }))?;
    Ok(Gpu::from_device(&device, &queue)?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let gpu = open()?;
    eprintln!("{}", gpu.description());
    let rows = multihead::tune(&gpu, arguments.seconds, |line| eprintln!("{line}"))?;
    println!("{}", rows.join("\n"));
    Ok(())
}
