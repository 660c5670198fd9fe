// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q8_0 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q8_0 = launchers_of<Q8_0>();

}  // namespace mm
}  // namespace frt
