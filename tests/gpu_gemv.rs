//! frt_gemv on a GPU: every weight type against the oracle, with segments, bias, residual, GLU and q8 blocks.
//!
//! Quantised weights multiply the values that the 8-bit blocks stand for, so the bounds hold f32 noise only and a quant that is
//! off by one fails. What quantising itself may change is bounded in one test of its own.

mod gpu;

use ggml_flashrt::kernel::cudart::Buffer;
use ggml_flashrt::kernel::{gemv, gemv_supports, CudaError, GemvArgs, GemvSeg, Glu, MAX_TOKENS, Q8, WEIGHT_TYPES};
use ggml_flashrt::reference::gemv_res::gemv_res;
use ggml_flashrt::reference::glu_gemv::glu_gemv;
use ggml_flashrt::reference::quant::{q8_step_bound, DType, Matrix, Q8Row};
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::Bounded;
use gpu::{expect, q8_input, strided, wide, Gpu, Output};

/// Weights on both sides. Rows are packed, as in a GGUF file.
struct Weights {
    dtype: DType,
    bytes: Vec<u8>,
    device: Buffer<u8>,
    n_rows: usize,
    k: usize,
}

impl Weights {
    fn new(gpu: &Gpu, sample: &mut Sample, dtype: DType, n_rows: usize, k: usize) -> Weights {
        let bytes = sample.weights(dtype, n_rows * k);
        Weights {
            dtype,
            device: gpu.input(&bytes),
            bytes,
            n_rows,
            k,
        }
    }

    fn row_bytes(&self) -> usize {
        self.bytes.len() / self.n_rows
    }

    fn matrix(&self) -> Matrix<'_> {
        let Weights { dtype, n_rows, k, .. } = *self;
        Matrix {
            dtype,
            bytes: &self.bytes,
            row_bytes: self.row_bytes(),
            n_rows,
            k,
        }
    }

    fn segment(&self, dst: *mut f32, dst_stride: usize) -> GemvSeg {
        GemvSeg {
            w: self.device.raw().cast_const().cast(),
            row_bytes: self.row_bytes() as i64,
            dst,
            dst_stride: dst_stride as i64,
            n_rows: self.n_rows as i32,
            ..GemvSeg::NONE
        }
    }
}

/// Activations on both sides, as f32 and as q8 blocks.
struct Activations {
    x: Buffer<f32>,
    x_stride: usize,
    qs: Buffer<i8>,
    ds: Buffer<f32>,
    /// What the mat-vec reads: the blocks' values for quantised weights.
    values: Vec<Bounded>,
    n_tokens: usize,
}

impl Activations {
    fn new(gpu: &Gpu, sample: &mut Sample, dtype: DType, n_tokens: usize, k: usize, gap: usize) -> Activations {
        let rows: Vec<Vec<f32>> = (0..n_tokens).map(|_| sample.values(k, 2.0)).collect();
        let whole: Vec<Vec<f32>> = rows.iter().map(|row| row[..k / 32 * 32].to_vec()).collect();
        let (qs, ds, values) = q8_input(gpu, &whole);
        Activations {
            x: gpu.input(&strided(&rows, k + gap)),
            x_stride: k + gap,
            qs,
            ds,
            values: if dtype.block_len() == 1 {
                rows.iter().map(|row| Bounded::exact(row)).collect()
            } else {
                values
            },
            n_tokens,
        }
    }

    /// As blocks when `blocks`, else as f32 alone, and the other pointer null.
    fn arguments(&self, w: &Weights, blocks: bool) -> GemvArgs {
        GemvArgs {
            ty: w.dtype as i32,
            n_seg: 1,
            seg: [GemvSeg::NONE; 3],
            k: w.k as i32,
            n_tokens: self.n_tokens as i32,
            x: if blocks { std::ptr::null() } else { self.x.raw() },
            x_stride: self.x_stride as i64,
            xq: if blocks {
                Q8 {
                    qs: self.qs.raw(),
                    ds: self.ds.raw(),
                }
            } else {
                Q8::NONE
            },
            glu: Glu::None as i32,
        }
    }
}

/// Whether a type can take its input as blocks, and must be tested both ways.
fn inputs(dtype: DType) -> &'static [bool] {
    if dtype.block_len() == 1 {
        &[false]
    } else {
        &[false, true]
    }
}

