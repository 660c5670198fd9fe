//! GGUF weight formats, exactly dequantised, the 8-bit activation blocks, and the mat-vec of both.

use half::{bf16, f16};

pub use crate::graph::DType;

use super::{rounded, Bounded, U};

/// Values of an activation block.
pub const Q8_BLOCK: usize = 32;

/// Dequantises a row of `k` values of the GGUF type with this number; `None` for types the kernels do not read and for rows
/// that are no whole number of blocks or shorter than `k`. Exact: f64 holds every product of these formats.
pub fn dequantize_row(ty: i32, bytes: &[u8], k: usize) -> Option<Vec<f64>> {
    Some(
        terms(ty, bytes, k)?
            .into_iter()
            .map(|(scaled, offset)| scaled - offset)
            .collect(),
    )
}

/// The two terms of each weight, `scale * q` and the offset that is subtracted. Kernels sum them apart, so rounding errors
/// grow with the terms rather than with the weight.
fn terms(ty: i32, bytes: &[u8], k: usize) -> Option<Vec<(f64, f64)>> {
    let dtype = DType::from_number(ty)?;
    let decode: fn(&[u8], &mut Vec<(f64, f64)>) = match dtype {
        DType::F16 => |b, out| out.push((half_at(b, 0), 0.0)),
        DType::BF16 => |b, out| out.push((bf16::from_le_bytes([b[0], b[1]]).into(), 0.0)),
        DType::Q8_0 => |b, out| out.extend(b[2..].iter().map(|&q| (half_at(b, 0) * f64::from(q as i8), 0.0))),
        DType::Q4_0 => q4_0,
        DType::Q5_0 => q5_0,
        DType::Q4_K => q4_k,
        DType::Q5_K => q5_k,
        DType::Q6_K => q6_k,
        _ => return None,
    };
    let bytes = bytes
        .get(..k / dtype.block_len() * dtype.block_bytes())
        .filter(|_| k % dtype.block_len() == 0)?;
    let mut out = Vec::with_capacity(k);
    bytes
        .chunks_exact(dtype.block_bytes())
        .for_each(|block| decode(block, &mut out));
    Some(out)
}

fn half_at(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).into()
}

/// `f16 d; u8 qs[16]`: low nibbles are the first 16 values, high nibbles the others.
fn q4_0(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = half_at(block, 0);
    out.extend((0..32).map(|i| (d * f64::from(nibble(block[2 + i % 16], i / 16)), 8.0 * d)));
}

/// `f16 d; u32 qh; u8 qs[16]`: as Q4_0, bit `i` of `qh` is the fifth bit of value `i`.
fn q5_0(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = half_at(block, 0);
    out.extend((0..32).map(|i| {
        let high = block[2 + i / 8] >> (i % 8) & 1;
        (d * f64::from(nibble(block[6 + i % 16], i / 16) | high << 4), 16.0 * d)
    }));
}

/// `f16 d, dmin; u8 scales[12]; u8 qs[128]`: eight groups of 32; each 32 bytes of `qs` hold two groups as nibbles.
fn q4_k(block: &[u8], out: &mut Vec<(f64, f64)>) {
    for group in 0..8 {
        let (scale, offset) = k_scale(block, group);
        let qs = &block[16 + group / 2 * 32..][..32];
        out.extend(qs.iter().map(|&q| (scale * f64::from(nibble(q, group % 2)), offset)));
    }
}

/// `f16 d, dmin; u8 scales[12]; u8 qh[32]; u8 qs[128]`: as Q4_K, bit `g` of `qh[i]` is the fifth bit of group `g`.
fn q5_k(block: &[u8], out: &mut Vec<(f64, f64)>) {
    for group in 0..8 {
        let (scale, offset) = k_scale(block, group);
        let qs = &block[48 + group / 2 * 32..][..32];
        out.extend(qs.iter().zip(&block[16..48]).map(|(&q, &high)| {
            let q = nibble(q, group % 2) | (high >> group & 1) << 4;
            (scale * f64::from(q), offset)
        }));
    }
}

/// `u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d`: two halves of 128 values, each four runs of 32, a scale per 16 values.
fn q6_k(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = half_at(block, 208);
    for i in 0..256 {
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let low = nibble(block[64 * half + 32 * (run % 2) + l], run / 2);
        let high = block[128 + 32 * half + l] >> (2 * run) & 3;
        let scale = d * f64::from(block[192 + i / 16] as i8);
        out.push((scale * f64::from(low | high << 4), 32.0 * scale));
    }
}

fn nibble(byte: u8, high: usize) -> u8 {
    if high == 0 {
        byte & 15
    } else {
        byte >> 4
    }
}

/// Scale and offset of a group of Q4_K and Q5_K: 6 bits each, the upper four groups' high bits are kept with the lower four.
fn k_scale(block: &[u8], group: usize) -> (f64, f64) {
    let s = &block[4..16];
    let (scale, min) = match group {
        0..4 => (s[group] & 63, s[group + 4] & 63),
        _ => (
            s[group + 4] & 15 | s[group - 4] >> 6 << 4,
            s[group + 4] >> 4 | s[group] >> 6 << 4,
        ),
    };
    (half_at(block, 0) * f64::from(scale), half_at(block, 2) * f64::from(min))
}

/// A row of activations as 8-bit blocks; see `frt_q8` in `csrc/flashrt_kernels.h`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Q8Row {
    /// `round(x / d)`
    pub qs: Vec<i8>,
    /// Of each block: `d = max|x| / 127` and `s = d * sum(qs)`.
    pub ds: Vec<[f32; 2]>,
}

