//! The reader.

use super::{tensor_bytes, Gguf, GgufError, Tensor, Value, ValueType, DEFAULT_ALIGNMENT};
use crate::graph::DType;
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

/// ggml's limit on the length of a tensor's name, the terminating zero included.
const MAX_NAME: usize = 64;
/// ggml's limit on dimensions.
const MAX_DIMS: u32 = 4;

impl Gguf {
    /// Reads the header of the file at `path`.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let at_path = |source| GgufError::Open {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(at_path)?;
        let meta = file.metadata().map_err(at_path)?;
        if meta.is_dir() {
            return Err(at_path(io::ErrorKind::IsADirectory.into()));
        }
        Self::read(BufReader::with_capacity(1 << 16, file), meta.len())
    }

    /// Reads a header from the first of `len` bytes.
    pub fn read(source: impl Read, len: u64) -> Result<Self, GgufError> {
        let mut r = Cursor { source, at: 0, len };
        let magic = r.array("the magic")?;
        if &magic != b"GGUF" {
            return Err(GgufError::Magic(magic));
        }
        let version = r.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version(version));
        }
        // A tensor takes at least a name length, a dimension count, a type and an offset; a key its length and a value.
        let n_tensors = r.count("the tensor list", 24)?;
        let n_keys = r.count("the metadata", 13)?;

        let mut metadata = Vec::new();
        let mut seen = HashSet::new();
        for index in 0..n_keys {
            let key = r.name("key", index, usize::MAX, &mut seen)?;
            let value = r.value(&key)?;
            metadata.push((key, value));
        }
        let alignment = match metadata.iter().find(|(key, _)| key == "general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some((_, value @ Value::Scalar(ValueType::U32, _))) => value.as_u64().unwrap_or(0),
            Some((_, other)) => return Err(GgufError::Alignment(format!("{other:?}"))),
        };
        if !alignment.is_power_of_two() {
            return Err(GgufError::Alignment(alignment.to_string()));
        }

        let mut tensors = Vec::new();
        seen.clear();
        for index in 0..n_tensors {
            let name = r.name("tensor name", index, MAX_NAME - 1, &mut seen)?;
            tensors.push(r.tensor(name)?);
        }
        if !tensors.is_empty() {
            place(&mut tensors, r.at.next_multiple_of(alignment), alignment, len)?;
        }
        Ok(Gguf {
            metadata,
            tensors,
            alignment,
        })
    }
}

/// Checks that the tensors follow each other in the data section, as ggml demands, and makes their offsets absolute.
fn place(tensors: &mut [Tensor], data: u64, alignment: u64, len: u64) -> Result<(), GgufError> {
    let mut expected = 0u64;
    for t in tensors {
        if t.start != expected {
            return Err(GgufError::Offset {
                tensor: t.name.clone(),
                offset: t.start,
                expected,
            });
        }
        let end = data
            .checked_add(t.start)
            .and_then(|start| start.checked_add(t.bytes))
            .unwrap_or(u64::MAX);
        if end > len {
            return Err(GgufError::Data {
                tensor: t.name.clone(),
                end,
                len,
            });
        }
        t.start += data;
        // No overflow: the end is inside the file, and an alignment is at most 2^31.
        expected = (expected + t.bytes).next_multiple_of(alignment);
    }
    Ok(())
}

/// Bytes of a header, with the position for messages and bounds.
struct Cursor<R> {
    source: R,
    at: u64,
    len: u64,
}

impl<R: Read> Cursor<R> {
    fn left(&self) -> u64 {
        self.len - self.at
    }

    fn fill(&mut self, buf: &mut [u8], what: &'static str) -> Result<(), GgufError> {
        if buf.len() as u64 > self.left() {
            return Err(GgufError::Truncated { what, at: self.len });
        }
        self.source.read_exact(buf).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => GgufError::Truncated { what, at: self.at },
            _ => GgufError::Io(e),
        })?;
        self.at += buf.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], GgufError> {
        let mut buf = [0; N];
        self.fill(&mut buf, what)?;
        Ok(buf)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A count of entries that take at least `min_bytes` each: what the rest of the file cannot hold is a lie.
    fn count(&mut self, what: &'static str, min_bytes: u64) -> Result<u64, GgufError> {
        let count = self.u64(what)?;
        match count.checked_mul(min_bytes) {
            Some(bytes) if bytes <= self.left() => Ok(count),
            _ => Err(GgufError::Count {
                what,
                count,
                left: self.left(),
            }),
        }
    }

    fn bytes(&mut self, n: u64, what: &'static str) -> Result<Vec<u8>, GgufError> {
        let mut buf = vec![0; n as usize];
        self.fill(&mut buf, what)?;
        Ok(buf)
    }

    fn string(&mut self, what: &'static str) -> Result<Vec<u8>, GgufError> {
        let n = self.count(what, 1)?;
        self.bytes(n, what)
    }

    fn name(
        &mut self,
        what: &'static str,
        index: u64,
        max: usize,
        seen: &mut HashSet<String>,
    ) -> Result<String, GgufError> {
        let bytes = self.string(what)?;
        let bad = |bytes: &[u8]| GgufError::Name {
            what,
            index,
            name: String::from_utf8_lossy(bytes).into_owned(),
        };
        let name = String::from_utf8(bytes).map_err(|e| bad(e.as_bytes()))?;
        if name.is_empty() || name.len() > max || !seen.insert(name.clone()) {
            return Err(bad(name.as_bytes()));
        }
        Ok(name)
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufError> {
        let id = self.u32("a value type")?;
        ValueType::from_id(id).ok_or_else(|| GgufError::ValueType {
            key: key.to_owned(),
            id,
        })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        match self.value_type(key)? {
            ValueType::String => Ok(Value::String(self.string("a string")?)),
            ValueType::Array => match self.value_type(key)? {
                // ggml has no arrays of arrays.
                ValueType::Array => Err(GgufError::ValueType {
                    key: key.to_owned(),
                    id: ValueType::Array as u32,
                }),
                ValueType::String => {
                    let n = self.count("an array of strings", ValueType::String.min_bytes())?;
                    Ok(Value::Strings(
                        (0..n).map(|_| self.string("a string")).collect::<Result<_, _>>()?,
                    ))
                }
                scalar => {
                    let n = self.count("an array", scalar.min_bytes())?;
                    Ok(Value::Scalars(scalar, self.bytes(n * scalar.min_bytes(), "an array")?))
                }
            },
            scalar => Ok(Value::Scalar(scalar, self.bytes(scalar.min_bytes(), "a value")?)),
        }
    }

    /// A tensor's entry; `start` is still relative to the data section.
    fn tensor(&mut self, name: String) -> Result<Tensor, GgufError> {
        let n_dims = self.u32("a dimension count")?;
        if n_dims > MAX_DIMS {
            return Err(GgufError::Shape {
                tensor: name,
                dims: vec![n_dims.into()],
            });
        }
        let dims = (0..n_dims)
            .map(|_| self.u64("a dimension"))
            .collect::<Result<Vec<_>, _>>()?;
        let id = self.u32("a tensor type")?;
        let Some(ty) = i32::try_from(id).ok().and_then(DType::from_number) else {
            return Err(GgufError::TensorType { tensor: name, id });
        };
        let start = self.u64("a tensor offset")?;
        match tensor_bytes(ty, &dims) {
            Some(bytes) => Ok(Tensor {
                name,
                ty,
                dims,
                start,
                bytes,
            }),
            None => Err(GgufError::Shape { tensor: name, dims }),
        }
    }
}
