//! `flashrt evidence`: the index of reports, the figures in documents, and series that other tools measured.

use crate::{llama, machine, output};
use anyhow::{bail, ensure, Context, Result};
use clap::Subcommand;
use ggml_flashrt::report::evidence::{self, Entry, INDEX};
use ggml_flashrt::report::{median, Better, Headline, Kind, Report, Series, Workload, SCHEMA};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Arguments of `flashrt evidence`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write index.json from the reports in a folder, each of which is verified
    Index {
        /// The folder.
        dir: PathBuf,
        /// Write nothing; fail if the index is not what it would be.
        #[arg(long)]
        check: bool,
    },
    /// Fill the `<!-- ev:<id> -->…<!-- /ev -->` markers of documents
    Render {
        /// The documents.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Folder of the index.
        #[arg(long, default_value = "docs/evidence")]
        dir: PathBuf,
        /// Write nothing; fail if a document is not what it would be.
        #[arg(long)]
        check: bool,
    },
    /// Make a report of a series: a JSON list of numbers, or criterion's sample.json
    Series {
        /// Id of its headline, the median.
        id: String,
        /// The samples.
        samples: PathBuf,
        /// Report to write.
        #[arg(long)]
        out: PathBuf,
        /// Unit of the result, for example `ns`.
        #[arg(long)]
        unit: String,
        /// Which way is better.
        #[arg(long, value_enum)]
        better: Direction,
        /// Divide each sample by this, for example the nodes that one iteration handles.
        #[arg(long, default_value_t = 1.0)]
        per: f64,
        /// A report from the machine and build where the samples were taken, if that is not this one.
        #[arg(long, value_name = "REPORT.json")]
        taken_with: Option<PathBuf>,
    },
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Direction {
    Higher,
    Lower,
}

/// Runs the subcommand.
pub fn run(args: Args) -> Result<()> {
    match args.command {
        Command::Index { dir, check } => {
            let entries = evidence::index(&dir)?;
            put(
                &dir.join(INDEX),
                &evidence::to_json(&entries),
                check,
                "flashrt evidence index",
            )
        }
        Command::Render { files, dir, check } => {
            let index = dir.join(INDEX);
            let text = std::fs::read_to_string(&index).with_context(|| index.display().to_string())?;
            let entries: Vec<Entry> = serde_json::from_str(&text).with_context(|| index.display().to_string())?;
            for file in files {
                let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
                let rendered = evidence::render(&text, &entries).with_context(|| file.display().to_string())?;
                put(&file, &rendered, check, "flashrt evidence render")?;
            }
            Ok(())
        }
        Command::Series {
            id,
            samples,
            out,
            unit,
            better,
            per,
            taken_with,
        } => {
            ensure!(per > 0.0, "--per must be positive");
            let mut report = series(id, &samples, unit, better, per)?;
            if let Some(path) = taken_with {
                let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
                let there: Report = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
                take_place(&mut report, there);
            }
            report.verify()?;
            output::write_text(&out, &report.to_json(), false)
        }
    }
}

/// Writes `text` where it differs from what is there, or complains that it does.
fn put(path: &Path, text: &str, check: bool, remedy: &str) -> Result<()> {
    let there = std::fs::read_to_string(path).unwrap_or_default();
    if there == text {
        return Ok(());
    }
    if check {
        let line = there.lines().zip(text.lines()).take_while(|(a, b)| a == b).count() + 1;
        bail!("{} is out of date from line {line} on: run `{remedy}`", path.display());
    }
    output::write_text(path, text, true)
}

