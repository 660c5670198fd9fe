//! Runs a model on the CPU and checks its prefill and decode graphs.

use super::record::Recorder;
use super::{check_recording, GraphReport, Report};
use crate::graph::BuildError;
use crate::host::{HostError, Model, Token};
use crate::window::thresholds::Thresholds;

/// How to check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// CPU threads.
    pub threads: u32,
    /// Compute capability, times 10, of the GPU to match for.
    pub cc: i32,
    /// By index in [`crate::window::WINDOWS`]: windows to leave out.
    pub off: Vec<bool>,
    /// From how many tokens on mat-muls are checked. By default the prompt has that many: one as long as a GPU needs for them to
    /// pay off would take a CPU minutes.
    pub thresholds: Thresholds,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            threads: 2,
            cc: 90,
            off: Vec::new(),
            thresholds: Thresholds {
                mm_min_tokens: Some(PROMPT.into()),
                fa4_min_tokens: Some(PROMPT.into()),
            },
        }
    }
}

/// Why a check could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// llama.cpp failed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A recorded graph contradicts itself.
    #[error("the recorded {graph} graph cannot be rebuilt")]
    Graph {
        /// Which evaluation.
        graph: &'static str,
        /// What is wrong with it.
        source: BuildError,
    },
    /// llama.cpp split a batch, so that there is no one graph for it.
    #[error("llama.cpp evaluated the {graph} batch of {tokens} tokens in more than one graph")]
    Split {
        /// Which evaluation.
        graph: &'static str,
        /// Tokens of the batch.
        tokens: usize,
    },
}

/// Tokens of a batch of `per_sequence` tokens for each of `sequences`, from `position` on. The ids are spread over the
/// vocabulary; what they spell does not matter. Logits are wanted for the last `outputs` tokens of each sequence.
fn batch(vocab: i32, position: i32, per_sequence: i32, sequences: i32, outputs: i32) -> Vec<Token> {
    let token = |sequence: i32, i: i32| {
        let at = position + i;
        let id = (i64::from(at) * 7919 + i64::from(sequence) * 104_729 + 1009) % i64::from(vocab.max(1));
        Token {
            id: id as i32,
            position: at,
            sequence,
            output: i >= per_sequence - outputs,
        }
    };
    (0..sequences)
        .flat_map(|s| (0..per_sequence).map(move |i| token(s, i)))
        .collect()
}

const PROMPT: i32 = 32;
const CONTEXT: u32 = 256;

/// Evaluates a prompt, one token, three tokens at once (as when verifying a draft), and one token each of two sequences.
pub fn run(model: &Model, options: &Options) -> Result<Report, CheckError> {
    let threads = options.threads as i32;
    let vocab = model.vocab();
    let mut graphs = Vec::new();
    let mut one = model.context(CONTEXT, 1, threads)?;
    let mut check = |context: &mut crate::host::Context, name: &'static str, tokens: &[Token]| {
        let mut recorder = Recorder::new(model, options.cc);
        context.decode(tokens, Some(&mut recorder))?;
        let recording = recorder.finish().ok_or(CheckError::Split {
            graph: name,
            tokens: tokens.len(),
        })?;
        let enabled = |window: usize| !options.off.get(window).copied().unwrap_or(false);
        let windows = check_recording(&recording, options.thresholds, enabled)
            .map_err(|source| CheckError::Graph { graph: name, source })?;
        let sequences = tokens.iter().map(|t| t.sequence + 1).max().unwrap_or(0) as usize;
        let nodes = recording.graph().nodes.len();
        graphs.push(GraphReport {
            name: name.to_owned(),
            tokens: tokens.len(),
            sequences,
            nodes,
            windows,
        });
        Ok::<(), CheckError>(())
    };
    check(&mut one, "prefill", &batch(vocab, 0, PROMPT, 1, 1))?;
    check(&mut one, "decode", &batch(vocab, PROMPT, 1, 1, 1))?;
    check(&mut one, "verify", &batch(vocab, PROMPT + 1, 3, 1, 3))?;
    drop(one);
    let mut two = model.context(CONTEXT, 2, threads)?;
    two.decode(&batch(vocab, 0, 8, 2, 1), None)?;
    check(&mut two, "two sequences", &batch(vocab, 8, 1, 2, 1))?;
    Ok(Report {
        model: model.describe(),
        layers: model.layers(),
        ggml: model.host().ggml_version().to_owned(),
        graphs,
    })
}
