//! Reads ranges of files, several at a time, past the page cache where that is possible.
//!
//! Ranges that lie next to each other are read together, then cut into pieces and put in flight. How it is done is decided when
//! a [`Reader`] is made, and said ([`Reader::method`]): io_uring with registered buffers, or threads; O_DIRECT, or the page cache.
//!
//! A read ends with every byte that was asked for, or with an error: short reads are continued, interrupted ones repeated, an
//! error of the device is tried once more. Nothing of an earlier request is in flight when the next begins.

use super::direct::{self, Alignment};
use super::source::Range;
use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ReadError {
    #[error("{path}: {source} reading {len} bytes at {offset}, {attempts} times", path = path.display())]
    Device {
        path: PathBuf,
        offset: u64,
        len: u64,
        attempts: u32,
        source: io::Error,
    },
    #[error("{path} has no byte {at}: it is shorter than when it was opened", path = path.display())]
    Eof { path: PathBuf, at: u64 },
    #[error("there is no file {file}, or bytes {start}…{end} are beyond its end")]
    Range { file: usize, start: u64, end: u64 },
    #[error("{path}: a read of {len} bytes at {offset} was interrupted {times} times", path = path.display())]
    Interrupted {
        path: PathBuf,
        offset: u64,
        len: u64,
        times: u32,
    },
    #[error("reads cannot be carried out: {0}")]
    Backend(io::Error),
}

/// How to read.
#[derive(Debug, Clone)]
pub struct Options {
    /// Reads in flight, at least 1.
    pub depth: usize,
    /// Bytes of one read at most. Rounded up to the largest alignment of the files.
    pub piece: u64,
    /// Bytes nobody wants that may be read to join two ranges.
    pub gap: u64,
    /// Go past the page cache where the file system lets us.
    pub direct: bool,
    /// Use io_uring where the kernel lets us.
    pub ring: bool,
    /// After so long without any completion the request fails.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            depth: 8,
            piece: 1 << 20,
            gap: 0,
            direct: true,
            ring: true,
            timeout: Duration::from_secs(30),
        }
    }
}

/// What was done since the reader was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Ranges asked for.
    pub ranges: u64,
    /// Bytes asked for.
    pub bytes_wanted: u64,
    /// Bytes that came from the files; more than asked for where reads are aligned.
    pub bytes_read: u64,
    /// Reads that were planned: fewer than ranges where they were joined, more where they were cut.
    pub reads: u64,
    /// Reads that brought less than asked for and were continued.
    pub short: u64,
    /// Reads that were interrupted and repeated.
    pub interrupted: u64,
    /// Reads repeated after an error of the device.
    pub retried: u64,
    /// Reads that left O_DIRECT for the page cache.
    pub buffered: u64,
}

/// Interruptions in a row before it is called an error: signals do not come that often.
const MAX_INTERRUPTIONS: u32 = 1000;
/// Times that a read is given to the device before its error is believed.
const ATTEMPTS: u32 = 2;
/// Continuations in a read that bring nothing new, before O_DIRECT is given up for it, and then before it is called the file's end.
const MAX_STALLS: u32 = 3;

// ---- the plan: which bytes to read for which ranges

/// A read, aligned as its file asks, and what its bytes are for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Which file.
    pub file: usize,
    /// First byte.
    pub start: u64,
    /// How many; the last may be beyond the file's end.
    pub len: u64,
    /// Where its bytes go.
    pub pieces: Vec<Piece>,
}

/// Bytes of an extent that belong to a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Which range of the request.
    pub range: usize,
    /// First byte in the range.
    pub in_range: u64,
    /// First byte in the extent.
    pub in_extent: u64,
    /// How many.
    pub len: u64,
}

impl Extent {
    /// Bytes from its start that somebody wants; what comes after them need not be there.
    fn needed(&self) -> u64 {
        self.pieces.iter().map(|p| p.in_extent + p.len).max().unwrap_or(0)
    }
}

