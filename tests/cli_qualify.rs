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

/// A llama-server that generates these tokens from every prompt, all with the same two candidates. It ends on SIGTERM and
/// writes its statistics then, as the real one does.
fn server(scratch: &Scratch, on: &str, off: &str) {
    let script = format!(
        r#"
exec python3 - "$@" <<'END'
import http.server, json, os, signal, sys
off = "GGML_FLASHRT_DISABLE" in os.environ
def stop(*_):
    with open(os.environ["GGML_FLASHRT_STATS"], "w") as f:
        json.dump({{"windows": {{"ADD_NORM": {{"fired": 0 if off else 5}}}}}}, f)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["temperature"] == 0 and request["n_predict"] == 256, request
        tokens = [{off}] if off else [{on}]
        top = [{{"id": 1, "logprob": -0.5}}, {{"id": 2, "logprob": -2.0}}]
        steps = [{{"id": t, "top_logprobs": top}} for t in tokens]
        self.answer({{"content": str(tokens), "completion_probabilities": steps}})
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
END
"#
    );
    scratch.tool("host", "llama-server", &script);
}

/// Tools that agree with the windows on and off.
fn host(scratch: &Scratch) -> PathBuf {
    scratch.tool("host", "llama-bench", "echo '  CUDA0: Test GPU'");
    server(scratch, "1, 1, 2", "1, 1, 2");
    scratch.tool(
        "host",
        "llama-quantize",
        "[ -n \"$GGML_FLASHRT_DISABLE\" ] && cp \"$2\" \"$3\"",
    );
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
    let expected = [
        "greedy text",
        "KL divergence",
        "same top token, %",
        "perplexity at -ub 1",
        "perplexity at -ub 3",
        "perplexity at -ub 33",
        "perplexity at -ub 512",
        "windows fired",
    ]
    .map(|name| format!("{name}=Some(true)"));
    assert_eq!(names, expected);

    let calls = std::fs::read_to_string(host.join("bin/calls")).unwrap();
    let base = calls.lines().next().unwrap();
    assert!(
        base.starts_with("1|") && base.contains("dequantised.gguf"),
        "the base is computed without windows: {base}"
    );
    assert_eq!(calls.lines().filter(|l| l.ends_with("--kl-divergence")).count(), 2);
    assert_eq!(calls.lines().filter(|l| l.contains("-ub 33 ")).count(), 2);
}

#[test]
fn another_text_does_not_qualify_and_is_shown() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    server(&scratch, "1, 2, 2", "1, 1, 2");
    assert_eq!(
        complaint(&mut qualify(&scratch, &host)),
        "flashrt: not qualified: greedy text"
    );
    let report: Value = serde_json::from_str(&std::fs::read_to_string(scratch.path("report.json")).unwrap()).unwrap();
    let first = &report["checks"][0]["data"]["partings"][0];
    assert_eq!(
        (&first["at_token"], &first["gap"], &first["tie"]),
        (&1.into(), &1.5.into(), &false.into())
    );
    assert_eq!(
        (&first["on"], &first["off"]),
        (&"[1, 2, 2]".into(), &"[1, 1, 2]".into())
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
fn a_larger_divergence_or_perplexity_does_not_qualify() {
    let scratch = Scratch::new();
    let host = host(&scratch);
    perplexity(&scratch, "0.0026", "21.45");
    let said = complaint(&mut qualify(&scratch, &host));
    assert!(
        said.starts_with("flashrt: not qualified: KL divergence, perplexity at -ub 1,"),
        "{said}"
    );
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
