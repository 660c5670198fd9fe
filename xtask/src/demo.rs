//! `cargo xtask demo`: from a fresh machine to generated text.

use crate::context::Context;
use crate::fetch;
use crate::host::{self, Backend, Extent, Plan};
use crate::test;
use crate::tools;
use crate::Llama;
use anyhow::{ensure, Context as _, Result};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// For `cargo xtask demo`.
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// What to continue
    #[arg(long, default_value = "The three laws of thermodynamics are")]
    pub prompt: String,
    /// Tokens to generate
    #[arg(long, default_value_t = 128)]
    pub tokens: u32,
    #[command(flatten)]
    pub llama: Llama,
}

/// An NVIDIA GPU, by its compute capability.
#[derive(Debug, PartialEq, Eq)]
struct Gpu {
    name: String,
    arch: String,
}

/// Sets up, builds and generates; on the GPU where there is one.
pub fn run(context: &Context, args: &DemoArgs) -> Result<()> {
    let why_not = match gpu() {
        Some(gpu) => match tools::cmake_archs(&gpu.arch) {
            Ok(_) => return on_gpu(context, args, &gpu),
            Err(why) => format!("{}: {why}", gpu.name),
        },
        None => "no NVIDIA GPU found".into(),
    };
    println!("{why_not}; running on the CPU, where the windows are checked against ggml's own results");
    on_cpu(context, args)
}

fn on_cpu(context: &Context, args: &DemoArgs) -> Result<()> {
    let tools = tools::ensure(context, false)?;
    let model = fetch::model(context, &tools)?;
    let bin = test::build_cpu_host(context, &tools, Extent::Programs, &args.llama)?;
    if context.would("generate text and run `flashrt check` on the model") {
        return Ok(());
    }
    print!("{}", generate(&bin, &model, args, &[])?.text);
    test::run_check(context, &bin, &model)
}

fn on_gpu(context: &Context, args: &DemoArgs, gpu: &Gpu) -> Result<()> {
    println!("{}, sm_{}", gpu.name, gpu.arch);
    let tools = tools::ensure(context, true)?;
    let model = fetch::model(context, &tools)?;
    let plan = |hook| Plan {
        backend: Backend::Cuda,
        arch: gpu.arch.clone(),
        hook,
        mask: false,
        extent: Extent::Programs,
        llama: args.llama.clone(),
    };
    let adapter = host::build(context, &tools, &plan(true))?;
    let stock = host::build(context, &tools, &plan(false))?;
    if context.would("generate text with the adapter, with stock llama.cpp, and with the adapter again") {
        return Ok(());
    }

    let first = generate(&adapter, &model, args, &[("GGML_FLASHRT_STATS", "1")])?;
    ensure!(
        !first.table.is_empty(),
        "the adapter printed no table of windows: it is not in {}",
        adapter.display()
    );
    println!("{}\n{}", first.text, first.table);
    let rates = [&adapter, &stock, &adapter].map(|bin| tokens_per_second(bin, &model));
    let [a, s, b] = rates;
    let (a, s, b) = (a?, s?, b?);
    println!("tokens/s, adapter / stock / adapter: {a:.1} / {s:.1} / {b:.1}");
    println!("adapter over stock: {:.2}", (a + b) / 2.0 / s);
    Ok(())
}

/// What a run printed: the text, and the window table of the adapter.
struct Generated {
    text: String,
    table: String,
}

fn generate(bin: &Path, model: &Path, args: &DemoArgs, variables: &[(&str, &str)]) -> Result<Generated> {
    let mut command = Command::new(bin.join("llama-completion"));
    command
        .arg("-m")
        .arg(model)
        .args(["-p", &args.prompt, "-n", &args.tokens.to_string()]);
    command.args(["--temp", "0", "--no-conversation", "-c", "4096", "-ngl", "99"]);
    command
        .envs(variables.iter().copied())
        .stdin(std::process::Stdio::null());
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", bin.join("llama-completion").display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "llama-completion failed ({}): {}",
        output.status,
        log.lines()
            .rev()
            .find(|line| line.contains("error") || line.contains("failed"))
            .unwrap_or("it gave no reason")
            .trim()
    );
    let text = String::from_utf8_lossy(&output.stdout).trim_end().to_string() + "\n";
    ensure!(
        text.trim().len() > args.prompt.len(),
        "llama-completion printed no text"
    );
    Ok(Generated {
        text,
        table: window_table(&log),
    })
}

