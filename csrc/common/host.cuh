// SPDX-License-Identifier: Apache-2.0
// What the checks and choices in front of the kernels share.
#pragma once
#include <stdint.h>
#include "../flashrt_kernels.h"

namespace frt {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline bool aligned(const void * p, uintptr_t to) { return reinterpret_cast<uintptr_t>(p) % to == 0; }

// Gated units that kernels have, and none.
inline bool glu_known(int32_t glu) {
    switch (glu) {
        case FRT_GLU_NONE:
        case FRT_GLU_REGLU:
        case FRT_GLU_GEGLU:
        case FRT_GLU_SWIGLU:
        case FRT_GLU_GEGLU_ERF:
        case FRT_GLU_GEGLU_QUICK: return true;
        default: return false;
    }
}

}  // namespace frt
