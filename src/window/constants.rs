//! Which tensors do not change while a graph runs: kernels may fetch those before the work of their predecessors is over.
//!
//! Weights lie in buffers that are marked so, except where the host does not know: an RPC server is sent tensors and graphs, not
//! what its buffers are for. There a tensor is constant when nothing in the graph could write it, which the graph shows by
//! itself: a leaf, and no node with bytes in common with it, views of it included (a KV cache is a leaf that nodes write through
//! views).
//!
//! The graph does not show what came before it. A leaf may have been uploaded, or written by a kernel of an earlier graph on
//! the same stream (a cache, the state of a recurrent model). An upload is never overtaken: a copy in the stream is no kernel, so
//! what follows it waits for it, and a copy elsewhere is over before the host goes on. A kernel could be: dependent launch lets the
//! first kernels of this graph start while the last ones of the graph before still run. So the first launch of an evaluation that
//! relies on such a leaf is a plain one ([`Constants::found_by_graph`]). It starts when all earlier work is over, and no later
//! launch starts before it.

use crate::graph::{BufferKind, GraphRef, HostView, Op, Tensor, FLAG_INPUT};
use std::cell::{Cell, OnceCell};
use std::ops::Range;

/// Answers for one graph which of its tensors are constant.
pub struct Constants<'g> {
    graph: GraphRef<'g>,
    host: HostView<'g>,
    /// Bytes that nodes may write: sorted, none touching the next. Made when first needed.
    written: OnceCell<Vec<Range<usize>>>,
    found_by_graph: Cell<bool>,
}

impl<'g> Constants<'g> {
    /// Those of a graph; looks at nothing yet.
    pub fn new(graph: GraphRef<'g>, host: HostView<'g>) -> Self {
        Constants {
            graph,
            host,
            written: OnceCell::new(),
            found_by_graph: Cell::new(false),
        }
    }

    /// Does `t` keep its bytes from before the first kernel of the graph until after the last?
    pub fn contains(&self, t: Tensor) -> bool {
        match self.host.buffer_kind(t) {
            BufferKind::OwnWeights => true,
            BufferKind::Foreign => false,
            BufferKind::Own => {
                let constant = self.is_leaf(t) && !self.is_written(t);
                self.found_by_graph.set(self.found_by_graph.get() | constant);
                constant
            }
        }
    }

    /// Was a tensor called constant that lies in no buffer of weights?
    pub fn found_by_graph(&self) -> bool {
        self.found_by_graph.get()
    }

    /// An input is a leaf that the host announces to write. Fetching those early was never asked for.
    fn is_leaf(&self, t: Tensor) -> bool {
        self.graph.op(t) == Op::None && t.view_src().is_none() && t.flags() & FLAG_INPUT == 0
    }

    fn is_written(&self, t: Tensor) -> bool {
        let written = self.written.get_or_init(|| self.written_ranges());
        let bytes = t.byte_range();
        let next = written.partition_point(|w| w.end <= bytes.start);
        written.get(next).is_some_and(|w| w.start < bytes.end)
    }

    /// A node counts as writing all of the tensor whose bytes it shows, also when it only reads them: a leaf must have no view.
    fn written_ranges(&self) -> Vec<Range<usize>> {
        let root = |node: Tensor<'g>| match node.view_src() {
            None => Some(node),
            // Views of a node's result add nothing to it.
            Some(root) if self.graph.op(node).is_view() && self.graph.op(root) != Op::None => None,
            shown => shown,
        };
        let roots = self.graph.nodes().filter_map(root).filter(|t| !t.is_empty());
        let mut ranges: Vec<_> = roots.map(|t| t.byte_range()).collect();
        ranges.sort_unstable_by_key(|r| r.start);
        ranges.dedup_by(|next, last| {
            let joined = next.start <= last.end;
            if joined {
                last.end = last.end.max(next.end);
            }
            joined
        });
        ranges
    }
}