/// Extents for `ranges`: those closer than `gap` bytes or in one sector are joined, and nothing longer than `piece`, a multiple
/// of every alignment, is made. `align` says a file's alignment, a power of two.
pub fn plan(ranges: &[Range], align: impl Fn(usize) -> u64, piece: u64, gap: u64) -> Vec<Extent> {
    let mut order: Vec<usize> = (0..ranges.len()).filter(|&i| ranges[i].bytes > 0).collect();
    order.sort_by_key(|&i| (ranges[i], i));
    let mut extents = Vec::new();
    let mut rest = order.as_slice();
    while let Some(&first) = rest.first() {
        let file = ranges[first].shard;
        let mask = align(file) - 1;
        let start = ranges[first].start & !mask;
        let mut end = start;
        let mut n = 0;
        for &i in rest {
            let r = ranges[i];
            if r.shard != file || (n > 0 && r.start & !mask > end.saturating_add(gap)) {
                break;
            }
            end = end.max((r.start + r.bytes + mask) & !mask);
            n += 1;
        }
        let (run, tail) = rest.split_at(n);
        rest = tail;
        let mut at = start;
        while at < end {
            let len = piece.min(end - at);
            let pieces: Vec<Piece> = run
                .iter()
                .filter_map(|&i| {
                    let r = ranges[i];
                    let (from, to) = (r.start.max(at), (r.start + r.bytes).min(at + len));
                    (from < to).then(|| Piece {
                        range: i,
                        in_range: from - r.start,
                        in_extent: from - at,
                        len: to - from,
                    })
                })
                .collect();
            if !pieces.is_empty() {
                extents.push(Extent {
                    file,
                    start: at,
                    len,
                    pieces,
                });
            }
            at += len;
        }
    }
    extents
}

// ---- backends: how a single read is carried out

/// A read for a backend.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    /// Comes back with the completion.
    pub token: usize,
    /// Open file.
    pub fd: RawFd,
    /// Offset in it.
    pub offset: u64,
    /// Where the bytes go.
    pub buffer: *mut u8,
    /// How many.
    pub len: usize,
}

// SAFETY: the pointer is only followed by whoever carries the read out, under the contract of `Backend::submit`.
unsafe impl Send for Op {}

/// Bytes read, or the error number.
pub type Outcome = Result<usize, i32>;

/// Carries out reads.
pub trait Backend: Send {
    /// Takes a read on; it may begin at once or with the next [`Backend::wait`].
    ///
    /// # Safety
    ///
    /// `op.buffer` is valid for writes of `op.len` bytes, and nothing else touches them, until `wait` has returned the token.
    unsafe fn submit(&mut self, op: Op) -> io::Result<()>;

    /// Waits until a read is over. An error is about the backend, not about a read: what is in flight may then go on for ever.
    fn wait(&mut self, timeout: Duration) -> io::Result<(usize, Outcome)>;
}

/// Memory that reads land in, aligned for O_DIRECT.
#[derive(Debug)]
pub struct Staging {
    base: *mut u8,
    layout: Layout,
}

// SAFETY: plain memory, owned.
unsafe impl Send for Staging {}

impl Staging {
    fn new(bytes: usize, align: usize) -> Staging {
        let layout = Layout::from_size_align(bytes.max(1), align.max(4096)).expect("a size that fits memory");
        // SAFETY: not of size 0.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Staging { base, layout }
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// Never: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: from `alloc_zeroed` with this layout; whoever reads into it is done, or the reader has leaked it.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// io_uring.
pub struct Ring {
    ring: io_uring::IoUring,
    /// The staging memory is registered, so the kernel need not map it for each read.
    registered: bool,
}

impl Ring {
    /// A ring for `depth` reads into `staging`, and why the memory is not registered, if it is not.
    pub fn new(depth: usize, staging: &Staging) -> io::Result<(Ring, Option<String>)> {
        let entries = u32::try_from(depth.next_power_of_two()).map_err(io::Error::other)?;
        let ring = io_uring::IoUring::new(entries)?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::other("this kernel's io_uring has no time-out for waiting"));
        }
        let whole = libc::iovec {
            iov_base: staging.base().cast(),
            iov_len: staging.len(),
        };
        // SAFETY: the memory outlives the ring: a `Reader` drops the ring first.
        let why = match unsafe { ring.submitter().register_buffers(&[whole]) } {
            Ok(()) => None,
            Err(e) => Some(format!("buffers are not registered: {e}")),
        };
        let registered = why.is_none();
        Ok((Ring { ring, registered }, why))
    }
}

