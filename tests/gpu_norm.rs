//! frt_norm on a GPU: both forms against the oracle, layouts, aliases, q8 blocks and f16 rows.

mod gpu;

use ggml_flashrt::kernel::{norm, to_h16, CudaError, H16Args, NormArgs, H16, Q8};
use ggml_flashrt::reference::add_norm::{add_norm, SumAndNorm};
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::sandwich_norm::sandwich_norm;
use ggml_flashrt::reference::Bounded;
use gpu::{bytes, expect, strided, wide, Gpu, H16Output, Q8Output};

/// Rows that y and z lie over.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Over {
    Nothing,
    /// y over x, z over h.
    XandH,
    /// y over h, z over x.
    HandX,
}

struct Case {
    n_rows: usize,
    n_cols: usize,
    /// Elements between rows beyond their length.
    gap: usize,
    post_norm: bool,
    over: Over,
}

impl Case {
    fn run(&self, gpu: &Gpu, seed: u64, pdl: bool) {
        let Case {
            n_rows,
            n_cols,
            gap,
            post_norm,
            over,
        } = *self;
        let case = format!("{n_rows}x{n_cols}+{gap} post_norm {post_norm} over {over:?} seed {seed} pdl {pdl}");
        let stride = n_cols + gap;
        let mut sample = Sample::new(seed);
        let [h, x] = [(); 2].map(|_| (0..n_rows).map(|_| sample.values(n_cols, 3.0)).collect::<Vec<_>>());
        let [w1, w2] = [(); 2].map(|_| sample.values(n_cols, 2.0));
        let (eps1, eps2) = (1e-6, 3e-5);
        let [h_all, x_all] = [&h, &x].map(|rows| strided(rows, stride));
        let before = |values: &[f32]| values.iter().map(|&v| Some(v)).collect::<Vec<_>>();
        let (h_dev, x_dev, w1_dev, w2_dev) = (gpu.input(&h_all), gpu.input(&x_all), gpu.input(&w1), gpu.input(&w2));
        let (y, z) = match over {
            Over::Nothing => (gpu.output(n_rows * stride), gpu.output(n_rows * stride)),
            Over::XandH => (gpu.output_over(&before(&x_all)), gpu.output_over(&before(&h_all))),
            Over::HandX => (gpu.output_over(&before(&h_all)), gpu.output_over(&before(&x_all))),
        };
        let (h_ptr, x_ptr) = match over {
            Over::Nothing => (h_dev.raw(), x_dev.raw()),
            Over::XandH => (z.raw(), y.raw()),
            Over::HandX => (y.raw(), z.raw()),
        };
        let zq = (n_cols % 32 == 0).then(|| Q8Output::new(gpu, n_rows, n_cols));
        let zh = (n_cols % 64 == 0).then(|| H16Output::new(gpu, n_rows, n_cols));
        let args = NormArgs {
            h: h_ptr,
            h_stride: stride as i64,
            x: x_ptr,
            x_stride: stride as i64,
            w1: if post_norm { w1_dev.raw() } else { std::ptr::null() },
            w2: w2_dev.raw(),
            y: y.raw(),
            y_stride: stride as i64,
            z: z.raw(),
            z_stride: stride as i64,
            zq: zq.as_ref().map_or(Q8::NONE, Q8Output::raw),
            zh: zh.as_ref().map_or(H16::NONE, H16Output::raw),
            n_rows: n_rows as i32,
            n_cols: n_cols as i32,
            eps1,
            eps2,
        };
        norm(&args, gpu.launch(pdl)).unwrap_or_else(|e| panic!("{case}: {e}"));

        let got_y = y.read_rows(&gpu.stream, n_rows, n_cols, stride);
        let got_z = z.read_rows(&gpu.stream, n_rows, n_cols, stride);
        for t in 0..n_rows {
            let (h, x) = (Bounded::exact(&h[t]), Bounded::exact(&x[t]));
            let SumAndNorm { sum, normed } = if post_norm {
                sandwich_norm(&h, &x, &wide(&w1), eps1.into(), &wide(&w2), eps2.into())
            } else {
                add_norm(&h, &x, &wide(&w2), eps2.into())
            };
            let row = t * n_cols..(t + 1) * n_cols;
            expect(&case, "y", &got_y[row.clone()], &sum);
            expect(&case, "z", &got_z[row], &normed);
        }
        if let Some(zq) = zq {
            zq.expect(&gpu.stream, &got_z, &case);
            if over == Over::Nothing {
                // Without z the blocks must be the same.
                zq.reset(&gpu.stream);
                norm(
                    &NormArgs {
                        z: std::ptr::null_mut(),
                        zh: H16::NONE,
                        ..args
                    },
                    gpu.launch(pdl),
                )
                .unwrap();
                zq.expect(&gpu.stream, &got_z, &format!("{case}, blocks alone"));
                assert_eq!(
                    bytes(&y.read_rows(&gpu.stream, n_rows, n_cols, stride)),
                    bytes(&got_y),
                    "{case}: y again"
                );
            }
        }
        if let Some(zh) = zh {
            zh.expect(&gpu.stream, &got_z, &case);
            if over == Over::Nothing {
                zh.reset(&gpu.stream);
                let alone = NormArgs {
                    y: std::ptr::null_mut(),
                    z: std::ptr::null_mut(),
                    zq: Q8::NONE,
                    ..args
                };
                norm(&alone, gpu.launch(pdl)).unwrap();
                zh.expect(&gpu.stream, &got_z, &format!("{case}, f16 alone"));
            }
            expect_converted(gpu, &zh, &got_z, (n_rows, n_cols), &case);
        }
    }
}

