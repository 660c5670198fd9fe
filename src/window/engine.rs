//! The engine behind the hook: plans by graph, launches by node, latches errors, counts.

use super::hand_off::{Edge, Form, HandOff};
use super::layout::Layout;
use super::match_graph::{match_graph, Matched};
use super::settings::{Settings, StatsTarget};
use super::stats::Stats;
use super::{KernelCall, Resources, WINDOWS};
use crate::cache::{Arena, BlockSource};
use crate::graph::dump::GraphRecord;
use crate::graph::host::{to_stderr, LogLevel};
use crate::graph::{GraphRef, HostView, Op};
use crate::kernel::{CudaError, Launch};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How an evaluation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvalStatus {
    /// Everything that was claimed was launched.
    Ok,
    /// A launch failed after others of its graph had been made.
    Failed,
}

/// What the engine needs of the GPU. Tests put their own behind it.
pub trait Backend: BlockSource + Send + Sync {
    /// Launches one kernel.
    fn launch(&self, call: &KernelCall, launch: Launch) -> Result<(), CudaError>;
    /// Runs every kernel once on the device and compares.
    fn self_check(&self, device: i32) -> Result<(), String>;
}

/// The kernels of this build.
struct Cuda;

impl BlockSource for Cuda {
    fn allocate(&self, bytes: usize, zeroed: usize, stream: usize) -> Result<usize, String> {
        crate::kernel::cudart::allocate(bytes, zeroed, stream).map_err(|e| e.to_string())
    }
    fn free(&self, address: usize) {
        crate::kernel::cudart::free(address);
    }
}

impl Backend for Cuda {
    fn launch(&self, call: &KernelCall, launch: Launch) -> Result<(), CudaError> {
        call.launch(launch)
    }
    fn self_check(&self, device: i32) -> Result<(), String> {
        crate::kernel::self_check(device)
    }
}

thread_local! {
    /// The window whose code is running, so that a panic switches off no more than that.
    static IN_WINDOW: Cell<Option<usize>> = const { Cell::new(None) };
    /// The context of the evaluation that this thread is in.
    static CURRENT: RefCell<Option<(usize, Arc<Mutex<Context>>)>> = const { RefCell::new(None) };
}

/// Marks the window whose code runs next.
pub(super) fn enter_window(window: Option<usize>) {
    IN_WINDOW.set(window);
}

/// A site of a plan, ready to launch.
struct PlannedSite {
    window: usize,
    start: usize,
    len: usize,
    calls: Vec<KernelCall>,
    /// The hand-off it reads, by index, and what is launched where nobody has made it.
    input: Option<(usize, Unmade)>,
    /// Hand-offs that it makes, by index.
    makes: Vec<usize>,
}

/// What a reader does about a hand-off that was not made: its producer failed, or stock took the producer's nodes together with
/// one before them and nobody was asked.
enum Unmade {
    /// Makes it from the f32 form, which stock has written then.
    Convert(Box<KernelCall>),
    /// Reads the f32 form: these are its calls.
    Without(Vec<KernelCall>),
}

/// A hand-off in the evaluation that is going on.
struct PlannedHandOff {
    made: bool,
    /// Its producer writes no f32 form.
    only_form: bool,
}

/// What to do with one graph.
struct Plan {
    uid: u64,
    /// The nodes in order: a plan is for exactly these.
    nodes: Vec<usize>,
    /// Contents of the nodes, for graphs without a uid.
    contents: Vec<u64>,
    sites: Vec<PlannedSite>,
    hand_offs: Vec<PlannedHandOff>,
    /// By node index: the site that starts there, plus one.
    starts: Vec<u32>,
    /// By window: the sites that an evaluation runs. At first all of the plan, then those that were launched when last asked, which
    /// is what a replayed CUDA graph does.
    counts: Vec<u64>,
    /// By window: the sites launched in this evaluation, once the host has asked about a node.
    launched: Option<Vec<u64>>,
    generation: u64,
    /// The first launch of an evaluation waits for everything before it: see [`super::Constants`].
    waits_at_start: bool,
    /// Something was launched in this evaluation.
    started: bool,
}

/// State of one backend context.
struct Context {
    arena: Arena,
    /// Most recently used last.
    plans: VecDeque<Plan>,
    /// The newest plan is for the evaluation that is going on.
    active: bool,
    failure: Option<String>,
    explained: HashSet<String>,
}

