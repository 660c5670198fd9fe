//! frt_mask_tiles and frt_prefill_fa4 on a GPU: tiles against the mask, attention of many tokens against the oracle.

mod gpu;

use ggml_flashrt::kernel::cudart::Buffer;
use ggml_flashrt::kernel::{
    mask_tiles, prefill_fa4, prefill_fa4_modules, prefill_fa4_scratch, prefill_fa4_supports, CudaError, MaskTilesArgs,
    Module, PrefillFa4Args, TileGrid, Tiles, MODULES,
};
use ggml_flashrt::reference::prefill_fa4::prefill_fa4 as oracle;
use ggml_flashrt::reference::sample::Sample;
use ggml_flashrt::reference::Bounded;
use gpu::{bytes, expect, Gpu};
use half::f16;

/// A device with all modules; a failure if this is such a device and build, and they do not run.
fn open() -> Option<Gpu> {
    let gpu = Gpu::open()?;
    let built = prefill_fa4_modules();
    if built.is_empty() || gpu.launch(false).cc != 90 {
        println!("skipped: no attention modules for this device (built with: [{built}])");
        return None;
    }
    for m in MODULES.iter() {
        let supported = prefill_fa4_supports(m.head_dim as i32, m.head_dim_v as i32);
        assert_eq!(supported, Some(true), "{}: [{built}]", m.name);
    }
    Some(gpu)
}

fn module(name: &str) -> &'static Module {
    MODULES.iter().find(|m| m.name == name).unwrap()
}

/// What the mask does to a token's keys.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mask {
    /// Nothing.
    Zero,
    /// The last token sees all keys but `behind`, each before it one fewer.
    Causal { behind: usize },
    /// As `Causal`, of `window` keys at most.
    Window { behind: usize, window: usize },
    /// Tokens and keys belong to one of three sequences in turn, in runs of 50.
    Sequences,
    /// Some keys, by chance.
    Ragged,
    /// As `Ragged`, and the others with a bias.
    Biased,
    /// Every third run of 40 tokens sees no key at all; the others see all.
    Blind,
    /// No token sees any key.
    Nothing,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    module: &'static str,
    n_heads: usize,
    n_heads_kv: usize,
    n_tokens: usize,
    n_kv: usize,
    n_streams: usize,
    /// All streams have the mask of the first.
    shared_mask: bool,
    mask: Mask,
    /// Values of a mask's row behind the last key.
    padding: usize,
    /// Rows of a mask behind the last token.
    more_tokens: usize,
    scale: f32,
    /// Size of the queries: large ones make sharp weights.
    sharpness: f32,
    seed: u64,
}

const LLAMA: Case = Case {
    module: "hd128",
    n_heads: 4,
    n_heads_kv: 1,
    n_tokens: 200,
    n_kv: 320,
    n_streams: 1,
    shared_mask: false,
    mask: Mask::Causal { behind: 20 },
    padding: 0,
    more_tokens: 0,
    scale: 0.088,
    sharpness: 1.0,
    seed: 1,
};

/// Between heads and rows, so that no stride is what shapes alone would give.
const PAD: usize = 8;
const HIDDEN: u16 = 0xfc00;

fn halves(values: &[f32]) -> Vec<u16> {
    values.iter().map(|&v| f16::from_f32(v).to_bits()).collect()
}

fn wide(values: &[u16]) -> Vec<f64> {
    values.iter().map(|&v| f16::from_bits(v).to_f64()).collect()
}

/// Device memory for [`Tiles`], poisoned.
struct TileLists {
    grid: TileGrid,
    memory: Buffer<u8>,
}

impl TileLists {
    fn new(gpu: &Gpu, grid: TileGrid) -> TileLists {
        let memory = Buffer::new(grid.bytes() + 256).unwrap();
        memory.fill(0xff, &gpu.stream).unwrap();
        TileLists { grid, memory }
    }

