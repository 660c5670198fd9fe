//! Safe view of the struct that the host fills for every call.

use super::{OpTable, Tensor};
use crate::abi::host::{
    FlashrtBufferKind, FlashrtHost, FlashrtRegion, FLASHRT_HOST_CAPTURING, FLASHRT_HOST_FUSION_OFF, FLASHRT_HOST_PDL,
};
use std::ffi::{c_void, CString};
use std::io::Write;

/// Severity of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    /// Shown with verbose logging.
    Debug = 0,
    /// Something a user may want to know.
    Info = 1,
    /// Something is off; the run goes on.
    Warn = 2,
    /// A request failed.
    Error = 3,
}

/// Prints a whole text. That nobody reads it (a closed pipe, a full disk) is no reason to end the host's process, as `eprint!` would.
pub fn to_stderr(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Where a tensor's bytes live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BufferKind {
    /// Not this device's own memory.
    Foreign,
    /// This device's memory.
    Own,
    /// This device's memory, marked as weights: constant during a graph.
    OwnWeights,
}

/// Where a node stands with respect to the host's concurrent regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Region {
    /// Outside.
    None,
    /// The region forks after this node.
    Fork,
    /// The region joins before this node.
    Join,
    /// On this branch of a region, counted from 1.
    Branch(u32),
}

/// What the host says of itself in one call.
#[derive(Clone, Copy)]
pub struct HostView<'h>(&'h FlashrtHost);

impl<'h> HostView<'h> {
    /// # Safety
    /// `raw` points to a [`FlashrtHost`] of this ABI version whose pointers and callbacks are valid during `'h`.
    pub unsafe fn from_raw(raw: *const FlashrtHost) -> Option<HostView<'h>> {
        unsafe { raw.as_ref() }.map(HostView)
    }

    /// Key of everything that lives as long as the backend context.
    pub fn context(self) -> usize {
        self.0.context as usize
    }

    /// CUDA device ordinal.
    pub fn device(self) -> i32 {
        self.0.device
    }

    /// Compute capability times 10.
    pub fn cc(self) -> i32 {
        self.0.cc
    }

    /// Multiprocessors of the device.
    pub fn sm_count(self) -> i32 {
        self.0.sm_count
    }

    /// Does the host launch its kernels with programmatic dependent launch?
    pub fn pdl(self) -> bool {
        self.0.flags & FLASHRT_HOST_PDL != 0
    }

    /// Is the stream capturing, so that nothing may be allocated?
    pub fn capturing(self) -> bool {
        self.0.flags & FLASHRT_HOST_CAPTURING != 0
    }

    /// Has the user switched all fusion off?
    pub fn fusion_off(self) -> bool {
        self.0.flags & FLASHRT_HOST_FUSION_OFF != 0
    }

    /// `cudaStream_t` to launch on.
    pub fn stream(self) -> *mut c_void {
        self.0.stream
    }

    /// Table of the host's operation numbers.
    pub fn ops(self) -> OpTable<'h> {
        if self.0.op_codes.is_null() {
            return OpTable::new(&[]);
        }
        // SAFETY: the host says how long its table is.
        OpTable::new(unsafe { std::slice::from_raw_parts(self.0.op_codes, self.0.n_op_codes as usize) })
    }

    /// Where a tensor's bytes live; foreign when the host cannot say.
    pub fn buffer_kind(self, t: Tensor) -> BufferKind {
        // SAFETY: the callback takes the host's own tensor.
        let kind = self
            .0
            .buffer_kind
            .map(|f| unsafe { f(self.0.user, t.address() as *const c_void) });
        match kind {
            Some(k) if k == FlashrtBufferKind::Own as i32 => BufferKind::Own,
            Some(k) if k == FlashrtBufferKind::OwnWeights as i32 => BufferKind::OwnWeights,
            _ => BufferKind::Foreign,
        }
    }

    /// Region of a node.
    pub fn region(self, t: Tensor) -> Region {
        // SAFETY: as for `buffer_kind`.
        let region = self
            .0
            .region
            .map_or(0, |f| unsafe { f(self.0.user, t.address() as *const c_void) });
        match region {
            r if r == FlashrtRegion::Fork as i32 => Region::Fork,
            r if r == FlashrtRegion::Join as i32 => Region::Join,
            r if r > FlashrtRegion::Branch as i32 => Region::Branch((r - FlashrtRegion::Branch as i32) as u32),
            _ => Region::None,
        }
    }

    /// The host's name for an operation number.
    pub fn op_name(self, number: i32) -> String {
        // SAFETY: the host returns a constant NUL-terminated string or null.
        let name = self.0.op_name.map_or(std::ptr::null(), |f| unsafe { f(number) });
        if name.is_null() {
            return format!("op {number}");
        }
        // SAFETY: as above.
        unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Hands a line to the host's log, or to stderr when it has none.
    pub fn log(self, level: LogLevel, text: &str) {
        let Some(log) = self.0.log else {
            to_stderr(&format!("{text}\n"));
            return;
        };
        if let Ok(text) = CString::new(text.replace('\0', " ")) {
            // SAFETY: the string lives during the call.
            unsafe { log(self.0.user, level as i32, text.as_ptr()) }
        }
    }
}
