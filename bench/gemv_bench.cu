// SPDX-License-Identifier: Apache-2.0
// Micro-benchmark and correctness check of csrc/gemv. Needs neither cargo nor llama.cpp.
//
//   nvcc -O3 -std=c++17 -cudart shared -gencode arch=compute_90a,code=sm_90a bench/gemv_bench.cu csrc/gemv/*.cu -o gemv_bench
//   ./gemv_bench [--host] [--sweep] [--type q4_k] [results.jsonl]
//
// --host checks the arithmetic of every weight format on the CPU and stops: no GPU needed.
// Otherwise: every format and shape against a double-precision sum over a sample of rows, then times. Each timed launch reads
// weights that are not in L2 (they rotate through more than 512 MB) and is part of a CUDA graph of many; "pdl" and "plain" are the
// same graph with and without programmatic dependent launch. TB/s counts the weights' bytes only. --sweep also times other choices
// of lanes, rows, ring depth and blocks per SM.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#include "../csrc/gemv/gemv.cuh"

namespace {

using std::vector;

#define CHECK(call)                                                                                    \
    do {                                                                                               \
        const cudaError_t err_ = (call);                                                               \
        if (err_ != cudaSuccess) {                                                                     \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(err_)); \
            exit(2);                                                                                   \
        }                                                                                              \
    } while (0)

__host__ __device__ uint32_t hash32(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}
__host__ __device__ float unit_float(uint32_t seed) { return static_cast<float>(hash32(seed) >> 8) * (1.0f / (1 << 24)); }

// ---- weight formats, from their definition in ggml-common.h, one value at a time -------------------------------------

struct Type {
    const char * name;
    int          id, block, bytes;
    int          scale_at[2];  // offsets of the f16 scales of a block, -1: none
};
const Type kTypes[] = {
    {"q8_0", 8, 32, 34, {0, -1}},    {"q4_0", 2, 32, 18, {0, -1}},   {"q5_0", 6, 32, 22, {0, -1}},    {"q4_k", 12, 256, 144, {0, 2}},
    {"q5_k", 13, 256, 176, {0, 2}}, {"q6_k", 14, 256, 210, {208, -1}}, {"f16", 1, 1, 2, {0, -1}}, {"bf16", 30, 1, 2, {-1, -1}},
};

double half_at(const uint8_t * p) {
    __half_raw raw;
    memcpy(&raw.x, p, 2);
    return __half2float(__half(raw));
}

void k_scale(const uint8_t * s, int g, double & scale, double & min) {
    scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
    min = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
}

double weight_at(const Type & type, const uint8_t * row, int i) {
    const uint8_t * b = row + static_cast<size_t>(i / type.block) * type.bytes;
    const int       j = i % type.block;
    double          scale, min;
    switch (type.id) {
        case 8: return half_at(b) * static_cast<int8_t>(b[2 + j]);
        case 2: return half_at(b) * ((b[2 + j % 16] >> j / 16 * 4 & 15) - 8);
        case 6: {
            uint32_t high;
            memcpy(&high, b + 2, 4);
            return half_at(b) * (static_cast<int>((b[6 + j % 16] >> j / 16 * 4 & 15) | (high >> j & 1) << 4) - 16);
        }
        case 12:
            k_scale(b + 4, j / 32, scale, min);
            return half_at(b) * scale * (b[16 + j / 64 * 32 + j % 32] >> j / 32 % 2 * 4 & 15) - half_at(b + 2) * min;
        case 13:
            k_scale(b + 4, j / 32, scale, min);
            return half_at(b) * scale * ((b[48 + j / 64 * 32 + j % 32] >> j / 32 % 2 * 4 & 15) | (b[16 + j % 32] >> j / 32 & 1) << 4) -
                   half_at(b + 2) * min;
        case 14: {
            const int h = j / 128, l = j % 32, part = j / 32 % 4;
            const int low = b[h * 64 + part % 2 * 32 + l] >> part / 2 * 4 & 15;
            const int high = b[128 + h * 32 + l] >> part * 2 & 3;
            return half_at(b + 208) * static_cast<int8_t>(b[192 + j / 16]) * ((low | high << 4) - 32);
        }
        case 1: return half_at(b);
        default: {
            uint32_t bits = static_cast<uint32_t>(b[0] | b[1] << 8) << 16;
            float    f;
            memcpy(&f, &bits, 4);
            return f;
        }
    }
}