    fn raw(&self) -> Tiles {
        self.grid.at(self.memory.raw() as usize)
    }

    /// For each row of tiles the partial and the full ones; fails if anything but lists and kinds was written.
    fn read(&self, gpu: &Gpu) -> Vec<[Vec<usize>; 2]> {
        let all = self.memory.to_vec(&gpu.stream).unwrap();
        assert!(
            all[self.grid.bytes()..].iter().all(|&b| b == 0xff),
            "written behind the tiles"
        );
        let start = self.memory.raw() as usize;
        let int = |base: *mut i32, i: usize| {
            let at = base as usize - start + 4 * i;
            i32::from_le_bytes(all[at..at + 4].try_into().unwrap())
        };
        let t = self.raw();
        let list = |row: usize, count: *mut i32, index: *mut i32| -> Vec<usize> {
            let n = int(count, row) as usize;
            assert!(n <= self.grid.key_tiles);
            let entries = (0..self.grid.key_tiles).map(|i| int(index, row * self.grid.key_tiles + i));
            let entries: Vec<i32> = entries.collect();
            assert!(entries[n..].iter().all(|&e| e == -1), "written behind a list");
            entries[..n].iter().map(|&e| e as usize).collect()
        };
        (0..self.grid.n_planes * self.grid.token_tiles)
            .map(|row| {
                [
                    list(row, t.partial_count, t.partial_index),
                    list(row, t.full_count, t.full_index),
                ]
            })
            .collect()
    }
}

/// A mask in device memory with its tiles.
struct Scanned {
    mask: Buffer<u16>,
    tiles: TileLists,
    token_stride: usize,
}

/// Scans a mask of `n_planes` x `n_tokens` x `n_kv` values, and holds the lists against its definition.
fn scanned(
    gpu: &Gpu,
    values: &[u16],
    [n_planes, n_tokens, n_kv]: [usize; 3],
    padding: usize,
    (tile_m, tile_n): (usize, usize),
    case: &str,
) -> Scanned {
    let token_stride = n_kv + padding;
    let mut padded = Vec::new();
    for row in values.chunks(n_kv) {
        padded.extend_from_slice(row);
        // What no kernel may read into a result.
        padded.extend(std::iter::repeat_n(0x3c00, padding));
    }
    let grid = TileGrid {
        tile_m,
        tile_n,
        n_planes,
        token_tiles: n_tokens.div_ceil(tile_m),
        key_tiles: n_kv.div_ceil(tile_n),
    };
    let (mask, tiles) = (gpu.input(&padded), TileLists::new(gpu, grid));
    let args = MaskTilesArgs {
        mask: mask.raw().cast_const().cast(),
        token_bytes: 2 * token_stride as i64,
        plane_bytes: 2 * (token_stride * n_tokens) as i64,
        n_planes: n_planes as i32,
        n_tokens: n_tokens as i32,
        n_kv: n_kv as i32,
        tile_m: tile_m as i32,
        tile_n: tile_n as i32,
        tiles: tiles.raw(),
    };
    mask_tiles(&args, gpu.launch(true)).unwrap();
    let got = tiles.read(gpu);
    for (row, got) in got.iter().enumerate() {
        let (plane, first) = (row / grid.token_tiles, row % grid.token_tiles * tile_m);
        let mut want = [Vec::new(), Vec::new()];
        for tile in 0..grid.key_tiles {
            let keys = tile * tile_n..((tile + 1) * tile_n).min(n_kv);
            let of_tile = (first..(first + tile_m).min(n_tokens))
                .flat_map(|t| &values[(plane * n_tokens + t) * n_kv..][keys.clone()]);
            let (mut shown, mut hidden, mut other) = (false, false, false);
            for &v in of_tile {
                match v {
                    0 | 0x8000 => shown = true,
                    HIDDEN => hidden = true,
                    _ => other = true,
                }
            }
            match (shown, hidden, other) {
                (false, true, false) => {}
                (true, false, false) => want[1].push(tile),
                _ => want[0].push(tile),
            }
        }
        assert_eq!(*got, want, "{case}: row {row} of tiles");
    }
    Scanned {
        mask,
        tiles,
        token_stride,
    }
}

