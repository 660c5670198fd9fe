// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for Q5_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_q5_k(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<Q5_K>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
