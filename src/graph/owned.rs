//! Graphs in the host's layout that we own: built by hand, from a recording, or by `flashrt check`.

use super::dump::{GraphRecord, TensorRecord};
use super::raw::{RawGraph, RawHashSet, RawTensor, MAX_NAME, MAX_SRC, OP_PARAMS};
use super::{BufferKind, DType, GraphRef, HostView, Op, OpTable, Tensor, FLAG_COMPUTE};
use crate::abi::host::{FlashrtBufferKind, FlashrtHost, FLASHRT_ABI_VERSION};
use std::ffi::{c_char, c_int, c_void};

/// Index of a tensor in a [`GraphRecord`].
pub type TensorId = usize;

/// Why a record is not a graph.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A reference past the last tensor.
    #[error("tensor {tensor} ({name:?}) refers to tensor {reference}, but the record holds {count}")]
    DanglingReference {
        /// Who refers.
        tensor: usize,
        /// Its name.
        name: String,
        /// To whom.
        reference: usize,
        /// Tensors there are.
        count: usize,
    },
    /// More operands or parameters than ggml has room for.
    #[error("tensor {tensor} ({name:?}) has {what}: more than ggml holds")]
    TooMany {
        /// Which tensor.
        tensor: usize,
        /// Its name.
        name: String,
        /// What there is too much of.
        what: &'static str,
    },
    /// What no memory holds.
    #[error("tensor {tensor} ({name:?}) has the impossible shape {ne:?} with strides {nb:?} at {data:#x}")]
    Shape {
        /// Which tensor.
        tensor: usize,
        /// Its name.
        name: String,
        /// Its elements per dimension.
        ne: [i64; 4],
        /// Its strides.
        nb: [usize; 4],
        /// Its address.
        data: u64,
    },
    /// A result that is made of itself.
    #[error("tensor {tensor} ({name:?}) is an operand of itself, directly or through others")]
    Cycle {
        /// Which tensor.
        tensor: usize,
        /// Its name.
        name: String,
    },
}

/// Files of recorded graphs come from anywhere. What the code that reads them relies on, as ggml's own graphs have it: sums and
/// products of extents that do not overflow, and operands that come before what is made of them.
fn plausible(record: &GraphRecord) -> Result<(), BuildError> {
    const MOST_ELEMENTS: i64 = 1 << 48;
    for (tensor, t) in record.tensors.iter().enumerate() {
        let elements = t.ne.iter().try_fold(1i64, |n, &d| match d {
            0..=0x7fff_ffff => n.checked_mul(d.max(1)).filter(|n| *n <= MOST_ELEMENTS),
            _ => None,
        });
        let end = t.ne.iter().zip(&t.nb).try_fold(t.data, |end, (&n, &stride)| {
            let last = (n.max(1) as u64 - 1).checked_mul(stride as u64)?;
            end.checked_add(last).filter(|end| *end < 1 << 62)
        });
        if elements.is_none() || end.is_none() {
            return Err(BuildError::Shape {
                tensor,
                name: t.name.clone(),
                ne: t.ne,
                nb: t.nb,
                data: t.data,
            });
        }
    }
    // Depth first, without recursion: a tensor that is met again while what it is made of is still looked at.
    #[derive(Clone, Copy, PartialEq)]
    enum Seen {
        Not,
        Open,
        Done,
    }
    let operands = |i: usize| {
        let t = &record.tensors[i];
        t.src.iter().flatten().chain(&t.view_src).copied()
    };
    let mut seen = vec![Seen::Not; record.tensors.len()];
    let mut stack: Vec<usize> = (0..seen.len()).collect();
    while let Some(&i) = stack.last() {
        if seen[i] != Seen::Not {
            seen[i] = Seen::Done;
            stack.pop();
            continue;
        }
        seen[i] = Seen::Open;
        for operand in operands(i) {
            match seen[operand] {
                Seen::Not => stack.push(operand),
                Seen::Open => {
                    return Err(BuildError::Cycle {
                        tensor: i,
                        name: record.tensors[i].name.clone(),
                    })
                }
                Seen::Done => {}
            }
        }
    }
    Ok(())
}