// Random quants; scales between a half and one and a half times a value that gives weights near 0.05.
__host__ __device__ void random_block(int id, int bytes, int scale0, int scale1, uint8_t * b, uint32_t seed) {
    for (int i = 0; i < bytes; ++i) {
        b[i] = static_cast<uint8_t>(hash32(seed + i * 0x9e3779b9u));
    }
    const float size = id == 8 ? 0.0005f : id == 2 ? 0.01f : id == 6 ? 0.005f : id == 14 ? 2e-5f : 2e-4f;
    const float v = id == 1 || id == 30 ? 0.1f * (unit_float(seed) - 0.5f) : size * (0.5f + unit_float(seed));
    if (id == 30) {
        const __nv_bfloat16_raw raw = __float2bfloat16(v);
        memcpy(b, &raw.x, 2);
        return;
    }
    const __half_raw raw = __float2half(v);
    memcpy(b + scale0, &raw.x, 2);
    if (scale1 >= 0) {
        memcpy(b + scale1, &raw.x, 2);
    }
}

__global__ void fill_kernel(int id, int bytes, int scale0, int scale1, uint8_t * w, size_t n_blocks) {
    for (size_t b = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; b < n_blocks; b += gridDim.x * static_cast<size_t>(blockDim.x)) {
        random_block(id, bytes, scale0, scale1, w + b * bytes, static_cast<uint32_t>(b) * 747796405u + 1);
    }
}

void fill_weights(const Type & type, uint8_t * w, size_t bytes, cudaStream_t stream) {
    fill_kernel<<<1024, 256, 0, stream>>>(type.id, type.bytes, std::max(type.scale_at[0], 0), type.scale_at[1], w, bytes / type.bytes);
    CHECK(cudaGetLastError());
}

// ---- activations --------------------------------------------------------------------------------------------------------

vector<float> random_acts(size_t n, uint32_t seed) {
    vector<float> x(n);
    for (size_t i = 0; i < n; ++i) {  // a few large values, as real activations have
        const uint32_t s = seed + static_cast<uint32_t>(i);
        x[i] = (unit_float(s) + unit_float(s + 77777777u) - 1.0f) * (hash32(s) % 97 == 0 ? 8.0f : 1.0f);
    }
    return x;
}

struct Q8Host {
    vector<int8_t> qs;
    vector<float>  ds;
    explicit Q8Host(const vector<float> & x) : qs(x.size()), ds(x.size() / 16) {
        for (size_t b = 0; b < x.size() / 32; ++b) {
            float amax = 0.0f;
            for (int i = 0; i < 32; ++i) {
                amax = std::max(amax, std::fabs(x[b * 32 + i]));
            }
            const float d = amax / 127.0f;
            int         sum = 0;
            for (int i = 0; i < 32; ++i) {
                qs[b * 32 + i] = static_cast<int8_t>(amax == 0.0f ? 0.0f : std::round(x[b * 32 + i] / d));
                sum += qs[b * 32 + i];
            }
            ds[2 * b] = d;
            ds[2 * b + 1] = d * static_cast<float>(sum);
        }
    }
    vector<double> values() const {
        vector<double> v(qs.size());
        for (size_t i = 0; i < v.size(); ++i) {
            v[i] = static_cast<double>(ds[i / 32 * 2]) * qs[i];
        }
        return v;
    }
};

// Exact dot product, and the sum of magnitudes that its rounding errors scale with.
struct Dot {
    double value = 0.0, size = 0.0;
};
Dot exact_dot(const Type & type, const uint8_t * row, const double * x, int k) {
    Dot d;
    for (int i = 0; i < k; ++i) {
        const double p = weight_at(type, row, i) * x[i];
        d.value += p;
        d.size += std::fabs(p);
    }
    return d;
}
// f32 sums of at most a few hundred terms per lane: relative to the magnitudes, with the minima's own share in it.
constexpr double kRelTol = 1e-5;

