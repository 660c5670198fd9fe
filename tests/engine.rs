//! The engine around the windows: plans, switches, failures, order, memory.

mod support;

use ggml_flashrt::abi::host::{FLASHRT_HOST_CAPTURING, FLASHRT_HOST_FUSION_OFF, FLASHRT_HOST_PDL};
use ggml_flashrt::graph::dump::GraphRecord;
use ggml_flashrt::graph::{GraphRef, HostView, Op, OwnedGraph, FLAG_INPUT};
use ggml_flashrt::window::engine::{Engine, EvalStatus};
use ggml_flashrt::window::settings::Settings;
use ggml_flashrt::window::{KernelCall, WINDOWS};
use support::machine::{difference, run_asking, run_stock, run_with, FakeDevice, Memory, FROM_MANY, MANY_TOKENS};
use support::model::{model, on_an_rpc_server, Family, Shape};

struct Bench {
    record: GraphRecord,
    owned: OwnedGraph,
    memory: Memory,
    device: FakeDevice,
    engine: Engine,
}

fn bench_with(record: GraphRecord, vars: &[(&str, &str)], change: impl FnOnce(&mut FakeDevice)) -> Bench {
    let memory = Memory::for_graph(&record, 5);
    let mut device = FakeDevice::new(memory.clone());
    change(&mut device);
    let mut settings = Settings::from_vars(vars.iter().map(|(k, v)| (k.to_string(), v.to_string())));
    settings.thresholds = FROM_MANY;
    bench_of(record, memory, device, settings)
}

fn bench_of(record: GraphRecord, memory: Memory, device: FakeDevice, settings: Settings) -> Bench {
    let engine = Engine::new(settings, Box::new(device.clone()));
    Bench {
        owned: OwnedGraph::new(&record).unwrap(),
        record,
        memory,
        device,
        engine,
    }
}

fn bench() -> Bench {
    bench_with(
        model(Shape {
            n_tokens: 2,
            ..Shape::tiny(Family::Llama)
        }),
        &[],
        |_| {},
    )
}

/// A prompt instead of a few tokens.
fn prefill(family: Family) -> GraphRecord {
    model(Shape {
        n_tokens: MANY_TOKENS,
        n_kv: 24,
        n_layers: 2,
        ..Shape::tiny(family)
    })
}

fn prefill_bench(vars: &[(&str, &str)]) -> Bench {
    bench_with(prefill(Family::Llama), vars, |_| {})
}

fn windows_of(bench: &Bench) -> Vec<&'static str> {
    let stats = bench.engine.stats();
    WINDOWS
        .iter()
        .zip(&stats.windows)
        .filter(|(_, c)| c.fired > 0)
        .map(|(w, _)| w.name)
        .collect()
}

/// One evaluation through the hook; what it left must be what the nodes give.
fn evaluate(bench: &Bench) -> usize {
    *bench.device.memory.lock().unwrap() = bench.memory.clone();
    let run = run_with(&bench.engine, &bench.device, &bench.owned, &bench.record);
    assert_eq!(run.status, EvalStatus::Ok);
    let stock = run_stock(&bench.record, &bench.memory);
    assert_eq!(difference(&bench.record, &stock, &run.memory), None);
    run.taken.len()
}

#[test]
fn each_switch_removes_its_window_alone_and_results_stay() {
    let decode = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Gemma3)
    });
    for record in [
        decode,
        prefill(Family::Gemma3),
        prefill(Family::Qwen2),
        prefill(Family::Qwen3Moe),
    ] {
        let all = bench_with(record.clone(), &[], |_| {});
        evaluate(&all);
        for name in windows_of(&all) {
            let switch = WINDOWS.iter().find(|w| w.name == name).unwrap().switch;
            let one_off = bench_with(record.clone(), &[(switch, "1")], |_| {});
            evaluate(&one_off);
            assert!(!windows_of(&one_off).contains(&name), "{switch} had no effect");
        }
    }
}

