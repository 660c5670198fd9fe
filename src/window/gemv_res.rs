//! GEMV_RES: a mat-vec with the bias and the residual that follow it.

use super::mat_vec::{guard_mat_vec, launch, segment, wants_q8};
use super::pattern::{Match, Pattern, Step};
use super::{
    constant_vector, exact, f32_rows, no_params_from, row_stride, Constants, Decline, Form, KernelCall, MayAlias,
    Resources, Window,
};
use crate::graph::Op;
use crate::kernel::Glu;
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("mm", Op::MulMat, &["w", "x"]),
    Step::new("mb", Op::Add, &["mm", "b"]).second_is_leaf().optional(),
    Step::new("y", Op::Add, &["mb", "res"]).commutes().optional(),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// Each element of the residual is read just before the same element is written.
const MAY_ALIAS: &[MayAlias] = &[exact("res", "y")];

/// The window.
pub static GEMV_RES: Window = Window {
    name: "GEMV_RES",
    computes: "y = w @ x [+ b] [+ res]",
    replaces: "MUL_MAT, optional ADD (bias), optional ADD (residual)",
    min_cc: 80,
    switch: "GGML_FLASHRT_NO_GEMV_RES",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: false,
    input_form: |m| wants_q8(m.tensor("w")).then_some(("x", Form::Q8)),
    hands_over: None,
    threshold: None,
    guard,
    scratch_bytes: |_| 0,
    calls,
};

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    guard_mat_vec(m, constants, ("w", "x", "mm"), Glu::None)?;
    let (mm, y) = (m.tensor("mm"), m.tensor("y"));
    f32_rows("y", y)?;
    if !y.same_shape(mm) {
        return Err(Decline::new("shape", format!("y {y:?} is not shaped like mm {mm:?}")));
    }
    if let Some(add) = m.node("mb") {
        no_params_from("mb", add, 0)?;
        constant_vector("b", m.tensor("b"), mm.ne()[0], constants)?;
    }
    if let Some(add) = m.node("y") {
        no_params_from("y", add, 0)?;
        let res = m.tensor("res");
        f32_rows("res", res)?;
        if !res.same_shape(mm) {
            return Err(Decline::new(
                "shape",
                format!("res {res:?} is not shaped like mm {mm:?}"),
            ));
        }
    }
    Ok(())
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let (w, y) = (m.tensor("w"), m.tensor("y"));
    let mut seg = segment(w, y.data(), row_stride(y));
    if m.has("mb") {
        seg.bias = m.tensor("b").data() as _;
    }
    if m.has("y") {
        let res = m.tensor("res");
        (seg.res, seg.res_stride) = (res.data() as _, row_stride(res));
    }
    vec![KernelCall::Gemv(launch(w, m.tensor("x"), &[seg], Glu::None, r))]
}
