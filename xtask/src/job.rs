//! Runs a program with its output in a log, a progress bar on a terminal, and one clear line when it fails.

use crate::context::Context;
use crate::files::{self, IoContext};
use anyhow::{anyhow, Result};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const POLL: Duration = Duration::from_millis(100);

/// A program to run.
pub struct Job<'a> {
    what: String,
    log: PathBuf,
    disks: [PathBuf; 2],
    progress: Progress<'a>,
}

/// Where progress is read from.
enum Progress<'a> {
    /// Nowhere: a spinner.
    Spinner,
    /// From the `[12/345]` that ninja prints.
    Ninja,
    /// From the bytes below a directory.
    Bytes { dir: &'a Path, total: u64 },
}

/// A failed job. `log` is what it printed.
#[derive(Debug)]
pub struct Failure {
    /// What was being done.
    pub what: String,
    /// How the program ended.
    pub status: String,
    /// Everything it printed.
    pub log: String,
    /// Where that is kept.
    pub path: PathBuf,
    /// Directories that the program may have filled.
    pub disks: [PathBuf; 2],
}

impl Failure {
    /// The error line, with the line of the log that says most.
    pub fn into_error(self) -> anyhow::Error {
        if let Some(full) = self.disks.iter().find(|dir| files::is_full(dir)) {
            return files::disk_full(full);
        }
        if says_disk_full(&self.log) {
            return files::disk_full(&self.disks[0]);
        }
        anyhow!(
            "{} failed ({}): {}; all of its output is in {}",
            self.what,
            self.status,
            telling_line(&self.log),
            self.path.display()
        )
    }
}

impl<'a> Job<'a> {
    /// `what` is shown while it runs and named when it fails, `step` is the name of the log.
    pub fn new(context: &Context, step: &str, what: impl Into<String>) -> Job<'a> {
        let disks = [context.home.clone(), context.cache.clone()];
        Job {
            what: what.into(),
            log: context.log(step),
            disks,
            progress: Progress::Spinner,
        }
    }

    /// Follows ninja's counter.
    pub fn following_ninja(mut self) -> Job<'a> {
        self.progress = Progress::Ninja;
        self
    }

    /// Follows the bytes that appear below `dir`.
    pub fn following_bytes(mut self, dir: &'a Path, total: u64) -> Job<'a> {
        self.progress = Progress::Bytes { dir, total };
        self
    }

    /// Runs it to its end.
    pub fn run(self, command: &mut Command) -> Result<()> {
        self.try_run(command)?.map_err(Failure::into_error)
    }

    /// As [`Job::run`], for callers that know better what a failure means.
    pub fn try_run(self, command: &mut Command) -> Result<Result<(), Failure>> {
        let path = self.log;
        files::create_dir(path.parent().expect("logs lie in a directory"))?;
        let out = File::create(&path).at("write", &path)?;
        let err = out.try_clone().at("write", &path)?;
        let program = PathBuf::from(command.get_program());
        let mut child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .at("run", &program)?;
        let bar = bar(&self.progress, &self.what);
        let mut reader = File::open(&path).at("read", &path)?;
        let status = loop {
            if let Some(status) = child.try_wait().at("wait for", &program)? {
                break status;
            }
            match self.progress {
                Progress::Spinner => bar.tick(),
                Progress::Bytes { dir, .. } => bar.set_position(bytes_below(dir)),
                Progress::Ninja => {
                    let mut text = String::new();
                    // Half a character at the end of the log is read again next time.
                    if reader.read_to_string(&mut text).is_ok() {
                        if let Some((done, total)) = ninja_counter(&text) {
                            bar.set_length(total);
                            bar.set_position(done);
                        }
                    }
                }
            }
            std::thread::sleep(POLL);
        };
        bar.finish_and_clear();
        if status.success() {
            return Ok(Ok(()));
        }
        let mut log = Vec::new();
        reader
            .seek(SeekFrom::Start(0))
            .and_then(|_| reader.read_to_end(&mut log))
            .at("read", &path)?;
        let log = String::from_utf8_lossy(&log).into_owned();
        Ok(Err(Failure {
            what: self.what,
            status: status.to_string(),
            log,
            path,
            disks: self.disks,
        }))
    }
}

/// indicatif draws to a terminal only, so that nothing of it appears in a pipe.
fn bar(progress: &Progress, what: &str) -> ProgressBar {
    let (bar, template) = match progress {
        Progress::Spinner => (ProgressBar::new_spinner(), "{spinner} {msg} {elapsed}"),
        Progress::Ninja => (ProgressBar::new(0), "{msg} [{wide_bar}] {pos}/{len} {elapsed}"),
        Progress::Bytes { total, .. } => (
            ProgressBar::new(*total),
            "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec}",
        ),
    };
    bar.with_style(ProgressStyle::with_template(template).expect("a constant template"))
        .with_message(what.to_string())
}

fn bytes_below(dir: &Path) -> u64 {
    let entries = walkdir::WalkDir::new(dir).into_iter().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .filter(|meta| meta.is_file())
        .map(|meta| meta.len())
        .sum()
}

fn ninja_counter(text: &str) -> Option<(u64, u64)> {
    text.lines().rev().find_map(|line| {
        let (done, total) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
        Some((done.parse().ok()?, total.parse().ok()?))
    })
}

fn says_disk_full(log: &str) -> bool {
    log.contains("No space left on device") || log.contains("Disk quota exceeded")
}

/// The first line that names an error, else the last line.
fn telling_line(log: &str) -> &str {
    let mut lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
    let named = lines.clone().find(|line| {
        let lower = line.to_ascii_lowercase();
        lower.contains("error:")
            || lower.starts_with("error")
            || lower.contains("fatal:")
            || lower.contains("cmake error")
    });
    named.or_else(|| lines.next_back()).unwrap_or("it printed nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_ninjas_last() {
        assert_eq!(ninja_counter("[1/9] a\n[2/9] b\nwarning: [x]\n"), Some((2, 9)));
        assert_eq!(ninja_counter("-- no counter\n"), None);
    }

    #[test]
    fn the_telling_line_is_the_first_error() {
        assert_eq!(
            telling_line("[1/2] cc\na.c:1: error: no\nerror: other\n[2/2]\n"),
            "a.c:1: error: no"
        );
        assert_eq!(telling_line("one\n\ntwo\n\n"), "two");
        assert_eq!(telling_line(""), "it printed nothing");
    }

    #[test]
    fn a_full_disk_is_recognised_in_any_program() {
        let failure = |log: &str| Failure {
            what: "building".into(),
            status: "exit status: 1".into(),
            log: log.into(),
            path: "/logs/x.log".into(),
            disks: ["/home/x".into(), "/cache/x".into()],
        };
        let text = failure("ld: final link failed: No space left on device\n")
            .into_error()
            .to_string();
        assert!(
            text.contains("no space left on the disk") && !text.contains('\n'),
            "{text}"
        );
        let text = failure("a.c:1: error: no\n").into_error().to_string();
        assert!(
            text.contains("building failed") && text.contains("a.c:1") && text.contains("/logs/x.log"),
            "{text}"
        );
    }
}
