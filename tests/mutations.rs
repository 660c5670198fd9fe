//! Every pattern under mutation: one thing in the graph is changed, and the windows must decline or compute what the changed
//! graph means. Cases B01, B02, B03, B07, B10.

mod support;

use ggml_flashrt::graph::dump::GraphRecord;
use ggml_flashrt::graph::{BufferKind, DType, Op, OwnedGraph, FLAG_COMPUTE, FLAG_OUTPUT};
use ggml_flashrt::kernel::{QkvPart, H16};
use ggml_flashrt::window::engine::Engine;
use ggml_flashrt::window::{match_graph, KernelCall};
use std::panic::{catch_unwind, AssertUnwindSafe};
use support::machine::{
    all_on, difference, extent, run_fused, run_stock, run_with, FakeDevice, Memory, FROM_MANY, MANY_TOKENS,
};
use support::model::{model, Family, Shape};

/// A graph with one thing changed.
struct Mutant {
    what: String,
    tensor: usize,
    record: GraphRecord,
}

fn end_of_memory(r: &GraphRecord) -> u64 {
    r.tensors
        .iter()
        .map(|t| t.data + extent(t) as u64)
        .max()
        .unwrap()
        .next_multiple_of(256)
}

fn is_result(r: &GraphRecord, id: usize) -> bool {
    let t = &r.tensors[id];
    !Op::from_code(t.code).is_view() && t.view_src.is_none()
}

/// Moves a tensor, and what shows its bytes, to another address.
fn move_to(r: &mut GraphRecord, id: usize, address: u64) {
    let from = r.tensors[id].data;
    for i in 0..r.tensors.len() {
        if i == id || r.tensors[i].view_src == Some(id) {
            r.tensors[i].data = r.tensors[i].data - from + address;
        }
    }
}

fn each(base: &GraphRecord, out: &mut Vec<Mutant>, what: &str, change: impl Fn(&mut GraphRecord, usize) -> bool) {
    for tensor in 0..base.tensors.len() {
        let mut record = base.clone();
        if change(&mut record, tensor) {
            out.push(Mutant {
                what: format!("{what} of {:?}", base.tensors[tensor].name),
                tensor,
                record,
            });
        }
    }
}

fn types(base: &GraphRecord, out: &mut Vec<Mutant>) {
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0] {
        each(base, out, dtype.name(), |r, id| {
            let t = &mut r.tensors[id];
            let float = |d: i32| [DType::F32, DType::F16, DType::BF16].iter().any(|&f| f as i32 == d);
            let weight = t.code == Op::None as u8 && t.ne[1] > 1 && (float(t.dtype) || t.dtype == DType::Q8_0 as i32);
            let possible = if dtype == DType::Q8_0 {
                weight && t.ne[0] % 32 == 0
            } else {
                weight || float(t.dtype)
            };
            if t.dtype == dtype as i32 || !possible || t.view_src.is_some() {
                return false;
            }
            t.dtype = dtype as i32;
            t.nb[0] = dtype.block_bytes();
            t.nb[1] = t.nb[0] * (t.ne[0] as usize / dtype.block_len());
            t.nb[2] = t.nb[1] * t.ne[1] as usize;
            t.nb[3] = t.nb[2] * t.ne[2] as usize;
            let end = end_of_memory(r);
            move_to(r, id, end);
            // What shows these bytes shows them as they are.
            let (nb, root_dtype) = (r.tensors[id].nb[0], r.tensors[id].dtype);
            for v in 0..r.tensors.len() {
                if r.tensors[v].view_src == Some(id) {
                    let t = &mut r.tensors[v];
                    (t.dtype, t.nb[0]) = (root_dtype, nb);
                    t.nb[1] = nb * t.ne[0] as usize;
                    t.nb[2] = t.nb[1] * t.ne[1] as usize;
                    t.nb[3] = t.nb[2] * t.ne[2] as usize;
                }
            }
            true
        });
    }
}

