//! QKV_GEMV: everything between the norm before attention and attention itself, in two launches: the mat-vecs of Q, K and V
//! (one launch for each weight type among them) leave their results in scratch, then one launch does the rest and stores
//! K and V into the cache.

use super::mat_vec::{guard_mat_vec, launch, segment, wants_q8};
use super::pattern::{Match, Pattern, Role, Step};
use super::{any, constant_vector, no_params_from, Constants, Decline, Form, KernelCall, MayAlias, Resources, Window};
use crate::graph::{DType, Op, Tensor};
use crate::kernel::{Glu, QkvPart, QkvTailArgs, Rope, RopeMode};
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("q", Op::MulMat, &["wq", "x"]),
    Step::new("k", Op::MulMat, &["wk", "x"]),
    Step::new("v", Op::MulMat, &["wv", "x"]),
    Step::new("qb", Op::Add, &["q", "bq"]).second_is_leaf().optional(),
    Step::new("kb", Op::Add, &["k", "bk"]).second_is_leaf().optional(),
    Step::new("vb", Op::Add, &["v", "bv"]).second_is_leaf().optional(),
    Step::new("qn", Op::RmsNorm, &["qb"]).optional(),
    Step::new("qm", Op::Mul, &["qn", "nq"]).commutes().with("qn"),
    Step::new("kn", Op::RmsNorm, &["kb"]).optional(),
    Step::new("km", Op::Mul, &["kn", "nk"]).commutes().with("kn"),
    Step::new("qr", Op::Rope, &["qm", "pos", "ff?"]),
    Step::new("kr", Op::Rope, &["km", "pos", "ff?"]),
    Step::new("qs", Op::Scale, &["qr"]).optional(),
    Step::new("ks", Op::SetRows, &["kr", "k_rows", "k_cache"]),
    Step::new("vs", Op::SetRows, &["vb", "v_rows", "v_cache"]),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["qs", "ks", "vs"]));

/// The first launches read x, weights and biases and write scratch only; the caches are the memory that is stored to.
const MAY_ALIAS: &[MayAlias] = &[any("x", "qs"), any("k_cache", "ks"), any("v_cache", "vs")];

/// The window.
pub static QKV_GEMV: Window = Window {
    name: "QKV_GEMV",
    computes: "q = rope(norm(wq @ x + bq)) * s;  k_cache[rows] = rope(norm(wk @ x + bk));  v_cache[rows] = wv @ x + bv",
    replaces: "3 MUL_MAT, optional ADD, optional RMS_NORM + MUL, 2 ROPE, optional SCALE, 2 SET_ROWS",
    min_cc: 80,
    switch: "GGML_FLASHRT_NO_QKV_GEMV",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: true,
    input_form: |m| {
        let all = ["wq", "wk", "wv"].iter().all(|w| wants_q8(m.tensor(w)));
        all.then_some(("x", Form::Q8))
    },
    hands_over: None,
    threshold: None,
    guard,
    scratch_bytes: |m| {
        BRANCHES
            .iter()
            .map(|b| m.tensor(b.mat_vec).raw().ne[..2].iter().product::<i64>() as usize * 4)
            .sum()
    },
    calls,
};

/// The names of one of Q, K and V.
struct Branch {
    weight: Role,
    mat_vec: Role,
    bias_add: Role,
    bias: Role,
    norm: Option<(Role, Role, Role)>,
    rope: Option<Role>,
    store: Option<(Role, Role)>,
}

static BRANCHES: [Branch; 3] = [
    Branch {
        weight: "wq",
        mat_vec: "q",
        bias_add: "qb",
        bias: "bq",
        norm: Some(("qn", "qm", "nq")),
        rope: Some("qr"),
        store: None,
    },
    Branch {
        weight: "wk",
        mat_vec: "k",
        bias_add: "kb",
        bias: "bk",
        norm: Some(("kn", "km", "nk")),
        rope: Some("kr"),
        store: Some(("ks", "k_rows")),
    },
    Branch {
        weight: "wv",
        mat_vec: "v",
        bias_add: "vb",
        bias: "bv",
        norm: None,
        rope: None,
        store: Some(("vs", "v_rows")),
    },
];

/// Longest head the tail kernel takes.
const MAX_HEAD_DIM: i64 = 512;

