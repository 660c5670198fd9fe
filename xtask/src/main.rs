//! `cargo xtask`: set-up and chores. The library and the `flashrt` command never depend on anything here.

mod bundle;
mod context;
mod demo;
mod fa4;
mod fetch;
mod files;
mod header;
mod host;
mod job;
mod patch;
mod pins;
mod sass;
mod style;
mod test;
mod tools;

// Shared with build.rs, so that both look for nvcc in the same places and read the same architecture lists.
#[allow(dead_code)]
#[path = "../../build/archs.rs"]
mod archs;
#[allow(dead_code)]
#[path = "../../build/ptxas.rs"]
mod ptxas;
#[allow(dead_code)]
#[path = "../../build/toolkit.rs"]
mod toolkit;

use clap::{Args, Parser, Subcommand};
use context::Context;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Set-up and chores of ggml-flashrt"
)]
struct Cli {
    /// Say what would be done, and do nothing
    #[arg(long, global = true)]
    dry_run: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// From nothing to generated text: tools, sources, model, hook, build, run
    Demo(demo::DemoArgs),
    /// Everything that CI checks
    Test(test::TestArgs),
    /// Build llama.cpp, with the hook unless told otherwise
    Host(host::HostArgs),
    /// Pack host binaries, kernels and GPU tests for a GPU machine that has no tool chain
    Bundle(bundle::BundleArgs),
    /// Compile the attention modules of feature `fa4`
    Fa4(fa4::Fa4Args),
    /// Format the Rust sources
    Fmt(CheckArg),
    /// Run clippy over the workspace in every feature set
    Lint,
    /// Regenerate include/flashrt.h
    Header(CheckArg),
}

#[derive(Args)]
struct CheckArg {
    /// Only say whether it is up to date
    #[arg(long)]
    check: bool,
}

/// Which llama.cpp to take.
#[derive(Args, Clone, Debug, Default)]
pub struct Llama {
    /// Your own llama.cpp tree instead of the pinned one; it is only read, the hook goes into a copy
    #[arg(long, value_name = "DIR")]
    pub llama_dir: Option<PathBuf>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // One line, whatever the causes are made of.
            let text = format!("{error:#}");
            eprintln!("error: {}", text.lines().map(str::trim).collect::<Vec<_>>().join(" "));
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let context = Context::from_env(cli.dry_run)?;
    match cli.command {
        Command::Demo(args) => demo::run(&context, &args),
        Command::Test(args) => test::run(&context, &args),
        Command::Host(args) => host::run(&context, &args),
        Command::Bundle(args) => bundle::run(&context, &args),
        Command::Fa4(args) => fa4::run(&context, &args),
        Command::Fmt(arg) => style::fmt(&context, arg.check),
        Command::Lint => style::lint(&context),
        Command::Header(arg) => style::header(&context, arg.check),
    }
}
