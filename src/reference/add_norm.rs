//! ADD_NORM: `y = x + h; z = rms_norm(y, eps) * w`, of one row.

use super::norm::rms_norm_bounded;
use super::Bounded;

/// Sum and normalised sum of a row.
#[derive(Debug, Clone)]
pub struct SumAndNorm {
    /// `y`
    pub sum: Bounded,
    /// `z`
    pub normed: Bounded,
}

/// `y = x + h; z = rms_norm(y, eps) * w`
pub fn add_norm(h: &Bounded, x: &Bounded, w: &[f64], eps: f64) -> SumAndNorm {
    let sum = x.add(h);
    let normed = rms_norm_bounded(&sum, eps).mul(w);
    SumAndNorm { sum, normed }
}
