// SPDX-License-Identifier: Apache-2.0
// Leaving a row of activations as frt_h16: see flashrt_kernels.h.
#pragma once
#include <cuda_fp16.h>
#include "../common/reduce.cuh"
#include "../flashrt_kernels.h"

namespace frt {

// NaN wins, unlike in fmaxf.
__device__ __forceinline__ float nan_max(float a, float b) { return a > b || a != a ? a : b; }

// Over a block of whole warps, as block_sum.
__device__ __forceinline__ float block_nan_max(float v, float * scratch) {
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        v = nan_max(v, __shfl_xor_sync(kAllLanes, v, o));
    }
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
        scratch[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = lane < static_cast<int>(blockDim.x / 32) ? scratch[lane] : 0.0f;
#pragma unroll
    for (int o = 16; o > 0; o /= 2) {
        v = nan_max(v, __shfl_xor_sync(kAllLanes, v, o));
    }
    return v;
}

struct H16Scale {
    float value, inverse;  // powers of two
};

// For a row whose largest absolute value is `most`. Rows below 2^-100 are not scaled all the way up.
__device__ __forceinline__ H16Scale h16_scale(float most) {
    if (most == 0.0f || !(most < INFINITY)) {
        return {1.0f, 1.0f};
    }
    const int e = max(static_cast<int>(__float_as_uint(most) >> 23) - 127, -100) - 13;
    return {__uint_as_float(static_cast<uint32_t>(127 + e) << 23), __uint_as_float(static_cast<uint32_t>(127 - e) << 23)};
}

// Piece c of a step of 64 values holds, for q = 0 .. 3, the values 16 q + 2 c and 16 q + 2 c + 1: a thread of the mat-mul has 16 weights in
// a row, and multiplies two of them at a time. `h16_index` is where in its row the q-th two of piece i (of k / 8) lie.
__device__ __forceinline__ int h16_index(int i, int q) { return i / 8 * 64 + 16 * q + i % 8 * 2; }

// Stores piece i of token t; v[2 q] and v[2 q + 1] are the q-th two.
__device__ __forceinline__ void h16_store(const frt_h16 & y, int t, int n_tokens, int i, const float (&v)[8], H16Scale scale) {
    const int64_t row = static_cast<int64_t>(i / 8) * ((n_tokens + 7) / 8 * 8) + t;
    uint32_t      w[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const __half2 pair = __floats2half2_rn(v[2 * q] * scale.inverse, v[2 * q + 1] * scale.inverse);
        w[q] = *reinterpret_cast<const uint32_t *>(&pair);
    }
    static_cast<uint4 *>(y.x)[row * 8 + ((i % 8) ^ (t % 8))] = make_uint4(w[0], w[1], w[2], w[3]);
}

// Stores values 4 i to 4 i + 3 of token t: two of a piece and two of the next.
__device__ __forceinline__ void h16_store_quad(const frt_h16 & y, int t, int n_tokens, int i, float4 v, H16Scale scale) {
    const int     q = i % 16 / 4, piece = i % 4 * 2;
    const int64_t row = static_cast<int64_t>(i / 16) * ((n_tokens + 7) / 8 * 8) + t;
    __half2 *     to = static_cast<__half2 *>(y.x) + row * 32 + q;
    to[(piece ^ (t % 8)) * 4] = __floats2half2_rn(v.x * scale.inverse, v.y * scale.inverse);
    to[((piece + 1) ^ (t % 8)) * 4] = __floats2half2_rn(v.z * scale.inverse, v.w * scale.inverse);
}

}  // namespace frt
