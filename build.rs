// SPDX-License-Identifier: Apache-2.0
//! With feature `cuda`: compiles csrc/ with nvcc into one static library. Without it there is nothing to do.

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

    let mut sources = Vec::new();
    cuda_sources(&root.join("csrc"), &mut sources)?;
    let objects = compile_all(&toolkit, &codes, &root.join("csrc"), &sources, &out)?;
    archive(&objects, &out.join("libflashrt_kernels.a"))?;
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=flashrt_kernels");

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

fn cuda_sources(dir: &Path, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            cuda_sources(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "cu") {
            found.push(path);
        }
    }
    found.sort();
    Ok(())
}

/// One object per source, as many at a time as cargo allows. No relocatable device code: it would drop the PTX.
fn compile_all(
    toolkit: &Toolkit,
    codes: &[Code],
    csrc: &Path,
    sources: &[PathBuf],
    out: &Path,
) -> Result<Vec<PathBuf>, String> {
    let jobs: usize = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let ccache = Command::new("ccache").arg("--version").output().is_ok();
    let next = AtomicUsize::new(0);
    let errors = Mutex::new(Vec::new());
    let object = |source: &Path| {
        let name = source.strip_prefix(csrc).unwrap_or(source).with_extension("o");
        out.join(name.to_string_lossy().replace('/', "-"))
    };
    thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, sources.len().max(1)) {
            scope.spawn(|| {
                while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = compile(toolkit, ccache, codes, csrc, source, &object(source)) {
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

fn compile(
    toolkit: &Toolkit,
    ccache: bool,
    codes: &[Code],
    csrc: &Path,
    source: &Path,
    object: &Path,
) -> Result<(), String> {
    let mut command = if ccache {
        Command::new("ccache")
    } else {
        Command::new(&toolkit.nvcc)
    };
    if ccache {
        command.arg(&toolkit.nvcc);
    }
    command.args([
        "-c",
        "-O3",
        "-std=c++17",
        "-Xcompiler",
        "-fPIC,-fvisibility=hidden",
        "-Xptxas",
        "-v",
    ]);
    for code in codes {
        command.arg("-gencode").arg(code.gencode());
    }
    let names: Vec<String> = codes.iter().map(Code::name).collect();
    command.arg(format!("-DFRT_ARCHS=\"{}\"", names.join(" ")));
    command.arg("-I").arg(csrc).arg(source).arg("-o").arg(object);

    let output = command
        .output()
        .map_err(|e| format!("{}: {e}", toolkit.nvcc.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("nvcc failed on {}:\n{log}", source.display()));
    }
    let spills = ptxas::spills(&log);
    if !spills.is_empty() {
        return Err(format!("{}: registers spill\n{}", source.display(), spills.join("\n")));
    }
    Ok(())
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
