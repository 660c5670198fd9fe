//! frt_moe_route, frt_moe_to_h16 and frt_moe_mm on a GPU: routes and rows number by number, products against the oracle, between
//! guard words. Skipped where the device has no tensor-core kernels.
//!
//! B32: ids that are no expert, and repeated ones, are in most cases.

mod gpu;

use ggml_flashrt::kernel::cudart::Buffer;
use ggml_flashrt::kernel::{
    moe_max_rows, moe_mm, moe_route, moe_to_h16, CudaError, Glu, MoeH16Args, MoeMmArgs, MoeRouteArgs, MoeRows, H16,
    MM_WEIGHT_TYPES, MOE_MAX_EXPERTS,
};
use ggml_flashrt::reference::h16::H16Row;
use ggml_flashrt::reference::moe::{moe_ffn, moe_prefill, Route};
use ggml_flashrt::reference::quant::{DType, Matrix};
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::Bounded;
use gpu::{bytes, expect, strided, Gpu, Output};

/// How tokens are spread.
#[derive(Debug, Clone, Copy)]
enum Spread {
    /// Any expert, now and then none.
    Random,
    /// All pairs to the last one.
    One,
    /// Every third expert.
    Few,
    /// Nobody.
    None,
}

/// `n_used` ids for each token, and between tokens numbers that nobody may read as ids.
struct Ids {
    /// One for each pair.
    values: Vec<i32>,
    device: Buffer<i32>,
    stride: usize,
    n_tokens: usize,
    n_used: usize,
    n_experts: usize,
}

impl Ids {
    const GAP: usize = 3;

    fn new(
        gpu: &Gpu,
        sample: &mut Sample,
        spread: Spread,
        (n_tokens, n_used): (usize, usize),
        n_experts: usize,
    ) -> Ids {
        let none = [-1, n_experts as i32, i32::MIN, i32::MAX];
        let mut id = || match spread {
            Spread::Random if sample.below(16) == 0 => sample.pick(&none),
            Spread::Random => sample.below(n_experts) as i32,
            Spread::One => n_experts as i32 - 1,
            Spread::Few => (sample.below(n_experts.div_ceil(3)) * 3) as i32,
            Spread::None => sample.pick(&none),
        };
        let values: Vec<i32> = (0..n_tokens * n_used).map(|_| id()).collect();
        let padded: Vec<i32> = values
            .chunks(n_used)
            .flat_map(|ids| ids.iter().copied().chain([0; Ids::GAP]))
            .collect();
        Ids {
            values,
            device: gpu.input(&padded),
            stride: n_used + Ids::GAP,
            n_tokens,
            n_used,
            n_experts,
        }
    }

    fn places(&self) -> usize {
        moe_max_rows(self.values.len() as i32, self.n_experts as i32) as usize
    }
}

/// The route on the device, poisoned.
struct RouteOutput {
    rows: Output<i32>,
    begin: Output<i32>,
    count: Output<i32>,
}

impl RouteOutput {
    /// Made from the ids, and checked number by number.
    fn new(gpu: &Gpu, ids: &Ids, pdl: bool, case: &str) -> RouteOutput {
        let out = RouteOutput {
            rows: gpu.output(ids.places()),
            begin: gpu.output(ids.n_experts + 1),
            count: gpu.output(ids.n_experts),
        };
        let args = MoeRouteArgs {
            ids: ids.device.raw(),
            ids_stride: ids.stride as i64,
            n_tokens: ids.n_tokens as i32,
            n_used: ids.n_used as i32,
            n_experts: ids.n_experts as i32,
            out: out.raw(),
        };
        moe_route(&args, gpu.launch(pdl)).unwrap_or_else(|e| panic!("{case}: {e}"));
        let want = Route::new(&ids.values, ids.n_experts);
        assert_eq!(out.begin.read(&gpu.stream), want.begin, "{case}: first places");
        assert_eq!(out.count.read(&gpu.stream), want.count, "{case}: counts");
        let rows = out.rows.read(&gpu.stream);
        let (used, rest) = rows.split_at(want.rows.len());
        assert_eq!(used, want.rows, "{case}: pairs");
        // The poison, which is -1 too.
        assert!(
            rest.iter().all(|&pair| pair == -1),
            "{case}: wrote behind the last place"
        );
        out
    }