#[test]
fn the_master_switch_removes_everything() {
    for name in ["GGML_FLASHRT_DISABLE", "GGML_CUDA_FLASHRT_DISABLE"] {
        let b = bench_with(model(Shape::tiny(Family::Llama)), &[(name, "1")], |_| {});
        assert_eq!(evaluate(&b), 0);
        assert!(b.device.launches.lock().unwrap().is_empty());
        assert!(b.engine.stats_json().contains("GGML_FLASHRT_DISABLE"));
    }
}

#[test]
fn fusion_off_in_the_host_is_off_here() {
    let mut b = bench();
    b.owned.host_mut().flags = FLASHRT_HOST_FUSION_OFF;
    assert_eq!(evaluate(&b), 0);
    b.owned.host_mut().flags = 0;
    assert!(evaluate(&b) > 0, "and comes back with it");
}

#[test]
fn a_plan_is_made_once_for_a_uid() {
    let b = bench();
    let taken = evaluate(&b);
    for _ in 0..5 {
        assert_eq!(evaluate(&b), taken);
    }
    let stats = b.engine.stats();
    assert_eq!((stats.plans, stats.evaluations), (1, 6));
    let sites: u64 = stats.windows.iter().map(|c| c.sites).sum();
    let evaluated: u64 = stats.windows.iter().map(|c| c.evaluated).sum();
    assert_eq!((sites, evaluated), (taken as u64, 6 * taken as u64));
}

/// Graph views and RPC graphs have no uid and repeat pointers with other contents.
#[test]
fn without_a_uid_contents_decide() {
    let mut record = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Llama)
    });
    record.uid = 0;
    let b = bench_with(record.clone(), &[], |_| {});
    evaluate(&b);
    evaluate(&b);
    assert_eq!(b.engine.stats().plans, 1, "same contents, same plan");

    // The same structs with another eps: the address of every node stays.
    let norm = record.tensors.iter().position(|t| t.name == "ffn_norm-0-n").unwrap();
    record.tensors[norm].params = vec![support::model::f(5.0)];
    let raw = std::ptr::from_ref(b.owned.tensor(norm).raw()).cast_mut();
    // SAFETY: the host, which owns the struct, changes it between two evaluations.
    unsafe { (*raw).op_params[0] = support::model::f(5.0) };
    *b.device.memory.lock().unwrap() = b.memory.clone();
    let run = run_with(&b.engine, &b.device, &b.owned, &record);
    assert_eq!(
        difference(&record, &run_stock(&record, &b.memory), &run.memory),
        None,
        "a stale plan was used"
    );
    assert_eq!(b.engine.stats().plans, 2);
}

/// Whether a leaf is constant is part of the contents: its struct says so, not the nodes'.
#[test]
fn without_a_uid_a_leaf_that_became_an_input_is_another_graph() {
    let record = on_an_rpc_server(model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Llama)
    }));
    let b = bench_with(record.clone(), &[], |_| {});
    let taken = evaluate(&b);
    let weight = record
        .tensors
        .iter()
        .position(|t| t.name == "ffn_out-0.weight")
        .unwrap();
    let raw = std::ptr::from_ref(b.owned.tensor(weight).raw()).cast_mut();
    // SAFETY: the host, which owns the struct, changes it between two evaluations.
    unsafe { (*raw).flags |= FLAG_INPUT };
    assert_eq!(evaluate(&b), taken - 1);
    assert_eq!(b.engine.stats().plans, 2);
}

/// A leaf in an ordinary buffer may have been written by the last kernels of the graph before, which dependent launch could
/// overtake. Weights cannot. In a prefill the first launch is a conversion.
#[test]
fn the_first_launch_waits_where_constants_are_no_weights() {
    let decode = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Gemma3)
    });
    let prefill = prefill(Family::Gemma3);
    for (record, waits) in [
        (on_an_rpc_server(decode.clone()), true),
        (decode, false),
        (on_an_rpc_server(prefill.clone()), true),
        (prefill, false),
    ] {
        let mut b = bench_with(record, &[], |_| {});
        b.owned.host_mut().flags = FLASHRT_HOST_PDL;
        for evaluation in 0..2 {
            b.device.dependent.lock().unwrap().clear();
            evaluate(&b);
            let dependent = b.device.dependent.lock().unwrap().clone();
            let mut expected = vec![true; dependent.len()];
            expected[0] = !waits;
            assert!(dependent.len() > 4);
            assert_eq!(dependent, expected, "evaluation {evaluation}");
        }
    }
}

