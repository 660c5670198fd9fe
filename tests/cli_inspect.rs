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
    let archs = ggml_flashrt::kernel::archs();
    assert!(
        !table.starts_with("kernels: \n") && table.starts_with(&format!("kernels: {archs}")),
        "{table}"
    );
    let json: Value = serde_json::from_str(&stdout(flashrt().args(["windows", "--json"]))).unwrap();
    assert_eq!(json["windows"].as_array().unwrap().len(), WINDOWS.len());
}

/// A misspelt switch is what somebody who asks for the table is after.
#[test]
fn an_unknown_switch_is_said_beside_the_table() {
    let output = flashrt()
        .arg("windows")
        .env("GGML_FLASHRT_NO_QKV_GMEV", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success());
    assert!(
        said.contains("unknown: GGML_FLASHRT_NO_QKV_GMEV") && said.contains("GGML_FLASHRT_NO_QKV_GEMV"),
        "{said}"
    );
}

/// Errors of the library state their cause, and have it as their source too.
#[test]
fn a_cause_is_said_once() {
    let scratch = Scratch::new();
    let missing = scratch.path("missing");
    let mut index = flashrt();
    let mut bench = flashrt();
    let (dir, out) = (scratch.path(""), scratch.path("r.json"));
    bench
        .arg("bench")
        .arg("--host")
        .arg(dir)
        .arg("--model")
        .arg(&missing)
        .arg("--out")
        .arg(out);
    for command in [index.args(["evidence", "index"]).arg(&missing), &mut bench] {
        let said = complaint(command);
        assert_eq!(said.matches("No such file").count(), 1, "{said}");
        assert!(said.contains(missing.to_str().unwrap()), "{said}");
    }
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
    // Sums that overflow, and a view of itself: looked through without end.
    for change in [
        |g: &mut GraphRecord| g.tensors[0].ne[1] = i64::MAX,
        |g: &mut GraphRecord| g.tensors[0].ne[0] = -1,
        |g: &mut GraphRecord| g.tensors[0].nb[3] = usize::MAX,
        |g: &mut GraphRecord| (g.tensors[0].ne[3], g.tensors[0].nb[3]) = (1 << 30, 1 << 40),
    ] {
        let mut broken = graph();
        change(&mut broken);
        broken.tensors[0].ne[3] = broken.tensors[0].ne[3].max(2);
        std::fs::write(&path, broken.to_json_line()).unwrap();
        assert!(complaint(&mut dump(&path, &[])).contains("impossible shape"));
    }
    let mut broken = graph();
    let y = broken.nodes[0];
    (broken.tensors[y].op, broken.tensors[y].code) = ("RESHAPE".into(), Op::Reshape as u8);
    broken.tensors[y].src = vec![Some(y)];
    std::fs::write(&path, broken.to_json_line()).unwrap();
    assert!(complaint(&mut dump(&path, &[])).contains("an operand of itself"));
    std::fs::write(&path, graph().to_json_line()).unwrap();
    assert!(complaint(&mut dump(&path, &["--graph", "1"])).contains("there is no graph 1, only 1"));
}
