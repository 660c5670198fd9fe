//! Reads of the streamer: on this machine's file system by every method, and with faults.

mod stream_support;

use ggml_flashrt::stream::read::{
    plan, Backend, MakeBackend, Op, Options, Outcome, ReadError, Reader, Ring, Staging, Threads,
};
use ggml_flashrt::stream::source::{Model, Range};
use proptest::prelude::*;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use stream_support::{model, noise, shards, EXPERTS};

/// A file of noise whose length is no whole number of sectors.
struct Noise {
    dir: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
    file: File,
}

const LEN: usize = 3_000_001;

impl Noise {
    fn new() -> Noise {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("noise");
        let bytes = noise(7, LEN);
        std::fs::write(&path, &bytes).unwrap();
        let file = File::open(&path).unwrap();
        Noise { dir, path, bytes, file }
    }

    fn reader(&self, options: Options) -> Reader {
        Reader::new(&[(&self.path, &self.file)], options).unwrap()
    }

    fn with(&self, options: Options, make: MakeBackend) -> Reader {
        Reader::with_backend(&[(&self.path, &self.file)], options, make).unwrap()
    }

    /// Reads the ranges and compares every byte.
    #[track_caller]
    fn check(&self, reader: &mut Reader, ranges: &[Range]) {
        self.try_check(reader, ranges).unwrap();
    }

    #[track_caller]
    fn try_check(&self, reader: &mut Reader, ranges: &[Range]) -> Result<(), ReadError> {
        let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|r| vec![0xa5; r.bytes as usize]).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        reader.read_into(ranges, &mut slices)?;
        for (r, got) in ranges.iter().zip(&buffers) {
            let want = &self.bytes[r.start as usize..(r.start + r.bytes) as usize];
            assert!(got == want, "{r:?} by {}", reader.method());
        }
        Ok(())
    }
}

fn range(start: u64, bytes: u64) -> Range {
    Range { shard: 0, start, bytes }
}

/// Ranges of all kinds: tiny, long, next to each other, overlapping, repeated, empty, up to the last byte.
fn many() -> Vec<Range> {
    let len = LEN as u64;
    vec![
        range(0, 1),
        range(1, 4095),
        range(4096, 100_000),
        range(104_096, 1),
        range(1_000_003, 700_001),
        range(1_500_000, 300_000),
        range(1_000_003, 700_001),
        range(2_000_000, 0),
        range(len - 1, 1),
        range(len - 5000, 5000),
        range(777_777, 512),
    ]
}

/// Every way of reading that this machine may have.
fn methods() -> Vec<Options> {
    let mut all = Vec::new();
    for direct in [true, false] {
        for ring in [true, false] {
            for (depth, piece, gap) in [(1, 4096, 0), (8, 65_536, 0), (3, 1 << 20, 50_000)] {
                all.push(Options {
                    depth,
                    piece,
                    gap,
                    direct,
                    ring,
                    ..Options::default()
                });
            }
        }
    }
    all
}

#[test]
fn every_method_reads_the_same_bytes() {
    let noise = Noise::new();
    for options in methods() {
        let mut reader = noise.reader(options.clone());
        for _ in 0..3 {
            noise.check(&mut reader, &many());
        }
        let c = reader.counters();
        assert_eq!(c.ranges, 3 * many().len() as u64);
        assert_eq!(c.bytes_wanted, 3 * many().iter().map(|r| r.bytes).sum::<u64>());
        assert_eq!((c.interrupted, c.retried), (0, 0));
        assert!(reader
            .method()
            .contains(if options.ring && !reader.method().contains("no io_uring") {
                "io_uring"
            } else {
                "pread"
            }));
        if !options.direct {
            assert!(!reader.is_direct());
        }
    }
}