impl Backend for Ring {
    unsafe fn submit(&mut self, op: Op) -> io::Result<()> {
        use io_uring::{opcode, types::Fd};
        let len = u32::try_from(op.len).map_err(io::Error::other)?;
        let entry = if self.registered {
            opcode::ReadFixed::new(Fd(op.fd), op.buffer, len, 0)
                .offset(op.offset)
                .build()
        } else {
            opcode::Read::new(Fd(op.fd), op.buffer, len).offset(op.offset).build()
        };
        let entry = entry.user_data(op.token as u64);
        // SAFETY: the caller keeps the buffer until the completion.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.ring.submit()?;
            // SAFETY: as above.
            unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<(usize, Outcome)> {
        let limit = io_uring::types::Timespec::from(timeout);
        loop {
            if let Some(done) = self.ring.completion().next() {
                let code = done.result();
                let outcome = usize::try_from(code).map_err(|_| -code);
                return Ok((done.user_data() as usize, outcome));
            }
            let args = io_uring::types::SubmitArgs::new().timespec(&limit);
            match self.ring.submitter().submit_with_args(1, &args) {
                Ok(_) => {}
                // A signal, or completions to be taken first: look again.
                Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
                Err(e) if e.raw_os_error() == Some(libc::ETIME) => return Err(timed_out(timeout)),
                Err(e) => return Err(e),
            }
        }
    }
}

fn timed_out(timeout: Duration) -> io::Error {
    io::Error::new(
        io::ErrorKind::TimedOut,
        format!("no read was over within {} s", timeout.as_secs_f64()),
    )
}

/// Threads that call pread.
pub struct Threads {
    work: Sender<Op>,
    done: Receiver<(usize, Outcome)>,
}

impl Threads {
    /// `depth` threads, which end with the value.
    pub fn new(depth: usize) -> io::Result<Threads> {
        let (work, jobs) = mpsc::channel::<Op>();
        let (report, done) = mpsc::channel();
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..depth {
            let (jobs, report) = (jobs.clone(), report.clone());
            thread::Builder::new().name("flashrt-read".into()).spawn(move || loop {
                let next = jobs.lock().unwrap_or_else(|e| e.into_inner()).recv();
                let Ok(op) = next else { return };
                let offset = op.offset as libc::off_t;
                // SAFETY: the submitter keeps the buffer until the token is back.
                let n = unsafe { libc::pread(op.fd, op.buffer.cast(), op.len, offset) };
                let outcome =
                    usize::try_from(n).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
                if report.send((op.token, outcome)).is_err() {
                    return;
                }
            })?;
        }
        Ok(Threads { work, done })
    }
}

impl Backend for Threads {
    unsafe fn submit(&mut self, op: Op) -> io::Result<()> {
        self.work
            .send(op)
            .map_err(|_| io::Error::other("the reading threads are gone"))
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<(usize, Outcome)> {
        self.done.recv_timeout(timeout).map_err(|e| match e {
            RecvTimeoutError::Timeout => timed_out(timeout),
            RecvTimeoutError::Disconnected => io::Error::other("the reading threads are gone"),
        })
    }
}

/// Makes a backend for a depth and the memory that will be read into, with notes on what it had to do without.
pub type MakeBackend = Box<dyn FnMut(usize, &Staging) -> io::Result<(Box<dyn Backend>, Vec<String>)> + Send>;

/// io_uring where it is allowed, else threads.
fn best_backend(ring: bool) -> MakeBackend {
    Box::new(move |depth, staging| {
        let mut notes = Vec::new();
        if ring {
            match Ring::new(depth, staging) {
                Ok((ring, why)) => {
                    let how = if why.is_none() {
                        "io_uring, registered buffers"
                    } else {
                        "io_uring"
                    };
                    notes.push(how.to_owned());
                    notes.extend(why);
                    return Ok((Box::new(ring), notes));
                }
                Err(e) => notes.push(format!("no io_uring: {e}")),
            }
        }
        notes.insert(0, format!("pread in {depth} threads"));
        Ok((Box::new(Threads::new(depth)?), notes))
    })
}

// ---- the reader

/// A file with the ways to read it.
#[derive(Debug)]
struct Source {
    path: PathBuf,
    len: u64,
    buffered: File,
    /// Open past the page cache. It stays open when it is given up: reads of it may be in flight.
    direct: Option<(File, Alignment)>,
    given_up: bool,
}

impl Source {
    fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.given_up
    }

