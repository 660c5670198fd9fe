//! What build.rs decides before it runs nvcc: architectures, toolkit, and when a log means failure.

#[path = "../build/archs.rs"]
mod archs;
#[path = "../build/ptxas.rs"]
mod ptxas;
#[path = "../build/toolkit.rs"]
mod toolkit;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use toolkit::{parse_release, Release, Toolkit, MINIMUM};

fn names(list: &str) -> String {
    let codes = archs::parse(list).unwrap_or_else(|why| panic!("{list}: {why}"));
    codes.iter().map(archs::Code::name).collect::<Vec<_>>().join(" ")
}

#[test]
fn arch_strings_give_the_code_that_runs_there() {
    for (list, expected) in [
        ("90", "sm_90a compute_90"),
        ("90a", "sm_90a compute_90"),
        ("90-real", "sm_90a"),
        ("90a-real", "sm_90a"),
        ("90-virtual", "compute_90"),
        ("87", "sm_87 compute_87"),
        ("87-real", "sm_87"),
        ("87-virtual", "compute_87"),
        ("80", "sm_80 compute_80"),
        ("86;89", "sm_86 compute_86 sm_89 compute_89"),
        ("110", "sm_110a"),
        ("110a", "sm_110a"),
        ("110f", "sm_110a"),
        ("110a-real", "sm_110a"),
        ("110-virtual", "compute_110a"),
        ("120", "sm_120 compute_120"),
        ("120a", "sm_120a"),
        ("100f", "sm_100f"),
        ("90;90a", "sm_90a compute_90"),
        (" 87 ; 90a-real ;", "sm_87 compute_87 sm_90a"),
    ] {
        assert_eq!(names(list), expected, "for {list:?}");
    }
}

#[test]
fn plain_ptx_of_hopper_and_of_older_gpus_stays_forward_compatible() {
    let gencode = |list: &str| {
        archs::parse(list)
            .unwrap()
            .iter()
            .map(archs::Code::gencode)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        gencode("90"),
        ["arch=compute_90a,code=sm_90a", "arch=compute_90,code=compute_90"]
    );
    assert_eq!(
        gencode("87"),
        ["arch=compute_87,code=sm_87", "arch=compute_87,code=compute_87"]
    );
    assert_eq!(archs::parse("110").unwrap()[0].number(), 110);
}

#[test]
fn impossible_archs_are_refused_with_the_reason() {
    for (list, reason) in [
        ("native", "must not depend on the GPU"),
        ("90;native", "must not depend on the GPU"),
        ("all", "name the numbers"),
        ("all-major", "name the numbers"),
        ("75", "sm_80 or newer"),
        ("99", "unknown"),
        ("87a", "no variant"),
        ("90f", "no variant"),
        ("90aa", "no variant"),
        ("sm_90", "not a number"),
        ("hopper", "not a number"),
        ("", "no CUDA architecture"),
        (" ; ", "no CUDA architecture"),
    ] {
        let why = archs::parse(list).expect_err(list);
        assert!(why.contains(reason), "for {list:?}: {why}");
    }
}

#[test]
fn nvcc_versions_are_read() {
    let text = "Cuda compilation tools, release 12.8, V12.8.93\n";
    assert_eq!(parse_release(text), Some(Release(12, 8)));
    assert_eq!(parse_release("release 13.0"), Some(Release(13, 0)));
    assert_eq!(parse_release("gcc 12.2.0"), None);
    assert!(Release(12, 10) > Release(12, 8) && Release(9, 9) < Release(12, 0));
}

/// A program that is being written while another thread starts one stays open in that thread's child, and cannot be run meanwhile.
static PROGRAMS: Mutex<()> = Mutex::new(());

/// A toolkit whose nvcc only says its version.
fn fake_toolkit(dir: &Path, release: &str) -> PathBuf {
    let _writing = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let nvcc = dir.join("bin/nvcc");
    fs::create_dir_all(nvcc.parent().unwrap()).unwrap();
    fs::write(
        &nvcc,
        format!("#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n"),
    )
    .unwrap();
    fs::set_permissions(&nvcc, fs::Permissions::from_mode(0o755)).unwrap();
    dir.to_path_buf()
}

