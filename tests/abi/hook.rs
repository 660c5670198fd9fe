//! The host side: the patches keep to their budget and to their `#ifdef`, and the glue fills the host struct and cleans up after a
//! failed evaluation. That the patched files still preprocess to the original's text is checked by `cargo xtask test`, which has
//! the sources.

use crate::archive::{root, run, source};
use std::process::Command;

/// Path in llama.cpp and the lines of its hunks, per file of a patch.
fn files(patch: &str) -> Vec<(&str, Vec<&str>)> {
    let mut files: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in patch.lines() {
        if let Some(path) = line.strip_prefix("+++ b/") {
            files.push((path, Vec::new()));
        } else if let (Some((_, lines)), Some('+' | '-' | ' ')) = (files.last_mut(), line.chars().next()) {
            if !line.starts_with("---") {
                lines.push(line);
            }
        }
    }
    files
}

#[test]
fn patches_add_less_than_sixty_lines_and_only_under_their_switch() {
    let mut seen = 0;
    for entry in std::fs::read_dir(root().join("cmake/hosts")).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().ends_with("-tests.patch") {
            continue;
        }
        let patch = std::fs::read_to_string(&path).unwrap();
        // The mask patch is a second one, with a switch of its own and no CUDA.
        let mask = path.to_string_lossy().ends_with("-mask.patch");
        let (guard, code) = if mask {
            ("#ifdef LLAMA_FLASHRT_MASK", ".cpp")
        } else {
            ("#ifdef GGML_CUDA_FLASHRT", ".cu")
        };
        let mut added = 0;
        for (file, lines) in files(&patch) {
            let mut inside = false;
            for line in lines {
                assert!(!line.starts_with('-'), "{}: {file}: removes {line:?}", path.display());
                let Some(text) = line.strip_prefix('+') else {
                    assert!(
                        !inside || !file.ends_with(code),
                        "{}: {file}: guards a line of the host",
                        path.display()
                    );
                    continue;
                };
                added += 1;
                match text {
                    _ if text == guard => inside = true,
                    "#endif" => inside = false,
                    _ if file.ends_with(code) => {
                        assert!(inside, "{}: {file}: {text:?} is not guarded", path.display())
                    }
                    _ => assert!(file.ends_with("CMakeLists.txt"), "{}: touches {file}", path.display()),
                }
            }
        }
        assert!(added > 0 && added < 60, "{}: {added} added lines", path.display());
        seen += 1;
    }
    assert!(seen >= 4, "two patches for each llama.cpp version");
}

#[test]
fn the_glue_fills_the_host_struct_and_cleans_up_after_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("glue");
    let mut cxx = Command::new("c++");
    cxx.args([
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        "-pthread",
    ]);
    for include in ["host", "include"] {
        cxx.arg("-I").arg(root().join(include));
    }
    run(cxx.arg(source("glue.cpp")).arg("-o").arg(&program));

    // Both switches are parsed as ggml-cuda parses them: 1 is FLASHRT_HOST_PDL, 4 FLASHRT_HOST_FUSION_OFF.
    for (pdl, fusion_off, flags) in [
        (None, None, "1"),
        (Some("0"), Some("0"), "0"),
        (Some("1"), Some("1"), "5"),
        (None, Some("yes"), "1"),
    ] {
        let mut glue = Command::new(&program);
        for (name, value) in [("GGML_CUDA_PDL", pdl), ("GGML_CUDA_DISABLE_FUSION", fusion_off)] {
            match value {
                Some(value) => glue.env(name, value),
                None => glue.env_remove(name),
            };
        }
        run(glue.env("EXPECTED_FLAGS", flags));
    }
}
