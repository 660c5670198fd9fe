//! Random quantised blocks, made directly: bytes from a generator, then scales that give the values a chosen spread.
//!
//! Quantising random floats would give the same distribution a thousand times slower.

use super::model::{Fill, Tensor};
use ggml_flashrt::graph::DType;
use ggml_flashrt::reference::sample::Sample;
use half::{bf16, f16};
use std::io::{self, Write};

/// Bytes made at a time; a multiple of every block size is cut from it.
const CHUNK: usize = 1 << 18;

struct Random(Sample);

impl Random {
    fn fill(&mut self, bytes: &mut [u8]) {
        for word in bytes.chunks_mut(8) {
            word.copy_from_slice(&self.0.bits().to_le_bytes()[..word.len()]);
        }
    }

    /// Roughly normal, mean 0, variance 1: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        let bits = self.0.bits();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u16 as u32).sum();
        (sum as f32 / 65_535.0 - 2.0) * 3f32.sqrt()
    }
}

/// Types that `Filler` can make.
pub fn supports(ty: DType) -> bool {
    use DType::*;
    !matches!(ty, Q8_1 | Q8_K | I8 | I16 | I32 | I64 | F64)
}

/// Names of the types that can be made, for messages.
pub fn supported_names() -> String {
    let names: Vec<_> = DType::ALL.iter().filter(|t| supports(**t)).map(|t| t.name()).collect();
    names.join(", ")
}

/// Makes one tensor's data.
pub struct Filler {
    ty: DType,
    fill: Fill,
    blocks: u64,
    /// Standard deviation of the values.
    sigma: f32,
    random: Random,
}

impl Filler {
    /// Each tensor has its own sequence, from the seed and its name, so that other tensors do not matter to it.
    pub fn new(ty: DType, tensor: &Tensor, seed: u64) -> Self {
        let elements: u64 = tensor.dims.iter().product();
        let state = tensor
            .name
            .bytes()
            .fold(seed, |h, b| Sample::new(h ^ u64::from(b)).bits());
        let sigma = 1.0 / (tensor.dims[0] as f32).sqrt();
        Filler {
            ty,
            fill: tensor.fill,
            blocks: elements / ty.block_len() as u64,
            sigma,
            random: Random(Sample::new(state)),
        }
    }

    /// Writes the whole tensor.
    pub fn write(mut self, out: &mut dyn Write) -> io::Result<()> {
        match self.fill {
            Fill::Matrix => {}
            Fill::Norm => {
                return (0..self.blocks)
                    .try_for_each(|_| out.write_all(&(1.0 + 0.05 * self.random.normal()).to_le_bytes()))
            }
            Fill::RopeFactors => return rope_factors(self.blocks).try_for_each(|f| out.write_all(&f.to_le_bytes())),
        }
        let bytes = self.ty.block_bytes();
        let mut chunk = vec![0; CHUNK / bytes * bytes];
        let mut left = self.blocks * bytes as u64;
        while left > 0 {
            let n = chunk.len().min(left as usize);
            self.random.fill(&mut chunk[..n]);
            for block in chunk[..n].chunks_exact_mut(bytes) {
                self.block(block);
            }
            out.write_all(&chunk[..n])?;
            left -= n as u64;
        }
        Ok(())
    }

