//! Where ggml's CPU results may be farther from an oracle than a right f32 kernel: the oracles' own bounds
//! ([`crate::reference`]) leave these out.

use crate::graph::DType;
use crate::kernel::{Glu, RopeMode};
use crate::reference::dec_attn::{self, Scoring};
use crate::reference::glu::activation;
use crate::reference::h16::{TINY16, U16};
use crate::reference::quant::{Matrix, Q8_BLOCK};
use crate::reference::rope::{pair, Params};
use crate::reference::{self, Bounded, U};

/// Unit roundoff of bf16.
const UB16: f64 = 1.0 / (1u64 << 9) as f64;
/// Half a step of an 8-bit quantiser, and the roundings of the step and the quotient.
const HALF_STEP: f64 = 0.501;

/// The input of a mat-vec as its dot product takes it: ggml-cpu rounds it to a type that goes with the weight's. The bound on
/// a result is then `sum |w| * error`. A lane of its f32 sums has up to `k / 8` additions, which the last term covers.
pub fn mat_vec_input(x: &Bounded, weight: DType) -> Bounded {
    let step = |block: &[f64]| block.iter().fold(0f64, |m, v| m.max(v.abs())) / 127.0;
    let additions = x.len() as f64 / 8.0 * U;
    let mut out = x.clone();
    match weight {
        DType::F16 => widen(&mut out, |v| v.abs() * U16 + TINY16),
        DType::BF16 => widen(&mut out, |v| v.abs() * UB16),
        _ if weight.block_len() == 256 => {
            // q8_K: 256 values share an f32 step.
            for (v, e) in x.value.chunks(256).zip(out.bound.chunks_mut(256)) {
                let d = step(v);
                e.iter_mut().for_each(|e| *e += HALF_STEP * d);
            }
        }
        _ => {
            // q8_0: 32 values share a step, and it is stored as f16.
            for (v, e) in x.value.chunks(Q8_BLOCK).zip(out.bound.chunks_mut(Q8_BLOCK)) {
                let d = step(v);
                e.iter_mut()
                    .zip(v)
                    .for_each(|(e, v)| *e += HALF_STEP * d + (v.abs() + d) * U16 + 127.0 * TINY16);
            }
        }
    }
    widen(&mut out, |v| v.abs() * additions);
    out
}

/// Products of inputs that [`mat_vec_input`] widened. Weights with an offset for each block of 32 multiply it with the sum of the
/// input's block, which is stored as f16.
pub fn mat_vecs(w: &Matrix, tokens: &[Bounded]) -> Vec<Bounded> {
    let mut out = w.mat_vecs(tokens);
    if matches!(w.dtype, DType::Q4_1 | DType::Q5_1) {
        for (r, row) in (0..w.n_rows).map(|r| (r, w.offsets(r))) {
            for (out, x) in out.iter_mut().zip(tokens) {
                let blocks = row.chunks(Q8_BLOCK).zip(x.value.chunks(Q8_BLOCK));
                out.bound[r] += blocks
                    .map(|(offsets, x)| {
                        let sum: f64 = x.iter().map(|v| v.abs()).sum();
                        offsets[0].abs() * (1.01 * U16 * sum + TINY16)
                    })
                    .sum::<f64>();
            }
        }
    }
    out
}

/// `act(gate) * up`. The tanh and the quick form of GELU come from a table of f16 values that an f16 argument selects.
pub fn glu(kind: Glu, gate: &Bounded, up: &Bounded) -> Bounded {
    if !matches!(kind, Glu::Geglu | Glu::GegluQuick) {
        return reference::glu::glu(kind, gate, up);
    }
    let mut rounded_gate = gate.clone();
    widen(&mut rounded_gate, |v| v.abs() * U16 + TINY16);
    let mut out = reference::glu::glu(kind, &rounded_gate, up);
    for (i, e) in out.bound.iter_mut().enumerate() {
        let (u, u_bound) = up.at(i);
        *e += (activation(kind, gate.value[i]).abs() * U16 + 2.0 * TINY16) * (u.abs() + u_bound);
    }
    out
}

/// Attention. ggml-cpu rounds the query to f16, and adds up the rows of V in f16 too: each addition, and each scaling when a new
/// maximum turns up, is off by a roundoff of what has been added so far.
pub fn dec_attn(q: &Bounded, scoring: Scoring, k: &[f64], v: &[f64], mask: &[f64]) -> Bounded {
    let mut narrow = q.clone();
    widen(&mut narrow, |v| v.abs() * U16 + TINY16);
    let mut out = dec_attn::dec_attn(&narrow, scoring, k, v, mask);
    let mut added = vec![0.0; q.len()];
    for (v, w) in v.chunks(q.len()).zip(&out.weights).filter(|(_, w)| **w > 0.0) {
        for ((added, v), bound) in added.iter_mut().zip(v).zip(&mut out.values.bound) {
            *added += w * v.abs();
            *bound += 2.0 * U16 * *added + TINY16;
        }
    }
    out.values
}

/// Widens the bounds of a head that was rotated. ggml-cpu gets the angle of pair `i` by `i` products with an inexact f32
/// factor: three units each where the oracle grants one. An angle off by `d` moves a pair by `d` times its length.
pub fn widen_rotated(head: &mut Bounded, mode: RopeMode, params: &Params, pos: i32, freq_factors: Option<&[f64]>) {
    for i in 0..params.n_dims / 2 {
        let angle = params.turn(pos, i, freq_factors.map_or(1.0, |f| f[i])).angle;
        let (a, b) = pair(mode, params.n_dims, i);
        let moved = 3.0 * i as f64 * U * angle.abs() * (head.value[a].abs() + head.value[b].abs());
        head.bound[a] += moved;
        head.bound[b] += moved;
    }
}

fn widen(x: &mut Bounded, by: impl Fn(f64) -> f64) {
    x.bound.iter_mut().zip(&x.value).for_each(|(e, &v)| *e += by(v));
}
