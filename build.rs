// SPDX-License-Identifier: Apache-2.0
//! With feature `cuda`: compiles csrc/ with nvcc into one static library. Without it there is nothing to do. With feature `fa4` the
//! attention modules that `cargo xtask fa4` made go into the library too, and the runtime they were made for is linked.

#[path = "build/archs.rs"]
mod archs;
#[path = "build/ptxas.rs"]
mod ptxas;
#[path = "build/toolkit.rs"]
mod toolkit;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{exit, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;
use std::thread;
use std::time::SystemTime;

use archs::Code;
use toolkit::Toolkit;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=build");
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        println!("cargo:rerun-if-changed=csrc");
        if let Err(why) = build_kernels() {
            eprintln!("error: {why}");
            exit(1);
        }
    }
}

fn build_kernels() -> Result<(), String> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").map_err(|e| e.to_string())?);
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| e.to_string())?);
    let toolkit = Toolkit::find(&tracked_var, &root)?;
    let codes = match tracked_var("FLASHRT_CUDA_ARCHS").or_else(|| tracked_var("CUDA_COMPUTE_CAP")) {
        Some(list) => archs::parse(&list)?,
        None => archs::parse("90a")?,
    };
    toolkit.check_archs(&codes)?;

    let csrc = root.join("csrc");
    let mut files = Vec::new();
    files_below(&csrc, &mut files)?;
    let (sources, headers): (Vec<_>, Vec<_>) = files
        .into_iter()
        .partition(|path| path.extension().is_some_and(|extension| extension == "cu"));
    let shared_changed = headers
        .iter()
        .chain([&toolkit.nvcc])
        .filter_map(|path| modified(path))
        .max();
    let modules = env::var_os("CARGO_FEATURE_FA4")
        .map(|_| Modules::find(&root))
        .transpose()?;
    let compiler = Compiler::new(toolkit.nvcc.clone(), &codes, csrc, shared_changed, modules.as_ref());
    let mut objects = compiler.compile_all(&sources, &out)?;
    objects.extend(modules.iter().flat_map(|modules| modules.objects.clone()));
    archive(&objects, &out.join("libflashrt_kernels.a"))?;
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=flashrt_kernels");
    if let Some(modules) = &modules {
        println!("cargo:rustc-link-search=native={}", modules.dir.display());
        println!("cargo:rustc-link-lib=static={RUNTIME}");
    }

    // Only for what is linked here (tests, benches, the binary): the static library leaves cudart to its host.
    if let Some(dir) = toolkit.lib_dir() {
        println!("cargo:rustc-link-arg=-L{}", dir.display());
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", dir.display());
    }
    println!("cargo:rustc-link-arg=-lcudart");
    println!("cargo:rustc-link-arg=-lstdc++");
    Ok(())
}

/// Reads a variable that decides about the build, so a change of it runs the build again.
fn tracked_var(name: &str) -> Option<String> {
    println!("cargo:rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            files_below(&path, found)?;
        } else {
            found.push(path);
        }
    }
    found.sort();
    Ok(())
}

fn modified(path: &Path) -> Option<SystemTime> {
    path.metadata().and_then(|meta| meta.modified()).ok()
}

/// What the attention modules call, of the package that made them.
const RUNTIME: &str = "cuda_dialect_runtime_static";

/// What `cargo xtask fa4` made.
struct Modules {
    dir: PathBuf,
    /// Lists the modules, and includes their headers.
    header: PathBuf,
    objects: Vec<PathBuf>,
}

impl Modules {
    /// The source that calls them.
    const CALLER: &'static str = "attention/prefill_fa4.cu";

    /// In `FLASHRT_FA4_DIR`, else where `cargo xtask fa4` leaves them.
    fn find(root: &Path) -> Result<Modules, String> {
        let named = tracked_var("FLASHRT_FA4_DIR");
        let home = tracked_var("FLASHRT_HOME").map_or_else(|| root.join(".flashrt"), PathBuf::from);
        let dir = named.map_or_else(|| home.join("fa4/sm_90a"), PathBuf::from);
        let header = dir.join("fa4_modules.h");
        println!("cargo:rerun-if-changed={}", header.display());
        if !header.is_file() || !dir.join(format!("lib{RUNTIME}.a")).is_file() {
            return Err(format!(
                "feature `fa4` needs attention modules, and {} holds none: run `cargo xtask fa4`, name their directory with \
                 FLASHRT_FA4_DIR, or build without the feature",
                dir.display()
            ));
        }
        let mut files = Vec::new();
        files_below(&dir, &mut files)?;
        files.retain(|path| path.extension().is_some_and(|extension| extension == "o"));
        Ok(Modules {
            dir,
            header,
            objects: files,
        })
    }
}

