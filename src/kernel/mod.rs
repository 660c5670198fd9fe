//! One launcher per entry of `csrc/flashrt_kernels.h`, with `#[repr(C)]` mirrors of its argument structs.
//!
//! Pointers are device memory, strides are in elements, `*_bytes` in bytes. A launcher never synchronises and never
//! allocates. It trusts what a window's guard has checked; what the header calls an unsupported combination comes back
//! as an error without a launch. Without feature `cuda` every launcher answers [`CudaError::NotCompiled`].

pub mod cudart;
mod ffi;
mod modules;
mod self_check;

use std::ffi::{c_int, c_void};

use crate::graph::DType;
pub use modules::{Module, MODULES};
pub use self_check::{self_check, WEIGHT_TYPES};

/// Weight types that [`mm`] reads.
pub const MM_WEIGHT_TYPES: [DType; 16] = [
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
    DType::MXFP4,
    DType::NVFP4,
];

/// Experts that [`moe_route`] and [`moe_mm`] take at most.
pub const MOE_MAX_EXPERTS: usize = 1024;

/// Rows of activations that [`gemv`] takes at most.
pub const MAX_TOKENS: usize = 8;

/// Why a launch or a runtime call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// This build has no kernels.
    #[error("built without feature `cuda`")]
    NotCompiled,
    /// The CUDA runtime refused.
    #[error("{name} ({code})")]
    Runtime {
        /// `cudaError_t`
        code: i32,
        /// What `cudaGetErrorName` calls it.
        name: String,
    },
}

impl CudaError {
    /// Turns a `cudaError_t` into a result. The runtime also keeps the error for `cudaGetLastError`; taken from there,
    /// the host does not trip over it.
    fn check(code: c_int) -> Result<(), CudaError> {
        match code {
            0 => Ok(()),
            ffi::NOT_COMPILED => Err(CudaError::NotCompiled),
            code => {
                // SAFETY: no arguments.
                unsafe { ffi::cudaGetLastError() };
                Err(CudaError::Runtime {
                    code,
                    name: ffi::error_name(code),
                })
            }
        }
    }
}

/// How to launch.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// `cudaStream_t`
    pub stream: *mut c_void,
    /// 1: join programmatic dependent launch. Ignored where the loaded code has none.
    pub pdl: i32,
    /// Multiprocessors of the device.
    pub sm_count: i32,
    /// Compute capability times 10.
    pub cc: i32,
}

/// Activations quantised to 8 bits in blocks of 32: `x[i] ~ d * qs[i]`. Null pointers: no hand-off.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Q8 {
    /// `[n_tokens][k]`, rows 16-byte aligned.
    pub qs: *mut i8,
    /// `[n_tokens][k / 32][2]`: `d = max|x| / 127` and `s = d * sum(qs)`.
    pub ds: *mut f32,
}

impl Q8 {
    /// No hand-off.
    pub const NONE: Q8 = Q8 {
        qs: std::ptr::null_mut(),
        ds: std::ptr::null_mut(),
    };
}

/// Activations as f16 in the layout that Hopper's tensor cores read, each row scaled by a power of two: `x[i] ~ scale * h[i]`. Null
/// pointers: no hand-off.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct H16 {
    /// f16, `[k / 64][n_tokens rounded up to 8][64]`, on [`H16::ALIGN`] bytes. Of each 64 values the piece of 16 bytes `c < 8` lies
    /// at `c ^ (token % 8)` and holds, for `q` from 0 to 3, the values `16 q + 2 c` and `16 q + 2 c + 1`.
    pub x: *mut c_void,
    /// `[n_tokens]`: the value is `scale * x`.
    pub scale: *mut f32,
}

impl H16 {
    /// No hand-off.
    pub const NONE: H16 = H16 {
        x: std::ptr::null_mut(),
        scale: std::ptr::null_mut(),
    };
    /// Alignment of `x`.
    pub const ALIGN: usize = 128;
    /// Values of a row that lie together: `k` is a multiple of it.
    pub const COLUMNS: usize = 64;

