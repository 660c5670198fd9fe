//! Kernel calls, executed by the oracles on recorded memory.
//!
//! A window hands out its launches as data ([`KernelCall`]), so what is checked here is exactly what a GPU would be told:
//! addresses, strides, head counts, scales. [`crate::reference`] computes; [`super::cpu`] widens the bounds to what ggml-cpu
//! does.

use super::cpu;
use super::memory::{element, Fault, Memory};
use crate::graph::DType;
use crate::kernel::{
    moe_max_rows, DecAttnArgs, GemvArgs, Glu, H16Args, MmArgs, MoeH16Args, MoeMmArgs, MoeRouteArgs, MoeRows, NormArgs,
    PrefillFa4Args, QkvPart, QkvTailArgs, Rope, RopeMode, H16,
};
use crate::reference::add_norm::add_norm;
use crate::reference::dec_attn::Scoring;
use crate::reference::h16;
use crate::reference::moe::Route;
use crate::reference::qkv_gemv::Tail;
use crate::reference::quant::{dequantize_row, Matrix};
use crate::reference::rope::Params;
use crate::reference::sandwich_norm::sandwich_norm;
use crate::reference::Bounded;
use crate::window::KernelCall;
use std::ffi::c_void;

/// Runs one call.
pub fn run(memory: &mut Memory, call: &KernelCall) -> Result<(), Fault> {
    match call {
        KernelCall::Norm(args) => norm(memory, args),
        KernelCall::Gemv(args) => gemv(memory, args),
        KernelCall::QkvTail(args) => qkv_tail(memory, args),
        KernelCall::DecAttn(args) => dec_attn(memory, args),
        // The lists only say where the mask need not be read.
        KernelCall::MaskTiles(_) => Ok(()),
        KernelCall::PrefillFa4(args) => prefill_fa4(memory, args),
        KernelCall::Mm(args) => mm(memory, args),
        KernelCall::ToH16(args) => to_h16(memory, args),
        KernelCall::MoeRoute(args) => moe_route(memory, args),
        KernelCall::MoeToH16(args) => moe_to_h16(memory, args),
        KernelCall::MoeMm(args) => moe_mm(memory, args),
    }
}

/// Address of a token's row.
fn row<T>(base: *const T, stride: i64, token: usize) -> usize {
    base as usize + token * stride as usize * std::mem::size_of::<T>()
}

fn norm(memory: &mut Memory, a: &NormArgs) -> Result<(), Fault> {
    let n = a.n_cols as usize;
    let w2 = memory.vector(a.w2 as usize, n)?;
    for t in 0..a.n_rows as usize {
        let h = memory.f32s(row(a.h, a.h_stride, t), n)?;
        let x = memory.f32s(row(a.x, a.x_stride, t), n)?;
        let result = if a.w1.is_null() {
            add_norm(&h, &x, &w2, a.eps2.into())
        } else {
            sandwich_norm(
                &h,
                &x,
                &memory.vector(a.w1 as usize, n)?,
                a.eps1.into(),
                &w2,
                a.eps2.into(),
            )
        };
        if !a.y.is_null() {
            memory.store(row(a.y, a.y_stride, t), DType::F32, &result.sum)?;
        }
        memory.store(row(a.z, a.z_stride, t), DType::F32, &result.normed)?;
    }
    Ok(())
}

fn weight_type(number: i32) -> Result<DType, Fault> {
    let known = DType::from_number(number).filter(|_| dequantize_row(number, &[], 0).is_some());
    known.ok_or(Fault::Unknown {
        what: "weight type",
        number,
    })
}

fn glu_kind(number: i32) -> Result<Glu, Fault> {
    let kinds = [
        Glu::None,
        Glu::Reglu,
        Glu::Geglu,
        Glu::Swiglu,
        Glu::GegluErf,
        Glu::GegluQuick,
    ];
    let known = kinds.into_iter().find(|&k| k as i32 == number);
    known.ok_or(Fault::Unknown { what: "GLU", number })
}

