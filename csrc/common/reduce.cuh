// SPDX-License-Identifier: Apache-2.0
// Reductions over groups of lanes and over a block. Every lane of the group gets the result.
#pragma once
#include <cuda_runtime.h>

namespace frt {

constexpr unsigned kAllLanes = 0xffffffffu;

// LANES: a power of two; groups are aligned within the warp, and the whole warp must call.
template <int LANES = 32> __device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
        v += __shfl_xor_sync(kAllLanes, v, o, 32);
    }
    return v;
}

template <int LANES = 32> __device__ __forceinline__ int lanes_sum(int v) {
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
        v += __shfl_xor_sync(kAllLanes, v, o, 32);
    }
    return v;
}

template <int LANES = 32> __device__ __forceinline__ float lanes_max(float v) {
#pragma unroll
    for (int o = LANES / 2; o > 0; o /= 2) {
        v = fmaxf(v, __shfl_xor_sync(kAllLanes, v, o, 32));
    }
    return v;
}

__device__ __forceinline__ unsigned warp_max(unsigned v) { return __reduce_max_sync(kAllLanes, v); }

// Sum over a block of whole warps, at most 1024 threads. `scratch` holds 32 floats and is free again after the next
// __syncthreads(); two calls in a row need two scratches.
__device__ __forceinline__ float block_sum(float v, float * scratch) {
    v = lanes_sum<32>(v);
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
        scratch[threadIdx.x / 32] = v;
    }
    __syncthreads();
    v = lane < static_cast<int>(blockDim.x / 32) ? scratch[lane] : 0.0f;
    return lanes_sum<32>(v);
}

// Maximum, likewise.
__device__ __forceinline__ unsigned block_max(unsigned v, unsigned * scratch) {
    v = warp_max(v);
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
        scratch[threadIdx.x / 32] = v;
    }
    __syncthreads();
    return warp_max(lane < static_cast<int>(blockDim.x / 32) ? scratch[lane] : 0u);
}

}  // namespace frt
