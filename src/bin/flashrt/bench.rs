//! `flashrt bench`: adapter, stock, adapter again, each a process of llama-bench, and a report of it.

use crate::llama::{self, Finished, Host, DISABLE};
use crate::output::{self, NewFile};
use crate::{evidence, machine};
use anyhow::{bail, ensure, Context, Result};
use ggml_flashrt::gguf::Gguf;
use ggml_flashrt::report::{outcomes, plot, Arm, Check, Kind, Report, Run, Workload, SCHEMA};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Arguments of `flashrt bench`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the llama.cpp build with the adapter.
    #[arg(long, value_name = "DIR")]
    host: PathBuf,
    /// Folder of an unpatched build; without it the adapter's build runs with GGML_FLASHRT_DISABLE=1.
    #[arg(long, value_name = "DIR", required_if_eq("mode", "off-over-stock"))]
    stock: Option<PathBuf>,
    /// The model, a GGUF file.
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// What the numerator of the ratio is.
    #[arg(long, value_enum, default_value_t = Mode::AdapterOverStock)]
    mode: Mode,
    /// Prompts (pp) and generations (tg) to time, all at one depth: `tg128`, `pp512`, or `tg128@d4096`.
    #[arg(long, value_delimiter = ',', default_values = ["pp512", "tg128"])]
    tests: Vec<Test>,
    /// Repetitions of each test in each process.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,
    /// Environment settings to try in each arm, of which the best counts.
    #[arg(long = "setting", value_name = "NAME=VALUE", default_values = ["default", "GGML_CUDA_GRAPH_OPT=1"])]
    settings: Vec<String>,
    /// Report to write; the plot goes beside it as .svg. Neither may exist yet.
    #[arg(long, value_name = "FILE.json")]
    out: PathBuf,
    /// Quote a test's ratio under this id; the test is the id's first part unless it is given.
    #[arg(long = "evidence-id", value_name = "ID[=TEST]")]
    evidence_ids: Vec<String>,
    /// Measure although there is no GPU: to try the command out.
    #[arg(long)]
    allow_cpu: bool,
    /// More arguments for llama-bench, the same for both arms.
    #[arg(last = true, value_name = "LLAMA-BENCH ARGS")]
    extra: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum Mode {
    /// The adapter's windows.
    AdapterOverStock,
    /// The adapter's build with all windows off: what the patch alone costs.
    OffOverStock,
    /// The adapter and the mask patch over a build with neither: what a user gains who takes both.
    UserGain,
}

/// A test as llama-bench names it.
#[derive(Clone, Debug, PartialEq)]
struct Test {
    prompt: u32,
    generate: u32,
    depth: u32,
}

impl FromStr for Test {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (test, depth) = text.split_once("@d").unwrap_or((text, "0"));
            let count = |n: &str| n.parse().ok().filter(|n| *n > 0);
            let (prompt, generate) = match (test.strip_prefix("pp"), test.strip_prefix("tg")) {
                (Some(n), _) => (count(n)?, 0),
                (_, Some(n)) => (0, count(n)?),
                _ => return None,
            };
            Some(Test {
                prompt,
                generate,
                depth: depth.parse().ok()?,
            })
        };
        parse().ok_or_else(|| format!("{text:?} is no test; give pp<tokens> or tg<tokens>, if need be with @d<depth>"))
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Test {
                prompt, generate: 0, ..
            } => write!(f, "pp{prompt}")?,
            Test { generate, .. } => write!(f, "tg{generate}")?,
        }
        if self.depth > 0 {
            write!(f, "@d{}", self.depth)?;
        }
        Ok(())
    }
}

/// Measures and writes the report.
pub fn run(args: Args) -> Result<()> {
    let plan = Plan::new(&args)?;
    let file = NewFile::create(&args.out, false)?;
    let plot_path = args.out.with_extension("svg");
    ensure!(!plot_path.exists(), "{} exists already", plot_path.display());

    let mut missing = machine::Missing::new();
    let mut report = Report {
        schema: SCHEMA,
        kind: Kind::Bench,
        created: machine::now(),
        command: std::env::args_os().map(|a| llama::without_folders(&a)).collect(),
        machine: machine::machine(&mut missing),
        build: machine::build(&mut missing),
        workload: workload(&args.model)?,
        runs: plan.measure(&args)?,
        outcomes: Vec::new(),
        series: Vec::new(),
        checks: Vec::new(),
        headlines: Vec::new(),
        missing,
    };
    report.workload.tests = args.tests.iter().map(Test::to_string).collect();
    report.workload.repetitions = Some(args.reps);
    report.outcomes = outcomes(&report.runs, &report.workload.tests)?;
    report.build.baseline = Some(plan.baseline());
    let first = report.runs[0].records.first();
    report.build.llama_commit = first.and_then(|r| Some(r.get("build_commit")?.as_str()?.to_owned()));
    let stats = report
        .runs
        .iter()
        .find(|r| r.arm == Arm::Adapter)
        .and_then(|r| r.stats.clone());
    report.build.archs = llama::archs(stats.as_ref());
    for (field, unknown, why) in [
        (
            "build.llama_commit",
            report.build.llama_commit.is_none(),
            "llama-bench does not state it",
        ),
        (
            "build.archs",
            report.build.archs.is_none(),
            "the processes wrote no GGML_FLASHRT_STATS",
        ),
        (
            "runs.stats",
            stats.is_none(),
            "the processes wrote no GGML_FLASHRT_STATS",
        ),
    ] {
        if unknown {
            report.missing.insert(field.to_owned(), why.to_owned());
        }
    }
    report.checks.push(plan.fired(stats.as_ref()));
    for (id, test) in &plan.ids {
        report.quote_outcome(id, test)?;
    }
    report.verify()?;

    file.writer()
        .write_all(report.to_json().as_bytes())
        .context("cannot write the report")?;
    file.commit()?;
    let title = report.workload.model.clone().unwrap_or_default();
    output::write_text(&plot_path, &plot::svg(&title, &report.outcomes), false)?;
    output::print(&table(&report, stats.as_ref()))?;
    match report.checks.iter().find(|c| c.pass == Some(false)) {
        Some(failed) => bail!("{}: {}", failed.name, failed.detail),
        None => Ok(()),
    }
}

