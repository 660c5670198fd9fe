//! From how many tokens on a mat-mul or attention window is faster than stock ggml: measured, by GPU family and weight type.

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
    /// Query tokens of attention.
    Queries {
        /// The queries.
        q: Role,
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

/// No number of tokens makes the window faster than stock.
pub const NEVER: i64 = i64::MAX;

/// The table: the smallest prompt at which the windows were measured to be faster than stock (H200, Q4_K and Q8_0 at 512 and 2048
/// tokens; the other quantised types by their kernels' rates). Where fewer would do is not known yet. F16 at 2048 tokens is as fast
/// as stock's cuBLAS, no faster.
pub static FAMILIES: &[Family] = &[Family {
    cc: 90,
    least_tokens: &[
        (DType::F16, NEVER),
        (DType::BF16, NEVER),
        (DType::Q8_0, 512),
        (DType::Q4_0, 512),
        (DType::Q4_1, 512),
        (DType::Q5_0, 512),
        (DType::Q5_1, 512),
        (DType::Q2_K, 512),
        (DType::Q3_K, 512),
        (DType::Q4_K, 512),
        (DType::Q5_K, 512),
        (DType::Q6_K, 512),
        (DType::IQ4_NL, 512),
        (DType::IQ4_XS, 512),
        (DType::MXFP4, 512),
        (DType::NVFP4, 512),
    ],
}];

/// Least tokens of the windows with experts, for all weight types: the only number at which they were measured (Qwen3-MoE shape).
pub const MOE_MIN_TOKENS: i64 = 2048;

/// Least query tokens of attention modules, of all streams together.
pub const FA4_MIN_TOKENS: i64 = 512;

/// Least blocks of attention modules, one for each head and tile of [`FA4_TILE`] tokens. Blocks do not share the keys of a head, so few of
/// them leave most of a GPU idle.
pub const FA4_MIN_BLOCKS: i64 = 64;

/// Tokens of a tile, in most modules.
const FA4_TILE: i64 = 128;

/// The table with what the settings make of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Thresholds {
    /// `GGML_FLASHRT_MM_MIN_TOKENS`: one number for all types, with experts and without.
    pub mm_min_tokens: Option<i64>,
    /// `GGML_FLASHRT_FA4_MIN_TOKENS`
    pub fa4_min_tokens: Option<i64>,
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
        self.least_tokens(cc, dtype).map(|dense| {
            self.mm_min_tokens
                .unwrap_or(if dense == NEVER { NEVER } else { MOE_MIN_TOKENS })
        })
    }

    /// Are there enough query tokens, of so many streams, to keep a GPU busy?
    fn check_queries(self, of_stream: i64, heads: i64, streams: i64) -> Result<(), Decline> {
        let n_tokens = of_stream.saturating_mul(streams);
        let least = self.fa4_min_tokens.unwrap_or(FA4_MIN_TOKENS);
        let tiles = (of_stream + FA4_TILE - 1) / FA4_TILE * streams;
        let detail = match () {
            () if n_tokens < least => format!("{n_tokens} tokens, at least {least}"),
            () if self.fa4_min_tokens.is_some() => return Ok(()),
            () if tiles * heads < FA4_MIN_BLOCKS => format!("{} blocks, at least {FA4_MIN_BLOCKS}", tiles * heads),
            () if 2 * n_tokens < tiles * FA4_TILE => format!("{of_stream} tokens of a stream, in tiles of {FA4_TILE}"),
            () => return Ok(()),
        };
        Err(Decline::new("few tokens", detail))
    }

    /// Is the product large enough?
    pub(super) fn check(self, cc: i32, m: &Match, threshold: Threshold) -> Result<(), Decline> {
        let no_kernel = |what: &str| Err(Decline::new("kernel", format!("no {what} for sm_{cc}")));
        let (weight, n_tokens) = match threshold {
            Threshold::Queries { q } => {
                if FAMILIES.iter().all(|f| f.cc != cc) {
                    return no_kernel("attention modules");
                }
                let [_, of_stream, heads, streams] = m.tensor(q).ne();
                return self.check_queries(of_stream, heads, streams);
            }
            Threshold::Rows { weight, input } => (m.tensor(weight), m.tensor(input).n_rows()),
            Threshold::Routed { weight, ids } => (m.tensor(weight), m.tensor(ids).ne()[1]),
        };
        let name = weight
            .dtype()
            .map_or_else(|| format!("type {}", weight.raw().dtype), |d| d.name().to_owned());
        let least = weight.dtype().and_then(|d| match threshold {
            Threshold::Routed { .. } => self.least_routed_tokens(cc, d),
            _ => self.least_tokens(cc, d),
        });
        match least {
            None if FAMILIES.iter().all(|f| f.cc != cc) => no_kernel("mat-muls"),
            None => Err(Decline::new("weight type", format!("{weight:?}: no kernel for {name}"))),
            Some(least) if n_tokens < least => {
                let detail = match least {
                    NEVER => format!("{n_tokens} tokens; for {name} stock is as fast with any number"),
                    _ => format!("{n_tokens} tokens, at least {least} for {name}"),
                };
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
    fn few_queries_decline() {
        let verdict = |t: Thresholds, of_stream, heads, streams| t.check_queries(of_stream, heads, streams).is_ok();
        let measured = Thresholds::default();
        for (of_stream, heads, streams, fires) in [
            (512, 32, 1, true),
            (511, 32, 1, false),
            (128, 32, 4, true),
            (64, 32, 8, true),
            // Tiles less than half full.
            (32, 32, 16, false),
            // 4 heads: 16 tiles make 64 blocks.
            (2048, 4, 1, true),
            (1024, 4, 1, false),
        ] {
            assert_eq!(
                verdict(measured, of_stream, heads, streams),
                fires,
                "{of_stream} {heads} {streams}"
            );
        }
        let given = Thresholds {
            fa4_min_tokens: Some(8),
            ..measured
        };
        assert!(verdict(given, 2, 1, 4) && !verdict(given, 7, 100, 1));
    }

    #[test]
    fn one_number_overrides_all() {
        let all = Thresholds {
            mm_min_tokens: Some(7),
            ..Thresholds::default()
        };
        assert!(MM_WEIGHT_TYPES
            .iter()
            .all(|&d| all.least_tokens(90, d) == Some(7) && all.least_routed_tokens(90, d) == Some(7)));
        assert_eq!(all.least_tokens(89, DType::F16), None);
    }
}
