//! `flashrt qualify`: the same results with the windows on as with them off, by llama.cpp's own tools.
//!
//! One build against itself, on against `GGML_FLASHRT_DISABLE=1`. Neither is the truth: both round, in different places. So the
//! judge is the dequantised model, whose weights are the same values in F32. Greedy text, token for token, may part only at a
//! tie or towards that model; and the distributions over next tokens (KL divergence, top token, perplexity) may be no farther from
//! that model's with the windows than without. The latter at several ubatch sizes, because one token at a time takes other
//! kernels than a full ubatch. Cases B30, B61.

mod greedy;

use crate::llama::{self, Finished, Host, DISABLE};
use crate::output::{self, NewFile};
use crate::server::Server;
use crate::{bench, machine};
use anyhow::{bail, ensure, Context, Result};
use ggml_flashrt::gguf::Gguf;
use ggml_flashrt::report::{Arm, Check, Kind, Report, Run, SCHEMA};
use serde_json::{json, Map, Value};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// By how many standard errors of a difference the windows may look worse than stock. The errors are those that llama-perplexity
/// states of its means over tokens. By chance alone one comparison in 740 exceeds three (one side of a normal distribution), so of
/// sets of twelve one in sixty fails; a wrong kernel moves these figures by tens of standard errors.
const STANDARD_ERRORS: f64 = 3.0;

/// Beginnings for greedy text: prose, code, lists, numbers, other languages.
const PROMPTS: [&str; 10] = [
    "The history of the printing press begins",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "The main differences between TCP and UDP are:\n1.",
    "Water boils at 100 degrees Celsius at sea level because",
    "Zutaten für einen Apfelkuchen:\n-",
    "La capitale de la France est",
    "Q: What is 17 times 23?\nA:",
    "{\"name\": \"Ada Lovelace\", \"born\": 1815, \"known_for\": [",
    "To be, or not to be, that is the question:",
];

/// Arguments of `flashrt qualify`.
#[derive(clap::Args)]
pub struct Args {
    /// Folder of the llama.cpp build with the adapter.
    #[arg(long, value_name = "DIR")]
    host: PathBuf,
    /// The model, a GGUF file.
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Plain text for KL divergence and perplexity; without it they are left out, and no dequantised model is made.
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// Report to write; must not exist yet.
    #[arg(long, value_name = "FILE.json")]
    out: PathBuf,
    /// Tokens to generate from each prompt.
    #[arg(long, default_value_t = 256)]
    tokens: u32,
    /// Pieces of 512 tokens of the corpus to use.
    #[arg(long, default_value_t = 8)]
    chunks: u32,
    /// Ubatch sizes to compare at.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 3, 33, 512])]
    ubatches: Vec<u32>,
    /// Type of the dequantised model; F32 is exact.
    #[arg(long, default_value = "F32", value_parser = ["F32", "F16", "BF16"])]
    reference_type: String,
    /// Folder for the dequantised model and its logits, deleted afterwards.
    #[arg(long, value_name = "DIR", default_value_os_t = std::env::temp_dir())]
    scratch: PathBuf,
    /// Run although there is no GPU: to try the command out.
    #[arg(long)]
    allow_cpu: bool,
    /// More arguments for the tools.
    #[arg(last = true, value_name = "LLAMA.CPP ARGS")]
    extra: Vec<OsString>,
}