fn run(gpu: &Gpu, case: &str, args: &GemvArgs, pdl: bool) {
    gemv(args, gpu.launch(pdl)).unwrap_or_else(|e| panic!("{case}: {e}"));
}

/// `n_tokens` rows of `n_rows` results, held against an oracle per token.
fn expect_rows(gpu: &Gpu, case: &str, dst: &Output<f32>, n_rows: usize, stride: usize, want: &[Bounded]) -> Vec<f32> {
    let got = dst.read_rows(&gpu.stream, want.len(), n_rows, stride);
    for (t, (got, want)) in got.chunks(n_rows).zip(want).enumerate() {
        expect(case, &format!("token {t}"), got, want);
    }
    got
}

#[test]
fn every_type_and_number_of_tokens() {
    let Some(gpu) = Gpu::open() else { return };
    for dtype in WEIGHT_TYPES {
        for n_tokens in 1..=MAX_TOKENS {
            let mut sample = Sample::new(n_tokens as u64);
            // Odd row counts leave a tail in every split of the rows.
            let k = if dtype.block_len() == 256 { 768 } else { 640 };
            let w = Weights::new(&gpu, &mut sample, dtype, 37, k);
            let x = Activations::new(&gpu, &mut sample, dtype, n_tokens, k, 4);
            for &blocks in inputs(dtype) {
                let case = format!("{} 37x{k}, {n_tokens} tokens, blocks {blocks}", dtype.name());
                let dst = gpu.output(n_tokens * 40);
                let mut args = x.arguments(&w, blocks);
                args.seg[0] = w.segment(dst.raw(), 40);
                run(&gpu, &case, &args, n_tokens % 2 == 0);
                let want: Vec<Bounded> = x.values.iter().map(|x| gemv_res(&w.matrix(), x, None, None)).collect();
                expect_rows(&gpu, &case, &dst, 37, 40, &want);
            }
        }
    }
}

#[test]
fn shapes_of_real_models() {
    let Some(gpu) = Gpu::open() else { return };
    // k that is no multiple of 256, long rows, and more rows than one wave of blocks holds.
    for (n_rows, k) in [
        (256, 640),
        (2048, 1152),
        (640, 2048),
        (1024, 4096),
        (64, 14336),
        (20000, 256),
    ] {
        for dtype in WEIGHT_TYPES.into_iter().filter(|dtype| k % dtype.block_len() == 0) {
            let mut sample = Sample::new(k as u64);
            let w = Weights::new(&gpu, &mut sample, dtype, n_rows, k);
            let x = Activations::new(&gpu, &mut sample, dtype, 1, k, 0);
            let case = format!("{} {n_rows}x{k}", dtype.name());
            let dst = gpu.output(n_rows);
            let mut args = x.arguments(&w, dtype.block_len() > 1);
            args.seg[0] = w.segment(dst.raw(), n_rows);
            run(&gpu, &case, &args, true);
            expect_rows(&gpu, &case, &dst, n_rows, n_rows, &[w.matrix().mat_vec(&x.values[0])]);
        }
    }
}

#[test]
fn three_segments_with_bias() {
    let Some(gpu) = Gpu::open() else { return };
    for dtype in WEIGHT_TYPES {
        for n_tokens in [1, 3] {
            let mut sample = Sample::new(31);
            let k = 512;
            let weights = [40, 7, 1].map(|n_rows| Weights::new(&gpu, &mut sample, dtype, n_rows, k));
            let x = Activations::new(&gpu, &mut sample, dtype, n_tokens, k, 0);
            let biases = [40, 7, 1].map(|n_rows| sample.values(n_rows, 1.0));
            let bias_dev = [0, 1, 2].map(|i| gpu.input(&biases[i]));
            for &blocks in inputs(dtype) {
                let outputs = [0, 1, 2].map(|i| gpu.output(n_tokens * (weights[i].n_rows + i)));
                let mut args = GemvArgs {
                    n_seg: 3,
                    ..x.arguments(&weights[0], blocks)
                };
                for i in 0..3 {
                    args.seg[i] = weights[i].segment(outputs[i].raw(), weights[i].n_rows + i);
                    // The middle one has none.
                    if i != 1 {
                        args.seg[i].bias = bias_dev[i].raw();
                    }
                }
                let case = format!("{} 3 segments, {n_tokens} tokens, blocks {blocks}", dtype.name());
                run(&gpu, &case, &args, true);
                for i in 0..3 {
                    let bias = (i != 1).then(|| Bounded::exact(&biases[i]));
                    let oracle = |x: &Bounded| gemv_res(&weights[i].matrix(), x, bias.as_ref(), None);
                    let want: Vec<Bounded> = x.values.iter().map(oracle).collect();
                    expect_rows(
                        &gpu,
                        &case,
                        &outputs[i],
                        weights[i].n_rows,
                        weights[i].n_rows + i,
                        &want,
                    );
                }
            }
        }
    }
}

