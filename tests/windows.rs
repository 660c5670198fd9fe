//! Which windows fire on hand-made graphs, and which hand-offs join them.

mod support;

use ggml_flashrt::graph::dump::{GraphRecord, TensorRecord};
use ggml_flashrt::graph::{BufferKind, DType, GraphBuilder, Op, OwnedGraph, TensorId, FLAG_INPUT};
use ggml_flashrt::kernel::{MM_WEIGHT_TYPES, MOE_MAX_EXPERTS};
use ggml_flashrt::window::thresholds::{Thresholds, MOE_MIN_TOKENS};
use ggml_flashrt::window::{edges, match_graph, Edge, Form, WINDOWS};
use std::collections::BTreeMap;
use support::machine::{assert_same_results, run_fused, run_fused_from, run_stock, Memory, FROM_MANY, MANY_TOKENS};
use support::model::{model, on_an_rpc_server, Family, Shape};

/// Sites by window, and the hand-offs between them, without the windows in `off`.
fn matched(record: &GraphRecord, thresholds: Thresholds, off: &[&str]) -> (BTreeMap<&'static str, usize>, Vec<Edge>) {
    let graph = OwnedGraph::new(record).unwrap();
    let on = |w: usize| !off.contains(&WINDOWS[w].name);
    let matched = match_graph(graph.graph(), graph.host(), thresholds, on);
    let mut counts = BTreeMap::new();
    for site in &matched.sites {
        *counts.entry(site.window().name).or_default() += 1;
    }
    for d in &matched.declined {
        println!("{} declines {}: {:?}", WINDOWS[d.window].name, d.node, d.decline);
    }
    (counts, edges(&matched, graph.graph(), graph.host()))
}

fn sites(shape: Shape) -> (BTreeMap<&'static str, usize>, usize, usize) {
    let (counts, edges) = matched(&model(shape), Thresholds::default(), &[]);
    let dropped = edges.iter().filter(|e| e.drop_f32).count();
    (counts, edges.len(), dropped)
}

/// The reasons why a window left its sites.
fn reasons(record: &GraphRecord, thresholds: Thresholds, window: &str, cc: i32) -> Vec<&'static str> {
    let mut graph = OwnedGraph::new(record).unwrap();
    graph.host_mut().cc = cc;
    let matched = match_graph(graph.graph(), graph.host(), thresholds, |_| true);
    let of_window = matched.declined.iter().filter(|d| WINDOWS[d.window].name == window);
    of_window.map(|d| d.decline.reason).collect()
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
        let matched = match_graph(graph.graph(), graph.host(), Thresholds::default(), |_| true);
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

/// Attention of many tokens with keys, values and a mask as the caller wants them.
struct Attention {
    b: GraphBuilder,
    q: TensorId,
    k: TensorId,
    v: TensorId,
    mask: TensorId,
    y: TensorId,
}

impl Attention {
    const TOKENS: i64 = 6;

    /// Heads of Q and K of `head_dim`, of V of `head_dim_v`; `n_kv` keys for each of the streams, `masks` of them masked apart.
    fn new([head_dim, head_dim_v]: [i64; 2], n_kv: i64, [streams, masks]: [i64; 2]) -> Attention {
        let (heads, heads_kv, n) = (4, 2, Attention::TOKENS);
        let mut b = GraphBuilder::new();
        let q = b.input("q", DType::F32, [head_dim, n, heads, streams]);
        let k = b.input("k", DType::F16, [head_dim, n_kv, heads_kv, streams]);
        let v = b.input("v", DType::F16, [head_dim_v, n_kv, heads_kv, streams]);
        let mask = b.input("mask", DType::F16, [n_kv, n, 1, masks]);
        let src = [q, k, v, mask].map(Some);
        let y = b.node("y", Op::FlashAttnExt, DType::F32, [head_dim_v, heads, n, streams], &src);
        b.tensor_mut(y).params = vec![support::model::f(0.3), 0, 0, 10];
        Attention { b, q, k, v, mask, y }
    }

    fn llama() -> Attention {
        Attention::new([64, 64], 300, [1, 1])
    }

    /// Why the window declines; when it fires, it must compute what the node does, also with a mask whose tiles are not all alike.
    fn verdict(self) -> Result<(), &'static str> {
        let mask = self.mask;
        let record = self.b.finish();
        let why = reasons(&record, FROM_MANY, "PREFILL_FA4", 90);
        if let Some(why) = why.first() {
            return Err(why);
        }
        let (counts, edges) = matched(&record, FROM_MANY, &[]);
        if counts.get("PREFILL_FA4") != Some(&1) {
            return Err("no match");
        }
        assert_eq!(edges.len(), 1, "the mask's tiles");
        let t = &record.tensors[mask];
        let mut memory = Memory::for_graph(&record, 3);
        let check = |memory: &Memory, what: &str| {
            let (stock, fused) = (run_stock(&record, memory), run_fused(&record, memory));
            assert_same_results(&record, &stock, &fused.memory, what);
        };
        check(&memory, "a bias for each key");
        if t.nb[1] == 2 * t.ne[0] as usize {
            let [keys, tokens, _, planes] = t.ne;
            let seen = |i: i64| match (i % keys, i / keys % tokens, i / keys / tokens) {
                // A token of the second stream that sees nothing.
                (_, 2, 1) => f64::NEG_INFINITY,
                (key, token, plane) if key <= 140 + 2 * token - 20 * plane => 0.0,
                _ => f64::NEG_INFINITY,
            };
            memory.set_f16s(t, (0..keys * tokens * planes).map(seen));
            check(&memory, "a causal mask");
        }
        Ok(())
    }
}

