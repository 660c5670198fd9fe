//! All windows of a graph, and the hand-offs between them.

use super::checks;
use super::pattern::{find, Match};
use super::{Constants, Decline, Q8Buffer, Window, WINDOWS};
use crate::graph::{GraphRef, HostView, Op, Region, Tensor};
use std::collections::HashMap;

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
pub fn match_graph<'g>(graph: GraphRef<'g>, host: HostView<'g>, enabled: impl Fn(usize) -> bool) -> Matched<'g> {
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
            match best(window, graph, &ops, start, host, &constants) {
                None => {}
                Some(Ok(m)) => {
                    // No pattern has such a step: later windows neither start here nor run across.
                    ops[m.start..m.end].fill(Op::Other);
                    matched.sites.push(Site {
                        window: index,
                        m: Box::new(m),
                    });
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
) -> Option<Result<Match<'g>, Decline>> {
    let pattern = (window.pattern)();
    let mut first = None;
    let mut ops = ops;
    while let Some(mut m) = find(pattern, graph, ops, start) {
        checks::mark_unread_outputs(&mut m, graph);
        let verdict = if host.cc() < window.min_cc {
            Err(Decline::new(
                "GPU",
                format!("sm_{}, at least sm_{} needed", host.cc(), window.min_cc),
            ))
        } else {
            (window.guard)(&m, constants).and_then(|()| checks::check(window, &m, graph, ops, host))
        };
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

/// A result that goes from one site to others as q8 blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Edge {
    /// Index of the site that makes it.
    pub producer: usize,
    /// Indices of the sites that read it.
    pub consumers: Vec<usize>,
    /// Nobody reads the f32 form.
    pub drop_f32: bool,
    /// Values of a row.
    pub k: usize,
    /// Rows.
    pub n_tokens: usize,
}

impl Edge {
    /// Bytes of the hand-off.
    pub fn bytes(&self) -> usize {
        Q8Buffer::bytes(self.k, self.n_tokens)
    }
}

/// The hand-offs between sites. There are none in a graph with concurrent regions: its nodes may still change order.
pub fn edges(matched: &Matched, graph: GraphRef, host: HostView) -> Vec<Edge> {
    let sites = &matched.sites;
    if graph.nodes().any(|t| host.region(t) != Region::None) {
        return Vec::new();
    }
    let mut producers: HashMap<Tensor, usize> = HashMap::new();
    for (i, site) in sites.iter().enumerate() {
        if let Some(role) = site.window().q8_output {
            producers.insert(site.m.tensor(role), i);
        }
    }
    let mut edges: Vec<Edge> = Vec::new();
    let mut readers: HashMap<usize, i32> = HashMap::new();
    for (i, site) in sites.iter().enumerate() {
        let Some(role) = (site.window().q8_input)(&site.m) else {
            continue;
        };
        let x = site.m.tensor(role);
        let Some(&producer) = producers.get(&x) else { continue };
        // Whole blocks, and rows of 16 bytes.
        if x.ne()[0] % 32 != 0 || x.n_rows() > crate::kernel::MAX_TOKENS as i64 {
            continue;
        }
        let uses = site
            .m
            .nodes()
            .map(|(_, n)| n.srcs().filter(|&s| s == x).count() as i32)
            .sum::<i32>();
        *readers.entry(producer).or_default() += uses;
        match edges.iter_mut().find(|e| e.producer == producer) {
            Some(edge) => edge.consumers.push(i),
            None => edges.push(Edge {
                producer,
                consumers: vec![i],
                drop_f32: false,
                k: x.ne()[0] as usize,
                n_tokens: x.n_rows() as usize,
            }),
        }
    }
    for edge in &mut edges {
        let site = &sites[edge.producer];
        let x = site.m.tensor(site.window().q8_output.expect("it made the edge"));
        edge.drop_f32 = !x.is_output() && readers[&edge.producer] == graph.uses(x);
    }
    edges
}
