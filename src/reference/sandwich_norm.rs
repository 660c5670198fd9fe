//! SANDWICH_NORM: `y = x + rms_norm(h, eps1) * w1; z = rms_norm(y, eps2) * w2`, of one row.

use super::add_norm::{add_norm, SumAndNorm};
use super::norm::rms_norm_bounded;
use super::Bounded;

/// `y = x + rms_norm(h, eps1) * w1; z = rms_norm(y, eps2) * w2`
pub fn sandwich_norm(h: &Bounded, x: &Bounded, w1: &[f64], eps1: f64, w2: &[f64], eps2: f64) -> SumAndNorm {
    add_norm(&rms_norm_bounded(h, eps1).mul(w1), x, w2, eps2)
}
