//! `flashrt probe`: what machine this is, and what keeps the streamer from running on it.

use crate::output;
use anyhow::{bail, ensure, Result};
use ggml_flashrt::probe::{Finding, Options, Probe, Reading, Root};
use std::path::PathBuf;

/// Arguments of `flashrt probe`.
#[derive(clap::Args)]
pub struct Args {
    /// Look also at what carries this model file.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Read the model file for about so many seconds, and say how fast it went.
    #[arg(long, value_name = "SECONDS", requires = "model", value_parser = seconds)]
    read_test: Option<f64>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
    /// Read the files of another machine, copied to this folder, instead of this machine's.
    #[arg(long, value_name = "DIR")]
    sysroot: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "no number".to_owned())?;
    (0.1..=600.0)
        .contains(&number)
        .then_some(number)
        .ok_or_else(|| "between 0.1 and 600".to_owned())
}

/// Prints the findings; fails when there are blockers.
pub fn run(args: Args) -> Result<()> {
    let root = match &args.sysroot {
        None => Root::live(),
        Some(dir) => {
            ensure!(dir.is_dir(), "{} is no folder", dir.display());
            Root::copy_at(dir)
        }
    };
    // What the machine calls the file is counted from its root; here, from where this was called.
    let model = match (&args.model, root.is_live()) {
        (Some(path), true) => Some(std::path::absolute(path)?),
        (path, _) => path.clone(),
    };
    let probe = Probe::take(
        &root,
        Options {
            model: model.as_deref(),
            read_seconds: args.read_test,
        },
    );
    output::print(&if args.json {
        probe.to_json()
    } else {
        text(&probe, args.read_test.is_some())
    })?;
    match probe.blockers.len() {
        0 => Ok(()),
        1 => bail!("not ready: {}", probe.blockers[0].what),
        n => bail!("not ready: {n} blockers"),
    }
}

fn show<T>(reading: &Reading<T>, show: impl Fn(&T) -> String) -> String {
    match reading {
        Reading::Known { value, .. } => show(value),
        Reading::Unknown { unknown } => format!("unknown: {unknown}"),
    }
}

fn text(probe: &Probe, asked: bool) -> String {
    let size = |bytes: &u64| output::size(*bytes);
    let word = |s: &String| s.clone();
    let (board, memory) = (&probe.board, &probe.memory);
    let mut rows: Vec<[String; 2]> = Vec::new();
    let mut row = |name: &str, value: String| rows.push([name.to_owned(), value]);
    row("board", show(&board.model, word));
    match board.soc.get() {
        Err(why) => row("Jetson", format!("unknown: {why}")),
        Ok(soc) => {
            row("SoC", soc.clone());
            row("module", show(&board.module, word));
            row("", show(&board.module_name, word));
            row("Jetson Linux", show(&board.l4t, word));
            row("JetPack", show(&board.jetpack, word));
            row("power mode", show(&board.power_mode, word));
            let mhz = |hz: u64| hz / 1_000_000;
            let clock = show(&board.gpu_clock, |c| {
                format!("{} MHz, at most {} MHz in this mode", mhz(c.now_hz), mhz(c.max_hz))
            });
            row("GPU clock", clock);
        }
    }
    row("kernel", show(&board.kernel, word));
    row("GPU driver", show(&probe.cuda.driver, word));
    row("CUDA", show(&probe.cuda.cuda_version, word));
    match &probe.cuda.devices {
        Reading::Unknown { unknown } => row("devices", format!("unknown: {unknown}")),
        Reading::Known { value, .. } => {
            for d in value {
                let kind = if d.integrated { "integrated" } else { "discrete" };
                let free = show(&d.free_bytes, size);
                let name = format!(
                    "{}, sm_{}, {kind}, {} SMs, {} of {} free",
                    d.name,
                    d.cc,
                    d.sm_count,
                    free,
                    output::size(d.memory_bytes)
                );
                row(&format!("device {}", d.ordinal), name);
                row("  kernels", show(&d.kernels, |_| "all ran, results right".to_owned()));
            }
        }
    }
    row("memory", show(&memory.total_bytes, size));
    row("  available", show(&memory.available_bytes, size));
    let swaps = show(&memory.swaps, |swaps| {
        let one = |s: &ggml_flashrt::probe::Swap| format!("{} {}", s.name, output::size(s.total_bytes));
        list(swaps.iter().map(one))
    });
    row("  swap", swaps);
    let limits = show(&memory.cgroup, |limits| {
        let one = |l: &ggml_flashrt::probe::Limit| {
            format!(
                "{} of {} left ({})",
                output::size(l.left_bytes),
                output::size(l.bytes),
                l.file
            )
        };
        list(limits.iter().map(one))
    });
    row("  control groups", limits);
    row("  usable", show(&memory.usable_bytes, size));
    row("io_uring", show(&probe.io_uring, |_| "allowed".to_owned()));
    match &probe.storage {
        Reading::Unknown { unknown } => row("model", format!("unknown: {unknown}")),
        Reading::Known { value: s, .. } => {
            row("model", format!("{}, {}", s.file, output::size(s.bytes)));
            row("  file system", format!("{} at {}", s.fs, s.mount));
            let layers = show(&s.layers, |layers| {
                let names: Vec<&str> = layers.iter().map(|l| l.name.as_str()).collect();
                names.join(" < ")
            });
            row("  on", layers);
            for d in s.disks.known().into_iter().flatten() {
                let known = [d.model.known(), d.pcie.known()].into_iter().flatten().cloned();
                let known = match &d.model {
                    Reading::Unknown { .. } if d.pcie.known().is_none() => show(&d.model, word),
                    _ => list(known),
                };
                row(&format!("  {}", d.name), known);
            }
            let direct = show(&s.direct, |d| {
                format!("aligned to {} bytes, in memory to {}", d.offset_bytes, d.memory_bytes)
            });
            row("  O_DIRECT", direct);
        }
    }
    if asked {
        let rate = show(&probe.read_rate, |r| {
            let mib = r.bytes_per_second / f64::from(1 << 20);
            format!("{mib:.0} MiB/s over {:.1} s ({})", r.seconds, r.method)
        });
        row("  read test", rate);
    }
    let width = rows.iter().map(|r| r[0].chars().count()).max().unwrap_or(0);
    let mut out: String = rows
        .iter()
        .map(|[name, value]| format!("{name:width$}  {value}").trim_end().to_owned() + "\n")
        .collect();
    let section = |title: &str, findings: &[Finding]| {
        let lines = findings
            .iter()
            .map(|f| format!("  {}: {}\n    {}\n", f.id, f.what, f.remedy));
        format!("\n{title}\n{}", lines.collect::<String>())
    };
    if !probe.warnings.is_empty() {
        out += &section("warnings", &probe.warnings);
    }
    if probe.ready {
        out += "\nready\n";
    } else {
        out += &section("not ready", &probe.blockers);
    }
    out
}

fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    if items.is_empty() {
        "none".to_owned()
    } else {
        items.join(", ")
    }
}
