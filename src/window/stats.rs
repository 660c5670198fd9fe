//! What fired and what did not.

use super::WINDOWS;
use serde::Serialize;
use std::collections::BTreeMap;

/// Counters of one window.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Sites in the plans that were made.
    pub sites: u64,
    /// Sites times evaluations, replayed CUDA graphs included.
    pub evaluated: u64,
    /// Launched by the hook: once while capturing, then the replayed graph does it.
    pub fired: u64,
    /// Declined sites by reason.
    pub declined: BTreeMap<&'static str, u64>,
}

/// Counters of all windows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// By index in [`WINDOWS`].
    pub windows: Vec<Counters>,
    /// Graphs evaluated.
    pub evaluations: u64,
    /// Plans made.
    pub plans: u64,
    /// Device memory held for scratch and hand-offs, of all contexts.
    pub scratch_bytes: u64,
    /// Why the layer is off, if it is.
    pub disabled: Option<String>,
}

impl Default for Stats {
    fn default() -> Self {
        Stats {
            windows: vec![Counters::default(); WINDOWS.len()],
            evaluations: 0,
            plans: 0,
            scratch_bytes: 0,
            disabled: None,
        }
    }
}

impl Stats {
    /// One JSON object.
    pub fn to_json(&self) -> String {
        let windows: BTreeMap<&str, &Counters> = WINDOWS.iter().map(|w| w.name).zip(&self.windows).collect();
        serde_json::json!({
            "windows": windows,
            "evaluations": self.evaluations,
            "plans": self.plans,
            "scratch_bytes": self.scratch_bytes,
            "disabled": self.disabled,
            "archs": crate::kernel::archs(),
        })
        .to_string()
    }

    /// A table for people.
    pub fn to_table(&self) -> String {
        use std::fmt::Write;
        let mut table = String::new();
        if let Some(why) = &self.disabled {
            let _ = writeln!(table, "flashrt: off: {why}");
        }
        let _ = writeln!(
            table,
            "flashrt: {} evaluations, {} plans, {:.1} MiB of scratch",
            self.evaluations,
            self.plans,
            self.scratch_bytes as f64 / f64::from(1 << 20)
        );
        let _ = writeln!(
            table,
            "{:<14} {:>6} {:>10} {:>10}  declined",
            "window", "sites", "evaluated", "launched"
        );
        for (window, c) in WINDOWS.iter().zip(&self.windows) {
            let declined: Vec<String> = c.declined.iter().map(|(why, n)| format!("{n} {why}")).collect();
            let declined = if declined.is_empty() {
                "-".to_owned()
            } else {
                declined.join(", ")
            };
            let _ = writeln!(
                table,
                "{:<14} {:>6} {:>10} {:>10}  {declined}",
                window.name, c.sites, c.evaluated, c.fired
            );
        }
        table
    }
}
