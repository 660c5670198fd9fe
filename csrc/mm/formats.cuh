// SPDX-License-Identifier: Apache-2.0
// GGUF weight formats for the mat-mul of mm.cuh: how one thread turns 16 weights of a row into f16. Everything here also
// compiles for the host, so that the arithmetic is tested without a GPU.
//
// A format F has
//   kAlign          bytes that every address in a row is a multiple of, when the row starts on 16 bytes
//   kBlock, kBytes  weights of a block and the bytes they take
//   kPieces, piece  the pieces of bytes that span s (kSpan weights) of a row consists of; longest: the bytes of the longest one
//   Row             a span of a row, for a thread that has the weights 16 (4 h + quarter) .. + 15 of it for h = 0 and 1
//     Row           piece p of the row begins at byte at[p] of its 16-byte aligned home in shared memory; with Skip<n> of n >= 0, which
//                   only formats with kKnown are asked for, in word n of 16 bytes
//     part<h>       those weights as f16, two in a word, in order
//
// Quants become f16 without a conversion instruction: 0x6400 | q is the f16 number 1024 + q for q < 1024, so one byte
// permutation makes two of them and one subtraction, exact, takes the 1024 (and the format's offset) away. Scales are
// products rounded to f16; the weight, or the weight plus its minimum, is rounded once more.
#pragma once
#include "../quant/weights.cuh"