/// A hand-off changes no result: it has the bits that converting the norm's f32 result gives.
fn expect_converted(gpu: &Gpu, zh: &H16Output, z: &[f32], (n_rows, n_cols): (usize, usize), case: &str) {
    let (x, y) = (gpu.input(z), H16Output::new(gpu, n_rows, n_cols));
    let args = H16Args {
        x: x.raw(),
        x_stride: n_cols as i64,
        y: y.raw(),
        k: n_cols as i32,
        n_tokens: n_rows as i32,
    };
    to_h16(&args, gpu.launch(true)).unwrap();
    assert!(
        zh.read(&gpu.stream) == y.read(&gpu.stream),
        "{case}: f16 of the f32 result has other bits"
    );
}

#[test]
fn rows_of_real_models() {
    let Some(gpu) = Gpu::open() else { return };
    // One per number of values a thread holds, and its limits; the last is the longest row.
    for n_cols in [32, 640, 1152, 2048, 2560, 4096, 5376, 8192, 12288, 16384] {
        for post_norm in [false, true] {
            for (n_rows, pdl) in [(1, true), (3, false)] {
                Case {
                    n_rows,
                    n_cols,
                    gap: 0,
                    post_norm,
                    over: Over::Nothing,
                }
                .run(&gpu, n_cols as u64, pdl);
            }
        }
    }
}

#[test]
fn outputs_over_inputs() {
    let Some(gpu) = Gpu::open() else { return };
    for over in [Over::XandH, Over::HandX] {
        for n_cols in [640, 641, 4096, 16384] {
            for post_norm in [false, true] {
                Case {
                    n_rows: 8,
                    n_cols,
                    gap: 0,
                    post_norm,
                    over,
                }
                .run(&gpu, 5, true);
            }
        }
    }
}

/// The form for rows that do not start on 16 bytes, as f16 too.
#[test]
fn unaligned_rows_of_any_length() {
    let Some(gpu) = Gpu::open() else { return };
    for n_cols in [64, 640, 1024, 4096, 8192, 16384] {
        for (gap, over) in [(1, Over::Nothing), (2, Over::XandH), (3, Over::HandX)] {
            for post_norm in [false, true] {
                Case {
                    n_rows: 11,
                    n_cols,
                    gap,
                    post_norm,
                    over,
                }
                .run(&gpu, 6, true);
            }
        }
    }
}

