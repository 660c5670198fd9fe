//! Where things are, and whether anything may be done.

use crate::files;
use crate::pins::Pins;
use anyhow::{Context as _, Result};
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Handed to every step.
#[derive(Debug)]
pub struct Context {
    /// The repository.
    pub repo: PathBuf,
    /// Tools, sources and builds of this checkout: `FLASHRT_HOME`, or `.flashrt` in the repository.
    pub home: PathBuf,
    /// Downloads, the model and the compiler cache, shared by checkouts: `FLASHRT_CACHE_DIR`, or the user's cache directory.
    pub cache: PathBuf,
    /// Parallel compilations: `FLASHRT_JOBS`, or one per processor.
    pub jobs: usize,
    /// What to fetch.
    pub pins: Pins,
    /// Print the plan instead of carrying it out.
    pub dry_run: bool,
}

impl Context {
    /// Reads the environment and third_party/pins.toml.
    pub fn from_env(dry_run: bool) -> Result<Context> {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .expect("xtask lies in the repository")
            .to_path_buf();
        let pins = Pins::read(&repo.join("third_party/pins.toml"))?;
        let home = path_variable("FLASHRT_HOME").unwrap_or_else(|| repo.join(".flashrt"));
        let cache = path_variable("FLASHRT_CACHE_DIR")
            .or_else(|| path_variable("XDG_CACHE_HOME").map(|dir| dir.join("ggml-flashrt")))
            .or_else(|| path_variable("HOME").map(|dir| dir.join(".cache/ggml-flashrt")))
            .context("neither HOME nor XDG_CACHE_HOME is set: set FLASHRT_CACHE_DIR to a directory for downloads")?;
        let jobs = match env::var("FLASHRT_JOBS") {
            Ok(text) => text
                .parse()
                .with_context(|| format!("FLASHRT_JOBS={text} is not a number"))?,
            Err(_) => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let context = Context {
            home: absolute(home)?,
            cache: absolute(cache)?,
            repo,
            jobs,
            pins,
            dry_run,
        };
        if !dry_run {
            let (home, cache) = (&context.home, &context.cache);
            for dir in [
                home.clone(),
                home.join("src"),
                cache.join("downloads"),
                cache.join("models"),
            ] {
                files::sweep(&dir)?;
            }
        }
        Ok(context)
    }

    /// In a dry run prints the step and returns true: the caller then skips it.
    pub fn would(&self, step: impl AsRef<str>) -> bool {
        if self.dry_run {
            println!("would {}", step.as_ref());
        }
        self.dry_run
    }

    /// The cargo that runs this program, in the repository.
    pub fn cargo(&self) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.repo);
        // Set by the outer cargo for this program alone; build scripts below must not see them.
        for (name, _) in env::vars_os() {
            let name_text = name.to_string_lossy();
            if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
                command.env_remove(&name);
            }
        }
        command
    }

    /// Where a step's output is kept.
    pub fn log(&self, step: &str) -> PathBuf {
        self.home.join("logs").join(format!("{step}.log"))
    }
}

fn path_variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn absolute(path: PathBuf) -> Result<PathBuf> {
    std::path::absolute(&path).with_context(|| format!("cannot make {} absolute", path.display()))
}
