//! How many experts fit: what is there, less everything else that must fit too, each thing once.
//!
//! Nothing here is measured on a machine; it is a sum over the model's metadata, so it is made before anything is loaded. What
//! does not fit is refused with the sum. There is no "unlimited", and a setting can only lower what the sum allows.

use super::shape::{Cache, Shape, ShapeError};
use super::source::{expert_tensor, LayerExperts, Model, SourceError};
use serde::Serialize;

const MIB: u64 = 1 << 20;

/// Memory that a process may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Available {
    /// An integrated GPU: one memory for both, counted once.
    Shared(u64),
    /// A GPU with memory of its own.
    Separate {
        /// Free on the GPU.
        device: u64,
        /// Usable on the host.
        host: u64,
    },
}

/// Which memory something takes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Pool {
    Device,
    Host,
    Shared,
}

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request<'m> {
    /// How the context is set up.
    pub cache: Cache,
    /// Most bytes of slots; none: what fits.
    pub slots: Option<u64>,
    /// Other files that are resident: vision tower, draft model. A file with attention layers gets a KV cache too.
    pub residents: Vec<(String, &'m Model)>,
    /// State beside the KV cache, where the model has one and it is known from elsewhere.
    pub state: Option<u64>,
    /// Least that is left to the system; a smaller number than [`reserve`] does not count.
    pub reserve: u64,
    /// Scratch memory of the windows' kernels.
    pub scratch: u64,
    /// Reads in flight.
    pub reads: u64,
    /// Bytes of one read.
    pub piece: u64,
}

/// Left to the system, which grows while a model runs: a twentieth, at least 512 MiB. A choice, not a measurement.
pub fn reserve(available: u64) -> u64 {
    (available / 20).max(512 * MIB)
}

/// For what driver and ggml take unasked: context, module images, pools, rounding. A choice, not a measurement.
pub const ALLOWANCE: u64 = 512 * MIB;
/// ggml-cuda aligns tensors in a buffer to this.
const TENSOR_ALIGN: u64 = 128;

/// A thing that takes memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What.
    pub name: String,
    /// From which memory.
    pub pool: Pool,
    /// How much.
    pub bytes: u64,
}

/// Layers whose experts have one layout, and the slots that they share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Class {
    /// Numbers of the layers.
    pub layers: Vec<u32>,
    /// Bytes of one expert.
    pub bundle_bytes: u64,
    /// Experts of all the layers.
    pub experts: u64,
    /// Slots one step needs.
    pub needed: u64,
    /// Slots there are.
    pub slots: u64,
}

/// The sum, and what it leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// What there is, by memory.
    pub available: Vec<Item>,
    /// What is taken before the slots.
    pub items: Vec<Item>,
    /// What is left for slots: 0 when the items alone are too much.
    pub left_bytes: u64,
    /// What may be used of it: a setting can only lower it.
    pub slot_bytes_allowed: u64,
    /// What one step needs.
    pub step_bytes: u64,
    /// What holding every expert would take.
    pub all_bytes: u64,
    /// Slots by layout.
    pub classes: Vec<Class>,
}

/// Why there is no budget.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum BudgetError {
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error("the model names experts, but not how many a token uses")]
    Used,
    #[error("a context of 0 tokens, sequences or a ubatch of 0")]
    Empty,
    #[error("0 bytes of slots: leave the setting out for as many as fit")]
    Zero,
    #[error("the {pool} memory is too small by {missing} bytes before there is a single slot")]
    Pool {
        pool: &'static str,
        missing: u64,
        budget: Box<Budget>,
    },
    #[error("{slots} slots in {allowed} bytes, but one step needs {needed} in {needed_bytes} bytes")]
    Slots {
        slots: u64,
        needed: u64,
        allowed: u64,
        needed_bytes: u64,
        budget: Box<Budget>,
    },
}

impl BudgetError {
    /// The sum that did not work out.
    pub fn budget(&self) -> Option<&Budget> {
        match self {
            BudgetError::Pool { budget, .. } | BudgetError::Slots { budget, .. } => Some(budget),
            _ => None,
        }
    }
}

impl Budget {
    /// Slots of all layers.
    pub fn slots(&self) -> u64 {
        self.classes.iter().map(|c| c.slots).sum()
    }

