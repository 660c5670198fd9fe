// SPDX-License-Identifier: Apache-2.0
// RoPE with YaRN as ggml defines it (ggml's rope_yarn, which follows LlamaYaRNScaledRotaryEmbedding of
// github.com/jquesnelle/yarn, MIT).
#pragma once
#include "../flashrt_kernels.h"

namespace frt {

// Angle's cosine and sine, times the magnitude, of pair `pair` whose plain angle is theta.
__device__ __forceinline__ float2 rope_cos_sin(const frt_rope & r, int pair, float theta) {
    float angle = r.freq_scale * theta;
    float magnitude = r.attn_factor;
    if (r.ext_factor != 0.0f) {
        const float y = (pair - r.corr_low) / fmaxf(0.001f, r.corr_high - r.corr_low);
        const float mix = (1.0f - fminf(1.0f, fmaxf(0.0f, y))) * r.ext_factor;
        angle = angle * (1.0f - mix) + theta * mix;
        magnitude *= 1.0f + 0.1f * logf(1.0f / r.freq_scale);
    }
    float sin, cos;
    sincosf(angle, &sin, &cos);
    return {cos * magnitude, sin * magnitude};
}

}  // namespace frt