fn series(name: String, path: &Path, unit: String, better: Direction, per: f64) -> Result<Report> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let value: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let mut samples = read_samples(&value).with_context(|| format!("{}: no samples", path.display()))?;
    samples.iter_mut().for_each(|s| *s /= per);
    let value = median(&samples).with_context(|| format!("{}: no samples", path.display()))?;
    let better = match better {
        Direction::Higher => Better::Higher,
        Direction::Lower => Better::Lower,
    };
    let mut missing = machine::Missing::new();
    missing.insert("workload".into(), "a series of another tool".into());
    for field in ["archs", "llama_commit", "baseline"] {
        missing.insert(format!("build.{field}"), "no llama.cpp build took part".into());
    }
    Ok(Report {
        schema: SCHEMA,
        kind: Kind::Measure,
        created: machine::now(),
        command: std::env::args_os().map(|a| llama::without_folders(&a)).collect(),
        machine: machine::machine(&mut missing),
        build: machine::build(&mut missing),
        workload: Workload::default(),
        runs: Vec::new(),
        outcomes: Vec::new(),
        series: vec![Series {
            name: name.clone(),
            unit: unit.clone(),
            samples,
        }],
        checks: Vec::new(),
        headlines: vec![Headline {
            id: name.clone(),
            of: name,
            value,
            unit,
            better,
        }],
        missing,
    })
}

/// Makes a report speak of the machine and the build of another one.
fn take_place(report: &mut Report, there: Report) {
    let of_place = |field: &String| field.starts_with("machine.") || field.starts_with("build.");
    report.missing.retain(|field, _| !of_place(field));
    report
        .missing
        .extend(there.missing.into_iter().filter(|(field, _)| of_place(field)));
    (report.machine, report.build) = (there.machine, there.build);
}

/// A list of numbers, or criterion's pairs of iterations and nanoseconds as nanoseconds per iteration.
fn read_samples(value: &Value) -> Option<Vec<f64>> {
    let numbers = |v: &Value| v.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
    match value {
        Value::Array(_) => numbers(value),
        _ => Some(
            numbers(&value["times"])?
                .iter()
                .zip(numbers(&value["iters"])?)
                .map(|(t, n)| t / n)
                .collect(),
        ),
    }
}

/// Splits `ID[=TEST]`; without a test, the id's first part is one, or there is only one.
pub fn id_and_test(text: &str, tests: &[String]) -> Result<(String, String)> {
    let (id, stated) = text.split_once('=').map_or((text, None), |(id, test)| (id, Some(test)));
    let first = id.split('/').next().unwrap_or_default();
    let only = (tests.len() == 1).then(|| tests[0].as_str());
    match stated
        .or(tests.iter().map(String::as_str).find(|t| *t == first))
        .or(only)
    {
        Some(test) if tests.iter().any(|t| t == test) => Ok((id.to_owned(), test.to_owned())),
        Some(test) => bail!("evidence id {id}: {test} is not among the tests {}", tests.join(", ")),
        None => bail!(
            "evidence id {id}: which test? give {id}=TEST with one of {}",
            tests.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_find_their_tests() {
        let tests = ["pp512".to_owned(), "tg128".to_owned()];
        assert_eq!(
            id_and_test("tg128/m", &tests).unwrap(),
            ("tg128/m".into(), "tg128".into())
        );
        assert_eq!(
            id_and_test("off-over-stock/m=tg128", &tests).unwrap(),
            ("off-over-stock/m".into(), "tg128".into())
        );
        assert!(id_and_test("off-over-stock/m", &tests)
            .unwrap_err()
            .to_string()
            .contains("which test?"));
        assert!(id_and_test("a/b=tg64", &tests)
            .unwrap_err()
            .to_string()
            .contains("not among the tests"));
        assert_eq!(id_and_test("off-over-stock/m", &tests[1..]).unwrap().1, "tg128");
    }

    #[test]
    fn criterions_samples_become_nanoseconds_per_iteration() {
        let sample = json!({"sampling_mode": "Linear", "iters": [1.0, 2.0], "times": [10.0, 30.0]});
        assert_eq!(read_samples(&sample), Some(vec![10.0, 15.0]));
        assert_eq!(read_samples(&json!([1, 2.5])), Some(vec![1.0, 2.5]));
        assert_eq!(read_samples(&json!({"a": 1})), None);
    }
}
