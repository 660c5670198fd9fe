//! The C interface as a C program sees it: the header compiles, the documented link lines work, the calls keep their promises.

use crate::archive::{archive, cc, documented_flags, root, run, source};
use std::path::Path;
use std::process::Command;

/// Names of the symbols that `nm` lists with these arguments.
fn symbols(nm_arguments: &[&str], file: &Path) -> Vec<String> {
    let output = run(Command::new("nm").args(nm_arguments).arg("-j").arg(file));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|l| l.trim().to_owned())
        .filter(|l| !l.is_empty())
        .collect()
}

#[test]
fn the_header_compiles_twice_in_c_and_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let text = "#include \"flashrt.h\"\n#include \"flashrt.h\"\nint main(void) { return sizeof(flashrt_host) == 0; }\n";
    for (compiler, file, standard) in [("cc", "twice.c", "-std=c99"), ("c++", "twice.cpp", "-std=c++11")] {
        let path = dir.path().join(file);
        std::fs::write(&path, text).unwrap();
        let mut command = Command::new(compiler);
        command.args([
            standard,
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-fsyntax-only",
            "-I",
        ]);
        run(command.arg(root().join("include")).arg(&path));
    }
}

#[test]
fn a_c_program_drives_the_library() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("drive");
    run(cc()
        .arg(source("drive.c"))
        .arg(archive())
        .args(documented_flags("A program"))
        .arg("-o")
        .arg(&program));

    let on = run(Command::new(&program)
        .env_remove("GGML_FLASHRT_DISABLE")
        .env_remove("GGML_CUDA_FLASHRT_DISABLE"));
    let stats: serde_json::Value = serde_json::from_slice(&on.stdout).expect("flashrt_stats writes JSON");
    assert!(
        stats["windows"].as_array().is_some_and(|w| !w.is_empty()) || stats["windows"].is_object(),
        "{stats}"
    );

    run(Command::new(&program).arg("off").env("GGML_FLASHRT_DISABLE", "1"));
    run(Command::new(&program).arg("unheard").env("GGML_FLASHRT_STATS", "1"));
}

#[test]
#[cfg(target_os = "linux")]
fn a_shared_library_shows_none_of_the_archives_symbols() {
    let dir = tempfile::tempdir().unwrap();
    let (object, library) = (dir.path().join("backend.o"), dir.path().join("libbackend.so"));
    run(cc()
        .args(["-fPIC", "-fvisibility=hidden", "-c"])
        .arg(source("backend.c"))
        .arg("-o")
        .arg(&object));
    let link = |flags: Vec<String>| {
        run(Command::new("cc")
            .arg(&object)
            .arg(archive())
            .args(flags)
            .arg("-o")
            .arg(&library));
        symbols(&["-D", "--defined-only"], &library)
    };

    assert_eq!(link(documented_flags("A shared library")), ["backend_run"]);

    // Without the documented flag there is something to hide, so the line above proves something.
    let careless = documented_flags("A shared library")
        .into_iter()
        .filter(|f| !f.contains("exclude-libs"))
        .collect();
    assert!(link(careless).len() > 1);
}

#[test]
fn the_archive_exports_every_entry_point_and_holds_no_command_line() {
    let defined = symbols(&["--defined-only", "-g"], archive());
    let header = std::fs::read_to_string(root().join("include/flashrt.h")).unwrap();
    let declared: Vec<&str> = header
        .lines()
        .filter(|l| !l.starts_with([' ', '/', '#']) && l.ends_with(");"))
        .filter_map(|l| l.split('(').next()?.rsplit([' ', '*']).next())
        .collect();
    assert!(declared.len() >= 12, "{declared:?}");
    for entry in declared {
        assert!(
            defined.iter().any(|d| d == entry),
            "{entry} is declared but not defined"
        );
    }
    for dependency in ["clap", "indicatif", "axum", "anyhow"] {
        let mangled = format!("{}{dependency}", dependency.len());
        assert!(
            !defined.iter().any(|d| d.contains(&mangled)),
            "{dependency} is part of the archive"
        );
    }
}
