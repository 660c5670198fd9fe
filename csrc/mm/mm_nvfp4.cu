// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for NVFP4 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_nvfp4(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<NVFP4>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
