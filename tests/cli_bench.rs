//! `flashrt bench`: order and environment of the processes, what becomes of their figures, and what is refused.
#![cfg(feature = "cli")]

mod cli_support;

use cli_support::{complaint, flashrt, stdout, Scratch};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A llama-bench that says how fast it was: `adapter` tokens a second, 100 when the adapter is off, half of that under
/// GRAPH_OPT in the adapter arm and a fifth more in the stock arm. It logs each call.
fn llama_bench(adapter: u32, fired: u32) -> String {
    format!(
        r#"
here=$(dirname "$0")
if [ "$1" = --list-devices ]; then echo "Available devices:"; echo "  CUDA0: Test GPU (1 MiB, 1 MiB free)"; exit 0; fi
echo "off=$GGML_FLASHRT_DISABLE opt=$GGML_CUDA_GRAPH_OPT dump=$GGML_FLASHRT_DUMP args=$*" >> "$here/calls"
tg={adapter}
if [ -n "$GGML_CUDA_GRAPH_OPT" ]; then tg=$((tg / 2)); fi
if [ -n "$GGML_FLASHRT_DISABLE" ]; then tg=100; if [ -n "$GGML_CUDA_GRAPH_OPT" ]; then tg=120; fi; fi
fired={fired}
if [ -n "$GGML_FLASHRT_DISABLE" ]; then fired=0; fi
echo "{{\"windows\":{{\"ADD_NORM\":{{\"sites\":2,\"evaluated\":9,\"fired\":$fired,\"declined\":{{}}}}}},\"archs\":\"sm_90a\"}}" > "$GGML_FLASHRT_STATS"
cat <<END
[
  {{"build_commit": "abc", "model_filename": "/some/where/model.gguf", "n_prompt": 0, "n_gen": 128, "n_depth": 0,
    "avg_ts": $tg, "samples_ts": [ $tg, $tg ]}},
  {{"build_commit": "abc", "model_filename": "/some/where/model.gguf", "n_prompt": 512, "n_gen": 0, "n_depth": 0,
    "avg_ts": 5000, "samples_ts": [ 5000, 5000 ]}}
]
END
"#
    )
}

fn bench(scratch: &Scratch, host: &Path) -> Command {
    let mut command = flashrt();
    command
        .arg("bench")
        .arg("--host")
        .arg(host)
        .arg("--model")
        .arg(scratch.model());
    command.arg("--out").arg(scratch.path("report.json"));
    command
}

fn report(scratch: &Scratch) -> Value {
    serde_json::from_str(&std::fs::read_to_string(scratch.path("report.json")).unwrap()).unwrap()
}

#[test]
fn adapter_stock_adapter_each_in_both_settings() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 7));
    let table = stdout(
        bench(&scratch, &host)
            .args(["--reps", "2", "--evidence-id", "tg128/test", "--", "-fa", "1"])
            .env("GGML_FLASHRT_DUMP", "x"),
    );
    assert!(
        table.contains("1.250") && table.contains("GGML_CUDA_GRAPH_OPT=1") && table.contains("ADD_NORM"),
        "{table}"
    );

    let model = scratch.path("model.gguf");
    let args = format!("args=-m {} -o json -r 2 -p 512 -n 128 -fa 1", model.display());
    let calls = std::fs::read_to_string(host.join("bin/calls")).unwrap();
    let expected: Vec<String> = [("", ""), ("", "1"), ("1", ""), ("1", "1"), ("", ""), ("", "1")]
        .map(|(off, opt)| format!("off={off} opt={opt} dump= {args}"))
        .into();
    assert_eq!(calls.lines().collect::<Vec<_>>(), expected);

    let report = report(&scratch);
    let tg = report["outcomes"]
        .as_array()
        .unwrap()
        .iter()
        .find(|o| o["test"] == "tg128")
        .unwrap();
    assert_eq!(tg["ratio"], 1.25, "150 over the best of stock, 120");
    assert_eq!(
        (&tg["adapter"]["setting"], &tg["stock"]["setting"]),
        (&"default".into(), &"GGML_CUDA_GRAPH_OPT=1".into())
    );
    assert_eq!(tg["adapter"]["samples_ts"].as_array().unwrap().len(), 4, "both passes");
    assert_eq!(report["headlines"][0]["id"], "tg128/test");
    assert_eq!(report["headlines"][0]["value"], 1.25);
    assert_eq!(report["runs"][0]["stats"]["windows"]["ADD_NORM"]["fired"], 7);
    assert_eq!(report["runs"][3]["env"]["GGML_FLASHRT_DISABLE"], "1");
    assert_eq!(report["build"]["archs"], "sm_90a");
    assert!(report["missing"]["machine.sm_count"].is_string() && report["machine"]["sm_count"].is_null());
    let published = report.to_string();
    assert!(
        !published.contains(scratch.path("").to_str().unwrap()) && !published.contains("/some/where"),
        "{published}"
    );
    assert!(std::fs::read_to_string(scratch.path("report.svg"))
        .unwrap()
        .contains("1.25x"));
}

#[test]
fn an_unpatched_build_is_the_stock_arm_when_given() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 7));
    let stock = scratch.tool("stock", "llama-bench", &llama_bench(90, 0));
    stdout(
        bench(&scratch, &host)
            .arg("--stock")
            .arg(&stock)
            .args(["--setting", "default"]),
    );
    let calls = |build: &Path| {
        std::fs::read_to_string(build.join("bin/calls"))
            .unwrap()
            .lines()
            .count()
    };
    assert_eq!((calls(&host), calls(&stock)), (2, 1));
    assert_eq!(report(&scratch)["build"]["baseline"], "an unpatched build");
}

