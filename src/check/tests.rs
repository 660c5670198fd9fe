//! Recordings as a right host would make them, computed here in plain f32, and the same with one thing wrong.

use super::recording::Recording;
use super::site::{compare, SiteError};
use super::{check_recording, GraphReport, Report, WindowReport};
use crate::graph::dump::GraphRecord;
use crate::graph::{DType, GraphBuilder, Op, OwnedGraph, TensorId};
use crate::kernel::QkvTailArgs;
use crate::reference::quant::{dequantize_row, Q8Row};
use crate::window::pattern::Match;
use crate::window::thresholds::Thresholds;
use crate::window::{match_graph, KernelCall, Resources, Window, WINDOWS};
use half::f16;
use std::borrow::Cow;

/// However few tokens there are.
const ALL_SIZES: Thresholds = Thresholds {
    mm_min_tokens: Some(0),
    fa4_min_tokens: Some(0),
};

/// Numbers that repeat for no length of interest, in (-1, 1).
fn noise(seed: usize, n: usize) -> Vec<f32> {
    let wave = |i: usize| ((i * i * 7 + i * 131 + seed * 977) as f32 * 0.618_034).sin();
    (0..n).map(wave).collect()
}

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A graph in the making, with what its tensors hold.
#[derive(Default)]
struct Tape {
    builder: GraphBuilder,
    values: Vec<Option<Vec<u8>>>,
}

