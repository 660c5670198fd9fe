//! Windows: chains of ggml nodes that one fused kernel, or two, can replace.
//!
//! A window is data (a [`Pattern`], which aliases it survives) plus two functions: a guard, which knows what only this window
//! knows, and a plan, which turns a match into kernel calls. Everything that could corrupt somebody's results is checked
//! once, in [`checks`], for all windows. To add one: write `src/window/<noun>.rs`, name it in [`WINDOWS`], and give it the
//! files with the same noun in `csrc`, `src/reference`, `tests` and `docs/windows`.

pub mod checks;
pub mod engine;
mod hand_off;
mod layout;
mod match_graph;
pub mod pattern;
pub mod settings;
mod stats;
pub mod thresholds;

mod add_norm;
mod call;
mod constants;
mod dec_attn;
mod geglu_ffn;
mod gemv_res;
mod glu_gemv;
mod mat_mul;
mod mat_vec;
mod mm_prefill;
mod mm_res;
mod moe;
mod moe_ffn;
mod moe_prefill;
mod prefill_fa4;
mod qkv_gemv;
mod sandwich_norm;

pub use hand_off::{edges, Edge, Form, HandOff};
pub use match_graph::{match_graph, Site};
pub use stats::{Counters, Stats};

use crate::graph::Tensor;
pub use call::KernelCall;
pub use constants::Constants;
use pattern::{Match, Pattern, Role};
use thresholds::Threshold;

/// How an output may share memory with an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alias {
    /// Same address, shape and strides: every element or row is read before it is written.
    Exact,
    /// In any way: all reads of the input are over before the first write.
    Any,
}

/// An input that an output may lie over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MayAlias {
    /// The input.
    pub input: Role,
    /// The output.
    pub output: Role,
    /// In which way.
    pub alias: Alias,
}

const fn exact(input: Role, output: Role) -> MayAlias {
    MayAlias {
        input,
        output,
        alias: Alias::Exact,
    }
}

const fn any(input: Role, output: Role) -> MayAlias {
    MayAlias {
        input,
        output,
        alias: Alias::Any,
    }
}

/// Why a window leaves a site to stock ggml.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decline {
    /// The kind of reason: what the statistics count.
    pub reason: &'static str,
    /// What was found, for `GGML_FLASHRT_DEBUG=1`.
    pub detail: String,
}

impl Decline {
    /// A reason and what was found.
    pub fn new(reason: &'static str, detail: impl Into<String>) -> Decline {
        Decline {
            reason,
            detail: detail.into(),
        }
    }
}

/// Where a window's kernels find what is not in the graph.
#[derive(Debug, Clone, Copy, Default)]
pub struct Resources {
    /// Start of the window's scratch bytes.
    pub scratch: usize,
    /// [`crate::cache::TICKET_BYTES`] of counters that are zero and are left so.
    pub tickets: usize,
    /// The input in the form that [`Window::input_form`] names: always where it [is needed](Form::is_needed), else when its
    /// producer hands it over.
    pub input: Option<HandOff>,
    /// Where to leave the output as q8 blocks, when a reader wants them.
    pub output_q8: Option<HandOff>,
    /// Where to leave the output as f16, when a reader wants it.
    pub output_h16: Option<HandOff>,
    /// The f32 form of the output is read by nobody.
    pub drop_output_f32: bool,
}

