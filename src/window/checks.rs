//! What must hold for every window, whatever it computes: nobody else reads what it leaves unwritten, all bytes are this
//! device's own, and no output destroys an input that is still to be read.

use super::pattern::{Match, Role};
use super::{Alias, Decline, Window};
use crate::graph::{BufferKind, DType, GraphRef, HostView, Op, Region, Tensor, FLAG_COMPUTE};
use std::ops::Range;

/// Checks a match against everything that does not depend on the window's own arithmetic.
pub fn check(window: &Window, m: &Match, graph: GraphRef, ops: &[Op], host: HostView) -> Result<(), Decline> {
    steps(m)?;
    own_results(m, graph)?;
    interior_uses(m, graph, ops)?;
    buffers(m, host)?;
    aliases(window, m)?;
    regions(window, m, graph, host)
}

/// Marks the outputs that only nodes of the run read. ggml's allocator knows that nobody else does and may have put another
/// output in their place.
pub fn mark_unread_outputs(m: &mut Match, graph: GraphRef) {
    let unread = |m: &Match, t: Tensor| {
        if t.is_output() || t.view_src().is_some() {
            return false;
        }
        let inside: usize = m.nodes().map(|(_, n)| n.srcs().filter(|&s| s == t).count()).sum();
        inside > 0 && inside as i64 == i64::from(graph.uses(t))
    };
    loop {
        let found = m.outputs().find(|&(_, t)| unread(m, t)).map(|(role, _)| role);
        let Some(role) = found else { break };
        m.set_unread(role);
    }
}

fn steps(m: &Match) -> Result<(), Decline> {
    for (role, node, written) in m.nodes_written() {
        if node.flags() & FLAG_COMPUTE == 0 {
            return Err(Decline::new("not to be computed", format!("{role} {node:?}")));
        }
        // A narrower intermediate result would be rounded where the kernel keeps f32.
        if !written && !node.is(DType::F32) {
            return Err(Decline::new("type", format!("{role} {node:?} is not f32")));
        }
    }
    Ok(())
}

/// What comes from outside of the run is read from memory, where the run's own results are not, or not yet.
fn own_results(m: &Match, graph: GraphRef) -> Result<(), Decline> {
    for (role, t) in m.externals() {
        // Most are leaves.
        let made = graph.op(t) != Op::None || t.view_src().is_some();
        if made && m.nodes().any(|(_, node)| node == t || Some(node) == t.view_src()) {
            return Err(Decline::new("an operand is the run's own", format!("{role} {t:?}")));
        }
    }
    Ok(())
}

/// Interior results are never written, so only nodes of the run may read them.
fn interior_uses(m: &Match, graph: GraphRef, ops: &[Op]) -> Result<(), Decline> {
    let mut unwritten: Vec<(Tensor, i32)> = Vec::with_capacity(m.end - m.start);
    unwritten.extend(
        m.nodes_written()
            .filter(|&(.., written)| !written)
            .map(|(_, t, _)| (t, 0)),
    );
    let run = m.start..m.end;
    for (i, op) in run.clone().zip(&ops[run]) {
        let node = graph.node(i);
        let mut reads = false;
        for src in node.srcs() {
            if let Some((_, uses)) = unwritten.iter_mut().find(|(t, _)| *t == src) {
                *uses += 1;
                reads = true;
            }
        }
        if op.is_view() && reads {
            unwritten.push((node, 0));
        }
    }
    for &(t, uses) in &unwritten {
        if t.is_output() {
            return Err(Decline::new("interior is a graph output", format!("{t:?}")));
        }
        if uses != graph.uses(t) {
            let detail = format!("{t:?} has {} uses, {uses} of them inside", graph.uses(t));
            return Err(Decline::new("interior is read elsewhere", detail));
        }
        if let Some(root) = t.view_src() {
            if !unwritten.iter().any(|(u, _)| *u == root) {
                return Err(Decline::new(
                    "interior is computed in place",
                    format!("{t:?} over {root:?}"),
                ));
            }
        }
    }
    Ok(())
}

fn buffers(m: &Match, host: HostView) -> Result<(), Decline> {
    for (role, t) in m.externals().chain(m.outputs()) {
        if host.buffer_kind(t) == BufferKind::Foreign {
            return Err(Decline::new("foreign buffer", format!("{role} {t:?}")));
        }
        if t.data() == 0 {
            return Err(Decline::new("no memory yet", format!("{role} {t:?}")));
        }
    }
    Ok(())
}

fn aliases(window: &Window, m: &Match) -> Result<(), Decline> {
    let declared = |input: Role, output: Role| {
        window
            .may_alias
            .iter()
            .find(|a| a.input == input && a.output == output)
            .map(|a| a.alias)
    };
    let overlap = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
    fn with_bytes((role, t): (Role, Tensor)) -> (Role, Tensor, Range<usize>) {
        (role, t, t.byte_range())
    }
    let inputs: Vec<_> = m.externals().map(with_bytes).collect();
    let outputs: Vec<_> = m.outputs().map(with_bytes).collect();
    for (i, &(out_role, out, ref out_bytes)) in outputs.iter().enumerate() {
        for (other_role, _, other_bytes) in &outputs[i + 1..] {
            if overlap(out_bytes, other_bytes) {
                return Err(Decline::new("outputs overlap", format!("{out_role} and {other_role}")));
            }
        }
        for &(in_role, input, ref in_bytes) in &inputs {
            if !overlap(out_bytes, in_bytes) {
                continue;
            }
            let exact = out.data() == input.data() && out.nb() == input.nb() && out.ne() == input.ne();
            match declared(in_role, out_role) {
                Some(Alias::Any) => {}
                Some(Alias::Exact) if exact => {}
                _ => {
                    let detail = format!("{out_role} {out:?} over {in_role} {input:?}");
                    return Err(Decline::new("output overlaps an input", detail));
                }
            }
        }
    }
    Ok(())
}

/// Inside a concurrent region a window stays within one branch and uses no scratch; only the last node of a run may be a
/// fork, only the first a join.
fn regions(window: &Window, m: &Match, graph: GraphRef, host: HostView) -> Result<(), Decline> {
    let mut branch = None;
    for i in m.start..m.end {
        let node = graph.node(i);
        let region = host.region(node);
        let fits = match region {
            Region::Fork => i + 1 == m.end,
            Region::Join => i == m.start,
            Region::None | Region::Branch(_) => true,
        };
        if !fits {
            return Err(Decline::new(
                "concurrent region",
                format!("{node:?} is a {region:?} inside the run"),
            ));
        }
        let on = matches!(region, Region::Branch(_)).then_some(region);
        if i > m.start && region != Region::Fork && on != branch {
            return Err(Decline::new("concurrent region", "the run crosses branches".to_owned()));
        }
        branch = on;
        if on.is_some() && window.uses_scratch {
            return Err(Decline::new(
                "concurrent region",
                "the window needs scratch memory".to_owned(),
            ));
        }
    }
    Ok(())
}