/// Our operation codes are the operation numbers of a graph of ours.
static IDENTITY: [u8; 256] = {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        table[i] = i as u8;
        i += 1;
    }
    table
};

/// A graph in the host's layout.
pub struct OwnedGraph {
    // Tensors refer to each other by address: the slice is never moved or resized.
    tensors: Box<[RawTensor]>,
    _nodes: Vec<*mut RawTensor>,
    _used: Vec<u32>,
    _keys: Vec<*mut RawTensor>,
    _use_counts: Vec<i32>,
    graph: Box<RawGraph>,
    host: Box<FlashrtHost>,
}

// SAFETY: the pointers lead to memory that the graph itself owns and nobody writes.
unsafe impl Send for OwnedGraph {}
// SAFETY: as above.
unsafe impl Sync for OwnedGraph {}

impl OwnedGraph {
    /// Lays a record out as the host would.
    pub fn new(record: &GraphRecord) -> Result<OwnedGraph, BuildError> {
        let count = record.tensors.len();
        let tensors: Result<Vec<RawTensor>, _> = record
            .tensors
            .iter()
            .enumerate()
            .map(|(i, t)| raw_tensor(i, t))
            .collect();
        let mut tensors = tensors?.into_boxed_slice();
        let address = |tensors: &mut Box<[RawTensor]>, from: usize, to: usize| {
            let name = record.tensors.get(from).map(|t| t.name.clone()).unwrap_or_default();
            let dangling = BuildError::DanglingReference {
                tensor: from,
                name,
                reference: to,
                count,
            };
            tensors.get_mut(to).map(std::ptr::from_mut).ok_or(dangling)
        };
        for (i, t) in record.tensors.iter().enumerate() {
            for (slot, src) in t.src.iter().enumerate() {
                if let Some(src) = *src {
                    tensors[i].src[slot] = address(&mut tensors, i, src)?;
                }
            }
            if let Some(view) = t.view_src {
                tensors[i].view_src = address(&mut tensors, i, view)?;
            }
        }
        plausible(record)?;
        let mut nodes = Vec::with_capacity(record.nodes.len());
        for &n in &record.nodes {
            nodes.push(address(&mut tensors, n, n)?);
        }

        let size = (count * 2).max(1) | 1;
        let mut used = vec![0u32; size / 32 + 1];
        let mut keys = vec![std::ptr::null_mut(); size];
        let mut use_counts = vec![0i32; size];
        for (t, r) in tensors.iter_mut().zip(&record.tensors) {
            let key: *mut RawTensor = t;
            let mut slot = (key as usize >> 4) % size;
            while used[slot / 32] & (1 << (slot % 32)) != 0 {
                slot = (slot + 1) % size;
            }
            used[slot / 32] |= 1 << (slot % 32);
            keys[slot] = key;
            use_counts[slot] = r.uses;
        }
        let graph = Box::new(RawGraph {
            size: count as c_int,
            n_nodes: nodes.len() as c_int,
            n_leafs: (count - nodes.len().min(count)) as c_int,
            nodes: nodes.as_mut_ptr(),
            grads: std::ptr::null_mut(),
            grad_accs: std::ptr::null_mut(),
            leafs: std::ptr::null_mut(),
            use_counts: use_counts.as_mut_ptr(),
            visited: RawHashSet {
                size,
                used: used.as_mut_ptr(),
                keys: keys.as_mut_ptr(),
            },
            order: 0,
            uid: record.uid,
        });
        let host = Box::new(FlashrtHost {
            abi_version: FLASHRT_ABI_VERSION,
            struct_size: std::mem::size_of::<FlashrtHost>() as u32,
            context: std::ptr::without_provenance_mut(1),
            device: record.device,
            cc: record.cc,
            sm_count: 132,
            flags: 0,
            stream: std::ptr::null_mut(),
            op_codes: IDENTITY.as_ptr(),
            n_op_codes: IDENTITY.len() as u32,
            op_name: Some(op_name),
            buffer_kind: Some(buffer_kind),
            region: Some(region),
            log: Some(no_log),
            user: std::ptr::null_mut(),
        });
        Ok(OwnedGraph {
            tensors,
            _nodes: nodes,
            _used: used,
            _keys: keys,
            _use_counts: use_counts,
            graph,
            host,
        })
    }

