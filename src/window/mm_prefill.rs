//! MM_PREFILL: a mat-mul of a weight with many rows, on tensor cores.

use super::mat_mul::{guard_mat_mul, launch};
use super::pattern::{Pattern, Step};
use super::thresholds::Threshold;
use super::{any, Form, KernelCall, MayAlias, Window};
use crate::graph::Op;
use crate::kernel::Glu;
use std::sync::LazyLock;

static STEPS: &[Step] = &[Step::new("y", Op::MulMat, &["w", "x"])];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// The input is read as f16, which is made before.
const MAY_ALIAS: &[MayAlias] = &[any("x", "y")];

/// The window.
pub static MM_PREFILL: Window = Window {
    name: "MM_PREFILL",
    computes: "y = w @ x",
    replaces: "MUL_MAT",
    min_cc: 90,
    switch: "GGML_FLASHRT_NO_MM_PREFILL",
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
    guard: |m, constants| guard_mat_mul(m, constants, ("w", "x", "y"), Glu::None),
    scratch_bytes: |_| 0,
    calls: |m, r| vec![KernelCall::Mm(launch(m.tensor("w"), m.tensor("y"), r))],
};