    fn align(&self) -> u64 {
        match &self.direct {
            Some((_, align)) if !self.given_up => align.offset,
            _ => 1,
        }
    }
}

/// Reads ranges of some files.
pub struct Reader {
    // Before `staging`: a ring must be gone before its memory is.
    backend: Option<Box<dyn Backend>>,
    staging: Option<Staging>,
    make: MakeBackend,
    sources: Vec<Source>,
    options: Options,
    /// Bytes of staging of each read in flight.
    room: u64,
    method: Vec<String>,
    counters: Counters,
}

/// A read in flight.
struct Flight {
    extent: Extent,
    /// Bytes that are there, from the extent's start.
    done: u64,
    /// Bytes that were asked for last, from the extent's start.
    asked: std::ops::Range<u64>,
    /// Alignment of reads past the page cache; none: through it.
    direct: Option<u64>,
    interrupted: u32,
    attempts: u32,
    stalls: u32,
}

impl Flight {
    fn new(extent: Extent, sources: &[Source]) -> Flight {
        let source = &sources[extent.file];
        Flight {
            direct: source.is_direct().then(|| source.align()),
            extent,
            done: 0,
            asked: 0..0,
            interrupted: 0,
            attempts: 1,
            stalls: 0,
        }
    }
}

impl Reader {
    /// A reader for open files, which are named by `path` in messages.
    pub fn new(files: &[(&Path, &File)], options: Options) -> io::Result<Reader> {
        let make = best_backend(options.ring);
        Self::with_backend(files, options, make)
    }

    /// The same over another backend.
    pub fn with_backend(files: &[(&Path, &File)], options: Options, make: MakeBackend) -> io::Result<Reader> {
        let mut notes = Vec::new();
        let sources = files
            .iter()
            .map(|(path, file)| source(path, file, options.direct, &mut notes))
            .collect::<io::Result<Vec<_>>>()?;
        let align = sources.iter().map(Source::align).max().unwrap_or(1);
        let piece = options.piece.max(1).next_multiple_of(align);
        let mut reader = Reader {
            backend: None,
            staging: None,
            make,
            sources,
            options: Options {
                depth: options.depth.max(1),
                piece,
                ..options
            },
            room: piece,
            method: notes,
            counters: Counters::default(),
        };
        let mut notes = reader.start()?;
        if reader.is_direct() {
            notes.push("O_DIRECT".to_owned());
        }
        reader.method.splice(0..0, notes);
        Ok(reader)
    }

    /// Staging and backend, where they are not there yet or were lost.
    fn start(&mut self) -> io::Result<Vec<String>> {
        if self.backend.is_some() {
            return Ok(Vec::new());
        }
        let memory = self
            .sources
            .iter()
            .filter_map(|s| s.direct.as_ref().map(|(_, a)| a.memory));
        let align = memory.max().unwrap_or(1);
        self.room = self.options.piece.next_multiple_of(align);
        let bytes = usize::try_from(self.room * self.options.depth as u64).map_err(io::Error::other)?;
        let staging = self.staging.get_or_insert_with(|| Staging::new(bytes, align as usize));
        let (backend, notes) = (self.make)(self.options.depth, staging)?;
        self.backend = Some(backend);
        Ok(notes)
    }

    /// How files are read, and what could not be had.
    pub fn method(&self) -> String {
        self.method.join("; ")
    }

