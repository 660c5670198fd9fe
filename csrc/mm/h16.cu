// SPDX-License-Identifier: Apache-2.0
// f32 rows to frt_h16: each scaled by a power of two and stored as wgmma reads it. One block per row.
#include "../common/host.cuh"
#include "../common/pdl.cuh"
#include "../quant/h16.cuh"

namespace frt {

namespace {

constexpr int kThreads = 512;

template <int EIGHTS> __global__ void __launch_bounds__(kThreads) to_h16_kernel(const __grid_constant__ frt_h16_args a) {
    __shared__ unsigned scratch[32];
    pdl_wait();
    h16_row<kThreads, EIGHTS>(a.x + blockIdx.x * a.x_stride, a.k, a.y, blockIdx.x, a.n_tokens, scratch);
}

}  // namespace

}  // namespace frt

extern "C" int frt_to_h16(const frt_h16_args * args, frt_launch how) {
    using namespace frt;
    const frt_h16_args & a = *args;
    if (a.n_tokens < 1 || a.k < 1 || a.k % kH16Columns != 0 || a.x == nullptr || a.y.x == nullptr || a.y.scale == nullptr ||
        !aligned(a.x, 16) || !aligned(a.y.x, kH16Align) || a.x_stride % 4 != 0) {
        return cudaErrorInvalidValue;
    }
    return h16_eights<kThreads>(a.k, [&](auto eights) {
        return launch<to_h16_kernel<eights()>>(how, a.n_tokens, a.k / 8 < kThreads ? ceil_div(a.k / 8, 32) * 32 : kThreads, 0, a);
    });
}
