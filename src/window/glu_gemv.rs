//! GLU_GEMV: the gate and up mat-vecs of a feed-forward block and the gated unit between them, in one launch.

use super::mat_vec::{guard_mat_vec, launch, segment, wants_q8};
use super::pattern::{Match, Pattern, Step};
use super::{f32_rows, no_params_from, row_stride, Constants, Decline, Form, KernelCall, Resources, Window};
use crate::graph::Op;
use crate::kernel::Glu;
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("gate", Op::MulMat, &["wg", "x"]),
    Step::new("up", Op::MulMat, &["wu", "x"]),
    Step::new("y", Op::Glu, &["gate", "up"]),
];
pub(super) static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// The window.
pub static GLU_GEMV: Window = Window {
    name: "GLU_GEMV",
    computes: "y = act(wg @ x) * (wu @ x)",
    replaces: "MUL_MAT, MUL_MAT, GLU",
    min_cc: 80,
    switch: "GGML_FLASHRT_NO_GLU_GEMV",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: &[],
    uses_scratch: false,
    input_form: |m| wants_q8(m.tensor("wg")).then_some(("x", Form::Q8)),
    hands_over: None,
    threshold: None,
    guard,
    scratch_bytes: |_| 0,
    calls,
};

fn activation(m: &Match) -> Option<Glu> {
    match m.tensor("y").param_i32(0) {
        0 => Some(Glu::Reglu),
        1 => Some(Glu::Geglu),
        2 => Some(Glu::Swiglu),
        4 => Some(Glu::GegluErf),
        5 => Some(Glu::GegluQuick),
        _ => None,
    }
}

/// Kind of the gated unit, if everything but the products is as the kernels can do it.
pub(super) fn guard_glu(m: &Match) -> Result<Glu, Decline> {
    let (y, wg, wu) = (m.tensor("y"), m.tensor("wg"), m.tensor("wu"));
    let Some(glu) = activation(m) else {
        return Err(Decline::new(
            "activation",
            format!("y {y:?}: GLU kind {}", y.param_i32(0)),
        ));
    };
    // Parameter 1 exchanges the halves of a packed operand, the later ones belong to kinds that are declined.
    no_params_from("y", y, 1)?;
    if wg.raw().dtype != wu.raw().dtype || !wg.same_shape(wu) || !y.same_shape(m.tensor("gate")) {
        return Err(Decline::new("shape", format!("wg {wg:?}, wu {wu:?}, y {y:?}")));
    }
    Ok(glu)
}

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    let glu = guard_glu(m)?;
    guard_mat_vec(m, constants, ("wg", "x", "gate"), glu)?;
    guard_mat_vec(m, constants, ("wu", "x", "up"), glu)?;
    f32_rows("y", m.tensor("y"))
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let (wg, wu, y) = (m.tensor("wg"), m.tensor("wu"), m.tensor("y"));
    let segments = [segment(wg, y.data(), row_stride(y)), segment(wu, 0, 0)];
    let glu = activation(m).expect("checked by the guard");
    vec![KernelCall::Gemv(launch(wg, m.tensor("x"), &segments, glu, r))]
}
