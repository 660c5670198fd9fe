//! Where the streamer looks for a model's experts.

mod stream_support;

use ggml_flashrt::gguf::Writer;
use ggml_flashrt::graph::DType;
use ggml_flashrt::stream::source::{Model, Range, Role, SourceError};
use std::fs;
use std::os::unix::fs::FileExt;
use stream_support::{model, shard_path, shards, tensors, write, writer, EXPERTS};

fn bytes(model: &Model, range: Range) -> Vec<u8> {
    let mut buf = vec![0; range.bytes as usize];
    model.shards()[range.shard]
        .file
        .read_exact_at(&mut buf, range.start)
        .unwrap();
    buf
}

/// The slices of the whole tensor, taken from ggml's rule: expert `e` of `n` is the e-th of n equal parts.
#[test]
fn a_bundle_is_the_experts_slice_of_each_of_its_tensors() {
    let dir = tempfile::tempdir().unwrap();
    for path in [model(dir.path(), 5), shards(dir.path(), 5, 4)] {
        let m = Model::open(&path).unwrap();
        let layers = m.experts().unwrap();
        assert_eq!(layers.iter().map(|l| l.layer).collect::<Vec<_>>(), [1, 2, 3, 4]);
        for layer in &layers {
            assert_eq!(layer.number, EXPERTS);
            for expert in 0..EXPERTS {
                let bundle = layer.bundle(expert).unwrap();
                assert_eq!(bundle.iter().map(|r| r.bytes).sum::<u64>(), layer.bundle_bytes());
                for (part, range) in layer.parts.iter().zip(bundle) {
                    let name = match part.role {
                        Role::Gate => "gate",
                        Role::Up => "up",
                        Role::GateUp => "gate_up",
                        Role::Down => "down",
                    };
                    let name = format!("blk.{}.ffn_{name}_exps.weight", layer.layer);
                    let dims = [part.dims[0], part.dims[1], EXPERTS, 1];
                    let whole = bytes(&m, m.locate(&name, part.ty, &dims).unwrap());
                    let size = whole.len() / EXPERTS as usize;
                    let at = size * expert as usize;
                    assert_eq!(bytes(&m, range), whole[at..at + size], "{name} {expert}");
                }
            }
            assert!(matches!(layer.bundle(EXPERTS), Err(SourceError::NoExpert { .. })));
        }
        let roles = |at: usize| layers[at].parts.iter().map(|p| p.role).collect::<Vec<_>>();
        assert_eq!(
            roles(0),
            [Role::GateUp, Role::Down],
            "by role, not by their order in the file"
        );
        assert_eq!(roles(1), [Role::Gate, Role::Up, Role::Down]);
        assert_ne!(layers[1].layout(), layers[3].layout(), "down has another type");
        assert_eq!(layers[0].layout(), layers[2].layout());
    }
}

#[test]
fn a_tensor_that_the_file_describes_otherwise_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 3)).unwrap();
    let name = "blk.2.ffn_up_exps.weight";
    m.locate(name, DType::Q4_0, &[64, 32, EXPERTS]).unwrap();
    m.locate(name, DType::Q4_0, &[64, 32, EXPERTS, 1]).unwrap();
    for (ty, dims) in [
        (DType::Q4_1, [64, 32, EXPERTS, 1]),
        (DType::Q4_0, [32, 64, EXPERTS, 1]),
        (DType::Q4_0, [64, 32, EXPERTS, 2]),
        (DType::Q4_0, [64, 32, EXPERTS - 1, 1]),
    ] {
        let error = m.locate(name, ty, &dims).unwrap_err();
        assert!(matches!(error, SourceError::Differs { .. }), "{error}");
    }
    assert!(matches!(
        m.locate("blk.2.nothing", DType::Q4_0, &[1]),
        Err(SourceError::NoTensor(_))
    ));
}

#[test]
fn shards_must_be_complete_in_order_and_disjoint() {
    let dir = tempfile::tempdir().unwrap();
    let first = shards(dir.path(), 5, 3);
    Model::open(&first).unwrap();
    let error = |what: &str| {
        let error = Model::open(&first).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };

    let second = shard_path(dir.path(), 1, 3);
    let not_first = Model::open(&second).unwrap_err().to_string();
    assert!(not_first.contains("shard 2 of 3"), "{not_first}");

    let copy = fs::read(&second).unwrap();
    fs::copy(shard_path(dir.path(), 2, 3), &second).unwrap();
    error("by its name it is (1, 3)");
    fs::remove_file(&second).unwrap();
    error("-00002-of-00003.gguf");
    fs::write(&second, copy).unwrap();
    Model::open(&first).unwrap();

    let renamed = dir.path().join("other.gguf");
    fs::copy(&first, &renamed).unwrap();
    let error_of_name = Model::open(&renamed).unwrap_err().to_string();
    assert!(error_of_name.contains("-00001-of-00003.gguf"), "{error_of_name}");

    let shard = |n: usize, tensors: &[(String, DType, Vec<u64>)]| {
        let mut w = if n == 0 { writer(3) } else { Writer::new("qwen3moe") };
        w.set("split.no", n as u16);
        w.set("split.count", 2u16);
        w.set("split.tensors.count", 2i32);
        write(&shard_path(dir.path(), n, 2), w, tensors);
    };
    let all = tensors(3);
    shard(0, &all[..1]);
    shard(1, &all[..1]);
    let twice = Model::open(&shard_path(dir.path(), 0, 2)).unwrap_err();
    assert!(matches!(twice, SourceError::Duplicate { .. }), "{twice}");
    shard(1, &all[1..3]);
    let count = Model::open(&shard_path(dir.path(), 0, 2)).unwrap_err();
    assert!(
        matches!(count, SourceError::TensorCount { stated: 2, found: 3 }),
        "{count}"
    );
}

#[test]
fn the_file_that_was_opened_is_the_one_that_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = model(dir.path(), 3);
    let m = Model::open(&path).unwrap();
    let range = m.experts().unwrap()[0].bundle(3).unwrap()[0];
    let before = bytes(&m, range);
    let other = dir.path().join("other");
    fs::write(&other, vec![0; 1 << 20]).unwrap();
    fs::rename(&other, &path).unwrap();
    assert_eq!(bytes(&m, range), before);
}

#[test]
fn experts_that_do_not_go_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let with = |tensors: Vec<(&str, Vec<u64>)>| {
        let path = dir.path().join("x.gguf");
        let tensors: Vec<_> = tensors
            .into_iter()
            .map(|(n, d)| (n.to_owned(), DType::F32, d))
            .collect();
        write(&path, writer(2), &tensors);
        Model::open(&path).unwrap().experts()
    };
    let up = ("blk.1.ffn_up_exps.weight", vec![8, 4, 6]);
    with(vec![up.clone()]).unwrap();
    let number = with(vec![up, ("blk.1.ffn_down_exps.weight", vec![4, 8, 5])]).unwrap_err();
    assert!(
        number.to_string().contains("5 experts, other tensors of the layer 6"),
        "{number}"
    );
    assert!(with(vec![("blk.1.ffn_up_exps.weight", vec![8, 4])]).is_err());
    assert!(matches!(
        with(vec![("blk.1.ffn_up.weight", vec![8, 4])]),
        Err(SourceError::NoExperts)
    ));
}
