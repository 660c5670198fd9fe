// SPDX-License-Identifier: Apache-2.0
// Mat-vec of one to eight tokens, in one kernel for all weight formats.
//
//   dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r])          up to three w of one format and one x
//   dst[t][r] = act(gate[r] . x[t]) * (up[r] . x[t])                       as f32, as q8 blocks, or both
//
// Replaces: quantising the activations, MUL_MAT x 1..3, ADD (bias), ADD (residual), GLU, and quantising the GLU's result.
// Shapes, strides and types: flashrt_kernels.h. sm_80 and up. Sums in f32; integer dot products inside a block, as in ggml.
//
// A mat-vec is done when its weights have been read, so all that matters is to have enough bytes on their way: 4.15 TB/s
// times 0.7 us is 22 KB for each of an H200's SMs. Every warp copies the rows it will need through a ring of its own in shared
// memory (cp.async, 16 bytes a lane), which needs no registers for data in flight, takes rows of any 2-byte alignment
// (Q8_0's blocks have 34 bytes), and needs no block-wide synchronisation. Weights never change, so the ring is filled before the
// kernel waits for its predecessor (PDL), whose tail thus hides the latency of the first bytes.
//
// LANES lanes work on one row at a time, or on ROWS rows at once to share the loads of activations. 32 lanes suit most
// shapes; 8 suit very many short rows, where 32 would leave lanes idle and spend the time in reductions.
//
// Shared memory: 8 rings of at most 7.25 KB, and the activations (a byte a value, 4 for F16/BF16, and 8 bytes per block of 32).
// Registers: at most 128, no spills.
#pragma once
#include "../common/pdl.cuh"
#include "../common/reduce.cuh"
#include "../quant/q8.cuh"
#include "../quant/weights.cuh"

