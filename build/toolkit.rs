//! Finds nvcc and says what is wrong with the one it found.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::archs::Code;

/// Oldest release that compiles the kernels.
pub const MINIMUM: Release = Release(12, 8);
/// First release that knows Thor as sm_110 (before, it was sm_101).
const MINIMUM_SM_110: Release = Release(13, 0);

/// A CUDA release, major and minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release(pub u32, pub u32);

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A usable nvcc.
#[derive(Debug)]
pub struct Toolkit {
    pub nvcc: PathBuf,
    /// The variable or place that led to it.
    pub found_by: &'static str,
    pub release: Release,
}

impl Toolkit {
    /// Looks at `NVCC`, `CUDA_HOME`, `CUDA_PATH`, `CUDA_ROOT`, `PATH`, `/usr/local/cuda` and last the project's own
    /// environment under `repo`. The first nvcc decides: a too old one is an error, not a reason to look further, because
    /// the user who set a variable means it.
    pub fn find(var: &dyn Fn(&str) -> Option<String>, repo: &Path) -> Result<Toolkit, String> {
        for (found_by, nvcc) in candidates(var, repo) {
            if found_by != "NVCC" && !nvcc.is_file() {
                continue;
            }
            let release = query(&nvcc).map_err(|why| format!("{} (from {found_by}): {why}", nvcc.display()))?;
            if release < MINIMUM {
                return Err(format!(
                    "{} (from {found_by}) is CUDA {release}, but the kernels need {MINIMUM} or newer: \
                     set NVCC or CUDA_HOME to a newer toolkit",
                    nvcc.display()
                ));
            }
            return Ok(Toolkit {
                nvcc,
                found_by,
                release,
            });
        }
        Err(format!(
            "no nvcc found: searched NVCC, CUDA_HOME, CUDA_PATH, CUDA_ROOT, PATH, /usr/local/cuda and {}; \
             set CUDA_HOME to a CUDA toolkit {MINIMUM} or newer, run `cargo xtask demo`, or build without feature `cuda`",
            repo.join(".flashrt/venv").display()
        ))
    }

    /// Says so when this release is too old for one of `codes`.
    pub fn check_archs(&self, codes: &[Code]) -> Result<(), String> {
        if self.release < MINIMUM_SM_110 && codes.iter().any(|code| code.number() == 110) {
            return Err(format!(
                "{} (from {}) is CUDA {}, but sm_110 needs {MINIMUM_SM_110} or newer",
                self.nvcc.display(),
                self.found_by,
                self.release
            ));
        }
        Ok(())
    }

    /// Directory with the CUDA runtime's shared library, unless the linker's default path has it.
    pub fn lib_dir(&self) -> Option<PathBuf> {
        let nvcc = self.nvcc.canonicalize().ok()?;
        let root = nvcc.parent()?.parent()?;
        ["lib64", "lib"]
            .iter()
            .map(|dir| root.join(dir))
            .find(|dir| dir.join("libcudart.so").exists())
    }
}

fn candidates(var: &dyn Fn(&str) -> Option<String>, repo: &Path) -> Vec<(&'static str, PathBuf)> {
    let mut found = Vec::new();
    let set = |name: &str| var(name).filter(|value| !value.is_empty());
    if let Some(nvcc) = set("NVCC") {
        found.push(("NVCC", PathBuf::from(nvcc)));
    }
    for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"] {
        if let Some(root) = set(name) {
            found.push((name, Path::new(&root).join("bin/nvcc")));
        }
    }
    if let Some(path) = set("PATH") {
        found.extend(env::split_paths(&path).map(|dir| ("PATH", dir.join("nvcc"))));
    }
    found.push(("/usr/local/cuda", PathBuf::from("/usr/local/cuda/bin/nvcc")));
    // The Python version in between is the environment's own.
    let python_dirs = std::fs::read_dir(repo.join(".flashrt/venv/lib"))
        .into_iter()
        .flatten()
        .flatten();
    found.extend(python_dirs.flat_map(|dir| {
        ["cu13", "cu12"].map(|cu| {
            (
                ".flashrt/venv",
                dir.path().join("site-packages/nvidia").join(cu).join("bin/nvcc"),
            )
        })
    }));
    found
}

fn query(nvcc: &Path) -> Result<Release, String> {
    let output = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|e| format!("cannot be run: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_release(&text).ok_or_else(|| format!("`nvcc --version` names no release, it printed: {}", text.trim()))
}

/// The release in the output of `nvcc --version`.
pub fn parse_release(text: &str) -> Option<Release> {
    let (_, rest) = text.split_once("release ")?;
    let number = rest.split([',', ' ', '\n']).next()?;
    let (major, minor) = number.split_once('.')?;
    Some(Release(major.parse().ok()?, minor.parse().ok()?))
}
