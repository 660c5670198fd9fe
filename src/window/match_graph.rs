//! All windows of a graph.

use super::checks;
use super::pattern::{find, Match};
use super::thresholds::Thresholds;
use super::{Constants, Decline, Window, WINDOWS};
use crate::graph::{GraphRef, HostView, Op};

/// A place where a window fires.
pub struct Site<'g> {
    /// Index in [`WINDOWS`].
    pub window: usize,
    /// What its names stand for.
    pub m: Box<Match<'g>>,
}

impl Site<'_> {
    /// The window.
    pub fn window(&self) -> &'static Window {
        WINDOWS[self.window]
    }
}

/// A place where a pattern was found and left to stock ggml.
pub struct Declined {
    /// Index in [`WINDOWS`].
    pub window: usize,
    /// Index of the first node.
    pub start: usize,
    /// Name of the first node.
    pub node: String,
    /// Why.
    pub decline: Decline,
}

/// What was found in a graph.
#[derive(Default)]
pub struct Matched<'g> {
    /// Sites in node order. No node belongs to two.
    pub sites: Vec<Site<'g>>,
    /// Sites that were declined.
    pub declined: Vec<Declined>,
    /// A site may rely on a constant outside of buffers of weights: see [`Constants`].
    pub waits_at_start: bool,
}

/// Finds the sites of all windows that `enabled` lets through.
pub fn match_graph<'g>(
    graph: GraphRef<'g>,
    host: HostView<'g>,
    thresholds: Thresholds,
    enabled: impl Fn(usize) -> bool,
) -> Matched<'g> {
    let mut ops: Vec<Op> = graph
        .nodes()
        .map(|t| if t.is_empty() { Op::None } else { graph.op(t) })
        .collect();
    let constants = Constants::new(graph, host);
    let mut matched = Matched::default();
    for (index, window) in WINDOWS.iter().enumerate() {
        if !enabled(index) {
            continue;
        }
        let pattern = (window.pattern)();
        for start in 0..ops.len() {
            if !pattern.may_start(&ops, start) {
                continue;
            }
            match best(window, graph, &ops, start, host, &constants, thresholds) {
                None => {}
                Some(Ok(m)) => {
                    // No pattern has such a step: later windows neither start here nor run across.
                    ops[m.start..m.end].fill(Op::Other);
                    matched.sites.push(Site { window: index, m });
                }
                Some(Err(decline)) => {
                    let node = graph.node(start).name();
                    matched.declined.push(Declined {
                        window: index,
                        start,
                        node,
                        decline,
                    });
                }
            }
        }
    }
    matched.sites.sort_by_key(|s| s.m.start);
    matched.waits_at_start = constants.found_by_graph();
    matched
}

/// The longest match that passes every check; else why the longest one did not.
fn best<'g>(
    window: &'static Window,
    graph: GraphRef<'g>,
    ops: &[Op],
    start: usize,
    host: HostView,
    constants: &Constants,
    thresholds: Thresholds,
) -> Option<Result<Box<Match<'g>>, Decline>> {
    let pattern = (window.pattern)();
    let mut first = None;
    let mut ops = ops;
    while let Some(mut m) = find(pattern, graph, ops, start) {
        checks::mark_unread_outputs(&mut m, graph);
        let verdict = allowed(window, &m, host, thresholds)
            .and_then(|()| (window.guard)(&m, constants))
            .and_then(|()| checks::check(window, &m, graph, ops, host));
        match verdict {
            Ok(()) => return Some(Ok(m)),
            Err(decline) => {
                first.get_or_insert(decline);
                ops = &ops[..m.end - 1];
            }
        }
    }
    first.map(Err)
}

/// Has this GPU the window, and does it pay off for so many tokens?
fn allowed(window: &Window, m: &Match, host: HostView, thresholds: Thresholds) -> Result<(), Decline> {
    if host.cc() < window.min_cc {
        let detail = format!("sm_{}, at least sm_{} needed", host.cc(), window.min_cc);
        return Err(Decline::new("GPU", detail));
    }
    match window.threshold {
        Some(threshold) => thresholds.check(host.cc(), m, threshold),
        None => Ok(()),
    }
}
