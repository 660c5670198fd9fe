//! Metadata values.

/// Types of metadata values, with GGUF's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    pub(super) fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64]
            .get(id as usize)
            .copied()
    }

    /// Bytes of a scalar; of strings and arrays, the bytes that even an empty one takes.
    pub fn min_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::String => 8,
            ValueType::Array => 12,
        }
    }
}

/// A metadata value. Strings are kept as bytes: vocabularies hold tokens that are no UTF-8.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A number or a boolean, as its little-endian bytes.
    Scalar(ValueType, Vec<u8>),
    /// A string.
    String(Vec<u8>),
    /// An array of numbers or booleans, as their little-endian bytes.
    Scalars(ValueType, Vec<u8>),
    /// An array of strings.
    Strings(Vec<Vec<u8>>),
}

impl Value {
    /// The value as an unsigned integer, if it is an integer that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        use ValueType::*;
        let Value::Scalar(kind, bytes) = self else { return None };
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(wide);
        let sign_bit = 1 << (8 * bytes.len() - 1);
        match kind {
            U8 | U16 | U32 | U64 => Some(unsigned),
            I8 | I16 | I32 | I64 => (unsigned & sign_bit == 0).then_some(unsigned),
            _ => None,
        }
    }

    /// The value as text, if it is a string of valid UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// An array of integers, none of them negative, or of booleans.
    pub fn as_u64s(&self) -> Option<Vec<u64>> {
        let Value::Scalars(kind, bytes) = self else { return None };
        let kind = if *kind == ValueType::Bool { ValueType::U8 } else { *kind };
        let entries = bytes.chunks_exact(kind.min_bytes() as usize);
        entries.map(|b| Value::Scalar(kind, b.to_vec()).as_u64()).collect()
    }

    /// Entries of an array; `None` for anything else.
    pub fn array_len(&self) -> Option<usize> {
        match self {
            Value::Scalars(kind, bytes) => Some(bytes.len() / kind.min_bytes() as usize),
            Value::Strings(strings) => Some(strings.len()),
            _ => None,
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::String(text.as_bytes().to_vec())
    }
}

impl From<Vec<Vec<u8>>> for Value {
    fn from(strings: Vec<Vec<u8>>) -> Self {
        Value::Strings(strings)
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Value::Scalar(ValueType::Bool, vec![flag.into()])
    }
}

macro_rules! from_numbers {
    ($($number:ty => $kind:ident),*) => {$(
        impl From<$number> for Value {
            fn from(number: $number) -> Self {
                Value::Scalar(ValueType::$kind, number.to_le_bytes().to_vec())
            }
        }

        impl From<&[$number]> for Value {
            fn from(numbers: &[$number]) -> Self {
                Value::Scalars(ValueType::$kind, numbers.iter().flat_map(|n| n.to_le_bytes()).collect())
            }
        }
    )*};
}

from_numbers!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64, f32 => F32, f64 => F64);