impl Case {
    fn values_of_mask(&self, sample: &mut Sample) -> Vec<u16> {
        let planes = if self.shared_mask { 1 } else { self.n_streams };
        let mut mask = Vec::new();
        for plane in 0..planes {
            for t in 0..self.n_tokens + self.more_tokens {
                let last = |behind: usize| (self.n_kv + t + 1).saturating_sub(behind + self.n_tokens + plane);
                for key in 0..self.n_kv {
                    let (chance, bias) = (sample.below(3), f16::from_f32(3.0 * sample.unit()));
                    let seen = match self.mask {
                        Mask::Zero => true,
                        Mask::Causal { behind } => key < last(behind),
                        Mask::Window { behind, window } => key < last(behind) && key + window >= last(behind),
                        Mask::Sequences => t / 50 % 3 == key / 50 % 3,
                        Mask::Ragged | Mask::Biased => chance > 0,
                        Mask::Blind => t / 40 % 3 != 0,
                        Mask::Nothing => false,
                    };
                    mask.push(match self.mask {
                        // Rows behind the last token hold anything.
                        _ if t >= self.n_tokens => [0, HIDDEN, 0x3c00][chance],
                        _ if !seen => HIDDEN,
                        Mask::Biased => bias.to_bits(),
                        _ => 0,
                    });
                }
            }
        }
        mask
    }