    /// Bytes of `x`.
    pub fn bytes(k: usize, n_tokens: usize) -> usize {
        k / H16::COLUMNS * n_tokens.next_multiple_of(8) * H16::COLUMNS * 2
    }

    /// Offset in bytes of value `i` of a token.
    pub fn offset(token: usize, i: usize, n_tokens: usize) -> usize {
        let row = i / H16::COLUMNS * n_tokens.next_multiple_of(8) + token;
        let (q, piece, half) = (i % H16::COLUMNS / 16, i % 16 / 2, i % 2);
        (row * H16::COLUMNS + (piece ^ (token % 8)) * 8 + 2 * q + half) * 2
    }
}

/// Arguments of [`norm`]. With `w1`: `y = x + rms_norm(h, eps1) * w1`, without: `y = x + h`; then
/// `z = rms_norm(y, eps2) * w2`. `y` and `z` may lie exactly over `h` or `x`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct NormArgs {
    /// `[n_rows][n_cols]`
    pub h: *const f32,
    /// Elements between rows of `h`.
    pub h_stride: i64,
    /// Residual, `[n_rows][n_cols]`
    pub x: *const f32,
    /// Elements between rows of `x`.
    pub x_stride: i64,
    /// `[n_cols]`, or null for the form without a post-norm.
    pub w1: *const f32,
    /// `[n_cols]`
    pub w2: *const f32,
    /// Sum, `[n_rows][n_cols]`, or null when nobody reads it.
    pub y: *mut f32,
    /// Elements between rows of `y`.
    pub y_stride: i64,
    /// Normalised sum, `[n_rows][n_cols]`, or null when only `zq` or `zh` is wanted.
    pub z: *mut f32,
    /// Elements between rows of `z`.
    pub z_stride: i64,
    /// `z` as q8 blocks.
    pub zq: Q8,
    /// `z` as f16; `n_cols` is then a multiple of [`H16::COLUMNS`].
    pub zh: H16,
    /// Tokens.
    pub n_rows: i32,
    /// Values of a token.
    pub n_cols: i32,
    /// Added to the mean square of `h`.
    pub eps1: f32,
    /// Added to the mean square of `y`.
    pub eps2: f32,
}

/// The function between gate and up; numbers are ggml's `ggml_glu_op`.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Glu {
    /// A plain mat-vec.
    None = -1,
    /// `max(0, gate)`
    Reglu = 0,
    /// Gate through GELU's tanh approximation.
    Geglu = 1,
    /// Gate through SiLU.
    Swiglu = 2,
    /// Gate through exact GELU.
    GegluErf = 4,
    /// Gate through `g * sigmoid(1.702 g)`.
    GegluQuick = 5,
}

/// One weight matrix of a mat-vec and where its result goes:
/// `dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r])`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GemvSeg {
    /// Rows of quantised or 16-bit weights.
    pub w: *const c_void,
    /// Bytes between rows of `w`.
    pub row_bytes: i64,
    /// `[n_tokens][n_rows]`
    pub dst: *mut f32,
    /// Elements between tokens of `dst`.
    pub dst_stride: i64,
    /// `[n_rows]` or null.
    pub bias: *const f32,
    /// `[n_tokens][n_rows]` or null; may lie exactly over `dst`.
    pub res: *const f32,
    /// Elements between tokens of `res`.
    pub res_stride: i64,
    /// Rows of `w`.
    pub n_rows: i32,
}

impl GemvSeg {
    /// No segment.
    pub const NONE: GemvSeg = GemvSeg {
        w: std::ptr::null(),
        row_bytes: 0,
        dst: std::ptr::null_mut(),
        dst_stride: 0,
        bias: std::ptr::null(),
        res: std::ptr::null(),
        res_stride: 0,
        n_rows: 0,
    };
}

