//! `flashrt windows` and `flashrt dump`.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use flate2::write::GzEncoder;
use ggml_flashrt::graph::dump::GraphRecord;
use ggml_flashrt::graph::{DType, GraphBuilder, Op};
use ggml_flashrt::window::WINDOWS;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// A residual addition and a norm with weights, and a product that no window takes.
fn graph() -> GraphRecord {
    let mut g = GraphBuilder::new();
    let row = [64, 1, 1, 1];
    let x = g.input("x", DType::F32, row);
    let h = g.input("h", DType::F32, row);
    let w = g.weight("w", DType::F32, row);
    let y = g.node("y", Op::Add, DType::F32, row, &[Some(h), Some(x)]);
    let n = g.node("n", Op::RmsNorm, DType::F32, row, &[Some(y)]);
    let z = g.node("z", Op::Mul, DType::F32, row, &[Some(n), Some(w)]);
    g.node("out", Op::Mul, DType::F32, row, &[Some(z), Some(y)]);
    g.finish()
}

fn dump(path: &Path, args: &[&str]) -> Command {
    let mut command = flashrt();
    command.arg("dump").arg(path).args(args);
    command
}

#[test]
fn every_window_is_listed_with_its_switch() {
    let table = stdout(flashrt().arg("windows"));
    for w in WINDOWS {
        let line = table
            .lines()
            .find(|l| l.starts_with(w.name))
            .unwrap_or_else(|| panic!("{} is not in\n{table}", w.name));
        assert!(line.contains(w.switch) && line.contains(w.computes), "{line}");
    }
    let json: Value = serde_json::from_str(&stdout(flashrt().args(["windows", "--json"]))).unwrap();
    assert_eq!(json["windows"].as_array().unwrap().len(), WINDOWS.len());
}

#[test]
fn a_dump_is_summarised_with_the_windows_that_match() {
    let scratch = Scratch::new();
    let path = scratch.path("graphs.jsonl");
    let line = graph().to_json_line();
    std::fs::write(&path, format!("{line}\n\n{line}\n")).unwrap();
    let summary = stdout(&mut dump(&path, &[]));
    assert!(
        summary.contains("graph 0: 4 nodes") && summary.contains("graph 1: 4 nodes"),
        "{summary}"
    );
    assert!(summary.contains("ADD 1, MUL 2, RMS_NORM 1"), "{summary}");
    assert!(summary.contains("ADD_NORM 1 (3 of 4 nodes)"), "{summary}");

    let nodes = stdout(&mut dump(&path, &["--graph", "1"]));
    let window_of = |name: &str| {
        nodes
            .lines()
            .find(|l| l.contains(&format!(" {name} ")))
            .unwrap()
            .contains("ADD_NORM #0")
    };
    assert_eq!(
        ["y", "n", "z", "out"].map(window_of),
        [true, true, true, false],
        "{nodes}"
    );

    let json: Value = serde_json::from_str(&stdout(&mut dump(&path, &["--json"]))).unwrap();
    assert_eq!(json[1]["windows"]["ADD_NORM"], 1);
    assert!(json[1].get("record").is_none());
}

#[test]
fn compressed_dumps_are_read() {
    let scratch = Scratch::new();
    let path = scratch.path("graphs.jsonl.gz");
    let mut gz = GzEncoder::new(std::fs::File::create(&path).unwrap(), flate2::Compression::fast());
    writeln!(gz, "{}", graph().to_json_line()).unwrap();
    gz.finish().unwrap();
    assert!(stdout(&mut dump(&path, &[])).contains("ADD_NORM 1"));
}

#[test]
fn broken_dumps_are_named_with_the_line() {
    let scratch = Scratch::new();
    let path = scratch.path("graphs.jsonl");
    assert!(complaint(&mut dump(&path, &[])).contains("graphs.jsonl"));
    std::fs::write(&path, "").unwrap();
    assert!(complaint(&mut dump(&path, &[])).contains("no recorded graphs"));
    std::fs::write(&path, format!("{}\n{{\"uid\": 1", graph().to_json_line())).unwrap();
    assert!(complaint(&mut dump(&path, &[])).contains("line 2 is no recorded graph"));
    let mut broken = graph();
    broken.nodes.push(999);
    std::fs::write(&path, broken.to_json_line()).unwrap();
    assert!(complaint(&mut dump(&path, &[])).contains("graph 0"));
    std::fs::write(&path, graph().to_json_line()).unwrap();
    assert!(complaint(&mut dump(&path, &["--graph", "1"])).contains("there is no graph 1, only 1"));
}