    fn run(&self, gpu: &Gpu) {
        let case = format!("{self:?}");
        let (s, module) = (self, module(self.module));
        let (d, dv) = (module.head_dim as usize, module.head_dim_v as usize);
        let mut sample = Sample::new(s.seed);
        let q_token = s.n_heads * (d + PAD);
        let q = sample.values(s.n_streams * s.n_tokens * q_token, s.sharpness);
        let (k_row, v_row) = (s.n_heads_kv * (d + PAD) + PAD, s.n_heads_kv * (dv + PAD) + PAD);
        let k = halves(&sample.values(s.n_streams * s.n_kv * k_row, 1.0));
        let v = halves(&sample.values(s.n_streams * s.n_kv * v_row, 2.0));
        let values = s.values_of_mask(&mut sample);
        let mask_tokens = s.n_tokens + s.more_tokens;
        let planes = if s.shared_mask { 1 } else { s.n_streams };
        let tile = (module.tile_m, module.tile_n);
        let scanned = scanned(gpu, &values, [planes, mask_tokens, s.n_kv], s.padding, tile, &case);
        let (q_dev, k_dev, v_dev) = (gpu.input(&q), gpu.input(&k), gpu.input(&v));
        let dst = gpu.output::<f32>(s.n_streams * s.n_tokens * s.n_heads * dv);
        let bytes_of = |elements: usize, size: usize| (elements * size) as i64;
        let mut args = PrefillFa4Args {
            q: q_dev.raw(),
            q_token_bytes: bytes_of(q_token, 4),
            q_head_bytes: bytes_of(d + PAD, 4),
            q_stream_bytes: bytes_of(s.n_tokens * q_token, 4),
            k: k_dev.raw().cast_const().cast(),
            k_row_bytes: bytes_of(k_row, 2),
            k_head_bytes: bytes_of(d + PAD, 2),
            k_stream_bytes: bytes_of(s.n_kv * k_row, 2),
            v: v_dev.raw().cast_const().cast(),
            v_row_bytes: bytes_of(v_row, 2),
            v_head_bytes: bytes_of(dv + PAD, 2),
            v_stream_bytes: bytes_of(s.n_kv * v_row, 2),
            mask: scanned.mask.raw().cast_const().cast(),
            mask_token_bytes: bytes_of(scanned.token_stride, 2),
            mask_stream_bytes: if planes > 1 {
                bytes_of(mask_tokens * scanned.token_stride, 2)
            } else {
                0
            },
            tiles: scanned.tiles.raw(),
            dst: dst.raw(),
            scratch: std::ptr::null_mut(),
            head_dim: d as i32,
            head_dim_v: dv as i32,
            n_heads: s.n_heads as i32,
            n_heads_kv: s.n_heads_kv as i32,
            n_tokens: s.n_tokens as i32,
            n_kv: s.n_kv as i32,
            n_streams: s.n_streams as i32,
            mask_tokens: mask_tokens as i32,
            tile_m: module.tile_m as i32,
            tile_n: module.tile_n as i32,
            scale: s.scale,
        };
        let scratch = gpu.output::<u8>(prefill_fa4_scratch(&args));
        args.scratch = scratch.raw().cast();
        prefill_fa4(&args, gpu.launch(true)).unwrap_or_else(|e| panic!("{case}: {e}"));
        let got = dst.read(&gpu.stream);

        // A few heads and tokens: f64 on the CPU is slow.
        let mut at = Sample::new(s.seed + 1);
        let mut picked: Vec<(usize, usize, usize)> = vec![(0, 0, 0), (s.n_streams - 1, s.n_tokens - 1, s.n_heads - 1)];
        picked.extend((0..40).map(|_| (at.below(s.n_streams), at.below(s.n_tokens), at.below(s.n_heads))));
        let (mut some, mut want) = (Vec::new(), Bounded::default());
        for (stream, t, head) in picked {
            let head_kv = head / (s.n_heads / s.n_heads_kv);
            let of_head = |cache: &[u16], row: usize, n: usize| -> Vec<f64> {
                let rows =
                    (0..s.n_kv).flat_map(|key| &cache[(stream * s.n_kv + key) * row + head_kv * (n + PAD)..][..n]);
                wide(&rows.copied().collect::<Vec<_>>())
            };
            let plane = if s.shared_mask { 0 } else { stream };
            let bias = wide(&values[(plane * mask_tokens + t) * s.n_kv..][..s.n_kv]);
            let q = &q[(stream * s.n_tokens + t) * q_token + head * (d + PAD)..][..d];
            let out = oracle(
                &Bounded::exact(q),
                s.scale.into(),
                &of_head(&k, k_row, d),
                &of_head(&v, v_row, dv),
                &bias,
            );
            want.extend(out.values);
            some.extend_from_slice(&got[((stream * s.n_tokens + t) * s.n_heads + head) * dv..][..dv]);
        }
        expect(&case, "dst", &some, &want);
        assert!(got.iter().all(|v| v.is_finite()), "{case}: not all is finite");

        dst.reset(&gpu.stream);
        prefill_fa4(&args, gpu.launch(false)).unwrap();
        assert_eq!(
            bytes(&dst.read(&gpu.stream)),
            bytes(&got),
            "{case}: a second launch gives something else"
        );
        scratch.read(&gpu.stream);
    }
}

#[test]
fn tiles_are_those_of_the_mask() {
    let Some(gpu) = Gpu::open() else { return };
    let mut sample = Sample::new(11);
    for (n_planes, n_tokens, n_kv, padding, tile) in [
        (1, 128, 128, 0, (128, 128)),
        (1, 1, 1, 0, (128, 64)),
        (2, 300, 1000, 24, (128, 128)),
        (3, 129, 4200, 0, (128, 64)),
        (1, 500, 777, 1, (192, 80)),
        (1, 64, 5000, 8, (64, 16)),
    ] {
        for kind in 0..4 {
            let mut values = vec![0; n_planes * n_tokens * n_kv];
            for (i, v) in values.iter_mut().enumerate() {
                let (t, key) = (i / n_kv, i % n_kv);
                *v = match kind {
                    // Zero of either sign.
                    0 => [0, 0x8000][sample.below(2)],
                    1 if key < t + n_kv / 3 => 0,
                    // One value that is neither, now and then.
                    2 if sample.below(3000) > 0 => 0,
                    2 => 0xfbff,
                    3 if key / 40 % 2 == 0 && sample.below(2000) > 0 => 0,
                    _ => HIDDEN,
                };
            }
            scanned(
                &gpu,
                &values,
                [n_planes, n_tokens, n_kv],
                padding,
                tile,
                &format!("{n_tokens} x {n_kv}, {kind}"),
            );
        }
    }
}

