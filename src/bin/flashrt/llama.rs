//! Runs llama.cpp's own tools with settled environments, and writes down exactly what was run.

use anyhow::{bail, Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use tempfile::NamedTempFile;

/// Variables that are never inherited: a run has them only if it asks for them.
const SETTLED: &[&str] = &[
    "GGML_CUDA_GRAPH_OPT",
    "GGML_FLASHRT_DISABLE",
    "GGML_CUDA_FLASHRT_DISABLE",
    "GGML_FLASHRT_STATS",
    "GGML_FLASHRT_DEBUG",
    "GGML_FLASHRT_DUMP",
    "GGML_FLASHRT_DUMP_MAX",
];
/// Beginnings of the names of variables that can change a result, and are written down.
const RECORDED: &[&str] = &["GGML_", "CUDA_", "LLAMA_", "NVIDIA_", "OMP_"];
/// What host/mask logs, and what a build with it therefore contains.
const MASK_FILL: &[u8] = b"attention masks are filled by ranges";
/// Switches the whole adapter off.
pub const DISABLE: (&str, &str) = ("GGML_FLASHRT_DISABLE", "1");

/// A folder with a build of llama.cpp.
#[derive(Clone)]
pub struct Host {
    dir: PathBuf,
    /// What stands for the folder in reports.
    label: &'static str,
}

/// A process that is settled but not started.
pub struct Prepared {
    /// To be spawned once.
    pub command: Command,
    shown: Vec<String>,
    env: BTreeMap<String, String>,
    stats: NamedTempFile,
}

/// How a process went.
pub struct Finished {
    /// What it printed.
    pub stdout: String,
    /// What it logged.
    pub stderr: String,
    /// Command line as reports show it: no folders.
    pub command: Vec<String>,
    /// Recorded part of its environment.
    pub env: BTreeMap<String, String>,
    /// Seconds it took.
    pub wall_s: f64,
    /// What it wrote to GGML_FLASHRT_STATS.
    pub stats: Option<Value>,
}

impl Host {
    /// A build in `dir`, or in its `bin`.
    pub fn open(dir: &Path, label: &'static str) -> Result<Self> {
        if !dir.is_dir() {
            bail!(
                "{}: no such folder; give the build folder of llama.cpp, or the one its tools are in",
                dir.display()
            );
        }
        Ok(Host {
            dir: dir.to_owned(),
            label,
        })
    }

    /// A label for reports.
    pub fn label(&self) -> &'static str {
        self.label
    }

    fn tool(&self, name: &str) -> Result<PathBuf> {
        let places = [self.dir.join("bin").join(name), self.dir.join(name)];
        match places.iter().find(|p| p.is_file()) {
            Some(path) => Ok(path.clone()),
            None => bail!("{name} is neither {} nor {}", places[0].display(), places[1].display()),
        }
    }

    /// Names of the CUDA devices that the build sees.
    pub fn cuda_devices(&self) -> Result<Vec<String>> {
        let listed = self.run("llama-bench", &["--list-devices".into()], &[])?;
        let names = listed.stdout.lines().map(str::trim).filter(|l| l.starts_with("CUDA"));
        Ok(names.map(str::to_owned).collect())
    }

    /// Was it built with the mask patch?
    pub fn fills_masks(&self) -> Result<bool> {
        let tool = self.tool("llama-bench")?;
        // In the library, or in the tool if that is linked statically.
        let files = [
            tool.with_file_name("libllama.so"),
            self.dir.join("lib/libllama.so"),
            tool,
        ];
        let read = files.iter().filter_map(|file| std::fs::read(file).ok());
        Ok(read
            .into_iter()
            .any(|bytes| bytes.windows(MASK_FILL.len()).any(|part| part == MASK_FILL)))
    }

    /// Runs a tool to its end. `vars` are set on top of what is inherited.
    pub fn run(&self, tool: &str, args: &[OsString], vars: &[(&str, &str)]) -> Result<Finished> {
        let mut prepared = self.prepare(tool, args, vars)?;
        let begun = Instant::now();
        let output = prepared
            .command
            .output()
            .with_context(|| format!("cannot run {tool}"))?;
        let wall_s = begun.elapsed().as_secs_f64();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            bail!(
                "{}/{tool} failed ({}): {}",
                self.label,
                output.status,
                last_lines(&stderr)
            );
        }
        Ok(prepared.finished(String::from_utf8_lossy(&output.stdout).into_owned(), stderr, wall_s))
    }

    /// A tool ready to be started.
    pub fn prepare(&self, tool: &str, args: &[OsString], vars: &[(&str, &str)]) -> Result<Prepared> {
        let path = self.tool(tool)?;
        let stats = tempfile::Builder::new()
            .suffix(".json")
            .tempfile()
            .context("no temporary file")?;
        let mut command = Command::new(&path);
        command.args(args).stdin(Stdio::null());
        SETTLED.iter().for_each(|name| {
            command.env_remove(name);
        });
        command.env("GGML_FLASHRT_STATS", stats.path());
        command.env("LD_LIBRARY_PATH", self.library_path(&path)?);
        command.envs(vars.iter().copied());
        let shown = args.iter().map(|arg| without_folders(arg));
        let shown = std::iter::once(format!("{}/{tool}", self.label)).chain(shown).collect();
        Ok(Prepared {
            command,
            shown,
            env: recorded_env(vars),
            stats,
        })
    }

    /// Bundles are moved away from where they were linked, so their libraries are looked for beside the tools.
    fn library_path(&self, tool: &Path) -> Result<OsString> {
        let beside = tool.parent().map(Path::to_owned);
        let inherited = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let all = beside
            .into_iter()
            .chain([self.dir.join("lib")])
            .chain(env::split_paths(&inherited));
        env::join_paths(all).context("the build folder's name cannot be part of LD_LIBRARY_PATH")
    }
}

