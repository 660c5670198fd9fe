//! `flashrt synth`: files that a reader accepts, the same for the same seed, and never half of one.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use ggml_flashrt::gguf::Gguf;
use ggml_flashrt::graph::DType;
use std::path::Path;
use std::process::Command;

fn synth(kind: &str, out: &Path, args: &[&str]) -> Command {
    let mut command = flashrt();
    command.args(["synth", kind]).arg(out).args(args);
    command
}

/// Values of a tensor of one of the plain types.
fn values(path: &Path, name: &str) -> Vec<f32> {
    let gguf = Gguf::open(path).unwrap();
    let t = gguf.tensor(name).unwrap();
    let bytes = std::fs::read(path).unwrap();
    let data = &bytes[t.start as usize..(t.start + t.bytes) as usize];
    match t.ty {
        DType::F32 => data
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect(),
        DType::F16 => data
            .chunks_exact(2)
            .map(|b| half::f16::from_le_bytes(b.try_into().unwrap()).to_f32())
            .collect(),
        DType::Q8_0 => data
            .chunks_exact(34)
            .flat_map(|b| {
                let d = half::f16::from_le_bytes([b[0], b[1]]).to_f32();
                b[2..].iter().map(move |q| d * f32::from(*q as i8)).collect::<Vec<_>>()
            })
            .collect(),
        other => panic!("{} is not handled here", other.name()),
    }
}

#[test]
fn the_file_has_the_models_shapes() {
    let scratch = Scratch::new();
    let path = scratch.path("m.gguf");
    let said = stdout(&mut synth("gemma3-270m", &path, &["--layers", "3"]));
    assert!(said.contains("3 layers, 41 tensors"), "{said}");
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.architecture(), Some("gemma3"));
    assert_eq!(gguf.get("gemma3.block_count").unwrap().as_u64(), Some(3));
    assert_eq!(gguf.get("tokenizer.ggml.tokens").unwrap().array_len(), Some(262_144));
    assert_eq!(gguf.tensor("token_embd.weight").unwrap().dims, [640, 262_144]);
    assert_eq!(gguf.tensor("blk.2.attn_q.weight").unwrap().dims, [640, 1024]);
    assert_eq!(
        gguf.tensor("blk.0.attn_q.weight").unwrap().ty,
        DType::Q5_0,
        "640 is no multiple of 256"
    );
    assert!(gguf.tensor("output.weight").is_none(), "the embeddings are the output");
    assert_eq!(scratch.files(), ["m.gguf"]);
}

#[test]
fn the_seed_decides_every_byte() {
    let scratch = Scratch::new();
    let make = |name: &str, args: &[&str]| {
        let path = scratch.path(name);
        stdout(&mut synth(
            "gemma3-270m",
            &path,
            &[&["--layers", "1", "--type", "q2_0"], args].concat(),
        ));
        std::fs::read(path).unwrap()
    };
    let first = make("a", &["--seed", "7"]);
    assert!(first == make("b", &["--seed", "7"]));
    assert!(first != make("c", &["--seed", "8"]));
}

#[test]
fn weights_keep_activations_at_their_size() {
    let scratch = Scratch::new();
    for ty in ["q8_0", "f16"] {
        let path = scratch.path(ty);
        stdout(&mut synth("gemma3-270m", &path, &["--layers", "1", "--type", ty]));
        let w = values(&path, "blk.0.ffn_down.weight"); // rows of 2048
        let mean = w.iter().sum::<f32>() / w.len() as f32;
        let spread = (w.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / w.len() as f32 * 2048.0).sqrt();
        assert!(
            (spread - 1.0).abs() < 0.02 && mean.abs() * 2048f32.sqrt() < 0.02,
            "{ty}: {spread} {mean}"
        );
        let norm = values(&path, "blk.0.attn_norm.weight");
        assert!(norm.iter().all(|x| (0.7..1.3).contains(x)), "{norm:?}");
    }
}

#[test]
fn refusals_name_the_reason_and_leave_nothing() {
    let scratch = Scratch::new();
    let path = scratch.path("there.gguf");
    std::fs::write(&path, "mine").unwrap();
    assert!(complaint(&mut synth("gemma3-270m", &path, &[])).contains("there.gguf exists already"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    assert!(complaint(&mut synth("gemma3-270m", &scratch.path("no/where.gguf"), &[])).contains("cannot write in"));
    let output = synth("gemma3-270m", &scratch.path("x"), &["--type", "q9"])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("q4_K_M or one of f32, f16"),
        "{said}"
    );
    assert_eq!(scratch.files(), ["there.gguf"]);
}
