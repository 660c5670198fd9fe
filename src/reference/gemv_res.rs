//! GEMV_RES: `dst = w . x (+ bias) (+ res)`, of one token.

use super::quant::Matrix;
use super::Bounded;

/// `w . x`, then `bias` and `res` where there are such.
pub fn gemv_res(w: &Matrix, x: &Bounded, bias: Option<&Bounded>, res: Option<&Bounded>) -> Bounded {
    [bias, res]
        .into_iter()
        .flatten()
        .fold(w.mat_vec(x), |sum, term| sum.add(term))
}
