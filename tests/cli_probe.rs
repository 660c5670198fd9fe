//! `flashrt probe`, on trees of system files made by hand (tests/fixtures/sysroot) and on the machine that runs the tests.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::flashrt;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/sysroot")
}

/// Lays a tree's files out in a folder.
fn unpack(tree: &str) -> TempDir {
    let text = fs::read_to_string(fixtures().join(format!("{tree}.tree"))).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let body = text.split_once("\n@ ").expect("a tree has files").1;
    for entry in body.split("\n@ ") {
        let (head, content) = entry.split_once('\n').unwrap_or((entry, ""));
        let (path, target) = match head.split_once(" -> ") {
            Some((path, target)) => (path, Some(target)),
            None => (head, None),
        };
        let at = dir.path().join(path.strip_prefix('/').expect("an absolute path"));
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        match target {
            Some(target) => symlink(target, at).unwrap(),
            None if path.ends_with('/') => fs::create_dir_all(at).unwrap(),
            None => fs::write(at, content.replace("\\0", "\0")).unwrap(),
        }
    }
    dir
}

/// The probe's JSON for a tree. It never calls another machine ready.
#[track_caller]
fn probe(tree: &str, model: &str) -> Value {
    let dir = unpack(tree);
    let output = flashrt()
        .args(["probe", "--json", "--model", model, "--sysroot"])
        .arg(dir.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "a copy is never ready");
    assert!(stderr.starts_with("flashrt: not ready: "), "{stderr}");
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["ready"], false);
    assert!(!json["blockers"].as_array().unwrap().is_empty());
    json
}

fn ids(json: &Value, list: &str) -> Vec<String> {
    let findings = json[list].as_array().unwrap();
    findings.iter().map(|f| f["id"].as_str().unwrap().to_owned()).collect()
}

fn layers(json: &Value) -> Vec<String> {
    let layers = json["storage"]["value"]["layers"]["value"].as_array();
    let layers = layers.unwrap_or_else(|| panic!("{}", json["storage"]));
    layers
        .iter()
        .map(|l| format!("{} {}", l["kind"].as_str().unwrap(), l["name"].as_str().unwrap()))
        .collect()
}

/// Trees and the model that is looked at in each.
const TREES: [(&str, &str); 6] = [
    ("orin-nano", "/home/user/model.gguf"),
    ("agx-orin", "/models/moe-00001-of-00002.gguf"),
    ("pc", "/home/user/models/moe.gguf"),
    ("container", "/models/moe.gguf"),
    ("live-usb", "/opt/moe.gguf"),
    ("broken", "/net/moe.gguf"),
];

/// A change of these files is a change of the schema: raise `probe::SCHEMA` unless only fields were added.
#[test]
fn every_tree_reads_as_it_did() {
    for (tree, model) in TREES {
        let mut json = probe(tree, model);
        json["version"] = "any".into();
        let wanted = format!("{json:#}\n");
        let path = fixtures().join(format!("{tree}.json"));
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::write(&path, &wanted).unwrap();
        }
        let stated = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(stated, wanted, "{tree}.json: see tests/fixtures/sysroot/README.md");
    }
}

#[test]
fn an_orin_nano_is_known_down_to_its_disk() {
    let json = probe("orin-nano", "/home/user/model.gguf");
    let board = &json["board"];
    assert_eq!(board["module"]["value"], "p3767-0005");
    assert_eq!(board["module_memory_bytes"]["value"], 8u64 << 30);
    assert_eq!(board["l4t"]["value"], "36.4.3");
    assert_eq!(board["jetpack"]["value"], "6.2+b77");
    assert_eq!(board["power_mode"]["value"], "25W (mode 1)");
    assert_eq!(board["gpu_clock"]["value"]["max_hz"], 918_000_000);
    assert_eq!(json["storage"]["value"]["file"], "/srv/models/moe.gguf");
    assert_eq!(layers(&json), ["partition nvme0n1p1", "disk nvme0n1"]);
    let disk = &json["storage"]["value"]["disks"]["value"][0];
    assert_eq!(disk["transport"], "nvme");
    assert_eq!(disk["pcie"]["value"], "8.0 GT/s PCIe x4 (of 16.0 GT/s PCIe x4)");
    assert_eq!(json["memory"]["usable_bytes"]["value"], 6_100_428u64 * 1024);
    assert_eq!(ids(&json, "warnings"), [""; 0], "zram is no disk, and the disk is NVMe");
    assert_eq!(ids(&json, "blockers"), ["copy", "cuda"]);
}