namespace frt {
namespace mm {

constexpr int kSpan = 128;  // weights of a row that are loaded together
constexpr int kStep = 64;   // weights of a row that the tensor cores take in one step

struct Piece {
    int offset;  // bytes from the start of the row
    int bytes;
};

// ---- pairs of f16 in a word ----------------------------------------------------------------------------------------------

FRT_HD uint32_t bits_of(__half2 v) {
    uint32_t w;
    memcpy(&w, &v, 4);
    return w;
}
FRT_HD __half2 half2_of(uint32_t w) {
    __half2 v;
    memcpy(&v, &w, 4);
    return v;
}
FRT_HD uint32_t both(float v) { return bits_of(__float2half2_rn(v)); }
FRT_HD uint32_t sub2(uint32_t a, uint32_t b) { return bits_of(__hsub2(half2_of(a), half2_of(b))); }
FRT_HD uint32_t mul2(uint32_t a, uint32_t b) { return bits_of(__hmul2(half2_of(a), half2_of(b))); }
FRT_HD uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
#ifdef __CUDA_ARCH__
    return bits_of(__hfma2(half2_of(a), half2_of(b), half2_of(c)));
#else
    const __half2 x = half2_of(a), y = half2_of(b), z = half2_of(c);
    const double  lo = static_cast<double>(__low2float(x)) * __low2float(y) + __low2float(z);
    const double  hi = static_cast<double>(__high2float(x)) * __high2float(y) + __high2float(z);
    return bits_of(__halves2half2(__double2half(lo), __double2half(hi)));
#endif
}

// Upper bytes of the f16 numbers from 1024 on, whose last bit is 1, and of those from 64 on, whose last bit is 1/16; four times.
constexpr uint32_t k1024 = 0x64646464, k64 = 0x54545454;

FRT_HD constexpr uint32_t twice(uint32_t f16) { return f16 << 16 | f16; }
// f16 bits of 1024 + n for whole n < 1024 and of 64 + n for n < 64.
FRT_HD constexpr uint32_t k1024_plus(uint32_t n) { return twice(0x6400 + n); }
FRT_HD constexpr uint32_t k64_plus(uint32_t n) { return twice(0x5400 + 16 * n); }

// The four weights of a word of bytes: each byte under the upper byte in `base`, minus `offset`.
FRT_HD void four_of(uint32_t bytes, uint32_t base, uint32_t offset, uint32_t * out) {
    out[0] = sub2(pick_bytes(bytes, base, 0x4140), offset);
    out[1] = sub2(pick_bytes(bytes, base, 0x4342), offset);
}

// d (f16, twice) times the number in byte b of `bytes` minus `offset`, twice; exact but for the rounding of the product.
FRT_HD uint32_t times_byte(uint32_t d, uint32_t bytes, int b, uint32_t offset) {
    return mul2(d, sub2(pick_bytes(bytes, k1024, 0x4040 + 0x101 * b), offset));
}

// Bit i of the number n < 16 to bit 0 of byte i.
FRT_HD uint32_t spread4(uint32_t n) { return n * 0x00204081u & 0x01010101u; }

// Times the scale; times the scale plus a minimum.
FRT_HD void scale_all(uint32_t (&w)[8], uint32_t d) {
    FRT_UNROLL
    for (int i = 0; i < 8; ++i) {
        w[i] = mul2(w[i], d);
    }
}
FRT_HD void scale_all(uint32_t (&w)[8], uint32_t d, uint32_t m) {
    FRT_UNROLL
    for (int i = 0; i < 8; ++i) {
        w[i] = fma2(w[i], d, m);
    }
}

// ---- from shared memory --------------------------------------------------------------------------------------------------

FRT_HD uint32_t shift_right(uint32_t low, uint32_t high, uint32_t bits) {  // below 32
#ifdef __CUDA_ARCH__
    return __funnelshift_r(low, high, bits);
#else
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
#endif
}

// N words at byte `at` + MORE of 16-byte aligned `p`; ALIGN divides both. Read in pieces as large as they surely lie, and moved into place
// from there: that takes fewer instructions than to choose among the words of larger pieces.
template <int N, int ALIGN, int MORE = 0> FRT_HD void fetch(const uint8_t * p, uint32_t at, uint32_t (&out)[N]) {
    if constexpr (MORE % 4 != 0) {
        return fetch<N, ALIGN>(p, at + MORE, out);
    }
    if constexpr (ALIGN >= 16) {
        FRT_UNROLL
        for (int i = 0; i < N; i += 4) {
            const uint4 v = *reinterpret_cast<const uint4 *>(p + at + MORE + 4 * i);
            out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
        }
    } else if constexpr (ALIGN >= 8) {
        FRT_UNROLL
        for (int i = 0; i < N; i += 2) {
            const uint2 v = *reinterpret_cast<const uint2 *>(p + at + MORE + 4 * i);
            out[i] = v.x, out[i + 1] = v.y;
        }
    } else {
        const uint32_t * words = reinterpret_cast<const uint32_t *>(p + (at & ~3u) + MORE);
        uint32_t         w[N + 1];
        FRT_UNROLL
        for (int i = 0; i < N + (ALIGN < 4); ++i) {
            w[i] = words[i];
        }
        FRT_UNROLL
        for (int i = 0; i < N; ++i) {
            out[i] = ALIGN < 4 ? shift_right(w[i], w[i + 1], at % 4 * 8) : w[i];
        }
    }
}

// Four words that begin in word SKIP, at an even byte, of the 16 bytes that `at` lies in. Every thread of a warp has its own 16 bytes, so
// these are read whole: smaller pieces would meet in the same banks.
template <int SKIP> struct Skip {};
template <int SKIP> FRT_HD void fetch(const uint8_t * p, uint32_t at, uint32_t (&out)[4], Skip<SKIP>) {
    const uint4 * chunk = reinterpret_cast<const uint4 *>(p + (at & ~15u));
    const uint4   a = chunk[0], b = chunk[1];
    uint32_t      w[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    constexpr int kFrom = SKIP < 0 ? 0 : SKIP;
    if constexpr (SKIP < 0) {  // it is not known in which
        FRT_UNROLL
        for (int i = 0; i < 6; ++i) {
            w[i] = at & 8 ? w[i + 2] : w[i];
        }
        FRT_UNROLL
        for (int i = 0; i < 5; ++i) {
            w[i] = at & 4 ? w[i + 1] : w[i];
        }
    }
    FRT_UNROLL
    for (int i = 0; i < 4; ++i) {
        out[i] = shift_right(w[kFrom + i], w[kFrom + i + 1], at % 4 * 8);
    }
}

FRT_HD uint32_t u16_at(const uint8_t * p) { return *reinterpret_cast<const uint16_t *>(p); }  // on 2 bytes

// ---- blocks that follow one another ---------------------------------------------------------------------------------------

template <int BLOCK, int BYTES> struct Blocks {
    static constexpr int kBlock = BLOCK, kBytes = BYTES, kPieces = 1, kKnown = false;
    static constexpr int kAlign = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : BYTES % 2 == 0 ? 2 : 1;
    static constexpr int kSpanBytes = kSpan / BLOCK * BYTES;
    static FRT_HD constexpr int longest(int) { return kSpanBytes; }
    static FRT_HD Piece         piece(int span, int) { return {span * kSpanBytes, kSpanBytes}; }
};

// What the rows of formats with blocks of 32 keep: where part 0's block is (part 1's is two blocks further), and the quants of both, which
// begin at OFFSET of the block, the second 16 weights' 16 bytes further when they have bytes of their own (APART).
template <typename F, int OFFSET, bool APART, int ALIGN = F::kAlign> struct BlockRow {
    const uint8_t * block;
    int             quarter;
    uint32_t        w[2][4];

    BlockRow() = default;
    FRT_HD BlockRow(const uint8_t * row, const uint32_t (&at)[1], int, int q) : block(row + at[0] + q / 2 * F::kBytes), quarter(q) {
        const uint32_t first = at[0] + q / 2 * F::kBytes + OFFSET + (APART ? q % 2 * 16 : 0);
        fetch<4, ALIGN>(row, first, w[0]);
        fetch<4, ALIGN, 2 * F::kBytes>(row, first, w[1]);
    }
    template <int H> FRT_HD uint32_t d(int offset = 0) const { return twice(u16_at(block + H * 2 * F::kBytes + offset)); }
};

struct Q8_0 : Blocks<32, 34> {
    struct Row : BlockRow<Q8_0, 2, true> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of(w[H][i] ^ 0x80808080, k1024, k1024_plus(128), out + 2 * i);
            }
            scale_all(out, d<H>());
        }
    };
};