// ---- --host: the very functions of the kernel, on the CPU ---------------------------------------------------------------

template <typename W> bool host_check(const Type & type) {
    const int       k = 2048;
    const int       row_bytes = k / type.block * type.bytes;
    vector<uint8_t> buffer(row_bytes + 64);
    const int       shift = row_bytes % 16 == 0 && W::kBytes % 16 == 0 ? 16 : 18;  // odd multiples of 2 where the format allows
    uint8_t *       row = buffer.data() + (16 - reinterpret_cast<uintptr_t>(buffer.data()) % 16) % 16 + shift;
    for (int b = 0; b < k / type.block; ++b) {
        random_block(type.id, type.bytes, type.scale_at[0], type.scale_at[1], row + b * type.bytes, 1234u + 7919u * b);
    }
    const vector<float>  x = random_acts(k, 99);
    const Q8Host         q8(x);
    const vector<double> exact = W::kQ8 ? q8.values() : vector<double>(x.begin(), x.end());
    const int            n_units = k / W::kUnit;
    vector<int4>         planes(k * (W::kQ8 ? 1 : 4) / 16);
    const uint8_t *      source = W::kQ8 ? reinterpret_cast<const uint8_t *>(q8.qs.data()) : reinterpret_cast<const uint8_t *>(x.data());
    for (size_t c = 0; c < planes.size(); ++c) {
        const frt::Place at = W::place(static_cast<int>(c));
        memcpy(&planes[at.plane * n_units + at.unit], source + c * 16, 16);
    }
    vector<float4> ds(k / 64);
    memcpy(ds.data(), q8.ds.data(), k / 32 * 8);
    const frt::Acts acts = {reinterpret_cast<const uint8_t *>(planes.data()), reinterpret_cast<const float2 *>(ds.data()), n_units * 16};
    float sum = 0.0f;
    for (int u = 0; u < n_units; ++u) {
        W w;
        w.load(row, u);
        sum += w.dot(W::fetch(acts, u));
    }
    const Dot  want = exact_dot(type, row, exact.data(), k);
    const bool ok = std::fabs(sum - want.value) <= kRelTol * want.size;
    printf("host %-5s got %.7g want %.7g (magnitudes %.4g) %s\n", type.name, sum, want.value, want.size, ok ? "ok" : "WRONG");
    return ok;
}

int host_checks() {
    const bool ok[] = {host_check<frt::Q8_0>(kTypes[0]), host_check<frt::Q4_0>(kTypes[1]), host_check<frt::Q5_0>(kTypes[2]),
                       host_check<frt::Q4_K>(kTypes[3]), host_check<frt::Q5_K>(kTypes[4]), host_check<frt::Q6_K>(kTypes[5]),
                       host_check<frt::F16>(kTypes[6]),  host_check<frt::BF16>(kTypes[7])};
    return std::all_of(std::begin(ok), std::end(ok), [](bool b) { return b; }) ? 0 : 1;
}

// ---- the device -----------------------------------------------------------------------------------------------------------

struct Case {
    const char * name;
    int          k;
    int          rows[3];  // of the segments; a GLU has gate and up of rows[0]
    int          glu;
};
const Case kCases[] = {
    {"8b.qkv", 4096, {4096, 1024, 1024}, FRT_GLU_NONE},    {"8b.o", 4096, {4096, 0, 0}, FRT_GLU_NONE},
    {"8b.kv", 4096, {1024, 0, 0}, FRT_GLU_NONE},           {"8b.glu", 4096, {14336, 0, 0}, FRT_GLU_SWIGLU},
    {"8b.down", 14336, {4096, 0, 0}, FRT_GLU_NONE},        {"8b.head", 4096, {128256, 0, 0}, FRT_GLU_NONE},
    {"270m.qkv", 640, {1024, 256, 256}, FRT_GLU_NONE},     {"270m.o", 1024, {640, 0, 0}, FRT_GLU_NONE},
    {"270m.glu", 640, {2048, 0, 0}, FRT_GLU_GEGLU},        {"270m.down", 2048, {640, 0, 0}, FRT_GLU_NONE},
    {"270m.head", 640, {262144, 0, 0}, FRT_GLU_NONE},      {"1b.qkv", 1152, {1024, 256, 256}, FRT_GLU_NONE},
    {"1b.o", 1024, {1152, 0, 0}, FRT_GLU_NONE},            {"1b.glu", 1152, {6912, 0, 0}, FRT_GLU_GEGLU},
    {"1b.down", 6912, {1152, 0, 0}, FRT_GLU_NONE},         {"1b.head", 1152, {262144, 0, 0}, FRT_GLU_NONE},
};

