//! The tools of a build: those of the machine where it has them, else pinned ones in the project's own environment.

use crate::archs;
use crate::context::Context;
use crate::fetch;
use crate::files::{self, IoContext};
use crate::job::Job;
use crate::pins::Artifact;
use crate::toolkit::{Toolkit, MINIMUM};
use anyhow::{anyhow, bail, ensure, Context as _, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// ggml-cuda asks for this release.
const CMAKE_MINIMUM: (u32, u32) = (3, 18);

/// Lists the pinned wheels that an environment holds; written last.
const STAMP: &str = "flashrt-pins";

/// What ggml calls of the driver. Executables are linked against a stub with these names where no driver is installed.
const DRIVER_CALLS: [&str; 16] = [
    "cuCtxGetDevice",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuInit",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemGetAllocationGranularity",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
];

/// Programs that a build needs.
#[derive(Debug)]
pub struct Tools {
    /// Of the project's environment; has pip.
    pub python: PathBuf,
    /// CMake.
    pub cmake: PathBuf,
    /// Ninja.
    pub ninja: PathBuf,
    /// Present if it was asked for.
    pub cuda: Option<Cuda>,
}

/// A CUDA toolkit.
#[derive(Debug, Clone)]
pub struct Cuda {
    /// Its root, with bin, include and lib64.
    pub root: PathBuf,
    /// The compiler.
    pub nvcc: PathBuf,
}

impl Cuda {
    /// A program of the toolkit, such as cuobjdump.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        let path = self.root.join("bin").join(name);
        ensure!(
            path.is_file(),
            "{} is missing: install it with the toolkit, or unset the variable that names it",
            path.display()
        );
        Ok(path)
    }

    /// Where its shared libraries are.
    pub fn lib(&self) -> PathBuf {
        self.root.join("lib64")
    }
}

/// Finds or installs what a build needs.
pub fn ensure(context: &Context, cuda: bool) -> Result<Tools> {
    compilers()?;
    let venv = context.home.join("venv");
    let cmake = on_path(context, "cmake").filter(|cmake| cmake_release(cmake).is_some_and(|r| r >= CMAKE_MINIMUM));
    let ninja = on_path(context, "ninja");
    let own_cuda = if cuda { system_cuda()? } else { None };

    let mut wanted: Vec<&Artifact> = context.pins.tools("fetch").collect();
    let groups = [
        ("cmake", cmake.is_none()),
        ("ninja", ninja.is_none()),
        ("cuda", cuda && own_cuda.is_none()),
    ];
    for (group, _) in groups.iter().filter(|(_, missing)| *missing) {
        wanted.extend(context.pins.tools(group));
    }
    ensure_venv(context, &venv, &wanted)?;

    let packages = || site_packages(&venv);
    let cmake = match cmake {
        Some(cmake) => cmake,
        // The program itself: pip's start script would name the environment's path.
        None if context.dry_run => venv.join("bin/cmake"),
        None => packages()?.join("cmake/data/bin/cmake"),
    };
    let ninja = ninja.unwrap_or_else(|| venv.join("bin/ninja"));
    let cuda = match (cuda, own_cuda) {
        (false, _) => None,
        (true, Some(own)) => Some(own),
        (true, None) => {
            let root = if context.dry_run {
                venv.join("cuda")
            } else {
                toolkit_root(&packages()?)?
            };
            Some(Cuda {
                nvcc: root.join("bin/nvcc"),
                root,
            })
        }
    };
    Ok(Tools {
        python: venv.join("bin/python"),
        cmake,
        ninja,
        cuda,
    })
}

/// ggml is C and C++.
fn compilers() -> Result<()> {
    for (variable, names) in [("CC", ["cc", "gcc", "clang"]), ("CXX", ["c++", "g++", "clang++"])] {
        let set = std::env::var(variable).ok().filter(|value| !value.is_empty());
        let found = match &set {
            Some(program) => which::which(program.split_whitespace().next().unwrap_or_default()).is_ok(),
            None => names.iter().any(|name| which::which(name).is_ok()),
        };
        ensure!(
            found,
            "no {} compiler found ({variable}{}): install one, such as with `apt install build-essential`, or set {variable}",
            if variable == "CC" { "C" } else { "C++" },
            set.map_or_else(|| format!(" is not set; looked for {}", names.join(", ")), |value| format!("={value}")),
        );
    }
    Ok(())
}

/// A program of the machine, not one that a shell's activated environment of ours lends.
fn on_path(context: &Context, name: &str) -> Option<PathBuf> {
    which::which_all(name)
        .ok()?
        .find(|path| !path.starts_with(&context.home))
}

fn cmake_release(cmake: &Path) -> Option<(u32, u32)> {
    let output = Command::new(cmake).arg("--version").output().ok()?;
    parse_cmake_release(&String::from_utf8_lossy(&output.stdout))
}