/// Arguments of [`gemv`]: one to three matrices of one type that multiply the same input, or with `glu` gate and up.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct GemvArgs {
    /// `ggml_type` of all segments' weights.
    pub ty: i32,
    /// Segments in use.
    pub n_seg: i32,
    /// The segments; `[gate, up]` with `glu`.
    pub seg: [GemvSeg; 3],
    /// Values of a weight row.
    pub k: i32,
    /// At most [`MAX_TOKENS`].
    pub n_tokens: i32,
    /// Input, `[n_tokens][k]`
    pub x: *const f32,
    /// Elements between tokens of `x`.
    pub x_stride: i64,
    /// Input as q8 blocks; where it is null quantised weights make the blocks from `x`.
    pub xq: Q8,
    /// A [`Glu`].
    pub glu: i32,
}

/// Which values of a head RoPE pairs.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeMode {
    /// No rotation.
    None = 0,
    /// Adjacent values.
    Normal = 1,
    /// The two halves of the first `n_dims` values.
    Neox = 2,
}

/// Q, K or V for [`qkv_tail`]: per head `v = src; v = rms_norm(v, eps) * norm_w; v = rope(v, pos[t]); v *= scale`,
/// stored at `dst + row * row_bytes + head * head_bytes`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QkvPart {
    /// `[n_tokens][n_heads][head_dim]`
    pub src: *const f32,
    /// Elements between tokens of `src`.
    pub src_stride: i64,
    /// Where heads are stored.
    pub dst: *mut c_void,
    /// Bytes between rows of `dst`.
    pub row_bytes: i64,
    /// Bytes between heads of a row.
    pub head_bytes: i64,
    /// Row of each token, or null: row = token.
    pub rows: *const c_void,
    /// 1: `rows` is i64, 0: i32.
    pub rows_i64: i32,
    /// `ggml_type` of `dst`: 0 f32, 1 f16, 30 bf16.
    pub dst_type: i32,
    /// Heads.
    pub n_heads: i32,
    /// Values of a head.
    pub head_dim: i32,
    /// `[head_dim]` or null: no norm.
    pub norm_w: *const f32,
    /// Added to the mean square.
    pub eps: f32,
    /// A [`RopeMode`].
    pub rope: i32,
    /// 1 when there is none.
    pub scale: f32,
}

impl QkvPart {
    /// No part.
    pub const NONE: QkvPart = QkvPart {
        src: std::ptr::null(),
        src_stride: 0,
        dst: std::ptr::null_mut(),
        row_bytes: 0,
        head_bytes: 0,
        rows: std::ptr::null(),
        rows_i64: 0,
        dst_type: 0,
        n_heads: 0,
        head_dim: 0,
        norm_w: std::ptr::null(),
        eps: 0.0,
        rope: RopeMode::None as i32,
        scale: 1.0,
    };
}

/// RoPE as ggml defines it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Rope {
    /// `[n_tokens]`
    pub pos: *const i32,
    /// `[n_dims / 2]` or null.
    pub freq_factors: *const f32,
    /// Rotated values of a head.
    pub n_dims: i32,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Position interpolation.
    pub freq_scale: f32,
    /// YaRN's mix; 0 turns YaRN off.
    pub ext_factor: f32,
    /// Magnitude.
    pub attn_factor: f32,
    /// First of `ggml_rope_yarn_corr_dims`.
    pub corr_low: f32,
    /// Second of `ggml_rope_yarn_corr_dims`.
    pub corr_high: f32,
}

impl Rope {
    /// For parts without rotation.
    pub const NONE: Rope = Rope {
        pos: std::ptr::null(),
        freq_factors: std::ptr::null(),
        n_dims: 0,
        freq_base: 1.0,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        corr_low: 0.0,
        corr_high: 0.0,
    };
}

/// Arguments of [`qkv_tail`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct QkvTailArgs {
    /// The parts.
    pub part: [QkvPart; 3],
    /// Parts in use.
    pub n_parts: i32,
    /// Tokens.
    pub n_tokens: i32,
    /// Shared by all parts that rotate.
    pub rope: Rope,
}

