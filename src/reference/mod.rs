//! Every window again on the CPU, in f64 from the definition of its operations: the oracles.
//!
//! An oracle returns [`Bounded`] values: beside each stands how far a right f32 kernel may be from it. The bound counts the
//! roundings on the way (unit roundoff [`U`]) and carries the bounds of its inputs through each operation by its derivative.
//! [`compare`] holds a kernel's result against both. One file per window, and one per operation that windows share.

pub mod add_norm;
pub mod dec_attn;
pub mod geglu_ffn;
pub mod gemv_res;
pub mod glu;
pub mod glu_gemv;
pub mod h16;
pub mod mm_prefill;
pub mod mm_res;
pub mod moe;
pub mod norm;
pub mod prefill_fa4;
pub mod qkv_gemv;
pub mod quant;
pub mod rope;
pub mod sample;
pub mod sandwich_norm;

/// Unit roundoff of f32: a rounded result is off by at most this, relative.
pub const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Values, each with the largest error that a right f32 kernel may have.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Bounded {
    /// Exact to f64.
    pub value: Vec<f64>,
    /// Absolute, in the same unit.
    pub bound: Vec<f64>,
}

impl Bounded {
    /// Values that the kernel reads as they are.
    pub fn exact<T: Copy + Into<f64>>(values: &[T]) -> Bounded {
        let value: Vec<f64> = values.iter().map(|&v| v.into()).collect();
        Bounded {
            bound: vec![0.0; value.len()],
            value,
        }
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.value.len()
    }

    /// No values?
    pub fn is_empty(&self) -> bool {
        self.value.is_empty()
    }

    /// Value and bound at `i`.
    pub fn at(&self, i: usize) -> (f64, f64) {
        (self.value[i], self.bound[i])
    }

    /// A part of the values.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Bounded {
        Bounded {
            value: self.value[range.clone()].to_vec(),
            bound: self.bound[range].to_vec(),
        }
    }

    /// Appends `other`.
    pub fn extend(&mut self, other: Bounded) {
        self.value.extend(other.value);
        self.bound.extend(other.bound);
    }

    /// Sum, rounded once.
    pub fn add(&self, other: &Bounded) -> Bounded {
        assert_eq!(self.len(), other.len(), "operands of one shape");
        (0..self.len())
            .map(|i| rounded(self.value[i] + other.value[i], self.bound[i] + other.bound[i]))
            .collect()
    }

    /// Product with exact values, rounded once.
    pub fn mul(&self, w: &[f64]) -> Bounded {
        assert_eq!(self.len(), w.len(), "operands of one shape");
        (0..self.len())
            .map(|i| rounded(self.value[i] * w[i], self.bound[i] * w[i].abs()))
            .collect()
    }

    /// With the rounding of a store to a type of unit roundoff `u` whose smallest value is `tiny`.
    pub fn stored(mut self, u: f64, tiny: f64) -> Bounded {
        for (bound, value) in self.bound.iter_mut().zip(&self.value) {
            *bound += u * (value.abs() + *bound) + tiny / 2.0;
        }
        self
    }
}

impl FromIterator<(f64, f64)> for Bounded {
    fn from_iter<I: IntoIterator<Item = (f64, f64)>>(pairs: I) -> Bounded {
        let (value, bound) = pairs.into_iter().unzip();
        Bounded { value, bound }
    }
}

/// A result with the rounding of its last operation.
fn rounded(value: f64, bound: f64) -> (f64, f64) {
    (value, bound + U * (value.abs() + bound))
}

/// Where a result left its bound.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Mismatch {
    /// The worst value.
    #[error("value {index} is {got}, expected {want} +- {bound:e}")]
    Value {
        /// Index of the value.
        index: usize,
        /// The kernel's.
        got: f64,
        /// The oracle's.
        want: f64,
        /// Largest error.
        bound: f64,
    },
    /// The shapes differ.
    #[error("{got} values, expected {want}")]
    Length {
        /// The kernel's.
        got: usize,
        /// The oracle's.
        want: usize,
    },
}

/// Holds `got` against the oracle; the largest quotient of error and bound when all are within.
pub fn compare(got: &[f32], want: &Bounded) -> Result<f64, Mismatch> {
    if got.len() != want.len() {
        return Err(Mismatch::Length {
            got: got.len(),
            want: want.len(),
        });
    }
    let quotient = |i: usize| {
        let error = (f64::from(got[i]) - want.value[i]).abs();
        // A zero bound allows no error; NaN must count as worst.
        match (error, want.bound[i]) {
            (0.0, _) => 0.0,
            (error, bound) if error.is_finite() => error / bound,
            _ => f64::INFINITY,
        }
    };
    let worst = (0..got.len())
        .map(|i| (quotient(i), i))
        .fold((0.0, 0), |a, b| if b.0 > a.0 { b } else { a });
    match worst {
        (quotient, _) if quotient <= 1.0 => Ok(quotient),
        (_, index) => Err(Mismatch::Value {
            index,
            got: got[index].into(),
            want: want.value[index],
            bound: want.bound[index],
        }),
    }
}
