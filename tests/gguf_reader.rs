//! The GGUF reader: against gguf-py's own reading of the same files, and against files that lie.
//!
//! A new way for a file to be broken goes into `broken_headers_name_the_fault`.

use ggml_flashrt::gguf::{Gguf, GgufError, Value, ValueType};
use ggml_flashrt::graph::DType;
use proptest::prelude::*;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/gguf")
        .join(name)
}

fn read(bytes: &[u8]) -> Result<Gguf, GgufError> {
    Gguf::read(bytes, bytes.len() as u64)
}

/// A value the way the fixture script writes it: 64-bit integers as text, the rest as JSON has it.
fn to_json(value: &Value) -> serde_json::Value {
    fn scalar(ty: ValueType, b: &[u8]) -> serde_json::Value {
        match ty {
            ValueType::U8 => b[0].into(),
            ValueType::I8 => (b[0] as i8).into(),
            ValueType::Bool => (b[0] != 0).into(),
            ValueType::U16 => u16::from_le_bytes(b.try_into().unwrap()).into(),
            ValueType::I16 => i16::from_le_bytes(b.try_into().unwrap()).into(),
            ValueType::U32 => u32::from_le_bytes(b.try_into().unwrap()).into(),
            ValueType::I32 => i32::from_le_bytes(b.try_into().unwrap()).into(),
            ValueType::F32 => f32::from_le_bytes(b.try_into().unwrap()).into(),
            ValueType::F64 => f64::from_le_bytes(b.try_into().unwrap()).into(),
            ValueType::U64 => u64::from_le_bytes(b.try_into().unwrap()).to_string().into(),
            ValueType::I64 => i64::from_le_bytes(b.try_into().unwrap()).to_string().into(),
            ValueType::String | ValueType::Array => unreachable!("not a scalar"),
        }
    }
    let text = |b: &[u8]| serde_json::Value::from(std::str::from_utf8(b).unwrap());
    match value {
        Value::Scalar(ty, b) => scalar(*ty, b),
        Value::String(b) => text(b),
        Value::Scalars(ty, b) => b.chunks(ty.min_bytes() as usize).map(|c| scalar(*ty, c)).collect(),
        Value::Strings(all) => all.iter().map(|b| text(b)).collect(),
    }
}