int n_seg(const Case & c) { return c.glu != FRT_GLU_NONE ? 2 : (c.rows[0] > 0) + (c.rows[1] > 0) + (c.rows[2] > 0); }
int seg_rows(const Case & c, int s) { return c.glu != FRT_GLU_NONE ? c.rows[0] : c.rows[s]; }
size_t row_bytes(const Type & t, const Case & c) { return static_cast<size_t>(c.k) / t.block * t.bytes; }
size_t weight_bytes(const Type & t, const Case & c) {
    size_t n = 0;
    for (int s = 0; s < n_seg(c); ++s) {
        n += (row_bytes(t, c) * seg_rows(c, s) + 255) / 256 * 256;
    }
    return n;
}

constexpr size_t kPool = size_t(640) << 20;
constexpr int    kMaxK = 14336, kMaxRows = 262144 + 4096;

struct Device {
    cudaStream_t stream;
    int          sm_count, cc;
    uint8_t *    pool;
    float *      x, *out, *bias, *res, *xq_ds;
    int8_t *     xq;
};

Device open_device() {
    Device         d = {};
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    d.sm_count = prop.multiProcessorCount;
    d.cc = prop.major * 10 + prop.minor;
    printf("%s, sm_%d, %d SMs, L2 %d MB\n", prop.name, d.cc, d.sm_count, prop.l2CacheSize >> 20);
    CHECK(cudaStreamCreate(&d.stream));
    CHECK(cudaMalloc(&d.pool, kPool));
    CHECK(cudaMalloc(&d.x, 8 * kMaxK * 4));
    CHECK(cudaMalloc(&d.out, size_t(8) * kMaxRows * 4));
    CHECK(cudaMalloc(&d.bias, kMaxRows * 4));
    CHECK(cudaMalloc(&d.res, size_t(8) * kMaxRows * 4));
    CHECK(cudaMalloc(&d.xq, 8 * kMaxK));
    CHECK(cudaMalloc(&d.xq_ds, 8 * kMaxK / 4));
    return d;
}

frt_gemv_args make_args(const Device & d, const Type & type, const Case & c, int tokens, bool xq, size_t pool_offset) {
    frt_gemv_args a = {};
    a.type = type.id;
    a.n_seg = n_seg(c);
    a.k = c.k;
    a.n_tokens = tokens;
    a.x = d.x;
    a.x_stride = c.k;
    a.glu = c.glu;
    if (xq) {
        a.xq = {d.xq, d.xq_ds};
    }
    size_t at = pool_offset;
    int    column = 0, total = 0;
    for (int s = 0; s < 3; ++s) {
        total += s < (c.glu != FRT_GLU_NONE ? 1 : a.n_seg) ? seg_rows(c, s) : 0;
    }
    for (int s = 0; s < a.n_seg; ++s) {
        frt_gemv_seg & seg = a.seg[s];
        seg.w = d.pool + at;
        seg.row_bytes = static_cast<int64_t>(row_bytes(type, c));
        seg.n_rows = seg_rows(c, s);
        seg.dst = d.out + column;
        seg.dst_stride = total;
        at += (row_bytes(type, c) * seg.n_rows + 255) / 256 * 256;
        column += c.glu != FRT_GLU_NONE ? 0 : seg.n_rows;
    }
    return a;
}

