//! bench/kernel_trace.py on a trace whose every figure is known.
#![cfg(target_os = "linux")]

use serde_json::Value;
use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Output};

const HEADER: &str = concat!(
    r#"{"format":"kernel_trace","version":1,"dropped":0,"untimed":2,"overwritten":0,"names":["#,
    r#"{"kind":"memcpy","name":"memcpy HtoD"},{"kind":"kernel","name":"_Z4gemvILi4EEvPKfPf"},"#,
    r#"{"kind":"kernel","name":"_Z4normPf"},{"kind":"kernel","name":"_Z4oncev"}]}"#,
    "\n"
);
const UPLOAD: u32 = 0;
const GEMV: u32 = 1;
const NORM: u32 = 2;
const ONCE: u32 = 3;

/// Five tokens, 100 µs apart, each a graph launch of gemv 0–10, norm 8–12 (overlapping), gemv 12–22 µs, after an upload that ends
/// 2 µs before it. Token 1 is an evaluation of another kind: one more kernel. The lines are not in order of time.
fn five_tokens(graph: u32) -> String {
    let mut lines = Vec::new();
    for token in 0..5u64 {
        let start = 1_000_000 + token * 100_000;
        let mut line = |name: u32, from: u64, to: u64, graph: u32, correlation: u64| {
            let (from, to) = (start + from - 5_000, start + to - 5_000);
            lines.push(format!("[{name},{from},{to},0,7,{graph},{correlation},0]"));
        };
        line(UPLOAD, 1_000, 3_000, 0, 10 * token + 1);
        line(GEMV, 17_000, 27_000, graph, 10 * token + 2);
        line(GEMV, 5_000, 15_000, graph, 10 * token + 2);
        line(NORM, 13_000, 17_000, graph, 10 * token + 2);
        if token == 1 {
            line(ONCE, 40_000, 41_000, 0, 10 * token + 3);
        }
    }
    lines.reverse();
    lines.into_iter().fold(HEADER.to_owned(), |mut text, line| {
        writeln!(text, "{line}").unwrap();
        text
    })
}

fn reader(trace: &str, arguments: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.jsonl");
    std::fs::write(&path, trace).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/kernel_trace.py");
    Command::new("python3")
        .arg(script)
        .arg(&path)
        .args(arguments)
        .output()
        .unwrap()
}

fn json(trace: &str, arguments: &[&str]) -> Value {
    let output = reader(trace, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The figures of one line of the table.
fn row<'a>(result: &'a Value, prefix: &str) -> &'a Value {
    let rows = result["rows"].as_array().unwrap();
    let found = rows.iter().find(|r| r["name"].as_str().unwrap().contains(prefix));
    found.unwrap_or_else(|| panic!("no {prefix} in {rows:?}"))
}

#[test]
fn a_token_is_what_lies_between_graph_launches() {
    let result = json(&five_tokens(3), &[]);
    assert_eq!(result["split"], "graph");
    // The fifth has no known end.
    assert_eq!(
        result["kinds"],
        serde_json::json!([{"evaluations": 3, "records": 4}, {"evaluations": 1, "records": 5}])
    );
    assert_eq!((&result["untimed"], &result["evaluations"]), (&2.into(), &3.into()));
    assert_eq!((&result["kernels"], &result["copies_and_sets"]), (&3.into(), &1.into()));
    assert_eq!(
        (&result["wall_us"], &result["busy_us"], &result["idle_us"]),
        (&100.0.into(), &24.0.into(), &76.0.into())
    );
}

#[test]
fn overlap_counts_once_in_the_advance_and_twice_in_the_sum() {
    let result = json(&five_tokens(3), &["--launches"]);
    let gemv = row(&result, "gemv");
    assert_eq!((&gemv["count"], &gemv["median_us"]), (&2.into(), &10.0.into()));
    assert_eq!(
        (&gemv["sum_us"], &gemv["advance_us"], &gemv["share"]),
        (&20.0.into(), &20.0.into(), &0.2.into())
    );
    let norm = row(&result, "norm");
    assert_eq!((&norm["sum_us"], &norm["advance_us"]), (&4.0.into(), &2.0.into()));

    let launches = result["launches"].as_array().unwrap();
    let starts: Vec<f64> = launches.iter().map(|l| l["start_us"].as_f64().unwrap()).collect();
    assert_eq!(starts, [0.0, 8.0, 12.0, 96.0]);
    assert_eq!(launches[1]["advance_us"], 2.0);
}

#[test]
fn without_graphs_the_uploads_cut() {
    let result = json(&five_tokens(0), &[]);
    assert_eq!(result["split"], "upload");
    assert_eq!(
        (&result["evaluations"], &result["wall_us"], &result["busy_us"]),
        (&3.into(), &100.0.into(), &24.0.into())
    );
    let by_gap = json(&five_tokens(0), &["--split", "gap", "--gap-us", "30"]);
    assert_eq!((&by_gap["evaluations"], &by_gap["wall_us"]), (&3.into(), &100.0.into()));
}

#[test]
fn another_kind_can_be_asked_for() {
    let result = json(&five_tokens(3), &["--kind", "2"]);
    assert_eq!(
        (&row(&result, "once")["count"], &result["busy_us"]),
        (&1.into(), &25.0.into())
    );
}

#[test]
fn the_table_has_a_line_a_name() {
    let output = reader(&five_tokens(3), &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("wall 100.0 us, busy 24.0, idle 76.0; 3 kernels"),
        "{text}"
    );
    assert!(text.contains("records lost: 2 untimed"), "{text}");
    let gemv = text.lines().find(|l| l.contains("gemv")).unwrap();
    assert_eq!(
        gemv.split_whitespace().take(5).collect::<Vec<_>>(),
        ["2", "10.00", "20.0", "20.0", "20.0%"]
    );
}

#[test]
fn what_cannot_be_read_is_refused_in_one_line() {
    let whole = five_tokens(3);
    let one_token: String = whole.lines().take(4).map(|l| format!("{l}\n")).collect();
    for (trace, arguments, complaint) in [
        ("", &[][..], "damaged or cut short"),
        (&whole[..whole.len() - 5], &[], "damaged or cut short"),
        (
            &whole.replace(r#""version":1"#, r#""version":9"#),
            &[],
            "not a kernel trace of version 1",
        ),
        (&one_token, &[], "fewer than two evaluations"),
        (&whole, &["--kind", "3"], "there are 2 kinds"),
        (&whole, &["--device", "1"], "nothing recorded on device 1"),
    ] {
        let output = reader(trace, arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        assert!(errors.contains(complaint) && errors.lines().count() == 1, "{errors}");
    }
}
