// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for MXFP4 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_mxfp4 = launchers_of<MXFP4>();

}  // namespace mm
}  // namespace frt
