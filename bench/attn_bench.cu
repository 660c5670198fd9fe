// SPDX-License-Identifier: Apache-2.0
// Microbenchmark of attention by the modules of `cargo xtask fa4`: the scan of the mask, the converts, the module, and all of it.
//
//   D=.flashrt/fa4/sm_90a
//   nvcc -O3 -std=c++17 -DFRT_FA4 -I$D -Icsrc -gencode arch=compute_90a,code=sm_90a bench/attn_bench.cu csrc/attention/mask_tiles.cu $D/*.o \
//       $D/libcuda_dialect_runtime_static.a -o attn_bench
//   ./attn_bench [--json] [head_dim head_dim_v heads heads_kv tokens keys window]...
//
// Token t of n sees keys up to keys - n + t, with a window > 0 only so many of them, as llama.cpp's mask has it. One line per shape and
// module: microseconds and TFLOP/s on the pairs that the mask lets through. A figure is the median of 30 samples: CUDA events around 4
// calls that alternate between 4 copies of all operands, after a rest. Rows are compared with f64 on the host. With --json one object per
// shape: TFLOP/s of each of the 30 samples of the module alone, and of converts, module and scan together.
#include "../csrc/attention/prefill_fa4.cu"
#include "samples.cuh"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

static double median(std::vector<float> us) {
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

struct Shape {
    int head_dim, head_dim_v, heads, heads_kv, tokens, keys, window;

    bool sees(int t, int key) const {
        const int last = keys - tokens + t;
        return key <= last && (window == 0 || key > last - window);
    }
};

template <typename T> static T * on_device(const std::vector<T> & host) {
    T * p;
    CHECK(cudaMalloc(&p, host.size() * sizeof(T)));
    CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

static std::vector<__half> halves(std::mt19937 & rng, size_t n) {
    std::normal_distribution<float> normal;
    std::vector<__half>             out(n);
    for (__half & v : out) {
        v = __float2half(normal(rng));
    }
    return out;
}

static void run(const Shape & s, bool json) {
    std::mt19937 rng(7);
    const float  scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
    std::vector<float>              q(static_cast<size_t>(s.tokens) * s.heads * s.head_dim);
    std::normal_distribution<float> normal;
    for (float & v : q) {
        v = normal(rng);
    }
    const auto k = halves(rng, static_cast<size_t>(s.keys) * s.heads_kv * s.head_dim);
    const auto v = halves(rng, static_cast<size_t>(s.keys) * s.heads_kv * s.head_dim_v);
    const int  padded = (s.keys + 255) / 256 * 256;
    std::vector<uint16_t> mask(static_cast<size_t>(s.tokens) * padded);
    double                pairs = 0;
    for (int t = 0; t < s.tokens; ++t) {
        for (int key = 0; key < s.keys; ++key) {
            const bool seen = s.sees(t, key);
            mask[static_cast<size_t>(t) * padded + key] = seen ? 0 : 0xfc00;
            pairs += seen;
        }
    }
    const double flop = 2.0 * (s.head_dim + s.head_dim_v) * s.heads * pairs;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    const frt_launch how = {stream, 1, prop.multiProcessorCount, prop.major * 10 + prop.minor};
    const size_t     results = static_cast<size_t>(s.tokens) * s.heads * s.head_dim_v;
    frt_prefill_fa4_args args[kCopies];
    for (frt_prefill_fa4_args & a : args) {
        a = {};
        a.q = on_device(q), a.q_head_bytes = s.head_dim * 4, a.q_token_bytes = a.q_head_bytes * s.heads;
        a.k = on_device(k), a.k_head_bytes = s.head_dim * 2, a.k_row_bytes = a.k_head_bytes * s.heads_kv;
        a.v = on_device(v), a.v_head_bytes = s.head_dim_v * 2, a.v_row_bytes = a.v_head_bytes * s.heads_kv;
        a.mask = on_device(mask), a.mask_token_bytes = padded * 2;
        a.head_dim = s.head_dim, a.head_dim_v = s.head_dim_v, a.n_heads = s.heads, a.n_heads_kv = s.heads_kv;
        a.n_tokens = a.mask_tokens = s.tokens, a.n_kv = s.keys, a.n_streams = 1, a.scale = scale;
        CHECK(cudaMalloc(&a.dst, results * 4));
        CHECK(cudaMalloc(&a.scratch, 2 * (q.size() + results)));
        const size_t tiles = static_cast<size_t>(s.tokens / 64 + 1) * (s.keys / 16 + 1);
        for (int32_t ** list : {&a.tiles.partial_count, &a.tiles.partial_index, &a.tiles.full_count, &a.tiles.full_index}) {
            CHECK(cudaMalloc(list, tiles * 4));
        }
        CHECK(cudaMalloc(&a.tiles.kind, tiles));
    }
    for (frt::Module & m : frt::modules) {
        if (m.init == nullptr || m.head_dim != s.head_dim || m.head_dim_v != s.head_dim_v) {
            continue;
        }
        CHECK(frt::load(m));
        auto scan = [&](int i) {
            const frt_prefill_fa4_args & a = args[i];
            const frt_mask_tiles_args    of = {a.mask, a.mask_token_bytes, 0, 1, s.tokens, s.keys, m.tile_m, m.tile_n, a.tiles};
            CHECK(frt_mask_tiles(&of, how));
        };
        for (frt_prefill_fa4_args & a : args) {
            a.tile_m = m.tile_m, a.tile_n = m.tile_n;
            CHECK(cudaMemset(a.dst, 0xff, results * 4));
        }
        auto in  = [&](int i) { CHECK(frt::convert_queries(args[i], how)); };
        auto mid = [&](int i) { CHECK(frt::attend(m, args[i], how)); };
        auto out = [&](int i) { CHECK(frt::convert_results(args[i], how)); };
        for (int i = 0; i < kCopies; ++i) {
            scan(i), in(i), mid(i), out(i);
        }
        CHECK(cudaStreamSynchronize(stream));
        const std::vector<float> alone = samples_us(stream, mid), all = samples_us(stream, [&](int i) { scan(i), in(i), mid(i), out(i); });
        if (json) {
            printf("{\"module\": \"%s\", \"heads\": %d, \"heads_kv\": %d, \"tokens\": %d, \"keys\": %d, \"window\": %d", m.name, s.heads,
                   s.heads_kv, s.tokens, s.keys, s.window);
            for (const auto & [name, us] : {std::make_pair("module_tflops", alone), std::make_pair("with_converts_and_scan_tflops", all)}) {
                printf(", \"%s\": [", name);
                for (size_t i = 0; i < us.size(); ++i) {
                    printf("%s%.2f", i > 0 ? ", " : "", flop / us[i] / 1e6);
                }
                printf("]");
            }
            printf("}\n");
            continue;
        }
        std::vector<float> dst(results);
        CHECK(cudaMemcpy(dst.data(), args[0].dst, results * 4, cudaMemcpyDeviceToHost));
        double worst = 0, largest = 0;
        for (int row = 0; row < 24; ++row) {
            const int t = row == 0 ? 0 : row == 1 ? s.tokens - 1 : static_cast<int>(rng() % s.tokens), h = static_cast<int>(rng() % s.heads);
            const int hk = h / (s.heads / s.heads_kv);
            std::vector<double> p(s.keys), o(s.head_dim_v);
            double              most = -INFINITY, sum = 0;
            for (int key = 0; key < s.keys; ++key) {
                p[key] = 0;
                for (int d = 0; d < s.head_dim; ++d) {
                    p[key] += static_cast<double>(q[(static_cast<size_t>(t) * s.heads + h) * s.head_dim + d]) *
                              __half2float(k[(static_cast<size_t>(key) * s.heads_kv + hk) * s.head_dim + d]) * scale;
                }
                p[key] = s.sees(t, key) ? p[key] : -INFINITY;
                most = std::max(most, p[key]);
            }
            for (int key = 0; key < s.keys; ++key) {
                const double w = std::exp(p[key] - most);
                sum += w;
                for (int d = 0; d < s.head_dim_v; ++d) {
                    o[d] += w * __half2float(v[(static_cast<size_t>(key) * s.heads_kv + hk) * s.head_dim_v + d]);
                }
            }
            for (int d = 0; d < s.head_dim_v; ++d) {
                const double error = std::fabs(o[d] / sum - dst[(static_cast<size_t>(t) * s.heads + h) * s.head_dim_v + d]);
                worst = error > worst || std::isnan(error) ? error : worst;
                largest = std::max(largest, std::fabs(o[d] / sum));
            }
        }
        const double us = median(alone), us_all = median(all);
        printf("%-10s %d/%d heads, %d x %d keys, window %d, tiles %dx%d: scan %.1f, q %.1f, module %.1f (%.0f TFLOP/s), o %.1f, all %.1f us "
               "(%.0f TFLOP/s); off by %.1e of %.1e\n",
               m.name, s.heads, s.heads_kv, s.tokens, s.keys, s.window, m.tile_m, m.tile_n, median(samples_us(stream, scan)),
               median(samples_us(stream, in)), us, flop / us / 1e6, median(samples_us(stream, out)), us_all, flop / us_all / 1e6, worst,
               largest);
        fflush(stdout);
    }
    for (const frt_prefill_fa4_args & a : args) {
        for (const void * p : {static_cast<const void *>(a.q), a.k, a.v, a.mask, static_cast<const void *>(a.dst),
                               static_cast<const void *>(a.scratch), static_cast<const void *>(a.tiles.kind),
                               static_cast<const void *>(a.tiles.partial_count), static_cast<const void *>(a.tiles.partial_index),
                               static_cast<const void *>(a.tiles.full_count), static_cast<const void *>(a.tiles.full_index)}) {
            cudaFree(const_cast<void *>(p));
        }
    }
    CHECK(cudaStreamDestroy(stream));
}

int main(int argc, char ** argv) {
    const bool json = argc > 1 && strcmp(argv[1], "--json") == 0;
    const int  first = json ? 2 : 1, fields = 7;
    if ((argc - first) % fields != 0) {
        fprintf(stderr, "usage: attn_bench [--json] [head_dim head_dim_v heads heads_kv tokens keys window]...\n");
        return 2;
    }
    for (int i = first; i + fields <= argc; i += fields) {
        auto at = [&](int n) { return atoi(argv[i + n]); };
        run({at(0), at(1), at(2), at(3), at(4), at(5), at(6)}, json);
    }
    return 0;
}
