// SPDX-License-Identifier: Apache-2.0
// Mat-mul of quantised weights with many rows of activations on Hopper's tensor cores:
//
//   dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r])        or        act(w[r] . x[t]) * (w2[r] . x[t])
//
// Replaces: quantising the activations, MUL_MAT, ADD (bias), ADD (residual); or MUL_MAT x 2, GLU.
// Shapes: w [n_rows][k] of a GGUF type, x [n_tokens][k] as frt_h16, dst f32; k a multiple of 64.
//
// On every multiprocessor three warpgroups walk over tiles of 128 weight rows x TOKENS tokens, in steps of 64 values along k:
//  - one fetches: weights as they are (cp.async, kSpan weights of every row at a time) and activations, which are stored the way that
//    wgmma wants them, so that a step of a tile is one piece;
//  - each of the others turns its 64 rows of a step into f16 in registers, the way that wgmma takes them from there, and starts the
//    wgmma of the step (all tokens, f32 sums in registers); while the tensor cores work on it, it prepares the next step.
// Rings of slots with mbarriers `full` and `free` lie between them: kSpans for raw weights, kStages for activations.
//
// With a GLU the tile's rows alternate by 8 between gate and up, so that a thread holds both of an output.
// Registers: up to 224 where sums are kept, 56 where nothing is. No spills.
#pragma once
#include "../common/glu.cuh"
#include "../common/hopper.cuh"
#include "../common/pdl.cuh"
#include "formats.cuh"

