//! What a number of slots would bring: a routing trace, played through [`Slots`] and a disk that is a rate and a latency.

use super::slot::{Grant, Key, Policy, Slots, Step};
use crate::reference::sample::Sample;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};

/// Version of the trace format.
pub const TRACE: u32 = 1;

/// Why a trace cannot be used or played.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum SimError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("line {line}: {why}")]
    Line { line: usize, why: String },
    #[error("{slots} slots, but a step needs {needed}")]
    Slots { slots: usize, needed: usize },
    #[error("the trace has no step")]
    Empty,
    #[error("{0} is out of range")]
    Range(&'static str),
}

/// First line of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`TRACE`].
    pub trace: u32,
    /// Layers with routed experts.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Of them, how many a token uses.
    pub used: u32,
    /// Where it comes from: a model and a text, or how it was made.
    pub source: String,
}

/// A step, one line of a trace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Tokens of a prompt; 0: a token is decoded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub prompt: u32,
    /// Experts by layer, each once.
    pub experts: Vec<Vec<u32>>,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Which experts every step used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// First line.
    pub head: Head,
    /// Steps in their order.
    pub steps: Vec<Record>,
}

impl Trace {
    /// Reads a trace: JSON, a line each.
    pub fn read(source: impl BufRead) -> Result<Trace, SimError> {
        let mut head: Option<Head> = None;
        let mut steps = Vec::new();
        for (n, text) in source.lines().enumerate() {
            let (line, text) = (n + 1, text?);
            let refuse = |why: String| SimError::Line { line, why };
            let Some(head) = &head else {
                let first: Head =
                    serde_json::from_str(&text).map_err(|e| refuse(format!("no head of a trace: {e}")))?;
                if first.trace != TRACE {
                    return Err(refuse(format!(
                        "trace version {}, this version reads {TRACE}",
                        first.trace
                    )));
                }
                if first.used == 0 || first.used > first.experts || first.layers == 0 {
                    return Err(refuse(format!(
                        "{} of {} experts in {} layers",
                        first.used, first.experts, first.layers
                    )));
                }
                head = Some(first);
                continue;
            };
            let step: Record = serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))?;
            if step.experts.len() != head.layers as usize {
                return Err(refuse(format!("{} layers of {}", step.experts.len(), head.layers)));
            }
            for layer in &step.experts {
                let distinct: BTreeSet<_> = layer.iter().collect();
                let beyond = layer.iter().any(|e| *e >= head.experts);
                let too_many = step.prompt == 0 && layer.len() > head.used as usize;
                if distinct.len() != layer.len() || beyond || too_many {
                    return Err(refuse(format!("experts {layer:?}")));
                }
            }
            steps.push(step);
        }
        match head {
            Some(head) if !steps.is_empty() => Ok(Trace { head, steps }),
            _ => Err(SimError::Empty),
        }
    }

    /// Writes it as [`Trace::read`] reads it.
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut out, &self.head)?;
        writeln!(out)?;
        for step in &self.steps {
            serde_json::to_writer(&mut out, step)?;
            writeln!(out)?;
        }
        Ok(())
    }
}

/// How a synthetic router behaves. The defaults meet the public figures for 512 experts, 10 used: an LRU of 64 and 128 experts a layer
/// hits 67 and 81 %, the 32 that are most frequent over all take 10 %.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    /// Layers with routed experts.
    pub layers: u32,
    /// Experts of a layer.
    pub experts: u32,
    /// Of them, how many a token uses.
    pub used: u32,
    /// Tokens of a prompt before the text; 0: none.
    pub prompt: u32,
    /// Tokens to decode.
    pub tokens: u32,
    /// Share of the experts that are drawn by how long ago they were used last; the others by their rank.
    pub locality: f64,
    /// An expert that is drawn by its age is one of the `age` last used ones of `experts` with the probability
    /// `1 - (1 + age / reach) ^ -tail`.
    pub reach: f64,
    /// See `reach`.
    pub tail: f64,
    /// Drawn by rank, the `r`-th expert of a layer has the weight `r ^ -skew`.
    pub skew: f64,
    /// The same seed gives the same trace.
    pub seed: u64,
}

