// SPDX-License-Identifier: Apache-2.0
// The rows that each expert multiplies, and their activations: what the routed mat-mul of mm.cuh reads.
//
// Two launches, a block per expert each: one counts, the other finds out where its expert's rows begin and writes them in order. Both
// read all ids, which lie in the L2 cache. The order is the same in every run.
#include "../common/host.cuh"
#include "../common/pdl.cuh"
#include "../quant/h16.cuh"

namespace frt {

namespace {

constexpr int kThreads = 256;

struct Pairs {
    const int32_t * ids;
    int64_t         stride;
    int             n_used;

    __device__ __forceinline__ int expert(int pair) const { return ids[pair / n_used * stride + pair % n_used]; }
};

__global__ void __launch_bounds__(kThreads) count_kernel(const __grid_constant__ frt_moe_route_args a) {
    pdl_wait();
    const Pairs pairs = {a.ids, a.ids_stride, a.n_used};
    const int   n = a.n_tokens * a.n_used;
    int         found = 0;
    for (int i = threadIdx.x; i < n; i += kThreads) {
        found += pairs.expert(i) == static_cast<int>(blockIdx.x);
    }
    __shared__ int sums[kThreads / 32];
    found = lanes_sum<32>(found);
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = found;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / 32; ++w) {
            found += sums[w];
        }
        a.out.count[blockIdx.x] = found;
    }
}

__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ frt_moe_route_args a) {
    pdl_wait();
    __shared__ int sums[kThreads / 32], begin;
    const Pairs    pairs = {a.ids, a.ids_stride, a.n_used};
    const int      e = blockIdx.x, n = a.n_tokens * a.n_used, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 0) {
        int before = 0, all = 0;
        for (int i = lane; i < a.n_experts; i += 32) {
            const int places = (a.out.count[i] + 7) / 8 * 8;
            before += i < e ? places : 0;
            all += places;
        }
        before = lanes_sum<32>(before);
        all = lanes_sum<32>(all);
        if (lane == 0) {
            begin = before;
            a.out.begin[e] = before;
            if (e == a.n_experts - 1) {
                a.out.begin[a.n_experts] = all;
            }
        }
    }
    __syncthreads();
    int at = begin;
    for (int i0 = 0; i0 < n; i0 += kThreads) {
        const int      i = i0 + threadIdx.x;
        const bool     mine = i < n && pairs.expert(i) == e;
        const unsigned others = __ballot_sync(kAllLanes, mine);
        if (lane == 0) {
            sums[warp] = __popc(others);
        }
        __syncthreads();
        int before = 0, all = 0;
#pragma unroll
        for (int w = 0; w < kThreads / 32; ++w) {
            before += w < warp ? sums[w] : 0;
            all += sums[w];
        }
        if (mine) {
            a.out.rows[at + before + __popc(others & ((1u << lane) - 1))] = i;
        }
        at += all;
        __syncthreads();
    }
    const int end = begin + (at - begin + 7) / 8 * 8;
    if (at + static_cast<int>(threadIdx.x) < end) {
        a.out.rows[at + threadIdx.x] = -1;
    }
}

template <int EIGHTS> __global__ void __launch_bounds__(kThreads) moe_h16_kernel(const __grid_constant__ frt_moe_h16_args a) {
    __shared__ unsigned scratch[32];
    pdl_wait();
    const int place = blockIdx.x;
    const int pair = place < a.route.begin[a.n_experts] ? a.route.rows[place] : -1;
    if (pair >= 0) {
        const float * x = a.x + (a.per_slot ? pair : pair / a.n_used) * a.x_stride;
        h16_row<kThreads, EIGHTS>(x, a.k, a.y, place, frt_moe_max_rows(a.n_pairs, a.n_experts), scratch);
    }
}

}  // namespace

}  // namespace frt

extern "C" __host__ __device__ int32_t frt_moe_max_rows(int32_t n_pairs, int32_t n_experts) { return (n_pairs + 7 * n_experts + 7) / 8 * 8; }

extern "C" int frt_moe_route(const frt_moe_route_args * args, frt_launch how) {
    const frt_moe_route_args & a = *args;
    if (a.n_experts < 1 || a.n_experts > FRT_MOE_MAX_EXPERTS || a.n_tokens < 1 || a.n_used < 1 || a.ids == nullptr || a.out.rows == nullptr ||
        a.out.begin == nullptr || a.out.count == nullptr) {
        return cudaErrorInvalidValue;
    }
    const cudaError_t err = frt::launch<frt::count_kernel>(how, a.n_experts, frt::kThreads, 0, a);
    return err != cudaSuccess ? err : frt::launch<frt::place_kernel>(how, a.n_experts, frt::kThreads, 0, a);
}

extern "C" int frt_moe_to_h16(const frt_moe_h16_args * args, frt_launch how) {
    using namespace frt;
    const frt_moe_h16_args & a = *args;
    if (a.k < 1 || a.k % kH16Columns != 0 || a.n_pairs < 1 || a.n_used < 1 || a.n_experts < 1 || a.x == nullptr || a.y.x == nullptr ||
        a.y.scale == nullptr || !aligned(a.x, 16) || a.x_stride % 4 != 0 || !aligned(a.y.x, kH16Align)) {
        return cudaErrorInvalidValue;
    }
    return h16_eights<kThreads>(
        a.k, [&](auto eights) { return launch<moe_h16_kernel<eights()>>(how, frt_moe_max_rows(a.n_pairs, a.n_experts), kThreads, 0, a); });
}