impl Context {
    fn new(scratch_limit: usize) -> Context {
        Context {
            arena: Arena::new(scratch_limit),
            plans: VecDeque::new(),
            active: false,
            failure: None,
            explained: HashSet::new(),
        }
    }
}

/// Plans a context keeps. A server has a handful of graph shapes; the oldest makes room.
const MAX_PLANS: usize = 32;

struct Dump {
    file: std::fs::File,
    left: usize,
    seen: HashSet<u64>,
}

/// Matches, plans and launches. One for the process.
pub struct Engine {
    settings: Settings,
    backend: Box<dyn Backend>,
    contexts: Mutex<HashMap<usize, Arc<Mutex<Context>>>>,
    stats: Mutex<Stats>,
    off: Mutex<Vec<bool>>,
    devices: Mutex<HashMap<i32, Result<(), String>>>,
    dump: Mutex<Option<Dump>>,
    messages: Mutex<Vec<(LogLevel, String)>>,
    /// When the statistics were last written to their file.
    written: Mutex<Option<Instant>>,
    disabled: AtomicBool,
    /// Counts the windows switched off while running: plans of an earlier generation may hold them.
    generation: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic was caught at the boundary and its window switched off; what it held is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static GLOBAL: OnceLock<Engine> = OnceLock::new();

impl Engine {
    /// The process's engine, with settings from the environment.
    pub fn global() -> &'static Engine {
        GLOBAL.get_or_init(|| {
            let engine = Engine::new(Settings::from_env(), Box::new(Cuda));
            if engine.settings.stats.is_some() {
                // SAFETY: registers a plain function.
                unsafe { libc::atexit(print_stats) };
            }
            engine
        })
    }

    /// An engine of one's own.
    pub fn new(settings: Settings, backend: Box<dyn Backend>) -> Engine {
        let mut messages: Vec<_> = settings.warnings.iter().map(|w| (LogLevel::Warn, w.clone())).collect();
        let dump =
            settings
                .dump
                .as_ref()
                .filter(|_| settings.dump_max > 0)
                .and_then(|path| match std::fs::File::create(path) {
                    Ok(file) => Some(Dump {
                        file,
                        left: settings.dump_max,
                        seen: HashSet::new(),
                    }),
                    Err(e) => {
                        let text = format!(
                            "GGML_FLASHRT_DUMP: cannot create {}: {e}; nothing is recorded",
                            path.display()
                        );
                        messages.push((LogLevel::Warn, text));
                        None
                    }
                });
        let mut stats = Stats::default();
        if settings.disabled {
            stats.disabled = Some("GGML_FLASHRT_DISABLE is set".to_owned());
        }
        Engine {
            off: Mutex::new(settings.off.clone()),
            disabled: settings.disabled.into(),
            generation: AtomicU64::new(0),
            settings,
            backend,
            contexts: Mutex::default(),
            stats: Mutex::new(stats),
            devices: Mutex::default(),
            dump: Mutex::new(dump),
            messages: Mutex::new(messages),
            written: Mutex::default(),
        }
    }

    /// Is everything off?
    pub fn is_disabled(&self) -> bool {
        self.disabled.load(Relaxed)
    }

    /// Switches everything off, or, after a panic in the code of a window, that window.
    pub fn disable(&self, reason: &str) {
        match IN_WINDOW.take() {
            Some(window) => self.switch_off(window, reason),
            None => {
                self.disabled.store(true, Relaxed);
                lock(&self.stats).disabled = Some(reason.to_owned());
                lock(&self.messages).push((LogLevel::Warn, format!("off: {reason}")));
            }
        }
    }

    fn switch_off(&self, window: usize, reason: &str) {
        let was_off = std::mem::replace(&mut lock(&self.off)[window], true);
        if !was_off {
            let text = format!("window {} is switched off: {reason}", WINDOWS[window].name);
            lock(&self.messages).push((LogLevel::Warn, text));
            self.generation.fetch_add(1, Relaxed);
        }
    }

    /// Start of an evaluation: finds or makes the plan.
    pub fn eval_begin(&self, host: &HostView, graph: GraphRef) {
        enter_window(None);
        self.flush_messages(host);
        if host.fusion_off() || graph.is_empty() {
            CURRENT.take();
            return;
        }
        self.record(host, graph);
        if self.is_disabled() || host.capturing() || !self.device_is_fit(host) {
            CURRENT.take();
            self.flush_messages(host);
            return;
        }
        let limit = self.settings.scratch_limit;
        let shared = Arc::clone(
            lock(&self.contexts)
                .entry(host.context())
                .or_insert_with(|| Arc::new(Mutex::new(Context::new(limit)))),
        );
        {
            let mut context = lock(&shared);
            context.failure = None;
            context.active = self.activate_plan(&mut context, host, graph);
        }
        self.flush_messages(host);
        CURRENT.set(Some((host.context(), shared)));
    }

