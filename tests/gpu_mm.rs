//! frt_to_h16 and frt_mm on a GPU: rows bit by bit, products of every weight type against the oracle, in tiles of every width, with
//! bias, residual and gated units. The products are skipped where the device has no tensor-core kernels.
//!
//! Weights multiply what the f16 rows stand for, so the bounds hold the roundings of weights and sums only. Tokens repeat with a period
//! that divides no tile: each must have the bits of the first of its kind, wherever in a tile of whatever width it lies.

mod gpu;

use ggml_flashrt::kernel::cudart::Buffer;
use ggml_flashrt::kernel::{mm, to_h16, CudaError, Glu, H16Args, Launch, MmArgs, H16, MM_WEIGHT_TYPES};
use ggml_flashrt::reference::geglu_ffn::geglu_ffn;
use ggml_flashrt::reference::h16::{lay_out, H16Row};
use ggml_flashrt::reference::mm_prefill::mm_prefill;
use ggml_flashrt::reference::mm_res::mm_res;
use ggml_flashrt::reference::quant::{DType, Matrix};
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::{compare, Bounded};
use gpu::{bytes, expect, strided, Gpu, H16Output, Output};

/// Different rows of activations.
const PERIOD: usize = 37;

/// Numbers of multiprocessors to choose tiles for: a block does many tiles, a few, one, or half of one. Few favour wide tiles, many narrow
/// ones; with those between, the longer products here are shared by two blocks in tiles of each width.
fn launches(gpu: &Gpu) -> [Launch; 6] {
    let launch = gpu.launch(true);
    [1, 12, 24, 48, launch.sm_count, 1 << 20].map(|sm_count| Launch { sm_count, ..launch })
}

/// Weights on both sides.
struct Weights {
    dtype: DType,
    bytes: Vec<u8>,
    device: Buffer<u8>,
    row_bytes: usize,
    n_rows: usize,
    k: usize,
}

impl Weights {
    /// Rows follow each other, as in a GGUF file.
    fn new(gpu: &Gpu, sample: &mut Sample, dtype: DType, (n_rows, k): (usize, usize)) -> Weights {
        Weights::apart(gpu, sample, dtype, (n_rows, k), 0)
    }

    /// Rows `gap` bytes apart.
    fn apart(gpu: &Gpu, sample: &mut Sample, dtype: DType, (n_rows, k): (usize, usize), gap: usize) -> Weights {
        let packed = sample.weights(dtype, n_rows * k);
        let row_bytes = packed.len() / n_rows + gap;
        let padded = packed
            .chunks(row_bytes - gap)
            .flat_map(|row| [row, &vec![0xff; gap]].concat());
        let bytes: Vec<u8> = padded.collect();
        Weights {
            dtype,
            // Up to 15 bytes behind the last row may be read.
            device: gpu.input(&[&bytes[..], &[0xff; 16]].concat()),
            bytes,
            row_bytes,
            n_rows,
            k,
        }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix {
            dtype: self.dtype,
            bytes: &self.bytes,
            row_bytes: self.row_bytes,
            n_rows: self.n_rows,
            k: self.k,
        }
    }
}

/// Activations on both sides.
struct Activations {
    x: Buffer<u8>,
    scale: Buffer<f32>,
    rows: Vec<H16Row>,
}

impl Activations {
    fn new(gpu: &Gpu, rows: &[H16Row]) -> Activations {
        let (x, scale) = lay_out(rows);
        Activations {
            x: gpu.input(&x),
            scale: gpu.input(&scale),
            rows: rows.to_vec(),
        }
    }

    /// `n_tokens` of `kinds`, over and over.
    fn repeated(gpu: &Gpu, kinds: &[H16Row], n_tokens: usize) -> Activations {
        let rows: Vec<H16Row> = kinds.iter().cycle().take(n_tokens).cloned().collect();
        Activations::new(gpu, &rows)
    }

    fn arguments(&self, w: &Weights) -> MmArgs {
        let x = H16 {
            x: self.x.raw().cast(),
            scale: self.scale.raw(),
        };
        arguments(w, x, self.rows.len())
    }
}