namespace frt {
namespace mm {

constexpr int kRows = 128;               // weight rows of a tile
constexpr int kGroups = 2;               // warpgroups that multiply
constexpr int kGroupRows = kRows / kGroups;
constexpr int kThreads = kGroups * 128 + 128;
constexpr int kRawFetchers = 96;         // threads that fetch weights
constexpr int kFetcherRegisters = 56, kMultiplierRegisters = 224;
constexpr int kStepBytes = 2 * kStep;    // of a row in a step
constexpr int kSmemMax = 227 * 1024;

struct Params {
    frt_mm_args a;
    int         padded_tokens;  // n_tokens rounded up to 8: rows of a step in x
    int         tiles, token_tiles;
};

// How format F lies in shared memory before it is dequantised. Pieces start wherever they do in global memory, modulo 16.
template <typename F> struct Raw {
    static FRT_HD constexpr int chunks_of(int piece) { return (F::longest(piece) + 16 - (F::kAlign < 16 ? F::kAlign : 16) + 15) / 16; }
    static FRT_HD constexpr int first_chunk(int piece) {
        int n = 0;
        for (int p = 0; p < piece; ++p) {
            n += chunks_of(p);
        }
        return n;
    }
    static constexpr int kChunks = first_chunk(F::kPieces);
    static constexpr int kPitch = 16 * (kChunks | 1);  // an odd number of 16 bytes: see fetch()
    static constexpr int kBytes = kRows * kPitch;
    static constexpr bool kBulk = F::kAlign >= 16 && F::kPieces == 1;  // a span of a row is one piece on 16 bytes
};

template <typename F, int TOKENS> struct Shape {
    static constexpr int kSpans = Raw<F>::kBytes <= 16 * 1024 ? 4 : 3;
    static constexpr int kStageBytes = TOKENS * kStepBytes;
    static constexpr int kHead = 256 + 4 * TOKENS;  // barriers, scales
    static constexpr int kFixed = 1024 + kHead + kSpans * Raw<F>::kBytes;  // of which 1024 for alignment
    static constexpr int kFit = (kSmemMax - kFixed) / kStageBytes;
    static constexpr int kStages = kFit > 8 ? 8 : kFit;
    static constexpr int kSmem = kFixed + kStages * kStageBytes;
    static_assert(kStages >= 3, "the tensor cores hold one step, another waits for them, one must be on its way");
    static_assert(16 * (kStages + kSpans) <= 256, "barriers do not fit");
};

template <int STAGES> struct Ring {
    int      stage = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Row of the weights that is row r of the tile of which `tile_row` is the first output row.
template <bool GLU> __device__ __forceinline__ const uint8_t * row_start(const frt_mm_args & a, int tile_row, int r) {
    const bool  second = GLU && r % 16 >= 8;
    const int   row = tile_row + (GLU ? r / 16 * 8 + r % 8 : r);
    const void * base = second ? a.w2 : a.w;
    return static_cast<const uint8_t *>(base) + static_cast<int64_t>(min(row, a.n_rows - 1)) * a.row_bytes;
}

// Shared memory of a block.
template <typename F, int TOKENS> struct Memory {
    using S = Shape<F, TOKENS>;
    uint64_t *full, *free;          // of activations
    uint64_t *raw_full, *raw_free;  // of raw weights
    float *   scales;               // of the tile's tokens
    uint8_t * stages;               // [kStages][TOKENS][64] f16
    uint8_t * raw;                  // [kSpans][kRows][Raw<F>::kPitch]

    __device__ explicit Memory(uint8_t * smem) {
        full = reinterpret_cast<uint64_t *>(smem);
        free = full + S::kStages;
        raw_full = free + S::kStages;
        raw_free = raw_full + S::kSpans;
        scales = reinterpret_cast<float *>(smem + 256);
        stages = smem + S::kHead + (-(hopper::smem_address(smem) + S::kHead) & 1023);  // the swizzle counts from multiples of 1024
        raw = stages + S::kStages * S::kStageBytes;
    }
    __device__ void init() const {
        for (int i = 0; i < S::kStages; ++i) {
            hopper::barrier_init(full + i, 1);
            hopper::barrier_init(free + i, kGroups * 4);
        }
        for (int i = 0; i < S::kSpans; ++i) {
            hopper::barrier_init(raw_full + i, kRawFetchers);
            hopper::barrier_init(raw_free + i, kGroups * 4);
        }
        hopper::barrier_init_fence();
    }
};

template <bool GLU> constexpr int kTileRows = GLU ? kRows / 2 : kRows;  // output rows of a tile

// The warpgroup that fetches.
template <typename F, int TOKENS, bool GLU> struct Fetcher {
    using S = Shape<F, TOKENS>;
    using R = Raw<F>;

    const Params &            p;
    const Memory<F, TOKENS> & m;

    // Starts the copies of one span of all rows.
    __device__ __forceinline__ void weights(int tile_row, int span, int slot) const {
        if constexpr (R::kBulk) {
            whole_rows(tile_row, span, slot);
        } else {
            chunks(tile_row, span, slot);
        }
    }

    // One copy a row.
    __device__ __forceinline__ void whole_rows(int tile_row, int span, int slot) const {
        const Piece piece = F::piece(span, 0);
        const int   bytes = min(piece.bytes, p.a.k / F::kBlock * F::kBytes - piece.offset);
        const int   first = threadIdx.x % 128, rows = (kRows - first + kRawFetchers - 1) / kRawFetchers;
        hopper::barrier_arrive_expecting(m.raw_full + slot, rows * bytes);
        for (int r = first; r < kRows; r += kRawFetchers) {
            hopper::bulk_copy(m.raw + slot * R::kBytes + r * R::kPitch, row_start<GLU>(p.a, tile_row, r) + piece.offset, bytes, m.raw_full + slot);
        }
    }

    // A thread has one chunk of every kStride-th row.
    __device__ __forceinline__ void chunks(int tile_row, int span, int slot) const {
        constexpr int kStride = kRawFetchers / R::kChunks;
        const int     thread = threadIdx.x % 128, chunk = thread % R::kChunks;
        Piece         piece = F::piece(span, 0);
        int           first = 0;
#pragma unroll
        for (int n = 1; n < F::kPieces; ++n) {
            if (chunk >= R::first_chunk(n)) {
                piece = F::piece(span, n);
                first = R::first_chunk(n);
            }
        }
        const int behind = piece.offset + min(piece.bytes, p.a.k / F::kBlock * F::kBytes - piece.offset);
        const int at = piece.offset + 16 * (chunk - first);
        uint32_t  to = hopper::smem_address(m.raw + slot * R::kBytes) + thread / R::kChunks * R::kPitch + 16 * chunk;
#pragma unroll 4
        for (int r = thread / R::kChunks; r < kRows; r += kStride, to += kStride * R::kPitch) {
            const uint8_t * row = row_start<GLU>(p.a, tile_row, r);
            const uint8_t * from = row + at;
            if (F::kAlign < 16) {
                from -= reinterpret_cast<uintptr_t>(row + piece.offset) & 15;
            }
            if (thread < kStride * R::kChunks && from < row + behind) {
                hopper::copy16_async(to, from);
            }
        }
        hopper::barrier_arrive_after_copies(m.raw_full + slot);
    }

    // Three warps do this,
    __device__ void fetch_weights() const {
        const int       spans = (p.a.k + kSpan - 1) / kSpan;
        Ring<S::kSpans> raw;
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            for (int span = 0; span < spans; ++span) {
                hopper::barrier_wait(m.raw_free + raw.stage, raw.phase ^ 1);
                weights(tile / p.token_tiles * kTileRows<GLU>, span, raw.stage);
                raw.next();
            }
        }
        pdl_wait();
    }

    // a thread of the fourth this.
    __device__ void fetch_activations() const {
        const int        steps = p.a.k / kStep;
        Ring<S::kStages> ring;
        pdl_wait();
        for (int tile = blockIdx.x; tile < p.tiles && threadIdx.x % 32 == 0; tile += gridDim.x) {
            const int       token = tile % p.token_tiles * TOKENS;
            const uint32_t  bytes = min(TOKENS, p.padded_tokens - token) * kStepBytes;
            const uint8_t * x = static_cast<const uint8_t *>(p.a.x.x) + static_cast<int64_t>(token) * kStepBytes;
            for (int s = 0; s < steps; ++s) {
                hopper::barrier_wait(m.free + ring.stage, ring.phase ^ 1);
                hopper::barrier_arrive_expecting(m.full + ring.stage, bytes);
                hopper::bulk_copy(m.stages + ring.stage * S::kStageBytes, x, bytes, m.full + ring.stage);
                x += static_cast<int64_t>(p.padded_tokens) * kStepBytes;
                ring.next();
            }
        }
    }
};

// Activation of a gate. Three kinds are x times a logistic function of an odd polynomial.
struct Gate {
    float c1, c3;
    bool  logistic;
    int   kind;

