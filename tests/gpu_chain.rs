//! A chain of dependent kernels, as in a decoder layer, repeated with and without programmatic dependent launch: a kernel that
//! starts reading before its predecessor's writes are visible gives other bits. Scales and quants of the hand-offs are
//! poisoned between repeats, so that blocks that were read too early are NaN and not last time's right values.

mod gpu;

use ggml_flashrt::kernel::cudart::Buffer;
use ggml_flashrt::kernel::{
    gemv, norm, qkv_tail, self_check, GemvArgs, GemvSeg, Glu, NormArgs, QkvPart, QkvTailArgs, Rope, RopeMode, H16, Q8,
};
use ggml_flashrt::reference::quant::DType;
use ggml_flashrt::reference::sample::Sample;
use gpu::{bytes, Gpu, Output, Q8Output};

const REPEATS: usize = 1000;
const LAYERS: usize = 4;
const N_TOKENS: usize = 2;
const N_EMBD: usize = 512;
const N_FF: usize = 1024;
const HEADS: usize = 4;
const HEAD_DIM: usize = 128;

struct Weights {
    dtype: DType,
    device: Buffer<u8>,
    n_rows: usize,
    k: usize,
}

impl Weights {
    fn new(gpu: &Gpu, sample: &mut Sample, dtype: DType, n_rows: usize, k: usize) -> Weights {
        Weights {
            dtype,
            device: gpu.input(&sample.weights(dtype, n_rows * k)),
            n_rows,
            k,
        }
    }

    fn segment(&self, dst: *mut f32) -> GemvSeg {
        GemvSeg {
            w: self.device.raw().cast_const().cast(),
            row_bytes: (self.k / self.dtype.block_len() * self.dtype.block_bytes()) as i64,
            dst,
            dst_stride: self.n_rows as i64,
            n_rows: self.n_rows as i32,
            ..GemvSeg::NONE
        }
    }

    /// One segment of these weights, reading f32 or blocks.
    fn arguments(&self, x: *const f32, xq: Q8, segment: GemvSeg) -> GemvArgs {
        GemvArgs {
            ty: self.dtype as i32,
            n_seg: 1,
            seg: [segment, GemvSeg::NONE, GemvSeg::NONE],
            k: self.k as i32,
            n_tokens: N_TOKENS as i32,
            x,
            x_stride: self.k as i64,
            xq,
            glu: Glu::None as i32,
        }
    }
}

/// Buffers of a layer. Every layer has its own, so nothing is written twice in a repeat.
struct Layer {
    y: [Output<f32>; 2],
    z: Output<f32>,
    zq: [Q8Output; 2],
    qkv: Output<f32>,
    q: Output<f32>,
    kv: Output<u16>,
    attn_out: Output<f32>,
    ff: Output<f32>,
    out: Output<f32>,
}

impl Layer {
    fn new(gpu: &Gpu) -> Layer {
        let row = || gpu.output(N_TOKENS * N_EMBD);
        Layer {
            y: [row(), row()],
            z: row(),
            zq: [(); 2].map(|_| Q8Output::new(gpu, N_TOKENS, N_EMBD)),
            qkv: gpu.output(3 * N_TOKENS * N_EMBD),
            q: row(),
            kv: gpu.output(2 * N_TOKENS * N_EMBD),
            attn_out: row(),
            ff: gpu.output(N_TOKENS * N_FF),
            out: row(),
        }
    }

    fn poison(&self, gpu: &Gpu) {
        let stream = &gpu.stream;
        self.y
            .iter()
            .chain([&self.z, &self.qkv, &self.q, &self.attn_out, &self.ff, &self.out])
            .for_each(|b| b.reset(stream));
        self.zq.iter().for_each(|b| b.reset(stream));
        self.kv.reset(stream);
    }
}

struct Model {
    weights: Vec<Weights>,
    norm_w: Buffer<f32>,
    h: Buffer<f32>,
    x: Buffer<f32>,
    pos: Buffer<i32>,
    layers: Vec<Layer>,
}

impl Model {
    fn new(gpu: &Gpu) -> Model {
        let mut sample = Sample::new(2024);
        let mut weights = |dtype, n_rows, k| Weights::new(gpu, &mut sample, dtype, n_rows, k);
        let weights = vec![
            weights(DType::Q4_K, N_EMBD, N_EMBD),
            weights(DType::Q6_K, N_EMBD, N_EMBD),
            weights(DType::Q8_0, N_FF, N_EMBD),
            weights(DType::F16, N_EMBD, N_FF),
            weights(DType::Q5_0, N_EMBD, N_FF),
        ];
        Model {
            weights,
            norm_w: gpu.input(&sample.values(N_EMBD, 1.0)),
            h: gpu.input(&sample.values(N_TOKENS * N_EMBD, 1.0)),
            x: gpu.input(&sample.values(N_TOKENS * N_EMBD, 1.0)),
            pos: gpu.input(&[3, 4]),
            layers: (0..LAYERS).map(|_| Layer::new(gpu)).collect(),
        }
    }

    fn norm(&self, h: *const f32, x: *const f32, y: &Output<f32>, z: *mut f32, zq: &Q8Output) -> NormArgs {
        let stride = N_EMBD as i64;
        NormArgs {
            h,
            h_stride: stride,
            x,
            x_stride: stride,
            w1: self.norm_w.raw(),
            w2: self.norm_w.raw(),
            y: y.raw(),
            y_stride: stride,
            z,
            z_stride: stride,
            zq: zq.raw(),
            zh: H16::NONE,
            n_rows: N_TOKENS as i32,
            n_cols: N_EMBD as i32,
            eps1: 1e-6,
            eps2: 1e-6,
        }
    }