#[test]
fn every_module_and_mask() {
    let Some(gpu) = open() else { return };
    for module in MODULES.iter() {
        for mask in [
            Mask::Zero,
            Mask::Causal { behind: 20 },
            Mask::Window { behind: 0, window: 70 },
            Mask::Sequences,
            Mask::Ragged,
            Mask::Biased,
            Mask::Blind,
            Mask::Nothing,
        ] {
            Case {
                module: &module.name,
                mask,
                ..LLAMA
            }
            .run(&gpu);
        }
    }
}

#[test]
fn every_ratio_of_heads() {
    let Some(gpu) = open() else { return };
    for (n_heads, n_heads_kv) in [
        (1, 1),
        (5, 5),
        (4, 2),
        (6, 2),
        (8, 1),
        (16, 1),
        (14, 2),
        (32, 8),
        (48, 3),
    ] {
        for module in ["hd64", "hd128", "hd256"] {
            Case {
                module,
                n_heads,
                n_heads_kv,
                n_tokens: 140,
                ..LLAMA
            }
            .run(&gpu);
        }
    }
}

#[test]
fn ragged_ends_of_tokens_and_keys() {
    let Some(gpu) = open() else { return };
    for n_tokens in [1, 5, 127, 128, 129, 300] {
        for n_kv in [1, 2, 31, 64, 127, 130, 255, 700] {
            for mask in [Mask::Zero, Mask::Causal { behind: 0 }, Mask::Biased] {
                Case {
                    module: ["hd128", "hd256", "hd72"][(n_tokens + n_kv) % 3],
                    n_tokens,
                    n_kv,
                    mask,
                    // Rows on an even number of values, and on 16 bytes or not.
                    padding: n_kv % 2 + 2 * (n_tokens % 3),
                    more_tokens: n_tokens % 2 * 60,
                    n_heads: 2,
                    ..LLAMA
                }
                .run(&gpu);
            }
        }
    }
}

#[test]
fn several_streams() {
    let Some(gpu) = open() else { return };
    for shared_mask in [false, true] {
        for module in ["hd64", "hd128", "hd192v128", "hd256"] {
            Case {
                module,
                n_streams: 3,
                shared_mask,
                n_tokens: 150,
                mask: Mask::Causal { behind: 40 },
                more_tokens: 10,
                ..LLAMA
            }
            .run(&gpu);
        }
    }
}

#[test]
fn sharp_weights_and_scales() {
    let Some(gpu) = open() else { return };
    for (scale, sharpness) in [
        (1.0, 0.1),
        (1.0, 10.0),
        (0.125, 100.0),
        (0.0001, 20000.0),
        (30.0, 0.01),
        (0.07, 1e-6),
    ] {
        for mask in [Mask::Causal { behind: 3 }, Mask::Biased] {
            Case {
                scale,
                sharpness,
                mask,
                ..LLAMA
            }
            .run(&gpu);
        }
    }
}

#[test]
fn many_keys() {
    let Some(gpu) = open() else { return };
    for (module, n_kv) in [("hd128", 18432), ("hd64", 9000), ("hd256", 9000)] {
        Case {
            module,
            n_kv,
            n_tokens: 260,
            ..LLAMA
        }
        .run(&gpu);
    }
}

