//! frt_dec_attn on a GPU: attention of a few tokens over many keys, against the oracle.

mod gpu;

use ggml_flashrt::kernel::{dec_attn, dec_attn_columns, dec_attn_scratch, CudaError, DecAttnArgs, DEC_ATTN_COLUMNS};
use ggml_flashrt::reference::dec_attn::{dec_attn as oracle, Scoring};
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::Bounded;
use gpu::{bytes, expect, Gpu};
use half::f16;

/// What the mask does to a token's keys.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mask {
    None,
    /// Token `t` sees all but the last `3 - t` keys.
    Causal,
    /// Some keys, by chance, the others with a bias.
    Ragged,
    /// Token 0 sees no key at all.
    Blind,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    head_dim: usize,
    n_heads: usize,
    n_heads_kv: usize,
    n_tokens: usize,
    n_kv: usize,
    n_streams: usize,
    mask: Mask,
    softcap: f32,
    max_splits: usize,
    /// Size of the queries: large ones make sharp weights.
    sharpness: f32,
    seed: u64,
}

/// Gemma 3 270M.
const GEMMA: Case = Case {
    head_dim: 256,
    n_heads: 4,
    n_heads_kv: 1,
    n_tokens: 1,
    n_kv: 256,
    n_streams: 1,
    mask: Mask::Causal,
    softcap: 0.0,
    max_splits: 64,
    sharpness: 1.0,
    seed: 1,
};

/// Between heads and rows, so that no stride is what shapes alone would give.
const PAD: usize = 8;

fn halves(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| f16::from_f32(v).to_bits()).collect()
}

fn wide(values: &[u16]) -> Vec<f64> {
    values.iter().map(|&v| f16::from_bits(v).to_f64()).collect()
}

impl Case {
    fn columns(&self) -> usize {
        dec_attn_columns(self.n_tokens * self.n_heads / self.n_heads_kv)
    }

    fn units(&self) -> usize {
        self.n_streams * self.n_heads_kv * self.columns().div_ceil(DEC_ATTN_COLUMNS)
    }

    fn bias(&self, sample: &mut Sample) -> Vec<u16> {
        let mut mask = Vec::new();
        for _ in 0..self.n_streams {
            for t in 0..self.n_tokens {
                let hidden = |key: usize, chance: usize| match self.mask {
                    Mask::None => false,
                    Mask::Causal => key + 3 >= self.n_kv + t && key > 0,
                    Mask::Ragged => chance == 0 && key > 0,
                    Mask::Blind => t == 0,
                };
                for key in 0..self.n_kv {
                    let (chance, bias) = (sample.below(3), sample.unit());
                    mask.push(match self.mask {
                        _ if hidden(key, chance) => f16::NEG_INFINITY.to_bits(),
                        Mask::Ragged => f16::from_f32(bias).to_bits(),
                        _ => 0,
                    });
                }
            }
        }
        mask
    }