/// Head sizes that [`dec_attn`] has kernels for.
pub const DEC_ATTN_HEAD_DIMS: [i32; 5] = [64, 80, 96, 128, 256];

/// Heads and tokens that share the keys in one block of [`dec_attn`], at most.
pub const DEC_ATTN_COLUMNS: usize = 8;

/// Arguments of [`dec_attn`]: per stream, token and head `dst = softmax(cap(scale * q . k) + mask) . v`. Heads of `q` share those
/// of `k` and `v`, which are f16, in groups. Pointers and strides of `q`, `k` and `v` are multiples of 16 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DecAttnArgs {
    /// Queries.
    pub q: *const f32,
    /// Bytes between tokens of `q`.
    pub q_token_bytes: i64,
    /// Bytes between heads of `q`.
    pub q_head_bytes: i64,
    /// Bytes between streams of `q`.
    pub q_stream_bytes: i64,
    /// Keys.
    pub k: *const c_void,
    /// Bytes between rows of `k`.
    pub k_row_bytes: i64,
    /// Bytes between heads of `k`.
    pub k_head_bytes: i64,
    /// Bytes between streams of `k`.
    pub k_stream_bytes: i64,
    /// Values.
    pub v: *const c_void,
    /// Bytes between rows of `v`.
    pub v_row_bytes: i64,
    /// Bytes between heads of `v`.
    pub v_head_bytes: i64,
    /// Bytes between streams of `v`.
    pub v_stream_bytes: i64,
    /// f16, `[n_kv]` for each token, or null.
    pub mask: *const c_void,
    /// Bytes between tokens of `mask`.
    pub mask_token_bytes: i64,
    /// Bytes between streams of `mask`; 0: all have the same.
    pub mask_stream_bytes: i64,
    /// `[n_streams][n_tokens][n_heads][head_dim]`
    pub dst: *mut f32,
    /// [`dec_attn_scratch`] bytes.
    pub scratch: *mut f32,
    /// A counter for each stream, head of `k` and [`DEC_ATTN_COLUMNS`] columns, needed with more than one split: zero before the
    /// first launch, left zero by every launch.
    pub tickets: *mut u32,
    /// One of [`DEC_ATTN_HEAD_DIMS`].
    pub head_dim: i32,
    /// Heads of `q`.
    pub n_heads: i32,
    /// Heads of `k` and `v`.
    pub n_heads_kv: i32,
    /// Tokens of a stream.
    pub n_tokens: i32,
    /// Rows of `k` and `v`.
    pub n_kv: i32,
    /// Sequences with keys of their own.
    pub n_streams: i32,
    /// Parts that the keys may be cut into.
    pub max_splits: i32,
    /// Factor of `q . k`.
    pub scale: f32,
    /// `cap(s) = softcap * tanh(s / softcap)`; 0: `cap(s) = s`.
    pub softcap: f32,
}

/// What a mask does to each tile of tokens x keys: see [`mask_tiles`]. Null pointers: no mask.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    /// `[n_planes][token tiles][key tiles]`: 0 every value is -inf, 1 every value is 0, 3 neither.
    pub kind: *mut u8,
    /// `[n_planes][token tiles]`: how many tiles of a row are of kind 3.
    pub partial_count: *mut i32,
    /// `[n_planes][token tiles][key tiles]`: which, ascending.
    pub partial_index: *mut i32,
    /// Likewise of kind 1.
    pub full_count: *mut i32,
    /// Likewise of kind 1.
    pub full_index: *mut i32,
}

impl Tiles {
    /// No mask.
    pub const NONE: Tiles = Tiles {
        kind: std::ptr::null_mut(),
        partial_count: std::ptr::null_mut(),
        partial_index: std::ptr::null_mut(),
        full_count: std::ptr::null_mut(),
        full_index: std::ptr::null_mut(),
    };
}

