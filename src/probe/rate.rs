//! How fast a file can be read in pieces of the size of an expert's matrix, as the streamer would read it.

use crate::stream::read::{Options, Reader};
use crate::stream::source::Range;
use serde::Serialize;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// What a short test of reading gave.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ReadRate {
    /// Bytes that were read.
    pub bytes: u64,
    /// For how long.
    pub seconds: f64,
    /// Their quotient.
    pub bytes_per_second: f64,
    /// Bytes of each read.
    pub piece_bytes: u64,
    /// Reads in flight.
    pub in_flight: usize,
    /// Did they go past the page cache? Otherwise this is the rate of memory as much as of the disk.
    pub direct: bool,
    /// How it was read.
    pub method: String,
}

/// Pieces in a request: enough that its end, when fewer are in flight, hardly counts.
const BATCH: u64 = 128;

/// Reads pieces from all over the file for about `seconds`.
pub(super) fn measure(path: &Path, seconds: f64) -> Result<ReadRate, String> {
    let at_path = |e: std::io::Error| format!("{}: {e}", path.display());
    let file = File::open(path).map_err(at_path)?;
    let options = Options::default();
    let (piece, depth) = (options.piece, options.depth);
    let pieces = file.metadata().map_err(at_path)?.len() / piece;
    if pieces < depth as u64 {
        return Err(format!(
            "{} is shorter than {depth} pieces of {piece} bytes",
            path.display()
        ));
    }
    let mut reader = Reader::new(&[(path, &file)], options).map_err(at_path)?;
    let limit = Duration::from_secs_f64(seconds);
    // A stride without a common divisor visits every piece before it repeats one, and no two neighbours in a row.
    let stride = (pieces * 5 / 8..).find(|s| gcd(*s, pieces) == 1).unwrap_or(1);
    let mut at = 0;
    let mut bytes = 0;
    let start = Instant::now();
    while start.elapsed() < limit {
        let batch: Vec<Range> = (0..BATCH.min(pieces))
            .map(|_| {
                at = (at + stride) % pieces;
                Range {
                    shard: 0,
                    start: at * piece,
                    bytes: piece,
                }
            })
            .collect();
        reader
            .read(&batch, &mut |_, _, read| bytes += read.len() as u64)
            .map_err(|e| e.to_string())?;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(ReadRate {
        bytes,
        seconds,
        bytes_per_second: bytes as f64 / seconds,
        piece_bytes: piece,
        in_flight: depth,
        direct: reader.is_direct(),
        method: reader.method(),
    })
}

fn gcd(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}
