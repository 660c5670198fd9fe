//! A machine that runs graphs twice: node by node as ggml defines the operations, and through the engine, whose kernel calls
//! it executes as unkindly as a GPU may: every output element is written before the inputs of the next one are read.

use ggml_flashrt::cache::{BlockSource, TICKET_BYTES};
use ggml_flashrt::graph::dump::{GraphRecord, TensorRecord};
use ggml_flashrt::graph::{DType, Op, OwnedGraph, FLAG_COMPUTE};
use ggml_flashrt::kernel::{
    moe_max_rows, CudaError, DecAttnArgs, GemvArgs, H16Args, Launch, MaskTilesArgs, MmArgs, MoeH16Args, MoeMmArgs,
    MoeRouteArgs, NormArgs, PrefillFa4Args, QkvPart, QkvTailArgs, H16,
};
use ggml_flashrt::window::engine::{Backend, Engine, EvalStatus};
use ggml_flashrt::window::settings::Settings;
use ggml_flashrt::window::thresholds::Thresholds;
use ggml_flashrt::window::{KernelCall, WINDOWS};
use half::{bf16, f16};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

const ARENA: usize = 1 << 44;
/// Scratch that tiny graphs really use.
const ARENA_BYTES: usize = TICKET_BYTES + (1 << 15);

/// Ids of experts in tensors whose name begins with "experts": 0 up to here.
const EXPERT_IDS: u64 = 4;

/// Device memory: the graph's tensors, and the engine's own blocks.
#[derive(Clone)]
pub struct Memory {
    base: usize,
    bytes: Vec<u8>,
    arena: Vec<u8>,
    /// Hand-offs, by address: their bytes, and the row. Kept exact: what is tested is who reads what, not the quantiser.
    handed_over: HashMap<usize, (usize, Vec<f64>)>,
}

impl Memory {
    /// Memory for a graph, filled with values that differ everywhere.
    pub fn for_graph(record: &GraphRecord, seed: u64) -> Memory {
        let end = record
            .tensors
            .iter()
            .map(|t| t.data as usize + extent(t))
            .max()
            .unwrap_or(0);
        let base = record.tensors.iter().map(|t| t.data as usize).min().unwrap_or(0);
        let mut memory = Memory {
            base,
            bytes: vec![0; end - base + 64],
            arena: vec![0xff; ARENA_BYTES],
            handed_over: HashMap::new(),
        };
        let mut random = seed | 1;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        // Results start as noise too: nothing may depend on what was there.
        for byte in &mut memory.bytes {
            *byte = (next() >> 56) as u8 & 0x3b;
        }
        for t in record
            .tensors
            .iter()
            .filter(|t| t.code == Op::None as u8 && t.view_src.is_none())
        {
            let rows = t.ne[1] * t.ne[2] * t.ne[3];
            for i in 0..(t.ne[0] * rows) as usize {
                let at = t.data as usize + i * DType::from_number(t.dtype).map_or(4, DType::block_bytes);
                let unit = (next() >> 40) as f64 / (1u64 << 24) as f64 * 2.0 - 1.0;
                match DType::from_number(t.dtype) {
                    Some(DType::F32) => memory.write_bytes(at, &(unit as f32).to_le_bytes()),
                    Some(DType::F16) => memory.write_bytes(at, &f16::from_f64(unit).to_le_bytes()),
                    Some(DType::BF16) => memory.write_bytes(at, &bf16::from_f64(unit).to_le_bytes()),
                    Some(DType::I32) if t.name.starts_with("experts") => {
                        memory.write_bytes(at, &((next() % EXPERT_IDS) as i32).to_le_bytes());
                    }
                    Some(DType::I32) => memory.write_bytes(at, &(3 + 5 * i as i32).to_le_bytes()),
                    Some(DType::I64) => memory.write_bytes(at, &(2 + 3 * i as i64).to_le_bytes()),
                    Some(DType::Q8_0) if i < (t.ne[0] / 32 * rows) as usize => {
                        memory.write_bytes(at, &f16::from_f64(0.01 * (1.5 + unit)).to_le_bytes());
                        for b in 0..32 {
                            memory.write_bytes(at + 2 + b, &[next() as u8]);
                        }
                    }
                    _ => {}
                }
            }
        }
        memory
    }

    fn at(&self, address: usize, len: usize) -> &[u8] {
        if address >= ARENA {
            &self.arena[address - ARENA..][..len]
        } else {
            &self.bytes[address - self.base..][..len]
        }
    }

    /// A row of a hand-off, in `len` bytes of its own.
    fn hand_over(&mut self, address: usize, len: usize, row: Vec<f64>) {
        self.drop_hand_offs(address, len);
        self.arena[address - ARENA..][..len].fill(0xee);
        self.handed_over.insert(address, (len, row));
    }

    /// Whatever is written over a hand-off destroys it.
    fn drop_hand_offs(&mut self, address: usize, len: usize) {
        self.handed_over
            .retain(|start, (n, _)| address + len <= *start || start + *n <= address);
    }

    fn received(&self, address: usize) -> Vec<f64> {
        let found = self.handed_over.get(&address);
        found
            .unwrap_or_else(|| panic!("a hand-off that nobody made is read"))
            .1
            .clone()
    }