/// Tokens and keys of a tile of a mask, and how many token tiles and key tiles it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TileGrid {
    /// Tokens of a tile.
    pub tile_m: usize,
    /// Keys of a tile.
    pub tile_n: usize,
    /// Masks, of a stream each.
    pub n_planes: usize,
    /// Token tiles of a plane.
    pub token_tiles: usize,
    /// Key tiles.
    pub key_tiles: usize,
}

impl TileGrid {
    fn rows(self) -> usize {
        self.n_planes * self.token_tiles
    }

    /// Bytes of [`Tiles`].
    pub fn bytes(self) -> usize {
        let tiles = self.rows() * self.key_tiles;
        8 * (self.rows() + tiles) + tiles
    }

    /// [`Tiles`] at an address.
    pub fn at(self, address: usize) -> Tiles {
        let (counts, indices) = (4 * self.rows(), 4 * self.rows() * self.key_tiles);
        Tiles {
            partial_count: address as _,
            full_count: (address + counts) as _,
            partial_index: (address + 2 * counts) as _,
            full_index: (address + 2 * counts + indices) as _,
            kind: (address + 2 * counts + 2 * indices) as _,
        }
    }
}

/// Arguments of [`mask_tiles`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MaskTilesArgs {
    /// f16, `[n_planes][n_tokens][n_kv]`
    pub mask: *const c_void,
    /// Bytes between tokens of `mask`.
    pub token_bytes: i64,
    /// Bytes between planes of `mask`.
    pub plane_bytes: i64,
    /// Masks, of a stream each.
    pub n_planes: i32,
    /// Tokens of a plane.
    pub n_tokens: i32,
    /// Keys.
    pub n_kv: i32,
    /// Tokens of a tile.
    pub tile_m: i32,
    /// Keys of a tile, a multiple of 8.
    pub tile_n: i32,
    /// The result.
    pub tiles: Tiles,
}

/// Arguments of [`prefill_fa4`]: per stream, token and head `dst = softmax(scale * q . k + mask) . v`. Heads of `q` share those of `k`
/// and `v`, which are f16, in groups. Pointers and strides of `q`, `k` and `v` are multiples of 16 bytes, those of `mask` of 4.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PrefillFa4Args {
    /// Queries.
    pub q: *const f32,
    /// Bytes between tokens of `q`.
    pub q_token_bytes: i64,
    /// Bytes between heads of `q`.
    pub q_head_bytes: i64,
    /// Bytes between streams of `q`.
    pub q_stream_bytes: i64,
    /// Keys.
    pub k: *const c_void,
    /// Bytes between rows of `k`.
    pub k_row_bytes: i64,
    /// Bytes between heads of `k`.
    pub k_head_bytes: i64,
    /// Bytes between streams of `k`.
    pub k_stream_bytes: i64,
    /// Values.
    pub v: *const c_void,
    /// Bytes between rows of `v`.
    pub v_row_bytes: i64,
    /// Bytes between heads of `v`.
    pub v_head_bytes: i64,
    /// Bytes between streams of `v`.
    pub v_stream_bytes: i64,
    /// f16, `[n_kv]` for each token, on an even number of values.
    pub mask: *const c_void,
    /// Bytes between tokens of `mask`.
    pub mask_token_bytes: i64,
    /// Bytes between streams of `mask`; 0: all have the same.
    pub mask_stream_bytes: i64,
    /// From [`mask_tiles`], for `mask_tokens` tokens a plane.
    pub tiles: Tiles,
    /// `[n_streams][n_tokens][n_heads][head_dim_v]`
    pub dst: *mut f32,
    /// [`prefill_fa4_scratch`] bytes.
    pub scratch: *mut c_void,
    /// Values of a head of `q` and `k`.
    pub head_dim: i32,
    /// Values of a head of `v`.
    pub head_dim_v: i32,
    /// Heads of `q`.
    pub n_heads: i32,
    /// Heads of `k` and `v`.
    pub n_heads_kv: i32,
    /// Tokens of a stream.
    pub n_tokens: i32,
    /// Rows of `k` and `v`.
    pub n_kv: i32,
    /// Sequences with keys of their own.
    pub n_streams: i32,
    /// Tokens that the mask has, at least `n_tokens`.
    pub mask_tokens: i32,
    /// Tokens of a tile, as the module has it.
    pub tile_m: i32,
    /// Keys of a tile, as the module has it.
    pub tile_n: i32,
    /// Factor of `q . k`, above 0.
    pub scale: f32,
}