#[test]
fn a_release_that_no_table_has_is_unknown_with_the_reason() {
    let json = probe("agx-orin", "/models/moe-00001-of-00002.gguf");
    let board = &json["board"];
    assert_eq!(board["l4t"]["value"], "36.9.9");
    let why = board["jetpack"]["unknown"].as_str().unwrap();
    assert!(why.contains("does not know Jetson Linux 36.9.9"), "{why}");
    assert_eq!(board["module"]["value"], "p3701-0099");
    assert!(board["module_name"]["unknown"].as_str().unwrap().contains("p3701-0099"));
    assert!(board["power_mode"]["value"]
        .as_str()
        .unwrap()
        .starts_with("mode 7, whose name"));

    let broken = probe("broken", "/net/moe.gguf");
    let unknown = |field: &str| broken["board"][field]["unknown"].as_str().unwrap().to_owned();
    assert!(unknown("l4t").contains("R36 (development)"));
    assert!(unknown("jetpack").contains("R36 (development)"));
    assert!(unknown("module").contains("several modules"));
    assert!(unknown("power_mode").contains("no mode"));
}

#[test]
fn storage_is_followed_through_mappings_raids_images_and_overlays() {
    let path = |tree, model| layers(&probe(tree, model));
    assert_eq!(
        path("agx-orin", "/models/moe-00001-of-00002.gguf"),
        ["lvm dm-1", "partition nvme0n1p2", "disk nvme0n1"]
    );
    assert_eq!(
        path("pc", "/home/user/models/moe.gguf"),
        ["crypt dm-0", "partition nvme1n1p3", "disk nvme1n1"]
    );
    assert_eq!(
        path("container", "/models/moe.gguf"),
        ["raid md127", "disk nvme0n1", "disk nvme1n1"]
    );
    assert_eq!(
        path("live-usb", "/opt/moe.gguf"),
        ["loop loop0", "partition sdb1", "disk sdb"]
    );

    let hidden = probe("container", "/opt/moe.gguf");
    let why = hidden["storage"]["value"]["layers"]["unknown"].as_str().unwrap();
    assert!(
        why.contains("cannot be seen") && why.contains("/var/lib/containers/l/A"),
        "{why}"
    );
    assert!(ids(&hidden, "warnings").contains(&"disk".to_owned()));

    let network = probe("broken", "/net/moe.gguf");
    let why = network["storage"]["value"]["disks"]["unknown"].as_str().unwrap();
    assert!(why.contains("nfs4") && why.contains("no block device"), "{why}");
}

#[test]
fn usable_memory_is_what_the_tightest_limit_leaves() {
    let usable = |tree, model| probe(tree, model)["memory"]["usable_bytes"]["value"].clone();
    // 20 GiB for the service, 3 used, of which 1 is page cache that goes first.
    assert_eq!(usable("agx-orin", "/models/moe-00001-of-00002.gguf"), 18u64 << 30);
    // memory.high of the slice in the middle: 32 GiB less 4 used.
    assert_eq!(usable("pc", "/home/user/models/moe.gguf"), 28u64 << 30);
    // The container's own group is what its mount shows as the top.
    assert_eq!(usable("container", "/models/moe.gguf"), (16u64 << 30) - (1 << 29));
    // Version 1: the group's name outside is the top inside.
    assert_eq!(usable("live-usb", "/opt/moe.gguf"), 7u64 << 30);
}

