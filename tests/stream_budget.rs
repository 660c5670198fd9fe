//! The streamer's budget: against what llama.cpp was seen to allocate, and as a sum that holds for any model.

mod stream_support;

use ggml_flashrt::gguf::{Gguf, Writer};
use ggml_flashrt::graph::DType;
use ggml_flashrt::stream::budget::{reserve, Available, Budget, BudgetError, Pool, Request};
use ggml_flashrt::stream::shape::{Cache, Shape, ShapeError};
use ggml_flashrt::stream::source::Model;
use proptest::prelude::*;
use std::time::{Duration, Instant};
use stream_support::{model, shards, tensors, write, writer, EXPERTS, USED};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn header(writer: Writer) -> Gguf {
    let bytes = writer.header(Vec::new()).unwrap().finish().unwrap();
    Gguf::read(bytes.as_slice(), bytes.len() as u64).unwrap()
}

fn cache(context: u64, ubatch: u64, sequences: u64, flash_attention: bool) -> Cache {
    Cache {
        context,
        sequences,
        ubatch,
        type_k: DType::F16,
        type_v: DType::F16,
        flash_attention,
    }
}

/// `flashrt synth qwen3-moe --layers 2`
fn qwen3_moe() -> Shape {
    let mut w = Writer::new("qwen3moe");
    for (key, value) in [
        ("block_count", 2u32),
        ("embedding_length", 2048),
        ("vocab_size", 151_936),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 4),
        ("attention.key_length", 128),
        ("attention.value_length", 128),
        ("feed_forward_length", 6144),
        ("expert_feed_forward_length", 768),
        ("expert_count", 128),
        ("expert_used_count", 8),
    ] {
        w.set(&format!("qwen3moe.{key}"), value);
    }
    Shape::of(&header(w)).unwrap()
}

/// Gemma 3 270M.
fn gemma3() -> Shape {
    let mut w = Writer::new("gemma3");
    for (key, value) in [
        ("block_count", 18u32),
        ("embedding_length", 640),
        ("vocab_size", 262_144),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 256),
        ("attention.value_length", 256),
        ("attention.sliding_window", 512),
        ("feed_forward_length", 2048),
    ] {
        w.set(&format!("gemma3.{key}"), value);
    }
    Shape::of(&header(w)).unwrap()
}

/// What llama-completion of llama.cpp 0.5.0 logged on a CPU as "KV buffer size", in KiB, with these `-c`, `-ub`, `-np`.
#[test]
fn kv_caches_are_those_of_llama_cpp() {
    let kib = |shape: &Shape, context, ubatch, sequences| {
        shape.kv_bytes(&cache(context, ubatch, sequences, true)).unwrap() / KIB
    };
    let (qwen, gemma) = (qwen3_moe(), gemma3());
    assert_eq!(kib(&qwen, 4096, 512, 1), 16 * KIB);
    assert_eq!(kib(&qwen, 16_384, 512, 1), 64 * KIB);
    // Two caches: the layers that see everything, and those with a window.
    assert_eq!(kib(&gemma, 4096, 128, 1), (12 * KIB) + (11 * KIB + 256));
    assert_eq!(kib(&gemma, 4096, 512, 1), (12 + 15) * KIB);
    assert_eq!(kib(&gemma, 16_384, 512, 1), (48 + 15) * KIB);
    assert_eq!(kib(&gemma, 4096, 512, 4), (12 + 60) * KIB);
    assert_eq!(kib(&gemma, 16_384, 512, 4), (48 + 60) * KIB);
    assert_eq!(kib(&gemma, 5000, 512, 3), (15 * KIB + 768) + 45 * KIB);
    let q8 = Cache {
        type_k: DType::Q8_0,
        type_v: DType::Q8_0,
        ..cache(4096, 512, 1, true)
    };
    assert_eq!(gemma.kv_bytes(&q8).unwrap(), (12 + 15) * MIB * 34 / 64);
}

