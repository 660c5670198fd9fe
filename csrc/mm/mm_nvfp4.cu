// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for NVFP4 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_nvfp4 = launchers_of<NVFP4>();

}  // namespace mm
}  // namespace frt