/// B18: memory does not climb over many different requests.
#[test]
fn plans_and_arena_are_bounded() {
    let b = bench();
    let mut record = b.record.clone();
    for uid in 1..=500 {
        record.uid = uid;
        let owned = OwnedGraph::new(&record).unwrap();
        *b.device.memory.lock().unwrap() = b.memory.clone();
        run_with(&b.engine, &b.device, &owned, &record);
    }
    let (plans, bytes) = b.engine.footprint(b.owned.host().context());
    assert!(plans <= 32, "{plans} plans");
    assert!(bytes <= 1 << 20, "{bytes} bytes");
    b.engine.context_free(b.owned.host().context());
    assert_eq!(b.engine.footprint(b.owned.host().context()), (0, 0));
}

/// B15: nothing is matched, allocated or launched when the first sight of a graph is inside a capture.
#[test]
fn a_capturing_stream_is_left_to_stock() {
    let mut b = bench();
    b.owned.host_mut().flags = FLASHRT_HOST_CAPTURING;
    assert_eq!(evaluate(&b), 0);
    assert_eq!(b.engine.footprint(b.owned.host().context()), (0, 0));
}

/// B33, B49: a device on which a kernel does not run is left alone.
#[test]
fn a_failed_self_check_switches_the_device_off() {
    let b = bench_with(model(Shape::tiny(Family::Llama)), &[], |d| {
        d.check = Err("no kernel image".into())
    });
    assert_eq!(evaluate(&b), 0);
    // Other devices may be well.
    let off = b.engine.stats().disabled.unwrap();
    assert_eq!(off, format!("device {}: no kernel image", b.owned.host().device()));
}

#[test]
fn a_first_launch_that_fails_falls_back_and_switches_its_window_off() {
    let b = bench();
    *b.device.failing.lock().unwrap() = Some(0);
    evaluate(&b);
    let fired = |b: &Bench| b.engine.stats().windows[0].fired;
    assert_eq!(
        (WINDOWS[0].name, fired(&b)),
        ("QKV_GEMV", 0),
        "the first window of the graph"
    );
    evaluate(&b);
    assert_eq!(fired(&b), 0, "it stays off");
    assert_eq!(b.engine.stats().plans, 2, "planned again without it");
}

/// Every launch of an evaluation fails in turn: either stock took over and results are right, or the evaluation says that it
/// failed. Never a wrong result reported as right.
#[test]
fn no_failed_launch_goes_unnoticed() {
    for make in [bench, || prefill_bench(&[])] {
        let count = {
            let b = make();
            evaluate(&b);
            let launches = b.device.launches.lock().unwrap().len();
            launches
        };
        let mut failed = 0;
        for launch in 0..count {
            let b = make();
            *b.device.failing.lock().unwrap() = Some(launch);
            let run = run_with(&b.engine, &b.device, &b.owned, &b.record);
            if run.status == EvalStatus::Failed {
                failed += 1;
                // The next evaluation works: the window is off.
                evaluate(&b);
            } else {
                let stock = run_stock(&b.record, &b.memory);
                assert_eq!(difference(&b.record, &stock, &run.memory), None, "launch {launch}");
            }
        }
        assert!(failed > 0 && failed < count, "{failed} of {count}");
    }
}

/// B12: attention may load Q before it waits for the launch in front of it, so that launch is never the one that writes Q.
#[test]
fn q_is_written_by_a_launch_before_the_last() {
    let b = bench_with(
        model(Shape {
            ..Shape::tiny(Family::Qwen3)
        }),
        &[],
        |_| {},
    );
    evaluate(&b);
    let calls = b.device.launches.lock().unwrap();
    let tails: Vec<Vec<bool>> = calls
        .iter()
        .filter_map(|call| match call {
            KernelCall::QkvTail(a) => Some(a.part[..a.n_parts as usize].iter().map(|p| p.rows.is_null()).collect()),
            _ => None,
        })
        .collect();
    // Q alone goes to the graph's memory by token, K and V to their caches by index.
    assert!(!tails.is_empty());
    for pair in tails.chunks(2) {
        assert_eq!(pair, [vec![true], vec![false, false]]);
    }
}