    /// Runs twice with the same tickets; the result must not depend on it.
    fn run(&self, gpu: &Gpu, pdl: bool) {
        let case = format!("{self:?}");
        let (d, s) = (self.head_dim, self);
        let mut sample = Sample::new(s.seed);
        let q_token = s.n_heads * (d + PAD);
        let q = sample.values(s.n_streams * s.n_tokens * q_token, s.sharpness);
        let row = s.n_heads_kv * (d + PAD) + PAD;
        let k = halves(&sample.values(s.n_streams * s.n_kv * row, 1.0));
        let v = halves(&sample.values(s.n_streams * s.n_kv * row, 2.0));
        let mask = s.bias(&mut sample);
        let (q_dev, k_dev, v_dev, mask_dev) = (gpu.input(&q), gpu.input(&k), gpu.input(&v), gpu.input(&mask));
        let dst = gpu.output::<f32>(s.n_streams * s.n_tokens * s.n_heads * d);
        let bytes_of = |elements: usize, size: usize| (elements * size) as i64;
        let scale = 1.0 / (d as f32).sqrt();
        let mut args = DecAttnArgs {
            q: q_dev.raw(),
            q_token_bytes: bytes_of(q_token, 4),
            q_head_bytes: bytes_of(d + PAD, 4),
            q_stream_bytes: bytes_of(s.n_tokens * q_token, 4),
            k: k_dev.raw().cast_const().cast(),
            k_row_bytes: bytes_of(row, 2),
            k_head_bytes: bytes_of(d + PAD, 2),
            k_stream_bytes: bytes_of(s.n_kv * row, 2),
            v: v_dev.raw().cast_const().cast(),
            v_row_bytes: bytes_of(row, 2),
            v_head_bytes: bytes_of(d + PAD, 2),
            v_stream_bytes: bytes_of(s.n_kv * row, 2),
            mask: if s.mask == Mask::None {
                std::ptr::null()
            } else {
                mask_dev.raw().cast_const().cast()
            },
            mask_token_bytes: bytes_of(s.n_kv, 2),
            mask_stream_bytes: bytes_of(s.n_tokens * s.n_kv, 2),
            dst: dst.raw(),
            scratch: std::ptr::null_mut(),
            tickets: std::ptr::null_mut(),
            head_dim: d as i32,
            n_heads: s.n_heads as i32,
            n_heads_kv: s.n_heads_kv as i32,
            n_tokens: s.n_tokens as i32,
            n_kv: s.n_kv as i32,
            n_streams: s.n_streams as i32,
            max_splits: s.max_splits as i32,
            scale,
            softcap: s.softcap,
        };
        let scratch = gpu.output::<f32>(dec_attn_scratch(&args) / 4);
        let tickets = gpu.output_over(&vec![Some(0i32); s.units()]);
        if s.max_splits > 1 {
            (args.scratch, args.tickets) = (scratch.raw(), tickets.raw().cast());
        }
        dec_attn(&args, gpu.launch(pdl)).unwrap_or_else(|e| panic!("{case}: {e}"));
        let got = dst.read(&gpu.stream);

        let scoring = Scoring {
            scale: scale.into(),
            softcap: s.softcap.into(),
        };
        let mut want = Bounded::default();
        for stream in 0..s.n_streams {
            for t in 0..s.n_tokens {
                for head in 0..s.n_heads {
                    let q = &q[(stream * s.n_tokens + t) * q_token + head * (d + PAD)..][..d];
                    let of_head = |cache: &[u16]| -> Vec<f64> {
                        let first = head / (s.n_heads / s.n_heads_kv) * (d + PAD);
                        let rows = (0..s.n_kv).flat_map(|key| &cache[(stream * s.n_kv + key) * row + first..][..d]);
                        wide(&rows.copied().collect::<Vec<_>>())
                    };
                    let bias = match s.mask {
                        Mask::None => vec![0.0; s.n_kv],
                        _ => wide(&mask[(stream * s.n_tokens + t) * s.n_kv..][..s.n_kv]),
                    };
                    want.extend(oracle(&Bounded::exact(q), scoring, &of_head(&k), &of_head(&v), &bias).values);
                }
            }
        }
        expect(&case, "dst", &got, &want);

        dst.reset(&gpu.stream);
        dec_attn(&args, gpu.launch(pdl)).unwrap();
        assert_eq!(
            bytes(&dst.read(&gpu.stream)),
            bytes(&got),
            "{case}: a second launch gives something else"
        );
        assert!(
            tickets.read(&gpu.stream).iter().all(|&t| t == 0),
            "{case}: tickets are not left zero"
        );
        scratch.read(&gpu.stream);
    }
}

#[test]
fn gemma_and_llama_heads() {
    let Some(gpu) = Gpu::open() else { return };
    for n_kv in [256, 1024] {
        Case { n_kv, ..GEMMA }.run(&gpu, true);
        Case {
            n_kv,
            head_dim: 128,
            n_heads: 32,
            n_heads_kv: 8,
            ..GEMMA
        }
        .run(&gpu, false);
    }
    Case {
        n_kv: 8192,
        head_dim: 128,
        n_heads: 8,
        n_heads_kv: 2,
        ..GEMMA
    }
    .run(&gpu, true);
}

#[test]
fn every_head_size_and_number_of_columns() {
    let Some(gpu) = Gpu::open() else { return };
    for head_dim in [64, 80, 96, 128, 256] {
        for (n_heads, n_heads_kv, n_tokens) in [
            (2, 2, 1),
            (2, 1, 1),
            (3, 1, 1),
            (7, 1, 1),
            (4, 2, 4),
            (5, 1, 3),
            (16, 1, 1),
        ] {
            let case = Case {
                head_dim,
                n_heads,
                n_heads_kv,
                n_tokens,
                n_kv: 203,
                mask: Mask::Ragged,
                ..GEMMA
            };
            case.run(&gpu, true);
        }
    }
}