    /// The graph as the engine sees it.
    pub fn graph(&self) -> GraphRef<'_> {
        // SAFETY: every pointer leads to memory that `self` owns.
        unsafe { GraphRef::from_raw(&*self.graph, OpTable::new(&IDENTITY)) }.expect("not null")
    }

    /// A host that runs this graph.
    pub fn host(&self) -> HostView<'_> {
        // SAFETY: the callbacks only read tensors of this graph.
        unsafe { HostView::from_raw(&*self.host) }.expect("not null")
    }

    /// The host struct, to change what it says.
    pub fn host_mut(&mut self) -> &mut FlashrtHost {
        &mut self.host
    }

    /// Tensor of the record with this index.
    pub fn tensor(&self, id: TensorId) -> Tensor<'_> {
        // SAFETY: owned by `self`.
        unsafe { Tensor::from_raw(&self.tensors[id]) }.expect("not null")
    }

    /// Index in the record of a tensor of this graph.
    pub fn id(&self, t: Tensor) -> Option<TensorId> {
        self.tensors.iter().position(|own| std::ptr::eq(own, t.raw()))
    }
}

fn raw_tensor(index: usize, t: &TensorRecord) -> Result<RawTensor, BuildError> {
    let too_many = |what| BuildError::TooMany {
        tensor: index,
        name: t.name.clone(),
        what,
    };
    let mut op_params = [0; OP_PARAMS];
    op_params
        .get_mut(..t.params.len())
        .ok_or(too_many("parameters"))?
        .copy_from_slice(&t.params);
    if t.src.len() > MAX_SRC {
        return Err(too_many("operands"));
    }
    let mut name = [0 as c_char; MAX_NAME];
    for (to, from) in name[..MAX_NAME - 1].iter_mut().zip(t.name.bytes()) {
        *to = from as c_char;
    }
    Ok(RawTensor {
        dtype: t.dtype,
        // Graphs of ours keep the buffer kind and the region where the host keeps pointers of its own.
        buffer: std::ptr::without_provenance_mut(t.buffer as usize),
        ne: t.ne,
        nb: t.nb,
        op: i32::from(t.code),
        op_params,
        flags: t.flags,
        src: [std::ptr::null_mut(); MAX_SRC],
        view_src: std::ptr::null_mut(),
        view_offs: t.view_offs,
        data: std::ptr::without_provenance_mut(t.data as usize),
        name,
        extra: std::ptr::without_provenance_mut(t.region as usize),
        padding: [0; 8],
    })
}

unsafe extern "C" fn buffer_kind(_user: *mut c_void, tensor: *const c_void) -> c_int {
    // SAFETY: called with tensors of an `OwnedGraph`.
    let kind = unsafe { (*tensor.cast::<RawTensor>()).buffer } as usize;
    match kind {
        k if k == BufferKind::Own as usize => FlashrtBufferKind::Own as c_int,
        k if k == BufferKind::OwnWeights as usize => FlashrtBufferKind::OwnWeights as c_int,
        _ => FlashrtBufferKind::Foreign as c_int,
    }
}

unsafe extern "C" fn region(_user: *mut c_void, tensor: *const c_void) -> c_int {
    // SAFETY: as above.
    (unsafe { (*tensor.cast::<RawTensor>()).extra }) as usize as c_int
}

unsafe extern "C" fn no_log(_user: *mut c_void, _level: c_int, _text: *const c_char) {}

