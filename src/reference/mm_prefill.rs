//! MM_PREFILL: `dst = w . x`, of many tokens, on tensor cores.

use super::quant::Matrix;
use super::Bounded;

/// `w . x` of each token. Tokens are what the f16 rows stand for: see [`super::h16`].
pub fn mm_prefill(w: &Matrix, tokens: &[Bounded]) -> Vec<Bounded> {
    w.mat_mul(tokens)
}
