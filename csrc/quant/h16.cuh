// SPDX-License-Identifier: Apache-2.0
// Leaving a row of activations as frt_h16 (see flashrt_kernels.h): its scale, and where a value lies.
//
// Piece c of a step of 64 values holds, for q = 0 .. 3, the values 16 q + 2 c and 16 q + 2 c + 1: a thread of the mat-mul has 16 weights in
// a row, and multiplies two of them at a time.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>
#include "../common/reduce.cuh"
#include "../flashrt_kernels.h"

namespace frt {

constexpr int kH16Columns = 64;  // values of a row that lie together
constexpr int kH16Align = 128;   // bytes

// The bits of |x|. They order like the values, with Inf and NaN above all.
__device__ __forceinline__ unsigned h16_magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ unsigned h16_magnitude(float4 v) {
    return max(max(h16_magnitude(v.x), h16_magnitude(v.y)), max(h16_magnitude(v.z), h16_magnitude(v.w)));
}

// The scale of a row whose largest magnitude has these bits, and its inverse: both are powers of two.
struct H16Scale {
    float scale, inverse;

    __device__ __forceinline__ explicit H16Scale(unsigned magnitude) {
        // Biased: largest / scale lies in [2^13, 2^14). Not below 2^-126, for then the inverse would overflow.
        const int      exponent = static_cast<int>(magnitude >> 23) - 13;
        const bool     plain = magnitude == 0 || magnitude >= 0x7f800000u;
        const unsigned biased = plain ? 127 : max(exponent, 1);
        scale = __uint_as_float(biased << 23);
        inverse = __uint_as_float((254 - biased) << 23);
    }

    // Two values, the first in the low half. Each is rounded once.
    __device__ __forceinline__ unsigned pair(float first, float second) const {
        const __half2 two = __floats2half2_rn(first * inverse, second * inverse);
        return *reinterpret_cast<const unsigned *>(&two);
    }
};

// Piece i (of k / 8) of token t: its four words, of two values each.
__device__ __forceinline__ unsigned * h16_piece(const frt_h16 & y, int64_t t, int n_tokens, int i) {
    const int64_t row = static_cast<int64_t>(i / 8) * ((n_tokens + 7) / 8 * 8) + t;
    return static_cast<unsigned *>(y.x) + (row * 8 + ((i % 8) ^ static_cast<int>(t % 8))) * 4;
}

// The values of piece i of a row of f32 on 8 bytes.
__device__ __forceinline__ void h16_load(const float * row, int i, float (&v)[8]) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const float2 two = *reinterpret_cast<const float2 *>(row + i / 8 * kH16Columns + 16 * q + i % 8 * 2);
        v[2 * q] = two.x, v[2 * q + 1] = two.y;
    }
}

__device__ __forceinline__ void h16_store(const frt_h16 & y, int64_t t, int n_tokens, int i, const float (&v)[8], H16Scale scale) {
    *reinterpret_cast<uint4 *>(h16_piece(y, t, n_tokens, i)) =
        make_uint4(scale.pair(v[0], v[1]), scale.pair(v[2], v[3]), scale.pair(v[4], v[5]), scale.pair(v[6], v[7]));
}

}  // namespace frt