    __device__ explicit Gate(int glu) : kind(glu) {
        logistic = glu == FRT_GLU_SWIGLU || glu == FRT_GLU_GEGLU || glu == FRT_GLU_GEGLU_QUICK;
        c1 = glu == FRT_GLU_SWIGLU ? 1.0f : glu == FRT_GLU_GEGLU ? 1.5957691216057308f : 1.702f;
        c3 = glu == FRT_GLU_GEGLU ? 0.071354816272600249f : 0.0f;
    }
    template <bool LOGISTIC> __device__ __forceinline__ float operator()(float x) const {
        return LOGISTIC ? __fdividef(x, 1.0f + __expf(-x * (c1 + c3 * x * x))) : glu_act(kind, x);
    }
};

// Writes one tile out. d as Wgmma leaves it; scales: of the tile's tokens, in shared memory.
template <int TOKENS> __device__ __forceinline__ void write_sums(const frt_mm_args & a, const float (&d)[TOKENS / 2], const float * scales, int tile_row, int token0) {
    constexpr int kBatch = 8;  // columns whose residuals are read before any of their sums is written: res may be dst
    const int     lane = threadIdx.x % 32, column0 = 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = tile_row + threadIdx.x / 32 * 16 + 8 * h + lane / 4;
        if (row >= a.n_rows) {
            continue;
        }
        const float bias = a.bias != nullptr ? a.bias[row] : 0.0f;
#pragma unroll
        for (int j0 = 0; j0 < TOKENS / 8; j0 += kBatch / 2) {
            float add[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int t = token0 + 8 * (j0 + i / 2) + column0 + i % 2;
                add[i] = bias;
                if (a.res != nullptr && t < a.n_tokens) {
                    add[i] += a.res[t * a.res_stride + row];
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int j = j0 + i / 2, column = 8 * j + column0 + i % 2;
                if (token0 + column < a.n_tokens) {
                    a.dst[(token0 + column) * a.dst_stride + row] = d[4 * j + 2 * h + i % 2] * scales[column] + add[i];
                }
            }
        }
    }
}

template <int TOKENS, bool LOGISTIC>
__device__ __forceinline__ void write_gated(const frt_mm_args & a, const float (&d)[TOKENS / 2], const float * scales, int tile_row, int token0) {
    const Gate gate(a.glu);
    const int  lane = threadIdx.x % 32, row = tile_row + threadIdx.x / 32 * 8 + lane / 4;
    if (row < a.n_rows) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * j + 2 * (lane % 4) + e;
                if (token0 + column < a.n_tokens) {
                    const float scale = scales[column];
                    a.dst[(token0 + column) * a.dst_stride + row] = gate.operator()<LOGISTIC>(d[4 * j + e] * scale) * (d[4 * j + 2 + e] * scale);
                }
            }
        }
    }
}

