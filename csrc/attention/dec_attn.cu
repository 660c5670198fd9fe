// SPDX-License-Identifier: Apache-2.0
// Attention of a few query tokens over a KV cache, in one launch:
//
//   s = softcap * tanh(scale * q.k / softcap), or scale * q.k without softcap;  s += mask
//   dst = sum_j exp(s_j - max s) v_j / sum_j exp(s_j - max s), or 0 where every s is -inf
//
// replaces FLASH_ATTN_EXT without ALiBi and sinks.
// q f32, k and v f16, mask f16 [n_kv], all with strides in bytes; dst f32 [n_streams][n_tokens][n_heads][head_dim].
//
// A "column" is one head of one token. All columns of a KV head read the same keys, so a block takes up to eight of them and
// one split of the keys: each K and V row is fetched once for all. A row is shared by as many lanes as it has 16-byte pieces;
// each group of lanes keeps its own running maximum, sum and weighted V, merged within the warp, the block, and last between
// the splits. The block that draws the last ticket of its columns does that: no second launch. Arithmetic is f32.
// Archs: sm_80 and up, PDL from sm_90. Static shared memory: up to 45 KiB. Blocks of 256 threads.
#include <cuda_fp16.h>
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <initializer_list>

#include "../common/pdl.cuh"
#include "../common/reduce.cuh"
#include "../flashrt_kernels.h"

namespace frt {
namespace {

constexpr int   kWarps = 8;
constexpr int   kThreads = 32 * kWarps;
constexpr int   kRows = 4;  // K and V rows that a lane has in flight
constexpr int   kMaxSplits = 128;
constexpr float kLog2e = 1.4426950408889634f;
// Below every score, and finite: the difference of two is a number even before the first key.
constexpr float kNoScore = -FLT_MAX / 2;

template <int HD> struct Layout {
    static constexpr int kPieces = HD / 8;                                    // of 16 bytes, in a row
    static constexpr int kLanes = kPieces > 16 ? 32 : kPieces > 8 ? 16 : 8;   // that share a row; those past kPieces idle
    static constexpr int kGroups = 32 / kLanes;
    static constexpr int kTile = kWarps * kGroups * kRows;                    // rows that a block takes at a time
    // A lane's eight f32 values lie as two float4 that are kLanes apart: free of bank conflicts.
    static constexpr int kQuads = 2 * kLanes;
};

// First of the four dimensions that quad f of a column holds.
template <int HD> __device__ __forceinline__ int dim_of(int f) {
    return f % Layout<HD>::kLanes * 8 + f / Layout<HD>::kLanes * 4;
}

__device__ __forceinline__ float exp_diff(float a, float b) { return exp2f((a - b) * kLog2e); }

__device__ __forceinline__ float2 wide(uint32_t pair) {
    __half2 h;
    memcpy(&h, &pair, sizeof(h));
    return __half22float2(h);
}

__device__ __forceinline__ void add_scaled(float4 & sum, float w, float4 v) {
    sum.x = fmaf(w, v.x, sum.x);
    sum.y = fmaf(w, v.y, sum.y);
    sum.z = fmaf(w, v.z, sum.z);
    sum.w = fmaf(w, v.w, sum.w);
}

// The columns of a block.
struct Columns {
    int stream, head_kv, first;  // `first` of the n_tokens * group columns of a KV head