    /// norm → Q, K, V → heads → output + residual → norm → GLU → down + residual, in every layer.
    fn run(&self, gpu: &Gpu, pdl: bool) -> Vec<u8> {
        self.layers.iter().for_each(|layer| layer.poison(gpu));
        let launch = gpu.launch(pdl);
        let [proj, attn, gate] = [0, 1, 2].map(|i| &self.weights[i]);
        let (mut h, mut x) = (self.h.raw().cast_const(), self.x.raw().cast_const());
        for (i, layer) in self.layers.iter().enumerate() {
            norm(&self.norm(h, x, &layer.y[0], layer.z.raw(), &layer.zq[0]), launch).unwrap();

            let mut args = proj.arguments(std::ptr::null(), layer.zq[0].raw(), GemvSeg::NONE);
            args.n_seg = 3;
            let part = |i: usize| layer.qkv.raw().wrapping_add(i * N_TOKENS * N_EMBD);
            args.seg = [0, 1, 2].map(|i| proj.segment(part(i)));
            gemv(&args, launch).unwrap();

            let q = QkvPart {
                src: part(0),
                src_stride: N_EMBD as i64,
                dst: layer.q.raw().cast(),
                row_bytes: 4 * N_EMBD as i64,
                head_bytes: 4 * HEAD_DIM as i64,
                n_heads: HEADS as i32,
                head_dim: HEAD_DIM as i32,
                norm_w: self.norm_w.raw(),
                eps: 1e-6,
                rope: RopeMode::Neox as i32,
                ..QkvPart::NONE
            };
            let stored = |i: usize| QkvPart {
                src: part(i),
                dst: layer.kv.raw().wrapping_add((i - 1) * N_TOKENS * N_EMBD).cast(),
                row_bytes: 2 * N_EMBD as i64,
                head_bytes: 2 * HEAD_DIM as i64,
                dst_type: DType::F16 as i32,
                ..q
            };
            let rope = Rope {
                pos: self.pos.raw(),
                n_dims: HEAD_DIM as i32,
                freq_base: 10000.0,
                ..Rope::NONE
            };
            let args = QkvTailArgs {
                part: [q, stored(1), stored(2)],
                n_parts: 3,
                n_tokens: N_TOKENS as i32,
                rope,
            };
            qkv_tail(&args, launch).unwrap();

            // Without a hand-off: the mat-vec quantises what the kernel before it wrote.
            let segment = GemvSeg {
                res: layer.z.raw(),
                res_stride: N_EMBD as i64,
                ..attn.segment(layer.attn_out.raw())
            };
            gemv(&attn.arguments(layer.q.raw(), Q8::NONE, segment), launch).unwrap();

            norm(
                &self.norm(
                    layer.attn_out.raw(),
                    layer.y[0].raw(),
                    &layer.y[1],
                    std::ptr::null_mut(),
                    &layer.zq[1],
                ),
                launch,
            )
            .unwrap();

            let mut args = gate.arguments(std::ptr::null(), layer.zq[1].raw(), GemvSeg::NONE);
            args.n_seg = 2;
            args.seg[0] = gate.segment(layer.ff.raw());
            args.seg[1] = gate.segment(std::ptr::null_mut());
            args.glu = Glu::Geglu as i32;
            gemv(&args, launch).unwrap();

            // F16 weights read the GLU's result as it is, Q5_0 quantises it.
            let down = &self.weights[3 + i % 2];
            let segment = GemvSeg {
                res: layer.y[1].raw(),
                res_stride: N_EMBD as i64,
                ..down.segment(layer.out.raw())
            };
            gemv(&down.arguments(layer.ff.raw(), Q8::NONE, segment), launch).unwrap();
            (h, x) = (layer.out.raw(), layer.y[1].raw());
        }
        let last = &self.layers[LAYERS - 1];
        let out = last.out.read(&gpu.stream);
        assert!(
            out.iter().all(|v| v.is_finite()),
            "pdl {pdl}: a value that was not written came through"
        );
        let mut all = bytes(&out);
        self.layers
            .iter()
            .for_each(|layer| all.extend(bytes(&layer.kv.read(&gpu.stream))));
        all
    }
}

#[test]
fn dependent_kernels_give_the_same_bits_with_and_without_pdl() {
    let Some(gpu) = Gpu::open() else { return };
    let model = Model::new(&gpu);
    let want = model.run(&gpu, false);
    for repeat in 0..REPEATS {
        assert!(model.run(&gpu, repeat % 8 != 7) == want, "repeat {repeat} differs");
    }
}

#[test]
fn the_self_check_passes() {
    let Some(_gpu) = Gpu::open() else { return };
    self_check(0).unwrap();
}

#[test]
fn the_self_check_names_a_device_that_is_not_there() {
    let Some(_gpu) = Gpu::open() else { return };
    let why = self_check(1000).unwrap_err();
    assert!(
        why.contains("device 1000") && why.contains("cudaErrorInvalidDevice"),
        "{why}"
    );
    self_check(0).expect("the failure left nothing behind");
}