fn find(vars: &[(&str, &Path)], repo: &Path) -> Result<Toolkit, String> {
    let _running = PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let var = |name: &str| vars.iter().find(|v| v.0 == name).map(|v| v.1.display().to_string());
    Toolkit::find(&var, repo)
}

#[test]
fn the_toolkit_search_follows_its_order() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second, third] =
        [("a", "13.0"), ("b", "12.9"), ("c", "12.8")].map(|(n, r)| fake_toolkit(&dir.path().join(n), r));
    let nvcc = first.join("bin/nvcc");
    let path = third.join("bin");
    let all: &[(&str, &Path)] = &[
        ("NVCC", &nvcc),
        ("CUDA_HOME", &second),
        ("CUDA_ROOT", &second),
        ("PATH", &path),
    ];
    for (vars, found_by, release) in [
        (all, "NVCC", Release(13, 0)),
        (&all[1..], "CUDA_HOME", Release(12, 9)),
        (&all[2..], "CUDA_ROOT", Release(12, 9)),
        (&all[3..], "PATH", Release(12, 8)),
    ] {
        let toolkit = find(vars, dir.path()).unwrap();
        assert_eq!((toolkit.found_by, toolkit.release), (found_by, release));
    }
    let venv = dir
        .path()
        .join(".flashrt/venv/lib/python3.12/site-packages/nvidia/cu13");
    fake_toolkit(&venv, "13.1");
    if !Path::new("/usr/local/cuda/bin/nvcc").exists() {
        assert_eq!(find(&[], dir.path()).unwrap().nvcc, venv.join("bin/nvcc"));
    }
}

#[test]
fn thor_needs_a_toolkit_that_knows_it() {
    let dir = tempfile::tempdir().unwrap();
    let toolkit = |release| {
        find(
            &[("CUDA_HOME", &fake_toolkit(&dir.path().join(release), release))],
            dir.path(),
        )
        .unwrap()
    };
    let (hopper, thor) = (archs::parse("90a").unwrap(), archs::parse("90a;110a").unwrap());
    assert_eq!(toolkit("12.9").check_archs(&hopper), Ok(()));
    let why = toolkit("12.9").check_archs(&thor).unwrap_err();
    assert!(why.contains("CUDA 12.9") && why.contains("13.0 or newer"), "{why}");
    assert_eq!(toolkit("13.0").check_archs(&thor), Ok(()));
}

#[test]
fn the_runtime_library_is_found_beside_nvcc() {
    let dir = tempfile::tempdir().unwrap();
    let home = fake_toolkit(dir.path(), "13.0");
    let toolkit = find(&[("CUDA_HOME", &home)], dir.path()).unwrap();
    assert_eq!(toolkit.lib_dir(), None, "then the linker's default path must have it");
    let lib = home.canonicalize().unwrap().join("lib");
    fs::create_dir(&lib).unwrap();
    fs::write(lib.join("libcudart.so"), "").unwrap();
    assert_eq!(toolkit.lib_dir(), Some(lib));
}

#[test]
fn an_old_or_broken_nvcc_is_named_with_the_minimum() {
    let dir = tempfile::tempdir().unwrap();
    let old = fake_toolkit(&dir.path().join("old"), "11.8");
    let new = fake_toolkit(&dir.path().join("new"), "13.0");
    let old_bin = old.join("bin");
    let why = find(&[("PATH", &old_bin)], dir.path()).unwrap_err();
    for part in [
        old_bin.join("nvcc").to_str().unwrap(),
        "PATH",
        "11.8",
        "12.8 or newer",
        "NVCC or CUDA_HOME",
    ] {
        assert!(why.contains(part), "{part} is missing in: {why}");
    }
    let found = find(&[("PATH", &old_bin), ("CUDA_HOME", &new)], dir.path()).unwrap();
    assert_eq!(
        found.release,
        Release(13, 0),
        "CUDA_HOME comes before an old nvcc on PATH"
    );

    let missing = dir.path().join("nowhere/nvcc");
    let why = find(&[("NVCC", &missing), ("CUDA_HOME", &new)], dir.path()).unwrap_err();
    assert!(
        why.contains(missing.to_str().unwrap()) && why.contains("cannot be run"),
        "{why}"
    );
}

