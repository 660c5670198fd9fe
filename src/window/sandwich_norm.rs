//! SANDWICH_NORM: the norm after a block, the residual addition, and the norm before the next block, in one launch.

use super::add_norm::{guard_rows, norm_calls};
use super::pattern::{Match, Pattern, Step};
use super::{constant_vector, exact, no_params_from, Constants, Decline, MayAlias, Window};
use crate::graph::Op;
use std::sync::LazyLock;

static STEPS: &[Step] = &[
    Step::new("n1", Op::RmsNorm, &["h"]),
    Step::new("p", Op::Mul, &["n1", "w1"]).commutes(),
    Step::new("y", Op::Add, &["p", "x"]).commutes(),
    Step::new("n2", Op::RmsNorm, &["y"]),
    Step::new("z", Op::Mul, &["n2", "w2"]).commutes(),
];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y", "z"]));

/// A block reads its rows of h and x whole before it writes.
const MAY_ALIAS: &[MayAlias] = &[exact("h", "y"), exact("h", "z"), exact("x", "y"), exact("x", "z")];

/// The window.
pub static SANDWICH_NORM: Window = Window {
    name: "SANDWICH_NORM",
    computes: "y = x + rms_norm(h) * w1;  z = rms_norm(y) * w2",
    replaces: "RMS_NORM, MUL, ADD, RMS_NORM, MUL",
    min_cc: 80,
    switch: "GGML_FLASHRT_NO_SANDWICH_NORM",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: MAY_ALIAS,
    uses_scratch: false,
    input_form: |_| None,
    hands_over: Some("z"),
    threshold: None,
    guard,
    scratch_bytes: |_| 0,
    calls: norm_calls,
};

fn guard(m: &Match, constants: &Constants) -> Result<(), Decline> {
    guard_rows(m, constants)?;
    let n = m.tensor("h").ne()[0];
    constant_vector("w1", m.tensor("w1"), n, constants)?;
    no_params_from("n1", m.tensor("n1"), 1)?;
    no_params_from("p", m.tensor("p"), 0)
}
