//! Layout of the host's structs. The glue asserts every size and offset used here at compile time.

use std::ffi::{c_char, c_int, c_void};

/// Dimensions of a tensor.
pub const MAX_DIMS: usize = 4;
/// Operands of a node.
pub const MAX_SRC: usize = 10;
/// 32-bit words of operation parameters.
pub const OP_PARAMS: usize = 16;
/// Bytes of a name.
pub const MAX_NAME: usize = 64;

/// `ggml_tensor`.
#[repr(C)]
pub struct RawTensor {
    /// `ggml_type` number.
    pub dtype: c_int,
    /// Buffer that holds the bytes.
    pub buffer: *mut c_void,
    /// Elements per dimension.
    pub ne: [i64; MAX_DIMS],
    /// Stride per dimension in bytes.
    pub nb: [usize; MAX_DIMS],
    /// `ggml_op` number of the host.
    pub op: c_int,
    /// Parameters of the operation.
    pub op_params: [i32; OP_PARAMS],
    /// `GGML_TENSOR_FLAG_*`.
    pub flags: i32,
    /// Operands; absent ones are null.
    pub src: [*mut RawTensor; MAX_SRC],
    /// Tensor whose bytes this one shows.
    pub view_src: *mut RawTensor,
    /// Offset into `view_src` in bytes.
    pub view_offs: usize,
    /// Device address.
    pub data: *mut c_void,
    /// NUL-terminated name.
    pub name: [c_char; MAX_NAME],
    /// The host's own.
    pub extra: *mut c_void,
    /// The host's own.
    pub padding: [u8; 8],
}

/// `ggml_hash_set`.
#[repr(C)]
pub struct RawHashSet {
    /// Slots.
    pub size: usize,
    /// One bit a slot.
    pub used: *mut u32,
    /// The tensor in each used slot.
    pub keys: *mut *mut RawTensor,
}

/// `ggml_cgraph`.
#[repr(C)]
pub struct RawGraph {
    /// Capacity.
    pub size: c_int,
    /// Nodes in use.
    pub n_nodes: c_int,
    /// Leafs in use.
    pub n_leafs: c_int,
    /// Nodes in execution order.
    pub nodes: *mut *mut RawTensor,
    /// Gradients; unused here.
    pub grads: *mut *mut RawTensor,
    /// Gradient accumulators; unused here.
    pub grad_accs: *mut *mut RawTensor,
    /// Leafs.
    pub leafs: *mut *mut RawTensor,
    /// Uses of each tensor, by slot of `visited`.
    pub use_counts: *mut i32,
    /// Every tensor of the graph.
    pub visited: RawHashSet,
    /// Evaluation order; unused here.
    pub order: c_int,
    /// Equal and non-zero: the same graph. 0: unknown.
    pub uid: u64,
}

const _: () = assert!(std::mem::size_of::<RawTensor>() == 336);
