//! The one abstraction over compute: source pieces and constants become a pipeline; calls are bound,
//! checked, then recorded together.
//!
//! A kernel's bindings are written once, in its WGSL: the params first, then inputs, then outputs. Sources are
//! joined, not preprocessed: a header made here (`enable`, tile sizes as `const`, loads by element
//! type), the shared pieces that the kernel names, and the kernel. `override` constants cannot size arrays in
//! functions, which is why tile sizes are `const`.

use std::{collections::HashMap, fmt::Write, num::NonZeroU64, ops::Range, sync::Arc};

use crate::{
    DType, Error, Gpu, Result, Tensor,
    gpu::{MOST_TIMED, Scratch, Timed},
};

/// How the elements of a binding are stored, as the shader sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Storage {
    F32,
    /// `f16` of a device with `SHADER_F16`.
    F16,
    /// Halves two to a word, for devices without `SHADER_F16`.
    Packed,
}

impl Storage {
    /// Storage of a float tensor on this device.
    pub(crate) fn of(gpu: &Gpu, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 if gpu.features().contains(wgpu::Features::SHADER_F16) => Ok(Self::F16),
            DType::F16 => Ok(Self::Packed),
            other => Err(Error::DType(format!("{other:?}: kernels compute on F32 and F16"))),
        }
    }

    /// `load_NAME`, which reads element `i` of binding `NAME` as f32, and `NAME_word`, the type to bind.
    fn loader(self, name: &str) -> String {
        let (word, value) = match self {
            Self::F32 => ("f32", format!("{name}[i]")),
            Self::F16 => ("f16", format!("f32({name}[i])")),
            Self::Packed => (
                "u32",
                format!("unpack2x16float({name}[i >> 1u] >> (16u * (i & 1u))).x"),
            ),
        };
        format!("alias {name}_word = {word};\nfn load_{name}(i: u32) -> f32 {{ return {value}; }}\n")
    }

    /// `store`, which writes element `i` of binding `output`, and `output_word`, the type to bind.
    ///
    /// The two halves of a packed word belong to different threads; atomics on its bits keep each from touching
    /// the other's, in any order.
    fn store(self) -> String {
        let (word, body) = match self {
            Self::F32 => ("f32", "output[i] = value;"),
            Self::F16 => ("f16", "output[i] = f16(value);"),
            Self::Packed => (
                "atomic<u32>",
                "let shift = 16u * (i & 1u);\n    \
                 atomicAnd(&output[i >> 1u], ~(0xffffu << shift));\n    \
                 atomicOr(&output[i >> 1u], (pack2x16float(vec2(value, 0.0)) & 0xffffu) << shift);",
            ),
        };
        format!("alias output_word = {word};\nfn store(i: u32, value: f32) {{\n    {body}\n}}\n")
    }
}