fn matrix<'m>(
    memory: &Memory<'m>,
    dtype: DType,
    address: usize,
    row_bytes: i64,
    n_rows: i32,
    k: usize,
) -> Result<Matrix<'m>, Fault> {
    let (n_rows, row_bytes) = (n_rows as usize, row_bytes as usize);
    let row_len = k / dtype.block_len() * dtype.block_bytes();
    let bytes = memory.bytes(address, n_rows.saturating_sub(1) * row_bytes + row_len)?;
    Ok(Matrix {
        dtype,
        bytes,
        row_bytes,
        n_rows,
        k,
    })
}

/// Adds bias and residual, where there are such, to the products of each token.
fn add_terms(
    memory: &Memory,
    products: &mut [Bounded],
    n_rows: usize,
    bias: *const f32,
    res: *const f32,
    res_stride: i64,
) -> Result<(), Fault> {
    for (t, product) in products.iter_mut().enumerate() {
        if !bias.is_null() {
            *product = product.add(&memory.f32s(bias as usize, n_rows)?);
        }
        if !res.is_null() {
            *product = product.add(&memory.f32s(row(res, res_stride, t), n_rows)?);
        }
    }
    Ok(())
}

fn gemv(memory: &mut Memory, a: &GemvArgs) -> Result<(), Fault> {
    let (dtype, kind) = (weight_type(a.ty)?, glu_kind(a.glu)?);
    let k = a.k as usize;
    let tokens = (0..a.n_tokens as usize)
        .map(|t| Ok(cpu::mat_vec_input(&memory.f32s(row(a.x, a.x_stride, t), k)?, dtype)))
        .collect::<Result<Vec<_>, Fault>>()?;
    // Everything is read before anything is written: an output may lie over the input.
    let mut products = Vec::new();
    for seg in &a.seg[..a.n_seg as usize] {
        let w = matrix(memory, dtype, seg.w as usize, seg.row_bytes, seg.n_rows, k)?;
        let mut of_seg = mat_vecs(&w, &tokens);
        add_terms(memory, &mut of_seg, w.n_rows, seg.bias, seg.res, seg.res_stride)?;
        products.push(of_seg);
    }
    let results = match (kind, products.as_slice()) {
        (Glu::None, _) => products,
        (_, [gate, up]) => vec![glu(kind, gate, up)],
        _ => {
            return Err(Fault::Unknown {
                what: "number of GLU operands",
                number: a.n_seg,
            })
        }
    };
    for (seg, tokens) in a.seg.iter().zip(&results) {
        for (t, product) in tokens.iter().enumerate() {
            memory.store(row(seg.dst.cast_const(), seg.dst_stride, t), DType::F32, product)?;
        }
    }
    Ok(())
}

fn glu(kind: Glu, gate: &[Bounded], up: &[Bounded]) -> Vec<Bounded> {
    gate.iter().zip(up).map(|(g, u)| cpu::glu(kind, g, u)).collect()
}

/// [`Matrix::mat_vecs`] with ggml-cpu's errors, the rows shared out among threads: this is where a check spends its time.
fn mat_vecs(w: &Matrix, tokens: &[Bounded]) -> Vec<Bounded> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let share = w.n_rows.div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let parts: Vec<_> = (0..w.n_rows)
            .step_by(share)
            .map(|first| {
                let bytes = &w.bytes[first * w.row_bytes..];
                let part = Matrix {
                    bytes,
                    n_rows: share.min(w.n_rows - first),
                    ..*w
                };
                scope.spawn(move || cpu::mat_vecs(&part, tokens))
            })
            .collect();
        let mut out = vec![Bounded::default(); tokens.len()];
        for part in parts {
            let part = part.join().expect("an oracle does not panic");
            out.iter_mut().zip(part).for_each(|(out, part)| out.extend(part));
        }
        out
    })
}

fn to_h16(memory: &mut Memory, a: &H16Args) -> Result<(), Fault> {
    for t in 0..a.n_tokens as usize {
        let x = memory.f32s(row(a.x, a.x_stride, t), a.k as usize)?;
        store_h16(memory, &x, a.y, a.n_tokens as usize, t)?;
    }
    Ok(())
}