/// Without an output.
fn arguments(w: &Weights, x: H16, n_tokens: usize) -> MmArgs {
    MmArgs {
        ty: w.dtype as i32,
        glu: Glu::None as i32,
        w: w.device.raw().cast_const().cast(),
        w2: std::ptr::null(),
        row_bytes: w.row_bytes as i64,
        n_rows: w.n_rows as i32,
        k: w.k as i32,
        n_tokens: n_tokens as i32,
        x,
        dst: std::ptr::null_mut(),
        dst_stride: 0,
        bias: std::ptr::null(),
        res: std::ptr::null(),
        res_stride: 0,
    }
}

/// Rows of very different size: each has a scale of its own. Some would overflow f16, one is 0.
fn kinds(sample: &mut Sample, k: usize) -> Vec<H16Row> {
    let sizes = [1.0, 3e4, 2e-6, 1e5, 0.0, 1e-30, 1e20];
    (0..PERIOD)
        .map(|i| H16Row::new(&sample.values(k, sizes[i % sizes.len()])))
        .collect()
}

fn values(rows: &[H16Row]) -> Vec<Bounded> {
    rows.iter().map(|row| Bounded::exact(&row.dequantize())).collect()
}

fn run(case: &str, args: &MmArgs, launch: Launch) {
    mm(args, launch).unwrap_or_else(|e| panic!("{case}: {e}"));
}

/// Holds the first tokens against the oracle, and the others against the first.
fn expect_tokens(case: &str, got: &[f32], n_rows: usize, want: &[Bounded]) {
    for (t, got_row) in got.chunks(n_rows).enumerate() {
        let first = &got[t % want.len() * n_rows..][..n_rows];
        if t < want.len() {
            expect(case, &format!("token {t}"), got_row, &want[t]);
        } else {
            assert!(
                bytes(got_row) == bytes(first),
                "{case}: token {t} has other bits than its equal"
            );
        }
    }
}

/// Rows of a poisoned output that lie `gap` floats apart.
fn product(gpu: &Gpu, case: &str, args: &MmArgs, launch: Launch, gap: usize) -> Vec<f32> {
    let (n_tokens, n_rows) = (args.n_tokens as usize, args.n_rows as usize);
    let dst = gpu.output::<f32>(n_tokens * (n_rows + gap));
    let args = MmArgs {
        dst: dst.raw(),
        dst_stride: (n_rows + gap) as i64,
        ..*args
    };
    run(case, &args, launch);
    dst.read_rows(&gpu.stream, n_tokens, n_rows, n_rows + gap)
}

#[test]
fn rows_of_any_size_as_f16() {
    let Some(gpu) = Gpu::open() else { return };
    let sizes = [0.0, 1.0, 1e5, 1e-30, 1e-38, 65504.0, 3e38, 2f32.powi(-60), 1e-42];
    // The limits of what a thread keeps in registers, and a longer row.
    for k in [64, 192, 1280, 4096, 4160, 8192, 16384, 16448] {
        for (n_tokens, gap) in [(1, 0), (7, 4), (8, 0), (9, 64), (27, 8)] {
            let mut sample = Sample::new(k as u64);
            let mut rows: Vec<Vec<f32>> = (0..n_tokens)
                .map(|t| sample.values(k, sizes[t % sizes.len()]))
                .collect();
            // One value that is no number, or none that is, in some rows.
            for (t, bad) in [
                (1, f32::INFINITY),
                (3, f32::NAN),
                (5, f32::NEG_INFINITY),
                (10, f32::NAN),
            ] {
                if let Some(row) = rows.get_mut(t) {
                    row[t * 5 % k] = bad;
                }
            }
            if let Some(row) = rows.get_mut(12) {
                row.fill(f32::NAN);
            }
            // A largest value at the very end, and exactly a power of two.
            rows[0][k - 1] = -4.0;
            let case = format!("{n_tokens} rows of {k}, {gap} apart");
            let (x, y) = (gpu.input(&strided(&rows, k + gap)), H16Output::new(&gpu, n_tokens, k));
            let args = H16Args {
                x: x.raw(),
                x_stride: (k + gap) as i64,
                y: y.raw(),
                k: k as i32,
                n_tokens: n_tokens as i32,
            };
            for pdl in [false, true] {
                y.reset(&gpu.stream);
                to_h16(&args, gpu.launch(pdl)).unwrap_or_else(|e| panic!("{case}: {e}"));
                y.expect(&gpu.stream, &rows.concat(), &case);
            }
        }
    }
}

