//! The patches of cmake/hosts, applied to a copy of llama.cpp that stays in step with the tree it was made from.

use crate::files::{self, IoContext};
use anyhow::{bail, ensure, Context as _, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, FileTimes};
use std::path::{Path, PathBuf};
use walkdir::{DirEntry, WalkDir};

/// Patched files by their path in the tree.
pub type Patched = BTreeMap<PathBuf, String>;

/// What a llama.cpp may be patched with. The patches touch different files, so that they can be combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The hook in ggml-cuda.
    Hook,
    /// Attention masks by ranges.
    Mask,
}

impl Kind {
    /// Name of the patch for a version.
    pub fn file(self, version: &str) -> String {
        match self {
            Kind::Hook => format!("llama.cpp-{version}.patch"),
            Kind::Mask => format!("llama.cpp-{version}-mask.patch"),
        }
    }

    /// Whether a file of cmake/hosts is such a patch. Those for llama.cpp's tests lie there too.
    fn has_name(self, name: &str) -> bool {
        let Some(stem) = name.strip_suffix(".patch").filter(|stem| !stem.ends_with("-tests")) else {
            return false;
        };
        (self == Kind::Mask) == stem.ends_with("-mask")
    }

    /// The CMake option and the definition of the same name.
    pub fn option(self) -> &'static str {
        match self {
            Kind::Hook => "GGML_CUDA_FLASHRT",
            Kind::Mask => "LLAMA_FLASHRT_MASK",
        }
    }

    /// The CMake variable for our sources.
    pub fn directory_option(self) -> &'static str {
        match self {
            Kind::Hook => "GGML_CUDA_FLASHRT_DIR",
            Kind::Mask => "LLAMA_FLASHRT_DIR",
        }
    }

    /// Whether a tree has the patch already.
    pub fn is_in(self, tree: &Path) -> Result<bool> {
        let inner = match self {
            Kind::Hook => "ggml/src/ggml-cuda/ggml-cuda.cu",
            Kind::Mask => "src/llama-kv-cache.cpp",
        };
        let text = fs::read_to_string(tree.join(inner))
            .with_context(|| format!("{} is no llama.cpp tree: it has no {inner}", tree.display()))?;
        Ok(text.contains(self.option()))
    }
}

/// Applies a patch in git's format to the files below `tree`, in memory.
pub fn apply(tree: &Path, patch: &Path) -> Result<Patched> {
    let text = fs::read_to_string(patch).at("read", patch)?;
    let mut patched = Patched::new();
    for section in split(&text) {
        let parsed = diffy::Patch::from_str(section).with_context(|| patch.display().to_string())?;
        let file = parsed.modified().and_then(|name| name.strip_prefix("b/"));
        let file = file.with_context(|| format!("{} removes a file, or names none", patch.display()))?;
        let before = match parsed.original() {
            Some("/dev/null") => String::new(),
            _ => fs::read_to_string(tree.join(file)).at("read", &tree.join(file))?,
        };
        let after = diffy::apply(&before, &parsed);
        let after = after
            .map_err(|why| anyhow::anyhow!("{} does not fit {}: {why}", patch.display(), tree.join(file).display()))?;
        patched.insert(file.into(), after);
    }
    ensure!(!patched.is_empty(), "{} changes nothing", patch.display());
    Ok(patched)
}

/// One file's part each, from its `--- ` line on.
fn split(patch: &str) -> Vec<&str> {
    let starts: Vec<_> = patch
        .match_indices("--- ")
        .map(|(at, _)| at)
        .filter(|&at| at == 0 || patch.as_bytes()[at - 1] == b'\n')
        .filter(|&at| {
            patch[at..]
                .split_once('\n')
                .is_some_and(|(_, rest)| rest.starts_with("+++ "))
        })
        .collect();
    let section = |(i, &start): (usize, &usize)| {
        let end = starts.get(i + 1).copied().unwrap_or(patch.len());
        // What git says about the next file stands before its `--- ` line.
        let text = &patch[start..end];
        text.find("\ndiff --git ").map_or(text, |at| &text[..=at])
    };
    starts.iter().enumerate().map(section).collect()
}

/// Lines that a patch adds.
pub fn added_lines(patch: &Path) -> Result<usize> {
    let text = fs::read_to_string(patch).at("read", patch)?;
    Ok(text
        .lines()
        .filter(|line| line.starts_with('+') && !line.starts_with("+++ "))
        .count())
}

