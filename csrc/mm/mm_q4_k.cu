// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q4_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q4_k = launchers_of<Q4_K>();

}  // namespace mm
}  // namespace frt
