// SPDX-License-Identifier: Apache-2.0
// Mat-mul of quantised weights with many rows of activations on Hopper's tensor cores:
//
//   dst[t][r] = sum_k w[r][k] * x[t][k] (+ bias[r]) (+ res[t][r])        or        act(w[r] . x[t]) * (w2[r] . x[t])
//
// Replaces: quantising the activations, MUL_MAT, ADD (bias), ADD (residual); or MUL_MAT x 2, GLU.
// Shapes: w [n_rows][k] of a GGUF type, x [n_tokens][k] as frt_h16, dst f32; k a multiple of 64. Routed, the same for each expert with
// weights of its own and the rows of x that frt_moe_route gave it.
//
// On every multiprocessor three warpgroups walk over tiles of 128 weight rows x TOKENS tokens, in steps of 64 values along k:
//  - one fetches: weights as they are (cp.async, kSpan weights of every row at a time) and activations, which are stored the way that
//    wgmma wants them, so that a step of a tile is one piece. It shares its instruction slots with those who dequantise, so it counts its
//    addresses on instead of computing them;
//  - each of the others turns its 64 rows of a step into f16 in registers, the way that wgmma takes them from there, and starts the
//    wgmma of the step (all tokens, f32 sums in registers); while the tensor cores work on it, it prepares the next step.
// Rings of slots with mbarriers `full` and `free` lie between them: kSpans for raw weights, kStages for activations.
//
// Where a product has too few tiles for all multiprocessors, two blocks share one, each with half of k, and exchange sums.
//
// With a GLU the tile's rows alternate by 8 between gate and up, so that a thread holds both of an output.
// Registers: up to 224 where sums are kept, 56 where nothing is. No spills.
#pragma once
#include "../common/glu.cuh"
#include "../common/hopper.cuh"
#include "../common/host.cuh"
#include "../common/pdl.cuh"
#include "formats.cuh"