    /// Is this thread in an evaluation of this context in which something may be fused?
    pub fn is_evaluating(&self, host: &HostView) -> bool {
        CURRENT.with_borrow(|current| current.as_ref().is_some_and(|(key, _)| *key == host.context()))
    }

    /// Nodes done from node `i` on; 0: not ours.
    pub fn fuse(&self, host: &HostView, graph: GraphRef, i: usize) -> usize {
        CURRENT.with_borrow(|current| match current {
            Some((key, shared)) if *key == host.context() => self.fuse_in(&mut lock(shared), host, graph, i),
            _ => 0,
        })
    }

    fn fuse_in(&self, context: &mut Context, host: &HostView, graph: GraphRef, i: usize) -> usize {
        let Context {
            plans, active, failure, ..
        } = context;
        let Some(plan) = plans.back_mut().filter(|_| *active) else {
            return 0;
        };
        if failure.is_some() {
            // The rest of the graph would run on results that are not there, on a stream whose capture may be broken.
            return graph.len() - i;
        }
        let launched = plan.launched.get_or_insert_with(|| vec![0; WINDOWS.len()]);
        let Some(index) = plan.starts.get(i).and_then(|&s| (s as usize).checked_sub(1)) else {
            return 0;
        };
        let site = &plan.sites[index];
        // The host may have put nodes into another order since the plan was made.
        let run = i..i + site.len;
        if graph.node_addresses().get(run.clone()) != plan.nodes.get(run) {
            return 0;
        }
        // What is to be launched before the site's own calls, and whether its input exists in no form that stock reads.
        let (convert, calls, bound) = match &site.input {
            None => (None, &site.calls, false),
            Some((h, _)) if plan.hand_offs[*h].made => (None, &site.calls, plan.hand_offs[*h].only_form),
            Some((_, Unmade::Convert(convert))) => (Some(&**convert), &site.calls, false),
            Some((_, Unmade::Without(calls))) => (None, calls, false),
        };
        enter_window(Some(site.window));
        for (n, call) in convert.into_iter().chain(calls).enumerate() {
            let launch = Launch {
                stream: host.stream(),
                pdl: i32::from(host.pdl() && (plan.started || !plan.waits_at_start)),
                sm_count: host.sm_count(),
                cc: host.cc(),
            };
            if let Err(e) = self.backend.launch(call, launch) {
                enter_window(None);
                let text = format!("{} at {:?}: {e}", WINDOWS[site.window].name, graph.node(i).name());
                let recoverable = n == 0 && !bound;
                let (window, len) = (site.window, site.len);
                if !recoverable {
                    *failure = Some(text.clone());
                }
                self.switch_off(window, &format!("launch failed: {text}"));
                return if recoverable { 0 } else { len };
            }
            plan.started = true;
        }
        enter_window(None);
        let (window, len) = (site.window, site.len);
        let converted = site.input.as_ref().filter(|_| convert.is_some()).map(|(h, _)| h);
        for &h in site.makes.iter().chain(converted) {
            plan.hand_offs[h].made = true;
        }
        launched[window] += 1;
        lock(&self.stats).windows[window].fired += 1;
        len
    }

    /// Corrects the count of an evaluation whose nodes were asked about: stock may have taken the first node of a site together with
    /// the node before it.
    fn count_launched(&self, plan: &mut Plan) {
        let Some(launched) = plan.launched.take() else { return };
        let mut stats = lock(&self.stats);
        for ((counters, counted), launched) in stats.windows.iter_mut().zip(&plan.counts).zip(&launched) {
            counters.evaluated = counters.evaluated + launched - counted;
        }
        plan.counts = launched;
    }

