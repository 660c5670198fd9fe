// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): a kernel may start while its predecessor in the stream still runs.
//
// Rules for a kernel launched through `launch`:
//  - before pdl_wait() it touches constant memory only (weights, norm weights, frequency factors);
//  - every thread calls pdl_wait() once, also those that have nothing to do: only then does "this grid is complete" imply
//    "all earlier grids are complete" for the grid that comes next;
//  - what it reads after pdl_wait() is read through pointers that are not __restrict__: the compiler may move loads
//    of the read-only path (ld.global.nc) above the wait.
#pragma once
#include <cuda_runtime.h>
#include <atomic>
#include <utility>
#include "../flashrt_kernels.h"

namespace frt {

// Waits until all earlier grids are complete and their writes are visible, then lets the next grid start once every block has
// come here. Not before the wait: grids would then pile up behind one another, each holding its share of the multiprocessors
// while it waits, and the one that works would be slower. No-op where PDL does not exist.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Code compiled for an architecture before sm_90 (and run through its PTX) has no wait in it: it must not be launched early.
template <auto Kernel> bool pdl_capable() {
    static const bool capable = [] {
        cudaFuncAttributes attr = {};
        return cudaFuncGetAttributes(&attr, reinterpret_cast<const void *>(Kernel)) == cudaSuccess && attr.ptxVersion >= 90;
    }();
    return capable;
}

constexpr size_t kDefaultSmem = 48 * 1024;  // dynamic shared memory a kernel has without asking for more

// Lets a kernel have all the shared memory of a block, once per device. Not what one launch needs: the limit also holds for the nodes
// of CUDA graphs, which are instantiated and updated after other launches have set it, and those fail if it has become smaller.
template <auto Kernel> cudaError_t allow_all_smem() {
    static std::atomic<uint64_t> done{0};  // a bit per device
    int         device = 0;
    cudaError_t err = cudaGetDevice(&device);
    const uint64_t bit = uint64_t{1} << (device & 63);
    if (err != cudaSuccess || (done.load(std::memory_order_relaxed) & bit) != 0) {
        return err;
    }
    cudaFuncAttributes attr = {};
    int                most = 0;
    err = cudaFuncGetAttributes(&attr, reinterpret_cast<const void *>(Kernel));
    err = err != cudaSuccess ? err : cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    err = err != cudaSuccess ? err
                             : cudaFuncSetAttribute(reinterpret_cast<const void *>(Kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    most - static_cast<int>(attr.sharedSizeBytes));
    if (err == cudaSuccess && device < 64) {
        done.fetch_or(bit, std::memory_order_relaxed);
    }
    return err;
}

// cluster: blocks of a cluster, 1: none.
template <auto Kernel, typename... Args>
cudaError_t launch_clusters(frt_launch how, int cluster, dim3 grid, dim3 block, size_t smem, Args &&... args) {
    if (smem > kDefaultSmem) {
        const cudaError_t err = allow_all_smem<Kernel>();
        if (err != cudaSuccess) {
            return err;
        }
    }
    cudaLaunchAttribute attrs[2] = {};
    int                 n = 0;
    if (how.pdl && how.cc >= 90 && pdl_capable<Kernel>()) {
        attrs[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attrs[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attrs[n].id = cudaLaunchAttributeClusterDimension;
        attrs[n].val.clusterDim.x = cluster, attrs[n].val.clusterDim.y = 1, attrs[n].val.clusterDim.z = 1;
        ++n;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = smem;
    config.stream = static_cast<cudaStream_t>(how.stream);
    config.attrs = attrs;
    config.numAttrs = n;
    return cudaLaunchKernelEx(&config, Kernel, std::forward<Args>(args)...);
}

template <auto Kernel, typename... Args>
cudaError_t launch(frt_launch how, dim3 grid, dim3 block, size_t smem, Args &&... args) {
    return launch_clusters<Kernel>(how, 1, grid, block, smem, std::forward<Args>(args)...);
}

}  // namespace frt
