//! What the host (the glue compiled inside ggml-cuda) hands over: plain C, read only.

use std::ffi::{c_char, c_int, c_void};

/// Version of `flashrt_host` and of every entry point. A host built against another version is refused.
pub const FLASHRT_ABI_VERSION: u32 = 1;

/// Where the bytes of a tensor live, as the host sees it.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlashrtBufferKind {
    /// Not in a buffer of this device: another device's, host memory (also where the GPU can address it), or none at all.
    Foreign = 0,
    /// This device's own memory.
    Own = 1,
    /// This device's own memory, in a buffer that the host marked as weights: its bytes do not change during a graph.
    OwnWeights = 2,
}

/// Where a node stands with respect to the concurrent regions of `GGML_CUDA_GRAPH_OPT=1`.
/// A value of `FLASHRT_REGION_BRANCH + b` (b >= 1) means: inside a region, on branch b.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlashrtRegion {
    /// Outside of every region.
    None = 0,
    /// The node a region forks from.
    Fork = 1,
    /// The node a region joins at. A node that is both counts as a join.
    Join = 2,
    /// The first branch is this value plus 1.
    Branch = 16,
}

/// Bit of `flashrt_host.flags`: the host launches its kernels with programmatic dependent launch.
pub const FLASHRT_HOST_PDL: u32 = 1;
/// Bit of `flashrt_host.flags`: the stream is capturing, nothing may be allocated.
pub const FLASHRT_HOST_CAPTURING: u32 = 2;
/// Bit of `flashrt_host.flags`: `GGML_CUDA_DISABLE_FUSION` is set, decline everything.
pub const FLASHRT_HOST_FUSION_OFF: u32 = 4;

/// Filled by the host, only read during the call it is passed to. The first four fields keep their place in every ABI version,
/// so that a mismatch can be reported through the host's own log.
#[repr(C)]
pub struct FlashrtHost {
    /// `FLASHRT_ABI_VERSION` the host was compiled with.
    pub abi_version: u32,
    /// `sizeof(flashrt_host)` the host was compiled with.
    pub struct_size: u32,
    /// Takes one line without newline; level 0 debug, 1 info, 2 warning, 3 error. Null: lines go to stderr.
    pub log: Option<unsafe extern "C" fn(user: *mut c_void, level: c_int, text: *const c_char)>,
    /// Passed to every callback.
    pub user: *mut c_void,
    /// The backend context: key of plans, arenas and hand-offs. Never dereferenced.
    pub context: *mut c_void,
    /// CUDA device ordinal. The device is current during every call.
    pub device: c_int,
    /// Compute capability times 10: 90 for sm_90.
    pub cc: c_int,
    /// Multiprocessors of the device.
    pub sm_count: c_int,
    /// `FLASHRT_HOST_*` bits.
    pub flags: u32,
    /// `cudaStream_t` to launch on.
    pub stream: *mut c_void,
    /// `op_codes[op]` is the `flashrt_op` of the host's `ggml_op` number `op`.
    pub op_codes: *const u8,
    /// Entries of `op_codes`.
    pub n_op_codes: u32,
    /// Name of a `ggml_op` number of the host, for dumps. May be null.
    pub op_name: Option<unsafe extern "C" fn(op: c_int) -> *const c_char>,
    /// Where a tensor (a `const ggml_tensor *`) lives: a `flashrt_buffer_kind`. Null: every tensor is foreign.
    pub buffer_kind: Option<unsafe extern "C" fn(user: *mut c_void, tensor: *const c_void) -> c_int>,
    /// Where a node stands: a `flashrt_region`. Null: there are no regions.
    pub region: Option<unsafe extern "C" fn(user: *mut c_void, tensor: *const c_void) -> c_int>,
}
