// SPDX-License-Identifier: Apache-2.0
// The mat-vec of gemv.cuh for BF16 weights.
#include "gemv.cuh"

namespace frt {

cudaError_t gemv_bf16(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    return gemv_typed<BF16>(args, how, forced);
}

}  // namespace frt
