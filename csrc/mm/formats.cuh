// SPDX-License-Identifier: Apache-2.0
// GGUF weight formats for the mat-mul of mm.cuh: how one thread turns 16 weights of a row into f16. Everything here also
// compiles for the host, so that the arithmetic is tested without a GPU.
//
// A format F has
//   kAlign          bytes that every address in a row is a multiple of, when the row starts on 16 bytes
//   kBlock, kBytes  weights of a block and the bytes they take
//   kPieces, piece  the pieces of bytes that span s (kSpan weights) of a row consists of; longest: the bytes of the longest one
//   dequantise      weights 16 e to 16 e + 15 of span s (e < 8) as f16, two in a word, in order. Piece p of the row begins at byte
//                   at[p] of its 16-byte aligned home in shared memory
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

constexpr uint32_t k1024 = 0x64646464;  // upper byte of the f16 numbers 1024 to 1279, four times

// Bytes 2 h and 2 h + 1 of a word as two f16, minus `offset` (1024 plus whatever the format wants to take away, as f16, twice).
FRT_HD uint32_t pair_of(uint32_t bytes, int h, uint32_t offset) { return sub2(pick_bytes(bytes, k1024, h ? 0x4342 : 0x4140), offset); }

FRT_HD constexpr uint32_t twice(uint32_t f16) { return f16 << 16 | f16; }
// f16 bits of 1024 + n for whole n < 1024.
FRT_HD constexpr uint32_t k1024_plus(uint32_t n) { return twice(0x6400 + n); }

// d (f16, twice) times the number in byte b of `bytes` minus `offset`, twice; exact but for the rounding of the product.
FRT_HD uint32_t times_byte(uint32_t d, uint32_t bytes, int b, uint32_t offset) {
    return mul2(d, sub2(pick_bytes(bytes, k1024, 0x4040 + 0x101 * b), offset));
}

// Bit i of the number n < 16 to bit 0 of byte i.
FRT_HD uint32_t spread4(uint32_t n) { return n * 0x00204081u & 0x01010101u; }

// The four weights of a word of bytes, minus `offset`.
FRT_HD void four_of(uint32_t bytes, uint32_t offset, uint32_t * out) {
    out[0] = pair_of(bytes, 0, offset);
    out[1] = pair_of(bytes, 1, offset);
}

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

// N words at byte `at` of 16-byte aligned `p`, read in pieces of 16 bytes and moved into place: wherever the bytes lie, the
// reads of a warp are free of bank conflicts when its rows are an odd multiple of 16 bytes apart. ALIGN divides `at`.
template <int N, int ALIGN> FRT_HD void fetch(const uint8_t * p, uint32_t at, uint32_t (&out)[N]) {
    constexpr int  kChunks = (4 * N + 16 - (ALIGN < 16 ? ALIGN : 16) + 15) / 16;
    uint32_t       w[4 * kChunks];
    const uint4 *  chunk = reinterpret_cast<const uint4 *>(p + (at & ~15u));
    FRT_UNROLL
    for (int i = 0; i < kChunks; ++i) {
        const uint4 v = chunk[i];
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    if constexpr (ALIGN < 16) {
        const bool by2 = at & 8;
        FRT_UNROLL
        for (int i = 0; i < N + 2 && i + 2 < 4 * kChunks; ++i) {
            w[i] = by2 ? w[i + 2] : w[i];
        }
    }
    if constexpr (ALIGN < 8) {
        const bool by1 = at & 4;
        FRT_UNROLL
        for (int i = 0; i < N + 1 && i + 1 < 4 * kChunks; ++i) {
            w[i] = by1 ? w[i + 1] : w[i];
        }
    }
    FRT_UNROLL
    for (int i = 0; i < N; ++i) {
        if constexpr (ALIGN < 4) {
            const uint32_t next = i + 1 < 4 * kChunks ? w[i + 1] : 0;
#ifdef __CUDA_ARCH__
            out[i] = __funnelshift_r(w[i], next, (at & 3) * 8);
#else
            out[i] = static_cast<uint32_t>((static_cast<uint64_t>(next) << 32 | w[i]) >> (at & 3) * 8);
#endif
        } else {
            out[i] = w[i];
        }
    }
}

FRT_HD uint32_t u16_at(const uint8_t * p) { return *reinterpret_cast<const uint16_t *>(p); }  // on 2 bytes

// ---- blocks that follow one another ---------------------------------------------------------------------------------------

template <int BLOCK, int BYTES> struct Blocks {
    static constexpr int kBlock = BLOCK, kBytes = BYTES, kPieces = 1;
    static constexpr int kAlign = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : BYTES % 4 == 0 ? 4 : BYTES % 2 == 0 ? 2 : 1;
    static constexpr int kSpanBytes = kSpan / BLOCK * BYTES;
    static FRT_HD constexpr int longest(int) { return kSpanBytes; }
    static FRT_HD Piece         piece(int span, int) { return {span * kSpanBytes, kSpanBytes}; }
};

struct Q8_0 : Blocks<32, 34> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const uint32_t block = at[0] + e / 2 * kBytes;
        uint32_t       w[4];
        fetch<4, 2>(row, block + 2 + e % 2 * 16, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(w[i] ^ 0x80808080, k1024_plus(128), out + 2 * i);
        }
        scale_all(out, twice(u16_at(row + block)));
    }
};

