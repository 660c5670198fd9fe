//! The `flashrt` command: measures, checks and inspects what the library does inside llama.cpp.

mod bench;
mod budget;
#[cfg(feature = "host")]
mod check;
mod dump;
mod evidence;
mod llama;
mod machine;
mod output;
mod probe;
mod qualify;
mod server;
mod stream_sim;
mod synth;
mod windows;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "flashrt", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a model on the CPU and compare the oracles of the windows in it with ggml's tensors
    #[cfg(feature = "host")]
    Check(check::Args),
    /// List the windows of this build
    Windows(windows::Args),
    /// Summarise the graphs that GGML_FLASHRT_DUMP recorded
    Dump(dump::Args),
    /// Write a GGUF with random weights in a known model's shapes
    Synth(synth::Args),
    /// Measure an adapter build against stock llama.cpp
    Bench(bench::Args),
    /// Compare the results of an adapter build with and without its windows
    Qualify(qualify::Args),
    /// Say what machine this is and whether the expert streamer could run on it
    Probe(probe::Args),
    /// Say how many experts of a model fit into memory, with the sum
    Budget(budget::Args),
    /// Play a routing trace through slots and a disk of given speed
    StreamSim(stream_sim::Args),
    /// Keep the evidence index and the figures in documents in step with the reports
    Evidence(evidence::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        #[cfg(feature = "host")]
        Command::Check(args) => check::run(&args),
        Command::Windows(args) => windows::run(args),
        Command::Dump(args) => dump::run(args),
        Command::Synth(args) => synth::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Qualify(args) => qualify::run(args),
        Command::Probe(args) => probe::run(args),
        Command::Budget(args) => budget::run(args),
        Command::StreamSim(args) => stream_sim::run(args),
        Command::Evidence(args) => evidence::run(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("flashrt: {}", in_one_line(&error));
            ExitCode::FAILURE
        }
    }
}

/// The error and its causes, each once: the library's errors state their cause themselves.
fn in_one_line(error: &anyhow::Error) -> String {
    error
        .chain()
        .map(ToString::to_string)
        .fold(String::new(), |text, cause| match text {
            text if text.is_empty() => cause,
            text if text.ends_with(&cause) => text,
            text => format!("{text}: {cause}"),
        })
}
