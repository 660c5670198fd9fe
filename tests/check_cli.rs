//! `flashrt check` where there is nothing to check: one line that says what is wrong, and a failing exit code.
//! What it says of right and wrong models is tested in `src/check/tests.rs`.
#![cfg(all(feature = "cli", feature = "host"))]

use ggml_flashrt::host::{host_dir, DEFAULT_HOST_DIR, HOST_DIR_VARIABLE};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/every_quant.gguf")
}

/// Runs the check; it must fail, and say why in one line on stderr.
fn fails(model: &Path, host: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_flashrt"))
        .arg("check")
        .arg(model)
        .env(HOST_DIR_VARIABLE, host)
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success(), "{stderr}");
    assert!(output.stdout.is_empty());
    assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    stderr
}

#[test]
fn a_missing_file_is_named() {
    let folder = TempDir::new().unwrap();
    let stderr = fails(&folder.path().join("no.gguf"), folder.path());
    assert!(
        stderr.contains("no.gguf") && stderr.contains("No such file"),
        "{stderr}"
    );
}

#[test]
fn a_truncated_file_is_named_with_the_tensor() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("cut.gguf");
    let bytes = std::fs::read(fixture()).unwrap();
    // The last tensor is padded to the alignment of 32.
    std::fs::write(&model, &bytes[..bytes.len() - 32]).unwrap();
    let stderr = fails(&model, folder.path());
    assert!(stderr.contains("cut.gguf") && stderr.contains("tensor"), "{stderr}");
}

#[test]
fn another_format_is_named() {
    let folder = TempDir::new().unwrap();
    let model = folder.path().join("zip.gguf");
    std::fs::write(&model, b"PK\x03\x04 and more than a magic number").unwrap();
    let stderr = fails(&model, folder.path());
    assert!(
        stderr.contains("zip.gguf") && stderr.contains("not a GGUF file"),
        "{stderr}"
    );
}

#[test]
fn without_a_host_the_remedy_is_named() {
    let folder = TempDir::new().unwrap();
    let stderr = fails(&fixture(), folder.path());
    for part in [
        folder.path().to_str().unwrap(),
        "cargo xtask host --backend cpu",
        HOST_DIR_VARIABLE,
    ] {
        assert!(stderr.contains(part), "{stderr}");
    }
}

#[test]
fn a_library_that_does_not_load_is_named() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("libflashrt_check.so"), b"no library").unwrap();
    let stderr = fails(&fixture(), folder.path());
    assert!(stderr.contains("libflashrt_check.so does not load"), "{stderr}");
}

#[test]
fn a_model_that_llama_cpp_refuses_is_named() {
    let host = host_dir(None);
    if !host.join("libflashrt_check.so").is_file() {
        eprintln!(
            "skipped: no llama.cpp build in {} (cargo xtask host --backend cpu)",
            host.display()
        );
        return;
    }
    let stderr = fails(&fixture(), &host);
    assert!(
        stderr.contains("every_quant.gguf: llama.cpp cannot load this model: "),
        "{stderr}"
    );
}

#[test]
fn an_expectation_needs_a_known_window() {
    let output = Command::new(env!("CARGO_BIN_EXE_flashrt"))
        .args(["check", "model.gguf", "--expect", "NO_SUCH=1"])
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains("QKV_GEMV"), "{stderr}");
}

#[test]
fn the_argument_comes_before_the_default() {
    assert_eq!(host_dir(Some(Path::new("/own"))), Path::new("/own"));
    if std::env::var_os(HOST_DIR_VARIABLE).is_none() {
        assert_eq!(host_dir(None), Path::new(DEFAULT_HOST_DIR));
    }
}
