//! Graphs that llama.cpp 0.5.0 built on a CUDA device (recorded with `GGML_FLASHRT_DUMP`), with exact fire counts. Case B04: a
//! window that never fires in the model it is for is not delivered.
//!
//! Models with random weights in real shapes: Gemma 3 270M (6 layers), Llama 8B, Qwen3 4B and Qwen3-MoE (2 layers each), all
//! Q4_K_M, run by llama-batched-bench with one sequence and then two: warm-up, prefill of 48 tokens, decode, prefill of 96, decode
//! of 2. `graph-opt`: with `GGML_CUDA_GRAPH_OPT=1`; `graph-opt-without-qkv`: with QKV_GEMV switched off too, so that the host makes
//! concurrent regions.

mod support;

use ggml_flashrt::graph::dump::GraphRecord;
use ggml_flashrt::graph::{OwnedGraph, Region};
use ggml_flashrt::window::thresholds::Thresholds;
use ggml_flashrt::window::{edges, match_graph, WINDOWS};
use std::io::Read;
use support::model::on_an_rpc_server;

fn recorded(name: &str) -> Vec<GraphRecord> {
    let path = format!("{}/tests/fixtures/graphs/{name}.jsonl.gz", env!("CARGO_MANIFEST_DIR"));
    let mut text = String::new();
    flate2::read::GzDecoder::new(std::fs::File::open(&path).unwrap())
        .read_to_string(&mut text)
        .unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Tokens of a graph: rows of its first node.
fn n_tokens(graph: &GraphRecord) -> i64 {
    graph.tensors[graph.nodes[0]].ne[1]
}

/// Prompts of the recorded graphs are short: 48 tokens, and then 96 in two streams.
const FROM_64: Thresholds = Thresholds {
    mm_min_tokens: Some(64),
    fa4_min_tokens: Some(64),
};

/// Fired sites in the order of [`WINDOWS`], hand-offs, and hand-offs that replace the f32 result.
fn counts(graph: &GraphRecord, off: &[&str]) -> (Vec<usize>, usize, usize) {
    counts_from(FROM_64, graph, off)
}

fn counts_from(thresholds: Thresholds, graph: &GraphRecord, off: &[&str]) -> (Vec<usize>, usize, usize) {
    let owned = OwnedGraph::new(graph).unwrap();
    let matched = match_graph(owned.graph(), owned.host(), thresholds, |w| {
        !off.contains(&WINDOWS[w].name)
    });
    let mut fired = vec![0; WINDOWS.len()];
    matched.sites.iter().for_each(|s| fired[s.window] += 1);
    let edges = edges(&matched, owned.graph(), owned.host());
    (fired, edges.len(), edges.iter().filter(|e| e.drop_f32).count())
}

fn decode_graphs(model: &str, variant: &str) -> Vec<GraphRecord> {
    recorded(&format!("{model}-{variant}"))
        .into_iter()
        .filter(|g| n_tokens(g) <= 2)
        .collect()
}

/// Windows, in this order: QKV_GEMV, SANDWICH_NORM, ADD_NORM, GLU_GEMV, DEC_ATTN, PREFILL_FA4, GEMV_RES. Mat-muls have too few tokens.
fn check(model: &str, fired: [usize; 7], edges: (usize, usize)) {
    let names: Vec<&str> = WINDOWS.iter().map(|w| w.name).collect();
    assert_eq!(
        names,
        [
            "QKV_GEMV",
            "SANDWICH_NORM",
            "ADD_NORM",
            "GLU_GEMV",
            "DEC_ATTN",
            "PREFILL_FA4",
            "GEMV_RES",
            "GEGLU_FFN",
            "MM_RES",
            "MM_PREFILL",
            "MOE_FFN",
            "MOE_PREFILL"
        ]
    );
    let fired = [&fired[..], &[0; 5]].concat();
    for variant in ["default", "graph-opt"] {
        let graphs = decode_graphs(model, variant);
        assert_eq!(
            graphs.iter().map(n_tokens).collect::<Vec<_>>(),
            [1, 2],
            "{model} {variant}"
        );
        for graph in &graphs {
            let (got, made, dropped) = counts(graph, &[]);
            assert_eq!(
                (got, (made, dropped)),
                (fired.clone(), edges),
                "{model} {variant}, {} tokens",
                n_tokens(graph)
            );
        }
    }
}

#[test]
fn gemma3() {
    // 6 layers: a QKV and a GLU each, output and down projection, and the output matrix. Two sandwiches a layer, but in the last
    // the gather of the residual's rows of interest stands between the norm after attention and the addition.
    // Hand-offs: every norm but the first layer's own. The final norm is an output of the graph as well.
    check("gemma3-270m", [6, 11, 1, 6, 6, 0, 13], (12, 11));
}

#[test]
fn llama() {
    // Two additions a layer, each with the norm behind it: all four norms but the first layer's own hand over.
    check("llama-8b", [2, 0, 4, 2, 2, 0, 5], (4, 3));
}

#[test]
fn qwen3() {
    check("qwen3-4b", [2, 0, 4, 2, 2, 0, 5], (4, 3));
}

#[test]
fn qwen3_moe() {
    // Experts are not ours with few tokens: the norms before them keep their f32 form and hand nothing over.
    check("qwen3-moe", [2, 0, 4, 0, 2, 0, 3], (2, 1));
}

/// The same graphs without a word on weights, as an RPC server has them: addresses of a real allocation, real views of caches.
#[test]
fn an_rpc_server_fuses_as_much() {
    for model in ["gemma3-270m", "llama-8b", "qwen3-4b", "qwen3-moe"] {
        for graph in recorded(&format!("{model}-default")) {
            let served = on_an_rpc_server(graph.clone());
            assert_eq!(
                counts(&served, &[]),
                counts(&graph, &[]),
                "{model}, {} tokens",
                n_tokens(&graph)
            );
        }
    }
}

/// Norms do not care how many rows there are. Of the mat-vecs only those behind the gather of the rows of interest, in the last
/// layer and the output matrix, have few enough. Mat-muls and attention need 64 tokens: of 48 all others are left. Layers with the same
/// mask share its tiles: Gemma has two masks.
#[test]
fn prefill_takes_norms_and_from_64_tokens_on_products() {
    let none = [0; 5];
    for (model, few, products, hand_offs) in [
        // Q, K, V and attention's output of all layers, down projections and units of all but the last: it has few rows by then.
        // Each has an input of its own but Q, K and V. The two hand-offs of 8-bit blocks are those of the few rows.
        (
            "gemma3-270m",
            [0, 11, 1, 1, 0, 0, 2],
            [5, 0, 6 * 4 + 5],
            (6 * 2 + 5 * 2 + 2 + 2, 11),
        ),
        (
            "llama-8b",
            [0, 0, 4, 1, 0, 0, 2],
            [1, 0, 2 * 4 + 1],
            (2 * 2 + 2 + 2 + 1, 3),
        ),
        (
            "qwen3-4b",
            [0, 0, 4, 1, 0, 0, 2],
            [1, 0, 2 * 4 + 1],
            (2 * 2 + 2 + 2 + 1, 3),
        ),
        // The router's weights are f32.
        ("qwen3-moe", [0, 0, 4, 0, 0, 0, 1], [0, 0, 2 * 4], (2 * 2 + 1 + 1, 1)),
    ] {
        let graphs: Vec<_> = recorded(&format!("{model}-default"))
            .into_iter()
            .filter(|g| n_tokens(g) > 40)
            .collect();
        assert_eq!(graphs.iter().map(n_tokens).collect::<Vec<_>>(), [48, 96], "{model}");
        assert_eq!(
            counts(&graphs[0], &[]).0,
            [&few[..], &none].concat(),
            "{model}, 48 tokens"
        );
        let (fired, edges, dropped) = counts(&graphs[1], &[]);
        let experts = if model == "qwen3-moe" { [1, 1] } else { [0, 0] };
        let mut few = few;
        few[5] = if model == "gemma3-270m" { 6 } else { 2 };
        assert_eq!(
            (fired, (edges, dropped)),
            ([&few[..], &products, &experts].concat(), hand_offs),
            "{model}, 96 tokens"
        );
    }
}

/// Gate, up and their unit, and the down product, of the first of two layers: the last has two tokens by then. 96 tokens are too few
/// by default.
#[test]
fn experts_of_a_prompt_fire_in_every_layer_with_many_tokens() {
    let from_64 = FROM_64;
    let names = ["MOE_FFN", "MOE_PREFILL"];
    for graph in recorded("qwen3-moe-default").into_iter().filter(|g| n_tokens(g) == 96) {
        let of_experts = |thresholds: Thresholds, off: &[&str]| counts_from(thresholds, &graph, off).0[10..].to_vec();
        assert_eq!(of_experts(Thresholds::default(), &[]), [0, 0]);
        assert_eq!(of_experts(from_64, &[]), [1, 1]);
        assert_eq!(of_experts(from_64, &names[..1]), [0, 3], "gate, up and down");
        assert_eq!(of_experts(from_64, &names[1..]), [1, 0]);
        let served = on_an_rpc_server(graph.clone());
        assert_eq!(counts_from(from_64, &served, &[]), counts_from(from_64, &graph, &[]));
        // They take the norm's f32 form, as the router does: no hand-off comes or goes.
        let without = counts_from(from_64, &graph, &names);
        let with = counts_from(from_64, &graph, &[]);
        assert_eq!((with.1, with.2), (without.1, without.2));
    }
}

#[test]
fn concurrent_regions_are_respected() {
    for model in ["gemma3-270m", "llama-8b", "qwen3-4b", "qwen3-moe"] {
        let graphs = recorded(&format!("{model}-graph-opt-without-qkv"));
        let mut regions = 0;
        for graph in &graphs {
            let owned = OwnedGraph::new(graph).unwrap();
            let (graph, host) = (owned.graph(), owned.host());
            if graph.nodes().all(|t| host.region(t) == Region::None) {
                continue;
            }
            regions += 1;
            let matched = match_graph(graph, host, Thresholds::default(), |_| true);
            assert!(
                matched.sites.iter().all(|s| s.window().name != "QKV_GEMV"),
                "{model}: would cross branches"
            );
            for site in &matched.sites {
                let branches: Vec<Region> = (site.m.start..site.m.end)
                    .map(|i| host.region(graph.node(i)))
                    .filter(|r| matches!(r, Region::Branch(_)))
                    .collect();
                assert!(branches.windows(2).all(|w| w[0] == w[1]), "{model}");
            }
            for edge in edges(&matched, graph, host) {
                let shared = edge.producer.is_some() || edge.consumers.len() > 1;
                assert!(!shared, "{model}: nodes may still change order");
            }
        }
        assert!(regions > 0, "{model}: the fixture holds no region");
    }
}

/// Switched off at random, windows never leave a hand-off without its reader or the reader without its producer.
#[test]
fn hand_offs_follow_the_switches() {
    for model in ["gemma3-270m", "llama-8b"] {
        for graph in recorded(&format!("{model}-default")) {
            for off in 0u32..1024 {
                let names: Vec<&str> = (0..10)
                    .filter(|w| off & (1 << w) != 0)
                    .map(|w| WINDOWS[w as usize].name)
                    .collect();
                let owned = OwnedGraph::new(&graph).unwrap();
                let matched = match_graph(owned.graph(), owned.host(), Thresholds::default(), |w| {
                    !names.contains(&WINDOWS[w].name)
                });
                for edge in edges(&matched, owned.graph(), owned.host()) {
                    assert!(edge.consumers.is_sorted() && edge.consumers.iter().all(|&c| Some(c) > edge.producer));
                    let ends = edge.consumers.iter().copied().chain(edge.producer);
                    for site in ends {
                        assert!(!names.contains(&matched.sites[site].window().name));
                    }
                }
            }
        }
    }
}
