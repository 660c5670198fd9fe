//! GLU_GEMV: `act(gate . x) * (up . x)`, of one token.

use super::gemv_res::gemv_res;
use super::glu::glu;
use super::quant::Matrix;
use super::Bounded;
use crate::kernel::Glu;

/// A weight matrix and its bias.
pub type Biased<'a> = (&'a Matrix<'a>, Option<&'a Bounded>);

/// `act(gate . x + bias) * (up . x + bias)`
pub fn glu_gemv(kind: Glu, gate: Biased, up: Biased, x: &Bounded) -> Bounded {
    glu(kind, &gemv_res(gate.0, x, gate.1, None), &gemv_res(up.0, x, up.1, None))
}