    __device__ Columns(const frt_dec_attn_args & a, int n) {
        const int chunks = (count(a) + n - 1) / n;
        stream = blockIdx.z;
        head_kv = blockIdx.y / chunks;
        first = blockIdx.y % chunks * n;
    }
    static __device__ int group(const frt_dec_attn_args & a) { return a.n_heads / a.n_heads_kv; }
    static __device__ int count(const frt_dec_attn_args & a) { return a.n_tokens * group(a); }
    // Columns past the last repeat it and are not stored.
    __device__ int index(const frt_dec_attn_args & a, int c) const { return min(first + c, count(a) - 1); }
    __device__ int token(const frt_dec_attn_args & a, int c) const { return index(a, c) / group(a); }
    __device__ int head(const frt_dec_attn_args & a, int c) const { return head_kv * group(a) + index(a, c) % group(a); }
};

template <int HD>
__device__ __forceinline__ void store(const frt_dec_attn_args & a, const Columns & cols, int c, int f, float4 v) {
    if (cols.first + c < Columns::count(a) && dim_of<HD>(f) < HD) {
        const int64_t row = (static_cast<int64_t>(cols.stream) * a.n_tokens + cols.token(a, c)) * a.n_heads + cols.head(a, c);
        *reinterpret_cast<float4 *>(a.dst + row * HD + dim_of<HD>(f)) = v;
    }
}

// Results of all splits, by the block that finished last.
template <int HD, int NC>
__device__ void combine(const frt_dec_attn_args & a, const Columns & cols, const float4 * values, const float2 * stats,
                        float (&weight)[NC][kMaxSplits]) {
    constexpr int kQuads = Layout<HD>::kQuads;
    const int n_split = gridDim.x;
    const int lane = threadIdx.x % 32;
    if (const int c = threadIdx.x / 32; c < NC) {
        float max = kNoScore;
        for (int s = lane; s < n_split; s += 32) {
            max = fmaxf(max, __ldcg(&stats[s * NC + c]).x);
        }
        max = lanes_max(max);
        float sum = 0.0f;
        for (int s = lane; s < n_split; s += 32) {
            const float2 stat = __ldcg(&stats[s * NC + c]);
            const float  w = exp_diff(stat.x, max);
            weight[c][s] = w;
            sum += w * stat.y;
        }
        sum = lanes_sum(sum);
        const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
        for (int s = lane; s < n_split; s += 32) {
            weight[c][s] *= scale;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < NC * kQuads; i += kThreads) {
        const int c = i / kQuads;
        float4 sum = {};
#pragma unroll 8
        for (int s = 0; s < n_split; s++) {
            add_scaled(sum, weight[c][s], __ldcg(&values[s * NC * kQuads + i]));
        }
        store<HD>(a, cols, c, i % kQuads, sum);
    }
}

template <int HD, int NC>
__global__ void __launch_bounds__(kThreads, NC > 4 ? 1 : 2)
    dec_attn_kernel(const __grid_constant__ frt_dec_attn_args a, int tiles_per_split) {
    using L = Layout<HD>;
    constexpr int kAtOnce = NC < 4 ? NC : 4;  // columns that warps exchange at once
    __shared__ float4 q[NC][L::kQuads];
    __shared__ float4 part[kWarps][kAtOnce][L::kQuads];
    __shared__ float2 part_stats[kWarps][NC];  // maximum, sum
    __shared__ float  weight[NC][kMaxSplits];
    __shared__ float  bias[kWarps][kRows * L::kGroups][NC];
    __shared__ bool is_last;

    const int warp = threadIdx.x / 32;
    const int group = threadIdx.x % 32 / L::kLanes;
    const int lane = threadIdx.x % L::kLanes;
    const Columns cols(a, NC);
    const int tile0 = blockIdx.x * tiles_per_split;
    const int tile_end = min(tile0 + tiles_per_split, (a.n_kv + L::kTile - 1) / L::kTile);
    const int piece = min(lane, L::kPieces - 1) * 16;
    const char * k_base = static_cast<const char *>(a.k) + cols.stream * a.k_stream_bytes + cols.head_kv * a.k_head_bytes + piece;
    const char * v_base = static_cast<const char *>(a.v) + cols.stream * a.v_stream_bytes + cols.head_kv * a.v_head_bytes + piece;
    const auto row_of = [&](int tile, int r) { return tile * L::kTile + (r * kWarps + warp) * L::kGroups + group; };
    const auto load = [&](uint4 (&rows)[kRows], const char * base, int64_t row_bytes, int tile) {
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            rows[r] = *reinterpret_cast<const uint4 *>(base + min(row_of(tile, r), a.n_kv - 1) * row_bytes);
        }
    };
    // What is added to the scores of a warp's rows: lanes fetch one each, with column threadIdx.x % NC, and pass them on
    // through shared memory. Rows past the last are masked like any other.
    constexpr int kBiases = kRows * L::kGroups * NC;
    constexpr int kBiasesPerLane = (kBiases + 31) / 32;
    const char * mask = static_cast<const char *>(a.mask) + cols.stream * a.mask_stream_bytes +
                        cols.token(a, threadIdx.x % NC) * a.mask_token_bytes;
    const auto load_bias = [&](float (&values)[kBiasesPerLane], int tile) {
#pragma unroll
        for (int j = 0; j < kBiasesPerLane; j++) {
            const int i = (j * 32 + threadIdx.x % 32) / NC;
            const int row = tile * L::kTile + (i / L::kGroups * kWarps + warp) * L::kGroups + i % L::kGroups;
            if (row >= a.n_kv) {
                values[j] = -INFINITY;
            } else {
                values[j] = a.mask == nullptr ? 0.0f : __half2float(reinterpret_cast<const __half *>(mask)[row]);
            }
        }
    };

    pdl_wait();
    uint4 k[kRows], v[kRows];
    load(k, k_base, a.k_row_bytes, tile0);
    load(v, v_base, a.v_row_bytes, tile0);
    float fetched[kBiasesPerLane];
    load_bias(fetched, tile0);
    for (int i = threadIdx.x; i < NC * L::kQuads; i += kThreads) {
        const int c = i / L::kQuads;
        const int f = i % L::kQuads;
        float4 value = {};
        if (dim_of<HD>(f) < HD) {
            const char * head = reinterpret_cast<const char *>(a.q) + cols.stream * a.q_stream_bytes +
                                cols.token(a, c) * a.q_token_bytes + cols.head(a, c) * a.q_head_bytes;
            add_scaled(value, a.scale, *reinterpret_cast<const float4 *>(head + dim_of<HD>(f) * sizeof(float)));
        }
        q[c][f] = value;
    }
    __syncthreads();

    float  max[NC], sum[NC];
    float4 out[NC][2] = {};
#pragma unroll
    for (int c = 0; c < NC; c++) {
        max[c] = kNoScore;
        sum[c] = 0.0f;
    }
    for (int tile = tile0; tile < tile_end; tile++) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kBiasesPerLane; j++) {
            if (const int i = j * 32 + threadIdx.x % 32; i < kBiases) {
                bias[warp][i / NC][i % NC] = fetched[j];
            }
        }
        __syncwarp();
        float score[kRows][NC] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 qs[NC];
#pragma unroll
            for (int c = 0; c < NC; c++) {
                qs[c] = q[c][half * L::kLanes + lane];
            }
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                const float2 lo = wide(half ? k[r].z : k[r].x);
                const float2 hi = wide(half ? k[r].w : k[r].y);
#pragma unroll
                for (int c = 0; c < NC; c++) {
                    score[r][c] = fmaf(qs[c].x, lo.x, score[r][c]);
                    score[r][c] = fmaf(qs[c].y, lo.y, score[r][c]);
                    score[r][c] = fmaf(qs[c].z, hi.x, score[r][c]);
                    score[r][c] = fmaf(qs[c].w, hi.y, score[r][c]);
                }
            }
        }
        const bool more = tile + 1 < tile_end;
        if (more) {
            load(k, k_base, a.k_row_bytes, tile + 1);
            load_bias(fetched, tile + 1);
        }