impl Default for Synthetic {
    fn default() -> Self {
        Synthetic {
            layers: 48,
            experts: 128,
            used: 8,
            prompt: 0,
            tokens: 256,
            locality: 1.0,
            reach: REACH,
            tail: TAIL,
            skew: 1.0,
            seed: 1,
        }
    }
}

/// Of [`Synthetic`], fitted by trying; `tests/stream_slot.rs` has the result.
const REACH: f64 = 18.0;
const TAIL: f64 = 0.77;

struct Random(Sample);

impl Random {
    /// From 0 up to 1.
    fn unit(&mut self) -> f64 {
        (self.0.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }
}

/// A layer's router.
struct Router {
    /// Experts by their last use, the last first.
    recent: Vec<u32>,
    /// Experts by rank, and the sums of their weights.
    ranked: Vec<u32>,
    sums: Vec<f64>,
}

impl Router {
    fn new(s: &Synthetic, random: &mut Random) -> Router {
        let mut shuffled = || {
            let mut all: Vec<u32> = (0..s.experts).collect();
            (1..all.len()).rev().for_each(|i| all.swap(i, random.below(i + 1)));
            all
        };
        let mut sum = 0.0;
        let weights = (1..=s.experts).map(|rank| {
            sum += f64::from(rank).powf(-s.skew);
            sum
        });
        Router {
            recent: shuffled(),
            ranked: shuffled(),
            sums: weights.collect(),
        }
    }

    /// The experts of a token.
    fn token(&mut self, s: &Synthetic, random: &mut Random) -> Vec<u32> {
        let mut chosen = Vec::new();
        while chosen.len() < s.used as usize {
            let expert = if random.unit() < s.locality {
                let age = s.reach * ((1.0 - random.unit()).powf(-1.0 / s.tail) - 1.0);
                // Older than all of them: any.
                let place = if age < f64::from(s.experts) {
                    age as usize
                } else {
                    random.below(self.recent.len())
                };
                self.recent[place]
            } else {
                let at = random.unit() * self.sums[self.sums.len() - 1];
                let rank = self.sums.partition_point(|sum| *sum <= at);
                self.ranked[rank.min(self.ranked.len() - 1)]
            };
            if !chosen.contains(&expert) {
                chosen.push(expert);
            }
        }
        // Used now: to the front, all at once, so that a token does not draw from itself.
        self.recent.retain(|e| !chosen.contains(e));
        self.recent.splice(0..0, chosen.iter().copied());
        chosen
    }
}

impl Synthetic {
    /// Makes the trace.
    pub fn trace(&self) -> Result<Trace, SimError> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        for (bad, what) in [
            (self.layers == 0 || self.layers > 4096, "the number of layers"),
            (self.experts == 0 || self.experts > 65_536, "the number of experts"),
            (self.used == 0 || self.used > self.experts, "the number of experts used"),
            (self.tokens == 0, "the number of tokens"),
            (!(0.0..=1.0).contains(&self.locality), "the locality"),
            (!positive(self.reach) || !positive(self.tail), "reach or tail"),
            (!self.skew.is_finite() || self.skew < 0.0, "the skew"),
        ] {
            if bad {
                return Err(SimError::Range(what));
            }
        }
        let mut random = Random(Sample::new(self.seed));
        let mut routers: Vec<Router> = (0..self.layers).map(|_| Router::new(self, &mut random)).collect();
        let mut steps = Vec::new();
        if self.prompt > 0 {
            let of_layer = |router: &mut Router| {
                let mut all = BTreeSet::new();
                (0..self.prompt).for_each(|_| all.extend(router.token(self, &mut random)));
                all.into_iter().collect()
            };
            steps.push(Record {
                prompt: self.prompt,
                experts: routers.iter_mut().map(of_layer).collect(),
            });
        }
        for _ in 0..self.tokens {
            let experts = routers.iter_mut().map(|r| r.token(self, &mut random)).collect();
            steps.push(Record { prompt: 0, experts });
        }
        let Synthetic {
            locality,
            reach,
            tail,
            skew,
            seed,
            ..
        } = self;
        Ok(Trace {
            head: Head {
                trace: TRACE,
                layers: self.layers,
                experts: self.experts,
                used: self.used,
                source: format!("synthetic: locality {locality}, reach {reach}, tail {tail}, skew {skew}, seed {seed}"),
            },
            steps,
        })
    }
}