    /// Slots one step needs.
    pub fn needed(&self) -> u64 {
        self.classes.iter().map(|c| c.needed).sum()
    }

    /// Makes the sum for a model.
    pub fn plan(model: &Model, request: &Request, available: Available) -> Result<Budget, BudgetError> {
        let cache = &request.cache;
        if cache.context == 0 || cache.sequences == 0 || cache.ubatch == 0 {
            return Err(BudgetError::Empty);
        }
        if request.slots == Some(0) {
            return Err(BudgetError::Zero);
        }
        let layers = model.experts()?;
        let shape = Shape::of(model.header())?;
        if shape.experts_used == 0 {
            return Err(BudgetError::Used);
        }
        let (device, host) = match available {
            Available::Shared(_) => (Pool::Shared, Pool::Shared),
            Available::Separate { .. } => (Pool::Device, Pool::Host),
        };
        let mut items = Vec::new();
        let mut add = |name: &str, pool, bytes| {
            items.push(Item {
                name: name.to_owned(),
                pool,
                bytes,
            });
        };
        let system = match available {
            Available::Shared(bytes) | Available::Separate { host: bytes, .. } => bytes,
        };
        add("left to the system", host, request.reserve.max(reserve(system)));
        add("driver and allocators", device, ALLOWANCE);
        let (on_device, on_host) = dense(model);
        add("weights besides the routed experts", device, on_device);
        add("embeddings on the host", host, on_host);
        add("KV cache", device, kv(&shape, cache)?);
        match (request.state, &shape.state) {
            (Some(bytes), _) => add("state beside the KV cache, as stated", device, bytes),
            (None, Some(key)) => {
                return Err(ShapeError::State {
                    arch: shape.arch.clone(),
                    key: key.clone(),
                }
                .into())
            }
            (None, None) => {}
        }
        add("tensors of a ubatch", device, shape.transient_bytes(cache)?);
        for (name, resident) in &request.residents {
            let bytes = resident.tensors().map(|(_, t)| aligned(t.bytes)).sum();
            add(&format!("{name}: weights"), device, bytes);
            if let Some(bytes) = resident_kv(resident, cache)? {
                add(&format!("{name}: KV cache and tensors"), device, bytes);
            }
        }
        add("scratch of the windows' kernels", device, request.scratch);
        let in_flight = request.reads.saturating_mul(request.piece);
        add("reads in flight", host, in_flight);
        add("pinned staging: read, not copied yet", host, in_flight);

        let classes = classes(&layers, shape.experts_used.saturating_mul(cache.sequences));
        let total = |f: &dyn Fn(&Class) -> u64| classes.iter().map(|c| c.bundle_bytes.saturating_mul(f(c))).sum();
        let mut budget = Budget {
            available: available.items(),
            items,
            left_bytes: 0,
            slot_bytes_allowed: 0,
            step_bytes: total(&|c| c.needed),
            all_bytes: total(&|c| c.experts),
            classes,
        };
        for (pool, name) in [
            (Pool::Host, "host's"),
            (Pool::Device, "GPU's"),
            (Pool::Shared, "shared"),
        ] {
            let there = budget.available.iter().find(|i| i.pool == pool).map(|i| i.bytes);
            let Some(there) = there else { continue };
            let taken = budget.items.iter().filter(|i| i.pool == pool).map(|i| i.bytes);
            let taken = taken.fold(0u64, u64::saturating_add);
            if taken > there {
                return Err(BudgetError::Pool {
                    pool: name,
                    missing: taken - there,
                    budget: budget.into(),
                });
            }
            if pool == device {
                budget.left_bytes = there - taken;
            }
        }
        budget.slot_bytes_allowed = request.slots.unwrap_or(u64::MAX).min(budget.left_bytes);
        if budget.step_bytes > budget.slot_bytes_allowed {
            return Err(BudgetError::Slots {
                slots: fill(&budget.classes, budget.slot_bytes_allowed),
                needed: budget.needed(),
                allowed: budget.slot_bytes_allowed,
                needed_bytes: budget.step_bytes,
                budget: budget.into(),
            });
        }
        spread(&mut budget.classes, budget.slot_bytes_allowed);
        Ok(budget)
    }
}

