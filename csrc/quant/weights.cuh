// SPDX-License-Identifier: Apache-2.0
// GGUF weight formats, one struct each: how one lane takes its share ("unit") of a row from shared memory and multiplies
// it with activations. Everything here also compiles for the host, so that the arithmetic is tested without a GPU.
//
// A format W has
//   kUnit     weights of a unit; kBlock weights are kBytes bytes of the row
//   load      decodes unit u of the row at `row` (2-byte aligned at least)
//   X, fetch  the activations that belong to unit u
//   dot       f32 dot product of both
//   place     where the 16-byte chunk c of a token's activations is kept (q8: 16 values, f32: 4): see `Acts`
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <string.h>

#define FRT_HD __host__ __device__ __forceinline__
#ifdef __CUDA_ARCH__
#define FRT_UNROLL _Pragma("unroll")
#else
#define FRT_UNROLL
#endif

namespace frt {

// Sum of the four signed byte products plus c.
FRT_HD int dot4(int a, int b, int c) {
#ifdef __CUDA_ARCH__
    return __dp4a(a, b, c);
#else
    for (int i = 0; i < 4; ++i) {
        c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
    }
    return c;
#endif
}

// Sum of the four products of an unsigned byte of a and a signed byte of b, plus c.
FRT_HD int dot4_us(uint32_t a, int b, int c) {
#ifdef __CUDA_ARCH__
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));
    return c;
#else
    for (int i = 0; i < 4; ++i) {
        c += static_cast<uint8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
    }
    return c;
#endif
}

