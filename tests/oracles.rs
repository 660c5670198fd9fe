//! The oracles' bounds: a right f32 implementation is within, and each planted fault is not.
//!
//! A new oracle gets a plain f32 implementation here and a list of faults that its comparison must report.

use ggml_flashrt::kernel::{Glu, RopeMode};
use ggml_flashrt::reference::add_norm::add_norm;
use ggml_flashrt::reference::gemv_res::gemv_res;
use ggml_flashrt::reference::glu_gemv::glu_gemv;
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
