//! Builds llama.cpp: on the CPU for `flashrt check`, with CUDA with and without the hook; each with and without the mask patch.
//!
//! A patched copy and its build lie in a tree of their own (`hook`, `mask`, `hook-mask`) that repeats the layout of the stock one. So
//! a file has the same path from its build directory in all, and a compiler cache gives all objects but those of the patched
//! sources to all.

use crate::context::Context;
use crate::fetch;
use crate::files;
use crate::job::Job;
use crate::patch::{self, Kind, Patched};
use crate::tools::{self, Cuda, Tools};
use crate::Llama;
use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// For `cargo xtask host`.
#[derive(Args, Debug)]
pub struct HostArgs {
    /// What it computes with
    #[arg(long, value_enum)]
    pub backend: Backend,
    /// CUDA architectures, as CMAKE_CUDA_ARCHITECTURES takes them
    #[arg(long, default_value = "90", value_parser = tools::cmake_archs)]
    pub arch: String,
    /// Leave the hook out: stock llama.cpp
    #[arg(long)]
    pub no_flashrt: bool,
    /// Fill attention masks by ranges (host/mask), with the hook or without
    #[arg(long)]
    pub mask: bool,
    #[command(flatten)]
    pub llama: Llama,
}

/// What a host computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// ggml-cpu; it has no hook
    Cpu,
    /// ggml-cuda
    Cuda,
}

/// What is built of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// The libraries that `flashrt check` opens.
    Libraries,
    /// The programs too.
    Programs,
}

/// A llama.cpp to build.
#[derive(Debug)]
pub struct Plan {
    /// What it computes with.
    pub backend: Backend,
    /// For CMAKE_CUDA_ARCHITECTURES.
    pub arch: String,
    /// With the hook.
    pub hook: bool,
    /// With attention masks by ranges.
    pub mask: bool,
    /// How much of it.
    pub extent: Extent,
    /// Whose sources.
    pub llama: Llama,
}

impl Plan {
    fn patches(&self) -> Vec<Kind> {
        let hook = self.hook.then_some(Kind::Hook);
        hook.into_iter().chain(self.mask.then_some(Kind::Mask)).collect()
    }
}

/// For `cargo xtask host`.
pub fn run(context: &Context, args: &HostArgs) -> Result<()> {
    let cuda = args.backend == Backend::Cuda;
    let tools = tools::ensure(context, cuda)?;
    let plan = Plan {
        backend: args.backend,
        arch: args.arch.clone(),
        hook: cuda && !args.no_flashrt,
        mask: args.mask,
        extent: Extent::Programs,
        llama: args.llama.clone(),
    };
    build(context, &tools, &plan).map(|_| ())
}