#[test]
fn what_is_missing_is_neither_zero_nor_unlimited() {
    let json = probe("broken", "/net/moe.gguf");
    let memory = &json["memory"];
    for field in ["total_bytes", "swaps", "rlimits", "cgroup", "usable_bytes"] {
        assert!(memory[field]["unknown"].is_string(), "{field}: {}", memory[field]);
    }
    assert!(
        ids(&json, "blockers").contains(&"memory".to_owned()),
        "{}",
        json["blockers"]
    );
}

#[test]
fn limits_that_hurt_are_warned_of() {
    let warned = |tree, model| ids(&probe(tree, model), "warnings");
    assert_eq!(warned("container", "/models/moe.gguf"), ["address-space"]);
    assert_eq!(warned("pc", "/home/user/models/moe.gguf"), ["swap"]);
    assert_eq!(warned("live-usb", "/opt/moe.gguf"), ["disk"]);
}

#[test]
fn a_model_that_is_not_there_is_a_blocker() {
    let json = probe("orin-nano", "/nowhere/model.gguf");
    assert!(ids(&json, "blockers").contains(&"model".to_owned()));
    assert_eq!(json["storage"]["unknown"], "there is no /nowhere");
}

/// Whatever this machine is: the exit status follows from the blockers, and nothing is written.
#[test]
fn this_machine_is_ready_or_the_blockers_say_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    fs::write(&model, vec![7; 100_000]).unwrap();
    let run = |json: bool| {
        let mut command = flashrt();
        command.arg("probe").arg("--model").arg(&model);
        if json {
            command.arg("--json");
        }
        command.output().unwrap()
    };
    let output = run(true);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    let blockers = ids(&json, "blockers");
    assert_eq!(output.status.success(), blockers.is_empty(), "{blockers:?}");
    assert_eq!(json["ready"], blockers.is_empty());
    assert!(json["memory"]["available_bytes"]["value"].as_u64().unwrap() > 0);
    assert_eq!(json["storage"]["value"]["bytes"], 100_000);
    // Without kernels in this build no device is ready, whatever the machine has.
    if !ggml_flashrt::window::compiled() {
        assert!(!blockers.is_empty());
    }
    let text = String::from_utf8(run(false).stdout).unwrap();
    for blocker in json["blockers"].as_array().unwrap() {
        assert!(text.contains(blocker["remedy"].as_str().unwrap()), "{text}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_read_test_says_how_it_read_and_how_fast() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model.gguf");
    fs::write(&model, vec![7; 20 << 20]).unwrap();
    let run = |seconds: &str| {
        let mut command = flashrt();
        command
            .args(["probe", "--json", "--read-test", seconds, "--model"])
            .arg(&model);
        command.output().unwrap()
    };
    let json: Value = serde_json::from_slice(&run("0.2").stdout).unwrap();
    let rate = &json["read_rate"]["value"];
    assert!(rate["bytes"].as_u64().unwrap() >= 8 << 20, "{json}");
    assert!(rate["seconds"].as_f64().unwrap() >= 0.2);
    let quotient = rate["bytes"].as_f64().unwrap() / rate["seconds"].as_f64().unwrap();
    assert!((rate["bytes_per_second"].as_f64().unwrap() / quotient - 1.0).abs() < 1e-9);
    assert_eq!(rate["direct"], json["storage"]["value"]["direct"]["value"].is_object());

    fs::write(&model, vec![7; 1 << 20]).unwrap();
    let json: Value = serde_json::from_slice(&run("0.2").stdout).unwrap();
    assert!(json["read_rate"]["unknown"].as_str().unwrap().contains("shorter"));
    assert!(
        run("0").stdout.is_empty() && run("nan").stdout.is_empty(),
        "no time at all"
    );
}