    fn write_bytes(&mut self, address: usize, bytes: &[u8]) {
        if address >= ARENA {
            self.drop_hand_offs(address, bytes.len());
            self.arena[address - ARENA..][..bytes.len()].copy_from_slice(bytes);
        } else {
            self.bytes[address - self.base..][..bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Fills a contiguous tensor of i32.
    pub fn set_i32s(&mut self, t: &TensorRecord, values: &[i32]) {
        for (i, v) in values.iter().enumerate() {
            self.write_bytes(t.data as usize + 4 * i, &v.to_le_bytes());
        }
    }

    /// Fills a contiguous tensor of f16.
    pub fn set_f16s(&mut self, t: &TensorRecord, values: impl IntoIterator<Item = f64>) {
        for (i, v) in values.into_iter().enumerate() {
            self.write_bytes(t.data as usize + 2 * i, &f16::from_f64(v).to_le_bytes());
        }
    }

    fn f32(&self, address: usize) -> f64 {
        f64::from(f32::from_le_bytes(self.at(address, 4).try_into().unwrap()))
    }

    fn f32s(&self, address: usize, n: usize) -> Vec<f64> {
        (0..n).map(|i| self.f32(address + 4 * i)).collect()
    }

    fn load(&self, address: usize, dtype: i32) -> f64 {
        match DType::from_number(dtype) {
            Some(DType::F16) => f16::from_le_bytes(self.at(address, 2).try_into().unwrap()).to_f64(),
            Some(DType::BF16) => bf16::from_le_bytes(self.at(address, 2).try_into().unwrap()).to_f64(),
            Some(DType::F32) => self.f32(address),
            other => panic!("cannot read {other:?}"),
        }
    }

    fn store(&mut self, address: usize, dtype: i32, value: f64) {
        match DType::from_number(dtype) {
            Some(DType::F16) => self.write_bytes(address, &f16::from_f64(value).to_le_bytes()),
            Some(DType::BF16) => self.write_bytes(address, &bf16::from_f64(value).to_le_bytes()),
            Some(DType::F32) => self.write_bytes(address, &(value as f32).to_le_bytes()),
            other => panic!("cannot write {other:?}"),
        }
    }

    fn index(&self, address: usize, dtype: i32, i: usize) -> i64 {
        if dtype == DType::I64 as i32 {
            i64::from_le_bytes(self.at(address + 8 * i, 8).try_into().unwrap())
        } else {
            i32::from_le_bytes(self.at(address + 4 * i, 4).try_into().unwrap()).into()
        }
    }

    fn weights(&self, address: usize, dtype: i32, k: usize) -> Vec<f64> {
        match DType::from_number(dtype) {
            Some(DType::Q8_0) => (0..k)
                .map(|i| {
                    let block = address + i / 32 * 34;
                    self.load(block, DType::F16 as i32) * f64::from(self.at(block + 2 + i % 32, 1)[0] as i8)
                })
                .collect(),
            Some(d) => (0..k)
                .map(|i| self.load(address + i * d.block_bytes(), dtype))
                .collect(),
            None => panic!("type {dtype}"),
        }
    }

    /// All values of a tensor.
    pub fn values(&self, t: &TensorRecord) -> Vec<f64> {
        indices(t.ne).map(|i| self.load(element(t, i), t.dtype)).collect()
    }
}

/// Bytes a tensor spans.
pub fn extent(t: &TensorRecord) -> usize {
    let d = DType::from_number(t.dtype).unwrap();
    let row = if t.nb[0] == d.block_bytes() {
        t.ne[0] as usize / d.block_len() * d.block_bytes()
    } else {
        (t.ne[0] as usize).saturating_sub(1) * t.nb[0] + d.block_bytes()
    };
    row + (1..4)
        .map(|i| (t.ne[i] as usize).saturating_sub(1) * t.nb[i])
        .sum::<usize>()
}

fn indices(ne: [i64; 4]) -> impl Iterator<Item = [usize; 4]> {
    let [a, b, c, d] = ne.map(|n| n as usize);
    (0..a * b * c * d).map(move |i| [i % a, i / a % b, i / (a * b) % c, i / (a * b * c)])
}

fn element(t: &TensorRecord, i: [usize; 4]) -> usize {
    t.data as usize + (0..4).map(|d| i[d] * t.nb[d]).sum::<usize>()
}

fn param(t: &TensorRecord, i: usize) -> i32 {
    t.params.get(i).copied().unwrap_or(0)
}

fn param_f(t: &TensorRecord, i: usize) -> f64 {
    f64::from(f32::from_bits(param(t, i) as u32))
}

fn rms(x: &[f64], eps: f64) -> f64 {
    1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + eps).sqrt()
}

fn activation(kind: i32, g: f64) -> f64 {
    match kind {
        0 => g.max(0.0),
        1 => 0.5 * g * (1.0 + (0.797_884_560_802_865_4 * g * (1.0 + 0.044715 * g * g)).tanh()),
        2 => g / (1.0 + (-g).exp()),
        5 => g / (1.0 + (-1.702 * g).exp()),
        _ => panic!("GLU kind {kind}"),
    }
}

/// Rotation of one head: the parameters that both sides know.
struct Rotation<'a> {
    n_dims: usize,
    neox: bool,
    base: f64,
    scale: f64,
    attn: f64,
    factors: Option<&'a [f64]>,
}

fn rotate(v: &mut [f64], pos: f64, r: &Rotation) {
    for i in 0..r.n_dims / 2 {
        let factor = r.factors.map_or(1.0, |f| f[i]);
        let theta = r.scale * pos * r.base.powf(-2.0 * i as f64 / r.n_dims as f64) / factor;
        let (a, b) = if r.neox {
            (i, i + r.n_dims / 2)
        } else {
            (2 * i, 2 * i + 1)
        };
        let (x, y) = (v[a], v[b]);
        v[a] = (x * theta.cos() - y * theta.sin()) * r.attn;
        v[b] = (x * theta.sin() + y * theta.cos()) * r.attn;
    }
}

/// Attention of one query; a row is its key, its value and what the mask adds to its score.
fn attend(
    n_v: usize,
    q: &[f64],
    scale: f64,
    softcap: f64,
    rows: impl Iterator<Item = (Vec<f64>, Vec<f64>, f64)>,
) -> Vec<f64> {
    let (mut total, mut out) = (0.0, vec![0.0; n_v]);
    for (k, v, bias) in rows {
        let mut score = scale * q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>();
        if softcap != 0.0 {
            score = softcap * (score / softcap).tanh();
        }
        let weight = (score + bias).exp();
        total += weight;
        out.iter_mut().zip(&v).for_each(|(out, v)| *out += weight * v);
    }
    out.iter()
        .map(|out| if total > 0.0 { out / total } else { 0.0 })
        .collect()
}

/// Runs one node as ggml defines it.
pub fn run_node(m: &mut Memory, g: &GraphRecord, id: usize) {
    let t = &g.tensors[id];
    let op = Op::from_code(t.code);
    if op.is_view() || t.flags & FLAG_COMPUTE == 0 {
        return;
    }
    let src = |i: usize| &g.tensors[t.src[i].unwrap()];
    let broadcast = |s: &TensorRecord, i: [usize; 4]| element(s, [0, 1, 2, 3].map(|d| i[d] % s.ne[d] as usize));
    let (mut out, mut products) = (Vec::new(), Vec::new());
    match op {
        Op::Add | Op::Mul => {
            for i in indices(t.ne) {
                let (a, b) = (
                    m.load(element(src(0), i), src(0).dtype),
                    m.load(broadcast(src(1), i), src(1).dtype),
                );
                out.push(if op == Op::Add { a + b } else { a * b });
            }
        }
        Op::Scale => {
            for i in indices(t.ne) {
                out.push(m.load(element(src(0), i), src(0).dtype) * param_f(t, 0) + param_f(t, 1));
            }
        }
        Op::RmsNorm => {
            for row in indices([1, t.ne[1], t.ne[2], t.ne[3]]) {
                let x: Vec<f64> = (0..t.ne[0] as usize)
                    .map(|c| m.load(element(src(0), [c, row[1], row[2], row[3]]), src(0).dtype))
                    .collect();
                let r = rms(&x, param_f(t, 0));
                out.extend(x.iter().map(|v| v * r));
            }
        }
        Op::MulMat => {
            let (w, x) = (src(0), src(1));
            for i in indices(t.ne) {
                let w_row = element(w, [0, i[0], 0, 0]);
                let weights = m.weights(w_row, w.dtype, w.ne[0] as usize);
                let x_row = element(x, [0, i[1], i[2], i[3]]);
                out.push(
                    weights
                        .iter()
                        .enumerate()
                        .map(|(k, w)| w * m.load(x_row + k * x.nb[0], x.dtype))
                        .sum(),
                );
            }
        }
        Op::MulMatId => {
            let (w, x, ids) = (src(0), src(1), src(2));
            for i in indices([1, t.ne[1], t.ne[2], 1]) {
                let (slot, token) = (i[1], i[2]);
                let expert = m.index(element(ids, [slot, token, 0, 0]), ids.dtype, 0);
                // Nobody computes such a row.
                if !(0..w.ne[2]).contains(&expert) {
                    continue;
                }
                for row in 0..t.ne[0] as usize {
                    let weights = m.weights(element(w, [0, row, expert as usize, 0]), w.dtype, w.ne[0] as usize);
                    let x_row = element(x, [0, slot % x.ne[1] as usize, token, 0]);
                    let terms = weights.iter().enumerate();
                    let sum = terms.map(|(k, w)| w * m.load(x_row + k * x.nb[0], x.dtype)).sum();
                    products.push((element(t, [row, slot, token, 0]), sum));
                }
            }
        }
        Op::Rope => {
            let factors = t.src.get(2).copied().flatten().map(|f| {
                let f = &g.tensors[f];
                m.f32s(f.data as usize, f.ne[0] as usize)
            });
            for row in indices([1, t.ne[1], t.ne[2], t.ne[3]]) {
                let mut v: Vec<f64> = (0..t.ne[0] as usize)
                    .map(|c| m.load(element(src(0), [c, row[1], row[2], row[3]]), src(0).dtype))
                    .collect();
                let rotation = Rotation {
                    n_dims: param(t, 1) as usize,
                    neox: param(t, 2) == 2,
                    base: param_f(t, 5),
                    scale: param_f(t, 6),
                    attn: param_f(t, 8),
                    factors: factors.as_deref(),
                };
                rotate(
                    &mut v,
                    m.index(src(1).data as usize, src(1).dtype, row[2]) as f64,
                    &rotation,
                );
                out.extend(v);
            }
        }
        Op::Glu => {
            for i in indices(t.ne) {
                let (g, u) = (
                    m.load(element(src(0), i), src(0).dtype),
                    m.load(element(src(1), i), src(1).dtype),
                );
                out.push(activation(param(t, 0), g) * u);
            }
        }
        Op::SetRows => {
            let (rows, from) = (src(1), src(0));
            for i in indices(from.ne) {
                let row = m.index(rows.data as usize, rows.dtype, i[1]) as usize;
                let value = m.load(element(from, i), from.dtype);
                let at = element(t, [i[0], row, i[2], i[3]]);
                m.store(at, t.dtype, value);
            }
            return;
        }
        Op::FlashAttnExt => {
            let (q, k, v) = (src(0), src(1), src(2));
            let mask = t.src.get(3).copied().flatten().map(|id| &g.tensors[id]);
            assert!(
                param(t, 1) == 0 && t.src.len() <= 4,
                "no interpreter for ALiBi and sinks"
            );
            let (group, dims_v) = ((q.ne[2] / k.ne[2]) as usize, v.ne[0] as usize);
            for i in indices([1, q.ne[2], q.ne[1], q.ne[3]]) {
                let (head, token, stream) = (i[1], i[2], i[3]);
                let row = |x: &TensorRecord, at: [usize; 3]| -> Vec<f64> {
                    (0..x.ne[0] as usize)
                        .map(|d| m.load(element(x, [d, at[0], at[1], at[2]]), x.dtype))
                        .collect()
                };
                let query = row(q, [token, head, stream]);
                let rows = (0..k.ne[1] as usize).map(|c| {
                    let bias = mask.map_or(0.0, |x| m.load(broadcast(x, [c, token, head, stream]), x.dtype));
                    (
                        row(k, [c, head / group, stream]),
                        row(v, [c, head / group, stream]),
                        bias,
                    )
                });
                out.extend(attend(dims_v, &query, param_f(t, 0), param_f(t, 2), rows));
            }
        }
        other => panic!("no interpreter for {other:?}"),
    }
    for (i, value) in indices(t.ne).zip(out) {
        m.store(element(t, i), t.dtype, value);
    }
    for (address, value) in products {
        m.store(address, t.dtype, value);
    }
}

fn run_norm(m: &mut Memory, a: &NormArgs) {
    let n = a.n_cols as usize;
    for row in 0..a.n_rows as usize {
        let at = |p: usize, stride: i64| p + row * stride as usize * 4;
        let h = m.f32s(at(a.h as usize, a.h_stride), n);
        let x = m.f32s(at(a.x as usize, a.x_stride), n);
        let (w2, r) = (m.f32s(a.w2 as usize, n), rms(&h, a.eps1.into()));
        let y: Vec<f64> = if a.w1.is_null() {
            (0..n).map(|i| x[i] + h[i]).collect()
        } else {
            let w1 = m.f32s(a.w1 as usize, n);
            (0..n).map(|i| x[i] + h[i] * r * w1[i]).collect()
        };
        let r2 = rms(&y, a.eps2.into());
        let z: Vec<f64> = (0..n).map(|i| y[i] * r2 * w2[i]).collect();
        if !a.y.is_null() {
            for (i, y) in y.iter().enumerate() {
                m.store(at(a.y as usize, a.y_stride) + 4 * i, 0, *y);
            }
        }
        if !a.z.is_null() {
            for (i, z) in z.iter().enumerate() {
                m.store(at(a.z as usize, a.z_stride) + 4 * i, 0, *z);
            }
        }
        if !a.zh.x.is_null() {
            hand_over_h16(m, a.zh, n, a.n_rows as usize, row, z.clone());
        }
        if !a.zq.qs.is_null() {
            m.hand_over(a.zq.qs as usize + row * n, n, z);
        }
    }
}

fn run_gemv(m: &mut Memory, a: &GemvArgs) {
    let k = a.k as usize;
    for t in 0..a.n_tokens as usize {
        let product = |m: &Memory, seg: usize, row: usize| -> f64 {
            let s = &a.seg[seg];
            let w = m.weights(s.w as usize + row * s.row_bytes as usize, a.ty, k);
            let x = if a.xq.qs.is_null() {
                m.f32s(a.x as usize + t * a.x_stride as usize * 4, k)
            } else {
                m.received(a.xq.qs as usize + t * k)
            };
            let mut sum: f64 = w.iter().zip(&x).map(|(w, x)| w * x).sum();
            if !s.bias.is_null() {
                sum += m.f32(s.bias as usize + 4 * row);
            }
            if !s.res.is_null() {
                sum += m.f32(s.res as usize + (t * s.res_stride as usize + row) * 4);
            }
            sum
        };
        if a.glu >= 0 {
            for row in 0..a.seg[0].n_rows as usize {
                let value = activation(a.glu, product(m, 0, row)) * product(m, 1, row);
                m.store(
                    a.seg[0].dst as usize + (t * a.seg[0].dst_stride as usize + row) * 4,
                    0,
                    value,
                );
            }
            continue;
        }
        for (i, s) in a.seg[..a.n_seg as usize].iter().enumerate() {
            for row in 0..s.n_rows as usize {
                let value = product(m, i, row);
                m.store(s.dst as usize + (t * s.dst_stride as usize + row) * 4, 0, value);
            }
        }
    }
}

/// A row of f16 in its share of the hand-off's bytes.
fn hand_over_h16(m: &mut Memory, x: H16, k: usize, n_tokens: usize, token: usize, row: Vec<f64>) {
    assert!(x.x as usize % H16::ALIGN == 0 && k % H16::COLUMNS == 0);
    let share = H16::bytes(k, n_tokens) / n_tokens.next_multiple_of(8);
    m.write_bytes(x.scale as usize + 4 * token, &1f32.to_le_bytes());
    m.hand_over(x.x as usize + token * share, share, row);
}

fn received_h16(m: &Memory, x: H16, k: usize, n_tokens: usize, token: usize) -> Vec<f64> {
    let share = H16::bytes(k, n_tokens) / n_tokens.next_multiple_of(8);
    assert_eq!(
        m.f32(x.scale as usize + 4 * token),
        1.0,
        "somebody wrote over the scales"
    );
    m.received(x.x as usize + token * share)
}

fn run_to_h16(m: &mut Memory, a: &H16Args) {
    let (k, n_tokens) = (a.k as usize, a.n_tokens as usize);
    for t in 0..n_tokens {
        let x = m.f32s(a.x as usize + t * a.x_stride as usize * 4, k);
        hand_over_h16(m, a.y, k, n_tokens, t, x);
    }
}

fn run_mm(m: &mut Memory, a: &MmArgs) {
    let (k, n_tokens) = (a.k as usize, a.n_tokens as usize);
    for t in 0..n_tokens {
        for row in 0..a.n_rows as usize {
            let x = received_h16(m, a.x, k, n_tokens, t);
            let product = |w: *const std::ffi::c_void| -> f64 {
                let w = m.weights(w as usize + row * a.row_bytes as usize, a.ty, k);
                w.iter().zip(&x).map(|(w, x)| w * x).sum()
            };
            let mut sum = product(a.w);
            if a.glu >= 0 {
                sum = activation(a.glu, sum) * product(a.w2);
            }
            if !a.bias.is_null() {
                sum += m.f32(a.bias as usize + 4 * row);
            }
            if !a.res.is_null() {
                sum += m.f32(a.res as usize + (t * a.res_stride as usize + row) * 4);
            }
            m.store(a.dst as usize + (t * a.dst_stride as usize + row) * 4, 0, sum);
        }
    }
}

fn run_moe_route(m: &mut Memory, a: &MoeRouteArgs) {
    let mut place = 0i32;
    for expert in 0..a.n_experts {
        m.write_bytes(a.out.begin as usize + 4 * expert as usize, &place.to_le_bytes());
        let begin = place;
        for pair in 0..a.n_tokens * a.n_used {
            let at = i64::from(pair / a.n_used) * a.ids_stride + i64::from(pair % a.n_used);
            if m.index(a.ids as usize + 4 * at as usize, DType::I32 as i32, 0) == i64::from(expert) {
                m.write_bytes(a.out.rows as usize + 4 * place as usize, &pair.to_le_bytes());
                place += 1;
            }
        }
        let count = place - begin;
        m.write_bytes(a.out.count as usize + 4 * expert as usize, &count.to_le_bytes());
        while place % 8 != 0 {
            m.write_bytes(a.out.rows as usize + 4 * place as usize, &(-1i32).to_le_bytes());
            place += 1;
        }
    }
    m.write_bytes(a.out.begin as usize + 4 * a.n_experts as usize, &place.to_le_bytes());
}

fn run_moe_to_h16(m: &mut Memory, a: &MoeH16Args) {
    let (k, places) = (a.k as usize, moe_max_rows(a.n_pairs, a.n_experts) as usize);
    let table = |m: &Memory, of: *mut i32, i: usize| m.index(of as usize, DType::I32 as i32, i);
    for place in 0..table(m, a.route.begin, a.n_experts as usize) as usize {
        let pair = table(m, a.route.rows, place);
        if pair >= 0 {
            let of = if a.per_slot != 0 {
                pair
            } else {
                pair / i64::from(a.n_used)
            };
            let x = m.f32s(a.x as usize + (of * a.x_stride) as usize * 4, k);
            hand_over_h16(m, a.y, k, places, place, x);
        }
    }
}

fn run_moe_mm(m: &mut Memory, a: &MoeMmArgs) {
    let (k, places) = (a.k as usize, moe_max_rows(a.n_pairs, a.n_experts) as usize);
    let table = |m: &Memory, of: *mut i32, i: usize| m.index(of as usize, DType::I32 as i32, i);
    for expert in 0..a.n_experts as usize {
        for n in 0..table(m, a.route.count, expert) as usize {
            let place = table(m, a.route.begin, expert) as usize + n;
            let pair = table(m, a.route.rows, place) as usize;
            for row in 0..a.n_rows as usize {
                let x = received_h16(m, a.x, k, places, place);
                let product = |w: *const std::ffi::c_void| -> f64 {
                    let offset = expert * a.expert_bytes as usize + row * a.row_bytes as usize;
                    let w = m.weights(w as usize + offset, a.ty, k);
                    w.iter().zip(&x).map(|(w, x)| w * x).sum()
                };
                let mut sum = product(a.w);
                if a.glu >= 0 {
                    sum = activation(a.glu, sum) * product(a.w2);
                }
                m.store(a.dst as usize + (pair * a.dst_stride as usize + row) * 4, 0, sum);
            }
        }
    }
}

fn run_part(m: &mut Memory, a: &QkvTailArgs, p: &QkvPart) {
    let n = p.head_dim as usize;
    for t in 0..a.n_tokens as usize {
        let row = if p.rows.is_null() {
            t as i64
        } else {
            m.index(
                p.rows as usize,
                if p.rows_i64 != 0 { DType::I64 } else { DType::I32 } as i32,
                t,
            )
        };
        for head in 0..p.n_heads as usize {
            let mut v = m.f32s(p.src as usize + (t * p.src_stride as usize + head * n) * 4, n);
            if !p.norm_w.is_null() {
                let (w, r) = (m.f32s(p.norm_w as usize, n), rms(&v, p.eps.into()));
                v.iter_mut().zip(&w).for_each(|(v, w)| *v *= r * w);
            }
            if p.rope != 0 {
                let n_dims = a.rope.n_dims as usize;
                let factors = a.rope.freq_factors;
                let factors = (!factors.is_null()).then(|| m.f32s(factors as usize, n_dims / 2));
                let rotation = Rotation {
                    n_dims,
                    neox: p.rope == 2,
                    base: a.rope.freq_base.into(),
                    scale: a.rope.freq_scale.into(),
                    attn: a.rope.attn_factor.into(),
                    factors: factors.as_deref(),
                };
                rotate(
                    &mut v,
                    m.index(a.rope.pos as usize, DType::I32 as i32, t) as f64,
                    &rotation,
                );
            }
            let size = DType::from_number(p.dst_type).unwrap().block_bytes();
            for (i, value) in v.iter().enumerate() {
                let at = p.dst as i64 + row * p.row_bytes + head as i64 * p.head_bytes + (i * size) as i64;
                m.store(at as usize, p.dst_type, value * f64::from(p.scale));
            }
        }
    }
}

fn run_dec_attn(m: &mut Memory, a: &DecAttnArgs) {
    let n = a.head_dim as usize;
    let group = a.n_heads / a.n_heads_kv;
    let mut dst = a.dst as usize;
    for stream in 0..i64::from(a.n_streams) {
        for token in 0..i64::from(a.n_tokens) {
            for head in 0..a.n_heads {
                let head_kv = i64::from(head / group);
                let f16s = |m: &Memory, address: i64, n: usize| -> Vec<f64> {
                    (0..n)
                        .map(|i| m.load(address as usize + 2 * i, DType::F16 as i32))
                        .collect()
                };
                let q =
                    a.q as i64 + stream * a.q_stream_bytes + token * a.q_token_bytes + i64::from(head) * a.q_head_bytes;
                let q = m.f32s(q as usize, n);
                let rows = (0..i64::from(a.n_kv)).map(|row| {
                    let k = a.k as i64 + stream * a.k_stream_bytes + head_kv * a.k_head_bytes + row * a.k_row_bytes;
                    let v = a.v as i64 + stream * a.v_stream_bytes + head_kv * a.v_head_bytes + row * a.v_row_bytes;
                    let bias = a.mask as i64 + stream * a.mask_stream_bytes + token * a.mask_token_bytes + 2 * row;
                    let bias = if a.mask.is_null() { 0.0 } else { f16s(m, bias, 1)[0] };
                    (f16s(m, k, n), f16s(m, v, n), bias)
                });
                for value in attend(n, &q, a.scale.into(), a.softcap.into(), rows) {
                    m.store(dst, DType::F32 as i32, value);
                    dst += 4;
                }
            }
        }
    }
}

/// Lists and kinds of tiles, as `frt_mask_tiles` leaves them.
fn run_mask_tiles(m: &mut Memory, a: &MaskTilesArgs) {
    let (token_tiles, key_tiles) = (
        (a.n_tokens as usize).div_ceil(a.tile_m as usize),
        (a.n_kv as usize).div_ceil(a.tile_n as usize),
    );
    for row in 0..a.n_planes as usize * token_tiles {
        let (plane, first_token) = (row / token_tiles, row % token_tiles * a.tile_m as usize);
        let (mut partial, mut full) = (0, 0);
        for tile in 0..key_tiles {
            let first_key = tile * a.tile_n as usize;
            let tokens = first_token..(first_token + a.tile_m as usize).min(a.n_tokens as usize);
            let keys = first_key..(first_key + a.tile_n as usize).min(a.n_kv as usize);
            let at = |t: usize, k: usize| {
                a.mask as usize + plane * a.plane_bytes as usize + t * a.token_bytes as usize + 2 * k
            };
            let values: Vec<f64> = tokens
                .flat_map(|t| keys.clone().map(move |k| (t, k)))
                .map(|(t, k)| m.load(at(t, k), DType::F16 as i32))
                .collect();
            let (count, index) = match values {
                v if v.iter().all(|&v| v == f64::NEG_INFINITY) => continue,
                v if v.iter().all(|&v| v == 0.0) => (&mut full, a.tiles.full_index),
                _ => (&mut partial, a.tiles.partial_index),
            };
            m.write_bytes(
                index as usize + 4 * (row * key_tiles + *count),
                &(tile as i32).to_le_bytes(),
            );
            *count += 1;
        }
        m.write_bytes(
            a.tiles.partial_count as usize + 4 * row,
            &(partial as i32).to_le_bytes(),
        );
        m.write_bytes(a.tiles.full_count as usize + 4 * row, &(full as i32).to_le_bytes());
    }
}

/// Looks at no key but those of the listed tiles, and at the mask in partial ones alone: lists of another mask give another result.
fn run_prefill_fa4(m: &mut Memory, a: &PrefillFa4Args) {
    let (n, n_v) = (a.head_dim as usize, a.head_dim_v as usize);
    let (tile_m, tile_n) = (a.tile_m as usize, a.tile_n as usize);
    let token_tiles = (a.mask_tokens as usize).div_ceil(tile_m);
    let key_tiles = (a.n_kv as usize).div_ceil(tile_n);
    let rows = a.n_streams as usize * a.n_tokens as usize * a.n_heads as usize;
    for i in 0..rows * (n + n_v) {
        m.write_bytes(a.scratch as usize + 2 * i, &[0xee, 0xee]);
    }
    let mut dst = a.dst as usize;
    for stream in 0..i64::from(a.n_streams) {
        for token in 0..a.n_tokens as usize {
            for head in 0..a.n_heads {
                let head_kv = i64::from(head / (a.n_heads / a.n_heads_kv));
                let f16s = |m: &Memory, address: i64, n: usize| -> Vec<f64> {
                    (0..n)
                        .map(|i| m.load(address as usize + 2 * i, DType::F16 as i32))
                        .collect()
                };
                let plane = if a.mask_stream_bytes == 0 {
                    0
                } else {
                    stream as usize * token_tiles
                };
                let row = plane + token / tile_m;
                let listed = |m: &Memory, count: *mut i32, index: *mut i32| -> Vec<usize> {
                    let n = m.index(count as usize, DType::I32 as i32, row) as usize;
                    (0..n)
                        .map(|i| m.index(index as usize, DType::I32 as i32, row * key_tiles + i) as usize)
                        .collect()
                };
                let partial = listed(m, a.tiles.partial_count, a.tiles.partial_index);
                let full = listed(m, a.tiles.full_count, a.tiles.full_index);
                let seen = |key: &i64| [&partial, &full].iter().any(|l| l.contains(&(*key as usize / tile_n)));
                let q = a.q as i64
                    + stream * a.q_stream_bytes
                    + token as i64 * a.q_token_bytes
                    + i64::from(head) * a.q_head_bytes;
                let q = m.f32s(q as usize, n);
                let rows = (0..i64::from(a.n_kv)).filter(seen).map(|row| {
                    let k = a.k as i64 + stream * a.k_stream_bytes + head_kv * a.k_head_bytes + row * a.k_row_bytes;
                    let v = a.v as i64 + stream * a.v_stream_bytes + head_kv * a.v_head_bytes + row * a.v_row_bytes;
                    let bias =
                        a.mask as i64 + stream * a.mask_stream_bytes + token as i64 * a.mask_token_bytes + 2 * row;
                    let masked = partial.contains(&(row as usize / tile_n));
                    let bias = if masked { f16s(m, bias, 1)[0] } else { 0.0 };
                    (f16s(m, k, n), f16s(m, v, n_v), bias)
                });
                for value in attend(n_v, &q, a.scale.into(), 0.0, rows) {
                    m.store(dst, DType::F32 as i32, value);
                    dst += 4;
                }
            }
        }
    }
}

/// A device that executes kernel calls on a [`Memory`].
#[derive(Clone)]
pub struct FakeDevice {
    pub memory: Arc<Mutex<Memory>>,
    pub launches: Arc<Mutex<Vec<KernelCall>>>,
    /// Of each launch: may it start before its predecessor's end?
    pub dependent: Arc<Mutex<Vec<bool>>>,
    /// Launch with this number fails, once.
    pub failing: Arc<Mutex<Option<usize>>>,
    pub check: Result<(), String>,
    /// A fault planted into every call.
    pub tamper: fn(&mut KernelCall),
}

impl FakeDevice {
    pub fn new(memory: Memory) -> FakeDevice {
        FakeDevice {
            memory: Arc::new(Mutex::new(memory)),
            launches: Arc::default(),
            dependent: Arc::default(),
            failing: Arc::default(),
            check: Ok(()),
            tamper: |_| {},
        }
    }
}

impl BlockSource for FakeDevice {
    fn allocate(&self, bytes: usize, _zeroed: usize, _stream: usize) -> Result<usize, String> {
        // Every block starts at the same place: stale addresses would show.
        assert!(
            bytes <= 1 << 20,
            "the engine asks for at least 1 MiB, tests use little of it"
        );
        Ok(ARENA)
    }
    fn free(&self, _address: usize) {}
}

impl Backend for FakeDevice {
    fn launch(&self, call: &KernelCall, launch: Launch) -> Result<(), CudaError> {
        let mut launches = self.launches.lock().unwrap();
        let mut failing = self.failing.lock().unwrap();
        if *failing == Some(launches.len()) {
            *failing = None;
            return Err(CudaError::Runtime {
                code: 700,
                name: "planted".into(),
            });
        }
        let mut call = *call;
        (self.tamper)(&mut call);
        launches.push(call);
        self.dependent.lock().unwrap().push(launch.pdl != 0);
        let mut m = self.memory.lock().unwrap();
        match call {
            KernelCall::Norm(a) => run_norm(&mut m, &a),
            KernelCall::Gemv(a) => run_gemv(&mut m, &a),
            KernelCall::DecAttn(a) => run_dec_attn(&mut m, &a),
            KernelCall::MaskTiles(a) => run_mask_tiles(&mut m, &a),
            KernelCall::PrefillFa4(a) => run_prefill_fa4(&mut m, &a),
            KernelCall::Mm(a) => run_mm(&mut m, &a),
            KernelCall::ToH16(a) => run_to_h16(&mut m, &a),
            KernelCall::MoeRoute(a) => run_moe_route(&mut m, &a),
            KernelCall::MoeToH16(a) => run_moe_to_h16(&mut m, &a),
            KernelCall::MoeMm(a) => run_moe_mm(&mut m, &a),
            KernelCall::QkvTail(a) => a.part[..a.n_parts as usize]
                .iter()
                .for_each(|p| run_part(&mut m, &a, p)),
        }
        Ok(())
    }
    fn self_check(&self, _device: i32) -> Result<(), String> {
        self.check.clone()
    }
}

/// Memory after running the graph node by node.
pub fn run_stock(record: &GraphRecord, memory: &Memory) -> Memory {
    let mut m = memory.clone();
    for &id in &record.nodes {
        run_node(&mut m, record, id);
    }
    m
}

/// What the engine did with a graph.
pub struct FusedRun {
    pub memory: Memory,
    /// Node positions that a window took, by the position it started at.
    pub taken: Vec<(usize, usize)>,
    pub status: EvalStatus,
}

/// Tokens from which on tests let mat-mul windows fire: one more than the mat-vec windows take.
pub const MANY_TOKENS: i64 = 5;

/// Mat-muls and attention modules from [`MANY_TOKENS`] on.
pub const FROM_MANY: Thresholds = Thresholds {
    mm_min_tokens: Some(MANY_TOKENS),
    fa4_min_tokens: Some(MANY_TOKENS),
};

/// Settings with every window on, also those that wait for their evidence, and mat-muls from [`MANY_TOKENS`] on.
pub fn all_on() -> Settings {
    let switches = WINDOWS.iter().map(|w| (w.switch.to_owned(), "0".to_owned()));
    Settings {
        thresholds: FROM_MANY,
        ..Settings::from_vars(switches)
    }
}

/// Memory after running the graph as the host's loop does, with the engine in it.
pub fn run_fused(record: &GraphRecord, memory: &Memory) -> FusedRun {
    run_fused_from(FROM_MANY, record, memory)
}

/// The same with other thresholds.
pub fn run_fused_from(thresholds: Thresholds, record: &GraphRecord, memory: &Memory) -> FusedRun {
    let device = FakeDevice::new(memory.clone());
    let settings = Settings { thresholds, ..all_on() };
    let engine = Engine::new(settings, Box::new(device.clone()));
    let owned = OwnedGraph::new(record).unwrap();
    run_with(&engine, &device, &owned, record)
}

/// The host's loop around an engine.
pub fn run_with(engine: &Engine, device: &FakeDevice, owned: &OwnedGraph, record: &GraphRecord) -> FusedRun {
    run_asking(engine, device, owned, record, |_| true)
}

/// The host's loop, which asks about some nodes only: the others it takes together with the node before them.
pub fn run_asking(
    engine: &Engine,
    device: &FakeDevice,
    owned: &OwnedGraph,
    record: &GraphRecord,
    asks: impl Fn(usize) -> bool,
) -> FusedRun {
    let (host, graph) = (owned.host(), owned.graph());
    engine.eval_begin(&host, graph);
    let mut taken = Vec::new();
    let mut i = 0;
    while i < record.nodes.len() {
        let t = &record.tensors[record.nodes[i]];
        if Op::from_code(t.code).is_view() || t.flags & FLAG_COMPUTE == 0 {
            i += 1;
            continue;
        }
        let taken_now = if asks(i) { engine.fuse(&host, graph, i) } else { 0 };
        match taken_now {
            0 => {
                run_node(&mut device.memory.lock().unwrap(), record, record.nodes[i]);
                i += 1;
            }
            n => {
                taken.push((i, n));
                i += n;
            }
        }
    }
    let status = engine.eval_end(&host);
    let memory = device.memory.lock().unwrap().clone();
    FusedRun { memory, taken, status }
}

/// What somebody outside of the graph can see: outputs, results that no node reads, and memory that lives on.
pub fn observable(record: &GraphRecord) -> Vec<usize> {
    let is_node = |id: usize| record.nodes.contains(&id);
    (0..record.tensors.len())
        .filter(|&id| {
            let t = &record.tensors[id];
            let float = [DType::F32, DType::F16, DType::BF16]
                .iter()
                .any(|&d| d as i32 == t.dtype);
            let cache = !is_node(id) && t.name.starts_with("cache");
            let result = is_node(id) && !Op::from_code(t.code).is_view();
            float && (cache || result && (t.uses == 0 || t.flags & ggml_flashrt::graph::FLAG_OUTPUT != 0))
        })
        .collect()
}

/// Both runs left the same values, up to rounding of intermediate results to f32, which may tip a result over to its neighbour in
/// its own type.
pub fn difference(record: &GraphRecord, stock: &Memory, fused: &Memory) -> Option<String> {
    for id in observable(record) {
        let t = &record.tensors[id];
        let (want, got) = (stock.values(t), fused.values(t));
        let scale = want
            .iter()
            .filter(|v| v.is_finite())
            .fold(1e-3f64, |m, v| m.max(v.abs()));
        let step = if t.dtype == DType::BF16 as i32 {
            2f64.powi(-7)
        } else {
            2e-3
        };
        for (i, (w, g)) in want.iter().zip(&got).enumerate() {
            let same = (w.is_nan() && g.is_nan()) || w == g || (w - g).abs() <= step * scale;
            if !same {
                return Some(format!("{} [{i}]: {g}, the nodes give {w}", t.name));
            }
        }
    }
    None
}

/// Panics with what differs.
pub fn assert_same_results(record: &GraphRecord, stock: &Memory, fused: &Memory, what: &str) {
    if let Some(difference) = difference(record, stock, fused) {
        panic!("{what}: {difference}");
    }
}