#[test]
fn a_residual_may_lie_under_its_output() {
    let Some(gpu) = Gpu::open() else { return };
    for dtype in WEIGHT_TYPES {
        for (n_tokens, in_place) in [(1, true), (1, false), (4, true), (8, false)] {
            let mut sample = Sample::new(8);
            let (n_rows, k) = (67, 512);
            let w = Weights::new(&gpu, &mut sample, dtype, n_rows, k);
            let x = Activations::new(&gpu, &mut sample, dtype, n_tokens, k, 0);
            let res: Vec<Vec<f32>> = (0..n_tokens).map(|_| sample.values(n_rows, 3.0)).collect();
            let res_all = strided(&res, n_rows + 1);
            let res_dev = gpu.input(&res_all);
            let dst = if in_place {
                gpu.output_over(&res_all.iter().map(|&v| Some(v)).collect::<Vec<_>>())
            } else {
                gpu.output(res_all.len())
            };
            let mut args = x.arguments(&w, false);
            args.seg[0] = GemvSeg {
                res: if in_place { dst.raw() } else { res_dev.raw() },
                res_stride: n_rows as i64 + 1,
                ..w.segment(dst.raw(), n_rows + 1)
            };
            let case = format!("{} residual, {n_tokens} tokens, in place {in_place}", dtype.name());
            run(&gpu, &case, &args, true);
            let oracle = |t: usize| gemv_res(&w.matrix(), &x.values[t], None, Some(&Bounded::exact(&res[t])));
            let want: Vec<Bounded> = (0..n_tokens).map(oracle).collect();
            expect_rows(&gpu, &case, &dst, n_rows, n_rows + 1, &want);
        }
    }
}

#[test]
fn every_glu_from_values_and_blocks() {
    let Some(gpu) = Gpu::open() else { return };
    const KINDS: [Glu; 5] = [Glu::Reglu, Glu::Geglu, Glu::Swiglu, Glu::GegluErf, Glu::GegluQuick];
    for dtype in WEIGHT_TYPES {
        for (kind, n_tokens) in KINDS.into_iter().zip([1, 2, 3, 4, 8]) {
            let mut sample = Sample::new(55);
            let (n_rows, k) = (96, 512);
            let [gate, up] = [(); 2].map(|_| Weights::new(&gpu, &mut sample, dtype, n_rows, k));
            let x = Activations::new(&gpu, &mut sample, dtype, n_tokens, k, 0);
            let bias = sample.values(n_rows, 1.0);
            let bias_dev = gpu.input(&bias);
            let want: Vec<Bounded> = x
                .values
                .iter()
                .map(|x| {
                    glu_gemv(
                        kind,
                        (&gate.matrix(), Some(&Bounded::exact(&bias))),
                        (&up.matrix(), None),
                        x,
                    )
                })
                .collect();
            for &blocks in inputs(dtype) {
                let case = format!("{} {kind:?}, {n_tokens} tokens, blocks {blocks}", dtype.name());
                let dst = gpu.output(n_tokens * n_rows);
                let mut args = GemvArgs {
                    n_seg: 2,
                    glu: kind as i32,
                    ..x.arguments(&gate, blocks)
                };
                args.seg[0] = GemvSeg {
                    bias: bias_dev.raw(),
                    ..gate.segment(dst.raw(), n_rows)
                };
                args.seg[1] = up.segment(std::ptr::null_mut(), 0);

                run(&gpu, &case, &args, true);
                expect_rows(&gpu, &case, &dst, n_rows, n_rows, &want);
            }
        }
    }
}