fn layouts(base: &GraphRecord, out: &mut Vec<Mutant>) {
    let viewed = |r: &GraphRecord, id: usize| r.tensors.iter().any(|t| t.view_src == Some(id));
    for pad in [4, 16, 32] {
        each(base, out, &format!("rows padded by {pad} bytes"), |r, id| {
            if !is_result(r, id) || viewed(r, id) || r.tensors[id].ne[1] < 2 || r.tensors[id].dtype != 0 {
                return false;
            }
            let t = &mut r.tensors[id];
            for d in 1..4 {
                t.nb[d] += pad * t.ne[1..d].iter().product::<i64>() as usize;
            }
            let end = end_of_memory(r);
            move_to(r, id, end);
            true
        });
    }
    each(base, out, "address off by 4", |r, id| {
        let end = end_of_memory(r);
        move_to(r, id, end + 4);
        is_result(r, id) && r.tensors[id].dtype == 0
    });
    // KV caches whose rows are longer than what is stored, as a cache of several streams or layers has.
    each(base, out, "cache rows padded", |r, id| {
        if !r.tensors[id].name.starts_with("cache") {
            return false;
        }
        let end = end_of_memory(r);
        move_to(r, id, end);
        for t in 0..r.tensors.len() {
            if t == id || r.tensors[t].view_src == Some(id) {
                let t = &mut r.tensors[t];
                let row = if t.ne[2] > 1 { 2 } else { 1 };
                for d in row..4 {
                    t.nb[d] *= 2;
                }
            }
        }
        true
    });
}

fn params(base: &GraphRecord, out: &mut Vec<Mutant>) {
    for i in 0..16 {
        each(base, out, &format!("parameter {i}"), |r, id| {
            let t = &mut r.tensors[id];
            if Op::from_code(t.code).is_view() {
                return false;
            }
            t.params.resize(16, 0);
            let old = f32::from_bits(t.params[i] as u32);
            t.params[i] = if old.is_normal() {
                (old * 1.5 + 0.25).to_bits() as i32
            } else {
                t.params[i] + 1
            };
            true
        });
    }
}

fn operands(base: &GraphRecord, out: &mut Vec<Mutant>) {
    for slot in 0..3 {
        // Another tensor of the same shape and type that is there by then: the first of all, or one of the last results, which may
        // be one of the window's own.
        for back in 0..4 {
            let what = match back {
                0 => format!("operand {slot} exchanged"),
                _ => format!("operand {slot} exchanged for result {back} before"),
            };
            each(base, out, &what, |r, id| {
                let Some(Some(src)) = r.tensors[id].src.get(slot).copied() else {
                    return false;
                };
                let position = |x: usize| r.nodes.iter().position(|&n| n == x);
                let me = position(id).unwrap();
                let alike = |x: &usize| {
                    let (a, b) = (&r.tensors[*x], &r.tensors[src]);
                    *x != src && *x != id && a.ne == b.ne && a.dtype == b.dtype && a.nb == b.nb
                };
                let other = match back {
                    0 => (0..r.tensors.len())
                        .filter(|&x| position(x).is_none_or(|p| p < me))
                        .find(alike),
                    _ => r.nodes[..me].iter().copied().rev().filter(alike).nth(back - 1),
                };
                let Some(other) = other else { return false };
                if Op::from_code(r.tensors[id].code).is_view() || r.tensors[id].view_src.is_some() {
                    return false;
                }
                r.tensors[src].uses -= 1;
                r.tensors[other].uses += 1;
                r.tensors[id].src[slot] = Some(other);
                true
            });
        }
        each(base, out, &format!("operand {slot} absent"), |r, id| {
            let Some(Some(src)) = r.tensors[id].src.get(slot).copied() else {
                return false;
            };
            if slot == 0 || Op::from_code(r.tensors[id].code).is_view() {
                return false;
            }
            r.tensors[src].uses -= 1;
            r.tensors[id].src[slot] = None;
            true
        });
    }
    each(base, out, "operands commuted", |r, id| {
        let t = &mut r.tensors[id];
        if ![Op::Add, Op::Mul].contains(&Op::from_code(t.code)) || t.src.len() != 2 {
            return false;
        }
        t.src.swap(0, 1);
        let (ne, first) = (t.ne, t.src[0].unwrap());
        ne[1..] == [1, 1, 1] || r.tensors[first].ne == ne
    });
}