/// Builds it and returns the directory of its programs and libraries.
pub fn build(context: &Context, tools: &Tools, plan: &Plan) -> Result<PathBuf> {
    let (root, source) = prepare(context, tools, plan)?;
    let name = match (plan.backend, plan.hook) {
        (Backend::Cpu, _) => "cpu",
        (Backend::Cuda, true) => "cuda",
        (Backend::Cuda, false) => "stock-cuda",
    };
    let build = root.join("build").join(name);
    let targets = targets(plan);
    if context.would(format!(
        "build {} of {} in {}",
        targets.join(", "),
        source.display(),
        build.display()
    )) {
        return Ok(build.join("bin"));
    }

    let mut options = vec![
        "-DCMAKE_BUILD_TYPE=Release".to_string(),
        // What the binaries are run on is not always what they are built on.
        "-DGGML_NATIVE=OFF".into(),
        "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON".into(),
        "-DLLAMA_OPENSSL=OFF".into(),
        "-DLLAMA_BUILD_UI=OFF".into(),
    ];
    options.extend(portable_cpu());
    if plan.llama.llama_dir.is_none() {
        // Otherwise taken from the git repository around it, which is not llama.cpp's.
        let commit = &context.pins.default_llama().upstream;
        options.push("-DLLAMA_BUILD_NUMBER=0".into());
        options.extend([
            format!("-DLLAMA_BUILD_COMMIT={commit}"),
            format!("-DGGML_BUILD_COMMIT={commit}"),
        ]);
    }
    match plan.backend {
        Backend::Cpu => {
            options.extend(["TESTS", "EXAMPLES", "SERVER", "APP"].map(|part| format!("-DLLAMA_BUILD_{part}=OFF")));
        }
        Backend::Cuda => {
            let cuda = tools
                .cuda
                .as_ref()
                .context("a CUDA build was planned without a toolkit")?;
            options.extend([
                "-DGGML_CUDA=ON".into(),
                "-DGGML_RPC=ON".into(),
                "-DLLAMA_BUILD_TESTS=ON".into(),
            ]);
            options.extend(cuda_options(context, &root, cuda, &plan.arch));
        }
    }
    for kind in plan.patches() {
        options.push(format!("-D{}=ON", kind.option()));
        options.push(format!("-D{}={}", kind.directory_option(), context.repo.display()));
    }
    lend_venv(context, &root)?;
    configure(context, tools, &source, &build, name, &options)?;
    let mut ninja = Command::new(&tools.ninja);
    ninja
        .arg("-C")
        .arg(&build)
        .args(["-j", &context.jobs.to_string()])
        .args(targets);
    set_cache(context, &mut ninja);
    Job::new(
        context,
        &format!("build-{name}"),
        format!("building llama.cpp ({name})"),
    )
    .following_ninja()
    .run(&mut ninja)?;
    let bin = build.join("bin");
    build_bridge(context, &source, &bin)?;
    if plan.mask {
        let flags = ["-O3", "-Wl,-rpath,$ORIGIN"];
        mask_program(
            context,
            "bench/mask_fill.cpp",
            &source,
            &bin,
            &bin.join("mask-fill"),
            &flags,
        )?;
    }
    if let Some(tree) = tree(&plan.patches()).filter(|tree| root == context.home.join(tree)) {
        let link = format!("build/{name}{}", if plan.mask { "-mask" } else { "" });
        files::symlink(
            &Path::new("..").join(tree).join("build").join(name),
            &context.home.join(link),
        )?;
    }
    println!("llama.cpp ({name}): {}", bin.display());
    Ok(bin)
}

fn targets(plan: &Plan) -> &'static [&'static str] {
    match (plan.extent, plan.backend) {
        (Extent::Libraries, _) => &["llama"],
        (Extent::Programs, Backend::Cpu) => &["llama-completion", "llama-bench"],
        (Extent::Programs, Backend::Cuda) => &[
            "llama-cli",
            "llama-completion",
            "llama-server",
            "llama-bench",
            "llama-perplexity",
            "llama-quantize",
            "test-backend-ops",
            "ggml-rpc-server",
        ],
    }
}

/// The tree that holds build directories, and the sources to build.
fn prepare(context: &Context, tools: &Tools, plan: &Plan) -> Result<(PathBuf, PathBuf)> {
    let Some(own) = &plan.llama.llama_dir else {
        let pinned = context.pins.default_llama();
        return match tree(&plan.patches()) {
            None => Ok((context.home.clone(), fetch::llama_sources(context, tools, pinned)?)),
            Some(tree) => patched(context, tools, &context.home.join(tree), &pinned.name, &plan.patches()),
        };
    };
    let own = own
        .canonicalize()
        .with_context(|| format!("--llama-dir: cannot find {}", own.display()))?;
    let digest = files::sha256_of(own.as_os_str().as_encoded_bytes());
    let mut root = context.home.join("own").join(&digest[..12]);
    if plan.mask {
        root.extend(tree(&plan.patches()));
    }
    Kind::Hook.is_in(&own)?; // or it is no llama.cpp
    let mut changed = Patched::new();
    for kind in plan.patches() {
        if !kind.is_in(&own)? {
            changed.extend(patch::fitting(&own, &context.repo.join("cmake/hosts"), kind)?);
        }
    }
    if changed.is_empty() {
        return Ok((root, own));
    }
    let copy = root.join("src").join("llama.cpp");
    if !context.would(format!(
        "copy {} to {} and patch it there",
        own.display(),
        copy.display()
    )) {
        patch::sync(&own, &changed, &copy)?;
    }
    Ok((root, copy))
}