    /// End of an evaluation.
    pub fn eval_end(&self, host: &HostView) -> EvalStatus {
        let Some((_, shared)) = CURRENT.take().filter(|(key, _)| *key == host.context()) else {
            return EvalStatus::Ok;
        };
        let failure = {
            let mut context = lock(&shared);
            let active = std::mem::take(&mut context.active);
            if let Some(plan) = context.plans.back_mut().filter(|_| active) {
                self.count_launched(plan);
            }
            let failure = context.failure.take();
            if failure.is_some() {
                context.plans.pop_back();
            }
            failure
        };
        self.flush_messages(host);
        self.refresh_stats_file();
        match failure {
            None => EvalStatus::Ok,
            Some(text) => {
                host.log(LogLevel::Error, &format!("flashrt: this evaluation failed: {text}"));
                EvalStatus::Failed
            }
        }
    }

    /// Writes the statistics to their file, at most once in [`STATS_INTERVAL`]: a server that is killed leaves them too.
    fn refresh_stats_file(&self) {
        let Some(StatsTarget::File(path)) = &self.settings.stats else {
            return;
        };
        let mut written = lock(&self.written);
        if written.is_none_or(|at| at.elapsed() >= STATS_INTERVAL) {
            *written = Some(Instant::now());
            drop(written);
            write_stats(path, &self.stats());
        }
    }

    /// Will [`Engine::fuse`] surely take node `i`? No window yet takes nodes of which the host needs to know.
    pub fn takes(&self, _host: &HostView, _graph: GraphRef, _i: usize) -> bool {
        false
    }

    /// Should the host leave the order of nodes alone? Yes when QKV_GEMV takes the stretches that concurrent regions are
    /// made for. The answer comes from the structure alone: addresses and batch size are not looked at.
    pub fn graph_optimize(&self, host: &HostView, graph: GraphRef) -> bool {
        if self.is_disabled() || host.fusion_off() || lock(&self.off)[super::QKV_GEMV_INDEX] {
            return false;
        }
        let ops: Vec<Op> = graph.nodes().map(|t| graph.op(t)).collect();
        let pattern = (WINDOWS[super::QKV_GEMV_INDEX].pattern)();
        let mut found = false;
        for start in 0..ops.len() {
            if let Some(m) = super::pattern::find(pattern, graph, &ops, start) {
                if !["wq", "wk", "wv"].iter().all(|w| super::mat_vec::reads(m.tensor(w))) {
                    return false;
                }
                found = true;
            }
        }
        found
    }

    /// The context is gone, and with it everything made for it.
    pub fn context_free(&self, context: usize) {
        // A context freed while its thread ends has no current evaluation to leave.
        let _ = CURRENT.try_with(|current| current.borrow_mut().take_if(|(key, _)| *key == context));
        if let Some(shared) = lock(&self.contexts).remove(&context) {
            let arena = &mut lock(&shared).arena;
            lock(&self.stats).scratch_bytes -= arena.bytes() as u64;
            arena.clear(&*self.backend);
        }
    }

    /// Memory at these addresses is about to change owner: plans that mention it are forgotten.
    pub fn buffer_freed(&self, _device: i32, _base: usize, _size: usize) {
        // Plans hold addresses of tensors. A graph over new buffers is a new graph, but one without a uid could repeat
        // pointers: its contents are compared, and contents include addresses. So nothing stale can be found; dropping the
        // plans only keeps the cache from holding what can never match again.
        for context in lock(&self.contexts).values() {
            if let Ok(mut context) = context.try_lock() {
                if !context.active {
                    context.plans.clear();
                }
            }
        }
    }

    /// Counters as JSON.
    pub fn stats_json(&self) -> String {
        lock(&self.stats).to_json()
    }

    /// A copy of the counters.
    pub fn stats(&self) -> Stats {
        lock(&self.stats).clone()
    }

    /// Plans and arena bytes of a context.
    pub fn footprint(&self, context: usize) -> (usize, usize) {
        let contexts = lock(&self.contexts);
        contexts.get(&context).map_or((0, 0), |c| {
            let c = lock(c);
            (c.plans.len(), c.arena.bytes())
        })
    }

    fn flush_messages(&self, host: &HostView) {
        let messages = std::mem::take(&mut *lock(&self.messages));
        for (level, text) in messages {
            host.log(level, &format!("flashrt: {text}"));
        }
    }

    /// Runs the self-check of a device on first sight.
    fn device_is_fit(&self, host: &HostView) -> bool {
        let mut devices = lock(&self.devices);
        if let Some(verdict) = devices.get(&host.device()) {
            return verdict.is_ok();
        }
        let verdict = self.backend.self_check(host.device());
        let fit = verdict.is_ok();
        let text = match &verdict {
            Ok(()) => format!("device {}: ready ({})", host.device(), crate::kernel::archs()),
            Err(why) => format!("device {}: off, stock kernels run instead: {why}", host.device()),
        };
        if let Err(why) = &verdict {
            lock(&self.stats).disabled = Some(format!("device {}: {why}", host.device()));
        }
        lock(&self.messages).push((if fit { LogLevel::Info } else { LogLevel::Warn }, text));
        devices.insert(host.device(), verdict);
        fit
    }

