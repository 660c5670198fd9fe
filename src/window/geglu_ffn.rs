//! GEGLU_FFN: the gate and up mat-muls of a feed-forward block and the gated unit between them, in one launch.

use super::glu_gemv::{guard_glu, PATTERN};
use super::mat_mul::{guard_mat_mul, launch, rows};
use super::pattern::Match;
use super::thresholds::Threshold;
use super::{any, Constants, Decline, Form, KernelCall, MayAlias, Resources, Window};

/// The input is read as f16, which is made before.
const MAY_ALIAS: &[MayAlias] = &[any("x", "y")];

/// The window. Its chain is that of GLU_GEMV, with many rows.
pub static GEGLU_FFN: Window = Window {
    name: "GEGLU_FFN",
    computes: "y = act(wg @ x) * (wu @ x)",
    replaces: "MUL_MAT, MUL_MAT, GLU",
    min_cc: 90,
    switch: "GGML_FLASHRT_NO_GEGLU_FFN",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: true,
    input_form: |_| Some(("x", Form::H16)),
    hands_over: None,
    threshold: Some(Threshold::Rows {
        weight: "wg",
        input: "x",
    }),
    guard,
    scratch_bytes: |_| 0,
    calls,
};

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    let glu = guard_glu(m)?;
    guard_mat_mul(m, constants, ("wg", "x", "gate"), glu)?;
    guard_mat_mul(m, constants, ("wu", "x", "up"), glu)?;
    rows("y", m.tensor("y")).map(drop)
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let mut args = launch(m.tensor("wg"), m.tensor("y"), r);
    args.w2 = m.tensor("wu").data() as _;
    args.glu = guard_glu(m).expect("checked by the guard") as i32;
    vec![KernelCall::Mm(args)]
}
