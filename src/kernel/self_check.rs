//! Runs every kernel family and weight type once on tiny data and holds the results against the oracles. An image that does
//! not suit the GPU, or a miscompiled kernel, shows here at load instead of in a user's text.

use std::fmt::Display;

use super::cudart::{current_device, set_device, Buffer, Stream};
use super::*;
use crate::reference::add_norm::add_norm;
use crate::reference::dec_attn::{dec_attn as attention, Scoring};
use crate::reference::geglu_ffn::geglu_ffn;
use crate::reference::gemv_res::gemv_res;
use crate::reference::glu_gemv::glu_gemv;
use crate::reference::h16::{lay_out, H16Row};
use crate::reference::mm_res::mm_res;
use crate::reference::moe::{moe_ffn, moe_prefill, Route};
use crate::reference::prefill_fa4::prefill_fa4 as attention_of_many;
use crate::reference::qkv_gemv::Tail;
use crate::reference::quant::{Matrix, Q8Row};
use crate::reference::rope::Params;
use crate::reference::sample::Sample;
use crate::reference::sandwich_norm::sandwich_norm;
use crate::reference::{compare, Bounded};

/// Weight types that [`gemv`] reads.
pub const WEIGHT_TYPES: [DType; 8] = [
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q5_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Checks all kernels on `device`, on a stream of its own; the error names the kernel and what was wrong. Allocates and
/// synchronises: not while a stream is being captured.
pub fn self_check(device: i32) -> Result<(), String> {
    let before = current_device().map_err(|e| format!("no CUDA device: {e}"))?;
    set_device(device).map_err(|e| format!("device {device}: {e}"))?;
    let result = check_all(device);
    let restored = set_device(before).map_err(|e| format!("device {before}: {e}"));
    result.and(restored)
}

fn check_all(device: i32) -> Result<(), String> {
    let stream = Stream::new().map_err(|e| format!("stream: {e}"))?;
    let launch = stream
        .launch(device, true)
        .map_err(|e| format!("device attributes: {e}"))?;
    let check = Check { stream, launch };
    for post_norm in [false, true] {
        check
            .norm(post_norm)
            .map_err(|e| format!("norm{}: {e}", if post_norm { " with post-norm" } else { "" }))?;
    }
    for dtype in WEIGHT_TYPES {
        check
            .gemv(dtype)
            .map_err(|e| format!("mat-vec {}: {e}", dtype.name()))?;
        check
            .glu_gemv(dtype)
            .map_err(|e| format!("GLU mat-vec {}: {e}", dtype.name()))?;
    }
    // Tensor-core kernels exist on some devices only; their windows ask too.
    for dtype in MM_WEIGHT_TYPES {
        for glu in [Glu::None, Glu::Swiglu] {
            if mm_supports(dtype as i32, Check::MM_K as i32, glu) {
                check
                    .mm(dtype, glu)
                    .map_err(|e| format!("mat-mul {} {glu:?}: {e}", dtype.name()))?;
                check
                    .moe(dtype, glu)
                    .map_err(|e| format!("mat-mul with experts {} {glu:?}: {e}", dtype.name()))?;
            }
        }
    }
    check.qkv_tail().map_err(|e| format!("QKV tail: {e}"))?;
    for head_dim in DEC_ATTN_HEAD_DIMS {
        check
            .dec_attn(head_dim)
            .map_err(|e| format!("attention with heads of {head_dim}: {e}"))?;
    }
    for module in MODULES.iter() {
        if prefill_fa4_supports(module.head_dim as i32, module.head_dim_v as i32) == Some(true) {
            check
                .prefill_fa4(module)
                .map_err(|e| format!("attention module {}: {e}", module.name))?;
        }
    }
    Ok(())
}

struct Check {
    stream: Stream,
    launch: Launch,
}

/// Device memory for rows as f16, every byte 0xff.
struct H16Buffer {
    x: Buffer<u8>,
    scale: Buffer<f32>,
    k: usize,
    n_tokens: usize,
}

impl H16Buffer {
    fn first(&self) -> usize {
        (self.x.raw() as usize).next_multiple_of(H16::ALIGN) - self.x.raw() as usize
    }

    fn raw(&self) -> H16 {
        H16 {
            x: self.x.at(self.first()).cast(),
            scale: self.scale.raw(),
        }
    }

    /// Must hold, bit by bit, these rows.
    fn expect(&self, stream: &Stream, rows: &[H16Row]) -> Result<(), String> {
        let (bytes, scale) = lay_out(rows);
        let got = self.x.to_vec(stream).map_err(text)?;
        let got = &got[self.first()..][..H16::bytes(self.k, self.n_tokens)];
        if self.scale.to_vec(stream).map_err(text)? != scale {
            return Err("the scale of an f16 row is wrong".into());
        }
        match bytes.iter().zip(got).position(|(want, got)| want != got) {
            None => Ok(()),
            Some(at) => Err(format!(
                "byte {at} of the f16 rows is {:#x}, expected {:#x}",
                got[at], bytes[at]
            )),
        }
    }
}

fn text(e: impl Display) -> String {
    e.to_string()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

impl Check {
    fn upload<T: cudart::Plain>(&self, values: &[T]) -> Result<Buffer<T>, String> {
        Buffer::from_slice(values, &self.stream).map_err(text)
    }

    /// A buffer of NaN, so that a value that was not written cannot pass.
    fn output(&self, len: usize) -> Result<Buffer<f32>, String> {
        self.upload(&vec![f32::NAN; len])
    }

    fn expect(&self, output: &Buffer<f32>, want: &Bounded) -> Result<(), String> {
        let got = output.to_vec(&self.stream).map_err(text)?;
        compare(&got, want).map(drop).map_err(text)
    }

    fn h16(&self, k: usize, n_tokens: usize) -> Result<H16Buffer, String> {
        Ok(H16Buffer {
            x: self.upload(&vec![0xffu8; H16::bytes(k, n_tokens) + H16::ALIGN])?,
            scale: self.output(n_tokens)?,
            k,
            n_tokens,
        })
    }

    fn norm(&self, post_norm: bool) -> Result<(), String> {
        const N: usize = 64;
        let mut sample = Sample::new(1);
        let [h, x, w1, w2] = [(); 4].map(|_| sample.values(N, 1.0));
        let eps = 1e-6f32;
        let (h_dev, x_dev, w1_dev, w2_dev) = (self.upload(&h)?, self.upload(&x)?, self.upload(&w1)?, self.upload(&w2)?);
        let (y, z, zh) = (self.output(N)?, self.output(N)?, self.h16(N, 1)?);
        let args = NormArgs {
            h: h_dev.raw(),
            h_stride: N as i64,
            x: x_dev.raw(),
            x_stride: N as i64,
            w1: if post_norm { w1_dev.raw() } else { std::ptr::null() },
            w2: w2_dev.raw(),
            y: y.raw(),
            y_stride: N as i64,
            z: z.raw(),
            z_stride: N as i64,
            zq: Q8::NONE,
            zh: zh.raw(),
            n_rows: 1,
            n_cols: N as i32,
            eps1: eps,
            eps2: eps,
        };
        norm(&args, self.launch).map_err(text)?;
        let (h, x) = (Bounded::exact(&h), Bounded::exact(&x));
        let (w1, w2, eps) = (wide(&w1), wide(&w2), f64::from(eps));
        let want = if post_norm {
            sandwich_norm(&h, &x, &w1, eps, &w2, eps)
        } else {
            add_norm(&h, &x, &w2, eps)
        };
        self.expect(&y, &want.sum)?;
        self.expect(&z, &want.normed)?;
        zh.expect(&self.stream, &[H16Row::new(&z.to_vec(&self.stream).map_err(text)?)])
    }

    /// What a mat-vec with weights of this type multiplies: quantised types read 8-bit blocks.
    fn activations(dtype: DType, x: &[f32]) -> Bounded {
        match dtype {
            DType::F16 | DType::BF16 => Bounded::exact(x),
            _ => Bounded::exact(&Q8Row::quantize(x).dequantize()),
        }
    }

    fn gemv(&self, dtype: DType) -> Result<(), String> {
        const K: usize = 256;
        const ROWS: usize = 5;
        let mut sample = Sample::new(2);
        let (bytes, x) = (sample.weights(dtype, K * ROWS), sample.values(K, 1.0));
        let (bias, res) = (sample.values(ROWS, 1.0), sample.values(ROWS, 1.0));
        let row_bytes = bytes.len() / ROWS;
        let (w, x_dev, bias_dev) = (self.upload(&bytes)?, self.upload(&x)?, self.upload(&bias)?);
        let dst = self.upload(&res)?;
        let seg = GemvSeg {
            w: w.raw().cast_const().cast(),
            row_bytes: row_bytes as i64,
            dst: dst.raw(),
            dst_stride: ROWS as i64,
            bias: bias_dev.raw(),
            res: dst.raw(),
            res_stride: ROWS as i64,
            n_rows: ROWS as i32,
        };
        let args = GemvArgs {
            ty: dtype as i32,
            n_seg: 1,
            seg: [seg, GemvSeg::NONE, GemvSeg::NONE],
            k: K as i32,
            n_tokens: 1,
            x: x_dev.raw(),
            x_stride: K as i64,
            xq: Q8::NONE,
            glu: Glu::None as i32,
        };
        gemv(&args, self.launch).map_err(text)?;
        let matrix = Matrix {
            dtype,
            bytes: &bytes,
            row_bytes,
            n_rows: ROWS,
            k: K,
        };
        let (bias, res) = (Bounded::exact(&bias), Bounded::exact(&res));
        self.expect(
            &dst,
            &gemv_res(&matrix, &Check::activations(dtype, &x), Some(&bias), Some(&res)),
        )
    }

    fn glu_gemv(&self, dtype: DType) -> Result<(), String> {
        const K: usize = 256;
        const ROWS: usize = 32;
        let mut sample = Sample::new(3);
        let (bytes, x) = (sample.weights(dtype, 2 * K * ROWS), sample.values(K, 1.0));
        let row_bytes = bytes.len() / ROWS / 2;
        let (gate, up) = bytes.split_at(ROWS * row_bytes);
        let (w, x_dev, dst) = (self.upload(&bytes)?, self.upload(&x)?, self.output(ROWS)?);
        let seg = GemvSeg {
            w: w.raw().cast_const().cast(),
            row_bytes: row_bytes as i64,
            dst: dst.raw(),
            dst_stride: ROWS as i64,
            n_rows: ROWS as i32,
            ..GemvSeg::NONE
        };
        let up_seg = GemvSeg {
            w: w.at(gate.len()).cast_const().cast(),
            dst: std::ptr::null_mut(),
            ..seg
        };
        let args = GemvArgs {
            ty: dtype as i32,
            n_seg: 2,
            seg: [seg, up_seg, GemvSeg::NONE],
            k: K as i32,
            n_tokens: 1,
            x: x_dev.raw(),
            x_stride: K as i64,
            xq: Q8::NONE,
            glu: Glu::Swiglu as i32,
        };
        gemv(&args, self.launch).map_err(text)?;
        let [gate, up] = [gate, up].map(|bytes| Matrix {
            dtype,
            bytes,
            row_bytes,
            n_rows: ROWS,
            k: K,
        });
        self.expect(
            &dst,
            &glu_gemv(Glu::Swiglu, (&gate, None), (&up, None), &Check::activations(dtype, &x)),
        )
    }

    const MM_K: usize = 256;

    /// The activations' conversion, then the product: with bias and residual, or of gate and up.
    fn mm(&self, dtype: DType, glu: Glu) -> Result<(), String> {
        const K: usize = Check::MM_K;
        const ROWS: usize = 80;
        const TOKENS: usize = 9;
        let mut sample = Sample::new(6);
        let bytes = sample.weights(dtype, 2 * K * ROWS);
        let row_bytes = bytes.len() / ROWS / 2;
        let (first, second) = bytes.split_at(ROWS * row_bytes);
        let x = sample.values(K * TOKENS, 1.0);
        let (bias, res) = (sample.values(ROWS, 1.0), sample.values(ROWS * TOKENS, 1.0));
        let (w, x_dev, bias_dev) = (self.upload(&bytes)?, self.upload(&x)?, self.upload(&bias)?);
        let (dst, xh) = (self.upload(&res)?, self.h16(K, TOKENS)?);
        let convert = H16Args {
            x: x_dev.raw(),
            x_stride: K as i64,
            y: xh.raw(),
            k: K as i32,
            n_tokens: TOKENS as i32,
        };
        to_h16(&convert, self.launch).map_err(text)?;
        let rows: Vec<H16Row> = x.chunks(K).map(H16Row::new).collect();
        xh.expect(&self.stream, &rows)?;
        let plain = glu == Glu::None;
        let args = MmArgs {
            ty: dtype as i32,
            glu: glu as i32,
            w: w.raw().cast_const().cast(),
            w2: if plain {
                std::ptr::null()
            } else {
                w.at(first.len()).cast_const().cast()
            },
            row_bytes: row_bytes as i64,
            n_rows: ROWS as i32,
            k: K as i32,
            n_tokens: TOKENS as i32,
            x: xh.raw(),
            dst: dst.raw(),
            dst_stride: ROWS as i64,
            bias: if plain { bias_dev.raw() } else { std::ptr::null() },
            res: if plain { dst.raw() } else { std::ptr::null() },
            res_stride: ROWS as i64,
        };
        mm(&args, self.launch).map_err(text)?;
        let [first, second] = [first, second].map(|bytes| Matrix {
            dtype,
            bytes,
            row_bytes,
            n_rows: ROWS,
            k: K,
        });
        let tokens: Vec<Bounded> = rows.iter().map(|r| Bounded::exact(&r.dequantize())).collect();
        let want = if plain {
            let res: Vec<Bounded> = res.chunks(ROWS).map(Bounded::exact).collect();
            mm_res(&first, &tokens, Some(&Bounded::exact(&bias)), Some(&res))
        } else {
            geglu_ffn(glu, &first, &second, &tokens)
        };
        let mut all = Bounded::default();
        want.into_iter().for_each(|token| all.extend(token));
        self.expect(&dst, &all)
    }

    /// The route, the activations in its order, and the products. One expert has no pair, one pair no expert.
    fn moe(&self, dtype: DType, glu: Glu) -> Result<(), String> {
        const K: usize = Check::MM_K;
        const ROWS: usize = 80;
        const EXPERTS: usize = 3;
        const USED: usize = 2;
        const IDS: [i32; 10] = [2, 0, 0, 2, 2, 3, 0, 2, 2, 0];
        let mut sample = Sample::new(7);
        let bytes = sample.weights(dtype, 2 * EXPERTS * K * ROWS);
        let expert_bytes = bytes.len() / EXPERTS / 2;
        let x = sample.values(K * IDS.len() / USED, 1.0);
        let (w, x_dev, ids) = (self.upload(&bytes)?, self.upload(&x)?, self.upload(&IDS)?);
        let places = moe_max_rows(IDS.len() as i32, EXPERTS as i32) as usize;
        let [rows, begin, count] = [places, EXPERTS + 1, EXPERTS].map(|len| self.upload(&vec![i32::MIN; len]));
        let (rows, begin, count) = (rows?, begin?, count?);
        let (dst, xh) = (self.output(ROWS * IDS.len())?, self.h16(K, places)?);
        let route = MoeRows {
            rows: rows.raw(),
            begin: begin.raw(),
            count: count.raw(),
        };
        let route_args = MoeRouteArgs {
            ids: ids.raw(),
            ids_stride: USED as i64,
            n_tokens: (IDS.len() / USED) as i32,
            n_used: USED as i32,
            n_experts: EXPERTS as i32,
            out: route,
        };
        moe_route(&route_args, self.launch).map_err(text)?;
        let want = Route::new(&IDS, EXPERTS);
        let read = |b: &Buffer<i32>| b.to_vec(&self.stream).map_err(text);
        if read(&rows)?[..want.rows.len()] != want.rows || read(&begin)? != want.begin || read(&count)? != want.count {
            return Err("pairs are not in the order of their experts".into());
        }
        let convert = MoeH16Args {
            x: x_dev.raw(),
            x_stride: K as i64,
            y: xh.raw(),
            route,
            k: K as i32,
            n_pairs: IDS.len() as i32,
            n_used: USED as i32,
            n_experts: EXPERTS as i32,
            per_slot: 0,
        };
        moe_to_h16(&convert, self.launch).map_err(text)?;
        let args = MoeMmArgs {
            ty: dtype as i32,
            glu: glu as i32,
            w: w.raw().cast_const().cast(),
            w2: w.at(EXPERTS * expert_bytes).cast_const().cast(),
            row_bytes: (expert_bytes / ROWS) as i64,
            expert_bytes: expert_bytes as i64,
            n_rows: ROWS as i32,
            k: K as i32,
            n_pairs: IDS.len() as i32,
            n_experts: EXPERTS as i32,
            x: xh.raw(),
            route,
            dst: dst.raw(),
            dst_stride: ROWS as i64,
        };
        moe_mm(&args, self.launch).map_err(text)?;
        let experts: Vec<Matrix> = bytes
            .chunks(expert_bytes)
            .map(|bytes| Matrix {
                dtype,
                bytes,
                row_bytes: expert_bytes / ROWS,
                n_rows: ROWS,
                k: K,
            })
            .collect();
        let (gate, up) = experts.split_at(EXPERTS);
        let token = |pair: usize| Bounded::exact(&H16Row::new(&x[pair / USED * K..][..K]).dequantize());
        let pairs: Vec<Bounded> = (0..IDS.len()).map(token).collect();
        let want = match glu {
            Glu::None => moe_prefill(gate, &IDS, &pairs),
            _ => moe_ffn(glu, gate, up, &IDS, &pairs),
        };
        let got = dst.to_vec(&self.stream).map_err(text)?;
        for (pair, (got, want)) in got.chunks(ROWS).zip(&want).enumerate() {
            match want {
                Some(want) => drop(compare(got, want).map_err(|e| format!("pair {pair}: {e}"))?),
                None if got.iter().all(|v| v.is_nan()) => {}
                None => return Err(format!("pair {pair} has no expert, and its row is written")),
            }
        }
        Ok(())
    }

    fn qkv_tail(&self) -> Result<(), String> {
        const HEADS: usize = 3;
        const DIM: usize = 64;
        let mut sample = Sample::new(4);
        let (src, norm_w) = (sample.values(HEADS * DIM, 1.0), sample.values(DIM, 1.0));
        let pos = 7i32;
        let (src_dev, w_dev, pos_dev) = (self.upload(&src)?, self.upload(&norm_w)?, self.upload(&[pos])?);
        let dst = self.output(HEADS * DIM)?;
        let part = QkvPart {
            src: src_dev.raw(),
            src_stride: (HEADS * DIM) as i64,
            dst: dst.raw().cast(),
            row_bytes: (4 * HEADS * DIM) as i64,
            head_bytes: 4 * DIM as i64,
            n_heads: HEADS as i32,
            head_dim: DIM as i32,
            norm_w: w_dev.raw(),
            eps: 1e-6,
            rope: RopeMode::Neox as i32,
            ..QkvPart::NONE
        };
        let rope = Rope {
            pos: pos_dev.raw(),
            n_dims: DIM as i32,
            freq_base: 10000.0,
            ..Rope::NONE
        };
        let args = QkvTailArgs {
            part: [part, QkvPart::NONE, QkvPart::NONE],
            n_parts: 1,
            n_tokens: 1,
            rope,
        };
        qkv_tail(&args, self.launch).map_err(text)?;
        let tail = Tail {
            head_dim: DIM,
            norm: Some((&wide(&norm_w), part.eps.into())),
            mode: RopeMode::Neox,
            rope: Params::from(&rope),
            freq_factors: None,
            scale: 1.0,
            stored_as: DType::F32,
        };
        self.expect(&dst, &tail.apply(&Bounded::exact(&src), pos))
    }

    /// Two splits, so that their combination runs too.
    fn dec_attn(&self, head_dim: i32) -> Result<(), String> {
        const KEYS: usize = 200;
        let dim = head_dim as usize;
        let mut sample = Sample::new(5);
        let q = sample.values(dim, 1.0);
        let [k, v] = [(); 2].map(|_| sample.values(KEYS * dim, 1.0).into_iter().map(half::f16::from_f32));
        let [k, v]: [Vec<half::f16>; 2] = [k.collect(), v.collect()];
        let bits = |values: &[half::f16]| values.iter().map(|v| v.to_bits()).collect::<Vec<u16>>();
        let (q_dev, k_dev, v_dev) = (self.upload(&q)?, self.upload(&bits(&k))?, self.upload(&bits(&v))?);
        let (dst, tickets) = (self.output(dim)?, self.upload(&[0i32])?);
        let (row_bytes, scale) = (2 * i64::from(head_dim), 0.125f32);
        let mut args = DecAttnArgs {
            q: q_dev.raw(),
            q_token_bytes: 0,
            q_head_bytes: 0,
            q_stream_bytes: 0,
            k: k_dev.raw().cast_const().cast(),
            k_row_bytes: row_bytes,
            k_head_bytes: 0,
            k_stream_bytes: 0,
            v: v_dev.raw().cast_const().cast(),
            v_row_bytes: row_bytes,
            v_head_bytes: 0,
            v_stream_bytes: 0,
            mask: std::ptr::null(),
            mask_token_bytes: 0,
            mask_stream_bytes: 0,
            dst: dst.raw(),
            scratch: std::ptr::null_mut(),
            tickets: tickets.raw().cast(),
            head_dim,
            n_heads: 1,
            n_heads_kv: 1,
            n_tokens: 1,
            n_kv: KEYS as i32,
            n_streams: 1,
            max_splits: 2,
            scale,
            softcap: 0.0,
        };
        let scratch = self.output(dec_attn_scratch(&args) / 4)?;
        args.scratch = scratch.raw();
        dec_attn(&args, self.launch).map_err(text)?;
        let wide = |values: &[half::f16]| values.iter().map(|v| v.to_f64()).collect::<Vec<f64>>();
        let scoring = Scoring {
            scale: scale.into(),
            softcap: 0.0,
        };
        let want = attention(&Bounded::exact(&q), scoring, &wide(&k), &wide(&v), &[0.0; KEYS]);
        self.expect(&dst, &want.values)
    }

    /// Three tiles of keys: one that shows everything, one to be looked at, one that hides everything.
    fn prefill_fa4(&self, module: &Module) -> Result<(), String> {
        const TOKENS: usize = 3;
        let (dim, dim_v, keys) = (
            module.head_dim as usize,
            module.head_dim_v as usize,
            3 * module.tile_n - 2,
        );
        let mut sample = Sample::new(6);
        let q = sample.values(TOKENS * dim, 1.0);
        let mut halves = |n: usize| -> Vec<half::f16> {
            let values = sample.values(n, 1.0).into_iter();
            values.map(half::f16::from_f32).collect()
        };
        let (k, v) = (halves(keys * dim), halves(keys * dim_v));
        let seen = |t: usize, key: usize| key < module.tile_n + 5 * (t + 1);
        let mask: Vec<half::f16> = (0..TOKENS * keys)
            .map(|i| match seen(i / keys, i % keys) {
                true => half::f16::ZERO,
                false => half::f16::NEG_INFINITY,
            })
            .collect();
        let bits = |values: &[half::f16]| values.iter().map(|v| v.to_bits()).collect::<Vec<u16>>();
        let (q_dev, mask_dev) = (self.upload(&q)?, self.upload(&bits(&mask))?);
        let (k_dev, v_dev) = (self.upload(&bits(&k))?, self.upload(&bits(&v))?);
        let grid = TileGrid {
            tile_m: module.tile_m,
            tile_n: module.tile_n,
            n_planes: 1,
            token_tiles: 1,
            key_tiles: 3,
        };
        let lists = self.output(grid.bytes().div_ceil(4))?;
        let dst = self.output(TOKENS * dim_v)?;
        let scan = MaskTilesArgs {
            mask: mask_dev.raw().cast_const().cast(),
            token_bytes: 2 * keys as i64,
            plane_bytes: 0,
            n_planes: 1,
            n_tokens: TOKENS as i32,
            n_kv: keys as i32,
            tile_m: module.tile_m as i32,
            tile_n: module.tile_n as i32,
            tiles: grid.at(lists.raw() as usize),
        };
        let mut args = PrefillFa4Args {
            q: q_dev.raw(),
            q_token_bytes: 4 * dim as i64,
            q_head_bytes: 0,
            q_stream_bytes: 0,
            k: k_dev.raw().cast_const().cast(),
            k_row_bytes: 2 * dim as i64,
            k_head_bytes: 0,
            k_stream_bytes: 0,
            v: v_dev.raw().cast_const().cast(),
            v_row_bytes: 2 * dim_v as i64,
            v_head_bytes: 0,
            v_stream_bytes: 0,
            mask: scan.mask,
            mask_token_bytes: scan.token_bytes,
            mask_stream_bytes: 0,
            tiles: scan.tiles,
            dst: dst.raw(),
            scratch: std::ptr::null_mut(),
            head_dim: dim as i32,
            head_dim_v: dim_v as i32,
            n_heads: 1,
            n_heads_kv: 1,
            n_tokens: TOKENS as i32,
            n_kv: keys as i32,
            n_streams: 1,
            mask_tokens: TOKENS as i32,
            tile_m: scan.tile_m,
            tile_n: scan.tile_n,
            scale: 0.125,
        };
        let scratch = self.output(prefill_fa4_scratch(&args).div_ceil(4))?;
        args.scratch = scratch.raw().cast();
        mask_tiles(&scan, self.launch).map_err(text)?;
        prefill_fa4(&args, self.launch).map_err(text)?;
        let wide = |values: &[half::f16]| values.iter().map(|v| v.to_f64()).collect::<Vec<f64>>();
        let (k, v, mask) = (wide(&k), wide(&v), wide(&mask));
        let mut want = Bounded::default();
        for (q, mask) in q.chunks(dim).zip(mask.chunks(keys)) {
            want.extend(attention_of_many(&Bounded::exact(q), 0.125, &k, &v, mask).values);
        }
        self.expect(&dst, &want)
    }
}