#[test]
fn experts_of_a_sharded_model_are_read_whole() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Model::open(&model(dir.path(), 6)).unwrap();
    let m = Model::open(&shards(dir.path(), 6, 3)).unwrap();
    let files: Vec<(&Path, &File)> = m.shards().iter().map(|s| (s.path.as_path(), &s.file)).collect();
    let mut reader = Reader::new(&files, Options::default()).unwrap();
    let bytes = |m: &Model, r: Range| {
        use std::os::unix::fs::FileExt;
        let mut buf = vec![0; r.bytes as usize];
        m.shards()[r.shard].file.read_exact_at(&mut buf, r.start).unwrap();
        buf
    };
    for (layer, reference) in m.experts().unwrap().iter().zip(whole.experts().unwrap()) {
        // All experts at once: neighbours are joined.
        let ranges: Vec<Range> = (0..EXPERTS).flat_map(|e| layer.bundle(e).unwrap()).collect();
        let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|r| vec![0; r.bytes as usize]).collect();
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let before = reader.counters();
        reader.read_into(&ranges, &mut slices).unwrap();
        let after = reader.counters();
        assert!(
            after.reads - before.reads <= layer.parts.len() as u64,
            "{before:?} {after:?}"
        );
        // Noise is seeded by the place in the list, which differs between the files; bytes are compared with the shard itself,
        // lengths with the whole.
        for (range, got) in ranges.iter().zip(&buffers) {
            assert_eq!(got, &bytes(&m, *range));
        }
        assert_eq!(layer.bundle_bytes(), reference.bundle_bytes());
    }
}

#[test]
fn neighbours_are_read_together_and_long_ranges_in_pieces() {
    let one = |_| 1;
    let ranges: Vec<Range> = (0..10).map(|i| range(1000 + 100 * i, 100)).collect();
    let joined = plan(&ranges, one, 1 << 20, 0);
    assert_eq!(joined.len(), 1);
    assert_eq!(
        (joined[0].start, joined[0].len, joined[0].pieces.len()),
        (1000, 1000, 10)
    );
    assert_eq!(plan(&ranges, one, 256, 0).len(), 4);
    let apart = [range(0, 100), range(150, 100)];
    assert_eq!(plan(&apart, one, 1 << 20, 49).len(), 2);
    assert_eq!(plan(&apart, one, 1 << 20, 50).len(), 1);
    // Two ranges in one sector are one read; the same bytes in another file are another.
    assert_eq!(plan(&apart, |_| 512, 1 << 20, 0).len(), 1);
    let other_file = [
        range(0, 100),
        Range {
            shard: 1,
            ..range(100, 100)
        },
    ];
    assert_eq!(plan(&other_file, |_| 512, 1 << 20, 1 << 20).len(), 2);
}

#[test]
fn what_is_not_in_a_file_is_refused() {
    let noise = Noise::new();
    let mut reader = noise.reader(Options::default());
    for bad in [
        range(LEN as u64, 1),
        range(0, LEN as u64 + 1),
        range(u64::MAX, 2),
        Range {
            shard: 1,
            ..range(0, 1)
        },
    ] {
        let error = reader
            .read(&[range(0, 1), bad], &mut |_, _, _| panic!("nothing is read"))
            .unwrap_err();
        assert!(matches!(error, ReadError::Range { .. }), "{error}");
    }
    noise.check(&mut reader, &many());
}

/// B39, the file's end: it was cut after it was opened.
#[test]
fn a_file_that_was_cut_gives_an_error_and_not_zeros() {
    for options in methods() {
        let noise = Noise::new();
        let mut reader = noise.reader(options);
        let file = File::options().write(true).open(&noise.path).unwrap();
        file.set_len(1_200_100).unwrap();
        let error = noise.try_check(&mut reader, &[range(1_000_003, 700_001)]).unwrap_err();
        assert!(matches!(error, ReadError::Eof { at: 1_200_100.., .. }), "{error}");
        noise.check(&mut reader, &[range(0, 1_200_100)]);
    }
}

// ---- faults

/// What to do to the n-th read that is submitted.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    /// Bring at most so many bytes.
    Short(usize),
    /// Read all, and say that only so many bytes came.
    Part(usize),
    /// Fail with this number, without reading.
    Error(i32),
    /// Never complete.
    Lost,
    /// Claim more bytes than were asked for.
    Long,
    /// Refuse to take it.
    Refuse,
}

/// Decides about each submission by its number.
type Script = Arc<Mutex<dyn FnMut(u64) -> Option<Fault> + Send>>;

/// A backend with faults over a real one.
struct Faulty {
    inner: Box<dyn Backend>,
    script: Script,
    submitted: Arc<Mutex<u64>>,
    /// Outcomes made up without reading.
    made_up: Vec<(usize, Outcome)>,
    /// Most bytes to report of a read, or what to claim instead.
    part: HashMap<usize, usize>,
    long: HashMap<usize, usize>,
}