/// Compares and writes the report; an error if a comparison fails.
pub fn run(args: Args) -> Result<()> {
    Gguf::open(&args.model).with_context(|| format!("cannot use {}", args.model.display()))?;
    if let Some(corpus) = &args.corpus {
        ensure!(corpus.is_file(), "{}: no such file", corpus.display());
    }
    let host = Host::open(&args.host, "host")?;
    if !args.allow_cpu && host.cuda_devices()?.is_empty() {
        bail!("the build sees no CUDA device: a GPU and a CUDA build are needed");
    }
    let file = NewFile::create(&args.out, false)?;
    let mut missing = machine::Missing::new();
    let mut session = Session {
        host,
        args: &args,
        runs: Vec::new(),
    };
    let reference = args.corpus.as_deref().map(|c| session.reference(c)).transpose()?;
    let mut checks = vec![session.greedy_text(reference.as_ref())?];
    match &reference {
        Some(reference) => checks.extend(session.distances(reference)?),
        None => {
            for what in ["KL divergence", "same top token", "perplexity"] {
                missing.insert(format!("checks.{what}"), "no --corpus was given".to_owned());
            }
        }
    }
    checks.push(session.fired());
    let mut report = Report {
        schema: SCHEMA,
        kind: Kind::Qualify,
        created: machine::now(),
        command: std::env::args_os().map(|a| llama::without_folders(&a)).collect(),
        machine: machine::machine(&mut missing),
        build: machine::build(&mut missing),
        workload: bench::workload(&args.model)?,
        runs: session.runs,
        outcomes: Vec::new(),
        series: Vec::new(),
        checks,
        headlines: Vec::new(),
        missing,
    };
    report.build.baseline = Some("the same build with GGML_FLASHRT_DISABLE=1".to_owned());
    report.build.archs = llama::archs(report.runs[0].stats.as_ref());
    let mut unknown = vec![
        ("build.llama_commit", "the tools that ran do not state it"),
        ("workload.repetitions", "each comparison is made once"),
    ];
    if report.build.archs.is_none() {
        unknown.push(("build.archs", "the processes wrote no GGML_FLASHRT_STATS"));
    }
    let reasons = unknown
        .into_iter()
        .map(|(field, why)| (field.to_owned(), why.to_owned()));
    report.missing.extend(reasons);
    report.verify()?;
    file.writer()
        .write_all(report.to_json().as_bytes())
        .context("cannot write the report")?;
    file.commit()?;
    output::print(&table(&report))?;
    let failed: Vec<&str> = report
        .checks
        .iter()
        .filter(|c| c.pass != Some(true))
        .map(|c| c.name.as_str())
        .collect();
    ensure!(failed.is_empty(), "not qualified: {}", failed.join(", "));
    Ok(())
}

/// The dequantised model.
struct Reference {
    model: PathBuf,
    /// What llama-perplexity takes to compare with it.
    options: Vec<String>,
    /// Its own perplexity.
    perplexity: Value,
    _scratch: tempfile::TempDir,
}

/// Processes so far.
struct Session<'a> {
    host: Host,
    args: &'a Args,
    runs: Vec<Run>,
}