#[test]
fn every_type_and_shape() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    for dtype in MM_WEIGHT_TYPES {
        // One step, an odd number of steps and of blocks, rows that start anywhere modulo 16.
        for k in [64, 192, 256, 1280, 4096] {
            if k % dtype.block_len() != 0 {
                continue;
            }
            for n_rows in [1, 100, 128, 300] {
                let mut sample = Sample::new((k + n_rows) as u64);
                let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
                let kinds = kinds(&mut sample, k);
                let want = mm_prefill(&w.matrix(), &values(&kinds));
                for n_tokens in [1, 33, 64, 100, 333, 1000] {
                    let x = Activations::repeated(&gpu, &kinds, n_tokens);
                    for launch in launches(&gpu) {
                        let case = format!(
                            "{} {n_rows}x{k}, {n_tokens} tokens, for {}",
                            dtype.name(),
                            launch.sm_count
                        );
                        let got = product(&gpu, &case, &x.arguments(&w), launch, n_tokens % 4);
                        expect_tokens(&case, &got, n_rows, &want);
                    }
                }
            }
        }
    }
}

/// The products of one token do not depend on how many others there are, if they are too short for two blocks to share.
#[test]
fn a_token_alone_has_the_same_bits() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    for dtype in MM_WEIGHT_TYPES {
        let (n_rows, k) = (200, 768);
        let mut sample = Sample::new(5);
        let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
        let kinds = kinds(&mut sample, k);
        let all = Activations::repeated(&gpu, &kinds, 300);
        for launch in launches(&gpu) {
            let got = product(&gpu, dtype.name(), &all.arguments(&w), launch, 0);
            for t in [0, 8, 35] {
                let one = Activations::new(&gpu, &kinds[t..=t]);
                let alone = product(&gpu, dtype.name(), &one.arguments(&w), gpu.launch(false), 0);
                let among = &got[t * n_rows..][..n_rows];
                assert!(bytes(&alone) == bytes(among), "{}: token {t}", dtype.name());
            }
        }
    }
}

#[test]
fn rows_of_weights_may_lie_apart() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    for dtype in MM_WEIGHT_TYPES {
        let (n_rows, k) = (150, 1280);
        let mut sample = Sample::new(6);
        let w = Weights::apart(&gpu, &mut sample, dtype, (n_rows, k), 48);
        let kinds = kinds(&mut sample, k);
        let x = Activations::repeated(&gpu, &kinds, 70);
        let got = product(&gpu, dtype.name(), &x.arguments(&w), gpu.launch(true), 0);
        expect_tokens(dtype.name(), &got, n_rows, &mm_prefill(&w.matrix(), &values(&kinds)));
    }
}

/// More tiles than a device has multiprocessors, several times.
#[test]
fn many_rows() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    for dtype in [DType::Q4_K, DType::Q6_K, DType::F16] {
        let (n_rows, k) = (50_001, 256);
        let mut sample = Sample::new(7);
        let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
        let kinds = kinds(&mut sample, k);
        let x = Activations::repeated(&gpu, &kinds, 100);
        let got = product(&gpu, dtype.name(), &x.arguments(&w), gpu.launch(true), 0);
        expect_tokens(dtype.name(), &got, n_rows, &mm_prefill(&w.matrix(), &values(&kinds)));
    }
}

