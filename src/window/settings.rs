//! The switches users have, read once from the environment.

use super::thresholds::Thresholds;
use super::WINDOWS;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Where `GGML_FLASHRT_STATS` puts its table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatsTarget {
    /// A table on stderr when the process ends.
    Stderr,
    /// JSON in a file when the process ends.
    File(PathBuf),
}

/// Resolved settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Everything is off.
    pub disabled: bool,
    /// By index in [`WINDOWS`]: the window is switched off.
    pub off: Vec<bool>,
    /// Explain each decline once.
    pub debug: bool,
    /// Count, and print at the end.
    pub stats: Option<StatsTarget>,
    /// Record graphs to this file.
    pub dump: Option<PathBuf>,
    /// Most graphs recorded.
    pub dump_max: usize,
    /// From how many tokens on mat-muls are taken.
    pub thresholds: Thresholds,
    /// Most bytes of device memory that a context holds for scratch and hand-offs.
    pub scratch_limit: usize,
    /// Lines about names that nobody knows.
    pub warnings: Vec<String>,
}

/// A switch that is not a window's.
pub struct Switch {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub does: &'static str,
}

/// All switches but those of the windows.
pub static SWITCHES: &[Switch] = &[
    Switch {
        name: "GGML_FLASHRT_DISABLE",
        does: "switches all windows off",
    },
    Switch {
        name: "GGML_CUDA_FLASHRT_DISABLE",
        does: "the same, under the name other adapters use",
    },
    Switch {
        name: "GGML_FLASHRT_STATS",
        does: "1: table of fired and declined sites on stderr at exit; a path: JSON there, once a second and at exit",
    },
    Switch {
        name: "GGML_FLASHRT_DEBUG",
        does: "logs each declined site once, with what was found",
    },
    Switch {
        name: "GGML_FLASHRT_DUMP",
        does: "records each distinct graph to this file, one JSON object a line",
    },
    Switch {
        name: "GGML_FLASHRT_DUMP_MAX",
        does: "most graphs to record (default 64)",
    },
    Switch {
        name: "GGML_FLASHRT_MM_MIN_TOKENS",
        does: "least tokens of the mat-mul windows, for all weight types (default: `flashrt windows` lists them)",
    },
    Switch {
        name: "GGML_FLASHRT_FA4_MIN_TOKENS",
        does: "least query tokens of PREFILL_FA4, whatever the number of heads (default 512, of enough heads)",
    },
    Switch {
        name: "GGML_FLASHRT_SCRATCH_MIB",
        does: "most device memory that a context holds for scratch and hand-offs, in MiB (default 256)",
    },
    Switch {
        name: MASK_FILL,
        does: "with the mask patch: attention masks are left to llama.cpp",
    },
];

/// Read by host/mask, inside libllama: known here so that it is not called unknown.
const MASK_FILL: &str = "GGML_FLASHRT_NO_MASK_FILL";

/// Names of windows and options that other adapters have and this version does not: known, without effect.
static FOREIGN: &[&str] = &[
    "GGML_CUDA_FLASHRT_NO_CACHE",
    "GGML_FLASHRT_NO_RMS_GEMMA",
    "GGML_FLASHRT_NO_QKV_PREFILL",
    "GGML_FLASHRT_NO_VIT_FA4",
    "GGML_FLASHRT_NO_KV_TAIL",
    "GGML_FLASHRT_NO_VIS_F16",
];

const DUMP_MAX: usize = 64;
const SCRATCH_MIB: usize = 256;