// The low or the high nibbles of bytes as f16 numbers: low ones at 1024, where a unit is the last bit, high ones at 64, where it is the
// fifth but last.
struct Nibbles {
    uint32_t mask, base, offset;

    FRT_HD Nibbles(bool high, uint32_t less)
        : mask(high ? 0xf0f0f0f0 : 0x0f0f0f0f), base(high ? k64 : k1024), offset(high ? k64_plus(less) : k1024_plus(less)) {}
    FRT_HD void four(uint32_t bytes, uint32_t * out) const { four_of(bytes & mask, base, offset, out); }
};
FRT_HD uint32_t nibbles_of(uint32_t w, int high) { return w >> 4 * high & 0x0f0f0f0f; }

// Blocks of 16 bytes: the low nibbles are the first 16 weights, the high nibbles the others.
struct Q4_0 : Blocks<32, 18> {
    struct Row : BlockRow<Q4_0, 2, false> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const Nibbles nibbles(quarter % 2, 8);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                nibbles.four(w[H][i], out + 2 * i);
            }
            scale_all(out, d<H>());
        }
    };
};

struct Q4_1 : Blocks<32, 20> {
    struct Row : BlockRow<Q4_1, 4, false> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const Nibbles nibbles(quarter % 2, 0);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                nibbles.four(w[H][i], out + 2 * i);
            }
            scale_all(out, d<H>(), d<H>(2));
        }
    };
};