fn parse_cmake_release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.strip_prefix("cmake version ")?.split(['.', '\n']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The machine's toolkit. A too old one that merely stands on PATH is passed over, one that a variable names is an error.
fn system_cuda() -> Result<Option<Cuda>> {
    let variable = |name: &str| std::env::var(name).ok();
    let named = ["NVCC", "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"]
        .iter()
        .any(|name| variable(name).is_some_and(|value| !value.is_empty()));
    match Toolkit::find(&variable, Path::new("/nonexistent")) {
        Ok(found) => {
            let nvcc = found.nvcc.canonicalize().at("resolve", &found.nvcc)?;
            let root = nvcc
                .parent()
                .and_then(Path::parent)
                .context("nvcc lies in no bin directory")?
                .to_path_buf();
            Ok(Some(Cuda { root, nvcc }))
        }
        Err(why) if named => Err(anyhow!(why)),
        Err(why) if why.contains("no nvcc found") => Ok(None),
        Err(why) => {
            eprintln!("note: {why}; using the pinned toolkit, which has CUDA {MINIMUM} or newer");
            Ok(None)
        }
    }
}

fn line(artifact: &Artifact) -> String {
    format!("{} {}", artifact.sha256, artifact.file)
}

/// An environment with at least these wheels.
pub fn ensure_venv(context: &Context, venv: &Path, wanted: &[&Artifact]) -> Result<()> {
    let stamp = fs::read_to_string(venv.join(STAMP)).unwrap_or_default();
    let installed: Vec<&str> = stamp.lines().collect();
    if wanted
        .iter()
        .all(|artifact| installed.contains(&line(artifact).as_str()))
    {
        return Ok(());
    }
    // What is there and still pinned stays, so that a CPU build after a CUDA build does not take CUDA away.
    let mut wanted = wanted.to_vec();
    let kept = context
        .pins
        .tools
        .iter()
        .map(|tool| &tool.artifact)
        .filter(|tool| installed.contains(&line(tool).as_str()));
    for artifact in kept {
        if !wanted.iter().any(|other| other.file == artifact.file) {
            wanted.push(artifact);
        }
    }
    for artifact in &wanted {
        ensure!(
            !artifact.file.contains("x86_64") || cfg!(all(target_arch = "x86_64", target_os = "linux")),
            "{} is pinned for x86_64 Linux only: install cmake, ninja and a CUDA toolkit {MINIMUM} or newer yourself",
            artifact.package
        );
    }
    let size: u64 = wanted.iter().map(|artifact| artifact.size).sum();
    let names: Vec<_> = wanted
        .iter()
        .map(|artifact| format!("{} {}", artifact.package, artifact.version))
        .collect();
    if context.would(format!(
        "install into {} ({} MB): {}",
        venv.display(),
        size >> 20,
        names.join(", ")
    )) {
        return Ok(());
    }

    // Unpacked, wheels are about three times as large; a former environment stays until the new one is whole.
    files::require_space(venv, 3 * size)?;
    let staging = files::Staging::new(venv)?;
    create_venv(context, staging.path())?;
    let python = staging.path().join("bin/python");
    let wheels = fetch::download(context, &python, &wanted)?;
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ])
    .args(&wheels);
    // Only the files that were checked above: no index and no configured extra place takes part.
    pip.env_remove("PIP_FIND_LINKS").env("PIP_CONFIG_FILE", "/dev/null");
    Job::new(context, "venv", "installing tools").run(&mut pip)?;
    let packages = site_packages(staging.path())?;
    if let Ok(root) = toolkit_root(&packages) {
        complete_toolkit(context, &root)?;
    }
    rename_in_scripts(&staging.path().join("bin"), staging.path(), venv)?;
    let lines: Vec<_> = wanted.iter().map(|artifact| line(artifact) + "\n").collect();
    files::write(&staging.path().join(STAMP), lines.concat())?;
    staging.commit()?;
    println!("tools: {}", venv.display());
    Ok(())
}

/// A bare environment with pip.
pub fn create_venv(context: &Context, dir: &Path) -> Result<()> {
    let python = ["python3", "python"].iter().find_map(|name| which::which(name).ok());
    let python = python.context("no python3 found: install it, such as with `apt install python3 python3-venv`")?;
    let job = Job::new(context, "python", "creating the environment");
    match job.try_run(Command::new(&python).args(["-m", "venv"]).arg(dir))? {
        Err(failure) if failure.log.contains("ensurepip") || failure.log.contains("No module named venv") => {
            bail!(
                "{} cannot make environments: install its venv module, such as with `apt install python3-venv`",
                python.display()
            )
        }
        other => other.map_err(|failure| failure.into_error()),
    }
}

/// Where an environment keeps its packages.
pub fn site_packages(venv: &Path) -> Result<PathBuf> {
    let lib = venv.join("lib");
    let entries = fs::read_dir(&lib).at("list", &lib)?.flatten();
    let found = entries
        .map(|entry| entry.path().join("site-packages"))
        .find(|path| path.is_dir());
    found.with_context(|| {
        format!(
            "{} has no site-packages: remove {} and run again",
            lib.display(),
            venv.display()
        )
    })
}

fn toolkit_root(packages: &Path) -> Result<PathBuf> {
    let root = packages.join("nvidia/cu13");
    ensure!(root.join("bin/nvcc").is_file(), "{} has no nvcc", root.display());
    Ok(root)
}