impl Settings {
    /// From the process's environment.
    pub fn from_env() -> Settings {
        let ours =
            std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.to_string_lossy().into_owned())));
        Settings::from_vars(ours.filter(|(k, _)| k.starts_with("GGML_FLASHRT_") || k.starts_with("GGML_CUDA_FLASHRT_")))
    }

    /// From given variables. Presence, or any value but `0`, switches on; `0` switches off.
    pub fn from_vars(vars: impl IntoIterator<Item = (String, String)>) -> Settings {
        let mut vars: BTreeMap<String, String> = vars.into_iter().collect();
        let off = WINDOWS
            .iter()
            .map(|w| vars.remove(w.switch).map_or(!w.on_by_default, |v| v != "0"))
            .collect();
        let mut warnings = Vec::new();
        // Of a number 0 is a value like others.
        let mut number = |name: &str, default: Option<usize>| match vars.remove(name).map(|v| v.parse().map_err(|_| v))
        {
            None => default,
            Some(Ok(n)) => Some(n),
            Some(Err(v)) => {
                let used = default.map_or("its default".to_owned(), |n| n.to_string());
                warnings.push(format!("{name}={v} is not a number; {used} is used"));
                default
            }
        };
        let dump_max = number("GGML_FLASHRT_DUMP_MAX", Some(DUMP_MAX)).unwrap_or_default();
        let scratch_mib = number("GGML_FLASHRT_SCRATCH_MIB", Some(SCRATCH_MIB)).unwrap_or_default();
        let [mm_min_tokens, fa4_min_tokens] = ["GGML_FLASHRT_MM_MIN_TOKENS", "GGML_FLASHRT_FA4_MIN_TOKENS"]
            .map(|name| number(name, None).map(|n| i64::try_from(n).unwrap_or(i64::MAX)));
        let mut take = |name: &str| vars.remove(name).filter(|v| v != "0");
        let disabled = take("GGML_FLASHRT_DISABLE").is_some() | take("GGML_CUDA_FLASHRT_DISABLE").is_some();
        let stats = take("GGML_FLASHRT_STATS").map(|v| match v.as_str() {
            "" | "1" => StatsTarget::Stderr,
            path => StatsTarget::File(path.into()),
        });
        let debug = take("GGML_FLASHRT_DEBUG").is_some();
        let dump = take("GGML_FLASHRT_DUMP").filter(|v| !v.is_empty()).map(PathBuf::from);
        take(MASK_FILL);
        for name in FOREIGN {
            if take(name).is_some() {
                warnings.push(format!("{name} has no effect: this build has no such window"));
            }
        }
        if !vars.is_empty() {
            let unknown: Vec<&str> = vars.keys().map(String::as_str).collect();
            let known: Vec<&str> = SWITCHES
                .iter()
                .map(|s| s.name)
                .chain(WINDOWS.iter().map(|w| w.switch))
                .collect();
            warnings.push(format!(
                "unknown: {}. Known are: {}",
                unknown.join(", "),
                known.join(", ")
            ));
        }
        Settings {
            disabled,
            off,
            debug,
            stats,
            dump,
            dump_max,
            thresholds: Thresholds {
                mm_min_tokens,
                fa4_min_tokens,
            },
            scratch_limit: scratch_mib.saturating_mul(1 << 20),
            warnings,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(vars: &[(&str, &str)]) -> Settings {
        Settings::from_vars(vars.iter().map(|(k, v)| (k.to_string(), v.to_string())))
    }

    #[test]
    fn nothing_set_means_the_defaults() {
        let s = settings(&[]);
        assert!(!s.disabled && s.stats.is_none() && s.warnings.is_empty());
        for (window, off) in WINDOWS.iter().zip(s.off) {
            assert_eq!(off, !window.on_by_default, "{}", window.name);
        }
    }

    #[test]
    fn zero_switches_a_window_on() {
        let s = settings(&[("GGML_FLASHRT_NO_DEC_ATTN", "0")]);
        assert!(s.off.iter().all(|&off| !off));
    }

    #[test]
    fn zero_is_off_and_presence_is_on() {
        assert!(!settings(&[("GGML_FLASHRT_DISABLE", "0")]).disabled);
        assert!(settings(&[("GGML_FLASHRT_DISABLE", "")]).disabled);
        assert!(settings(&[("GGML_CUDA_FLASHRT_DISABLE", "1")]).disabled);
    }

    #[test]
    fn each_window_has_its_switch() {
        for (i, window) in WINDOWS.iter().enumerate() {
            let s = settings(&[(window.switch, "1")]);
            assert_eq!(window.switch, format!("GGML_FLASHRT_NO_{}", window.name));
            let expected = |j: usize| i == j || !WINDOWS[j].on_by_default;
            assert!(
                s.off.iter().enumerate().all(|(j, &off)| off == expected(j)),
                "{}",
                window.name
            );
        }
    }

    #[test]
    fn unknown_names_are_reported_once_with_the_known_ones() {
        let s = settings(&[("GGML_FLASHRT_NO_QKV_GMV", "1"), ("GGML_FLASHRT_TURBO", "1")]);
        assert_eq!(s.warnings.len(), 1);
        for name in [
            "GGML_FLASHRT_NO_QKV_GMV",
            "GGML_FLASHRT_TURBO",
            "GGML_FLASHRT_NO_QKV_GEMV",
            "GGML_FLASHRT_STATS",
        ] {
            assert!(s.warnings[0].contains(name), "{}", s.warnings[0]);
        }
    }

    #[test]
    fn every_listed_switch_is_known() {
        for switch in SWITCHES {
            let s = settings(&[(switch.name, "1")]);
            assert!(s.warnings.is_empty(), "{:?}", s.warnings);
        }
    }

    #[test]
    fn other_adapters_names_are_known() {
        let s = settings(&[("GGML_FLASHRT_NO_VIT_FA4", "1")]);
        assert_eq!(s.warnings.len(), 1);
        assert!(s.warnings[0].contains("no effect"));
    }

    #[test]
    fn stats_take_a_path() {
        assert_eq!(
            settings(&[("GGML_FLASHRT_STATS", "1")]).stats,
            Some(StatsTarget::Stderr)
        );
        assert_eq!(
            settings(&[("GGML_FLASHRT_STATS", "/x.json")]).stats,
            Some(StatsTarget::File("/x.json".into()))
        );
        assert_eq!(settings(&[("GGML_FLASHRT_STATS", "0")]).stats, None);
    }

    #[test]
    fn a_bad_number_is_said() {
        let s = settings(&[
            ("GGML_FLASHRT_DUMP_MAX", "many"),
            ("GGML_FLASHRT_SCRATCH_MIB", "-1"),
            ("GGML_FLASHRT_MM_MIN_TOKENS", ""),
        ]);
        assert_eq!(s.dump_max, DUMP_MAX);
        assert_eq!(s.scratch_limit, 256 << 20);
        assert_eq!(s.thresholds, Thresholds::default());
        assert_eq!(s.warnings.len(), 3);
        assert!(s.warnings[0].contains("many"));
    }

    #[test]
    fn numbers_are_taken_as_they_are_even_zero() {
        let s = settings(&[
            ("GGML_FLASHRT_DUMP_MAX", "0"),
            ("GGML_FLASHRT_SCRATCH_MIB", "0"),
            ("GGML_FLASHRT_MM_MIN_TOKENS", "0"),
        ]);
        assert_eq!((s.dump_max, s.scratch_limit), (0, 0));
        assert_eq!(s.thresholds.mm_min_tokens, Some(0));
        assert!(s.warnings.is_empty());
        assert_eq!(settings(&[("GGML_FLASHRT_SCRATCH_MIB", "64")]).scratch_limit, 64 << 20);
    }
}