#[test]
fn random_shapes() {
    let Some(gpu) = Gpu::open() else { return };
    let mut sample = Sample::new(99);
    for _ in 0..48 {
        let dtype = sample.pick(&WEIGHT_TYPES);
        // F16 and BF16 rows are read 16 bytes at a time.
        let unit = dtype.block_len().max(8);
        let k = unit * (1 + sample.below(2048 / unit));
        let (n_rows, n_tokens) = (1 + sample.below(300), 1 + sample.below(MAX_TOKENS));
        let w = Weights::new(&gpu, &mut sample, dtype, n_rows, k);
        let x = Activations::new(&gpu, &mut sample, dtype, n_tokens, k, 4 * (k % 3));
        let blocks = sample.pick(inputs(dtype));
        let case = format!("{} {n_rows}x{k}, {n_tokens} tokens, blocks {blocks}", dtype.name());
        let dst = gpu.output(n_tokens * (n_rows + 3));
        let mut args = x.arguments(&w, blocks);
        args.seg[0] = w.segment(dst.raw(), n_rows + 3);
        run(&gpu, &case, &args, true);
        let want: Vec<Bounded> = x.values.iter().map(|x| w.matrix().mat_vec(x)).collect();
        expect_rows(&gpu, &case, &dst, n_rows, n_rows + 3, &want);
    }
}

#[test]
fn quantising_the_input_costs_at_most_half_a_step_a_value() {
    let Some(gpu) = Gpu::open() else { return };
    for dtype in WEIGHT_TYPES.into_iter().filter(|dtype| dtype.block_len() > 1) {
        let mut sample = Sample::new(17);
        let (n_rows, k) = (64, 1024);
        let w = Weights::new(&gpu, &mut sample, dtype, n_rows, k);
        let x = sample.values(k, 2.0);
        let x_dev = gpu.input(&x);
        let dst = gpu.output(n_rows);
        let args = GemvArgs {
            ty: dtype as i32,
            n_seg: 1,
            seg: [w.segment(dst.raw(), n_rows), GemvSeg::NONE, GemvSeg::NONE],
            k: k as i32,
            n_tokens: 1,
            x: x_dev.raw(),
            x_stride: k as i64,
            xq: Q8::NONE,
            glu: Glu::None as i32,
        };
        run(&gpu, dtype.name(), &args, true);
        // The unquantised input, each value uncertain by half a step.
        let input = Bounded {
            value: wide(&x),
            bound: q8_step_bound(&wide(&x)),
        };
        expect_rows(&gpu, dtype.name(), &dst, n_rows, n_rows, &[w.matrix().mat_vec(&input)]);
    }
}

#[test]
fn zeros_and_huge_values_make_valid_blocks() {
    let Some(gpu) = Gpu::open() else { return };
    let mut sample = Sample::new(23);
    let (n_rows, k) = (32, 512);
    let w = Weights::new(&gpu, &mut sample, DType::Q8_0, n_rows, k);
    let mut x = sample.values(k, 1.0);
    x[..64].fill(0.0);
    x[64..96].iter_mut().for_each(|v| *v *= 1e30);
    x[96..128].iter_mut().for_each(|v| *v *= 1e-30);
    let x_dev = gpu.input(&x);
    let dst = gpu.output(n_rows);
    let args = GemvArgs {
        ty: w.dtype as i32,
        n_seg: 1,
        seg: [w.segment(dst.raw(), n_rows), GemvSeg::NONE, GemvSeg::NONE],
        k: k as i32,
        n_tokens: 1,
        x: x_dev.raw(),
        x_stride: k as i64,
        xq: Q8::NONE,
        glu: Glu::None as i32,
    };
    run(&gpu, "zeros and huge values", &args, true);
    let want = w.matrix().mat_vec(&Bounded::exact(&Q8Row::quantize(&x).dequantize()));
    expect_rows(&gpu, "zeros and huge values", &dst, n_rows, n_rows, &[want]);
}

