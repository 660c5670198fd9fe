//! ADD_NORM: the residual addition and the norm that follows it, in one launch.

use super::pattern::{Match, Pattern, Step};
use super::{
    constant_vector, exact, f32_rows, no_params_from, row_stride, Constants, Decline, HandOff, KernelCall, MayAlias,
    Resources, Window,
};
use crate::graph::Op;
use crate::kernel::{NormArgs, H16, Q8};
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("y", Op::Add, &["h", "x"]).commutes(),
    Step::new("n2", Op::RmsNorm, &["y"]),
    Step::new("z", Op::Mul, &["n2", "w2"]).commutes(),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y", "z"]));

const MAY_ALIAS: &[MayAlias] = &[exact("h", "y"), exact("h", "z"), exact("x", "y"), exact("x", "z")];

/// The window.
pub static ADD_NORM: Window = Window {
    name: "ADD_NORM",
    computes: "y = x + h;  z = rms_norm(y) * w2",
    replaces: "ADD, RMS_NORM, MUL",
    min_cc: 80,
    switch: "GGML_FLASHRT_NO_ADD_NORM",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: false,
    input_form: |_| None,
    hands_over: Some("z"),
    threshold: None,
    guard: guard_rows,
    scratch_bytes: |_| 0,
    calls: norm_calls,
};

/// One block a row: up to the largest ubatch that users set.
const MAX_ROWS: i64 = 8192;
/// Widest row that the kernel keeps in registers.
const MAX_COLS: i64 = 16384;

/// What ADD_NORM and SANDWICH_NORM share.
pub(super) fn guard_rows(m: &Match, constants: &Constants) -> Result<(), Decline> {
    let h = m.tensor("h");
    for role in ["h", "x", "y", "z"] {
        let t = m.tensor(role);
        f32_rows(role, t)?;
        if !t.same_shape(h) {
            return Err(Decline::new("shape", format!("{role} {t:?} is not shaped like {h:?}")));
        }
    }
    let [n_cols, n_rows, ..] = h.ne();
    if n_rows > MAX_ROWS {
        return Err(Decline::new(
            "many tokens",
            format!("{n_rows} rows, at most {MAX_ROWS}"),
        ));
    }
    if n_cols > MAX_COLS || n_cols % 4 != 0 {
        return Err(Decline::new("shape", format!("rows of {n_cols} values")));
    }
    constant_vector("w2", m.tensor("w2"), n_cols, constants)?;
    no_params_from("y", m.tensor("y"), 0)?;
    no_params_from("n2", m.tensor("n2"), 1)?;
    no_params_from("z", m.tensor("z"), 0)
}

/// One launch for either window.
pub(super) fn norm_calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let (h, x, y, z) = (m.tensor("h"), m.tensor("x"), m.tensor("y"), m.tensor("z"));
    let w1 = m.get("w1").map_or(0, |w| w.data());
    let eps1 = m.get("n1").map_or(0.0, |n| n.param_f32(0));
    vec![KernelCall::Norm(NormArgs {
        h: h.data() as _,
        h_stride: row_stride(h),
        x: x.data() as _,
        x_stride: row_stride(x),
        w1: w1 as _,
        w2: m.tensor("w2").data() as _,
        y: if m.is_unread("y") {
            std::ptr::null_mut()
        } else {
            y.data() as _
        },
        y_stride: row_stride(y),
        z: if r.drop_output_f32 {
            std::ptr::null_mut()
        } else {
            z.data() as _
        },
        z_stride: row_stride(z),
        zq: r.output_q8.and_then(HandOff::q8).unwrap_or(Q8::NONE),
        zh: r.output_h16.and_then(HandOff::h16).unwrap_or(H16::NONE),
        n_rows: h.ne()[1] as i32,
        n_cols: h.ne()[0] as i32,
        eps1,
        eps2: m.tensor("n2").param_f32(0),
    })]
}