// The same with a fifth bit of each weight in a word.
struct Q5_0 : Blocks<32, 22> {
    struct Row : BlockRow<Q5_0, 6, false> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const uint32_t fifth = u16_at(block + H * 2 * kBytes + 2 + quarter % 2 * 2);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of(nibbles_of(w[H][i], quarter % 2) | spread4(fifth >> 4 * i & 15) << 4, k1024, k1024_plus(16), out + 2 * i);
            }
            scale_all(out, d<H>());
        }
    };
};

struct Q5_1 : Blocks<32, 24> {
    struct Row : BlockRow<Q5_1, 8, false> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const uint32_t fifth = u16_at(block + H * 2 * kBytes + 4 + quarter % 2 * 2);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of(nibbles_of(w[H][i], quarter % 2) | spread4(fifth >> 4 * i & 15) << 4, k1024, k1024_plus(0), out + 2 * i);
            }
            scale_all(out, d<H>(), d<H>(2));
        }
    };
};

// Sixteen signed bytes plus 128, looked up by nibble.
struct Table {
    uint32_t w[4];

    // The weights of a word of bytes below 16. The numbers move together into the selector of a permutation, which takes one of eight
    // bytes; another permutation chooses between the lower and the upper eight.
    FRT_HD void four(uint32_t numbers, uint32_t * out) const {
        const uint32_t n = pick_bytes(numbers | numbers >> 4, 0, 0x4420), low3 = n & 0x7777;
        const uint32_t found = pick_bytes(pick_bytes(w[0], w[1], low3), pick_bytes(w[2], w[3], low3), 0x3210 + (n >> 1 & 0x4444));
        four_of(found, k1024, k1024_plus(128), out);
    }
};

FRT_HD constexpr uint32_t word_of(int a, int b, int c, int d) {
    return static_cast<uint32_t>(a + 128) | static_cast<uint32_t>(b + 128) << 8 | static_cast<uint32_t>(c + 128) << 16 |
           static_cast<uint32_t>(d + 128) << 24;
}
FRT_HD Table table_iq4() {
    return {{word_of(-127, -104, -83, -65), word_of(-49, -35, -22, -10), word_of(1, 13, 25, 38), word_of(53, 69, 89, 113)}};
}

// Two E4M3 numbers, the first in the low byte, as f16; exact.
FRT_HD uint32_t e4m3_two(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t f16;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(f16) : "h"(static_cast<uint16_t>(bytes)));
    return f16;
#else
    // The bits of an f16 number with another bias, whose exponent cannot say NaN.
    const uint32_t sign = (bytes & 0x80) << 8 | (bytes & 0x8000) << 16, rest = (bytes & 0x7f) << 7 | (bytes & 0x7f00) << 15;
    return mul2(rest, twice(0x5c00)) | sign;
#endif
}

// E2M1 numbers over 64, of the low or the high nibbles of a word. As the upper bits of E4M3's exponent and mantissa they mean just that, 0
// and a half included.
FRT_HD void fp4_four(uint32_t nibbles, int high, uint32_t * out) {
    const uint32_t sign = (high ? nibbles : nibbles << 4) & 0x80808080, rest = (high ? nibbles >> 2 : nibbles << 2) & 0x1c1c1c1c;
    const uint32_t bytes = sign | rest;
    out[0] = e4m3_two(bytes & 0xffff);
    out[1] = e4m3_two(bytes >> 16);
}

struct IQ4_NL : Blocks<32, 18> {
    struct Row : BlockRow<IQ4_NL, 2, false> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const Table table = table_iq4();
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                table.four(nibbles_of(w[H][i], quarter % 2), out + 2 * i);
            }
            scale_all(out, d<H>());
        }
    };
};