#pragma unroll
        for (int c = 0; c < NC; c++) {
            float new_max = max[c];
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                score[r][c] = lanes_sum<L::kLanes>(score[r][c]);
                if (a.softcap != 0.0f) {
                    score[r][c] = a.softcap * tanhf(score[r][c]);
                }
                score[r][c] += bias[warp][r * L::kGroups + group][c];
                new_max = fmaxf(new_max, score[r][c]);
            }
            const float shrink = exp_diff(max[c], new_max);
            max[c] = new_max;
            sum[c] *= shrink;
#pragma unroll
            for (int r = 0; r < kRows; r++) {
                score[r][c] = exp_diff(score[r][c], new_max);
                sum[c] += score[r][c];
            }
#pragma unroll
            for (float4 & o : out[c]) {
                o = {o.x * shrink, o.y * shrink, o.z * shrink, o.w * shrink};
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; r++) {
            const float2 v0 = wide(v[r].x), v1 = wide(v[r].y), v2 = wide(v[r].z), v3 = wide(v[r].w);
#pragma unroll
            for (int c = 0; c < NC; c++) {
                add_scaled(out[c][0], score[r][c], {v0.x, v0.y, v1.x, v1.y});
                add_scaled(out[c][1], score[r][c], {v2.x, v2.y, v3.x, v3.y});
            }
        }
        if (more) {
            load(v, v_base, a.v_row_bytes, tile + 1);
        }
    }

    // The groups of a warp, then the warps.