/// The tree, below the home, of pinned sources with these patches; none for stock.
fn tree(patches: &[Kind]) -> Option<&'static str> {
    match (patches.contains(&Kind::Hook), patches.contains(&Kind::Mask)) {
        (false, false) => None,
        (true, false) => Some("hook"),
        (false, true) => Some("mask"),
        (true, true) => Some("hook-mask"),
    }
}

/// A pinned version with patches, in a tree below `root` that is laid out as the stock one.
pub fn patched(
    context: &Context,
    tools: &Tools,
    root: &Path,
    version: &str,
    patches: &[Kind],
) -> Result<(PathBuf, PathBuf)> {
    let llama = context.pins.llama.iter().find(|llama| llama.name == version);
    let llama = llama.with_context(|| format!("third_party/pins.toml has no llama.cpp {version}"))?;
    let pristine = fetch::llama_sources(context, tools, llama)?;
    let names: Vec<_> = patches.iter().map(|kind| kind.file(version)).collect();
    let copy = root.join("src").join(format!("llama.cpp-{version}"));
    if context.would(format!(
        "copy {} to {} and apply {} of cmake/hosts",
        pristine.display(),
        copy.display(),
        names.join(" and ")
    )) {
        return Ok((root.to_path_buf(), copy));
    }
    let mut changed = Patched::new();
    for name in names {
        changed.extend(patch::apply(&pristine, &context.repo.join("cmake/hosts").join(name))?);
    }
    patch::sync(&pristine, &changed, &copy)?;
    Ok((root.to_path_buf(), copy))
}

/// Repeats the environment's place in a tree of its own.
pub fn lend_venv(context: &Context, root: &Path) -> Result<()> {
    if root == context.home {
        return Ok(());
    }
    files::create_dir(root)?;
    files::symlink(&context.home.join("venv"), &root.join("venv"))
}

/// Options that lead CMake to a toolkit; by its path in the tree of this build if it is ours.
pub fn cuda_options(context: &Context, root: &Path, cuda: &Cuda, arch: &str) -> Vec<String> {
    let toolkit = match cuda.root.strip_prefix(context.home.join("venv")) {
        Ok(inner) => root.join("venv").join(inner),
        Err(_) => cuda.root.clone(),
    };
    let nvcc = toolkit.join("bin/nvcc");
    let lib = toolkit.join("lib64");
    vec![
        format!("-DCMAKE_CUDA_ARCHITECTURES={arch}"),
        format!("-DCMAKE_CUDA_COMPILER={}", nvcc.display()),
        format!("-DCUDAToolkit_ROOT={}", toolkit.display()),
        // libggml-cuda.so names libraries that neither the linker nor the loader searches by itself.
        format!("-DCMAKE_BUILD_RPATH={}", lib.display()),
        format!("-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{0}:{0}/stubs", lib.display()),
    ]
}

/// ggml's baseline without GGML_NATIVE is x86-64-v3. A machine below that could not run what it built.
fn portable_cpu() -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    if !["avx2", "fma", "f16c", "bmi2"]
        .iter()
        .all(|feature| has_feature(feature))
    {
        return ["SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"]
            .iter()
            .map(|name| format!("-DGGML_{name}=OFF"))
            .collect();
    }
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
fn has_feature(name: &str) -> bool {
    match name {
        "avx2" => is_x86_feature_detected!("avx2"),
        "fma" => is_x86_feature_detected!("fma"),
        "f16c" => is_x86_feature_detected!("f16c"),
        "bmi2" => is_x86_feature_detected!("bmi2"),
        _ => false,
    }
}

