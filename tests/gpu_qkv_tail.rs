//! frt_qkv_tail on a GPU: norm, RoPE, scale and store of several parts against the oracle.

mod gpu;

use ggml_flashrt::kernel::cudart::Buffer;
use ggml_flashrt::kernel::{qkv_tail, CudaError, QkvPart, QkvTailArgs, Rope, RopeMode};
use ggml_flashrt::reference::qkv_gemv::Tail;
use ggml_flashrt::reference::quant::DType;
use ggml_flashrt::reference::rope::Params;
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::Bounded;
use gpu::{expect, strided, wide, Gpu, Output};
use half::{bf16, f16};

/// How the rows of a destination are found.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    /// Row = token.
    Token,
    I32,
    I64,
}

#[derive(Debug, Clone, Copy)]
struct Part {
    n_heads: usize,
    head_dim: usize,
    norm: bool,
    mode: RopeMode,
    scale: f32,
    stored_as: DType,
    rows: Rows,
}

#[derive(Debug, Clone)]
struct Case {
    n_tokens: usize,
    parts: Vec<Part>,
    n_dims: usize,
    freq_factors: bool,
    /// `ext_factor` 0 where this is false.
    yarn: bool,
    seed: u64,
}

/// Rows of every destination, more than tokens.
const CACHE_ROWS: usize = 24;

/// A part's memory.
struct Stored {
    src: Vec<Vec<f32>>,
    src_dev: Buffer<f32>,
    norm_w: Vec<f32>,
    norm_w_dev: Buffer<f32>,
    rows: Vec<usize>,
    rows_i32: Buffer<i32>,
    rows_i64: Buffer<i64>,
    /// As 16-bit words: f32 takes two.
    dst: Output<u16>,
    row_words: usize,
}

fn words(dtype: DType) -> usize {
    dtype.block_bytes() / 2
}

impl Case {
    fn positions(&self) -> Vec<i32> {
        (0..self.n_tokens as i32).map(|t| 37 + 301 * t).collect()
    }

    fn run(&self, gpu: &Gpu, pdl: bool) {
        let mut sample = Sample::new(self.seed);
        let pos = gpu.input(&self.positions());
        let freq_factors: Vec<f32> = (0..self.n_dims / 2).map(|_| 2.5 + sample.unit()).collect();
        let freq_factors_dev = gpu.input(&freq_factors);
        let rope = Rope {
            pos: pos.raw(),
            freq_factors: if self.freq_factors {
                freq_factors_dev.raw()
            } else {
                std::ptr::null()
            },
            n_dims: self.n_dims as i32,
            freq_base: 10000.0,
            freq_scale: if self.yarn { 0.25 } else { 1.0 },
            ext_factor: if self.yarn { 0.8 } else { 0.0 },
            attn_factor: if self.yarn { 1.1 } else { 1.0 },
            corr_low: 2.0,
            corr_high: self.n_dims as f32 / 4.0,
        };
        let stored: Vec<Stored> = self
            .parts
            .iter()
            .map(|part| part.stored(gpu, &mut sample, self.n_tokens))
            .collect();
        let mut args = QkvTailArgs {
            part: [QkvPart::NONE; 3],
            n_parts: self.parts.len() as i32,
            n_tokens: self.n_tokens as i32,
            rope,
        };
        for ((arg, part), stored) in args.part.iter_mut().zip(&self.parts).zip(&stored) {
            *arg = part.argument(stored);
        }
        qkv_tail(&args, gpu.launch(pdl)).unwrap_or_else(|e| panic!("{self:?}: {e}"));

        for (part, stored) in self.parts.iter().zip(&stored) {
            let norm_w = wide(&stored.norm_w);
            let factors = wide(&freq_factors);
            let tail = Tail {
                head_dim: part.head_dim,
                norm: part.norm.then_some((norm_w.as_slice(), 1e-6f32.into())),
                mode: part.mode,
                rope: Params::from(&rope),
                freq_factors: self.freq_factors.then_some(factors.as_slice()),
                scale: part.scale.into(),
                stored_as: part.stored_as,
            };
            let cache = part.rows(stored, gpu);
            for (t, pos) in self.positions().into_iter().enumerate() {
                let want = tail.apply(&Bounded::exact(&stored.src[t]), pos);
                let got = cache[stored.rows[t]]
                    .as_ref()
                    .expect("a row that tokens name is written");
                expect(&format!("{self:?}"), &format!("{part:?} token {t}"), got, &want);
            }
            let named = |row: &usize| stored.rows.contains(row);
            for row in (0..CACHE_ROWS).filter(|row| !named(row)) {
                assert!(
                    cache[row].is_none(),
                    "{self:?}: {part:?} wrote row {row}, which no token names"
                );
            }
        }
    }
}