/// The wheels are meant for running, not for linking: they lack lib64, the unversioned names and the driver's stub.
fn complete_toolkit(context: &Context, root: &Path) -> Result<()> {
    files::symlink(Path::new("lib"), &root.join("lib64"))?;
    let lib = root.join("lib");
    for entry in fs::read_dir(&lib).at("list", &lib)? {
        let name = entry.at("list", &lib)?.file_name().to_string_lossy().into_owned();
        if let Some(short) = unversioned(&name) {
            files::symlink(Path::new(&name), &lib.join(short))?;
        }
    }
    let stubs = lib.join("stubs");
    files::create_dir(&stubs)?;
    let source = stubs.join("libcuda.c");
    let functions: Vec<_> = DRIVER_CALLS
        .iter()
        .map(|name| format!("int {name}(void) {{ return 999; }}\n"))
        .collect();
    files::write(&source, functions.concat())?;
    let mut cc = compiler();
    cc.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(stubs.join("libcuda.so"))
        .arg(&source);
    Job::new(context, "stub", "compiling the driver's stub").run(&mut cc)?;
    // The linker looks for the name that libggml-cuda.so records.
    files::symlink(Path::new("libcuda.so"), &stubs.join("libcuda.so.1"))
}

/// libcublas.so for libcublas.so.13.
fn unversioned(name: &str) -> Option<&str> {
    let (stem, version) = name.split_once(".so.")?;
    version
        .bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| &name[..stem.len() + ".so".len()])
}

/// The machine's C compiler.
pub fn compiler() -> Command {
    compiler_of("CC", ["cc", "gcc", "clang"])
}

/// The machine's C++ compiler.
pub fn cxx_compiler() -> Command {
    compiler_of("CXX", ["c++", "g++", "clang++"])
}

fn compiler_of(variable: &str, names: [&str; 3]) -> Command {
    let set = std::env::var(variable).ok().filter(|value| !value.is_empty());
    let words = set.map(|value| value.split_whitespace().map(OsString::from).collect::<Vec<_>>());
    let mut words = words.unwrap_or_default().into_iter();
    let mut command = match words.next() {
        Some(program) => Command::new(program),
        None => Command::new(
            names
                .into_iter()
                .find(|name| which::which(name).is_ok())
                .unwrap_or(names[0]),
        ),
    };
    command.args(words);
    command
}

/// Start scripts name the interpreter by the path that the environment had when they were written.
fn rename_in_scripts(bin: &Path, from: &Path, to: &Path) -> Result<()> {
    let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
    for entry in fs::read_dir(bin).at("list", bin)? {
        let path = entry.at("list", bin)?.path();
        if path.is_symlink() {
            continue;
        }
        // Programs are no text.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        if text.contains(&*from) {
            fs::write(&path, text.replace(&*from, &to)).at("write", &path)?;
        }
    }
    Ok(())
}

/// The list as CMake wants it, checked by the rules of the kernels' own build. An `a` is added by the adapter, so that ggml's
/// kernels are compiled for the plain architecture whose objects both builds share.
pub fn cmake_archs(list: &str) -> Result<String> {
    archs::parse(list).map_err(|why| anyhow!(why))?;
    Ok(list
        .split([';', ','])
        .map(str::trim)
        .filter(|item| !item.is_empty())
        .collect::<Vec<_>>()
        .join(";"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_cmake() {
        assert_eq!(
            parse_cmake_release("cmake version 3.31.10\n\nCMake suite"),
            Some((3, 31))
        );
        assert_eq!(parse_cmake_release("cmake version 4.1-rc1\n"), None);
        assert_eq!(parse_cmake_release("something else"), None);
    }

    #[test]
    fn unversioned_names() {
        assert_eq!(unversioned("libcublas.so.13"), Some("libcublas.so"));
        assert_eq!(unversioned("libcudart.so"), None);
        assert_eq!(unversioned("libcudart.so.13.0.96"), None);
        assert_eq!(unversioned("libcudart_static.a"), None);
    }

    #[test]
    fn architectures_are_checked() {
        assert_eq!(cmake_archs("90").unwrap(), "90");
        assert_eq!(cmake_archs(" 87; 90a ").unwrap(), "87;90a");
        for (list, part) in [
            ("native", "native"),
            ("75", "75"),
            ("", "no CUDA architecture"),
            ("ninety", "ninety"),
        ] {
            let error = cmake_archs(list).unwrap_err().to_string();
            assert!(error.contains(part), "{list}: {error}");
        }
    }

    #[test]
    fn scripts_follow_the_environment() {
        let dir = tempfile::TempDir::new().unwrap();
        let script = dir.path().join("tool");
        fs::write(&script, "#!/a/staging/bin/python\nrun()\n").unwrap();
        fs::write(dir.path().join("program"), [0x7f, b'E', b'L', b'F', 0xff]).unwrap();
        rename_in_scripts(dir.path(), Path::new("/a/staging"), Path::new("/a/venv")).unwrap();
        assert_eq!(fs::read_to_string(&script).unwrap(), "#!/a/venv/bin/python\nrun()\n");
    }
}