namespace frt {

constexpr int kWarps = 8;
constexpr int kRows = 2;  // rows (or one gate and one up row) of a group of lanes
constexpr int kRingBytes = 7424;  // of a warp, at most
constexpr int kQ8Block = 32;

// How a shape is spread over the machine.
struct GemvTuning {
    int lanes;          // per row: 32 or 8
    int blocks_per_sm;  // at most this many blocks are launched per multiprocessor
};

template <typename W, int LANES, int ROWS> struct Stage {
    static constexpr int kSteps = W::kUnit < 32 ? 2 : 1;       // units a lane takes from a stage of one row
    static constexpr int kUnits = LANES * kSteps;
    static constexpr int kBytes = kUnits * W::kUnit / W::kBlock * W::kBytes;
    static constexpr int kPitch = (kBytes + 30 + 15) / 16 * 16;  // room for both ends of the row rounded to 16 bytes
    static constexpr int kWarpBytes = 32 / LANES * ROWS * kPitch;
    static constexpr int kCount = kRingBytes / kWarpBytes < 2 ? 2 : kRingBytes / kWarpBytes > 6 ? 6 : kRingBytes / kWarpBytes;
    static_assert(kUnits * W::kUnit % W::kBlock == 0, "a stage holds whole blocks");
};

struct GemvParams {
    frt_gemv_args args;
    int tile_end[3];      // tiles of the segments before and including this one
    int n_units;          // of a row
    int n_stages;         // of a row
    int row_bytes;        // of a row's data
    int acts_bytes;       // of a token's activations in shared memory, without the scales
    int tiles_per_share;  // blocks own multiples of this many tiles
};

__device__ __forceinline__ void copy_16(uint32_t to_shared, const uint8_t * from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copies_wait_until_pending() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ggml's definitions (ops.cpp, unary.cu), of f32.
__device__ __forceinline__ float glu_act(int glu, float x) {
    switch (glu) {
        case FRT_GLU_REGLU: return fmaxf(x, 0.0f);
        case FRT_GLU_GEGLU: return 0.5f * x * (1.0f + tanhf(0.79788456080286535588f * x * (1.0f + 0.044715f * x * x)));
        case FRT_GLU_SWIGLU: return x / (1.0f + expf(-x));
        case FRT_GLU_GEGLU_ERF: return 0.5f * x * (1.0f + erff(x * 0.70710678118654752440f));
        default: return x * (1.0f / (1.0f + expf(-1.702f * x)));  // FRT_GLU_GEGLU_QUICK
    }
}

struct RowOf {
    int seg, row;
};

// Rows of a tile: LANES-wide groups side by side, ROWS deep; with a GLU the depth alternates between gate and up.
template <int LANES, int ROWS> __device__ __forceinline__ RowOf row_of(const GemvParams & p, int tile, int depth) {
    constexpr int kGroups = 32 / LANES;
    const int group = threadIdx.x % 32 / LANES;
    if (p.args.glu != FRT_GLU_NONE) {
        return {depth % 2, (tile * (ROWS / 2) + depth / 2) * kGroups + group};
    }
    const int seg = (tile >= p.tile_end[0]) + (tile >= p.tile_end[1]);
    const int first = seg == 0 ? 0 : p.tile_end[seg - 1];
    return {seg, ((tile - first) * ROWS + depth) * kGroups + group};
}

// A tile may hang over the end of its matrix: the surplus rows repeat the last one and are not stored.
__device__ __forceinline__ const uint8_t * row_at(const GemvParams & p, RowOf r) {
    const frt_gemv_seg & seg = p.args.seg[r.seg];
    return static_cast<const uint8_t *>(seg.w) + min(r.row, seg.n_rows - 1) * seg.row_bytes;
}

// Copies or quantises the activations into shared memory, plane by plane. All warps call it, after pdl_wait().
template <typename W> __device__ __forceinline__ void place_acts(const GemvParams & p, uint8_t * acts, float2 * acts_ds) {
    const frt_gemv_args & a = p.args;
    constexpr int kThreads = kWarps * 32;
    const int plane_bytes = p.n_units * 16;
    for (int t = 0; t < a.n_tokens; ++t) {
        uint8_t * to = acts + t * p.acts_bytes;
        float2 *  to_ds = acts_ds + t * (a.k / kQ8Block);
        if constexpr (!W::kQ8) {
            const float4 * from = reinterpret_cast<const float4 *>(a.x + t * a.x_stride);
            for (int c = threadIdx.x; c < a.k / 4; c += kThreads) {
                const Place at = W::place(c);
                *reinterpret_cast<float4 *>(to + at.plane * plane_bytes + at.unit * 16) = from[c];
            }
        } else if (a.xq.qs != nullptr) {
            const int4 *   from = reinterpret_cast<const int4 *>(a.xq.qs + static_cast<int64_t>(t) * a.k);
            const float2 * from_ds = reinterpret_cast<const float2 *>(a.xq.ds) + t * (a.k / kQ8Block);
            for (int c = threadIdx.x; c < a.k / 16; c += kThreads) {
                const Place at = W::place(c);
                *reinterpret_cast<int4 *>(to + at.plane * plane_bytes + at.unit * 16) = from[c];
            }
            for (int b = threadIdx.x; b < a.k / kQ8Block; b += kThreads) {
                to_ds[b] = from_ds[b];
            }
        } else {
            const float4 * from = reinterpret_cast<const float4 *>(a.x + t * a.x_stride);
            constexpr int kBatch = 4;  // loads in flight
            for (int base = 0; base < a.k / 4; base += kBatch * kThreads) {
                float4 x[kBatch];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int q = base + i * kThreads + static_cast<int>(threadIdx.x);
                    x[i] = q < a.k / 4 ? from[q] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int q = base + i * kThreads + static_cast<int>(threadIdx.x);
                    if (base + i * kThreads >= a.k / 4) {
                        break;
                    }
                    const Q8Quad quad = q8_from_8_lanes(x[i]);
                    if (q < a.k / 4) {
                        const Place at = W::place(q / 4);
                        *reinterpret_cast<int *>(to + at.plane * plane_bytes + at.unit * 16 + q % 4 * 4) = quad.q;
                        if (q % 8 == 0) {
                            to_ds[q / 8] = quad.ds;
                        }
                    }
                }
            }
        }
    }
}

// One output of a tile, owned by one lane.
struct Output {
    bool  mine;
    RowOf at;
    int   token;
    int   sum;           // which of the lane's ROWS x TOKENS sums it is (with a GLU: the gate's, up's is TOKENS further)
    float add, add_up;   // bias and residual, loaded ahead
};

template <int TOKENS, int LANES, int ROWS> __device__ __forceinline__ Output output_of(const GemvParams & p, int tile) {
    static_assert(ROWS * TOKENS <= LANES, "one output per lane");
    const frt_gemv_args & a = p.args;
    const bool glu = a.glu != FRT_GLU_NONE;
    const int  j = threadIdx.x % LANES;
    Output o;
    o.token = j % TOKENS;
    const int depth = glu ? j / TOKENS * 2 : j / TOKENS;
    o.sum = depth * TOKENS + o.token;
    o.add = 0.0f;
    o.add_up = 0.0f;
    o.mine = depth < ROWS && o.token < a.n_tokens;
    if (o.mine) {
        o.at = row_of<LANES, ROWS>(p, tile, depth);
        const frt_gemv_seg & seg = a.seg[o.at.seg];
        o.mine = o.at.row < seg.n_rows;
        if (o.mine) {
            if (seg.bias != nullptr) {
                o.add = seg.bias[o.at.row];
            }
            if (glu) {
                if (a.seg[1].bias != nullptr) {
                    o.add_up = a.seg[1].bias[o.at.row];
                }
            } else if (seg.res != nullptr) {
                o.add += seg.res[o.token * seg.res_stride + o.at.row];
            }
        }
    }
    return o;
}

template <typename W, int TOKENS, int LANES, int ROWS, int STAGES>
__global__ void __launch_bounds__(kWarps * 32, 2) gemv_kernel(const __grid_constant__ GemvParams p) {
    using S = Stage<W, LANES, ROWS>;
    constexpr int kGroups = 32 / LANES;
    extern __shared__ __align__(128) uint8_t smem[];

    pdl_launch_dependents();

    const frt_gemv_args & a = p.args;
    const int warp = threadIdx.x / 32;
    const int group = threadIdx.x % 32 / LANES;
    const int sub = threadIdx.x % LANES;

    uint8_t * ring = smem + warp * (STAGES * S::kWarpBytes) + group * (ROWS * S::kPitch);
    uint8_t * acts = smem + kWarps * STAGES * S::kWarpBytes;
    float2 *  acts_ds = reinterpret_cast<float2 *>(acts + a.n_tokens * p.acts_bytes);
    float *   glu_out = reinterpret_cast<float *>(acts_ds + (W::kQ8 ? a.n_tokens * (a.k / kQ8Block) : 0));

    const int n_shares = p.tile_end[2] / p.tiles_per_share;
    const int tile_first = static_cast<int>(static_cast<int64_t>(n_shares) * blockIdx.x / gridDim.x) * p.tiles_per_share;
    const int tile_last = static_cast<int>(static_cast<int64_t>(n_shares) * (blockIdx.x + 1) / gridDim.x) * p.tiles_per_share;

    // The filling end of the ring: runs ahead of the reading end, across tiles.
    const uint8_t * ahead[ROWS];
    int ahead_tile = tile_first + warp;
    int ahead_stage = 0;
    const auto find_rows = [&] {
        if (ahead_tile < tile_last) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                ahead[r] = row_at(p, row_of<LANES, ROWS>(p, ahead_tile, r));
            }
        }
    };
    const auto fill = [&](int slot) {
        if (ahead_tile < tile_last) {
            const int offset = ahead_stage * S::kBytes;
            const int bytes = min(S::kBytes, p.row_bytes - offset);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                // Rounded outwards to 16 bytes, which never leaves an allocation: those are multiples of 256.
                const uint8_t * from = ahead[r] + offset;
                const uint32_t  before = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from)) & 15;
                const uint32_t  to = static_cast<uint32_t>(__cvta_generic_to_shared(ring + slot * S::kWarpBytes + r * S::kPitch));
                for (int i = sub * 16; i < static_cast<int>(before) + bytes; i += LANES * 16) {
                    copy_16(to + i, from - before + i);
                }
            }
            if (++ahead_stage == p.n_stages) {
                ahead_stage = 0;
                ahead_tile += kWarps;
                find_rows();
            }
        }
        copies_commit();  // a group per call, empty or not: the wait counts groups
    };
    find_rows();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        fill(s);
    }

    pdl_wait();
    place_acts<W>(p, acts, acts_ds);
    __syncthreads();

    Acts x[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const int token = min(t, a.n_tokens - 1);  // tokens beyond the last are computed like it and not stored
        x[t] = {acts + token * p.acts_bytes, acts_ds + token * (a.k / kQ8Block), p.n_units * 16};
    }

    int slot = 0;
    int rows_done = 0;  // of the current 32, for q8 output
    int parity = 0;
    for (int tile = tile_first + warp; tile < tile_last; tile += kWarps) {
        const Output out = output_of<TOKENS, LANES, ROWS>(p, tile);
        uint32_t before[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            before[r] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row_at(p, row_of<LANES, ROWS>(p, tile, r))));
        }
        float sum[ROWS][TOKENS] = {};
        for (int stage = 0; stage < p.n_stages; ++stage) {
            copies_wait_until_pending<STAGES - 1>();
            __syncwarp();
#pragma unroll
            for (int step = 0; step < S::kSteps; ++step) {
                const int in_stage = step * LANES + sub;
                const int u = stage * S::kUnits + in_stage;
                if (u < p.n_units) {
                    W w[ROWS];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        const uint32_t shift = (before[r] + stage * S::kBytes) & 15;
                        w[r].load(ring + slot * S::kWarpBytes + r * S::kPitch + shift, in_stage);
                    }
#pragma unroll
                    for (int t = 0; t < TOKENS; ++t) {
                        const typename W::X xu = W::fetch(x[t], u);
#pragma unroll
                        for (int r = 0; r < ROWS; ++r) {
                            sum[r][t] += w[r].dot(xu);
                        }
                    }
                }
            }
            __syncwarp();
            fill(slot);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }

        float value = 0.0f, up = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) {
                const float s = lanes_sum<LANES>(sum[r][t]);
                const int   i = r * TOKENS + t;
                value = i == out.sum ? s : value;
                up = i == out.sum + TOKENS ? s : up;
            }
        }
        value += out.add;
        if (a.glu != FRT_GLU_NONE) {
            value = glu_act(a.glu, value) * (up + out.add_up);
        }
        const frt_gemv_seg & seg = a.seg[out.mine ? out.at.seg : 0];
        if (out.mine && seg.dst != nullptr) {
            seg.dst[out.token * seg.dst_stride + out.at.row] = value;
        }

        if (a.out_q.qs != nullptr) {
            // 32 rows in a row are one block of the next mat-vec's input. Two buffers: a warp may be a block ahead.
            float * rows = glu_out + parity * (FRT_MAX_TOKENS * kQ8Block);
            if (out.mine) {
                rows[out.token * kQ8Block + out.at.row % kQ8Block] = value;
            }
            rows_done += kWarps * kGroups * (ROWS / 2);
            if (rows_done == kQ8Block) {
                rows_done = 0;
                parity ^= 1;
                __syncthreads();
                if (warp < a.n_tokens) {
                    const int b = tile / p.tiles_per_share;
                    const int lane = threadIdx.x % 32;
                    const int64_t n_rows = a.seg[0].n_rows;
                    float2 ds;
                    const int8_t q = q8_from_warp(rows[warp * kQ8Block + lane], ds);
                    a.out_q.qs[warp * n_rows + b * kQ8Block + lane] = q;
                    if (lane == 0) {
                        reinterpret_cast<float2 *>(a.out_q.ds)[warp * (n_rows / kQ8Block) + b] = ds;
                    }
                }
            }
        }
    }
}