    fn raw(&self) -> MoeRows {
        MoeRows {
            rows: self.rows.raw(),
            begin: self.begin.raw(),
            count: self.count.raw(),
        }
    }
}

/// Activations in the order of the route.
struct Rows {
    x: Output<u8>,
    scale: Output<f32>,
    /// What they stand for, of each pair.
    values: Vec<Bounded>,
}

impl Rows {
    /// Converted on the device, and checked bit by bit; places without a pair must keep their poison, which is NaN.
    fn new(
        gpu: &Gpu,
        sample: &mut Sample,
        ids: &Ids,
        route: &RouteOutput,
        (k, per_slot): (usize, bool),
        case: &str,
    ) -> Rows {
        let n_rows = if per_slot { ids.values.len() } else { ids.n_tokens };
        // Rows of very different size: each has a scale of its own.
        let rows: Vec<Vec<f32>> = (0..n_rows).map(|i| sample.values(k, [1.0, 3e4, 2e-6][i % 3])).collect();
        let f16: Vec<H16Row> = (0..ids.values.len())
            .map(|pair| H16Row::new(&rows[if per_slot { pair } else { pair / ids.n_used }]))
            .collect();
        let (x_dev, places) = (gpu.input(&strided(&rows, k + 4)), ids.places());
        let out = Rows {
            x: gpu.output(H16::bytes(k, places)),
            scale: gpu.output(places),
            values: f16.iter().map(|row| Bounded::exact(&row.dequantize())).collect(),
        };
        let args = MoeH16Args {
            x: x_dev.raw(),
            x_stride: k as i64 + 4,
            y: out.raw(),
            route: route.raw(),
            k: k as i32,
            n_pairs: ids.values.len() as i32,
            n_used: ids.n_used as i32,
            n_experts: ids.n_experts as i32,
            per_slot: per_slot.into(),
        };
        moe_to_h16(&args, gpu.launch(true)).unwrap_or_else(|e| panic!("{case}: {e}"));
        let (got, scales) = (out.x.read(&gpu.stream), bytes(&out.scale.read(&gpu.stream)));
        let mut want = vec![0xff; got.len()];
        let mut want_scales = vec![0xff; scales.len()];
        let order = Route::new(&ids.values, ids.n_experts).rows;
        for (place, &pair) in order.iter().enumerate().filter(|(_, &pair)| pair >= 0) {
            let row = &f16[pair as usize];
            want_scales[4 * place..][..4].copy_from_slice(&row.scale.to_le_bytes());
            for (i, v) in row.values.iter().enumerate() {
                want[H16::offset(place, i, places)..][..2].copy_from_slice(&v.to_le_bytes());
            }
        }
        assert_eq!(scales, want_scales, "{case}: scales");
        assert!(got == want, "{case}: f16 rows");
        out
    }

    fn raw(&self) -> H16 {
        H16 {
            x: self.x.raw().cast(),
            scale: self.scale.raw(),
        }
    }
}

/// Matrices of experts on both sides.
struct Experts {
    dtype: DType,
    bytes: Vec<u8>,
    device: Buffer<u8>,
    n_rows: usize,
    k: usize,
    n_experts: usize,
}

impl Experts {
    fn new(gpu: &Gpu, sample: &mut Sample, dtype: DType, (k, n_rows): (usize, usize), n_experts: usize) -> Experts {
        let bytes = sample.weights(dtype, k * n_rows * n_experts);
        // Up to 15 bytes behind the last row may be read.
        let mut padded = bytes.clone();
        padded.extend([0xff; 16]);
        Experts {
            dtype,
            device: gpu.input(&padded),
            bytes,
            n_rows,
            k,
            n_experts,
        }
    }

    fn expert_bytes(&self) -> usize {
        self.bytes.len() / self.n_experts
    }

    fn matrices(&self) -> Vec<Matrix<'_>> {
        let matrix = |bytes| Matrix {
            dtype: self.dtype,
            bytes,
            row_bytes: self.expert_bytes() / self.n_rows,
            n_rows: self.n_rows,
            k: self.k,
        };
        self.bytes.chunks(self.expert_bytes()).map(matrix).collect()
    }
}

