//! `flashrt budget`: how many experts of a model fit, with the sum.

use crate::output;
use anyhow::{anyhow, Context, Result};
use ggml_flashrt::graph::DType;
use ggml_flashrt::probe::{Options, Probe, Root};
use ggml_flashrt::stream::budget::{Available, Budget, BudgetError, Pool, Request};
use ggml_flashrt::stream::shape::Cache;
use ggml_flashrt::stream::source::Model;
use ggml_flashrt::window::settings::Settings;
use std::path::PathBuf;

/// Arguments of `flashrt budget`.
#[derive(clap::Args)]
pub struct Args {
    /// Model, or the first of its shards.
    model: PathBuf,
    /// Tokens of context, of all sequences together.
    #[arg(long = "ctx", value_name = "TOKENS")]
    context: u64,
    /// Most memory for slots, for example 4GiB; `auto`: what fits. It can only lower what fits.
    #[arg(long, default_value = "auto", value_name = "SIZE", value_parser = budget_size)]
    budget: Limit,
    /// Sequences at the same time.
    #[arg(long, default_value_t = 1)]
    sequences: u64,
    /// Tokens that are computed at once.
    #[arg(long, default_value_t = 512)]
    ubatch: u64,
    /// Type of keys in the cache.
    #[arg(long, default_value = "f16", value_parser = dtype)]
    type_k: DType,
    /// Type of values in the cache.
    #[arg(long, default_value = "f16", value_parser = dtype)]
    type_v: DType,
    /// Flash attention is off.
    #[arg(long)]
    no_flash_attention: bool,
    /// Another file that is resident: vision tower, draft model. May be repeated.
    #[arg(long = "with", value_name = "FILE")]
    with: Vec<PathBuf>,
    /// State that the model keeps beside its KV cache, where flashrt cannot size it.
    #[arg(long, value_name = "SIZE", value_parser = output::parse_size)]
    state: Option<u64>,
    /// Leave the system more than flashrt would.
    #[arg(long, default_value = "0", value_name = "SIZE", value_parser = output::parse_size)]
    reserve: u64,
    /// Reads in flight.
    #[arg(long, default_value_t = 8)]
    reads: u64,
    /// Plan for a machine with so much memory instead of this one: the GPU shares it with the system, unless --host-available.
    #[arg(long, value_name = "SIZE", value_parser = output::parse_size)]
    available: Option<u64>,
    /// With --available, which is then the GPU's own memory: memory of the host.
    #[arg(long, value_name = "SIZE", value_parser = output::parse_size, requires = "available")]
    host_available: Option<u64>,
    /// GPU to plan for.
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Most bytes of slots, if there is such a setting.
#[derive(Clone, Copy)]
struct Limit(Option<u64>);

fn budget_size(text: &str) -> Result<Limit, String> {
    if text == "auto" {
        return Ok(Limit(None));
    }
    match output::parse_size(text)? {
        0 => Err("0 is no budget: `auto` takes what fits".to_owned()),
        bytes => Ok(Limit(Some(bytes))),
    }
}

fn dtype(text: &str) -> Result<DType, String> {
    DType::from_name(text).ok_or_else(|| "no type of ggml's".to_owned())
}

/// Prints the sum; fails with it when the model does not fit.
pub fn run(args: Args) -> Result<()> {
    let model = Model::open(&args.model)?;
    let others: Vec<(String, Model)> = args
        .with
        .iter()
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((name, Model::open(path)?))
        })
        .collect::<Result<_>>()?;
    let available = match (args.available, args.host_available) {
        (Some(bytes), None) => Available::Shared(bytes),
        (Some(device), Some(host)) => Available::Separate { device, host },
        (None, _) => observed(args.device)?,
    };
    let request = Request {
        cache: Cache {
            context: args.context,
            sequences: args.sequences,
            ubatch: args.ubatch,
            type_k: args.type_k,
            type_v: args.type_v,
            flash_attention: !args.no_flash_attention,
        },
        slots: args.budget.0,
        residents: others.iter().map(|(name, model)| (name.clone(), model)).collect(),
        state: args.state,
        reserve: args.reserve,
        scratch: Settings::from_env().scratch_limit as u64,
        reads: args.reads,
        piece: PIECE,
    };
    let result = Budget::plan(&model, &request, available);
    let budget = match &result {
        Ok(budget) => Some(budget),
        Err(error) => error.budget(),
    };
    if let Some(budget) = budget {
        output::print(&if args.json {
            let fits = result.is_ok();
            let all = serde_json::json!({"schema": SCHEMA, "fits": fits, "slots": budget.slots(), "needed": budget.needed(),
                "budget": budget});
            format!("{all:#}\n")
        } else {
            text(budget, result.is_ok())
        })?;
    }
    match result {
        Ok(_) => Ok(()),
        Err(error @ (BudgetError::Pool { .. } | BudgetError::Slots { .. })) => Err(error).context("does not fit"),
        Err(error) => Err(error).with_context(|| args.model.display().to_string()),
    }
}

