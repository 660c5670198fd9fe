//! The static library, built without kernels, and the flags that flashrt.h documents for linking it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Builds libggml_flashrt.a beside this test, where nearly all of it is built already.
pub fn archive() -> &'static Path {
    static ARCHIVE: OnceLock<PathBuf> = OnceLock::new();
    ARCHIVE.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile_dir = test.ancestors().nth(2).unwrap();
        let release: &[&str] = if profile_dir.ends_with("release") {
            &["--release"]
        } else {
            &[]
        };
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--quiet", "--lib", "--package", "ggml-flashrt"])
            .args(release);
        cargo.arg("--manifest-path").arg(root().join("Cargo.toml"));
        cargo.arg("--target-dir").arg(profile_dir.parent().unwrap());
        run(&mut cargo);
        profile_dir.join("libggml_flashrt.a")
    })
}

/// The flags of the header's example for a `kind` of output ("A shared library", "A program"), without those that only kernels
/// need.
pub fn documented_flags(kind: &str) -> Vec<String> {
    let header = std::fs::read_to_string(root().join("include/flashrt.h")).unwrap();
    let line = header
        .lines()
        .find(|l| l.contains(&format!("{kind}:")))
        .expect("flashrt.h documents it");
    let flags = line
        .split_whitespace()
        .filter(|w| w.starts_with('-') && !["-lcudart", "-lstdc++"].contains(w));
    flags.map(str::to_owned).collect()
}

/// A C compiler that warns about everything and finds flashrt.h.
pub fn cc() -> Command {
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-I"])
        .arg(root().join("include"));
    cc
}

/// Path of a source in tests/c.
pub fn source(name: &str) -> PathBuf {
    root().join("tests/c").join(name)
}

/// Runs a command that must succeed.
pub fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}