/// What distinguishes one pipeline from another: never a tensor's sizes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Variant {
    /// The kernel's file name.
    pub(crate) name: &'static str,
    /// Its own source and the shared pieces it includes.
    pub(crate) pieces: Vec<&'static str>,
    /// Tile sizes and switches.
    pub(crate) constants: Vec<(&'static str, u32)>,
    /// Float inputs by binding name.
    pub(crate) inputs: Vec<(&'static str, Storage)>,
    /// Storage of the binding `output`, for kernels that have one.
    pub(crate) output: Option<Storage>,
    /// Needs subgroup operations.
    pub(crate) subgroups: bool,
}

impl Variant {
    /// Name, element types and constants, for labels and messages.
    pub(crate) fn label(&self) -> String {
        let mut label = format!("multihead {}", self.name);
        for storage in self.inputs.iter().map(|(_, storage)| storage).chain(&self.output) {
            let _ = write!(label, " {storage:?}");
        }
        for (name, value) in &self.constants {
            let _ = write!(label, " {name}={value}");
        }
        label
    }

    /// The whole WGSL text.
    pub(crate) fn source(&self) -> String {
        let mut source = String::new();
        if self
            .inputs
            .iter()
            .map(|(_, storage)| storage)
            .chain(&self.output)
            .any(|s| *s == Storage::F16)
        {
            source.push_str("enable f16;\n");
        }
        for (name, value) in &self.constants {
            let _ = writeln!(source, "const {name}: u32 = {value}u;");
        }
        for (name, storage) in &self.inputs {
            source.push_str(&storage.loader(name));
        }
        if let Some(storage) = self.output {
            source.push_str(&storage.store());
        }
        for piece in &self.pieces {
            source.push_str(piece);
        }
        source
    }
}

impl Variant {
    /// Placeholders for all that it binds besides the params.
    fn absent_bindings(&self, gpu: &Gpu) -> Vec<Binding> {
        let declared = self.pieces.iter().flat_map(|piece| piece.lines());
        declared
            .filter_map(|line| line.strip_prefix("@group(0) @binding(")?.split_once("var<"))
            .filter(|(_, kind)| !kind.starts_with("uniform"))
            .map(|(_, kind)| {
                if kind.starts_with("storage, read_write") {
                    Binding::absent_output(gpu)
                } else {
                    Binding::absent(gpu)
                }
            })
            .collect()
    }
}

/// Builds kernels, and has each run once without work: some drivers compile at the first dispatch. Waits.
pub(crate) fn warm_up(gpu: &Gpu, variants: &[Variant]) -> Result<()> {
    let mut batch = Batch::new(gpu);
    for variant in variants {
        batch.push_idle(variant)?;
    }
    let mut encoder = gpu.encoder();
    batch.record_uncounted(&mut encoder)?;
    gpu.submit(encoder)?;
    gpu.wait()
}

/// A built pipeline.
#[derive(Debug)]
pub(crate) struct Kernel {
    label: String,
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

impl Kernel {
    pub(crate) fn build(gpu: &Gpu, variant: &Variant) -> Result<Self> {
        Self::from_source(gpu, variant.label(), &gpu.with_fault(variant.source()))
    }

    fn from_source(gpu: &Gpu, label: String, source: &str) -> Result<Self> {
        let device = gpu.device();
        let cache = gpu.pipeline_cache();
        let built = gpu.guarded("building a kernel", 0, || {
            let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label: Some(&label),
                source: wgpu::ShaderSource::Wgsl(source.into()),
            });
            let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&label),
                layout: None,
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    // Kernels write workgroup memory before they read it; filling it costs build time.
                    zero_initialize_workgroup_memory: false,
                    ..Default::default()
                },
                cache: cache.as_ref(),
            });
            let layout = pipeline.get_bind_group_layout(0);
            (pipeline, layout)
        });
        match built {
            Ok((pipeline, layout)) => Ok(Self {
                label,
                pipeline,
                layout,
            }),
            Err(Error::Wgpu { message, .. }) => Err(Error::Shader {
                kernel: label,
                message,
            }),
            Err(other) => Err(other),
        }
    }
}

/// A buffer range as a kernel binds it.
#[derive(Debug, Clone)]
pub(crate) struct Binding {
    buffer: wgpu::Buffer,
    offset: u64,
    size: u64,
}

impl Binding {
    /// The first `bytes` of a buffer of this crate's own.
    pub(crate) fn prefix(gpu: &Gpu, what: &str, buffer: &wgpu::Buffer, bytes: u64) -> Result<Self> {
        let size = bytes.next_multiple_of(4).max(4);
        check_binding(gpu, what, size)?;
        let size = size.min(buffer.size());
        Ok(Self {
            buffer: buffer.clone(),
            offset: 0,
            size,
        })
    }

