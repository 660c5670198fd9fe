//! From how many tokens on a mat-mul window is faster than stock ggml: measured, by GPU family and weight type.

use super::pattern::{Match, Role};
use super::Decline;
use crate::graph::DType;

/// Which product of a window must be large enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threshold {
    /// A weight times all rows of an input.
    Rows {
        /// The weight.
        weight: Role,
        /// The input.
        input: Role,
    },
    /// Experts' weights times the tokens that are routed to them.
    Routed {
        /// The experts.
        weight: Role,
        /// Which experts each token takes.
        ids: Role,
    },
}

/// Least tokens of the mat-mul windows on one GPU family.
#[derive(Debug)]
pub struct Family {
    /// Compute capability, times 10: these kernels exist on no other.
    pub cc: i32,
    /// By weight type.
    pub least_tokens: &'static [(DType, i64)],
}

/// The table. Values are provisional: nothing has been measured yet.
pub static FAMILIES: &[Family] = &[Family {
    cc: 90,
    least_tokens: &[
        (DType::F16, 64),
        (DType::BF16, 64),
        (DType::Q8_0, 64),
        (DType::Q4_0, 64),
        (DType::Q4_1, 64),
        (DType::Q5_0, 64),
        (DType::Q5_1, 64),
        (DType::Q2_K, 64),
        (DType::Q3_K, 64),
        (DType::Q4_K, 64),
        (DType::Q5_K, 64),
        (DType::Q6_K, 64),
        (DType::IQ4_NL, 64),
        (DType::IQ4_XS, 64),
        (DType::MXFP4, 64),
        (DType::NVFP4, 64),
    ],
}];

/// Least tokens of the windows with experts, for all weight types. Provisional: nothing has been measured yet.
pub const MOE_MIN_TOKENS: i64 = 128;

/// The table with what the settings make of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Thresholds {
    /// `GGML_FLASHRT_MM_MIN_TOKENS`: one number for all types, with experts and without.
    pub mm_min_tokens: Option<i64>,
}

impl Thresholds {
    /// Least tokens for weights of a type on a GPU; `None` where there are no kernels.
    pub fn least_tokens(self, cc: i32, dtype: DType) -> Option<i64> {
        let family = FAMILIES.iter().find(|f| f.cc == cc)?;
        let &(_, measured) = family.least_tokens.iter().find(|(d, _)| *d == dtype)?;
        Some(self.mm_min_tokens.unwrap_or(measured))
    }

    /// Least tokens for experts of a type on a GPU; `None` where there are no kernels.
    pub fn least_routed_tokens(self, cc: i32, dtype: DType) -> Option<i64> {
        self.least_tokens(cc, dtype)
            .map(|_| self.mm_min_tokens.unwrap_or(MOE_MIN_TOKENS))
    }

    /// Is the product large enough?
    pub(super) fn check(self, cc: i32, m: &Match, threshold: Threshold) -> Result<(), Decline> {
        let (weight, n_tokens) = match threshold {
            Threshold::Rows { weight, input } => (m.tensor(weight), m.tensor(input).n_rows()),
            Threshold::Routed { weight, ids } => (m.tensor(weight), m.tensor(ids).ne()[1]),
        };
        let name = weight
            .dtype()
            .map_or_else(|| format!("type {}", weight.raw().dtype), |d| d.name().to_owned());
        let least = weight.dtype().and_then(|d| match threshold {
            Threshold::Rows { .. } => self.least_tokens(cc, d),
            Threshold::Routed { .. } => self.least_routed_tokens(cc, d),
        });
        match least {
            None if FAMILIES.iter().all(|f| f.cc != cc) => {
                Err(Decline::new("kernel", format!("no mat-muls for sm_{cc}")))
            }
            None => Err(Decline::new("weight type", format!("{weight:?}: no kernel for {name}"))),
            Some(least) if n_tokens < least => {
                let detail = format!("{n_tokens} tokens, at least {least} for {name}");
                Err(Decline::new("few tokens", detail))
            }
            Some(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::MM_WEIGHT_TYPES;

    #[test]
    fn every_type_of_the_kernel_has_a_threshold_and_no_other() {
        for family in FAMILIES {
            let types: Vec<DType> = family.least_tokens.iter().map(|(d, _)| *d).collect();
            assert_eq!(types, MM_WEIGHT_TYPES);
        }
        assert_eq!(Thresholds::default().least_tokens(90, DType::F32), None);
        assert_eq!(Thresholds::default().least_tokens(120, DType::F16), None);
        assert_eq!(Thresholds::default().least_routed_tokens(90, DType::F32), None);
        assert_eq!(
            Thresholds::default().least_routed_tokens(90, DType::Q4_K),
            Some(MOE_MIN_TOKENS)
        );
    }

    #[test]
    fn one_number_overrides_all() {
        let all = Thresholds { mm_min_tokens: Some(7) };
        assert!(MM_WEIGHT_TYPES
            .iter()
            .all(|&d| all.least_tokens(90, d) == Some(7) && all.least_routed_tokens(90, d) == Some(7)));
        assert_eq!(all.least_tokens(89, DType::F16), None);
    }
}
