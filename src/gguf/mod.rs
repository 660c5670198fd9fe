//! Reads and writes the headers of GGUF files.
//!
//! The reader takes nothing on trust: every count and length is held against the bytes that are left before anything is
//! allocated, shapes and sizes are computed with checked arithmetic, and what llama.cpp would refuse is refused here, with an
//! error that names the key or tensor. Tensor data is not touched; [`Tensor::start`] says where in the file it lies.

mod read;
mod value;
mod writer;

pub use value::{Value, ValueType};
pub use writer::{DataWriter, Writer, WriterError};

use crate::graph::DType;
use std::io;
use std::path::PathBuf;

/// Alignment of the data section and of every tensor in it when the file does not set one.
pub const DEFAULT_ALIGNMENT: u64 = 32;
/// Why a file is not a GGUF file that can be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum GgufError {
    #[error("{path}: {source}", path = path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("read failed: {0}")]
    Io(#[from] io::Error),
    #[error("not a GGUF file: it starts with {0:02x?}, not \"GGUF\"")]
    Magic([u8; 4]),
    #[error("GGUF version {0:#x}: only 2 and 3 of this byte order can be read")]
    Version(u32),
    #[error("the file ends inside {what}, at byte {at}")]
    Truncated { what: &'static str, at: u64 },
    #[error("{what} claims {count} entries, but only {left} bytes of file are left")]
    Count { what: &'static str, count: u64, left: u64 },
    #[error("{what} {index} is empty, duplicate, too long or no UTF-8: {name:?}")]
    Name {
        what: &'static str,
        index: u64,
        name: String,
    },
    #[error("key {key:?} has the unknown value type {id}")]
    ValueType { key: String, id: u32 },
    #[error("tensor {tensor:?} has the unknown type {id}")]
    TensorType { tensor: String, id: u32 },
    #[error("tensor {tensor:?} has the impossible shape {dims:?} for its type")]
    Shape { tensor: String, dims: Vec<u64> },
    #[error("general.alignment is no power of two: {0}")]
    Alignment(String),
    #[error("tensor {tensor:?} starts at {offset}, where {expected} was expected")]
    Offset { tensor: String, offset: u64, expected: u64 },
    #[error("the data of tensor {tensor:?} ends at byte {end}, but the file has {len} bytes")]
    Data { tensor: String, end: u64, len: u64 },
}

/// A tensor as the header describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Name, for example `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub ty: DType,
    /// Extents, fastest first, one to four of them (none: a scalar).
    pub dims: Vec<u64>,
    /// First byte of the data in the file.
    pub start: u64,
    /// Bytes of data.
    pub bytes: u64,
}

/// The header of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct Gguf {
    /// Metadata in file order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in file order.
    pub tensors: Vec<Tensor>,
    /// Alignment of the data section and of the tensors in it.
    pub alignment: u64,
}

impl Gguf {
    /// The value of a metadata key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// The tensor called `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// `general.architecture`, for example `gemma3`.
    pub fn architecture(&self) -> Option<&str> {
        self.get("general.architecture")?.as_str()
    }
}

/// Bytes of a tensor, `None` when a row is no whole number of blocks or a size is beyond 2^63.
fn tensor_bytes(ty: DType, dims: &[u64]) -> Option<u64> {
    let (row, rest) = dims.split_first().unwrap_or((&1, &[]));
    let row = ty.row_bytes(*row)?;
    // Extents multiply up even where one of them is 0: ggml computes strides from all of them.
    let rows = rest.iter().try_fold(1u64, |n, d| n.checked_mul((*d).max(1)))?;
    let bytes = row.checked_mul(rows).filter(|b| *b <= i64::MAX as u64)?;
    Some(if rest.contains(&0) { 0 } else { bytes })
}
