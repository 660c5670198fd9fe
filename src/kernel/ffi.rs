//! The C functions behind [`super`] and [`super::cudart`]. Without feature `cuda` each is replaced by one that answers
//! [`NOT_COMPILED`], so that callers are the same code in both builds.

use std::ffi::{c_int, c_uint, c_void};

use super::{
    DecAttnArgs, GemvArgs, H16Args, Launch, MaskTilesArgs, MmArgs, MoeH16Args, MoeMmArgs, MoeRouteArgs, NormArgs,
    PrefillFa4Args, QkvTailArgs,
};

/// No `cudaError_t` is negative.
pub const NOT_COMPILED: c_int = -1;

macro_rules! c_functions {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> c_int;)*) => {
        #[cfg(feature = "cuda")]
        #[allow(non_snake_case)]
        extern "C" {
            $(pub fn $name($($arg: $ty),*) -> c_int;)*
        }
        $(
            #[cfg(not(feature = "cuda"))]
            #[allow(non_snake_case)]
            pub unsafe fn $name($(_: $ty),*) -> c_int {
                NOT_COMPILED
            }
        )*
    };
}

c_functions! {
    fn frt_norm(args: *const NormArgs, launch: Launch) -> c_int;
    fn frt_gemv(args: *const GemvArgs, launch: Launch) -> c_int;
    fn frt_gemv_supports(ty: i32, k: i32, n_tokens: i32, glu: i32) -> c_int;
    fn frt_qkv_tail(args: *const QkvTailArgs, launch: Launch) -> c_int;
    fn frt_dec_attn(args: *const DecAttnArgs, launch: Launch) -> c_int;
    fn frt_mask_tiles(args: *const MaskTilesArgs, launch: Launch) -> c_int;
    fn frt_prefill_fa4(args: *const PrefillFa4Args, launch: Launch) -> c_int;
    fn frt_prefill_fa4_supports(head_dim: i32, head_dim_v: i32) -> c_int;
    fn frt_mm(args: *const MmArgs, launch: Launch) -> c_int;
    fn frt_mm_supports(ty: i32, k: i32, glu: i32) -> c_int;
    fn frt_to_h16(args: *const H16Args, launch: Launch) -> c_int;
    fn frt_moe_route(args: *const MoeRouteArgs, launch: Launch) -> c_int;
    fn frt_moe_max_rows(n_pairs: i32, n_experts: i32) -> c_int;
    fn frt_moe_to_h16(args: *const MoeH16Args, launch: Launch) -> c_int;
    fn frt_moe_mm(args: *const MoeMmArgs, launch: Launch) -> c_int;
    fn frt_moe_mm_supports(ty: i32, k: i32, glu: i32, n_experts: i32) -> c_int;

    fn cudaGetDeviceCount(count: *mut c_int) -> c_int;
    fn cudaGetDevice(device: *mut c_int) -> c_int;
    fn cudaSetDevice(device: c_int) -> c_int;
    fn cudaDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
    fn cudaMalloc(ptr: *mut *mut c_void, bytes: usize) -> c_int;
    fn cudaFree(ptr: *mut c_void) -> c_int;
    fn cudaMemcpyAsync(dst: *mut c_void, src: *const c_void, bytes: usize, kind: c_int, stream: *mut c_void) -> c_int;
    fn cudaMemsetAsync(dst: *mut c_void, byte: c_int, bytes: usize, stream: *mut c_void) -> c_int;
    fn cudaStreamCreateWithFlags(stream: *mut *mut c_void, flags: c_uint) -> c_int;
    fn cudaStreamDestroy(stream: *mut c_void) -> c_int;
    fn cudaStreamSynchronize(stream: *mut c_void) -> c_int;
    fn cudaGetLastError() -> c_int;
}

#[cfg(feature = "cuda")]
mod names {
    use std::ffi::{c_char, c_int, CStr};

    extern "C" {
        fn cudaGetErrorName(code: c_int) -> *const c_char;
        fn frt_archs() -> *const c_char;
        fn frt_prefill_fa4_modules() -> *const c_char;
    }

    pub fn error_name(code: c_int) -> String {
        // SAFETY: a string literal of the runtime, for unknown codes too.
        unsafe { CStr::from_ptr(cudaGetErrorName(code)) }
            .to_string_lossy()
            .into_owned()
    }

    pub fn archs() -> String {
        // SAFETY: a string literal of the archive.
        unsafe { CStr::from_ptr(frt_archs()) }.to_string_lossy().into_owned()
    }

    pub fn prefill_fa4_modules() -> String {
        // SAFETY: a string literal of the archive.
        let names = unsafe { CStr::from_ptr(frt_prefill_fa4_modules()) }.to_string_lossy();
        names.trim_end().to_owned()
    }
}

#[cfg(not(feature = "cuda"))]
mod names {
    use std::ffi::c_int;

    pub fn error_name(_: c_int) -> String {
        "unknown".into()
    }

    pub fn archs() -> String {
        String::new()
    }

    pub fn prefill_fa4_modules() -> String {
        String::new()
    }
}

pub use names::{archs, error_name, prefill_fa4_modules};