unsafe extern "C" fn op_name(_op: c_int) -> *const c_char {
    c"OTHER".as_ptr()
}

/// Builds a [`GraphRecord`] the way ggml's own builders would: shapes by hand, strides, addresses and uses by itself.
pub struct GraphBuilder {
    record: GraphRecord,
    next_address: u64,
}

impl Default for GraphBuilder {
    fn default() -> Self {
        Self::new()
    }
}

impl GraphBuilder {
    /// An empty graph for an sm_90 device.
    pub fn new() -> Self {
        let record = GraphRecord {
            uid: 1,
            device: 0,
            cc: 90,
            tensors: Vec::new(),
            nodes: Vec::new(),
        };
        GraphBuilder {
            record,
            next_address: 1 << 20,
        }
    }

    fn push(&mut self, name: &str, op: Op, dtype: DType, ne: [i64; 4], buffer: BufferKind) -> TensorId {
        let mut nb = [dtype.block_bytes(); 4];
        nb[1] = nb[0] * (ne[0] as usize / dtype.block_len());
        nb[2] = nb[1] * ne[1] as usize;
        nb[3] = nb[2] * ne[2] as usize;
        let bytes = (nb[3] * ne[3] as usize) as u64;
        let data = self.next_address;
        self.next_address += bytes.next_multiple_of(256) + 256;
        self.record.tensors.push(TensorRecord {
            name: name.to_owned(),
            op: op.name().to_owned(),
            code: op as u8,
            dtype: dtype as i32,
            ne,
            nb,
            params: Vec::new(),
            flags: if op == Op::None { 0 } else { FLAG_COMPUTE },
            src: Vec::new(),
            view_src: None,
            view_offs: 0,
            data,
            uses: 0,
            buffer,
            region: 0,
        });
        self.record.tensors.len() - 1
    }

    /// A weight.
    pub fn weight(&mut self, name: &str, dtype: DType, ne: [i64; 4]) -> TensorId {
        self.push(name, Op::None, dtype, ne, BufferKind::OwnWeights)
    }

    /// An input or a cache: own memory that changes from run to run.
    pub fn input(&mut self, name: &str, dtype: DType, ne: [i64; 4]) -> TensorId {
        self.push(name, Op::None, dtype, ne, BufferKind::Own)
    }

    /// A node with a result of its own.
    pub fn node(&mut self, name: &str, op: Op, dtype: DType, ne: [i64; 4], src: &[Option<TensorId>]) -> TensorId {
        let id = self.push(name, op, dtype, ne, BufferKind::Own);
        self.connect(id, src);
        id
    }

    /// A node that shows another tensor's bytes: a view, a reshape, or an operation in place.
    pub fn view_node(
        &mut self,
        name: &str,
        op: Op,
        of: TensorId,
        ne: [i64; 4],
        offset: usize,
        src: &[Option<TensorId>],
    ) -> TensorId {
        let dtype = DType::from_number(self.record.tensors[of].dtype).expect("built by this builder");
        let address = self.next_address;
        let id = self.push(name, op, dtype, ne, self.record.tensors[of].buffer);
        self.next_address = address;
        let root = self.record.tensors[of].view_src.unwrap_or(of);
        self.record.tensors[id].view_src = Some(root);
        self.record.tensors[id].view_offs = offset;
        self.record.tensors[id].data = self.record.tensors[of].data + offset as u64;
        self.connect(id, src);
        id
    }

    fn connect(&mut self, id: TensorId, src: &[Option<TensorId>]) {
        for s in src.iter().flatten() {
            self.record.tensors[*s].uses += 1;
        }
        self.record.tensors[id].src = src.to_vec();
        self.record.nodes.push(id);
    }

    /// The record of a tensor, to set what the builder does not.
    pub fn tensor_mut(&mut self, id: TensorId) -> &mut TensorRecord {
        &mut self.record.tensors[id]
    }

    /// The finished record.
    pub fn finish(self) -> GraphRecord {
        self.record
    }
}
