// SPDX-License-Identifier: Apache-2.0
// Time of one attention mask: llama.cpp's own way, by ranges (host/mask), and memcpy of as many bytes. Needs neither a GPU nor a
// model. `cargo xtask host --mask` puts it, as mask-fill, beside llama.cpp's programs.
//
//   mask-fill                    every case, one JSON object a line
//   mask-fill --samples CASE     a JSON list of what filling by ranges took, for `flashrt evidence series`
//
// Times are in ms, medians unless they are samples. The ways take turns, so that they share what else the machine does and find the
// caches as a forward pass leaves them: full of other things. `ratio` is ranges over memcpy. `threads` and `stream` are what
// host/mask chooses for the size; lines with "forced" say what other choices take.
#include "llama-kv-cache.cpp"

#include "mask_cases.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <vector>

namespace {

using llama_flashrt_mask::manner;

constexpr int samples = 15;

struct workload {
    const char * name;
    mask_case    c;
};

// `n_seq` sequences, each with its stream of cells: `depth` tokens in the cache and `n` that ask. The cache of a window keeps
// `kept` of those before and goes round.
mask_case decoder(const uint32_t n_seq, const llama_pos depth, const uint32_t n, const llama_pos kept) {
    mask_case c;
    const uint32_t used = std::min(depth, kept) + n;
    c.n_kv     = (used + 255)/256*256;
    c.n_stream = n_seq;
    c.cells.resize(n_seq);
    for (uint32_t s = 0; s < n_seq; ++s) {
        c.seq_to_stream[s] = s;
        c.cells[s].resize(c.n_kv);
        for (uint32_t i = 0; i < used; ++i) {
            const llama_pos  pos   = depth + n - used + i;
            const mask_token token = { pos, 0, 0, { (llama_seq_id) s } };
            c.put(s, kept < depth ? (i + used/3)%used : i, token);
            if (pos >= depth) {
                c.tokens.push_back(token);
            }
        }
    }
    return c;
}

// One cache for `n_seq` sequences that were filled in turn: `depth` tokens of each in the cache and `n` of each that ask.
mask_case unified(const uint32_t n_seq, const llama_pos depth, const uint32_t n) {
    mask_case c;
    c.n_kv = (n_seq*(depth + n) + 255)/256*256;
    c.cells.resize(1);
    c.cells[0].resize(c.n_kv);
    for (uint32_t i = 0; i < n_seq*(depth + n); ++i) {
        const mask_token token = { (llama_pos) (i/n_seq), 0, 0, { (llama_seq_id) (i%n_seq) } };
        c.put(0, i, token);
        if (token.pos >= depth) {
            c.tokens.push_back(token);
        }
    }
    return c;
}

struct times {
    std::vector<double> stock, ranges, copy;
    std::vector<std::vector<double>> forced; // by the choices asked for
};

times measure(const workload & w, const manner chosen, const std::vector<manner> & forced) {
    const size_t bytes  = w.c.n_bytes();
    const auto   buffer = [&](const int value) {
        void * data = aligned_alloc(4096, (bytes + 4095)/4096*4096);
        memset(data, value, bytes);
        return data;
    };
    void * stock  = buffer(1);
    void * ranges = buffer(2);
    void * from   = buffer(3);
    void * to     = buffer(4);

    // Small masks are filled many times for one sample.
    const int  repeats = std::max<int>(1, (1 << 20)/bytes);
    const auto sample  = [&](std::vector<double> & all, const std::function<void()> & run) {
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < repeats; ++i) {
            run();
        }
        all.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count()/repeats);
    };
    const auto fill = [&](const manner how) {
        if (const char * why = w.c.ranges(ranges, how)) {
            fprintf(stderr, "%s: declined: %s\n", w.name, why);
            exit(1);
        }
    };
    times t;
    t.forced.resize(forced.size());
    for (int i = 0; i < samples; ++i) {
        sample(t.stock, [&] { w.c.stock(stock); });
        sample(t.ranges, [&] { fill(chosen); });
        sample(t.copy, [&] { memcpy(to, from, bytes); });
        for (size_t f = 0; f < forced.size(); ++f) {
            sample(t.forced[f], [&] { fill(forced[f]); });
        }
    }
    if (memcmp(stock, ranges, bytes) != 0) {
        fprintf(stderr, "%s: the masks differ\n", w.name);
        exit(1);
    }
    for (void * data : { stock, ranges, from, to }) {
        free(data);
    }
    return t;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size()/2];
}