/// What was launched, in order: `n` for a norm, `N` for one that leaves f16 too, `c` for a conversion, `m` for a product;
/// `r` for the route of experts, `g` for rows gathered in its order, `e` for their product.
fn launches(b: &Bench) -> String {
    let calls = b.device.launches.lock().unwrap();
    let name = |call: &KernelCall| match call {
        KernelCall::Norm(a) if a.zh.x.is_null() => 'n',
        KernelCall::Norm(_) => 'N',
        KernelCall::ToH16(_) => 'c',
        KernelCall::Mm(_) => 'm',
        KernelCall::MoeRoute(_) => 'r',
        KernelCall::MoeToH16(_) => 'g',
        KernelCall::MoeMm(_) => 'e',
        KernelCall::MaskTiles(_) => 't',
        KernelCall::PrefillFa4(_) => 'a',
        _ => '?',
    };
    calls.iter().map(name).collect()
}

#[test]
fn the_first_reader_converts_what_no_norm_hands_over() {
    let b = prefill_bench(&[]);
    evaluate(&b);
    // Q, V and K of stock's norm; attention, its mask's tiles first; its result; norm, gate and up; their unit's result. Then all but the
    // first norm are ours, and the mask is known.
    let (first, other) = (
        ["cmmm", "ta", "cm", "Nm", "cm"].concat(),
        ["Nmmm", "a", "cm", "Nm", "cm"].concat(),
    );
    assert_eq!(launches(&b), format!("{first}{other}Nm"));
    // A norm whose readers all take f16 writes no f32.
    for call in b.device.launches.lock().unwrap().iter() {
        if let KernelCall::Norm(a) = call {
            assert!(a.z.is_null());
        }
    }
    // The next evaluation makes them anew.
    let first = launches(&b);
    evaluate(&b);
    assert_eq!(launches(&b), first.repeat(2));
}

/// Each product with experts by itself, from the route on. The norm before them keeps its f32 result, and leaves no other.
#[test]
fn experts_make_their_own_route_and_rows() {
    let b = bench_with(prefill(Family::Qwen3Moe), &[], |_| {});
    evaluate(&b);
    let (first, other) = (["cmmm", "ta", "cm", "n"].concat(), ["Nmmm", "a", "cm", "n"].concat());
    assert_eq!(launches(&b), format!("{first}rgerge{other}rgergeNm"));
}

/// Scratch is bounded: products with experts that need more are stock's, and the rest is as before.
#[test]
fn experts_beyond_the_scratch_limit_are_left_to_stock() {
    let record = prefill(Family::Qwen3Moe);
    let settings = |limit: usize| Settings {
        thresholds: FROM_MANY,
        scratch_limit: limit,
        // Its tiles would lie between.
        ..Settings::from_vars([("GGML_FLASHRT_NO_PREFILL_FA4".to_owned(), "1".to_owned())])
    };
    let run = |kib: usize| {
        let memory = Memory::for_graph(&record, 5);
        let device = FakeDevice::new(memory.clone());
        let b = bench_of(record.clone(), memory, device, settings((2 * (64 + kib)) << 10));
        evaluate(&b);
        let all = launches(&b);
        let declined = |window: &str| {
            let index = WINDOWS.iter().position(|w| w.name == window).unwrap();
            b.engine.stats().windows[index].declined.get("scratch limit").copied()
        };
        (all.matches("rge").count(), declined("MOE_FFN"), declined("MOE_PREFILL"))
    };
    // 40 places of 64 values a row, or of 128 for down.
    assert_eq!(run(16), (4, None, None));
    assert_eq!(run(8), (2, None, Some(2)));
    assert_eq!(run(4), (0, Some(2), Some(2)));
}

#[test]
fn without_its_norm_each_input_is_converted_once() {
    let b = prefill_bench(&[("GGML_FLASHRT_NO_ADD_NORM", "1")]);
    evaluate(&b);
    // The additions are now the products'.
    let rest = ["cm", "cm", "cm"].concat();
    assert_eq!(launches(&b), format!("cmmmta{rest}cmmma{rest}cm"));
}

