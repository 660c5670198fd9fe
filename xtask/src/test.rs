//! `cargo xtask test`: everything that CI checks, stage by stage. A stage fails with one line; the first failure ends the run.

use crate::context::Context;
use crate::fetch;
use crate::files::{self, IoContext};
use crate::host::{self, Backend, Extent, Plan};
use crate::job::Job;
use crate::patch::{self, Kind, Patched};
use crate::ptxas;
use crate::sass;
use crate::style::{self, show};
use crate::tools::{self, Cuda, Tools};
use crate::Llama;
use anyhow::{ensure, Context as _, Result};
use clap::Args;
use serde::Deserialize;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The patches must stay reviewable.
const HOOK_LINES: usize = 60;
const MASK_LINES: usize = 20;

/// Compiled for the families that no machine at hand can run: the sources that between them use every shared header. Of the mat-mul
/// there is nothing to run on them, but it must compile.
const SAMPLES: [&str; 5] = [
    "norm/norm.cu",
    "qkv/qkv_tail.cu",
    "gemv/gemv_q4_k.cu",
    "mm/mm_q4_k.cu",
    "moe/route.cu",
];

/// Random caches and ubatches whose masks are compared.
const MASK_CASES: &str = "20000";

type Stage = (&'static str, fn(&Context) -> Result<()>);

const STAGES: [Stage; 14] = [
    ("format", |context| style::fmt(context, true)),
    ("lint", style::lint),
    ("tests", |context| cargo_test(context, &["--workspace"])),
    ("tests with cli and host", |context| {
        cargo_test(context, &["--features", "cli,host"])
    }),
    ("header", |context| style::header(context, true)),
    ("hook patches", hook_patches),
    ("mask patches", mask_patches),
    ("kernels for sm_90a", kernels),
    ("kernels for sm_87 and sm_110a", samples),
    ("machine code", machine_code),
    ("GPU code: lint and tests compile", gpu_code),
    ("CPU host", cpu_host),
    ("flashrt check", check_model),
    ("attention masks", attention_masks),
];

/// For `cargo xtask test`.
#[derive(Args, Debug)]
pub struct TestArgs {
    /// Only the stages whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
}

/// Runs every stage, or those asked for.
pub fn run(context: &Context, args: &TestArgs) -> Result<()> {
    let begin = Instant::now();
    let wanted = |name: &str| args.only.as_ref().is_none_or(|part| name.contains(part.as_str()));
    let stages: Vec<_> = STAGES.iter().filter(|(name, _)| wanted(name)).collect();
    let names = || STAGES.map(|(name, _)| name).join(", ");
    ensure!(!stages.is_empty(), "no stage is called so; there are: {}", names());
    for (name, stage) in &stages {
        if context.would(format!("check: {name}")) {
            continue;
        }
        println!("== {name}");
        let start = Instant::now();
        stage(context).with_context(|| format!("stage \"{name}\" failed after {} s", start.elapsed().as_secs()))?;
        println!("== {name}: passed in {:.1} s\n", start.elapsed().as_secs_f64());
    }
    if context.dry_run {
        return Ok(());
    }
    match args.only {
        None => println!("all {} stages passed in {} s", stages.len(), begin.elapsed().as_secs()),
        Some(_) => println!(
            "{} of {} stages passed in {} s",
            stages.len(),
            STAGES.len(),
            begin.elapsed().as_secs()
        ),
    }
    Ok(())
}

fn cargo_test(context: &Context, args: &[&str]) -> Result<()> {
    show(context.cargo().arg("test").args(args), "cargo test")
}

/// Each patch fits its version and is small; with the option off its files mean what they meant; with it on ggml-cuda.cu
/// compiles.
fn hook_patches(context: &Context) -> Result<()> {
    let tools = tools::ensure(context, true)?;
    let cuda = tools.cuda.as_ref().context("asked for")?;
    for llama in &context.pins.llama {
        let version = &llama.name;
        let pristine = fetch::llama_sources(context, &tools, llama)?;
        let patched = reviewable(context, &pristine, version, Kind::Hook, HOOK_LINES)?;
        let (root, copy) = host::patched(context, &tools, &context.home.join("hook"), version, &[Kind::Hook])?;

        let off = compile_commands(
            context,
            &tools,
            Some(cuda),
            &context.home,
            &pristine,
            &format!("ggml-{version}"),
            None,
        )?;
        let compared = unchanged_when_off(&off, &pristine, &copy, &patched, Kind::Hook)?;
        println!("llama.cpp {version}: with the option off, {compared} means what it meant");

        let name = format!("ggml-{version}-hook");
        let on = compile_commands(context, &tools, Some(cuda), &root, &copy, &name, Some(Kind::Hook))?;
        compile(context, version, &on, Path::new("ggml-cuda/ggml-cuda.cu"), Kind::Hook)?;
        println!("llama.cpp {version}: ggml-cuda.cu compiles with the hook");
    }
    Ok(())
}

/// The same of the patch for attention masks, which also fits a tree with the hook.
fn mask_patches(context: &Context) -> Result<()> {
    let tools = tools::ensure(context, false)?;
    for llama in &context.pins.llama {
        let version = &llama.name;
        let pristine = fetch::llama_sources(context, &tools, llama)?;
        let patched = reviewable(context, &pristine, version, Kind::Mask, MASK_LINES)?;
        let (root, copy) = host::patched(context, &tools, &context.home.join("mask"), version, &[Kind::Mask])?;
        let hook = patch::apply(&pristine, &hosts(context).join(Kind::Hook.file(version)))?;
        ensure!(
            hook.keys().all(|file| !patched.contains_key(file)),
            "the patches of llama.cpp {version} change the same file, so that one does not fit a tree with the other"
        );

        let name = format!("llama-{version}");
        let off = compile_commands(context, &tools, None, &context.home, &pristine, &name, None)?;
        let compared = unchanged_when_off(&off, &pristine, &copy, &patched, Kind::Mask)?;
        println!("llama.cpp {version}: with the option off, {compared} means what it meant");

        let name = format!("llama-{version}-mask");
        let on = compile_commands(context, &tools, None, &root, &copy, &name, Some(Kind::Mask))?;
        compile(context, version, &on, Path::new("src/llama-kv-cache.cpp"), Kind::Mask)?;
        println!("llama.cpp {version}: llama-kv-cache.cpp compiles with host/mask");
    }
    Ok(())
}

fn hosts(context: &Context) -> PathBuf {
    context.repo.join("cmake/hosts")
}

/// What a patch that fits and is small makes of a tree.
fn reviewable(context: &Context, pristine: &Path, version: &str, kind: Kind, lines: usize) -> Result<Patched> {
    let patch = hosts(context).join(kind.file(version));
    let added = patch::added_lines(&patch)?;
    ensure!(
        added < lines,
        "{} adds {added} lines, {lines} are too many",
        patch.display()
    );
    let patched = patch::apply(pristine, &patch)?;
    println!(
        "llama.cpp {version}: the patch applies and adds {added} lines to {} files",
        patched.len()
    );
    Ok(patched)
}

/// An entry of compile_commands.json.
#[derive(Debug, Deserialize)]
struct CompileCommand {
    directory: PathBuf,
    command: String,
    file: PathBuf,
}

impl CompileCommand {
    fn words(&self) -> Result<Vec<String>> {
        shell_words::split(&self.command).with_context(|| format!("compile command of {}", self.file.display()))
    }
}

/// How CMake would compile llama.cpp's two libraries; nothing else of it is configured. With the option of a patch, or without.
fn compile_commands(
    context: &Context,
    tools: &Tools,
    cuda: Option<&Cuda>,
    root: &Path,
    tree: &Path,
    name: &str,
    on: Option<Kind>,
) -> Result<Vec<CompileCommand>> {
    let build = root.join("build").join(name);
    let mut options: Vec<String> = ["BUILD_TYPE=Release", "EXPORT_COMPILE_COMMANDS=ON"]
        .map(|o| format!("-DCMAKE_{o}"))
        .into();
    options.push("-DGGML_NATIVE=OFF".into());
    options.extend(
        ["COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP"].map(|part| format!("-DLLAMA_BUILD_{part}=OFF")),
    );
    if let Some(kind) = on {
        options.push(format!("-D{}=ON", kind.option()));
        options.push(format!("-D{}={}", kind.directory_option(), context.repo.display()));
    }
    host::lend_venv(context, root)?;
    if let Some(cuda) = cuda {
        options.push("-DGGML_CUDA=ON".into());
        options.extend(host::cuda_options(context, root, cuda, "90"));
    }
    host::configure(context, tools, tree, &build, name, &options)?;
    let path = build.join("compile_commands.json");
    let text = fs::read_to_string(&path).at("read", &path)?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// Preprocesses each patched source of both trees with the option off. Lines have moved, so `__LINE__` is fixed.
fn unchanged_when_off(
    off: &[CompileCommand],
    pristine: &Path,
    copy: &Path,
    patched: &Patched,
    kind: Kind,
) -> Result<String> {
    let mut compared = Vec::new();
    for file in patched.keys() {
        let Some(command) = off.iter().find(|command| command.file == pristine.join(file)) else {
            continue;
        };
        let preprocess = |tree: &Path| -> Result<Vec<u8>> {
            // Paths relative to the tree, so that __FILE__ is the same in both.
            let prefix = format!("{}/", pristine.display());
            let words = command.words()?.into_iter().map(|word| word.replace(&prefix, ""));
            let words = without_output(words.collect());
            let (program, args) = words.split_first().context("an empty compile command")?;
            let mut run = Command::new(program);
            run.args(args).args(["-E", "-D__LINE__=0"]).current_dir(tree);
            run.args(if is_cuda(file) {
                &["-Xcompiler", "-P,-Wno-builtin-macro-redefined"][..]
            } else {
                &["-P"]
            });
            let output = run.output().with_context(|| format!("cannot run {program}"))?;
            let why = String::from_utf8_lossy(&output.stderr);
            ensure!(
                output.status.success(),
                "cannot preprocess {}: {}",
                tree.join(file).display(),
                why.trim()
            );
            Ok(output.stdout)
        };
        let (before, after) = (preprocess(pristine)?, preprocess(copy)?);
        ensure!(!before.is_empty(), "{} preprocesses to nothing", file.display());
        ensure!(
            before == after,
            "{} differs from the original although {} is off",
            file.display(),
            kind.option()
        );
        compared.push(file.file_name().unwrap_or_default().to_string_lossy().into_owned());
    }
    ensure!(!compared.is_empty(), "no patched file is compiled");
    Ok(compared.join(", "))
}

fn is_cuda(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "cu")
}

/// A compile command without its cache, its output and its dependency file.
fn without_output(words: Vec<String>) -> Vec<String> {
    let mut kept = Vec::new();
    let mut words = words.into_iter().skip_while(|word| word.ends_with("ccache"));
    while let Some(word) = words.next() {
        match word.as_str() {
            "-o" | "-MT" | "-MF" => drop(words.next()),
            "-c" | "-MD" => {}
            _ => kept.push(word),
        }
    }
    kept
}

/// Compiles a patched source, which the option must have reached.
fn compile(context: &Context, version: &str, on: &[CompileCommand], file: &Path, kind: Kind) -> Result<()> {
    let command = on.iter().find(|command| command.file.ends_with(file));
    let command = command.with_context(|| format!("{} is not built", file.display()))?;
    let words = command.words()?;
    ensure!(
        words.contains(&format!("-D{}", kind.option())),
        "the option {} does not reach {}",
        kind.option(),
        file.display()
    );
    let output = words
        .iter()
        .position(|word| word == "-o")
        .and_then(|at| words.get(at + 1))
        .context("no output named")?;
    let output = command.directory.join(output);
    files::create_dir(output.parent().context("an object lies in a directory")?)?;
    let mut run = Command::new(&words[0]);
    run.args(&words[1..]).current_dir(&command.directory);
    host::set_cache(context, &mut run);
    Job::new(
        context,
        &format!("patched-{version}"),
        format!("compiling {} of {version}", file.display()),
    )
    .run(&mut run)
}

/// The archive that a host links.
pub fn build_archive(context: &Context, cuda: &Cuda, archs: &str) -> Result<PathBuf> {
    let target = context.home.join("target");
    let mut cargo = kernel_cargo(context, cuda, archs);
    cargo
        .args(["build", "--release", "--lib", "--features", "cuda", "--target-dir"])
        .arg(&target);
    show(&mut cargo, &format!("compiling the kernels for {archs}"))?;
    Ok(target.join("release/libggml_flashrt.a"))
}

/// A cargo that compiles kernels with this toolkit.
pub fn kernel_cargo(context: &Context, cuda: &Cuda, archs: &str) -> Command {
    let mut cargo = context.cargo();
    cargo.env("NVCC", &cuda.nvcc).env("FLASHRT_CUDA_ARCHS", archs);
    host::set_cache(context, &mut cargo);
    cargo
}

fn toolkit(context: &Context) -> Result<Cuda> {
    tools::ensure(context, true)?.cuda.context("asked for")
}

fn kernels(context: &Context) -> Result<()> {
    build_archive(context, &toolkit(context)?, "90a").map(|_| ())
}

fn samples(context: &Context) -> Result<()> {
    let cuda = toolkit(context)?;
    let dir = context.home.join("build/samples");
    files::create_dir(&dir)?;
    for arch in ["87", "110a"] {
        for source in SAMPLES {
            let csrc = context.repo.join("csrc");
            let object = dir.join(format!("{}-{arch}.o", source.replace('/', "-")));
            let mut nvcc = Command::new(&cuda.nvcc);
            nvcc.args([
                "-c",
                "-O3",
                "-std=c++17",
                "-Xptxas",
                "-v",
                "-DFRT_ARCHS=\"\"",
                "-gencode",
            ]);
            nvcc.arg(format!("arch=compute_{arch},code=sm_{arch}"))
                .arg("-I")
                .arg(&csrc);
            nvcc.arg(csrc.join(source)).arg("-o").arg(&object);
            Job::new(context, "samples", format!("compiling csrc/{source} for sm_{arch}")).run(&mut nvcc)?;
            let log = context.log("samples");
            let faults = ptxas::faults(&fs::read_to_string(&log).at("read", &log)?);
            ensure!(faults.is_empty(), "csrc/{source}: {}", faults.join("; "));
            println!("csrc/{source} compiles for sm_{arch}");
        }
    }
    Ok(())
}

fn machine_code(context: &Context) -> Result<()> {
    let cuda = toolkit(context)?;
    let archive = context.home.join("target/release/libggml_flashrt.a");
    println!("{}", sass::gate(context, &cuda, &archive)?);
    Ok(())
}

/// In the target directory of the archive, whose compiled kernels serve here too.
fn gpu_code(context: &Context) -> Result<()> {
    let cuda = toolkit(context)?;
    let target = context.home.join("target");
    let mut clippy = kernel_cargo(context, &cuda, "90a");
    clippy.args(["clippy", "--quiet", "--release", "--all-targets"]);
    clippy.args(["--features", "cuda", "--target-dir"]).arg(&target);
    show(clippy.args(["--", "--deny", "warnings"]), "clippy with feature cuda")?;
    let mut cargo = kernel_cargo(context, &cuda, "90a");
    cargo
        .args(["test", "--release", "--no-run", "--features", "cuda", "--target-dir"])
        .arg(&target);
    for test in gpu_test_names(context)? {
        cargo.args(["--test", &test]);
    }
    show(&mut cargo, "compiling the GPU tests")
}

/// The tests that need a GPU are called gpu_…, by the rule of the house.
pub fn gpu_test_names(context: &Context) -> Result<Vec<String>> {
    let dir = context.repo.join("tests");
    let files = fs::read_dir(&dir).at("list", &dir)?.flatten().map(|entry| entry.path());
    let stems = files.filter_map(|path| path.file_name()?.to_str()?.strip_suffix(".rs").map(String::from));
    let mut names: Vec<_> = stems.filter(|name| name.starts_with("gpu_")).collect();
    ensure!(!names.is_empty(), "{} has no gpu_*.rs", dir.display());
    names.sort();
    Ok(names)
}

/// llama.cpp for the CPU, as `flashrt check` opens it.
pub fn build_cpu_host(context: &Context, tools: &Tools, extent: Extent, llama: &Llama) -> Result<PathBuf> {
    let plan = Plan {
        backend: Backend::Cpu,
        arch: String::new(),
        hook: false,
        mask: false,
        extent,
        llama: llama.clone(),
    };
    host::build(context, tools, &plan)
}

fn cpu_host(context: &Context) -> Result<()> {
    let tools = tools::ensure(context, false)?;
    build_cpu_host(context, &tools, Extent::Libraries, &Llama::default()).map(|_| ())
}

fn check_model(context: &Context) -> Result<()> {
    let tools = tools::ensure(context, false)?;
    let model = fetch::model(context, &tools)?;
    run_check(context, &context.home.join("build/cpu/bin"), &model)
}

/// Masks by ranges against llama.cpp's own: random caches for every version, and the logits of a model.
fn attention_masks(context: &Context) -> Result<()> {
    let tools = tools::ensure(context, false)?;
    let bin = build_cpu_host(context, &tools, Extent::Libraries, &Llama::default())?;
    for llama in &context.pins.llama {
        let version = &llama.name;
        let (root, copy) = host::patched(context, &tools, &context.home.join("mask"), version, &[Kind::Mask])?;
        let program = root.join("build").join(format!("mask-{version}"));
        files::create_dir(&root.join("build"))?;
        let rpath = format!("-Wl,-rpath,{}", bin.display());
        let mut flags = vec!["-O2", rpath.as_str()];
        let is_built = version == &context.pins.default_llama().name;
        if !is_built {
            // The libraries are of another version: good enough for the few functions that masks need.
            flags.extend(["-no-pie", "-Wl,--unresolved-symbols=ignore-all"]);
        }
        host::mask_program(context, "tests/c/mask.cpp", &copy, &bin, &program, &flags)?;
        let cases = mask_test(&program, &["cases", "1", MASK_CASES], "0")?;
        println!(
            "llama.cpp {version}: {} with masks by ranges",
            cases.lines().next().unwrap_or_default()
        );
        if is_built {
            let model = fetch::model(context, &tools)?;
            let model = ["model", model.to_str().context("the model's path is not UTF-8")?];
            let ranges = mask_test(&program, &model, "0")?;
            let stock = mask_test(&program, &model, "1")?;
            let (digest, way) = ranges.trim().split_once("; ").context("no digest")?;
            ensure!(way == "by ranges", "the model's masks were not filled by ranges");
            ensure!(
                stock.trim() == format!("{digest}; stock"),
                "the model's logits differ: {} and {}",
                ranges.trim(),
                stock.trim()
            );
            println!("llama.cpp {version}: the model's logits are the same");
        }
    }
    Ok(())
}

/// What the test program prints, with the fill switched off or on.
fn mask_test(program: &Path, args: &[&str], off: &str) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args).env("GGML_FLASHRT_NO_MASK_FILL", off);
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{} {} failed ({}): {}",
        program.display(),
        args.join(" "),
        output.status,
        log.trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `flashrt check` on a model.
