// SPDX-License-Identifier: Apache-2.0
// Microbenchmark of the mat-mul with many rows: convert of the activations and multiplication, alone and together.
//
//   nvcc -O3 -std=c++17 -DFRT_ARCHS='"sm_90a"' -gencode arch=compute_90a,code=sm_90a bench/mm_bench.cu csrc/mm/*.cu csrc/moe/*.cu -o mm_bench
//   ./mm_bench [--json] [type k n_rows n_tokens glu]...
//
// One line per shape and cut, tile width x blocks that share a tile (0 x 0: what frt_mm chooses): microseconds and TFLOP/s. A figure is the
// median of 30 samples: CUDA events around 4 calls that alternate between 4 copies of the weights, after a rest. Weights and activations
// are random; results are compared between cuts of as many blocks.
// With --json one object per shape: TFLOP/s of each of the 30 samples, activation convert included, at the chosen cut.
#include "../csrc/mm/mm.cuh"
#include "samples.cuh"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

struct Type {
    const char * name;
    int          number, block, bytes;
    std::vector<int> scales;  // offsets of f16 scales in a block
};

static const Type kTypes[] = {
    {"f16", 1, 1, 2, {}},          {"q8_0", 8, 32, 34, {0}},   {"q4_0", 2, 32, 18, {0}},     {"q4_1", 3, 32, 20, {0, 2}},
    {"q5_0", 6, 32, 22, {0}},      {"q5_1", 7, 32, 24, {0, 2}}, {"q2_k", 10, 256, 84, {80, 82}}, {"q3_k", 11, 256, 110, {108}},
    {"q4_k", 12, 256, 144, {0, 2}}, {"q5_k", 13, 256, 176, {0, 2}}, {"q6_k", 14, 256, 210, {208}}, {"iq4_nl", 20, 32, 18, {0}},
    {"iq4_xs", 23, 256, 136, {0}}, {"mxfp4", 39, 32, 17, {}},  {"nvfp4", 40, 64, 36, {}},
};

