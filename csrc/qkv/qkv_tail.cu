// SPDX-License-Identifier: Apache-2.0
// What follows the mat-vecs of Q, K and V, one block per head and token, one thread per pair of values:
//
//   v = src;  v = rms_norm(v, eps) * norm_w;  v = rope(v, pos[t]);  v *= scale;  store at row rows[t] of dst
//
// replaces, per part: RMS_NORM, MUL, ROPE, SCALE, SET_ROWS, each where there is one.
// src f32 [n_tokens][n_heads][head_dim], tokens src_stride elements apart; dst f32, f16 or bf16. A thread writes the pair
// it has read, so dst may lie exactly over src.
// Archs: sm_80 and up, PDL from sm_90. Static shared memory: 128 bytes. Blocks of head_dim / 2 threads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cmath>

#include "../common/pdl.cuh"
#include "../common/reduce.cuh"
#include "../flashrt_kernels.h"
#include "rope.cuh"

namespace frt {
namespace {

enum StoreType { kF32 = 0, kF16 = 1, kBF16 = 30 };
enum RopeMode { kRopeNone = 0, kRopeNormal = 1, kRopeNeox = 2 };
constexpr int kMaxHeadDim = 512;

__device__ __forceinline__ void store(char * head, int type, int i, float v) {
    if (type == kF32) {
        reinterpret_cast<float *>(head)[i] = v;
    } else if (type == kF16) {
        reinterpret_cast<__half *>(head)[i] = __float2half_rn(v);
    } else {
        reinterpret_cast<__nv_bfloat16 *>(head)[i] = __float2bfloat16_rn(v);
    }
}

__global__ void __launch_bounds__(kMaxHeadDim / 2)
    qkv_tail_kernel(const __grid_constant__ frt_qkv_tail_args a, float theta_scale) {
    __shared__ float scratch[32];
    int head = blockIdx.x;
    int index = 0;
    while (head >= a.part[index].n_heads) {
        head -= a.part[index++].n_heads;
    }
    const frt_qkv_part & part = a.part[index];
    const int64_t token = blockIdx.y;
    const int pair = threadIdx.x;
    const bool active = 2 * pair < part.head_dim;
    const bool rotates = part.rope != kRopeNone && 2 * pair < a.rope.n_dims;
    // NeoX pairs the halves of the first n_dims values; all others are adjacent.
    const bool halves = rotates && part.rope == kRopeNeox;
    const int i0 = halves ? pair : 2 * pair;
    const int i1 = halves ? pair + a.rope.n_dims / 2 : i0 + 1;

    float w0 = 1.0f, w1 = 1.0f, power = 0.0f, divisor = 1.0f;
    if (active && part.norm_w != nullptr) {
        w0 = part.norm_w[i0];
        w1 = part.norm_w[i1];
    }
    if (rotates) {
        power = powf(theta_scale, static_cast<float>(pair));
        divisor = a.rope.freq_factors != nullptr ? a.rope.freq_factors[pair] : 1.0f;
    }
    pdl_wait();

    float v0 = 0.0f, v1 = 0.0f;
    if (active) {
        const float * src = part.src + token * part.src_stride + static_cast<int64_t>(head) * part.head_dim;
        v0 = src[i0];
        v1 = src[i1];
    }
    int64_t row = token;
    if (part.rows != nullptr) {
        row = part.rows_i64 ? static_cast<const int64_t *>(part.rows)[token] : static_cast<const int32_t *>(part.rows)[token];
    }
    float2 turn = {1.0f, 0.0f};
    if (rotates) {
        turn = rope_cos_sin(a.rope, pair, a.rope.pos[token] * power / divisor);
    }
    if (part.norm_w != nullptr) {
        const float mean = block_sum(v0 * v0 + v1 * v1, scratch) / part.head_dim;
        const float scale = rsqrtf(mean + part.eps);
        v0 = scale * v0 * w0;
        v1 = scale * v1 * w1;
    }
    if (active) {
        char * dst = static_cast<char *>(part.dst) + row * part.row_bytes + head * part.head_bytes;
        const float r0 = rotates ? v0 * turn.x - v1 * turn.y : v0;
        const float r1 = rotates ? v0 * turn.y + v1 * turn.x : v1;
        store(dst, part.dst_type, i0, r0 * part.scale);
        store(dst, part.dst_type, i1, r1 * part.scale);
    }
}

bool valid(const frt_qkv_part & part, const frt_rope & rope) {
    if (part.src == nullptr || part.dst == nullptr || part.n_heads < 1 || part.head_dim < 2 || part.head_dim % 2 != 0 ||
        part.head_dim > kMaxHeadDim) {
        return false;
    }
    if (part.dst_type != kF32 && part.dst_type != kF16 && part.dst_type != kBF16) {
        return false;
    }
    if (part.rope == kRopeNone) {
        return true;
    }
    return (part.rope == kRopeNormal || part.rope == kRopeNeox) && rope.pos != nullptr && rope.n_dims >= 2 &&
           rope.n_dims % 2 == 0 && rope.n_dims <= part.head_dim;
}

}  // namespace
}  // namespace frt

int frt_qkv_tail(const frt_qkv_tail_args * args, frt_launch how) {
    using namespace frt;
    const frt_qkv_tail_args & a = *args;
    constexpr int kMaxTokens = 65535;  // grid.y
    if (a.n_parts < 1 || a.n_parts > 3 || a.n_tokens < 1 || a.n_tokens > kMaxTokens) {
        return cudaErrorInvalidValue;
    }
    int heads = 0;
    int head_dim = 0;
    for (int i = 0; i < a.n_parts; i++) {
        if (!valid(a.part[i], a.rope)) {
            return cudaErrorInvalidValue;
        }
        heads += a.part[i].n_heads;
        head_dim = head_dim > a.part[i].head_dim ? head_dim : a.part[i].head_dim;
    }
    // In f32, as ggml computes it.
    const float theta_scale = a.rope.n_dims > 0 ? std::pow(a.rope.freq_base, -2.0f / a.rope.n_dims) : 1.0f;
    const dim3 grid(heads, a.n_tokens);
    return launch<qkv_tail_kernel>(how, grid, (head_dim / 2 + 31) / 32 * 32, 0, a, theta_scale);
}
