//! Patterns: dataflow of a window, and the search for it in a run of nodes.
//!
//! A pattern is a list of steps. Each names its result and its operands; an operand that is no step's name is external and
//! stands for one and the same tensor wherever it occurs. Steps may be found in any order that respects the dataflow, so the
//! branches of a pattern may come in any order. Views between a step and its reader are looked through as long as they show
//! all of its elements in order.

use crate::graph::{GraphRef, Op, Tensor};

/// Name of a tensor in a pattern.
pub type Role = &'static str;

/// Most steps a pattern may have.
pub const MAX_STEPS: usize = 16;
/// Most external tensors a pattern may have.
pub const MAX_EXTERNALS: usize = 16;
/// Most operands a step may have.
pub const MAX_OPERANDS: usize = 4;

/// Is a step always there?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// No match without it.
    Required,
    /// May be missing; its readers then read its first operand.
    Optional,
    /// There exactly when the named step is.
    With(Role),
}

/// One operation of a pattern.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    /// Name of the result.
    pub result: Role,
    /// The operation.
    pub op: Op,
    /// Names of the operands, in the host's order. A name ending in `?` may be absent.
    pub operands: &'static [Role],
    /// The first two operands may be exchanged.
    pub commutes: bool,
    /// Whether the step may be missing.
    pub presence: Presence,
    /// The second operand is a leaf, such as a weight, not the result of a node.
    pub second_is_leaf: bool,
}

impl Step {
    /// `result = op(operands…)`.
    pub const fn new(result: Role, op: Op, operands: &'static [Role]) -> Step {
        Step {
            result,
            op,
            operands,
            commutes: false,
            presence: Presence::Required,
            second_is_leaf: false,
        }
    }

    /// The first two operands may be exchanged.
    pub const fn commutes(mut self) -> Step {
        self.commutes = true;
        self
    }

    /// The step may be missing.
    pub const fn optional(mut self) -> Step {
        self.presence = Presence::Optional;
        self
    }

    /// The second operand is a leaf.
    pub const fn second_is_leaf(mut self) -> Step {
        self.second_is_leaf = true;
        self
    }

    /// The step is there exactly when `other` is.
    pub const fn with(mut self, other: Role) -> Step {
        self.presence = Presence::With(other);
        self
    }
}

/// An operand with its name resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operand {
    Step(usize),
    External { slot: usize, optional: bool },
}

/// A pattern ready to be searched for.
#[derive(Debug)]
pub struct Pattern {
    steps: &'static [Step],
    operands: Vec<Vec<Operand>>,
    externals: Vec<Role>,
    /// Names of steps and externals, as numbers.
    names: Vec<u128>,
    outputs: Vec<usize>,
    with: Vec<Option<usize>>,
    /// Operations that the first node of a run can have, as bits.
    first: u64,
    /// Steps that are always there.
    n_required: usize,
    /// By operation: its steps, as bits.
    by_op: [u16; 64],
}

