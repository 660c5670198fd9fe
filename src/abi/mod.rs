//! The C ABI: entry points, status codes, last error, panic boundary. Nothing else. `include/flashrt.h` is generated from this
//! module and opens with the contract.

mod boundary;
pub mod host;
pub mod layout;
mod status;

pub use boundary::flashrt_last_error;
pub use status::{flashrt_status_name, FlashrtStatus};

use crate::graph::host::to_stderr;
use crate::graph::raw::RawGraph;
use crate::graph::{GraphRef, HostView};
use crate::window::engine::{Engine, EvalStatus};
use boundary::{guarded, set_last_error};
use host::{FlashrtHost, FLASHRT_ABI_VERSION};
use std::ffi::{c_char, c_int, c_void, CString};
use std::mem::{offset_of, size_of};
use std::sync::{Once, OnceLock};

/// `FLASHRT_ABI_VERSION` of the library.
#[no_mangle]
pub extern "C" fn flashrt_abi_version() -> u32 {
    FLASHRT_ABI_VERSION
}

/// Architectures the kernels were compiled for, such as "sm_90a compute_90"; empty in a build without kernels.
/// The string is constant.
#[no_mangle]
pub extern "C" fn flashrt_archs() -> *const c_char {
    static ARCHS: OnceLock<CString> = OnceLock::new();
    let archs = || {
        ARCHS
            .get_or_init(|| CString::new(crate::kernel::archs()).unwrap_or_default())
            .as_ptr()
    };
    guarded("flashrt_archs", switch_off_and(c"".as_ptr()), archs)
}

/// Start of an evaluation, before the host looks at its captured graphs. May allocate, load modules and match; must not be
/// called while the stream is capturing. Anything but `FLASHRT_STATUS_OK` means that nothing will be fused in this evaluation:
/// the host may leave out the other calls.
///
/// # Safety
/// `host` points to a filled `flashrt_host`, `graph` to a `const ggml_cgraph`; both may be null.
#[no_mangle]
pub unsafe extern "C" fn flashrt_eval_begin(host: *const FlashrtHost, graph: *const c_void) -> FlashrtStatus {
    guarded("flashrt_eval_begin", switch_off_and(FlashrtStatus::Panicked), || {
        // SAFETY: passed on from the caller.
        let (host, graph) = match unsafe { arguments("flashrt_eval_begin", host, graph) } {
            Ok(arguments) => arguments,
            Err(status) => return status,
        };
        let engine = Engine::global();
        engine.eval_begin(&host, graph);
        if engine.is_evaluating(&host) {
            FlashrtStatus::Ok
        } else {
            set_last_error("flashrt_eval_begin: off; the log or flashrt_stats says why");
            FlashrtStatus::Disabled
        }
    })
}

/// Does a window start at node `i`? `n > 0`: the nodes `i … i + n - 1` are done. `0`: not ours, nothing was touched.
///
/// A failed launch is latched and reported by `flashrt_eval_end`; from then on every call claims the rest of the graph, so that
/// nothing more is put on a stream whose capture may be broken.
///
/// # Safety
/// As for `flashrt_eval_begin`, and with the graph that was passed there.
#[no_mangle]
pub unsafe extern "C" fn flashrt_fuse(host: *const FlashrtHost, graph: *const c_void, i: c_int) -> c_int {
    guarded("flashrt_fuse", switch_off_and(0), || {
        // SAFETY: passed on from the caller.
        let Ok((host, graph)) = (unsafe { arguments("flashrt_fuse", host, graph) }) else {
            return 0;
        };
        let Some(i) = node_index("flashrt_fuse", graph, i) else {
            return 0;
        };
        c_int::try_from(Engine::global().fuse(&host, graph, i)).unwrap_or(0)
    })
}

