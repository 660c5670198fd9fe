//! tests/c/cudart_counter.c, the library that counts a host's CUDA calls, against a runtime that does nothing.
#![cfg(target_os = "linux")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// How the host comes by the code that calls CUDA.
enum Backend {
    /// As a library it was linked with.
    Linked,
    /// By dlopen, as with `GGML_BACKEND_DL`.
    Opened,
}

/// A directory with the counter, the runtime and a host for them.
struct Bench {
    dir: TempDir,
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{errors}", output.status);
    output
}

impl Bench {
    fn new(backend: Backend) -> Self {
        let bench = Bench {
            dir: tempfile::tempdir().unwrap(),
        };
        bench.shared_library("libcudart_counter.so", "cudart_counter.c", &["-ldl"]);
        bench.shared_library("libcudart.so.13", "cudart_stub.c", &["-Wl,-soname,libcudart.so.13"]);
        let rpath = format!("-Wl,-rpath,{}", bench.path("").display());
        let runtime = bench.path("libcudart.so.13");
        bench.shared_library("libbackend.so", "cudart_calls.c", &[runtime.to_str().unwrap(), &rpath]);

        let (call, library) = match backend {
            Backend::Linked => ("work(tokens)".to_owned(), bench.path("libbackend.so")),
            Backend::Opened => {
                let open = format!(
                    "dlopen(\"{}\", RTLD_NOW | RTLD_LOCAL)",
                    bench.path("libbackend.so").display()
                );
                (
                    format!("((int (*)(int)) dlsym({open}, \"work\"))(tokens)"),
                    "-ldl".into(),
                )
            }
        };
        let host = format!(
            "#include <dlfcn.h>\n#include <stdlib.h>\nint work(int);\n\
             int main(int argc, char ** argv) {{ int tokens = atoi(argv[argc - 1]); return tokens < 0 ? 0 : {call}; }}\n"
        );
        std::fs::write(bench.path("host.c"), host).unwrap();
        let mut cc = Command::new("cc");
        cc.arg(bench.path("host.c")).arg(library).arg(rpath);
        run(cc.arg("-o").arg(bench.path("host")));
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn shared_library(&self, name: &str, source: &str, more: &[&str]) {
        let mut cc = Command::new("cc");
        cc.args([
            "-std=gnu11",
            "-O1",
            "-shared",
            "-fPIC",
            "-fvisibility=default",
            "-Wall",
            "-Wextra",
            "-Werror",
        ]);
        cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source));
        run(cc.args(more).arg("-o").arg(self.path(name)));
    }

    /// The host under the counter. A negative number of tokens: it calls nothing of CUDA.
    fn host(&self, tokens: i32, window: &[(&str, &str)]) -> Command {
        let mut host = Command::new(self.path("host"));
        host.arg(tokens.to_string()).envs(window.iter().copied());
        host.env("LD_PRELOAD", self.path("libcudart_counter.so"));
        host.env("CUDART_COUNTER_OUT", self.path("counts.json"));
        host
    }

    fn counts(&self, tokens: i32, window: &[(&str, &str)]) -> Value {
        run(&mut self.host(tokens, window));
        serde_json::from_str(&std::fs::read_to_string(self.path("counts.json")).unwrap()).unwrap()
    }
}

fn totals(report: &Value) -> Vec<(&str, u64)> {
    let groups = ["synchronise", "allocate", "free", "launch", "copy", "graph"];
    groups
        .map(|g| (g, report["counts"][g]["total"].as_u64().unwrap()))
        .to_vec()
}

#[test]
fn every_call_is_counted_and_passed_on() {
    for backend in [Backend::Linked, Backend::Opened] {
        let report = Bench::new(backend).counts(8, &[]);
        assert_eq!(
            totals(&report),
            [
                ("synchronise", 8),
                ("allocate", 1),
                ("free", 2),
                ("launch", 4),
                ("copy", 16),
                ("graph", 11)
            ]
        );
        assert_eq!(report["graph_launches_seen"], 8);
        assert_eq!(report["until"], Value::Null);
        let launches = &report["counts"]["launch"];
        assert_eq!(launches["cudaLaunchKernelExC"], 2);
        assert_eq!(launches["cudaLaunchKernel"], 1);
        assert_eq!(launches["__cudaLaunchKernel"], 1);
        assert_eq!(report["counts"]["free"]["cuMemRelease"], 1);
    }
}

#[test]
fn only_what_lies_between_two_graph_launches_is_counted() {
    let bench = Bench::new(Backend::Linked);
    let report = bench.counts(8, &[("CUDART_COUNTER_AFTER", "2"), ("CUDART_COUNTER_UNTIL", "5")]);
    assert_eq!(
        totals(&report),
        [
            ("synchronise", 3),
            ("allocate", 0),
            ("free", 0),
            ("launch", 0),
            ("copy", 6),
            ("graph", 3)
        ]
    );
    assert_eq!(report["graph_launches_seen"], 8);

    let open = bench.counts(8, &[("CUDART_COUNTER_AFTER", "6")]);
    assert_eq!(
        totals(&open),
        [
            ("synchronise", 3),
            ("allocate", 0),
            ("free", 2),
            ("launch", 0),
            ("copy", 4),
            ("graph", 2)
        ]
    );
}

#[test]
fn what_was_not_measured_is_null_with_the_reason() {
    let report = Bench::new(Backend::Linked).counts(3, &[("CUDART_COUNTER_AFTER", "4")]);
    assert_eq!(report["counts"], Value::Null);
    let reason = report["reason"].as_str().unwrap();
    assert!(
        reason.contains("launched 3 graphs") && reason.contains("after 4"),
        "{reason}"
    );
}

#[test]
fn a_process_without_cuda_calls_leaves_the_file_alone() {
    let bench = Bench::new(Backend::Linked);
    std::fs::write(bench.path("counts.json"), "the parent's").unwrap();
    run(&mut bench.host(-1, &[]));
    assert_eq!(
        std::fs::read_to_string(bench.path("counts.json")).unwrap(),
        "the parent's"
    );
}

#[test]
fn bad_limits_are_refused() {
    let bench = Bench::new(Backend::Linked);
    for (window, complaint) in [
        (
            vec![("CUDART_COUNTER_AFTER", "many")],
            "CUDART_COUNTER_AFTER=many: not a number",
        ),
        (
            vec![("CUDART_COUNTER_AFTER", "5"), ("CUDART_COUNTER_UNTIL", "5")],
            "CUDART_COUNTER_UNTIL must be larger",
        ),
    ] {
        let output = bench.host(1, &window).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(2) && errors.contains(complaint),
            "{errors}"
        );
    }
}
