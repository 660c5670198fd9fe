//! The oracles' bounds: a right f32 implementation is within, and each planted fault is not.
//!
//! A new oracle gets a plain f32 implementation here and a list of faults that its comparison must report.

use ggml_flashrt::kernel::{Glu, RopeMode};
use ggml_flashrt::reference::add_norm::add_norm;
use ggml_flashrt::reference::geglu_ffn::geglu_ffn;
use ggml_flashrt::reference::gemv_res::gemv_res;
use ggml_flashrt::reference::glu_gemv::glu_gemv;
use ggml_flashrt::reference::h16::{self, H16Row};
use ggml_flashrt::reference::mm_prefill::mm_prefill;
use ggml_flashrt::reference::mm_res::mm_res;
use ggml_flashrt::reference::moe::{moe_ffn, moe_prefill};
use ggml_flashrt::reference::qkv_gemv::{qkv_gemv, Tail};
use ggml_flashrt::reference::quant::{dequantize_row, DType, Matrix, Q8Row};
use ggml_flashrt::reference::rope::Params;
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::sandwich_norm::sandwich_norm;
use ggml_flashrt::reference::{compare, Bounded, Mismatch};

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}

fn accepts(got: &[f32], want: &Bounded) {
    compare(got, want).unwrap_or_else(|mismatch| panic!("a right result was refused: {mismatch}"));
}

fn refuses(fault: &str, got: &[f32], want: &Bounded) {
    if let Ok(quotient) = compare(got, want) {
        panic!("{fault} went unseen, at {quotient} of the bound");
    }
}

fn rms_norm_f32(x: &[f32], w: &[f32], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
    let factor = 1.0 / (mean + eps).sqrt();
    x.iter().zip(w).map(|(v, w)| v * factor * w).collect()
}