/// The first patch of a kind that fits a tree of unknown version.
pub fn fitting(tree: &Path, patches: &Path, kind: Kind) -> Result<Patched> {
    let mut candidates: Vec<_> = fs::read_dir(patches)
        .at("list", patches)?
        .flatten()
        .map(|e| e.path())
        .collect();
    let is_wanted = |name: &str| kind.has_name(name);
    candidates.retain(|path| path.file_name().and_then(|n| n.to_str()).is_some_and(is_wanted));
    candidates.sort();
    let mut tried = Vec::new();
    for patch in candidates.iter().rev() {
        match apply(tree, patch) {
            Ok(patched) => return Ok(patched),
            Err(_) => tried.push(patch.file_name().unwrap_or_default().to_string_lossy().into_owned()),
        }
    }
    bail!(
        "no patch for {} fits {} (tried {}): use a llama.cpp of one of these versions, or adapt one of {} and apply it yourself",
        kind.option(),
        tree.display(),
        tried.join(", "),
        patches.display()
    )
}

/// Makes `copy` what `tree` is with `patched` applied. Only files that differ are written, so that a build of the copy stays
/// incremental; whatever else lies in the copy goes.
pub fn sync(tree: &Path, patched: &Patched, copy: &Path) -> Result<()> {
    let mut wanted = BTreeSet::new();
    for entry in walk(tree) {
        let entry = entry.with_context(|| format!("cannot list {}", tree.display()))?;
        let inner = entry.path().strip_prefix(tree).expect("lies below").to_path_buf();
        if entry.file_type().is_dir() || patched.contains_key(&inner) {
            continue;
        }
        let (from, to) = (entry.path(), copy.join(&inner));
        let meta = match fs::metadata(from) {
            Err(_) if entry.path_is_symlink() => continue, // leads nowhere
            meta => meta.at("read", from)?,
        };
        if meta.is_dir() {
            // A link, say to a directory of models: not to be copied, and it stays what it is.
            files::create_dir(to.parent().expect("lies in the copy"))?;
            files::symlink(&from.canonicalize().at("resolve", from)?, &to)?;
            wanted.insert(inner);
            continue;
        }
        if !meta.is_file() {
            continue;
        }
        let modified = meta.modified().at("read", from)?;
        let same = fs::metadata(&to).is_ok_and(|m| m.len() == meta.len() && m.modified().is_ok_and(|t| t == modified));
        if !same {
            files::create_dir(to.parent().expect("lies in the copy"))?;
            fs::copy(from, &to).at("write", &to)?;
            let file = File::options().write(true).open(&to).at("write", &to)?;
            file.set_times(FileTimes::new().set_modified(modified))
                .at("write", &to)?;
        }
        wanted.insert(inner);
    }
    for (inner, text) in patched {
        let to = copy.join(inner);
        if !fs::read_to_string(&to).is_ok_and(|now| now == *text) {
            files::write(&to, text)?;
        }
        wanted.insert(inner.clone());
    }
    for entry in WalkDir::new(copy) {
        let entry = entry.with_context(|| format!("cannot list {}", copy.display()))?;
        let inner = entry.path().strip_prefix(copy).expect("lies below");
        if !entry.file_type().is_dir() && !wanted.contains(inner) {
            fs::remove_file(entry.path()).at("remove", entry.path())?;
        }
    }
    Ok(())
}

