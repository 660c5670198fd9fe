// SPDX-License-Identifier: Apache-2.0
// The mat-vec of gemv.cuh for Q5_K weights.
#include "gemv.cuh"

namespace frt {

cudaError_t gemv_q5_k(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    return gemv_typed<Q5_K>(args, how, forced);
}

}  // namespace frt