#[test]
fn a_reader_that_is_off_keeps_the_f32_form() {
    let b = prefill_bench(&[("GGML_FLASHRT_NO_MM_PREFILL", "1")]);
    evaluate(&b);
    // Norms before gate and up hand over; those before Q, K and V have no reader of ours.
    assert_eq!(launches(&b), "taNmnaNmn");
    let handed_over: Vec<bool> = b
        .device
        .launches
        .lock()
        .unwrap()
        .iter()
        .filter_map(|call| match call {
            KernelCall::Norm(a) => Some(a.z.is_null()),
            _ => None,
        })
        .collect();
    assert_eq!(handed_over, [true, false, true, false]);
}

/// The norm's launch fails: stock's norm writes f32, and the reader makes of it what it needs.
#[test]
fn a_norm_that_did_not_fire_is_made_up_for() {
    let b = prefill_bench(&[]);
    evaluate(&b);
    let norm = launches(&b).find('N').unwrap();
    let b = prefill_bench(&[]);
    *b.device.failing.lock().unwrap() = Some(norm);
    evaluate(&b);
    assert_eq!(launches(&b)[norm..norm + 2], *"cm");
}

/// Stock fuses a norm, its weight and the addition behind it, or a mat-vec and the residual, when we leave their first node to it.
/// The addition is then never asked about, although ADD_NORM could take it: its readers do without the hand-off.
#[test]
fn readers_fire_when_stock_took_the_norms_first_node() {
    for (family, switch, before) in [
        (Family::Gemma3, "GGML_FLASHRT_NO_SANDWICH_NORM", Op::Mul),
        (Family::Llama, "GGML_FLASHRT_NO_GEMV_RES", Op::MulMat),
    ] {
        let record = model(Shape {
            n_layers: 3,
            ..Shape::tiny(family)
        });
        let b = bench_with(record.clone(), &[(switch, "1")], |_| {});
        let op = |i: usize| Op::from_code(record.tensors[record.nodes[i]].code);
        for evaluation in 1..=2 {
            *b.device.memory.lock().unwrap() = b.memory.clone();
            let asks = |i: usize| op(i) != Op::Add || op(i - 1) != before;
            let run = run_asking(&b.engine, &b.device, &b.owned, &record, asks);
            assert_eq!(run.status, EvalStatus::Ok);
            assert_eq!(
                difference(&record, &run_stock(&record, &b.memory), &run.memory),
                None,
                "{family:?}"
            );
            let stats = b.engine.stats();
            for (window, c) in WINDOWS.iter().zip(&stats.windows) {
                match window.name {
                    "QKV_GEMV" | "GLU_GEMV" => assert_eq!(c.fired, 3 * evaluation, "{family:?}: {}", window.name),
                    "ADD_NORM" => assert!(c.sites > 0 && c.fired == 0, "{family:?}: {c:?}"),
                    _ => {}
                }
                assert_eq!(
                    c.evaluated, c.fired,
                    "{family:?}: what stock took did not run here: {}",
                    window.name
                );
            }
        }
        // A replayed CUDA graph asks nothing: it runs what was launched last.
        let (host, graph) = (b.owned.host(), b.owned.graph());
        let before = b.engine.stats();
        b.engine.eval_begin(&host, graph);
        b.engine.eval_end(&host);
        for (was, is) in before.windows.iter().zip(&b.engine.stats().windows) {
            assert_eq!((is.evaluated, is.fired), (was.evaluated + was.fired / 2, was.fired));
        }
    }
}

/// In a graph with concurrent regions nodes may change order until they run: each product converts for itself, and within a
/// branch, where memory is not ours alone, stock does.
#[test]
fn concurrent_regions_share_no_hand_offs() {
    let mut record = prefill(Family::Llama);
    let id = |r: &GraphRecord, name: &str| r.tensors.iter().position(|t| t.name == name).unwrap();
    for (name, branch) in [("Qcur-0", 1), ("Vcur-0", 2), ("Kcur-0", 3)] {
        let id = id(&record, name);
        record.tensors[id].region = 16 + branch;
    }
    let (fork, join) = (id(&record, "attn_norm-0"), id(&record, "attn-0"));
    record.tensors[fork].region = 1;
    record.tensors[join].region = 2;
    let b = bench_with(record, &[], |_| {});
    evaluate(&b);
    // Layer 0: attention and its output, gate and up, down. Layer 1 also Q, V and K. Then the output matrix. Each attention looks at
    // the mask for itself.
    assert_eq!(launches(&b), ["tacmncmcm", "ncmcmcm", "tacmncmcm", "ncm"].concat());
    let mm = WINDOWS.iter().position(|w| w.name == "MM_PREFILL").unwrap();
    assert_eq!(b.engine.stats().windows[mm].declined["concurrent region"], 3);
}