/// Version of the JSON.
const SCHEMA: u32 = 1;
/// Bytes of one read of the streamer.
const PIECE: u64 = 1 << 20;

/// What this machine has now. What is not known is not assumed.
fn observed(device: i32) -> Result<Available> {
    let probe = Probe::take_memory(&Root::live(), Options::default());
    let unknown = |why: String| anyhow!("{why}: plan for a machine with --available SIZE");
    let devices = probe.cuda.devices.get().map_err(unknown)?;
    let found = devices.iter().find(|d| d.ordinal == device);
    let found = found.ok_or_else(|| unknown(format!("there is no device {device}")))?;
    let host = *probe.memory.usable_bytes.get().map_err(unknown)?;
    if found.integrated {
        return Ok(Available::Shared(host));
    }
    let device = *found.free_bytes.get().map_err(unknown)?;
    Ok(Available::Separate { device, host })
}

fn text(budget: &Budget, fits: bool) -> String {
    let mut rows: Vec<[String; 4]> = Vec::new();
    let mut row = |sign: &str, name: &str, pool: Pool, bytes: u64| {
        let pool = match pool {
            Pool::Device => "GPU",
            Pool::Host => "host",
            Pool::Shared => "shared",
        };
        rows.push([
            format!("{sign} {bytes:>15}"),
            output::size(bytes),
            pool.to_owned(),
            name.to_owned(),
        ]);
    };
    for item in &budget.available {
        row(" ", &item.name, item.pool, item.bytes);
    }
    for item in budget.items.iter().filter(|i| i.bytes > 0) {
        row("-", &item.name, item.pool, item.bytes);
    }
    let slots_pool = match budget.available[0].pool {
        Pool::Host => Pool::Device,
        pool => pool,
    };
    row("=", "left for slots", slots_pool, budget.left_bytes);
    if budget.slot_bytes_allowed < budget.left_bytes {
        row(" ", "allowed by the setting", slots_pool, budget.slot_bytes_allowed);
    }
    row(" ", "one step needs", slots_pool, budget.step_bytes);
    row(" ", "all experts would take", slots_pool, budget.all_bytes);
    let mut out = output::table(["          bytes", "", "memory", ""], &rows);
    if fits {
        let experts: u64 = budget.classes.iter().map(|c| c.experts).sum();
        let slots = budget.slots();
        out += &format!(
            "\n{slots} slots for {experts} experts ({:.1} %); one step needs {}\n",
            100.0 * slots as f64 / experts as f64,
            budget.needed()
        );
        let rows: Vec<[String; 4]> = budget
            .classes
            .iter()
            .map(|c| {
                [
                    c.layers.len().to_string(),
                    c.bundle_bytes.to_string(),
                    c.experts.to_string(),
                    c.slots.to_string(),
                ]
            })
            .collect();
        out += &output::table(["layers", "bytes of an expert", "experts", "slots"], &rows);
    }
    out
}