impl Part {
    fn stored(&self, gpu: &Gpu, sample: &mut Sample, n_tokens: usize) -> Stored {
        let width = self.n_heads * self.head_dim;
        let src: Vec<Vec<f32>> = (0..n_tokens).map(|_| sample.values(width, 2.0)).collect();
        let norm_w = sample.values(self.head_dim, 2.0);
        // Neither ascending nor dense, and none twice.
        let first = sample.below(CACHE_ROWS);
        let rows: Vec<usize> = match self.rows {
            Rows::Token => (0..n_tokens).collect(),
            _ => (0..n_tokens).map(|t| (first + 7 * t) % CACHE_ROWS).collect(),
        };
        let row_words = (width + 8) * words(self.stored_as);
        Stored {
            src_dev: gpu.input(&strided(&src, width + 4)),
            norm_w_dev: gpu.input(&norm_w),
            rows_i32: gpu.input(&rows.iter().map(|&r| r as i32).collect::<Vec<_>>()),
            rows_i64: gpu.input(&rows.iter().map(|&r| r as i64).collect::<Vec<_>>()),
            dst: gpu.output(CACHE_ROWS * row_words),
            src,
            norm_w,
            rows,
            row_words,
        }
    }

    fn argument(&self, stored: &Stored) -> QkvPart {
        QkvPart {
            src: stored.src_dev.raw(),
            src_stride: (self.n_heads * self.head_dim + 4) as i64,
            dst: stored.dst.raw().cast(),
            row_bytes: 2 * stored.row_words as i64,
            head_bytes: (self.head_dim * self.stored_as.block_bytes()) as i64,
            rows: match self.rows {
                Rows::Token => std::ptr::null(),
                Rows::I32 => stored.rows_i32.raw().cast_const().cast(),
                Rows::I64 => stored.rows_i64.raw().cast_const().cast(),
            },
            rows_i64: (self.rows == Rows::I64).into(),
            dst_type: self.stored_as as i32,
            n_heads: self.n_heads as i32,
            head_dim: self.head_dim as i32,
            norm_w: if self.norm {
                stored.norm_w_dev.raw()
            } else {
                std::ptr::null()
            },
            eps: 1e-6,
            rope: self.mode as i32,
            scale: self.scale,
        }
    }

    /// The destination's rows as f32; `None` for those that are still poison.
    fn rows(&self, stored: &Stored, gpu: &Gpu) -> Vec<Option<Vec<f32>>> {
        let width = self.n_heads * self.head_dim * words(self.stored_as);
        let used = stored.dst.read_rows(&gpu.stream, CACHE_ROWS, width, stored.row_words);
        let value = |w: &[u16]| match self.stored_as {
            DType::F16 => f16::from_bits(w[0]).to_f32(),
            DType::BF16 => bf16::from_bits(w[0]).to_f32(),
            _ => f32::from_bits(u32::from(w[0]) | u32::from(w[1]) << 16),
        };
        let row = |words_of_row: &[u16]| {
            let written = words_of_row.iter().any(|&w| w != 0xffff);
            written.then(|| words_of_row.chunks(words(self.stored_as)).map(value).collect())
        };
        used.chunks(width).map(row).collect()
    }
}