double act(int glu, double x) {
    switch (glu) {
        case FRT_GLU_REGLU: return std::max(x, 0.0);
        case FRT_GLU_GEGLU: return 0.5 * x * (1 + std::tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x)));
        case FRT_GLU_SWIGLU: return x / (1 + std::exp(-x));
        case FRT_GLU_GEGLU_ERF: return 0.5 * x * (1 + std::erf(x * 0.70710678118654752440));
        default: return x / (1 + std::exp(-1.702 * x));
    }
}

// Largest error over a sample of rows as a fraction of what is allowed: above 1 is wrong.
double check_case(const Device & d, const Type & type, Case c, int tokens, bool xq, bool epilogue, int lanes) {
    const int           rows_total = seg_rows(c, 0) + (c.glu != FRT_GLU_NONE ? 0 : c.rows[1] + c.rows[2]);
    const vector<float> x = random_acts(static_cast<size_t>(tokens) * c.k, 7u * tokens + c.k);
    const bool          quantised = type.block > 1;
    vector<double>      exact(x.begin(), x.end());
    CHECK(cudaMemcpy(d.x, x.data(), x.size() * 4, cudaMemcpyHostToDevice));
    if (quantised) {
        const Q8Host q8(x);
        exact = q8.values();
        CHECK(cudaMemcpy(d.xq, q8.qs.data(), q8.qs.size(), cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(d.xq_ds, q8.ds.data(), q8.ds.size() * 4, cudaMemcpyHostToDevice));
    }
    frt_gemv_args a = make_args(d, type, c, tokens, xq && quantised, 256);
    for (int s = 0; s < a.n_seg; ++s) {
        fill_weights(type, static_cast<uint8_t *>(const_cast<void *>(a.seg[s].w)), row_bytes(type, c) * a.seg[s].n_rows, d.stream);
    }
    const vector<float> bias = random_acts(rows_total, 5), res = random_acts(static_cast<size_t>(rows_total) * tokens, 6);
    if (epilogue) {
        CHECK(cudaMemcpy(d.bias, bias.data(), bias.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(d.out, res.data(), res.size() * 4, cudaMemcpyHostToDevice));  // the residual lies over the result
        int column = 0;
        for (int s = 0; s < a.n_seg; ++s) {
            a.seg[s].bias = d.bias + (c.glu != FRT_GLU_NONE ? 0 : column);
            if (c.glu == FRT_GLU_NONE) {
                a.seg[s].res = a.seg[s].dst;
                a.seg[s].res_stride = a.seg[s].dst_stride;
                column += a.seg[s].n_rows;
            }
        }
    } else {
        CHECK(cudaMemset(d.out, 0xff, static_cast<size_t>(tokens) * rows_total * 4));
    }
    const frt_launch      how = {d.stream, 1, d.sm_count, d.cc};
    const frt::GemvTuning forced = {lanes, 0};
    const cudaError_t err = frt::gemv_any(a, how, lanes > 0 ? &forced : nullptr);
    if (err != cudaSuccess) {
        printf("%s %s: %s\n", type.name, c.name, cudaGetErrorString(err));
        return 1e30;
    }
    CHECK(cudaStreamSynchronize(d.stream));
    vector<float> out(static_cast<size_t>(tokens) * rows_total);
    CHECK(cudaMemcpy(out.data(), d.out, out.size() * 4, cudaMemcpyDeviceToHost));

    double          worst = 0.0;
    vector<uint8_t> row(row_bytes(type, c) * 2);
    const auto      fetch = [&](int s, int r, uint8_t * to) {
        CHECK(cudaMemcpy(to, static_cast<const uint8_t *>(a.seg[s].w) + r * a.seg[s].row_bytes, row_bytes(type, c), cudaMemcpyDeviceToHost));
    };
    int column = 0;
    for (int s = 0; s < (c.glu != FRT_GLU_NONE ? 1 : a.n_seg); ++s) {
        const int n = a.seg[s].n_rows;
        for (int i = 0; i < 9; ++i) {
            const int r = i == 0 ? 0 : i == 1 ? n - 1 : static_cast<int>(hash32(i * 31 + n) % n);
            fetch(s, r, row.data());
            if (c.glu != FRT_GLU_NONE) {
                fetch(1, r, row.data() + row_bytes(type, c));
            }
            for (int t = 0; t < tokens; ++t) {
                Dot want = exact_dot(type, row.data(), exact.data() + static_cast<size_t>(t) * c.k, c.k);
                double tol = kRelTol * want.size;
                if (epilogue) {
                    want.value += bias[column + r];
                }
                if (c.glu != FRT_GLU_NONE) {
                    Dot up = exact_dot(type, row.data() + row_bytes(type, c), exact.data() + static_cast<size_t>(t) * c.k, c.k);
                    if (epilogue) {
                        up.value += bias[r];
                    }
                    // |act'| <= 1.2; act itself is good to a few ulp.
                    tol = 1.2 * tol * std::fabs(up.value) + (kRelTol * up.size + 1e-6 * std::fabs(up.value)) * std::fabs(act(c.glu, want.value)) + 1e-7;
                    want.value = act(c.glu, want.value) * up.value;
                } else if (epilogue) {
                    want.value += res[static_cast<size_t>(t) * rows_total + column + r];
                }
                const size_t at = static_cast<size_t>(t) * rows_total + column + r;
                const double bad = std::fabs(out[at] - want.value) / (tol + 1e-6 * std::fabs(want.value));
                worst = std::max(worst, std::isfinite(bad) ? bad : 1e30);
            }
        }
        column += n;
    }
    return worst;
}

bool check_all(const Device & d, const Type & type) {
    struct Variant {
        int  tokens;
        bool xq, epilogue;
        int  lanes;
    };
    const Variant variants[] = {{1, false, false, 0}, {1, true, true, 0},  {2, false, true, 32}, {3, true, false, 32},
                                {4, false, true, 8},  {2, true, false, 8}, {8, true, true, 32},  {5, false, false, 0}};
    const Case odd[] = {{"odd.rows", 768, {77, 5, 130}, FRT_GLU_NONE}, {"odd.glu", 512, {45, 0, 0}, FRT_GLU_GEGLU_ERF},
                        {"reglu", 256, {64, 0, 0}, FRT_GLU_REGLU},     {"quick", 1024, {96, 0, 0}, FRT_GLU_GEGLU_QUICK}};
    vector<Case> cases(std::begin(kCases), std::end(kCases));
    cases.insert(cases.end(), std::begin(odd), std::end(odd));
    bool   ok = true;
    double worst = 0.0;
    for (const Case & c : cases) {
        for (const Variant & v : variants) {
            if (!frt_gemv_supports(type.id, c.k, v.tokens, c.glu) || weight_bytes(type, c) + 256 > kPool ||
                (v.tokens > 2 && seg_rows(c, 0) > 100000)) {
                continue;
            }
            const double bad = check_case(d, type, c, v.tokens, v.xq, v.epilogue, v.lanes);
            worst = std::max(worst, bad);
            if (!(bad <= 1.0)) {
                ok = false;
                printf("WRONG %s %s tokens %d xq %d epilogue %d lanes %d: error %.3g of the bound\n", type.name, c.name, v.tokens, v.xq,
                       v.epilogue, v.lanes, bad);
            }
        }
    }
    printf("check %-5s worst error %.3f of the bound: %s\n", type.name, worst, ok ? "ok" : "WRONG");
    return ok;
}

// ---- times ------------------------------------------------------------------------------------------------------------------

using Launcher = std::function<cudaError_t(int i, frt_launch how)>;

// Microseconds per launch in a graph of n; negative when the launch is refused.
double time_graph(const Device & d, int n, bool pdl, int repeats, const Launcher & launch) {
    const frt_launch how = {d.stream, pdl, d.sm_count, d.cc};
    CHECK(cudaStreamBeginCapture(d.stream, cudaStreamCaptureModeThreadLocal));
    cudaError_t err = cudaSuccess;
    for (int i = 0; i < n && err == cudaSuccess; ++i) {
        err = launch(i, how);
    }
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(d.stream, &graph));
    if (err != cudaSuccess) {
        cudaGetLastError();
        CHECK(cudaGraphDestroy(graph));
        return -1.0;
    }
    cudaGraphExec_t exec;
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaGraphLaunch(exec, d.stream));
    vector<float> ms(repeats);
    for (float & m : ms) {
        CHECK(cudaEventRecord(begin, d.stream));
        CHECK(cudaGraphLaunch(exec, d.stream));
        CHECK(cudaEventRecord(end, d.stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&m, begin, end));
    }
    std::sort(ms.begin(), ms.end());
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return ms[repeats / 2] * 1000.0 / n;
}

