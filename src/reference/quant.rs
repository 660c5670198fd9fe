//! GGUF weight formats, exactly dequantised, the 8-bit activation blocks, and the mat-vec of both.

use half::{bf16, f16};

pub use crate::graph::DType;

use super::h16::{TINY16, U16};
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
        DType::Q4_1 => q4_1,
        DType::Q5_0 => q5_0,
        DType::Q5_1 => q5_1,
        DType::Q2_K => q2_k,
        DType::Q3_K => q3_k,
        DType::Q4_K => q4_k,
        DType::Q5_K => q5_k,
        DType::Q6_K => q6_k,
        DType::IQ4_NL => iq4_nl,
        DType::IQ4_XS => iq4_xs,
        DType::MXFP4 => mxfp4,
        DType::NVFP4 => nvfp4,
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

/// `f16 d, m; u8 qs[16]`: as Q4_0, with an offset of its own that is added.
fn q4_1(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    out.extend((0..32).map(|i| (d * f64::from(nibble(block[4 + i % 16], i / 16)), -m)));
}

/// `f16 d; u32 qh; u8 qs[16]`: as Q4_0, bit `i` of `qh` is the fifth bit of value `i`.
fn q5_0(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = half_at(block, 0);
    out.extend((0..32).map(|i| {
        let high = block[2 + i / 8] >> (i % 8) & 1;
        (d * f64::from(nibble(block[6 + i % 16], i / 16) | high << 4), 16.0 * d)
    }));
}

/// `f16 d, m; u32 qh; u8 qs[16]`: as Q5_0, with an offset of its own that is added.
fn q5_1(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    out.extend((0..32).map(|i| {
        let high = block[4 + i / 8] >> (i % 8) & 1;
        (d * f64::from(nibble(block[8 + i % 16], i / 16) | high << 4), -m)
    }));
}

/// `u8 scales[16]; u8 qs[64]; f16 d, dmin`: two halves of 128 values in 32 bytes of `qs`, each four runs of 32 by two bits. A scale
/// and an offset of four bits for 16 values.
fn q2_k(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for i in 0..256 {
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let q = block[16 + 32 * half + l] >> (2 * run) & 3;
        let s = block[i / 16];
        out.push((d * f64::from(s & 15) * f64::from(q), dmin * f64::from(s >> 4)));
    }
}

/// `u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d`: low bits as in Q2_K; bit `i / 32` of `hmask[i % 32]` is the third bit of value
/// `i`, and 4 is subtracted. Scales have six bits: four in the nibbles of the first eight bytes, two in the last four; 32 is
/// subtracted.
fn q3_k(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = half_at(block, 108);
    let scales = &block[96..108];
    for i in 0..256 {
        let (half, run, l) = (i / 128, i % 128 / 32, i % 32);
        let low = block[32 + 32 * half + l] >> (2 * run) & 3;
        let high = block[l] >> (i / 32) & 1;
        let s = i / 16;
        let scale = nibble(scales[s % 8], s / 8) | (scales[8 + s % 4] >> (s / 4 * 2) & 3) << 4;
        let scale = d * (f64::from(scale) - 32.0);
        out.push((scale * f64::from(low | high << 2), 4.0 * scale));
    }
}

/// The values that nibbles of IQ4_NL and IQ4_XS stand for.
const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `f16 d; u8 qs[16]`: nibbles as in Q4_0, each standing for a value of a table.
fn iq4_nl(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = half_at(block, 0);
    out.extend((0..32).map(|i| (d * of_table(&IQ4_VALUES, block[2 + i % 16], i / 16), 0.0)));
}

/// `f16 d; u16 scales_h; u8 scales_l[4]; u8 qs[128]`: eight blocks as in IQ4_NL, their scales four bits in a nibble and two in
/// `scales_h`; 32 is subtracted.
fn iq4_xs(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let high = u16::from_le_bytes([block[2], block[3]]);
    for group in 0..8 {
        let scale = nibble(block[4 + group / 2], group % 2) | ((high >> (2 * group) & 3) as u8) << 4;
        let d = half_at(block, 0) * (f64::from(scale) - 32.0);
        let qs = &block[8 + 16 * group..][..16];
        out.extend((0..32).map(|i| (d * of_table(&IQ4_VALUES, qs[i % 16], i / 16), 0.0)));
    }
}