/// The residual under the output, elsewhere, or missing; with and without bias.
#[test]
fn bias_and_residual() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    let (n_rows, k, gap) = (300, 768, 5);
    for dtype in MM_WEIGHT_TYPES {
        let mut sample = Sample::new(8);
        let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
        let kinds = kinds(&mut sample, k);
        let bias = sample.values(n_rows, 1.0);
        let bias_dev = gpu.input(&bias);
        // As large as the largest results and as the smallest.
        let res_kinds: Vec<Vec<f32>> = (0..PERIOD).map(|t| sample.values(n_rows, [1.0, 1e4][t % 2])).collect();
        let res_bounded: Vec<Bounded> = res_kinds.iter().map(|row| Bounded::exact(row)).collect();
        for n_tokens in [65, 400] {
            let x = Activations::repeated(&gpu, &kinds, n_tokens);
            let res: Vec<Vec<f32>> = res_kinds.iter().cycle().take(n_tokens).cloned().collect();
            let res_all = strided(&res, n_rows + gap);
            let res_dev = gpu.input(&res_all);
            for (with_bias, with_res, in_place) in [
                (true, false, false),
                (false, true, false),
                (false, true, true),
                (true, true, true),
            ] {
                let want = mm_res(
                    &w.matrix(),
                    &values(&kinds),
                    with_bias.then(|| Bounded::exact(&bias)).as_ref(),
                    with_res.then_some(&res_bounded[..]),
                );
                for launch in launches(&gpu) {
                    let case = format!(
                        "{}, {n_tokens} tokens, bias {with_bias}, residual {with_res}, in place {in_place}, for {}",
                        dtype.name(),
                        launch.sm_count
                    );
                    let dst: Output<f32> = if in_place {
                        gpu.output_over(&res_all.iter().map(|&v| Some(v)).collect::<Vec<_>>())
                    } else {
                        gpu.output(res_all.len())
                    };
                    let res = if in_place { dst.raw() } else { res_dev.raw() };
                    let args = MmArgs {
                        dst: dst.raw(),
                        dst_stride: (n_rows + gap) as i64,
                        bias: if with_bias { bias_dev.raw() } else { std::ptr::null() },
                        res: if with_res { res } else { std::ptr::null() },
                        res_stride: (n_rows + gap) as i64,
                        ..x.arguments(&w)
                    };
                    run(&case, &args, launch);
                    let got = dst.read_rows(&gpu.stream, n_tokens, n_rows, n_rows + gap);
                    expect_tokens(&case, &got, n_rows, &want);
                }
            }
        }
    }
}

#[test]
fn every_gated_unit() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    const KINDS: [Glu; 5] = [Glu::Reglu, Glu::Geglu, Glu::Swiglu, Glu::GegluErf, Glu::GegluQuick];
    for dtype in MM_WEIGHT_TYPES {
        for k in [192, 2048].into_iter().filter(|k| k % dtype.block_len() == 0) {
            // A tile has 64 rows of either matrix.
            for n_rows in [1, 64, 150] {
                let mut sample = Sample::new((k + n_rows) as u64);
                let [gate, up] = [(); 2].map(|_| Weights::new(&gpu, &mut sample, dtype, (n_rows, k)));
                // Results beyond f32 would be infinite.
                let sizes = [1.0, 30.0, 2e-6, 1e5, 0.0, 1e-12];
                let kinds: Vec<H16Row> = (0..PERIOD)
                    .map(|i| H16Row::new(&sample.values(k, sizes[i % sizes.len()])))
                    .collect();
                for kind in KINDS {
                    let want = geglu_ffn(kind, &gate.matrix(), &up.matrix(), &values(&kinds));
                    for n_tokens in [33, 400] {
                        let x = Activations::repeated(&gpu, &kinds, n_tokens);
                        let args = MmArgs {
                            glu: kind as i32,
                            w2: up.device.raw().cast_const().cast(),
                            ..x.arguments(&gate)
                        };
                        for launch in launches(&gpu) {
                            let case = format!(
                                "{} {n_rows}x{k} {kind:?}, {n_tokens} tokens, for {}",
                                dtype.name(),
                                launch.sm_count
                            );
                            let got = product(&gpu, &case, &args, launch, 3);
                            expect_tokens(&case, &got, n_rows, &want);
                        }
                    }
                }
            }
        }
    }
}

