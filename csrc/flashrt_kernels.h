// SPDX-License-Identifier: Apache-2.0
// The launch interface of the kernels: plain C, no ggml, no Rust types. src/kernel mirrors it one to one.
//
// Every function launches on `launch.stream`, never synchronises, never allocates, and returns the CUDA error of the
// launch as an int (0 = cudaSuccess). Arguments have been checked by the caller (the window's guard); a launcher that is
// handed a combination it has no instantiation for returns cudaErrorInvalidValue without launching.
// Strides named *_stride are in elements between consecutive tokens; *_bytes are bytes. Pointers are device memory.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// How to launch. pdl: join programmatic dependent launch (sm_90 and up; ignored below).
typedef struct frt_launch {
    void *  stream;    // cudaStream_t
    int32_t pdl;
    int32_t sm_count;  // multiprocessors of the device
    int32_t cc;        // compute capability x 10, e.g. 90
} frt_launch;

// Activations quantised to 8 bits in blocks of 32 along k, structure of arrays: the hand-off ("q8_1 edge") between a
// norm and the mat-vecs that read it. Block b of token t: x[i] ~ d * qs[i].
typedef struct frt_q8 {
    int8_t * qs;  // [n_tokens][k], 16-byte aligned rows (k % 32 == 0); null: no hand-off
    float *  ds;  // [n_tokens][k / 32][2]: d = max|x| / 127, and s = d * sum(qs)
} frt_q8;

// Activations as f16 in the layout that the tensor cores of sm_90a read from shared memory: the hand-off between whatever makes
// an input and the mat-muls that read it. A row is scaled by a power of two so that its largest value lies in [2^13, 2^14): nothing
// overflows, and nothing above 2^-38 of the largest value underflows to 0.
typedef struct frt_h16 {
    void *  x;      // f16 [k / 64][n_tokens rounded up to 8][64], k % 64 == 0, on 128 bytes. Of each 64 values, the piece of 16 bytes
                    // c < 8 lies at c ^ (token % 8) and holds, for q = 0 .. 3, the values 16 q + 2 c and 16 q + 2 c + 1. Rows behind
                    // n_tokens are not written
    float * scale;  // [n_tokens]: the value is scale * x. At least 2^-126, so that rows below 2^-113 lie lower than said above. 1 for a
                    // row of zeros; a row with Inf or NaN has them in x, and scale 1
} frt_h16;          // null pointers: no hand-off

#define FRT_MAX_TOKENS 8  // rows of activations a mat-vec takes at most

// ---- norm -----------------------------------------------------------------------------------------------------------
// w1 != null (SANDWICH_NORM): y = x + rms_norm(h, eps1) * w1;  z = rms_norm(y, eps2) * w2
// w1 == null (ADD_NORM):      y = x + h;                       z = rms_norm(y, eps2) * w2
// One row per token. Each block reads its rows of h and x whole before it writes y or z, so y and z may lie exactly over h or x
// (and must not overlap each other). y may be null when nobody reads it, z when only zq or zh is wanted.
typedef struct frt_norm_args {
    const float * h;  int64_t h_stride;
    const float * x;  int64_t x_stride;
    const float * w1;
    const float * w2;
    float * y;        int64_t y_stride;
    float * z;        int64_t z_stride;
    frt_q8  zq;
    frt_h16 zh;       // n_cols % 64 == 0
    int32_t n_rows, n_cols;
    float   eps1, eps2;
} frt_norm_args;
int frt_norm(const frt_norm_args * args, frt_launch launch);

// ---- mat-vec --------------------------------------------------------------------------------------------------------
// Weights are read in pieces of 16 bytes: up to 15 bytes behind the last row may be read too. ggml pads every tensor to 128.
// Weight types by their GGUF number (ggml_type): F16 1, BF16 30, Q4_0 2, Q5_0 6, Q8_0 8, Q4_K 12, Q5_K 13, Q6_K 14.
enum { FRT_GLU_NONE = -1, FRT_GLU_REGLU = 0, FRT_GLU_GEGLU = 1, FRT_GLU_SWIGLU = 2, FRT_GLU_GEGLU_ERF = 4, FRT_GLU_GEGLU_QUICK = 5 };

// dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r]).  res may lie exactly over dst.
typedef struct frt_gemv_seg {
    const void *  w;    int64_t row_bytes;  // weight rows, row_bytes apart
    float *       dst;  int64_t dst_stride;
    const float * bias;                     // [n_rows] or null
    const float * res;  int64_t res_stride; // or null
    int32_t n_rows;
} frt_gemv_seg;

// Up to three weight matrices that multiply one input (QKV), or one (GEMV_RES), or with glu != NONE two: seg[0] = gate,
// seg[1] = up, and seg[0].dst[t][r] = act(gate) * up.
// Quantised weights read the input as q8 blocks: from xq when it is there, else from x, quantised by the kernel itself.
// F16 and BF16 weights read x. Accumulation is f32.
typedef struct frt_gemv_args {
    int32_t       type;     // of all segments
    int32_t       n_seg;
    frt_gemv_seg  seg[3];
    int32_t       k, n_tokens;  // n_tokens <= FRT_MAX_TOKENS
    const float * x;  int64_t x_stride;
    frt_q8        xq;
    int32_t       glu;
} frt_gemv_args;
int frt_gemv(const frt_gemv_args * args, frt_launch launch);
// 1 if frt_gemv has an instantiation for this type and shape.
int frt_gemv_supports(int32_t type, int32_t k, int32_t n_tokens, int32_t glu);

// ---- QKV tail -------------------------------------------------------------------------------------------------------
// Per part (Q, K or V) and per head of head_dim values:
//   v = src; if norm_w: v = rms_norm(v, eps) * norm_w; if rope: v = rope(v, pos[t]); v *= scale; store.
// Stores f32, f16 or bf16 (ggml type numbers 0, 1, 30) at dst + row * row_bytes + head * head_bytes, where row = rows[t] (i64 or
// i32 indices of the KV cache) or, without indices, row = t.
typedef struct frt_qkv_part {
    const float * src;  int64_t src_stride;
    void *        dst;  int64_t row_bytes, head_bytes;
    const void *  rows; int32_t rows_i64;   // 1: int64 indices, 0: int32
    int32_t       dst_type;
    int32_t       n_heads, head_dim;
    const float * norm_w; float eps;
    int32_t       rope;                     // 0 none, 1 adjacent pairs (normal), 2 halves (NeoX)
    float         scale;                    // 1 when there is none
} frt_qkv_part;

// RoPE as ggml defines it: theta = pos * freq_base^(-2i/n_dims) / freq_factors[i], YaRN-corrected; corr = ggml_rope_yarn_corr_dims.
typedef struct frt_rope {
    const int32_t * pos;           // [n_tokens]
    const float *   freq_factors;  // [n_dims / 2] or null
    int32_t n_dims;
    float   freq_base, freq_scale, ext_factor, attn_factor, corr_low, corr_high;
} frt_rope;

typedef struct frt_qkv_tail_args {
    frt_qkv_part part[3];
    int32_t      n_parts, n_tokens;
    frt_rope     rope;
} frt_qkv_tail_args;
int frt_qkv_tail(const frt_qkv_tail_args * args, frt_launch launch);

