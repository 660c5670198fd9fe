//! What MOE_FFN and MOE_PREFILL share: weights of experts times the tokens that are routed to them.

use super::mat_mul::{rows, weight_type};
use super::pattern::{Match, Role};
use super::{constant, no_params_from, Constants, Decline, KernelCall};
use crate::graph::{DType, Tensor};
use crate::kernel::{
    moe_max_rows, moe_mm_supports, Glu, MoeH16Args, MoeMmArgs, MoeRouteArgs, MoeRows, H16, MOE_MAX_EXPERTS,
};

/// `out = w[ids] @ x`, as the kernels can do it.
pub(super) fn guard_moe(
    m: &Match,
    constants: &Constants,
    (w_role, x_role, out_role): (Role, Role, Role),
    glu: Glu,
) -> Result<(), Decline> {
    let (w, x, ids, out) = (m.tensor(w_role), m.tensor(x_role), m.tensor("ids"), m.tensor(out_role));
    let (_, x_stride) = rows(x_role, x)?;
    rows(out_role, out)?;
    let dtype = weight_type(w_role, w)?;
    constant(w_role, w, constants)?;
    if !ids.is(DType::I32) {
        return Err(Decline::new("type", format!("ids {ids:?} is not i32")));
    }
    let ([k, n_rows, n_experts, _], [n_used, n_tokens, ..]) = (w.ne(), ids.ne());
    let whole = dtype.block_len().max(H16::COLUMNS) as i64;
    let fits = |n: Option<i64>| n.is_some_and(|n| i32::try_from(n).is_ok());
    // Places of the route are counted in 32 bits, up to 7 unused ones for each expert and for all of them.
    let places = n_used
        .checked_mul(n_tokens)
        .and_then(|n| n.checked_add(7 * MOE_MAX_EXPERTS as i64 + 7));
    let shapes = w.ne() == [k, n_rows, n_experts, 1]
        && ids.ne() == [n_used, n_tokens, 1, 1]
        && (x.ne() == [k, 1, n_tokens, 1] || x.ne() == [k, n_used, n_tokens, 1])
        && out.ne() == [n_rows, n_used, n_tokens, 1]
        && k % whole == 0
        && (1..=MOE_MAX_EXPERTS as i64).contains(&n_experts)
        && fits(Some(k))
        && fits(Some(n_rows))
        && fits(places);
    if !shapes {
        return Err(Decline::new(
            "shape",
            format!("{w_role} {w:?}, {x_role} {x:?}, ids {ids:?}, {out_role} {out:?}"),
        ));
    }
    if !w.is_contiguous() {
        return Err(Decline::new(
            "layout",
            format!("{w_role} {w:?} has strides {:?}", w.nb()),
        ));
    }
    if ids.nb()[0] != 4 || ids.nb()[1] % 4 != 0 || ids.data() % 4 != 0 {
        return Err(Decline::new(
            "layout",
            format!("ids {ids:?} has strides {:?}", ids.nb()),
        ));
    }
    if w.data() % 16 != 0 || x.data() % 16 != 0 || x_stride % 4 != 0 {
        return Err(Decline::new(
            "layout",
            format!("{w_role} {w:?} or {x_role} {x:?} is not on 16 bytes"),
        ));
    }
    if super::compiled() && !moe_mm_supports(dtype as i32, k as i32, glu, n_experts as i32) {
        return Err(Decline::new(
            "kernel",
            format!("none for {n_experts} experts of {} {k}x{n_rows}", dtype.name()),
        ));
    }
    // Parameter 0 is the precision of sums, which are f32 either way. Parameter 3 would be that of the activations.
    no_params_from(out_role, out, 1)
}

/// Tokens times slots of a match that passed the guard.
fn n_pairs(ids: Tensor) -> i32 {
    (ids.ne()[0] * ids.ne()[1]) as i32
}

/// Where the intermediate results of a site lie: the input as f16 in the order of the experts, and that order.
struct Scratch {
    x: H16,
    route: MoeRows,
    end: usize,
}

impl Scratch {
    /// From address `start` on, which lies on [`H16::ALIGN`] bytes.
    fn at(start: usize, w: Tensor, ids: Tensor) -> Scratch {
        let (k, n_experts) = (w.ne()[0] as usize, w.ne()[2] as usize);
        let places = moe_max_rows(n_pairs(ids), n_experts as i32) as usize;
        let scale = start + H16::bytes(k, places);
        let rows = scale + 4 * places;
        let begin = rows + 4 * places;
        let count = begin + 4 * (n_experts + 1);
        Scratch {
            x: H16 {
                x: start as _,
                scale: scale as _,
            },
            route: MoeRows {
                rows: rows as _,
                begin: begin as _,
                count: count as _,
            },
            end: count + 4 * n_experts,
        }
    }
}

/// Scratch of a site.
pub(super) fn scratch_bytes(m: &Match, w_role: Role) -> usize {
    Scratch::at(0, m.tensor(w_role), m.tensor("ids")).end
}

/// Launches for `y = w[ids] @ x`, with `glu` for `y = act(w[ids] @ x) * (w2[ids] @ x)`.
pub(super) fn launches(m: &Match, w_role: Role, glu: Glu, w2: Option<Tensor>, scratch: usize) -> Vec<KernelCall> {
    let (w, x, ids, y) = (m.tensor(w_role), m.tensor("x"), m.tensor("ids"), m.tensor("y"));
    let stride = |role: Role, t: Tensor| rows(role, t).expect("checked by the guard").1;
    let ([k, n_rows, n_experts, _], [n_used, n_tokens, ..]) = (w.ne().map(|n| n as i32), ids.ne().map(|n| n as i32));
    let Scratch { x: h16, route, .. } = Scratch::at(scratch, w, ids);
    let route_args = MoeRouteArgs {
        ids: ids.data() as _,
        ids_stride: (ids.nb()[1] / 4) as i64,
        n_tokens,
        n_used,
        n_experts,
        out: route,
    };
    let convert = MoeH16Args {
        x: x.data() as _,
        x_stride: stride("x", x),
        y: h16,
        route,
        k,
        n_pairs: n_pairs(ids),
        n_used,
        n_experts,
        per_slot: i32::from(x.ne()[1] != 1),
    };
    let product = MoeMmArgs {
        ty: w.raw().dtype,
        glu: glu as i32,
        w: w.data() as _,
        w2: w2.map_or(std::ptr::null(), |w| w.data() as _),
        row_bytes: w.nb()[1] as i64,
        expert_bytes: w.nb()[2] as i64,
        n_rows,
        k,
        n_pairs: n_pairs(ids),
        n_experts,
        x: h16,
        route,
        dst: y.data() as _,
        dst_stride: stride("y", y),
    };
    vec![
        KernelCall::MoeRoute(route_args),
        KernelCall::MoeToH16(convert),
        KernelCall::MoeMm(product),
    ]
}