fn readers(base: &GraphRecord, out: &mut Vec<Mutant>) {
    each(base, out, "another reader", |r, id| {
        if !r.nodes.contains(&id) || r.tensors[id].dtype != 0 {
            return false;
        }
        let mut reader = r.tensors[id].clone();
        reader.name = "reader".into();
        (reader.code, reader.view_src, reader.uses) = (Op::Scale as u8, None, 0);
        (reader.params, reader.src) = (vec![2f32.to_bits() as i32], vec![Some(id)]);
        (reader.flags, reader.data) = (FLAG_COMPUTE | FLAG_OUTPUT, end_of_memory(r));
        let ne = reader.ne;
        reader.nb = [
            4,
            4 * ne[0] as usize,
            4 * (ne[0] * ne[1]) as usize,
            4 * (ne[0] * ne[1] * ne[2]) as usize,
        ];
        r.tensors.push(reader);
        r.tensors[id].uses += 1;
        let new = r.tensors.len() - 1;
        r.nodes.push(new);
        true
    });
    each(base, out, "graph output flag", |r, id| {
        r.tensors[id].flags |= FLAG_OUTPUT;
        r.nodes.contains(&id)
    });
    each(base, out, "no compute flag", |r, id| {
        r.tensors[id].flags &= !FLAG_COMPUTE;
        r.nodes.contains(&id) && !Op::from_code(r.tensors[id].code).is_view()
    });
    each(base, out, "foreign buffer", |r, id| {
        r.tensors[id].buffer = BufferKind::Foreign;
        true
    });
    each(base, out, "ordinary buffer", |r, id| {
        let weight = r.tensors[id].buffer == BufferKind::OwnWeights;
        r.tensors[id].buffer = BufferKind::Own;
        weight
    });
}

fn nodes(base: &GraphRecord, out: &mut Vec<Mutant>) {
    each(base, out, "node dropped", |r, id| {
        let t = r.tensors[id].clone();
        let Some(Some(src)) = t.src.first().copied() else {
            return false;
        };
        if !r.nodes.contains(&id)
            || r.tensors[src].ne != t.ne
            || r.tensors[src].dtype != t.dtype
            || t.view_src.is_some()
        {
            return false;
        }
        r.nodes.retain(|&n| n != id);
        for s in t.src.iter().flatten() {
            r.tensors[*s].uses -= 1;
        }
        for n in 0..r.tensors.len() {
            for s in 0..r.tensors[n].src.len() {
                if r.tensors[n].src[s] == Some(id) {
                    r.tensors[n].src[s] = Some(src);
                    r.tensors[src].uses += 1;
                }
            }
            if r.tensors[n].view_src == Some(id) {
                r.tensors[n].view_src = Some(src);
                r.tensors[n].data = r.tensors[src].data + r.tensors[n].view_offs as u64;
            }
        }
        r.tensors[id].uses = 0;
        true
    });
    each(base, out, "node inserted after", |r, id| {
        let Some(position) = r.nodes.iter().position(|&n| n == id) else {
            return false;
        };
        if r.tensors[id].dtype != 0 || !is_result(r, id) || r.tensors.iter().any(|t| t.view_src == Some(id)) {
            return false;
        }
        let mut node = r.tensors[id].clone();
        node.name = "inserted".into();
        (node.code, node.params, node.src) = (Op::Scale as u8, vec![3f32.to_bits() as i32], vec![Some(id)]);
        (node.data, node.flags) = (end_of_memory(r), FLAG_COMPUTE);
        r.tensors.push(node);
        let new = r.tensors.len() - 1;
        for n in 0..new {
            for s in 0..r.tensors[n].src.len() {
                if r.tensors[n].src[s] == Some(id) {
                    r.tensors[n].src[s] = Some(new);
                }
            }
        }
        r.tensors[id].uses = 1;
        r.nodes.insert(position + 1, new);
        true
    });
}

