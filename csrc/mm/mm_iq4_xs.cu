// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for IQ4_XS weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_iq4_xs = launchers_of<IQ4_XS>();

}  // namespace mm
}  // namespace frt
