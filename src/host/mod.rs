//! The llama.cpp build that `cargo xtask host` made, opened at run time, and its graphs watched node by node.
//!
//! Nothing here is linked: the libraries are found through `FLASHRT_HOST_DIR`. The calls go through
//! `libflashrt_check.so` (host/check), compiled with that llama.cpp's own headers, so no layout of llama.cpp is guessed
//! except the ones that [`crate::graph::raw`] declares.

mod ffi;

use crate::graph::{Op, OpTable, Tensor};
use ffi::Api;
use std::any::Any;
use std::ffi::{c_char, c_void, CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Directory of the host's shared libraries.
pub const HOST_DIR_VARIABLE: &str = "FLASHRT_HOST_DIR";
/// Where `cargo xtask host --backend cpu` puts them.
pub const DEFAULT_HOST_DIR: &str = ".flashrt/build/cpu/bin";

const BRIDGE: &str = "libflashrt_check.so";
const BRIDGE_VERSION: i32 = 1;
const LOG_LEVEL_ERROR: i32 = 4;

/// Why the host could not be used.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// There is no build of llama.cpp where one was looked for.
    #[error(
        "no llama.cpp build found: {} has no {BRIDGE}. Build one with `cargo xtask host --backend cpu`, or point \
         {HOST_DIR_VARIABLE} at the directory that holds its libraries",
        .searched.display()
    )]
    NotFound {
        /// The directory that was searched.
        searched: PathBuf,
    },
    /// The libraries are there but do not load.
    #[error("{} does not load: {reason}. Rebuild it with `cargo xtask host --backend cpu`", .path.display())]
    Unloadable {
        /// The library.
        path: PathBuf,
        /// What the dynamic loader says.
        reason: String,
    },
    /// The libraries speak another version of the bridge.
    #[error("{} has interface version {found}, this program needs {BRIDGE_VERSION}: rebuild it with `cargo xtask host --backend cpu`", .path.display())]
    Version {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: i32,
    },
    /// llama.cpp does not load the model.
    #[error("{}: llama.cpp cannot load this model: {reason}", .path.display())]
    Model {
        /// The model.
        path: PathBuf,
        /// llama.cpp's own words.
        reason: String,
    },
    /// llama.cpp gives no context for the model.
    #[error("llama.cpp cannot create a context: {reason}")]
    Context {
        /// llama.cpp's own words.
        reason: String,
    },
    /// An evaluation failed.
    #[error("llama_decode of {n_tokens} tokens failed with code {code}: {reason}")]
    Decode {
        /// Tokens of the batch.
        n_tokens: usize,
        /// What it returned.
        code: i32,
        /// llama.cpp's own words.
        reason: String,
    },
}

/// An opened build of llama.cpp.
pub struct Host {
    api: Api,
    // Boxed: the host keeps a pointer to it.
    log: Box<HostLog>,
    op_codes: Vec<u8>,
    ggml_version: String,
}

/// Errors that the host logged since they were last taken.
#[derive(Default)]
struct HostLog(Mutex<Vec<String>>);

impl HostLog {
    /// The line that names the cause: llama.cpp reports the same failure once more at every level above it.
    fn take_cause(&self) -> String {
        let lines = std::mem::take(&mut *self.0.lock().unwrap_or_else(|e| e.into_inner()));
        let cause = lines
            .iter()
            .find(|l| l.contains("error loading model:"))
            .or(lines.first());
        let cause = cause.map_or("it gave no reason", |l| {
            l.rsplit_once("error loading model: ").map_or(l, |(_, c)| c)
        });
        cause.lines().next().unwrap_or_default().trim().to_string()
    }
}

extern "C" fn collect_log(level: i32, text: *const c_char, user: *mut c_void) {
    if level != LOG_LEVEL_ERROR || text.is_null() {
        return;
    }
    // SAFETY: `user` is the `HostLog` that `Host` keeps boxed; `text` is a C string for the duration of the call.
    let (log, text) = unsafe { (&*user.cast::<HostLog>(), CStr::from_ptr(text)) };
    log.0
        .lock()
        .unwrap_or_else(|e| e.into_inner())
        .push(text.to_string_lossy().into_owned());
}

