//! Which windows fire on hand-made graphs, and which hand-offs join them.

mod support;

use ggml_flashrt::graph::dump::TensorRecord;
use ggml_flashrt::graph::{DType, OwnedGraph};
use ggml_flashrt::window::{edges, match_graph, WINDOWS};
use std::collections::BTreeMap;
use support::machine::{assert_same_results, run_fused, run_stock, Memory};
use support::model::{model, Family, Shape};

fn sites(shape: Shape) -> (BTreeMap<&'static str, usize>, usize, usize) {
    let graph = OwnedGraph::new(&model(shape)).unwrap();
    let matched = match_graph(graph.graph(), graph.host(), |_| true);
    let mut counts = BTreeMap::new();
    for site in &matched.sites {
        *counts.entry(site.window().name).or_default() += 1;
    }
    for d in &matched.declined {
        println!("{} declines {}: {:?}", WINDOWS[d.window].name, d.node, d.decline);
    }
    let edges = edges(&matched, graph.graph(), graph.host());
    (counts, edges.len(), edges.iter().filter(|e| e.drop_f32).count())
}

#[test]
fn llama_decodes_in_six_windows_a_layer() {
    let (counts, edges, dropped) = sites(Shape {
        n_layers: 3,
        ..Shape::small(Family::Llama)
    });
    // Per layer the addition after attention, then the one after the feed-forward block with the next layer's norm.
    let expected = [
        ("ADD_NORM", 6),
        ("DEC_ATTN", 3),
        ("GEMV_RES", 7),
        ("GLU_GEMV", 3),
        ("QKV_GEMV", 3),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
    // Every norm but the first feeds mat-vecs alone.
    assert_eq!((edges, dropped), (6, 6));
}

#[test]
fn gemma_decodes_with_sandwich_norms() {
    let (counts, edges, dropped) = sites(Shape {
        n_layers: 3,
        ..Shape::small(Family::Gemma3)
    });
    let expected = [
        ("DEC_ATTN", 3),
        ("GEMV_RES", 7),
        ("GLU_GEMV", 3),
        ("QKV_GEMV", 3),
        ("SANDWICH_NORM", 6),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
    assert_eq!((edges, dropped), (6, 6));
}

#[test]
fn biases_and_head_norms_are_part_of_qkv() {
    for family in [Family::Qwen2, Family::Qwen3] {
        let (counts, ..) = sites(Shape {
            n_layers: 3,
            ..Shape::small(family)
        });
        assert_eq!(counts["QKV_GEMV"], 3, "{family:?}");
    }
}

#[test]
fn every_weight_type_fires() {
    for dtype in [
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q5_0,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ] {
        let shape = Shape {
            types: [dtype; 4],
            ..Shape::small(Family::Llama)
        };
        let (counts, ..) = sites(shape);
        assert_eq!(
            counts["QKV_GEMV"] + counts["GLU_GEMV"] + counts["GEMV_RES"],
            2 + 2 + 5,
            "{dtype:?}"
        );
    }
}

#[test]
fn other_weight_types_decline() {
    for dtype in [
        DType::Q4_1,
        DType::Q5_1,
        DType::IQ4_NL,
        DType::MXFP4,
        DType::F32,
        DType::Q3_K,
    ] {
        let (counts, ..) = sites(Shape {
            types: [dtype; 4],
            ..Shape::small(Family::Llama)
        });
        assert!(
            !counts.contains_key("QKV_GEMV") && !counts.contains_key("GLU_GEMV"),
            "{dtype:?}: {counts:?}"
        );
        assert_eq!(counts["GEMV_RES"], 1, "only the output matrix is Q8_0");
        assert_eq!(counts["ADD_NORM"], 4, "norms do not care");
    }
}

#[test]
fn many_tokens_are_left_to_stock() {
    for (n_tokens, fires) in [(1, true), (2, true), (4, true), (5, false), (512, false)] {
        let shape = Shape {
            n_tokens,
            n_kv: 512,
            ..Shape::small(Family::Llama)
        };
        let (counts, ..) = sites(shape);
        assert_eq!(counts.contains_key("QKV_GEMV"), fires, "{n_tokens} tokens");
        assert_eq!(counts.contains_key("GLU_GEMV"), fires, "{n_tokens} tokens");
        assert_eq!(counts.contains_key("DEC_ATTN"), fires, "{n_tokens} tokens");
    }
}

#[test]
fn attention_fires_for_the_head_sizes_and_caches_it_has_kernels_for() {
    for (head_dim, kv, sites_expected) in [
        (64, DType::F16, 2),
        (80, DType::F16, 2),
        (96, DType::F16, 2),
        (128, DType::F16, 2),
        (256, DType::F16, 2),
        (32, DType::F16, 0),
        (112, DType::F16, 0),
        (192, DType::F16, 0),
        (64, DType::BF16, 0),
        (64, DType::F32, 0),
        (64, DType::Q8_0, 0),
    ] {
        let (counts, ..) = sites(Shape {
            head_dim,
            kv,
            ..Shape::small(Family::Llama)
        });
        assert_eq!(
            counts.get("DEC_ATTN").copied().unwrap_or(0),
            sites_expected,
            "{head_dim} {kv:?}"
        );
    }
}

/// One attention node changed: the window declines, or it takes the node and both give the same.
#[test]
fn attention_declines_what_its_kernel_does_not_compute() {
    let base = model(Shape {
        n_layers: 1,
        ..Shape::tiny(Family::Llama)
    });
    let attn = base.tensors.iter().position(|t| t.name == "attn-0").unwrap();
    type Change = fn(&mut TensorRecord);
    let cases: [(&str, bool, Change); 7] = [
        ("as it is", true, |_| {}),
        ("a softcap", true, |t| t.params[2] = 2f32.to_bits() as i32),
        ("another precision", true, |t| t.params[3] = 0),
        ("no mask", true, |t| t.src.truncate(3)),
        ("ALiBi", false, |t| t.params[1] = 8f32.to_bits() as i32),
        ("a hint", false, |t| t.params.push(64)),
        ("sinks", false, |t| t.src.push(t.src[0])),
    ];
    for (what, fires, change) in cases {
        let mut record = base.clone();
        change(&mut record.tensors[attn]);
        let graph = OwnedGraph::new(&record).unwrap();
        let matched = match_graph(graph.graph(), graph.host(), |_| true);
        assert_eq!(
            matched.sites.iter().any(|s| s.window().name == "DEC_ATTN"),
            fires,
            "{what}"
        );
        if fires {
            let memory = Memory::for_graph(&record, 7);
            assert_same_results(
                &record,
                &run_stock(&record, &memory),
                &run_fused(&record, &memory).memory,
                what,
            );
        }
    }
}

#[test]
fn fused_graphs_compute_what_the_nodes_do() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Gemma3] {
        for n_tokens in [1, 3] {
            let record = model(Shape {
                n_tokens,
                n_layers: 2,
                ..Shape::tiny(family)
            });
            let memory = Memory::for_graph(&record, 7);
            let stock = run_stock(&record, &memory);
            let fused = run_fused(&record, &memory);
            assert!(fused.taken.len() > 8, "{family:?}");
            assert_same_results(&record, &stock, &fused.memory, &format!("{family:?} {n_tokens}"));
        }
    }
}