// 2^(e - 128): half of what the exponent byte says, so that it is not the scale that leaves f16.
FRT_HD float e8m0_half(uint32_t e) { return f32_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

struct MXFP4 : Blocks<32, 17> {
    struct Row : BlockRow<MXFP4, 1, false> {
        using BlockRow::BlockRow;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                fp4_four(w[H][i] >> 4 * (quarter % 2), 0, out + 2 * i);
            }
            scale_all(out, twice(0x5800));  // 128
            scale_all(out, both(fminf(e8m0_half(block[H * 2 * kBytes]), 65504.0f)));
        }
    };
};

// Groups of 16 with a scale each, an unsigned E4M3 number of which ggml reads 0x7f as 0; the second eight weights of a group are in the
// high nibbles.
struct NVFP4 : Blocks<64, 36> {
    struct Row {
        uint32_t w[2][2], scale[2];

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[1], int, int q) {
            uint32_t s[2];
            FRT_UNROLL
            for (int h = 0; h < 2; ++h) {
                fetch<2, 4>(row, at[0] + h * kBytes + 4 + q * 8, w[h]);
                s[h] = row[at[0] + h * kBytes + q];
                s[h] = s[h] == 0x7f ? 0 : s[h] & 0x7f;
            }
            // Times 64. The bits are those of an f16 number with another bias, without a NaN.
            const uint32_t two = mul2(s[0] << 7 | s[1] << 23, twice(0x7400));
            scale[0] = pick_bytes(two, 0, 0x1010), scale[1] = pick_bytes(two, 0, 0x3232);
        }
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                fp4_four(w[H][i % 2], i / 2, out + 2 * i);
            }
            scale_all(out, scale[H]);
        }
    };
};

struct F16 : Blocks<8, 16> {
    struct Row {
        const uint8_t * bytes;

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[1], int, int q) : bytes(row + at[0] + q * 32) {}
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const { fetch<8, 16>(bytes, H * 128, out); }
    };
};

struct BF16 : Blocks<8, 16> {
    struct Row : F16::Row {
        using F16::Row::Row;
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            F16::Row::part<H>(out);
            FRT_UNROLL
            for (int i = 0; i < 8; ++i) {
                out[i] = bits_of(__floats2half2_rn(f32_bits(out[i] << 16), f32_bits(out[i] & 0xffff0000u)));
            }
        }
    };
};

// ---- blocks of 256: a span is half of one ---------------------------------------------------------------------------------

// Q4_K and Q5_K have groups of 32 with a 6-bit scale and a 6-bit minimum; part H is in group 4 (span % 2) + 2 H + quarter / 2. The head of
// a block is f16 d, f16 dmin and 12 bytes of both, packed.
struct RowK {
    uint32_t d[2], m[2];

    RowK() = default;
    FRT_HD RowK(const uint8_t * head_bytes, uint32_t at, int span, int quarter) {
        uint32_t head[4];
        fetch<4, 16>(head_bytes, at, head);
        const bool     second = span % 2;
        const uint32_t sc = second ? (head[3] & 0x0f0f0f0f) | (head[1] >> 2 & 0x30303030) : head[1] & 0x3f3f3f3f;
        const uint32_t mn = second ? (head[3] >> 4 & 0x0f0f0f0f) | (head[2] >> 2 & 0x30303030) : head[2] & 0x3f3f3f3f;
        const uint32_t scale = pick_bytes(head[0], 0, 0x1010), dmin = pick_bytes(head[0], 0, 0x3232) ^ 0x80008000;
        FRT_UNROLL
        for (int h = 0; h < 2; ++h) {
            d[h] = times_byte(scale, sc >> quarter / 2 * 8, 2 * h, k1024_plus(0));
            m[h] = times_byte(dmin, mn >> quarter / 2 * 8, 2 * h, k1024_plus(0));
        }
    }
};

