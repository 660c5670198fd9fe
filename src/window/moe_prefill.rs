//! MOE_PREFILL: a product of many tokens with the experts they are routed to, on tensor cores.

use super::moe::{guard_moe, launches, scratch_bytes};
use super::pattern::{Pattern, Step};
use super::thresholds::Threshold;
use super::{any, MayAlias, Window};
use crate::graph::Op;
use crate::kernel::Glu;
use std::sync::LazyLock;

static STEPS: &[Step] = &[Step::new("y", Op::MulMatId, &["w", "x", "ids"])];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// Input and ids are read for the last time before the launch that writes.
const MAY_ALIAS: &[MayAlias] = &[any("x", "y"), any("ids", "y")];

/// The window.
pub static MOE_PREFILL: Window = Window {
    name: "MOE_PREFILL",
    computes: "y = w[ids] @ x",
    replaces: "MUL_MAT_ID",
    min_cc: 90,
    switch: "GGML_FLASHRT_NO_MOE_PREFILL",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: true,
    input_form: |_| None,
    hands_over: None,
    threshold: Some(Threshold::Routed {
        weight: "w",
        ids: "ids",
    }),
    guard: |m, constants| guard_moe(m, constants, ("w", "x", "y"), Glu::None),
    scratch_bytes: |m| scratch_bytes(m, "w"),
    calls: |m, r| launches(m, "w", Glu::None, None, r.scratch),
};