/// Twice the values of e2m1, the four-bit float of MXFP4 and NVFP4.
const FP4_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `u8 e; u8 qs[16]`: nibbles as in Q4_0, e2m1; the scale is `2^(e - 127)`.
fn mxfp4(block: &[u8], out: &mut Vec<(f64, f64)>) {
    let d = 2f64.powi(i32::from(block[0]) - 128);
    out.extend((0..32).map(|i| (d * of_table(&FP4_VALUES, block[1 + i % 16], i / 16), 0.0)));
}

/// `u8 d[4]; u8 qs[32]`: four groups of 16 values in 8 bytes, low nibbles first, e2m1, each with a scale without sign of four
/// exponent bits (bias 7) and three of mantissa. The pattern of NaN counts as 0.
fn nvfp4(block: &[u8], out: &mut Vec<(f64, f64)>) {
    for group in 0..4 {
        let (exponent, mantissa) = (i32::from(block[group] >> 3 & 15), f64::from(block[group] & 7));
        let scale = match (block[group], exponent) {
            (0x7f, _) => 0.0,
            (_, 0) => mantissa * 2f64.powi(-9),
            _ => (8.0 + mantissa) * 2f64.powi(exponent - 10),
        };
        let qs = &block[4 + 8 * group..][..8];
        out.extend((0..16).map(|i| (0.5 * scale * of_table(&FP4_VALUES, qs[i % 8], i / 8), 0.0)));
    }
}

fn of_table(values: &[i8; 16], byte: u8, high: usize) -> f64 {
    f64::from(values[usize::from(nibble(byte, high))])
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

/// How the values of a row of weights enter a sum.
struct Row {
    value: Vec<f64>,
    /// How far a kernel's value may be off.
    error: Vec<f64>,
    /// What the roundings of the sum grow with.
    magnitude: Vec<f64>,
}

impl Row {
    /// `roundings`: the sum's own errors, relative to its magnitude.
    fn dot(&self, x: &Bounded, roundings: f64) -> (f64, f64) {
        // Sums of their own for the compiler to work on side by side: a check of a model spends its time here.
        const LANES: usize = 4;
        let mut sums = [[0.0; LANES]; 3];
        let lanes = |values: &[f64], at: usize| -> [f64; LANES] {
            let rest = &values[at..];
            rest.first_chunk()
                .copied()
                .unwrap_or_else(|| std::array::from_fn(|i| rest.get(i).copied().unwrap_or(0.0)))
        };
        for at in (0..x.len()).step_by(LANES) {
            let (w, e, m) = (
                lanes(&self.value, at),
                lanes(&self.error, at),
                lanes(&self.magnitude, at),
            );
            let (x, b) = (lanes(&x.value, at), lanes(&x.bound, at));
            for i in 0..LANES {
                let largest = x[i].abs() + b[i];
                sums[0][i] += w[i] * x[i];
                sums[1][i] += w[i].abs() * b[i] + e[i] * largest;
                sums[2][i] += m[i] * largest;
            }
        }
        let [value, bound, magnitude] = sums.map(|lanes| lanes.iter().sum::<f64>());
        rounded(value, bound + roundings * magnitude)
    }
}

impl Matrix<'_> {
    fn terms(&self, row: usize) -> Vec<(f64, f64)> {
        terms(self.dtype as i32, &self.bytes[row * self.row_bytes..], self.k)
            .expect("a type the kernels read and a whole row")
    }

    /// What is subtracted from each scaled quant of a row.
    pub fn offsets(&self, row: usize) -> Vec<f64> {
        self.terms(row).into_iter().map(|(_, offset)| offset).collect()
    }

    /// Each row's sum with each token.
    fn products(&self, tokens: &[Bounded], row: impl Fn(usize) -> Row, roundings: f64) -> Vec<Bounded> {
        assert!(tokens.iter().all(|x| x.len() == self.k), "one activation per column");
        let mut out = vec![Bounded::default(); tokens.len()];
        for r in 0..self.n_rows {
            let row = row(r);
            for (out, x) in out.iter_mut().zip(tokens) {
                let (value, bound) = row.dot(x, roundings);
                out.value.push(value);
                out.bound.push(bound);
            }
        }
        out
    }

    /// `w . x` of one token. For quantised weights `x` is what the 8-bit blocks stand for.
    pub fn mat_vec(&self, x: &Bounded) -> Bounded {
        self.mat_vecs(std::slice::from_ref(x)).remove(0)
    }

    /// The same of several tokens.
    ///
    /// A row's sum in f32. The kernels split it over at least 8 lanes, so no path has more than `k / 8` additions (a quantised
    /// block of 16 values or more is summed exactly, so `k / 128`), five reductions and a few products with scales.
    pub fn mat_vecs(&self, tokens: &[Bounded]) -> Vec<Bounded> {
        let roundings = 16.0 + self.k as f64 / if self.dtype.block_len() == 1 { 8.0 } else { 128.0 };
        let row = |r: usize| {
            let terms = self.terms(r);
            Row {
                value: terms.iter().map(|(scaled, offset)| scaled - offset).collect(),
                error: vec![0.0; self.k],
                magnitude: terms
                    .iter()
                    .map(|(scaled, offset)| scaled.abs() + offset.abs())
                    .collect(),
            }
        };
        self.products(tokens, row, roundings * U)
    }

    /// `w . x` on tensor cores, of several tokens: weights are rounded to f16, products are exact, sums are f32.
    ///
    /// A tensor core adds 16 products to its sum at a time. It aligns all 17 to the largest and drops what then lies below its
    /// last bit: each may lose a unit of an f32 (`2 U`) of the largest, which no magnitude of the whole row exceeds. Adding up what
    /// several of them did takes a few more roundings.
    pub fn mat_mul(&self, tokens: &[Bounded]) -> Vec<Bounded> {
        let roundings = (self.k as f64 / 16.0 * 17.0 * 2.0 + 8.0) * U;
        let row = |r: usize| {
            let (mut value, mut error) = (Vec::with_capacity(self.k), Vec::with_capacity(self.k));
            for term in self.terms(r) {
                value.push(term.0 - term.1);
                error.push(f16_error(self.dtype, term));
            }
            let magnitude = value.iter().zip(&error).map(|(v, e)| v.abs() + e).collect();
            Row {
                value,
                error,
                magnitude,
            }
        };
        self.products(tokens, row, roundings)
    }
}