/// One window of the table.
pub struct Window {
    /// Name, as users write it in switches.
    pub name: &'static str,
    /// The equation.
    pub computes: &'static str,
    /// The ops it replaces, for people.
    pub replaces: &'static str,
    /// Least compute capability, times 10.
    pub min_cc: i32,
    /// `GGML_FLASHRT_NO_<NAME>`: any value but `0` switches the window off, `0` on.
    pub switch: &'static str,
    /// On without a switch. A window that is not faster than stock wherever it was measured waits here for its evidence.
    pub on_by_default: bool,
    /// The chain of nodes.
    pub pattern: fn() -> &'static Pattern,
    /// Inputs that outputs may lie over.
    pub may_alias: &'static [MayAlias],
    /// Kernels hand intermediate results through scratch memory.
    pub uses_scratch: bool,
    /// The input that this match takes in another form than the graph has it, and the form.
    pub input_form: fn(&Match) -> Option<(Role, Form)>,
    /// The output that can be left in any [`Form`], its f32 form then unwritten when nobody reads it.
    pub hands_over: Option<Role>,
    /// The product that must have so many tokens for the window to be faster than stock: see [`thresholds`].
    pub threshold: Option<Threshold>,
    /// Types, shapes, strides and parameters.
    pub guard: fn(&Match, &Constants) -> Result<(), Decline>,
    /// Scratch bytes a match needs.
    pub scratch_bytes: fn(&Match) -> usize,
    /// The kernel calls of a match that passed the guard.
    pub calls: fn(&Match, &Resources) -> Vec<KernelCall>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// All windows, by priority: an earlier one takes its nodes first.
pub static WINDOWS: &[&Window] = &[
    &qkv_gemv::QKV_GEMV,
    &sandwich_norm::SANDWICH_NORM,
    &add_norm::ADD_NORM,
    &glu_gemv::GLU_GEMV,
    &dec_attn::DEC_ATTN,
    &prefill_fa4::PREFILL_FA4,
    &gemv_res::GEMV_RES,
    &geglu_ffn::GEGLU_FFN,
    &mm_res::MM_RES,
    &mm_prefill::MM_PREFILL,
    &moe_ffn::MOE_FFN,
    &moe_prefill::MOE_PREFILL,
];

/// Index of QKV_GEMV in [`WINDOWS`].
const QKV_GEMV_INDEX: usize = 0;

/// Is this window part of this build?
pub fn compiled() -> bool {
    cfg!(feature = "cuda")
}

/// What a window lacks that this build could have.
pub fn lacks(window: &Window) -> Option<&'static str> {
    let of_modules = std::ptr::eq(window, &prefill_fa4::PREFILL_FA4);
    (of_modules && compiled() && crate::kernel::prefill_fa4_modules().is_empty()).then_some("no modules (feature fa4)")
}

/// `t` is f32 and its rows are one after another or apart by a whole number of floats.
fn f32_rows(role: Role, t: Tensor) -> Result<(), Decline> {
    if !t.is(crate::graph::DType::F32) {
        return Err(Decline::new("type", format!("{role} {t:?} is not f32")));
    }
    let nb = t.nb();
    let plain = nb[0] == 4 && nb[1] % 4 == 0 && t.ne()[2] == 1 && t.ne()[3] == 1;
    if !plain || t.is_empty() {
        return Err(Decline::new("layout", format!("{role} {t:?} has strides {nb:?}")));
    }
    if t.data() % 4 != 0 {
        return Err(Decline::new("layout", format!("{role} {t:?} is not aligned")));
    }
    Ok(())
}

/// `t` does not change during the graph: kernels may fetch it before the work of their predecessors is over.
fn constant(role: Role, t: Tensor, constants: &Constants) -> Result<(), Decline> {
    if !constants.contains(t) {
        return Err(Decline::new(
            "not a weight",
            format!("{role} {t:?} is in no buffer of weights, and not a leaf that the graph leaves alone"),
        ));
    }
    Ok(())
}

/// `t` is one contiguous f32 row of `n` constant values.
fn constant_vector(role: Role, t: Tensor, n: i64, constants: &Constants) -> Result<(), Decline> {
    f32_rows(role, t)?;
    constant(role, t, constants)?;
    if t.ne() != [n, 1, 1, 1] {
        return Err(Decline::new("shape", format!("{role} {t:?} is not a vector of {n}")));
    }
    Ok(())
}

/// Floats from one row of `t` to the next.
fn row_stride(t: Tensor) -> i64 {
    (t.nb()[1] / 4) as i64
}

/// All operation parameters from `first` on are zero: none that this version does not know of.
fn no_params_from(role: Role, t: Tensor, first: usize) -> Result<(), Decline> {
    match t.raw().op_params[first..].iter().position(|&p| p != 0) {
        None => Ok(()),
        Some(i) => Err(Decline::new(
            "parameter",
            format!("{role} {t:?} has parameter {} set", first + i),
        )),
    }
}
