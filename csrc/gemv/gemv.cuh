// SPDX-License-Identifier: Apache-2.0
// Mat-vec of one to eight tokens, in one kernel for all weight formats.
//
//   dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r])          up to three w of one format and one x
//   dst[t][r] = act(gate[r] . x[t]) * (up[r] . x[t])
//
// Replaces: quantising the activations, MUL_MAT x 1..3, ADD (bias), ADD (residual), GLU.
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
// Shared memory: 8 rings of at most 8.75 KB, and the activations (a byte a value, 4 for F16/BF16, and 8 bytes per block of 32).
// Registers: at most 80 for one token, 128 for more; no spills.
#pragma once
#include "../common/glu.cuh"
#include "../common/host.cuh"
#include "../common/pdl.cuh"
#include "../common/reduce.cuh"
#include "../quant/q8.cuh"
#include "../quant/weights.cuh"

namespace frt {

constexpr int kWarps = 8;
constexpr int kRows = 2;  // rows (or one gate and one up row) of a group of lanes
constexpr int kRingBytes = 8960;  // of a warp, at most: three blocks of a 4096-wide mat-vec just fill an SM's 228 KB
constexpr int kQ8Block = 32;

// How a shape is spread over the machine.
struct GemvTuning {
    int lanes;          // per row: 32 or 8
    int blocks_per_sm;  // 0: as gemv_blocks_per_sm says; otherwise at most this many
};

// Blocks that the registers of an SM have room for.
constexpr int resident_blocks(int tokens) { return tokens == 1 ? 3 : 2; }

template <typename W, int LANES, int ROWS> struct Stage {
    // Units a lane takes from a stage of one row: stages of about a kilobyte, over which the cost of the loop is spread.
    static constexpr int kSteps = W::kUnit * W::kBytes / W::kBlock < 24 ? 2 : 1;
    static constexpr int kUnits = LANES * kSteps;
    static constexpr int kBytes = kUnits * W::kUnit / W::kBlock * W::kBytes;
    static constexpr int kPitch = (kBytes + 30 + 15) / 16 * 16;  // room for both ends of the row rounded to 16 bytes
    static constexpr int kWarpBytes = 32 / LANES * ROWS * kPitch;
    static constexpr int kCount = kRingBytes / kWarpBytes < 2 ? 2 : kRingBytes / kWarpBytes > 6 ? 6 : kRingBytes / kWarpBytes;
    // Whole blocks, and all stages of a row aligned alike.
    static constexpr bool kUsable = kUnits * W::kUnit % W::kBlock == 0 && kBytes % 16 == 0;
};

struct GemvParams {
    frt_gemv_args args;
    int tile_end[3];      // tiles of the segments before and including this one
    int n_units;          // of a row
    int n_stages;         // of a row
    int row_bytes;        // of a row's data
    int acts_bytes;       // of a token's activations in shared memory, without the scales
};

__device__ __forceinline__ void copy_16(uint32_t to_shared, const uint8_t * from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to_shared), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copies_wait_until_pending() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

// Bytes past a multiple of 16. The same in all stages of a row.
__device__ __forceinline__ int misaligned(const uint8_t * p) { return static_cast<int>(reinterpret_cast<uintptr_t>(p) & 15); }

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
            constexpr int kBatch = 2;  // pairs of loads in flight
            const int n_octets = a.k / 8;
            for (int base = threadIdx.x; base - static_cast<int>(threadIdx.x % 32) < n_octets; base += kBatch * kThreads) {
                float4 x[kBatch][2];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int at = base + i * kThreads;
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        x[i][h] = at < n_octets ? from[2 * at + h] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    }
                }
