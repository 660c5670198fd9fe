//! What machine is this, and can the streamer run here?
//!
//! Read-only, and fail-closed: what could not be found out is unknown with the reason, never a guess, and what the streamer
//! needs but is not known counts as missing. All files are read below a [`Root`], so that a copy of another machine's files
//! can be looked at as well.

mod board;
mod cuda;
mod memory;
mod rate;
mod root;
mod storage;
mod verdict;

pub use board::{Board, Clock};
pub use cuda::{Cuda, Device};
pub use memory::{Limit, Memory, Rlimits, Swap};
pub use rate::ReadRate;
pub use root::{Reading, Root};
pub use storage::{Direct, Disk, Kind, Layer, Storage, Transport};
pub use verdict::Finding;

use serde::Serialize;
use std::path::Path;

/// Version of the schema: raised when a field changes its meaning, its type or its place, or goes.
pub const SCHEMA: u32 = 1;

/// Everything that was found out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Probe {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of this crate.
    pub version: &'static str,
    /// Is this the machine that ran the probe, or a copy of another's files?
    pub live: bool,
    /// May the streamer be used here? Only without blockers.
    pub ready: bool,
    /// What has to be mended first.
    pub blockers: Vec<Finding>,
    /// What costs speed or safety.
    pub warnings: Vec<Finding>,
    /// Board and software.
    pub board: Board,
    /// GPUs.
    pub cuda: Cuda,
    /// Memory and limits.
    pub memory: Memory,
    /// May this process use io_uring?
    pub io_uring: Reading<bool>,
    /// What carries the model file.
    pub storage: Reading<Storage>,
    /// How fast the model file can be read, when that was asked for.
    pub read_rate: Reading<ReadRate>,
}

/// What to look at.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// A model file, as the machine names it.
    pub model: Option<&'a Path>,
    /// Read the model file for about so many seconds.
    pub read_seconds: Option<f64>,
}

impl Probe {
    /// Looks at the machine below `root`.
    pub fn take(root: &Root, options: Options) -> Probe {
        Self::take_with(root, options, kernels_run)
    }

    /// The same without trying kernels, which takes seconds: for sums over memory. Never ready.
    pub fn take_memory(root: &Root, options: Options) -> Probe {
        Self::take_with(root, options, |_| Err("not tried".to_owned()))
    }

    fn take_with(root: &Root, options: Options, kernels: fn(i32) -> Result<(), String>) -> Probe {
        let storage = match options.model {
            None => Reading::unknown("no model file was named"),
            Some(path) => Reading::new("the model file", storage::read(root, path)),
        };
        let read_rate = match (options.read_seconds, options.model) {
            (None, _) => Reading::unknown("not asked for"),
            (_, None) => Reading::unknown("no model file was named"),
            (Some(_), _) if !root.is_live() => Reading::unknown("a copy of another machine's files tells no rate"),
            (Some(seconds), Some(path)) => Reading::new("the model file", rate::measure(path, seconds)),
        };
        let mut probe = Probe {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            live: root.is_live(),
            ready: false,
            blockers: Vec::new(),
            warnings: Vec::new(),
            board: Board::read(root),
            cuda: Cuda::read(root, kernels),
            memory: Memory::read(root),
            io_uring: io_uring(root),
            storage,
            read_rate,
        };
        probe.blockers = verdict::blockers(&probe, options.model.is_some());
        probe.warnings = verdict::warnings(&probe);
        probe.ready = probe.blockers.is_empty();
        probe
    }

    /// As a JSON text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("only text, numbers and lists") + "\n"
    }
}

/// Executes the kernels of this build on a device: an image that does not suit shows in no attribute.
fn kernels_run(device: i32) -> Result<(), String> {
    if crate::window::compiled() {
        crate::kernel::self_check(device)
    } else {
        Err("this build of flashrt has no kernels to try (feature `cuda`)".to_owned())
    }
}

fn io_uring(root: &Root) -> Reading<bool> {
    if !root.is_live() {
        return Reading::unknown("not tried on a copy of another machine's files");
    }
    match crate::stream::direct::io_uring() {
        Ok(()) => Reading::new("io_uring_setup", Ok(true)),
        Err(why) => Reading::unknown(why),
    }
}
