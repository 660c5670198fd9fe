// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q2_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q2_k = launchers_of<Q2_K>();

}  // namespace mm
}  // namespace frt