static double median_us(cudaStream_t stream, const std::function<void(int)> & call) {
    std::vector<float> us = samples_us(stream, call);
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

static void shape(const Type & type, int k, int n_rows, int n_tokens, int glu, bool json) {
    std::mt19937 rng(7);
    const size_t row_bytes = static_cast<size_t>(k / type.block) * type.bytes;
    const int    matrices = glu >= 0 ? 2 : 1;
    std::vector<uint8_t> host(row_bytes * n_rows + 256);
    for (size_t i = 0; i + 4 <= host.size(); i += 4) {
        const uint32_t v = rng();
        memcpy(&host[i], &v, 4);
    }
    const __half scale = __float2half(0.01f);
    for (size_t block = 0; block < host.size() / type.bytes; ++block) {
        for (int at : type.scales) {
            memcpy(&host[block * type.bytes + at], &scale, 2);
        }
        if (type.number == 39) {
            host[block * type.bytes] = 120;
        }
        if (type.number == 40) {
            memset(&host[block * type.bytes], 0x20, 4);
        }
    }
    if (type.number == 1) {
        for (size_t i = 0; i + 2 <= host.size(); i += 2) {
            const __half v = __float2half(static_cast<float>(rng() % 2001) / 1000.0f - 1.0f);
            memcpy(&host[i], &v, 2);
        }
    }
    uint8_t * w[4][2];
    for (auto & copy : w) {
        for (int m = 0; m < matrices; ++m) {
            CHECK(cudaMalloc(&copy[m], host.size()));
            CHECK(cudaMemcpy(copy[m], host.data(), host.size(), cudaMemcpyHostToDevice));
        }
    }
    std::vector<float> hx(static_cast<size_t>(n_tokens) * k);
    std::normal_distribution<float> normal;
    for (float & v : hx) {
        v = normal(rng);
    }
    float *x, *dst, *scales;
    void * h16;
    const size_t padded = (n_tokens + 7) / 8 * 8;
    CHECK(cudaMalloc(&x, hx.size() * 4));
    CHECK(cudaMalloc(&h16, padded * k * 2));
    CHECK(cudaMalloc(&scales, padded * 4));
    CHECK(cudaMalloc(&dst, static_cast<size_t>(n_tokens) * n_rows * 4));
    CHECK(cudaMemcpy(x, hx.data(), hx.size() * 4, cudaMemcpyHostToDevice));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const frt_launch how = {stream, 1, prop.multiProcessorCount, prop.major * 10 + prop.minor};
    const frt_h16_args convert = {x, k, {h16, scales}, k, n_tokens};
    const double flop = 2.0 * n_tokens * k * n_rows * matrices;
    const double convert_us = median_us(stream, [&](int) { CHECK(frt_to_h16(&convert, how)); });
    std::vector<float> first[2], out(static_cast<size_t>(n_tokens) * n_rows);
    for (frt::mm::Cut cut : {frt::mm::Cut{256, 1}, {256, 2}, {128, 1}, {128, 2}, {64, 1}, {64, 2}, {0, 0}}) {
        auto args = [&](int copy) {
            frt_mm_args a = {};
            a.type = type.number, a.glu = glu, a.w = w[copy][0], a.w2 = matrices > 1 ? w[copy][1] : nullptr;
            a.row_bytes = static_cast<int64_t>(row_bytes), a.n_rows = n_rows, a.k = k, a.n_tokens = n_tokens;
            a.x = {h16, scales}, a.dst = dst, a.dst_stride = n_rows;
            return a;
        };
        if (json) {
            if (cut.tokens == 0) {
                printf("{\"type\": \"%s\", \"k\": %d, \"rows\": %d, \"tokens\": %d, \"tflops\": [", type.name, k, n_rows, n_tokens);
                const char * comma = "";
                for (float us : samples_us(stream, [&](int i) {
                         CHECK(frt_to_h16(&convert, how));
                         CHECK(frt::mm::mm_any(args(i), how, cut));
                     })) {
                    printf("%s%.2f", comma, flop / us / 1e6);
                    comma = ", ";
                }
                printf("]}\n");
            }
            continue;
        }
        const double alone = median_us(stream, [&](int i) { CHECK(frt::mm::mm_any(args(i), how, cut)); });
        const double both = median_us(stream, [&](int i) {
            CHECK(frt_to_h16(&convert, how));
            CHECK(frt::mm::mm_any(args(i), how, cut));
        });
        CHECK(cudaMemcpy(out.data(), dst, out.size() * 4, cudaMemcpyDeviceToHost));
        bool same = cut.blocks == 0;
        if (!same) {
            std::vector<float> & reference = first[cut.blocks - 1];
            reference = reference.empty() ? out : reference;
            same = memcmp(reference.data(), out.data(), out.size() * 4) == 0;
        }
        printf("%-6s k %5d rows %6d tokens %5d glu %2d cut %3d x %d: convert %6.1f us, mat-mul %7.1f us %4.0f TFLOP/s, both %7.1f us %4.0f TFLOP/s%s\n",
               type.name, k, n_rows, n_tokens, glu, cut.tokens, cut.blocks, convert_us, alone, flop / alone / 1e6, both, flop / both / 1e6,
               same ? "" : "  DIFFERENT RESULTS");
        fflush(stdout);
    }
    for (auto & copy : w) {
        for (int m = 0; m < matrices; ++m) {
            cudaFree(copy[m]);
        }
    }
    cudaFree(x), cudaFree(h16), cudaFree(scales), cudaFree(dst);
}

int main(int argc, char ** argv) {
    const bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    const int  first = json ? 2 : 1;
    if ((argc - first) % 5 != 0) {
        fprintf(stderr, "usage: mm_bench [--json] [type k n_rows n_tokens glu]...\n");
        return 2;
    }
    for (int i = first; i + 4 < argc; i += 5) {
        const Type * type = nullptr;
        for (const Type & t : kTypes) {
            if (strcmp(t.name, argv[i]) == 0) {
                type = &t;
            }
        }
        if (type == nullptr) {
            fprintf(stderr, "mm_bench: no type %s\n", argv[i]);
            return 2;
        }
        shape(*type, atoi(argv[i + 1]), atoi(argv[i + 2]), atoi(argv[i + 3]), atoi(argv[i + 4]), json);
    }
    return 0;
}
