//! Read-only view of the host's graph. Every unsafe read of a host struct lives in this module.

pub mod dump;
pub mod host;
mod op;
mod owned;
pub mod raw;

pub use host::{BufferKind, HostView, Region};
pub use op::{DType, Op};
pub use owned::{BuildError, GraphBuilder, OwnedGraph, TensorId};

use raw::{RawGraph, RawTensor, MAX_SRC};
use std::ffi::CStr;
use std::hash::{Hash, Hasher};

/// `GGML_TENSOR_FLAG_INPUT`: the host writes it between evaluations.
pub const FLAG_INPUT: i32 = 1;
/// `GGML_TENSOR_FLAG_OUTPUT`: somebody outside of the graph reads the result.
pub const FLAG_OUTPUT: i32 = 2;
/// `GGML_TENSOR_FLAG_COMPUTE`: the node is to be computed in this evaluation.
pub const FLAG_COMPUTE: i32 = 16;

/// One tensor of a graph. Two are equal when they are the same tensor, not when their contents are.
#[derive(Clone, Copy)]
pub struct Tensor<'g>(&'g RawTensor);

impl PartialEq for Tensor<'_> {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Tensor<'_> {}

impl Hash for Tensor<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.address().hash(state);
    }
}

impl std::fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.dtype().map_or("?", DType::name);
        write!(f, "{:?} {} {:?}", self.name(), name, self.0.ne)
    }
}

impl<'g> Tensor<'g> {
    /// # Safety
    /// `raw` is null or points to a `ggml_tensor` that outlives `'g`, as do its operands.
    pub unsafe fn from_raw(raw: *const RawTensor) -> Option<Tensor<'g>> {
        unsafe { raw.as_ref() }.map(Tensor)
    }

    /// Identity of the tensor: the address of its struct.
    pub fn address(self) -> usize {
        std::ptr::from_ref(self.0) as usize
    }

    /// The struct itself.
    pub fn raw(self) -> &'g RawTensor {
        self.0
    }

    /// Element type, unless it is one this version does not know.
    pub fn dtype(self) -> Option<DType> {
        DType::from_number(self.0.dtype)
    }

    /// Is the element type this one?
    pub fn is(self, dtype: DType) -> bool {
        self.0.dtype == dtype as i32
    }

    /// Elements per dimension.
    pub fn ne(self) -> [i64; 4] {
        self.0.ne
    }

    /// Stride per dimension in bytes.
    pub fn nb(self) -> [usize; 4] {
        self.0.nb
    }

    /// Rows: the product of all dimensions but the first.
    pub fn n_rows(self) -> i64 {
        self.0.ne[1] * self.0.ne[2] * self.0.ne[3]
    }

    /// Has it no elements?
    pub fn is_empty(self) -> bool {
        self.0.ne.contains(&0)
    }

    /// Same dimensions?
    pub fn same_shape(self, other: Tensor) -> bool {
        self.0.ne == other.0.ne
    }

    /// Elements lie one after another without gaps.
    pub fn is_contiguous(self) -> bool {
        let Some(dtype) = self.dtype() else { return false };
        let mut expected = dtype.block_bytes();
        for d in 0..4 {
            if self.0.ne[d] != 1 && self.0.nb[d] != expected {
                return false;
            }
            let n = self.0.ne[d] as usize;
            expected = if d == 0 {
                dtype.block_bytes() * (n / dtype.block_len())
            } else {
                expected * n
            };
        }
        true
    }

    /// Operand `i`.
    pub fn src(self, i: usize) -> Option<Tensor<'g>> {
        // SAFETY: operands live as long as the graph.
        unsafe { Tensor::from_raw(*self.0.src.get(i)?) }
    }

    /// The operands that are there.
    pub fn srcs(self) -> impl Iterator<Item = Tensor<'g>> {
        (0..MAX_SRC).filter_map(move |i| self.src(i))
    }

    /// Tensor whose bytes this one shows.
    pub fn view_src(self) -> Option<Tensor<'g>> {
        // SAFETY: as for operands.
        unsafe { Tensor::from_raw(self.0.view_src) }
    }

    /// Device address of the first element.
    pub fn data(self) -> usize {
        self.0.data as usize
    }

    /// Addresses from the first to past the last byte that the tensor's elements touch.
    pub fn byte_range(self) -> std::ops::Range<usize> {
        if self.is_empty() {
            return self.data()..self.data();
        }
        let (block_len, block_bytes) = self.dtype().map_or((1, 1), |d| (d.block_len(), d.block_bytes()));
        let row = if self.0.nb[0] == block_bytes {
            self.0.ne[0] as usize / block_len * block_bytes
        } else {
            (self.0.ne[0] as usize - 1) * self.0.nb[0] + block_bytes
        };
        let rest: usize = (1..4).map(|d| (self.0.ne[d] as usize - 1) * self.0.nb[d]).sum();
        self.data()..self.data() + row + rest
    }

    /// `GGML_TENSOR_FLAG_*` bits.
    pub fn flags(self) -> i32 {
        self.0.flags
    }

    /// Is it a result that somebody outside of the graph reads?
    pub fn is_output(self) -> bool {
        self.0.flags & FLAG_OUTPUT != 0
    }

    /// Integer parameter `i` of the operation.
    pub fn param_i32(self, i: usize) -> i32 {
        self.0.op_params[i]
    }

    /// Float parameter `i` of the operation.
    pub fn param_f32(self, i: usize) -> f32 {
        f32::from_bits(self.0.op_params[i] as u32)
    }

    /// Name, for messages.
    pub fn name(self) -> String {
        // SAFETY: the array is ours to read whole; a name without NUL reads as empty.
        let bytes = unsafe { std::slice::from_raw_parts(self.0.name.as_ptr().cast::<u8>(), self.0.name.len()) };
        CStr::from_bytes_until_nul(bytes)
            .map(|s| s.to_string_lossy().into_owned())
            .unwrap_or_default()
    }
}

