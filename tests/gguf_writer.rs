//! The GGUF writer: what it writes is what the reader reads, byte for byte what gguf-py writes, and never half a file.

use ggml_flashrt::gguf::{Gguf, Value, Writer, WriterError};
use ggml_flashrt::graph::DType;
use std::path::Path;

/// The fixture's contents written by us.
fn rewrite(gguf: &Gguf, bytes: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    for (key, value) in &gguf.metadata {
        writer.set(key, value.clone());
    }
    for t in &gguf.tensors {
        writer.declare(&t.name, t.ty, &t.dims).unwrap();
    }
    let mut data = writer.header(Vec::new()).unwrap();
    for t in &gguf.tensors {
        data.tensor([&bytes[t.start as usize..(t.start + t.bytes) as usize]])
            .unwrap();
    }
    data.finish().unwrap()
}

#[test]
fn writes_what_gguf_py_writes() {
    for name in ["every_value_type", "every_quant"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/gguf/{name}.gguf"));
        let bytes = std::fs::read(&path).unwrap();
        let gguf = Gguf::open(&path).unwrap();
        assert!(rewrite(&gguf, &bytes) == bytes, "{name}: the bytes differ");
    }
}

#[test]
fn refuses_shapes_and_data_that_do_not_fit() {
    let mut writer = Writer::new("llama");
    assert!(matches!(
        writer.declare("t", DType::Q4_K, &[640, 2]),
        Err(WriterError::Shape { .. })
    ));
    writer.declare("t", DType::Q8_0, &[64, 2]).unwrap();
    assert_eq!(writer.data_bytes(), 136);
    let mut data = writer.header(Vec::new()).unwrap();
    assert!(matches!(
        data.tensor([&[0u8; 135][..]]),
        Err(WriterError::Data {
            got: 135,
            want: 136,
            ..
        })
    ));
    assert!(matches!(data.tensor([&[0u8; 135][..]]), Err(WriterError::Surplus)));
}

#[test]
fn an_unfinished_file_is_no_file() {
    let mut writer = Writer::new("llama");
    writer.declare("t", DType::F32, &[4]).unwrap();
    assert!(matches!(
        writer.header(Vec::new()).unwrap().finish(),
        Err(WriterError::Missing(1))
    ));
}

#[test]
fn values_keep_their_types() {
    let mut writer = Writer::new("llama");
    let values: [(&str, Value); 4] = [
        ("u32", 7u32.into()),
        ("bool", true.into()),
        ("floats", [1.5f32, -2.0][..].into()),
        ("tokens", vec![vec![0xff, 0xfe], b"x".to_vec()].into()),
    ];
    for (key, value) in &values {
        writer.set(key, value.clone());
    }
    let bytes = writer.header(Vec::new()).unwrap().finish().unwrap();
    let gguf = Gguf::read(&bytes[..], bytes.len() as u64).unwrap();
    for (key, value) in &values {
        assert_eq!(gguf.get(key), Some(value), "{key}");
    }
}