namespace frt {
namespace mm {

constexpr int kRows = 128;               // weight rows of a tile
constexpr int kGroups = 2;               // warpgroups that multiply
constexpr int kThreads = kGroups * 128 + 128;
constexpr int kRawFetchers = 96;         // threads that fetch weights
constexpr int kFetcherRegisters = 56, kMultiplierRegisters = 224;
constexpr int kStepBytes = 2 * kStep;    // of a row in a step
constexpr int kSmemMax = 227 * 1024;

// Both kinds of arguments.
struct Params {
    const uint8_t *w, *w2;
    int64_t        row_bytes, expert_bytes;
    int            glu, n_rows, k, n_experts;
    frt_h16        x;
    int            places;  // rows of a step in x, a multiple of 8
    float *        dst;
    int64_t        dst_stride;
    const float *  bias;
    const float *  res;
    int64_t        res_stride;
    frt_moe_rows   route;
    int            n_tokens, token_tiles, row_tiles;  // not routed: n_tokens and how many tiles they are
    int            blocks;                            // that share a tile, 1 or 2; not routed, and then each does one
};

// Output rows of a tile.
template <bool GLU> constexpr int kTileRows = GLU ? kRows / 2 : kRows;

// What to compute, as template parameters: weights of format F, tiles of TOKENS tokens, with a GLU, routed to experts.
template <typename FORMAT, int TOKENS, bool GLU, bool ROUTED> struct Kind {
    using F = FORMAT;
    static constexpr int  kTokens = TOKENS;
    static constexpr bool kGlu = GLU, kRouted = ROUTED;
};

// How format F lies in shared memory before it is dequantised. Pieces start wherever they do in global memory, modulo 16.
template <typename F> struct Raw {
    static FRT_HD constexpr int chunks_of(int piece) { return (F::longest(piece) + 16 - (F::kAlign < 16 ? F::kAlign : 16) + 15) / 16; }
    // No loop, which the compiler might leave for the run time.
    static FRT_HD constexpr int first_chunk(int piece) {
        return (piece > 0 ? chunks_of(0) : 0) + (piece > 1 ? chunks_of(1) : 0) + (piece > 2 ? chunks_of(2) : 0);
    }
    static_assert(F::kPieces <= 3);
    static constexpr int kChunks = first_chunk(F::kPieces);
    static constexpr int kPitch = 16 * (kChunks | 1);  // an odd number of 16 bytes: see fetch()
    static constexpr int kBytes = kRows * kPitch;
};

template <typename K> struct Shape {
    using F = typename K::F;
    static constexpr int kSpans = Raw<F>::kBytes <= 16 * 1024 ? 4 : 3;
    static constexpr int kStageBytes = K::kTokens * kStepBytes;
    static constexpr int kTable = K::kRouted ? 4 * (FRT_MOE_MAX_EXPERTS + 1) : 0;
    static constexpr int kHead = 256 + 8 * K::kTokens + (kTable + 15) / 16 * 16;  // barriers; scales and places of columns; table
    static constexpr int kFixed = 1024 + kHead + kSpans * Raw<F>::kBytes;         // of which 1024 for alignment
    static constexpr int kFit = (kSmemMax - kFixed) / kStageBytes;
    static constexpr int kStages = kFit > 8 ? 8 : kFit;
    static constexpr int kSmem = kFixed + kStages * kStageBytes;
    static_assert(kStages >= 3, "the tensor cores hold one step, another waits for them, one must be on its way");
    static_assert(16 * (kStages + kSpans) <= 256, "barriers do not fit");
};

// Keeps the compiler from computing v again wherever it is used.
__device__ __forceinline__ void keep(uint32_t & v) { asm volatile("" : "+r"(v)); }
__device__ __forceinline__ void keep(const uint8_t *& v) { asm volatile("" : "+l"(v)); }

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

// Shared memory of a block.
template <typename K> struct Memory {
    using S = Shape<K>;
    uint64_t *full, *free;          // of activations
    uint64_t *raw_full, *raw_free;  // of raw weights
    float *   scales;               // of the tile's columns
    int *     targets;              // row of dst of each column, -1: none
    int *     first;                // routed: token tiles before each expert
    uint8_t * stages;               // [kStages][kTokens][64] f16
    uint8_t * raw;                  // [kSpans][kRows][Raw<F>::kPitch]

    __device__ explicit Memory(uint8_t * smem) {
        full = reinterpret_cast<uint64_t *>(smem);
        free = full + S::kStages;
        raw_full = free + S::kStages;
        raw_free = raw_full + S::kSpans;
        scales = reinterpret_cast<float *>(smem + 256);
        targets = reinterpret_cast<int *>(scales + K::kTokens);
        first = targets + K::kTokens;
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

struct Tile {
    const uint8_t *w, *w2;  // of the expert
    int            row0;    // first output row
    int            place0;  // first row of x
    int            places;  // rows of x, a multiple of 8
    int            span0, span1;  // what to sum over, in spans

    __device__ __forceinline__ int steps(const Params & p) const { return min(p.k / kStep, 2 * span1) - 2 * span0; }
};

// The tiles of a launch, in the order in which blocks take them: tiles that share weights or activations are neighbours.
template <typename K> struct Tiles {
    const Params &    p;
    const Memory<K> & m;

    // Of a block, the last tile is below end().
    __device__ __forceinline__ int first() const { return blockIdx.x / blocks(); }
    __device__ __forceinline__ int end() const { return p.row_tiles * (K::kRouted ? m.first[p.n_experts] : p.token_tiles); }
    __device__ __forceinline__ int blocks() const { return K::kRouted ? 1 : p.blocks; }
    __device__ __forceinline__ int rank() const { return blockIdx.x % blocks(); }

    __device__ __forceinline__ Tile at(int i) const {
        const int spans = (p.k + kSpan - 1) / kSpan;
        if (!K::kRouted) {
            const int place0 = i % p.token_tiles * K::kTokens;
            return {p.w, p.w2, i / p.token_tiles * kTileRows<K::kGlu>, place0, min(K::kTokens, p.places - place0),
                    spans * rank() / p.blocks, spans * (rank() + 1) / p.blocks};
        }
        const int token_tile = i / p.row_tiles;
        int       e = 0;  // the last expert with first[e] <= token_tile
        for (int end = p.n_experts; end - e > 1;) {
            const int middle = (e + end) / 2;
            (m.first[middle] <= token_tile ? e : end) = middle;
        }
        const int     place = (token_tile - m.first[e]) * K::kTokens;
        const int64_t expert = e * p.expert_bytes;
        return {p.w + expert, p.w2 + expert, i % p.row_tiles * kTileRows<K::kGlu>, p.route.begin[e] + place,
                min(K::kTokens, (p.route.count[e] + 7) / 8 * 8 - place), 0, spans};
    }

    // One warp makes the table of token tiles.
    __device__ void fill() const {
        const int lane = threadIdx.x % 32;
        int       before = 0;
        for (int e0 = 0; e0 < p.n_experts; e0 += 32) {
            const int mine = e0 + lane < p.n_experts ? (p.route.count[e0 + lane] + K::kTokens - 1) / K::kTokens : 0;
            int       sum = mine;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const int other = __shfl_up_sync(~0u, sum, o);
                sum += lane >= o ? other : 0;
            }
            if (e0 + lane < p.n_experts) {
                m.first[e0 + lane] = before + sum - mine;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
        if (lane == 0) {
            m.first[p.n_experts] = before;
        }
    }
};

// Row r of the weights of a tile.
template <bool GLU> __device__ __forceinline__ const uint8_t * row_start(const Params & p, const Tile & tile, int r) {
    const uint8_t * base = GLU && r % 16 >= 8 ? tile.w2 : tile.w;
    const int       row = tile.row0 + (GLU ? r / 16 * 8 + r % 8 : r);
    return base + static_cast<int64_t>(min(row, p.n_rows - 1)) * p.row_bytes;
}

// Do all rows start on 16 bytes?
__device__ __forceinline__ bool rows_even(const Params & p) { return ((p.row_bytes | p.expert_bytes) & 15) == 0; }

// The warpgroup that fetches.
template <typename K> struct Fetcher {
    using F = typename K::F;
    using S = Shape<K>;
    using R = Raw<F>;

    const Params &    p;
    const Memory<K> & m;

    // A thread has a line of 16 bytes of every kAtOnce-th row, or two half a row apart. Of 16 rows (or more) that follow each other it has
    // kMine; a GLU's are 8 of either matrix.
    static constexpr int kLines = R::kChunks > 12 ? 2 : 1, kThreadsOfRow = R::kChunks / kLines;
    static constexpr int kAtOnce = kThreadsOfRow > 6 ? 8 : kThreadsOfRow > 3 ? 16 : 32;
    static constexpr int kRun = kAtOnce > 16 ? kAtOnce : 16, kMine = kRun / kAtOnce;
    static_assert(kAtOnce * kThreadsOfRow <= kRawFetchers && (kLines == 1 || (F::kPieces == 1 && R::kChunks % 2 == 0)));

    static __device__ __forceinline__ int chunk() { return threadIdx.x % 128 % kThreadsOfRow; }
    static __device__ __forceinline__ int first_row() { return threadIdx.x % 128 / kThreadsOfRow; }

    // The lines of one span. SOME: of rows that the matrix has, as far as the span goes.
    template <bool SOME>
    __device__ __forceinline__ void copy(const Tile & tile, const uint8_t * const (&start)[kMine], int offset, int line, int end,
                                         uint32_t to) const {
        const int64_t step = p.row_bytes * (K::kGlu ? kRun / 2 : kRun);
        const uint8_t * piece[kMine];
#pragma unroll
        for (int j = 0; j < kMine; ++j) {
            piece[j] = start[j] + offset;
        }
#pragma unroll(SOME ? 1 : 8 / kMine)
        for (int run = 0; run < kRows / kRun; ++run) {
#pragma unroll
            for (int j = 0; j < kMine; ++j) {
                const uint8_t * from = reinterpret_cast<const uint8_t *>(reinterpret_cast<uintptr_t>(piece[j]) & ~uintptr_t{15}) + line;
                const int       r = first_row() + j * kAtOnce + run * kRun, row = tile.row0 + (K::kGlu ? r / 16 * 8 + r % 8 : r);
#pragma unroll
                for (int l = 0; l < kLines * 16 * kThreadsOfRow; l += 16 * kThreadsOfRow) {
                    if (!SOME || (row < p.n_rows && from + l < piece[j] + (end - offset))) {
                        hopper::copy16_async(to + (run * kRun + j * kAtOnce) * R::kPitch + l, from + l);
                    }
                }
                piece[j] += step;
                keep(piece[j]);
            }
        }
    }

    // Starts the copies of one span of all rows. Lines are whole: up to 15 bytes before a row's piece and behind it come along.
    __device__ __forceinline__ void weights(const Tile & tile, const uint8_t * const (&start)[kMine], int span, int spans, int slot) const {
        Piece piece = F::piece(span, 0);
        int   first = 0;
#pragma unroll
        for (int n = 1; n < F::kPieces; ++n) {
            if (chunk() >= R::first_chunk(n)) {
                piece = F::piece(span, n);
                first = R::first_chunk(n);
            }
        }
        const int      line = 16 * (chunk() - first), end = piece.offset + min(piece.bytes, p.k / F::kBlock * F::kBytes - piece.offset);
        const uint32_t to = hopper::smem_address(m.raw + slot * R::kBytes) + first_row() * R::kPitch + 16 * chunk();
        if (first_row() < kAtOnce) {
            // Behind the last block there may be nothing.
            const bool all = tile.row0 + kTileRows<K::kGlu> <= p.n_rows && span + (F::kBlock > kSpan ? 2 : 1) < spans;
            if (!all) {
                copy<true>(tile, start, piece.offset, line, end, to);
            } else if (!rows_even(p) || (piece.offset & ~15) + line < end) {
                copy<false>(tile, start, piece.offset, line, end, to);
            }
        }
        hopper::barrier_arrive_after_copies(m.raw_full + slot);
    }

    // Three warps do this,
    __device__ void fetch_weights() const {
        const Tiles<K>  tiles{p, m};
        const int       spans = (p.k + kSpan - 1) / kSpan;  // of a row
        Ring<S::kSpans> raw;
        for (int i = tiles.first(); i < tiles.end(); i += gridDim.x) {
            const Tile      tile = tiles.at(i);
            const uint8_t * start[kMine];
#pragma unroll
            for (int j = 0; j < kMine; ++j) {
                start[j] = row_start<K::kGlu>(p, tile, first_row() + j * kAtOnce);
            }
            for (int span = tile.span0; span < tile.span1; ++span) {
                hopper::barrier_wait(m.raw_free + raw.stage, raw.phase ^ 1);
                weights(tile, start, span, spans, raw.stage);
                raw.next();
            }
        }
        if (!K::kRouted) {
            pdl_wait();
        }
    }

    // a thread of the fourth this.
    __device__ void fetch_activations() const {
        const Tiles<K>   tiles{p, m};
        Ring<S::kStages> ring;
        if (!K::kRouted) {
            pdl_wait();
        }
        if (threadIdx.x % 32 != 0) {
            return;
        }
        for (int i = tiles.first(); i < tiles.end(); i += gridDim.x) {
            const Tile      tile = tiles.at(i);
            const uint32_t  bytes = tile.places * kStepBytes;
            const int       steps = tile.steps(p);
            const int64_t   row = static_cast<int64_t>(2 * tile.span0) * p.places + tile.place0;
            const uint8_t * x = static_cast<const uint8_t *>(p.x.x) + row * kStepBytes;
            for (int s = 0; s < steps; ++s) {
                hopper::barrier_wait(m.free + ring.stage, ring.phase ^ 1);
                hopper::barrier_arrive_expecting(m.full + ring.stage, bytes);
                hopper::bulk_copy(m.stages + ring.stage * S::kStageBytes, x, bytes, m.full + ring.stage);
                x += static_cast<int64_t>(p.places) * kStepBytes;
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

// Which columns of a tile are written: those of one half, or all.
struct Columns {
    int only;  // half 0 or 1, -1: both

    __device__ __forceinline__ bool has(int half) const { return only < 0 || only == half; }
};

// Writes a tile out. d as Wgmma leaves it.

template <typename K>
__device__ __forceinline__ void write_sums(const Params & p, const Memory<K> & m, const float (&d)[K::kTokens / 2], int row0,
                                           Columns columns) {
    constexpr int kBatch = 8;  // columns whose residuals are read before any of their sums is written: res may be dst
    const int     lane = threadIdx.x % 32, column0 = 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = row0 + threadIdx.x / 32 * 16 + 8 * h + lane / 4;
        if (row >= p.n_rows) {
            continue;
        }
        const float bias = p.bias != nullptr ? p.bias[row] : 0.0f;
#pragma unroll
        for (int j0 = 0; j0 < K::kTokens / 8; j0 += kBatch / 2) {
            if (!columns.has(j0 >= K::kTokens / 16)) {
                continue;
            }
            float add[kBatch];
            int   to[kBatch];
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                to[i] = m.targets[8 * (j0 + i / 2) + column0 + i % 2];
                add[i] = bias;
                if (!K::kRouted && p.res != nullptr && to[i] >= 0) {
                    add[i] += p.res[to[i] * p.res_stride + row];
                }
            }
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                const int j = j0 + i / 2;
                if (to[i] >= 0) {
                    p.dst[to[i] * p.dst_stride + row] = d[4 * j + 2 * h + i % 2] * m.scales[8 * j + column0 + i % 2] + add[i];
                }
            }
        }
    }
}

template <bool LOGISTIC, typename K>
__device__ __forceinline__ void write_gated(const Params & p, const Memory<K> & m, const float (&d)[K::kTokens / 2], int row0,
                                            Columns columns) {
    const Gate gate(p.glu);
    const int  lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 * 8 + lane / 4;
    if (row < p.n_rows) {
#pragma unroll
        for (int j = 0; j < K::kTokens / 8; ++j) {
            if (!columns.has(j >= K::kTokens / 16)) {
                continue;
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * j + 2 * (lane % 4) + e, to = m.targets[column];
                if (to >= 0) {
                    const float scale = m.scales[column];
                    p.dst[to * p.dst_stride + row] = gate.operator()<LOGISTIC>(d[4 * j + e] * scale) * (d[4 * j + 2 + e] * scale);
                }
            }
        }
    }
}

// Two warpgroups that dequantise and multiply.
template <typename K> struct Multiplier {
    using F = typename K::F;
    using S = Shape<K>;
    using R = Raw<F>;

    const Params &    p;
    const Memory<K> & m;
    Ring<S::kStages>  ring;
    Ring<S::kSpans>   raw;

    static __device__ __forceinline__ bool speaks() { return threadIdx.x % 32 == 0; }
    // The thread has rows row() and row() + 8 of the tile, and a quarter of the values of a step.
    static __device__ __forceinline__ int row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }
    static __device__ __forceinline__ int quarter() { return threadIdx.x % 4; }

    // Reads the raw bytes of a span, 32 weights of either row. low: where the thread's two rows start, modulo 16, all that matters of an
    // address once its bytes are in shared memory. offset: of the thread's first row in a slot.
    __device__ __forceinline__ void load(const uint32_t (&low)[2], uint32_t offset, int span, typename F::Row (&rows)[2]) const {
        hopper::barrier_wait(m.raw_full + raw.stage, raw.phase);
        const uint8_t * bytes = m.raw + (raw.stage * R::kBytes + offset);
        const auto      read = [&](auto known, uint32_t low0, uint32_t low1) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t at[F::kPieces];
#pragma unroll
                for (int n = 0; n < F::kPieces; ++n) {
                    at[n] = 16 * R::first_chunk(n) + (F::kAlign >= 16 ? 0 : ((i == 0 ? low0 : low1) + F::piece(span, n).offset) & 15);
                }
                if constexpr (F::kKnown) {
                    rows[i] = typename F::Row(bytes + 8 * i * R::kPitch, at, span, quarter(), known);
                } else {
                    rows[i] = typename F::Row(bytes + 8 * i * R::kPitch, at, span, quarter());
                }
            }
        };
        if constexpr (F::kKnown) {
            if (rows_even(p)) {
                switch (F::piece(span, 0).offset / 4 & 3) {
                    case 0: return read(Skip<0>(), 0, 0);
                    case 1: return read(Skip<1>(), 0, 0);
                    case 2: return read(Skip<2>(), 0, 0);
                    default: return read(Skip<3>(), 0, 0);
                }
            }
        }
        read(Skip<-1>(), low[0], low[1]);
    }
    __device__ __forceinline__ void close() {
        __syncwarp();
        if (speaks()) {
            hopper::barrier_arrive(m.raw_free + raw.stage);
        }
        raw.next();
    }

    // Raw bytes to f16: step H of the span.
    template <int H> static __device__ __forceinline__ void make(const typename F::Row (&rows)[2], uint32_t (&w)[2][8]) {
        rows[0].template part<H>(w[0]);
        rows[1].template part<H>(w[1]);
    }

    // Starts the wgmma of a step whose weights are w, and waits for the one before.
    __device__ __forceinline__ void multiply(float (&d)[K::kTokens / 2], const uint32_t (&w)[2][8], bool add, int & before) {
        hopper::barrier_wait(m.full + ring.stage, ring.phase);
        const uint32_t x = hopper::tile_descriptor(m.stages) + ring.stage * (S::kStageBytes / 16);
        hopper::wgmma_begin();
#pragma unroll
        for (int i = 0; i < kStep / 16; ++i) {
            const uint32_t a[4] = {w[0][2 * i], w[1][2 * i], w[0][2 * i + 1], w[1][2 * i + 1]};
            hopper::Wgmma<K::kTokens>::mma(d, a, x + 2 * i, add || i > 0);
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

    // Two blocks have summed over a half of k each: every one gives the other its sums of half of the columns, and adds what it gets. A sum
    // of two does not depend on their order. They go through the memory of the activations, which nobody needs any more.
    __device__ __forceinline__ void exchange(float (&d)[K::kTokens / 2], int rank) const {
        constexpr int  kQuarter = K::kTokens / 4;  // of a thread's sums, those of a half of the columns
        const uint32_t here = hopper::smem_address(m.stages) + threadIdx.x * 16, there = hopper::address_in(here, rank ^ 1);
        hopper::cluster_sync();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half != rank) {
#pragma unroll
                for (int i = 0; i < kQuarter; i += 4) {
                    const float * v = d + half * kQuarter + i;
                    hopper::store_there(there + i / 4 * (kGroups * 128 * 16), v[0], v[1], v[2], v[3]);
                }
            }
        }
        hopper::cluster_sync();
        const float4 * got = reinterpret_cast<const float4 *>(m.stages) + threadIdx.x;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (half == rank) {
#pragma unroll
                for (int i = 0; i < kQuarter; i += 4) {
                    const float4 v = got[i / 4 * (kGroups * 128)];
                    float *      sum = d + half * kQuarter + i;
                    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
                }
            }
        }
    }

    __device__ __forceinline__ void run(const Tile & tile, int rank) {
        const int       steps = tile.steps(p), spans = tile.span1 - tile.span0;
        float           d[K::kTokens / 2];
        uint32_t        w[2][2][8];  // [step of the span][row]: one is being multiplied while the other is made
        typename F::Row rows[2];
        uint32_t        low[2] = {};
        int             before = -1;  // the stage of the step before, which the tensor cores may still be reading
        if (F::kAlign < 16) {
            low[0] = reinterpret_cast<uintptr_t>(row_start<K::kGlu>(p, tile, row())) & 15;
            low[1] = reinterpret_cast<uintptr_t>(row_start<K::kGlu>(p, tile, row() + 8)) & 15;
        }
        uint32_t offset = row() * R::kPitch;
        keep(offset);
        load(low, offset, tile.span0, rows);
        for (int span = 0;; ++span) {
            make<0>(rows, w[0]);
            multiply(d, w[0], span > 0, before);
            if (2 * span + 1 == steps) {
                close();
                break;
            }
            make<1>(rows, w[1]);
            close();
            if (span + 1 < spans) {
                load(low, offset, tile.span0 + span + 1, rows);
            }
            multiply(d, w[1], true, before);
            if (span + 1 == spans) {
                break;
            }
        }
        hopper::sync_some(1, kGroups * 128);  // everybody has read the columns of the tile before
        for (int c = threadIdx.x; c < K::kTokens; c += kGroups * 128) {
            const int place = tile.place0 + c;
            m.scales[c] = c < tile.places ? p.x.scale[place] : 0.0f;
            m.targets[c] = c >= tile.places ? -1 : K::kRouted ? p.route.rows[place] : place < p.n_tokens ? place : -1;
        }
        hopper::sync_some(1, kGroups * 128);
        hopper::wgmma_wait<0>();
        release(before);
        Columns columns = {-1};
        if (!K::kRouted && p.blocks > 1) {
            exchange(d, rank);
            columns.only = rank;
        }
        if constexpr (!K::kGlu) {
            write_sums(p, m, d, tile.row0, columns);
        } else if (Gate(p.glu).logistic) {
            write_gated<true>(p, m, d, tile.row0, columns);
        } else {
            write_gated<false>(p, m, d, tile.row0, columns);
        }
    }

    __device__ void run() {
        const Tiles<K> tiles{p, m};
        if (!K::kRouted) {
            pdl_wait();
        }
        for (int i = tiles.first(); i < tiles.end(); i += gridDim.x) {
            run(tiles.at(i), tiles.rank());
        }
    }
};

template <typename K> __global__ void __launch_bounds__(kThreads, 1) mm_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t smem[];
    const Memory<K>           m(smem);
    if (threadIdx.x == 0) {
        m.init();
    }
    if (K::kRouted) {
        pdl_wait();
        if (threadIdx.x < 32) {
            Tiles<K>{p, m}.fill();
        }
    }
    __syncthreads();
    if (threadIdx.x < kGroups * 128) {
        hopper::registers_more<kMultiplierRegisters>();
        Multiplier<K>{p, m}.run();
    } else {
        hopper::registers_less<kFetcherRegisters>();
        const Fetcher<K> fetcher{p, m};
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

// How to cut a product: columns of a tile (64, 128 or 256), and blocks that share a tile (1 or 2).
struct Cut {
    int tokens, blocks;
};

template <typename F, int TOKENS, bool GLU> cudaError_t mm_launch(const frt_mm_args & a, frt_launch how, int blocks) {
    using K = Kind<F, TOKENS, GLU, false>;
    Params p = {};
    p.w = static_cast<const uint8_t *>(a.w), p.w2 = static_cast<const uint8_t *>(a.w2), p.row_bytes = a.row_bytes;
    p.glu = a.glu, p.n_rows = a.n_rows, p.k = a.k, p.x = a.x, p.places = ceil_div(a.n_tokens, 8) * 8;
    p.dst = a.dst, p.dst_stride = a.dst_stride, p.bias = a.bias, p.res = a.res, p.res_stride = a.res_stride;
    p.n_tokens = a.n_tokens, p.token_tiles = ceil_div(a.n_tokens, TOKENS), p.row_tiles = ceil_div(a.n_rows, kTileRows<GLU>);
    p.blocks = blocks;
    const int tiles = p.token_tiles * p.row_tiles;
    return launch_clusters<mm_kernel<K>>(how, blocks, blocks > 1 ? blocks * tiles : tiles < how.sm_count ? tiles : how.sm_count, kThreads,
                                         Shape<K>::kSmem, p);
}

template <typename F, int TOKENS, bool GLU> cudaError_t moe_launch(const frt_moe_mm_args & a, frt_launch how) {
    using K = Kind<F, TOKENS, GLU, true>;
    Params p = {};
    p.w = static_cast<const uint8_t *>(a.w), p.w2 = static_cast<const uint8_t *>(a.w2), p.row_bytes = a.row_bytes;
    p.expert_bytes = a.expert_bytes, p.n_experts = a.n_experts;
    p.glu = a.glu, p.n_rows = a.n_rows, p.k = a.k, p.x = a.x, p.places = frt_moe_max_rows(a.n_pairs, a.n_experts);
    p.dst = a.dst, p.dst_stride = a.dst_stride, p.route = a.route, p.row_tiles = ceil_div(a.n_rows, kTileRows<GLU>);
    return launch<mm_kernel<K>>(how, how.sm_count, kThreads, Shape<K>::kSmem, p);
}

template <typename F, bool GLU> cudaError_t mm_glu(const frt_mm_args & args, frt_launch how, Cut cut) {
    return cut.tokens == 64    ? mm_launch<F, 64, GLU>(args, how, cut.blocks)
           : cut.tokens == 128 ? mm_launch<F, 128, GLU>(args, how, cut.blocks)
                               : mm_launch<F, 256, GLU>(args, how, cut.blocks);
}

template <typename F> cudaError_t mm_typed(const frt_mm_args & args, frt_launch how, Cut cut) {
    return args.glu == FRT_GLU_NONE ? mm_glu<F, false>(args, how, cut) : mm_glu<F, true>(args, how, cut);
}
// Tiles wide enough for most experts' rows, so that their weights are dequantised once.
template <typename F, bool GLU> cudaError_t moe_glu(const frt_moe_mm_args & a, frt_launch how) {
    return a.n_pairs <= 48 * a.n_experts ? moe_launch<F, 64, GLU>(a, how) : moe_launch<F, 192, GLU>(a, how);
}
template <typename F> cudaError_t mm_typed(const frt_moe_mm_args & args, frt_launch how) {
    return args.glu == FRT_GLU_NONE ? moe_glu<F, false>(args, how) : moe_glu<F, true>(args, how);
}

// One format's kernels. Each lives in a file of its own so that they compile side by side.
struct Launchers {
    cudaError_t (*plain)(const frt_mm_args &, frt_launch, Cut);
    cudaError_t (*routed)(const frt_moe_mm_args &, frt_launch);
};
template <typename F> constexpr Launchers launchers_of() { return {mm_typed<F>, mm_typed<F>}; }

extern const Launchers mm_f16;
extern const Launchers mm_bf16;
extern const Launchers mm_q8_0;
extern const Launchers mm_q4_0;
extern const Launchers mm_q4_1;
extern const Launchers mm_q5_0;
extern const Launchers mm_q5_1;
extern const Launchers mm_q2_k;
extern const Launchers mm_q3_k;
extern const Launchers mm_q4_k;
extern const Launchers mm_q5_k;
extern const Launchers mm_q6_k;
extern const Launchers mm_iq4_nl;
extern const Launchers mm_iq4_xs;
extern const Launchers mm_mxfp4;
extern const Launchers mm_nvfp4;

// frt_mm with a choice of how; 0 columns: the best.
cudaError_t mm_any(const frt_mm_args & args, frt_launch how, Cut cut);

}  // namespace mm
}  // namespace frt