    fn record(&self, host: &HostView, graph: GraphRef) {
        if self.settings.dump.is_none() {
            return;
        }
        let mut slot = lock(&self.dump);
        let Some(dump) = slot.as_mut() else { return };
        let record = GraphRecord::capture(*host, graph);
        if !dump.seen.insert(record.digest()) {
            return;
        }
        let written = writeln!(dump.file, "{}", record.to_json_line()).and_then(|()| dump.file.sync_data());
        dump.left -= 1;
        if let Err(e) = &written {
            lock(&self.messages).push((LogLevel::Warn, format!("GGML_FLASHRT_DUMP: {e}; recording ends")));
        }
        if written.is_err() || dump.left == 0 {
            *slot = None;
        }
    }

    /// Makes the plan of this graph the newest. False: there is none.
    fn activate_plan(&self, context: &mut Context, host: &HostView, graph: GraphRef) -> bool {
        let nodes = graph.node_addresses();
        let contents = if graph.uid() == 0 { contents(graph) } else { Vec::new() };
        let generation = self.generation.load(Relaxed);
        context.plans.retain(|p| p.generation == generation);
        let known = context
            .plans
            .iter()
            .position(|p| p.uid == graph.uid() && p.nodes == nodes && p.contents == contents);
        let plan = match known {
            Some(i) => context.plans.remove(i),
            None => self.make_plan(context, host, graph, contents),
        };
        let Some(mut plan) = plan else { return false };
        plan.started = false;
        plan.launched = None;
        for hand_off in &mut plan.hand_offs {
            hand_off.made = false;
        }
        let mut stats = lock(&self.stats);
        stats.evaluations += 1;
        for (counters, n) in stats.windows.iter_mut().zip(&plan.counts) {
            counters.evaluated += n;
        }
        while context.plans.len() >= MAX_PLANS {
            context.plans.pop_front();
        }
        context.plans.push_back(plan);
        true
    }

    fn make_plan(&self, context: &mut Context, host: &HostView, graph: GraphRef, contents: Vec<u64>) -> Option<Plan> {
        let off = lock(&self.off).clone();
        let mut matched = match_graph(graph, *host, self.settings.thresholds, |window| !off[window]);
        let budget = context.arena.budget();
        let (edges, layout) = Layout::within(budget, &mut matched, graph, *host);
        let held = context.arena.bytes();
        let reserved = context
            .arena
            .reserve(layout.bytes, &*self.backend, host.stream() as usize);
        lock(&self.stats).scratch_bytes += (context.arena.bytes() - held) as u64;
        let block = match reserved {
            Ok(block) => block,
            Err(e) => {
                let text = format!(
                    "no memory for {} bytes of scratch: {e}; stock kernels run instead",
                    layout.bytes
                );
                lock(&self.messages).push((LogLevel::Warn, text));
                return None;
            }
        };
        let hand_off = |e: usize| HandOff {
            form: edges[e].form,
            address: block.scratch + layout.edges[e],
            k: edges[e].k,
            n_tokens: edges[e].n_tokens,
        };
        let mut incoming = vec![None; matched.sites.len()];
        let mut made = vec![Vec::new(); matched.sites.len()];
        for (e, edge) in edges.iter().enumerate() {
            edge.consumers.iter().for_each(|&i| incoming[i] = Some(e));
            edge.producer.into_iter().for_each(|i| made[i].push(e));
        }
        let mut starts = vec![0; graph.len()];
        let mut sites = Vec::with_capacity(matched.sites.len());
        for (i, site) in matched.sites.iter().enumerate() {
            let makes: Vec<usize> = std::mem::take(&mut made[i]);
            let output = |form: Form| makes.iter().copied().find(|&e| edges[e].form == form).map(hand_off);
            let resources = Resources {
                scratch: block.scratch + layout.scratch[i],
                tickets: block.tickets,
                input: incoming[i].map(hand_off),
                output_q8: output(Form::Q8),
                output_h16: output(Form::H16),
                drop_output_f32: makes.iter().any(|&e| edges[e].drop_f32),
            };
            enter_window(Some(site.window));
            let calls = (site.window().calls)(&site.m, &resources);
            let input = incoming[i].map(|e| {
                let (role, _) = (site.window().input_form)(&site.m).expect("it reads a hand-off");
                let without = || {
                    let resources = Resources {
                        input: None,
                        ..resources
                    };
                    Unmade::Without((site.window().calls)(&site.m, &resources))
                };
                let convert = hand_off(e).convert(site.m.tensor(role));
                (e, convert.map_or_else(without, |call| Unmade::Convert(Box::new(call))))
            });
            enter_window(None);
            starts[site.m.start] = i as u32 + 1;
            sites.push(PlannedSite {
                window: site.window,
                start: site.m.start,
                len: site.m.end - site.m.start,
                calls,
                input,
                makes,
            });
        }
        let only_form = |e: &Edge| PlannedHandOff {
            made: false,
            only_form: e.drop_f32,
        };
        let hand_offs = edges.iter().map(only_form).collect();
        self.count(context, host, &matched);
        let mut counts = vec![0; WINDOWS.len()];
        for site in &sites {
            counts[site.window] += 1;
        }
        debug_assert!(sites.windows(2).all(|w| w[0].start + w[0].len <= w[1].start));
        Some(Plan {
            uid: graph.uid(),
            nodes: graph.node_addresses().to_vec(),
            contents,
            sites,
            hand_offs,
            starts,
            counts,
            launched: None,
            generation: self.generation.load(Relaxed),
            waits_at_start: matched.waits_at_start,
            started: false,
        })
    }