impl Prepared {
    /// What is known of the process once it has ended.
    pub fn finished(self, stdout: String, stderr: String, wall_s: f64) -> Finished {
        let written = std::fs::read_to_string(self.stats.path()).unwrap_or_default();
        let stats = serde_json::from_str(&written).ok();
        Finished {
            stdout,
            stderr,
            command: self.shown,
            env: self.env,
            wall_s,
            stats,
        }
    }
}

fn recorded_env(vars: &[(&str, &str)]) -> BTreeMap<String, String> {
    let inherited = env::vars().filter(|(name, _)| !SETTLED.contains(&name.as_str()));
    let set = vars.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    let all = inherited
        .chain([("GGML_FLASHRT_STATS".to_owned(), "file".to_owned())])
        .chain(set);
    all.filter(|(name, _)| RECORDED.iter().any(|r| name.starts_with(r)))
        .collect()
}

/// Reports are published: of a path, only the file's name is kept.
pub fn without_folders(arg: &OsStr) -> String {
    let path = Path::new(arg);
    let shown = if path.is_absolute() {
        path.file_name().unwrap_or(arg)
    } else {
        arg
    };
    shown.to_string_lossy().into_owned()
}

/// The end of a log, in one line.
pub fn last_lines(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    match lines.len() {
        0 => "it logged nothing".to_owned(),
        n => lines[n.saturating_sub(3)..].join(" | "),
    }
}

/// Launches counted over all windows; `None` when there are no statistics.
pub fn fired(stats: Option<&Value>) -> Option<u64> {
    let windows = stats?.get("windows")?.as_object()?;
    Some(windows.values().filter_map(|w| w.get("fired")?.as_u64()).sum())
}

/// Architectures that the adapter was compiled for, as its statistics state them.
pub fn archs(stats: Option<&Value>) -> Option<String> {
    Some(stats?.get("archs")?.as_str()?.to_owned())
}