// Blocks of 16 bytes: the low nibbles are the first 16 weights, the high nibbles the others.
FRT_HD uint32_t nibbles_of(uint32_t w, int high) { return w >> 4 * high & 0x0f0f0f0f; }

struct Q4_0 : Blocks<32, 18> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const uint32_t block = at[0] + e / 2 * kBytes;
        uint32_t       w[4];
        fetch<4, 2>(row, block + 2, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(w[i], e % 2), k1024_plus(8), out + 2 * i);
        }
        scale_all(out, twice(u16_at(row + block)));
    }
};

struct Q4_1 : Blocks<32, 20> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const uint32_t block = at[0] + e / 2 * kBytes;
        uint32_t       w[4];
        fetch<4, 4>(row, block + 4, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(w[i], e % 2), k1024_plus(0), out + 2 * i);
        }
        scale_all(out, twice(u16_at(row + block)), twice(u16_at(row + block + 2)));
    }
};

struct Q5_0 : Blocks<32, 22> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const uint32_t block = at[0] + e / 2 * kBytes;
        const uint32_t fifth = u16_at(row + block + 2 + e % 2 * 2);
        uint32_t       w[4];
        fetch<4, 2>(row, block + 6, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(w[i], e % 2) | spread4(fifth >> 4 * i & 15) << 4, k1024_plus(16), out + 2 * i);
        }
        scale_all(out, twice(u16_at(row + block)));
    }
};

struct Q5_1 : Blocks<32, 24> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const uint32_t block = at[0] + e / 2 * kBytes;
        const uint32_t fifth = u16_at(row + block + 4 + e % 2 * 2);
        uint32_t       w[4];
        fetch<4, 8>(row, block + 8, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(w[i], e % 2) | spread4(fifth >> 4 * i & 15) << 4, k1024_plus(0), out + 2 * i);
        }
        scale_all(out, twice(u16_at(row + block)), twice(u16_at(row + block + 2)));
    }
};

// Sixteen signed bytes plus 128, looked up by nibble.
struct Table {
    uint32_t w[4];

    // The weights of a word of bytes below 16. The numbers move together into the selector of a permutation, which takes one of eight
    // bytes; another permutation chooses between the lower and the upper eight.
    FRT_HD void four(uint32_t bytes, uint32_t * out) const {
        const uint32_t n = pick_bytes(bytes | bytes >> 4, 0, 0x4420), low3 = n & 0x7777;
        const uint32_t found = pick_bytes(pick_bytes(w[0], w[1], low3), pick_bytes(w[2], w[3], low3), 0x3210 + (n >> 1 & 0x4444));
        four_of(found, k1024_plus(128), out);
    }
};

FRT_HD constexpr uint32_t word_of(int a, int b, int c, int d) {
    return static_cast<uint32_t>(a + 128) | static_cast<uint32_t>(b + 128) << 8 | static_cast<uint32_t>(c + 128) << 16 |
           static_cast<uint32_t>(d + 128) << 24;
}
FRT_HD Table table_iq4() {
    return {{word_of(-127, -104, -83, -65), word_of(-49, -35, -22, -10), word_of(1, 13, 25, 38), word_of(53, 69, 89, 113)}};
}
FRT_HD Table table_fp4() {  // twice the E2M1 numbers
    return {{word_of(0, 1, 2, 3), word_of(4, 6, 8, 12), word_of(0, -1, -2, -3), word_of(-4, -6, -8, -12)}};
}

struct IQ4_NL : Blocks<32, 18> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const Table    table = table_iq4();
        const uint32_t block = at[0] + e / 2 * kBytes;
        uint32_t       w[4];
        fetch<4, 2>(row, block + 2, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            table.four(nibbles_of(w[i], e % 2), out + 2 * i);
        }
        scale_all(out, twice(u16_at(row + block)));
    }
};

