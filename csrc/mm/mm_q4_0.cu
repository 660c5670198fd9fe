// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q4_0 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q4_0 = launchers_of<Q4_0>();

}  // namespace mm
}  // namespace frt
