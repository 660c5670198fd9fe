// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q5_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q5_k = launchers_of<Q5_K>();

}  // namespace mm
}  // namespace frt
