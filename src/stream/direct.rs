//! What this kernel and this file system allow: reads past the page cache, and io_uring.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// What O_DIRECT asks of a file's reads, in bytes; powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alignment {
    /// Of the address in memory.
    pub memory: u64,
    /// Of offset and length.
    pub offset: u64,
}

/// Sizes that are tried where the kernel does not say: from the smallest sector to the largest page.
const TRIED: [u64; 4] = [512, 4096, 16_384, 65_536];

/// Opens a file for reads past the page cache.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// What reads of `path` past the page cache must be aligned to; an error says why there can be none. The kernel's word is
/// tried before it is believed: one read is cheap, and network and FUSE file systems say nothing or too much.
pub fn alignment(path: &Path) -> Result<Alignment, String> {
    let file = open(path).map_err(|e| format!("O_DIRECT is refused: {e}"))?;
    let stated = match stated(path) {
        Some(Alignment { memory: 0, .. } | Alignment { offset: 0, .. }) => {
            return Err("the file system says that it has no O_DIRECT for this file".to_owned());
        }
        stated => stated,
    };
    let tried = TRIED.map(|n| Alignment { memory: n, offset: n });
    let candidates: Vec<Alignment> = stated.into_iter().chain(tried).collect();
    let mut last = String::new();
    for alignment in candidates {
        if !alignment.memory.is_power_of_two() || !alignment.offset.is_power_of_two() {
            continue;
        }
        match try_read(&file, alignment) {
            Ok(()) => return Ok(alignment),
            Err(e) => last = e.to_string(),
        }
    }
    Err(format!("no alignment up to {} makes O_DIRECT work: {last}", TRIED[3]))
}

/// What the kernel says, from Linux 6.1 on.
fn stated(path: &Path) -> Option<Alignment> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: plain integers; all zero is a value.
    let mut answer: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: a path with its terminating zero; writes `answer`.
    let code = unsafe { libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, libc::STATX_DIOALIGN, &mut answer) };
    (code == 0 && answer.stx_mask & libc::STATX_DIOALIGN != 0).then_some(Alignment {
        memory: answer.stx_dio_mem_align.into(),
        offset: answer.stx_dio_offset_align.into(),
    })
}

/// Reads one aligned piece at an offset that is aligned to no more than asked.
fn try_read(file: &File, alignment: Alignment) -> io::Result<()> {
    let (memory, piece) = (alignment.memory as usize, alignment.offset as usize);
    // Room to move the piece off every larger alignment: what passes then needs no more than was asked.
    let room = vec![0u8; piece + 3 * memory];
    let base = room.as_ptr() as usize;
    let mut at = base.next_multiple_of(memory);
    if at % (2 * memory) == 0 {
        at += memory;
    }
    let buffer = room.as_ptr().wrapping_add(at - base).cast_mut();
    // SAFETY: `piece` bytes from `buffer` lie inside `room`, which nobody else reads.
    let n = unsafe { libc::pread(file.as_raw_fd(), buffer.cast(), piece, piece as libc::off_t) };
    drop(room);
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// May this process use io_uring? An error says why not.
pub fn io_uring() -> Result<(), String> {
    io_uring::IoUring::new(1).map(drop).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has no io_uring".to_owned(),
        Some(libc::EPERM) => {
            "io_uring is not allowed here (sysctl kernel.io_uring_disabled, or the container's seccomp profile)"
                .to_owned()
        }
        _ => format!("io_uring_setup: {e}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn alignment_is_a_finding_either_way() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; 300_000]).unwrap();
        match alignment(file.path()) {
            Ok(a) => {
                assert!(a.memory.is_power_of_two() && a.offset.is_power_of_two(), "{a:?}");
                assert!(try_read(&open(file.path()).unwrap(), a).is_ok());
            }
            Err(why) => assert!(!why.is_empty()),
        }
        assert!(alignment(Path::new("/proc/self/status")).is_err());
        assert!(alignment(Path::new("/nowhere")).unwrap_err().contains("refused"));
    }
}