    /// Does every file go past the page cache?
    pub fn is_direct(&self) -> bool {
        self.sources.iter().all(Source::is_direct)
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Reads `ranges`, whose `shard` is the number of a file, into buffers of their lengths. After an error the buffers hold
    /// anything.
    pub fn read_into(&mut self, ranges: &[Range], buffers: &mut [&mut [u8]]) -> Result<(), ReadError> {
        assert_eq!(ranges.len(), buffers.len(), "a buffer for each range");
        self.read(ranges, &mut |range, at, bytes| {
            buffers[range][at as usize..][..bytes.len()].copy_from_slice(bytes);
        })
    }

    /// Reads `ranges` and hands their bytes out as they come: number of the range, first byte in it, bytes. Every byte comes once, in
    /// any order. After an error some may be missing.
    pub fn read(&mut self, ranges: &[Range], sink: &mut dyn FnMut(usize, u64, &[u8])) -> Result<(), ReadError> {
        for r in ranges {
            let end = r.start.checked_add(r.bytes);
            let inside = self
                .sources
                .get(r.shard)
                .is_some_and(|s| end.is_some_and(|e| e <= s.len));
            if !inside {
                return Err(ReadError::Range {
                    file: r.shard,
                    start: r.start,
                    end: end.unwrap_or(u64::MAX),
                });
            }
        }
        self.start().map_err(ReadError::Backend)?;
        let extents = plan(
            ranges,
            |f| self.sources[f].align(),
            self.options.piece,
            self.options.gap,
        );
        self.counters.ranges += ranges.len() as u64;
        self.counters.bytes_wanted += ranges.iter().map(|r| r.bytes).sum::<u64>();
        self.counters.reads += extents.len() as u64;
        let mut flights: Vec<Option<Flight>> = (0..self.options.depth).map(|_| None).collect();
        let result = self.fly(extents.into(), &mut flights, sink);
        if let Err(ReadError::Backend(_)) = &result {
            // Whoever reads may still write to the memory: leave it to them, and begin anew with the next request.
            self.backend = None;
            if flights.iter().any(Option::is_some) {
                std::mem::forget(self.staging.take());
            }
        }
        result
    }

    /// Keeps reads in flight until there are none left, or an error has been met and all others are over.
    fn fly(
        &mut self,
        mut todo: VecDeque<Extent>,
        flights: &mut [Option<Flight>],
        sink: &mut dyn FnMut(usize, u64, &[u8]),
    ) -> Result<(), ReadError> {
        let mut failed = None;
        loop {
            while failed.is_none() {
                let free = flights.iter().position(Option::is_none);
                let (Some(token), Some(extent)) = (free, free.and_then(|_| todo.pop_front())) else {
                    break;
                };
                let flight = Flight::new(extent, &self.sources);
                self.submit(token, flights[token].insert(flight))?;
            }
            if flights.iter().all(Option::is_none) {
                return failed.map_or(Ok(()), Err);
            }
            let backend = self.backend.as_mut().expect("started");
            let (token, outcome) = backend.wait(self.options.timeout).map_err(ReadError::Backend)?;
            let unknown = || ReadError::Backend(io::Error::other(format!("completion of an unknown read {token}")));
            let flight = flights.get_mut(token).and_then(Option::as_mut).ok_or_else(unknown)?;
            match self.land(flight, outcome) {
                Ok(true) => {
                    let flight = flights[token].take().expect("just landed");
                    self.deliver(token, &flight.extent, sink);
                }
                Ok(false) if failed.is_none() => self.submit(token, flight)?,
                Ok(false) => flights[token] = None,
                Err(error @ ReadError::Backend(_)) => return Err(error),
                Err(error) => {
                    flights[token] = None;
                    failed.get_or_insert(error);
                }
            }
        }
    }

    /// Puts the rest of a read in flight.
    fn submit(&mut self, token: usize, flight: &mut Flight) -> Result<(), ReadError> {
        let source = &self.sources[flight.extent.file];
        let (fd, from, to) = match (&source.direct, flight.direct) {
            // A sector that came in part is read again: offset and length stay aligned.
            (Some((file, _)), Some(align)) => (file.as_raw_fd(), flight.done & !(align - 1), flight.extent.len),
            _ => (source.buffered.as_raw_fd(), flight.done, flight.extent.needed()),
        };
        flight.asked = from..to;
        let staging = self.staging.as_ref().expect("started");
        let at = token as u64 * self.room + from;
        debug_assert!(at + (to - from) <= staging.len() as u64, "a read inside its room");
        let op = Op {
            token,
            fd,
            offset: flight.extent.start + from,
            buffer: staging.base().wrapping_add(at as usize),
            len: (to - from) as usize,
        };
        let backend = self.backend.as_mut().expect("started");
        // SAFETY: this token's room of the staging memory, which is looked at after the token is back, and is leaked if it
        // never comes back.
        unsafe { backend.submit(op) }.map_err(ReadError::Backend)
    }

    /// Takes a completion: true when all needed bytes are there, false when the rest must be read.
    fn land(&mut self, flight: &mut Flight, outcome: Outcome) -> Result<bool, ReadError> {
        let path = || self.sources[flight.extent.file].path.clone();
        let offset = flight.extent.start + flight.asked.start;
        let len = flight.asked.end - flight.asked.start;
        match outcome {
            Ok(n) if n as u64 > len => Err(ReadError::Backend(io::Error::other(format!("{n} bytes came of {len}")))),
            Ok(n) => {
                self.counters.bytes_read += n as u64;
                flight.interrupted = 0;
                let before = flight.done;
                flight.done = flight.done.max(flight.asked.start + n as u64);
                if flight.done >= flight.extent.needed() {
                    return Ok(true);
                }
                self.counters.short += 1;
                if let Some(align) = flight.direct {
                    if flight.done / align == before / align {
                        flight.stalls += 1;
                    }
                    if n == 0 || flight.stalls > MAX_STALLS {
                        // The end of a file that is no whole number of sectors, on some file systems.
                        flight.direct = None;
                        flight.stalls = 0;
                        self.counters.buffered += 1;
                    }
                    return Ok(false);
                }
                if n == 0 {
                    flight.stalls += 1;
                    if flight.stalls > MAX_STALLS {
                        return Err(ReadError::Eof {
                            path: path(),
                            at: flight.extent.start + flight.done,
                        });
                    }
                }
                Ok(false)
            }
            Err(libc::EINTR | libc::EAGAIN) => {
                flight.interrupted += 1;
                self.counters.interrupted += 1;
                if flight.interrupted > MAX_INTERRUPTIONS {
                    return Err(ReadError::Interrupted {
                        path: path(),
                        offset,
                        len,
                        times: flight.interrupted,
                    });
                }
                Ok(false)
            }
            Err(libc::EINVAL) if flight.direct.is_some() => {
                // What worked when the file was opened does not any more, or not here.
                let source = &mut self.sources[flight.extent.file];
                flight.direct = None;
                self.counters.buffered += 1;
                if !std::mem::replace(&mut source.given_up, true) {
                    self.method
                        .push(format!("{}: O_DIRECT was given up after EINVAL", source.path.display()));
                }
                Ok(false)
            }
            Err(code) => {
                if code == libc::EIO && flight.attempts < ATTEMPTS {
                    flight.attempts += 1;
                    self.counters.retried += 1;
                    return Ok(false);
                }
                Err(ReadError::Device {
                    path: path(),
                    offset,
                    len,
                    attempts: flight.attempts,
                    source: io::Error::from_raw_os_error(code),
                })
            }
        }
    }

    fn deliver(&self, token: usize, extent: &Extent, sink: &mut dyn FnMut(usize, u64, &[u8])) {
        let staging = self.staging.as_ref().expect("started");
        for p in &extent.pieces {
            let at = token as u64 * self.room + p.in_extent;
            // SAFETY: inside this token's room, which no read in flight writes to, and which was filled or zeroed.
            let bytes = unsafe { std::slice::from_raw_parts(staging.base().wrapping_add(at as usize), p.len as usize) };
            sink(p.range, p.in_range, bytes);
        }
    }
}

/// Opens the ways to read a file. It is opened again through its descriptor, so that it is the same file.
fn source(path: &Path, file: &File, direct: bool, notes: &mut Vec<String>) -> io::Result<Source> {
    let len = file.metadata()?.len();
    let same = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let opened = match direct {
        false => None,
        true => match direct::alignment(&same).and_then(|a| Ok((direct::open(&same).map_err(|e| e.to_string())?, a))) {
            // One alignment for both: a read that is continued stays aligned in memory too.
            Ok((file, a)) => {
                let both = a.offset.max(a.memory);
                let align = Alignment {
                    memory: both,
                    offset: both,
                };
                Some((file, align))
            }
            Err(why) => {
                notes.push(format!("{}: through the page cache: {why}", path.display()));
                None
            }
        },
    };
    Ok(Source {
        path: path.to_owned(),
        len,
        buffered: file.try_clone()?,
        direct: opened,
        given_up: false,
    })
}

impl std::fmt::Debug for Reader {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.debug_struct("Reader")
            .field("method", &self.method)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