impl Available {
    fn items(self) -> Vec<Item> {
        let item = |name: &str, pool, bytes| Item {
            name: name.to_owned(),
            pool,
            bytes,
        };
        match self {
            Available::Shared(bytes) => vec![item("memory, shared by GPU and system", Pool::Shared, bytes)],
            Available::Separate { device, host } => {
                vec![
                    item("GPU memory", Pool::Device, device),
                    item("host memory", Pool::Host, host),
                ]
            }
        }
    }
}

fn aligned(bytes: u64) -> u64 {
    bytes.saturating_add(TENSOR_ALIGN - 1) / TENSOR_ALIGN * TENSOR_ALIGN
}

/// Bytes of everything but the routed experts, on the device and on the host. llama.cpp looks embeddings up on the host; as the
/// output matrix, where the model has no other, they are on the device as well.
fn dense(model: &Model) -> (u64, u64) {
    let tied = !model.tensors().any(|(_, t)| t.name == "output.weight");
    let (mut device, mut host) = (0, 0);
    for (_, tensor) in model.tensors() {
        if expert_tensor(&tensor.name).is_some() {
            continue;
        }
        let embeddings = tensor.name == "token_embd.weight";
        if embeddings {
            host += aligned(tensor.bytes);
        }
        if !embeddings || tied {
            device += aligned(tensor.bytes);
        }
    }
    (device, host)
}

fn kv(shape: &Shape, cache: &Cache) -> Result<u64, BudgetError> {
    Ok(shape.kv_bytes(cache)?)
}

/// A draft model decodes the same sequences; a vision tower has no vocabulary and keeps nothing.
fn resident_kv(model: &Model, cache: &Cache) -> Result<Option<u64>, BudgetError> {
    if !model.tensors().any(|(_, t)| t.name == "token_embd.weight") {
        return Ok(None);
    }
    let shape = Shape::of(model.header())?;
    if let Some(key) = &shape.state {
        return Err(ShapeError::State {
            arch: shape.arch.clone(),
            key: key.clone(),
        }
        .into());
    }
    Ok(Some(kv(&shape, cache)?.saturating_add(shape.transient_bytes(cache)?)))
}

/// Layers by layout. A step touches `used` experts of each layer at most.
fn classes(layers: &[LayerExperts], used: u64) -> Vec<Class> {
    let mut classes: Vec<(Vec<_>, Class)> = Vec::new();
    for layer in layers {
        let layout = layer.layout();
        let place = classes
            .iter()
            .position(|(known, _)| *known == layout)
            .unwrap_or_else(|| {
                let class = Class {
                    layers: Vec::new(),
                    bundle_bytes: layer.bundle_bytes(),
                    experts: 0,
                    needed: 0,
                    slots: 0,
                };
                classes.push((layout, class));
                classes.len() - 1
            });
        let class = &mut classes[place].1;
        class.layers.push(layer.layer);
        class.experts += layer.number;
        class.needed += used.min(layer.number);
    }
    classes.into_iter().map(|(_, class)| class).collect()
}

/// Slots that would fit if they were handed out layout by layout; for the message only.
fn fill(classes: &[Class], bytes: u64) -> u64 {
    let mut left = bytes;
    let mut slots = 0;
    for c in classes {
        let n = (left / c.bundle_bytes).min(c.needed);
        left -= n * c.bundle_bytes;
        slots += n;
    }
    slots
}

/// The same share of its experts for every layout, beyond what a step needs; what is left over goes to the layouts in order.
fn spread(classes: &mut [Class], bytes: u64) {
    let more = |c: &Class| u128::from(c.experts - c.needed);
    let step: u64 = classes.iter().map(|c| c.needed * c.bundle_bytes).sum();
    let mut left = bytes - step;
    let wanted: u128 = classes.iter().map(|c| more(c) * u128::from(c.bundle_bytes)).sum();
    for c in classes.iter_mut() {
        let share = match wanted {
            0 => 0,
            _ => more(c) * u128::from(bytes - step) / wanted,
        };
        let extra = share.min(more(c)) as u64;
        c.slots = c.needed + extra;
        left -= extra * c.bundle_bytes;
    }
    for c in classes.iter_mut() {
        let extra = (left / c.bundle_bytes).min(c.experts - c.slots);
        c.slots += extra;
        left -= extra * c.bundle_bytes;
    }
}
