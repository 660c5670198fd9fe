// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for Q8_0 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_q8_0(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<Q8_0>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