/// Arguments of [`mm`]: `dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r])`, or with `glu`
/// `dst[t][r] = act(w[r] . x[t]) * (w2[r] . x[t])`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MmArgs {
    /// `ggml_type` of `w` and `w2`.
    pub ty: i32,
    /// A [`Glu`].
    pub glu: i32,
    /// Weights, or the gate's.
    pub w: *const c_void,
    /// With `glu` the weights of up, shaped like `w`.
    pub w2: *const c_void,
    /// Bytes between rows of weights.
    pub row_bytes: i64,
    /// Rows of weights.
    pub n_rows: i32,
    /// Values of a row, a multiple of [`H16::COLUMNS`].
    pub k: i32,
    /// Rows of activations.
    pub n_tokens: i32,
    /// Input, `[n_tokens][k]`
    pub x: H16,
    /// `[n_tokens][n_rows]`
    pub dst: *mut f32,
    /// Elements between tokens of `dst`.
    pub dst_stride: i64,
    /// `[n_rows]` or null.
    pub bias: *const f32,
    /// `[n_tokens][n_rows]` or null; may lie exactly over `dst`.
    pub res: *const f32,
    /// Elements between tokens of `res`.
    pub res_stride: i64,
}

/// Arguments of [`to_h16`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct H16Args {
    /// `[n_tokens][k]`, rows on 16 bytes.
    pub x: *const f32,
    /// Elements between rows of `x`.
    pub x_stride: i64,
    /// `x` as f16.
    pub y: H16,
    /// Values of a row, a multiple of [`H16::COLUMNS`].
    pub k: i32,
    /// Rows.
    pub n_tokens: i32,
}

/// Which rows each expert multiplies: the routed pairs (token, slot) in the order of their experts, and within one by token and
/// slot. Each expert's rows begin at a multiple of 8. Pairs whose id is no expert are left out.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MoeRows {
    /// `[`[`moe_max_rows`]`]`: `token * n_used + slot` of the pair at each place, -1 where there is none.
    pub rows: *mut i32,
    /// `[n_experts + 1]`: first place of each expert; the last: all places.
    pub begin: *mut i32,
    /// `[n_experts]`: pairs of each expert.
    pub count: *mut i32,
}

/// Arguments of [`moe_route`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MoeRouteArgs {
    /// `[n_tokens][n_used]`: an expert for each slot of each token.
    pub ids: *const i32,
    /// Elements between tokens of `ids`.
    pub ids_stride: i64,
    /// Tokens.
    pub n_tokens: i32,
    /// Slots of a token.
    pub n_used: i32,
    /// At most [`MOE_MAX_EXPERTS`].
    pub n_experts: i32,
    /// The result.
    pub out: MoeRows,
}

/// Arguments of [`moe_to_h16`]. The row of `x` for a pair `(t, s)` is `t`, or with `per_slot` `t * n_used + s`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MoeH16Args {
    /// `[n_tokens][k]`, or with `per_slot` `[n_tokens][n_used][k]`, rows on 16 bytes.
    pub x: *const f32,
    /// Elements between rows of `x`.
    pub x_stride: i64,
    /// `x` as f16 in the order of `route`, [`moe_max_rows`] rows.
    pub y: H16,
    /// From [`moe_route`].
    pub route: MoeRows,
    /// Values of a row, a multiple of [`H16::COLUMNS`].
    pub k: i32,
    /// Tokens times slots.
    pub n_pairs: i32,
    /// Slots of a token.
    pub n_used: i32,
    /// Experts.
    pub n_experts: i32,
    /// 1: each slot has an input of its own, 0: all slots of a token share one.
    pub per_slot: i32,
}