/// The same programs' "compute buffer size", in units of 1/10000 MiB: never more than stated here, and at most an eighth less.
#[test]
fn tensors_of_a_ubatch_are_at_least_those_of_llama_cpp() {
    let (qwen, gemma) = (qwen3_moe(), gemma3());
    for (shape, context, ubatch, flash_attention, seen) in [
        (&qwen, 4096, 128, true, 761_880),
        (&qwen, 4096, 512, true, 3_047_520),
        (&qwen, 16_384, 512, true, 3_047_520),
        (&qwen, 4096, 512, false, 3_047_520),
        (&qwen, 16_384, 128, false, 2_715_024),
        (&qwen, 16_384, 512, false, 10_860_098),
        (&gemma, 4096, 128, true, 1_286_255),
        (&gemma, 16_384, 512, true, 5_145_020),
        (&gemma, 16_384, 512, false, 5_145_020),
    ] {
        let stated = shape
            .transient_bytes(&cache(context, ubatch, 1, flash_attention))
            .unwrap();
        let seen = seen * MIB / 10_000;
        assert!(
            stated >= seen && stated - seen <= seen / 8,
            "{} {context} {ubatch}: {stated}, seen {seen}",
            shape.arch
        );
    }
}

#[test]
fn layers_differ_in_heads_and_windows() {
    let mut w = Writer::new("gpt-oss");
    w.set("gpt-oss.block_count", 4u32);
    w.set("gpt-oss.embedding_length", 64u32);
    w.set("gpt-oss.vocab_size", 10u32);
    w.set("gpt-oss.attention.head_count", 8u32);
    w.set("gpt-oss.attention.head_count_kv", [2u32, 0, 4, 1].as_slice());
    w.set("gpt-oss.attention.sliding_window", 128u32);
    let shape = Shape::of(&header(w)).unwrap();
    let layers: Vec<_> = shape.layers.iter().map(|l| (l.k, l.sliding)).collect();
    assert_eq!(layers, [(16, true), (0, false), (32, true), (8, false)]);

    let with = |arch: &str, pattern: Option<&[u32]>| {
        let mut w = Writer::new(arch);
        w.set(&format!("{arch}.block_count"), 5u32);
        w.set(&format!("{arch}.embedding_length"), 64u32);
        w.set(&format!("{arch}.vocab_size"), 10u32);
        w.set(&format!("{arch}.attention.head_count"), 8u32);
        w.set(&format!("{arch}.attention.sliding_window"), 128u32);
        if let Some(pattern) = pattern {
            w.set(&format!("{arch}.attention.sliding_window_pattern"), pattern);
        }
        let layers = Shape::of(&header(w)).unwrap().layers;
        layers.iter().map(|l| l.sliding).collect::<Vec<_>>()
    };
    assert_eq!(with("smallthinker", None), [false, true, true, true, false]);
    assert_eq!(with("cohere2", None), [true, true, true, false, true]);
    assert_eq!(with("gemma3", Some(&[1, 0, 0, 1, 1])), [true, false, false, true, true]);
    // Unknown: the larger cache.
    assert_eq!(with("a-new-one", None), [false; 5]);
}

#[test]
fn latent_attention_keeps_one_vector() {
    let mut w = Writer::new("deepseek2");
    for (key, value) in [
        ("block_count", 1u32),
        ("embedding_length", 2048),
        ("vocab_size", 10),
        ("attention.head_count", 16),
        ("attention.head_count_kv", 1),
        ("attention.key_length", 576),
        ("attention.value_length", 512),
        ("attention.key_length_mla", 192),
        ("attention.value_length_mla", 128),
    ] {
        w.set(&format!("deepseek2.{key}"), value);
    }
    let shape = Shape::of(&header(w)).unwrap();
    assert_eq!((shape.layers[0].k, shape.layers[0].v), (576, 0));
}