#[test]
fn the_mask_patch_is_in_both_arms_or_in_none() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 7));
    let stock = scratch.tool("stock", "llama-bench", &llama_bench(90, 0));
    let run = || {
        let mut command = bench(&scratch, &host);
        command.arg("--stock").arg(&stock).args(["--setting", "default"]);
        command
    };
    let patch = |build: &Path| {
        let library = "\0flashrt: attention masks are filled by ranges of positions\n\0";
        std::fs::write(build.join("bin/libllama.so"), library).unwrap();
    };
    patch(&host);
    assert!(complaint(&mut run()).contains("only the host build has the mask patch"));
    assert!(!scratch.path("report.json").exists());
    // Unless the gain of both is what is asked for.
    stdout(run().args(["--mode", "user-gain"]));
    assert_eq!(report(&scratch)["build"]["baseline"], "an unpatched build");
    for file in ["report.json", "report.svg"] {
        std::fs::remove_file(scratch.path(file)).unwrap();
    }
    patch(&stock);
    assert!(complaint(run().args(["--mode", "user-gain"])).contains("must be given without it"));
    stdout(&mut run());
    assert_eq!(
        report(&scratch)["build"]["baseline"],
        "a build with the mask patch alone"
    );
}

#[test]
fn off_over_stock_switches_the_adapter_off() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 7));
    let stock = scratch.tool("stock", "llama-bench", &llama_bench(80, 0));
    stdout(bench(&scratch, &host).arg("--stock").arg(&stock).args([
        "--mode",
        "off-over-stock",
        "--setting",
        "default",
        "--evidence-id",
        "off-over-stock/m=tg128",
    ]));
    let report = report(&scratch);
    assert_eq!(report["runs"][0]["env"]["GGML_FLASHRT_DISABLE"], "1");
    assert!(report["runs"][1]["env"].get("GGML_FLASHRT_DISABLE").is_none());
    assert_eq!(report["headlines"][0]["value"], 1.25);
}

#[test]
fn a_run_in_which_nothing_fired_is_reported_and_fails() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 0));
    let complaint = complaint(&mut bench(&scratch, &host));
    assert_eq!(
        complaint,
        "flashrt: windows fired: 0 launches of windows in the adapter arm"
    );
    assert_eq!(report(&scratch)["checks"][0]["pass"], false);
}

#[test]
fn a_build_without_the_adapter_is_found_out() {
    let scratch = Scratch::new();
    let script = llama_bench(150, 7).replace("> \"$GGML_FLASHRT_STATS\"", "> /dev/null");
    let host = scratch.tool("host", "llama-bench", &script);
    let said = complaint(&mut bench(&scratch, &host));
    assert!(said.contains("is --host a build with the adapter?"), "{said}");
    let report = report(&scratch);
    assert!(report["runs"][0]["stats"].is_null() && report["build"]["archs"].is_null());
    assert!(report["missing"]["runs.stats"].is_string() && report["missing"]["build.archs"].is_string());
}

#[test]
fn refusals_say_why_and_leave_nothing() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 7));
    let no_gpu = scratch.tool("no-gpu", "llama-bench", "echo 'Available devices:'; echo '  (none)'");
    let broken = scratch.tool(
        "broken",
        "llama-bench",
        "[ \"$1\" = --list-devices ] && echo CUDA0 && exit 0; echo 'out of memory' >&2; exit 3",
    );
    let babbling = scratch.tool("babbling", "llama-bench", "echo CUDA0: and then text");
    scratch.model();
    let before = scratch.files();
    let case = |host: &Path, args: &[&str]| complaint(bench(&scratch, host).args(args));

    assert!(case(&scratch.path("absent"), &[]).contains("no such folder"));
    assert!(case(&scratch.path(""), &[]).contains("llama-bench is neither"));
    assert!(case(&no_gpu, &[]).contains("sees no CUDA device"));
    assert!(case(&broken, &[]).contains("(exit status: 3): out of memory"));
    assert!(case(&babbling, &[]).contains("llama-bench printed no results"));
    assert!(case(&host, &["--tests", "pp512@d1,tg128"]).contains("the same depth"));
    assert!(case(&host, &["--evidence-id", "off-over-stock/m"]).contains("which test?"));
    assert!(case(&host, &["--setting", "fast"]).contains("is no setting"));
    assert_eq!(scratch.files(), before);

    std::fs::write(scratch.path("report.json"), "mine").unwrap();
    assert!(case(&host, &[]).contains("report.json exists already"));
    assert_eq!(std::fs::read_to_string(scratch.path("report.json")).unwrap(), "mine");
}

#[test]
fn a_broken_model_is_named_before_anything_runs() {
    let scratch = Scratch::new();
    let host = scratch.tool("host", "llama-bench", &llama_bench(150, 7));
    std::fs::write(scratch.path("cut.gguf"), b"GGUF\x03\0\0\0").unwrap();
    for (name, message) in [
        ("cut.gguf", "the file ends inside the tensor list"),
        ("absent.gguf", "absent.gguf"),
    ] {
        let mut command = flashrt();
        command
            .arg("bench")
            .arg("--host")
            .arg(&host)
            .arg("--model")
            .arg(scratch.path(name));
        let said = complaint(command.arg("--out").arg(scratch.path("r.json")));
        assert!(said.contains(message), "{said}");
    }
    assert!(!host.join("bin/calls").exists());
}
