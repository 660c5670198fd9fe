// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for Q3_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_q3_k(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<Q3_K>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