/// Arguments of [`moe_mm`]: for each routed pair `p = token * n_used + slot` with its expert `e`
/// `dst[p][r] = sum_k w[e][r][k] * x[p][k]`, or with `glu` `dst[p][r] = act(w[e][r] . x[p]) * (w2[e][r] . x[p])`. Rows of pairs
/// without an expert are not written.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MoeMmArgs {
    /// `ggml_type` of `w` and `w2`.
    pub ty: i32,
    /// A [`Glu`].
    pub glu: i32,
    /// `[n_experts][n_rows]` rows of weights, or of the gate's.
    pub w: *const c_void,
    /// With `glu` the weights of up, laid out like `w`.
    pub w2: *const c_void,
    /// Bytes between rows of weights.
    pub row_bytes: i64,
    /// Bytes between experts.
    pub expert_bytes: i64,
    /// Rows of an expert.
    pub n_rows: i32,
    /// Values of a row, a multiple of [`H16::COLUMNS`].
    pub k: i32,
    /// Tokens times slots.
    pub n_pairs: i32,
    /// Experts.
    pub n_experts: i32,
    /// From [`moe_to_h16`].
    pub x: H16,
    /// From [`moe_route`].
    pub route: MoeRows,
    /// `[n_pairs][n_rows]`
    pub dst: *mut f32,
    /// Elements between pairs of `dst`.
    pub dst_stride: i64,
}

/// `columns` (tokens times heads that share keys) with those that a block of [`dec_attn`] carries along unused.
pub fn dec_attn_columns(columns: usize) -> usize {
    columns
        .next_power_of_two()
        .min(columns.next_multiple_of(DEC_ATTN_COLUMNS))
}

/// Bytes of scratch that [`dec_attn`] needs; none when the keys stay in one piece.
pub fn dec_attn_scratch(args: &DecAttnArgs) -> usize {
    if args.max_splits <= 1 {
        return 0;
    }
    let columns = dec_attn_columns(args.n_tokens as usize * (args.n_heads / args.n_heads_kv) as usize);
    let units = args.max_splits as usize * args.n_streams as usize * args.n_heads_kv as usize;
    units * columns * ((args.head_dim as usize).next_power_of_two() + 2) * 4
}

/// ADD_NORM and SANDWICH_NORM.
pub fn norm(args: &NormArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: reads `args` only; the kernel touches device memory alone.
    CudaError::check(unsafe { ffi::frt_norm(args, launch) })
}

/// QKV_GEMV's mat-vecs, GLU_GEMV and GEMV_RES.
pub fn gemv(args: &GemvArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_gemv(args, launch) })
}

/// Whether [`gemv`] has an instantiation for this weight type and shape, and the current device shared memory for it.
/// Without feature `cuda` there is no device, and only the type and the shape are judged.
pub fn gemv_supports(ty: i32, k: i32, n_tokens: i32, glu: Glu) -> bool {
    // SAFETY: plain values.
    match unsafe { ffi::frt_gemv_supports(ty, k, n_tokens, glu as i32) } {
        ffi::NOT_COMPILED => {
            let multiple = match DType::from_number(ty) {
                Some(DType::F16 | DType::BF16) => 8,
                Some(DType::Q4_0 | DType::Q5_0 | DType::Q8_0) => 32,
                Some(DType::Q4_K | DType::Q5_K | DType::Q6_K) => 256,
                _ => return false,
            };
            k >= multiple && k % multiple == 0 && (1..=MAX_TOKENS as i32).contains(&n_tokens)
        }
        supported => supported == 1,
    }
}

/// Norm, RoPE, scale and store of Q, K and V after their mat-vecs.
pub fn qkv_tail(args: &QkvTailArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_qkv_tail(args, launch) })
}

/// DEC_ATTN.
pub fn dec_attn(args: &DecAttnArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_dec_attn(args, launch) })
}

/// Classifies the tiles of a mask for [`prefill_fa4`].
pub fn mask_tiles(args: &MaskTilesArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_mask_tiles(args, launch) })
}

