// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for BF16 weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_bf16 = launchers_of<BF16>();

}  // namespace mm
}  // namespace frt
