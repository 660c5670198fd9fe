// SPDX-License-Identifier: Apache-2.0
// Activations of gated units, as ggml defines them.
#pragma once
#include <cuda_runtime.h>
#include "../flashrt_kernels.h"

namespace frt {

__device__ __forceinline__ float glu_act(int glu, float x) {
    switch (glu) {
        case FRT_GLU_REGLU: return fmaxf(x, 0.0f);
        case FRT_GLU_GEGLU: return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x)));
        case FRT_GLU_SWIGLU: return x / (1.0f + expf(-x));
        case FRT_GLU_GEGLU_ERF: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
        default: return x * (1.0f / (1.0f + expf(-1.702f * x)));  // FRT_GLU_GEGLU_QUICK
    }
}

}  // namespace frt