/// Every result over each thing that any node within a window's reach reads: exactly, partly, and just beside.
fn addresses(base: &GraphRecord, out: &mut Vec<Mutant>) {
    let results: Vec<usize> = base.nodes.iter().copied().filter(|&id| is_result(base, id)).collect();
    for &id in &results {
        let me = base.nodes.iter().position(|&n| n == id).unwrap();
        let near = &base.nodes[me.saturating_sub(16)..=me];
        let mut inputs: Vec<usize> = near
            .iter()
            .flat_map(|&n| base.tensors[n].src.iter().flatten().copied())
            .collect();
        inputs.sort_unstable();
        inputs.dedup();
        for input in inputs {
            // The result may not lie over something that is still read later: then the graph itself would be wrong, and
            // ggml's allocator never makes such a one.
            let root = base.tensors[input].view_src.unwrap_or(input);
            let bytes = |x: usize| base.tensors[x].view_src.unwrap_or(x);
            let read_later = base.nodes[me + 1..]
                .iter()
                .any(|&n| base.tensors[n].src.iter().flatten().any(|&s| bytes(s) == root));
            let persistent = base.tensors[root].name.starts_with("cache");
            if root == id || read_later || persistent {
                continue;
            }
            for (how, offset) in [
                ("exactly over", 0i64),
                ("partly over", 64),
                ("just before", -(extent(&base.tensors[id]) as i64)),
            ] {
                let mut record = base.clone();
                let address = (base.tensors[input].data as i64 + offset) as u64;
                move_to(&mut record, id, address);
                // Over anything else it would destroy what the graph itself needs.
                let range = |t: &ggml_flashrt::graph::dump::TensorRecord| t.data..t.data + extent(t) as u64;
                let mine = range(&record.tensors[id]);
                let others = (0..record.tensors.len()).filter(|&x| ![root, id].contains(&bytes(x)));
                let clean = others
                    .map(|x| range(&record.tensors[x]))
                    .all(|r| r.start >= mine.end || mine.start >= r.end);
                if !clean {
                    continue;
                }
                let what = format!("{:?} {how} {:?}", base.tensors[id].name, base.tensors[input].name);
                out.push(Mutant {
                    what,
                    tensor: id,
                    record,
                });
            }
        }
    }
}

fn mutants(base: &GraphRecord) -> Vec<Mutant> {
    let mut out = Vec::new();
    for kind in [types, layouts, params, operands, readers, nodes, addresses] {
        kind(base, &mut out);
    }
    out
}

/// Does any window that fires on the record touch this tensor: read or write it, or stand for it?
fn touches(record: &GraphRecord, tensor: usize, as_a_step: bool) -> bool {
    let graph = OwnedGraph::new(record).unwrap();
    let matched = match_graph(graph.graph(), graph.host(), FROM_MANY, |_| true);
    let t = graph.tensor(tensor);
    matched.sites.iter().any(|s| {
        if as_a_step {
            s.m.nodes().any(|(_, x)| x == t)
        } else {
            s.m.externals().chain(s.m.outputs()).any(|(_, x)| x == t)
        }
    })
}

