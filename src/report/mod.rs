//! One schema for everything that is measured: benchmarks, qualifications and single series.
//!
//! A report keeps the raw samples, and every figure quoted from it can be computed again from them: [`Report::verify`] does,
//! and so does the evidence index before it believes a headline. What was not measured is `null`, with the reason under the
//! same path in [`Report::missing`]; it is never 0.

mod bench;
pub mod evidence;
pub mod plot;

pub use bench::{outcomes, Arm, ArmResult, Outcome, Run};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the schema. Readers refuse another one.
pub const SCHEMA: u32 = 1;

/// Why a report cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ReportError {
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path}: no report: {source}", path = path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: schema {found}, but this version reads {SCHEMA}", path = path.display())]
    Schema { path: PathBuf, found: u32 },
    #[error("the runs have no samples of {test} for the {arm} arm")]
    NoSamples { test: String, arm: &'static str },
    #[error("{what} is {stated} in the report, but its samples give {computed}")]
    Differs {
        what: String,
        stated: String,
        computed: String,
    },
    #[error("{0} is null, and the report does not say why")]
    Unexplained(String),
    #[error("headline {0} names no outcome and no series of the report")]
    Dangling(String),
}

/// What a report is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Speed of one build against another.
    Bench,
    /// Results of one build against another.
    Qualify,
    /// Series of one quantity.
    Measure,
}

/// A report as it is written to disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What it is about.
    pub kind: Kind,
    /// When it was begun, UTC, RFC 3339.
    pub created: String,
    /// The command line that made it.
    pub command: Vec<String>,
    /// Where it was made.
    pub machine: Machine,
    /// What was measured.
    pub build: Build,
    /// On what.
    pub workload: Workload,
    /// Processes in the order in which they ran.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<Run>,
    /// Comparisons of the two arms, a line per test.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outcomes: Vec<Outcome>,
    /// Series of one quantity.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Series>,
    /// Conditions that hold or do not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checks: Vec<Check>,
    /// Figures to quote.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headlines: Vec<Headline>,
    /// Path of each field that is null, and why it is.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub missing: BTreeMap<String, String>,
}

/// The machine; fields that could not be found out are null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // named after what nvidia-smi and /proc call them
pub struct Machine {
    pub gpu: Option<String>,
    pub gpu_count: Option<u32>,
    pub compute_capability: Option<String>,
    pub driver: Option<String>,
    pub sm_count: Option<u32>,
    pub memory_mib: Option<u64>,
    pub clock_sm_mhz: Option<u32>,
    pub clock_sm_max_mhz: Option<u32>,
    pub clock_mem_mhz: Option<u32>,
    pub power_limit_w: Option<f64>,
    pub cpu: Option<String>,
    pub cores: Option<u32>,
    pub kernel: Option<String>,
}

/// The builds that were compared.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Build {
    /// Version of this crate.
    pub version: String,
    /// Commit of this repository.
    pub commit: Option<String>,
    /// Were there uncommitted changes?
    pub dirty: Option<bool>,
    /// Architectures the kernels were compiled for.
    pub archs: Option<String>,
    /// llama.cpp's commit of the adapter build, as its tools state it.
    pub llama_commit: Option<String>,
    /// What the adapter was compared with.
    pub baseline: Option<String>,
}

/// The model and what was done with it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// File name of the model, without folders.
    pub model: Option<String>,
    /// Its size.
    pub model_bytes: Option<u64>,
    /// Digest of its bytes.
    pub model_sha256: Option<String>,
    /// Tests, for example `tg128`.
    pub tests: Vec<String>,
    /// Repetitions of each test in each process.
    pub repetitions: Option<u32>,
}

/// Samples of one quantity; its value is their median.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Name, and the id of its headline.
    pub name: String,
    /// Unit of the samples.
    pub unit: String,
    /// Every sample.
    pub samples: Vec<f64>,
}

/// A condition with its verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Name of the condition.
    pub name: String,
    /// Does it hold? Null when it could not be tried.
    pub pass: Option<bool>,
    /// What was seen.
    pub detail: String,
    /// The figures behind it.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub data: Value,
}

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Better {
    Higher,
    Lower,
}

