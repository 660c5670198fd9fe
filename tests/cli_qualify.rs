//! `flashrt qualify` with stand-ins for llama.cpp's tools: what it runs, and when it does not qualify.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const STATS: &str = r#"
fired=5; [ -n "$GGML_FLASHRT_DISABLE" ] && fired=0
echo "{\"windows\":{\"ADD_NORM\":{\"fired\":$fired}}}" > "$GGML_FLASHRT_STATS"
"#;

/// Tools that agree with the windows on and off.
fn host(scratch: &Scratch) -> PathBuf {
    scratch.tool("host", "llama-bench", "echo '  CUDA0: Test GPU'");
    scratch.tool("host", "llama-completion", &format!("{STATS} echo \"text after $4\""));
    scratch.tool("host", "llama-quantize", "[ -n \"$GGML_FLASHRT_DISABLE\" ] && cp \"$2\" \"$3\"");
    perplexity(scratch, "0.002", "21.30")
}

/// llama-perplexity: divergence and perplexity with the windows on; 0.001 ± 0.0005 and 21.3 with them off.
fn perplexity(scratch: &Scratch, kld: &str, ppl: &str) -> PathBuf {
    let script = format!(
        r#"{STATS}
echo "$GGML_FLASHRT_DISABLE|$*" >> "$(dirname "$0")/calls"
kld={kld}; ppl={ppl}
[ -n "$GGML_FLASHRT_DISABLE" ] && {{ kld=0.001; ppl=21.3; }}
case "$*" in
*--kl-divergence) echo "Mean PPL(Q)                   :  $ppl ± 0.5"; echo "Mean    KLD: $kld ± 0.0015"; echo "Same top p: 98.1 ± 0.2 %";;
*) echo "Final estimate: PPL = $ppl +/- 0.51" >&2;;
esac
"#
    );
    scratch.tool("host", "llama-perplexity", &script)
}

fn qualify(scratch: &Scratch, host: &Path) -> Command {
    std::fs::write(scratch.path("corpus.txt"), "text").unwrap();
    let mut command = flashrt();
    command.arg("qualify").arg("--host").arg(host).arg("--model").arg(scratch.model());
    command.arg("--corpus").arg(scratch.path("corpus.txt")).arg("--out").arg(scratch.path("report.json"));
    command
}

fn checks(scratch: &Scratch) -> Vec<(String, Option<bool>)> {
    let text = std::fs::read_to_string(scratch.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    report["checks"].as_array().unwrap().iter().map(|c| (c["name"].as_str().unwrap().to_owned(), c["pass"].as_bool())).collect()
}

#[test]
fn equal_results_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    let table = stdout(&mut qualify(&scratch, &host));
    assert!(table.contains("10 of 10 texts of 256 tokens are the same"), "{table}");
    let names: Vec<String> = checks(&scratch).into_iter().map(|(name, pass)| format!("{name}={pass:?}")).collect();
    let expected = ["greedy text", "KL divergence", "same top token, %", "perplexity at -ub 1", "perplexity at -ub 3",
        "perplexity at -ub 33", "perplexity at -ub 512", "windows fired"]
        .map(|name| format!("{name}=Some(true)"));
    assert_eq!(names, expected);

    let calls = std::fs::read_to_string(host.join("bin/calls")).unwrap();
    let base = calls.lines().next().unwrap();
    assert!(base.starts_with("1|") && base.contains("dequantised.gguf"), "the base is computed without windows: {base}");
    assert_eq!(calls.lines().filter(|l| l.ends_with("--kl-divergence")).count(), 2);
    assert_eq!(calls.lines().filter(|l| l.contains("-ub 33 ")).count(), 2);
}

#[test]
fn another_text_does_not_qualify_and_is_shown() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    scratch.tool("host", "llama-completion", &format!("{STATS} if [ $fired = 0 ]; then echo one two; else echo one three; fi"));
    assert_eq!(complaint(&mut qualify(&scratch, &host)), "flashrt: not qualified: greedy text");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(scratch.path("report.json")).unwrap()).unwrap();
    let first = &report["checks"][0]["data"][0];
    assert_eq!((&first["at_character"], &first["on"], &first["off"]), (&5.into(), &"hree\n".into(), &"wo\n".into()));
}

#[test]
fn a_larger_divergence_or_perplexity_does_not_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    perplexity(&scratch, "0.0026", "21.45");
    let said = complaint(&mut qualify(&scratch, &host));
    assert!(said.starts_with("flashrt: not qualified: KL divergence, perplexity at -ub 1,"), "{said}");
}

#[test]
fn results_of_runs_in_which_nothing_fired_do_not_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    scratch.tool("host", "llama-completion", "echo text");
    assert_eq!(complaint(&mut qualify(&scratch, &host)), "flashrt: not qualified: windows fired");
}

#[test]
fn what_was_left_out_is_said() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    let mut command = flashrt();
    command.arg("qualify").arg("--host").arg(&host).arg("--model").arg(scratch.model());
    let table = stdout(command.arg("--out").arg(scratch.path("report.json")));
    assert!(table.contains("checks.perplexity: no --corpus was given"), "{table}");
}