fn verdict(base_sites: usize, mutant: &Mutant, memory: &Memory) -> Result<bool, String> {
    let record = &mutant.record;
    let stock = catch_unwind(AssertUnwindSafe(|| run_stock(record, memory)));
    let Ok(stock) = stock else {
        // The interpreter does not know what this means, so no window may claim to.
        return if touches(record, mutant.tensor, true) {
            Err("fires on what nobody defines".into())
        } else {
            Ok(false)
        };
    };
    if mutant.what.starts_with("foreign") && touches(record, mutant.tensor, false) {
        return Err("fires on a foreign buffer".into());
    }
    let fused = run_fused(record, memory);
    match difference(record, &stock, &fused.memory) {
        Some(difference) => Err(difference),
        None => Ok(fused.taken.len() == base_sites),
    }
}

fn check_family(family: Family, n_tokens: i64) {
    let base = model(Shape {
        n_tokens,
        n_kv: 16,
        ..Shape::tiny(family)
    });
    let memory = Memory::for_graph(&base, 3);
    let sites = run_fused(&base, &memory).taken.len();
    assert!(sites >= 5);
    std::panic::set_hook(Box::new(|_| {}));
    let (mut unchanged, mut fewer, mut wrong) = (0, 0, Vec::new());
    for mutant in mutants(&base) {
        let memory = Memory::for_graph(&mutant.record, 3);
        match verdict(sites, &mutant, &memory) {
            Ok(true) => unchanged += 1,
            Ok(false) => fewer += 1,
            Err(why) => wrong.push(format!("{}: {why}", mutant.what)),
        }
    }
    let _ = std::panic::take_hook();
    println!("{family:?}, {n_tokens} tokens: {unchanged} still fire everywhere, {fewer} decline somewhere");
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        unchanged + fewer + wrong.len(),
        wrong.join("\n")
    );
    assert!(
        unchanged > 50 && fewer > 200,
        "the mutations lost their teeth: {unchanged}, {fewer}"
    );
}

#[test]
fn llama_mutants() {
    check_family(Family::Llama, 2);
}

#[test]
fn qwen2_mutants() {
    check_family(Family::Qwen2, 2);
}

#[test]
fn qwen3_mutants() {
    check_family(Family::Qwen3, 1);
}

#[test]
fn gemma3_mutants() {
    check_family(Family::Gemma3, 2);
}

#[test]
fn llama_prefill_mutants() {
    check_family(Family::Llama, MANY_TOKENS);
}

/// Biases.
#[test]
fn qwen2_prefill_mutants() {
    check_family(Family::Qwen2, MANY_TOKENS);
}

#[test]
fn qwen3_moe_prefill_mutants() {
    check_family(Family::Qwen3Moe, MANY_TOKENS);
}

/// What makes a kernel do the wrong thing.
type Tamper = fn(&mut KernelCall);