/// A figure to quote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Headline {
    /// Id by which documents quote it.
    pub id: String,
    /// The outcome's test or the series that it is taken from.
    pub of: String,
    /// The figure.
    pub value: f64,
    /// Unit; `x` for ratios.
    pub unit: String,
    /// Which way is better.
    pub better: Better,
}

impl Report {
    /// Reads a report.
    pub fn load(path: &Path) -> Result<Self, ReportError> {
        let text = std::fs::read_to_string(path).map_err(|source| ReportError::Io {
            path: path.to_owned(),
            source,
        })?;
        let no_report = |source| ReportError::Json {
            path: path.to_owned(),
            source,
        };
        let value: Value = serde_json::from_str(&text).map_err(no_report)?;
        if let Some(found) = value["schema"].as_u64().filter(|found| *found != u64::from(SCHEMA)) {
            return Err(ReportError::Schema {
                path: path.to_owned(),
                found: found as u32,
            });
        }
        serde_json::from_value(value).map_err(no_report)
    }

    /// The file's text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a report has only text, numbers and lists") + "\n"
    }

    /// Quotes the ratio of an outcome under an id.
    pub fn quote_outcome(&mut self, id: &str, test: &str) -> Result<(), ReportError> {
        let outcome = self.outcomes.iter().find(|o| o.test == test);
        let value = outcome.ok_or_else(|| ReportError::Dangling(id.to_owned()))?.ratio;
        let (id, of) = (id.to_owned(), test.to_owned());
        self.headlines.push(Headline {
            id,
            of,
            value,
            unit: "x".to_owned(),
            better: Better::Higher,
        });
        Ok(())
    }

    /// Computes every outcome and headline again and holds them against what is stated; and sees to it that every null field
    /// has its reason.
    pub fn verify(&self) -> Result<(), ReportError> {
        if let Some(path) = self.unexplained() {
            return Err(ReportError::Unexplained(path));
        }
        if self.kind == Kind::Bench {
            let computed = outcomes(&self.runs, &self.workload.tests)?;
            for (stated, computed) in self.outcomes.iter().zip(&computed) {
                same(&format!("the ratio of {}", computed.test), stated.ratio, computed.ratio)?;
            }
            same(
                "the number of outcomes",
                self.outcomes.len() as f64,
                computed.len() as f64,
            )?;
        }
        for h in &self.headlines {
            let ratio = self.outcomes.iter().find(|o| o.test == h.of).map(|o| o.ratio);
            let series = || {
                self.series
                    .iter()
                    .find(|s| s.name == h.of)
                    .and_then(|s| median(&s.samples))
            };
            let computed = ratio
                .or_else(series)
                .ok_or_else(|| ReportError::Dangling(h.id.clone()))?;
            same(&h.id, h.value, computed)?;
        }
        Ok(())
    }
}

impl Report {
    /// Path of the first null field of which neither it nor its section is listed in `missing`.
    fn unexplained(&self) -> Option<String> {
        let whole = serde_json::to_value(self).expect("a report has only text, numbers and lists");
        let null_fields = ["machine", "build", "workload"].into_iter().flat_map(|section| {
            let fields = whole[section].as_object().into_iter().flatten();
            fields
                .filter(|(_, value)| value.is_null())
                .map(move |(field, _)| (section, format!("{section}.{field}")))
        });
        null_fields
            .filter(|(section, path)| !self.missing.contains_key(*section) && !self.missing.contains_key(path))
            .map(|(_, path)| path)
            .next()
    }
}

/// Equal up to the rounding of another order of summation.
fn same(what: &str, stated: f64, computed: f64) -> Result<(), ReportError> {
    if (stated - computed).abs() <= 1e-9 * computed.abs() {
        return Ok(());
    }
    let (stated, computed) = (stated.to_string(), computed.to_string());
    Err(ReportError::Differs {
        what: what.to_owned(),
        stated,
        computed,
    })
}

/// The middle value, or the mean of the two in the middle.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => None,
        _ => Some((sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0),
    }
}