    fn count(&self, context: &mut Context, host: &HostView, matched: &Matched) {
        let mut stats = lock(&self.stats);
        stats.plans += 1;
        for site in &matched.sites {
            stats.windows[site.window].sites += 1;
        }
        for d in &matched.declined {
            *stats.windows[d.window].declined.entry(d.decline.reason).or_default() += 1;
            if self.settings.debug {
                let text = format!(
                    "{} declines {:?}: {}: {}",
                    WINDOWS[d.window].name, d.node, d.decline.reason, d.decline.detail
                );
                if context.explained.len() < MAX_EXPLAINED && context.explained.insert(text.clone()) {
                    host.log(LogLevel::Info, &format!("flashrt: {text}"));
                }
            }
        }
    }
}

/// How old the statistics file of a running process may be.
const STATS_INTERVAL: Duration = Duration::from_secs(1);

/// Most declined sites that `GGML_FLASHRT_DEBUG=1` explains for one context.
const MAX_EXPLAINED: usize = 4096;

/// Everything of the nodes that a plan depends on.
fn contents(graph: GraphRef) -> Vec<u64> {
    let mut words = Vec::with_capacity(graph.len() * 48);
    for node in graph.nodes() {
        let raw = node.raw();
        words.extend([
            raw.dtype as u64,
            raw.op as u64,
            raw.flags as u64,
            raw.data as u64,
            raw.buffer as u64,
            raw.view_src as u64,
        ]);
        words.extend(raw.ne.iter().map(|&n| n as u64));
        words.extend(raw.nb.iter().map(|&n| n as u64));
        words.extend(
            raw.op_params
                .chunks(2)
                .map(|p| p[0] as u32 as u64 | (p[1] as u32 as u64) << 32),
        );
        words.push(graph.uses(node) as u64);
        for src in node.srcs() {
            let raw = src.raw();
            words.extend([
                src.address() as u64,
                raw.data as u64,
                raw.dtype as u64,
                raw.buffer as u64,
                raw.view_src as u64,
                raw.op as u64,
                raw.flags as u64,
            ]);
            words.extend(raw.ne.iter().map(|&n| n as u64));
            words.extend(raw.nb.iter().map(|&n| n as u64));
        }
    }
    words
}

extern "C" fn print_stats() {
    let Some(engine) = GLOBAL.get() else { return };
    match &engine.settings.stats {
        Some(StatsTarget::File(path)) => write_stats(path, &engine.stats()),
        _ => to_stderr(&engine.stats().to_table()),
    }
}

fn write_stats(path: &Path, stats: &Stats) {
    let temporary = path.with_extension("tmp");
    let written = std::fs::write(&temporary, stats.to_json()).and_then(|()| std::fs::rename(&temporary, path));
    if let Err(e) = written {
        to_stderr(&format!(
            "flashrt: GGML_FLASHRT_STATS: cannot write {}: {e}\n",
            path.display()
        ));
    }
}