/// Translates the host's operation numbers.
#[derive(Clone, Copy)]
pub struct OpTable<'g>(&'g [u8]);

impl<'g> OpTable<'g> {
    /// `codes[n]` is the [`Op`] code of the host's number `n`.
    pub fn new(codes: &'g [u8]) -> Self {
        OpTable(codes)
    }

    /// The operation with the host's number.
    pub fn get(self, number: i32) -> Op {
        usize::try_from(number)
            .ok()
            .and_then(|n| self.0.get(n))
            .map_or(Op::Other, |&code| Op::from_code(code))
    }
}

/// A graph of the host.
#[derive(Clone, Copy)]
pub struct GraphRef<'g> {
    raw: &'g RawGraph,
    ops: OpTable<'g>,
}

impl<'g> GraphRef<'g> {
    /// # Safety
    /// `raw` points to a `ggml_cgraph` whose arrays and tensors outlive `'g` and are not written meanwhile.
    pub unsafe fn from_raw(raw: *const RawGraph, ops: OpTable<'g>) -> Option<GraphRef<'g>> {
        unsafe { raw.as_ref() }.map(|raw| GraphRef { raw, ops })
    }

    /// Identity of the graph; 0: unknown, compare contents.
    pub fn uid(self) -> u64 {
        self.raw.uid
    }

    /// Number of nodes.
    pub fn len(self) -> usize {
        self.raw.n_nodes.max(0) as usize
    }

    /// Has it no nodes?
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Addresses of the nodes in execution order.
    pub fn node_addresses(self) -> &'g [usize] {
        if self.is_empty() {
            return &[];
        }
        // SAFETY: `nodes` holds `n_nodes` pointers; a pointer and a usize have one layout.
        unsafe { std::slice::from_raw_parts(self.raw.nodes.cast::<usize>(), self.len()) }
    }

    /// Node `i` in execution order.
    ///
    /// # Panics
    /// When there is no node `i`.
    pub fn node(self, i: usize) -> Tensor<'g> {
        let address = self.node_addresses()[i];
        // SAFETY: every node of a graph is a live tensor.
        unsafe { Tensor::from_raw(address as *const RawTensor) }.expect("a graph holds no null nodes")
    }

    /// All nodes in execution order.
    pub fn nodes(self) -> impl Iterator<Item = Tensor<'g>> {
        (0..self.len()).map(move |i| self.node(i))
    }

    /// Operation of a tensor.
    pub fn op(self, t: Tensor) -> Op {
        self.ops.get(t.0.op)
    }

    /// How often nodes of the whole graph use this tensor as an operand. 0 for a tensor the graph does not know.
    pub fn uses(self, t: Tensor) -> i32 {
        let set = &self.raw.visited;
        if set.size == 0 || set.used.is_null() || self.raw.use_counts.is_null() {
            return 0;
        }
        let start = (t.address() >> 4) % set.size;
        let mut i = start;
        loop {
            // SAFETY: `i < size`; `used` has a bit, `keys` and `use_counts` an entry for every slot.
            unsafe {
                if *set.used.add(i >> 5) & (1 << (i & 31)) == 0 {
                    return 0;
                }
                if *set.keys.add(i) as usize == t.address() {
                    return *self.raw.use_counts.add(i);
                }
            }
            i = (i + 1) % set.size;
            if i == start {
                return 0;
            }
        }
    }
}