impl Backend for Faulty {
    unsafe fn submit(&mut self, mut op: Op) -> io::Result<()> {
        let n = {
            let mut submitted = self.submitted.lock().unwrap();
            *submitted += 1;
            *submitted - 1
        };
        let fault = (self.script.lock().unwrap())(n);
        match fault {
            None => {}
            Some(Fault::Short(0)) => {
                self.made_up.push((op.token, Ok(0)));
                return Ok(());
            }
            Some(Fault::Short(bytes)) => {
                // Reads past the page cache are cut at sectors, as the kernel does: the shorter read is done in full and cut after.
                op.len = op.len.min(bytes);
            }
            Some(Fault::Part(bytes)) => {
                self.part.insert(op.token, bytes);
            }
            Some(Fault::Error(code)) => {
                self.made_up.push((op.token, Err(code)));
                return Ok(());
            }
            Some(Fault::Lost) => return Ok(()),
            Some(Fault::Long) => {
                self.long.insert(op.token, op.len + 1);
            }
            Some(Fault::Refuse) => return Err(io::Error::other("refused")),
        }
        // SAFETY: as promised to us.
        unsafe { self.inner.submit(op) }
    }

    fn wait(&mut self, timeout: Duration) -> io::Result<(usize, Outcome)> {
        if let Some(done) = self.made_up.pop() {
            return Ok(done);
        }
        let (token, outcome) = self.inner.wait(timeout)?;
        let outcome = match self.part.remove(&token) {
            Some(bytes) => outcome.map(|n| n.min(bytes)),
            None => outcome,
        };
        Ok((token, self.long.remove(&token).map_or(outcome, Ok)))
    }
}

fn faulty(ring: bool, script: Script) -> MakeBackend {
    let submitted = Arc::new(Mutex::new(0));
    Box::new(move |depth, staging: &Staging| {
        let inner: Box<dyn Backend> = match Ring::new(depth, staging) {
            Ok((r, _)) if ring => Box::new(r),
            _ => Box::new(Threads::new(depth)?),
        };
        let made = Faulty {
            inner,
            script: script.clone(),
            submitted: submitted.clone(),
            made_up: Vec::new(),
            part: HashMap::new(),
            long: HashMap::new(),
        };
        Ok((Box::new(made) as Box<dyn Backend>, Vec::new()))
    })
}

fn script(f: impl FnMut(u64) -> Option<Fault> + Send + 'static) -> Script {
    Arc::new(Mutex::new(f))
}

fn small() -> Options {
    Options {
        depth: 4,
        piece: 65_536,
        timeout: Duration::from_millis(300),
        ..Options::default()
    }
}

/// With and without io_uring, with and without O_DIRECT.
fn kinds() -> Vec<(bool, Options)> {
    let of = |ring, direct| (ring, Options { direct, ..small() });
    vec![of(true, true), of(true, false), of(false, true), of(false, false)]
}

/// B39: a short read taken for a complete one.
#[test]
fn short_reads_are_continued() {
    let noise = Noise::new();
    for (ring, options) in kinds() {
        // Every second is cut to a sector, every one to two; some bring nothing; some a little.
        for (every, cut) in [(2, 4096), (1, 8192), (8, 0), (8, 12_288)] {
            let faults = script(move |n| (n % every == 0).then_some(Fault::Short(cut)));
            let mut reader = noise.with(options.clone(), faulty(ring, faults));
            noise.check(&mut reader, &many());
            assert!(reader.counters().short > 0);
        }
        if !options.direct {
            let odd = script(|n| (n % 3 != 2).then_some(Fault::Short(1 + n as usize % 5000)));
            let mut reader = noise.with(options.clone(), faulty(ring, odd));
            noise.check(&mut reader, &many());
        }
    }
}

/// O_DIRECT refuses to go on in the middle of a sector, so the sector is read again.
#[test]
fn a_short_read_past_the_page_cache_goes_on_at_a_sector() {
    let noise = Noise::new();
    for ring in [true, false] {
        let odd = script(|n| (n % 4 != 3).then_some(Fault::Part(1 + 4099 * (1 + n as usize % 7))));
        let mut reader = noise.with(small(), faulty(ring, odd));
        if !reader.is_direct() {
            println!("skipped: {}", reader.method());
            return;
        }
        noise.check(&mut reader, &many());
        assert!(reader.counters().short > 0);
        assert!(
            reader.is_direct() && reader.counters().buffered == 0,
            "{}",
            reader.method()
        );
        // Less than a sector each time is no progress: the page cache then brings the rest.
        let none = script(|_| Some(Fault::Part(100)));
        let mut reader = noise.with(small(), faulty(ring, none));
        noise.check(&mut reader, &[range(1_000_003, 3000)]);
        assert!(reader.counters().buffered > 0);
    }
}