// 2^(e - 128): half of what the exponent byte says, because the table holds twice the numbers.
FRT_HD float e8m0_half(uint32_t e) { return f32_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

struct MXFP4 : Blocks<32, 17> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const Table    table = table_fp4();
        const uint32_t block = at[0] + e / 2 * kBytes;
        uint32_t       w[4];
        fetch<4, 1>(row, block + 1, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            table.four(nibbles_of(w[i], e % 2), out + 2 * i);
        }
        scale_all(out, both(fminf(e8m0_half(row[block]), 65504.0f)));
    }
};

// Half of an unsigned E4M3 number; ggml reads 0x7f as 0.
FRT_HD float ue4m3_half(uint32_t x) {
    const float normal = f32_bits(((x >> 3 & 15) + 119) << 23 | (x & 7) << 20);  // exponent bias 7, one less for the half
    return x == 0x7f ? 0.0f : (x & 0x78) == 0 ? static_cast<float>(x & 7) * (1.0f / 1024.0f) : normal;
}

// Groups of 16 with a scale each, the second eight weights of a group in the high nibbles.
struct NVFP4 : Blocks<64, 36> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        const Table    table = table_fp4();
        const uint32_t block = at[0] + e / 4 * kBytes;
        uint32_t       w[2];
        fetch<2, 4>(row, block + 4 + e % 4 * 8, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            table.four(nibbles_of(w[i % 2], i / 2), out + 2 * i);
        }
        scale_all(out, both(ue4m3_half(row[block + e % 4])));
    }
};

struct F16 : Blocks<8, 16> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        fetch<8, 16>(row, at[0] + e * 32, out);
    }
};

struct BF16 : Blocks<8, 16> {
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[1], int, int e, uint32_t (&out)[8]) {
        fetch<8, 16>(row, at[0] + e * 32, out);
        FRT_UNROLL
        for (int i = 0; i < 8; ++i) {
            out[i] = bits_of(__floats2half2_rn(f32_bits(out[i] << 16), f32_bits(out[i] & 0xffff0000u)));
        }
    }
};

// ---- blocks of 256: a span is half of one ---------------------------------------------------------------------------------

// Q4_K and Q5_K have groups of 32 with a 6-bit scale and a 6-bit minimum. head: f16 d, f16 dmin, 12 bytes of both, packed; group g.
FRT_HD void scale_k(uint32_t (&w)[8], const uint32_t (&head)[4], int g) {
    const int      by = g % 4 * 8;
    const uint32_t s = head[1] >> by, m = head[2] >> by, top = head[3] >> by;
    const uint32_t sc = g < 4 ? s & 63 : (top & 15) | (s >> 2 & 48);
    const uint32_t mn = g < 4 ? m & 63 : (top >> 4 & 15) | (m >> 2 & 48);
    const uint32_t d = pick_bytes(head[0], 0, 0x1010), dmin = pick_bytes(head[0], 0, 0x3232) ^ 0x80008000;
    scale_all(w, times_byte(d, sc, 0, k1024_plus(0)), times_byte(dmin, mn, 0, k1024_plus(0)));
}

struct Q4_K {
    static constexpr int kBlock = 256, kBytes = 144, kAlign = 16, kPieces = 2;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 16 : 64; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 16} : Piece{block + 16 + span % 2 * 64, 64};
    }
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[2], int span, int e, uint32_t (&out)[8]) {
        uint32_t head[4], w[4];
        fetch<4, 16>(row, at[0], head);
        fetch<4, 16>(row, at[1] + e / 4 * 32 + e % 2 * 16, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(w[i], e / 2 % 2), k1024_plus(0), out + 2 * i);
        }
        scale_k(out, head, span % 2 * 4 + e / 2);
    }
};

struct Q5_K {
    static constexpr int kBlock = 256, kBytes = 176, kAlign = 16, kPieces = 3;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 16 : p == 1 ? 32 : 64; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 16} : p == 1 ? Piece{block + 16, 32} : Piece{block + 48 + span % 2 * 64, 64};
    }
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[3], int span, int e, uint32_t (&out)[8]) {
        const int g = span % 2 * 4 + e / 2;
        uint32_t  head[4], fifth[4], w[4];
        fetch<4, 16>(row, at[0], head);
        fetch<4, 16>(row, at[1] + e % 2 * 16, fifth);
        fetch<4, 16>(row, at[2] + e / 4 * 32 + e % 2 * 16, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(w[i], e / 2 % 2) | (fifth[i] >> g & 0x01010101) << 4, k1024_plus(0), out + 2 * i);
        }
        scale_k(out, head, g);
    }
};

