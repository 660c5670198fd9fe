//! Formatting, lints, and the committed header.

use crate::context::Context;
use crate::files::{self, IoContext};
use crate::header as generated;
use anyhow::{ensure, Context as _, Result};
use std::fs;
use std::process::Command;

/// Feature sets that must build without a warning. `cuda` needs nvcc: `cargo xtask test` lints it
/// where it compiles it.
pub const FEATURE_SETS: [&str; 4] = ["", "cli", "host", "cli,host"];

/// Runs a program whose output the user wants to see.
pub fn show(command: &mut Command, what: &str) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot run {:?}", command.get_program()))?;
    ensure!(status.success(), "{what} failed ({status})");
    Ok(())
}

/// For `cargo xtask fmt`.
pub fn fmt(context: &Context, check: bool) -> Result<()> {
    if !check && context.would("format the Rust sources") {
        return Ok(());
    }
    let mut cargo = context.cargo();
    cargo.args(["fmt", "--all"]);
    if check {
        cargo.args(["--", "--check"]);
    }
    show(&mut cargo, "cargo fmt")
}

/// For `cargo xtask lint`.
pub fn lint(context: &Context) -> Result<()> {
    for features in FEATURE_SETS {
        let mut cargo = context.cargo();
        cargo.args(["clippy", "--quiet", "--all-targets"]);
        if features.is_empty() {
            cargo.arg("--workspace");
        } else {
            cargo.args(["--features", features]);
        }
        cargo.args(["--", "--deny", "warnings"]);
        if context.would(format!("run {cargo:?}")) {
            continue;
        }
        show(&mut cargo, &format!("clippy with features \"{features}\""))?;
    }
    Ok(())
}

/// For `cargo xtask header`.
pub fn header(context: &Context, check: bool) -> Result<()> {
    let path = context.repo.join("include/flashrt.h");
    let wanted = generated::generate()?;
    if check {
        let committed = fs::read_to_string(&path).at("read", &path)?;
        ensure!(
            committed == wanted,
            "include/flashrt.h differs from src/abi: run `cargo xtask header` and commit the result"
        );
        return Ok(());
    }
    if context.would(format!("write {}", path.display())) {
        return Ok(());
    }
    files::write(&path, wanted)
}
