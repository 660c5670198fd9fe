// SPDX-License-Identifier: Apache-2.0
// Leaving a row of activations as frt_h16 (see flashrt_kernels.h): its scale, and where a value lies.
//
// Piece c of a step of 64 values holds, for q = 0 .. 3, the values 16 q + 2 c and 16 q + 2 c + 1: a thread of the mat-mul has 16 weights in
// a row, and multiplies two of them at a time.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>
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

// A row of k values on 16 bytes becomes row t of y, which has n_rows. All THREADS of the block call, and a shorter row needs fewer; scratch
// is block_max's. EIGHTS: pieces of 8 values that a thread keeps in registers; 0: the row is longer, and is read twice.
template <int THREADS, int EIGHTS>
__device__ __forceinline__ void h16_row(const float * x, int k, const frt_h16 & y, int64_t t, int n_rows, unsigned * scratch) {
    constexpr int kKept = EIGHTS > 0 ? EIGHTS : 1;
    const int     n = k / 8;
    float         v[kKept][8];
    unsigned      most = 0;
    // Calls f for each piece of this thread: which one, and where it is kept.
    const auto pieces = [&](auto f) {
        if constexpr (EIGHTS > 0) {
#pragma unroll
            for (int e = 0; e < EIGHTS; ++e) {
                const int i = threadIdx.x + e * THREADS;
                if (i < n) {
                    f(i, v[e]);
                }
            }
        } else {
            for (int i = threadIdx.x; i < n; i += THREADS) {
                f(i, v[0]);
            }
        }
    };
    pieces([&](int i, float(&piece)[8]) {
        h16_load(x, i, piece);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            most = max(most, h16_magnitude(piece[j]));
        }
    });
    const H16Scale scale(block_max(most, scratch));
    if (threadIdx.x == 0) {
        y.scale[t] = scale.scale;
    }
    pieces([&](int i, float(&piece)[8]) {
        if constexpr (EIGHTS == 0) {
            h16_load(x, i, piece);
        }
        h16_store(y, t, n_rows, i, piece, scale);
    });
}

// Calls f with h16_row's EIGHTS for rows of k values, as a constant.
template <int THREADS, typename F> cudaError_t h16_eights(int k, F f) {
    return k <= 8 * THREADS    ? f(std::integral_constant<int, 1>())
           : k <= 16 * THREADS ? f(std::integral_constant<int, 2>())
           : k <= 32 * THREADS ? f(std::integral_constant<int, 4>())
                               : f(std::integral_constant<int, 0>());
}

}  // namespace frt
