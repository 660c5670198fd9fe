//! What QKV_GEMV, GLU_GEMV and GEMV_RES share: a weight matrix times a few rows of activations.

use super::pattern::{Match, Role};
use super::{constant, f32_rows, no_params_from, row_stride, Constants, Decline, HandOff, Resources};
use crate::graph::{DType, Tensor};
use crate::kernel::{gemv_supports, GemvArgs, GemvSeg, Glu, Q8};

/// Weight types the kernels read.
pub(super) const WEIGHT_TYPES: &[DType] = &[
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q5_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Rows of activations up to which the windows take a mat-vec.
pub(super) const MAX_TOKENS: i64 = 4;

/// Can the kernels read this weight, in whatever number of tokens?
pub(super) fn reads(weight: Tensor) -> bool {
    weight.dtype().is_some_and(|d| WEIGHT_TYPES.contains(&d))
}

/// Do quantised activations help this weight type?
pub(super) fn wants_q8(weight: Tensor) -> bool {
    !matches!(weight.dtype(), Some(DType::F16 | DType::BF16) | None)
}

/// `out = w @ x`, as the kernels can do it.
pub(super) fn guard_mat_vec(
    m: &Match,
    constants: &Constants,
    (w_role, x_role, out_role): (Role, Role, Role),
    glu: Glu,
) -> Result<(), Decline> {
    let (w, x, out) = (m.tensor(w_role), m.tensor(x_role), m.tensor(out_role));
    f32_rows(x_role, x)?;
    f32_rows(out_role, out)?;
    let n_tokens = x.ne()[1];
    if n_tokens > MAX_TOKENS {
        return Err(Decline::new(
            "many tokens",
            format!("{n_tokens} tokens, at most {MAX_TOKENS}"),
        ));
    }
    let dtype = w.dtype().filter(|d| WEIGHT_TYPES.contains(d));
    let Some(dtype) = dtype else {
        let name = w
            .dtype()
            .map_or_else(|| format!("type {}", w.raw().dtype), |d| d.name().to_owned());
        return Err(Decline::new(
            "weight type",
            format!("{w_role} {w:?}: no kernel for {name}"),
        ));
    };
    constant(w_role, w, constants)?;
    let [k, n_rows, ..] = w.ne();
    let row_bytes = k as usize / dtype.block_len() * dtype.block_bytes();
    let shapes = w.ne() == [k, n_rows, 1, 1]
        && x.ne() == [k, n_tokens, 1, 1]
        && out.ne() == [n_rows, n_tokens, 1, 1]
        && k % dtype.block_len() as i64 == 0
        && i32::try_from(k).is_ok()
        && i32::try_from(n_rows).is_ok();
    if !shapes {
        return Err(Decline::new(
            "shape",
            format!("{w_role} {w:?}, {x_role} {x:?}, {out_role} {out:?}"),
        ));
    }
    if w.nb()[0] != dtype.block_bytes() || w.nb()[1] != row_bytes {
        return Err(Decline::new(
            "layout",
            format!("{w_role} {w:?} has strides {:?}", w.nb()),
        ));
    }
    // Weights start on 16 bytes, f32 rows of an odd stride do too unless a view cut them.
    if w.data() % 16 != 0 || x.data() % 16 != 0 || (n_tokens > 1 && x.nb()[1] % 16 != 0) {
        return Err(Decline::new(
            "layout",
            format!("{w_role} {w:?} or {x_role} {x:?} is not on 16 bytes"),
        ));
    }
    if super::compiled() && !gemv_supports(dtype as i32, k as i32, n_tokens as i32, glu) {
        return Err(Decline::new(
            "kernel",
            format!("none for {} {k}x{n_rows} with {n_tokens} tokens", dtype.name()),
        ));
    }
    // Parameter 0 is the precision: sums are f32 either way. Parameter 1 is a hint that names another algorithm.
    no_params_from(out_role, out, 1)
}

/// One weight matrix writing to `dst`.
pub(super) fn segment(w: Tensor, dst: usize, dst_stride: i64) -> GemvSeg {
    GemvSeg {
        w: w.data() as _,
        row_bytes: w.nb()[1] as i64,
        dst: dst as _,
        dst_stride,
        n_rows: w.ne()[1] as i32,
        ..GemvSeg::NONE
    }
}

/// A launch of `segments` that all have the type of `w` and read `x`.
pub(super) fn launch(w: Tensor, x: Tensor, segments: &[GemvSeg], glu: Glu, r: &Resources) -> GemvArgs {
    let mut seg = [GemvSeg::NONE; 3];
    seg[..segments.len()].copy_from_slice(segments);
    GemvArgs {
        ty: w.raw().dtype,
        n_seg: segments.len() as i32,
        seg,
        k: w.ne()[0] as i32,
        n_tokens: x.ne()[1] as i32,
        x: x.data() as _,
        x_stride: row_stride(x),
        xq: if wants_q8(w) {
            r.input.and_then(HandOff::q8).unwrap_or(Q8::NONE)
        } else {
            Q8::NONE
        },
        glu: glu as i32,
    }
}
