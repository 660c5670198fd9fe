// SPDX-License-Identifier: Apache-2.0
// The mat-vec of gemv.cuh for Q5_0 weights.
#include "gemv.cuh"

namespace frt {

cudaError_t gemv_q5_0(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    return gemv_typed<Q5_0>(args, how, forced);
}

}  // namespace frt