fn request(context: u64) -> Request<'static> {
    Request {
        cache: cache(context, 64, 1, true),
        slots: None,
        residents: Vec::new(),
        state: None,
        reserve: 0,
        scratch: 256 * MIB,
        reads: 8,
        piece: MIB,
    }
}

fn taken(budget: &Budget, pool: Pool) -> u64 {
    budget.items.iter().filter(|i| i.pool == pool).map(|i| i.bytes).sum()
}

#[test]
fn every_tensor_is_counted_once() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 5)).unwrap();
    let budget = Budget::plan(&m, &request(256), Available::Shared(4 * GIB)).unwrap();
    let item = |name: &str| budget.items.iter().find(|i| i.name.contains(name)).unwrap().bytes;
    let aligned = |bytes: u64| bytes.next_multiple_of(128);
    let sum = |f: &dyn Fn(&str) -> bool| {
        m.tensors()
            .filter(|(_, t)| f(&t.name))
            .map(|(_, t)| aligned(t.bytes))
            .sum::<u64>()
    };
    let experts = |n: &str| n.contains("_exps.weight");
    assert_eq!(
        item("besides the routed"),
        sum(&|n| !experts(n) && n != "token_embd.weight")
    );
    assert_eq!(item("embeddings"), sum(&|n| n == "token_embd.weight"));
    let shape = Shape::of(m.header()).unwrap();
    let cache = request(256).cache;
    assert_eq!(item("KV cache"), shape.kv_bytes(&cache).unwrap());
    assert_eq!(item("tensors of a ubatch"), shape.transient_bytes(&cache).unwrap());
    assert_eq!(item("scratch"), 256 * MIB);
    assert_eq!(item("reads in flight") + item("staging"), 2 * 8 * MIB);
    let of_experts: u64 = m
        .tensors()
        .filter(|(_, t)| experts(&t.name))
        .map(|(_, t)| t.bytes)
        .sum();
    assert_eq!(budget.all_bytes, of_experts);
    assert_eq!(budget.left_bytes, 4 * GIB - taken(&budget, Pool::Shared));
    // Everything fits: a slot for every expert, and no more.
    assert_eq!(budget.slots(), 4 * EXPERTS);
    assert_eq!(budget.needed(), 4 * u64::from(USED));

    let sharded = Model::open(&shards(dir.path(), 5, 3)).unwrap();
    assert_eq!(
        Budget::plan(&sharded, &request(256), Available::Shared(4 * GIB)).unwrap(),
        budget
    );
}

#[test]
fn a_tied_output_matrix_is_on_both_sides() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tied.gguf");
    let untied: Vec<_> = tensors(3);
    let tied: Vec<_> = untied.iter().filter(|t| t.0 != "output.weight").cloned().collect();
    write(&path, writer(3), &tied);
    let m = Model::open(&path).unwrap();
    let separate = Available::Separate {
        device: 4 * GIB,
        host: 4 * GIB,
    };
    let budget = Budget::plan(&m, &request(256), separate).unwrap();
    let item = |name: &str| budget.items.iter().find(|i| i.name.contains(name)).unwrap();
    let table = 64 * 100 * 2;
    assert_eq!((item("embeddings").bytes, item("embeddings").pool), (table, Pool::Host));
    assert!(item("besides the routed").bytes > table);
}

#[test]
fn two_memories_are_not_one() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 5)).unwrap();
    let plan = |available| Budget::plan(&m, &request(256), available);
    let shared = plan(Available::Shared(4 * GIB)).unwrap();
    let both = Available::Separate {
        device: 4 * GIB,
        host: 4 * GIB,
    };
    let separate = plan(both).unwrap();
    assert_eq!(
        taken(&shared, Pool::Shared),
        taken(&separate, Pool::Device) + taken(&separate, Pool::Host)
    );
    let host = taken(&separate, Pool::Host);
    let short = Available::Separate {
        device: 4 * GIB,
        host: host - 1,
    };
    // The reserve is at its least here, so it does not move with the host's memory.
    assert_eq!(reserve(host), reserve(4 * GIB));
    match plan(short) {
        Err(BudgetError::Pool { missing: 1, pool, .. }) => assert_eq!(pool, "host's"),
        other => panic!("{other:?}"),
    }
}

