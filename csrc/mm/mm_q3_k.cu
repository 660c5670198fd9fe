// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for Q3_K weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_q3_k = launchers_of<Q3_K>();

}  // namespace mm
}  // namespace frt
