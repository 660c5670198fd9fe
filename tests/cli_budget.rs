//! `flashrt budget`.
#![cfg(feature = "cli")]

mod cli_support;
mod stream_support;

use cli_support::{complaint, flashrt, stdout};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

fn budget(model: &Path, args: &[&str]) -> Command {
    let mut command = flashrt();
    command.arg("budget").arg(model).args(["--ctx", "512"]).args(args);
    command
}

#[test]
fn the_sum_is_shown_with_the_slots_it_leaves() {
    let dir = tempfile::tempdir().unwrap();
    let model = stream_support::model(dir.path(), 5);
    let text = stdout(&mut budget(&model, &["--available", "4GiB"]));
    for line in [
        "KV cache",
        "left to the system",
        "pinned staging",
        "= ",
        "24 slots for 24 experts (100.0 %); one step needs 8",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    let json: Value = serde_json::from_str(&stdout(&mut budget(&model, &["--available", "4GiB", "--json"]))).unwrap();
    assert_eq!(
        (&json["fits"], &json["slots"], &json["schema"]),
        (&true.into(), &24.into(), &1.into())
    );
    let sum = |list: &str| {
        json["budget"][list]
            .as_array()
            .unwrap()
            .iter()
            .map(|i| i["bytes"].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(json["budget"]["left_bytes"], sum("available") - sum("items"));
}

#[test]
fn what_does_not_fit_is_refused_with_the_sum() {
    let dir = tempfile::tempdir().unwrap();
    let model = stream_support::model(dir.path(), 5);
    for args in [
        ["--available", "700MiB", "--budget", "auto"],
        ["--available", "4GiB", "--budget", "20KiB"],
    ] {
        let output = budget(&model, &args).output().unwrap();
        assert!(!output.status.success());
        let (out, err) = (
            String::from_utf8(output.stdout).unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        );
        assert!(
            err.starts_with("flashrt: does not fit: ") && err.contains("bytes"),
            "{err}"
        );
        assert!(
            out.contains("KV cache") && out.contains("one step needs") && !out.contains("slots for"),
            "{out}"
        );
    }
}

#[test]
fn a_setting_lowers_and_never_raises() {
    let dir = tempfile::tempdir().unwrap();
    let model = stream_support::model(dir.path(), 5);
    let slots = |setting: &str| {
        let args = ["--available", "4GiB", "--json", "--budget", setting];
        let json: Value = serde_json::from_str(&stdout(&mut budget(&model, &args))).unwrap();
        json["slots"].as_u64().unwrap()
    };
    assert_eq!(slots("auto"), 24);
    assert_eq!(slots("900GiB"), 24);
    assert!(slots("40KiB") < 24);
}

#[test]
fn zero_and_nonsense_are_no_budget() {
    let dir = tempfile::tempdir().unwrap();
    let model = stream_support::model(dir.path(), 5);
    for setting in ["0", "0GiB", "-1", "unlimited", "4 GiB", "4TB", "99999999999999999999"] {
        let output = budget(&model, &["--available", "4GiB", &format!("--budget={setting}")])
            .output()
            .unwrap();
        assert!(!output.status.success(), "{setting}");
    }
}

#[test]
fn without_a_gpu_a_machine_must_be_named() {
    let dir = tempfile::tempdir().unwrap();
    let model = stream_support::model(dir.path(), 5);
    let output = budget(&model, &["--device", "77"]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--available SIZE"));
}

#[test]
fn a_model_without_experts_has_nothing_to_stream() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/no_tensors.gguf");
    let line = complaint(&mut budget(&model, &["--available", "4GiB"]));
    assert!(line.contains("no tensors of routed experts"), "{line}");
}
