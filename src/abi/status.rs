//! Numbered outcomes. A number that falls out of use is retired, never given to another meaning.

use std::ffi::{c_char, c_int, CStr};

/// Outcome of a call.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlashrtStatus {
    /// Done.
    Ok = 0,
    /// A pointer that must not be null is null, or an index is out of range.
    BadArgument = 1,
    /// The host was compiled against another version of `flashrt.h`. Nothing is fused for it.
    AbiMismatch = 2,
    /// Switched off: by the user, by a failed self-check on this device, or by an earlier panic. Nothing is fused.
    Disabled = 3,
    /// A kernel launch of this evaluation failed: its results are incomplete and its capture must not be replayed.
    LaunchFailed = 4,
    /// A bug in the library was caught at its boundary. The library has switched itself off.
    Panicked = 5,
    /// The caller's buffer is too small; nothing was written to it.
    BufferTooSmall = 6,
}

impl FlashrtStatus {
    const ALL: [FlashrtStatus; 7] = [
        FlashrtStatus::Ok,
        FlashrtStatus::BadArgument,
        FlashrtStatus::AbiMismatch,
        FlashrtStatus::Disabled,
        FlashrtStatus::LaunchFailed,
        FlashrtStatus::Panicked,
        FlashrtStatus::BufferTooSmall,
    ];

    fn name(self) -> &'static CStr {
        match self {
            FlashrtStatus::Ok => c"ok",
            FlashrtStatus::BadArgument => c"bad argument",
            FlashrtStatus::AbiMismatch => c"ABI mismatch",
            FlashrtStatus::Disabled => c"disabled",
            FlashrtStatus::LaunchFailed => c"launch failed",
            FlashrtStatus::Panicked => c"panicked",
            FlashrtStatus::BufferTooSmall => c"buffer too small",
        }
    }
}

/// Name of a status, or "unknown status". The string is constant.
#[no_mangle]
pub extern "C" fn flashrt_status_name(status: c_int) -> *const c_char {
    let known = FlashrtStatus::ALL.into_iter().find(|s| *s as c_int == status);
    known.map_or(c"unknown status", FlashrtStatus::name).as_ptr()
}