/// nvcc with the arguments that all sources share.
struct Compiler<'m> {
    program: PathBuf,
    args: Vec<String>,
    modules: Option<&'m Modules>,
    csrc: PathBuf,
    /// When any header, or nvcc itself, changed last.
    shared_changed: Option<SystemTime>,
}

impl<'m> Compiler<'m> {
    fn new(
        nvcc: PathBuf,
        codes: &[Code],
        csrc: PathBuf,
        shared_changed: Option<SystemTime>,
        modules: Option<&'m Modules>,
    ) -> Compiler<'m> {
        let ccache = Command::new("ccache").arg("--version").output().is_ok();
        let mut args: Vec<String> = if ccache {
            vec![nvcc.display().to_string()]
        } else {
            Vec::new()
        };
        // No relocatable device code: it would drop the PTX.
        let fixed = [
            "-c",
            "-O3",
            "-std=c++17",
            "-Xcompiler",
            "-fPIC,-fvisibility=hidden",
            "-Xptxas",
            "-v",
        ];
        args.extend(fixed.map(String::from));
        for code in codes {
            args.extend(["-gencode".to_string(), code.gencode()]);
        }
        let names: Vec<String> = codes.iter().map(Code::name).collect();
        args.push(format!("-DFRT_ARCHS=\"{}\"", names.join(" ")));
        Compiler {
            program: if ccache { "ccache".into() } else { nvcc },
            args,
            modules,
            csrc,
            shared_changed,
        }
    }

    /// One object per source, as many at a time as cargo allows.
    fn compile_all(&self, sources: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, String> {
        let jobs: usize = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        let next = AtomicUsize::new(0);
        let errors = Mutex::new(Vec::new());
        let object = |source: &Path| {
            let name = source.strip_prefix(&self.csrc).unwrap_or(source).with_extension("o");
            out.join(name.to_string_lossy().replace('/', "-"))
        };
        thread::scope(|scope| {
            for _ in 0..jobs.clamp(1, sources.len().max(1)) {
                scope.spawn(|| {
                    while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                        if let Err(why) = self.compile(source, &object(source)) {
                            errors.lock().unwrap_or_else(|e| e.into_inner()).push(why);
                        }
                    }
                });
            }
        });
        let errors = errors.into_inner().unwrap_or_else(|e| e.into_inner());
        if !errors.is_empty() {
            return Err(errors.join("\n"));
        }
        Ok(sources.iter().map(|source| object(source)).collect())
    }

    /// Skips what is up to date: this script also runs when an unrelated directory joins PATH. The stamp beside an object
    /// is the command that made it.
    fn compile(&self, source: &Path, object: &Path) -> Result<(), String> {
        let stamp = object.with_extension("cmd");
        let mut args = self.args.clone();
        let mut changed = modified(source).max(self.shared_changed);
        if let Some(modules) = self.modules.filter(|_| source.ends_with(Modules::CALLER)) {
            args.extend(["-DFRT_FA4".to_string(), format!("-I{}", modules.dir.display())]);
            changed = changed.max(modified(&modules.header));
        }
        let command_line = format!("{} {}", self.program.display(), args.join(" "));
        if changed < modified(&stamp) && fs::read_to_string(&stamp).is_ok_and(|made_by| made_by == command_line) {
            return Ok(());
        }
        let _ = fs::remove_file(&stamp);

        let mut command = Command::new(&self.program);
        command
            .args(&args)
            .arg("-I")
            .arg(&self.csrc)
            .arg(source)
            .arg("-o")
            .arg(object);
        let output = command
            .output()
            .map_err(|e| format!("{}: {e}", self.program.display()))?;
        let log = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            return Err(format!("nvcc failed on {}:\n{log}", source.display()));
        }
        // A spill costs a little, wgmma instructions that ptxas serializes cost a mat-mul most of its speed. It mentions either in passing.
        let faults = ptxas::faults(&log);
        if !faults.is_empty() {
            return Err(format!("{}:\n{}", source.display(), faults.join("\n")));
        }
        fs::write(&stamp, command_line).map_err(|e| format!("{}: {e}", stamp.display()))
    }
}

fn archive(objects: &[PathBuf], library: &Path) -> Result<(), String> {
    // `ar` adds to what is there: objects of sources that no longer exist must not stay.
    let _ = fs::remove_file(library);
    let mut ar = cc::Build::new()
        .try_get_archiver()
        .map_err(|e| format!("no archiver: {e}"))?;
    let status = ar
        .arg("crs")
        .arg(library)
        .args(objects)
        .status()
        .map_err(|e| format!("ar: {e}"))?;
    if !status.success() {
        return Err(format!("ar failed on {}: {status}", library.display()));
    }
    Ok(())
}
