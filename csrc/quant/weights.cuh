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

FRT_HD int dot16(const int (&w)[4], int4 x) { return dot4(w[3], x.w, dot4(w[2], x.z, dot4(w[1], x.y, dot4(w[0], x.x, 0)))); }

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

    int   lo[4], hi[4];
    float d;

    // offset: what every stored quant is too large by.
    FRT_HD float scaled_dot(const X & x, float offset) const {
        const int sum = dot16(lo, x.lo) + dot16(hi, x.hi);
        return d * (x.ds.x * static_cast<float>(sum) - offset * x.ds.y);
    }
};

struct Q8_0 : BlockOf32 {
    static constexpr int kBytes = 34;
    FRT_HD void load(const uint8_t * row, int u) {
        uint32_t w[8];
        d = scaled_block_at(row + u * kBytes, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            lo[i] = static_cast<int>(w[i]);
            hi[i] = static_cast<int>(w[4 + i]);
        }
    }
    FRT_HD float dot(const X & x) const { return d * x.ds.x * static_cast<float>(dot16(lo, x.lo) + dot16(hi, x.hi)); }
};

struct Q4_0 : BlockOf32 {
    static constexpr int kBytes = 18;
    FRT_HD void load(const uint8_t * row, int u) {
        uint32_t w[4];
        d = scaled_block_at(row + u * kBytes, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            lo[i] = static_cast<int>(w[i] & 0x0f0f0f0f);
            hi[i] = static_cast<int>(w[i] >> 4 & 0x0f0f0f0f);
        }
    }
    FRT_HD float dot(const X & x) const { return scaled_dot(x, 8.0f); }
};

struct Q5_0 : BlockOf32 {
    static constexpr int kBytes = 22;

    // The low four bits of `bits` to bit 4 of the four bytes.
    static FRT_HD uint32_t fifth_bits(uint32_t bits) {
        return (bits << 4 & 0x10) | (bits << 11 & 0x1000) | (bits << 18 & 0x100000) | (bits << 25 & 0x10000000);
    }
    FRT_HD void load(const uint8_t * row, int u) {
        uint32_t w[5];
        d = scaled_block_at(row + u * kBytes, w);
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            lo[i] = static_cast<int>((w[1 + i] & 0x0f0f0f0f) | fifth_bits(w[0] >> 4 * i));
            hi[i] = static_cast<int>((w[1 + i] >> 4 & 0x0f0f0f0f) | fifth_bits(w[0] >> (16 + 4 * i)));
        }
    }
    FRT_HD float dot(const X & x) const { return scaled_dot(x, 16.0f); }
};

// ---- Q4_K and Q5_K: 8 groups of 32, each with a 6-bit scale and a 6-bit minimum --------------------------------------
// A unit is 16 bytes of nibbles: 16 weights of group 2j (low) and the same 16 places of group 2j + 1 (high). The minima
// multiply whole groups of activations, so the unit of the first 16 places takes group 2j's and the other one 2j + 1's.

struct GroupsOf32 {
    static constexpr int  kUnit = 32, kBlock = 256, kPlanes = 2;
    static constexpr bool kQ8 = true;
    struct X {
        int4   lo, hi;
        float4 ds;  // d, s of group 2j, d, s of group 2j + 1
    };
    static FRT_HD X     fetch(const Acts & a, int u) { return {a.q(0, u), a.q(1, u), a.ds_pair(u / 2 * 2)}; }
    static FRT_HD Place place(int c) { return {c / 2 % 2, c / 4 * 2 + c % 2}; }

    int   lo[4], hi[4];
    float d_lo, d_hi, m;
    bool  second;  // this unit's minimum is that of group 2j + 1