/// Directory to search: the argument, else `FLASHRT_HOST_DIR`, else [`DEFAULT_HOST_DIR`] under the working directory.
pub fn host_dir(argument: Option<&Path>) -> PathBuf {
    let from_environment = || {
        std::env::var_os(HOST_DIR_VARIABLE)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    argument
        .map(Path::to_path_buf)
        .or_else(from_environment)
        .unwrap_or_else(|| PathBuf::from(DEFAULT_HOST_DIR))
}

impl Host {
    /// Opens the build in `dir`. Call it once per process: the libraries stay mapped, since their thread pools outlive
    /// any handle.
    pub fn open(dir: &Path) -> Result<Host, HostError> {
        let path = dir.join(BRIDGE);
        if !path.is_file() {
            return Err(HostError::NotFound {
                searched: dir.to_path_buf(),
            });
        }
        // An absolute path: the loader must not search elsewhere.
        let path = path.canonicalize().unwrap_or(path);
        let api = Api::open(&path).map_err(|e| HostError::Unloadable {
            path: path.clone(),
            reason: e.to_string(),
        })?;
        // SAFETY: `Api` holds functions of the library with the signatures of host/check/flashrt_check.c; the version
        // function never changes.
        let found = unsafe { (api.version)() };
        if found != BRIDGE_VERSION {
            return Err(HostError::Version { path, found });
        }
        let log = Box::<HostLog>::default();
        let search = CString::new(dir.to_string_lossy().as_bytes()).unwrap_or_default();
        // SAFETY: the log sink lives until `Host::drop` takes it away; names are constant strings of the library.
        let (op_codes, ggml_version) = unsafe {
            (api.set_log)(Some(collect_log), std::ptr::from_ref::<HostLog>(&log).cast_mut().cast());
            (api.init)(search.as_ptr());
            let codes = (0..(api.n_ops)())
                .map(|op| op_code(CStr::from_ptr((api.op_name)(op))))
                .collect();
            (
                codes,
                CStr::from_ptr((api.ggml_version)()).to_string_lossy().into_owned(),
            )
        };
        Ok(Host {
            api,
            log,
            op_codes,
            ggml_version,
        })
    }

    /// Translates the host's operation numbers.
    pub fn ops(&self) -> OpTable<'_> {
        OpTable::new(&self.op_codes)
    }

    /// Version of ggml in this build.
    pub fn ggml_version(&self) -> &str {
        &self.ggml_version
    }

    /// Loads a model for the CPU, its weights as they are in the file.
    pub fn load(&self, path: &Path) -> Result<Model<'_>, HostError> {
        let refuse = |reason: String| HostError::Model {
            path: path.to_path_buf(),
            reason,
        };
        let name = CString::new(path.to_string_lossy().as_bytes()).map_err(|e| refuse(e.to_string()))?;
        self.log.take_cause();
        // SAFETY: a C string; the result is null or a model that `Model::drop` frees.
        let raw = unsafe { (self.api.model_load)(name.as_ptr()) };
        if raw.is_null() {
            return Err(refuse(self.log.take_cause()));
        }
        Ok(Model { host: self, raw })
    }

    /// The host's name for an operation number.
    pub fn op_name(&self, number: i32) -> String {
        // SAFETY: the library returns a constant string for every number below `n_ops`.
        unsafe {
            match number {
                n if (0..(self.api.n_ops)()).contains(&n) => {
                    CStr::from_ptr((self.api.op_name)(n)).to_string_lossy().into_owned()
                }
                n => format!("op {n}"),
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: null is the documented way to silence the log; the sink dies after this.
        unsafe { (self.api.set_log)(None, std::ptr::null_mut()) }
    }
}

fn op_code(name: &CStr) -> u8 {
    let name = name.to_string_lossy();
    Op::ALL
        .iter()
        .find(|op| op.name() == name)
        .map_or(Op::Other as u8, |&op| op as u8)
}

/// A loaded model.
pub struct Model<'h> {
    host: &'h Host,
    raw: *mut c_void,
}

impl Model<'_> {
    /// Entries of its vocabulary.
    pub fn vocab(&self) -> i32 {
        // SAFETY: a live model.
        unsafe { (self.host.api.vocab)(self.raw) }
    }

    /// Its layers.
    pub fn layers(&self) -> i32 {
        // SAFETY: a live model.
        unsafe { (self.host.api.layers)(self.raw) }
    }

    /// The build that loaded it.
    pub fn host(&self) -> &Host {
        self.host
    }

    /// Bytes of a tensor of this model that never change, from its first element to its last; `None` for any other tensor.
    pub fn weight_bytes(&self, t: Tensor) -> Option<&[u8]> {
        // SAFETY: a live tensor. Weights stay where they are, in memory of the CPU, as long as the model does.
        unsafe {
            let raw = t.address() as *const c_void;
            (self.host.api.is_weight)(raw)
                .then(|| std::slice::from_raw_parts(t.data() as *const u8, (self.host.api.nbytes)(raw)))
        }
    }

    /// A copy of what a tensor holds now, from its first element to its last.
    pub fn copy_bytes(&self, t: Tensor) -> Vec<u8> {
        // SAFETY: only the CPU backend runs (host/check), so `data` is memory of this process; an observer sees only tensors
        // that are allocated.
        unsafe {
            let len = (self.host.api.nbytes)(t.address() as *const c_void);
            if t.data() == 0 || len == 0 {
                return Vec::new();
            }
            std::slice::from_raw_parts(t.data() as *const u8, len).to_vec()
        }
    }

    /// What llama.cpp calls it, e.g. `gemma3 270M Q4_K - Medium`.
    pub fn describe(&self) -> String {
        let mut text = [0u8; 128];
        // SAFETY: the host writes at most `text.len()` bytes, the NUL included.
        unsafe { (self.host.api.describe)(self.raw, text.as_mut_ptr().cast(), text.len()) };
        CStr::from_bytes_until_nul(&text)
            .map(|s| s.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    /// A context with room for `n_ctx` tokens in each of `n_seq` sequences, flash attention on.
    pub fn context(&self, n_ctx: u32, n_seq: u32, n_threads: i32) -> Result<Context<'_>, HostError> {
        let watch = Box::new(Mutex::new(Watch {
            observer: None,
            panic: None,
        }));
        self.host.log.take_cause();
        let user = std::ptr::from_ref(&*watch).cast_mut().cast();
        // SAFETY: a live model; the watch is boxed and outlives the context that points to it.
        let raw =
            unsafe { (self.host.api.context_new)(self.raw, n_ctx * n_seq, n_seq, n_threads, Some(on_node), user) };
        if raw.is_null() {
            return Err(HostError::Context {
                reason: self.host.log.take_cause(),
            });
        }
        Ok(Context {
            host: self.host,
            raw,
            watch,
            _model: self,
        })
    }
}