#[test]
fn many_tokens_attend_by_modules() {
    for (dims, n_kv, streams) in [
        ([64, 64], 300, [1, 1]),
        ([72, 72], 256, [1, 1]),
        ([128, 128], 130, [1, 1]),
        ([192, 128], 200, [1, 1]),
        ([256, 256], 300, [1, 1]),
        ([64, 64], 200, [3, 3]),
        ([64, 64], 200, [3, 1]),
    ] {
        assert_eq!(
            Attention::new(dims, n_kv, streams).verdict(),
            Ok(()),
            "{dims:?} {n_kv} {streams:?}"
        );
    }
    // Rows of heads, as a cache and a permuted query have them.
    let mut a = Attention::llama();
    for (id, n) in [(a.q, 4), (a.k, 2), (a.v, 2)] {
        let t = a.b.tensor_mut(id);
        (t.nb[1], t.nb[2]) = (n * t.nb[1], t.nb[1]);
        t.nb[3] = t.nb[1] * t.ne[1] as usize;
    }
    assert_eq!(a.verdict(), Ok(()));
    // Older hosts pad the tokens.
    let mut a = Attention::llama();
    let t = a.b.tensor_mut(a.mask);
    (t.ne[1], t.data) = (64, ELSEWHERE);
    (t.nb[2], t.nb[3]) = (64 * t.nb[1], 64 * t.nb[1]);
    assert_eq!(a.verdict(), Ok(()));
    // An odd number of keys, on an even number of values.
    let mut a = Attention::new([64, 64], 201, [1, 1]);
    let t = a.b.tensor_mut(a.mask);
    (t.nb[1], t.data) = (404, ELSEWHERE);
    (t.nb[2], t.nb[3]) = (6 * 404, 6 * 404);
    assert_eq!(a.verdict(), Ok(()));
}

