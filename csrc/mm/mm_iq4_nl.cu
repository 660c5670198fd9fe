// SPDX-License-Identifier: Apache-2.0
// The mat-mul of mm.cuh for IQ4_NL weights.
#include "mm.cuh"

namespace frt {
namespace mm {

cudaError_t mm_iq4_nl(const frt_mm_args & args, frt_launch how, int tokens) { return mm_typed<IQ4_NL>(args, how, tokens); }

}  // namespace mm
}  // namespace frt
