//! Runs the `flashrt` command, and stands in for llama.cpp's tools where there is no GPU.
#![allow(dead_code, reason = "each test file uses its part")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The command, without the switches of whoever runs the tests.
pub fn flashrt() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_flashrt"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("GGML_") || name.starts_with("FLASHRT_")) {
        command.env_remove(name);
    }
    command
}

/// Its stdout; panics with its stderr when it failed.
#[track_caller]
pub fn stdout(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// Its one line on stderr; panics when it succeeded, said nothing or said more.
#[track_caller]
pub fn complaint(command: &mut Command) -> String {
    let output: Output = command.output().unwrap();
    assert!(!output.status.success(), "succeeded: {}", text(&output.stdout));
    let stderr = text(&output.stderr);
    let lines: Vec<&str> = stderr.lines().filter(|l| l.starts_with("flashrt: ")).collect();
    assert_eq!(lines.len(), 1, "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
    lines[0].to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A folder for one test.
pub struct Scratch(TempDir);

impl Scratch {
    pub fn new() -> Self {
        Scratch(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Names of the files in it.
    pub fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.0.path())
            .unwrap()
            .map(|f| f.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// A model that any reader accepts.
    pub fn model(&self) -> PathBuf {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/no_tensors.gguf");
        let path = self.path("model.gguf");
        fs::copy(fixture, &path).unwrap();
        path
    }

    /// A folder of llama.cpp's tools whose `name` is this shell script.
    pub fn tool(&self, build: &str, name: &str, script: &str) -> PathBuf {
        let bin = self.path(build).join("bin");
        fs::create_dir_all(&bin).unwrap();
        let path = bin.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self.path(build)
    }
}
