//! The three ways in which ggml links its backends, with stubs in place of ggml-cuda and llama.cpp: each links without a
//! duplicate or missing symbol, and runs.

use crate::archive::{archive, cc, documented_flags, run, source};
use std::path::Path;
use std::process::Command;

/// ggml-cuda.cu.o, compiled as for the kind of library it will be part of.
fn backend_object(dir: &Path) -> std::path::PathBuf {
    let object = dir.join("backend.o");
    run(cc()
        .args(["-fPIC", "-fvisibility=hidden", "-c"])
        .arg(source("backend.c"))
        .arg("-o")
        .arg(&object));
    object
}

fn backend_library(dir: &Path, soname: &[&str]) -> std::path::PathBuf {
    let library = dir.join("libbackend.so");
    let mut link = Command::new("cc");
    link.args(soname)
        .arg("-Wl,--no-undefined")
        .arg(backend_object(dir))
        .arg(archive());
    run(link.args(documented_flags("A shared library")).arg("-o").arg(&library));
    library
}

#[test]
fn shared() {
    let dir = tempfile::tempdir().unwrap();
    let library = backend_library(dir.path(), &["-Wl,-soname,libbackend.so"]);
    let host = dir.path().join("host");
    run(cc()
        .arg(source("host.c"))
        .arg(&library)
        .arg(format!("-Wl,-rpath,{}", dir.path().display()))
        .arg("-o")
        .arg(&host));
    run(&mut Command::new(&host));
}

#[test]
fn backend_dl() {
    let dir = tempfile::tempdir().unwrap();
    let library = backend_library(dir.path(), &[]);
    let host = dir.path().join("host");
    run(cc()
        .arg("-DHOST_LOADS")
        .arg(source("host.c"))
        .arg("-ldl")
        .arg("-o")
        .arg(&host));
    run(Command::new(&host).arg(&library));
}

#[test]
fn statically() {
    let dir = tempfile::tempdir().unwrap();
    let (library, host) = (dir.path().join("libbackend.a"), dir.path().join("host"));
    run(Command::new("ar")
        .arg("rcs")
        .arg(&library)
        .arg(backend_object(dir.path())));
    let mut link = cc();
    link.arg(source("host.c"))
        .arg(&library)
        .arg(archive())
        .args(documented_flags("A program"));
    run(link.arg("-o").arg(&host));
    run(&mut Command::new(&host));
}