/// B37: 64 slots where a step needs more never hit; and 0 was taken for "unlimited".
#[test]
fn fewer_slots_than_a_step_needs_are_refused_with_the_sum() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 5)).unwrap();
    let with = |slots| {
        let request = Request {
            slots: Some(slots),
            ..request(256)
        };
        Budget::plan(&m, &request, Available::Shared(4 * GIB))
    };
    let step = with(GIB).unwrap().step_bytes;
    let exact = with(step).unwrap();
    assert_eq!(exact.slots(), exact.needed());
    let error = with(step - 1).unwrap_err();
    assert!(error.to_string().contains("one step needs 8 in"), "{error}");
    assert_eq!(error.budget().unwrap().slot_bytes_allowed, step - 1);
    assert!(matches!(with(0), Err(BudgetError::Zero)));
    // More sequences touch more experts in a step, up to all of them.
    let four = Request {
        cache: cache(1024, 64, 4, true),
        ..request(0)
    };
    assert_eq!(
        Budget::plan(&m, &four, Available::Shared(4 * GIB)).unwrap().needed(),
        4 * EXPERTS
    );
    for context in [cache(0, 64, 1, true), cache(256, 0, 1, true), cache(256, 64, 0, true)] {
        let empty = Request {
            cache: context,
            ..request(0)
        };
        assert!(matches!(
            Budget::plan(&m, &empty, Available::Shared(4 * GIB)),
            Err(BudgetError::Empty)
        ));
    }
}

/// B47: the budget ignored the vision tower.
#[test]
fn whatever_else_is_resident_counts() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 5)).unwrap();
    let tower_path = dir.path().join("mmproj.gguf");
    let tower_tensors = vec![("v.blk.0.attn_q.weight".to_owned(), DType::F32, vec![1024, 1024])];
    write(&tower_path, Writer::new("clip"), &tower_tensors);
    let tower = Model::open(&tower_path).unwrap();
    let alone = Budget::plan(&m, &request(256), Available::Shared(4 * GIB)).unwrap();
    let with = |resident| {
        let request = Request {
            residents: vec![("other".to_owned(), resident)],
            ..request(256)
        };
        Budget::plan(&m, &request, Available::Shared(4 * GIB)).unwrap()
    };
    assert_eq!(alone.left_bytes - with(&tower).left_bytes, 4 * MIB);
    // A draft model has a cache of its own as well.
    let draft = with(&m);
    assert!(draft
        .items
        .iter()
        .any(|i| i.name == "other: KV cache and tensors" && i.bytes > 0));
}

#[test]
fn state_of_unknown_size_is_refused_until_it_is_stated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hybrid.gguf");
    let mut w = writer(3);
    w.set("qwen3moe.ssm.state_size", 128u32);
    write(&path, w, &tensors(3));
    let m = Model::open(&path).unwrap();
    let refused = Budget::plan(&m, &request(256), Available::Shared(4 * GIB));
    assert!(
        matches!(refused, Err(BudgetError::Shape(ShapeError::State { .. }))),
        "{refused:?}"
    );
    let stated = Request {
        state: Some(MIB),
        ..request(256)
    };
    Budget::plan(&m, &stated, Available::Shared(4 * GIB)).unwrap();
}

#[test]
fn a_reserve_can_only_be_raised() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 3)).unwrap();
    let left = |reserve| {
        let request = Request {
            reserve,
            ..request(256)
        };
        Budget::plan(&m, &request, Available::Shared(4 * GIB))
            .unwrap()
            .left_bytes
    };
    assert_eq!(left(0), left(reserve(4 * GIB)));
    assert_eq!(left(GIB), left(0) - (GIB - reserve(4 * GIB)));
}