const Q: Part = Part {
    n_heads: 4,
    head_dim: 256,
    norm: true,
    mode: RopeMode::Neox,
    scale: 0.0625,
    stored_as: DType::F32,
    rows: Rows::Token,
};
const K: Part = Part {
    n_heads: 1,
    scale: 1.0,
    stored_as: DType::F16,
    rows: Rows::I64,
    ..Q
};
const V: Part = Part {
    norm: false,
    mode: RopeMode::None,
    ..K
};

#[test]
fn gemma_and_llama_heads() {
    let Some(gpu) = Gpu::open() else { return };
    for n_tokens in [1, 2, 8] {
        let gemma = Case {
            n_tokens,
            parts: vec![Q, K, V],
            n_dims: 256,
            freq_factors: false,
            yarn: false,
            seed: n_tokens as u64,
        };
        gemma.run(&gpu, true);
        let llama = |part: Part, n_heads| Part {
            n_heads,
            head_dim: 128,
            norm: false,
            scale: 1.0,
            ..part
        };
        let mut llama = Case {
            parts: vec![llama(Q, 32), llama(V, 8), llama(K, 8)],
            n_dims: 128,
            freq_factors: true,
            ..gemma.clone()
        };
        for part in &mut llama.parts {
            if part.mode == RopeMode::Neox {
                part.mode = RopeMode::Normal;
            }
        }
        llama.run(&gpu, false);
    }
}

#[test]
fn random_shapes() {
    let Some(gpu) = Gpu::open() else { return };
    let mut sample = Sample::new(4242);
    for seed in 0..64 {
        // V may have its own head size; only those that rotate must hold n_dims.
        let head_dim = sample.pick(&[16, 64, 72, 80, 96, 128, 192, 256, 512]);
        let n_dims = if sample.below(2) == 0 {
            head_dim
        } else {
            2 + 2 * sample.below(head_dim / 2)
        };
        let mode = sample.pick(&[RopeMode::Normal, RopeMode::Neox]);
        let mut part = |own_dim: bool| Part {
            n_heads: 1 + sample.below(9),
            head_dim: if own_dim { sample.pick(&[2, 40, 128]) } else { head_dim },
            norm: sample.below(2) == 0,
            mode: if own_dim { RopeMode::None } else { mode },
            scale: sample.pick(&[1.0, 0.125]),
            stored_as: sample.pick(&[DType::F32, DType::F16, DType::BF16]),
            rows: sample.pick(&[Rows::Token, Rows::I32, Rows::I64]),
        };
        let parts = [part(false), part(false), part(true)];
        let case = Case {
            n_tokens: 1 + sample.below(5),
            parts: parts[..1 + sample.below(3)].to_vec(),
            n_dims,
            freq_factors: sample.below(2) == 0,
            yarn: sample.below(2) == 0,
            seed,
        };
        case.run(&gpu, seed % 2 == 0);
    }
}

#[test]
fn narrow_stores_round_the_f32_result_to_nearest_even() {
    let Some(gpu) = Gpu::open() else { return };
    // Without norm and rotation the f32 result is the input, so the stored bits are known. Halfway cases included.
    let mut src: Vec<f32> = vec![
        1.0 + 2f32.powi(-8),
        1.0 + 3.0 * 2f32.powi(-8),
        1.0 + 2f32.powi(-11),
        65504.0,
        1e-7,
        -0.0,
    ];
    src.extend(Sample::new(9).values(58, 100.0));
    let src_dev = gpu.input(&src);
    type Bits = fn(f32) -> u16;
    let types: [(DType, Bits); 2] = [
        (DType::F16, |v| f16::from_f32(v).to_bits()),
        (DType::BF16, |v| bf16::from_f32(v).to_bits()),
    ];
    for (stored_as, bits) in types {
        let dst = gpu.output::<u16>(src.len());
        let part = QkvPart {
            src: src_dev.raw(),
            dst: dst.raw().cast(),
            dst_type: stored_as as i32,
            n_heads: 1,
            head_dim: src.len() as i32,
            ..QkvPart::NONE
        };
        let args = QkvTailArgs {
            part: [part, QkvPart::NONE, QkvPart::NONE],
            n_parts: 1,
            n_tokens: 1,
            rope: Rope::NONE,
        };
        qkv_tail(&args, gpu.launch(true)).unwrap();
        let want: Vec<u16> = src.iter().map(|&v| bits(v)).collect();
        assert_eq!(dst.read(&gpu.stream), want, "{}", stored_as.name());
    }
}

