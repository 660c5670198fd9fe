//! `flashrt windows`: the table of windows.

use crate::output;
use anyhow::Result;
use ggml_flashrt::window::settings::{Settings, SWITCHES};
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
    let status = |index: usize| match () {
        () if !window::compiled() => "not compiled (no CUDA)",
        () if settings.disabled => "off (GGML_FLASHRT_DISABLE)",
        () if settings.off[index] && !WINDOWS[index].on_by_default => "off (until its switch is 0)",
        () if settings.off[index] => "off (its switch)",
        () => "on",
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
        let archs = ggml_flashrt::kernel::archs();
        let all = serde_json::json!({"windows": windows, "compiled": window::compiled(), "archs": archs});
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
    let switches: Vec<_> = SWITCHES.iter().map(|s| [s.name.into(), s.does.into()]).collect();
    output::print(&format!(
        "{}\n{}",
        output::table(["window", "archs", "status", "switch", "computes"], &rows),
        output::table(["switch", "effect"], &switches)
    ))
}
