// SPDX-License-Identifier: Apache-2.0
// Activations as 8-bit blocks of 32 (frt_q8): d = max|x| / 127, q = round(x / d), s = d * sum(q).
// The rounding is ggml's quantize_q8_1; d and s stay f32 here where ggml's block keeps them as f16.
#pragma once
#include "../common/reduce.cuh"

namespace frt {

struct Q8Quad {
    int    q;   // four values, element 0 in the low byte
    float2 ds;  // of the whole block, in each of its lanes
};

__device__ __forceinline__ int pack_s8(int a, int b, int c, int d) {
    return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24;
}

// Quantises a block held by 8 neighbouring lanes, 4 consecutive values each. The whole warp must call.
__device__ __forceinline__ Q8Quad q8_from_8_lanes(float4 x) {
    const float amax = lanes_max<8>(fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
    const float d = amax / 127.0f;
    int a = 0, b = 0, c = 0, e = 0;
    if (amax != 0.0f) {
        a = static_cast<int>(roundf(x.x / d));
        b = static_cast<int>(roundf(x.y / d));
        c = static_cast<int>(roundf(x.z / d));
        e = static_cast<int>(roundf(x.w / d));
    }
    const int sum = lanes_sum<8>(a + b + c + e);
    return {pack_s8(a, b, c, e), make_float2(d, d * static_cast<float>(sum))};
}

// Quantises a block held by a warp, one value per lane. q of this lane; ds of the block.
__device__ __forceinline__ int8_t q8_from_warp(float x, float2 & ds) {
    const float amax = lanes_max<32>(fabsf(x));
    const float d = amax / 127.0f;
    const int   q = amax != 0.0f ? static_cast<int>(roundf(x / d)) : 0;
    ds = make_float2(d, d * static_cast<float>(lanes_sum<32>(q)));
    return static_cast<int8_t>(q);
}

}  // namespace frt
