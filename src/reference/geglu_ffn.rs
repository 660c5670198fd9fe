//! GEGLU_FFN: `act(gate . x) * (up . x)`, of many tokens, on tensor cores.

use super::glu::glu;
use super::mm_prefill::mm_prefill;
use super::quant::Matrix;
use super::Bounded;
use crate::kernel::Glu;

/// `act(gate . x) * (up . x)` of each token.
pub fn geglu_ffn(kind: Glu, gate: &Matrix, up: &Matrix, tokens: &[Bounded]) -> Vec<Bounded> {
    let up = mm_prefill(up, tokens);
    mm_prefill(gate, tokens)
        .iter()
        .zip(&up)
        .map(|(g, u)| glu(kind, g, u))
        .collect()
}