    /// A tensor's range, with the element at which it starts in the binding: binding offsets are coarser than
    /// tensors'. A tensor without elements binds the placeholder.
    pub(crate) fn tensor(gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<(Self, u32)> {
        if tensor.is_empty() {
            return Ok((Self::absent(gpu), 0));
        }
        Self::elements(gpu, what, tensor, 0..tensor.extent())
    }

    /// The part of a tensor's memory that holds the elements `range`, counted from its first one, and what to add to such
    /// a count to have the element's place in the binding. That may be below 0 and wraps, as shaders' arithmetic does.
    pub(crate) fn elements(gpu: &Gpu, what: &str, tensor: &Tensor, range: Range<u64>) -> Result<(Self, u32)> {
        let (offset, size) = Self::place(gpu, tensor, &range);
        check_binding(gpu, what, size)?;
        let start = (tensor.offset() as i64 - offset as i64) / tensor.dtype().size() as i64;
        Ok((
            Self {
                buffer: tensor.buffer().clone(),
                offset,
                size,
            },
            start as u32,
        ))
    }

    /// Whether the device can bind the elements `range` of a tensor at once.
    pub(crate) fn fits(gpu: &Gpu, tensor: &Tensor, range: &Range<u64>) -> bool {
        Self::place(gpu, tensor, range).1 <= most_bytes(gpu)
    }

    fn place(gpu: &Gpu, tensor: &Tensor, range: &Range<u64>) -> (u64, u64) {
        let alignment = u64::from(gpu.limits().min_storage_buffer_offset_alignment).max(4);
        let byte = |element: u64| {
            element
                .saturating_mul(tensor.dtype().size() as u64)
                .saturating_add(tensor.offset())
        };
        let offset = byte(range.start) / alignment * alignment;
        let size = (byte(range.end) - offset)
            .checked_next_multiple_of(4)
            .unwrap_or(u64::MAX);
        (offset, size)
    }

    /// [`Binding::tensor`] for a tensor that is written.
    pub(crate) fn output(gpu: &Gpu, what: &str, tensor: &Tensor) -> Result<(Self, u32)> {
        if tensor.is_empty() {
            return Ok((Self::absent_output(gpu), 0));
        }
        Self::tensor(gpu, what, tensor)
    }

    /// Stands for an input that is absent.
    pub(crate) fn absent(gpu: &Gpu) -> Self {
        Self {
            buffer: gpu.absent().clone(),
            offset: 0,
            size: 16,
        }
    }

    /// Stands for an output that is absent.
    pub(crate) fn absent_output(gpu: &Gpu) -> Self {
        Self {
            buffer: gpu.absent_output().clone(),
            offset: 0,
            size: 16,
        }
    }
}

/// Bytes that one binding may have. Shaders count elements, and bytes of packed elements, in 32 bits.
pub(crate) fn most_bytes(gpu: &Gpu) -> u64 {
    gpu.limits()
        .max_storage_buffer_binding_size
        .min(u64::from(u32::MAX))
}

fn check_binding(gpu: &Gpu, what: &str, size: u64) -> Result<()> {
    let allows = most_bytes(gpu);
    if size > allows {
        return Err(Error::Limit {
            what: what.to_owned(),
            needs: size,
            allows,
            limit: "max_storage_buffer_binding_size",
            advice: "split the call by batch or by heads, or open the device with the adapter's own limits"
                .to_owned(),
        });
    }
    Ok(())
}

/// Dispatches of one call: prepared and checked first, then recorded in one compute pass.
pub(crate) struct Batch<'a> {
    gpu: &'a Gpu,
    params: Vec<u8>,
    calls: Vec<Call>,
    /// What is counted instead of recorded, if the call is only planned.
    plan: Option<Counted>,
}

/// What a planned call would take.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    pub(crate) dispatches: u64,
    pub(crate) scratch: HashMap<Scratch, u64>,
    pub(crate) key_tiles: u64,
    pub(crate) hidden_key_tiles: u64,
}

