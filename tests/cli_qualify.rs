//! `flashrt qualify` with stand-ins for llama.cpp's tools: what it runs, and when it does not qualify.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

const LLAMA_SERVER: &str = include_str!("support/llama_server.py");

const STATS: &str = r#"
fired=5; [ -n "$GGML_FLASHRT_DISABLE" ] && fired=0
echo "{\"windows\":{\"ADD_NORM\":{\"fired\":$fired}}}" > "$GGML_FLASHRT_STATS"
"#;

/// A llama-server that generates these tokens from every prompt, all with the same two candidates: 1, and 2 by 1.5 less likely.
/// The dequantised model prefers `dequantised`. It ends on SIGTERM and writes its statistics then, as the real one does.
fn server(scratch: &Scratch, on: &str, off: &str, dequantised: u32) {
    let script = format!(
        r#"
exec python3 - "$@" <<'END'
{LLAMA_SERVER}
off = "GGML_FLASHRT_DISABLE" in os.environ
def counters():
    return {{"fired": 0 if off else 5}}
def completion(request):
    tokens, first = ({off} if off else {on}), 1
    if "dequantised" in sys.argv[sys.argv.index("-m") + 1]:
        assert off and request["n_predict"] == 1 and request["prompt"][1:] == [1] * 8, request
        tokens, first = [{dequantised}], {dequantised}
    else:
        assert request["n_predict"] == 256, request
    top = [{{"id": first, "logprob": -0.5}}, {{"id": 3 - first, "logprob": -2.0}}]
    return str(tokens), [{{"id": t, "top_logprobs": top}} for t in tokens]
serve()
END
"#
    );
    scratch.tool("host", "llama-server", &script);
}

/// Tools that agree with the windows on and off.
fn host(scratch: &Scratch) -> PathBuf {
    scratch.tool("host", "llama-bench", "echo '  CUDA0: Test GPU'");
    server(scratch, "[1, 1, 2]", "[1, 1, 2]", 1);
    scratch.tool(
        "host",
        "llama-quantize",
        "[ -n \"$GGML_FLASHRT_DISABLE\" ] && cp \"$2\" \"$3\"",
    );
    perplexity(scratch, "0.002", "-0.0115", "97.7")
}

/// llama-perplexity: what it finds with the windows on; with them off 0.001 ± 0.0003, 0.010 ± 0.0004 and 98.1 ± 0.12. With
/// windows it is as uncertain, so a difference of three standard errors is 0.00127, 0.0017 and 0.51.
fn perplexity(scratch: &Scratch, kld: &str, ln_ratio: &str, same_top: &str) -> PathBuf {
    let script = format!(
        r#"{STATS}
echo "$GGML_FLASHRT_DISABLE|$*" >> "$(dirname "$0")/calls"
kld={kld}; ratio={ln_ratio}; top={same_top}
[ -n "$GGML_FLASHRT_DISABLE" ] && {{ kld=0.001; ratio=0.010; top=98.1; }}
case "$*" in
*--kl-divergence)
    echo "Mean PPL(Q)                   :  21.3 ± 0.5"
    echo "Mean ln(PPL(Q)/PPL(base))     :  $ratio ± 0.0004"
    echo "Mean    KLD: $kld ± 0.0003"
    echo "Same top p: $top ± 0.12 %";;
*) echo "Final estimate: PPL = 21.1 +/- 0.51" >&2;;
esac
"#
    );
    scratch.tool("host", "llama-perplexity", &script)
}

fn qualify(scratch: &Scratch, host: &Path) -> Command {
    std::fs::write(scratch.path("corpus.txt"), "text").unwrap();
    let mut command = flashrt();
    command
        .arg("qualify")
        .arg("--host")
        .arg(host)
        .arg("--model")
        .arg(scratch.model());
    command
        .arg("--corpus")
        .arg(scratch.path("corpus.txt"))
        .arg("--out")
        .arg(scratch.path("report.json"));
    command
}

