// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q6_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q6_k = launchers_of<Q6_K>();

}  // namespace mm
}  // namespace frt