struct Call {
    kernel: Arc<Kernel>,
    params: u64,
    params_size: u64,
    bindings: Vec<Binding>,
    grid: [u32; 2],
}

/// A folded grid: workgroup `(x, y)` is number `y * width + x` of `groups`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) groups: u32,
    pub(crate) width: u32,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(gpu: &'a Gpu) -> Self {
        Self {
            gpu,
            params: Vec::new(),
            calls: Vec::new(),
            plan: None,
        }
    }

    /// A batch that counts and records nothing. Its tensors may be [`Tensor::planned`].
    pub(crate) fn planned(gpu: &'a Gpu) -> Self {
        Self {
            plan: Some(Counted::default()),
            ..Self::new(gpu)
        }
    }

    /// What was counted, and the bytes of the params.
    pub(crate) fn counted(self) -> (Counted, u64) {
        let params = self.params.len() as u64;
        (self.plan.unwrap_or_default(), params.next_multiple_of(16))
    }

    pub(crate) fn is_planned(&self) -> bool {
        self.plan.is_some()
    }

    /// Counts tiles of keys that are looked at and that are not.
    pub(crate) fn count_key_tiles(&mut self, seen: u64, hidden: u64) {
        if let Some(plan) = &mut self.plan {
            plan.key_tiles += seen;
            plan.hidden_key_tiles += hidden;
        }
    }

    /// [`Gpu::scratch`], or its count.
    pub(crate) fn scratch(&mut self, slot: Scratch, bytes: u64) -> Result<wgpu::Buffer> {
        let Some(plan) = &mut self.plan else {
            return self.gpu.scratch(slot, bytes);
        };
        let size = self
            .gpu
            .check_size(&format!("multihead scratch {slot:?}"), bytes)?;
        let most = plan.scratch.entry(slot).or_default();
        *most = size.max(*most);
        Ok(self.gpu.absent().clone())
    }

    pub(crate) fn gpu(&self) -> &'a Gpu {
        self.gpu
    }

    /// Adds a dispatch of `groups` workgroups. A grid has at most 65,535 on an axis, so they are folded into
    /// rows; kernels unfold them and skip what is too many. None at all adds nothing.
    pub(crate) fn push<P: Params>(
        &mut self,
        variant: &Variant,
        params: impl FnOnce(Grid) -> P,
        bindings: Vec<Binding>,
        groups: u64,
    ) -> Result<()> {
        if groups == 0 {
            return Ok(());
        }
        let most = u64::from(self.gpu.limits().max_compute_workgroups_per_dimension);
        let allows = most.saturating_mul(most).min(u64::from(u32::MAX));
        if groups > allows {
            return Err(Error::Limit {
                what: format!("a dispatch of {}", variant.name),
                needs: groups,
                allows,
                limit: "max_compute_workgroups_per_dimension",
                advice: "split the call by batch or by heads".to_owned(),
            });
        }
        let rows = groups.div_ceil(most);
        let width = groups.div_ceil(rows) as u32;
        let alignment = (self.gpu.limits().min_uniform_buffer_offset_alignment as usize).max(16);
        self.params
            .resize(self.params.len().next_multiple_of(alignment), 0);
        let start = self.params.len() as u64;
        self.params.extend_from_slice(bytemuck::bytes_of(&params(Grid {
            groups: groups as u32,
            width,
        })));
        if let Some(plan) = &mut self.plan {
            plan.dispatches += 1;
            return Ok(());
        }
        self.calls.push(Call {
            kernel: self.gpu.kernel(variant)?,
            params: start,
            params_size: size_of::<P>() as u64,
            bindings,
            grid: [width, rows as u32],
        });
        Ok(())
    }

    /// Adds a dispatch of a kernel that does nothing: with params of zeros it has no workgroup to work for.
    fn push_idle(&mut self, variant: &Variant) -> Result<()> {
        /// More than any kernel's params.
        const PARAMS: usize = 512;
        let alignment = (self.gpu.limits().min_uniform_buffer_offset_alignment as usize).max(16);
        self.params
            .resize(self.params.len().next_multiple_of(alignment), 0);
        let params = self.params.len() as u64;
        self.params.resize(self.params.len() + PARAMS, 0);
        self.calls.push(Call {
            kernel: self.gpu.kernel(variant)?,
            params,
            params_size: PARAMS as u64,
            bindings: variant.absent_bindings(self.gpu),
            grid: [1, 1],
        });
        Ok(())
    }

    /// Binds everything, and only then records. On an error nothing is recorded.
    pub(crate) fn record(self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        let (gpu, dispatches) = (self.gpu, self.calls.len() as u64);
        self.record_as(encoder, true)?;
        gpu.count_dispatches(dispatches);
        Ok(())
    }

    /// [`Batch::record`] of dispatches that the caller did not ask for, and that no count or profile shows.
    pub(crate) fn record_uncounted(self, encoder: &mut wgpu::CommandEncoder) -> Result<()> {
        self.record_as(encoder, false)
    }

    fn record_as(self, encoder: &mut wgpu::CommandEncoder, asked_for: bool) -> Result<()> {
        let Self {
            gpu, params, calls, ..
        } = self;
        if calls.is_empty() {
            return Ok(());
        }
        // `Queue::write_buffer` would run before the whole submit, so two calls recorded into one encoder would
        // share the last one's params: each batch has a buffer of its own.
        let buffer = gpu.buffer_with("multihead params", 0, wgpu::BufferUsages::UNIFORM, &params)?;
        let groups = gpu.guarded("binding a call's buffers", 0, || {
            let bind = |call: &Call| {
                let range = |buffer, offset, size| {
                    wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer,
                        offset,
                        size: NonZeroU64::new(size),
                    })
                };
                let params = [range(&buffer.buffer, call.params, call.params_size)];
                let inputs = call.bindings.iter().map(|b| range(&b.buffer, b.offset, b.size));
                let entries: Vec<_> = params
                    .into_iter()
                    .chain(inputs)
                    .zip(0..)
                    .map(|(resource, binding)| wgpu::BindGroupEntry { binding, resource })
                    .collect();
                gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
                    label: Some(&call.kernel.label),
                    layout: &call.kernel.layout,
                    entries: &entries,
                })
            };
            calls.iter().map(bind).collect::<Vec<_>>()
        })?;
        if asked_for && gpu.is_profiling() {
            return record_timed(gpu, encoder, &calls, &groups);
        }
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
            label: Some("multihead"),
            timestamp_writes: None,
        });
        for (call, group) in calls.iter().zip(&groups) {
            call.dispatch(&mut pass, group);
        }
        Ok(())
    }
}