fn limited(limit: usize) -> Bench {
    let record = prefill(Family::Llama);
    let memory = Memory::for_graph(&record, 5);
    let device = FakeDevice::new(memory.clone());
    let settings = Settings {
        thresholds: FROM_MANY,
        scratch_limit: limit,
        ..Settings::from_vars([])
    };
    bench_of(record, memory, device, settings)
}

/// A limit takes the sites with the largest inputs, in all layers alike, and the arena stays below it.
#[test]
fn a_scratch_limit_declines_what_does_not_fit() {
    let declined = |b: &Bench, window: &str| {
        let index = WINDOWS.iter().position(|w| w.name == window).unwrap();
        let declined = &b.engine.stats().windows[index].declined;
        declined.get("scratch limit").copied().unwrap_or(0)
    };
    // Tickets take 64 KiB of half the limit. Attention's output and down projections read 128 values a token, the
    // others 64. Attention itself has 256 in scratch.
    let kib = |n: usize| n << 10;
    for (rest, products, units, launched) in [
        (kib(4), 0, 0, "cmmmtacmNmcmNmmmacmNmcmNm"),
        (kib(2), 4, 0, "cmmmNmNmmmNmNm"),
        (0, 11, 2, "nnnn"),
    ] {
        let b = limited(2 * (kib(64) + rest));
        evaluate(&b);
        assert_eq!(launches(&b), launched, "{rest}");
        assert_eq!(
            (declined(&b, "MM_PREFILL"), declined(&b, "GEGLU_FFN")),
            (products, units),
            "{rest}"
        );
        let held = b.engine.stats().scratch_bytes as usize;
        assert!(held <= 2 * (kib(64) + rest), "{held}");
        assert_eq!(held > 0, rest > 0);
    }
    let b = limited(0);
    evaluate(&b);
    assert_eq!((launches(&b), b.engine.stats().scratch_bytes), ("nnnn".to_owned(), 0));
}

#[test]
fn the_memory_that_is_held_is_reported_until_its_context_goes() {
    let b = prefill_bench(&[]);
    evaluate(&b);
    let held = b.engine.footprint(b.owned.host().context()).1 as u64;
    assert!(held > 0 && b.engine.stats().scratch_bytes == held);
    let json: serde_json::Value = serde_json::from_str(&b.engine.stats_json()).unwrap();
    assert_eq!(json["scratch_bytes"], held);
    assert!(b.engine.stats().to_table().contains("1.0 MiB of scratch"));
    b.engine.context_free(b.owned.host().context());
    assert_eq!(b.engine.stats().scratch_bytes, 0);
}

/// A decode plan's 8-bit hand-offs are a convenience: without memory for them the mat-vecs quantise for themselves.
#[test]
fn mat_vecs_do_without_hand_offs() {
    let record = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Llama)
    });
    let memory = Memory::for_graph(&record, 5);
    let device = FakeDevice::new(memory.clone());
    let settings = Settings {
        scratch_limit: 0,
        ..Settings::from_vars([])
    };
    let b = bench_of(record, memory, device, settings);
    evaluate(&b);
    let names = windows_of(&b);
    assert!(names.contains(&"GLU_GEMV") && names.contains(&"GEMV_RES"), "{names:?}");
    assert!(
        !names.contains(&"QKV_GEMV"),
        "its mat-vecs leave their results in scratch"
    );
}