#[test]
fn a_device_that_brings_nothing_is_not_asked_for_ever() {
    let noise = Noise::new();
    for (ring, options) in kinds() {
        let mut reader = noise.with(options, faulty(ring, script(|_| Some(Fault::Short(0)))));
        let error = noise.try_check(&mut reader, &many()).unwrap_err();
        assert!(matches!(error, ReadError::Eof { .. }), "{error}");
    }
}

#[test]
fn interrupted_reads_are_repeated_but_not_for_ever() {
    let noise = Noise::new();
    for (ring, options) in kinds() {
        for code in [libc::EINTR, libc::EAGAIN] {
            let faults = script(move |n| (n % 3 != 0).then_some(Fault::Error(code)));
            let mut reader = noise.with(options.clone(), faulty(ring, faults));
            noise.check(&mut reader, &many());
            assert!(reader.counters().interrupted > 0);
        }
        let always = script(|_| Some(Fault::Error(libc::EINTR)));
        let mut reader = noise.with(options, faulty(ring, always));
        let error = noise.try_check(&mut reader, &many()).unwrap_err();
        assert!(matches!(error, ReadError::Interrupted { .. }), "{error}");
    }
}

#[test]
fn an_error_of_the_device_is_tried_once_more_and_then_said() {
    let noise = Noise::new();
    for (ring, options) in kinds() {
        let mut failed = false;
        let once =
            script(move |n| (n == 5 && !std::mem::replace(&mut failed, true)).then_some(Fault::Error(libc::EIO)));
        let mut reader = noise.with(options.clone(), faulty(ring, once));
        noise.check(&mut reader, &many());
        assert_eq!(reader.counters().retried, 1);

        // For ever, from the fifth on, then mended: that request fails, the next is right.
        let broken = Arc::new(Mutex::new(true));
        let seen = broken.clone();
        let faults = script(move |n| (n >= 5 && *seen.lock().unwrap()).then_some(Fault::Error(libc::EIO)));
        let mut reader = noise.with(options.clone(), faulty(ring, faults));
        let error = noise.try_check(&mut reader, &many()).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, ReadError::Device { attempts: 2, .. }), "{said}");
        assert!(said.contains("noise") && said.contains("2 times"), "{said}");
        *broken.lock().unwrap() = false;
        noise.check(&mut reader, &many());

        let other = script(|n| (n == 3).then_some(Fault::Error(libc::ENXIO)));
        let mut reader = noise.with(options, faulty(ring, other));
        let error = noise.try_check(&mut reader, &many()).unwrap_err();
        assert!(matches!(error, ReadError::Device { attempts: 1, .. }), "{error}");
    }
}

/// B40: EINVAL on some file systems, only when it is read.
#[test]
fn a_refused_direct_read_goes_through_the_page_cache() {
    let noise = Noise::new();
    for ring in [true, false] {
        let mut refused = 0;
        let faults = script(move |_| {
            refused += 1;
            (refused == 3).then_some(Fault::Error(libc::EINVAL))
        });
        let mut reader = noise.with(small(), faulty(ring, faults));
        if !reader.is_direct() {
            println!("skipped: {}", reader.method());
            return;
        }
        noise.check(&mut reader, &many());
        assert!(!reader.is_direct());
        assert!(reader.method().contains("given up after EINVAL"), "{}", reader.method());
        assert!(reader.counters().buffered > 0);
        let before = reader.counters();
        noise.check(&mut reader, &[range(777_777, 512)]);
        assert_eq!(
            reader.counters().bytes_read - before.bytes_read,
            512,
            "nothing is aligned any more"
        );
    }
    // Without O_DIRECT there is nothing to give up.
    let always = script(|_| Some(Fault::Error(libc::EINVAL)));
    let options = Options {
        direct: false,
        ..small()
    };
    let mut reader = noise.with(options, faulty(false, always));
    assert!(matches!(
        noise.try_check(&mut reader, &many()),
        Err(ReadError::Device { .. })
    ));
}

/// A read that never ends, a backend that takes none, one that counts wrong: that request fails in time, the next is right.
#[test]
fn a_lost_read_fails_its_request_only() {
    let noise = Noise::new();
    for (ring, options) in kinds() {
        for fault in [Fault::Lost, Fault::Refuse, Fault::Long] {
            let faults = script(move |n| (n == 6).then_some(fault));
            let mut reader = noise.with(options.clone(), faulty(ring, faults));
            let error = noise.try_check(&mut reader, &many()).unwrap_err();
            assert!(matches!(error, ReadError::Backend(_)), "{fault:?}: {error}");
            noise.check(&mut reader, &many());
            noise.check(&mut reader, &many());
        }
    }
}