// ---- attention ------------------------------------------------------------------------------------------------------
// Per stream, token and head: dst = softmax(cap(scale * q . k) + mask) . v, where cap(s) = softcap * tanh(s / softcap), or s when
// softcap is 0. A query whose every key is masked with -inf gives 0. Heads of q share those of k and v in groups.
// k, v and mask are f16. Pointers and strides of q, k and v are multiples of 16 bytes. dst overlaps none of the inputs.
typedef struct frt_dec_attn_args {
    const float * q;     int64_t q_token_bytes, q_head_bytes, q_stream_bytes;
    const void *  k;     int64_t k_row_bytes, k_head_bytes, k_stream_bytes;
    const void *  v;     int64_t v_row_bytes, v_head_bytes, v_stream_bytes;
    const void *  mask;  int64_t mask_token_bytes, mask_stream_bytes;  // [n_kv] per token, or null
    float *       dst;      // [n_streams][n_tokens][n_heads][head_dim]
    // With max_splits > 1: max_splits * n_streams * n_heads_kv * C * (D + 2) floats, where D is head_dim rounded up to a power
    // of two and C is n_tokens * n_heads / n_heads_kv rounded up: to a power of two up to 8, to a multiple of 8 above.
    float *       scratch;
    uint32_t *    tickets;  // [n_streams * n_heads_kv * ceil(C / 8)]: zero before the first launch, left zero by every launch
    int32_t       head_dim;  // 64, 80, 96, 128 or 256
    int32_t       n_heads, n_heads_kv, n_tokens, n_kv, n_streams;
    int32_t       max_splits;  // parts that the keys may be cut into
    float         scale, softcap;
} frt_dec_attn_args;
int frt_dec_attn(const frt_dec_attn_args * args, frt_launch launch);

// ---- attention of many tokens (sm_90a, modules of `cargo xtask fa4`) -------------------------------------------------------
// What a mask does to each tile of tile_m tokens x tile_n keys. Tiles whose every value is -inf are in no list, those whose every value
// is 0 in the full list, all others in the partial one. Lists ascend.
typedef struct frt_tiles {
    uint8_t * kind;           // [n_planes][token tiles][key tiles]: 0 left out, 1 full, 3 partial
    int32_t * partial_count;  // [n_planes][token tiles]
    int32_t * partial_index;  // [n_planes][token tiles][key tiles]: partial_count of them are written
    int32_t * full_count;
    int32_t * full_index;
} frt_tiles;

typedef struct frt_mask_tiles_args {
    const void * mask;  int64_t token_bytes, plane_bytes;  // f16 [n_planes][n_tokens][n_kv]
    int32_t      n_planes, n_tokens, n_kv;
    int32_t      tile_m, tile_n;  // tile_n % 8 == 0
    frt_tiles    tiles;
} frt_mask_tiles_args;
int frt_mask_tiles(const frt_mask_tiles_args * args, frt_launch launch);

// Per stream, token and head: dst = softmax(scale * q . k + mask) . v. A query whose every key is masked with -inf gives 0. Heads of q
// share those of k and v in groups. k, v and mask are f16, products and sums f32; q, the weights and the result are rounded to f16 on
// the way. Pointers and strides of q, k and v are multiples of 16 bytes, those of mask of 4, and a mask's row lies on an even number
// of values, whose last is read too. dst overlaps none of the inputs.
typedef struct frt_prefill_fa4_args {
    const float * q;     int64_t q_token_bytes, q_head_bytes, q_stream_bytes;
    const void *  k;     int64_t k_row_bytes, k_head_bytes, k_stream_bytes;
    const void *  v;     int64_t v_row_bytes, v_head_bytes, v_stream_bytes;
    const void *  mask;  int64_t mask_token_bytes, mask_stream_bytes;  // 0: all streams have the same
    frt_tiles     tiles;     // of the mask, for mask_tokens tokens a plane
    float *       dst;       // [n_streams][n_tokens][n_heads][head_dim_v]
    void *        scratch;   // f16 [n_streams][n_tokens][n_heads][head_dim + head_dim_v]
    int32_t       head_dim, head_dim_v, n_heads, n_heads_kv, n_tokens, n_kv, n_streams;
    int32_t       mask_tokens;  // at least n_tokens
    int32_t       tile_m, tile_n;
    float         scale;     // above 0
} frt_prefill_fa4_args;
int frt_prefill_fa4(const frt_prefill_fa4_args * args, frt_launch launch);
// 1 if this build has a module for these heads, for the current device. Loads it: not while a stream is being captured.
int frt_prefill_fa4_supports(int32_t head_dim, int32_t head_dim_v);
// Names of the modules in this build, with spaces between; empty without feature `fa4`.
const char * frt_prefill_fa4_modules(void);