// Shared memory of a launch, in bytes, given that of all rings.
inline size_t gemv_smem(size_t rings, int k, int n_tokens, bool q8, bool q8_out) {
    const size_t acts = q8 ? static_cast<size_t>(k) + k / kQ8Block * sizeof(float2) : static_cast<size_t>(k) * sizeof(float);
    const size_t out = q8_out ? 2 * FRT_MAX_TOKENS * kQ8Block * sizeof(float) : 0;
    return rings + n_tokens * acts + out;
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename W, int TOKENS, int LANES, int ROWS, int STAGES>
cudaError_t gemv_launch(const frt_gemv_args & args, frt_launch how, int blocks_per_sm) {
    using S = Stage<W, LANES, ROWS>;
    const bool glu = args.glu != FRT_GLU_NONE;
    const bool q8_out = args.out_q.qs != nullptr;
    const int  rows_per_tile = 32 / LANES * (glu ? ROWS / 2 : ROWS);
    GemvParams p = {};
    p.args = args;
    p.n_units = args.k / W::kUnit;
    p.n_stages = ceil_div(p.n_units, S::kUnits);
    p.row_bytes = args.k / W::kBlock * W::kBytes;
    p.acts_bytes = args.k * (W::kQ8 ? 1 : static_cast<int>(sizeof(float)));
    p.tiles_per_share = q8_out ? kQ8Block / rows_per_tile : 1;
    int tiles = 0;
    for (int s = 0; s < 3; ++s) {
        tiles += s < (glu ? 1 : args.n_seg) ? ceil_div(args.seg[s].n_rows, rows_per_tile) : 0;
        p.tile_end[s] = tiles;
    }
    // Few tiles: one block per multiprocessor has warps enough, and more blocks would only repeat the quantisation.
    const int shares = tiles / p.tiles_per_share;
    const int blocks = how.sm_count * (tiles <= how.sm_count * kWarps ? 1 : blocks_per_sm);
    const size_t smem = gemv_smem(kWarps * STAGES * S::kWarpBytes, args.k, args.n_tokens, W::kQ8, q8_out);
    return launch<gemv_kernel<W, TOKENS, LANES, ROWS, STAGES>>(how, shares < blocks ? shares : blocks, kWarps * 32, smem, p);
}

// Lanes that have work when LANES share a row of n units.
inline float lanes_busy(int n, int lanes) { return static_cast<float>(n) / static_cast<float>(ceil_div(n, lanes) * lanes); }

inline GemvTuning gemv_tuning(const frt_gemv_args & args, int unit, int sm_count) {
    const int units = args.k / unit;
    const int rows = args.seg[0].n_rows * (args.glu != FRT_GLU_NONE ? 2 : 1);
    const bool many = rows >= sm_count * kWarps * (32 / 8) * kRows * 2;
    return {many && args.n_tokens <= 4 && lanes_busy(units, 8) > 1.2f * lanes_busy(units, 32) ? 8 : 32, 2};
}

template <typename W> cudaError_t gemv_typed(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    const GemvTuning tuning = forced != nullptr ? *forced : gemv_tuning(args, W::kUnit, how.sm_count);
    const int n = args.n_tokens, per_sm = tuning.blocks_per_sm;
    using S32 = Stage<W, 32, kRows>;
    using S8 = Stage<W, 8, kRows>;
    static_assert(S32::kCount * S32::kWarpBytes <= kRingBytes && S8::kCount * S8::kWarpBytes <= kRingBytes,
                  "frt_gemv_supports counts on it");
    if (tuning.lanes == 8) {
        constexpr int kStages = S8::kCount;
        return n == 1   ? gemv_launch<W, 1, 8, kRows, kStages>(args, how, per_sm)
               : n == 2 ? gemv_launch<W, 2, 8, kRows, kStages>(args, how, per_sm)
               : n <= 4 ? gemv_launch<W, 4, 8, kRows, kStages>(args, how, per_sm)
                        : cudaErrorInvalidValue;
    }
    constexpr int kStages = S32::kCount;
    return n == 1   ? gemv_launch<W, 1, 32, kRows, kStages>(args, how, per_sm)
           : n == 2 ? gemv_launch<W, 2, 32, kRows, kStages>(args, how, per_sm)
           : n <= 4 ? gemv_launch<W, 4, 32, kRows, kStages>(args, how, per_sm)
                    : gemv_launch<W, 8, 32, kRows, kStages>(args, how, per_sm);
}

// One per format, each in its own file so that they compile side by side. forced: null, or what a benchmark tries.
cudaError_t gemv_f16(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_bf16(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_q4_0(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_q5_0(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_q8_0(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_q4_k(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_q5_k(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);
cudaError_t gemv_q6_k(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);

// frt_gemv with a choice of how.
cudaError_t gemv_any(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced);

}  // namespace frt