/// What the adapter prints at exit, after everything else.
fn window_table(log: &str) -> String {
    let begins =
        |line: &&str| line.starts_with("flashrt: ") && (line.contains(" evaluations") || line.contains(" off:"));
    let start = log.lines().position(|line| begins(&line)).unwrap_or(usize::MAX);
    log.lines().skip(start).map(|line| format!("{line}\n")).collect()
}

fn tokens_per_second(bin: &Path, model: &Path) -> Result<f64> {
    let mut command = Command::new(bin.join("llama-bench"));
    command
        .arg("-m")
        .arg(model)
        .args(["-p", "0", "-n", "128", "-ngl", "99", "-fa", "1", "-o", "json"]);
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", bin.join("llama-bench").display()))?;
    ensure!(output.status.success(), "llama-bench failed ({})", output.status);
    bench_rate(&output.stdout)
}

fn bench_rate(json: &[u8]) -> Result<f64> {
    let tests: serde_json::Value = serde_json::from_slice(json).context("llama-bench printed no JSON")?;
    tests[0]["avg_ts"].as_f64().context("llama-bench reported no avg_ts")
}

/// The first GPU that the driver lists. A driver library without a device, as in a container, is no GPU.
fn gpu() -> Option<Gpu> {
    let device = fs::read_dir("/dev").ok()?.flatten().any(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok())
            || ["nvhost-gpu", "nvgpu", "dxg"].contains(&name.as_str())
    });
    if !device {
        return None;
    }
    let query = ["--query-gpu=name,compute_cap", "--format=csv,noheader"];
    let smi = which::which("nvidia-smi").unwrap_or_else(|_| PathBuf::from("nvidia-smi"));
    let output = Command::new(smi)
        .args(query)
        .output()
        .ok()
        .filter(|output| output.status.success());
    match output {
        Some(output) => parse_gpu(&String::from_utf8_lossy(&output.stdout)),
        None => jetson(&fs::read_to_string("/proc/device-tree/compatible").ok()?),
    }
}

fn parse_gpu(csv: &str) -> Option<Gpu> {
    let (name, capability) = csv.lines().next()?.rsplit_once(',')?;
    let arch = capability.trim().replace('.', "");
    arch.parse::<u32>().ok()?;
    Some(Gpu {
        name: name.trim().to_string(),
        arch,
    })
}

/// Jetson boards before Thor have no nvidia-smi that names a capability.
fn jetson(compatible: &str) -> Option<Gpu> {
    let families = [("tegra234", "Jetson Orin", "87"), ("tegra264", "Jetson Thor", "110")];
    let (_, name, arch) = families.into_iter().find(|(chip, _, _)| compatible.contains(chip))?;
    Some(Gpu {
        name: name.into(),
        arch: arch.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_read_from_the_driver() {
        let gpu = parse_gpu("NVIDIA H200, 9.0\nNVIDIA H200, 9.0\n").unwrap();
        assert_eq!((gpu.name.as_str(), gpu.arch.as_str()), ("NVIDIA H200", "90"));
        assert_eq!(parse_gpu("NVIDIA-SMI has failed\n"), None);
        assert_eq!(parse_gpu("Orin (nvgpu), [N/A]\n"), None);
    }

    #[test]
    fn jetsons_are_read_from_the_device_tree() {
        assert_eq!(
            jetson("nvidia,p3768-0000+p3767-0005\0nvidia,tegra234\0").unwrap().arch,
            "87"
        );
        assert_eq!(jetson("raspberrypi,5\0"), None);
    }

    #[test]
    fn the_window_table_is_the_end_of_the_log() {
        let table = "flashrt: 12 evaluations, 2 plans\nwindow  sites\nADD_NORM  18\n";
        assert_eq!(window_table(&format!("load\nflashrt: on, sm_90\n{table}")), table);
        assert_eq!(window_table("load\nflashrt: on, sm_90\n"), "");
    }

    #[test]
    fn the_rate_is_read_from_llama_bench() {
        assert_eq!(bench_rate(br#"[{"n_gen": 128, "avg_ts": 812.5}]"#).unwrap(), 812.5);
        assert!(bench_rate(b"[]").is_err());
        assert!(bench_rate(b"ggml_cuda_init: no device").is_err());
    }
}
