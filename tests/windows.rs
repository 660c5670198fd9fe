//! Which windows fire on hand-made graphs, and which hand-offs join them.

mod support;

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
fn llama_decodes_in_five_windows_a_layer() {
    let (counts, edges, dropped) = sites(Shape { n_layers: 3, ..Shape::small(Family::Llama) });
    // Per layer the addition after attention, then the one after the feed-forward block with the next layer's norm.
    let expected = [("ADD_NORM", 6), ("GEMV_RES", 7), ("GLU_GEMV", 3), ("QKV_GEMV", 3)];
    assert_eq!(counts, BTreeMap::from(expected));
    // Every norm but the first feeds mat-vecs alone, every GLU its down projection.
    assert_eq!((edges, dropped), (9, 9));
}

#[test]
fn gemma_decodes_with_sandwich_norms() {
    let (counts, edges, dropped) = sites(Shape { n_layers: 3, ..Shape::small(Family::Gemma3) });
    let expected = [("GEMV_RES", 7), ("GLU_GEMV", 3), ("QKV_GEMV", 3), ("SANDWICH_NORM", 6)];
    assert_eq!(counts, BTreeMap::from(expected));
    assert_eq!((edges, dropped), (9, 9));
}

#[test]
fn biases_and_head_norms_are_part_of_qkv() {
    for family in [Family::Qwen2, Family::Qwen3] {
        let (counts, ..) = sites(Shape { n_layers: 3, ..Shape::small(family) });
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
        let shape = Shape { types: [dtype; 4], head_dim: 64, ..Shape::small(Family::Llama) };
        let (counts, ..) = sites(shape);
        assert_eq!(counts["QKV_GEMV"] + counts["GLU_GEMV"] + counts["GEMV_RES"], 2 + 2 + 5, "{dtype:?}");
    }
}

#[test]
fn other_weight_types_decline() {
    for dtype in [DType::Q4_1, DType::Q5_1, DType::IQ4_NL, DType::MXFP4, DType::F32, DType::Q3_K] {
        let (counts, ..) = sites(Shape { types: [dtype; 4], head_dim: 64, ..Shape::small(Family::Llama) });
        assert!(!counts.contains_key("QKV_GEMV") && !counts.contains_key("GLU_GEMV"), "{dtype:?}: {counts:?}");
        assert_eq!(counts["GEMV_RES"], 1, "only the output matrix is Q8_0");
        assert_eq!(counts["ADD_NORM"], 4, "norms do not care");
    }
}

#[test]
fn many_tokens_are_left_to_stock() {
    for (n_tokens, fires) in [(1, true), (2, true), (4, true), (5, false), (512, false)] {
        let shape = Shape { n_tokens, n_kv: 512, ..Shape::small(Family::Llama) };
        let (counts, ..) = sites(shape);
        assert_eq!(counts.contains_key("QKV_GEMV"), fires, "{n_tokens} tokens");
        assert_eq!(counts.contains_key("GLU_GEMV"), fires, "{n_tokens} tokens");
    }
}

#[test]
fn fused_graphs_compute_what_the_nodes_do() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Gemma3] {
        for n_tokens in [1, 3] {
            let record = model(Shape { n_tokens, n_layers: 2, ..Shape::tiny(family) });
            let memory = Memory::for_graph(&record, 7);
            let stock = run_stock(&record, &memory);
            let fused = run_fused(&record, &memory);
            assert!(fused.taken.len() > 8, "{family:?}");
            assert_same_results(&record, &stock, &fused.memory, &format!("{family:?} {n_tokens}"));
        }
    }
}
