//! Recorded graphs: what `GGML_FLASHRT_DUMP` writes, one JSON object a line, and what tests and `flashrt dump` read.

use super::{BufferKind, GraphRef, HostView, Op, Region, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// One tensor of a recorded graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// Name given by the model builder.
    pub name: String,
    /// Name of the operation as the host spells it.
    pub op: String,
    /// [`Op`] code of the operation.
    pub code: u8,
    /// `ggml_type` number.
    pub dtype: i32,
    /// Elements per dimension.
    pub ne: [i64; 4],
    /// Strides in bytes.
    pub nb: [usize; 4],
    /// Operation parameters, trailing zeros dropped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub params: Vec<i32>,
    /// `GGML_TENSOR_FLAG_*` bits.
    #[serde(default)]
    pub flags: i32,
    /// Indices of the operands in the record; absent ones before the last are null.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub src: Vec<Option<usize>>,
    /// Index of the tensor whose bytes this one shows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view_src: Option<usize>,
    /// Offset into `view_src` in bytes.
    #[serde(default)]
    pub view_offs: usize,
    /// Device address.
    pub data: u64,
    /// How often nodes use it.
    pub uses: i32,
    /// Where its bytes live.
    pub buffer: BufferKind,
    /// Region code as in the ABI (0 none, 1 fork, 2 join, 16 + branch).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub region: i32,
}

fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// A recorded graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GraphRecord {
    /// Identity the host gave it.
    pub uid: u64,
    /// CUDA device ordinal.
    pub device: i32,
    /// Compute capability times 10.
    pub cc: i32,
    /// Every tensor: nodes and what they read.
    pub tensors: Vec<TensorRecord>,
    /// Indices of the nodes in execution order.
    pub nodes: Vec<usize>,
}

impl GraphRecord {
    /// Records a graph of the host.
    pub fn capture(host: HostView, graph: GraphRef) -> GraphRecord {
        let mut recorder = Recorder {
            host,
            graph,
            tensors: Vec::new(),
            index: HashMap::new(),
        };
        let nodes = graph.nodes().map(|t| recorder.add(t)).collect();
        GraphRecord {
            uid: graph.uid(),
            device: host.device(),
            cc: host.cc(),
            tensors: recorder.tensors,
            nodes,
        }
    }

    /// One line of a dump file.
    pub fn to_json_line(&self) -> String {
        serde_json::to_string(self).expect("a record has only numbers, strings and lists")
    }

    /// What distinguishes graphs in a dump: everything but the uid and the addresses.
    pub fn digest(&self) -> u64 {
        use std::hash::{Hash, Hasher};
        let mut hasher = std::collections::hash_map::DefaultHasher::new();
        self.nodes.hash(&mut hasher);
        for t in &self.tensors {
            (
                t.code, t.dtype, t.ne, t.nb, &t.src, t.view_src, t.uses, t.region, &t.params,
            )
                .hash(&mut hasher);
        }
        hasher.finish()
    }
}

struct Recorder<'g> {
    host: HostView<'g>,
    graph: GraphRef<'g>,
    tensors: Vec<TensorRecord>,
    index: HashMap<usize, usize>,
}

impl Recorder<'_> {
    /// Index of a tensor; recorded with all it refers to on first sight.
    fn add(&mut self, t: Tensor) -> usize {
        if let Some(&index) = self.index.get(&t.address()) {
            return index;
        }
        let op = self.graph.op(t);
        let last_src = (0..super::raw::MAX_SRC)
            .rev()
            .find(|&i| t.src(i).is_some())
            .map_or(0, |i| i + 1);
        let src = (0..last_src).map(|i| t.src(i).map(|s| self.add(s))).collect();
        let view_src = t.view_src().map(|v| self.add(v));
        let params = &t.raw().op_params;
        let n_params = params.iter().rposition(|&p| p != 0).map_or(0, |i| i + 1);
        let index = self.tensors.len();
        self.tensors.push(TensorRecord {
            name: t.name(),
            op: if op == Op::Other {
                self.host.op_name(t.raw().op)
            } else {
                op.name().to_owned()
            },
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
            uses: self.graph.uses(t),
            buffer: self.host.buffer_kind(t),
            region: match self.host.region(t) {
                Region::None => 0,
                Region::Fork => 1,
                Region::Join => 2,
                Region::Branch(b) => 16 + b as i32,
            },
        });
        self.index.insert(t.address(), index);
        index
    }
}