fn add_f32(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

#[test]
fn norms() {
    const N: usize = 640;
    const EPS: f32 = 1e-6;
    let mut sample = Sample::new(11);
    // Small values make eps count in both norms; a wrong one would drown in rows of magnitude 1.
    let [h, x] = [(); 2].map(|_| sample.values(N, 0.02));
    let (w1, w2) = (sample.values(N, 0.02), sample.values(N, 2.0));
    let (h_row, x_row) = (Bounded::exact(&h), Bounded::exact(&x));

    let want = add_norm(&h_row, &x_row, &wide(&w2), EPS.into());
    let y = add_f32(&x, &h);
    accepts(&y, &want.sum);
    accepts(&rms_norm_f32(&y, &w2, EPS), &want.normed);
    refuses("a wrong eps", &rms_norm_f32(&y, &w2, 1e-5), &want.normed);
    refuses("the norm of the wrong input", &rms_norm_f32(&x, &w2, EPS), &want.normed);

    let want = sandwich_norm(&h_row, &x_row, &wide(&w1), EPS.into(), &wide(&w2), EPS.into());
    let y = add_f32(&x, &rms_norm_f32(&h, &w1, EPS));
    let z = rms_norm_f32(&y, &w2, EPS);
    accepts(&y, &want.sum);
    accepts(&z, &want.normed);
    refuses(
        "a wrong first eps",
        &add_f32(&x, &rms_norm_f32(&h, &w1, 1e-5)),
        &want.sum,
    );
    refuses("a wrong second eps", &rms_norm_f32(&y, &w2, 2e-6), &want.normed);
    refuses("the other weight", &add_f32(&x, &rms_norm_f32(&h, &w2, EPS)), &want.sum);
    refuses("a missing residual", &rms_norm_f32(&h, &w1, EPS), &want.sum);
    let mut shifted = z.clone();
    shifted.rotate_right(1);
    refuses("a shifted row", &shifted, &want.normed);
    assert_eq!(
        compare(&z[1..], &want.normed),
        Err(Mismatch::Length { got: N - 1, want: N })
    );
    let mut unwritten = z;
    unwritten[N / 2] = f32::NAN;
    refuses("a value that was not written", &unwritten, &want.normed);
}

/// `w . x` in f32, with the terms of 8 lanes summed apart.
fn mat_vec_f32(w: &Matrix, x: &[f64]) -> Vec<f32> {
    let row = |r: usize| dequantize_row(w.dtype as i32, &w.bytes[r * w.row_bytes..], w.k).unwrap();
    let dot = |weights: Vec<f64>| {
        let mut lanes = [0f32; 8];
        for (i, (w, x)) in weights.iter().zip(x).enumerate() {
            lanes[i % 8] += *w as f32 * *x as f32;
        }
        lanes.iter().sum()
    };
    (0..w.n_rows).map(|r| dot(row(r))).collect()
}

#[test]
fn mat_vecs() {
    const K: usize = 512;
    const ROWS: usize = 32;
    for dtype in ggml_flashrt::kernel::WEIGHT_TYPES {
        let mut sample = Sample::new(12);
        let [gate, up] = [(); 2].map(|_| sample.weights(dtype, K * ROWS));
        let row_bytes = gate.len() / ROWS;
        let [gate, up] = [&gate, &up].map(|bytes| Matrix {
            dtype,
            bytes,
            row_bytes,
            n_rows: ROWS,
            k: K,
        });
        let x = sample.values(K, 1.0);
        let res = sample.values(ROWS, 1.0);
        let quantised = Q8Row::quantize(&x);
        let x = if dtype.block_len() == 1 {
            wide(&x)
        } else {
            quantised.dequantize()
        };
        let exact = Bounded::exact(&x);

        let want = gemv_res(&gate, &exact, None, Some(&Bounded::exact(&res)));
        let got = add_f32(&mat_vec_f32(&gate, &x), &res);
        accepts(&got, &want);
        let mut lost_row = got.clone();
        lost_row[7] = res[7];
        refuses("a lost row", &lost_row, &want);
        let mut swapped = got.clone();
        swapped.swap(3, 4);
        refuses("swapped rows", &swapped, &want);
        let mut short = x.clone();
        short[K - 32..].fill(0.0);
        refuses("a lost last block", &add_f32(&mat_vec_f32(&gate, &short), &res), &want);
        if dtype.block_len() > 1 {
            let mut step = x.clone();
            step[5] += f64::from(quantised.ds[0][0]);
            refuses(
                "one quant that is off by one",
                &add_f32(&mat_vec_f32(&gate, &step), &res),
                &want,
            );
        }

        let want = glu_gemv(Glu::Swiglu, (&gate, None), (&up, None), &exact);
        let [g, u] = [&gate, &up].map(|w| mat_vec_f32(w, &x));
        let swiglu =
            |g: &[f32], u: &[f32]| -> Vec<f32> { g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect() };
        accepts(&swiglu(&g, &u), &want);
        refuses("gate and up exchanged", &swiglu(&u, &g), &want);
    }
}

/// Why the windows lie nearer to the dequantised model than stock's mat-vecs on Q4_0 and Q5_0. A weight there is `d * (q - o)`
/// with unsigned q. Stock sums `q * x` over 8-bit activations and subtracts `o` times the sum of the activations *before* they
/// were rounded, so the rounding error of an activation is weighted by q, not by q - o. The kernels here subtract `o` times the
/// sum of the rounded ones. Both in f64, with stock's f16 for a block's scale and sum.
#[test]
fn an_offset_times_unrounded_activations_more_than_doubles_the_rounding_error() {
    const DOTS: usize = 4000;
    const BLOCKS: usize = 4;
    for (name, offset) in [("Q4_0", 8.0), ("Q5_0", 16.0)] {
        let mut sample = Sample::new(14);
        let mut gaussian = || {
            let [radius, angle] = [(); 2].map(|_| f64::from(sample.unit()) * 0.5 + 0.5);
            (-2.0 * (1.0 - radius).max(1e-12).ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
        };
        let half = |v: f64| half::f16::from_f64(v).to_f64();
        // Sums over all dots: squared errors, and what they are expected to be.
        let (mut stock_errors, mut our_errors) = (0.0, 0.0);
        let (mut unsigned, mut signed, mut halves) = (0.0, 0.0, 0.0);
        for _ in 0..DOTS {
            let (mut exact, mut stock, mut ours, mut half_bound) = (0.0, 0.0, 0.0, 0.0);
            for _ in 0..BLOCKS {
                let w: Vec<f64> = (0..32).map(|_| gaussian()).collect();
                let x: Vec<f32> = (0..32).map(|_| gaussian() as f32).collect();
                // As ggml quantises: the value of largest magnitude becomes -o exactly.
                let d = w.iter().fold(0f64, |m, v| if v.abs() > m.abs() { *v } else { m }) / -offset;
                let q = w.iter().map(|v| (v / d + offset + 0.5).floor().min(2.0 * offset - 1.0));
                let row = Q8Row::quantize(&x);
                let step = f64::from(row.ds[0][0]);
                let (mut products, mut sum) = (0.0, 0.0);
                for ((q, x), q8) in q.zip(&x).zip(&row.qs) {
                    let (x, q8) = (f64::from(*x), f64::from(*q8));
                    exact += d * (q - offset) * x;
                    ours += d * (q - offset) * step * q8;
                    (products, sum) = (products + q * q8, sum + x);
                    // Rounding to a step moves a value by step / sqrt(12) in root mean square.
                    unsigned += (d * q * step).powi(2) / 12.0;
                    signed += (d * (q - offset) * step).powi(2) / 12.0;
                }
                stock += d * (products * half(step) - offset * half(sum));
                half_bound += (d * products * step).abs() / 2048.0 + (d * offset * sum).abs() / 2048.0;
            }
            stock_errors += (stock - exact).powi(2);
            our_errors += (ours - exact).powi(2);
            halves += half_bound.powi(2);
        }
        let ratio = (stock_errors / our_errors).sqrt();
        // A root mean square of n samples has a relative error of 1 / sqrt(2 n): 4 of the quotient's.
        let chance = 4.0 / (DOTS as f64).sqrt();
        let least = (unsigned / signed).sqrt();
        let most = (unsigned.sqrt() + halves.sqrt()) / signed.sqrt();
        println!("{name}: {ratio:.3}, expected {least:.3} to {most:.3}");
        assert!(
            ratio > least * (1.0 - chance) && ratio < most * (1.0 + chance),
            "{name}: {ratio}, expected {least} to {most}"
        );
        assert!(least > 2.0, "{name}: {least}");
    }
}

/// `w . x` as a tensor core does it: weights in f16, 16 products at a time added in f32, cut off rather than rounded.
fn mat_mul_f16(w: &Matrix, x: &H16Row) -> Vec<f32> {
    let cut = |v: f64| f32::from_bits((v as f32).to_bits() & !1);
    let row = |r: usize| dequantize_row(w.dtype as i32, &w.bytes[r * w.row_bytes..], w.k).unwrap();
    let dot = |weights: Vec<f64>| {
        let products: Vec<f64> = weights
            .iter()
            .zip(&x.values)
            .map(|(w, x)| half::f16::from_f64(*w).to_f64() * x.to_f64())
            .collect();
        let sum = products
            .chunks(16)
            .fold(0f32, |sum, step| cut(f64::from(sum) + step.iter().sum::<f64>()));
        sum * x.scale
    };
    (0..w.n_rows).map(|r| dot(row(r))).collect()
}

#[test]
fn mat_muls() {
    const K: usize = 512;
    const ROWS: usize = 24;
    for dtype in ggml_flashrt::kernel::MM_WEIGHT_TYPES {
        let mut sample = Sample::new(14);
        let [gate, up] = [(); 2].map(|_| sample.weights(dtype, K * ROWS));
        let row_bytes = gate.len() / ROWS;
        let [gate, up] = [&gate, &up].map(|bytes| Matrix {
            dtype,
            bytes,
            row_bytes,
            n_rows: ROWS,
            k: K,
        });
        // Rows of very different size: each has a scale of its own.
        let rows: Vec<Vec<f32>> = [1.0, 3e4, 2e-6].map(|size| sample.values(K, size)).into();
        let f16: Vec<H16Row> = rows.iter().map(|row| H16Row::new(row)).collect();
        let tokens: Vec<Bounded> = f16.iter().map(|row| Bounded::exact(&row.dequantize())).collect();
        let bias = sample.values(ROWS, 1.0);
        let res: Vec<Vec<f32>> = rows.iter().map(|_| sample.values(ROWS, 1.0)).collect();

        let want = mm_prefill(&gate, &tokens);
        // An input that was not rounded to f16 yet has a wider bound, and the same product is within that too.
        let from_f32 = mm_prefill(
            &gate,
            &rows
                .iter()
                .map(|r| h16::rounded(&Bounded::exact(r)))
                .collect::<Vec<_>>(),
        );
        for (t, want) in want.iter().enumerate() {
            let got = mat_mul_f16(&gate, &f16[t]);
            accepts(&got, want);
            accepts(&got, &from_f32[t]);
            let mut swapped = got.clone();
            swapped.swap(3, 4);
            refuses("swapped rows", &swapped, want);
            let mut short = f16[t].clone();
            short.values[K - 32..].fill(half::f16::ZERO);
            refuses("a lost last block", &mat_mul_f16(&gate, &short), want);
            let mut scaled = f16[t].clone();
            scaled.scale *= 2.0;
            refuses("a wrong scale", &mat_mul_f16(&gate, &scaled), want);
            refuses("another token", &mat_mul_f16(&gate, &f16[(t + 1) % 3]), want);
        }
        // A single activation leaves nowhere to hide: each weight is seen alone.
        for i in [0, 17, 31, 32, 255, K - 1] {
            let mut x = vec![0f32; K];
            x[i] = 1.5;
            let row = H16Row::new(&x);
            let want = mm_prefill(&gate, &[Bounded::exact(&row.dequantize())]).remove(0);
            let got = mat_mul_f16(&gate, &row);
            accepts(&got, &want);
            x.rotate_left(1);
            refuses("the neighbour's weight", &mat_mul_f16(&gate, &H16Row::new(&x)), &want);
        }

        let res_rows: Vec<Bounded> = res.iter().map(|row| Bounded::exact(row)).collect();
        let want = mm_res(&gate, &tokens, Some(&Bounded::exact(&bias)), Some(&res_rows));
        let product = mat_mul_f16(&gate, &f16[0]);
        accepts(&add_f32(&product, &add_f32(&bias, &res[0])), &want[0]);
        refuses("a missing bias", &add_f32(&product, &res[0]), &want[0]);
        refuses(
            "another token's residual",
            &add_f32(&add_f32(&product, &bias), &res[1]),
            &want[0],
        );

        let want = geglu_ffn(Glu::Swiglu, &gate, &up, &tokens);
        let [g, u] = [&gate, &up].map(|w| mat_mul_f16(w, &f16[0]));
        let swiglu =
            |g: &[f32], u: &[f32]| -> Vec<f32> { g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect() };
        accepts(&swiglu(&g, &u), &want[0]);
        refuses("gate and up exchanged", &swiglu(&u, &g), &want[0]);
    }
}

/// B32: an id that is no expert has no result.
#[test]
fn products_with_experts() {
    const K: usize = 256;
    const ROWS: usize = 24;
    const IDS: [i32; 6] = [2, 0, 3, 2, -1, 0];
    for dtype in [DType::F16, DType::Q4_K] {
        let mut sample = Sample::new(15);
        let bytes: Vec<Vec<u8>> = (0..6).map(|_| sample.weights(dtype, K * ROWS)).collect();
        let matrices: Vec<Matrix> = bytes
            .iter()
            .map(|bytes| Matrix {
                dtype,
                bytes,
                row_bytes: bytes.len() / ROWS,
                n_rows: ROWS,
                k: K,
            })
            .collect();
        let (gate, up) = matrices.split_at(3);
        let rows: Vec<H16Row> = IDS.iter().map(|_| H16Row::new(&sample.values(K, 1.0))).collect();
        let x: Vec<Bounded> = rows.iter().map(|row| Bounded::exact(&row.dequantize())).collect();
        let products = moe_prefill(gate, &IDS, &x);
        let units = moe_ffn(Glu::Swiglu, gate, up, &IDS, &x);
        let swiglu =
            |g: &[f32], u: &[f32]| -> Vec<f32> { g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect() };
        for (pair, id) in IDS.iter().enumerate() {
            let (Some(product), Some(unit)) = (&products[pair], &units[pair]) else {
                assert!(!(0..3).contains(id) && products[pair].is_none() && units[pair].is_none());
                continue;
            };
            let (e, other) = (*id as usize, (*id as usize + 1) % 3);
            let of = |w: &Matrix, row: usize| mat_mul_f16(w, &rows[row]);
            accepts(&of(&gate[e], pair), product);
            refuses("another expert", &of(&gate[other], pair), product);
            refuses("another pair's input", &of(&gate[e], (pair + 1) % IDS.len()), product);
            let (g, u) = (of(&gate[e], pair), of(&up[e], pair));
            accepts(&swiglu(&g, &u), unit);
            refuses("gate and up exchanged", &swiglu(&u, &g), unit);
            refuses("another expert's up", &swiglu(&g, &of(&up[other], pair)), unit);
        }
    }
}

#[test]
fn qkv_heads() {
    const K: usize = 128;
    const DIM: usize = 32;
    const HEADS: usize = 3;
    const EPS: f32 = 1e-6;
    let mut sample = Sample::new(13);
    let bytes = sample.weights(DType::F16, K * DIM * HEADS);
    let w = Matrix {
        dtype: DType::F16,
        bytes: &bytes,
        row_bytes: 2 * K,
        n_rows: DIM * HEADS,
        k: K,
    };
    let (x, norm_w) = (sample.values(K, 0.1), sample.values(DIM, 2.0));
    let wide_w = wide(&norm_w);
    let rope = Params {
        n_dims: 24,
        freq_base: 10000.0,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        corr_dims: (0.0, 0.0),
    };
    let tail = Tail {
        head_dim: DIM,
        norm: Some((&wide_w, EPS.into())),
        mode: RopeMode::Neox,
        rope,
        freq_factors: None,
        scale: 0.25,
        stored_as: DType::F32,
    };
    const POS: i32 = 900;
    let want = qkv_gemv(&w, None, &Bounded::exact(&x), &tail, POS);

    let heads = mat_vec_f32(&w, &wide(&x));
    let run = |eps: f32, pos: i32, neox: bool| -> Vec<f32> {
        let mut out = Vec::new();
        for head in heads.chunks(DIM) {
            let mut v = rms_norm_f32(head, &norm_w, eps);
            for i in 0..rope.n_dims / 2 {
                let theta = pos as f32 * 10000f32.powf(-2.0 / rope.n_dims as f32).powf(i as f32);
                let (a, b) = if neox {
                    (i, i + rope.n_dims / 2)
                } else {
                    (2 * i, 2 * i + 1)
                };
                let (x0, x1) = (v[a], v[b]);
                v[a] = x0 * theta.cos() - x1 * theta.sin();
                v[b] = x0 * theta.sin() + x1 * theta.cos();
            }
            out.extend(v.iter().map(|v| v * 0.25));
        }
        out
    };
    let got = run(EPS, POS, true);
    accepts(&got, &want);
    refuses("a wrong eps", &run(2e-6, POS, true), &want);
    refuses("a position that is off by one", &run(EPS, POS + 1, true), &want);
    refuses("the other pairing", &run(EPS, POS, false), &want);
    let mut swapped = got.clone();
    swapped.rotate_left(DIM);
    refuses("swapped heads", &swapped, &want);

    let stored = Tail {
        stored_as: DType::BF16,
        ..tail
    };
    let want = qkv_gemv(&w, None, &Bounded::exact(&x), &stored, POS);
    let nearest: Vec<f32> = got.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect();
    accepts(&nearest, &want);
    let cut: Vec<f32> = got.iter().map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)).collect();
    refuses("truncation to bf16", &cut, &want);
}
