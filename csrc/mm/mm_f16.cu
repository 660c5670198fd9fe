// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for F16 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_f16 = launchers_of<F16>();

}  // namespace mm
}  // namespace frt