/// Runs CMake unless it ran with the same options before.
pub fn configure(
    context: &Context,
    tools: &Tools,
    source: &Path,
    build: &Path,
    name: &str,
    options: &[String],
) -> Result<()> {
    let stamp = build.join("flashrt-options");
    let wanted = format!(
        "{}\n{}\n{}\n",
        tools.cmake.display(),
        source.display(),
        options.join("\n")
    );
    if build.join("build.ninja").is_file() && fs::read_to_string(&stamp).is_ok_and(|now| now == wanted) {
        return Ok(());
    }
    // CMake refuses a build directory that was made for other sources.
    let cached = fs::read_to_string(build.join("CMakeCache.txt")).unwrap_or_default();
    let home = cached
        .lines()
        .find_map(|line| line.strip_prefix("CMAKE_HOME_DIRECTORY:INTERNAL="));
    if home.is_some_and(|home| Path::new(home) != source) {
        files::remove_dir(build)?;
    }
    let mut cmake = Command::new(&tools.cmake);
    cmake
        .arg("-S")
        .arg(source)
        .arg("-B")
        .arg(build)
        .args(["-G", "Ninja", "-Wno-dev"])
        .args(options);
    cmake.arg(format!("-DCMAKE_MAKE_PROGRAM={}", tools.ninja.display()));
    set_cache(context, &mut cmake);
    Job::new(
        context,
        &format!("configure-{name}"),
        format!("configuring llama.cpp ({name})"),
    )
    .run(&mut cmake)?;
    files::write(&stamp, wanted)
}

/// ccache, which ggml uses where it is installed, keeps its objects with our downloads and forgets where a checkout lies.
pub fn set_cache(context: &Context, command: &mut Command) {
    if env::var_os("CCACHE_DIR").is_none() {
        command.env("CCACHE_DIR", context.cache.join("ccache"));
    }
    let inside = context.home.starts_with(&context.repo);
    command.env("CCACHE_BASEDIR", if inside { &context.repo } else { &context.home });
}

/// The C side of `flashrt check`, compiled with the headers of the llama.cpp that it calls.
fn build_bridge(context: &Context, source: &Path, bin: &Path) -> Result<()> {
    let bridge = context.repo.join("host/check/flashrt_check.c");
    let mut cc = tools::compiler();
    cc.args(["-O2", "-shared", "-fPIC", "-fvisibility=hidden"]);
    cc.arg("-I")
        .arg(source.join("include"))
        .arg("-I")
        .arg(source.join("ggml/include"));
    cc.arg(&bridge).arg("-o").arg(bin.join("libflashrt_check.so"));
    cc.arg("-L").arg(bin).args([
        "-lllama",
        "-lggml",
        "-lggml-base",
        "-Wl,-rpath,$ORIGIN",
        "-Wl,--allow-shlib-undefined",
    ]);
    Job::new(context, "bridge", "compiling host/check").run(&mut cc)
}

/// Compiles a C++ program of ours that includes the patched llama-kv-cache.cpp of `llama`, against the libraries in `bin`.
pub fn mask_program(
    context: &Context,
    program: &str,
    llama: &Path,
    bin: &Path,
    out: &Path,
    flags: &[&str],
) -> Result<()> {
    let mut cxx = tools::cxx_compiler();
    cxx.args([
        "-std=gnu++17",
        "-DNDEBUG",
        "-DLLAMA_FLASHRT_MASK",
        "-Wall",
        "-Wextra",
        "-Wno-unused-function",
    ]);
    for dir in ["host/mask", "tests/c"] {
        cxx.arg("-I").arg(context.repo.join(dir));
    }
    for dir in ["src", "include", "ggml/include"] {
        cxx.arg("-I").arg(llama.join(dir));
    }
    cxx.arg(context.repo.join(program)).arg("-o").arg(out);
    cxx.arg("-L").arg(bin);
    cxx.args([
        "-lllama",
        "-lggml",
        "-lggml-base",
        "-pthread",
        "-Wl,--allow-shlib-undefined",
    ]);
    cxx.args(flags);
    Job::new(context, "mask-program", format!("compiling {program}")).run(&mut cxx)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_combination_of_patches_has_its_own_tree() {
        let plan = |hook, mask| Plan {
            backend: Backend::Cuda,
            arch: String::new(),
            hook,
            mask,
            extent: Extent::Libraries,
            llama: Llama::default(),
        };
        let trees =
            [(false, false), (true, false), (false, true), (true, true)].map(|(h, m)| tree(&plan(h, m).patches()));
        assert_eq!(trees, [None, Some("hook"), Some("mask"), Some("hook-mask")]);
    }
}
