//! `flashrt windows`: the table of windows, and from how many tokens on the mat-mul windows take a product.

use crate::output;
use anyhow::Result;
use ggml_flashrt::window::settings::{Settings, SWITCHES};
use ggml_flashrt::window::thresholds::{Threshold, FAMILIES, NEVER};
use ggml_flashrt::window::{self, WINDOWS};

/// Arguments of `flashrt windows`.
#[derive(clap::Args)]
pub struct Args {
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the table.
pub fn run(args: Args) -> Result<()> {
    let settings = Settings::from_env();
    settings.warnings.iter().for_each(|w| eprintln!("flashrt: {w}"));
    let status = |index: usize| match () {
        () if !window::compiled() => "not compiled (no CUDA)",
        () if settings.disabled => "off (GGML_FLASHRT_DISABLE)",
        () if settings.off[index] && !WINDOWS[index].on_by_default => "off (until its switch is 0)",
        () if settings.off[index] => "off (its switch)",
        () => window::lacks(WINDOWS[index]).unwrap_or("on"),
    };
    if args.json {
        let windows: Vec<_> = WINDOWS
            .iter()
            .enumerate()
            .map(|(i, w)| {
                serde_json::json!({"name": w.name, "computes": w.computes, "replaces": w.replaces, "min_cc": w.min_cc,
                    "switch": w.switch, "status": status(i)})
            })
            .collect();
        let thresholds: Vec<_> = least_tokens(&settings)
            .map(|(cc, name, least, routed)| {
                serde_json::json!({"cc": cc, "weight_type": name, "least_tokens": least, "least_routed_tokens": routed})
            })
            .collect();
        let archs = ggml_flashrt::kernel::archs();
        let all = serde_json::json!({"windows": windows, "thresholds": thresholds, "compiled": window::compiled(),
            "archs": archs, "attention_modules": ggml_flashrt::kernel::prefill_fa4_modules()});
        return output::print(&format!("{all:#}\n"));
    }
    let rows: Vec<_> = WINDOWS
        .iter()
        .enumerate()
        .map(|(i, w)| {
            let least = format!("sm_{}+", w.min_cc);
            [
                w.name.into(),
                least,
                status(i).into(),
                w.switch.into(),
                w.computes.into(),
            ]
        })
        .collect();
    let takers = |of_kind: fn(Threshold) -> bool| {
        let takers = WINDOWS.iter().filter(|w| w.threshold.is_some_and(of_kind));
        takers.map(|w| w.name).collect::<Vec<_>>().join(", ")
    };
    let from = match settings.thresholds.mm_min_tokens {
        Some(_) => "from GGML_FLASHRT_MM_MIN_TOKENS",
        None => "measured: see the windows' pages",
    };
    let least: Vec<_> = least_tokens(&settings)
        .map(|(cc, name, least, routed)| [format!("sm_{cc}a"), name.to_owned(), tokens(least), tokens(routed)])
        .collect();
    let switches: Vec<_> = SWITCHES.iter().map(|s| [s.name.into(), s.does.into()]).collect();
    let archs = ggml_flashrt::kernel::archs();
    let kernels = match archs.as_str() {
        "" => "none: built without CUDA",
        archs => archs,
    };
    output::print(&format!(
        "kernels: {kernels}\n\n{}\n{} take products, {} those of experts, from so many tokens on ({from}):\n{}\n{}",
        output::table(["window", "archs", "status", "switch", "computes"], &rows),
        takers(|t| matches!(t, Threshold::Rows { .. })),
        takers(|t| matches!(t, Threshold::Routed { .. })),
        output::table(["GPU", "weights", "least tokens", "with experts"], &least),
        output::table(["switch", "effect"], &switches)
    ))
}

fn tokens(least: i64) -> String {
    if least == NEVER {
        "never".to_owned()
    } else {
        least.to_string()
    }
}

/// Compute capability (times 10), weight type and least tokens of the mat-mul windows, and of those with experts.
fn least_tokens(settings: &Settings) -> impl Iterator<Item = (i32, &'static str, i64, i64)> + '_ {
    let lines = FAMILIES
        .iter()
        .flat_map(|f| f.least_tokens.iter().map(|(dtype, _)| (f.cc, *dtype)));
    lines.map(|(cc, dtype)| {
        let all = settings.thresholds;
        let [least, routed] =
            [all.least_tokens(cc, dtype), all.least_routed_tokens(cc, dtype)].map(|n| n.expect("a line of the table"));
        (cc, dtype.name(), least, routed)
    })
}
