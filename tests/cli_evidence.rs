//! `flashrt evidence`: the index follows from verified reports, documents follow from the index.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use serde_json::{json, Value};

/// A folder with one report of a series.
fn folder() -> Scratch {
    let scratch = Scratch::new();
    std::fs::write(scratch.path("samples"), "[300.0, 100.0, 200.0]").unwrap();
    let mut series = flashrt();
    series
        .args(["evidence", "series", "match/ns-per-node"])
        .arg(scratch.path("samples"));
    series
        .arg("--out")
        .arg(scratch.path("match.json"))
        .args(["--unit", "ns", "--better", "lower", "--per", "2"]);
    stdout(series.env("FLASHRT_COMMIT", "c0ffee-dirty"));
    scratch
}

fn index(scratch: &Scratch, check: bool) -> std::process::Command {
    let mut command = flashrt();
    command.args(["evidence", "index"]).arg(scratch.path(""));
    if check {
        command.arg("--check");
    }
    command
}

fn edit(scratch: &Scratch, change: impl FnOnce(&mut Value)) {
    let path = scratch.path("match.json");
    let mut report: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut report);
    std::fs::write(path, report.to_string()).unwrap();
}

#[test]
fn the_index_lists_headlines_and_checks_itself() {
    let scratch = folder();
    assert!(complaint(&mut index(&scratch, true)).contains("index.json is out of date"));
    stdout(&mut index(&scratch, false));
    stdout(&mut index(&scratch, true));
    let text = std::fs::read_to_string(scratch.path("index.json")).unwrap();
    let entries: Value = serde_json::from_str(&text).unwrap();
    let entry = &entries[0];
    assert_eq!(
        (&entry["id"], &entry["value"], &entry["unit"]),
        (&"match/ns-per-node".into(), &100.0.into(), &"ns".into())
    );
    assert_eq!(
        (&entry["commit"], &entry["report"]),
        (&"c0ffee-dirty".into(), &"match.json".into())
    );

    std::fs::write(scratch.path("index.json"), text.replace("100.0", "90.0")).unwrap();
    assert!(complaint(&mut index(&scratch, true)).contains("index.json is out of date from line 4 on"));
}

#[test]
fn a_headline_that_its_samples_do_not_give_is_refused() {
    let scratch = folder();
    edit(&scratch, |report| report["headlines"][0]["value"] = json!(50.0));
    let said = complaint(&mut index(&scratch, false));
    assert!(
        said.contains("match.json: match/ns-per-node is 50 in the report, but its samples give 100"),
        "{said}"
    );
}

#[test]
fn a_null_without_a_reason_is_refused() {
    let scratch = folder();
    edit(&scratch, |report| {
        report["missing"].as_object_mut().unwrap().remove("build.archs");
    });
    let said = complaint(&mut index(&scratch, false));
    assert!(
        said.contains("match.json: build.archs is null, and the report does not say why"),
        "{said}"
    );
}

#[test]
fn reports_of_another_schema_and_double_ids_are_refused() {
    let scratch = folder();
    std::fs::copy(scratch.path("match.json"), scratch.path("again.json")).unwrap();
    assert!(complaint(&mut index(&scratch, false)).contains("is in again.json and in match.json"));
    std::fs::remove_file(scratch.path("again.json")).unwrap();
    edit(&scratch, |report| report["schema"] = json!(2));
    assert!(complaint(&mut index(&scratch, false)).contains("schema 2, but this version reads 1"));
    std::fs::write(scratch.path("match.json"), "{}").unwrap();
    assert!(complaint(&mut index(&scratch, false)).contains("match.json: no report"));
}

#[test]
fn documents_follow_the_index() {
    let scratch = folder();
    stdout(&mut index(&scratch, false));
    let document = scratch.path("README.md");
    std::fs::write(
        &document,
        "Matching takes <!-- ev:match/ns-per-node -->?<!-- /ev --> a node.\n",
    )
    .unwrap();
    let render = |check: &[&str]| {
        let mut command = flashrt();
        command
            .args(["evidence", "render", "--dir"])
            .arg(scratch.path(""))
            .arg(&document)
            .args(check);
        command
    };
    assert!(complaint(&mut render(&["--check"])).contains("README.md is out of date from line 1 on"));
    stdout(&mut render(&[]));
    let text = std::fs::read_to_string(&document).unwrap();
    assert_eq!(
        text,
        "Matching takes <!-- ev:match/ns-per-node -->100 ns<!-- /ev --> a node.\n"
    );
    stdout(&mut render(&["--check"]));
    std::fs::write(&document, "<!-- ev:nothing -->1<!-- /ev -->").unwrap();
    assert!(complaint(&mut render(&[])).contains("no evidence has the id \"nothing\""));
}

#[test]
fn a_series_taken_elsewhere_speaks_of_that_machine_and_build() {
    let scratch = folder();
    edit(&scratch, |report| {
        report["machine"]["gpu"] = json!("NVIDIA H200");
        report["build"]["archs"] = json!("sm_90a");
        let missing = report["missing"].as_object_mut().unwrap();
        missing.retain(|field, _| field != "machine.gpu" && field != "build.archs");
    });
    let mut series = flashrt();
    series.args(["evidence", "series", "op/x"]).arg(scratch.path("samples"));
    series.arg("--out").arg(scratch.path("op.json"));
    series
        .args(["--unit", "x", "--better", "higher", "--taken-with"])
        .arg(scratch.path("match.json"));
    stdout(&mut series);
    let read =
        |name: &str| -> Value { serde_json::from_str(&std::fs::read_to_string(scratch.path(name)).unwrap()).unwrap() };
    let (made, there) = (read("op.json"), read("match.json"));
    assert_eq!((&made["machine"], &made["build"]), (&there["machine"], &there["build"]));
    assert_eq!(made["missing"].get("machine.gpu"), None);
    assert_eq!(made["headlines"][0]["value"], json!(200.0));
}
