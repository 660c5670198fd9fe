//! Reproducible data for the self-check and the tests.

use half::{bf16, f16};

use super::quant::DType;

/// A small generator, SplitMix64 (Steele, Lea, Flood 2014): the same seed gives the same data everywhere.
#[derive(Debug, Clone)]
pub struct Sample(u64);

impl Sample {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Sample {
        Sample(seed)
    }

    /// 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `n` bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.bits() as u8).collect()
    }

    /// A whole number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Uniform in -1 … 1.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// `n` values in `-scale … scale`.
    pub fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }

    /// `n` values (whole blocks) of a GGUF weight type the kernels read: every bit pattern of the quants and small scales, so
    /// that weights stay well below 1.
    pub fn weights(&mut self, dtype: DType, n: usize) -> Vec<u8> {
        let mut bytes = self.bytes(n / dtype.block_len() * dtype.block_bytes());
        // Largest f16 scale.
        let size: f32 = match dtype {
            DType::F16 | DType::BF16 => 0.1,
            DType::Q8_0 => 0.1 / 128.0,
            DType::Q4_0 => 0.1 / 8.0,
            DType::Q4_1 | DType::Q5_0 => 0.1 / 16.0,
            DType::Q5_1 => 0.1 / 32.0,
            DType::Q2_K => 0.1 / 3.0 / 16.0,
            DType::Q3_K => 0.1 / 4.0 / 32.0,
            DType::Q4_K => 0.1 / 15.0 / 64.0,
            DType::Q5_K => 0.1 / 31.0 / 64.0,
            DType::Q6_K => 0.1 / 32.0 / 128.0,
            DType::IQ4_NL => 0.1 / 128.0,
            DType::IQ4_XS => 0.1 / 128.0 / 32.0,
            DType::MXFP4 | DType::NVFP4 => 0.0,
            other => panic!("no kernel reads {}", other.name()),
        };
        let scales = f16_scales(dtype);
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            for &at in scales {
                let scale = self.unit() * size;
                let stored = match dtype {
                    DType::BF16 => bf16::from_f32(scale).to_le_bytes(),
                    _ => f16::from_f32(scale).to_le_bytes(),
                };
                block[at..at + 2].copy_from_slice(&stored);
            }
            match dtype {
                // 2^-15 to 2^-8 for half a step.
                DType::MXFP4 => block[0] = 113 + block[0] % 8,
                // Exponents 0 and 1.
                DType::NVFP4 => block[..4].iter_mut().for_each(|b| *b &= 15),
                _ => {}
            }
        }
        bytes
    }
}

/// Offsets of a block's 16-bit scales and offsets.
pub fn f16_scales(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::MXFP4 | DType::NVFP4 => &[],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q6_K => &[208],
        _ => &[0],
    }
}
