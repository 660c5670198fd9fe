//! `cargo xtask fa4`: the attention modules of PREFILL_FA4, compiled on this machine, without a GPU, from pinned packages.
//!
//! The archive that modules call may not be passed on, so neither it nor anything that holds it is kept in the repository: modules lie in
//! the cache, by the digest of all that they are made from, and in `.flashrt/fa4/<arch>`, where build.rs takes them.

use crate::context::Context;
use crate::files::{self, IoContext, Staging};
use crate::job::Job;
use crate::tools;
use crate::{sass, tools::Cuda};
use anyhow::{ensure, Context as _, Result};
use clap::Args;
use ggml_flashrt::kernel::{Module, MODULES};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The only GPUs that modules are made for.
const ARCH: &str = "sm_90a";
/// What modules call, in the packages' environment.
const RUNTIME: &str = "libcuda_dialect_runtime_static.a";

/// For `cargo xtask fa4`.
#[derive(Args, Debug)]
pub struct Fa4Args {
    /// Only these modules of build/fa4/modules.json
    #[arg(value_name = "MODULE")]
    pub modules: Vec<String>,
}

/// Compiles what the cache lacks and puts the modules where build.rs finds them.
pub fn run(context: &Context, args: &Fa4Args) -> Result<()> {
    let modules = chosen(&args.modules)?;
    let dir = context.home.join("fa4").join(ARCH);
    let cache = context.cache.join("fa4");
    let script = context.repo.join("build/fa4/generate.py");
    let table = context.repo.join("build/fa4/modules.json");
    let pins = format!("{:?}", context.pins.fa4);
    let source = fs::read_to_string(&script).at("read", &script)?;
    let entries: Value =
        serde_json::from_str(&fs::read_to_string(&table).at("read", &table)?).context("modules.json")?;
    let places: Vec<PathBuf> = modules
        .iter()
        .map(|module| cache.join(key(&source, &entry(&entries, &module.name), &pins)))
        .collect();
    let runtime = cache.join(key("", "", &pins)).join(RUNTIME);
    let whole =
        |(module, place): &(&&Module, &PathBuf)| !files_of(module).iter().all(|file| place.join(file).is_file());
    let missing: Vec<&str> = modules
        .iter()
        .zip(&places)
        .filter(whole)
        .map(|(module, _)| module.name.as_str())
        .collect();
    if context.would(format!(
        "compile for {ARCH}: {}; put into {}: {}",
        list(&missing),
        dir.display(),
        list(&modules.iter().map(|m| m.name.as_str()).collect::<Vec<_>>())
    )) {
        return Ok(());
    }
    if !missing.is_empty() || !runtime.is_file() {
        let cuda = tools::ensure(context, true)?.cuda.context("asked for")?;
        let venv = environment(context)?;
        let found = tools::site_packages(&venv)?
            .join("nvidia_cutlass_dsl/cu13/lib")
            .join(RUNTIME);
        files::write(&runtime, fs::read(&found).at("read", &found)?)?;
        compile(context, &cuda, &venv, &script, &missing, |name| {
            let index = modules.iter().position(|m| m.name == name).expect("chosen");
            places[index].clone()
        })?;
    }
    let staging = Staging::new(&dir)?;
    let copy = |from: &Path| {
        let to = staging.path().join(from.file_name().expect("a file"));
        fs::copy(from, &to).at("write", &to).map(drop)
    };
    copy(&runtime)?;
    for (module, place) in modules.iter().zip(&places) {
        files_of(module).iter().try_for_each(|file| copy(&place.join(file)))?;
    }
    files::write(&staging.path().join("fa4_modules.h"), header(&modules))?;
    staging.commit()?;
    println!(
        "attention modules: {} ({} compiled now). Build with --features fa4, or llama.cpp with -DGGML_CUDA_FLASHRT_FA4=ON",
        dir.display(),
        missing.len()
    );
    Ok(())
}

/// The modules of these names, or all.
fn chosen(names: &[String]) -> Result<Vec<&'static Module>> {
    let known = || list(&MODULES.iter().map(|m| m.name.as_str()).collect::<Vec<_>>());
    for name in names {
        let is_known = MODULES.iter().any(|m| m.name == *name);
        ensure!(
            is_known,
            "build/fa4/modules.json has no module {name}; it has {}",
            known()
        );
    }
    let wanted = |m: &&Module| names.is_empty() || names.contains(&m.name);
    Ok(MODULES.iter().filter(wanted).collect())
}

