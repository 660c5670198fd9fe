//! DEC_ATTN: attention of a few query tokens over the KV cache, in one launch.

use super::pattern::{Match, Pattern, Role, Step};
use super::{no_params_from, Constants, Decline, KernelCall, Resources, Window};
use crate::cache::TICKET_BYTES;
use crate::graph::{DType, Op, Tensor};
use crate::kernel::{dec_attn_columns, dec_attn_scratch, DecAttnArgs, DEC_ATTN_COLUMNS, DEC_ATTN_HEAD_DIMS};
use std::sync::LazyLock;

static STEPS: &[Step] = &[Step::new("y", Op::FlashAttnExt, &["q", "k", "v", "mask?"])];
static PATTERN: LazyLock<Pattern> = LazyLock::new(|| Pattern::new(STEPS, &["y"]));

/// Query tokens up to which the window takes attention.
const MAX_TOKENS: i64 = 4;
/// Keys that make a split of their own worth while.
const KEYS_PER_SPLIT: usize = 32;
/// Blocks that no GPU exceeds at once: scratch for more results would never be used.
const MAX_BLOCKS: usize = 512;

/// The window. The output lies over none of the inputs: one block writes while others read.
pub static DEC_ATTN: Window = Window {
    name: "DEC_ATTN",
    computes: "y = softmax(cap(scale * q . k) + mask) . v",
    replaces: "FLASH_ATTN_EXT",
    min_cc: 80,
    switch: "GGML_FLASHRT_NO_DEC_ATTN",
    on_by_default: false,
    pattern: || &PATTERN,
    may_alias: &[],
    uses_scratch: true,
    input_form: |_| None,
    hands_over: None,
    threshold: None,
    guard,
    scratch_bytes,
    calls,
};

/// Rows on 16 bytes, one value after another.
pub(super) fn rows(role: Role, t: Tensor, dtype: DType) -> Result<(), Decline> {
    if !t.is(dtype) {
        let name = t.dtype().map_or("an unknown type", DType::name);
        return Err(Decline::new(
            "type",
            format!("{role} {t:?} is {name}, not {}", dtype.name()),
        ));
    }
    let nb = t.nb();
    if nb[0] != dtype.block_bytes() || nb[1..].iter().any(|n| n % 16 != 0) || t.data() % 16 != 0 {
        return Err(Decline::new("layout", format!("{role} {t:?} has strides {nb:?}")));
    }
    Ok(())
}

fn guard(m: &Match, _constants: &Constants) -> Result<(), Decline> {
    let (q, k, v, y) = (m.tensor("q"), m.tensor("k"), m.tensor("v"), m.tensor("y"));
    let [head_dim, n_tokens, n_heads, n_streams] = q.ne();
    if n_tokens > MAX_TOKENS {
        return Err(Decline::new(
            "many tokens",
            format!("{n_tokens} tokens, at most {MAX_TOKENS}"),
        ));
    }
    if !DEC_ATTN_HEAD_DIMS.iter().any(|&d| i64::from(d) == head_dim) {
        return Err(Decline::new(
            "head size",
            format!("q {q:?}: no kernel for heads of {head_dim}"),
        ));
    }
    if y.param_f32(1) != 0.0 {
        return Err(Decline::new("ALiBi", format!("y {y:?}: slope {}", y.param_f32(1))));
    }
    // Parameter 3 is the precision: sums are f32 either way.
    no_params_from("y", y, 4)?;
    rows("q", q, DType::F32)?;
    rows("k", k, DType::F16)?;
    rows("v", v, DType::F16)?;
    rows("y", y, DType::F32)?;
    let [_, n_kv, n_heads_kv, _] = k.ne();
    let shapes = !k.is_empty()
        && k.ne() == [head_dim, n_kv, n_heads_kv, n_streams]
        && v.same_shape(k)
        && y.ne() == [head_dim, n_heads, n_tokens, n_streams]
        && n_heads % n_heads_kv == 0
        && i32::try_from(n_kv * n_heads).is_ok_and(|n| n <= i32::MAX / 2);
    if !shapes {
        return Err(Decline::new("shape", format!("q {q:?}, k {k:?}, v {v:?}, y {y:?}")));
    }
    if !y.is_contiguous() {
        return Err(Decline::new("layout", format!("y {y:?} has strides {:?}", y.nb())));
    }
    if let Some(mask) = m.get("mask") {
        let [keys, tokens, heads, streams] = mask.ne();
        // Older hosts pad the tokens.
        let fits = keys == n_kv && tokens >= n_tokens && heads == 1 && (streams == 1 || streams == n_streams);
        if !mask.is(DType::F16) || !fits {
            return Err(Decline::new(
                "mask",
                format!("mask {mask:?} for {n_kv} keys, {n_tokens} tokens"),
            ));
        }
        if mask.nb()[0] != 2 || mask.nb()[1..].iter().any(|n| n % 2 != 0) || mask.data() % 2 != 0 {
            return Err(Decline::new(
                "layout",
                format!("mask {mask:?} has strides {:?}", mask.nb()),
            ));
        }
    }
    if units(m) * 4 > TICKET_BYTES {
        return Err(Decline::new(
            "shape",
            format!("q {q:?}: more heads and streams than tickets"),
        ));
    }
    Ok(())
}

/// Groups of columns that blocks work on.
fn units(m: &Match) -> usize {
    let [_, n_tokens, n_heads, n_streams] = m.tensor("q").ne().map(|n| n as usize);
    let n_heads_kv = m.tensor("k").ne()[2] as usize;
    let columns = dec_attn_columns(n_tokens * (n_heads / n_heads_kv));
    n_streams * n_heads_kv * columns.div_ceil(DEC_ATTN_COLUMNS)
}

fn max_splits(m: &Match) -> usize {
    let by_keys = (m.tensor("k").ne()[1] as usize).div_ceil(KEYS_PER_SPLIT);
    by_keys.min(MAX_BLOCKS / units(m)).max(1)
}

fn scratch_bytes(m: &Match) -> usize {
    dec_attn_scratch(&args(m, &Resources::default()))
}

fn args(m: &Match, r: &Resources) -> DecAttnArgs {
    let (q, k, v, y) = (m.tensor("q"), m.tensor("k"), m.tensor("v"), m.tensor("y"));
    let [head_dim, n_tokens, n_heads, n_streams] = q.ne().map(|n| n as i32);
    let [_, n_kv, n_heads_kv, _] = k.ne().map(|n| n as i32);
    let stride = |t: Tensor, d: usize| t.nb()[d] as i64;
    let mask = m.get("mask");
    DecAttnArgs {
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
        mask: mask.map_or(0, Tensor::data) as _,
        mask_token_bytes: mask.map_or(0, |t| stride(t, 1)),
        mask_stream_bytes: mask.map_or(0, |t| if t.ne()[3] > 1 { stride(t, 3) } else { 0 }),
        dst: y.data() as _,
        scratch: r.scratch as _,
        tickets: r.tickets as _,
        head_dim,
        n_heads,
        n_heads_kv,
        n_tokens,
        n_kv,
        n_streams,
        max_splits: max_splits(m) as i32,
        scale: y.param_f32(0),
        softcap: y.param_f32(2),
    }
}

fn calls(m: &Match, r: &Resources) -> Vec<KernelCall> {
    vec![KernelCall::DecAttn(args(m, r))]
}
