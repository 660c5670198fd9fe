// SPDX-License-Identifier: Apache-2.0
// Residual add and RMS norm of one row per block, of f32 [n_rows][n_cols] with row strides in elements.
//
//   ADD_NORM       y = x + h                          replaces ADD, RMS_NORM, MUL
//   SANDWICH_NORM  y = x + rms_norm(h, eps1) * w1     replaces RMS_NORM, MUL, ADD, RMS_NORM, MUL
//   both           z = rms_norm(y, eps2) * w2         as f32, as q8 blocks, as f16 for tensor cores, in any combination
//
// A row stays in registers, 4 * kQuads values a thread, so h and x are read once, and whole before y or z is written.
// Time is latency: weights are fetched before the wait on the previous grid, and a block has few warps.
// Archs: sm_80 and up, PDL from sm_90. Static shared memory: 384 bytes. Registers: at most 128 (512 threads).
#include "../common/pdl.cuh"
#include "../common/reduce.cuh"
#include "../flashrt_kernels.h"
#include "../quant/h16.cuh"
#include "../quant/q8.cuh"

#include <type_traits>

namespace frt {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kMaxQuads = 8;
constexpr int kMaxCols = kMaxThreads * kMaxQuads * 4;

// Stays where it is written: on its side of the wait on the previous grid.
struct PlainLoad {
    template <typename T> static __device__ __forceinline__ T at(const T * p) { return *p; }
};
// For weights alone: the compiler may move it over stores and over the wait.
struct ConstantLoad {
    template <typename T> static __device__ __forceinline__ T at(const T * p) { return __ldg(p); }
};

// Values i to i + 3 of a row of n, zero beyond it. kAligned: the row starts on 16 bytes and n is a multiple of 4.
template <typename Load, bool kAligned> __device__ __forceinline__ float4 load_quad(const float * row, int i, int n) {
    if constexpr (kAligned) {
        return i < n ? Load::at(reinterpret_cast<const float4 *>(row + i)) : float4{};
    } else {
        return {i < n ? Load::at(row + i) : 0.0f, i + 1 < n ? Load::at(row + i + 1) : 0.0f,
                i + 2 < n ? Load::at(row + i + 2) : 0.0f, i + 3 < n ? Load::at(row + i + 3) : 0.0f};
    }
}

template <bool kAligned> __device__ __forceinline__ void store_quad(float * row, int i, int n, float4 v) {
    if constexpr (kAligned) {
        if (i < n) {
            *reinterpret_cast<float4 *>(row + i) = v;
        }
    } else {
        const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (i + j < n) {
                row[i + j] = values[j];
            }
        }
    }
}

__device__ __forceinline__ float dot(float4 a) {
    return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
}

__device__ __forceinline__ float4 scaled(float4 v, float scale, float4 w) {
    return {scale * v.x * w.x, scale * v.y * w.y, scale * v.z * w.z, scale * v.w * w.w};
}

__device__ __forceinline__ float4 scaled_add(float4 v, float scale, float4 w, float4 x) {
    return {scale * v.x * w.x + x.x, scale * v.y * w.y + x.y, scale * v.z * w.z + x.z, scale * v.w * w.w + x.w};
}