template <int TOKENS, bool GLU>
__device__ __forceinline__ void write_tile(const frt_mm_args & a, const float (&d)[TOKENS / 2], const float * scales, int tile_row, int token0) {
    if constexpr (!GLU) {
        write_sums<TOKENS>(a, d, scales, tile_row, token0);
    } else if (Gate(a.glu).logistic) {
        write_gated<TOKENS, true>(a, d, scales, tile_row, token0);
    } else {
        write_gated<TOKENS, false>(a, d, scales, tile_row, token0);
    }
}

// Two warpgroups that dequantise and multiply.
template <typename F, int TOKENS, bool GLU> struct Multiplier {
    using S = Shape<F, TOKENS>;
    using R = Raw<F>;

    const Params &            p;
    const Memory<F, TOKENS> & m;
    Ring<S::kStages>          ring;
    Ring<S::kSpans>           raw;

    static __device__ __forceinline__ bool speaks() { return threadIdx.x % 32 == 0; }
    // The thread has rows row() and row() + 8 of the tile, and a quarter of the values of a step.
    static __device__ __forceinline__ int row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int quarter() { return threadIdx.x % 4; }

    // Where the thread's two rows of the weights start, modulo 16: all that matters of an address once its bytes are in shared memory.
    __device__ __forceinline__ void enter(int tile, uint32_t (&low)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = F::kAlign >= 16 ? 0 : reinterpret_cast<uintptr_t>(row_start<GLU>(p.a, tile / p.token_tiles * kTileRows<GLU>, row() + 8 * i)) & 15;
        }
    }

    // Step 0 of a span, raw bytes to f16: 16 weights of either row. Step 1 is the part<1>() of `rows`.
    __device__ __forceinline__ void open(const uint32_t (&low)[2], int span, typename F::Row (&rows)[2], uint32_t (&w)[2][8]) const {
        hopper::barrier_wait(m.raw_full + raw.stage, raw.phase);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t at[F::kPieces];
#pragma unroll
            for (int n = 0; n < F::kPieces; ++n) {
                at[n] = 16 * R::first_chunk(n) + (F::kAlign >= 16 ? 0 : (low[i] + F::piece(span, n).offset) & 15);
            }
            rows[i] = typename F::Row(m.raw + raw.stage * R::kBytes + (row() + 8 * i) * R::kPitch, at, span, quarter());
            rows[i].template part<0>(w[i]);
        }
    }
    __device__ __forceinline__ void close() {
        __syncwarp();
        if (speaks()) {
            hopper::barrier_arrive(m.raw_free + raw.stage);
        }
        raw.next();
    }

    // Starts the wgmma of a step whose weights are w, and waits for the one before.
    __device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], const uint32_t (&w)[2][8], bool add, int & before) {
        hopper::barrier_wait(m.full + ring.stage, ring.phase);
        const uint64_t x = hopper::tile_descriptor(m.stages + ring.stage * S::kStageBytes);
        hopper::wgmma_begin();
#pragma unroll
        for (int i = 0; i < kStep / 16; ++i) {
            const uint32_t a[4] = {w[0][2 * i], w[1][2 * i], w[0][2 * i + 1], w[1][2 * i + 1]};
            hopper::Wgmma<TOKENS>::mma(d, a, x + 2 * i, add || i > 0);
        }
        hopper::wgmma_commit();
        hopper::wgmma_wait<1>();
        release(before);
        before = ring.stage;
        ring.next();
    }

    __device__ __forceinline__ void release(int stage) const {
        if (stage >= 0 && speaks()) {
            hopper::barrier_arrive(m.free + stage);
        }
    }

    __device__ void run() {
        const int steps = p.a.k / kStep, spans = (steps + 1) / 2;
        float     d[TOKENS / 2];
        uint32_t  w[2][2][8];  // [step of the span][row]: one is being multiplied while the other is made
        uint32_t  low[2];
        typename F::Row rows[2];
        pdl_wait();
        for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
            const int token0 = tile % p.token_tiles * TOKENS;
            int       before = -1;  // the stage of the step before, which the tensor cores may still be reading
            enter(tile, low);
            open(low, 0, rows, w[0]);
            for (int span = 0; span < spans; ++span) {
                multiply(d, w[0], span > 0, before);
                if (2 * span + 1 < steps) {
                    rows[0].template part<1>(w[1][0]);
                    rows[1].template part<1>(w[1][1]);
                    close();
                    multiply(d, w[1], true, before);
                    if (span + 1 < spans) {
                        open(low, span + 1, rows, w[0]);
                    }
                } else {
                    close();
                }
            }
            hopper::sync_some(1, kGroups * 128);  // everybody has read the scales of the tile before
            for (int t = threadIdx.x; t < TOKENS; t += kGroups * 128) {
                m.scales[t] = token0 + t < p.a.n_tokens ? p.a.x.scale[token0 + t] : 0.0f;
            }
            hopper::sync_some(1, kGroups * 128);
            hopper::wgmma_wait<0>();
            release(before);
            write_tile<TOKENS, GLU>(p.a, d, m.scales, tile / p.token_tiles * kTileRows<GLU>, token0);
        }
    }
};