impl Q8Row {
    /// Quantises in f32 as ggml's `quantize_q8_1` does, bit by bit.
    pub fn quantize(x: &[f32]) -> Q8Row {
        let mut row = Q8Row::default();
        for block in x.chunks(Q8_BLOCK) {
            let d = block.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
            let qs = block.iter().map(|v| if d == 0.0 { 0 } else { (v / d).round() as i8 });
            let sum: i32 = qs.clone().map(i32::from).sum();
            row.ds.push([d, d * sum as f32]);
            row.qs.extend(qs);
        }
        row
    }

    /// The values the blocks stand for.
    pub fn dequantize(&self) -> Vec<f64> {
        let step = |i: usize| f64::from(self.ds[i / Q8_BLOCK][0]);
        self.qs
            .iter()
            .enumerate()
            .map(|(i, &q)| step(i) * f64::from(q))
            .collect()
    }
}

/// Half a step of each value's block, with the roundings of the step and the quotient: what quantising `x` may change.
pub fn q8_step_bound(x: &[f64]) -> Vec<f64> {
    let step = |block: &[f64]| block.iter().fold(0f64, |m, v| m.max(v.abs())) / 127.0;
    x.chunks(Q8_BLOCK)
        .flat_map(|b| vec![step(b) * (0.5 + 256.0 * U); b.len()])
        .collect()
}

/// Weights of one type, rows `row_bytes` apart.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// GGUF type.
    pub dtype: DType,
    /// The rows.
    pub bytes: &'a [u8],
    /// Bytes between rows.
    pub row_bytes: usize,
    /// Rows.
    pub n_rows: usize,
    /// Values of a row.
    pub k: usize,
}

impl Matrix<'_> {
    /// `w . x` of one token. For quantised weights `x` is what the 8-bit blocks stand for.
    pub fn mat_vec(&self, x: &Bounded) -> Bounded {
        assert_eq!(x.len(), self.k, "one activation per column");
        (0..self.n_rows)
            .map(|r| self.dot(&self.bytes[r * self.row_bytes..], x))
            .collect()
    }

    /// A row's sum in f32. The kernels split it over at least 8 lanes, so no path has more than `k / 8` additions (a quantised
    /// block of 16 values or more is summed exactly, so `k / 128`), five reductions and a few products with scales.
    fn dot(&self, row: &[u8], x: &Bounded) -> (f64, f64) {
        let roundings = 16.0 + self.k as f64 / if self.dtype.block_len() == 1 { 8.0 } else { 128.0 };
        let terms = terms(self.dtype as i32, row, self.k).expect("a type the kernels read and a whole row");
        let (mut value, mut bound, mut magnitude) = (0.0, 0.0, 0.0);
        for (i, (scaled, offset)) in terms.into_iter().enumerate() {
            let (x, x_bound) = x.at(i);
            value += (scaled - offset) * x;
            bound += (scaled - offset).abs() * x_bound;
            magnitude += (scaled.abs() + offset.abs()) * (x.abs() + x_bound);
        }
        rounded(value, bound + roundings * U * magnitude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// gguf-py's results, written by tests/fixtures/quant/generate.py.
    #[test]
    fn every_type_dequantises_as_gguf_py_does() {
        macro_rules! fixture {
            ($name:literal) => {
                (
                    include_bytes!(concat!("../../tests/fixtures/quant/", $name, ".bin")).as_slice(),
                    include_bytes!(concat!("../../tests/fixtures/quant/", $name, ".f32")).as_slice(),
                )
            };
        }
        for (dtype, (blocks, values)) in [
            (DType::F16, fixture!("f16")),
            (DType::BF16, fixture!("bf16")),
            (DType::Q8_0, fixture!("q8_0")),
            (DType::Q4_0, fixture!("q4_0")),
            (DType::Q5_0, fixture!("q5_0")),
            (DType::Q4_K, fixture!("q4_k")),
            (DType::Q5_K, fixture!("q5_k")),
            (DType::Q6_K, fixture!("q6_k")),
        ] {
            let want: Vec<f32> = values
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect();
            let got = dequantize_row(dtype as i32, blocks, want.len()).unwrap();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                // gguf-py rounds each product of scale and quant, and the difference, to f32.
                let want = f64::from(*want);
                assert!(
                    (got - want).abs() <= U * want.abs(),
                    "{} value {i}: {got} is not {want}",
                    dtype.name()
                );
            }
        }
    }

    #[test]
    fn rows_that_cannot_be_are_refused() {
        let row = |ty: DType, bytes: usize, k| dequantize_row(ty as i32, &vec![0; bytes], k).map(|row| row.len());
        assert_eq!(row(DType::Q4_K, 144, 256), Some(256));
        assert_eq!(row(DType::Q4_K, 143, 256), None, "too short");
        assert_eq!(row(DType::Q4_K, 144, 255), None, "no whole block");
        assert_eq!(row(DType::Q2_K, 84, 256), None, "no kernel reads it");
        assert_eq!(dequantize_row(-5, &[0; 64], 32), None, "no such type");
    }

    #[test]
    fn activations_are_rounded_half_away_from_zero() {
        let mut x = [0f32; 64];
        x[..4].copy_from_slice(&[127.0, -2.5, 0.5, -0.49]);
        let row = Q8Row::quantize(&x);
        assert_eq!(row.qs[..5], [127, -3, 1, 0, 0]);
        assert_eq!(row.ds, [[1.0, 125.0], [0.0, 0.0]], "an empty block has no step");
        let x: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 31.7) * 0.1).collect();
        let row = Q8Row::quantize(&x);
        let steps = q8_step_bound(&x.iter().map(|&v| f64::from(v)).collect::<Vec<_>>());
        for ((value, got), step) in x.iter().zip(row.dequantize()).zip(steps) {
            assert!((f64::from(*value) - got).abs() <= step, "{value} became {got}");
        }
    }
}
