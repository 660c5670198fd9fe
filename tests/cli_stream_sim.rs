//! `flashrt stream-sim`.
#![cfg(feature = "cli")]

mod cli_support;
mod stream_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use serde_json::Value;
use std::process::Command;

fn sim(args: &[&str]) -> Command {
    let mut command = flashrt();
    command
        .args([
            "stream-sim",
            "--disk-rate",
            "1000MiB",
            "--latency-us",
            "100",
            "--step-ms",
            "20",
        ])
        .args(args);
    command
}

const SMALL: [&str; 12] = [
    "--bundle",
    "1MiB",
    "--layers",
    "4",
    "--experts",
    "32",
    "--used",
    "4",
    "--tokens",
    "100",
    "--warm-up",
    "20",
];

fn results(args: &[&str]) -> Vec<Value> {
    let json: Value = serde_json::from_str(&stdout(sim(&SMALL).args(args).arg("--json"))).unwrap();
    assert_eq!(json["simulated"], true, "nobody must take it for a measurement");
    json["results"].as_array().unwrap().clone()
}

#[test]
fn fewer_slots_hit_less_and_cost_tokens() {
    let all = results(&["--policy", "lru", "--slots", "100%,50%,25%,16"]);
    let number = |r: &Value, field: &str| r[field].as_f64().unwrap();
    assert_eq!(
        all.iter().map(|r| r["slots"].as_u64().unwrap()).collect::<Vec<_>>(),
        [128, 64, 32, 16]
    );
    for pair in all.windows(2) {
        assert!(number(&pair[0], "hit_rate") >= number(&pair[1], "hit_rate"));
        assert!(number(&pair[0], "tokens_per_second") >= number(&pair[1], "tokens_per_second"));
    }
    assert!(number(&all[0], "tokens_per_second") <= 50.0, "a step takes 20 ms");
    // Time is what the model says: steps, waits and bytes.
    for r in &all {
        let c = &r["counts"];
        let bytes = c["bytes"].as_f64().unwrap() / f64::from(1000 << 20);
        let seconds = c["seconds"].as_f64().unwrap();
        let waits = (seconds - 80.0 * 0.02 - bytes) / 1e-4;
        assert!((waits - waits.round()).abs() < 1e-3, "{r} {waits}");
        assert!((0.0..=320.0).contains(&waits.round()), "{r} {waits}");
    }
}

#[test]
fn a_trace_that_was_written_plays_the_same() {
    let scratch = Scratch::new();
    let path = scratch.path("trace.jsonl");
    let path = path.to_str().unwrap();
    let slots = ["--slots", "40,100%"];
    let made = results(&[&slots[..], &["--write-trace", path]].concat());
    assert_eq!(made, results(&[&slots[..], &["--trace", path]].concat()));
    assert_ne!(made, results(&[&slots[..], &["--seed", "2"]].concat()));
    // It is not written over.
    let mut again = sim(&SMALL);
    assert!(complaint(again.args(["--write-trace", path])).contains("exists already"));
}

#[test]
fn a_model_says_how_large_its_experts_are() {
    let dir = tempfile::tempdir().unwrap();
    let model = stream_support::model(dir.path(), 5);
    let args = [
        "--slots",
        "50%",
        "--policy",
        "segmented",
        "--model",
        model.to_str().unwrap(),
    ];
    let text = stdout(&mut sim(&args));
    assert!(
        text.starts_with("simulated: ") && text.contains("4 layers with 6 experts, 2 used"),
        "{text}"
    );
    assert!(text.contains("synthetic: locality"), "{text}");
}

#[test]
fn what_cannot_be_played_is_said() {
    let with = |args: &[&str]| complaint(sim(&SMALL).args(args));
    assert!(with(&["--slots", "3"]).contains("a step needs 16"));
    assert!(with(&["--slots", "0"]).contains("there are 128 experts"));
    assert!(with(&["--slots", "many"]).contains("no number of slots"));
    assert!(with(&["--slots", "200%"]).contains("there are 128 experts"));
    assert!(with(&["--trace", "/nowhere.jsonl"]).contains("/nowhere.jsonl"));
    assert!(with(&["--locality", "2"]).contains("locality"));
    assert!(!sim(&[]).output().unwrap().status.success(), "no size of an expert");
}
