// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q5_0 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q5_0 = launchers_of<Q5_0>();

}  // namespace mm
}  // namespace frt
