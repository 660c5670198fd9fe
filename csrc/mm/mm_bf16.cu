// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for BF16 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_bf16(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<BF16>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