int launches_for(size_t bytes) { return static_cast<int>(std::clamp<size_t>(kPool / bytes, 3, 160)); }

__global__ void nothing_kernel() {
    frt::pdl_wait();
}

__global__ void __launch_bounds__(512) read_kernel(const uint4 * from, size_t n, uint32_t * to) {
    uint32_t sum = 0;
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            v[j] = __ldcs(from + i + j * step);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
        }
    }
    if (sum == 0x12345678u) {
        *to = sum;
    }
}

struct Row {
    std::string type, name, what;
    int         tokens;
    double      plain, pdl, bytes;
};

void print_row(const Row & r, FILE * json) {
    const double us = r.pdl > 0 ? r.pdl : r.plain;
    printf("%-5s %-10s t%d %-26s pdl %8.2f us  plain %8.2f us  %5.2f TB/s\n", r.type.c_str(), r.name.c_str(), r.tokens, r.what.c_str(), r.pdl, r.plain, r.bytes / us * 1e-6);
    if (json != nullptr) {
        fprintf(json, "{\"type\":\"%s\",\"case\":\"%s\",\"tokens\":%d,\"variant\":\"%s\",\"pdl_us\":%.3f,\"plain_us\":%.3f,\"bytes\":%.0f}\n", r.type.c_str(),
                r.name.c_str(), r.tokens, r.what.c_str(), r.pdl, r.plain, r.bytes);
    }
}

