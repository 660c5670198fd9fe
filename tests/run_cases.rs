//! bench/run_cases.py with a stand-in for llama-server: which lines it prints, and what fails.
#![cfg(target_os = "linux")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

const LLAMA_SERVER: &str = include_str!("support/llama_server.py");

/// A server of 80 tokens after any prompt, always token 1 before token 2. Gaps between the two differ by 0.01 with tensors on the
/// CPU; `other` says where token 2 is taken instead, and by how much it is preferred there.
fn cases(other: &str, fired: u32, arguments: &[&str]) -> (Vec<String>, bool) {
    let script = format!(
        r#"#!/usr/bin/env python3
{LLAMA_SERVER}
cpu = "-ot" in sys.argv
def counters():
    return {{"fired": {fired}, "declined": {{"many tokens": 3}}}}
def completion(request):
    steps = []
    for i in range(80):
        gap = 1.0 + (0.01 if cpu else 0)
        {other}
        top = [(1, -0.5), (2, -0.5 - gap)]
        top.sort(key=lambda c: -c[1])
        steps.append({{"id": top[0][0], "top_logprobs": [{{"id": t, "logprob": p}} for t, p in top]}})
    return "", steps
serve()
"#
    );
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let server = bin.join("llama-server");
    std::fs::write(&server, script).unwrap();
    std::fs::set_permissions(&server, std::fs::Permissions::from_mode(0o755)).unwrap();
    let model = dir.path().join("model.gguf");
    std::fs::write(&model, "").unwrap();
    let output = Command::new("python3")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/run_cases.py"))
        .args([dir.path(), &model])
        .args(arguments)
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert!(!lines.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (lines, output.status.success())
}

fn starts(lines: &[String], with: &[&str]) {
    assert_eq!(lines.len(), with.len() + 1, "{lines:#?}");
    for (line, with) in lines.iter().zip(with) {
        assert!(line.starts_with(with), "{line:?} is not {with:?}");
    }
}

const ONLY_B16: [&str; 2] = ["--only", "B16"];

#[test]
fn equal_tokens_pass_and_what_is_not_there_is_skipped() {
    let (lines, ok) = cases("pass", 7, &["--only", "B08,B16,B22,rpc", "--jobs", "1"]);
    starts(
        &lines,
        &[
            "CASE B08 skip no --flashrt",
            "CASE B16 pass 80 tokens the same",
            "CASE B22 skip no --reload",
            "CASE rpc skip no ggml-rpc-server",
        ],
    );
    assert!(ok && lines[4] == "1 pass, 0 fail, 3 skip", "{lines:?}");
}

#[test]
fn windows_that_do_not_fire_fail_a_case() {
    let (lines, ok) = cases("pass", 0, &ONLY_B16);
    starts(&lines, &["CASE B16 fail no window fired: {'many tokens': 3}"]);
    assert!(!ok);
    let (lines, ok) = cases("pass", 0, &["--only", "B16", "--no-fired"]);
    starts(&lines, &["CASE B16 pass"]);
    assert!(ok);
}

#[test]
fn the_same_kernels_must_give_the_same_tokens() {
    let other = r#"if i == 70 and "GGML_CUDA_DISABLE_GRAPHS" in os.environ: gap = -0.001"#;
    let (lines, _) = cases(other, 7, &ONLY_B16);
    starts(
        &lines,
        &["CASE B16 fail CUDA graphs on and off: text 0 parts at token 70 of 80"],
    );
}

#[test]
fn other_sums_may_part_at_a_tie_only() {
    let other = |on_the_cpu: f64| format!("if i == 60: gap = {on_the_cpu} if cpu else 0.03");
    let (lines, _) = cases(&other(-0.03), 7, &["--only", "B06"]);
    starts(
        &lines,
        &["CASE B06 pass 0 of 8 texts the same, text 0 parts at 60 (gaps 0.030 and 0.030)"],
    );
    let (lines, _) = cases(&other(-0.05), 7, &["--only", "B06"]);
    starts(&lines, &["CASE B06 fail 0 of 8 texts the same"]);
    assert!(lines[0].contains("no tie, as the noise is 0.0100"), "{lines:?}");
    let early = "if i == 5: gap = -0.03 if cpu else 0.03";
    let (lines, _) = cases(early, 7, &["--only", "B06"]);
    assert!(lines[0].contains("40 common steps are too few"), "{lines:?}");
}