// ---- mat-mul with many rows (sm_90a) --------------------------------------------------------------------------------
// dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r]), or with glu != NONE: dst[t][r] = act(w[r] . x[t]) * (w2[r] . x[t]).
// Weights are dequantised to f16 on the way to the tensor cores (BF16 weights: exactly where f16 can hold them); sums are f32. res may
// lie exactly over dst. Results do not depend on sm_count, and are the same bits from run to run.
typedef struct frt_mm_args {
    int32_t       type;     // ggml_type of w and w2
    int32_t       glu;
    const void *  w;        // n_rows rows, row_bytes apart
    const void *  w2;       // with glu: the same shape
    int64_t       row_bytes;
    int32_t       n_rows, k, n_tokens;
    frt_h16       x;
    float *       dst;  int64_t dst_stride;
    const float * bias;     // [n_rows] or null
    const float * res;  int64_t res_stride;  // or null
} frt_mm_args;
int frt_mm(const frt_mm_args * args, frt_launch launch);
// 1 if frt_mm has an instantiation for this type and shape in this build, and the current device can run it.
int frt_mm_supports(int32_t type, int32_t k, int32_t glu);

// f32 rows to frt_h16.
typedef struct frt_h16_args {
    const float * x;  int64_t x_stride;
    frt_h16       y;
    int32_t       k, n_tokens;
} frt_h16_args;
int frt_to_h16(const frt_h16_args * args, frt_launch launch);

// ---- mat-mul with routed experts (sm_90a) ---------------------------------------------------------------------------
// Which rows each expert multiplies: the routed pairs (token, slot) in the order of their experts, and within one by token and slot.
// Each expert's rows begin at a multiple of 8. Pairs whose id is no expert are left out.
typedef struct frt_moe_rows {
    int32_t * rows;   // [frt_moe_max_rows]: token * n_used + slot of the pair at each place, -1 where there is none
    int32_t * begin;  // [n_experts + 1]: first place of each expert; the last: all places
    int32_t * count;  // [n_experts]: pairs of each expert
} frt_moe_rows;

typedef struct frt_moe_route_args {
    const int32_t * ids;  int64_t ids_stride;  // [n_tokens][n_used], elements between tokens
    int32_t         n_tokens, n_used, n_experts;  // n_experts <= FRT_MOE_MAX_EXPERTS
    frt_moe_rows    out;
} frt_moe_route_args;
#define FRT_MOE_MAX_EXPERTS 1024
int frt_moe_route(const frt_moe_route_args * args, frt_launch launch);
// Places of n_pairs routed pairs, at most.
int32_t frt_moe_max_rows(int32_t n_pairs, int32_t n_experts);

// f32 rows to frt_h16, in the order of `rows`. Row of x for a pair (t, s): t, or with per_slot t * n_used + s.
typedef struct frt_moe_h16_args {
    const float * x;  int64_t x_stride;
    frt_h16       y;            // frt_moe_max_rows rows
    frt_moe_rows  route;
    int32_t       k, n_pairs, n_used, n_experts, per_slot;
} frt_moe_h16_args;
int frt_moe_to_h16(const frt_moe_h16_args * args, frt_launch launch);

// dst[p][r] = sum_k w[e][r][k] * x[p][k] for each routed pair p = token * n_used + slot with its expert e, or with glu:
// act(w[e][r] . x[p]) * (w2[e][r] . x[p]). Rows of dst whose pair has no expert are not written.
typedef struct frt_moe_mm_args {
    int32_t       type, glu;
    const void *  w;            // [n_experts][n_rows] rows, row_bytes and expert_bytes apart
    const void *  w2;
    int64_t       row_bytes, expert_bytes;
    int32_t       n_rows, k, n_pairs, n_experts;
    frt_h16       x;            // from frt_moe_to_h16
    frt_moe_rows  route;
    float *       dst;  int64_t dst_stride;  // [n_pairs]
} frt_moe_mm_args;
int frt_moe_mm(const frt_moe_mm_args * args, frt_launch launch);
int frt_moe_mm_supports(int32_t type, int32_t k, int32_t glu, int32_t n_experts);

// Architectures this archive was compiled for, e.g. "sm_90a compute_90".
const char * frt_archs(void);

#ifdef __cplusplus
}
#endif