impl Tape {
    fn set(&mut self, id: TensorId, bytes: Vec<u8>) -> TensorId {
        self.values.resize(self.values.len().max(id + 1), None);
        self.values[id] = Some(bytes);
        id
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> TensorId {
        let id = self.builder.weight(name, DType::F32, [values.len() as i64, 1, 1, 1]);
        self.set(id, f32_bytes(values))
    }

    fn rows(&mut self, name: &str, values: &[f32], n_rows: usize) -> TensorId {
        let id = self
            .builder
            .input(name, DType::F32, [(values.len() / n_rows) as i64, n_rows as i64, 1, 1]);
        self.set(id, f32_bytes(values))
    }

    fn node(&mut self, name: &str, op: Op, ne: [i64; 4], src: &[TensorId], params: &[i32], values: &[f32]) -> TensorId {
        let src: Vec<_> = src.iter().copied().map(Some).collect();
        let id = self.builder.node(name, op, DType::F32, ne, &src);
        self.builder.tensor_mut(id).params = params.to_vec();
        self.set(id, f32_bytes(values))
    }

    fn finish(self) -> (GraphRecord, Vec<Option<Vec<u8>>>) {
        (self.builder.finish(), self.values)
    }
}

fn id(graph: &GraphRecord, name: &str) -> TensorId {
    graph
        .tensors
        .iter()
        .position(|t| t.name == name)
        .unwrap_or_else(|| panic!("no tensor {name}"))
}

/// What the check says of one window of a recording.
fn check((graph, values): (GraphRecord, Vec<Option<Vec<u8>>>), window: &str) -> WindowReport {
    let values = values.into_iter().map(|v| v.map(Cow::Owned)).collect();
    let reports = check_recording(&Recording::new(graph, values), ALL_SIZES, |_| true).expect("a graph");
    reports
        .into_iter()
        .find(|r| r.window == window)
        .expect("a window of the table")
}

fn passes(report: &WindowReport) -> bool {
    report.sites == 1 && report.compared == 1 && report.errors.is_empty() && report.worst.as_ref().unwrap().is_within()
}

/// Found, compared, and beyond its bound: a site that is declined would prove nothing.
fn is_caught(report: &WindowReport) -> bool {
    report.compared == 1 && !report.worst.as_ref().unwrap().is_within()
}

fn rms_norm(x: &[f32], n: usize, eps: f32) -> Vec<f32> {
    x.chunks(n)
        .flat_map(|row| {
            let mean = row.iter().map(|v| f64::from(v * v)).sum::<f64>() as f32 / n as f32;
            let factor = 1.0 / (mean + eps).sqrt();
            row.iter().map(move |v| v * factor).collect::<Vec<_>>()
        })
        .collect()
}

fn zip(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> Vec<f32> {
    a.iter().zip(b.iter().cycle()).map(|(a, b)| f(*a, *b)).collect()
}

const N: usize = 64;
const ROWS: usize = 3;
const EPS: f32 = 1e-6;

fn sandwich() -> (GraphRecord, Vec<Option<Vec<u8>>>) {
    let mut tape = Tape::default();
    // Small enough for eps to matter.
    let h: Vec<f32> = noise(1, N * ROWS).iter().map(|v| v * 1e-3).collect();
    let (x, w1, w2) = (noise(2, N * ROWS), noise(3, N), noise(4, N));
    let n1 = rms_norm(&h, N, EPS);
    let p = zip(&n1, &w1, |a, b| a * b);
    let y = zip(&p, &x, |a, b| a + b);
    let n2 = rms_norm(&y, N, EPS);
    let z = zip(&n2, &w2, |a, b| a * b);
    let ne = [N as i64, ROWS as i64, 1, 1];
    let eps = EPS.to_bits() as i32;
    let (th, tx) = (tape.rows("h", &h, ROWS), tape.rows("x", &x, ROWS));
    let (tw1, tw2) = (tape.vector("w1", &w1), tape.vector("w2", &w2));
    let tn1 = tape.node("n1", Op::RmsNorm, ne, &[th], &[eps], &n1);
    let tp = tape.node("p", Op::Mul, ne, &[tn1, tw1], &[], &p);
    let ty = tape.node("y", Op::Add, ne, &[tp, tx], &[], &y);
    let tn2 = tape.node("n2", Op::RmsNorm, ne, &[ty], &[eps], &n2);
    let tz = tape.node("z", Op::Mul, ne, &[tn2, tw2], &[], &z);
    for output in [ty, tz] {
        // Read by the rest of the model.
        tape.builder.tensor_mut(output).uses += 1;
    }
    tape.finish()
}

#[test]
fn a_right_sandwich_passes() {
    let report = check(sandwich(), "SANDWICH_NORM");
    assert!(passes(&report), "{report:?}");
    assert_eq!(report.values, 2 * N * ROWS);
}

#[test]
fn a_wrong_eps_is_caught() {
    let mut case = sandwich();
    let n1 = id(&case.0, "n1");
    case.0.tensors[n1].params = vec![(EPS * 1.01).to_bits() as i32];
    let report = check(case, "SANDWICH_NORM");
    assert!(is_caught(&report), "{report:?}");
}

#[test]
fn exchanged_norm_weights_are_caught() {
    let mut case = sandwich();
    let (w1, w2) = (id(&case.0, "w1"), id(&case.0, "w2"));
    case.1.swap(w1, w2);
    let report = check(case, "SANDWICH_NORM");
    assert!(is_caught(&report), "{report:?}");
}

#[test]
fn a_lost_row_and_a_nan_are_caught() {
    for byte in [0x00, 0xff] {
        let mut case = sandwich();
        let z = id(&case.0, "z");
        case.1[z].as_mut().unwrap()[4 * N * (ROWS - 1)..].fill(byte);
        let report = check(case, "SANDWICH_NORM");
        assert!(is_caught(&report), "{byte:#x}: {report:?}");
    }
}

#[test]
fn an_input_that_was_not_recorded_is_an_error() {
    let mut case = sandwich();
    let x = id(&case.0, "x");
    case.1[x] = None;
    let report = check(case, "SANDWICH_NORM");
    assert_eq!((report.compared, report.errors.len()), (0, 1), "{report:?}");
    assert!(report.errors[0].contains("x"), "{}", report.errors[0]);
}

/// Q8_0 blocks of these values.
fn q8_0(values: &[f32]) -> Vec<u8> {
    values
        .chunks(32)
        .flat_map(|block| {
            let d = f16::from_f32(block.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0);
            let quants: Vec<u8> = block.iter().map(|v| (v / d.to_f32()).round() as i8 as u8).collect();
            d.to_le_bytes().into_iter().chain(quants)
        })
        .collect()
}

/// `w . x` for each token, the input rounded to 8 bits as ggml does.
fn mat_vec(w: &[u8], k: usize, x: &[f32]) -> Vec<f32> {
    x.chunks(k)
        .flat_map(|x| {
            let x = Q8Row::quantize(x).dequantize();
            let dot = |row: &[u8]| {
                let row = dequantize_row(DType::Q8_0 as i32, row, k).unwrap();
                row.iter().zip(&x).fold(0f32, |sum, (w, x)| sum + (w * x) as f32)
            };
            w.chunks(k / 32 * 34).map(dot).collect::<Vec<_>>()
        })
        .collect()
}

fn glu(rows: usize) -> (GraphRecord, Vec<Option<Vec<u8>>>) {
    let mut tape = Tape::default();
    let x = noise(5, N * rows);
    let weights = [noise(6, N * 32), noise(7, N * 32)].map(|w| q8_0(&w));
    let [gate, up] = [0, 1].map(|i| mat_vec(&weights[i], N, &x));
    let y = zip(&gate, &up, |g, u| g / (1.0 + (-g).exp()) * u);
    let tx = tape.rows("x", &x, rows);
    let [wg, wu] = ["wg", "wu"].map(|name| tape.builder.weight(name, DType::Q8_0, [N as i64, 32, 1, 1]));
    let [bytes_g, bytes_u] = weights;
    tape.set(wg, bytes_g);
    tape.set(wu, bytes_u);
    let ne = [32, rows as i64, 1, 1];
    let tg = tape.node("gate", Op::MulMat, ne, &[wg, tx], &[], &gate);
    let tu = tape.node("up", Op::MulMat, ne, &[wu, tx], &[], &up);
    let ty = tape.node("y", Op::Glu, ne, &[tg, tu], &[2], &y);
    tape.builder.tensor_mut(ty).uses += 1;
    tape.finish()
}

/// More rows than the mat-vec windows take.
const MANY: usize = 11;

#[test]
fn a_right_glu_passes_and_exchanged_weights_are_caught() {
    for (rows, window) in [(ROWS, "GLU_GEMV"), (MANY, "GEGLU_FFN")] {
        let report = check(glu(rows), window);
        assert!(passes(&report), "{report:?}");
        // The input's rounding is most of the bound, and not all of it is used up.
        assert!(report.worst.as_ref().unwrap().ratio > 0.01, "{report:?}");
        let mut case = glu(rows);
        let (wg, wu) = (id(&case.0, "wg"), id(&case.0, "wu"));
        case.1.swap(wg, wu);
        let report = check(case, window);
        assert!(is_caught(&report), "{report:?}");
    }
}

/// A product, with bias and residual if asked for, in a batch of two.
fn product(bias: bool, residual: bool) -> (GraphRecord, Vec<Option<Vec<u8>>>) {
    let mut tape = Tape::default();
    let x = noise(20, N * 2 * MANY);
    let w = q8_0(&noise(21, N * 32));
    let (b, res) = (noise(22, 32), noise(23, 32 * 2 * MANY));
    let mut values = mat_vec(&w, N, &x);
    let batch = [MANY as i64, 2, 1];
    let ne = [32, batch[0], batch[1], batch[2]];
    let tx = tape
        .builder
        .input("x", DType::F32, [N as i64, batch[0], batch[1], batch[2]]);
    tape.set(tx, f32_bytes(&x));
    let tw = tape.builder.weight("w", DType::Q8_0, [N as i64, 32, 1, 1]);
    tape.set(tw, w);
    let mut last = tape.node("mm", Op::MulMat, ne, &[tw, tx], &[], &values);
    if bias {
        let tb = tape.vector("b", &b);
        values = zip(&values, &b, |a, b| a + b);
        last = tape.node("biased", Op::Add, ne, &[last, tb], &[], &values);
    }
    if residual {
        let tr = tape.builder.input("res", DType::F32, ne);
        tape.set(tr, f32_bytes(&res));
        values = zip(&values, &res, |a, b| a + b);
        last = tape.node("sum", Op::Add, ne, &[last, tr], &[], &values);
    }
    tape.builder.tensor_mut(last).uses += 1;
    tape.finish()
}

#[test]
fn right_products_pass_and_their_faults_are_caught() {
    for (bias, residual, window) in [
        (false, false, "MM_PREFILL"),
        (true, false, "MM_RES"),
        (false, true, "MM_RES"),
        (true, true, "MM_RES"),
    ] {
        let report = check(product(bias, residual), window);
        assert!(passes(&report), "{report:?}");
        assert_eq!(report.values, 32 * 2 * MANY);
        // Two rows of the input exchanged.
        let mut case = product(bias, residual);
        let x = id(&case.0, "x");
        case.1[x].as_mut().unwrap().rotate_left(4 * N);
        assert!(is_caught(&check(case, window)));
        for name in ["b", "res"] {
            let mut case = product(bias, residual);
            let Some(term) = case.0.tensors.iter().position(|t| t.name == name) else {
                continue;
            };
            case.1[term].as_mut().unwrap().rotate_left(4);
            assert!(is_caught(&check(case, window)), "{name}");
        }
    }
}

const EXPERTS: usize = 3;
const USED: usize = 2;
/// The last expert has no pair.
const IDS: [i32; USED * ROWS] = [1, 0, 0, 1, 0, 1];

/// Gate, up, their unit and down of experts. Ids are the first columns of a sort.
fn experts() -> (GraphRecord, Vec<Option<Vec<u8>>>) {
    let mut tape = Tape::default();
    let x = noise(30, N * ROWS);
    let [gate, up, down] = [31, 32, 33].map(|seed| q8_0(&noise(seed, N * N * EXPERTS)));
    // A row of input for each pair.
    let products = |w: &[u8], rows: &[f32]| -> Vec<f32> {
        let of_expert = |id: i32| &w[id as usize * w.len() / EXPERTS..][..w.len() / EXPERTS];
        let pairs = IDS.iter().zip(rows.chunks(N));
        pairs.flat_map(|(&id, row)| mat_vec(of_expert(id), N, row)).collect()
    };
    let rows: Vec<f32> = x.chunks(N).flat_map(|row| row.repeat(USED)).collect();
    let (g, u) = (products(&gate, &rows), products(&up, &rows));
    let unit = zip(&g, &u, |g, u| g / (1.0 + (-g).exp()) * u);
    let out = products(&down, &unit);

    let tx = tape.builder.input("x", DType::F32, [N as i64, 1, ROWS as i64, 1]);
    tape.set(tx, f32_bytes(&x));
    let sorted = IDS.chunks(USED).flat_map(|ids| [ids[0], ids[1], 2]);
    let bytes: Vec<u8> = sorted.flat_map(i32::to_le_bytes).collect();
    let columns = |n: usize| [n as i64, ROWS as i64, 1, 1];
    let all = tape.builder.input("sorted", DType::I32, columns(EXPERTS));
    tape.set(all, bytes.clone());
    let nb = tape.builder.tensor_mut(all).nb;
    let ids = tape
        .builder
        .view_node("ids", Op::View, all, columns(USED), 0, &[Some(all)]);
    tape.builder.tensor_mut(ids).nb = nb;
    tape.set(ids, bytes[..bytes.len() - 4].to_vec());
    let [wg, wu, wd] = [("wg", gate), ("wu", up), ("wd", down)].map(|(name, bytes)| {
        let ne = [N as i64, N as i64, EXPERTS as i64, 1];
        let w = tape.builder.weight(name, DType::Q8_0, ne);
        tape.set(w, bytes)
    });
    let ne = [N as i64, USED as i64, ROWS as i64, 1];
    let tg = tape.node("gate", Op::MulMatId, ne, &[wg, tx, ids], &[], &g);
    let tu = tape.node("up", Op::MulMatId, ne, &[wu, tx, ids], &[], &u);
    let ty = tape.node("unit", Op::Glu, ne, &[tg, tu], &[2], &unit);
    let td = tape.node("down", Op::MulMatId, ne, &[wd, ty, ids], &[], &out);
    tape.builder.tensor_mut(td).uses += 1;
    tape.finish()
}

#[test]
fn right_experts_pass_and_their_faults_are_caught() {
    for (window, weight, input) in [("MOE_FFN", "wg", "x"), ("MOE_PREFILL", "wd", "unit")] {
        let report = check(experts(), window);
        assert!(passes(&report), "{report:?}");
        assert_eq!(report.values, N * USED * ROWS);
        // The next row of input, the next expert, the next row of an expert.
        for (name, bytes) in [(input, 4 * N), (weight, N * N / 32 * 34), (weight, N / 32 * 34)] {
            let mut case = experts();
            let t = id(&case.0, name);
            case.1[t].as_mut().unwrap().rotate_left(bytes);
            let report = check(case, window);
            assert!(is_caught(&report), "{name} by {bytes}: {report:?}");
        }
        let mut case = experts();
        let ids = id(&case.0, "ids");
        case.1[ids].as_mut().unwrap()[..8].rotate_left(4);
        let report = check(case, window);
        assert!(is_caught(&report), "experts exchanged: {report:?}");
        // B32: a row that no kernel writes cannot be compared.
        let mut case = experts();
        case.1[ids].as_mut().unwrap()[..4].copy_from_slice(&(-1i32).to_le_bytes());
        let report = check(case, window);
        assert!(
            report.compared == 0 && report.errors[0].contains("unwritten"),
            "{report:?}"
        );
    }
}

#[test]
fn another_activation_is_caught() {
    let mut case = glu(ROWS);
    let y = id(&case.0, "y");
    case.0.tensors[y].params = vec![0];
    let report = check(case, "GLU_GEMV");
    assert!(is_caught(&report), "{report:?}");
}

const HEAD: usize = 32;
const CELLS: usize = 8;
const FIRST_CELL: usize = 2;

fn rotate(x: &[f32], n_heads: usize, positions: &[i32]) -> Vec<f32> {
    let mut out = x.to_vec();
    for (head, out) in out.chunks_mut(HEAD).enumerate() {
        let pos = positions[head / n_heads] as f32;
        for i in 0..HEAD / 2 {
            let (sin, cos) = (pos * 10000f32.powf(-2.0 * i as f32 / HEAD as f32)).sin_cos();
            let (a, b) = (out[i], out[i + HEAD / 2]);
            (out[i], out[i + HEAD / 2]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }
    out
}

/// Two heads of Q, one of K and V; the cache holds f16.
fn qkv() -> (GraphRecord, Vec<Option<Vec<u8>>>) {
    let mut tape = Tape::default();
    let x = noise(8, N * ROWS);
    let positions: Vec<i32> = (0..ROWS as i32).map(|t| t + 5).collect();
    let tx = tape.rows("x", &x, ROWS);
    let pos = tape.builder.input("pos", DType::I32, [ROWS as i64, 1, 1, 1]);
    tape.set(pos, positions.iter().flat_map(|p| p.to_le_bytes()).collect());
    let rows = tape.builder.input("rows", DType::I64, [ROWS as i64, 1, 1, 1]);
    tape.set(
        rows,
        (0..ROWS as i64)
            .flat_map(|t| (t + FIRST_CELL as i64).to_le_bytes())
            .collect(),
    );
    let mut rope = vec![0, HEAD as i32, 2, 0, 4096];
    rope.extend([10000f32, 1.0, 0.0, 1.0, 32.0, 1.0].map(|v| v.to_bits() as i32));

    for (name, n_heads, seed) in [("q", 2, 9), ("k", 1, 10), ("v", 1, 11)] {
        let width = n_heads * HEAD;
        let w = q8_0(&noise(seed, N * width));
        let product = mat_vec(&w, N, &x);
        let tw = tape
            .builder
            .weight(&format!("w{name}"), DType::Q8_0, [N as i64, width as i64, 1, 1]);
        tape.set(tw, w);
        let flat = [width as i64, ROWS as i64, 1, 1];
        let mut last = tape.node(name, Op::MulMat, flat, &[tw, tx], &[], &product);
        let mut values = product;
        if name != "v" {
            let heads = [HEAD as i64, n_heads as i64, ROWS as i64, 1];
            last = tape
                .builder
                .view_node(&format!("{name} heads"), Op::Reshape, last, heads, 0, &[Some(last)]);
            values = rotate(&values, n_heads, &positions);
            last = tape.node(&format!("{name} rope"), Op::Rope, heads, &[last, pos], &rope, &values);
        }
        if name == "q" {
            tape.builder.tensor_mut(last).uses += 1;
            continue;
        }
        let cache = tape
            .builder
            .input(&format!("{name} cache"), DType::F16, [width as i64, CELLS as i64, 1, 1]);
        let mut cells = vec![f16::ONE; width * CELLS];
        tape.set(cache, cells.iter().flat_map(|c| c.to_le_bytes()).collect());
        if name == "k" {
            last = tape.builder.view_node("k flat", Op::View, last, flat, 0, &[Some(last)]);
        }
        let ne = [width as i64, CELLS as i64, 1, 1];
        let sources = [Some(last), Some(rows), Some(cache)];
        let store = tape
            .builder
            .view_node(&format!("{name} store"), Op::SetRows, cache, ne, 0, &sources);
        for (cell, v) in cells[FIRST_CELL * width..].iter_mut().zip(&values) {
            *cell = f16::from_f32(*v);
        }
        tape.set(store, cells.iter().flat_map(|c| c.to_le_bytes()).collect());
    }
    tape.finish()
}

#[test]
fn a_right_qkv_passes_and_only_stored_rows_are_compared() {
    let report = check(qkv(), "QKV_GEMV");
    assert!(passes(&report), "{report:?}");
    assert_eq!(report.values, (2 + 1 + 1) * HEAD * ROWS);
}

#[test]
fn exchanged_heads_are_caught() {
    let mut case = qkv();
    let q = id(&case.0, "q rope");
    let bytes = case.1[q].as_mut().unwrap();
    let (first, second) = bytes.split_at_mut(4 * HEAD);
    first.swap_with_slice(&mut second[..4 * HEAD]);
    let report = check(case, "QKV_GEMV");
    assert!(is_caught(&report), "{report:?}");
}

#[test]
fn a_wrong_position_is_caught() {
    let mut case = qkv();
    let pos = id(&case.0, "pos");
    case.1[pos].as_mut().unwrap()[0] += 1;
    let report = check(case, "QKV_GEMV");
    assert!(is_caught(&report), "{report:?}");
}

#[test]
fn a_wrong_cache_row_is_caught() {
    let mut case = qkv();
    let rows = id(&case.0, "rows");
    case.1[rows].as_mut().unwrap()[0] = 0;
    let report = check(case, "QKV_GEMV");
    assert!(is_caught(&report), "{report:?}");
}

#[test]
fn a_store_outside_of_the_cache_is_an_error() {
    let mut case = qkv();
    let rows = id(&case.0, "rows");
    case.1[rows].as_mut().unwrap()[0] = CELLS as u8;
    let report = check(case, "QKV_GEMV");
    assert_eq!(report.compared, 0, "{report:?}");
    assert!(report.errors[0].contains("write at"), "{}", report.errors[0]);
}

fn tampered(m: &Match, r: &Resources, fault: impl Fn(&mut QkvTailArgs)) -> Vec<KernelCall> {
    let mut calls = (WINDOWS[0].calls)(m, r);
    for call in &mut calls {
        if let KernelCall::QkvTail(args) = call {
            fault(args);
        }
    }
    calls
}

/// Rows of a cache that were not written hold what they held: nothing to compare, but something is missing.
#[test]
fn a_store_that_is_lost_is_an_error() {
    let (graph, values) = qkv();
    let recording = Recording::new(graph, values.into_iter().map(|v| v.map(Cow::Owned)).collect());
    let owned = OwnedGraph::new(recording.graph()).unwrap();
    let matched = match_graph(owned.graph(), owned.host(), ALL_SIZES, |_| true);
    let site = matched.sites.iter().find(|s| s.window().name == "QKV_GEMV").unwrap();
    type Calls = fn(&Match, &Resources) -> Vec<KernelCall>;
    let faults: [Calls; 3] = [
        |m, r| tampered(m, r, |_| {}),
        |m, r| tampered(m, r, |a| a.n_parts -= i32::from(a.n_parts == 2)),
        |m, r| tampered(m, r, |a| a.n_tokens -= i32::from(a.n_parts == 2)),
    ];
    let lost: Vec<bool> = faults
        .map(|calls| {
            let window = Window {
                calls,
                ..*site.window()
            };
            matches!(
                compare(&window, &site.m, &owned, &recording),
                Err(SiteError::NotStored { .. })
            )
        })
        .to_vec();
    assert_eq!(lost, [false, true, true]);
}

#[test]
fn a_switched_off_window_is_not_reported() {
    let (graph, values) = sandwich();
    let recording = Recording::new(graph, values.into_iter().map(|v| v.map(Cow::Owned)).collect());
    let off = crate::window::WINDOWS
        .iter()
        .position(|w| w.name == "SANDWICH_NORM")
        .unwrap();
    let reports = check_recording(&recording, ALL_SIZES, |w| w != off).unwrap();
    assert!(reports.iter().all(|r| r.window != "SANDWICH_NORM"));
}

#[test]
fn a_report_without_sites_or_beyond_a_bound_fails() {
    let report = |windows: Vec<WindowReport>| Report {
        model: "m".into(),
        layers: 1,
        ggml: "0".into(),
        graphs: vec![GraphReport {
            name: "decode".into(),
            tokens: 1,
            sequences: 1,
            nodes: 5,
            windows,
        }],
    };
    let nothing = report(vec![WindowReport {
        window: "SANDWICH_NORM".into(),
        ..WindowReport::default()
    }]);
    assert!(nothing.failures()[0].contains("no window site"));
    let good = report(vec![check(sandwich(), "SANDWICH_NORM")]);
    assert_eq!(good.failures(), Vec::<String>::new());
    assert_eq!(
        (
            good.sites("decode", "SANDWICH_NORM"),
            good.sites("prefill", "SANDWICH_NORM")
        ),
        (1, 0)
    );
    let mut case = sandwich();
    let n2 = id(&case.0, "n2");
    case.0.tensors[n2].params = vec![0.5f32.to_bits() as i32];
    let bad = report(vec![check(case, "SANDWICH_NORM")]).failures();
    assert!(
        bad.len() == 1 && bad[0].contains("SANDWICH_NORM in the decode graph"),
        "{bad:?}"
    );
}