/// ggml-cpu does not round to f16, so nor is it done here: only the scale and the places of the values are as on a GPU.
fn store_h16(memory: &mut Memory, x: &Bounded, y: H16, n_tokens: usize, token: usize) -> Result<(), Fault> {
    let scale = h16::scale(x.value.iter().fold(0.0, |m, v| m.max(v.abs())));
    for i in 0..x.len() {
        let value = [(x.value[i] / scale, x.bound[i] / scale)].into_iter().collect();
        memory.store(y.x as usize + H16::offset(token, i, n_tokens), DType::F16, &value)?;
    }
    memory.store(y.scale as usize + 4 * token, DType::F32, &Bounded::exact(&[scale]))
}

fn h16_row(memory: &Memory, x: H16, k: usize, n_tokens: usize, token: usize) -> Result<Bounded, Fault> {
    let written = |address: usize, len: usize| memory.written(address).ok_or(Fault::Read { address, len });
    let (scale, _) = written(x.scale as usize + 4 * token, 4)?;
    (0..k)
        .map(|i| written(x.x as usize + H16::offset(token, i, n_tokens), 2))
        .map(|v| v.map(|(value, bound)| (value * scale, bound * scale)))
        .collect()
}

fn mm(memory: &mut Memory, a: &MmArgs) -> Result<(), Fault> {
    let (dtype, kind) = (weight_type(a.ty)?, glu_kind(a.glu)?);
    let (k, n_tokens) = (a.k as usize, a.n_tokens as usize);
    let tokens = (0..n_tokens)
        .map(|t| Ok(cpu::mat_vec_input(&h16_row(memory, a.x, k, n_tokens, t)?, dtype)))
        .collect::<Result<Vec<_>, Fault>>()?;
    let w = matrix(memory, dtype, a.w as usize, a.row_bytes, a.n_rows, k)?;
    let mut results = mat_vecs(&w, &tokens);
    if kind == Glu::None {
        add_terms(memory, &mut results, w.n_rows, a.bias, a.res, a.res_stride)?;
    } else {
        let w2 = matrix(memory, dtype, a.w2 as usize, a.row_bytes, a.n_rows, k)?;
        results = glu(kind, &results, &mat_vecs(&w2, &tokens));
    }
    for (t, result) in results.iter().enumerate() {
        memory.store(row(a.dst.cast_const(), a.dst_stride, t), DType::F32, result)?;
    }
    Ok(())
}

fn moe_route(memory: &mut Memory, a: &MoeRouteArgs) -> Result<(), Fault> {
    let mut ids = Vec::new();
    for t in 0..a.n_tokens as usize {
        for slot in 0..a.n_used as usize {
            ids.push(memory.i32(row(a.ids, a.ids_stride, t) + 4 * slot)?);
        }
    }
    let Route { rows, begin, count } = Route::new(&ids, a.n_experts as usize);
    for (to, numbers) in [(a.out.rows, rows), (a.out.begin, begin), (a.out.count, count)] {
        memory.store(to as usize, DType::I32, &Bounded::exact(&numbers))?;
    }
    Ok(())
}

/// Number `i` of a table of the route.
fn routed(memory: &Memory, table: *mut i32, i: usize) -> Result<usize, Fault> {
    let address = table as usize + 4 * i;
    let (value, _) = memory.written(address).ok_or(Fault::Read { address, len: 4 })?;
    Ok(value as usize)
}

/// The pairs of an expert, each with its place.
fn pairs_of(memory: &Memory, route: MoeRows, expert: usize) -> Result<Vec<(usize, usize)>, Fault> {
    let (begin, count) = (
        routed(memory, route.begin, expert)?,
        routed(memory, route.count, expert)?,
    );
    (begin..begin + count)
        .map(|place| Ok((place, routed(memory, route.rows, place)?)))
        .collect()
}

fn moe_to_h16(memory: &mut Memory, a: &MoeH16Args) -> Result<(), Fault> {
    let places = moe_max_rows(a.n_pairs, a.n_experts) as usize;
    for expert in 0..a.n_experts as usize {
        for (place, pair) in pairs_of(memory, a.route, expert)? {
            let of = if a.per_slot != 0 {
                pair
            } else {
                pair / a.n_used as usize
            };
            let x = memory.f32s(row(a.x, a.x_stride, of), a.k as usize)?;
            store_h16(memory, &x, a.y, places, place)?;
        }
    }
    Ok(())
}