/// End of an evaluation, after the last node and with a capture still open.
///
/// `FLASHRT_STATUS_LAUNCH_FAILED`: close the capture, drop it, and report the evaluation as failed.
///
/// # Safety
/// `host` points to a filled `flashrt_host` or is null.
#[no_mangle]
pub unsafe extern "C" fn flashrt_eval_end(host: *const FlashrtHost) -> FlashrtStatus {
    guarded("flashrt_eval_end", switch_off_and(FlashrtStatus::Panicked), || {
        // SAFETY: passed on from the caller.
        let host = match unsafe { checked_host("flashrt_eval_end", host) } {
            Ok(host) => host,
            Err(status) => return status,
        };
        match Engine::global().eval_end(&host) {
            EvalStatus::Ok => FlashrtStatus::Ok,
            EvalStatus::Failed => {
                set_last_error("flashrt_eval_end: a kernel launch failed; the log says which");
                FlashrtStatus::LaunchFailed
            }
        }
    })
}

/// `1` is a promise: `flashrt_fuse` will not decline node `i` in this evaluation. `0`: it may.
///
/// # Safety
/// As for `flashrt_fuse`.
#[no_mangle]
pub unsafe extern "C" fn flashrt_takes(host: *const FlashrtHost, graph: *const c_void, i: c_int) -> c_int {
    guarded("flashrt_takes", switch_off_and(0), || {
        // SAFETY: passed on from the caller.
        let Ok((host, graph)) = (unsafe { arguments("flashrt_takes", host, graph) }) else {
            return 0;
        };
        let Some(i) = node_index("flashrt_takes", graph, i) else {
            return 0;
        };
        c_int::from(Engine::global().takes(&host, graph, i))
    })
}

/// Asked before the host re-orders nodes for concurrent regions; the graph has no addresses yet. `1`: leave the order alone.
/// The answer is the same for every batch size of a model.
///
/// # Safety
/// As for `flashrt_eval_begin`.
#[no_mangle]
pub unsafe extern "C" fn flashrt_graph_optimize(host: *const FlashrtHost, graph: *const c_void) -> c_int {
    guarded("flashrt_graph_optimize", switch_off_and(0), || {
        // SAFETY: passed on from the caller.
        let Ok((host, graph)) = (unsafe { arguments("flashrt_graph_optimize", host, graph) }) else {
            return 0;
        };
        c_int::from(Engine::global().graph_optimize(&host, graph))
    })
}

/// A backend context is about to be freed, its streams idle: plans, arenas and hand-offs under this key die with it.
#[no_mangle]
pub extern "C" fn flashrt_context_free(context: *const c_void) {
    guarded("flashrt_context_free", switch_off_and(()), || {
        Engine::global().context_free(context as usize)
    });
}

/// The device buffer of `size` bytes at `base` is about to be freed: what was derived from its contents dies with it.
#[no_mangle]
pub extern "C" fn flashrt_buffer_freed(device: c_int, base: *const c_void, size: usize) {
    let forget = || Engine::global().buffer_freed(device, base as usize, size);
    guarded("flashrt_buffer_freed", switch_off_and(()), forget);
}

/// Counters of every window as JSON, NUL-terminated. `needed` (may be null) receives the bytes that the text takes with its NUL,
/// also when `capacity` is smaller than that; `buffer` is written only on success. `buffer` may be null when `capacity` is 0.
///
/// # Safety
/// `buffer` has room for `capacity` bytes.
#[no_mangle]
pub unsafe extern "C" fn flashrt_stats(buffer: *mut c_char, capacity: usize, needed: *mut usize) -> FlashrtStatus {
    guarded("flashrt_stats", switch_off_and(FlashrtStatus::Panicked), || {
        let text = Engine::global().stats_json();
        let size = text.len() + 1;
        // SAFETY: a non-null `needed` points to a size_t.
        if let Some(needed) = unsafe { needed.as_mut() } {
            *needed = size;
        }
        if buffer.is_null() && capacity > 0 {
            set_last_error("flashrt_stats: buffer is null but capacity is not 0");
            return FlashrtStatus::BadArgument;
        }
        if capacity < size {
            set_last_error(&format!("flashrt_stats: {capacity} bytes given, {size} needed"));
            return FlashrtStatus::BufferTooSmall;
        }
        // SAFETY: the buffer holds at least `size` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, text.len());
            *buffer.add(text.len()) = 0;
        }
        FlashrtStatus::Ok
    })
}

