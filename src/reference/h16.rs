//! Activations as f16 with a power of two for each row: see `frt_h16` in `csrc/flashrt_kernels.h`.

use half::f16;

use super::Bounded;
use crate::kernel::H16;

/// Unit roundoff of f16.
pub const U16: f64 = 1.0 / (1u64 << 11) as f64;
/// Half the smallest f16: how far a value that is too small for f16's relative precision is off at most.
pub const TINY16: f64 = 1.0 / (1u64 << 25) as f64;

/// A row as a right kernel makes it, bit by bit.
#[derive(Debug, Clone, PartialEq)]
pub struct H16Row {
    /// The row divided by the scale.
    pub values: Vec<f16>,
    /// A power of two.
    pub scale: f32,
}

impl H16Row {
    /// Rounds each value once.
    pub fn new(x: &[f32]) -> H16Row {
        let largest = x.iter().fold(0f64, |m, &v| {
            m.max(if v.is_finite() {
                f64::from(v).abs()
            } else {
                f64::INFINITY
            })
        });
        let scale = scale(largest);
        H16Row {
            values: x.iter().map(|&v| f16::from_f64(f64::from(v) / scale)).collect(),
            scale: scale as f32,
        }
    }

    /// What the row stands for.
    pub fn dequantize(&self) -> Vec<f64> {
        self.values.iter().map(|v| v.to_f64() * f64::from(self.scale)).collect()
    }
}

/// The power of two by which a row with this largest magnitude is divided, so that it lies in `[2^13, 2^14)`; below, when the
/// magnitude is below `2^-113`.
pub fn scale(largest: f64) -> f64 {
    if largest == 0.0 || !largest.is_finite() {
        return 1.0;
    }
    // Not by log2, which rounds.
    let exponent = (largest.to_bits() >> 52) as i32 - 1023;
    2f64.powi((exponent - 13).max(-126))
}

/// A row that is only known within bounds, as f16: each value rounded relative to itself, or, where it is too small for that,
/// by half the smallest f16 times the scale. A larger maximum than the one that is known at most doubles that scale.
pub fn rounded(x: &Bounded) -> Bounded {
    let largest = (0..x.len()).fold(0f64, |m, i| m.max(x.value[i].abs() + x.bound[i]));
    let tiny = TINY16 * scale(largest);
    (0..x.len())
        .map(|i| {
            let (value, bound) = x.at(i);
            (value, bound + U16 * (value.abs() + bound) + tiny)
        })
        .collect()
}

/// `x` of [`H16`] with these rows, bytes behind them 0xff, and the scales.
pub fn lay_out(rows: &[H16Row]) -> (Vec<u8>, Vec<f32>) {
    let k = rows.first().map_or(0, |r| r.values.len());
    let mut bytes = vec![0xff; H16::bytes(k, rows.len())];
    for (t, row) in rows.iter().enumerate() {
        for (i, v) in row.values.iter().enumerate() {
            let at = H16::offset(t, i, rows.len());
            bytes[at..at + 2].copy_from_slice(&v.to_le_bytes());
        }
    }
    (bytes, rows.iter().map(|r| r.scale).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_value_lies_below_two_to_the_fourteenth() {
        for largest in [1.0f32, 1.999_999_9, 2.0, 3e-7, 6.5e9, f32::MAX, 2f32.powi(-113)] {
            let row = H16Row::new(&[0.0, largest / 3.0, -largest]);
            // Rounding may take it there.
            let top = row.values[2].to_f64().abs();
            assert!((8192.0..=16384.0).contains(&top), "{largest} became {top}");
            let back = row.dequantize()[2];
            assert!((back + f64::from(largest)).abs() <= U16 * f64::from(largest));
        }
    }

    #[test]
    fn rows_without_a_magnitude_have_scale_one() {
        assert_eq!(H16Row::new(&[0.0, -0.0]).scale, 1.0);
        let row = H16Row::new(&[1.5, f32::NAN, f32::NEG_INFINITY]);
        assert_eq!((row.scale, row.values[0].to_f64()), (1.0, 1.5));
        assert!(row.values[1].is_nan() && row.values[2] == f16::NEG_INFINITY);
    }

    #[test]
    fn the_smallest_rows_keep_a_normal_scale() {
        let row = H16Row::new(&[f32::from_bits(1), 2f32.powi(-120)]);
        assert_eq!(row.scale, 2f32.powi(-126));
        assert_eq!(
            row.values.iter().map(|v| v.to_f64()).collect::<Vec<_>>(),
            [2f64.powi(-23), 64.0]
        );
    }

    #[test]
    fn rounding_stays_within_its_bound() {
        let x: Vec<f32> = (0..512)
            .map(|i| ((i * 37 % 511) as f32 - 255.0).powi(5) * 1e-9)
            .collect();
        let bounded = rounded(&Bounded::exact(&x));
        let row = H16Row::new(&x).dequantize();
        for (i, got) in row.iter().enumerate() {
            let (value, bound) = bounded.at(i);
            assert!((got - value).abs() <= bound, "{value} became {got}");
        }
    }

    #[test]
    fn the_layout_is_a_permutation() {
        let (k, n) = (192, 11);
        let mut seen = vec![false; H16::bytes(k, n) / 2];
        for t in 0..n {
            for i in 0..k {
                let at = H16::offset(t, i, n);
                assert!(at % 2 == 0 && !std::mem::replace(&mut seen[at / 2], true));
            }
        }
        // Two values of each 16 make a piece, and eight tokens' first pieces lie in different banks.
        let of_piece = [2, 3, 18, 19, 34, 35, 50, 51].map(|i| H16::offset(3, 64 + i, n));
        assert!((0..8).all(|i| of_piece[i] == of_piece[0] + 2 * i) && of_piece[0] % 16 == 0);
        let pieces: Vec<usize> = (0..8).map(|t| H16::offset(t, 0, n) % 128).collect();
        assert_eq!(pieces, [0, 16, 32, 48, 64, 80, 96, 112]);
    }
}