/// A disk, and what a step takes without it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Bytes a second, with as many reads in flight as the streamer keeps.
    pub bytes_per_second: f64,
    /// From a miss to the first byte, and from the last byte to the GPU going on.
    pub latency_seconds: f64,
    /// A decode step with every expert resident.
    pub step_seconds: f64,
}

/// Layers whose experts have one size, and the slots they share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Places of the layers in the trace.
    pub layers: Vec<u32>,
    /// Bytes of an expert.
    pub bytes: u64,
    /// Slots.
    pub slots: usize,
}

/// What came of a trace. Loads of the first `warm_up` decode steps are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Decode steps that were counted.
    pub tokens: u64,
    /// Experts that they used.
    pub uses: u64,
    /// Of them, those that were there.
    pub hits: u64,
    /// Of the others, bytes read.
    pub bytes: u64,
    /// Time of the counted steps.
    pub seconds: f64,
    /// Experts that prompts loaded.
    pub prompt_loads: u64,
    /// Waves of prompts, over all layers.
    pub waves: u64,
}

impl Outcome {
    /// Share of uses that found their expert.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.uses.max(1) as f64
    }

    /// Decoded tokens a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// Plays a trace. A layer's missing experts are read together, and the layer waits for them: nothing is predicted.
pub fn play(
    trace: &Trace,
    groups: &[Group],
    policy: Policy,
    machine: &Machine,
    warm_up: usize,
) -> Result<Outcome, SimError> {
    let mut slots: Vec<Slots> = Vec::new();
    let mut group_of = vec![usize::MAX; trace.head.layers as usize];
    for (g, group) in groups.iter().enumerate() {
        let needed = group.layers.len() * trace.head.used as usize;
        if group.slots < needed {
            return Err(SimError::Slots {
                slots: group.slots,
                needed,
            });
        }
        slots.push(Slots::new(group.slots, policy));
        for layer in &group.layers {
            *group_of
                .get_mut(*layer as usize)
                .ok_or(SimError::Range("a layer of a group"))? = g;
        }
    }
    if group_of.contains(&usize::MAX) {
        return Err(SimError::Range("the layers of all groups together"));
    }
    let mut out = Outcome::default();
    let mut decoded = 0;
    for record in &trace.steps {
        let step = if record.prompt > 0 { Step::Prefill } else { Step::Decode };
        slots.iter_mut().for_each(|s| s.begin(step));
        let counted = step == Step::Decode && decoded >= warm_up;
        let mut seconds = machine.step_seconds;
        for (layer, experts) in record.experts.iter().enumerate() {
            let group = group_of[layer];
            let mut missing = 0;
            for &expert in experts {
                let key = Key {
                    layer: layer as u32,
                    expert,
                };
                let grant = slots[group].request(key).or_else(|_| {
                    // A prompt may need more than there are slots: the layer goes on in a further wave.
                    out.waves += 1;
                    slots[group].begin(step);
                    slots[group].request(key)
                });
                let grant = grant.expect("groups have a slot for every expert that a layer uses at once");
                if let Grant::Load { slot, .. } = grant {
                    slots[group].loaded(slot);
                    missing += 1;
                }
            }
            let bytes = missing * groups[group].bytes;
            if missing > 0 {
                seconds += machine.latency_seconds + bytes as f64 / machine.bytes_per_second;
            }
            if counted {
                out.uses += experts.len() as u64;
                out.hits += experts.len() as u64 - missing;
                out.bytes += bytes;
            } else if step == Step::Prefill {
                out.prompt_loads += missing;
            }
        }
        if counted {
            out.tokens += 1;
            out.seconds += seconds;
        }
        decoded += usize::from(step == Step::Decode);
    }
    if out.tokens == 0 {
        return Err(SimError::Empty);
    }
    Ok(out)
}