#[test]
fn many_tokens_decline_what_no_module_computes() {
    type Change = fn(&mut TensorRecord);
    let of_y: [(Result<(), &str>, Change); 8] = [
        (Ok(()), |t| t.params[3] = 0),
        (Err("ALiBi"), |t| t.params[1] = 8f32.to_bits() as i32),
        (Err("softcap"), |t| t.params[2] = 2f32.to_bits() as i32),
        (Err("parameter"), |t| t.params.push(64)),
        (Err("scale"), |t| t.params[0] = 0),
        (Err("scale"), |t| t.params[0] = (-1f32).to_bits() as i32),
        (Err("no mask"), |t| t.src.truncate(3)),
        (Err("no match"), |t| t.src.push(t.src[0])),
    ];
    for (i, (expected, change)) in of_y.into_iter().enumerate() {
        let mut a = Attention::llama();
        change(a.b.tensor_mut(a.y));
        assert_eq!(a.verdict(), expected, "change {i} of y");
    }
    for dims in [[56, 56], [112, 112], [64, 128], [512, 512]] {
        assert_eq!(
            Attention::new(dims, 100, [1, 1]).verdict(),
            Err("head size"),
            "{dims:?}"
        );
    }
    for dtype in [DType::BF16, DType::F32, DType::Q8_0, DType::Q4_0] {
        for of_k in [true, false] {
            let mut a = Attention::llama();
            let id = if of_k { a.k } else { a.v };
            a.b.tensor_mut(id).dtype = dtype as i32;
            assert_eq!(a.verdict(), Err("type"), "{dtype:?}");
        }
    }
    // An odd number of keys whose last has no second of its pair, and rows on odd values.
    assert_eq!(Attention::new([64, 64], 201, [1, 1]).verdict(), Err("layout"));
    let mut a = Attention::llama();
    a.b.tensor_mut(a.mask).nb[1] += 2;
    assert_eq!(a.verdict(), Err("layout"));
    let mut a = Attention::llama();
    a.b.tensor_mut(a.k).nb[1] += 8;
    assert_eq!(a.verdict(), Err("layout"));
    // A mask for each head, for other keys, for too few tokens.
    for (dim, n) in [(2, 4), (0, 299), (1, 5)] {
        let mut a = Attention::llama();
        a.b.tensor_mut(a.mask).ne[dim] = n;
        assert_eq!(a.verdict(), Err("mask"));
    }
    let mut a = Attention::llama();
    a.b.tensor_mut(a.mask).dtype = DType::F32 as i32;
    assert_eq!(a.verdict(), Err("mask"));
    let record = Attention::llama().b.finish();
    assert_eq!(
        reasons(&record, Thresholds::default(), "PREFILL_FA4", 90),
        ["few tokens"]
    );
    assert_eq!(reasons(&record, FROM_MANY, "PREFILL_FA4", 89), ["GPU"]);
    assert_eq!(reasons(&record, FROM_MANY, "PREFILL_FA4", 120), ["kernel"]);
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
            let matched = match_graph(graph.graph(), graph.host(), Thresholds::default(), |_| true);
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

/// An RPC server's buffers are not marked as weights. What fires there is the same.
#[test]
fn leaves_that_the_graph_leaves_alone_are_as_good_as_weights() {
    for family in [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Gemma3] {
        let decode = Shape {
            n_layers: 3,
            ..Shape::small(family)
        };
        for record in [decode, prefill(family)].map(model) {
            assert_eq!(
                matched(&on_an_rpc_server(record.clone()), Thresholds::default(), &[]),
                matched(&record, Thresholds::default(), &[]),
                "{family:?}"
            );
        }
        for n_tokens in [2, MANY_TOKENS] {
            let record = on_an_rpc_server(model(Shape {
                n_tokens,
                n_kv: 24,
                ..Shape::tiny(family)
            }));
            let memory = Memory::for_graph(&record, 7);
            let fused = run_fused(&record, &memory);
            assert!(!fused.taken.is_empty(), "{family:?}");
            assert_same_results(
                &record,
                &run_stock(&record, &memory),
                &fused.memory,
                &format!("{family:?}, {n_tokens}"),
            );
        }
    }
}

/// `y = w @ x` and `z = rms_norm(y + h) * v` with w and v in ordinary buffers, after what `change` puts before them and to them.
fn without_weights_buffers(n_tokens: i64, change: impl FnOnce(&mut GraphBuilder, [TensorId; 2])) -> GraphRecord {
    let mut b = GraphBuilder::new();
    let ne = [64, n_tokens, 1, 1];
    let (x, h) = (b.input("x", DType::F32, ne), b.input("h", DType::F32, ne));
    let w = b.input("w", DType::F16, [64, 64, 1, 1]);
    let v = b.input("v", DType::F32, [64, 1, 1, 1]);
    change(&mut b, [w, v]);
    let mm = b.node("mm", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
    let y = b.node("y", Op::Add, DType::F32, ne, &[Some(mm), Some(h)]);
    let n = b.node("n", Op::RmsNorm, DType::F32, ne, &[Some(y)]);
    b.node("z", Op::Mul, DType::F32, ne, &[Some(n), Some(v)]);
    let mut record = b.finish();
    record.uid = 0;
    record
}

#[test]
fn leaves_that_something_may_write_are_no_weights() {
    type Change = fn(&mut GraphBuilder, TensorId);
    /// A node whose result starts `offset` bytes after the start of `over`.
    fn result_at(b: &mut GraphBuilder, over: TensorId, offset: i64) {
        let from = b.input("from", DType::F32, [16, 1, 1, 1]);
        let node = b.node("other", Op::Scale, DType::F32, [16, 1, 1, 1], &[Some(from)]);
        b.tensor_mut(node).data = (b.tensor_mut(over).data as i64 + offset) as u64;
    }
    fn end(b: &mut GraphBuilder, of: TensorId) -> i64 {
        let t = b.tensor_mut(of);
        t.ne[1] * t.nb[1] as i64
    }
    let cases: [(&str, bool, Change); 9] = [
        ("nothing", true, |_, _| {}),
        ("an input", false, |b, t| b.tensor_mut(t).flags |= FLAG_INPUT),
        ("a view that is read", false, |b, t| {
            let view = b.view_node("view", Op::View, t, [16, 1, 1, 1], 0, &[Some(t)]);
            b.node("reader", Op::Scale, DType::F32, [16, 1, 1, 1], &[Some(view)]);
        }),
        ("a store, as into a cache", false, |b, t| {
            let rows = b.input("rows", DType::I64, [1, 1, 1, 1]);
            let ne = b.tensor_mut(t).ne;
            let from = b.input("from", DType::F32, [64, 1, 1, 1]);
            b.view_node("store", Op::SetRows, t, ne, 0, &[Some(from), Some(rows), Some(t)]);
        }),
        ("a result over its start", false, |b, t| result_at(b, t, -60)),
        ("a result over its end", false, |b, t| {
            let end = end(b, t);
            result_at(b, t, end - 4);
        }),
        ("a result just before", true, |b, t| result_at(b, t, -64)),
        ("a result just behind", true, |b, t| {
            let end = end(b, t);
            result_at(b, t, end);
        }),
        ("a result in its place", false, |b, t| {
            b.tensor_mut(t).code = Op::Other as u8;
        }),
    ];
    for (window, tensor, n_tokens) in [("GEMV_RES", 0, 2), ("MM_PREFILL", 0, MANY_TOKENS), ("ADD_NORM", 1, 2)] {
        for (what, fires, change) in &cases {
            let record = without_weights_buffers(n_tokens, |b, tensors| change(b, tensors[tensor]));
            let (counts, _) = matched(&record, FROM_MANY, &[]);
            let fired = counts.get(window).copied().unwrap_or(0);
            let reasons = reasons(&record, FROM_MANY, window, 90);
            let expected = if *fires { (1, vec![]) } else { (0, vec!["not a weight"]) };
            assert_eq!((fired, reasons), expected, "{window}, {what}");
        }
    }
}

const PREFILL: i64 = 512;

fn prefill(family: Family) -> Shape {
    Shape {
        n_layers: 3,
        n_tokens: PREFILL,
        n_kv: 128,
        n_head: 16,
        ..Shape::small(family)
    }
}

/// Additions stay with the norms that follow them: their hand-off is worth more than an epilogue.
#[test]
fn llama_prefills_in_eight_windows_a_layer() {
    let (counts, edges) = matched(&model(prefill(Family::Llama)), Thresholds::default(), &[]);
    // Q, K, V, attention's output and down of each layer, and the output matrix.
    let expected = [
        ("ADD_NORM", 6),
        ("GEGLU_FFN", 3),
        ("MM_PREFILL", 3 * 5 + 1),
        ("PREFILL_FA4", 3),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
    // All layers have one mask.
    let (edges, tiles): (Vec<Edge>, Vec<Edge>) = edges.into_iter().partition(|e| e.form == Form::H16);
    assert!(tiles.len() == 1 && tiles[0].consumers.len() == 3 && tiles[0].producer.is_none());
    // Norms hand over to gate and up, to the next Q, K and V, and to the output matrix.
    let (made, converted): (Vec<&Edge>, Vec<&Edge>) = edges.iter().partition(|e| e.producer.is_some());
    assert!(made.len() == 6 && made.iter().all(|e| e.drop_f32));
    // The first norm is stock's; then each layer's attention and each GLU.
    assert!(converted.len() == 1 + 3 + 3 && converted.iter().all(|e| !e.drop_f32));
    let readers: usize = edges.iter().map(|e| e.consumers.len()).sum();
    assert_eq!(
        readers,
        3 + 3 * 5 + 1,
        "each mat-mul has one input, gate and up are one"
    );
}

#[test]
fn without_the_norm_window_the_product_takes_the_addition() {
    let (counts, edges) = matched(&model(prefill(Family::Llama)), Thresholds::default(), &["ADD_NORM"]);
    let expected = [
        ("GEGLU_FFN", 3),
        ("MM_PREFILL", 3 * 3 + 1),
        ("MM_RES", 6),
        ("PREFILL_FA4", 3),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
    assert!(edges.iter().all(|e| e.producer.is_none() && !e.drop_f32));
}

#[test]
fn gemma_prefills_with_sandwich_norms() {
    let (counts, edges) = matched(&model(prefill(Family::Gemma3)), Thresholds::default(), &[]);
    let expected = [
        ("GEGLU_FFN", 3),
        ("MM_PREFILL", 3 * 5 + 1),
        ("PREFILL_FA4", 3),
        ("SANDWICH_NORM", 6),
    ];
    assert_eq!(counts, BTreeMap::from(expected));
    assert_eq!(edges.iter().filter(|e| e.drop_f32).count(), 6);
}

#[test]
fn biases_are_part_of_the_product() {
    let (counts, _) = matched(&model(prefill(Family::Qwen2)), Thresholds::default(), &[]);
    assert_eq!((counts["MM_RES"], counts["MM_PREFILL"]), (9, 3 * 2 + 1));
}

#[test]
fn prefill_takes_every_weight_type_of_its_kernel_and_no_other() {
    for dtype in DType::ALL {
        let shape = Shape {
            types: [*dtype; 4],
            ..prefill(Family::Llama)
        };
        let (counts, _) = matched(&model(shape), FROM_MANY, &[]);
        let known = MM_WEIGHT_TYPES.contains(dtype);
        assert_eq!(counts.contains_key("GEGLU_FFN"), known, "{dtype:?}");
        // The output matrix is Q8_0.
        assert_eq!(counts["MM_PREFILL"], if known { 16 } else { 1 }, "{dtype:?}");
    }
}

#[test]
fn thresholds_decide_from_how_many_tokens_on() {
    let count = |n_tokens: i64, thresholds: Thresholds| {
        let shape = Shape {
            n_tokens,
            ..prefill(Family::Llama)
        };
        matched(&model(shape), thresholds, &[]).0.get("MM_PREFILL").copied()
    };
    assert_eq!(count(PREFILL - 1, Thresholds::default()), None);
    assert_eq!(count(PREFILL, Thresholds::default()), Some(16));
    assert_eq!(count(MANY_TOKENS, FROM_MANY), Some(16));
    assert_eq!(count(MANY_TOKENS - 1, FROM_MANY), None, "mat-vecs come first");
    let record = model(Shape {
        n_tokens: PREFILL - 1,
        ..prefill(Family::Llama)
    });
    let why = reasons(&record, Thresholds::default(), "MM_PREFILL", 90);
    assert!(!why.is_empty() && why.iter().all(|r| *r == "few tokens"), "{why:?}");
}

/// The kernels are Hopper's alone.
#[test]
fn other_gpus_keep_stocks_mat_muls() {
    let record = model(prefill(Family::Llama));
    for (cc, reason) in [(80, "GPU"), (89, "GPU"), (100, "kernel"), (120, "kernel")] {
        for window in ["MM_PREFILL", "GEGLU_FFN"] {
            let why = reasons(&record, FROM_MANY, window, cc);
            assert!(!why.is_empty() && why.iter().all(|r| *r == reason), "sm_{cc}: {why:?}");
        }
    }
}

/// Beyond everything that a small graph holds.
const ELSEWHERE: u64 = 1 << 22;

/// `y = w @ x + res`, each part as the caller wants it.
struct Product {
    b: GraphBuilder,
    w: TensorId,
    x: TensorId,
    res: TensorId,
    y: TensorId,
}

impl Product {
    const ROWS: i64 = 32;

    /// `x` of `k` values, `n` tokens and a batch.
    fn new(k: i64, n: i64, batch: i64) -> Product {
        let mut b = GraphBuilder::new();
        let x = b.input("x", DType::F32, [k, n, batch, 1]);
        let w = b.weight("w", DType::F16, [k, Product::ROWS, 1, 1]);
        let ne = [Product::ROWS, n, batch, 1];
        let from = b.input("from", DType::F32, ne);
        let res = b.node("res", Op::Scale, DType::F32, ne, &[Some(from)]);
        b.tensor_mut(res).params = vec![support::model::f(2.0)];
        let mm = b.node("mm", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
        let y = b.node("y", Op::Add, DType::F32, ne, &[Some(mm), Some(res)]);
        Product { b, w, x, res, y }
    }

    /// Which windows take it; when any does, it must compute what the nodes do.
    fn windows(self) -> Vec<&'static str> {
        let record = self.b.finish();
        let (counts, _) = matched(&record, FROM_MANY, &[]);
        let memory = Memory::for_graph(&record, 3);
        let (stock, fused) = (run_stock(&record, &memory), run_fused(&record, &memory));
        assert_same_results(&record, &stock, &fused.memory, "product");
        counts.into_keys().collect()
    }
}

#[test]
fn a_product_takes_its_residual() {
    assert_eq!(Product::new(64, 6, 1).windows(), ["MM_RES"]);
    assert_eq!(Product::new(192, 9, 1).windows(), ["MM_RES"]);
}

/// Tokens of a batch are tokens, and count as such.
#[test]
fn a_batch_is_more_tokens() {
    assert_eq!(Product::new(64, 3, 2).windows(), ["MM_RES"]);
    assert_eq!(Product::new(64, 1, 6).windows(), ["MM_RES"]);
    assert_eq!(Product::new(64, 2, 2).windows(), [""; 0], "four of them are too few");
}

#[test]
fn rows_that_are_padded_are_read_where_they_lie() {
    for part in ["x", "res", "y"] {
        let mut p = Product::new(64, 6, 1);
        let id = match part {
            "x" => p.x,
            "res" => p.res,
            _ => p.y,
        };
        let t = p.b.tensor_mut(id);
        t.nb[1] += 32;
        (t.nb[2], t.nb[3]) = (t.nb[1] * 6, t.nb[1] * 6);
        t.data = ELSEWHERE;
        assert_eq!(p.windows(), ["MM_RES"], "{part}");
    }
}

#[test]
fn what_the_kernel_cannot_read_is_left() {
    // No whole pieces of 64 values.
    assert_eq!(Product::new(96, 6, 1).windows(), [""; 0]);
    // A batch whose parts lie apart.
    let mut p = Product::new(64, 3, 2);
    let t = p.b.tensor_mut(p.x);
    t.nb[2] += 64;
    t.nb[3] = 2 * t.nb[2];
    t.data = ELSEWHERE;
    assert_eq!(p.windows(), [""; 0]);
    // Rows of weights apart.
    let mut p = Product::new(64, 6, 1);
    let t = p.b.tensor_mut(p.w);
    t.nb[1] += 64;
    (t.nb[2], t.nb[3]) = (t.nb[1] * 32, t.nb[1] * 32);
    t.data = ELSEWHERE;
    assert_eq!(p.windows(), [""; 0]);
}

/// B03: the output over an input.
#[test]
fn the_output_may_lie_over_the_input_and_exactly_over_the_residual() {
    for (over, offset, windows) in [
        ("res", 0, &["MM_RES"][..]),
        // The product alone is written elsewhere.
        ("res", 64, &["MM_PREFILL"]),
        ("x", 0, &["MM_RES"]),
        ("x", 128, &["MM_RES"]),
    ] {
        let mut p = Product::new(64, 6, 1);
        let onto = if over == "res" { p.res } else { p.x };
        let address = p.b.tensor_mut(onto).data + offset;
        p.b.tensor_mut(p.y).data = address;
        assert_eq!(p.windows(), windows, "{over} + {offset}");
    }
}

/// A residual that is a leaf could be taken for a bias, and a bias for a residual: shapes tell them apart.
#[test]
fn a_bias_alone_is_a_bias() {
    for n_tokens in [5, 8] {
        let mut b = GraphBuilder::new();
        let x = b.input("x", DType::F32, [64, n_tokens, 1, 1]);
        let w = b.weight("w", DType::Q8_0, [64, 32, 1, 1]);
        let bias = b.weight("bias", DType::F32, [32, 1, 1, 1]);
        let res = b.input("res", DType::F32, [32, n_tokens, 1, 1]);
        let ne = [32, n_tokens, 1, 1];
        let mm = b.node("mm", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
        let y = b.node("y", Op::Add, DType::F32, ne, &[Some(mm), Some(bias)]);
        let mm2 = b.node("mm2", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
        b.node("y2", Op::Add, DType::F32, ne, &[Some(mm2), Some(res)]);
        b.tensor_mut(y).flags |= ggml_flashrt::graph::FLAG_OUTPUT;
        let record = b.finish();
        let (counts, edges) = matched(&record, FROM_MANY, &[]);
        assert_eq!(counts, BTreeMap::from([("MM_RES", 2)]));
        assert_eq!(edges.len(), 1, "one input, one conversion");
        let memory = Memory::for_graph(&record, 3);
        let (stock, fused) = (run_stock(&record, &memory), run_fused(&record, &memory));
        assert_same_results(&record, &stock, &fused.memory, "bias");
    }
}

#[test]
fn fused_prefills_compute_what_the_nodes_do() {
    for family in [
        Family::Llama,
        Family::Qwen2,
        Family::Qwen3,
        Family::Qwen3Moe,
        Family::Gemma3,
    ] {
        for n_tokens in [MANY_TOKENS, 11] {
            let record = model(Shape {
                n_tokens,
                n_layers: 2,
                n_kv: 40,
                ..Shape::tiny(family)
            });
            let memory = Memory::for_graph(&record, 7);
            let stock = run_stock(&record, &memory);
            let fused = run_fused(&record, &memory);
            assert!(fused.taken.len() > 12, "{family:?}");
            assert_same_results(&record, &stock, &fused.memory, &format!("{family:?} {n_tokens}"));
        }
    }
}

/// An operation in place between two readers of a tensor: the second reads what it left, so the hand-off of the first is stale.
#[test]
fn a_hand_off_ends_where_its_tensor_is_changed() {
    let mut b = GraphBuilder::new();
    let ne = [64, 6, 1, 1];
    let from = b.input("from", DType::F32, ne);
    let x = b.node("x", Op::Scale, DType::F32, ne, &[Some(from)]);
    b.tensor_mut(x).params = vec![support::model::f(3.0)];
    let w = b.weight("w", DType::F16, [64, 64, 1, 1]);
    let first = b.node("first", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
    let second = b.node("second", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
    let halved = b.view_node("halved", Op::Scale, x, ne, 0, &[Some(x)]);
    b.tensor_mut(halved).params = vec![support::model::f(0.5)];
    let third = b.node("third", Op::MulMat, DType::F32, ne, &[Some(w), Some(x)]);
    for id in [first, second, third] {
        b.tensor_mut(id).flags |= ggml_flashrt::graph::FLAG_OUTPUT;
    }
    let record = b.finish();
    let (counts, edges) = matched(&record, FROM_MANY, &[]);
    assert_eq!(counts, BTreeMap::from([("MM_PREFILL", 3)]));
    let readers: Vec<usize> = edges.iter().map(|e| e.consumers.len()).collect();
    assert_eq!(readers, [2, 1]);
    let memory = Memory::for_graph(&record, 3);
    let (stock, fused) = (run_stock(&record, &memory), run_fused(&record, &memory));
    assert_same_results(&record, &stock, &fused.memory, "in place");
}

fn moe_prefill(n_tokens: i64) -> Shape {
    Shape {
        n_layers: 3,
        n_tokens,
        n_kv: 256,
        ..Shape::small(Family::Qwen3Moe)
    }
}

#[test]
fn experts_prefill_in_two_windows_a_layer() {
    let record = model(moe_prefill(MOE_MIN_TOKENS));
    let (counts, _) = matched(&record, Thresholds::default(), &[]);
    assert_eq!((counts["MOE_FFN"], counts["MOE_PREFILL"]), (3, 3));
    let (counts, _) = matched(&record, Thresholds::default(), &["MOE_FFN"]);
    assert_eq!(counts["MOE_PREFILL"], 9, "gate, up and down");
    let (counts, _) = matched(&on_an_rpc_server(record), Thresholds::default(), &[]);
    assert_eq!((counts["MOE_FFN"], counts["MOE_PREFILL"]), (3, 3));
}

/// cuBLAS is as fast with F16, and BF16 was not measured.
#[test]
fn by_default_half_precision_weights_are_left_to_stock() {
    for dtype in [DType::F16, DType::BF16] {
        let record = model(Shape {
            types: [dtype; 4],
            ..prefill(Family::Llama)
        });
        let (counts, _) = matched(&record, Thresholds::default(), &[]);
        assert_eq!(
            (counts.get("GEGLU_FFN"), counts["MM_PREFILL"]),
            (None, 1),
            "the output matrix is Q8_0"
        );
        assert!(reasons(&record, Thresholds::default(), "GEGLU_FFN", 90).contains(&"few tokens"));
    }
}

#[test]
fn experts_of_every_weight_type_of_the_kernel_fire_and_no_other() {
    for dtype in DType::ALL {
        let shape = Shape {
            types: [*dtype; 4],
            ..moe_prefill(MOE_MIN_TOKENS)
        };
        let (counts, _) = matched(&model(shape), FROM_MANY, &[]);
        let expected = MM_WEIGHT_TYPES.contains(dtype).then_some(3);
        for window in ["MOE_FFN", "MOE_PREFILL"] {
            assert_eq!(counts.get(window).copied(), expected, "{window}, {dtype:?}");
        }
    }
}

/// B08: a window for experts that was wrong beyond one token. With few tokens stock runs; where they are forced on, each number of
/// them gives what the nodes do.
#[test]
fn few_tokens_with_experts_are_left_to_stock() {
    let windows = ["MOE_FFN", "MOE_PREFILL"];
    for n_tokens in (1..=9).chain([MOE_MIN_TOKENS - 1]) {
        let record = model(moe_prefill(n_tokens));
        let (counts, _) = matched(&record, Thresholds::default(), &[]);
        assert!(windows.iter().all(|w| !counts.contains_key(w)), "{n_tokens} tokens");
        // Without the other MOE_PREFILL looks at all three products of a layer.
        for (window, products) in windows.into_iter().zip([3, 9]) {
            let why = reasons(&record, Thresholds::default(), window, 90);
            assert_eq!(why, vec!["few tokens"; products], "{window}, {n_tokens} tokens");
        }
    }
    let always = Thresholds {
        mm_min_tokens: Some(0),
        ..Thresholds::default()
    };
    for n_tokens in 1..=9 {
        let record = model(Shape {
            n_tokens,
            ..Shape::tiny(Family::Qwen3Moe)
        });
        let (counts, _) = matched(&record, always, &[]);
        assert_eq!((counts["MOE_FFN"], counts["MOE_PREFILL"]), (1, 1), "{n_tokens} tokens");
        let memory = Memory::for_graph(&record, 7);
        let fused = run_fused_from(always, &record, &memory);
        let stock = run_stock(&record, &memory);
        assert_same_results(&record, &stock, &fused.memory, &format!("{n_tokens} tokens"));
    }
}

/// `y = w[ids] @ x` with four experts.
struct Routed {
    b: GraphBuilder,
    w: TensorId,
    x: TensorId,
    ids: TensorId,
    y: TensorId,
}

impl Routed {
    const ROWS: i64 = 32;
    const TOKENS: i64 = 6;

    /// `x` of `k` values in `slots` rows for each token, of which each takes `n_used` experts.
    fn new(k: i64, n_used: i64, slots: i64, n_experts: i64) -> Routed {
        let mut b = GraphBuilder::new();
        let x = b.input("x", DType::F32, [k, slots, Routed::TOKENS, 1]);
        let ids = b.input("experts", DType::I32, [n_used, Routed::TOKENS, 1, 1]);
        let w = b.weight("w", DType::F16, [k, Routed::ROWS, n_experts, 1]);
        let ne = [Routed::ROWS, n_used, Routed::TOKENS, 1];
        let y = b.node("y", Op::MulMatId, DType::F32, ne, &[Some(w), Some(x), Some(ids)]);
        Routed { b, w, x, ids, y }
    }

    /// Strides from dimension `from` on longer by `bytes`, at an address of its own.
    fn stretch(&mut self, id: TensorId, from: usize, bytes: usize) {
        let t = self.b.tensor_mut(id);
        t.nb[from] += bytes;
        for d in from + 1..4 {
            t.nb[d] = t.nb[d - 1] * t.ne[d - 1] as usize;
        }
        t.data = ELSEWHERE;
    }

    /// Does it fire, and if not, why? When it does, it must compute what the node does.
    fn verdict(self) -> Result<(), &'static str> {
        let record = self.b.finish();
        let (counts, _) = matched(&record, FROM_MANY, &[]);
        if counts.contains_key("MOE_PREFILL") {
            let memory = Memory::for_graph(&record, 3);
            let (stock, fused) = (run_stock(&record, &memory), run_fused(&record, &memory));
            assert_same_results(&record, &stock, &fused.memory, "routed product");
            return Ok(());
        }
        Err(reasons(&record, FROM_MANY, "MOE_PREFILL", 90)[0])
    }
}

#[test]
fn each_slot_may_have_its_own_input_or_all_the_same() {
    for k in [64, 192] {
        for (n_used, slots) in [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)] {
            for n_experts in [1, 3, 4] {
                // With fewer than four experts some ids are none.
                let routed = Routed::new(k, n_used, slots, n_experts);
                assert_eq!(
                    routed.verdict(),
                    Ok(()),
                    "{k}, {slots} of {n_used}, {n_experts} experts"
                );
            }
        }
    }
}

#[test]
fn routed_products_decline_what_the_kernel_cannot_read() {
    type Change = fn(&mut Routed);
    let cases: [(&str, Result<(), &str>, Change); 18] = [
        ("as it is", Ok(()), |_| {}),
        ("another precision of sums", Ok(()), |r| {
            r.b.tensor_mut(r.y).params = vec![10]
        }),
        ("ids of more columns", Ok(()), |r| {
            let ids = r.ids;
            r.stretch(ids, 1, 4);
        }),
        ("inputs apart", Ok(()), |r| {
            let x = r.x;
            r.stretch(x, 1, 16);
        }),
        ("results apart", Ok(()), |r| {
            let y = r.y;
            r.stretch(y, 1, 4);
        }),
        ("a hint", Err("parameter"), |r| r.b.tensor_mut(r.y).params = vec![0, 1]),
        ("f32 activations", Err("parameter"), |r| {
            r.b.tensor_mut(r.y).params = vec![0, 0, 0, 10];
        }),
        ("weights that may change", Err("not a weight"), |r| {
            let w = r.b.tensor_mut(r.w);
            (w.buffer, w.flags) = (BufferKind::Own, FLAG_INPUT);
        }),
        ("64-bit ids", Err("type"), |r| {
            let ids = r.b.tensor_mut(r.ids);
            (ids.dtype, ids.nb) = (DType::I64 as i32, ids.nb.map(|n| 2 * n));
        }),
        ("f16 activations", Err("type"), |r| {
            let x = r.b.tensor_mut(r.x);
            (x.dtype, x.nb) = (DType::F16 as i32, x.nb.map(|n| n / 2));
        }),
        ("ids apart", Err("layout"), |r| {
            let ids = r.ids;
            r.stretch(ids, 0, 4);
        }),
        ("experts apart", Err("layout"), |r| {
            let w = r.w;
            r.stretch(w, 2, 64);
        }),
        ("rows of experts apart", Err("layout"), |r| {
            let w = r.w;
            r.stretch(w, 1, 64);
        }),
        ("tokens of the input farther apart than slots", Err("layout"), |r| {
            let x = r.x;
            r.stretch(x, 2, 64);
        }),
        ("tokens of the result farther apart than slots", Err("layout"), |r| {
            let y = r.y;
            r.stretch(y, 2, 64);
        }),
        ("an input not on 16 bytes", Err("layout"), |r| {
            r.b.tensor_mut(r.x).data += 4
        }),
        ("rows of input not on 16 bytes", Err("layout"), |r| {
            let x = r.x;
            r.stretch(x, 1, 4);
        }),
        ("weights not on 16 bytes", Err("layout"), |r| {
            r.b.tensor_mut(r.w).data += 4
        }),
    ];
    for (what, verdict, change) in cases {
        let mut routed = Routed::new(64, 2, 2, 4);
        change(&mut routed);
        assert_eq!(routed.verdict(), verdict, "{what}");
    }
    for (what, routed) in [
        ("no whole pieces of 64", Routed::new(96, 2, 1, 4)),
        ("inputs for pairs of slots", Routed::new(64, 4, 2, 4)),
    ] {
        assert_eq!(routed.verdict(), Err("shape"), "{what}");
    }
    let most = MOE_MAX_EXPERTS as i64;
    let why = |n_experts: i64| {
        let record = Routed::new(64, 2, 1, n_experts).b.finish();
        reasons(&record, FROM_MANY, "MOE_PREFILL", 90)
    };
    assert_eq!((why(most), why(most + 1)), (vec![], vec!["shape"]));
}

#[test]
fn other_gpus_keep_stocks_experts() {
    let record = model(moe_prefill(MOE_MIN_TOKENS));
    for (cc, reason) in [(80, "GPU"), (89, "GPU"), (100, "kernel"), (120, "kernel")] {
        for (window, products) in [("MOE_FFN", 3), ("MOE_PREFILL", 9)] {
            assert_eq!(
                reasons(&record, FROM_MANY, window, cc),
                vec![reason; products],
                "sm_{cc}"
            );
        }
    }
}

/// B03: ids and input are read for the last time before anything is written.
#[test]
fn the_output_of_experts_may_lie_over_ids_and_input() {
    for over_ids in [false, true] {
        for offset in [-256, -64, 0, 64] {
            let mut r = Routed::new(64, 2, 1, 4);
            let onto = if over_ids { r.ids } else { r.x };
            // Both lie far from anything else.
            let own = r.b.tensor_mut(onto);
            own.data = ELSEWHERE;
            r.b.tensor_mut(r.y).data = (ELSEWHERE as i64 + offset) as u64;
            assert_eq!(r.verdict(), Ok(()), "over ids: {over_ids}, at {offset}");
        }
    }
    let mut r = Routed::new(64, 2, 1, 4);
    let w = r.b.tensor_mut(r.w).data;
    r.b.tensor_mut(r.y).data = w;
    assert_eq!(r.verdict(), Err("output overlaps an input"));
}

/// B32: NaN or ties in the router's logits made ids that are no expert, or the same twice. Nobody computes a row of the first.
#[test]
fn ids_that_are_no_expert_leave_their_rows_as_they_were() {
    let record = Routed::new(64, 3, 1, 4).b.finish();
    let ids = &record.tensors[record.nodes[0]].src[2].unwrap();
    let y = &record.tensors[record.nodes[0]];
    let mut memory = Memory::for_graph(&record, 3);
    let none = [-1, 4, i32::MAX, i32::MIN];
    // Repeated within a token, and no expert in its last slot.
    let chosen: Vec<i32> = (0..3 * Routed::TOKENS as i32)
        .map(|i| {
            if i % 3 == 2 {
                none[(i / 3) as usize % 4]
            } else {
                i / 3 % 4
            }
        })
        .collect();
    memory.set_i32s(&record.tensors[*ids], &chosen);
    let fused = run_fused(&record, &memory);
    assert_eq!(fused.taken, [(0, 1)]);
    assert_same_results(&record, &run_stock(&record, &memory), &fused.memory, "ids");
    let (before, after) = (memory.values(y), fused.memory.values(y));
    for (pair, rows) in before
        .chunks(Routed::ROWS as usize)
        .zip(after.chunks(Routed::ROWS as usize))
        .enumerate()
    {
        assert_eq!(rows.0 == rows.1, pair % 3 == 2, "pair {pair}");
    }
}

/// Gate and up as one matrix, or with something between product and unit: the products alone are taken.
#[test]
fn units_that_do_not_follow_two_products_are_stocks() {
    let ne = [32, 2, 6, 1];
    let mut b = GraphBuilder::new();
    let x = b.input("x", DType::F32, [64, 1, 6, 1]);
    let ids = b.input("experts", DType::I32, [2, 6, 1, 1]);
    let merged = b.weight("gate_up", DType::Q8_0, [64, 64, 4, 1]);
    let operands = [Some(merged), Some(x), Some(ids)];
    let gate_up = b.node("both", Op::MulMatId, DType::F32, [64, 2, 6, 1], &operands);
    let nb = b.tensor_mut(gate_up).nb;
    let halves = [0, 128].map(|offset| {
        let half = b.view_node("half", Op::View, gate_up, ne, offset, &[Some(gate_up)]);
        b.tensor_mut(half).nb = nb;
        Some(half)
    });
    let unit = b.node("unit", Op::Glu, DType::F32, ne, &halves);
    b.tensor_mut(unit).params = vec![2];
    let [gate, up] = ["gate", "up"].map(|name| {
        let w = b.weight(name, DType::Q8_0, [64, 32, 4, 1]);
        b.node(name, Op::MulMatId, DType::F32, ne, &[Some(w), Some(x), Some(ids)])
    });
    let scaled = b.node("scaled", Op::Scale, DType::F32, ne, &[Some(up)]);
    b.tensor_mut(scaled).params = vec![support::model::f(2.0)];
    let second = b.node("second", Op::Glu, DType::F32, ne, &[Some(gate), Some(scaled)]);
    b.tensor_mut(second).params = vec![1];
    let record = b.finish();
    let (counts, edges) = matched(&record, FROM_MANY, &[]);
    assert_eq!(counts, BTreeMap::from([("MOE_PREFILL", 3)]));
    assert!(edges.is_empty(), "rows in the order of experts are nobody else's");
    let memory = Memory::for_graph(&record, 3);
    let (stock, fused) = (run_stock(&record, &memory), run_fused(&record, &memory));
    assert_same_results(&record, &stock, &fused.memory, "units");
}

/// The unit's own guard: kind, halves, and what gate and up have in common.
#[test]
fn units_of_experts_decline_what_their_kernel_does_not_compute() {
    type Change = fn(&mut TensorRecord);
    let base = model(Shape {
        n_tokens: MANY_TOKENS,
        ..Shape::tiny(Family::Qwen3Moe)
    });
    let cases: [(&str, &str, &[&str], Change); 7] = [
        ("GeGLU", "ffn_moe_swiglu-0", &[], |t| t.params[0] = 1),
        ("a kind with limits", "ffn_moe_swiglu-0", &["activation"], |t| {
            t.params[0] = 3
        }),
        ("halves exchanged", "ffn_moe_swiglu-0", &["parameter"], |t| {
            t.params.push(1)
        }),
        ("a hint", "ffn_moe_up-0", &["parameter"], |t| t.params = vec![0, 1]),
        ("f32 activations", "ffn_moe_gate-0", &["parameter"], |t| {
            t.params = vec![0, 0, 0, 10];
        }),
        ("another type of up", "ffn_moe_up-0.weight", &["shape"], |t| {
            t.dtype = DType::F16 as i32;
            t.nb = [2, 128, 128 * 128, 128 * 128 * 4];
            t.data = ELSEWHERE;
        }),
        (
            "a graph output",
            "ffn_moe_gate-0",
            &["interior is a graph output"],
            |t| {
                t.flags |= ggml_flashrt::graph::FLAG_OUTPUT;
            },
        ),
    ];
    for (what, name, why, change) in cases {
        let mut record = base.clone();
        let t = record.tensors.iter_mut().find(|t| t.name == name).unwrap();
        change(t);
        assert_eq!(reasons(&record, FROM_MANY, "MOE_FFN", 90), why, "{what}");
        let (counts, _) = matched(&record, FROM_MANY, &[]);
        assert_eq!(counts.contains_key("MOE_FFN"), why.is_empty(), "{what}");
    }
}