// Groups of 16 with an 8-bit scale. The first and the second 32 weights of a span are the low nibbles of two times 32 bytes, the third
// and the fourth the high ones; two more bits of them lie in 32 bytes.
struct Q6_K {
    static constexpr int kBlock = 256, kBytes = 210, kAlign = 2, kPieces = 3;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 64 : p == 1 ? 32 : 18; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes, half = span % 2;
        return p == 0 ? Piece{block + 64 * half, 64} : p == 1 ? Piece{block + 128 + 32 * half, 32} : Piece{block + 192, 18};
    }
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[3], int span, int e, uint32_t (&out)[8]) {
        uint32_t l[4], h[4];
        fetch<4, 2>(row, at[0] + e / 2 % 2 * 32 + e % 2 * 16, l);
        fetch<4, 2>(row, at[1] + e % 2 * 16, h);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(nibbles_of(l[i], e / 4) | (h[i] >> e / 2 * 2 & 0x03030303) << 4, k1024_plus(32), out + 2 * i);
        }
        const uint32_t d = twice(u16_at(row + at[2] + 16)), scale = row[at[2] + span % 2 * 8 + e] ^ 0x80u;
        scale_all(out, times_byte(d, scale, 0, k1024_plus(128)));
    }
};

// Groups of 16 with a 4-bit scale and a 4-bit minimum. 32 weights are two bits of 32 bytes each.
struct Q2_K {
    static constexpr int kBlock = 256, kBytes = 84, kAlign = 4, kPieces = 3;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 8 : p == 1 ? 32 : 4; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes, half = span % 2;
        return p == 0 ? Piece{block + 8 * half, 8} : p == 1 ? Piece{block + 16 + 32 * half, 32} : Piece{block + 80, 4};
    }
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[3], int, int e, uint32_t (&out)[8]) {
        uint32_t w[4];
        fetch<4, 4>(row, at[1] + e % 2 * 16, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of(w[i] >> e / 2 * 2 & 0x03030303, k1024_plus(0), out + 2 * i);
        }
        const uint32_t d = twice(u16_at(row + at[2])), dmin = twice(u16_at(row + at[2] + 2)) ^ 0x80008000, s = row[at[0] + e];
        scale_all(out, times_byte(d, s & 15, 0, k1024_plus(0)), times_byte(dmin, s >> 4, 0, k1024_plus(0)));
    }
};

// Groups of 16 with a 6-bit scale; the third bit of every weight lies in a mask of its own and subtracts 4 where it is 0.
struct Q3_K {
    static constexpr int kBlock = 256, kBytes = 110, kAlign = 2, kPieces = 3;
    static FRT_HD constexpr int longest(int p) { return p == 2 ? 14 : 32; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 32} : p == 1 ? Piece{block + 32 + 32 * (span % 2), 32} : Piece{block + 96, 14};
    }
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[3], int span, int e, uint32_t (&out)[8]) {
        const int half = span % 2;
        uint32_t  third[4], w[4];
        fetch<4, 2>(row, at[0] + e % 2 * 16, third);
        fetch<4, 2>(row, at[1] + e % 2 * 16, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            four_of((w[i] >> e / 2 * 2 & 0x03030303) | (third[i] >> (4 * half + e / 2) & 0x01010101) << 2, k1024_plus(4), out + 2 * i);
        }
        // Scale 8 h + e has four bits in byte e (the upper ones for h = 1) and two in byte 8 + e % 4.
        const uint8_t * s = row + at[2];
        const uint32_t  six = (s[e] >> 4 * half & 15u) | (s[8 + e % 4] >> (4 * half + e / 4 * 2) & 3u) << 4;
        scale_all(out, times_byte(twice(u16_at(s + 12)), six, 0, k1024_plus(32)));
    }
};

// Groups of 32 with a 6-bit scale and IQ4_NL's table.
struct IQ4_XS {
    static constexpr int kBlock = 256, kBytes = 136, kAlign = 8, kPieces = 2;
    static FRT_HD constexpr int longest(int p) { return p == 0 ? 8 : 64; }
    static FRT_HD Piece         piece(int span, int p) {
        const int block = span / 2 * kBytes;
        return p == 0 ? Piece{block, 8} : Piece{block + 8 + 64 * (span % 2), 64};
    }
    static FRT_HD void dequantise(const uint8_t * row, const uint32_t (&at)[2], int span, int e, uint32_t (&out)[8]) {
        const Table table = table_iq4();
        const int   g = span % 2 * 4 + e / 2;
        uint32_t    head[2], w[4];
        fetch<2, 8>(row, at[0], head);
        fetch<4, 8>(row, at[1] + e / 2 * 16, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            table.four(nibbles_of(w[i], e % 2), out + 2 * i);
        }
        const uint32_t six = (head[1] >> 4 * g & 15) | (head[0] >> 16 >> 2 * g & 3) << 4;
        scale_all(out, times_byte(twice(head[0] & 0xffff), six, 0, k1024_plus(32)));
    }
};

}  // namespace mm
}  // namespace frt