/// After a panic: switches the engine off, which says so in the log, and answers with `value`.
fn switch_off_and<T>(value: T) -> impl FnOnce(&str) -> T {
    |reason| {
        guarded("flashrt", |_| (), || Engine::global().disable(reason));
        value
    }
}

/// # Safety
/// `host` is null or points to a struct that begins like [`FlashrtHost`] and, when its version and size match, is one.
unsafe fn checked_host<'h>(entry: &str, host: *const FlashrtHost) -> Result<HostView<'h>, FlashrtStatus> {
    if host.is_null() {
        set_last_error(&format!("{entry}: host is null"));
        return Err(FlashrtStatus::BadArgument);
    }
    // SAFETY: these two come first in every version.
    let (version, size) = unsafe { ((*host).abi_version, (*host).struct_size as usize) };
    if version != FLASHRT_ABI_VERSION || size != size_of::<FlashrtHost>() {
        // SAFETY: as above.
        unsafe { refuse(entry, host, version, size) };
        return Err(FlashrtStatus::AbiMismatch);
    }
    // SAFETY: version and size say that it is one.
    unsafe { HostView::from_raw(host) }.ok_or(FlashrtStatus::BadArgument)
}

/// Says once, through the host's own log if it is in reach, that the host speaks another version.
///
/// # Safety
/// As for [`checked_host`].
unsafe fn refuse(entry: &str, host: *const FlashrtHost, version: u32, size: usize) {
    let text = format!(
        "{entry}: the host was built for ABI version {version} (flashrt_host of {size} bytes), this library is version \
         {FLASHRT_ABI_VERSION} ({} bytes): nothing is fused; rebuild the host with this library's flashrt.h",
        size_of::<FlashrtHost>()
    );
    set_last_error(&text);
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let in_reach = size >= offset_of!(FlashrtHost, user) + size_of::<*mut c_void>();
        // SAFETY: `log` and `user` keep their place in every version, and the struct is long enough to hold them.
        let log = if in_reach {
            unsafe { (*host).log.map(|log| (log, (*host).user)) }
        } else {
            None
        };
        let line = format!("flashrt: {text}");
        match (log, CString::new(line.as_str())) {
            // SAFETY: the callback is the host's own and the text lives during the call.
            (Some((log, user)), Ok(line)) => unsafe { log(user, 2, line.as_ptr()) },
            _ => to_stderr(&format!("{line}\n")),
        }
    });
}

/// # Safety
/// As for [`checked_host`]; `graph` is null or a `ggml_cgraph` that outlives `'h`.
unsafe fn arguments<'h>(
    entry: &str,
    host: *const FlashrtHost,
    graph: *const c_void,
) -> Result<(HostView<'h>, GraphRef<'h>), FlashrtStatus> {
    // SAFETY: passed on from the caller.
    let host = unsafe { checked_host(entry, host) }?;
    // SAFETY: passed on from the caller.
    match unsafe { GraphRef::from_raw(graph.cast::<RawGraph>(), host.ops()) } {
        Some(graph) => Ok((host, graph)),
        None => {
            set_last_error(&format!("{entry}: graph is null"));
            Err(FlashrtStatus::BadArgument)
        }
    }
}

fn node_index(entry: &str, graph: GraphRef, i: c_int) -> Option<usize> {
    let index = usize::try_from(i).ok().filter(|i| *i < graph.len());
    if index.is_none() {
        set_last_error(&format!("{entry}: there is no node {i} in a graph of {}", graph.len()));
    }
    index
}
