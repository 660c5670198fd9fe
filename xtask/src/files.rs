//! Files and directories that appear whole or not at all.

use anyhow::{bail, ensure, Context as _, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::{NamedTempFile, TempDir};

/// Says what could not be done with a path, and what to do about a full disk.
pub trait IoContext<T> {
    /// `verb` completes "cannot … PATH".
    fn at(self, verb: &str, path: &Path) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn at(self, verb: &str, path: &Path) -> Result<T> {
        self.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => disk_full(path),
            _ => anyhow::Error::new(error).context(format!("cannot {verb} {}", path.display())),
        })
    }
}

/// The one line for a full disk.
pub fn disk_full(path: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "no space left on the disk of {}: free some, or move FLASHRT_HOME or FLASHRT_CACHE_DIR to another disk, then run again",
        path.display()
    )
}

/// Fails before anything is begun if a directory's disk cannot take `bytes`.
pub fn require_space(dir: &Path, bytes: u64) -> Result<()> {
    let existing = dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/"));
    let disk = rustix::fs::statvfs(existing)
        .map_err(io::Error::from)
        .at("examine the disk of", existing)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    ensure!(
        free >= bytes,
        "{} MB are needed on the disk of {}, {} MB are free: free some, or move FLASHRT_HOME or FLASHRT_CACHE_DIR to another \
         disk, then run again",
        bytes.div_ceil(1 << 20),
        dir.display(),
        free >> 20
    );
    Ok(())
}

/// Whether a directory's disk takes no more. A program that failed for that may not even have been able to say so.
pub fn is_full(dir: &Path) -> bool {
    let written = NamedTempFile::with_prefix_in(PARTIAL, dir).and_then(|mut file| {
        file.write_all(&[0; 1 << 20])?;
        file.as_file().sync_all()
    });
    written.is_err_and(|error| matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// Prefixes of what is not in its place yet, or not any more.
pub const PARTIAL: &str = ".partial-";
const FORMER: &str = ".former-";
/// No step takes this long.
const STALE: Duration = Duration::from_secs(12 * 3600);

/// Removes what runs that were killed left in a directory.
pub fn sweep(dir: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let age = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if [PARTIAL, FORMER].iter().any(|prefix| name.starts_with(prefix)) && age.is_some_and(|age| age > STALE) {
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => remove_dir(&entry.path())?,
                false => fs::remove_file(entry.path()).at("remove", &entry.path())?,
            }
        }
    }
    Ok(())
}

/// Creates a directory and its parents.
pub fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).at("create", path)
}

/// Removes a directory tree if it is there.
pub fn remove_dir(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error).at("remove", path),
        _ => Ok(()),
    }
}

/// Writes a file: the old content stays until the new one is on the disk.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    write_with(path, |out| out.write_all(content.as_ref()).at("write", path))
}

/// As [`write`], with the content written by `fill`; if it fails, nothing has changed.
pub fn write_with(path: &Path, fill: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    let parent = path.parent().context("a file to write lies in a directory")?;
    create_dir(parent)?;
    let mut staged = NamedTempFile::with_prefix_in(PARTIAL, parent).at("write in", parent)?;
    fill(staged.as_file_mut())?;
    staged.as_file().sync_all().at("write", path)?;
    // Temporary files are private to the user; what they become is not secret.
    set_mode(staged.as_file(), 0o644).at("set the mode of", path)?;
    staged.persist(path).map_err(|e| e.error).at("write", path)?;
    sync_dir(parent)
}

/// A directory that is filled elsewhere and then takes its place at once. Dropped before that, it leaves nothing.
pub struct Staging {
    dir: TempDir,
    target: PathBuf,
}

impl Staging {
    /// For a later `target`, on the same file system.
    pub fn new(target: &Path) -> Result<Staging> {
        let parent = target.parent().context("a directory to install lies in another")?;
        create_dir(parent)?;
        let dir = TempDir::with_prefix_in(PARTIAL, parent).at("write in", parent)?;
        Ok(Staging {
            dir,
            target: target.to_path_buf(),
        })
    }

    /// Where to put the content.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Puts the directory in its place; a former one is removed.
    pub fn commit(self) -> Result<()> {
        for entry in walkdir::WalkDir::new(self.path()) {
            let entry = entry.with_context(|| format!("cannot list {}", self.dir.path().display()))?;
            if entry.file_type().is_file() {
                File::open(entry.path())
                    .and_then(|file| file.sync_all())
                    .at("write", entry.path())?;
            }
        }
        let parent = self.target.parent().expect("checked in new");
        let former = TempDir::with_prefix_in(FORMER, parent).at("write in", parent)?;
        match fs::rename(&self.target, former.path().join("tree")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).at("replace", &self.target),
            _ => {}
        }
        let staged = self.dir.keep();
        set_mode(&File::open(&staged).at("open", &staged)?, 0o755).at("set the mode of", &staged)?;
        fs::rename(&staged, &self.target).at("create", &self.target)?;
        sync_dir(parent)
    }
}

fn set_mode(file: &File, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(fs::Permissions::from_mode(mode))
}