impl Drop for Model<'_> {
    fn drop(&mut self) {
        // SAFETY: contexts borrow the model, so none is left.
        unsafe { (self.host.api.model_free)(self.raw) }
    }
}

/// Sees every node of a graph, one at a time, in the order of execution.
pub trait Observer {
    /// The node is about to be computed: its operands are as it will read them.
    fn before(&mut self, node: Tensor);
    /// The node was computed.
    fn after(&mut self, node: Tensor);
}

/// A token to evaluate.
#[derive(Debug, Clone, Copy)]
pub struct Token {
    /// Its number in the vocabulary.
    pub id: i32,
    /// Its place in the sequence.
    pub position: i32,
    /// The sequence.
    pub sequence: i32,
    /// Whether its logits are wanted.
    pub output: bool,
}

struct Watch {
    observer: Option<*mut dyn Observer>,
    panic: Option<Box<dyn Any + Send>>,
}

extern "C" fn on_node(node: *mut c_void, ask: bool, user: *mut c_void) -> bool {
    // SAFETY: `user` is the watch that `Context` keeps boxed.
    let watch = unsafe { &*user.cast::<Mutex<Watch>>() };
    let mut watch = watch.lock().unwrap_or_else(|e| e.into_inner());
    let Some(observer) = watch.observer else { return false };
    let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // SAFETY: the host hands over a node of the graph it is computing; `decode` lends the observer for its duration.
        if let (Some(node), observer) = unsafe { (Tensor::from_raw(node as *const _), &mut *observer) } {
            if ask {
                observer.before(node);
            } else {
                observer.after(node);
            }
        }
    }));
    match seen {
        Ok(()) => true,
        Err(panic) => {
            // No unwinding through C++: the evaluation runs to its end unwatched, then `decode` goes on with the panic.
            watch.observer = None;
            watch.panic = Some(panic);
            false
        }
    }
}

/// An inference context of a model.
pub struct Context<'m> {
    host: &'m Host,
    raw: *mut c_void,
    watch: Box<Mutex<Watch>>,
    _model: &'m Model<'m>,
}

impl Context<'_> {
    /// Evaluates one batch and shows every node to the observer, if there is one: the host then computes them one by one.
    pub fn decode<'o>(
        &mut self,
        tokens: &[Token],
        observer: Option<&'o mut (dyn Observer + 'o)>,
    ) -> Result<(), HostError> {
        let observer = observer.map(|o| {
            let observer: *mut (dyn Observer + 'o) = o;
            // SAFETY: only the lifetime in the type changes; the pointer is taken back before this function returns.
            unsafe { std::mem::transmute::<*mut (dyn Observer + 'o), *mut (dyn Observer + 'static)>(observer) }
        });
        self.watch().observer = observer;
        let column = |f: fn(&Token) -> i32| tokens.iter().map(f).collect::<Vec<i32>>();
        let (ids, positions, sequences) = (column(|t| t.id), column(|t| t.position), column(|t| t.sequence));
        let outputs: Vec<i8> = tokens.iter().map(|t| i8::from(t.output)).collect();
        self.host.log.take_cause();
        // SAFETY: a live context; four arrays of `tokens.len()` entries, read during the call.
        let code = unsafe {
            (self.host.api.decode)(
                self.raw,
                tokens.len() as i32,
                ids.as_ptr(),
                positions.as_ptr(),
                sequences.as_ptr(),
                outputs.as_ptr(),
            )
        };
        let panic = {
            let mut watch = self.watch();
            watch.observer = None;
            watch.panic.take()
        };
        if let Some(panic) = panic {
            std::panic::resume_unwind(panic);
        }
        if code != 0 {
            return Err(HostError::Decode {
                n_tokens: tokens.len(),
                code,
                reason: self.host.log.take_cause(),
            });
        }
        Ok(())
    }

    fn watch(&self) -> std::sync::MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        // SAFETY: freed once, before the watch it points to.
        unsafe { (self.host.api.context_free)(self.raw) }
    }
}