/// Faults that the comparison above does not notice.
fn unnoticed(base: &GraphRecord, faults: &[(&'static str, Tamper)]) -> Vec<&'static str> {
    unnoticed_in(Memory::for_graph(base, 3), base, faults)
}

fn unnoticed_in(memory: Memory, base: &GraphRecord, faults: &[(&'static str, Tamper)]) -> Vec<&'static str> {
    let stock = run_stock(base, &memory);
    let is_unnoticed = |tamper: Tamper| {
        let device = FakeDevice {
            tamper,
            ..FakeDevice::new(memory.clone())
        };
        let engine = Engine::new(all_on(), Box::new(device.clone()));
        let owned = OwnedGraph::new(base).unwrap();
        let run = catch_unwind(AssertUnwindSafe(|| run_with(&engine, &device, &owned, base)));
        run.is_ok_and(|run| difference(base, &stock, &run.memory).is_none())
    };
    assert!(is_unnoticed(|_| {}), "the graph itself is wrong");
    let found = faults.iter().filter(|(_, tamper)| is_unnoticed(*tamper));
    found.map(|(what, _)| *what).collect()
}

#[test]
fn faults_in_mat_muls_are_noticed() {
    let base = model(Shape {
        n_tokens: MANY_TOKENS,
        n_kv: 16,
        ..Shape::tiny(Family::Qwen2)
    });
    let faults: [(&str, Tamper); 9] = [
        ("a row lost", |c| {
            if let KernelCall::Mm(a) = c {
                a.n_rows -= 1;
            }
        }),
        ("a token lost", |c| {
            if let KernelCall::Mm(a) = c {
                a.n_tokens -= 1;
            }
        }),
        ("a token not converted", |c| {
            if let KernelCall::ToH16(a) = c {
                a.n_tokens -= 1;
            }
        }),
        ("tokens exchanged", |c| {
            if let KernelCall::ToH16(a) = c {
                a.x_stride = 0;
            }
        }),
        ("no bias", |c| {
            if let KernelCall::Mm(a) = c {
                a.bias = std::ptr::null();
            }
        }),
        ("gate and up exchanged", |c| {
            if let KernelCall::Mm(a) = c {
                if a.glu >= 0 {
                    std::mem::swap(&mut a.w, &mut a.w2);
                }
            }
        }),
        ("another activation", |c| {
            if let KernelCall::Mm(a) = c {
                if a.glu >= 0 {
                    a.glu = 0;
                }
            }
        }),
        ("rows of weights apart", |c| {
            if let KernelCall::Mm(a) = c {
                a.row_bytes += 34;
            }
        }),
        ("a norm without its f16 form", |c| {
            if let KernelCall::Norm(a) = c {
                a.zh = H16::NONE;
            }
        }),
    ];
    assert_eq!(unnoticed(&base, &faults), [""; 0]);
}

/// A mask whose first tile shows everything, whose second has to be looked at, and whose third hides everything.
#[test]
fn faults_in_attention_of_many_tokens_are_noticed() {
    let base = model(Shape {
        n_tokens: MANY_TOKENS,
        n_kv: 300,
        ..Shape::tiny(Family::Llama)
    });
    let mut memory = Memory::for_graph(&base, 3);
    let seen = |t: i64, key: i64| if key <= 190 + 3 * t { 0.0 } else { f64::NEG_INFINITY };
    let mask = base.tensors.iter().find(|t| t.name == "kq_mask").unwrap();
    memory.set_f16s(
        mask,
        (0..MANY_TOKENS).flat_map(|t| (0..300).map(move |key| seen(t, key))),
    );
    let faults: [(&str, Tamper); 12] = [
        ("full tiles lost", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                (a.tiles.full_count, a.tiles.full_index) = (a.tiles.partial_count, a.tiles.partial_index);
            }
        }),
        ("partial tiles lost", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                (a.tiles.partial_count, a.tiles.partial_index) = (a.tiles.full_count, a.tiles.full_index);
            }
        }),
        ("partial tiles taken for full ones", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                std::mem::swap(&mut a.tiles.full_count, &mut a.tiles.partial_count);
                std::mem::swap(&mut a.tiles.full_index, &mut a.tiles.partial_index);
            }
        }),
        ("tiles of fewer keys", |c| {
            if let KernelCall::MaskTiles(a) = c {
                a.n_kv -= 200;
            }
        }),
        ("tiles of another size", |c| {
            if let KernelCall::MaskTiles(a) = c {
                a.tile_n = 64;
            }
        }),
        ("tiles of other keys", |c| {
            if let KernelCall::MaskTiles(a) = c {
                // The second tile is the first.
                a.mask = a.mask.wrapping_byte_sub(2 * 128);
            }
        }),
        ("the mask of the first token", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                a.mask_token_bytes = 0;
            }
        }),
        ("heads exchanged", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                a.q_head_bytes = 0;
            }
        }),
        ("tokens exchanged", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                a.q_token_bytes = 0;
            }
        }),
        ("keys for values", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                a.v = a.k;
            }
        }),
        ("another scale", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                a.scale *= 1.5;
            }
        }),
        ("a token lost", |c| {
            if let KernelCall::PrefillFa4(a) = c {
                a.n_tokens -= 1;
            }
        }),
    ];
    assert_eq!(unnoticed_in(memory, &base, &faults), [""; 0]);
}