pub fn run_check(context: &Context, host: &Path, model: &Path) -> Result<()> {
    let mut cargo = context.cargo();
    cargo.args([
        "run",
        "--quiet",
        "--release",
        "--features",
        "cli,host",
        "--bin",
        "flashrt",
        "--target-dir",
    ]);
    cargo.arg(context.home.join("target")).args(["--", "check"]).arg(model);
    if env::var_os("FLASHRT_HOST_DIR").is_none() {
        cargo.env("FLASHRT_HOST_DIR", host);
    }
    // A window that is off would not be compared.
    cargo.env("GGML_FLASHRT_NO_DEC_ATTN", "0");
    show(&mut cargo, "flashrt check")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_left_out_of_a_preprocessing_command() {
        let words = shell_words::split("/usr/bin/ccache nvcc -Da -MD -MT a.o -MF a.d -x cu -c a.cu -o a.o").unwrap();
        assert_eq!(without_output(words).join(" "), "nvcc -Da -x cu a.cu");
    }

    #[test]
    fn the_hook_off_is_compared_as_text() {
        let dir = tempfile::TempDir::new().unwrap();
        let (pristine, copy) = (dir.path().join("a"), dir.path().join("b"));
        let original = "int f(void) {\n    return __LINE__;\n}\n";
        files::write(&pristine.join("x.c"), original).unwrap();
        let command = |file: &str| CompileCommand {
            directory: dir.path().into(),
            command: format!("cc -c {}/{file} -o {file}.o", pristine.display()),
            file: pristine.join(file),
        };
        for (hooked, same) in [
            (format!("#ifdef GGML_CUDA_FLASHRT\nhook\n#endif\n{original}"), true),
            (format!("#ifndef GGML_CUDA_FLASHRT\nint g;\n#endif\n{original}"), false),
        ] {
            files::write(&copy.join("x.c"), &hooked).unwrap();
            let patched = Patched::from([(PathBuf::from("x.c"), hooked)]);
            let result = unchanged_when_off(&[command("x.c")], &pristine, &copy, &patched, Kind::Hook);
            assert_eq!(result.is_ok(), same, "{result:?}");
        }
    }
}
