//! Where the library expects the fields of the host's structs, by the host's own names. The C header carries these numbers and
//! the glue compares them with the host's structs when it is compiled.

use crate::graph::raw::{RawGraph, RawHashSet, RawTensor};
use std::mem::offset_of;

/// Fields and offsets of `ggml_tensor`.
pub const TENSOR: &[(&str, usize)] = &[
    ("type", offset_of!(RawTensor, dtype)),
    ("buffer", offset_of!(RawTensor, buffer)),
    ("ne", offset_of!(RawTensor, ne)),
    ("nb", offset_of!(RawTensor, nb)),
    ("op", offset_of!(RawTensor, op)),
    ("op_params", offset_of!(RawTensor, op_params)),
    ("flags", offset_of!(RawTensor, flags)),
    ("src", offset_of!(RawTensor, src)),
    ("view_src", offset_of!(RawTensor, view_src)),
    ("view_offs", offset_of!(RawTensor, view_offs)),
    ("data", offset_of!(RawTensor, data)),
    ("name", offset_of!(RawTensor, name)),
    ("extra", offset_of!(RawTensor, extra)),
];

/// Fields and offsets of `ggml_hash_set`.
pub const HASH_SET: &[(&str, usize)] = &[
    ("size", offset_of!(RawHashSet, size)),
    ("used", offset_of!(RawHashSet, used)),
    ("keys", offset_of!(RawHashSet, keys)),
];

/// Fields and offsets of `ggml_cgraph`.
pub const CGRAPH: &[(&str, usize)] = &[
    ("n_nodes", offset_of!(RawGraph, n_nodes)),
    ("nodes", offset_of!(RawGraph, nodes)),
    ("use_counts", offset_of!(RawGraph, use_counts)),
    ("visited_hash_set", offset_of!(RawGraph, visited)),
    ("uid", offset_of!(RawGraph, uid)),
];
