// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for MXFP4 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_mxfp4(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<MXFP4>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
