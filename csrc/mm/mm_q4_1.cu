// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q4_1 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q4_1 = launchers_of<Q4_1>();

}  // namespace mm
}  // namespace frt