fn rope_mode(rope: Tensor) -> Option<RopeMode> {
    match rope.param_i32(2) {
        0 => Some(RopeMode::Normal),
        2 => Some(RopeMode::Neox),
        _ => None,
    }
}

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    for b in &BRANCHES {
        guard_mat_vec(m, constants, (b.weight, "x", b.mat_vec), Glu::None)?;
        let width = m.tensor(b.mat_vec).ne()[0];
        if let Some(add) = m.node(b.bias_add) {
            no_params_from(b.bias_add, add, 0)?;
            constant_vector(b.bias, m.tensor(b.bias), width, constants)?;
        }
        if let Some((norm, scaled, weight)) = b.norm {
            if let Some(node) = m.node(norm) {
                no_params_from(norm, node, 1)?;
                no_params_from(scaled, m.tensor(scaled), 0)?;
                constant_vector(weight, m.tensor(weight), node.ne()[0], constants)?;
                let head = b.rope.map_or(node.ne()[0], |r| m.tensor(r).ne()[0]);
                if node.ne()[0] != head || !node.is(DType::F32) {
                    return Err(Decline::new(
                        "shape",
                        format!("{norm} {node:?} does not norm heads of {head}"),
                    ));
                }
            }
        }
        if let Some(rope) = b.rope {
            guard_rope(m, rope, width)?;
        }
        if let Some((store, rows)) = b.store {
            guard_store(m, store, rows, width)?;
        }
    }
    guard_one_rope(m.tensor("qr"), m.tensor("kr"))?;
    if let Some(ff) = m.get("ff") {
        constant_vector("ff", ff, i64::from(m.tensor("qr").param_i32(1)) / 2, constants)?;
    }
    let q = m.tensor("qs");
    if !q.is(DType::F32) || !q.same_shape(m.tensor("qr")) || q.nb()[0] != 4 {
        return Err(Decline::new("layout", format!("qs {q:?} has strides {:?}", q.nb())));
    }
    if let Some(scale) = m.node("qs") {
        // Parameter 1 is a bias.
        no_params_from("qs", scale, 1)?;
    }
    Ok(())
}

fn guard_rope(m: &Match, role: Role, width: i64) -> Result<(), Decline> {
    let (rope, pos) = (m.tensor(role), m.tensor("pos"));
    let n_tokens = m.tensor("x").ne()[1];
    let [head_dim, n_heads, ..] = rope.ne();
    let n_dims = i64::from(rope.param_i32(1));
    if rope_mode(rope).is_none() {
        return Err(Decline::new(
            "rope mode",
            format!("{role} {rope:?}: mode {}", rope.param_i32(2)),
        ));
    }
    // Parameters 0 and 3 are retired; those from 11 on are sections of the multi-axis modes, which are declined.
    if rope.param_i32(0) != 0 || rope.param_i32(3) != 0 {
        return Err(Decline::new("parameter", format!("{role} {rope:?}")));
    }
    no_params_from(role, rope, 11)?;
    let fits = rope.is(DType::F32)
        && rope.ne() == [head_dim, n_heads, n_tokens, 1]
        && head_dim * n_heads == width
        && head_dim <= MAX_HEAD_DIM
        && head_dim % 2 == 0
        && n_dims > 0
        && n_dims % 2 == 0
        && n_dims <= head_dim;
    let positions = pos.is(DType::I32) && pos.ne() == [n_tokens, 1, 1, 1] && pos.nb()[0] == 4;
    if !fits || !positions {
        return Err(Decline::new(
            "shape",
            format!("{role} {rope:?} rotating {n_dims}, pos {pos:?}"),
        ));
    }
    Ok(())
}

/// One set of parameters serves both.
fn guard_one_rope(q: Tensor, k: Tensor) -> Result<(), Decline> {
    if q.raw().op_params != k.raw().op_params || q.src(2) != k.src(2) {
        return Err(Decline::new("parameter", format!("{q:?} and {k:?} rotate differently")));
    }
    Ok(())
}

