//! GLU_GEMV: the gate and up mat-vecs of a feed-forward block and the gated unit between them, in one launch.

use super::mat_vec::{guard_mat_vec, launch, segment, wants_q8};
use super::pattern::{Match, Pattern, Step};
use super::{f32_rows, no_params_from, row_stride, Constants, Decline, KernelCall, Resources, Window};
use crate::graph::Op;
use crate::kernel::Glu;
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("gate", Op::MulMat, &["wg", "x"]),
    Step::new("up", Op::MulMat, &["wu", "x"]),
    Step::new("y", Op::Glu, &["gate", "up"]),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

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
    q8_input: |m| wants_q8(m.tensor("wg")).then_some("x"),
    q8_output: None,
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

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    let y = m.tensor("y");
    let Some(glu) = activation(m) else {
        return Err(Decline::new(
            "activation",
            format!("y {y:?}: GLU kind {}", y.param_i32(0)),
        ));
    };
    // Parameter 1 exchanges the halves of a packed operand, the later ones belong to kinds that are declined.
    no_params_from("y", y, 1)?;
    guard_mat_vec(m, constants, ("wg", "x", "gate"), glu)?;
    guard_mat_vec(m, constants, ("wu", "x", "up"), glu)?;
    f32_rows("y", y)?;
    let (wg, wu) = (m.tensor("wg"), m.tensor("wu"));
    if wg.raw().dtype != wu.raw().dtype || !wg.same_shape(wu) || !y.same_shape(m.tensor("gate")) {
        return Err(Decline::new("shape", format!("wg {wg:?}, wu {wu:?}, y {y:?}")));
    }
    Ok(())
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let (wg, wu, y) = (m.tensor("wg"), m.tensor("wu"), m.tensor("y"));
    let segments = [segment(wg, y.data(), row_stride(y)), segment(wu, 0, 0)];
    let glu = activation(m).expect("checked by the guard");
    vec![KernelCall::Gemv(launch(wg, m.tensor("x"), &segments, glu, r))]
}