fn moe_mm(memory: &mut Memory, a: &MoeMmArgs) -> Result<(), Fault> {
    let (dtype, kind) = (weight_type(a.ty)?, glu_kind(a.glu)?);
    let (k, places) = (a.k as usize, moe_max_rows(a.n_pairs, a.n_experts) as usize);
    for expert in 0..a.n_experts as usize {
        let pairs = pairs_of(memory, a.route, expert)?;
        if pairs.is_empty() {
            continue;
        }
        let inputs = pairs
            .iter()
            .map(|&(place, _)| Ok(cpu::mat_vec_input(&h16_row(memory, a.x, k, places, place)?, dtype)))
            .collect::<Result<Vec<_>, Fault>>()?;
        let products = |first: *const c_void| -> Result<Vec<Bounded>, Fault> {
            let w = first as usize + expert * a.expert_bytes as usize;
            Ok(mat_vecs(&matrix(memory, dtype, w, a.row_bytes, a.n_rows, k)?, &inputs))
        };
        let mut results = products(a.w)?;
        if kind != Glu::None {
            results = glu(kind, &results, &products(a.w2)?);
        }
        for ((_, pair), result) in pairs.iter().zip(&results) {
            memory.store(row(a.dst.cast_const(), a.dst_stride, *pair), DType::F32, result)?;
        }
    }
    Ok(())
}

fn qkv_tail(memory: &mut Memory, a: &QkvTailArgs) -> Result<(), Fault> {
    for part in &a.part[..a.n_parts as usize] {
        let unknown = Fault::Unknown {
            what: "store type",
            number: part.dst_type,
        };
        let dtype = DType::from_number(part.dst_type)
            .filter(|d| matches!(d, DType::F32 | DType::F16 | DType::BF16))
            .ok_or(unknown)?;
        for t in 0..a.n_tokens as usize {
            let index = if part.rows.is_null() {
                t as i64
            } else if part.rows_i64 != 0 {
                memory.i64(part.rows as usize + 8 * t)?
            } else {
                memory.i32(part.rows as usize + 4 * t)?.into()
            };
            let head_dim = part.head_dim as usize;
            let heads = memory.f32s(row(part.src, part.src_stride, t), part.n_heads as usize * head_dim)?;
            let stored = tail(memory, part, &a.rope, dtype, t, &heads)?;
            for head in 0..part.n_heads as usize {
                let offset = index * part.row_bytes + head as i64 * part.head_bytes;
                let values = stored.slice(head * head_dim..(head + 1) * head_dim);
                memory.store((part.dst as usize).wrapping_add_signed(offset as isize), dtype, &values)?;
            }
        }
    }
    Ok(())
}

fn tail(
    memory: &Memory,
    part: &QkvPart,
    rope: &Rope,
    stored_as: DType,
    token: usize,
    heads: &Bounded,
) -> Result<Bounded, Fault> {
    let modes = [RopeMode::None, RopeMode::Normal, RopeMode::Neox];
    let unknown = Fault::Unknown {
        what: "RoPE mode",
        number: part.rope,
    };
    let mode = modes.into_iter().find(|&m| m as i32 == part.rope).ok_or(unknown)?;
    let vector = |p: *const f32, n: usize| (!p.is_null()).then(|| memory.vector(p as usize, n)).transpose();
    let norm = vector(part.norm_w, part.head_dim as usize)?;
    let params = Params::from(rope);
    let (pos, factors) = match mode {
        RopeMode::None => (0, None),
        _ => (
            memory.i32(rope.pos as usize + 4 * token)?,
            vector(rope.freq_factors, params.n_dims / 2)?,
        ),
    };
    let tail = Tail {
        head_dim: part.head_dim as usize,
        norm: norm.as_deref().map(|w| (w, part.eps.into())),
        mode,
        rope: params,
        freq_factors: factors.as_deref(),
        scale: part.scale.into(),
        stored_as,
    };
    let mut out = Bounded::default();
    for at in (0..heads.len()).step_by(tail.head_dim) {
        let mut head = tail.apply(&heads.slice(at..at + tail.head_dim), pos);
        if mode != RopeMode::None {
            // Rotated values are as long as what they were rotated from.
            cpu::widen_rotated(&mut head, mode, &params, pos, factors.as_deref());
        }
        out.extend(head);
    }
    Ok(out)
}