#pragma unroll
                for (int i = 0; i < kBatch; ++i) {
                    const int    octet = base + i * kThreads;
                    const Q8Octet q = q8_from_4_lanes(x[i][0], x[i][1]);
                    if (octet < n_octets) {
                        const Place at = W::place(octet / 2);
                        *reinterpret_cast<int2 *>(to + at.plane * plane_bytes + at.unit * 16 + octet % 2 * 8) = q.q;
                        if (octet % 4 == 0) {
                            to_ds[octet / 4] = q.ds;
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
__global__ void __launch_bounds__(kWarps * 32, resident_blocks(TOKENS)) gemv_kernel(const __grid_constant__ GemvParams p) {
    using S = Stage<W, LANES, ROWS>;
    static_assert(S::kUsable);
    extern __shared__ __align__(128) uint8_t smem[];

    const frt_gemv_args & a = p.args;
    const int warp = threadIdx.x / 32;
    const int group = threadIdx.x % 32 / LANES;
    const int sub = threadIdx.x % LANES;

    uint8_t * ring = smem + warp * (STAGES * S::kWarpBytes) + group * (ROWS * S::kPitch);
    uint8_t * acts = smem + kWarps * STAGES * S::kWarpBytes;
    float2 *  acts_ds = reinterpret_cast<float2 *>(acts + a.n_tokens * p.acts_bytes);

    const int tile_first = static_cast<int>(static_cast<int64_t>(p.tile_end[2]) * blockIdx.x / gridDim.x);
    const int tile_last = static_cast<int>(static_cast<int64_t>(p.tile_end[2]) * (blockIdx.x + 1) / gridDim.x);

    // The filling end of the ring: runs ahead of the reading end, across tiles. Reads are rounded outwards to 16 bytes, which never
    // leaves an allocation: those are multiples of 256.
    const uint32_t  ring_shared = static_cast<uint32_t>(__cvta_generic_to_shared(ring)) + sub * 16;
    const uint8_t * ahead[ROWS];  // this lane's first 16 bytes of the next stage
    int             before[ROWS];  // bytes read ahead of the row
    int ahead_tile = tile_first + warp;
    int ahead_bytes = p.row_bytes;  // of the row, still to be requested
    const auto find_rows = [&] {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint8_t * row = row_at(p, row_of<LANES, ROWS>(p, min(ahead_tile, tile_last - 1), r));
            before[r] = misaligned(row);
            ahead[r] = row - before[r] + sub * 16;
        }
    };
    const auto fill = [&](int slot_bytes) {
        if (ahead_tile < tile_last) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int end = before[r] + min(S::kBytes, ahead_bytes) - sub * 16;
#pragma unroll
                for (int i = 0; i < S::kPitch; i += LANES * 16) {
                    if (i < end) {
                        copy_16(ring_shared + slot_bytes + r * S::kPitch + i, ahead[r] + i);
                    }
                }
                ahead[r] += S::kBytes;
            }
            ahead_bytes -= S::kBytes;
            if (ahead_bytes <= 0) {
                ahead_bytes = p.row_bytes;
                ahead_tile += kWarps;
                find_rows();
            }
        }
        copies_commit();  // a group per call, empty or not: the wait counts groups
    };
    find_rows();
#pragma unroll
    for (int s = 0; s < STAGES; ++s) {
        fill(s * S::kWarpBytes);
    }

    pdl_wait();
    place_acts<W>(p, acts, acts_ds);
    __syncthreads();

    Acts x[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        const int token = t < a.n_tokens ? t : 0;  // tokens beyond the last are computed like the first and not stored
        x[t] = {acts + token * p.acts_bytes, acts_ds + token * a.k / kQ8Block, p.n_units * 16};
    }

    int slot_bytes = 0;
    for (int tile = tile_first + warp; tile < tile_last; tile += kWarps) {
        const Output out = output_of<TOKENS, LANES, ROWS>(p, tile);
        const uint8_t * row[ROWS];  // in the first slot
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            row[r] = ring + r * S::kPitch + misaligned(row_at(p, row_of<LANES, ROWS>(p, tile, r)));
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
                        w[r].load(row[r] + slot_bytes, in_stage);
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
            fill(slot_bytes);
            slot_bytes = slot_bytes == (STAGES - 1) * S::kWarpBytes ? 0 : slot_bytes + S::kWarpBytes;
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
        if (out.mine) {
            seg.dst[out.token * seg.dst_stride + out.at.row] = value;
        }
    }
}

// Shared memory of a launch, in bytes, given that of all rings.
inline size_t gemv_smem(size_t rings, int k, int n_tokens, bool q8) {
    const size_t acts = q8 ? static_cast<size_t>(k) + k / kQ8Block * sizeof(float2) : static_cast<size_t>(k) * sizeof(float);
    return rings + n_tokens * acts;
}

// A size in bytes that the current device has; 0 when it does not say.
inline size_t device_bytes(cudaDeviceAttr attribute) {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&bytes, attribute, device) != cudaSuccess) {
        return 0;
    }
    return static_cast<size_t>(bytes);
}

// Measured on an H200, at 4096 x 4096 to 262144 x 640:
//  - if one block per SM can request all of its rows before it waits for its input, or has a warp for every tile, more blocks
//    only repeat the work on the activations;
//  - a tile for each warp of two blocks: a third block would leave warps idle;
//  - beyond that, as many warps as fit hide the most latency (Q8_0 28672 x 4096: 32 us with three blocks, 37 with two).
inline int gemv_blocks_per_sm(int tiles, int stages, int ring_stages, int sm_count, int most) {
    const int rounds = ceil_div(tiles, sm_count * kWarps);
    return rounds == 1 || rounds * stages <= ring_stages ? 1 : rounds == 2 && most > 2 ? 2 : most;
}

