//! PREFILL_FA4: attention of many query tokens over the KV cache, by a FlashAttention-4 module compiled ahead of time.

use super::dec_attn::rows;
use super::pattern::{Match, Pattern, Role, Step};
use super::thresholds::Threshold;
use super::{no_params_from, Constants, Decline, Form, HandOff, KernelCall, Resources, Window};
use crate::graph::{DType, Op, Tensor};
use crate::kernel::{
    prefill_fa4_modules, prefill_fa4_scratch, prefill_fa4_supports, Module, PrefillFa4Args, TileGrid, Tiles, MODULES,
};
use std::sync::LazyLock;

static STEPS: &[Step] = &[Step::new("y", Op::FlashAttnExt, &["q", "k", "v", "mask?"])];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// The window. The output lies over none of the inputs: keys, values and the mask are read until the last tile is done.
pub static PREFILL_FA4: Window = Window {
    name: "PREFILL_FA4",
    computes: "y = softmax(scale * q . k + mask) . v",
    replaces: "FLASH_ATTN_EXT",
    min_cc: 90,
    switch: "GGML_FLASHRT_NO_PREFILL_FA4",
    on_by_default: true,
    pattern: || &PATTERN,
    may_alias: &[],
    uses_scratch: true,
    input_form,
    hands_over: None,
    threshold: Some(Threshold::Queries { q: "q" }),
    guard,
    scratch_bytes: |m| prefill_fa4_scratch(&args(m, &Resources::default())),
    calls: |m, r| vec![KernelCall::PrefillFa4(args(m, r))],
};

/// The module for the heads of a match.
fn module(m: &Match) -> Option<&'static Module> {
    let (head_dim, head_dim_v) = (m.tensor("q").ne()[0], m.tensor("v").ne()[0]);
    MODULES
        .iter()
        .find(|x| (x.head_dim, x.head_dim_v) == (head_dim, head_dim_v))
}

fn grid(m: &Match) -> Option<TileGrid> {
    let (mask, module) = (m.get("mask")?, module(m)?);
    let [keys, tokens, _, planes] = mask.ne().map(|n| n as usize);
    Some(TileGrid {
        tile_m: module.tile_m,
        tile_n: module.tile_n,
        n_planes: planes,
        token_tiles: tokens.div_ceil(module.tile_m),
        key_tiles: keys.div_ceil(module.tile_n),
    })
}

/// The mask's tiles, classified once for all layers that use it.
fn input_form(m: &Match) -> Option<(Role, Form)> {
    Some(("mask", Form::Tiles(grid(m)?)))
}