impl Session<'_> {
    /// Runs a tool on a model with the windows on or off, and keeps what `extract` finds in its output.
    fn tool(
        &mut self,
        arm: Arm,
        tool: &str,
        model: &Path,
        args: &[&str],
        extract: impl Fn(&Finished) -> Result<Value>,
    ) -> Result<Value> {
        let vars: &[_] = if arm == Arm::Stock { &[DISABLE] } else { &[] };
        let mut all: Vec<OsString> = vec!["-m".into(), model.into()];
        all.extend(args.iter().map(OsString::from));
        all.extend(self.args.extra.iter().cloned());
        eprintln!("{tool}, windows {}", if arm == Arm::Stock { "off" } else { "on" });
        let done = self.host.run(tool, &all, vars)?;
        let record = extract(&done).with_context(|| format!("{tool} printed no result"))?;
        self.keep(arm, done, record.as_object().cloned().into_iter().collect());
        Ok(record)
    }

    /// Greedy text from one server each, with the log-probabilities that say whether two texts part at a tie; and where they
    /// part, what the dequantised model has to say.
    fn greedy_text(&mut self, reference: Option<&Reference>) -> Result<Check> {
        let requests: Vec<_> = PROMPTS.map(|p| greedy::request(p, self.args.tokens)).into();
        let model = &self.args.model;
        let on = self.answers(Arm::Adapter, model, &requests)?;
        let off = self.answers(Arm::Stock, model, &requests)?;
        let partings = greedy::partings(&on, &off);
        let mut preferences = Vec::new();
        if let Some(reference) = reference.filter(|_| !partings.is_empty()) {
            let questions: Vec<_> = partings.iter().map(|p| p.question(&PROMPTS, &on)).collect();
            let answers = self.answers(Arm::Stock, &reference.model, &questions)?;
            preferences = partings.iter().zip(&answers).map(|(p, a)| p.preference(a)).collect();
        }
        Ok(greedy::judge(
            &PROMPTS,
            (&on, &off),
            &partings,
            &preferences,
            self.args.tokens,
        ))
    }

    /// What a server with this model answers.
    fn answers(&mut self, arm: Arm, model: &Path, requests: &[Value]) -> Result<Vec<greedy::Text>> {
        eprintln!("llama-server, windows {}", if arm == Arm::Stock { "off" } else { "on" });
        let vars: &[_] = if arm == Arm::Stock { &[DISABLE] } else { &[] };
        let mut options: Vec<OsString> = vec!["-m".into(), model.into()];
        options.extend(["-c", "4096", "-np", "1"].map(OsString::from));
        options.extend(self.args.extra.iter().cloned());
        let server = Server::start(&self.host, &options, vars)?;
        let mut texts = Vec::new();
        for request in requests {
            let answer = server.complete(request)?;
            texts.push(greedy::Text::read(&answer).with_context(|| format!("llama-server answered {answer}"))?);
        }
        let done = server.stop()?;
        let record = |(request, text): (&Value, &greedy::Text)| {
            Map::from_iter([
                ("prompt".to_owned(), request["prompt"].clone()),
                ("text".to_owned(), json!(text.content)),
            ])
        };
        let records = requests.iter().zip(&texts).map(record).collect();
        self.keep(arm, done, records);
        Ok(texts)
    }

    fn keep(&mut self, arm: Arm, done: Finished, records: Vec<Map<String, Value>>) {
        let Finished {
            command,
            env,
            wall_s,
            stats,
            ..
        } = done;
        self.runs.push(Run {
            arm,
            setting: "default".to_owned(),
            command,
            env,
            wall_s,
            records,
            stats,
        });
    }

    /// Makes the dequantised model, and its logits on the corpus at the tools' own ubatch size.
    fn reference(&mut self, corpus: &Path) -> Result<Reference> {
        let scratch = tempfile::tempdir_in(&self.args.scratch).context("no scratch folder")?;
        let model = scratch.path().join("dequantised.gguf");
        let logits = scratch.path().join("logits.bin");
        eprintln!("llama-quantize to {}", self.args.reference_type);
        let from_to = [
            self.args.model.as_os_str(),
            model.as_os_str(),
            self.args.reference_type.as_ref(),
        ];
        let quantize: Vec<OsString> = ["--allow-requantize".into()]
            .into_iter()
            .chain(from_to.map(Into::into))
            .collect();
        self.host.run("llama-quantize", &quantize, &[DISABLE])?;

        let (chunks, logits) = (self.args.chunks.to_string(), path_text(&logits)?.to_owned());
        let options = [
            "-c",
            "512",
            "-b",
            "512",
            "--chunks",
            &chunks,
            "--kl-divergence-base",
            &logits,
        ]
        .map(str::to_owned);
        let base: Vec<&str> = ["-f", path_text(corpus)?]
            .into_iter()
            .chain(options.iter().map(String::as_str))
            .collect();
        let perplexity = self.tool(Arm::Stock, "llama-perplexity", &model, &base, perplexity)?;
        Ok(Reference {
            model,
            options: options.into(),
            perplexity,
            _scratch: scratch,
        })
    }

    /// Distances to the dequantised model at each ubatch size: with the windows on they may not be larger than without them,
    /// beyond what chance makes of the pieces of text that were looked at.
    fn distances(&mut self, reference: &Reference) -> Result<Vec<Check>> {
        let mut checks = Vec::new();
        for ubatch in self.args.ubatches.clone() {
            let size = ubatch.to_string();
            let mut options: Vec<&str> = reference.options.iter().map(String::as_str).collect();
            options.extend(["-ub", &size, "--kl-divergence"]);
            let on = self.tool(Arm::Adapter, "llama-perplexity", &self.args.model, &options, distance)?;
            let off = self.tool(Arm::Stock, "llama-perplexity", &self.args.model, &options, distance)?;
            let value = |side: &Value, field: &str| side[field].as_f64().unwrap_or(f64::NAN);
            let chance = |field: &str| {
                let field = format!("{field}_uncertainty");
                STANDARD_ERRORS * value(&on, &field).hypot(value(&off, &field))
            };
            let mut check = |what: &str, pass, detail| {
                checks.push(Check {
                    name: format!("{what} at -ub {ubatch}"),
                    pass: Some(pass),
                    detail,
                    data: json!({"on": &on, "off": &off, "dequantised": &reference.perplexity}),
                });
            };
            let sides =
                |field: &str, unit: &str| format!("{}{unit} with windows, {}{unit} without", on[field], off[field]);
            let no_larger = value(&on, "kld") <= value(&off, "kld") + chance("kld");
            check("KL divergence", no_larger, sides("kld", ""));
            let no_smaller = value(&on, "same_top") >= value(&off, "same_top") - chance("same_top");
            check("same top token", no_smaller, sides("same_top", " %"));
            let [on_ratio, off_ratio] = [&on, &off].map(|side| value(side, "ln_ppl_ratio"));
            check(
                "perplexity",
                on_ratio.abs() <= off_ratio.abs() + chance("ln_ppl_ratio"),
                format!(
                    "{:+.2} % from the dequantised model's with windows, {:+.2} % without; {:+.2} % between them",
                    100.0 * on_ratio.exp_m1(),
                    100.0 * off_ratio.exp_m1(),
                    100.0 * (on_ratio - off_ratio).exp_m1()
                ),
            );
        }
        Ok(checks)
    }

    /// Equal results of runs in which nothing fired would say nothing.
    fn fired(&self) -> Check {
        let count = |arm: Arm| {
            self.runs
                .iter()
                .filter(move |r| r.arm == arm)
                .map(|r| llama::fired(r.stats.as_ref()))
        };
        let on: Vec<_> = count(Arm::Adapter).collect();
        let silent = on.iter().filter(|n| n.unwrap_or(0) == 0).count();
        let off: u64 = count(Arm::Stock).flatten().sum();
        let detail = format!(
            "windows fired in {} of {} runs with them on, {off} times with them off",
            on.len() - silent,
            on.len()
        );
        let pass = Some(silent == 0 && off == 0);
        Check {
            name: "windows fired".into(),
            pass,
            detail,
            data: json!(on),
        }
    }
}