struct Q4_K {
    static constexpr int kBlock = 256, kBytes = 144, kAlign = 16, kPieces = 2, kKnown = false;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 16 : 64; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 16} : Piece{block + 16 + span % 2 * 64, 64};
    }
    struct Row : RowK {
        int      quarter;
        uint32_t w[2][4];

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[2], int span, int q)
            : RowK(row, at[0], span, q), quarter(q) {
            fetch<4, 16>(row, at[1] + q % 2 * 16, w[0]);
            fetch<4, 16>(row, at[1] + q % 2 * 16 + 32, w[1]);
        }
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const Nibbles nibbles(quarter / 2, 0);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                nibbles.four(w[H][i], out + 2 * i);
            }
            scale_all(out, d[H], m[H]);
        }
    };
};

struct Q5_K {
    static constexpr int kBlock = 256, kBytes = 176, kAlign = 16, kPieces = 3, kKnown = false;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 16 : p == 1 ? 32 : 64; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 16} : p == 1 ? Piece{block + 16, 32} : Piece{block + 48 + span % 2 * 64, 64};
    }
    struct Row : RowK {
        const uint8_t *fifth, *qs;
        int            high, bit;  // of part 0

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[3], int span, int q)
            : RowK(row, at[0], span, q), fifth(row + at[1] + q % 2 * 16), qs(row + at[2] + q % 2 * 16), high(q / 2), bit(span % 2 * 4 + q / 2) {}
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            uint32_t f[4], w[4];
            fetch<4, 16>(fifth, 0, f);
            fetch<4, 16>(qs, H * 32, w);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of(nibbles_of(w[i], high) | (f[i] >> (bit + 2 * H) & 0x01010101) << 4, k1024, k1024_plus(0), out + 2 * i);
            }
            scale_all(out, d[H], m[H]);
        }
    };
};

// Groups of 16 with an 8-bit scale. The first and the second 32 weights of a span are the low nibbles of two times 32 bytes, the third
// and the fourth the high ones; two more bits of them lie in 32 bytes.
struct Q6_K {
    static constexpr int kBlock = 256, kBytes = 210, kAlign = 2, kPieces = 3, kKnown = true;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 64 : p == 1 ? 32 : 18; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes, half = span % 2;
        return p == 0 ? Piece{block + 64 * half, 64} : p == 1 ? Piece{block + 128 + 32 * half, 32} : Piece{block + 192, 18};
    }
    struct Row {
        uint32_t d[2];
        uint32_t l[4], h[4];  // both parts need them

        Row() = default;
        // All pieces begin alike modulo 16.
        template <int SKIP> FRT_HD Row(const uint8_t * row, const uint32_t (&at)[3], int span, int q, Skip<SKIP> known) {
            fetch(row, at[0] + q * 16, l, known);
            fetch(row, at[1] + q % 2 * 16, h, known);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                h[i] >>= q / 2 * 2;
            }
            const uint32_t scale = twice(u16_at(row + at[2] + 16));
            const uint8_t * s = row + at[2] + span % 2 * 8 + q;
            d[0] = times_byte(scale, s[0] ^ 0x80u, 0, k1024_plus(128));
            d[1] = times_byte(scale, s[4] ^ 0x80u, 0, k1024_plus(128));
        }
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of(nibbles_of(l[i], H) | (H ? h[i] & 0x30303030 : h[i] << 4 & 0x30303030), k1024, k1024_plus(32), out + 2 * i);
            }
            scale_all(out, d[H]);
        }
    };
};