#[test]
fn agrees_with_gguf_py() {
    for name in ["every_value_type", "every_quant", "wide_alignment", "no_tensors"] {
        let gguf = Gguf::open(&fixture(&format!("{name}.gguf"))).unwrap();
        let keys: serde_json::Map<_, _> = gguf.metadata.iter().map(|(k, v)| (k.clone(), to_json(v))).collect();
        let tensors: serde_json::Value = gguf
            .tensors
            .iter()
            .map(|t| {
                serde_json::json!({"name": t.name, "type": t.ty.name().to_uppercase(), "dims": t.dims, "start": t.start,
                    "bytes": t.bytes})
            })
            .collect();
        let ours = serde_json::json!({"keys": keys, "tensors": tensors, "alignment": gguf.alignment});
        let text = std::fs::read_to_string(fixture(&format!("{name}.json"))).unwrap();
        assert_eq!(
            ours,
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn typed_access() {
    let gguf = Gguf::open(&fixture("every_value_type.gguf")).unwrap();
    assert_eq!(gguf.architecture(), Some("llama"));
    assert_eq!(gguf.get("k.u64").unwrap().as_u64(), Some((1 << 63) + 1));
    assert_eq!(gguf.get("k.i8").unwrap().as_u64(), None, "negative");
    assert_eq!(gguf.get("k.f32").unwrap().as_u64(), None, "no integer");
    assert_eq!(gguf.get("k.strings").unwrap().array_len(), Some(3));
    assert_eq!(gguf.get("k.ints").unwrap().array_len(), Some(3));
    assert_eq!(gguf.tensor("matrix").unwrap().dims, [4, 3]);
    assert!(gguf.tensor("absent").is_none());
}

/// A header in the making, for files no writer would write.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(n_tensors: u64, n_keys: u64) -> Self {
        Raw(b"GGUF".to_vec()).u32(3).u64(n_tensors).u64(n_keys)
    }
    fn u32(mut self, v: u32) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn u64(mut self, v: u64) -> Self {
        self.0.extend(v.to_le_bytes());
        self
    }
    fn str(self, s: &str) -> Self {
        self.bytes(s.as_bytes())
    }
    fn bytes(mut self, s: &[u8]) -> Self {
        self = self.u64(s.len() as u64);
        self.0.extend(s);
        self
    }
    fn key(self, name: &str, v: u32) -> Self {
        self.str(name).u32(ValueType::U32 as u32).u32(v)
    }
    fn tensor(self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        let head = self.str(name).u32(dims.len() as u32);
        dims.iter().fold(head, |r, d| r.u64(*d)).u32(ty).u64(offset)
    }
    fn zeros(mut self, n: usize) -> Self {
        self.0.resize(self.0.len() + n, 0);
        self
    }
}

#[test]
fn broken_headers_name_the_fault() {
    let f32_id = DType::F32 as u32;
    let q4_k = DType::Q4_K as u32;
    let one = |dims: &[u64], ty, offset| Raw::new(1, 0).tensor("t", dims, ty, offset).zeros(4096);
    let cases: Vec<(&str, Raw, &str)> = vec![
        ("empty", Raw(vec![]), "ends inside the magic, at byte 0"),
        (
            "other magic",
            Raw(b"PK\x03\x04____".to_vec()),
            "it starts with [50, 4b, 03, 04]",
        ),
        ("version 1", Raw(b"GGUF".to_vec()).u32(1).zeros(64), "version 0x1"),
        (
            "byte order",
            Raw(b"GGUF\0\0\0\x03".to_vec()).zeros(64),
            "version 0x3000000",
        ),
        ("version 4", Raw(b"GGUF".to_vec()).u32(4).zeros(64), "version 0x4"),
        (
            "tensor count",
            Raw::new(u64::MAX, 0).zeros(64),
            "the tensor list claims 18446744073709551615 entries",
        ),
        (
            "tensor count that would overflow",
            Raw::new(u64::MAX / 24 + 2, 0).zeros(64),
            "the tensor list claims",
        ),
        (
            "key count",
            Raw::new(0, 1 << 40).zeros(64),
            "the metadata claims 1099511627776 entries",
        ),
        (
            "key length",
            Raw::new(0, 1).u64(1 << 60).zeros(64),
            "key claims 1152921504606846976",
        ),
        ("empty key", Raw::new(0, 1).key("", 1).zeros(8), "key 0 is empty"),
        (
            "duplicate key",
            Raw::new(0, 2).key("a", 1).key("a", 2).zeros(8),
            "key 1 is empty, duplicate",
        ),
        (
            "key no UTF-8",
            Raw::new(0, 1).bytes(&[0xff, 0xfe]).u32(4).zeros(64),
            "no UTF-8",
        ),
        (
            "value type",
            Raw::new(0, 1).str("a").u32(13).zeros(64),
            "key \"a\" has the unknown value type 13",
        ),
        (
            "nested array",
            Raw::new(0, 1).str("a").u32(9).u32(9).u64(1).zeros(64),
            "unknown value type 9",
        ),
        (
            "array length",
            Raw::new(0, 1).str("a").u32(9).u32(12).u64(u64::MAX / 4).zeros(64),
            "an array claims",
        ),
        (
            "strings",
            Raw::new(0, 1).str("a").u32(9).u32(8).u64(100).zeros(64),
            "an array of strings claims 100 entries",
        ),
        (
            "alignment 0",
            Raw::new(0, 1).key("general.alignment", 0),
            "no power of two: 0",
        ),
        (
            "alignment 48",
            Raw::new(0, 1).key("general.alignment", 48),
            "no power of two: 48",
        ),
        (
            "alignment as text",
            Raw::new(0, 1).str("general.alignment").u32(8).str("32"),
            "general.alignment",
        ),
        (
            "long tensor name",
            Raw::new(1, 0).tensor(&"n".repeat(64), &[1], 0, 0).zeros(64),
            "too long",
        ),
        (
            "same tensor twice",
            Raw::new(2, 0)
                .tensor("t", &[8], 0, 0)
                .tensor("t", &[8], 0, 32)
                .zeros(128),
            "tensor name 1",
        ),
        (
            "dimension count",
            Raw::new(1, 0).tensor("t", &[1; 5], 0, 0).zeros(64),
            "impossible shape [5]",
        ),
        ("unknown type", one(&[32], 43, 0), "\"t\" has the unknown type 43"),
        ("retired type", one(&[32], 4, 0), "\"t\" has the unknown type 4"),
        ("partial block", one(&[255], q4_k, 0), "impossible shape [255]"),
        ("size overflow", one(&[1 << 40, 1 << 40], f32_id, 0), "impossible shape"),
        (
            "size overflow beside a zero",
            one(&[1 << 40, 1 << 40, 0], f32_id, 0),
            "impossible shape",
        ),
        ("row overflow", one(&[!3], f32_id, 0), "impossible shape"),
        ("offset", one(&[8], f32_id, 32), "starts at 32, where 0 was expected"),
        (
            "overlap",
            Raw::new(2, 0)
                .tensor("a", &[16], 0, 0)
                .tensor("b", &[8], 0, 32)
                .zeros(256),
            "where 64 was expected",
        ),
        (
            "data beyond the end",
            one(&[2048], f32_id, 0),
            "ends at byte 8256, but the file has",
        ),
    ];
    for (what, raw, message) in cases {
        let error = read(&raw.0).expect_err(what).to_string();
        assert!(
            error.contains(message),
            "{what}: {error:?} does not contain {message:?}"
        );
    }
}

#[test]
fn the_same_header_unbroken_is_read() {
    let raw = Raw::new(2, 1)
        .key("general.alignment", 64)
        .tensor("a", &[16], 0, 0)
        .tensor("b", &[8], 0, 64)
        .zeros(256);
    let gguf = read(&raw.0).unwrap();
    assert_eq!((gguf.tensors[0].start, gguf.tensors[1].start), (128, 192));
}

#[test]
fn every_truncation_is_refused() {
    for name in ["every_value_type", "every_quant", "wide_alignment"] {
        let bytes = std::fs::read(fixture(&format!("{name}.gguf"))).unwrap();
        let gguf = read(&bytes).unwrap();
        let end = gguf.tensors.iter().map(|t| t.start + t.bytes).max().unwrap() as usize;
        for len in 0..end {
            assert!(read(&bytes[..len]).is_err(), "{name} cut to {len} bytes was accepted");
        }
        assert!(
            read(&bytes[..end]).is_ok(),
            "{name}: padding after the last tensor is not needed"
        );
    }
}

#[test]
fn a_file_shorter_than_it_said_is_truncated() {
    let bytes = std::fs::read(fixture("every_value_type.gguf")).unwrap();
    let error = Gguf::read(&bytes[..100], bytes.len() as u64).unwrap_err();
    assert!(matches!(error, GgufError::Truncated { .. }), "{error}");
}

#[test]
fn missing_files_and_directories_say_which() {
    for path in [fixture("absent.gguf"), fixture("")] {
        let error = Gguf::open(&path).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
    }
}

/// What must hold of any header that is accepted: data inside the file, aligned, apart from each other.
fn assert_sound(gguf: &Gguf, len: u64) {
    let mut last_end = 0;
    for t in &gguf.tensors {
        assert!(
            t.start % gguf.alignment == 0 && t.start >= last_end && t.start + t.bytes <= len,
            "{t:?}"
        );
        last_end = t.start + t.bytes;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn mutated_files_are_refused_or_sound(
        name in prop::sample::select(vec!["every_value_type", "every_quant", "wide_alignment", "no_tensors"]),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = std::fs::read(fixture(&format!("{name}.gguf"))).unwrap();
        let header = read(&bytes).unwrap().tensors.first().map_or(bytes.len(), |t| t.start as usize);
        for (at, value) in edits {
            bytes[at.index(header)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        if let Ok(gguf) = read(&bytes) {
            assert_sound(&gguf, bytes.len() as u64);
        }
    }

    #[test]
    fn noise_after_the_magic_is_refused_or_sound(noise in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(noise);
        if let Ok(gguf) = read(&bytes) {
            assert_sound(&gguf, bytes.len() as u64);
        }
    }
}