#[test]
fn few_keys_and_ragged_ends() {
    let Some(gpu) = Gpu::open() else { return };
    for n_kv in [1, 2, 3, 31, 32, 33, 63, 65, 129, 257] {
        for head_dim in [64, 128, 256] {
            Case {
                n_kv,
                head_dim,
                mask: Mask::None,
                ..GEMMA
            }
            .run(&gpu, true);
            Case {
                n_kv,
                head_dim,
                n_tokens: 2,
                n_streams: 2,
                ..GEMMA
            }
            .run(&gpu, true);
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gives_zero() {
    let Some(gpu) = Gpu::open() else { return };
    for (n_kv, max_splits) in [(40, 1), (300, 16)] {
        for head_dim in [64, 256] {
            // Zero bounds: the oracle allows nothing but zeros for the blind token.
            Case {
                n_kv,
                head_dim,
                n_tokens: 2,
                mask: Mask::Blind,
                max_splits,
                ..GEMMA
            }
            .run(&gpu, true);
        }
    }
}

#[test]
fn softcap_and_sharp_weights() {
    let Some(gpu) = Gpu::open() else { return };
    for sharpness in [0.1, 10.0, 200.0] {
        Case {
            sharpness,
            n_kv: 500,
            ..GEMMA
        }
        .run(&gpu, true);
        Case {
            sharpness,
            softcap: 50.0,
            n_heads: 8,
            n_heads_kv: 4,
            ..GEMMA
        }
        .run(&gpu, true);
    }
}

#[test]
fn random_shapes() {
    let Some(gpu) = Gpu::open() else { return };
    let mut sample = Sample::new(77);
    for seed in 0..48 {
        let n_heads_kv = 1 + sample.below(4);
        let case = Case {
            head_dim: sample.pick(&[64, 80, 96, 128, 256]),
            n_heads: n_heads_kv * (1 + sample.below(8)),
            n_heads_kv,
            n_tokens: 1 + sample.below(4),
            n_kv: 1 + sample.below(600),
            n_streams: 1 + sample.below(2),
            mask: sample.pick(&[Mask::None, Mask::Causal, Mask::Ragged, Mask::Blind]),
            softcap: sample.pick(&[0.0, 0.0, 30.0]),
            max_splits: 1 + sample.below(20),
            sharpness: sample.pick(&[1.0, 8.0]),
            seed,
        };
        case.run(&gpu, seed % 2 == 0);
    }
}

#[test]
fn what_it_cannot_do_is_refused() {
    let Some(gpu) = Gpu::open() else { return };
    let memory = gpu.output::<f32>(1 << 14);
    let good = DecAttnArgs {
        q: memory.raw(),
        q_token_bytes: 256,
        q_head_bytes: 256,
        q_stream_bytes: 256,
        k: memory.raw().cast_const().cast(),
        k_row_bytes: 128,
        k_head_bytes: 128,
        k_stream_bytes: 128,
        v: memory.raw().cast_const().cast(),
        v_row_bytes: 128,
        v_head_bytes: 128,
        v_stream_bytes: 128,
        mask: std::ptr::null(),
        mask_token_bytes: 0,
        mask_stream_bytes: 0,
        dst: memory.raw(),
        scratch: std::ptr::null_mut(),
        tickets: std::ptr::null_mut(),
        head_dim: 64,
        n_heads: 2,
        n_heads_kv: 1,
        n_tokens: 1,
        n_kv: 16,
        n_streams: 1,
        max_splits: 1,
        scale: 1.0,
        softcap: 0.0,
    };
    for (what, args) in [
        ("a head of 72", DecAttnArgs { head_dim: 72, ..good }),
        (
            "heads that do not divide",
            DecAttnArgs {
                n_heads: 3,
                n_heads_kv: 2,
                ..good
            },
        ),
        ("no keys", DecAttnArgs { n_kv: 0, ..good }),
        ("no tokens", DecAttnArgs { n_tokens: 0, ..good }),
        (
            "a crooked stride",
            DecAttnArgs {
                k_row_bytes: 136,
                ..good
            },
        ),
        (
            "no values",
            DecAttnArgs {
                v: std::ptr::null(),
                ..good
            },
        ),
        ("splits without scratch", DecAttnArgs { max_splits: 2, ..good }),
    ] {
        let refused = dec_attn(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
}