// Bytes of hi:lo chosen by the four nibbles of sel.
FRT_HD uint32_t pick_bytes(uint32_t lo, uint32_t hi, uint32_t sel) {
#ifdef __CUDA_ARCH__
    return __byte_perm(lo, hi, sel);
#else
    const uint64_t both = static_cast<uint64_t>(hi) << 32 | lo;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
        out |= static_cast<uint32_t>(both >> 8 * (sel >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return out;
#endif
}

FRT_HD float f16_bits(uint32_t low16) {
    __half_raw raw;
    raw.x = static_cast<unsigned short>(low16);
    return __half2float(__half(raw));
}

FRT_HD float f32_bits(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

// n modulo 32.
FRT_HD uint32_t rotate_left(uint32_t v, uint32_t n) {
#ifdef __CUDA_ARCH__
    return __funnelshift_l(v, v, n);
#else
    return v << (n & 31) | v >> (-n & 31);
#endif
}

// N words at a 2-byte aligned address, read as aligned words: shared memory has no narrower conflict-free access.
// Touches up to 2 bytes on either side.
template <int N> FRT_HD void words_at(const uint8_t * p, uint32_t (&out)[N]) {
    const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 2;
    const uint32_t * w = reinterpret_cast<const uint32_t *>(p - odd);
    const uint32_t sel = odd ? 0x5432 : 0x3210;
    uint32_t lo = w[0];
    FRT_UNROLL
    for (int i = 0; i < N; ++i) {
        const uint32_t hi = w[i + 1];
        out[i] = pick_bytes(lo, hi, sel);
        lo = hi;
    }
}

// A block "f16 scale, then N words of payload" at a 2-byte aligned address. Touches up to 2 bytes on either side.
template <int N> FRT_HD float scaled_block_at(const uint8_t * p, uint32_t (&out)[N]) {
    const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 2;
    const uint32_t * w = reinterpret_cast<const uint32_t *>(p - odd);
    const uint32_t sel = odd ? 0x7654 : 0x5432;
    uint32_t lo = w[0];
    const float d = f16_bits(odd ? lo >> 16 : lo);
    FRT_UNROLL
    for (int i = 0; i < N; ++i) {
        const uint32_t hi = w[i + 1];
        out[i] = pick_bytes(lo, hi, sel);
        lo = hi;
    }
    return d;
}

// Activations of one token in shared memory. A unit's 16-byte chunks lie in as many planes, chunk after chunk of
// consecutive units side by side, so that a warp's 16-byte reads are contiguous, hence free of bank conflicts.
struct Acts {
    const uint8_t * planes;
    const float2 *  ds;           // q8 only: (d, s) of each block of 32
    int             plane_bytes;  // 16 * number of units

    FRT_HD int4   q(int plane, int u) const { return *reinterpret_cast<const int4 *>(planes + plane * plane_bytes + u * 16); }
    FRT_HD float4 f(int plane, int u) const { return *reinterpret_cast<const float4 *>(planes + plane * plane_bytes + u * 16); }
    FRT_HD float4 ds_pair(int b) const { return *reinterpret_cast<const float4 *>(ds + b); }  // b even
};

struct Place {
    int plane, unit;
};

FRT_HD int dot16(const int * w, int4 x, int sum = 0) {
    return dot4(w[3], x.w, dot4(w[2], x.z, dot4(w[1], x.y, dot4(w[0], x.x, sum))));
}
FRT_HD int dot16_us(const uint32_t * w, int4 x, int sum = 0) {
    return dot4_us(w[3], x.w, dot4_us(w[2], x.z, dot4_us(w[1], x.y, dot4_us(w[0], x.x, sum))));
}

// ---- formats of one block per unit: Q8_0, Q4_0, Q5_0 ------------------------------------------------------------------

struct BlockOf32 {
    static constexpr int  kUnit = 32, kBlock = 32, kPlanes = 2;
    static constexpr bool kQ8 = true;
    struct X {
        int4   lo, hi;
        float2 ds;
    };
    static FRT_HD X     fetch(const Acts & a, int u) { return {a.q(0, u), a.q(1, u), a.ds[u]}; }
    static FRT_HD Place place(int c) { return {c % 2, c / 2}; }
};

struct Q8_0 : BlockOf32 {
    static constexpr int kBytes = 34;
    uint32_t w[8];
    float    d;

    FRT_HD void load(const uint8_t * row, int u) { d = scaled_block_at(row + u * kBytes, w); }
    FRT_HD float dot(const X & x) const {
        int q[8];
        FRT_UNROLL
        for (int i = 0; i < 8; ++i) {
            q[i] = static_cast<int>(w[i]);
        }
        return d * x.ds.x * static_cast<float>(dot16(q + 4, x.hi, dot16(q, x.lo)));
    }
};

// Nibbles of the second half stay where they are, 16 times too large as unsigned bytes: one operation a word, not two.
struct Q4_0 : BlockOf32 {
    static constexpr int kBytes = 18;
    uint32_t lo[4], hi[4];
    float    d;

    FRT_HD void load(const uint8_t * row, int u) {
        uint32_t w[4];
        d = scaled_block_at(row + u * kBytes, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            lo[i] = w[i] & 0x0f0f0f0f;
            hi[i] = w[i] & 0xf0f0f0f0;
        }
    }
    FRT_HD float dot(const X & x) const {
        const int sum16 = dot16_us(hi, x.hi, 16 * dot16_us(lo, x.lo));
        return d * (x.ds.x * 0.0625f * static_cast<float>(sum16) - 8.0f * x.ds.y);
    }
};

struct Q5_0 : BlockOf32 {
    static constexpr int kBytes = 22;
    int   w[8];
    float d;

    // Bit i of the number n < 16 to bit 4 of byte i: the multiplication puts n at bits 4, 11, 18 and 25, which nowhere overlap.
    static FRT_HD uint32_t fifth_bits(uint32_t n) { return n * 0x02040810u & 0x10101010u; }

    FRT_HD void load(const uint8_t * row, int u) {
        uint32_t q[5];
        d = scaled_block_at(row + u * kBytes, q);
        const uint32_t even = q[0] & 0x0f0f0f0f, odd = q[0] >> 4 & 0x0f0f0f0f;  // four fifth bits in each byte
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            const uint32_t four = i % 2 == 0 ? even : odd;
            w[i] = static_cast<int>((q[1 + i] & 0x0f0f0f0f) | fifth_bits(pick_bytes(four, 0, 0x4440 + i / 2)));
            w[4 + i] = static_cast<int>((q[1 + i] >> 4 & 0x0f0f0f0f) | fifth_bits(pick_bytes(four, 0, 0x4442 + i / 2)));
        }
    }
    FRT_HD float dot(const X & x) const {
        return d * (x.ds.x * static_cast<float>(dot16(w + 4, x.hi, dot16(w, x.lo))) - 16.0f * x.ds.y);
    }
};

// ---- Q4_K and Q5_K: 8 groups of 32, each with a 6-bit scale and a 6-bit minimum --------------------------------------
// A unit is 32 bytes of nibbles: group 2j in the low ones and group 2j + 1 in the high ones. Its blocks of 9 or 11 times 16 bytes
// put the reads of 8 neighbouring lanes into different banks.

struct GroupsOf32 {
    static constexpr int  kUnit = 64, kBlock = 256, kPlanes = 4;
    static constexpr bool kQ8 = true;
    struct X {
        int4   q[4];
        float4 ds;  // d, s of group 2j, d, s of group 2j + 1
    };
    static FRT_HD X     fetch(const Acts & a, int u) { return {{a.q(0, u), a.q(1, u), a.q(2, u), a.q(3, u)}, a.ds_pair(2 * u)}; }
    static FRT_HD Place place(int c) { return {c % 4, c / 4}; }

    uint32_t lo[8], hi[8];  // unsigned bytes; those of hi are a power of two too large
    int      scale_lo, scale_hi;
    float    d, min_lo, min_hi;

    // head: f16 d, f16 dmin, 12 bytes of packed scales and minima.
    FRT_HD void scales(uint4 head, int u) {
        const int      j = u % 4;
        const uint32_t shift = j % 2 * 16;
        const uint32_t s0 = head.y >> shift, s1 = head.z >> shift, s2 = head.w >> shift;
        const bool     low = j < 2;
        const uint32_t sc = low ? s0 & 0x3f3f : (s2 & 0x0f0f) | (s0 >> 2 & 0x3030);
        const uint32_t mn = low ? s1 & 0x3f3f : (s2 >> 4 & 0x0f0f) | (s1 >> 2 & 0x3030);
        const float    dmin = f16_bits(head.x >> 16);
        d = f16_bits(head.x);
        scale_lo = static_cast<int>(sc & 0xff);
        scale_hi = static_cast<int>(sc >> 8);
        min_lo = dmin * static_cast<float>(mn & 0xff);
        min_hi = dmin * static_cast<float>(mn >> 8);
    }
    // Sums times scales stay below 2^26 as integers.
    FRT_HD float dot(const X & x, float hi_unit) const {
        const int sum_lo = scale_lo * dot16_us(lo + 4, x.q[1], dot16_us(lo, x.q[0]));
        const int sum_hi = scale_hi * dot16_us(hi + 4, x.q[3], dot16_us(hi, x.q[2]));
        return d * (x.ds.x * static_cast<float>(sum_lo) + x.ds.z * hi_unit * static_cast<float>(sum_hi)) - (min_lo * x.ds.y + min_hi * x.ds.w);
    }
};

FRT_HD void words_of(uint4 a, uint4 b, uint32_t (&w)[8]) {
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

struct Q4_K : GroupsOf32 {
    static constexpr int kBytes = 144;
    FRT_HD void load(const uint8_t * row, int u) {
        const uint4 * block = reinterpret_cast<const uint4 *>(row + u / 4 * kBytes);
        scales(block[0], u);
        uint32_t w[8];
        words_of(block[1 + u % 4 * 2], block[2 + u % 4 * 2], w);
        FRT_UNROLL
        for (int i = 0; i < 8; ++i) {
            lo[i] = w[i] & 0x0f0f0f0f;
            hi[i] = w[i] & 0xf0f0f0f0;
        }
    }
    FRT_HD float dot(const X & x) const { return GroupsOf32::dot(x, 1.0f / 16.0f); }
};

struct Q5_K : GroupsOf32 {
    static constexpr int kBytes = 176;
    FRT_HD void load(const uint8_t * row, int u) {
        const uint4 * block = reinterpret_cast<const uint4 *>(row + u / 4 * kBytes);
        scales(block[0], u);
        uint32_t w[8], fifth[8];
        words_of(block[3 + u % 4 * 2], block[4 + u % 4 * 2], w);
        words_of(block[1], block[2], fifth);
        const uint32_t bit = u % 4 * 2;
        FRT_UNROLL
        for (int i = 0; i < 8; ++i) {
            const uint32_t b = rotate_left(fifth[i], 4 - bit);  // group 2j's bits to bit 4 of the bytes, 2j + 1's to bit 5
            lo[i] = (w[i] & 0x0f0f0f0f) | (b & 0x10101010);
            hi[i] = (w[i] >> 3 & 0x1e1e1e1e) | (b & 0x20202020);
        }
    }
    FRT_HD float dot(const X & x) const { return GroupsOf32::dot(x, 1.0f / 2.0f); }
};

// ---- Q6_K: 16 groups of 16 with an 8-bit scale ------------------------------------------------------------------------
// A unit is the four groups of 16 (32 apart) that share 16 bytes of upper bits.

struct Q6_K {
    static constexpr int  kUnit = 64, kBlock = 256, kBytes = 210, kPlanes = 4;
    static constexpr bool kQ8 = true;
    struct X {
        int4  q[4];
        float d[4];
    };
    static FRT_HD X fetch(const Acts & a, int u) {
        const float4 d01 = a.ds_pair(u / 2 * 4), d23 = a.ds_pair(u / 2 * 4 + 2);
        return {{a.q(0, u), a.q(1, u), a.q(2, u), a.q(3, u)}, {d01.x, d01.z, d23.x, d23.z}};
    }
    static FRT_HD Place place(int c) { return {c / 2 % 4, c / 8 * 2 + c % 2}; }

    int   w[4][4];  // four times the value: its six bits are a byte's upper ones, the top one inverted, which subtracts 32
    int   scale[4];
    float d;

    FRT_HD void load(const uint8_t * row, int u) {
        const uint8_t * block = row + u / 4 * kBytes;
        const int       half = u / 2 % 2, part = u % 2;
        uint32_t        l0[4], l1[4], h[4], sc[2];
        words_at(block + half * 64 + part * 16, l0);
        words_at(block + half * 64 + part * 16 + 32, l1);
        words_at(block + 128 + half * 32 + part * 16, h);
        words_at(block + 192 + half * 8, sc);
        d = 0.25f * f16_bits(*reinterpret_cast<const uint16_t *>(block + 208));
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            const uint32_t top = h[i] ^ 0xaaaaaaaa;
            w[0][i] = static_cast<int>((l0[i] << 2 & 0x3c3c3c3c) | (top << 6 & 0xc0c0c0c0));
            w[1][i] = static_cast<int>((l1[i] << 2 & 0x3c3c3c3c) | (top << 4 & 0xc0c0c0c0));
            w[2][i] = static_cast<int>((l0[i] >> 2 & 0x3c3c3c3c) | (top << 2 & 0xc0c0c0c0));
            w[3][i] = static_cast<int>((l1[i] >> 2 & 0x3c3c3c3c) | (top & 0xc0c0c0c0));
            scale[i] = static_cast<int8_t>(sc[i / 2] >> 8 * part >> 16 * (i % 2));
        }
    }
    FRT_HD float dot(const X & x) const {
        float sum = 0.0f;
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            sum += x.d[i] * static_cast<float>(scale[i] * dot16(w[i], x.q[i]));
        }
        return d * sum;
    }
};

// ---- F16 and BF16: activations stay f32 ---------------------------------------------------------------------------------

struct Half8 {
    static constexpr int  kUnit = 8, kBlock = 8, kBytes = 16, kPlanes = 2;
    static constexpr bool kQ8 = false;
    struct X {
        float4 lo, hi;
    };
    static FRT_HD X     fetch(const Acts & a, int u) { return {a.f(0, u), a.f(1, u)}; }
    static FRT_HD Place place(int c) { return {c % 2, c / 2}; }

    float w[8];

    FRT_HD float dot(const X & x) const {
        return ((w[0] * x.lo.x + w[1] * x.lo.y) + (w[2] * x.lo.z + w[3] * x.lo.w)) +
               ((w[4] * x.hi.x + w[5] * x.hi.y) + (w[6] * x.hi.z + w[7] * x.hi.w));
    }
};

struct F16 : Half8 {
    FRT_HD void load(const uint8_t * row, int u) {
        const uint4    q = *reinterpret_cast<const uint4 *>(row + u * kBytes);
        const uint32_t p[4] = {q.x, q.y, q.z, q.w};
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            w[2 * i] = f16_bits(p[i]);
            w[2 * i + 1] = f16_bits(p[i] >> 16);
        }
    }
};

struct BF16 : Half8 {
    FRT_HD void load(const uint8_t * row, int u) {
        const uint4    q = *reinterpret_cast<const uint4 *>(row + u * kBytes);
        const uint32_t p[4] = {q.x, q.y, q.z, q.w};
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            w[2 * i] = f32_bits(p[i] << 16);
            w[2 * i + 1] = f32_bits(p[i] & 0xffff0000u);
        }
    }
};

}  // namespace frt