template <int kQuads, bool kAligned, bool kSandwich>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_kernel(const __grid_constant__ frt_norm_args a) {
    // With more than 4 quads a thread's registers do not hold the weights beside h and x: they are then fetched late.
    constexpr bool kEarly = kQuads <= 4;
    constexpr int kHeld = kEarly ? kQuads : 1;
    __shared__ float scratch[2][32];
    __shared__ unsigned largest[32];
    const int n = a.n_cols;
    const int64_t row = blockIdx.x;
    const auto column = [&](int j) { return 4 * static_cast<int>(threadIdx.x + j * blockDim.x); };
    // Fetched early, the single values of unaligned rows would spill.
    using LateLoad = std::conditional_t<kAligned, ConstantLoad, PlainLoad>;
    const auto late = [&](const float * w, int j) { return load_quad<LateLoad, kAligned>(w, column(j), n); };

    float4 w1[kHeld], w2[kHeld];
    if constexpr (kEarly) {
#pragma unroll
        for (int j = 0; j < kQuads; j++) {
            if constexpr (kSandwich) {
                w1[j] = load_quad<PlainLoad, kAligned>(a.w1, column(j), n);
            }
            w2[j] = load_quad<PlainLoad, kAligned>(a.w2, column(j), n);
        }
    }
    pdl_wait();

    float4 h[kQuads], y[kQuads];
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
        h[j] = load_quad<PlainLoad, kAligned>(a.h + row * a.h_stride, column(j), n);
        y[j] = load_quad<PlainLoad, kAligned>(a.x + row * a.x_stride, column(j), n);
    }
    float scale = 1.0f;
    if constexpr (kSandwich) {
        float squares = 0.0f;
#pragma unroll
        for (int j = 0; j < kQuads; j++) {
            squares += dot(h[j]);
        }
        scale = rsqrtf(block_sum(squares, scratch[0]) / n + a.eps1);
    }
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
        if constexpr (kSandwich) {
            y[j] = scaled_add(h[j], scale, kEarly ? w1[j % kHeld] : late(a.w1, j), y[j]);
        } else {
            y[j] = {y[j].x + h[j].x, y[j].y + h[j].y, y[j].z + h[j].z, y[j].w + h[j].w};
        }
        squares += dot(y[j]);
    }
    scale = rsqrtf(block_sum(squares, scratch[1]) / n + a.eps2);

    // Behind the barrier of the sum above: every thread has read its part of h and x.
    unsigned magnitude = 0;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
        const int i = column(j);
        const float4 z = scaled(y[j], scale, kEarly ? w2[j % kHeld] : late(a.w2, j));
        if (a.y != nullptr) {
            store_quad<kAligned>(a.y + row * a.y_stride, i, n, y[j]);
        }
        if (a.z != nullptr) {
            store_quad<kAligned>(a.z + row * a.z_stride, i, n, z);
        }
        if (a.zq.qs != nullptr) {
            const Q8Quad q = q8_from_8_lanes(z);
            if (i < n) {
                *reinterpret_cast<int *>(a.zq.qs + row * n + i) = q.q;
                if (i % 32 == 0) {
                    *reinterpret_cast<float2 *>(a.zq.ds + (row * n + i) / 16) = q.ds;
                }
            }
        }
        if (a.zh.x != nullptr && i < n) {
            y[j] = z;
            magnitude = max(magnitude, h16_magnitude(z));
        }
    }
    if (a.zh.x != nullptr) {
        const H16Scale h16(block_max(magnitude, largest));
        // A lane's four values are word q of two pieces. The lane 4 away has the word beside it of both: they exchange one each, and
        // store two words of one piece.
        const int  q = threadIdx.x / 4 % 4;
        const bool odd = q % 2 != 0;
        const int  piece = threadIdx.x % 4 * 2 + odd;
#pragma unroll
        for (int j = 0; j < kQuads; j++) {
            const int      i = column(j);
            const unsigned first = h16.pair(y[j].x, y[j].y), second = h16.pair(y[j].z, y[j].w);
            const unsigned other = __shfl_xor_sync(kAllLanes, odd ? first : second, 4);
            if (i < n) {
                unsigned * words = h16_piece(a.zh, row, a.n_rows, i / kH16Columns * 8 + piece);
                *reinterpret_cast<uint2 *>(words + q / 2 * 2) = odd ? make_uint2(other, second) : make_uint2(first, other);
            }
        }
        if (threadIdx.x == 0) {
            a.zh.scale[row] = h16.scale;
        }
    }
}

template <int kQuads, bool kAligned> cudaError_t launch_form(const frt_norm_args & a, int threads, frt_launch how) {
    if (a.w1 != nullptr) {
        return launch<norm_kernel<kQuads, kAligned, true>>(how, a.n_rows, threads, 0, a);
    }
    return launch<norm_kernel<kQuads, kAligned, false>>(how, a.n_rows, threads, 0, a);
}

bool rows_aligned(const void * base, int64_t stride) {
    return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % 4 == 0;
}

}  // namespace
}  // namespace frt

int frt_norm(const frt_norm_args * args, frt_launch how) {
    using namespace frt;
    const frt_norm_args & a = *args;
    if (a.n_rows < 1 || a.n_cols < 1 || a.n_cols > kMaxCols || a.h == nullptr || a.x == nullptr || a.w2 == nullptr ||
        (a.z == nullptr && a.zq.qs == nullptr && a.zh.x == nullptr) ||
        (a.zq.qs != nullptr && (a.zq.ds == nullptr || a.n_cols % 32 != 0)) ||
        (a.zh.x != nullptr && (a.zh.scale == nullptr || a.n_cols % kH16Columns != 0 || reinterpret_cast<uintptr_t>(a.zh.x) % kH16Align != 0))) {
        return cudaErrorInvalidValue;
    }
    const int quads = (a.n_cols + 3) / 4;
    const auto threads = [&](int per_thread) {
        return ((quads + per_thread - 1) / per_thread + 31) / 32 * 32;
    };
    const bool aligned = a.n_cols % 4 == 0 && rows_aligned(a.h, a.h_stride) && rows_aligned(a.x, a.x_stride) &&
                         rows_aligned(a.w1, 0) && rows_aligned(a.w2, 0) && rows_aligned(a.y, a.y_stride) &&
                         rows_aligned(a.z, a.z_stride);
    if (!aligned) {
        return launch_form<kMaxQuads, false>(a, threads(kMaxQuads), how);
    }
    if (threads(1) <= kMaxThreads) {
        return launch_form<1, true>(a, threads(1), how);
    }
    if (threads(2) <= kMaxThreads) {
        return launch_form<2, true>(a, threads(2), how);
    }
    if (threads(4) <= kMaxThreads) {
        return launch_form<4, true>(a, threads(4), how);
    }
    return launch_form<kMaxQuads, true>(a, threads(kMaxQuads), how);
}
