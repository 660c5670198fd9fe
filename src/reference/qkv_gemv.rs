//! QKV_GEMV: the mat-vec of Q, K or V, then per head norm, RoPE, scale and the rounding of the store, of one token.

use super::norm::rms_norm_bounded;
use super::quant::{DType, Matrix};
use super::rope::{rope, Params};
use super::Bounded;
use crate::kernel::RopeMode;

/// What happens to each head.
#[derive(Debug, Clone, Copy)]
pub struct Tail<'a> {
    /// Values of a head.
    pub head_dim: usize,
    /// Weight and eps of the RMS norm.
    pub norm: Option<(&'a [f64], f64)>,
    /// [`RopeMode::None`] for V.
    pub mode: RopeMode,
    /// Shared by Q and K.
    pub rope: Params,
    /// One per pair.
    pub freq_factors: Option<&'a [f64]>,
    /// 1 when there is none.
    pub scale: f64,
    /// F32, F16 or BF16.
    pub stored_as: DType,
}

impl Tail<'_> {
    /// All heads of a token at a position.
    pub fn apply(&self, heads: &Bounded, pos: i32) -> Bounded {
        let mut out = Bounded::default();
        for start in (0..heads.len()).step_by(self.head_dim) {
            let mut v = heads.slice(start..start + self.head_dim);
            if let Some((w, eps)) = self.norm {
                v = rms_norm_bounded(&v, eps).mul(w);
            }
            v = rope(&v, self.mode, &self.rope, pos, self.freq_factors);
            v = v.mul(&vec![self.scale; self.head_dim]);
            out.extend(match self.stored_as {
                DType::F16 => v.stored(2f64.powi(-11), 2f64.powi(-24)),
                DType::BF16 => v.stored(2f64.powi(-8), 0.0),
                _ => v,
            });
        }
        out
    }
}

/// `tail(w . x + bias)`
pub fn qkv_gemv(w: &Matrix, bias: Option<&Bounded>, x: &Bounded, tail: &Tail, pos: i32) -> Bounded {
    tail.apply(&super::gemv_res::gemv_res(w, x, bias, None), pos)
}