fn path_text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{}: the name is no UTF-8", path.display()))
}

/// The value after `label`, and the uncertainty after the next `±` or `+/-`.
fn value_after(text: &str, label: &str) -> Result<(f64, f64)> {
    let line = text
        .lines()
        .rev()
        .find_map(|l| l.split_once(label))
        .with_context(|| format!("no line with {label:?}"))?
        .1;
    let mut numbers = line
        .split(|c: char| !(c.is_ascii_digit() || "+-.e".contains(c)))
        .filter_map(|w| w.parse::<f64>().ok());
    numbers
        .next()
        .zip(numbers.next())
        .with_context(|| format!("{label:?} is followed by {line:?}"))
}

fn perplexity(done: &Finished) -> Result<Value> {
    let (ppl, uncertainty) = value_after(&format!("{}\n{}", done.stdout, done.stderr), "Final estimate: PPL =")?;
    Ok(json!({"ppl": ppl, "ppl_uncertainty": uncertainty}))
}

fn distance(done: &Finished) -> Result<Value> {
    let text = format!("{}\n{}", done.stdout, done.stderr);
    let (kld, kld_uncertainty) = value_after(&text, "Mean    KLD:")?;
    let (same_top, same_top_uncertainty) = value_after(&text, "Same top p:")?;
    let (ppl, ppl_uncertainty) = value_after(&text, "Mean PPL(Q)  ")?;
    let (ln_ppl_ratio, ln_ppl_ratio_uncertainty) = value_after(&text, "Mean ln(PPL(Q)/PPL(base))")?;
    Ok(
        json!({"kld": kld, "kld_uncertainty": kld_uncertainty, "same_top": same_top,
        "same_top_uncertainty": same_top_uncertainty, "ppl": ppl, "ppl_uncertainty": ppl_uncertainty,
        "ln_ppl_ratio": ln_ppl_ratio, "ln_ppl_ratio_uncertainty": ln_ppl_ratio_uncertainty}),
    )
}

fn table(report: &Report) -> String {
    let verdict = |pass| match pass {
        Some(true) => "pass",
        Some(false) => "FAIL",
        None => "-",
    };
    let rows: Vec<[String; 3]> = report
        .checks
        .iter()
        .map(|c| [c.name.clone(), verdict(c.pass).to_owned(), c.detail.clone()])
        .collect();
    let left_out: String = report
        .missing
        .iter()
        .filter(|(what, _)| what.starts_with("checks."))
        .map(|(what, why)| format!("{what}: {why}\n"))
        .collect();
    output::table(["check", "verdict", "detail"], &rows) + &left_out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_llama_perplexity_prints() {
        let text = "Final estimate: PPL = 21.3456 +/- 0.51234\nMean    KLD:   0.001234 ±   0.000056\n\
                    Mean PPL(Q)                   :  21.345600 ±   0.512340\n\
                    Mean ln(PPL(Q)/PPL(base))     :  -0.005000 ±   0.002000\n\
                    Mean PPL(Q)-PPL(base)         :   0.010000 ±   0.020000\nSame top p: 98.765 ± 0.123 %\n";
        assert_eq!(value_after(text, "Final estimate: PPL =").unwrap(), (21.3456, 0.51234));
        assert_eq!(value_after(text, "Mean    KLD:").unwrap(), (0.001234, 0.000056));
        assert_eq!(value_after(text, "Mean PPL(Q)  ").unwrap(), (21.3456, 0.51234));
        let ratio = value_after(text, "Mean ln(PPL(Q)/PPL(base))").unwrap();
        assert_eq!(ratio, (-0.005, 0.002));
        assert_eq!(value_after(text, "Same top p:").unwrap(), (98.765, 0.123));
        assert!(value_after(text, "Median").is_err());
        assert!(value_after("Same top p: nothing", "Same top p:").is_err());
    }
}
