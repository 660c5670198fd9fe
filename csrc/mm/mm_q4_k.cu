// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for Q4_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_q4_k(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<Q4_K>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
