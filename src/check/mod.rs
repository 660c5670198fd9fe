//! `flashrt check`: the windows of a real model's graphs, their oracles against ggml's CPU results.
//!
//! A model runs on ggml-cpu while every node's operands and result are recorded ([`record`], feature `host`). The engine
//! matches windows on that graph as the CUDA hook would. The kernel calls of each site are then executed by the oracles on
//! the recorded memory ([`emulate`]) and what they write is compared with what ggml computed there, value by value. Each value
//! carries a bound for ggml's own error ([`cpu`]): mostly the rounding of a mat-vec's input to 8 bits.
//!
//! This shows that patterns, guards, arguments and oracles mean what the model means. It says nothing about the CUDA kernels:
//! those are held against the same oracles by the GPU tests.

pub mod cpu;
pub mod emulate;
pub mod memory;
pub mod recording;
pub mod site;

#[cfg(feature = "host")]
pub mod record;
#[cfg(feature = "host")]
mod run;

#[cfg(test)]
mod tests;

#[cfg(feature = "host")]
pub use run::{run, CheckError, Options};

use crate::graph::{BuildError, OwnedGraph};
use crate::window::thresholds::Thresholds;
use crate::window::{match_graph, WINDOWS};
use recording::Recording;
use serde::Serialize;
use site::{compare, Worst};
use std::collections::BTreeMap;

/// What `flashrt check` found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What llama.cpp calls the model.
    pub model: String,
    /// Its layers.
    pub layers: i32,
    /// Version of ggml that computed.
    pub ggml: String,
    /// One for each evaluation.
    pub graphs: Vec<GraphReport>,
}

/// One evaluation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GraphReport {
    /// What was evaluated, e.g. `prefill`.
    pub name: String,
    /// Tokens of the batch.
    pub tokens: usize,
    /// Sequences they belong to.
    pub sequences: usize,
    /// Nodes of the graph.
    pub nodes: usize,
    /// One for each window that is switched on.
    pub windows: Vec<WindowReport>,
}

/// One window in one evaluation.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct WindowReport {
    /// Its name.
    pub window: String,
    /// Sites where it would fire.
    pub sites: usize,
    /// Sites whose outputs were compared.
    pub compared: usize,
    /// Values that were compared.
    pub values: usize,
    /// The one that lies farthest off, in units of its bound; `null` when there is none.
    pub worst: Option<Worst>,
    /// Sites left to stock ggml, by reason.
    pub declined: BTreeMap<String, usize>,
    /// Sites that could not be compared, and why.
    pub errors: Vec<String>,
}

impl Report {
    /// Sites of a window in the graph with this name; 0 when there is none.
    pub fn sites(&self, graph: &str, window: &str) -> usize {
        let windows = self.graphs.iter().filter(|g| g.name == graph).flat_map(|g| &g.windows);
        windows.filter(|w| w.window == window).map(|w| w.sites).sum()
    }

    /// Everything that makes the check fail.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        for graph in &self.graphs {
            for w in &graph.windows {
                let at = format!("{} in the {} graph", w.window, graph.name);
                if let Some(error) = w.errors.first() {
                    failures.push(format!("{at}: {} of {} sites failed: {error}", w.errors.len(), w.sites));
                }
                if let Some(worst) = w.worst.as_ref().filter(|w| !w.is_within()) {
                    let Worst {
                        ratio,
                        error,
                        bound,
                        tensor,
                    } = worst;
                    failures.push(format!(
                        "{at}: {tensor} is off by {error:.3e}, {ratio:.2} times its bound of {bound:.3e}"
                    ));
                }
            }
        }
        if self.graphs.iter().flat_map(|g| &g.windows).all(|w| w.sites == 0) {
            failures.push("no window site in any graph of this model".to_owned());
        }
        failures
    }
}

/// Matches the windows that `enabled` lets through (by index in [`WINDOWS`]) and compares every site of a recorded graph.
pub fn check_recording(
    recording: &Recording,
    thresholds: Thresholds,
    enabled: impl Fn(usize) -> bool,
) -> Result<Vec<WindowReport>, BuildError> {
    let owned = OwnedGraph::new(recording.graph())?;
    let matched = match_graph(owned.graph(), owned.host(), thresholds, &enabled);
    let named = |w: usize| WindowReport {
        window: WINDOWS[w].name.to_owned(),
        ..WindowReport::default()
    };
    let mut reports: BTreeMap<usize, WindowReport> = (0..WINDOWS.len())
        .filter(|&w| enabled(w))
        .map(|w| (w, named(w)))
        .collect();
    for declined in &matched.declined {
        if let Some(report) = reports.get_mut(&declined.window) {
            *report.declined.entry(declined.decline.reason.to_owned()).or_default() += 1;
        }
    }
    for site in &matched.sites {
        let Some(report) = reports.get_mut(&site.window) else {
            continue;
        };
        report.sites += 1;
        match compare(site.window(), &site.m, &owned, recording) {
            Ok(found) => {
                report.compared += 1;
                report.values += found.values;
                if report.worst.as_ref().is_none_or(|w| found.worst.ratio > w.ratio) {
                    report.worst = Some(found.worst);
                }
            }
            Err(error) => report
                .errors
                .push(format!("{}: {error}", owned.graph().node(site.m.start).name())),
        }
    }
    Ok(reports.into_values().collect())
}