#pragma unroll
    for (int c = 0; c < NC; c++) {
        float all_max = max[c];
#pragma unroll
        for (int o = L::kLanes; o < 32; o *= 2) {
            all_max = fmaxf(all_max, __shfl_xor_sync(kAllLanes, all_max, o));
        }
        const float w = exp_diff(max[c], all_max);
        float * values[] = {&sum[c],      &out[c][0].x, &out[c][0].y, &out[c][0].z, &out[c][0].w,
                            &out[c][1].x, &out[c][1].y, &out[c][1].z, &out[c][1].w};
#pragma unroll
        for (float * value : values) {
            *value *= w;
#pragma unroll
            for (int o = L::kLanes; o < 32; o *= 2) {
                *value += __shfl_xor_sync(kAllLanes, *value, o);
            }
        }
        if (threadIdx.x % 32 == 0) {
            part_stats[warp][c] = {all_max, sum[c]};
        }
    }
    const int     n_split = gridDim.x;
    const int64_t unit = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
    const int64_t n_parts = static_cast<int64_t>(gridDim.z) * gridDim.y * n_split;
    float4 * values = reinterpret_cast<float4 *>(a.scratch) + unit * n_split * NC * L::kQuads;
    float2 * stats = reinterpret_cast<float2 *>(a.scratch + n_parts * NC * L::kQuads * 4) + unit * n_split * NC;
#pragma unroll
    for (int c0 = 0; c0 < NC; c0 += kAtOnce) {
        if (c0 > 0) {
            __syncthreads();
        }
        if (group == 0) {
#pragma unroll
            for (int c = 0; c < kAtOnce; c++) {
                part[warp][c][lane] = out[c0 + c][0];
                part[warp][c][L::kLanes + lane] = out[c0 + c][1];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < kAtOnce * L::kQuads; i += kThreads) {
            const int c = c0 + i / L::kQuads;
            const int f = i % L::kQuads;
            float block_max = kNoScore;
#pragma unroll
            for (int w = 0; w < kWarps; w++) {
                block_max = fmaxf(block_max, part_stats[w][c].x);
            }
            float  block_sum = 0.0f;
            float4 value = {};
#pragma unroll
            for (int w = 0; w < kWarps; w++) {
                const float2 stat = part_stats[w][c];
                const float  scale = exp_diff(stat.x, block_max);
                block_sum += scale * stat.y;
                add_scaled(value, scale, part[w][c - c0][f]);
            }
            if (n_split == 1) {
                const float scale = block_sum > 0.0f ? 1.0f / block_sum : 0.0f;
                store<HD>(a, cols, c, f, {value.x * scale, value.y * scale, value.z * scale, value.w * scale});
            } else {
                const int at = blockIdx.x * NC + c;
                values[at * L::kQuads + f] = value;
                if (f == 0) {
                    stats[at] = {block_max, block_sum};
                }
            }
        }
    }
    if (n_split == 1) {
        return;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        // Wraps to zero at the last: ready for the next launch.
        const unsigned last = n_split - 1;
        is_last = atomicInc(a.tickets + unit, last) == last;
        __threadfence();
    }
    __syncthreads();
    if (is_last) {
        combine<HD, NC>(a, cols, values, stats, weight);
    }
}

