// SPDX-License-Identifier: Apache-2.0
// Which tiles of an attention mask hide every key (all -inf), which show every key (all 0), and which have to be looked at: once for
// a mask, for all layers that use it. Two launches: a block classifies one tile, then a warp writes the two lists of a row of tiles.
// mask f16, strides in bytes; reads the whole mask once. Archs: sm_80 and up. No shared memory beyond a word; blocks of 256 threads.
#include <cuda_fp16.h>

#include "../common/pdl.cuh"
#include "../flashrt_kernels.h"

namespace frt {
namespace {

constexpr int      kThreads = 256;
constexpr unsigned kShown = 1, kHidden = 2;  // bits of a tile's kind; both: it has to be looked at
constexpr unsigned kPartial = kShown | kHidden;

__device__ __forceinline__ unsigned kind_of(unsigned half_bits) {
    return (half_bits & 0x7fff) == 0 ? kShown : half_bits == 0xfc00 ? kHidden : kPartial;
}

__device__ __forceinline__ unsigned kind_of(uint4 eight) {
    const unsigned words[4] = {eight.x, eight.y, eight.z, eight.w};
    unsigned       kind = 0;
#pragma unroll
    for (const unsigned w : words) {
        kind |= w == 0 ? kShown : w == 0xfc00fc00u ? kHidden : kind_of(w & 0xffff) | kind_of(w >> 16);
    }
    return kind;
}

// VECTORS: rows lie on 16 bytes.
template <bool VECTORS> __global__ void __launch_bounds__(kThreads) mask_kind_kernel(const __grid_constant__ frt_mask_tiles_args a) {
    pdl_wait();
    const int    first_token = blockIdx.y * a.tile_m, first_key = blockIdx.x * a.tile_n;
    const int    tokens = min(a.tile_m, a.n_tokens - first_token), keys = min(a.tile_n, a.n_kv - first_key);
    const char * tile = static_cast<const char *>(a.mask) + blockIdx.z * a.plane_bytes + first_token * a.token_bytes + 2 * first_key;
    unsigned     kind = 0;
    if (VECTORS && keys % 8 == 0) {
        const int in_row = keys / 8, all = tokens * in_row;
#pragma unroll 8
        for (int i = threadIdx.x; i < all; i += kThreads) {
            kind |= kind_of(*reinterpret_cast<const uint4 *>(tile + i / in_row * a.token_bytes + i % in_row * 16));
        }
    } else {
        for (int i = threadIdx.x; i < tokens * keys; i += kThreads) {
            kind |= kind_of(*reinterpret_cast<const uint16_t *>(tile + i / keys * a.token_bytes + i % keys * 2));
        }
    }
    const int shown = __syncthreads_or(kind & kShown), hidden = __syncthreads_or(kind & kHidden);
    if (threadIdx.x == 0) {
        const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
        a.tiles.kind[row * gridDim.x + blockIdx.x] = (shown ? 1 : 0) | (hidden ? shown ? 2 : 0 : 0);
    }
}

// One warp for each row of tiles.
__global__ void __launch_bounds__(32) mask_lists_kernel(const __grid_constant__ frt_mask_tiles_args a, int key_tiles) {
    pdl_wait();
    const int64_t   row = blockIdx.x;
    const uint8_t * kind = a.tiles.kind + row * key_tiles;
    const unsigned  before = (1u << threadIdx.x) - 1;
    int             partial = 0, full = 0;
    for (int first = 0; first < key_tiles; first += 32) {
        const int      tile = first + threadIdx.x;
        const unsigned of_tile = tile < key_tiles ? kind[tile] : 0;
        const unsigned partials = __ballot_sync(~0u, of_tile == kPartial), fulls = __ballot_sync(~0u, of_tile == kShown);
        if (of_tile == kPartial) {
            a.tiles.partial_index[row * key_tiles + partial + __popc(partials & before)] = tile;
        } else if (of_tile == kShown) {
            a.tiles.full_index[row * key_tiles + full + __popc(fulls & before)] = tile;
        }
        partial += __popc(partials);
        full += __popc(fulls);
    }
    if (threadIdx.x == 0) {
        a.tiles.partial_count[row] = partial;
        a.tiles.full_count[row] = full;
    }
}

bool valid(const frt_mask_tiles_args & a) {
    const frt_tiles & t = a.tiles;
    return a.n_planes > 0 && a.n_planes < 65536 && a.n_tokens > 0 && a.n_kv > 0 && a.tile_m > 0 && a.tile_n > 0 && a.tile_n % 8 == 0 &&
           (a.n_tokens - 1) / a.tile_m < 65535 && a.mask && reinterpret_cast<uintptr_t>(a.mask) % 2 == 0 && a.token_bytes % 2 == 0 &&
           a.plane_bytes % 2 == 0 && t.kind && t.partial_count && t.partial_index && t.full_count && t.full_index;
}

}  // namespace
}  // namespace frt

int frt_mask_tiles(const frt_mask_tiles_args * args, frt_launch how) {
    const frt_mask_tiles_args & a = *args;
    if (!frt::valid(a)) {
        return cudaErrorInvalidValue;
    }
    const unsigned key_tiles = (a.n_kv - 1) / a.tile_n + 1, token_tiles = (a.n_tokens - 1) / a.tile_m + 1;
    const dim3     grid(key_tiles, token_tiles, a.n_planes);
    const bool     vectors = reinterpret_cast<uintptr_t>(a.mask) % 16 == 0 && a.token_bytes % 16 == 0 && a.plane_bytes % 16 == 0;
    const cudaError_t err = vectors ? frt::launch<frt::mask_kind_kernel<true>>(how, grid, frt::kThreads, 0, a)
                                    : frt::launch<frt::mask_kind_kernel<false>>(how, grid, frt::kThreads, 0, a);
    return err != cudaSuccess ? err
                              : frt::launch<frt::mask_lists_kernel>(how, token_tiles * a.n_planes, 32, 0, a, static_cast<int>(key_tiles));
}
