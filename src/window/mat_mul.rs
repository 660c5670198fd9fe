//! What MM_PREFILL, MM_RES and GEGLU_FFN share: a weight matrix times many rows of activations.

use super::pattern::{Match, Role};
use super::{constant, no_params_from, Constants, Decline, HandOff, Resources};
use crate::graph::{DType, Tensor};
use crate::kernel::{mm_supports, Glu, MmArgs, H16, MM_WEIGHT_TYPES};

/// Rows of an f32 tensor that lie equally far apart, over all its dimensions: their number, and floats from one to the next.
pub(super) fn rows(role: Role, t: Tensor) -> Result<(i64, i64), Decline> {
    if !t.is(DType::F32) {
        return Err(Decline::new("type", format!("{role} {t:?} is not f32")));
    }
    let ([_, n1, n2, n3], nb) = (t.ne(), t.nb());
    let even = (n2 == 1 || nb[2] == nb[1] * n1 as usize) && (n3 == 1 || nb[3] == nb[2] * n2 as usize);
    if t.is_empty() || nb[0] != 4 || nb[1] % 4 != 0 || !even || t.data() % 4 != 0 {
        return Err(Decline::new("layout", format!("{role} {t:?} has strides {nb:?}")));
    }
    Ok((t.n_rows(), (nb[1] / 4) as i64))
}

/// Type of a weight that the kernels read.
pub(super) fn weight_type(role: Role, w: Tensor) -> Result<DType, Decline> {
    let known = w.dtype().filter(|d| MM_WEIGHT_TYPES.contains(d));
    known.ok_or_else(|| Decline::new("weight type", format!("{role} {w:?}: no kernel for it")))
}

/// `out = w @ x`, as the kernel can do it.
pub(super) fn guard_mat_mul(
    m: &Match,
    constants: &Constants,
    (w_role, x_role, out_role): (Role, Role, Role),
    glu: Glu,
) -> Result<(), Decline> {
    let (w, x, out) = (m.tensor(w_role), m.tensor(x_role), m.tensor(out_role));
    let (n_tokens, x_stride) = rows(x_role, x)?;
    rows(out_role, out)?;
    let dtype = weight_type(w_role, w)?;
    constant(w_role, w, constants)?;
    let [k, n_rows, ..] = w.ne();
    let whole = (dtype.block_len().max(H16::COLUMNS)) as i64;
    // A batch is more tokens: all of them multiply the one matrix.
    let shapes = w.ne() == [k, n_rows, 1, 1]
        && x.ne()[0] == k
        && out.ne()[0] == n_rows
        && out.ne()[1..] == x.ne()[1..]
        && k % whole == 0
        && [k, n_rows, n_tokens].iter().all(|&n| i32::try_from(n).is_ok());
    if !shapes {
        return Err(Decline::new(
            "shape",
            format!("{w_role} {w:?}, {x_role} {x:?}, {out_role} {out:?}"),
        ));
    }
    if w.nb()[0] != dtype.block_bytes() || w.nb()[1] != k as usize / dtype.block_len() * dtype.block_bytes() {
        return Err(Decline::new(
            "layout",
            format!("{w_role} {w:?} has strides {:?}", w.nb()),
        ));
    }
    if w.data() % 16 != 0 || x.data() % 16 != 0 || x_stride % 4 != 0 {
        return Err(Decline::new(
            "layout",
            format!("{w_role} {w:?} or {x_role} {x:?} is not on 16 bytes"),
        ));
    }
    if super::compiled() && !mm_supports(dtype as i32, k as i32, glu) {
        return Err(Decline::new(
            "kernel",
            format!("none for {} {k}x{n_rows}", dtype.name()),
        ));
    }
    // Parameter 0 is the precision: sums are f32 either way. Parameter 1 is a hint that names another algorithm.
    no_params_from(out_role, out, 1)
}

/// Arguments for `y = w @ x`, `x` handed over.
pub(super) fn launch(w: Tensor, y: Tensor, r: &Resources) -> MmArgs {
    let (n_tokens, dst_stride) = rows("y", y).expect("checked by the guard");
    MmArgs {
        ty: w.raw().dtype,
        glu: Glu::None as i32,
        w: w.data() as _,
        w2: std::ptr::null(),
        row_bytes: w.nb()[1] as i64,
        n_rows: w.ne()[1] as i32,
        k: w.ne()[0] as i32,
        n_tokens: n_tokens as i32,
        x: r.input.and_then(HandOff::h16).expect("the plan makes the f16 form"),
        dst: y.data() as _,
        dst_stride,
        bias: std::ptr::null(),
        res: std::ptr::null(),
        res_stride: 0,
    }
}