fn guard(m: &Match, _constants: &Constants) -> Result<(), Decline> {
    let (q, k, v, y) = (m.tensor("q"), m.tensor("k"), m.tensor("v"), m.tensor("y"));
    let [head_dim, n_tokens, n_heads, n_streams] = q.ne();
    let head_dim_v = v.ne()[0];
    if y.param_f32(1) != 0.0 {
        return Err(Decline::new("ALiBi", format!("y {y:?}: slope {}", y.param_f32(1))));
    }
    if y.param_f32(2) != 0.0 {
        return Err(Decline::new("softcap", format!("y {y:?}: {}", y.param_f32(2))));
    }
    let scale = y.param_f32(0);
    // The module adds mask / scale to a product. The quotient of any f16 and these is finite.
    if !(1e-30..1e30).contains(&scale) {
        return Err(Decline::new("scale", format!("y {y:?}: {scale}")));
    }
    // Parameter 3 is the precision: sums are f32 either way.
    no_params_from("y", y, 4)?;
    rows("q", q, DType::F32)?;
    rows("k", k, DType::F16)?;
    rows("v", v, DType::F16)?;
    rows("y", y, DType::F32)?;
    let [_, n_kv, n_heads_kv, _] = k.ne();
    let counts = [n_kv * n_heads, n_tokens * n_heads * n_streams, n_heads_kv, n_streams];
    let shapes = !k.is_empty()
        && !q.is_empty()
        && k.ne() == [head_dim, n_kv, n_heads_kv, n_streams]
        && v.ne() == [head_dim_v, n_kv, n_heads_kv, n_streams]
        && y.ne() == [head_dim_v, n_heads, n_tokens, n_streams]
        && n_heads % n_heads_kv == 0
        && n_streams < 1 << 16
        && counts
            .iter()
            .all(|&n| i32::try_from(n).is_ok_and(|n| n <= i32::MAX / 512));
    if !shapes {
        return Err(Decline::new("shape", format!("q {q:?}, k {k:?}, v {v:?}, y {y:?}")));
    }
    if !y.is_contiguous() {
        return Err(Decline::new("layout", format!("y {y:?} has strides {:?}", y.nb())));
    }
    let Some(mask) = m.get("mask") else {
        return Err(Decline::new("no mask", format!("y {y:?}")));
    };
    let [keys, tokens, heads, streams] = mask.ne();
    // Older hosts pad the tokens.
    let fits = keys == n_kv && tokens >= n_tokens && heads == 1 && (streams == 1 || streams == n_streams);
    if !mask.is(DType::F16) || !fits {
        return Err(Decline::new(
            "mask",
            format!("mask {mask:?} for {n_kv} keys, {n_tokens} tokens"),
        ));
    }
    // Read in pairs.
    let row_bytes = 2 * (n_kv as usize).next_multiple_of(2);
    let nb = mask.nb();
    if nb[0] != 2 || nb[1] < row_bytes || nb[1..].iter().any(|n| n % 4 != 0) || mask.data() % 4 != 0 {
        return Err(Decline::new("layout", format!("mask {mask:?} has strides {nb:?}")));
    }
    let tiles = grid(m).map(|g| g.n_planes * g.token_tiles * g.key_tiles);
    if tiles.is_some_and(|n| n > i32::MAX as usize / 4) {
        return Err(Decline::new("shape", format!("mask {mask:?} has too many tiles")));
    }
    let none = || Decline::new("head size", format!("q {q:?}, v {v:?}: no module"));
    let module = module(m).ok_or_else(none)?;
    match prefill_fa4_supports(head_dim as i32, head_dim_v as i32) {
        // Without kernels the table alone decides.
        None | Some(true) => Ok(()),
        Some(false) => Err(Decline::new(
            "no module",
            format!("{} is not in this build: [{}]", module.name, prefill_fa4_modules()),
        )),
    }
}

fn args(m: &Match, r: &Resources) -> PrefillFa4Args {
    let (q, k, v, y) = (m.tensor("q"), m.tensor("k"), m.tensor("v"), m.tensor("y"));
    let [head_dim, n_tokens, n_heads, n_streams] = q.ne().map(|n| n as i32);
    let [_, n_kv, n_heads_kv, _] = k.ne().map(|n| n as i32);
    let (mask, module) = (m.tensor("mask"), module(m).expect("checked by the guard"));
    let stride = |t: Tensor, d: usize| t.nb()[d] as i64;
    PrefillFa4Args {
        q: q.data() as _,
        q_token_bytes: stride(q, 1),
        q_head_bytes: stride(q, 2),
        q_stream_bytes: stride(q, 3),
        k: k.data() as _,
        k_row_bytes: stride(k, 1),
        k_head_bytes: stride(k, 2),
        k_stream_bytes: stride(k, 3),
        v: v.data() as _,
        v_row_bytes: stride(v, 1),
        v_head_bytes: stride(v, 2),
        v_stream_bytes: stride(v, 3),
        mask: mask.data() as _,
        mask_token_bytes: stride(mask, 1),
        mask_stream_bytes: if mask.ne()[3] > 1 { stride(mask, 3) } else { 0 },
        tiles: r.input.and_then(HandOff::tiles).unwrap_or(Tiles::NONE),
        dst: y.data() as _,
        scratch: r.scratch as _,
        head_dim,
        head_dim_v: v.ne()[0] as i32,
        n_heads,
        n_heads_kv,
        n_tokens,
        n_kv,
        n_streams,
        mask_tokens: mask.ne()[1] as i32,
        tile_m: module.tile_m as i32,
        tile_n: module.tile_n as i32,
        scale: y.param_f32(0),
    }
}
