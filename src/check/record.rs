//! Watches one evaluation of a model and records it.

use super::recording::Recording;
use crate::graph::dump::{GraphRecord, TensorRecord};
use crate::graph::raw::MAX_SRC;
use crate::graph::{BufferKind, Op, Tensor, TensorId};
use crate::host::{Model, Observer};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// Records the nodes it observes.
pub struct Recorder<'m> {
    model: &'m Model<'m>,
    graph: GraphRecord,
    values: Vec<Option<Cow<'m, [u8]>>>,
    index: HashMap<usize, TensorId>,
    computed: HashSet<TensorId>,
    repeated: bool,
}

impl<'m> Recorder<'m> {
    /// Records a graph of this model as if it ran on a device of compute capability `cc` (times 10).
    pub fn new(model: &'m Model<'m>, cc: i32) -> Self {
        let graph = GraphRecord {
            uid: 0,
            device: 0,
            cc,
            tensors: Vec::new(),
            nodes: Vec::new(),
        };
        Recorder {
            model,
            graph,
            values: Vec::new(),
            index: HashMap::new(),
            computed: HashSet::new(),
            repeated: false,
        }
    }

    /// What was recorded; `None` when it was more than one graph.
    pub fn finish(self) -> Option<Recording<'m>> {
        (!self.repeated).then(|| Recording::new(self.graph, self.values))
    }

    /// Index of a tensor; recorded with all it refers to on first sight.
    fn add(&mut self, t: Tensor) -> TensorId {
        if let Some(&id) = self.index.get(&t.address()) {
            return id;
        }
        let last_src = (0..MAX_SRC).rev().find(|&i| t.src(i).is_some()).map_or(0, |i| i + 1);
        let src: Vec<_> = (0..last_src).map(|i| t.src(i).map(|s| self.add(s))).collect();
        let view_src = t.view_src().map(|v| self.add(v));
        let op = self.model.host().ops().get(t.raw().op);
        let weight = self.model.weight_bytes(t);
        let params = &t.raw().op_params;
        let n_params = params.iter().rposition(|&p| p != 0).map_or(0, |i| i + 1);
        let id = self.graph.tensors.len();
        self.graph.tensors.push(TensorRecord {
            name: t.name(),
            op: self.model.host().op_name(t.raw().op),
            code: op as u8,
            dtype: t.raw().dtype,
            ne: t.ne(),
            nb: t.nb(),
            params: params[..n_params].to_vec(),
            flags: t.flags(),
            src,
            view_src,
            view_offs: t.raw().view_offs,
            data: t.data() as u64,
            uses: 0,
            buffer: if weight.is_some() {
                BufferKind::OwnWeights
            } else {
                BufferKind::Own
            },
            region: 0,
        });
        // A node's result does not exist yet; `after` takes it.
        let value = match weight {
            Some(bytes) => Some(Cow::Borrowed(bytes)),
            None if op == Op::None => Some(Cow::Owned(self.model.copy_bytes(t))),
            None => None,
        };
        self.values.push(value);
        self.index.insert(t.address(), id);
        id
    }
}

impl Observer for Recorder<'_> {
    fn before(&mut self, node: Tensor) {
        let id = self.add(node);
        // llama.cpp builds the graph of each ubatch in the same memory.
        self.repeated |= !self.computed.insert(id);
        self.graph.nodes.push(id);
        // ggml counts one use for each operand slot of each node.
        let src = self.graph.tensors[id].src.clone();
        for operand in src.into_iter().flatten() {
            self.graph.tensors[operand].uses += 1;
        }
    }

    fn after(&mut self, node: Tensor) {
        let id = self.index[&node.address()];
        self.values[id].get_or_insert_with(|| Cow::Owned(self.model.copy_bytes(node)));
    }
}