fn list(names: &[&str]) -> String {
    match names {
        [] => "nothing".to_owned(),
        names => names.join(" "),
    }
}

/// A module's line in the table, in one spelling. Why it exists does not change what it is.
fn entry(table: &Value, name: &str) -> String {
    let mut modules = table["modules"].as_array().into_iter().flatten();
    let mut found = modules.find(|m| m["name"] == name).cloned().unwrap_or_default();
    if let Some(fields) = found.as_object_mut() {
        fields.remove("why");
    }
    found.to_string()
}

/// The digest of everything that a module is made from.
fn key(script: &str, entry: &str, pins: &str) -> String {
    files::sha256_of([ARCH, script, entry, pins].join("\0").as_bytes())
}

fn files_of(module: &Module) -> [String; 2] {
    ["h", "o"].map(|extension| format!("fa4_{}.{extension}", module.name))
}

/// What csrc/attention/prefill_fa4.cu includes.
fn header(modules: &[&Module]) -> String {
    let includes = modules.iter().map(|m| format!("#include \"fa4_{}.h\"\n", m.name));
    let lines = modules.iter().map(|m| {
        format!(
            " \\\n    X({}, {}, {}, {}, {})",
            m.name, m.head_dim, m.head_dim_v, m.tile_m, m.tile_n
        )
    });
    format!(
        "// Written by `cargo xtask fa4`: name, values of a head of K and of V, tokens and keys of a tile.\n#pragma once\n{}\n\
         #define FRT_FA4_MODULES(X){}\n",
        includes.collect::<String>(),
        lines.collect::<String>()
    )
}

/// The packages' own environment: they are 350 MB, and nothing else needs them.
fn environment(context: &Context) -> Result<PathBuf> {
    let venv = context.home.join("fa4/venv");
    let python = which::which("python3")
        .context("no python3 found: install it, such as with `apt install python3 python3-venv`")?;
    let code = "import sys; print('cp%d%d' % sys.version_info[:2])";
    let output = Command::new(&python).args(["-c", code]).output().at("run", &python)?;
    let tag = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    tools::ensure_venv(context, &venv, &context.pins.fa4(&tag)?)?;
    Ok(venv)
}

fn compile(
    context: &Context,
    cuda: &Cuda,
    venv: &Path,
    script: &Path,
    names: &[&str],
    place: impl Fn(&str) -> PathBuf,
) -> Result<()> {
    for (i, name) in names.iter().enumerate() {
        let staging = Staging::new(&place(name))?;
        let mut python = Command::new(venv.join("bin/python"));
        python
            .arg(script)
            .args(["--arch", ARCH, "--out"])
            .arg(staging.path())
            .arg(name);
        let what = format!("compiling attention module {name} ({} of {})", i + 1, names.len());
        Job::new(context, "fa4", what).run(&mut python)?;
        let object = staging.path().join(format!("fa4_{name}.o"));
        sass::attention(context, cuda, &object)?;
        staging.commit()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_lists_the_modules_for_the_source_that_calls_them() {
        let text = header(&chosen(&["hd256".to_owned()]).unwrap());
        assert!(text.contains("#include \"fa4_hd256.h\""), "{text}");
        assert!(
            text.ends_with("#define FRT_FA4_MODULES(X) \\\n    X(hd256, 256, 256, 128, 64)\n"),
            "{text}"
        );
        assert_eq!(header(&chosen(&[]).unwrap()).matches("X(hd").count(), MODULES.len());
    }

    #[test]
    fn an_unknown_module_is_named_with_the_known_ones() {
        let error = chosen(&["hd512".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("hd512") && error.contains("hd128"), "{error}");
    }

    #[test]
    fn a_module_is_made_anew_when_anything_it_is_made_from_changes() {
        let table: Value = serde_json::from_str(include_str!("../../build/fa4/modules.json")).unwrap();
        let of = |table: &Value| key("script", &entry(table, "hd128"), "pins");
        let first = of(&table);
        let index = MODULES.iter().position(|m| m.name == "hd128").unwrap();
        let mut other = table.clone();
        other["modules"][index]["tile_n"] = 64.into();
        assert_ne!(of(&other), first);
        other = table.clone();
        other["modules"][index]["why"] = "another reason".into();
        other["modules"][index + 1]["tile_n"] = 16.into();
        assert_eq!(of(&other), first, "neither the reason nor another module");
        assert_ne!(key("another script", &entry(&table, "hd128"), "pins"), first);
        assert_ne!(key("script", &entry(&table, "hd128"), "other pins"), first);
    }
}
