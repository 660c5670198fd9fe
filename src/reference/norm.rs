//! RMS norm of a row: `x / sqrt(mean(x^2) + eps)`.

use super::{Bounded, U};

/// Roundings on the way from a row to a normalised value, in units of [`U`]. The sum of squares takes at most 32 additions
/// in a thread, 10 in the block and one rounding of the square: 43, of which the root halves all. Quotient and eps add one
/// more, rsqrtf (2 ulp) four, the product with the factor one.
const ROUNDINGS: f64 = 43.0 / 2.0 + 1.0 + 4.0 + 1.0;

/// `x / sqrt(mean(x^2) + eps)`
pub fn rms_norm(x: &[f64], eps: f64) -> Vec<f64> {
    let factor = factor(x, eps);
    x.iter().map(|v| v * factor).collect()
}

/// The same of values that are inexact themselves: their errors move the mean by at most `sum(2 |x| e + e^2) / n`.
pub fn rms_norm_bounded(x: &Bounded, eps: f64) -> Bounded {
    let factor = factor(&x.value, eps);
    let moved: f64 = (0..x.len())
        .map(|i| 2.0 * x.value[i].abs() * x.bound[i] + x.bound[i].powi(2))
        .sum();
    let relative = ROUNDINGS * U + moved / x.len() as f64 * factor * factor / 2.0;
    (0..x.len())
        .map(|i| {
            let value = x.value[i] * factor;
            (value, x.bound[i] * factor + value.abs() * relative)
        })
        .collect()
}

fn factor(x: &[f64], eps: f64) -> f64 {
    let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    (mean + eps).sqrt().recip()
}
