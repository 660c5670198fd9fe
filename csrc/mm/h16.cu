// SPDX-License-Identifier: Apache-2.0
// f32 rows to frt_h16: each scaled by a power of two and stored as wgmma reads it. One block per row.
#include "../common/pdl.cuh"
#include "../quant/h16.cuh"

namespace frt {

namespace {

constexpr int kThreads = 512;

// EIGHTS: pieces of 8 values that a thread keeps in registers; 0: the row is longer, and is read twice.
template <int EIGHTS> __global__ void __launch_bounds__(kThreads) to_h16_kernel(const __grid_constant__ frt_h16_args a) {
    __shared__ unsigned scratch[32];
    pdl_wait();
    const int      t = blockIdx.x, n = a.k / 8;
    const float * x = a.x + t * a.x_stride;
    float          v[EIGHTS > 0 ? EIGHTS : 1][8];
    unsigned       most = 0;
    auto most_of = [&](const float(&of)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            most = max(most, h16_magnitude(of[j]));
        }
    };
    if constexpr (EIGHTS > 0) {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const int i = threadIdx.x + e * kThreads;
            if (i < n) {
                h16_load(x, i, v[e]);
                most_of(v[e]);
            }
        }
    } else {
        for (int i = threadIdx.x; i < n; i += kThreads) {
            h16_load(x, i, v[0]);
            most_of(v[0]);
        }
    }
    const H16Scale scale(block_max(most, scratch));
    if (threadIdx.x == 0) {
        a.y.scale[t] = scale.scale;
    }
    if constexpr (EIGHTS > 0) {
#pragma unroll
        for (int e = 0; e < EIGHTS; ++e) {
            const int i = threadIdx.x + e * kThreads;
            if (i < n) {
                h16_store(a.y, t, a.n_tokens, i, v[e], scale);
            }
        }
    } else {
        for (int i = threadIdx.x; i < n; i += kThreads) {
            h16_load(x, i, v[0]);
            h16_store(a.y, t, a.n_tokens, i, v[0], scale);
        }
    }
}

template <int EIGHTS> cudaError_t to_h16(const frt_h16_args & a, frt_launch how) {
    return launch<to_h16_kernel<EIGHTS>>(how, a.n_tokens, a.k / 8 < kThreads ? (a.k / 8 + 31) / 32 * 32 : kThreads, 0, a);
}

}  // namespace

}  // namespace frt

extern "C" int frt_to_h16(const frt_h16_args * args, frt_launch how) {
    const frt_h16_args & a = *args;
    if (a.n_tokens < 1 || a.k < 1 || a.k % frt::kH16Columns != 0 || a.x == nullptr || a.y.x == nullptr || a.y.scale == nullptr ||
        reinterpret_cast<uintptr_t>(a.x) % 16 != 0 || reinterpret_cast<uintptr_t>(a.y.x) % frt::kH16Align != 0 || a.x_stride % 4 != 0) {
        return cudaErrorInvalidValue;
    }
    return a.k <= 8 * frt::kThreads    ? frt::to_h16<1>(a, how)
           : a.k <= 16 * frt::kThreads ? frt::to_h16<2>(a, how)
           : a.k <= 32 * frt::kThreads ? frt::to_h16<4>(a, how)
                                       : frt::to_h16<0>(a, how);
}