fn checks(scratch: &Scratch) -> Vec<(String, Option<bool>)> {
    let text = std::fs::read_to_string(scratch.path("report.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    report["checks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (c["name"].as_str().unwrap().to_owned(), c["pass"].as_bool()))
        .collect()
}

#[test]
fn equal_results_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    let table = stdout(&mut qualify(&scratch, &host));
    assert!(table.contains("10 of 10 texts of 256 tokens are the same"), "{table}");
    let names: Vec<String> = checks(&scratch)
        .into_iter()
        .map(|(name, pass)| format!("{name}={pass:?}"))
        .collect();
    let at = |ubatch| ["KL divergence", "same top token", "perplexity"].map(|what| format!("{what} at -ub {ubatch}"));
    let mut expected = vec!["greedy text".to_owned()];
    expected.extend([1, 3, 33, 512].into_iter().flat_map(at));
    expected.push("windows fired".to_owned());
    expected.iter_mut().for_each(|name| name.push_str("=Some(true)"));
    assert_eq!(names, expected);

    let calls = std::fs::read_to_string(host.join("bin/calls")).unwrap();
    let base = calls.lines().next().unwrap();
    assert!(
        base.starts_with("1|") && base.contains("dequantised.gguf"),
        "the base is computed without windows: {base}"
    );
    for ubatch in [1, 3, 33, 512] {
        let compared = format!("-ub {ubatch} --kl-divergence");
        assert_eq!(calls.lines().filter(|l| l.ends_with(&compared)).count(), 2, "{calls}");
    }
}

const LONG: &str = "[1] * 9";
const PARTED: &str = "[1] * 8 + [2]";

#[test]
fn another_text_does_not_qualify_and_is_shown() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    server(&scratch, PARTED, LONG, 1);
    assert_eq!(
        complaint(&mut qualify(&scratch, &host)),
        "flashrt: not qualified: greedy text"
    );
    let report: Value = serde_json::from_str(&std::fs::read_to_string(scratch.path("report.json")).unwrap()).unwrap();
    let data = &report["checks"][0]["data"];
    assert_eq!((&data["common_steps"], &data["noise"]), (&80.into(), &0.0.into()));
    let first = &data["partings"][0];
    assert_eq!(
        (&first["at_token"], &first["gap_off"], &first["tie"]),
        (&8.into(), &1.5.into(), &false.into())
    );
    assert_eq!(first["dequantised_prefers_on_by"], -1.5);
    assert_eq!(
        (&first["on"], &first["off"]),
        (
            &"[1, 1, 1, 1, 1, 1, 1, 1, 2]".into(),
            &"[1, 1, 1, 1, 1, 1, 1, 1, 1]".into()
        )
    );
}

#[test]
fn a_text_that_parts_towards_the_dequantised_model_qualifies() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    server(&scratch, PARTED, LONG, 2);
    let table = stdout(&mut qualify(&scratch, &host));
    assert!(
        table
            .contains("0 of 10 texts of 256 tokens are the same, 0 part at a tie, 10 to the dequantised model's token"),
        "{table}"
    );
}

#[test]
fn a_server_that_does_not_start_is_one_clear_line() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    scratch.tool("host", "llama-server", "echo 'failed to load model' >&2; exit 1");
    let said = complaint(&mut qualify(&scratch, &host));
    assert_eq!(
        said,
        "flashrt: llama-server failed (exit status: 1): failed to load model"
    );
    assert!(!scratch.path("report.json").exists());
}

#[test]
fn a_larger_distance_to_the_dequantised_model_does_not_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    let failed = || -> Vec<String> {
        let failed = checks(&scratch).into_iter().filter(|(_, pass)| *pass == Some(false));
        failed
            .map(|(name, _)| name)
            .filter(|name| name.ends_with("-ub 3"))
            .collect()
    };
    for (kld, ln_ratio, same_top, expected) in [
        ("0.0023", "0.010", "98.1", "KL divergence"),
        ("0.001", "-0.0118", "98.1", "perplexity"),
        ("0.001", "0.010", "97.5", "same top token"),
    ] {
        perplexity(&scratch, kld, ln_ratio, same_top);
        let said = complaint(&mut qualify(&scratch, &host));
        assert_eq!(failed(), [format!("{expected} at -ub 3")], "{said}");
        std::fs::remove_file(scratch.path("report.json")).unwrap();
    }
    // Nearer to that model than stock is never a fault, however far from stock.
    perplexity(&scratch, "0.0001", "0.0", "99.9");
    stdout(&mut qualify(&scratch, &host));
}

#[test]
fn results_of_runs_in_which_nothing_fired_do_not_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    let script = std::fs::read_to_string(host.join("bin/llama-perplexity")).unwrap();
    scratch.tool("host", "llama-perplexity", &script.replace("fired=5", "fired=0"));
    assert_eq!(
        complaint(&mut qualify(&scratch, &host)),
        "flashrt: not qualified: windows fired"
    );
}

#[test]
fn what_was_left_out_is_said() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    let mut command = flashrt();
    command
        .arg("qualify")
        .arg("--host")
        .arg(&host)
        .arg("--model")
        .arg(scratch.model());
    let table = stdout(command.arg("--out").arg(scratch.path("report.json")));
    assert!(table.contains("checks.perplexity: no --corpus was given"), "{table}");
}