impl Call {
    fn dispatch(&self, pass: &mut wgpu::ComputePass, group: &wgpu::BindGroup) {
        pass.push_debug_group(&self.kernel.label);
        pass.set_pipeline(&self.kernel.pipeline);
        pass.set_bind_group(0, group, &[]);
        pass.dispatch_workgroups(self.grid[0], self.grid[1], 1);
        pass.pop_debug_group();
    }
}

/// A pass for each dispatch, whose beginning and end the device notes. All queries are made before the first is recorded.
fn record_timed(
    gpu: &Gpu,
    encoder: &mut wgpu::CommandEncoder,
    calls: &[Call],
    groups: &[wgpu::BindGroup],
) -> Result<()> {
    let label = |call: &Call| call.kernel.label.clone();
    let timed: Vec<Timed> = calls
        .chunks(MOST_TIMED)
        .map(|calls| gpu.timed(calls.iter().map(label).collect()))
        .collect::<Result<_>>()?;
    for (part, timed) in timed.into_iter().enumerate() {
        let range = part * MOST_TIMED..part * MOST_TIMED + timed.kernels.len();
        let mut query = 0;
        for (call, group) in calls[range.clone()].iter().zip(&groups[range]) {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: Some(&call.kernel.label),
                timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                    query_set: &timed.queries,
                    beginning_of_pass_write_index: Some(query),
                    end_of_pass_write_index: Some(query + 1),
                }),
            });
            call.dispatch(&mut pass, group);
            query += 2;
        }
        encoder.resolve_query_set(&timed.queries, 0..query, &timed.ticks.buffer, 0);
        gpu.keep_timed(timed);
    }
    Ok(())
}

