//! Where files are read from, and what a reading of one is worth.

use serde::Serialize;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

/// Larger files than any that is read here; dpkg's status is the largest.
const MAX_TEXT: u64 = 64 << 20;
/// As many links as Linux itself follows.
const MAX_LINKS: usize = 40;

/// Something that was found out, or why it was not. Nothing is guessed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Reading<T> {
    /// Found out.
    Known {
        /// What.
        value: T,
        /// Where.
        from: String,
    },
    /// Not found out.
    Unknown {
        /// Why not.
        unknown: String,
    },
}

impl<T> Reading<T> {
    /// What `result` says of `from`.
    pub fn new(from: impl Into<String>, result: Result<T, String>) -> Self {
        match result {
            Ok(value) => Reading::Known {
                value,
                from: from.into(),
            },
            Err(unknown) => Reading::Unknown { unknown },
        }
    }

    /// Not found out, and why.
    pub fn unknown(why: impl Into<String>) -> Self {
        Reading::Unknown { unknown: why.into() }
    }

    /// The value, if it is known.
    pub fn known(&self) -> Option<&T> {
        match self {
            Reading::Known { value, .. } => Some(value),
            Reading::Unknown { .. } => None,
        }
    }

    /// The value, or the reason why there is none.
    pub fn get(&self) -> Result<&T, String> {
        match self {
            Reading::Known { value, .. } => Ok(value),
            Reading::Unknown { unknown } => Err(unknown.clone()),
        }
    }
}

/// The root of the file system that is read: this machine's, or a copy of another's. Links are followed as if it were `/`, so
/// that those of a copy never lead out of it.
#[derive(Debug, Clone)]
pub struct Root {
    base: PathBuf,
    live: bool,
}

impl Root {
    /// This machine.
    pub fn live() -> Self {
        Root {
            base: PathBuf::from("/"),
            live: true,
        }
    }

    /// A copy of another machine's files.
    pub fn copy_at(base: &Path) -> Self {
        Root {
            base: base.to_owned(),
            live: false,
        }
    }

    /// Are these the files of the machine that runs this?
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// `path` without links, as the machine itself names it; an error says what is missing.
    pub fn real(&self, path: &Path) -> Result<PathBuf, String> {
        let mut todo: Vec<PathBuf> = parts(path);
        let mut done = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = todo.pop() {
            if part.as_os_str() == ".." {
                done.pop();
                continue;
            }
            let next = done.join(&part);
            let meta = self
                .host(&next)
                .symlink_metadata()
                .map_err(|e| self.cannot(&next, &e))?;
            if !meta.is_symlink() {
                done = next;
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(format!("{}: too many links", path.display()));
            }
            let target = self.host(&next).read_link().map_err(|e| self.cannot(&next, &e))?;
            if target.is_absolute() {
                done = PathBuf::from("/");
            }
            todo.extend(parts(&target));
        }
        Ok(done)
    }

    /// Where this process finds what the machine calls `path`, a path without links.
    pub fn host(&self, path: &Path) -> PathBuf {
        self.base.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Is there such a file or folder?
    pub fn exists(&self, path: &str) -> bool {
        self.real(Path::new(path)).is_ok()
    }

    /// A file's bytes.
    pub fn bytes(&self, path: &str) -> Result<Vec<u8>, String> {
        let real = self.real(Path::new(path))?;
        let mut bytes = Vec::new();
        // A path of a copy could be a pipe or a device: only files are opened.
        let host = self.host(&real);
        let meta = host.metadata().map_err(|e| self.cannot(&real, &e))?;
        if !meta.is_file() {
            return Err(format!("{path} is no file"));
        }
        File::open(&host)
            .and_then(|file| file.take(MAX_TEXT).read_to_end(&mut bytes))
            .map_err(|e| self.cannot(&real, &e))?;
        Ok(bytes)
    }

    /// A file's text without the white space and NULs at its end.
    pub fn text(&self, path: &str) -> Result<String, String> {
        let bytes = self.bytes(path)?;
        let text = String::from_utf8(bytes).map_err(|_| format!("{path} is no text"))?;
        Ok(text.trim_end_matches(['\0', '\n', ' ']).to_owned())
    }

    /// A file that holds one number.
    pub fn number(&self, path: &str) -> Result<u64, String> {
        let text = self.text(path)?;
        text.trim()
            .parse()
            .map_err(|_| format!("{path} holds {text:?}, no number"))
    }

    /// Names in a folder, sorted.
    pub fn list(&self, path: &str) -> Result<Vec<String>, String> {
        let real = self.real(Path::new(path))?;
        let entries = self.host(&real).read_dir().map_err(|e| self.cannot(&real, &e))?;
        let mut names: Vec<String> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    fn cannot(&self, path: &Path, error: &io::Error) -> String {
        match error.kind() {
            io::ErrorKind::NotFound => format!("there is no {}", path.display()),
            _ => format!("{}: {error}", path.display()),
        }
    }
}

/// Components, the last one first.
fn parts(path: &Path) -> Vec<PathBuf> {
    let kept = path.components().filter_map(|c| match c {
        Component::Normal(name) => Some(PathBuf::from(name)),
        Component::ParentDir => Some(PathBuf::from("..")),
        _ => None,
    });
    let mut parts: Vec<PathBuf> = kept.collect();
    parts.reverse();
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_of_a_copy_stay_inside_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::copy_at(dir.path());
        std::fs::create_dir_all(dir.path().join("a/b")).unwrap();
        std::fs::write(dir.path().join("a/file"), "inside\n").unwrap();
        symlink("/a", dir.path().join("absolute")).unwrap();
        symlink("../../../../a/file", dir.path().join("a/b/up")).unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        assert_eq!(root.text("/absolute/file").unwrap(), "inside");
        assert_eq!(root.real(Path::new("/a/b/up")).unwrap(), Path::new("/a/file"));
        assert!(root.text("/loop").unwrap_err().contains("too many links"));
        assert_eq!(root.text("/etc/passwd").unwrap_err(), "there is no /etc");
        assert!(root.text("/a").unwrap_err().contains("no file"));
    }

    #[test]
    fn a_number_is_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::copy_at(dir.path());
        std::fs::write(dir.path().join("n"), "12\n").unwrap();
        std::fs::write(dir.path().join("word"), "max\n").unwrap();
        assert_eq!(root.number("/n"), Ok(12));
        assert!(root.number("/word").is_err());
    }
}