template <typename W, int ROWS, int STAGES> void sweep_one(const Device & d, const Type & type, const Case & c, vector<Row> & rows) {
    if (c.glu != FRT_GLU_NONE && ROWS % 2 != 0) {
        return;
    }
    const size_t bytes = weight_bytes(type, c);
    const int    n = launches_for(bytes);
    for (int per_sm = 1; per_sm <= 3; ++per_sm) {
        const double us = time_graph(d, n, true, 3, [&](int i, frt_launch how) {
            return frt::gemv_launch<W, 1, 32, ROWS, STAGES>(make_args(d, type, c, 1, true, i % (kPool / bytes) * bytes), how, per_sm);
        });
        if (us > 0) {
            rows.push_back({type.name, c.name, "rows " + std::to_string(ROWS) + " stages " + std::to_string(STAGES) + " per_sm " + std::to_string(per_sm), 1, 0,
                            us, static_cast<double>(bytes)});
        }
    }
}

template <typename W, int ROWS, int... STAGES> void sweep_stages(const Device & d, const Type & type, const Case & c, vector<Row> & rows) {
    (sweep_one<W, ROWS, STAGES>(d, type, c, rows), ...);
}

// Template choices that the library does not offer at run time: rows per group of lanes, depth of the ring.
template <typename W> void sweep(const Device & d, const Type & type, FILE * json) {
    for (const Case & c : kCases) {
        if (!frt_gemv_supports(type.id, c.k, 1, c.glu) || weight_bytes(type, c) > kPool) {
            continue;
        }
        vector<Row> rows;
        sweep_stages<W, 1, 2, 4, 8>(d, type, c, rows);
        sweep_stages<W, 2, 2, 3, 4, 6>(d, type, c, rows);
        sweep_stages<W, 4, 2, 3>(d, type, c, rows);
        std::sort(rows.begin(), rows.end(), [](const Row & a, const Row & b) { return a.pdl < b.pdl; });
        for (size_t i = 0; i < rows.size(); ++i) {
            if (i < 3) {
                print_row(rows[i], json);
            }
        }
    }
}