fn arguments(w: &Experts, w2: Option<(&Experts, Glu)>, ids: &Ids, route: &RouteOutput, x: &Rows) -> MoeMmArgs {
    MoeMmArgs {
        ty: w.dtype as i32,
        glu: w2.map_or(Glu::None, |(_, glu)| glu) as i32,
        w: w.device.raw().cast_const().cast(),
        w2: w2.map_or(std::ptr::null(), |(w2, _)| w2.device.raw().cast_const().cast()),
        row_bytes: (w.expert_bytes() / w.n_rows) as i64,
        expert_bytes: w.expert_bytes() as i64,
        n_rows: w.n_rows as i32,
        k: w.k as i32,
        n_pairs: ids.values.len() as i32,
        n_experts: w.n_experts as i32,
        x: x.raw(),
        route: route.raw(),
        dst: std::ptr::null_mut(),
        dst_stride: 0,
    }
}

/// Runs a product, holds it against the oracle, and runs it again for the same bits.
fn expect_product(gpu: &Gpu, args: &MoeMmArgs, want: &[Option<Bounded>], case: &str) {
    let (n_rows, stride) = (args.n_rows as usize, args.n_rows as usize + 5);
    let dst = gpu.output::<f32>(want.len() * stride);
    let args = MoeMmArgs {
        dst: dst.raw(),
        dst_stride: stride as i64,
        ..*args
    };
    moe_mm(&args, gpu.launch(true)).unwrap_or_else(|e| panic!("{case}: {e}"));
    let got = dst.read_rows(&gpu.stream, want.len(), n_rows, stride);
    for (pair, (got, want)) in got.chunks(n_rows).zip(want).enumerate() {
        match want {
            Some(want) => expect(case, &format!("pair {pair}"), got, want),
            None => assert!(
                bytes(got).iter().all(|&b| b == 0xff),
                "{case}: pair {pair} has no expert, and its row is written"
            ),
        }
    }
    for pdl in [true, false] {
        dst.reset(&gpu.stream);
        moe_mm(&args, gpu.launch(pdl)).unwrap();
        let again = dst.read_rows(&gpu.stream, want.len(), n_rows, stride);
        assert!(bytes(&again) == bytes(&got), "{case}: other bits in another run");
    }
}

#[test]
fn routes_of_any_spread() {
    let Some(gpu) = Gpu::open() else { return };
    for n_experts in [1, 2, 8, 37, 128, 1000, MOE_MAX_EXPERTS] {
        for spread in [Spread::Random, Spread::One, Spread::Few, Spread::None] {
            for shape in [(1, 1), (5, 2), (33, 8), (300, 6)] {
                let mut sample = Sample::new(n_experts as u64);
                let ids = Ids::new(&gpu, &mut sample, spread, shape, n_experts);
                let case = format!("{n_experts} experts, {spread:?}, {shape:?}");
                RouteOutput::new(&gpu, &ids, shape.0 % 2 == 0, &case);
            }
        }
    }
}

#[test]
fn every_type_and_spread() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    for dtype in [DType::Q4_K, DType::Q8_0, DType::Q6_K, DType::F16] {
        for k in [64, 192, 768].into_iter().filter(|k| k % dtype.block_len() == 0) {
            // Few pairs for each expert take narrow tiles, many wide ones.
            for (n_experts, spread, shape) in [
                (1, Spread::Random, (70, 1)),
                (8, Spread::One, (130, 2)),
                (8, Spread::Random, (230, 2)),
                (8, Spread::None, (9, 2)),
                (37, Spread::Few, (40, 3)),
                (128, Spread::Random, (64, 8)),
            ] {
                for per_slot in [false, true] {
                    let mut sample = Sample::new(k as u64);
                    let case = format!("{} k {k}, {n_experts} experts, {spread:?}, {per_slot}", dtype.name());
                    let ids = Ids::new(&gpu, &mut sample, spread, shape, n_experts);
                    let route = RouteOutput::new(&gpu, &ids, true, &case);
                    let x = Rows::new(&gpu, &mut sample, &ids, &route, (k, per_slot), &case);
                    // No multiple of a tile's rows.
                    let w = Experts::new(&gpu, &mut sample, dtype, (k, 75), n_experts);
                    let want = moe_prefill(&w.matrices(), &ids.values, &x.values);
                    expect_product(&gpu, &arguments(&w, None, &ids, &route, &x), &want, &case);
                }
            }
        }
    }
}