#[test]
fn numbers_out_of_this_world_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let m = Model::open(&model(dir.path(), 3)).unwrap();
    for huge in [u64::MAX, u64::MAX / 2, 1 << 60] {
        let request = Request {
            cache: cache(huge, 512, 1, true),
            ..request(0)
        };
        assert!(Budget::plan(&m, &request, Available::Shared(u64::MAX)).is_err());
    }
    let shape = |layers: u32, heads: u32, vocab: Option<u32>| {
        let mut w = Writer::new("x");
        w.set("x.block_count", layers);
        w.set("x.embedding_length", u64::MAX / 3);
        w.set("x.attention.head_count", heads);
        w.set("x.attention.key_length", u64::MAX / 5);
        w.set("x.attention.value_length", u64::MAX / 5);
        if let Some(vocab) = vocab {
            w.set("x.vocab_size", vocab);
        }
        Shape::of(&header(w))
    };
    assert!(
        shape(0, 1, Some(1)).is_err() && shape(u32::MAX, 1, Some(1)).is_err(),
        "layers"
    );
    assert!(shape(1, 1, None).is_err(), "no vocabulary");
    assert!(shape(1, u32::MAX, Some(1)).is_err(), "heads");
    let wide = shape(1, 4, Some(1)).unwrap();
    assert!(wide.kv_bytes(&cache(256, 64, 1, true)).is_err());
    for context in [256, u64::MAX] {
        assert!(wide.transient_bytes(&cache(context, u64::MAX, 1, false)).is_err());
    }
}

#[test]
fn a_refusal_takes_no_second() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.gguf");
    // 64 layers with 512 experts, as sparse as the file.
    let mut w = writer(64);
    for l in 0..64 {
        for name in ["gate", "up", "down"] {
            w.declare(
                &format!("blk.{l}.ffn_{name}_exps.weight"),
                DType::Q4_0,
                &[4096, 1024, 512],
            )
            .unwrap();
        }
    }
    w.declare("token_embd.weight", DType::F16, &[64, 100]).unwrap();
    let bytes = w.data_bytes();
    let file = std::fs::File::create(&path).unwrap();
    drop(w.header(&file).unwrap());
    file.set_len(bytes + (1 << 20)).unwrap();
    let start = Instant::now();
    let m = Model::open(&path).unwrap();
    let refused = Budget::plan(&m, &request(4096), Available::Shared(GIB));
    let took = start.elapsed();
    assert!(refused.unwrap_err().budget().is_some());
    assert!(took < Duration::from_secs(1), "{took:?}");
}

proptest! {
    /// Whatever there is and whatever is asked for: slots fit in what is left and in the setting, each layout has what a step
    /// needs and no more than it has experts, and no slot more would fit.
    #[test]
    fn slots_fill_what_is_left_and_no_more(extra in 0u64..200_000, setting in proptest::option::of(1u64..200_000), layers in 2u32..12) {
        let dir = tempfile::tempdir().unwrap();
        let m = Model::open(&model(dir.path(), layers)).unwrap();
        let full = Budget::plan(&m, &request(256), Available::Shared(4 * GIB)).unwrap();
        let there = taken(&full, Pool::Shared) + extra;
        let request = Request { slots: setting, ..request(256) };
        let plan = Budget::plan(&m, &request, Available::Shared(there));
        let allowed = setting.unwrap_or(u64::MAX).min(extra);
        match plan {
            Ok(b) => {
                prop_assert_eq!((b.left_bytes, b.slot_bytes_allowed), (extra, allowed));
                let used: u64 = b.classes.iter().map(|c| c.slots * c.bundle_bytes).sum();
                prop_assert!(used <= allowed);
                for c in &b.classes {
                    prop_assert!(c.needed <= c.slots && c.slots <= c.experts);
                    prop_assert!(c.slots == c.experts || used + c.bundle_bytes > allowed);
                }
            }
            Err(error) => prop_assert!(error.budget().is_some() && allowed < full.step_bytes, "{error}"),
        }
    }
}
