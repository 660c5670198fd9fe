//! Signatures of host/check/flashrt_check.c.

use libloading::Library;
use std::ffi::{c_char, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;

pub type LogFn = extern "C" fn(level: i32, text: *const c_char, user: *mut c_void);
pub type EvalFn = extern "C" fn(node: *mut c_void, ask: bool, user: *mut c_void) -> bool;

macro_rules! api {
    ($($field:ident = $symbol:literal: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions, and the library that keeps them mapped.
        pub struct Api {
            $(pub $field: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            // Never unmapped: the host's worker threads may still run when the last handle goes.
            _library: ManuallyDrop<Library>,
        }

        impl Api {
            pub fn open(path: &Path) -> Result<Api, libloading::Error> {
                // SAFETY: loading runs the initialisers of llama.cpp's libraries, which have no preconditions; each symbol
                // has the type that the C file gives it.
                unsafe {
                    let library = ManuallyDrop::new(Library::new(path)?);
                    Ok(Api { $($field: *library.get(concat!($symbol, "\0").as_bytes())?,)* _library: library })
                }
            }
        }
    };
}

api! {
    version = "frt_check_version": fn() -> i32;
    ggml_version = "frt_check_ggml_version": fn() -> *const c_char;
    set_log = "frt_check_set_log": fn(Option<LogFn>, *mut c_void);
    init = "frt_check_init": fn(*const c_char);
    model_load = "frt_check_model_load": fn(*const c_char) -> *mut c_void;
    model_free = "frt_check_model_free": fn(*mut c_void);
    vocab = "frt_check_vocab": fn(*const c_void) -> i32;
    layers = "frt_check_layers": fn(*const c_void) -> i32;
    describe = "frt_check_describe": fn(*const c_void, *mut c_char, usize) -> i32;
    context_new = "frt_check_context_new": fn(*mut c_void, u32, u32, i32, Option<EvalFn>, *mut c_void) -> *mut c_void;
    context_free = "frt_check_context_free": fn(*mut c_void);
    decode = "frt_check_decode": fn(*mut c_void, i32, *const i32, *const i32, *const i32, *const i8) -> i32;
    nbytes = "frt_check_nbytes": fn(*const c_void) -> usize;
    is_weight = "frt_check_is_weight": fn(*const c_void) -> bool;
    n_ops = "frt_check_n_ops": fn() -> i32;
    op_name = "frt_check_op_name": fn(i32) -> *const c_char;
}
