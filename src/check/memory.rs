//! The memory that a window's kernels see: recorded tensors at the addresses they had, and what the oracle writes.

use crate::graph::DType;
use crate::reference::Bounded;
use half::{bf16, f16};
use std::collections::HashMap;
use std::ops::Range;

/// An access that the recorded evaluation does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Bytes that no input of the site holds.
    #[error("the arguments make the kernel read {len} bytes at {address:#x}, which no input of this site holds")]
    Read {
        /// Where.
        address: usize,
        /// How much.
        len: usize,
    },
    /// Bytes that belong to no output of the site.
    #[error("the arguments make the kernel write at {address:#x}, which no output of this site holds")]
    Write {
        /// Where.
        address: usize,
    },
    /// A number that stands for nothing the kernel knows.
    #[error("the arguments tell the kernel of {what} {number}")]
    Unknown {
        /// What kind of number.
        what: &'static str,
        /// The number.
        number: i32,
    },
}

/// Memory of one site. Reads see inputs and what was written before; an output may lie over an input.
#[derive(Default)]
pub struct Memory<'r> {
    inputs: Vec<(usize, &'r [u8])>,
    writable: Vec<Range<usize>>,
    // By address: the oracle's value and how far ggml's may be from it.
    written: HashMap<usize, (f64, f64)>,
}

impl<'r> Memory<'r> {
    /// Places an input.
    pub fn add_input(&mut self, address: usize, bytes: &'r [u8]) {
        self.inputs.push((address, bytes));
    }

    /// Allows writes.
    pub fn allow_writes(&mut self, range: Range<usize>) {
        self.writable.push(range);
    }

    /// Bytes of inputs.
    pub fn bytes(&self, address: usize, len: usize) -> Result<&'r [u8], Fault> {
        self.inputs
            .iter()
            .find_map(|&(start, bytes)| bytes.get(address.checked_sub(start)?..)?.get(..len))
            .ok_or(Fault::Read { address, len })
    }

    /// `n` consecutive f32: results of an earlier kernel where there are any, else inputs.
    pub fn f32s(&self, address: usize, n: usize) -> Result<Bounded, Fault> {
        if self.written.contains_key(&address) {
            let cells = (0..n).map(|i| address + 4 * i);
            return cells
                .map(|a| self.written.get(&a).copied().ok_or(Fault::Read { address: a, len: 4 }))
                .collect();
        }
        self.bytes(address, 4 * n)
            .map(|bytes| bytes.chunks_exact(4).map(|b| (f64::from(f32_of(b)), 0.0)).collect())
    }

    /// `n` consecutive f32 that no kernel writes.
    pub fn vector(&self, address: usize, n: usize) -> Result<Vec<f64>, Fault> {
        self.bytes(address, 4 * n)
            .map(|bytes| bytes.chunks_exact(4).map(|b| f64::from(f32_of(b))).collect())
    }

    /// One i32.
    pub fn i32(&self, address: usize) -> Result<i32, Fault> {
        self.bytes(address, 4)
            .map(|b| i32::from_le_bytes(b.try_into().expect("4 bytes")))
    }

    /// One i64.
    pub fn i64(&self, address: usize) -> Result<i64, Fault> {
        self.bytes(address, 8)
            .map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes")))
    }

    /// Stores consecutive elements of a type.
    pub fn store(&mut self, address: usize, dtype: DType, values: &Bounded) -> Result<(), Fault> {
        for i in 0..values.len() {
            let address = address + i * dtype.block_bytes();
            if !self.writable.iter().any(|r| r.contains(&address)) {
                return Err(Fault::Write { address });
            }
            self.written.insert(address, values.at(i));
        }
        Ok(())
    }

    /// The oracle's value and its bound at an address.
    pub fn written(&self, address: usize) -> Option<(f64, f64)> {
        self.written.get(&address).copied()
    }
}

/// A recorded element.
pub fn element(dtype: DType, bytes: &[u8]) -> Option<f64> {
    Some(match dtype {
        DType::F32 => f64::from(f32_of(bytes.get(..4)?)),
        DType::F16 => f16::from_le_bytes(bytes.get(..2)?.try_into().ok()?).to_f64(),
        DType::BF16 => bf16::from_le_bytes(bytes.get(..2)?.try_into().ok()?).to_f64(),
        _ => return None,
    })
}

fn f32_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("4 bytes"))
}