/// A row that is no number spoils its own token alone.
#[test]
fn what_is_no_number_stays_with_its_token() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    let (n_rows, k, n_tokens) = (140, 256, 90);
    for dtype in [DType::Q4_K, DType::Q8_0, DType::BF16] {
        let mut sample = Sample::new(9);
        let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
        let rows: Vec<Vec<f32>> = (0..n_tokens).map(|_| sample.values(k, 1.0)).collect();
        let f16 = |rows: &[Vec<f32>]| -> Vec<H16Row> { rows.iter().map(|row| H16Row::new(row)).collect() };
        let clean = Activations::new(&gpu, &f16(&rows));
        let want = product(&gpu, dtype.name(), &clean.arguments(&w), gpu.launch(true), 0);
        let mut spoilt = rows.clone();
        spoilt[17][k - 1] = f32::NAN;
        spoilt[64].fill(f32::INFINITY);
        let spoilt = Activations::new(&gpu, &f16(&spoilt));
        let got = product(&gpu, dtype.name(), &spoilt.arguments(&w), gpu.launch(true), 0);
        for (t, (got, want)) in got.chunks(n_rows).zip(want.chunks(n_rows)).enumerate() {
            match t {
                17 => assert!(got.iter().all(|v| v.is_nan()), "{}: NaN was lost", dtype.name()),
                64 => assert!(got.iter().all(|v| !v.is_finite()), "{}: Inf was lost", dtype.name()),
                _ => assert!(bytes(got) == bytes(want), "{}: token {t} is spoilt too", dtype.name()),
            }
        }
    }
}

/// B12: the same bits in each run, also when the conversion before is still running when the product starts.
#[test]
fn the_same_bits_in_every_run() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    let (n_rows, k, n_tokens) = (640, 2048, 200);
    for dtype in [DType::Q4_K, DType::Q8_0, DType::Q6_K, DType::MXFP4] {
        let mut sample = Sample::new(10);
        let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
        let x = sample.values(n_tokens * k, 1.0);
        let x_dev = gpu.input(&x);
        let (xh, dst) = (H16Output::new(&gpu, n_tokens, k), gpu.output::<f32>(n_tokens * n_rows));
        let convert = H16Args {
            x: x_dev.raw(),
            x_stride: k as i64,
            y: xh.raw(),
            k: k as i32,
            n_tokens: n_tokens as i32,
        };
        let rows: Vec<H16Row> = x.chunks(k).map(H16Row::new).collect();
        let args = MmArgs {
            dst: dst.raw(),
            dst_stride: n_rows as i64,
            ..arguments(&w, xh.raw(), n_tokens)
        };
        let mut first = None;
        for round in 0..100 {
            // Stale rows of the round before must not be what is read.
            xh.reset(&gpu.stream);
            dst.reset(&gpu.stream);
            to_h16(&convert, gpu.launch(round % 4 != 0)).unwrap();
            run(dtype.name(), &args, gpu.launch(round % 4 != 0));
            let got = bytes(&dst.read(&gpu.stream));
            assert!(
                *first.get_or_insert(got.clone()) == got,
                "{}: round {round}",
                dtype.name()
            );
        }
        let got = dst.read(&gpu.stream);
        for (t, want) in mm_prefill(&w.matrix(), &values(&rows[..PERIOD])).iter().enumerate() {
            expect(dtype.name(), &format!("token {t}"), &got[t * n_rows..][..n_rows], want);
        }
    }
}

/// What the comparisons above must notice.
#[test]
fn planted_faults_are_noticed() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    let (n_rows, k) = (130, 768);
    for dtype in MM_WEIGHT_TYPES {
        let mut sample = Sample::new(11);
        let w = Weights::new(&gpu, &mut sample, dtype, (n_rows, k));
        let rows: Vec<H16Row> = (0..9).map(|_| H16Row::new(&sample.values(k, 1.0))).collect();
        let want = mm_prefill(&w.matrix(), &values(&rows));
        let (x, scale) = lay_out(&rows);
        let right = |x: &[u8], scale: &[f32], change: fn(&mut MmArgs)| {
            let (x_dev, scale) = (gpu.input(x), gpu.input(scale));
            let x = H16 {
                x: x_dev.raw().cast(),
                scale: scale.raw(),
            };
            let mut args = arguments(&w, x, rows.len());
            change(&mut args);
            let dst = gpu.output::<f32>(rows.len() * n_rows);
            (args.dst, args.dst_stride) = (dst.raw(), n_rows as i64);
            run(dtype.name(), &args, gpu.launch(true));
            let got = dst.read(&gpu.stream);
            got.chunks(n_rows)
                .zip(&want)
                .all(|(got, want)| compare(got, want).is_ok())
        };
        assert!(right(&x, &scale, |_| {}), "{}", dtype.name());
        // Two words of a piece of token 3.
        let mut exchanged = x.clone();
        let at = H16::offset(3, 64, rows.len());
        exchanged[at..at + 8].rotate_left(4);
        // Its pieces where another swizzle would have them.
        let mut swizzled = x.clone();
        for i in 0..k {
            let (a, b) = (H16::offset(3, i, rows.len()), H16::offset(3, i ^ 2, rows.len()));
            swizzled[a..a + 2].copy_from_slice(&x[b..b + 2]);
        }
        let mut doubled = scale.clone();
        doubled[8] *= 2.0;
        let faults: [(&str, bool); 7] = [
            ("two exchanged pairs", right(&exchanged, &scale, |_| {})),
            ("another order of pieces", right(&swizzled, &scale, |_| {})),
            ("a scale off by 2", right(&x, &doubled, |_| {})),
            ("a lost row", right(&x, &scale, |a| a.n_rows -= 1)),
            ("a lost token", right(&x, &scale, |a| a.n_tokens -= 1)),
            ("a lost step", right(&x, &scale, |a| a.k -= 256)),
            ("one row for all", right(&x, &scale, |a| a.row_bytes = 0)),
        ];
        for (what, unnoticed) in faults {
            assert!(!unnoticed, "{}: {what} went unseen", dtype.name());
        }
    }
}

