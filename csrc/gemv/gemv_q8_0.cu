// SPDX-License-Identifier: Apache-2.0
// The mat-vec of gemv.cuh for Q8_0 weights.
#include "gemv.cuh"

namespace frt {

cudaError_t gemv_q8_0(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    return gemv_typed<Q8_0>(args, how, forced);
}

}  // namespace frt
