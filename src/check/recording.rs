//! A recorded evaluation: the graph as the engine will see it, and what every tensor held.

use crate::graph::dump::GraphRecord;
use crate::graph::TensorId;
use std::borrow::Cow;

/// A graph with the contents of its tensors. Weights are borrowed from the loaded model, everything else is a copy: ggml's
/// allocator lets a later node write over an earlier one's result.
pub struct Recording<'m> {
    graph: GraphRecord,
    values: Vec<Option<Cow<'m, [u8]>>>,
}

impl<'m> Recording<'m> {
    /// `values[id]` is what tensor `id` of the graph held: a node's result right after it was computed, a leaf's content
    /// right before its first use.
    pub fn new(graph: GraphRecord, values: Vec<Option<Cow<'m, [u8]>>>) -> Self {
        Recording { graph, values }
    }

    /// The graph.
    pub fn graph(&self) -> &GraphRecord {
        &self.graph
    }

    /// Bytes of a tensor from its first element to its last; `None` when nothing was recorded for it.
    pub fn bytes(&self, id: TensorId) -> Option<&[u8]> {
        self.values.get(id)?.as_deref()
    }
}