/// The usual order of operands: the mat-vec first, the residual second. It is not a bias.
#[test]
fn a_residual_is_fused_in_either_order() {
    use ggml_flashrt::graph::{GraphBuilder, Op};
    for swapped in [false, true] {
        for n_tokens in [1, 3] {
            let mut b = GraphBuilder::new();
            let x = b.input("x", DType::F32, [64, n_tokens, 1, 1]);
            let w = b.weight("w", DType::Q8_0, [64, 32, 1, 1]);
            let from = b.input("from", DType::F32, [32, n_tokens, 1, 1]);
            let res = b.node("res", Op::Scale, DType::F32, [32, n_tokens, 1, 1], &[Some(from)]);
            b.tensor_mut(res).params = vec![support::model::f(2.0)];
            let mm = b.node("mm", Op::MulMat, DType::F32, [32, n_tokens, 1, 1], &[Some(w), Some(x)]);
            let operands = if swapped {
                [Some(res), Some(mm)]
            } else {
                [Some(mm), Some(res)]
            };
            b.node("y", Op::Add, DType::F32, [32, n_tokens, 1, 1], &operands);
            let record = b.finish();
            let graph = OwnedGraph::new(&record).unwrap();
            let matched = match_graph(graph.graph(), graph.host(), |_| true);
            let run: Vec<_> = matched
                .sites
                .iter()
                .map(|s| (s.window().name, s.m.start, s.m.end))
                .collect();
            assert_eq!(run, [("GEMV_RES", 1, 3)], "swapped: {swapped}, {n_tokens} tokens");
            let memory = Memory::for_graph(&record, 3);
            let (stock, fused) = (run_stock(&record, &memory), run_fused(&record, &memory));
            assert_same_results(&record, &stock, &fused.memory, "residual");
        }
    }
}