#[test]
fn a_backend_that_cannot_be_had_again_is_an_error() {
    let noise = Noise::new();
    let mut made = 0;
    let make: MakeBackend = Box::new(move |depth, _| {
        made += 1;
        if made > 1 {
            return Err(io::Error::other("no threads"));
        }
        let inner: Box<dyn Backend> = Box::new(Threads::new(depth)?);
        let faulty = Faulty {
            inner,
            script: script(|n| (n == 0).then_some(Fault::Refuse)),
            submitted: Arc::default(),
            made_up: Vec::new(),
            part: HashMap::new(),
            long: HashMap::new(),
        };
        Ok((Box::new(faulty), Vec::new()))
    });
    let mut reader = noise.with(small(), make);
    for _ in 0..2 {
        assert!(matches!(
            noise.try_check(&mut reader, &many()),
            Err(ReadError::Backend(_))
        ));
    }
}

#[test]
fn many_requests_leave_nothing_behind() {
    let noise = Noise::new();
    let mut reader = noise.reader(small());
    noise.check(&mut reader, &many());
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = (open(), threads());
    for i in 0..500 {
        noise.check(&mut reader, &[range(i * 1000, 5000)]);
    }
    // Other tests run beside this one, so a few more are none of ours.
    assert!(open() < before.0 + 100 && threads() < before.1 + 100);
    assert!(noise.dir.path().exists());
}

proptest! {
    /// Any ranges, any alignment: every wanted byte is in exactly one piece, extents are aligned, no longer than a piece, and
    /// do not overlap in a file.
    #[test]
    fn a_plan_covers_every_range_once(
        wanted in proptest::collection::vec((0usize..3, 0u64..200_000, 0u64..20_000), 0..40),
        align in (0u32..13).prop_map(|n| 1u64 << n),
        pieces in 1u64..20,
        gap in 0u64..10_000,
    ) {
        let ranges: Vec<Range> = wanted.iter().map(|&(shard, start, bytes)| Range { shard, start, bytes }).collect();
        let piece = (pieces * 4096).next_multiple_of(align);
        let extents = plan(&ranges, |_| align, piece, gap);
        let mut covered: Vec<Vec<u8>> = ranges.iter().map(|r| vec![0; r.bytes as usize]).collect();
        for e in &extents {
            prop_assert!(e.start % align == 0 && e.len % align == 0 && e.len <= piece && e.len > 0);
            prop_assert!(!e.pieces.is_empty());
            for p in &e.pieces {
                let r = ranges[p.range];
                prop_assert!(r.shard == e.file && r.start + p.in_range == e.start + p.in_extent);
                prop_assert!(p.len > 0 && p.in_extent + p.len <= e.len);
                covered[p.range][p.in_range as usize..][..p.len as usize].iter_mut().for_each(|n| *n += 1);
            }
        }
        prop_assert!(covered.iter().flatten().all(|n| *n == 1));
        let mut spans: Vec<_> = extents.iter().map(|e| (e.file, e.start, e.start + e.len)).collect();
        spans.sort_unstable();
        prop_assert!(spans.windows(2).all(|w| w[0].0 != w[1].0 || w[0].2 <= w[1].1));
    }

    /// Any mixture of faults that a kernel may bring: the right bytes, or an error.
    #[test]
    fn never_wrong_bytes(seed in 0u64.., ring: bool, direct: bool, fatal: bool) {
        let noise = Noise::new();
        let mut state = seed | 1;
        let faults = script(move |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            match state % 11 {
                0 => Some(Fault::Short(4096 * (1 + state as usize / 11 % 8))),
                1 => Some(Fault::Error(libc::EINTR)),
                2 if direct => Some(Fault::Error(libc::EINVAL)),
                3 if fatal => Some(Fault::Error(libc::EIO)),
                4 => Some(Fault::Short(if direct { 8192 } else { 1 + state as usize / 11 % 9000 })),
                _ => None,
            }
        });
        let mut reader = noise.with(Options { direct, ..small() }, faulty(ring, faults));
        for _ in 0..3 {
            // try_check panics on a wrong byte.
            let read = noise.try_check(&mut reader, &many());
            // Once O_DIRECT is given up, EINVAL is an error like any other.
            prop_assert!(read.is_ok() || fatal || direct, "{read:?}");
        }
    }
}
