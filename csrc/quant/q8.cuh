// SPDX-License-Identifier: Apache-2.0
// Activations as 8-bit blocks of 32 (frt_q8): d = max|x| / 127, q = round(x / d), s = d * sum(q).
// The rounding is ggml's quantize_q8_1; d and s stay f32 here where ggml's block keeps them as f16.
#pragma once
#include "../common/reduce.cuh"
#include "weights.cuh"

namespace frt {

struct Q8Quad {
    int    q;   // four values, element 0 in the low byte
    float2 ds;  // of the whole block, in each of its lanes
};

struct Q8Octet {
    int2   q;   // eight values
    float2 ds;  // of the whole block, in each of its lanes
};

__device__ __forceinline__ int pack_s8(int a, int b, int c, int d) {
    return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
}

// x / d rounded to nearest, given 1 / d rounded to nearest (Markstein): three operations where a division has a dozen.
__device__ __forceinline__ float divide(float x, float d, float inverse) {
    const float q = x * inverse;
    return fmaf(fmaf(-q, d, x), inverse, q);
}

// The scale of a block, and what quantises its values. Blocks below 2^-126 * 127 become zero: 1 / d would overflow.
struct Q8Scale {
    float d, inverse;

    __device__ __forceinline__ explicit Q8Scale(float amax)
        : d(divide(amax, 127.0f, 1.0f / 127.0f)), inverse(d >= 1.17549435e-38f ? 1.0f / d : 0.0f) {}

    // roundf(x / d) for |x / d| < 2^22: the largest float below a half, so that only halves and more reach the next integer.
    __device__ __forceinline__ int quant(float x) const {
        const float q = divide(x, d, inverse);
        return static_cast<int>(q + copysignf(0.49999997f, q));
    }
    __device__ __forceinline__ int quants(float4 x) const { return pack_s8(quant(x.x), quant(x.y), quant(x.z), quant(x.w)); }
};

__device__ __forceinline__ float max_abs(float4 x) { return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))); }

// Quantises a block held by 8 neighbouring lanes, 4 consecutive values each. The whole warp must call.
__device__ __forceinline__ Q8Quad q8_from_8_lanes(float4 x) {
    const Q8Scale scale(lanes_max<8>(max_abs(x)));
    const int     q = scale.quants(x);
    return {q, make_float2(scale.d, scale.d * static_cast<float>(lanes_sum<8>(dot4(q, 0x01010101, 0))))};
}

// Quantises a block held by 4 neighbouring lanes, 8 consecutive values each. The whole warp must call.
__device__ __forceinline__ Q8Octet q8_from_4_lanes(float4 lo, float4 hi) {
    const Q8Scale scale(lanes_max<4>(fmaxf(max_abs(lo), max_abs(hi))));
    const int2    q = make_int2(scale.quants(lo), scale.quants(hi));
    const int     sum = lanes_sum<4>(dot4(q.x, 0x01010101, dot4(q.y, 0x01010101, 0)));
    return {q, make_float2(scale.d, scale.d * static_cast<float>(sum))};
}

}  // namespace frt
