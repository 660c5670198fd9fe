//! `flashrt stream-sim`: hit rate and tokens per second that a number of slots would bring.

use crate::output::{self, NewFile};
use anyhow::{bail, ensure, Context, Result};
use flate2::read::MultiGzDecoder;
use ggml_flashrt::stream::sim::{play, Group, Machine, Synthetic, Trace};
use ggml_flashrt::stream::slot::Policy;
use ggml_flashrt::stream::source::Model;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter};
use std::path::{Path, PathBuf};

/// Arguments of `flashrt stream-sim`.
#[derive(clap::Args)]
pub struct Args {
    /// Trace to play, plain or as .gz; without one it is made by the options below --synthetic.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Take layers and sizes of experts from this model, or the first of its shards.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Size of an expert, when there is no --model.
    #[arg(long, value_name = "SIZE", value_parser = output::parse_size, required_unless_present = "model", conflicts_with = "model")]
    bundle: Option<u64>,
    /// Numbers of slots to try, or shares of all experts.
    #[arg(long, value_delimiter = ',', default_value = "100%,50%,25%,12%")]
    slots: Vec<String>,
    /// Which expert goes first; both by default.
    #[arg(long, value_enum)]
    policy: Option<PolicyName>,
    /// Bytes that the disk reads in a second (`flashrt probe --read-test` measures it).
    #[arg(long, value_name = "SIZE", value_parser = output::parse_size)]
    disk_rate: u64,
    /// Microseconds that a layer with a missing expert waits besides its bytes.
    #[arg(long, value_name = "US")]
    latency_us: f64,
    /// Milliseconds of a decode step with every expert resident.
    #[arg(long, value_name = "MS")]
    step_ms: f64,
    /// Decode steps before counting begins.
    #[arg(long, default_value_t = 32)]
    warm_up: usize,
    #[command(flatten)]
    synthetic: SyntheticArgs,
    /// Write the trace that is played to this file, which must not exist.
    #[arg(long, value_name = "FILE")]
    write_trace: Option<PathBuf>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// How a trace is made. Its router is synthetic: docs/streamer.md says what it is fitted to.
#[derive(clap::Args)]
#[group(id = "synthetic")]
struct SyntheticArgs {
    /// Layers with routed experts, when neither --trace nor --model says it.
    #[arg(long, default_value_t = Synthetic::default().layers)]
    layers: u32,
    /// Experts of a layer, likewise.
    #[arg(long, default_value_t = Synthetic::default().experts)]
    experts: u32,
    /// Of them, how many a token uses, likewise.
    #[arg(long, default_value_t = Synthetic::default().used)]
    used: u32,
    /// Tokens of a prompt before the text.
    #[arg(long, default_value_t = 0)]
    prompt: u32,
    /// Tokens to decode.
    #[arg(long, default_value_t = 256)]
    tokens: u32,
    /// Share of the experts that are drawn by how long ago they were used; the others by their rank.
    #[arg(long, default_value_t = Synthetic::default().locality)]
    locality: f64,
    /// Ages are drawn with the probability 1 - (1 + age / reach)^-tail.
    #[arg(long, default_value_t = Synthetic::default().reach)]
    reach: f64,
    /// See --reach.
    #[arg(long, default_value_t = Synthetic::default().tail)]
    tail: f64,
    /// Ranks are drawn with the weight rank^-skew.
    #[arg(long, default_value_t = Synthetic::default().skew)]
    skew: f64,
    /// The same seed gives the same trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum PolicyName {
    Lru,
    Segmented,
}

/// Plays the trace with every number of slots and prints a line each.
pub fn run(args: Args) -> Result<()> {
    ensure!(args.disk_rate > 0, "a disk that reads nothing");
    ensure!(args.latency_us >= 0.0 && args.step_ms > 0.0, "times are positive");
    let model = args.model.as_deref().map(ModelSizes::open).transpose()?;
    let trace = match &args.trace {
        Some(path) => read(path)?,
        None => synthetic(&args.synthetic, model.as_ref()).trace()?,
    };
    if let Some(path) = &args.write_trace {
        let file = NewFile::create(path, false)?;
        let mut out = BufWriter::new(file.writer());
        trace.write(&mut out)?;
        std::io::Write::flush(&mut out)?;
        drop(out);
        file.commit()?;
    }
    let sizes = match (&model, args.bundle) {
        (Some(model), _) => model.bundles.clone(),
        (None, Some(bytes)) => vec![bytes; trace.head.layers as usize],
        (None, None) => bail!("name a --model, or the size of an expert with --bundle"),
    };
    ensure!(
        sizes.len() == trace.head.layers as usize,
        "the trace has {} layers with experts, the model {}",
        trace.head.layers,
        sizes.len()
    );
    let machine = Machine {
        bytes_per_second: args.disk_rate as f64,
        latency_seconds: args.latency_us * 1e-6,
        step_seconds: args.step_ms * 1e-3,
    };
    let policies = match args.policy {
        None => vec![("lru", Policy::Lru), ("segmented", Policy::Segmented)],
        Some(PolicyName::Lru) => vec![("lru", Policy::Lru)],
        Some(PolicyName::Segmented) => vec![("segmented", Policy::Segmented)],
    };
    let all = u64::from(trace.head.layers) * u64::from(trace.head.experts);
    let mut rows = Vec::new();
    let mut json = Vec::new();
    for text in &args.slots {
        let share = share(text, all)?;
        let groups = groups(&sizes, trace.head.experts, share);
        let slots: usize = groups.iter().map(|g| g.slots).sum();
        for (name, policy) in &policies {
            let out =
                play(&trace, &groups, *policy, &machine, args.warm_up).with_context(|| format!("with {text} slots"))?;
            let mib = out.bytes as f64 / out.tokens as f64 / f64::from(1 << 20);
            rows.push([
                slots.to_string(),
                format!("{:.1} %", 100.0 * slots as f64 / all as f64),
                (*name).to_owned(),
                format!("{:.1} %", 100.0 * out.hit_rate()),
                format!("{mib:.1}"),
                format!("{:.2}", out.tokens_per_second()),
            ]);
            json.push(
                serde_json::json!({"slots": slots, "policy": name, "hit_rate": out.hit_rate(),
                "tokens_per_second": out.tokens_per_second(), "counts": out}),
            );
        }
    }
    if args.json {
        let report = serde_json::json!({"schema": 1, "simulated": true, "trace": trace.head, "steps": trace.steps.len(),
            "disk_bytes_per_second": args.disk_rate, "latency_us": args.latency_us, "step_ms": args.step_ms,
            "warm_up": args.warm_up, "results": json});
        return output::print(&format!("{report:#}\n"));
    }
    let head = &trace.head;
    let table = output::table(["slots", "of all", "policy", "hits", "MiB/token", "tokens/s"], &rows);
    output::print(&format!(
        "simulated: {} steps, {} layers with {} experts, {} used ({})\n{table}",
        trace.steps.len(),
        head.layers,
        head.experts,
        head.used,
        head.source
    ))
}

/// What a model's header says of its experts.
struct ModelSizes {
    experts: u32,
    used: u32,
    bundles: Vec<u64>,
}

impl ModelSizes {
    fn open(path: &Path) -> Result<ModelSizes> {
        let model = Model::open(path)?;
        let layers = model.experts()?;
        let shape = ggml_flashrt::stream::shape::Shape::of(model.header())?;
        let experts = layers[0].number;
        ensure!(
            layers.iter().all(|l| l.number == experts),
            "{}: the layers differ in their number of experts",
            path.display()
        );
        Ok(ModelSizes {
            experts: u32::try_from(experts)?,
            used: u32::try_from(shape.experts_used)?,
            bundles: layers.iter().map(|l| l.bundle_bytes()).collect(),
        })
    }
}

fn synthetic(args: &SyntheticArgs, model: Option<&ModelSizes>) -> Synthetic {
    Synthetic {
        layers: model.map_or(args.layers, |m| m.bundles.len() as u32),
        experts: model.map_or(args.experts, |m| m.experts),
        used: model.map_or(args.used, |m| m.used),
        prompt: args.prompt,
        tokens: args.tokens,
        locality: args.locality,
        reach: args.reach,
        tail: args.tail,
        skew: args.skew,
        seed: args.seed,
    }
}

fn read(path: &Path) -> Result<Trace> {
    let name = || path.display().to_string();
    let file = BufReader::new(File::open(path).with_context(name)?);
    let gz = path.extension().is_some_and(|e| e == "gz");
    let plain: Box<dyn BufRead> = if gz {
        Box::new(BufReader::new(MultiGzDecoder::new(file)))
    } else {
        Box::new(file)
    };
    Trace::read(plain).with_context(name)
}

/// `25%` or a number of slots, as a share of all experts.
fn share(text: &str, all: u64) -> Result<f64> {
    let share = match text.strip_suffix('%') {
        Some(percent) => percent.parse::<f64>().map(|p| p / 100.0).ok(),
        None => text.parse::<u64>().map(|n| n as f64 / all as f64).ok(),
    };
    let share = share.with_context(|| format!("{text:?} is no number of slots and no share"))?;
    ensure!(share > 0.0 && share <= 1.0, "{text}: there are {all} experts");
    Ok(share)
}

/// Layers by the size of their experts, each with its share of slots.
fn groups(sizes: &[u64], experts: u32, share: f64) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (layer, &bytes) in sizes.iter().enumerate() {
        match groups.iter_mut().find(|g| g.bytes == bytes) {
            Some(group) => group.layers.push(layer as u32),
            None => groups.push(Group {
                layers: vec![layer as u32],
                bytes,
                slots: 0,
            }),
        }
    }
    for group in &mut groups {
        let all = group.layers.len() as f64 * f64::from(experts);
        group.slots = (all * share).round() as usize;
    }
    groups
}