/// What runs, settled before the first process.
struct Plan {
    mode: Mode,
    adapter: Host,
    stock: Option<Host>,
    /// Both builds have the mask patch.
    masks: bool,
    ids: Vec<(String, String)>,
}

impl Plan {
    fn new(args: &Args) -> Result<Self> {
        Gguf::open(&args.model).with_context(|| format!("cannot use {}", args.model.display()))?;
        ensure!(
            args.tests.iter().all(|t| t.depth == args.tests[0].depth),
            "all tests must have the same depth"
        );
        for setting in &args.settings {
            ensure!(
                setting == "default" || setting.contains('='),
                "{setting:?} is no setting; give NAME=VALUE or default"
            );
        }
        let tests: Vec<String> = args.tests.iter().map(Test::to_string).collect();
        let ids = args
            .evidence_ids
            .iter()
            .map(|id| evidence::id_and_test(id, &tests))
            .collect::<Result<_>>()?;
        let adapter = Host::open(&args.host, "host")?;
        let stock = args.stock.as_deref().map(|dir| Host::open(dir, "stock")).transpose()?;
        for host in [Some(&adapter), stock.as_ref()].into_iter().flatten() {
            if !args.allow_cpu && host.cuda_devices()?.is_empty() {
                bail!(
                    "the {} build sees no CUDA device: a GPU and a CUDA build are needed",
                    host.label()
                );
            }
        }
        let masks = adapter.fills_masks()?;
        if args.mode == Mode::UserGain {
            let plain = stock.as_ref().map(Host::fills_masks).transpose()? == Some(false);
            ensure!(
                masks && plain,
                "user-gain compares adapter and mask patch with neither: --host needs the mask patch, --stock must be given without it"
            );
        } else if let Some(stock) = &stock {
            ensure!(
                stock.fills_masks()? == masks,
                "only the {} build has the mask patch: its gain is not the adapter's; build both with `cargo xtask host --mask`, or \
                 neither",
                if masks { adapter.label() } else { stock.label() }
            );
        }
        Ok(Plan {
            mode: args.mode,
            adapter,
            stock,
            masks,
            ids,
        })
    }

    fn baseline(&self) -> String {
        let baseline = match (&self.stock, self.masks && self.mode != Mode::UserGain) {
            (Some(_), false) => "an unpatched build",
            (Some(_), true) => "a build with the mask patch alone",
            (None, _) => "the adapter's build with GGML_FLASHRT_DISABLE=1",
        };
        baseline.to_owned()
    }

    fn measure(&self, args: &Args) -> Result<Vec<Run>> {
        let passes = [Arm::Adapter, Arm::Stock, Arm::Adapter];
        let total = passes.len() * args.settings.len();
        let mut runs = Vec::with_capacity(total);
        for arm in passes {
            for setting in &args.settings {
                eprintln!("[{}/{total}] {}, {setting}", runs.len() + 1, arm.name());
                runs.push(self.process(args, arm, setting)?);
            }
        }
        Ok(runs)
    }

    fn process(&self, args: &Args, arm: Arm, setting: &str) -> Result<Run> {
        let mut vars: Vec<(&str, &str)> = setting.split_once('=').into_iter().collect();
        let host = match (arm, &self.stock) {
            (Arm::Stock, Some(stock)) => stock,
            (Arm::Stock, None) => {
                vars.push(DISABLE);
                &self.adapter
            }
            (Arm::Adapter, _) => {
                if self.mode == Mode::OffOverStock {
                    vars.push(DISABLE);
                }
                &self.adapter
            }
        };
        let done = host.run("llama-bench", &arguments(args), &vars)?;
        let records = records(&done).context("llama-bench printed no results")?;
        Ok(Run {
            arm,
            setting: setting.to_owned(),
            command: done.command,
            env: done.env,
            wall_s: done.wall_s,
            records,
            stats: done.stats,
        })
    }

