// SPDX-License-Identifier: Apache-2.0
// The mat-muls of mm.cuh for IQ4_NL weights.
#include "mm.cuh"

namespace frt {
namespace mm {

const Launchers mm_iq4_nl = launchers_of<IQ4_NL>();

}  // namespace mm
}  // namespace frt