void times(const Device & d, const Type & type, bool sweep, FILE * json) {
    for (const Case & c : kCases) {
        const size_t bytes = weight_bytes(type, c);
        if (bytes > kPool) {
            continue;
        }
        const int n = launches_for(bytes);
        for (int tokens : {1, 4}) {
            if (!frt_gemv_supports(type.id, c.k, tokens, c.glu)) {
                continue;
            }
            struct Choice {
                const char *    name;
                bool            xq, forced;
                frt::GemvTuning tuning;
            };
            vector<Choice> choices = {{"default", true, false, {}}};
            if (tokens == 1) {
                if (type.block > 1) {
                    choices.push_back({"own quantisation", false, false, {}});
                }
                if (sweep) {
                    for (const auto & [name, lanes, per_sm] : {std::tuple{"lanes 32 per_sm 1", 32, 1}, std::tuple{"lanes 32 per_sm 3", 32, 3},
                                                               std::tuple{"lanes 8 per_sm 1", 8, 1}, std::tuple{"lanes 8 per_sm 2", 8, 2}}) {
                        choices.push_back({name, true, true, {lanes, per_sm}});
                    }
                }
            }
            for (const Choice & choice : choices) {
                const Launcher launcher = [&](int i, frt_launch how) {
                    return frt::gemv_any(make_args(d, type, c, tokens, choice.xq, i % (kPool / bytes) * bytes), how,
                                         choice.forced ? &choice.tuning : nullptr);
                };
                const double pdl = time_graph(d, n, true, 3, launcher);
                const double plain = choice.forced ? 0.0 : time_graph(d, n, false, 3, launcher);
                print_row({type.name, c.name, choice.name, tokens, plain, pdl, static_cast<double>(bytes)}, json);
            }
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    bool         sweeps = false;
    const char * json_path = nullptr;
    const char * only = nullptr;
    for (int i = 1; i < argc; ++i) {
        if (strcmp(argv[i], "--host") == 0) {
            return host_checks();
        }
        if (strcmp(argv[i], "--sweep") == 0) {
            sweeps = true;
        } else if (strcmp(argv[i], "--type") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else {
            json_path = argv[i];
        }
    }
    FILE * json = json_path != nullptr ? fopen(json_path, "w") : nullptr;
    if (json_path != nullptr && json == nullptr) {
        perror(json_path);
        return 2;
    }
    const Device d = open_device();
    printf("an empty kernel: pdl %.2f us, plain %.2f us\n",
           time_graph(d, 200, true, 5, [&](int, frt_launch how) { return frt::launch<nothing_kernel>(how, d.sm_count, 256, 0); }),
           time_graph(d, 200, false, 5, [&](int, frt_launch how) { return frt::launch<nothing_kernel>(how, d.sm_count, 256, 0); }));
    const double read_us = time_graph(d, 4, false, 5, [&](int, frt_launch how) {
        read_kernel<<<d.sm_count * 4, 512, 0, static_cast<cudaStream_t>(how.stream)>>>(reinterpret_cast<const uint4 *>(d.pool), kPool / 16, reinterpret_cast<uint32_t *>(d.out));
        return cudaGetLastError();
    });
    printf("reading %zu MB: %.2f TB/s\n", kPool >> 20, static_cast<double>(kPool) / read_us * 1e-6);

    bool ok = true;
    for (const Type & type : kTypes) {
        if (only != nullptr && strcmp(only, type.name) != 0) {
            continue;
        }
        fill_weights(type, d.pool, kPool, d.stream);
        CHECK(cudaStreamSynchronize(d.stream));
        ok = check_all(d, type) && ok;
        times(d, type, sweeps, json);
        if (sweeps && type.id == 12) {
            sweep<frt::Q4_K>(d, type, json);
        }
        if (sweeps && type.id == 8) {
            sweep<frt::Q8_0>(d, type, json);
        }
        fflush(stdout);
    }
    if (json != nullptr) {
        fclose(json);
    }
    printf("%s\n", ok ? "all right" : "WRONG results above");
    return ok ? 0 : 1;
}
