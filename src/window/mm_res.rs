//! MM_RES: a mat-mul with the bias and the residual that follow it.

use super::mat_mul::{guard_mat_mul, launch, rows};
use super::pattern::{Match, Pattern, Step};
use super::thresholds::Threshold;
use super::{
    any, constant_vector, exact, no_params_from, Constants, Decline, Form, KernelCall, MayAlias, Resources, Window,
};
use crate::graph::Op;
use crate::kernel::Glu;
use std::sync::LazyLock;

/// `res` is a residual, or, where there is no other addition, the bias.
static STEPS: &[Step] = &[
    Step::new("mm", Op::MulMat, &["w", "x"]),
    Step::new("mb", Op::Add, &["mm", "b"]).second_is_leaf().optional(),
    Step::new("y", Op::Add, &["mb", "res"]).commutes(),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// The input is read as f16, which is made before. Each element of the residual is read just before the same element is written.
const MAY_ALIAS: &[MayAlias] = &[any("x", "y"), exact("res", "y")];

/// The window.
pub static MM_RES: Window = Window {
    name: "MM_RES",
    computes: "y = w @ x [+ b] [+ res]",
    replaces: "MUL_MAT, ADD (bias) or ADD (residual) or both",
    min_cc: 90,
    switch: "GGML_FLASHRT_NO_MM_RES",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: true,
    input_form: |_| Some(("x", Form::H16)),
    hands_over: None,
    threshold: Some(Threshold::Rows {
        weight: "w",
        input: "x",
    }),
    guard,
    scratch_bytes: |_| 0,
    calls,
};

/// Is `res` as large as the product?
fn is_residual(m: &Match) -> bool {
    m.tensor("res").same_shape(m.tensor("mm"))
}

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    guard_mat_mul(m, constants, ("w", "x", "mm"), Glu::None)?;
    let (mm, y, res) = (m.tensor("mm"), m.tensor("y"), m.tensor("res"));
    rows("y", y)?;
    no_params_from("y", y, 0)?;
    if !y.same_shape(mm) {
        return Err(Decline::new("shape", format!("y {y:?} is not shaped like mm {mm:?}")));
    }
    if let Some(add) = m.node("mb") {
        no_params_from("mb", add, 0)?;
        constant_vector("b", m.tensor("b"), mm.ne()[0], constants)?;
    }
    if is_residual(m) {
        rows("res", res).map(drop)
    } else if m.has("mb") {
        Err(Decline::new(
            "shape",
            format!("res {res:?} is not shaped like mm {mm:?}"),
        ))
    } else {
        constant_vector("res", res, mm.ne()[0], constants)
    }
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let mut args = launch(m.tensor("w"), m.tensor("y"), r);
    if m.has("mb") {
        args.bias = m.tensor("b").data() as _;
    }
    let res = m.tensor("res");
    if is_residual(m) {
        args.res = res.data() as _;
        args.res_stride = rows("res", res).expect("checked by the guard").1;
    } else {
        args.bias = res.data() as _;
    }
    vec![KernelCall::Mm(args)]
}