const char * yes_or_no(const bool value) {
    return value ? "true" : "false";
}

void report(const workload & w) {
    const manner              chosen = llama_flashrt_mask::manner_for(w.c.n_bytes());
    const std::vector<manner> forced = { { 1, false }, { 1, true }, { 2, true }, { 4, true } };

    const times t = measure(w, chosen, forced);
    printf("{\"case\": \"%s\", \"mbytes\": %.3f, \"stock_ms\": %.4f, \"ranges_ms\": %.4f, \"memcpy_ms\": %.4f, "
           "\"ratio\": %.2f, \"threads\": %u, \"stream\": %s}\n",
           w.name, w.c.n_bytes()/1e6, median(t.stock), median(t.ranges), median(t.copy), median(t.ranges)/median(t.copy),
           chosen.threads, yes_or_no(chosen.stream));
    for (size_t f = 0; f < forced.size(); ++f) {
        printf("{\"case\": \"%s\", \"forced\": {\"threads\": %u, \"stream\": %s}, \"ranges_ms\": %.4f}\n", w.name,
               forced[f].threads, yes_or_no(forced[f].stream), median(t.forced[f]));
    }
    fflush(stdout);
}

void print_samples(const workload & w) {
    const std::vector<double> ms = measure(w, llama_flashrt_mask::manner_for(w.c.n_bytes()), {}).ranges;
    for (size_t i = 0; i < ms.size(); ++i) {
        printf("%s%.6f", i == 0 ? "[" : ", ", ms[i]);
    }
    printf("]\n");
}

} // namespace

int main(int argc, char ** argv) {
    constexpr llama_pos all = INT_MAX/2;

    workload swa = { "SWA 1024, 2048 tokens at 64k", decoder(1, 65536, 2048, 1024) };
    swa.c.n_swa    = 1024;
    swa.c.swa_type = LLAMA_SWA_TYPE_STANDARD;

    workload alibi = { "ALiBi, 2048 tokens at 0", decoder(1, 0, 2048, all) };
    alibi.c.hparams.use_alibi = true;

    workload f32 = { "f32, 2048 tokens at 0", decoder(1, 0, 2048, all) };
    f32.c.f16 = false;

    const workload workloads[] = {
        { "2048 tokens at 0", decoder(1, 0, 2048, all) },
        { "512 tokens at 0", decoder(1, 0, 512, all) },
        { "2048 tokens at 64k", decoder(1, 65536, 2048, all) },
        swa,
        { "4 streams, 512 tokens each at 16k", decoder(4, 16384, 512, all) },
        { "1 token at 0", decoder(1, 0, 1, all) },
        { "1 token at 4k", decoder(1, 4096, 1, all) },
        { "1 token at 64k", decoder(1, 65536, 1, all) },
        { "4 tokens at 64k", decoder(1, 65536, 4, all) },
        { "1 token of each of 4 sequences at 16k, unified", unified(4, 16384, 1) },
        { "512 tokens of each of 4 sequences at 16k, unified", unified(4, 16384, 512) },
        f32,
        alibi,
    };
    if (argc == 1) {
        std::for_each(std::begin(workloads), std::end(workloads), report);
        return 0;
    }
    if (argc == 3 && strcmp(argv[1], "--samples") == 0) {
        const auto named = [&](const workload & w) { return strcmp(w.name, argv[2]) == 0; };
        const workload * w = std::find_if(std::begin(workloads), std::end(workloads), named);
        if (w != std::end(workloads)) {
            print_samples(*w);
            return 0;
        }
    }
    fprintf(stderr, "arguments: none, or --samples CASE. The cases:\n");
    for (const workload & w : workloads) {
        fprintf(stderr, "  %s\n", w.name);
    }
    return 1;
}