/// Bytes of scratch that [`prefill_fa4`] needs: queries and results as f16.
pub fn prefill_fa4_scratch(args: &PrefillFa4Args) -> usize {
    let rows = args.n_streams as usize * args.n_tokens as usize * args.n_heads as usize;
    rows * (args.head_dim + args.head_dim_v) as usize * 2
}

/// PREFILL_FA4.
pub fn prefill_fa4(args: &PrefillFa4Args, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_prefill_fa4(args, launch) })
}

/// Whether this build has a module for these heads, and the current device can run it. Loads it: not while a stream is being captured.
/// `None` without feature `cuda`, where there is no device to ask.
pub fn prefill_fa4_supports(head_dim: i32, head_dim_v: i32) -> Option<bool> {
    // SAFETY: plain values.
    match unsafe { ffi::frt_prefill_fa4_supports(head_dim, head_dim_v) } {
        ffi::NOT_COMPILED => None,
        supported => Some(supported == 1),
    }
}

/// The attention modules in this build, by name; empty without feature `fa4`.
pub fn prefill_fa4_modules() -> String {
    ffi::prefill_fa4_modules()
}

/// MM_PREFILL, MM_RES and GEGLU_FFN.
pub fn mm(args: &MmArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_mm(args, launch) })
}

/// Whether [`mm`] has an instantiation for this weight type and row length, and the current device can run it. Without feature
/// `cuda` there is no device, and only the type and the length are judged.
pub fn mm_supports(ty: i32, k: i32, glu: Glu) -> bool {
    // SAFETY: plain values.
    match unsafe { ffi::frt_mm_supports(ty, k, glu as i32) } {
        ffi::NOT_COMPILED => {
            let known = DType::from_number(ty).filter(|d| MM_WEIGHT_TYPES.contains(d));
            known.is_some_and(|d| k > 0 && k as usize % d.block_len().max(H16::COLUMNS) == 0)
        }
        supported => supported == 1,
    }
}

/// f32 rows as f16 for [`mm`].
pub fn to_h16(args: &H16Args, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_to_h16(args, launch) })
}

/// The routed pairs of MOE_FFN and MOE_PREFILL by expert.
pub fn moe_route(args: &MoeRouteArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_moe_route(args, launch) })
}

/// Places of `n_pairs` routed pairs, at most: each expert's rows begin at a multiple of 8.
pub fn moe_max_rows(n_pairs: i32, n_experts: i32) -> i32 {
    // SAFETY: plain values.
    match unsafe { ffi::frt_moe_max_rows(n_pairs, n_experts) } {
        ffi::NOT_COMPILED => (n_pairs + 7 * n_experts + 7) / 8 * 8,
        places => places,
    }
}

/// f32 rows as f16 for [`moe_mm`], in the order of the route.
pub fn moe_to_h16(args: &MoeH16Args, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_moe_to_h16(args, launch) })
}

/// MOE_FFN and MOE_PREFILL.
pub fn moe_mm(args: &MoeMmArgs, launch: Launch) -> Result<(), CudaError> {
    // SAFETY: as in `norm`.
    CudaError::check(unsafe { ffi::frt_moe_mm(args, launch) })
}

/// Whether [`moe_mm`] has an instantiation for this weight type, row length and number of experts; see [`mm_supports`].
pub fn moe_mm_supports(ty: i32, k: i32, glu: Glu, n_experts: i32) -> bool {
    // SAFETY: plain values.
    match unsafe { ffi::frt_moe_mm_supports(ty, k, glu as i32, n_experts) } {
        ffi::NOT_COMPILED => (1..=MOE_MAX_EXPERTS as i32).contains(&n_experts) && mm_supports(ty, k, glu),
        supported => supported == 1,
    }
}

/// Architectures the kernels were compiled for, such as "sm_90a compute_90"; empty without feature `cuda`.
pub fn archs() -> String {
    ffi::archs()
}