/// B22: weights of the same shape at another address, in a graph without a uid.
#[test]
fn without_a_uid_other_weights_are_another_plan() {
    let mut record = prefill(Family::Llama);
    record.uid = 0;
    let b = bench_with(record.clone(), &[], |_| {});
    evaluate(&b);
    let id = |name: &str| record.tensors.iter().position(|t| t.name == name).unwrap();
    let (k, v) = (id("Kcur-1.weight"), id("Vcur-1.weight"));
    let data = |id: usize| std::ptr::from_ref(b.owned.tensor(id).raw()).cast_mut();
    // SAFETY: the host, which owns the structs, changes them between two evaluations.
    unsafe { std::mem::swap(&mut (*data(k)).data, &mut (*data(v)).data) };
    let (k_data, v_data) = (record.tensors[k].data, record.tensors[v].data);
    (record.tensors[k].data, record.tensors[v].data) = (v_data, k_data);
    *b.device.memory.lock().unwrap() = b.memory.clone();
    let run = run_with(&b.engine, &b.device, &b.owned, &record);
    assert_eq!(
        difference(&record, &run_stock(&record, &b.memory), &run.memory),
        None,
        "a stale plan was used"
    );
    assert_eq!(b.engine.stats().plans, 2);
}

/// The host may put the nodes of a concurrent region into another order after the plan was made.
#[test]
fn another_order_of_nodes_is_another_plan() {
    let b = bench();
    let taken = evaluate(&b);
    let mut record = b.record.clone();
    // Exchange two independent neighbours: up and gate.
    let up = record
        .nodes
        .iter()
        .position(|&n| record.tensors[n].name == "ffn_up-0")
        .unwrap();
    let nodes = b.owned.graph().node_addresses();
    let raw = nodes.as_ptr().cast_mut();
    // SAFETY: the host owns the node list and changes it between two evaluations.
    unsafe { std::ptr::swap(raw.add(up), raw.add(up + 1)) };
    record.nodes.swap(up, up + 1);
    *b.device.memory.lock().unwrap() = b.memory.clone();
    let run = run_with(&b.engine, &b.device, &b.owned, &record);
    assert_eq!(difference(&record, &run_stock(&record, &b.memory), &run.memory), None);
    assert_eq!(run.taken.len(), taken, "either order matches");
    assert_eq!(b.engine.stats().plans, 2);
}

/// After eval_begin the order changes under the engine's feet, as restoring a concurrent region does.
#[test]
fn a_changed_order_within_an_evaluation_declines() {
    let mut record = model(Shape {
        n_tokens: 1,
        ..Shape::tiny(Family::Llama)
    });
    // A region somewhere: hand-offs are then always written as f32 too.
    let attn = record.tensors.iter().position(|t| t.name == "attn-0").unwrap();
    record.tensors[attn].region = 2;
    let b = bench_with(record, &[], |_| {});
    let (host, graph): (HostView, GraphRef) = (b.owned.host(), b.owned.graph());
    b.engine.eval_begin(&host, graph);
    let up = b
        .record
        .nodes
        .iter()
        .position(|&n| b.record.tensors[n].name == "ffn_up-0")
        .unwrap();
    let raw = graph.node_addresses().as_ptr().cast_mut();
    // SAFETY: as above.
    unsafe { std::ptr::swap(raw.add(up), raw.add(up + 1)) };
    assert_eq!(b.engine.fuse(&host, graph, up), 0);
    b.engine.eval_end(&host);
}

#[test]
fn a_panic_in_a_window_switches_off_that_window_only() {
    let b = bench_with(
        model(Shape {
            n_tokens: 2,
            ..Shape::tiny(Family::Llama)
        }),
        &[],
        |d| {
            d.tamper = |call| {
                if let ggml_flashrt::window::KernelCall::QkvTail(_) = call {
                    panic!("planted");
                }
            };
        },
    );
    let (host, graph) = (b.owned.host(), b.owned.graph());
    std::panic::set_hook(Box::new(|_| {}));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        run_with(&b.engine, &b.device, &b.owned, &b.record)
    }));
    let _ = std::panic::take_hook();
    assert!(panicked.is_err());
    // What the boundary does.
    b.engine.disable("planted");
    assert!(!b.engine.is_disabled());
    b.device.memory.clear_poison();
    b.device.launches.clear_poison();
    b.device.failing.clear_poison();
    b.engine.eval_end(&host);
    let _ = graph;
    assert!(evaluate(&b) > 0);
    let qkv = &b.engine.stats().windows[0];
    assert_eq!((WINDOWS[0].name, qkv.fired), ("QKV_GEMV", 0));
}

