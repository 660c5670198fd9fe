//! Processes of a benchmark, and what follows from their samples.

use super::{median, ReportError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The two sides of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// The build under test.
    Adapter,
    /// What it is compared with.
    Stock,
}

impl Arm {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Arm::Adapter => "adapter",
            Arm::Stock => "stock",
        }
    }
}

/// One process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Side it belongs to.
    pub arm: Arm,
    /// Environment setting that was varied, for example `GGML_CUDA_GRAPH_OPT=1`, or `default`.
    pub setting: String,
    /// Full command line.
    pub command: Vec<String>,
    /// Variables that can change the outcome, as the process saw them.
    pub env: BTreeMap<String, String>,
    /// Duration of the process in seconds.
    pub wall_s: f64,
    /// What the process reported: for llama-bench one object a test, with all of its fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub records: Vec<Map<String, Value>>,
    /// The adapter's counters (`GGML_FLASHRT_STATS`); null when the process wrote none.
    pub stats: Option<Value>,
}

/// One arm's samples in the setting that was best for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ArmResult {
    /// The setting.
    pub setting: String,
    /// Tokens a second, all of its processes together.
    pub samples_ts: Vec<f64>,
    /// Their median.
    pub median_ts: f64,
    /// (Largest - smallest) / median.
    pub spread: f64,
}

/// Comparison of the arms in one test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The test, for example `tg128`.
    pub test: String,
    /// The build under test.
    pub adapter: ArmResult,
    /// What it is compared with.
    pub stock: ArmResult,
    /// Median of the adapter over median of stock.
    pub ratio: f64,
    /// The same for each pass of the adapter arm alone: how far they lie apart is the drift of the machine.
    pub ratio_by_pass: Vec<f64>,
}

/// Name of the test that a llama-bench record is about: `pp512`, `tg128`, with `@d4096` when the context was filled before.
pub(crate) fn test_name(record: &Map<String, Value>) -> String {
    let number = |field: &str| record.get(field).and_then(Value::as_u64).unwrap_or(0);
    let mut name = match (number("n_prompt"), number("n_gen")) {
        (pp, 0) => format!("pp{pp}"),
        (0, tg) => format!("tg{tg}"),
        (pp, tg) => format!("pp{pp}+tg{tg}"),
    };
    if number("n_depth") > 0 {
        name += &format!("@d{}", number("n_depth"));
    }
    name
}

fn samples(run: &Run, test: &str) -> Vec<f64> {
    let of_test = run.records.iter().filter(|r| test_name(r) == test);
    of_test
        .filter_map(|r| r.get("samples_ts")?.as_array())
        .flatten()
        .filter_map(Value::as_f64)
        .collect()
}

/// Samples of an arm in its best setting.
fn best(runs: &[Run], arm: Arm, test: &str) -> Result<ArmResult, ReportError> {
    let mut by_setting: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for run in runs.iter().filter(|r| r.arm == arm) {
        by_setting.entry(&run.setting).or_default().extend(samples(run, test));
    }
    let measured = by_setting.into_iter().filter_map(|(setting, samples_ts)| {
        let median_ts = median(&samples_ts).filter(|m| *m > 0.0)?;
        let largest = samples_ts.iter().copied().fold(f64::MIN, f64::max);
        let smallest = samples_ts.iter().copied().fold(f64::MAX, f64::min);
        let spread = (largest - smallest) / median_ts;
        Some(ArmResult {
            setting: setting.to_owned(),
            samples_ts,
            median_ts,
            spread,
        })
    });
    measured
        .max_by(|a, b| a.median_ts.total_cmp(&b.median_ts))
        .ok_or_else(|| ReportError::NoSamples {
            test: test.to_owned(),
            arm: arm.name(),
        })
}

/// Compares the arms in every test: each in the setting that is best for it.
pub fn outcomes(runs: &[Run], tests: &[String]) -> Result<Vec<Outcome>, ReportError> {
    let compare = |test: &String| {
        let adapter = best(runs, Arm::Adapter, test)?;
        let stock = best(runs, Arm::Stock, test)?;
        let passes = runs
            .iter()
            .filter(|r| r.arm == Arm::Adapter && r.setting == adapter.setting);
        let ratio_by_pass = passes
            .filter_map(|run| median(&samples(run, test)))
            .map(|pass| pass / stock.median_ts)
            .collect();
        let ratio = adapter.median_ts / stock.median_ts;
        Ok(Outcome {
            test: test.clone(),
            adapter,
            stock,
            ratio,
            ratio_by_pass,
        })
    };
    tests.iter().map(compare).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(arm: Arm, setting: &str, tg: &[f64]) -> Run {
        let record = json!({"n_prompt": 0, "n_gen": 128, "n_depth": 0, "samples_ts": tg});
        Run {
            arm,
            setting: setting.to_owned(),
            command: vec![],
            env: BTreeMap::new(),
            wall_s: 1.0,
            records: vec![record.as_object().unwrap().clone()],
            stats: None,
        }
    }

    #[test]
    fn each_arm_is_taken_in_its_best_setting() {
        let runs = [
            run(Arm::Adapter, "default", &[120.0, 122.0]),
            run(Arm::Adapter, "opt", &[110.0, 110.0]),
            run(Arm::Stock, "default", &[80.0, 80.0]),
            run(Arm::Stock, "opt", &[100.0, 100.0]),
            run(Arm::Adapter, "default", &[118.0, 120.0]),
            run(Arm::Adapter, "opt", &[111.0, 111.0]),
        ];
        let outcome = &outcomes(&runs, &["tg128".to_owned()]).unwrap()[0];
        assert_eq!(
            (outcome.adapter.setting.as_str(), outcome.stock.setting.as_str()),
            ("default", "opt")
        );
        assert_eq!(outcome.ratio, 1.2);
        assert_eq!(outcome.ratio_by_pass, [1.21, 1.19]);
        assert!((outcome.adapter.spread - 4.0 / 120.0).abs() < 1e-12);
    }

    #[test]
    fn a_test_without_samples_is_an_error_not_a_zero() {
        let runs = [run(Arm::Adapter, "default", &[1.0]), run(Arm::Stock, "default", &[])];
        let error = outcomes(&runs, &["tg128".to_owned()]).unwrap_err().to_string();
        assert_eq!(error, "the runs have no samples of tg128 for the stock arm");
    }

    #[test]
    fn tests_are_named_as_llama_bench_names_them() {
        let name = |pp: u32, tg: u32, depth: u32| {
            test_name(
                json!({"n_prompt": pp, "n_gen": tg, "n_depth": depth})
                    .as_object()
                    .unwrap(),
            )
        };
        assert_eq!(name(512, 0, 0), "pp512");
        assert_eq!(name(0, 128, 4096), "tg128@d4096");
        assert_eq!(name(512, 128, 0), "pp512+tg128");
    }
}
