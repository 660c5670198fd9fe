//! One window site: its kernel calls run by the oracle, its outputs held against what ggml computed.

use super::emulate;
use super::memory::{element, Fault, Memory};
use super::recording::Recording;
use crate::graph::{GraphRef, Op, OwnedGraph, Tensor};
use crate::window::pattern::Match;
use crate::window::{Form, HandOff, Resources, Window};

/// Why a site could not be compared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SiteError {
    /// The kernel's arguments do not fit the recorded memory.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// An output element that no kernel writes.
    #[error("output {role} ({name}): the kernels leave element {element} unwritten")]
    Unwritten {
        /// Output of the window.
        role: &'static str,
        /// Name of the tensor.
        name: String,
        /// Index of the element.
        element: usize,
    },
    /// Rows that the graph stores and the kernels do not.
    #[error("output {role} ({name}): the kernels store {stored} values, the graph {expected}")]
    NotStored {
        /// Output of the window.
        role: &'static str,
        /// Name of the tensor.
        name: String,
        /// Values that the kernels wrote.
        stored: usize,
        /// Values of the source.
        expected: usize,
    },
    /// Nothing was recorded for a tensor, or its type has no values.
    #[error("{role} ({name}) was not recorded")]
    NotRecorded {
        /// Input or output of the window.
        role: &'static str,
        /// Name of the tensor.
        name: String,
    },
}

/// The largest error of some values, in units of its bound.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Worst {
    /// `error / bound`: above 1 something is wrong. `null` in JSON where the error is no number.
    pub ratio: f64,
    /// Distance between the oracle's and ggml's value.
    pub error: f64,
    /// How large it may be.
    pub bound: f64,
    /// Tensor it was found in.
    pub tensor: String,
}

impl Worst {
    /// Is even this value within its bound?
    pub fn is_within(&self) -> bool {
        self.ratio <= 1.0
    }
}

/// What the comparison of a site found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Comparison {
    /// Values that were compared.
    pub values: usize,
    /// The worst of them.
    pub worst: Worst,
}

/// Scratch memory lies where no recorded tensor can: below any mapping.
const SCRATCH: usize = 4096;

/// Runs the oracle of a site and compares its outputs.
pub fn compare(window: &Window, m: &Match, owned: &OwnedGraph, recording: &Recording) -> Result<Comparison, SiteError> {
    let bytes = |role: &'static str, t: Tensor| {
        let found = owned.id(t).and_then(|id| recording.bytes(id));
        found.ok_or_else(|| SiteError::NotRecorded { role, name: t.name() })
    };
    let mut memory = Memory::default();
    for (role, t) in m.externals() {
        memory.add_input(t.data(), bytes(role, t)?);
    }
    for (_, t) in m.outputs() {
        memory.allow_writes(t.byte_range());
    }
    let mut end = SCRATCH + (window.scratch_bytes)(m);
    // 8-bit blocks come from another site or not at all.
    let input = (window.input_form)(m)
        .filter(|&(_, form)| form == Form::H16)
        .map(|(role, form)| {
            let x = m.tensor(role);
            let hand_off = HandOff {
                form,
                address: end.next_multiple_of(HandOff::ALIGN),
                k: x.ne()[0] as usize,
                n_tokens: x.n_rows() as usize,
            };
            end = hand_off.address + form.bytes(hand_off.k, hand_off.n_tokens);
            (hand_off, hand_off.convert(x))
        });
    memory.allow_writes(SCRATCH..end);
    let resources = Resources {
        scratch: SCRATCH,
        input: input.map(|(hand_off, _)| hand_off),
        ..Resources::default()
    };
    let convert = input.and_then(|(_, convert)| convert);
    for call in convert.into_iter().chain((window.calls)(m, &resources)) {
        emulate::run(&mut memory, &call)?;
    }
    let mut result = Comparison::default();
    for (role, t) in m.outputs() {
        compare_output(role, t, owned.graph(), bytes(role, t)?, &memory, &mut result)?;
    }
    Ok(result)
}

fn compare_output(
    role: &'static str,
    t: Tensor,
    graph: GraphRef,
    bytes: &[u8],
    memory: &Memory,
    result: &mut Comparison,
) -> Result<(), SiteError> {
    // A store into the KV cache writes some rows; the others hold what they held.
    let scatters = graph.op(t) == Op::SetRows;
    let not_recorded = || SiteError::NotRecorded { role, name: t.name() };
    let dtype = t.dtype().ok_or_else(not_recorded)?;
    let before = result.values;
    for (index, offset) in offsets(t).enumerate() {
        let Some((value, bound)) = memory.written(t.data() + offset) else {
            if scatters {
                continue;
            }
            return Err(SiteError::Unwritten {
                role,
                name: t.name(),
                element: index,
            });
        };
        let actual = bytes
            .get(offset..)
            .and_then(|b| element(dtype, b))
            .ok_or_else(not_recorded)?;
        let error = (actual - value).abs();
        // A comparison that fails for NaN on either side.
        let ratio = match error <= bound {
            true if error == 0.0 => 0.0,
            _ if error.is_nan() || bound.is_nan() => f64::INFINITY,
            _ => error / bound,
        };
        result.values += 1;
        if ratio > result.worst.ratio || result.worst.tensor.is_empty() {
            result.worst = Worst {
                ratio,
                error,
                bound,
                tensor: t.name(),
            };
        }
    }
    // No two tokens share a row, so what is stored is all of the source.
    let stored = result.values - before;
    let source = t.src(0).filter(|_| scatters);
    let expected = source.map_or(stored, |s| s.ne().iter().product::<i64>() as usize);
    if stored != expected {
        let name = t.name();
        return Err(SiteError::NotStored {
            role,
            name,
            stored,
            expected,
        });
    }
    Ok(())
}

/// Byte offset of each element, in order.
fn offsets(t: Tensor) -> impl Iterator<Item = usize> {
    let (ne, nb) = (t.ne().map(|n| n as usize), t.nb());
    (0..ne.iter().product()).map(move |i| {
        let (i0, i1, i2, i3) = (
            i % ne[0],
            i / ne[0] % ne[1],
            i / (ne[0] * ne[1]) % ne[2],
            i / (ne[0] * ne[1] * ne[2]),
        );
        i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3]
    })
}