// Blocks along the keys. A longer split costs time in proportion, and so do more results to combine, about a tenth as much each:
// the square root balances the two. Beyond what the device holds at once there is nothing to gain.
int choose_splits(int tiles, int64_t units, int resident_blocks, int max_splits) {
    constexpr float kTilePerPart = 10.0f;
    const int most = static_cast<int>(std::sqrt(kTilePerPart * tiles));
    const int fitting = static_cast<int>(resident_blocks / units);
    const int splits = std::max(1, std::min({most, fitting, tiles, max_splits, kMaxSplits}));
    const int tiles_per_split = (tiles + splits - 1) / splits;
    return (tiles + tiles_per_split - 1) / tiles_per_split;
}

template <int HD, int NC> cudaError_t run(const frt_dec_attn_args & a, frt_launch how) {
    const int columns = a.n_tokens * (a.n_heads / a.n_heads_kv);
    const int64_t per_stream = static_cast<int64_t>(a.n_heads_kv) * ((columns + NC - 1) / NC);
    constexpr int kMaxGrid = 65535;  // y and z
    if (per_stream > kMaxGrid || a.n_streams > kMaxGrid) {
        return cudaErrorInvalidValue;
    }
    const int tiles = (a.n_kv - 1) / Layout<HD>::kTile + 1;
    const int resident = how.sm_count * (NC > 4 ? 1 : 2);
    const int splits = choose_splits(tiles, per_stream * a.n_streams, resident, a.max_splits);
    frt_dec_attn_args args = a;
    if (a.softcap != 0.0f) {
        args.scale /= a.softcap;
    }
    const dim3 grid(splits, static_cast<unsigned>(per_stream), a.n_streams);
    return launch<dec_attn_kernel<HD, NC>>(how, grid, kThreads, 0, args, (tiles + splits - 1) / splits);
}

template <int HD> cudaError_t run(const frt_dec_attn_args & a, frt_launch how) {
    const int columns = a.n_tokens * (a.n_heads / a.n_heads_kv);
    return columns > 4   ? run<HD, 8>(a, how)
           : columns > 2 ? run<HD, 4>(a, how)
           : columns > 1 ? run<HD, 2>(a, how)
                         : run<HD, 1>(a, how);
}

bool on_16(std::initializer_list<const void *> pointers, std::initializer_list<int64_t> strides) {
    return std::all_of(pointers.begin(), pointers.end(), [](const void * p) { return p && reinterpret_cast<uintptr_t>(p) % 16 == 0; }) &&
           std::all_of(strides.begin(), strides.end(), [](int64_t s) { return s % 16 == 0; });
}

bool valid(const frt_dec_attn_args & a) {
    return a.n_heads_kv > 0 && a.n_heads > 0 && a.n_heads % a.n_heads_kv == 0 && a.n_tokens > 0 && a.n_kv > 0 &&
           a.n_kv <= INT32_MAX / 2 && a.n_streams > 0 && a.max_splits > 0 &&
           (a.max_splits == 1 || (a.tickets != nullptr && on_16({a.scratch}, {}))) &&
           on_16({a.q, a.k, a.v, a.dst}, {a.q_token_bytes, a.q_head_bytes, a.q_stream_bytes, a.k_row_bytes, a.k_head_bytes,
                                          a.k_stream_bytes, a.v_row_bytes, a.v_head_bytes, a.v_stream_bytes});
}

}  // namespace
}  // namespace frt

int frt_dec_attn(const frt_dec_attn_args * args, frt_launch how) {
    if (!frt::valid(*args)) {
        return cudaErrorInvalidValue;
    }
    switch (args->head_dim) {
        case 64: return frt::run<64>(*args, how);
        case 80: return frt::run<80>(*args, how);
        case 96: return frt::run<96>(*args, how);
        case 128: return frt::run<128>(*args, how);
        case 256: return frt::run<256>(*args, how);
        default: return cudaErrorInvalidValue;
    }
}