impl Pattern {
    /// Resolves the names. `outputs` are the steps whose results others may read.
    ///
    /// # Panics
    /// On a pattern that contradicts itself: it is part of the program.
    pub fn new(steps: &'static [Step], outputs: &[Role]) -> Pattern {
        assert!(
            !steps.is_empty() && steps.len() <= MAX_STEPS,
            "a pattern has 1 to {MAX_STEPS} steps"
        );
        let step = |name: Role| steps.iter().position(|s| s.result == name);
        let mut externals: Vec<Role> = Vec::new();
        let mut operands = Vec::new();
        for (i, s) in steps.iter().enumerate() {
            assert!(s.operands.len() <= MAX_OPERANDS);
            let resolved = s.operands.iter().map(|&name| match step(name) {
                Some(earlier) => {
                    assert!(earlier < i, "{name} is read before it is made");
                    Operand::Step(earlier)
                }
                None => {
                    let (base, optional) = name.strip_suffix('?').map_or((name, false), |base| (base, true));
                    let slot = externals.iter().position(|&e| e == base).unwrap_or_else(|| {
                        externals.push(base);
                        externals.len() - 1
                    });
                    Operand::External { slot, optional }
                }
            });
            operands.push(resolved.collect());
        }
        assert!(externals.len() <= MAX_EXTERNALS);
        let names = steps.iter().map(|s| s.result).chain(externals.iter().copied());
        let names = names.map(number).collect();
        let outputs = outputs.iter().map(|&o| step(o).expect("an output is a step")).collect();
        let with = steps
            .iter()
            .map(|s| match s.presence {
                Presence::With(other) => Some(step(other).expect("`with` names a step")),
                _ => None,
            })
            .collect();
        let required = |step: usize| steps[step].presence == Presence::Required;
        let starts = |operands: &Vec<Operand>| operands.iter().all(|o| !matches!(o, Operand::Step(e) if required(*e)));
        let first = steps
            .iter()
            .zip(&operands)
            .filter(|(_, o)| starts(o))
            .fold(0, |bits, (s, _)| bits | 1 << s.op as u8);
        let n_required = (0..steps.len()).filter(|&i| required(i)).count();
        let mut by_op = [0; 64];
        for (i, s) in steps.iter().enumerate() {
            by_op[s.op as usize] |= 1 << i;
        }
        Pattern {
            steps,
            operands,
            externals,
            names,
            outputs,
            with,
            first,
            n_required,
            by_op,
        }
    }

    /// The steps.
    pub fn steps(&self) -> &'static [Step] {
        self.steps
    }

    /// Names of the external tensors.
    pub fn externals(&self) -> &[Role] {
        &self.externals
    }

    /// Can a run start here? A look at the operations alone, which settles most nodes.
    #[inline]
    pub fn may_start(&self, ops: &[Op], start: usize) -> bool {
        let Some(run) = ops.get(start..) else { return false };
        run.first().is_some_and(|&op| self.first & (1 << op as u8) != 0)
            && run
                .iter()
                .filter(|op| !op.is_view())
                .take_while(|&&op| self.by_op[op as usize] != 0)
                .take(self.n_required)
                .count()
                == self.n_required
    }

    /// Position of a name among the steps and, after them, the externals.
    fn position(&self, name: u128) -> Option<usize> {
        self.names.iter().position(|&n| n == name)
    }

    #[inline]
    fn step(&self, role: Role) -> Option<usize> {
        self.position(number(role)).filter(|&i| i < self.steps.len())
    }

    fn is_required(&self, step: usize) -> bool {
        self.steps[step].presence == Presence::Required
    }
}

/// A name as a number: cheaper to compare, and known at compile time where the name is.
#[inline]
const fn number(role: Role) -> u128 {
    let (name, mut number, mut i) = (role.as_bytes(), 0, 0);
    assert!(name.len() <= 16, "names of tensors have 16 letters at most");
    while i < name.len() {
        number = number << 8 | name[i] as u128;
        i += 1;
    }
    number
}