#[test]
fn random_shapes() {
    let Some(gpu) = open() else { return };
    let mut sample = Sample::new(78);
    for seed in 0..60 {
        let n_heads_kv = 1 + sample.below(4);
        let n_kv = 1 + sample.below(900);
        Case {
            module: &MODULES[sample.below(MODULES.len())].name,
            n_heads: n_heads_kv * (1 + sample.below(8)),
            n_heads_kv,
            n_tokens: 1 + sample.below(400),
            n_kv,
            n_streams: 1 + sample.below(2),
            shared_mask: sample.below(2) == 0,
            mask: sample.pick(&[
                Mask::Zero,
                Mask::Causal { behind: 7 },
                Mask::Window { behind: 1, window: 130 },
                Mask::Sequences,
                Mask::Ragged,
                Mask::Biased,
                Mask::Blind,
            ]),
            padding: n_kv % 2 + 2 * sample.below(20),
            more_tokens: sample.below(70),
            scale: sample.pick(&[0.125, 0.088, 1.0]),
            sharpness: sample.pick(&[1.0, 8.0]),
            seed,
        }
        .run(&gpu);
    }
}

#[test]
fn what_it_cannot_do_is_refused() {
    let Some(gpu) = open() else { return };
    let memory = gpu.output::<f32>(1 << 16);
    let (base, hd64) = (memory.raw(), module("hd64"));
    let tiles = Tiles {
        kind: base.cast(),
        partial_count: base.cast(),
        partial_index: base.cast(),
        full_count: base.cast(),
        full_index: base.cast(),
    };
    let good = PrefillFa4Args {
        q: base,
        q_token_bytes: 256,
        q_head_bytes: 256,
        q_stream_bytes: 256,
        k: base.cast_const().cast(),
        k_row_bytes: 128,
        k_head_bytes: 128,
        k_stream_bytes: 128,
        v: base.cast_const().cast(),
        v_row_bytes: 128,
        v_head_bytes: 128,
        v_stream_bytes: 128,
        mask: base.cast_const().cast(),
        mask_token_bytes: 64,
        mask_stream_bytes: 0,
        tiles,
        dst: base,
        scratch: base.cast(),
        head_dim: 64,
        head_dim_v: 64,
        n_heads: 2,
        n_heads_kv: 1,
        n_tokens: 1,
        n_kv: 16,
        n_streams: 1,
        mask_tokens: 1,
        tile_m: hd64.tile_m as i32,
        tile_n: hd64.tile_n as i32,
        scale: 1.0,
    };
    for (what, args) in [
        ("a head of 56", PrefillFa4Args { head_dim: 56, ..good }),
        ("heads of V of another size", PrefillFa4Args { head_dim_v: 32, ..good }),
        (
            "heads that do not divide",
            PrefillFa4Args {
                n_heads: 3,
                n_heads_kv: 2,
                ..good
            },
        ),
        ("no keys", PrefillFa4Args { n_kv: 0, ..good }),
        ("no tokens", PrefillFa4Args { n_tokens: 0, ..good }),
        ("too few rows of the mask", PrefillFa4Args { n_tokens: 2, ..good }),
        (
            "a crooked stride",
            PrefillFa4Args {
                k_row_bytes: 136,
                ..good
            },
        ),
        (
            "a mask on odd values",
            PrefillFa4Args {
                mask_token_bytes: 66,
                ..good
            },
        ),
        ("another module's tiles", PrefillFa4Args { tile_n: 64, ..good }),
        ("no scale", PrefillFa4Args { scale: 0.0, ..good }),
        (
            "no tiles",
            PrefillFa4Args {
                tiles: Tiles::NONE,
                ..good
            },
        ),
        (
            "no scratch",
            PrefillFa4Args {
                scratch: std::ptr::null_mut(),
                ..good
            },
        ),
    ] {
        let refused = prefill_fa4(&args, gpu.launch(true));
        assert!(
            matches!(&refused, Err(CudaError::Runtime { name, .. }) if name == "cudaErrorInvalidValue"),
            "{what}: {refused:?}"
        );
    }
}