#[test]
fn a_destination_may_lie_over_its_source() {
    let Some(gpu) = Gpu::open() else { return };
    let src = Sample::new(3).values(4 * 64, 1.0);
    let heads = gpu.output_over(&src.iter().map(|&v| Some(v)).collect::<Vec<_>>());
    let pos = gpu.input(&[11i32]);
    let part = QkvPart {
        src: heads.raw(),
        dst: heads.raw().cast(),
        row_bytes: 4 * 4 * 64,
        head_bytes: 4 * 64,
        n_heads: 4,
        head_dim: 64,
        rope: RopeMode::Neox as i32,
        ..QkvPart::NONE
    };
    let rope = Rope {
        pos: pos.raw(),
        n_dims: 48,
        freq_base: 10000.0,
        ..Rope::NONE
    };
    let args = QkvTailArgs {
        part: [part, QkvPart::NONE, QkvPart::NONE],
        n_parts: 1,
        n_tokens: 1,
        rope,
    };
    qkv_tail(&args, gpu.launch(true)).unwrap();
    let tail = Tail {
        head_dim: 64,
        norm: None,
        mode: RopeMode::Neox,
        rope: Params::from(&rope),
        freq_factors: None,
        scale: 1.0,
        stored_as: DType::F32,
    };
    expect(
        "in place",
        "heads",
        &heads.read(&gpu.stream),
        &tail.apply(&Bounded::exact(&src), 11),
    );
}

#[test]
fn what_it_cannot_do_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let memory = gpu.output::<f32>(1024);
    let part = QkvPart {
        src: memory.raw(),
        dst: memory.raw().cast(),
        n_heads: 1,
        head_dim: 64,
        ..QkvPart::NONE
    };
    let rotated = QkvPart {
        rope: RopeMode::Neox as i32,
        ..part
    };
    let run = |part: QkvPart, n_parts, rope| {
        let args = QkvTailArgs {
            part: [part, QkvPart::NONE, QkvPart::NONE],
            n_parts,
            n_tokens: 1,
            rope,
        };
        qkv_tail(&args, gpu.launch(true))
    };
    let rope = Rope {
        pos: memory.raw().cast_const().cast(),
        n_dims: 64,
        ..Rope::NONE
    };
    for (what, refused) in [
        ("an odd head", run(QkvPart { head_dim: 63, ..part }, 1, Rope::NONE)),
        ("a long head", run(QkvPart { head_dim: 514, ..part }, 1, Rope::NONE)),
        (
            "an integer store",
            run(
                QkvPart {
                    dst_type: DType::I32 as i32,
                    ..part
                },
                1,
                Rope::NONE,
            ),
        ),
        (
            "a rotation beyond the head",
            run(rotated, 1, Rope { n_dims: 66, ..rope }),
        ),
        (
            "a rotation without positions",
            run(
                rotated,
                1,
                Rope {
                    pos: std::ptr::null(),
                    ..rope
                },
            ),
        ),
        ("an unknown rotation", run(QkvPart { rope: 8, ..part }, 1, rope)),
        ("no part", run(part, 0, rope)),
        ("a missing second part", run(part, 2, rope)),
    ] {
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
}