template <typename W, int TOKENS, int LANES, int ROWS, int STAGES>
cudaError_t gemv_launch(const frt_gemv_args & args, frt_launch how, int blocks_per_sm) {
    using S = Stage<W, LANES, ROWS>;
    const bool glu = args.glu != FRT_GLU_NONE;
    const int  rows_per_tile = 32 / LANES * (glu ? ROWS / 2 : ROWS);
    GemvParams p = {};
    p.args = args;
    p.n_units = args.k / W::kUnit;
    p.n_stages = ceil_div(p.n_units, S::kUnits);
    p.row_bytes = args.k / W::kBlock * W::kBytes;
    p.acts_bytes = args.k * (W::kQ8 ? 1 : static_cast<int>(sizeof(float)));
    int tiles = 0;
    for (int s = 0; s < 3; ++s) {
        tiles += s < (glu ? 1 : args.n_seg) ? ceil_div(args.seg[s].n_rows, rows_per_tile) : 0;
        p.tile_end[s] = tiles;
    }

    size_t       smem = gemv_smem(kWarps * STAGES * S::kWarpBytes, args.k, args.n_tokens, W::kQ8);
    const size_t sm_smem = device_bytes(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    const size_t reserved = device_bytes(cudaDevAttrReservedSharedMemoryPerBlock);
    const int    room = static_cast<int>(sm_smem / (smem + reserved));
    const int    most = room < 1 ? 1 : room < resident_blocks(TOKENS) ? room : resident_blocks(TOKENS);
    const int    per_sm = blocks_per_sm == 0       ? gemv_blocks_per_sm(tiles, p.n_stages, STAGES, how.sm_count, most)
                          : blocks_per_sm < most ? blocks_per_sm
                                                 : most;
    if (per_sm > 1) {
        // Room for one block more would be taken by the next grid, launched early, on whichever SMs are done first: these would
        // end up with more of its blocks than the others, and the whole grid waits for them.
        const size_t share = sm_smem / (per_sm + 1);
        smem = smem + reserved > share ? smem : share - reserved + 128;
    }
    const int blocks = how.sm_count * per_sm;
    return launch<gemv_kernel<W, TOKENS, LANES, ROWS, STAGES>>(how, tiles < blocks ? tiles : blocks, kWarps * 32, smem, p);
}

// Lanes that have work when LANES share a row of n units.
inline float lanes_busy(int n, int lanes) { return static_cast<float>(n) / static_cast<float>(ceil_div(n, lanes) * lanes); }

// 8 lanes, where a format can, for short rows that leave lanes of a warp idle, if there are rows enough for every warp.
inline int gemv_lanes(const frt_gemv_args & args, int unit, int sm_count) {
    const int units = args.k / unit;
    const int rows = args.seg[0].n_rows * (args.glu != FRT_GLU_NONE ? 2 : 1);
    const bool many = rows >= sm_count * kWarps * (32 / 8) * kRows;
    return many && args.n_tokens <= 4 && lanes_busy(units, 8) > 1.2f * lanes_busy(units, 32) ? 8 : 32;
}

template <typename W> cudaError_t gemv_typed(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    using S32 = Stage<W, 32, kRows>;
    using S8 = Stage<W, 8, kRows>;
    const GemvTuning chosen = {S8::kUsable ? gemv_lanes(args, W::kUnit, how.sm_count) : 32, 0};
    const GemvTuning tuning = forced != nullptr ? *forced : chosen;
    const int n = args.n_tokens, per_sm = tuning.blocks_per_sm;
    static_assert(S32::kCount * S32::kWarpBytes <= kRingBytes && S8::kCount * S8::kWarpBytes <= kRingBytes,
                  "frt_gemv_supports counts on it");
    if constexpr (S8::kUsable) {
        if (tuning.lanes == 8) {
            constexpr int kStages = S8::kCount;
            return n == 1   ? gemv_launch<W, 1, 8, kRows, kStages>(args, how, per_sm)
                   : n == 2 ? gemv_launch<W, 2, 8, kRows, kStages>(args, how, per_sm)
                   : n <= 4 ? gemv_launch<W, 4, 8, kRows, kStages>(args, how, per_sm)
                            : cudaErrorInvalidValue;
        }
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