fn sync_dir(path: &Path) -> Result<()> {
    File::open(path).and_then(|dir| dir.sync_all()).at("write", path)
}

/// Makes `link` point to `target`, replacing another link but nothing else.
pub fn symlink(target: &Path, link: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|now| now == target) {
        return Ok(());
    }
    match fs::symlink_metadata(link) {
        Ok(meta) if meta.is_symlink() => fs::remove_file(link).at("replace", link)?,
        Ok(_) => bail!("{} is in the way: remove it and run again", link.display()),
        Err(_) => {}
    }
    std::os::unix::fs::symlink(target, link).at("create", link)
}

/// Hexadecimal digest of a file.
pub fn sha256(path: &Path) -> Result<String> {
    let mut reader = BufReader::with_capacity(1 << 20, File::open(path).at("open", path)?);
    let mut digest = Sha256::new();
    io::copy(&mut reader, &mut digest).at("read", path)?;
    Ok(hex(&digest.finalize()))
}

/// Hexadecimal digest of bytes.
pub fn sha256_of(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Passes bytes on and digests them.
pub struct Digesting<W> {
    inner: W,
    digest: Sha256,
}

impl<W: Write> Digesting<W> {
    /// Around a writer.
    pub fn new(inner: W) -> Self {
        Digesting {
            inner,
            digest: Sha256::new(),
        }
    }

    /// Hexadecimal digest of all that was written.
    pub fn finish(self) -> String {
        hex(&self.digest.finalize())
    }
}

impl<W: Write> Write for Digesting<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(buffer)?;
        self.digest.update(&buffer[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_failed_write_keeps_the_old_content_and_leaves_nothing_else() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("a");
        write(&file, "old").unwrap();
        let result = write_with(&file, |out| {
            out.write_all(b"half of the n").unwrap();
            bail!("stopped")
        });
        assert!(result.is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "old");
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn a_dropped_staging_leaves_the_former_directory() {
        let dir = TempDir::new().unwrap();
        let target = dir.path().join("tree");
        for (content, commit) in [("one", true), ("two", false), ("three", true)] {
            let staging = Staging::new(&target).unwrap();
            fs::write(staging.path().join("file"), content).unwrap();
            let expected = if commit { content } else { "one" };
            if commit {
                staging.commit().unwrap();
            } else {
                drop(staging);
            }
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), expected);
            assert_eq!(names(dir.path()), ["tree"]);
        }
    }

    #[test]
    fn only_old_leftovers_are_swept() {
        let dir = TempDir::new().unwrap();
        for name in [".partial-old", ".partial-new", "kept-old"] {
            fs::write(dir.path().join(name), "").unwrap();
            if name.ends_with("old") {
                let file = File::options().write(true).open(dir.path().join(name)).unwrap();
                file.set_modified(std::time::SystemTime::now() - 2 * STALE).unwrap();
            }
        }
        sweep(dir.path()).unwrap();
        assert_eq!(names(dir.path()), [".partial-new", "kept-old"]);
    }

    #[test]
    fn a_full_disk_is_named_with_its_remedy() {
        let result: io::Result<()> = Err(io::Error::from(io::ErrorKind::StorageFull));
        let text = format!("{:#}", result.at("write", Path::new("/some/where")).unwrap_err());
        assert!(
            text.contains("/some/where") && text.contains("FLASHRT_CACHE_DIR"),
            "{text}"
        );
    }

    #[test]
    fn space_is_asked_for_before_anything_is_begun() {
        let dir = TempDir::new().unwrap();
        let later = dir.path().join("not/yet/there");
        require_space(&later, 1).unwrap();
        let text = require_space(&later, u64::MAX).unwrap_err().to_string();
        assert!(text.contains("MB are free") && text.contains("FLASHRT_HOME"), "{text}");
        assert!(!later.exists());
    }

    #[test]
    fn a_real_full_device_is_recognised() {
        let full = Path::new("/dev/full");
        let Ok(mut file) = fs::OpenOptions::new().write(true).open(full) else {
            eprintln!("skipped: no /dev/full here");
            return;
        };
        let text = format!("{:#}", file.write_all(b"x").at("write", full).unwrap_err());
        assert!(text.contains("no space left"), "{text}");
    }

    #[test]
    fn digests_agree() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("a");
        fs::write(&file, "abc").unwrap();
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&file).unwrap(), known);
        assert_eq!(sha256_of(b"abc"), known);
        let mut writer = Digesting::new(Vec::new());
        writer.write_all(b"abc").unwrap();
        assert_eq!(writer.inner, b"abc");
        assert_eq!(writer.finish(), known);
    }

    #[test]
    fn a_link_replaces_a_link_only() {
        let dir = TempDir::new().unwrap();
        let link = dir.path().join("link");
        symlink(Path::new("a"), &link).unwrap();
        symlink(Path::new("b"), &link).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("b"));
        let real = dir.path().join("real");
        fs::write(&real, "").unwrap();
        assert!(symlink(Path::new("a"), &real)
            .unwrap_err()
            .to_string()
            .contains("in the way"));
    }
}