template <typename F, int TOKENS, bool GLU> __global__ void __launch_bounds__(kThreads, 1) mm_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t smem[];
    const Memory<F, TOKENS>   m(smem);
    if (threadIdx.x == 0) {
        m.init();
    }
    __syncthreads();
    if (threadIdx.x < kGroups * 128) {
        hopper::registers_more<kMultiplierRegisters>();
        Multiplier<F, TOKENS, GLU>{p, m}.run();
    } else {
        hopper::registers_less<kFetcherRegisters>();
        const Fetcher<F, TOKENS, GLU> fetcher{p, m};
        if (threadIdx.x % 128 < kRawFetchers) {
            fetcher.fetch_weights();
        } else {
            fetcher.fetch_activations();
        }
    }
#else
    __trap();  // never chosen: see frt_mm_supports
#endif
}

inline constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

template <typename F, int TOKENS, bool GLU> cudaError_t mm_launch(const frt_mm_args & args, frt_launch how) {
    Params p = {};
    p.a = args;
    p.padded_tokens = ceil_div(args.n_tokens, 8) * 8;
    p.token_tiles = ceil_div(args.n_tokens, TOKENS);
    p.tiles = p.token_tiles * ceil_div(args.n_rows, GLU ? kRows / 2 : kRows);
    const int blocks = p.tiles < how.sm_count ? p.tiles : how.sm_count;
    return launch<mm_kernel<F, TOKENS, GLU>>(how, blocks, kThreads, Shape<F, TOKENS>::kSmem, p);
}

// Time of all tiles when they are `tokens` wide, in units that only compare: waves of tiles, each as long as it is wide plus what a
// narrow tile loses because the weights are dequantised for fewer tokens.
inline int cost(const frt_mm_args & a, int rows, int tokens, int sm_count) {
    const int tiles = ceil_div(a.n_tokens, tokens) * ceil_div(a.n_rows, rows);
    return ceil_div(tiles, sm_count) * (tokens + 24);
}

template <typename F, bool GLU> cudaError_t mm_glu(const frt_mm_args & args, frt_launch how, int tokens) {
    if (tokens == 0) {
        const int rows = GLU ? kRows / 2 : kRows;
        tokens = 256;
        for (int narrower : {128, 64}) {
            if (cost(args, rows, narrower, how.sm_count) < cost(args, rows, tokens, how.sm_count)) {
                tokens = narrower;
            }
        }
    }
    return tokens == 64    ? mm_launch<F, 64, GLU>(args, how)
           : tokens == 128 ? mm_launch<F, 128, GLU>(args, how)
                           : mm_launch<F, 256, GLU>(args, how);
}

// tokens: width of a tile, 0 for the best.
template <typename F> cudaError_t mm_typed(const frt_mm_args & args, frt_launch how, int tokens) {
    return args.glu == FRT_GLU_NONE ? mm_glu<F, false>(args, how, tokens) : mm_glu<F, true>(args, how, tokens);
}

using Launcher = cudaError_t (*)(const frt_mm_args &, frt_launch, int tokens);
// One per format, each in its own file so that they compile side by side.
cudaError_t mm_f16(const frt_mm_args &, frt_launch, int);
cudaError_t mm_bf16(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q8_0(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q4_0(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q4_1(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q5_0(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q5_1(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q2_k(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q3_k(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q4_k(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q5_k(const frt_mm_args &, frt_launch, int);
cudaError_t mm_q6_k(const frt_mm_args &, frt_launch, int);
cudaError_t mm_iq4_nl(const frt_mm_args &, frt_launch, int);
cudaError_t mm_iq4_xs(const frt_mm_args &, frt_launch, int);
cudaError_t mm_mxfp4(const frt_mm_args &, frt_launch, int);
cudaError_t mm_nvfp4(const frt_mm_args &, frt_launch, int);

// frt_mm with a choice of how.
cudaError_t mm_any(const frt_mm_args & args, frt_launch how, int tokens);

}  // namespace mm
}  // namespace frt