/// A kernel's params: 4-byte scalars alone, a multiple of 16 bytes, as WGSL lays out a uniform.
pub(crate) trait Params: bytemuck::Pod {
    /// Name and byte offset of every field, nested ones as `outer.inner`.
    #[cfg(test)]
    fn fields() -> Vec<(String, usize)>;
}

/// Defines a params struct with its field list, which a test holds against the WGSL. Scalars come first, then
/// structs, which WGSL aligns to 16 bytes.
macro_rules! params {
    ($(#[$meta:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? } $($inner:ident: $struct:ty),* $(,)?) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
        #[repr(C)]
        pub(crate) struct $name {
            $(pub(crate) $field: $type,)*
            $(pub(crate) $inner: $struct,)*
        }

        const _: () = assert!(size_of::<$name>() % 16 == 0, "pad the params to a multiple of 16 bytes");

        impl crate::kernel::Params for $name {
            #[cfg(test)]
            fn fields() -> Vec<(String, usize)> {
                #[allow(unused_mut)]
                let mut fields = vec![$((stringify!($field).to_owned(), std::mem::offset_of!($name, $field))),*];
                $(
                    let start = std::mem::offset_of!($name, $inner);
                    fields.extend(
                        <$struct as crate::kernel::Params>::fields()
                            .into_iter()
                            .map(|(field, offset)| (format!("{}.{field}", stringify!($inner)), start + offset)),
                    );
                )*
                fields
            }
        }
    };
}
pub(crate) use params;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A kernel that does not compile, or not on this device, is an error with its name and the compiler's words;
    /// the device goes on, and no half-built pipeline is kept.
    #[test]
    fn a_broken_shader_is_an_error_and_not_zeros() {
        let gpu = Gpu::new().unwrap();
        let entry = "@compute @workgroup_size(1) fn main() {}";
        for (source, says) in [
            ("fn main( {", "expected"),
            ("@compute @workgroup_size(1) fn other() {}", "main"),
            (
                "@compute @workgroup_size(1) fn main() { let x: f32 = 1u; }",
                "f32",
            ),
            ("@compute @workgroup_size(1 << 30) fn main() {}", "Workgroup size"),
            (
                "const INFINITE: f32 = 1.0 / 0.0;\n@compute @workgroup_size(1) fn main() {}",
                "0.0",
            ),
        ] {
            let built = Kernel::from_source(&gpu, "broken".to_owned(), source);
            let Err(Error::Shader { kernel, message }) = built else {
                unreachable!("{source} gave {built:?}");
            };
            assert_eq!(kernel, "broken");
            assert!(message.contains(says), "{source}: {message}");
        }
        let broken = Variant {
            name: "broken",
            pieces: vec!["not WGSL"],
            constants: vec![],
            inputs: vec![],
            output: None,
            subgroups: false,
        };
        for _ in 0..2 {
            assert!(matches!(gpu.kernel(&broken), Err(Error::Shader { .. })));
        }
        assert!(Kernel::from_source(&gpu, "whole".to_owned(), entry).is_ok());
        let one = Tensor::upload(&gpu, &[1.0f32], &[1, 1]).unwrap();
        let linear = crate::Linear::new(one.clone(), None).unwrap();
        assert_eq!(linear.run(&one).unwrap().download::<f32>(), Ok(vec![1.0]));
    }
}