#[test]
fn nothing_found_says_what_was_searched_and_what_to_do() {
    if Path::new("/usr/local/cuda/bin/nvcc").exists() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let why = find(&[], dir.path()).unwrap_err();
    for part in [
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_ROOT",
        "PATH",
        "/usr/local/cuda",
        "set CUDA_HOME",
    ] {
        assert!(why.contains(part), "{part} is missing in: {why}");
    }
}

#[test]
fn a_spill_is_reported_with_its_kernel() {
    let log = "ptxas info    : Compiling entry function '_Z4goodv' for 'sm_90a'\n\
               \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
               ptxas info    : Compiling entry function '_Z3badv' for 'sm_87'\n\
               \x20   32 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n";
    assert_eq!(
        ptxas::faults(log),
        ["registers spill: _Z3badv for sm_87: 16 bytes stored, 24 loaded"]
    );
}

#[test]
fn serialized_wgmma_is_reported_with_its_kernel() {
    let serialized = "wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the \
                      function '_Z3badv'";
    let log = format!(
        "ptxas info    : (C7519) warpgroup.arrive is injected in around line 55 by compiler to allow use of registers in GMMA in function \
         '_Z3badv'\n\
         ptxas info    : (C7511) Potential Performance Loss: {serialized}\n\
         ptxas info    : Compiling entry function '_Z3badv' for 'sm_90a'\n\
         \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    );
    assert_eq!(ptxas::faults(&log), [serialized]);
}

/// B52, in a build that CMake drives: said when it is configured. What follows the check needs a project, so here it ends there.
#[test]
fn cmake_names_an_old_nvcc_with_the_minimum() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let own = std::fs::read_dir(root.join(".flashrt/venv/lib"))
        .into_iter()
        .flatten()
        .flatten();
    let own = own.map(|python| python.path().join("site-packages/cmake/data/bin/cmake"));
    let cmake = own
        .chain([PathBuf::from("cmake")])
        .find(|c| Command::new(c).arg("--version").output().is_ok());
    let Some(cmake) = cmake else {
        println!("skipped: no cmake");
        return;
    };
    let configure = |version: &str, archs: &str| {
        let output = Command::new(&cmake)
            .args(["-DCMAKE_CUDA_COMPILER=/old/bin/nvcc", "-DFLASHRT_CARGO=cargo"])
            .arg(format!("-DCMAKE_CUDA_COMPILER_VERSION={version}"))
            .arg(format!("-DCMAKE_CUDA_ARCHITECTURES={archs}"))
            .arg("-P")
            .arg(root.join("cmake/FlashRT.cmake"))
            .output()
            .unwrap();
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for (version, archs, minimum) in [
        ("12.4.131", "90", Some("12.8")),
        ("11.8.89", "80;90a", Some("12.8")),
        ("12.9.86", "87;110", Some("13.0")),
        ("12.8.0", "90", None),
        ("13.0.88", "87;90;110a", None),
    ] {
        let said = configure(version, archs);
        let refused = format!(
            "/old/bin/nvcc is CUDA {version}, but the kernels need {}",
            minimum.unwrap_or_default()
        );
        assert_eq!(said.contains(&refused), minimum.is_some(), "{said}");
    }
    let minimum = format!("set(minimum {MINIMUM})");
    assert!(std::fs::read_to_string(root.join("cmake/FlashRT.cmake"))
        .unwrap()
        .contains(&minimum));
}