#[test]
fn every_unit() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    const KINDS: [Glu; 5] = [Glu::Reglu, Glu::Geglu, Glu::Swiglu, Glu::GegluErf, Glu::GegluQuick];
    for dtype in [DType::Q4_K, DType::Q8_0, DType::Q6_K, DType::F16] {
        for (i, kind) in KINDS.into_iter().enumerate() {
            let k = if dtype.block_len() == 256 {
                768
            } else {
                [64, 192][i % 2]
            };
            // Narrow tiles, then wide ones.
            for (n_experts, shape) in [(37, (40, 4)), (8, (230, 2))] {
                let mut sample = Sample::new(i as u64);
                let case = format!("{} k {k}, {kind:?}, {n_experts} experts", dtype.name());
                let ids = Ids::new(&gpu, &mut sample, Spread::Random, shape, n_experts);
                let route = RouteOutput::new(&gpu, &ids, true, &case);
                let x = Rows::new(&gpu, &mut sample, &ids, &route, (k, false), &case);
                let [gate, up] = [(); 2].map(|_| Experts::new(&gpu, &mut sample, dtype, (k, 75), n_experts));
                let want = moe_ffn(kind, &gate.matrices(), &up.matrices(), &ids.values, &x.values);
                let args = arguments(&gate, Some((&up, kind)), &ids, &route, &x);
                expect_product(&gpu, &args, &want, &case);
            }
        }
    }
}

/// One small shape of each of the others.
#[test]
fn every_other_type() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    for dtype in MM_WEIGHT_TYPES {
        let mut sample = Sample::new(41);
        let (k, n_experts) = (256, 5);
        let ids = Ids::new(&gpu, &mut sample, Spread::Random, (31, 2), n_experts);
        let case = dtype.name();
        let route = RouteOutput::new(&gpu, &ids, true, case);
        let x = Rows::new(&gpu, &mut sample, &ids, &route, (k, true), case);
        let [gate, up] = [(); 2].map(|_| Experts::new(&gpu, &mut sample, dtype, (k, 40), n_experts));
        let want = moe_prefill(&gate.matrices(), &ids.values, &x.values);
        expect_product(&gpu, &arguments(&gate, None, &ids, &route, &x), &want, case);
        let want = moe_ffn(Glu::Swiglu, &gate.matrices(), &up.matrices(), &ids.values, &x.values);
        let args = arguments(&gate, Some((&up, Glu::Swiglu)), &ids, &route, &x);
        expect_product(&gpu, &args, &want, case);
    }
}

#[test]
fn what_has_no_kernel_is_refused_without_a_launch() {
    let Some(gpu) = Gpu::with_mat_muls() else { return };
    let mut sample = Sample::new(9);
    let ids = Ids::new(&gpu, &mut sample, Spread::Random, (9, 2), 4);
    let route = RouteOutput::new(&gpu, &ids, true, "refused");
    let x = Rows::new(&gpu, &mut sample, &ids, &route, (64, false), "refused");
    let w = Experts::new(&gpu, &mut sample, DType::F16, (64, 16), 4);
    let dst = gpu.output::<f32>(18 * 16);
    let args = MoeMmArgs {
        dst: dst.raw(),
        dst_stride: 16,
        ..arguments(&w, None, &ids, &route, &x)
    };
    let with = |change: fn(&mut MoeMmArgs)| {
        let mut args = args;
        change(&mut args);
        args
    };
    for (what, args) in [
        ("a type", with(|a| a.ty = DType::F32 as i32)),
        ("no whole pieces of 64", with(|a| a.k = 96)),
        ("another activation", with(|a| a.glu = 3)),
        ("no experts", with(|a| a.n_experts = 0)),
        ("too many experts", with(|a| a.n_experts = MOE_MAX_EXPERTS as i32 + 1)),
        ("a unit without up", with(|a| a.glu = Glu::Swiglu as i32)),
        ("weights not on 16 bytes", with(|a| a.w = a.w.wrapping_byte_add(4))),
        ("no result", with(|a| a.dst = std::ptr::null_mut())),
    ] {
        let refused = moe_mm(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
    assert!(dst.read(&gpu.stream).iter().all(|v| v.is_nan()), "nothing was launched");
}
