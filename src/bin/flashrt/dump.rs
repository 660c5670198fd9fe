//! `flashrt dump`: what is in a file of recorded graphs, and which windows match there.

use crate::output;
use anyhow::{bail, Context, Result};
use flate2::read::MultiGzDecoder;
use ggml_flashrt::graph::dump::GraphRecord;
use ggml_flashrt::graph::OwnedGraph;
use ggml_flashrt::window::settings::Settings;
use ggml_flashrt::window::thresholds::Thresholds;
use ggml_flashrt::window::{match_graph, WINDOWS};
use serde_json::{json, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Arguments of `flashrt dump`.
#[derive(clap::Args)]
pub struct Args {
    /// File that GGML_FLASHRT_DUMP wrote: a graph a line, plain or as .gz.
    file: PathBuf,
    /// Show the nodes of this graph (the first is 0).
    #[arg(long)]
    graph: Option<usize>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Prints the summary, or one graph.
pub fn run(args: Args) -> Result<()> {
    let graphs = read(&args.file)?;
    let selected = match args.graph {
        None => (0..graphs.len()).collect(),
        Some(n) if n < graphs.len() => vec![n],
        Some(n) => bail!("{}: there is no graph {n}, only {}", args.file.display(), graphs.len()),
    };
    let settings = Settings::from_env();
    settings.warnings.iter().for_each(|w| eprintln!("flashrt: {w}"));
    let found = selected
        .iter()
        .map(|&n| Found::new(n, &graphs[n], settings.thresholds))
        .collect::<Result<Vec<_>>>()?;
    if args.json {
        let all: Vec<Value> = found.iter().map(|f| f.to_json(args.graph.is_some())).collect();
        return output::print(&format!("{:#}\n", Value::from(all)));
    }
    if args.graph.is_some() {
        return output::print(&found.iter().map(Found::nodes).collect::<String>());
    }
    let text: Vec<String> = found.iter().map(Found::summary).collect();
    output::print(&text.join("\n"))
}

fn read(path: &Path) -> Result<Vec<GraphRecord>> {
    let name = path.display();
    let file = File::open(path).with_context(|| name.to_string())?;
    let gz = path.extension().is_some_and(|e| e == "gz");
    let plain: Box<dyn Read> = if gz {
        Box::new(MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let mut graphs = Vec::new();
    for (n, line) in BufReader::new(plain).lines().enumerate() {
        let line = line.with_context(|| format!("{name}: line {}", n + 1))?;
        if line.trim().is_empty() {
            continue;
        }
        let graph =
            serde_json::from_str(&line).with_context(|| format!("{name}: line {} is no recorded graph", n + 1))?;
        graphs.push(graph);
    }
    if graphs.is_empty() {
        bail!("{name}: no recorded graphs");
    }
    Ok(graphs)
}

/// A graph and what matches in it.
struct Found<'g> {
    number: usize,
    graph: &'g GraphRecord,
    /// Window and node indices of each site.
    sites: Vec<(&'static str, Vec<usize>)>,
    /// Declined sites by window and reason.
    declined: BTreeMap<(&'static str, &'static str), usize>,
}

impl<'g> Found<'g> {
    fn new(number: usize, graph: &'g GraphRecord, thresholds: Thresholds) -> Result<Self> {
        let owned = OwnedGraph::new(graph).with_context(|| format!("graph {number}"))?;
        let matched = match_graph(owned.graph(), owned.host(), thresholds, |_| true);
        let sites = matched
            .sites
            .iter()
            .map(|s| (s.window().name, (s.m.start..s.m.end).collect()))
            .collect();
        let mut declined = BTreeMap::new();
        for d in &matched.declined {
            *declined.entry((WINDOWS[d.window].name, d.decline.reason)).or_default() += 1;
        }
        Ok(Found {
            number,
            graph,
            sites,
            declined,
        })
    }

    fn per_window(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        self.sites
            .iter()
            .for_each(|(window, _)| *counts.entry(*window).or_default() += 1);
        counts
    }

    fn ops(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        self.graph
            .nodes
            .iter()
            .for_each(|&n| *counts.entry(self.graph.tensors[n].op.as_str()).or_default() += 1);
        counts
    }

    fn summary(&self) -> String {
        let list = |counts: BTreeMap<&str, usize>| {
            let items: Vec<String> = counts.iter().map(|(name, n)| format!("{name} {n}")).collect();
            if items.is_empty() {
                "none".to_owned()
            } else {
                items.join(", ")
            }
        };
        let covered: usize = self.sites.iter().map(|(_, nodes)| nodes.len()).sum();
        let nodes = self.graph.nodes.len();
        let mut text = format!(
            "graph {}: {nodes} nodes, sm_{}, uid {}\n",
            self.number, self.graph.cc, self.graph.uid
        );
        text += &format!("  ops       {}\n", list(self.ops()));
        text += &format!("  windows   {} ({covered} of {nodes} nodes)\n", list(self.per_window()));
        for ((window, reason), n) in &self.declined {
            text += &format!("  declined  {window} {n}: {reason}\n");
        }
        text
    }

    fn nodes(&self) -> String {
        let mut owner = BTreeMap::new();
        for (site, (window, nodes)) in self.sites.iter().enumerate() {
            nodes.iter().for_each(|n| {
                owner.insert(*n, format!("{window} #{site}"));
            });
        }
        let name = |id: usize| self.graph.tensors[id].name.clone();
        let rows: Vec<[String; 6]> = self
            .graph
            .nodes
            .iter()
            .enumerate()
            .map(|(i, &id)| {
                let t = &self.graph.tensors[id];
                let operands: Vec<String> = t.src.iter().map(|s| s.map_or("-".to_owned(), name)).collect();
                let shape: Vec<String> = t.ne.iter().map(ToString::to_string).collect();
                let window = owner.remove(&i).unwrap_or_default();
                [
                    i.to_string(),
                    t.op.clone(),
                    shape.join("x"),
                    window,
                    t.name.clone(),
                    operands.join(", "),
                ]
            })
            .collect();
        output::table(["node", "op", "shape", "window", "name", "operands"], &rows)
    }

    fn to_json(&self, with_nodes: bool) -> Value {
        let sites: Vec<Value> = self
            .sites
            .iter()
            .map(|(w, nodes)| json!({"window": w, "nodes": nodes}))
            .collect();
        let declined: Vec<Value> = self
            .declined
            .iter()
            .map(|((window, reason), n)| json!({"window": window, "reason": reason, "count": n}))
            .collect();
        let mut all = json!({"graph": self.number, "uid": self.graph.uid, "cc": self.graph.cc,
            "nodes": self.graph.nodes.len(), "ops": self.ops(), "windows": self.per_window(), "declined": declined});
        if with_nodes {
            all["sites"] = sites.into();
            all["record"] = json!(self.graph);
        }
        all
    }
}