    /// Turns random bytes into a block whose values have standard deviation `sigma`: each type's scale is `sigma` over the
    /// standard deviation of its values at scale 1, which follows from the code book (given beside each).
    fn block(&mut self, b: &mut [u8]) {
        use DType::*;
        let s = self.sigma;
        match self.ty {
            F32 => b.copy_from_slice(&(s * self.random.normal()).to_le_bytes()),
            F16 => b.copy_from_slice(&f16::from_f32(s * self.random.normal()).to_le_bytes()),
            BF16 => b.copy_from_slice(&bf16::from_f32(s * self.random.normal()).to_le_bytes()),
            Q1_0 => put(b, 0, s),        // -1 or 1
            Q2_0 => put(b, 0, s / 1.22), // -1 … 2
            Q4_0 => put(b, 0, s / 4.61), // -8 … 7
            Q5_0 => put(b, 0, s / 9.23), // -16 … 15
            Q4_1 => put_pair(b, 0, s / 4.61, -7.5),
            Q5_1 => put_pair(b, 0, s / 9.23, -15.5),
            Q8_0 => {
                b[2..].iter_mut().filter(|q| **q == 0x80).for_each(|q| *q = 0x81); // ggml's quantiser never makes -128
                put(b, 0, s / 73.6);
            }
            // Scale and minimum of a group alike, 8 … 15: the minimum then takes the mean of the quants (1.5) away.
            Q2_K => {
                b[..16].iter_mut().for_each(|g| *g = (*g & 7 | 8) * 0x11);
                put_pair(b, 80, s / (11.7 * 1.12), 1.5);
            }
            Q3_K => put(b, 108, s / (18.5 * 2.29)), // six-bit scales -32 … 31, quants -4 … 3
            Q4_K => {
                six_bit_scales(&mut b[4..16]);
                put_pair(b, 0, s / (48.4 * 4.61), 7.5);
            }
            Q5_K => {
                six_bit_scales(&mut b[4..16]);
                put_pair(b, 0, s / (48.4 * 9.23), 15.5);
            }
            Q6_K => put(b, 208, s / (73.9 * 18.5)), // eight-bit scales, quants -32 … 31
            IQ4_NL => put(b, 0, s / 70.0),
            IQ4_XS => put(b, 0, s / (18.5 * 70.0)),
            // The grids' entries have a root mean square of about 25 (two bits), 30 and 8 (three bits).
            IQ2_XXS | IQ2_XS | IQ2_S => put(b, 0, s / (2.3 * 25.0)),
            IQ3_XXS => put(b, 0, s / (4.6 * 30.0)),
            IQ3_S => put(b, 0, s / (18.4 * 8.0)),
            IQ1_S => put(b, 0, s / (9.2 * 0.8)),
            IQ1_M => {
                // The scale's 16 bits are spread over the top four bits of the four scale words.
                let d = f16::from_f32(s / (9.2 * 0.8)).to_bits();
                for i in 0..4 {
                    b[48 + 2 * i + 1] = b[48 + 2 * i + 1] & 0x0f | ((d >> (4 * i)) as u8 & 0x0f) << 4;
                }
            }
            TQ1_0 => put(b, 52, s / 0.82), // -1, 0, 1
            TQ2_0 => {
                b[..64].iter_mut().for_each(|q| *q &= !(*q & *q >> 1 & 0x55)); // 3 is no code
                put(b, 64, s / 0.8);
            }
            MXFP4 => b[0] = (127.0 + (s / 2.8).log2().round()) as u8, // e2m1 values times a power of two
            NVFP4 => b[..4].fill(ue4m3(s / 2.8)),
            Q8_1 | Q8_K | I8 | I16 | I32 | I64 | F64 => unreachable!("refused by supports()"),
        }
    }
}

fn put(block: &mut [u8], at: usize, scale: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
}

/// Scale, and beside it the minimum (or offset), `ratio` times the scale.
fn put_pair(block: &mut [u8], at: usize, scale: f32, ratio: f32) {
    put(block, at, scale);
    put(block, at + 2, scale * ratio);
}

/// Packs eight six-bit scales, and minima equal to them, as Q4_K and Q5_K do: the first four in the low six bits of bytes
/// 0-3 (minima: 4-7), the others as nibbles in bytes 8-11 with their high bits on top of bytes 0-7.
fn six_bit_scales(packed: &mut [u8]) {
    let mut scales = [0; 8];
    scales.copy_from_slice(&packed[..8]);
    let scales = scales.map(|random| random & 31 | 32);
    for j in 0..4 {
        let (low, high) = (scales[j], scales[j + 4]);
        packed[j] = low | (high >> 4) << 6;
        packed[j + 4] = packed[j];
        packed[j + 8] = (high & 15) * 0x11;
    }
}

/// The nearest code of an unsigned e4m3 number, at least the smallest one.
fn ue4m3(x: f32) -> u8 {
    let value = |code: u8| {
        let (e, m) = (i32::from(code >> 3), f32::from(code & 7));
        if e == 0 {
            m * 2f32.powi(-9)
        } else {
            (1.0 + m / 8.0) * 2f32.powi(e - 7)
        }
    };
    (1..=0x7e)
        .min_by(|a, b| (value(*a) - x).abs().total_cmp(&(value(*b) - x).abs()))
        .expect("not empty")
}

/// Llama 3.1's factors: 1 for short wave lengths, 8 for long ones, smooth between (base 500000, 8192 tokens of old context).
fn rope_factors(n: u64) -> impl Iterator<Item = f32> {
    (0..n).map(move |i| {
        let wave_len = 2.0 * std::f64::consts::PI * 5e5f64.powf(i as f64 / n as f64);
        let (low, high) = (8192.0 / 1.0, 8192.0 / 4.0);
        if wave_len < high {
            1.0
        } else if wave_len > low {
            8.0
        } else {
            let smooth = (8192.0 / wave_len - 1.0) / 3.0;
            (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
        }
    })
}