#[test]
fn what_has_no_kernel_is_refused_without_a_launch() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    let mut sample = Sample::new(12);
    let w = Weights::new(&gpu, &mut sample, DType::Q8_0, (16, 64));
    let x = Activations::new(&gpu, &kinds(&mut sample, 64)[..9]);
    let dst = gpu.output::<f32>(9 * 16);
    let args = MmArgs {
        dst: dst.raw(),
        dst_stride: 16,
        ..x.arguments(&w)
    };
    let with = |change: fn(&mut MmArgs)| {
        let mut args = args;
        change(&mut args);
        args
    };
    for (what, args) in [
        ("a type", with(|a| a.ty = DType::F32 as i32)),
        ("no whole steps", with(|a| a.k = 96)),
        ("no values", with(|a| a.k = 0)),
        ("another activation", with(|a| a.glu = 3)),
        ("a unit without up", with(|a| a.glu = Glu::Swiglu as i32)),
        (
            "a unit with a residual",
            with(|a| (a.glu, a.w2, a.res) = (Glu::Swiglu as i32, a.w, a.dst)),
        ),
        ("no rows", with(|a| a.n_rows = 0)),
        ("no tokens", with(|a| a.n_tokens = 0)),
        ("no weights", with(|a| a.w = std::ptr::null())),
        ("weights not on 16 bytes", with(|a| a.w = a.w.wrapping_byte_add(2))),
        ("rows of weights on odd addresses", with(|a| a.row_bytes += 1)),
        ("rows not on 128 bytes", with(|a| a.x.x = a.x.x.wrapping_byte_add(64))),
        ("no scales", with(|a| a.x.scale = std::ptr::null_mut())),
        ("no result", with(|a| a.dst = std::ptr::null_mut())),
    ] {
        let refused = mm(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
    assert!(
        dst.read(&gpu.stream).iter().all(|v| v.is_nan()),
        "something was launched"
    );
}

#[test]
fn rows_that_cannot_be_converted_are_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let (x, y) = (gpu.input(&[1f32; 256]), H16Output::new(&gpu, 2, 64));
    let args = H16Args {
        x: x.raw(),
        x_stride: 64,
        y: y.raw(),
        k: 64,
        n_tokens: 2,
    };
    for (what, args) in [
        ("no whole steps", H16Args { k: 96, ..args }),
        ("no values", H16Args { k: 0, ..args }),
        ("no tokens", H16Args { n_tokens: 0, ..args }),
        ("rows not on 16 bytes", H16Args { x_stride: 65, ..args }),
        (
            "an input not on 16 bytes",
            H16Args {
                x: args.x.wrapping_add(1),
                ..args
            },
        ),
        (
            "an output not on 128 bytes",
            H16Args {
                y: H16 {
                    x: args.y.x.wrapping_byte_add(64),
                    ..args.y
                },
                ..args
            },
        ),
        ("no output", H16Args { y: H16::NONE, ..args }),
    ] {
        let refused = to_h16(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
    gpu.stream.synchronize().unwrap();
}
