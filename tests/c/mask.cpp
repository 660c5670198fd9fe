// SPDX-License-Identifier: Apache-2.0
// The attention mask by ranges (host/mask) against llama.cpp's own, bit for bit. Both are in this program: it includes the patched
// llama-kv-cache.cpp, whose own functions are as they were.
//
//   mask cases SEED N        random caches and ubatches; then faults, each of which some case must show
//   mask model FILE.gguf     what a model computes, as a digest of all logits: with GGML_FLASHRT_NO_MASK_FILL=1 and without it
//                            must be the same. The program's set_input_kq_mask stands before libllama's
#include "llama-kv-cache.cpp"

#include "mask_cases.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>

// How many more threads can be started. Stands before the system's function of this name.
static std::atomic<int> threads_left = INT_MAX;

extern "C" int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*start)(void *), void * arg) {
    using function = int (*)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);
    static const function system = (function) dlsym(RTLD_NEXT, "pthread_create");
    return threads_left-- > 0 ? system(thread, attr, start, arg) : EAGAIN;
}

namespace {

using llama_flashrt_mask::manner;

[[noreturn]] void fail(const std::string & what) {
    fprintf(stderr, "mask: %s\n", what.c_str());
    exit(1);
}

std::mt19937 rng;

// One of [low, high].
int32_t pick(const int32_t low, const int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

bool chance(const int percent) {
    return pick(1, 100) <= percent;
}

// What a case has in it, so that a generator that no longer makes something is noticed.
using features = std::set<std::string>;

struct sample {
    mask_case c;
    manner    how;
    int       threads_left = INT_MAX; // that the system gives
    features  has;
};

// Puts a token of `seqs` into a random empty cell, or the first from `from` on; false if the cache is full.
bool place(mask_case & c, const mask_token & token, const bool anywhere, uint32_t & from) {
    llama_kv_cells & cells = c.cells[c.seq_to_stream[token.seqs[0]]];
    if (cells.get_used() == cells.size()) {
        return false;
    }
    if (anywhere) {
        from = pick(0, cells.size() - 1);
    }
    while (!cells.is_empty(from %= cells.size())) {
        ++from;
    }
    c.put(c.seq_to_stream[token.seqs[0]], from++, token);
    return true;
}

// A sequence's next tokens: text, or with M-RoPE an image, all of whose tokens have one position.
std::vector<mask_token> next_tokens(const mask_case & c, const llama_seq_id seq, llama_pos & pos, const uint32_t n, features & has) {
    std::vector<mask_token> tokens;
    if (c.is_2d && chance(50)) {
        const llama_pos width = pick(1, 6);
        for (uint32_t i = 0; i < n; ++i) {
            tokens.push_back({ pos, pos + (llama_pos) i/width, pos + (llama_pos) i%width, { seq } });
        }
        if (chance(20)) {
            std::shuffle(tokens.begin(), tokens.end(), rng);
        }
        pos += std::max<llama_pos>(width, n/width + 1);
        has.insert("image");
        return tokens;
    }
    for (uint32_t i = 0; i < n; ++i) {
        tokens.push_back({ pos, pos, pos, { seq } });
        pos += chance(2) ? pick(2, 9) : 1;
    }
    return tokens;
}

// A cache with a past: sequences that took turns, were copied, cut, shifted and divided; then the tokens that ask.
sample random_sample() {
    sample s;
    mask_case & c = s.c;
    features & has = s.has;

    const bool     split  = chance(40);
    const uint32_t n_seq  = chance(40) ? 1 : pick(2, 6);
    const uint32_t size   = chance(10) ? pick(300, 1500) : pick(1, 300);
    c.cells.resize(split ? n_seq : 1);
    for (llama_kv_cells & cells : c.cells) {
        cells.resize(size);
    }
    for (uint32_t seq = 0; split && seq < n_seq; ++seq) {
        c.seq_to_stream[seq] = seq;
    }
    has.insert(split && n_seq > 1 ? "streams" : n_seq > 1 ? "sequences of one stream" : "one sequence");

    c.causal   = chance(70);
    c.f16      = chance(70);
    c.is_2d    = chance(30);
    c.swa_type = (llama_swa_type) (chance(30) ? 0 : pick(1, 3));
    c.n_swa    = c.swa_type == LLAMA_SWA_TYPE_NONE && chance(80) ? 0 : chance(20) ? pick(1, 3) : pick(1, 200);
    c.hparams.use_alibi       = chance(20);
    c.hparams.non_causal_type = (llama_non_causal_type) pick(0, 2);
    has.insert(std::string(c.causal ? "causal" : "not causal") + ", window " + std::to_string(c.swa_type));
    has.insert(std::string(c.f16 ? "f16" : "f32") + (c.hparams.use_alibi ? ", ALiBi" : ""));
    if (c.is_2d) {
        has.insert(c.hparams.use_alibi ? "M-RoPE, ALiBi" : c.causal ? "M-RoPE, causal" : "M-RoPE, not causal");
    }
    if (!c.causal && c.swa_type != LLAMA_SWA_TYPE_NONE && c.hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_FULL) {
        has.insert("all of the ubatch, not causal, window " + std::to_string(c.swa_type));
    }

    // The past.
    std::vector<llama_pos> pos(n_seq);
    std::vector<uint32_t>  head(c.cells.size());
    for (llama_pos & p : pos) {
        p = chance(20) ? pick(0, 5000) : 0;
    }
    const bool scattered = chance(15);
    for (int turn = pick(0, 12); turn > 0; --turn) {
        const llama_seq_id seq    = pick(0, n_seq - 1);
        const uint32_t     stream = c.seq_to_stream[seq];
        llama_kv_cells &   cells  = c.cells[stream];
        const int          what   = pick(0, 9);
        if (what < 6) {
            for (mask_token token : next_tokens(c, seq, pos[seq], pick(1, 1 + size/4), has)) {
                if (!split && n_seq > 1 && chance(3)) {
                    token.seqs.push_back((seq + 1)%n_seq);
                    has.insert("token of two sequences");
                }
                place(c, token, scattered, head[stream]);
            }
            if (scattered) {
                has.insert("scattered cells");
            }
            continue;
        }
        const uint32_t  begin = pick(0, size - 1);
        const uint32_t  end   = pick(begin, size);
        const llama_pos by    = pick(-20, 20);
        for (uint32_t j = begin; j < end; ++j) {
            if (cells.is_empty(j) || !cells.seq_has(j, seq)) {
                continue;
            }
            switch (what) {
                case 6:
                    cells.seq_rm(j, seq);
                    has.insert("hole");
                    break;
                case 7:
                    if (!split && n_seq > 1 && !cells.seq_has(j, (seq + 1)%n_seq)) {
                        cells.seq_add(j, (seq + 1)%n_seq);
                        has.insert("copied sequence");
                    }
                    break;
                case 8:
                    cells.pos_add(j, by);
                    has.insert("shift");
                    break;
                case 9:
                    cells.pos_div(j, 2);
                    has.insert("division");
                    break;
            }
        }
    }

    // The tokens that ask: mostly the next of their sequences, in cells of their own.
    const uint32_t n = chance(25) ? 1 : chance(10) ? pick(100, 300) : pick(1, 40);
    if (split) {
        std::vector<llama_seq_id> seqs(n_seq);
        for (uint32_t seq = 0; seq < n_seq; ++seq) {
            seqs[seq] = seq;
        }
        std::shuffle(seqs.begin(), seqs.end(), rng);
        c.n_stream = pick(1, n_seq);
        for (uint32_t k = 0; k < c.n_stream; ++k) {
            const auto tokens = next_tokens(c, seqs[k], pos[seqs[k]], n, has);
            c.tokens.insert(c.tokens.end(), tokens.begin(), tokens.end());
        }
    } else {
        for (uint32_t left = n; left > 0;) {
            const llama_seq_id seq  = pick(0, n_seq - 1);
            const uint32_t     some = chance(30) ? 1 : pick(1, left);
            for (mask_token & token : next_tokens(c, seq, pos[seq], some, has)) {
                if (n_seq > 1 && chance(5)) {
                    token.seqs.push_back((seq + 1)%n_seq);
                }
                c.tokens.push_back(token);
            }
            left -= some;
        }
    }
    if (chance(10)) {
        std::shuffle(c.tokens.begin(), c.tokens.end(), rng);
        if (split) { // a stream's tokens are of its sequence
            std::stable_sort(c.tokens.begin(), c.tokens.end(), [](const mask_token & a, const mask_token & b) { return a.seqs[0] < b.seqs[0]; });
        }
        has.insert("tokens in any order");
    }
    if (chance(10)) {
        for (mask_token & token : c.tokens) {
            token.pos = pick(0, 400);
        }
        has.insert("tokens at any position");
    }
    for (const mask_token & token : c.tokens) {
        if (!place(c, token, scattered, head[c.seq_to_stream[token.seqs[0]]])) {
            has.insert("full cache");
        }
    }
    if (chance(5)) { // far apart: no table of distances
        llama_kv_cells & cells = c.cells[0];
        if (!cells.is_empty(0)) {
            cells.pos_add(0, 1 << 20);
            has.insert(c.hparams.use_alibi ? "far apart, ALiBi" : "far apart");
        }
    }

    c.n_kv = chance(50) ? size : pick(1, size);
    if (chance(60) && c.n_kv >= 32) { // as llama.cpp pads it
        c.n_kv -= c.n_kv%32;
    }
    has.insert(c.n_kv%32 == 0 ? "padded rows" : "odd rows");
    s.how = { chance(70) ? 1u : (unsigned) pick(2, 5), chance(50) };
    has.insert(c.tokens.size() == 1 ? "one token" : "tokens");
    has.insert(s.how.threads == 1 ? "one thread" : "threads");
    if (s.how.threads > 2 && chance(20)) {
        s.threads_left = 1;
        has.insert("too few threads");
    }
    if (s.how.stream && c.n_bytes()/c.tokens.size()%64 == 0) {
        has.insert("stream");
    }
    return s;
}

// Calls `fill` on memory that holds something else, between guards; what it made of them.
std::vector<uint8_t> filled(const mask_case & c, const std::function<void(void *)> & fill) {
    constexpr size_t guard = 256;
    const size_t     bytes = c.n_bytes();

    std::vector<uint8_t> memory(bytes + 2*guard + 64, 0xa5);
    // As tensors lie: on 32 bytes, not always on more.
    uint8_t * data = memory.data() + guard;
    data += (32 - (uintptr_t) data%64 + 64)%64;
    fill(data);
    const size_t offset = data - memory.data();
    for (size_t i = 0; i < memory.size(); ++i) {
        if ((i < offset || i >= offset + bytes) && memory[i] != 0xa5) {
            fail("wrote outside the mask");
        }
    }
    return { data, data + bytes };
}

std::vector<uint8_t> stock_mask(const mask_case & c) {
    return filled(c, [&](void * data) { c.stock(data); });
}

std::vector<uint8_t> ranges_mask(const mask_case & c, const manner how) {
    return filled(c, [&](void * data) {
        if (const char * why = c.ranges(data, how)) {
            fail(std::string("declined: ") + why);
        }
    });
}

// Each changes what the ranges are made from, as a rule misread would; false if the case has nothing to change.
const std::vector<std::pair<const char *, std::function<bool(mask_case &)>>> faults = {
    { "the future is seen", [](mask_case & c) { return std::exchange(c.causal, false); } },
    { "the present is not seen", [](mask_case & c) {
        for (mask_token & token : c.tokens) {
            token.pos = std::max(token.pos - 1, 0);
        }
        return c.causal;
    } },
    { "a window one too wide", [](mask_case & c) { ++c.n_swa; return c.swa_type == LLAMA_SWA_TYPE_STANDARD; } },
    { "a window one too narrow", [](mask_case & c) { return c.swa_type == LLAMA_SWA_TYPE_STANDARD && c.n_swa-- > 1; } },
    { "chunks one too long", [](mask_case & c) { ++c.n_swa; return c.swa_type == LLAMA_SWA_TYPE_CHUNKED; } },
    { "a symmetric window two too wide", [](mask_case & c) { c.n_swa += 2; return c.swa_type == LLAMA_SWA_TYPE_SYMMETRIC; } },
    { "chunks for a window", [](mask_case & c) {
        return std::exchange(c.swa_type, LLAMA_SWA_TYPE_STANDARD) == LLAMA_SWA_TYPE_CHUNKED;
    } },
    { "no window", [](mask_case & c) { return std::exchange(c.swa_type, LLAMA_SWA_TYPE_NONE) != LLAMA_SWA_TYPE_NONE; } },
    { "a window inside the ubatch", [](mask_case & c) {
        return !c.causal && std::exchange(c.hparams.non_causal_type, LLAMA_NON_CAUSAL_TYPE_ALL) == LLAMA_NON_CAUSAL_TYPE_SWA_FULL;
    } },
    { "images are read at once", [](mask_case & c) { return std::exchange(c.is_2d, false); } },
    { "rows and columns exchanged", [](mask_case & c) {
        for (mask_token & token : c.tokens) {
            std::swap(token.x, token.y);
        }
        return c.is_2d;
    } },
    { "no distances", [](mask_case & c) { return std::exchange(c.hparams.use_alibi, false); } },
    { "another sequence's cell is seen", [](mask_case & c) {
        for (uint32_t j = 0; j < c.n_kv; ++j) {
            if (!c.cells[0].is_empty(j) && !c.cells[0].seq_has(j, c.tokens[0].seqs[0])) {
                c.cells[0].seq_add(j, c.tokens[0].seqs[0]);
                return true;
            }
        }
        return false;
    } },
    { "a cell is not seen", [](mask_case & c) {
        const llama_seq_id seq   = c.tokens[0].seqs[0];
        llama_kv_cells &   cells = c.cells[c.seq_to_stream[seq]];
        for (uint32_t j = 0; j < c.n_kv; ++j) {
            if (!cells.is_empty(j) && cells.seq_has(j, seq)) {
                cells.seq_rm(j, seq);
                return true;
            }
        }
        return false;
    } },
    { "another stream", [](mask_case & c) {
        std::rotate(c.seq_to_stream.begin(), c.seq_to_stream.begin() + 1, c.seq_to_stream.begin() + c.cells.size());
        return c.cells.size() > 1;
    } },
    { "two tokens exchanged", [](mask_case & c) {
        std::swap(c.tokens.front(), c.tokens.back());
        return c.tokens.size() > 1;
    } },
};

// What no cache of llama.cpp holds is left to llama.cpp.
void unusual_is_declined() {
    const manner how = { 1, false };
    mask_case usual;
    usual.cells.resize(1);
    usual.cells[0].resize(64);
    usual.n_kv   = 64;
    usual.tokens = { { 3 }, { 4 } };
    usual.put(0, 0, { 3 });

    std::vector<float> data(usual.n_values());
    const auto declines = [&](const char * what, const std::function<void(mask_case &)> & change) {
        mask_case c = usual;
        change(c);
        if (c.ranges(data.data(), how) == nullptr) {
            fail(std::string("did not decline ") + what);
        }
    };
    if (usual.ranges(data.data(), how) != nullptr) {
        fail("declined the usual");
    }
    declines("chunks of nothing", [](mask_case & c) { c.swa_type = LLAMA_SWA_TYPE_CHUNKED; });
    declines("a huge window", [](mask_case & c) { c.n_swa = 1u << 31; });
    declines("a token before the start", [](mask_case & c) { c.tokens[1].pos = -1; });
    declines("a token at the end of time", [](mask_case & c) { c.tokens[1].pos = INT_MAX; });
    declines("a cell at the end of time", [](mask_case & c) { c.put(0, 9, { INT_MAX }); });
    declines("a row longer than the cache", [](mask_case & c) { c.cells[0].resize(32); });
}

void cases(const uint32_t seed, const int n) {
    std::map<std::string, int> seen;
    std::map<std::string, std::pair<int, int>> caught; // of those planted
    for (int i = 0; i < n; ++i) {
        rng.seed(seed + i);
        const sample s     = random_sample();
        const auto   stock = stock_mask(s.c);
        threads_left = s.threads_left;
        if (ranges_mask(s.c, s.how) != stock) {
            fail("differs: mask cases " + std::to_string(seed + i) + " 1");
        }
        threads_left = INT_MAX;
        for (const std::string & feature : s.has) {
            ++seen[feature];
        }
        for (const auto & [what, plant] : faults) {
            mask_case c = s.c;
            if (plant(c)) {
                ++caught[what].second;
                caught[what].first += ranges_mask(c, s.how) != stock;
            }
        }
    }
    unusual_is_declined();
    printf("%d cases are equal\n", n);
    for (const auto & [feature, count] : seen) {
        printf("%7d with %s\n", count, feature.c_str());
    }
    for (const auto & [what, plant] : faults) {
        const auto [shown, planted] = caught[what];
        printf("%7d of %d show the fault: %s\n", shown, planted, what);
        if (n >= 10000 && shown == 0) {
            fail("a fault is not noticed");
        }
    }
    // Counted once, over many cases.
    constexpr size_t kinds = 41;
    if (n >= 10000 && seen.size() < kinds) {
        fail("the cases no longer have all that they had");
    }
}

bool said;

void listen(ggml_log_level level, const char * text, void *) {
    said = said || strstr(text, "attention masks are filled by ranges") != nullptr;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

// Two sequences: a long prompt in several ubatches, tokens one by one, a cut and a shift; in one cache or in two.
uint64_t digest(llama_model * model, const bool unified) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx      = 2048;
    params.n_batch    = 1024;
    params.n_ubatch   = 256;
    params.n_seq_max  = 2;
    params.kv_unified = unified;
    params.n_threads  = params.n_threads_batch = 2;
    // Masks in f16, then in f32; a full cache for windows, then one of the window's size.
    params.flash_attn_type = unified ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.swa_full        = unified;
    llama_context * context = llama_init_from_model(model, params);
    if (context == nullptr) {
        fail("no context");
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));

    uint64_t hash = 0xcbf29ce484222325;
    std::vector<llama_pos> pos(2);
    llama_batch batch = llama_batch_init(1024, 0, 1);
    const auto add = [&](const llama_seq_id seq, const int n) {
        for (int i = 0; i < n; ++i) {
            const int32_t k = batch.n_tokens++;
            batch.token[k]     = pick(10, 20000);
            batch.pos[k]       = pos[seq]++;
            batch.n_seq_id[k]  = 1;
            batch.seq_id[k][0] = seq;
            batch.logits[k]    = i >= n - 4;
        }
    };
    const auto decode = [&] {
        if (llama_decode(context, batch) != 0) {
            fail("llama_decode");
        }
        for (int32_t k = 0; k < batch.n_tokens; ++k) {
            if (batch.logits[k]) {
                const uint32_t * logits = (const uint32_t *) llama_get_logits_ith(context, k);
                for (int32_t v = 0; v < n_vocab; ++v) {
                    hash = (hash ^ logits[v])*0x100000001b3;
                }
            }
        }
        batch.n_tokens = 0;
    };
    rng.seed(7);
    add(0, 620);
    decode();
    add(1, 90);
    add(0, 40);
    decode();
    for (int i = 0; i < 4; ++i) {
        add(0, 1);
        add(1, 1 + i%2);
        decode();
    }
    llama_memory_t memory = llama_get_memory(context);
    if (!llama_memory_seq_rm(memory, 1, 60, -1)) {
        fail("llama_memory_seq_rm");
    }
    pos[1] = 60;
    if (llama_memory_can_shift(memory)) {
        llama_memory_seq_rm(memory, 1, 0, 20);
        llama_memory_seq_add(memory, 1, 20, -1, -20);
        pos[1] = 40;
    }
    add(1, 100);
    add(0, 1);
    decode();
    llama_batch_free(batch);
    llama_free(context);
    return hash;
}

void model(const char * path) {
    llama_log_set(listen, nullptr);
    ggml_backend_load_all();
    llama_model * model = llama_model_load_from_file(path, llama_model_default_params());
    if (model == nullptr) {
        fail(std::string("cannot load ") + path);
    }
    const unsigned long long one_cache = digest(model, true);
    const unsigned long long two       = digest(model, false);
    printf("%016llx %016llx; %s\n", one_cache, two, said ? "by ranges" : "stock");
    llama_model_free(model);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 4 && strcmp(argv[1], "cases") == 0) {
        cases(strtoul(argv[2], nullptr, 10), atoi(argv[3]));
    } else if (argc == 3 && strcmp(argv[1], "model") == 0) {
        model(argv[2]);
    } else {
        fail("arguments: cases SEED N, or model FILE.gguf");
    }
}