// Groups of 16 with a 4-bit scale and a 4-bit minimum. 32 weights are two bits of 32 bytes each.
struct Q2_K {
    static constexpr int kBlock = 256, kBytes = 84, kAlign = 4, kPieces = 3, kKnown = false;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 8 : p == 1 ? 32 : 4; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes, half = span % 2;
        return p == 0 ? Piece{block + 8 * half, 8} : p == 1 ? Piece{block + 16 + 32 * half, 32} : Piece{block + 80, 4};
    }
    struct Row {
        uint32_t d[2], m[2], w[4];

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[3], int, int q) {
            fetch<4, 4>(row, at[1] + q % 2 * 16, w);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                w[i] >>= q / 2 * 2;
            }
            const uint32_t scale = twice(u16_at(row + at[2])), dmin = twice(u16_at(row + at[2] + 2)) ^ 0x80008000;
            FRT_UNROLL
            for (int h = 0; h < 2; ++h) {
                const uint32_t s = row[at[0] + 4 * h + q];
                d[h] = times_byte(scale, s & 15, 0, k1024_plus(0));
                m[h] = times_byte(dmin, s >> 4, 0, k1024_plus(0));
            }
        }
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of(w[i] >> 4 * H & 0x03030303, k1024, k1024_plus(0), out + 2 * i);
            }
            scale_all(out, d[H], m[H]);
        }
    };
};

// Groups of 16 with a 6-bit scale; the third bit of every weight lies in a mask of its own and subtracts 4 where it is 0.
struct Q3_K {
    static constexpr int kBlock = 256, kBytes = 110, kAlign = 2, kPieces = 3, kKnown = false;
    static FRT_HD constexpr int longest(int p) { return p == 2 ? 14 : 32; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 32} : p == 1 ? Piece{block + 32 + 32 * (span % 2), 32} : Piece{block + 96, 14};
    }
    struct Row {
        uint32_t d[2], third[4], w[4];

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[3], int span, int q) {
            const int half = span % 2;
            fetch<4, 2>(row, at[0] + q % 2 * 16, third);
            fetch<4, 2>(row, at[1] + q % 2 * 16, w);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                third[i] >>= 4 * half + q / 2;
                w[i] >>= q / 2 * 2;
            }
            // Scale 8 half + e has four bits in byte e (the upper ones for the second half) and two in byte 8 + e % 4.
            const uint8_t * s = row + at[2];
            FRT_UNROLL
            for (int h = 0; h < 2; ++h) {
                const uint32_t six = (s[4 * h + q] >> 4 * half & 15u) | (s[8 + q] >> (4 * half + 2 * h) & 3u) << 4;
                d[h] = times_byte(twice(u16_at(s + 12)), six, 0, k1024_plus(32));
            }
        }
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                four_of((w[i] >> 4 * H & 0x03030303) | (third[i] >> 2 * H & 0x01010101) << 2, k1024, k1024_plus(4), out + 2 * i);
            }
            scale_all(out, d[H]);
        }
    };
};

// Groups of 32 with a 6-bit scale and IQ4_NL's table.
struct IQ4_XS {
    static constexpr int kBlock = 256, kBytes = 136, kAlign = 8, kPieces = 2, kKnown = false;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 8 : 64; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 8} : Piece{block + 8 + 64 * (span % 2), 64};
    }
    struct Row {
        const uint8_t * bytes;
        uint32_t        qs, d[2];
        int             quarter;

        Row() = default;
        FRT_HD Row(const uint8_t * row, const uint32_t (&at)[2], int span, int q) : bytes(row), qs(at[1] + q / 2 * 16), quarter(q) {
            uint32_t head[2];
            fetch<2, 8>(row, at[0], head);
            FRT_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int      g = span % 2 * 4 + 2 * h + q / 2;
                const uint32_t six = (head[1] >> 4 * g & 15) | (head[0] >> 16 >> 2 * g & 3) << 4;
                d[h] = times_byte(twice(head[0] & 0xffff), six, 0, k1024_plus(32));
            }
        }
        template <int H> FRT_HD void part(uint32_t (&out)[8]) const {
            const Table table = table_iq4();
            uint32_t    w[4];
            fetch<4, 8>(bytes, qs + 32 * H, w);
            FRT_UNROLL
            for (int i = 0; i < 4; ++i) {
                table.four(nibbles_of(w[i], quarter % 2), out + 2 * i);
            }
            scale_all(out, d[H]);
        }
    };
};

}  // namespace mm
}  // namespace frt
