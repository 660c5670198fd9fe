//! MOE_FFN: the gate and up products of many tokens with the experts they are routed to, and the gated unit between them, in one
//! launch.

use super::glu_gemv::guard_glu;
use super::mat_mul::rows;
use super::moe::{guard_moe, launches, scratch_bytes};
use super::pattern::{Match, Pattern, Step};
use super::thresholds::Threshold;
use super::{any, Constants, Decline, KernelCall, MayAlias, Resources, Window};
use crate::graph::Op;
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("gate", Op::MulMatId, &["wg", "x", "ids"]),
    Step::new("up", Op::MulMatId, &["wu", "x", "ids"]),
    Step::new("y", Op::Glu, &["gate", "up"]),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// Input and ids are read for the last time before the launch that writes.
const MAY_ALIAS: &[MayAlias] = &[any("x", "y"), any("ids", "y")];

/// The window.
pub static MOE_FFN: Window = Window {
    name: "MOE_FFN",
    computes: "y = act(wg[ids] @ x) * (wu[ids] @ x)",
    replaces: "MUL_MAT_ID, MUL_MAT_ID, GLU",
    min_cc: 90,
    switch: "GGML_FLASHRT_NO_MOE_FFN",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: true,
    input_form: |_| None,
    hands_over: None,
    threshold: Some(Threshold::Routed {
        weight: "wg",
        ids: "ids",
    }),
    guard,
    scratch_bytes: |m| scratch_bytes(m, "wg"),
    calls,
};

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    let glu = guard_glu(m)?;
    guard_moe(m, constants, ("wg", "x", "gate"), glu)?;
    guard_moe(m, constants, ("wu", "x", "up"), glu)?;
    rows("y", m.tensor("y")).map(drop)
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    let glu = guard_glu(m).expect("checked by the guard");
    launches(m, "wg", glu, Some(m.tensor("wu")), r.scratch)
}