fn guard_store(m: &Match, role: Role, rows_role: Role, width: i64) -> Result<(), Decline> {
    let (store, rows) = (m.tensor(role), m.tensor(rows_role));
    let n_tokens = m.tensor("x").ne()[1];
    no_params_from(role, store, 0)?;
    let Some(DType::F32 | DType::F16 | DType::BF16) = store.dtype() else {
        return Err(Decline::new("cache type", format!("{role} {store:?}")));
    };
    let source = store.src(0).expect("an operand of the pattern");
    if width % m.tensor("kr").ne()[0] != 0 {
        return Err(Decline::new(
            "shape",
            format!("{role} {store:?}: {width} values are no whole number of K's heads"),
        ));
    }
    let fits = store.ne()[0] == width
        && store.ne()[2..] == [1, 1]
        && source.ne() == [width, n_tokens, 1, 1]
        && rows.ne() == [n_tokens, 1, 1, 1]
        && store.nb()[0] == store.dtype().map_or(0, DType::block_bytes);
    let indices = match rows.dtype() {
        Some(DType::I64) => rows.nb()[0] == 8,
        Some(DType::I32) => rows.nb()[0] == 4,
        _ => false,
    };
    if !fits || !indices {
        return Err(Decline::new(
            "cache layout",
            format!("{role} {store:?} <- {source:?} at {rows:?}"),
        ));
    }
    Ok(())
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let x = m.tensor("x");
    let n_tokens = x.ne()[1];
    let mut scratch = r.scratch;
    let mut calls = Vec::new();
    let mut parts = [QkvPart::NONE; 3];
    let mut segments = Vec::new();
    for (b, part) in BRANCHES.iter().zip(&mut parts) {
        let w = m.tensor(b.weight);
        let width = w.ne()[1];
        let mut seg = segment(w, scratch, width);
        if m.has(b.bias_add) {
            seg.bias = m.tensor(b.bias).data() as _;
        }
        segments.push((w, seg));
        *part = tail_part(m, b, scratch, width);
        scratch += (width * n_tokens) as usize * 4;
    }
    while let Some(&(w, _)) = segments.first() {
        let same = |s: &(Tensor, _)| s.0.raw().dtype == w.raw().dtype;
        let group: Vec<_> = segments.iter().filter(|s| same(s)).map(|s| s.1).collect();
        segments.retain(|s| !same(s));
        calls.push(KernelCall::Gemv(launch(w, x, &group, Glu::None, r)));
    }
    let rope = m.tensor("qr");
    let (corr_low, corr_high) = yarn_corr_dims(rope);
    let tail = |part: [QkvPart; 3], n_parts: i32| {
        KernelCall::QkvTail(QkvTailArgs {
            part,
            n_parts,
            n_tokens: n_tokens as i32,
            rope: Rope {
                pos: m.tensor("pos").data() as _,
                freq_factors: m.get("ff").map_or(0, |t| t.data()) as _,
                n_dims: rope.param_i32(1),
                freq_base: rope.param_f32(5),
                freq_scale: rope.param_f32(6),
                ext_factor: rope.param_f32(7),
                attn_factor: rope.param_f32(8),
                corr_low,
                corr_high,
            },
        })
    };
    // Q in a launch of its own, and not the last: a launch lets the next one start before it writes, and nvcc moves the loads of Q in
    // ggml's attention for one token (heads of 64 and 128) above the wait for what was written. K and V it reads after the wait.
    let [q, k, v] = parts;
    calls.push(tail([q, QkvPart::NONE, QkvPart::NONE], 1));
    calls.push(tail([k, v, QkvPart::NONE], 2));
    calls
}

fn tail_part(m: &Match, b: &Branch, src: usize, width: i64) -> QkvPart {
    let mut part = QkvPart {
        src: src as _,
        src_stride: width,
        ..QkvPart::NONE
    };
    if let Some(rope) = b.rope.map(|r| m.tensor(r)) {
        (part.head_dim, part.n_heads) = (rope.ne()[0] as i32, rope.ne()[1] as i32);
        part.rope = rope_mode(rope).expect("checked by the guard") as i32;
    } else {
        // V is only stored: any split into heads will do, and K's spreads it over as many blocks.
        let head_dim = m.tensor("kr").ne()[0];
        (part.head_dim, part.n_heads) = (head_dim as i32, (width / head_dim) as i32);
    }
    if let Some((norm, weight)) = b.norm.and_then(|(n, _, w)| Some((m.node(n)?, m.tensor(w)))) {
        part.norm_w = weight.data() as _;
        part.eps = norm.param_f32(0);
    }
    match b.store {
        Some((store, rows)) => {
            let (store, rows) = (m.tensor(store), m.tensor(rows));
            part.dst = store.data() as _;
            part.row_bytes = store.nb()[1] as i64;
            part.head_bytes = i64::from(part.head_dim) * store.nb()[0] as i64;
            part.rows = rows.data() as _;
            part.rows_i64 = i32::from(rows.is(DType::I64));
            part.dst_type = store.raw().dtype;
        }
        None => {
            let q = m.tensor("qs");
            part.dst = q.data() as _;
            part.head_bytes = q.nb()[1] as i64;
            part.row_bytes = q.nb()[2] as i64;
            part.dst_type = DType::F32 as i32;
            part.scale = m.node("qs").map_or(1.0, |s| s.param_f32(0));
        }
    }
    part
}

/// Dimensions between which YaRN blends, as `ggml_rope_yarn_corr_dims` has them.
fn yarn_corr_dims(rope: Tensor) -> (f32, f32) {
    let (n_dims, n_ctx_orig) = (rope.param_i32(1) as f32, rope.param_i32(4) as f32);
    let (freq_base, beta_fast, beta_slow) = (rope.param_f32(5), rope.param_f32(9), rope.param_f32(10));
    let dim = |beta: f32| n_dims * (n_ctx_orig / (beta * 2.0 * std::f32::consts::PI)).ln() / (2.0 * freq_base.ln());
    (dim(beta_fast).floor().max(0.0), dim(beta_slow).ceil().min(n_dims - 1.0))
}