/// What a pattern's names stand for.
#[derive(Clone)]
pub struct Match<'g> {
    pattern: &'g Pattern,
    steps: [Option<Tensor<'g>>; MAX_STEPS],
    externals: [Option<Tensor<'g>>; MAX_EXTERNALS],
    /// Steps that are outputs by the pattern, but that nobody outside of this run reads, as bits.
    unread: u32,
    /// Index of the run's first node.
    pub start: usize,
    /// Index past the run's last node.
    pub end: usize,
}

impl<'g> Match<'g> {
    /// The tensor with this name, if it is there. The result of a missing optional step is that of its first operand.
    #[inline]
    pub fn get(&self, role: Role) -> Option<Tensor<'g>> {
        let i = self.pattern.position(number(role))?;
        match i.checked_sub(self.pattern.steps.len()) {
            None => self.result(i),
            Some(slot) => self.externals[slot],
        }
    }

    /// The tensor with this name.
    ///
    /// # Panics
    /// When the pattern does not guarantee that it is there.
    #[inline]
    pub fn tensor(&self, role: Role) -> Tensor<'g> {
        self.get(role)
            .unwrap_or_else(|| panic!("{role} is not part of this match"))
    }

    /// Is the step with this name itself there?
    pub fn has(&self, step: Role) -> bool {
        self.node(step).is_some()
    }

    /// The node of a step, without falling back to its operand when it is missing.
    #[inline]
    pub fn node(&self, step: Role) -> Option<Tensor<'g>> {
        self.pattern.step(step).and_then(|i| self.steps[i])
    }

    /// The results that others read: for a missing optional output, what takes its place.
    pub fn outputs(&self) -> impl Iterator<Item = (Role, Tensor<'g>)> + '_ {
        let outputs = self.pattern.outputs.iter().filter(|&&o| self.unread & (1 << o) == 0);
        outputs.filter_map(|&o| Some((self.pattern.steps[o].result, self.result(o)?)))
    }

    /// The output with this name is read by nobody outside of this run: it need not be written.
    pub fn set_unread(&mut self, output: Role) {
        self.unread |= self.pattern.step(output).map_or(0, |o| 1 << o);
    }

    /// Need the output with this name not be written?
    pub fn is_unread(&self, output: Role) -> bool {
        self.pattern.step(output).is_some_and(|o| self.unread & (1 << o) != 0)
    }

    /// Is the step with this name one of the outputs, itself or in place of one that is missing?
    pub fn is_output(&self, step: Role) -> bool {
        let step = self.pattern.step(step).filter(|&i| self.steps[i].is_some());
        step.is_some_and(|i| self.written() & (1 << i) != 0)
    }

    /// Steps whose nodes are outputs, themselves or in place of one that is missing, as bits.
    fn written(&self) -> u32 {
        let outputs = self.pattern.outputs.iter().filter(|&&o| self.unread & (1 << o) == 0);
        outputs
            .filter_map(|&o| self.present(o))
            .fold(0, |bits, i| bits | 1 << i)
    }

    /// Every node of a step, and whether it is an output.
    pub fn nodes_written(&self) -> impl Iterator<Item = (Role, Tensor<'g>, bool)> + '_ {
        let written = self.written();
        let steps = self.pattern.steps.iter().zip(&self.steps).enumerate();
        steps.filter_map(move |(i, (s, t))| Some((s.result, (*t)?, written & (1 << i) != 0)))
    }

    /// Every node of a step.
    pub fn nodes(&self) -> impl Iterator<Item = (Role, Tensor<'g>)> + '_ {
        self.pattern
            .steps
            .iter()
            .zip(&self.steps)
            .filter_map(|(s, t)| Some((s.result, (*t)?)))
    }

    /// Every external tensor.
    pub fn externals(&self) -> impl Iterator<Item = (Role, Tensor<'g>)> + '_ {
        self.pattern
            .externals
            .iter()
            .zip(&self.externals)
            .filter_map(|(&role, t)| Some((role, (*t)?)))
    }

    fn result(&self, step: usize) -> Option<Tensor<'g>> {
        self.present(step).and_then(|i| self.steps[i])
    }

    /// The step itself, or what takes its place when it is missing.
    #[inline]
    fn present(&self, mut step: usize) -> Option<usize> {
        while self.steps[step].is_none() {
            match self.pattern.operands[step].first() {
                Some(Operand::Step(earlier)) if !self.pattern.is_required(step) => step = *earlier,
                _ => return None,
            }
        }
        Some(step)
    }

    fn is_complete(&self) -> bool {
        (0..self.pattern.steps.len()).all(|i| match self.pattern.with[i] {
            Some(other) => self.steps[i].is_some() == self.steps[other].is_some(),
            None => self.steps[i].is_some() || !self.pattern.is_required(i),
        })
    }
}

/// The tensor whose elements `t` shows, all of them and in order, through any number of views.
pub fn look_through<'g>(graph: GraphRef<'g>, t: Tensor<'g>) -> Tensor<'g> {
    let mut t = t;
    while matches!(graph.op(t), Op::View | Op::Reshape) {
        let Some(src) = t.src(0) else { break };
        let same = t.data() == src.data()
            && t.raw().dtype == src.raw().dtype
            && t.ne().iter().product::<i64>() == src.ne().iter().product::<i64>()
            && t.is_contiguous()
            && src.is_contiguous();
        if !same {
            break;
        }
        t = src;
    }
    t
}

/// Finds a pattern at node `start`: the longest run of nodes that completes it.
pub fn find<'g>(pattern: &'g Pattern, graph: GraphRef<'g>, ops: &[Op], start: usize) -> Option<Box<Match<'g>>> {
    if !pattern.may_start(ops, start) {
        return None;
    }
    // In its place from the start: it is large, and kept if it passes.
    let mut state = Box::new(Match {
        pattern,
        steps: [None; MAX_STEPS],
        externals: [None; MAX_EXTERNALS],
        unread: 0,
        start,
        end: start,
    });
    extend(graph, ops, &mut state).then_some(state)
}

/// Binds nodes from `state.end` on. Leaves the state as it was when there is no match.
fn extend<'g>(graph: GraphRef<'g>, ops: &[Op], state: &mut Match<'g>) -> bool {
    let pattern = state.pattern;
    let mut position = state.end;
    while position < ops.len() && ops[position].is_view() {
        position += 1;
    }
    if position < ops.len() {
        let node = graph.node(position);
        let mut candidates = pattern.by_op[ops[position] as usize];
        while candidates != 0 {
            let i = candidates.trailing_zeros() as usize;
            candidates &= candidates - 1;
            let step = &pattern.steps[i];
            if state.steps[i].is_some() {
                continue;
            }
            for exchanged in [false, true] {
                if exchanged && !step.commutes {
                    break;
                }
                let Some(fresh) = bind(graph, state, i, node, exchanged) else {
                    continue;
                };
                let end = std::mem::replace(&mut state.end, position + 1);
                if extend(graph, ops, state) {
                    return true;
                }
                state.end = end;
                state.steps[i] = None;
                release(state, fresh);
            }
        }
    }
    state.end > state.start && state.is_complete()
}

/// Takes `node` for step `i` if its operands agree with what is bound already. Returns the externals it bound, as bits.
fn bind<'g>(graph: GraphRef<'g>, state: &mut Match<'g>, i: usize, node: Tensor<'g>, exchanged: bool) -> Option<u32> {
    let pattern = state.pattern;
    if pattern.with[i].is_some_and(|other| state.steps[other].is_none()) {
        return None;
    }
    if pattern.steps[i].second_is_leaf && node.src(1).is_some_and(|t| graph.op(t) != Op::None) {
        return None;
    }
    let operands = &pattern.operands[i];
    let mut fresh = 0;
    let agree = operands.iter().enumerate().all(|(position, &operand)| {
        let source = node.src(if exchanged && position < 2 {
            1 - position
        } else {
            position
        });
        match (operand, source) {
            (Operand::Step(earlier), Some(source)) => state
                .result(earlier)
                .is_some_and(|t| t == source || t == look_through(graph, source)),
            (Operand::External { slot, .. }, Some(source)) => {
                let bound = *state.externals[slot].get_or_insert_with(|| {
                    fresh |= 1 << slot;
                    source
                });
                bound == source
            }
            (Operand::External { optional, slot }, None) => optional && state.externals[slot].is_none(),
            (Operand::Step(_), None) => false,
        }
    });
    // Operands that the pattern does not know of would be ignored.
    if !agree || (operands.len()..crate::graph::raw::MAX_SRC).any(|extra| node.src(extra).is_some()) {
        release(state, fresh);
        return None;
    }
    state.steps[i] = Some(node);
    Some(fresh)
}

fn release(state: &mut Match, externals: u32) {
    for slot in (0..MAX_EXTERNALS).filter(|slot| externals & (1 << slot) != 0) {
        state.externals[slot] = None;
    }
}