/// How far a weight in f16 may be from its exact value. Types whose values f16 holds are rounded once, where they leave its
/// range. Of the others a kernel may round scaled quant, offset and difference to f16, each relative to itself. A scale that is a
/// product (two levels of scales) may be rounded too, and where it is below f16's normal range that error is multiplied by the
/// quant.
fn f16_error(dtype: DType, (scaled, offset): (f64, f64)) -> f64 {
    let weight = scaled - offset;
    let largest_quant = match dtype {
        // A scale that f16 does not hold has no quant that is larger than this.
        DType::MXFP4 if weight.abs() <= 12.0 * 2.0 * TINY16 => return 13.0 * TINY16,
        DType::F16 | DType::BF16 | DType::MXFP4 | DType::NVFP4 => {
            return (f16::from_f64(weight).to_f64() - weight).abs()
        }
        DType::Q2_K => 3.0,
        DType::Q3_K => 7.0,
        DType::Q4_K => 15.0,
        DType::Q5_K => 31.0,
        DType::Q6_K => 63.0,
        DType::IQ4_XS => 127.0,
        _ => 0.0,
    };
    U16 * (scaled.abs() + offset.abs() + weight.abs()) + TINY16 * (3.0 + largest_quant)
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
            (DType::Q4_1, fixture!("q4_1")),
            (DType::Q5_0, fixture!("q5_0")),
            (DType::Q5_1, fixture!("q5_1")),
            (DType::Q2_K, fixture!("q2_k")),
            (DType::Q3_K, fixture!("q3_k")),
            (DType::Q4_K, fixture!("q4_k")),
            (DType::Q5_K, fixture!("q5_k")),
            (DType::Q6_K, fixture!("q6_k")),
            (DType::IQ4_NL, fixture!("iq4_nl")),
            (DType::IQ4_XS, fixture!("iq4_xs")),
            (DType::MXFP4, fixture!("mxfp4")),
            (DType::NVFP4, fixture!("nvfp4")),
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
        assert_eq!(row(DType::TQ2_0, 66, 256), None, "no kernel reads it");
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
