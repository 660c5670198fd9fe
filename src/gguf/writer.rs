//! Writes GGUF files front to back, so that files larger than memory can be made.

use super::{Value, ValueType, DEFAULT_ALIGNMENT};
use crate::graph::DType;
use std::io::{self, Write};

/// Why a file cannot be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum WriterError {
    #[error("write failed: {0}")]
    Io(#[from] io::Error),
    #[error("tensor {tensor:?}: {dims:?} is no whole number of {ty} blocks")]
    Shape {
        tensor: String,
        dims: Vec<u64>,
        ty: &'static str,
    },
    #[error("tensor {tensor:?}: {got} bytes of data were given, {want} are due")]
    Data { tensor: String, got: u64, want: u64 },
    #[error("{0} tensors were declared but not written")]
    Missing(usize),
    #[error("there is no tensor left to write")]
    Surplus,
}

/// A file in the making: first metadata and tensor declarations, then the data of each tensor in that order.
#[derive(Debug, Default)]
pub struct Writer {
    metadata: Vec<(String, Value)>,
    tensors: Vec<(String, DType, Vec<u64>, u64)>,
}

impl Writer {
    /// An empty file of the given architecture.
    pub fn new(architecture: &str) -> Self {
        let mut writer = Writer::default();
        writer.set("general.architecture", architecture);
        writer
    }

    /// Adds a metadata value. Keys are written in the order of the calls.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.metadata.push((key.to_owned(), value.into()));
    }

    /// Declares the next tensor.
    pub fn declare(&mut self, name: &str, ty: DType, dims: &[u64]) -> Result<(), WriterError> {
        let bytes = super::tensor_bytes(ty, dims).ok_or_else(|| WriterError::Shape {
            tensor: name.to_owned(),
            dims: dims.to_vec(),
            ty: ty.name(),
        })?;
        self.tensors.push((name.to_owned(), ty, dims.to_vec(), bytes));
        Ok(())
    }

    /// Bytes of all tensors' data, without padding.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.3).sum()
    }

    /// Writes the header to `out`; the tensors' data follow through [`DataWriter::tensor`].
    pub fn header<W: Write>(self, out: W) -> Result<DataWriter<W>, WriterError> {
        let mut head = Vec::new();
        head.extend(b"GGUF");
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut head, key.as_bytes());
            put_value(&mut head, value);
        }
        let mut offset = 0u64;
        for (name, ty, dims, bytes) in &self.tensors {
            put_string(&mut head, name.as_bytes());
            head.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| head.extend(d.to_le_bytes()));
            head.extend((*ty as u32).to_le_bytes());
            head.extend(offset.to_le_bytes());
            offset = (offset + bytes).next_multiple_of(DEFAULT_ALIGNMENT);
        }
        let mut due: Vec<_> = self
            .tensors
            .into_iter()
            .map(|(name, _, _, bytes)| (name, bytes))
            .collect();
        due.reverse();
        let mut data = DataWriter { out, due };
        data.out.write_all(&head)?;
        data.pad(head.len() as u64)?;
        Ok(data)
    }
}

/// A file whose header is written.
#[derive(Debug)]
pub struct DataWriter<W> {
    out: W,
    /// Names and sizes still to come, the next one last.
    due: Vec<(String, u64)>,
}

impl<W: Write> DataWriter<W> {
    /// Writes the next tensor's data, which `chunks` yields.
    pub fn tensor<'a>(&mut self, chunks: impl IntoIterator<Item = &'a [u8]>) -> Result<(), WriterError> {
        self.tensor_with(|out| chunks.into_iter().try_for_each(|chunk| out.write_all(chunk)))
    }

    /// Writes the next tensor's data, which `fill` writes to the sink it is given.
    pub fn tensor_with(&mut self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), WriterError> {
        let (tensor, want) = self.due.pop().ok_or(WriterError::Surplus)?;
        let mut counted = Counted {
            out: &mut self.out,
            bytes: 0,
        };
        fill(&mut counted)?;
        let got = counted.bytes;
        if got != want {
            return Err(WriterError::Data { tensor, got, want });
        }
        self.pad(want)
    }

    /// The sink, once every declared tensor is there.
    pub fn finish(mut self) -> Result<W, WriterError> {
        if !self.due.is_empty() {
            return Err(WriterError::Missing(self.due.len()));
        }
        self.out.flush()?;
        Ok(self.out)
    }

    fn pad(&mut self, written: u64) -> Result<(), WriterError> {
        let padding = written.next_multiple_of(DEFAULT_ALIGNMENT) - written;
        Ok(self
            .out
            .write_all(&[0; DEFAULT_ALIGNMENT as usize][..padding as usize])?)
    }
}

struct Counted<'a, W> {
    out: &'a mut W,
    bytes: u64,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let n = self.out.write(buf)?;
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn put_string(head: &mut Vec<u8>, bytes: &[u8]) {
    head.extend((bytes.len() as u64).to_le_bytes());
    head.extend(bytes);
}

fn put_value(head: &mut Vec<u8>, value: &Value) {
    let mut put_type = |ty: ValueType| head.extend((ty as u32).to_le_bytes());
    match value {
        Value::Scalar(ty, bytes) => {
            put_type(*ty);
            head.extend(bytes);
        }
        Value::String(bytes) => {
            put_type(ValueType::String);
            put_string(head, bytes);
        }
        Value::Scalars(ty, bytes) => {
            put_type(ValueType::Array);
            put_type(*ty);
            head.extend((bytes.len() as u64 / ty.min_bytes()).to_le_bytes());
            head.extend(bytes);
        }
        Value::Strings(strings) => {
            put_type(ValueType::Array);
            put_type(ValueType::String);
            head.extend((strings.len() as u64).to_le_bytes());
            strings.iter().for_each(|s| put_string(head, s));
        }
    }
}