/// All of a source tree but its repository and builds inside it.
fn walk(tree: &Path) -> impl Iterator<Item = walkdir::Result<DirEntry>> {
    let is_source = |entry: &DirEntry| {
        let build = entry.file_type().is_dir() && entry.path().join("CMakeCache.txt").exists();
        entry.depth() == 0 || !(build || entry.file_name() == ".git")
    };
    WalkDir::new(tree).into_iter().filter_entry(is_source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    const PATCH: &str = "\
diff --git a/ggml/a.cu b/ggml/a.cu
index 1111111..2222222 100644
--- a/ggml/a.cu
+++ b/ggml/a.cu
@@ -1,3 +1,4 @@
 one
+GGML_CUDA_FLASHRT
 two
 three
diff --git a/ggml/b.txt b/ggml/b.txt
index 1111111..2222222 100644
--- a/ggml/b.txt
+++ b/ggml/b.txt
@@ -1 +1,2 @@
 --- b
+c
";

    fn tree() -> (TempDir, PathBuf, PathBuf) {
        let dir = TempDir::new().unwrap();
        let tree = dir.path().join("tree");
        for (file, text) in [
            ("ggml/a.cu", "one\ntwo\nthree\n"),
            ("ggml/b.txt", "--- b\n"),
            ("c", "c"),
            (".git/HEAD", ""),
        ] {
            files::write(&tree.join(file), text).unwrap();
        }
        files::write(&tree.join("build/CMakeCache.txt"), "").unwrap();
        let patches = dir.path().join("hosts");
        files::write(&patches.join("v1.patch"), PATCH).unwrap();
        (dir, tree, patches)
    }

    #[test]
    fn every_file_of_a_patch_is_applied() {
        let (_dir, tree, patches) = tree();
        let patched = apply(&tree, &patches.join("v1.patch")).unwrap();
        assert_eq!(patched[Path::new("ggml/a.cu")], "one\nGGML_CUDA_FLASHRT\ntwo\nthree\n");
        assert_eq!(patched[Path::new("ggml/b.txt")], "--- b\nc\n");
        assert_eq!(added_lines(&patches.join("v1.patch")).unwrap(), 2);
    }

    #[test]
    fn another_tree_is_refused_with_what_was_tried() {
        let (_dir, tree, patches) = tree();
        files::write(&tree.join("ggml/a.cu"), "quite\nanother\nfile\n").unwrap();
        let error = fitting(&tree, &patches, Kind::Hook).unwrap_err().to_string();
        assert!(error.contains("v1.patch"), "{error}");
    }

    #[test]
    fn a_copy_follows_its_tree_and_touches_only_what_changed() {
        let (dir, tree, patches) = tree();
        let copy = dir.path().join("copy");
        let patched = fitting(&tree, &patches, Kind::Hook).unwrap();
        sync(&tree, &patched, &copy).unwrap();
        assert!(fs::read_to_string(copy.join("ggml/a.cu")).unwrap().contains("FLASHRT"));
        assert!(!copy.join(".git").exists() && !copy.join("build").exists());

        let written = |file: &str| fs::metadata(copy.join(file)).unwrap().modified().unwrap();
        let before = written("ggml/a.cu");
        files::write(&tree.join("c"), "changed").unwrap();
        fs::write(copy.join("stray"), "").unwrap();
        fs::write(copy.join("ggml/b.txt"), "spoilt").unwrap();
        sync(&tree, &patched, &copy).unwrap();
        assert_eq!(written("ggml/a.cu"), before);
        assert_eq!(fs::read_to_string(copy.join("c")).unwrap(), "changed");
        assert_eq!(fs::read_to_string(copy.join("ggml/b.txt")).unwrap(), "--- b\nc\n");
        assert!(!copy.join("stray").exists());
    }

    /// A user's tree may link its models from elsewhere.
    #[test]
    fn links_of_a_tree_are_kept_or_followed_and_lead_nowhere_at_worst() {
        let (dir, tree, patches) = tree();
        let link = |to: &Path, name: &str| std::os::unix::fs::symlink(to, tree.join(name)).unwrap();
        let models = dir.path().join("models");
        files::write(&models.join("m.gguf"), "m").unwrap();
        link(&models, "models");
        link(&models.join("m.gguf"), "m.gguf");
        link(Path::new("../gone"), "gone");
        let copy = dir.path().join("copy");
        let patched = fitting(&tree, &patches, Kind::Hook).unwrap();
        for _ in 0..2 {
            sync(&tree, &patched, &copy).unwrap();
            assert_eq!(
                fs::read_link(copy.join("models")).unwrap(),
                models.canonicalize().unwrap()
            );
            assert_eq!(fs::read_to_string(copy.join("m.gguf")).unwrap(), "m");
            assert!(!copy.join("gone").exists());
        }
        assert!(models.join("m.gguf").is_file());
    }

    #[test]
    fn a_tree_without_ggml_cuda_is_named() {
        let dir = TempDir::new().unwrap();
        let error = Kind::Hook.is_in(dir.path()).unwrap_err().to_string();
        assert!(error.contains("no llama.cpp tree"), "{error}");
    }

    #[test]
    fn each_kind_finds_its_own_patches() {
        for (kind, name) in [
            (Kind::Hook, "llama.cpp-1.patch"),
            (Kind::Mask, "llama.cpp-1-mask.patch"),
        ] {
            assert_eq!(kind.file("1"), name);
            for other in [Kind::Hook, Kind::Mask] {
                assert_eq!(other.has_name(name), other == kind, "{name}");
                assert!(!other.has_name("llama.cpp-1-tests.patch") && !other.has_name("README.md"));
            }
        }
        let (_dir, tree, patches) = tree();
        let error = fitting(&tree, &patches, Kind::Mask).unwrap_err().to_string();
        assert!(error.contains("LLAMA_FLASHRT_MASK"), "{error}");
    }
}