    /// A ratio of a run in which nothing fired says nothing about the windows.
    fn fired(&self, stats: Option<&Value>) -> Check {
        let fired = llama::fired(stats);
        let (pass, detail) = match (self.mode, fired) {
            (Mode::AdapterOverStock | Mode::UserGain, None) => (
                Some(false),
                "no statistics were written: is --host a build with the adapter?".to_owned(),
            ),
            (Mode::OffOverStock, None) => (None, "no statistics were written".to_owned()),
            (Mode::AdapterOverStock | Mode::UserGain, Some(n)) => {
                (Some(n > 0), format!("{n} launches of windows in the adapter arm"))
            }
            (Mode::OffOverStock, Some(n)) => (Some(n == 0), format!("{n} launches of windows though they are off")),
        };
        Check {
            name: "windows fired".to_owned(),
            pass,
            detail,
            data: Value::Null,
        }
    }
}

fn arguments(args: &Args) -> Vec<OsString> {
    let list = |counts: Vec<u32>| {
        let some: Vec<String> = counts.into_iter().filter(|n| *n > 0).map(|n| n.to_string()).collect();
        if some.is_empty() {
            "0".to_owned()
        } else {
            some.join(",")
        }
    };
    let mut all: Vec<OsString> = vec!["-m".into(), args.model.clone().into()];
    let reps = args.reps.to_string();
    let prompts = list(args.tests.iter().map(|t| t.prompt).collect());
    let generations = list(args.tests.iter().map(|t| t.generate).collect());
    all.extend(["-o", "json", "-r", &reps, "-p", &prompts, "-n", &generations].map(OsString::from));
    if args.tests[0].depth > 0 {
        all.extend(["-d".into(), args.tests[0].depth.to_string().into()]);
    }
    all.extend(args.extra.iter().cloned());
    all
}

/// llama-bench's records, of the model's path only the file's name.
fn records(done: &Finished) -> Result<Vec<Map<String, Value>>> {
    let mut records: Vec<Map<String, Value>> = serde_json::from_str(&done.stdout)?;
    for record in &mut records {
        if let Some(Value::String(path)) = record.get_mut("model_filename") {
            *path = llama::without_folders(path.as_ref());
        }
    }
    Ok(records)
}

/// The model's part of the workload.
pub fn workload(model: &Path) -> Result<Workload> {
    let mut file = std::fs::File::open(model).with_context(|| model.display().to_string())?;
    let mut digest = Sha256::new();
    let bytes = std::io::copy(&mut file, &mut digest).with_context(|| model.display().to_string())?;
    Ok(Workload {
        model: model.file_name().map(|n| n.to_string_lossy().into_owned()),
        model_bytes: Some(bytes),
        model_sha256: Some(digest.finalize().iter().map(|b| format!("{b:02x}")).collect()),
        ..Workload::default()
    })
}

fn table(report: &Report, stats: Option<&Value>) -> String {
    let rows: Vec<[String; 5]> = report
        .outcomes
        .iter()
        .map(|o| {
            let arm = |a: &ggml_flashrt::report::ArmResult| {
                format!("{:.1} ({}, spread {:.1} %)", a.median_ts, a.setting, 100.0 * a.spread)
            };
            let passes: Vec<String> = o.ratio_by_pass.iter().map(|r| format!("{r:.3}")).collect();
            [
                o.test.clone(),
                arm(&o.adapter),
                arm(&o.stock),
                format!("{:.3}", o.ratio),
                passes.join(", "),
            ]
        })
        .collect();
    let mut text = output::table(["test", "adapter t/s", "stock t/s", "ratio", "by pass"], &rows);
    if let Some(baseline) = &report.build.baseline {
        text += &format!("stock: {baseline}\n");
    }
    if let Some(windows) = stats.and_then(|s| s.get("windows")?.as_object()) {
        let count = |w: &Value, field: &str| {
            w.get(field)
                .and_then(Value::as_u64)
                .map_or("-".to_owned(), |n| n.to_string())
        };
        let rows: Vec<[String; 4]> = windows
            .iter()
            .map(|(name, w)| {
                [
                    name.clone(),
                    count(w, "sites"),
                    count(w, "fired"),
                    count(w, "evaluated"),
                ]
            })
            .collect();
        text += &format!(
            "\n{}",
            output::table(["window", "sites", "launched", "evaluated"], &rows)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::Test;

    #[test]
    fn tests_are_written_as_they_are_read() {
        for name in ["pp512", "tg128", "tg64@d4096"] {
            assert_eq!(name.parse::<Test>().unwrap().to_string(), name);
        }
        for name in ["", "128", "pp", "tg0", "tg-1", "pp512@4096", "pp512@dx"] {
            assert!(name.parse::<Test>().unwrap_err().contains("is no test"), "{name}");
        }
    }
}
