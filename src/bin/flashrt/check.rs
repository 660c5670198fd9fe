//! `flashrt check`: every window site of a real model, its oracle against ggml's own CPU results.

use crate::output;
use anyhow::{anyhow, bail, Context as _, Result};
use ggml_flashrt::check::site::Worst;
use ggml_flashrt::check::{self, Report};
use ggml_flashrt::gguf::{Gguf, GgufError};
use ggml_flashrt::host::{host_dir, Host};
use ggml_flashrt::window::settings::Settings;
use ggml_flashrt::window::WINDOWS;
use std::path::PathBuf;

/// Arguments of `flashrt check`.
#[derive(clap::Args)]
pub struct Args {
    /// The model, a GGUF file.
    model: PathBuf,
    /// Directory of llama.cpp's shared libraries. Default: FLASHRT_HOST_DIR, else .flashrt/build/cpu/bin.
    #[arg(long, value_name = "DIR")]
    host_dir: Option<PathBuf>,
    /// CPU threads that llama.cpp uses.
    #[arg(long, default_value_t = default_threads(), value_parser = clap::value_parser!(u32).range(1..))]
    threads: u32,
    /// Fail unless the decode graph has exactly this many sites of a window; may be repeated.
    #[arg(long, value_name = "WINDOW=SITES", value_parser = expectation)]
    expect: Vec<(&'static str, usize)>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
}

fn default_threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(8) as u32)
}

fn expectation(text: &str) -> Result<(&'static str, usize), String> {
    let (name, sites) = text.split_once('=').ok_or("expected WINDOW=SITES")?;
    let known = || WINDOWS.iter().map(|w| w.name).collect::<Vec<_>>().join(", ");
    let window = WINDOWS
        .iter()
        .find(|w| w.name == name)
        .ok_or_else(|| format!("no window {name}; known: {}", known()))?;
    Ok((
        window.name,
        sites
            .parse()
            .map_err(|e| format!("{sites:?} is no number of sites: {e}"))?,
    ))
}

/// Runs the command: an error when a value is beyond its bound, a site cannot be compared or there is nothing to compare.
pub fn run(args: &Args) -> Result<()> {
    // A broken file gets an exact message here, and needs no build of llama.cpp to get it.
    Gguf::open(&args.model).map_err(|e| match e {
        GgufError::Open { .. } => anyhow!("{e}"),
        other => anyhow!("{}: {other}", args.model.display()),
    })?;
    let host = Host::open(&host_dir(args.host_dir.as_deref()))?;
    let model = host.load(&args.model)?;
    let settings = Settings::from_env();
    settings.warnings.iter().for_each(|w| eprintln!("flashrt: {w}"));
    let mut options = check::Options {
        threads: args.threads,
        off: settings.off,
        ..check::Options::default()
    };
    let (asked, least) = (settings.thresholds, &mut options.thresholds);
    least.mm_min_tokens = asked.mm_min_tokens.or(least.mm_min_tokens);
    least.fa4_min_tokens = asked.fa4_min_tokens.or(least.fa4_min_tokens);
    let report = check::run(&model, &options)?;
    if args.json {
        output::print(&format!(
            "{}\n",
            serde_json::to_string_pretty(&report).context("cannot write the report")?
        ))?;
    } else {
        output::print(&table(&report))?;
    }
    let mut failures = report.failures();
    for &(window, expected) in &args.expect {
        let found = report.sites("decode", window);
        if found != expected {
            failures.push(format!(
                "{window}: {found} sites in the decode graph, expected {expected}"
            ));
        }
    }
    if !failures.is_empty() {
        bail!("{}: {}", args.model.display(), failures.join("; "));
    }
    Ok(())
}

fn table(report: &Report) -> String {
    let mut rows = Vec::new();
    for graph in &report.graphs {
        for w in &graph.windows {
            let (worst, tensor) = w.worst.as_ref().map_or(
                ("-".into(), "-"),
                |Worst {
                     ratio, error, tensor, ..
                 }| { (format!("{ratio:.3} ({error:.1e})"), tensor.as_str()) },
            );
            let declined: Vec<String> = w.declined.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
            let declined = if declined.is_empty() {
                "-".to_owned()
            } else {
                declined.join(", ")
            };
            rows.push([
                w.window.clone(),
                format!("{} ({})", graph.name, graph.tokens),
                w.sites.to_string(),
                w.compared.to_string(),
                w.values.to_string(),
                worst,
                tensor.to_owned(),
                declined,
            ]);
        }
    }
    rows.sort_by_key(|row| WINDOWS.iter().position(|w| w.name == row[0]));
    let head = [
        "window",
        "graph (tokens)",
        "sites",
        "compared",
        "values",
        "worst error / bound",
        "in",
        "declined",
    ];
    let Report {
        model, layers, ggml, ..
    } = report;
    format!(
        "{model}, {layers} layers, on ggml-cpu {ggml}\n\n{}",
        output::table(head, &rows)
    )
}