#[test]
fn faults_in_products_with_experts_are_noticed() {
    let base = model(Shape {
        n_tokens: MANY_TOKENS,
        n_kv: 16,
        ..Shape::tiny(Family::Qwen3Moe)
    });
    let faults: [(&str, Tamper); 11] = [
        ("an expert lost", |c| {
            if let KernelCall::MoeRoute(a) = c {
                a.n_experts -= 1;
            }
        }),
        ("a token without experts", |c| {
            if let KernelCall::MoeRoute(a) = c {
                a.n_tokens -= 1;
            }
        }),
        ("another token's experts", |c| {
            if let KernelCall::MoeRoute(a) = c {
                a.ids_stride = a.n_used.into();
            }
        }),
        ("another slot's expert", |c| {
            if let KernelCall::MoeRoute(a) = c {
                a.ids = a.ids.wrapping_add(1);
            }
        }),
        ("one input for all slots", |c| {
            if let KernelCall::MoeToH16(a) = c {
                a.per_slot = 0;
            }
        }),
        ("one input for all tokens", |c| {
            if let KernelCall::MoeToH16(a) = c {
                a.x_stride = 0;
            }
        }),
        ("one expert for all", |c| {
            if let KernelCall::MoeMm(a) = c {
                a.expert_bytes = 0;
            }
        }),
        ("rows of weights apart", |c| {
            if let KernelCall::MoeMm(a) = c {
                a.row_bytes += 34;
            }
        }),
        ("a row lost", |c| {
            if let KernelCall::MoeMm(a) = c {
                a.n_rows -= 1;
            }
        }),
        ("gate and up exchanged", |c| {
            if let KernelCall::MoeMm(a) = c {
                if a.glu >= 0 {
                    std::mem::swap(&mut a.w, &mut a.w2);
                }
            }
        }),
        ("results of pairs over each other", |c| {
            if let KernelCall::MoeMm(a) = c {
                a.dst_stride = 0;
            }
        }),
    ];
    assert_eq!(unnoticed(&base, &faults), [""; 0]);
}

#[test]
fn planted_faults_are_noticed() {
    let base = model(Shape {
        n_tokens: 2,
        ..Shape::tiny(Family::Gemma3)
    });
    let faults: [(&str, Tamper); 8] = [
        ("eps of the first norm", |c| {
            if let KernelCall::Norm(a) = c {
                a.eps1 = 100.0;
            }
        }),
        ("eps of the second norm", |c| {
            if let KernelCall::Norm(a) = c {
                a.eps2 = 100.0;
            }
        }),
        ("heads swapped", |c| {
            if let KernelCall::QkvTail(a) = c {
                let part: &mut QkvPart = &mut a.part[0];
                // SAFETY: an address for the fake device, which is not followed here.
                part.src = part.src.wrapping_add(part.head_dim as usize);
                part.n_heads = 1;
            }
        }),
        ("a row lost", |c| {
            if let KernelCall::Gemv(a) = c {
                a.seg[0].n_rows -= 1;
            }
        }),
        ("a token lost", |c| {
            if let KernelCall::QkvTail(a) = c {
                a.n_tokens -= 1;
            }
        }),
        ("a key lost", |c| {
            if let KernelCall::DecAttn(a) = c {
                a.n_kv -= 1;
            }
        }),
        ("one mask for all tokens", |c| {
            if let KernelCall::DecAttn(a) = c {
                a.mask_token_bytes = 0;
            }
        }),
        ("no scale", |c| {
            if let KernelCall::QkvTail(a) = c {
                a.part[0].scale = 1.0;
            }
        }),
    ];
    assert_eq!(unnoticed(&base, &faults), [""; 0]);
}
