//! Files that appear whole or not at all, and tables.

use anyhow::{bail, Context, Result};
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file in the making: written beside its place, moved there by [`NewFile::commit`], gone if that never happens.
pub struct NewFile {
    temp: NamedTempFile,
    path: PathBuf,
    replace: bool,
}

impl NewFile {
    /// Begins a file at `path`, which must not exist unless it is to be replaced.
    pub fn create(path: &Path, replace: bool) -> Result<Self> {
        if !replace && path.exists() {
            bail!("{} exists already", path.display());
        }
        let folder = folder_of(path);
        let mut builder = tempfile::Builder::new();
        builder.prefix(".flashrt-").permissions(Permissions::from_mode(0o666)); // less the umask
        let temp = builder
            .tempfile_in(folder)
            .with_context(|| format!("cannot write in {}", folder.display()))?;
        Ok(NewFile {
            temp,
            path: path.to_owned(),
            replace,
        })
    }

    /// Where to write.
    pub fn writer(&self) -> &File {
        self.temp.as_file()
    }

    /// Makes the file durable and gives it its name.
    pub fn commit(self) -> Result<()> {
        let context = || format!("cannot write {}", self.path.display());
        self.temp.as_file().sync_all().with_context(context)?;
        let moved = if self.replace {
            self.temp.persist(&self.path)
        } else {
            self.temp.persist_noclobber(&self.path)
        };
        moved.map_err(|e| e.error).with_context(context)?;
        File::open(folder_of(&self.path))
            .and_then(|folder| folder.sync_all())
            .with_context(context)
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Writes a whole text file.
pub fn write_text(path: &Path, text: &str, replace: bool) -> Result<()> {
    let file = NewFile::create(path, replace)?;
    file.writer()
        .write_all(text.as_bytes())
        .with_context(|| format!("cannot write {}", path.display()))?;
    file.commit()
}

/// Prints to stdout; a reader that has gone away (`| head`) is no error.
pub fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e).context("cannot write to stdout"),
        _ => Ok(()),
    }
}

/// Columns aligned to the left, the last one free.
pub fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let width = |i: usize| {
        rows.iter()
            .map(|r| r[i].chars().count())
            .chain([head[i].len()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(|i| if i + 1 < N { width(i) } else { 0 }).collect();
    let line = |cells: Vec<&str>| {
        let padded: Vec<String> = cells
            .iter()
            .zip(&widths)
            .map(|(cell, w)| format!("{cell:w$}"))
            .collect();
        padded.join("  ").trim_end().to_owned() + "\n"
    };
    let body: String = rows
        .iter()
        .map(|r| line(r.iter().map(String::as_str).collect()))
        .collect();
    line(head.to_vec()) + &body
}

/// A number of bytes to read: three digits or more of the largest unit that leaves no zero before the point.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (0..UNITS.len()).rev().find(|u| bytes >> (10 * u) > 0).unwrap_or(0);
    if unit == 0 {
        return format!("{bytes} B");
    }
    format!("{:.2} {}", bytes as f64 / (1u64 << (10 * unit)) as f64, UNITS[unit])
}

/// Reads a number of bytes as it is written by hand: `4GiB`, `512M`, `1000`.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let shift = match &text[digits..] {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        unit => return Err(format!("{unit:?} is no unit: B, KiB, MiB or GiB")),
    };
    let number: u64 = text[..digits]
        .parse()
        .map_err(|_| "a whole number and a unit, as in 4GiB".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}