    // head: f16 d, f16 dmin, 12 bytes of packed scales and minima.
    FRT_HD void scales(uint4 head, int u) {
        const int      j = u / 2 % 4;
        const uint32_t shift = j % 2 * 16;
        const uint32_t s0 = head.y >> shift, s1 = head.z >> shift, s2 = head.w >> shift;
        const bool     low = j < 2;
        const uint32_t sc = low ? s0 & 0x3f3f : (s2 & 0x0f0f) | (s0 >> 2 & 0x3030);
        const uint32_t mn = low ? s1 & 0x3f3f : (s2 >> 4 & 0x0f0f) | (s1 >> 2 & 0x3030);
        const float    d = f16_bits(head.x);
        second = u % 2;
        d_lo = d * static_cast<float>(sc & 0xff);
        d_hi = d * static_cast<float>(sc >> 8 & 0xff);
        m = f16_bits(head.x >> 16) * static_cast<float>(second ? mn >> 8 & 0xff : mn & 0xff);
    }
    FRT_HD float dot(const X & x) const {
        return d_lo * x.ds.x * static_cast<float>(dot16(lo, x.lo)) + d_hi * x.ds.z * static_cast<float>(dot16(hi, x.hi)) -
               m * (second ? x.ds.w : x.ds.y);
    }
};

struct Q4_K : GroupsOf32 {
    static constexpr int kBytes = 144;
    FRT_HD void load(const uint8_t * row, int u) {
        const uint4 * block = reinterpret_cast<const uint4 *>(row + u / 8 * kBytes);
        const uint4   q = block[1 + u % 8];
        scales(block[0], u);
        const uint32_t w[4] = {q.x, q.y, q.z, q.w};
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            lo[i] = static_cast<int>(w[i] & 0x0f0f0f0f);
            hi[i] = static_cast<int>(w[i] >> 4 & 0x0f0f0f0f);
        }
    }
};

struct Q5_K : GroupsOf32 {
    static constexpr int kBytes = 176;
    FRT_HD void load(const uint8_t * row, int u) {
        const uint4 * block = reinterpret_cast<const uint4 *>(row + u / 8 * kBytes);
        const uint4   h = block[1 + u % 2];
        const uint4   q = block[3 + u % 8];
        scales(block[0], u);
        const int      bit = u / 2 % 4 * 2;
        const uint32_t w[4] = {q.x, q.y, q.z, q.w};
        const uint32_t b[4] = {h.x >> bit, h.y >> bit, h.z >> bit, h.w >> bit};
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            lo[i] = static_cast<int>((w[i] & 0x0f0f0f0f) | (b[i] << 4 & 0x10101010));
            hi[i] = static_cast<int>((w[i] >> 4 & 0x0f0f0f0f) | (b[i] << 3 & 0x10101010));
        }
    }
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

    int   w[4][4];
    float d[4];

    // Bytes v - 32 for v in 0..63: no borrow crosses a byte while its top bit is set.
    static FRT_HD int minus_32(uint32_t v) { return static_cast<int>(((v | 0x80808080u) - 0x20202020u) ^ 0x80808080u); }

    FRT_HD void load(const uint8_t * row, int u) {
        const uint8_t * block = row + u / 4 * kBytes;
        const int       half = u / 2 % 2, part = u % 2;
        uint32_t        l0[4], l1[4], h[4], sc[2];
        words_at(block + half * 64 + part * 16, l0);
        words_at(block + half * 64 + part * 16 + 32, l1);
        words_at(block + 128 + half * 32 + part * 16, h);
        words_at(block + 192 + half * 8, sc);
        const float d6 = f16_bits(*reinterpret_cast<const uint16_t *>(block + 208));
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            w[0][i] = minus_32((l0[i] & 0x0f0f0f0f) | (h[i] << 4 & 0x30303030));
            w[1][i] = minus_32((l1[i] & 0x0f0f0f0f) | (h[i] << 2 & 0x30303030));
            w[2][i] = minus_32((l0[i] >> 4 & 0x0f0f0f0f) | (h[i] & 0x30303030));
            w[3][i] = minus_32((l1[i] >> 4 & 0x0f0f0f0f) | (h[i] >> 2 & 0x30303030));
            d[i] = d6 * static_cast<float>(static_cast<int8_t>(sc[i / 2] >> (16 * (i % 2) + 8 * part)));
        }
    }
    FRT_HD float dot(const X & x) const {
        float sum = 0.0f;
        FRT_UNROLL
        for (int i = 0; i < 4; ++i) {
            sum += d[i] * x.d[i] * static_cast<float>(dot16(w[i], x.q[i]));
        }
        return sum;
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