#[test]
fn concurrent_regions_keep_windows_within_a_branch() {
    let mut record = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Llama)
    });
    let id = |r: &GraphRecord, name: &str| r.tensors.iter().position(|t| t.name == name).unwrap();
    for (name, branch) in [
        ("Qcur-0", 1),
        ("Qcur-0_rope", 1),
        ("Vcur-0", 2),
        ("Kcur-0", 3),
        ("Kcur-0_rope", 3),
    ] {
        let id = id(&record, name);
        record.tensors[id].region = 16 + branch;
    }
    let fork = id(&record, "attn_norm-0");
    record.tensors[fork].region = 1;
    let join = id(&record, "attn-0");
    record.tensors[join].region = 2;
    let b = bench_with(record, &[], |_| {});
    evaluate(&b);
    let stats = b.engine.stats();
    assert_eq!(stats.windows[0].fired, 0, "QKV_GEMV would cross branches");
    assert_eq!(stats.windows[0].declined["concurrent region"], 1);
    let gemv = WINDOWS.iter().position(|w| w.name == "GEMV_RES").unwrap();
    assert!(
        stats.windows[gemv].fired >= 3 + 3,
        "each branch's mat-vec still fires alone"
    );
}

#[test]
fn the_order_is_kept_where_qkv_fires_whatever_the_batch() {
    for n_tokens in [1, 7, 512] {
        let record = model(Shape {
            n_tokens,
            n_kv: 512,
            ..Shape::small(Family::Llama)
        });
        let b = OwnedGraph::new(&record).unwrap();
        let engine = Engine::new(
            Settings::from_vars([]),
            Box::new(FakeDevice::new(Memory::for_graph(
                &model(Shape::tiny(Family::Llama)),
                1,
            ))),
        );
        assert!(engine.graph_optimize(&b.host(), b.graph()), "{n_tokens}");
        let off = Settings::from_vars([("GGML_FLASHRT_NO_QKV_GEMV".to_owned(), "1".to_owned())]);
        let engine = Engine::new(
            off,
            Box::new(FakeDevice::new(Memory::for_graph(
                &model(Shape::tiny(Family::Llama)),
                1,
            ))),
        );
        assert!(!engine.graph_optimize(&b.host(), b.graph()), "{n_tokens}");
    }
}

#[test]
fn dumps_hold_each_distinct_graph_once_and_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("graphs.jsonl");
    let record = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Gemma3)
    });
    let b = bench_with(record.clone(), &[("GGML_FLASHRT_DUMP", path.to_str().unwrap())], |_| {});
    evaluate(&b);
    evaluate(&b);
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 1);
    let read: GraphRecord = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let again = OwnedGraph::new(&read).unwrap();
    let (a, b) = (again.graph(), b.owned.graph());
    assert_eq!(a.len(), b.len());
    for (x, y) in a.nodes().zip(b.nodes()) {
        assert_eq!(
            (x.name(), x.ne(), x.nb(), x.data(), a.uses(x)),
            (y.name(), y.ne(), y.nb(), y.data(), b.uses(y))
        );
        assert_eq!(x.raw().op_params, y.raw().op_params);
    }
}

#[test]
fn an_unwritable_dump_is_said_and_harms_nothing() {
    let b = bench_with(
        model(Shape {
            n_tokens: 2,
            ..Shape::tiny(Family::Llama)
        }),
        &[("GGML_FLASHRT_DUMP", "/nonexistent/x")],
        |_| {},
    );
    assert!(evaluate(&b) > 0);
}

/// A server that is killed never comes to its exit handlers.
#[test]
fn the_statistics_file_is_there_while_the_process_runs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("stats.json");
    let record = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Llama)
    });
    let b = bench_with(record, &[("GGML_FLASHRT_STATS", path.to_str().unwrap())], |_| {});
    evaluate(&b);
    let stats: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(stats["windows"]["QKV_GEMV"]["fired"], 1);
}