#[test]
fn odd_shapes_and_strides() {
    let Some(gpu) = Gpu::open() else { return };
    let mut sample = Sample::new(77);
    for seed in 0..48 {
        let case = Case {
            n_rows: 1 + sample.below(8),
            n_cols: 1 + sample.below(5000),
            gap: sample.pick(&[0, 0, 1, 3, 4, 32]),
            post_norm: sample.below(2) == 0,
            over: sample.pick(&[Over::Nothing, Over::XandH, Over::HandX]),
        };
        case.run(&gpu, seed, seed % 2 == 0);
    }
}

/// Rows whose f16 form is a matter of its own: all zeros, no magnitude, huge and tiny ones, and more rows than go into eight.
#[test]
fn rows_of_every_magnitude_as_f16() {
    let Some(gpu) = Gpu::open() else { return };
    const N: usize = 128;
    let scales = [
        0.0,
        1.0,
        1e-38,
        3e18,
        1e-20,
        f32::NAN,
        7.0,
        1e-3,
        65504.0,
        2f32.powi(-60),
        5.0,
    ];
    let mut sample = Sample::new(31);
    // The weight makes the magnitude: the norm itself takes it away.
    for scale in scales {
        let h: Vec<f32> = sample.values(N * scales.len(), 1.0);
        let zeros = vec![0f32; N * scales.len()];
        let mut w = sample.values(N, 1.0);
        w.iter_mut().for_each(|w| *w *= scale);
        let (h_dev, x_dev, w_dev) = (gpu.input(&h), gpu.input(&zeros), gpu.input(&w));
        let z = gpu.output::<f32>(h.len());
        let zh = H16Output::new(&gpu, scales.len(), N);
        let args = NormArgs {
            h: h_dev.raw(),
            h_stride: N as i64,
            x: x_dev.raw(),
            x_stride: N as i64,
            w1: std::ptr::null(),
            w2: w_dev.raw(),
            y: std::ptr::null_mut(),
            y_stride: 0,
            z: z.raw(),
            z_stride: N as i64,
            zq: Q8::NONE,
            zh: zh.raw(),
            n_rows: scales.len() as i32,
            n_cols: N as i32,
            eps1: 0.0,
            eps2: 1e-6,
        };
        norm(&args, gpu.launch(true)).unwrap();
        let got_z = z.read(&gpu.stream);
        let case = format!("scale {scale:e}");
        zh.expect(&gpu.stream, &got_z, &case);
        expect_converted(&gpu, &zh, &got_z, (scales.len(), N), &case);
    }
}

#[test]
fn what_it_cannot_do_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let row = gpu.output::<f32>(64);
    let args = |n_cols: i32| NormArgs {
        h: row.raw(),
        h_stride: 0,
        x: row.raw(),
        x_stride: 0,
        w1: std::ptr::null(),
        w2: row.raw(),
        y: row.raw(),
        y_stride: 0,
        z: row.raw(),
        z_stride: 0,
        zq: Q8::NONE,
        zh: H16::NONE,
        n_rows: 1,
        n_cols,
        eps1: 0.0,
        eps2: 0.0,
    };
    let (blocks, rows) = (Q8Output::new(&gpu, 1, 64), H16Output::new(&gpu, 1, 64));
    for (what, args) in [
        ("a row that is too long", args(16385)),
        ("an empty row", args(0)),
        ("no rows", NormArgs { n_rows: 0, ..args(64) }),
        (
            "no result",
            NormArgs {
                z: std::ptr::null_mut(),
                ..args(64)
            },
        ),
        (
            "no whole f16 pieces",
            NormArgs {
                zh: rows.raw(),
                ..args(96)
            },
        ),
        (
            "no whole blocks",
            NormArgs {
                zq: blocks.raw(),
                ..args(48)
            },
        ),
    ] {
        let refused = norm(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
    gpu.stream.synchronize().unwrap();
}