/// As [`dec_attn`] with another kernel: what ggml's CPU kernel may be off by does not depend on it.
fn prefill_fa4(memory: &mut Memory, a: &PrefillFa4Args) -> Result<(), Fault> {
    if a.head_dim != a.head_dim_v {
        let (what, number) = ("heads of V of size", a.head_dim_v);
        return Err(Fault::Unknown { what, number });
    }
    let same = DecAttnArgs {
        q: a.q,
        q_token_bytes: a.q_token_bytes,
        q_head_bytes: a.q_head_bytes,
        q_stream_bytes: a.q_stream_bytes,
        k: a.k,
        k_row_bytes: a.k_row_bytes,
        k_head_bytes: a.k_head_bytes,
        k_stream_bytes: a.k_stream_bytes,
        v: a.v,
        v_row_bytes: a.v_row_bytes,
        v_head_bytes: a.v_head_bytes,
        v_stream_bytes: a.v_stream_bytes,
        mask: a.mask,
        mask_token_bytes: a.mask_token_bytes,
        mask_stream_bytes: a.mask_stream_bytes,
        dst: a.dst,
        scratch: std::ptr::null_mut(),
        tickets: std::ptr::null_mut(),
        head_dim: a.head_dim,
        n_heads: a.n_heads,
        n_heads_kv: a.n_heads_kv,
        n_tokens: a.n_tokens,
        n_kv: a.n_kv,
        n_streams: a.n_streams,
        max_splits: 1,
        scale: a.scale,
        softcap: 0.0,
    };
    dec_attn(memory, &same)
}

fn dec_attn(memory: &mut Memory, a: &DecAttnArgs) -> Result<(), Fault> {
    let n = a.head_dim as usize;
    let f16s = |memory: &Memory, address: i64, n: usize| -> Result<Vec<f64>, Fault> {
        let bytes = memory.bytes(address as usize, 2 * n)?;
        Ok(bytes.chunks_exact(2).filter_map(|b| element(DType::F16, b)).collect())
    };
    let scoring = Scoring {
        scale: a.scale.into(),
        softcap: a.softcap.into(),
    };
    // Everything is read before anything is written, as in `gemv`.
    let mut results = Bounded::default();
    for stream in 0..i64::from(a.n_streams) {
        let rows = |memory: &Memory, base: i64, row_bytes: i64| -> Result<Vec<f64>, Fault> {
            let rows = (0..i64::from(a.n_kv)).map(|row| f16s(memory, base + row * row_bytes, n));
            Ok(rows.collect::<Result<Vec<_>, _>>()?.concat())
        };
        let heads = (0..i64::from(a.n_heads_kv)).map(|head| {
            let k = a.k as i64 + stream * a.k_stream_bytes + head * a.k_head_bytes;
            let v = a.v as i64 + stream * a.v_stream_bytes + head * a.v_head_bytes;
            Ok((rows(memory, k, a.k_row_bytes)?, rows(memory, v, a.v_row_bytes)?))
        });
        let heads = heads.collect::<Result<Vec<_>, Fault>>()?;
        for token in 0..i64::from(a.n_tokens) {
            let mask = if a.mask.is_null() {
                vec![0.0; a.n_kv as usize]
            } else {
                let of_token = a.mask as i64 + stream * a.mask_stream_bytes + token * a.mask_token_bytes;
                f16s(memory, of_token, a.n_kv as usize)?
            };
            for head in 0..a.n_heads {
                let offset = stream * a.q_stream_bytes + token * a.q_token_bytes + i64::from(head) * a.q_head_bytes;
                let q = memory.f32s(a.q as usize + offset as usize, n)?;
                let (k, v) = &heads[(head / (a.n_heads / a.n_heads_kv)) as usize];
                results.extend(cpu::dec_attn(&q, scoring, k, v, &mask));
            }
        }
    }
    memory.store(a.dst as usize, DType::F32, &results)
}