#[test]
fn support_is_answered_before_a_launch() {
    let Some(gpu) = Gpu::open() else { return };
    for dtype in WEIGHT_TYPES {
        let ty = dtype as i32;
        let step = if dtype.block_len() == 1 {
            8
        } else {
            dtype.block_len() as i32
        };
        assert!(
            gemv_supports(ty, 2 * step, 1, Glu::None) && gemv_supports(ty, 4096, 4, Glu::Swiglu),
            "{}",
            dtype.name()
        );
        assert!(!gemv_supports(ty, 2 * step + 1, 1, Glu::None) && !gemv_supports(ty, 0, 1, Glu::None));
        assert!(!gemv_supports(ty, 4096, 0, Glu::None) && !gemv_supports(ty, 4096, MAX_TOKENS as i32 + 1, Glu::None));
    }
    assert!(!gemv_supports(DType::Q2_K as i32, 4096, 1, Glu::None));
    // What is not supported is not launched either.
    let dst = gpu.output::<f32>(32);
    let mut sample = Sample::new(1);
    let w = Weights::new(&gpu, &mut sample, DType::Q8_0, 8, 64);
    let x = Activations::new(&gpu, &mut sample, DType::Q8_0, 1, 64, 0);
    let mut args = x.arguments(&w, true);
    args.seg[0] = w.segment(dst.raw(), 8);
    for (what, args) in [
        (
            "an unknown type",
            GemvArgs {
                ty: DType::Q2_K as i32,
                ..args
            },
        ),
        ("a broken block", GemvArgs { k: 40, ..args }),
        ("too many tokens", GemvArgs { n_tokens: 9, ..args }),
        ("no segment", GemvArgs { n_seg: 0, ..args }),
        (
            "a gate without up",
            GemvArgs {
                glu: Glu::Swiglu as i32,
                ..args
            },
        ),
        (
            "an unknown GLU",
            GemvArgs {
                glu: 3,
                n_seg: 2,
                ..args
            },
        ),
    ] {
        let refused = gemv(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
    assert!(dst.read(&gpu.stream).iter().all(|v| v.is_nan()), "nothing was launched");
}

#[cfg(feature = "cuda")]
mod graphs {
    use super::*;
    use std::ffi::{c_int, c_void};

    unsafe extern "C" {
        fn cudaStreamBeginCapture(stream: *mut c_void, mode: c_int) -> c_int;
        fn cudaStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> c_int;
        fn cudaGraphInstantiate(exec: *mut *mut c_void, graph: *mut c_void, flags: u64) -> c_int;
        fn cudaGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> c_int;
    }

    /// B18: graphs are instantiated and updated long after their kernels were captured. A launch in between that needs less shared
    /// memory must not take away what their nodes need: a server of four slots died of it after a few dozen requests.
    #[test]
    fn a_captured_launch_keeps_its_shared_memory() {
        let Some(gpu) = Gpu::open() else { return };
        let mut sample = Sample::new(18);
        let case = |sample: &mut Sample, k: usize| {
            let w = Weights::new(&gpu, sample, DType::Q4_K, 64, k);
            let x = Activations::new(&gpu, sample, DType::Q4_K, 2, k, 0);
            (w, x, gpu.output::<f32>(2 * 64))
        };
        let (large, small) = (case(&mut sample, 16384), case(&mut sample, 256));
        let call = |(w, x, dst): &(Weights, Activations, Output<f32>)| {
            let mut args = x.arguments(w, true);
            args.seg[0] = w.segment(dst.raw(), 64);
            gemv(&args, gpu.launch(true)).unwrap();
        };
        let stream = gpu.launch(true).stream;
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a stream of our own; the test's process ends with the graph.
        unsafe { assert_eq!(cudaStreamBeginCapture(stream, 2), 0) };
        call(&large);
        // SAFETY: as above.
        unsafe { assert_eq!(cudaStreamEndCapture(stream, &mut graph), 0) };
        call(&small);
        // SAFETY: as above.
        unsafe {
            assert_eq!(cudaGraphInstantiate(&mut exec, graph, 0), 0, "cannot be instantiated");
            assert_eq!(cudaGraphLaunch(exec, stream), 0);
        }
        for (w, x, dst) in [&large, &small] {
            let want: Vec<_> = (0..2).map(|t| w.matrix().mat_vec(&x.values[t])).collect();
            expect_rows(&gpu, "in a graph", dst, 64, 64, &want);
        }
    }
}
