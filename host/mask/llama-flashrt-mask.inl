// SPDX-License-Identifier: Apache-2.0
// Fills the attention mask by ranges of positions. llama-kv-cache.cpp includes this after args_set_input_kq_mask; the result is,
// bit for bit, that of set_input_kq_mask_impl, which decides cell by cell and which runs where this declines.
//
// A mask has a row of n_kv cells for each token: 0 where the token sees the cell (with ALiBi minus the distance), else -inf. Which
// cells of its sequence a token sees is one range in their order by position: causality ends it, a sliding window begins it. So
// the rows of a sequence differ only in the cells where their ranges begin and end. Those are sorted once; a row is then the one
// before it, with the few cells changed that a binary search finds.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace llama_flashrt_mask {

// How the rows are stored.
struct manner {
    unsigned threads;
    bool     stream; // past the caches
};

// Where a cell or a token stands: in time, and with M-RoPE within an image by row and column.
struct place {
    llama_pos pos;
    llama_pos y;
    llama_pos x;

    bool operator<(const place & other) const {
        return pos != other.pos ? pos < other.pos : y != other.y ? y < other.y : x < other.x;
    }
};

// What a token sees: cells from a position on, up to and including a place.
struct range {
    llama_pos first;
    place     last;
};

// Beyond these, sums of positions and windows might leave 32 bits.
constexpr llama_pos max_pos = 1 << 29;
constexpr uint32_t  max_swa = 1 << 29;

// From this size on, in bytes, a mask would only push other things out of the caches.
constexpr size_t stream_from = size_t(4) << 20;
// One thread is faster than memcpy, but not as fast as the memory of a server. Bytes that are worth starting one more.
constexpr size_t   bytes_per_thread = size_t(64) << 20;
constexpr unsigned max_threads      = 4;

// Cells [cell, cell + n) hold the positions [pos, pos + n).
struct run {
    uint32_t  cell;
    uint32_t  n;
    llama_pos pos;
};

// The tokens of one sequence, and what all of them need to know.
template <typename T>
struct group {
    const llama_kv_cells * cells = nullptr;
    llama_seq_id           seq   = -1;
    bool                   alone = false; // no cell in use is without this sequence

    std::vector<uint32_t> tokens;
    llama_pos             pos_min = INT_MAX; // of the tokens
    llama_pos             pos_max = 0;

    // Where ranges of the tokens begin or end: cells that one token may see and another not, in the order of their places. All
    // other cells are the same in all rows.
    std::vector<std::pair<place, uint32_t>> edges;

    // ALiBi: the sequence's cells, and the value for each distance from slopes_from on.
    std::vector<run> runs;
    std::vector<T>   slopes;
    llama_pos        slopes_from = 0;
};

template <typename T>
class filler {
public:
    filler(const args_set_input_kq_mask & args, T * data, bool causal) :
        ubatch(*args.ubatch), args(args), data(data), n_kv(args.n_kv), causal(causal), alibi(args.hparams.use_alibi),
        is_2d(ubatch.is_pos_2d()), keep(llama_cast<T>(0.0f)), drop(llama_cast<T>(-INFINITY)) {}

    // Writes the mask, or says why not. Whatever it wrote before that is of no use.
    const char * fill(const manner how) {
        if (const char * why = plan()) {
            return why;
        }
        const unsigned n = std::max(1u, std::min(how.threads, ubatch.n_tokens));

        std::vector<std::vector<T>> rows(n, std::vector<T>(ubatch.n_tokens > groups.size() ? n_kv : 0));
        const auto part = [&](const unsigned i) {
            const uint64_t n_tokens = ubatch.n_tokens;
            fill_tokens(n_tokens*i/n, n_tokens*(i + 1)/n, rows[i].data(), how.stream);
        };
        std::vector<std::thread> threads;
        threads.reserve(n);
        unsigned started = 1;
        try {
            for (; started < n; ++started) {
                threads.emplace_back(part, started);
            }
        } catch (const std::system_error &) { // no more threads to be had
        }
        part(0);
        for (unsigned i = started; i < n; ++i) {
            part(i);
        }
        for (std::thread & thread : threads) {
            thread.join();
        }
        return nullptr;
    }

private:
    const llama_ubatch &           ubatch;
    const args_set_input_kq_mask & args;

    T * const      data;
    const uint32_t n_kv;
    const bool     causal;
    const bool     alibi;
    const bool     is_2d;
    const T        keep;
    const T        drop;

    std::vector<group<T>> groups;

    // Puts the tokens into groups and finds what their rows are made from.
    const char * plan() {
        if (args.n_swa > max_swa || (args.n_swa == 0 && args.swa_type == LLAMA_SWA_TYPE_CHUNKED)) {
            return "an unusual window";
        }
        switch (args.swa_type) {
            case LLAMA_SWA_TYPE_NONE:
            case LLAMA_SWA_TYPE_STANDARD:
            case LLAMA_SWA_TYPE_CHUNKED:
            case LLAMA_SWA_TYPE_SYMMETRIC: break;
            default:                       return "an unknown kind of window"; // of a llama.cpp newer than this
        }
        std::vector<int> group_of(LLAMA_MAX_SEQ, -1);
        for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
            const llama_seq_id seq = ubatch.seq_id[i][0];
            const llama_pos    pos = ubatch.pos[i];
            if (pos < 0 || pos > max_pos) {
                return "an unusual position";
            }
            if (group_of[seq] < 0) {
                const llama_kv_cells & cells = args.v_cells[args.seq_to_stream[seq]];
                if (n_kv > cells.size() || cells.seq_pos_max(seq) > max_pos) {
                    return "an unusual position";
                }
                group_of[seq] = groups.size();
                groups.emplace_back();
                groups.back().cells = &cells;
                groups.back().seq   = seq;
                groups.back().alone = cells.seq_pos_get(seq).size() == cells.get_used();
            }
            group<T> & g = groups[group_of[seq]];
            g.tokens.push_back(i);
            g.pos_min = std::min(g.pos_min, pos);
            g.pos_max = std::max(g.pos_max, pos);
        }
        for (group<T> & g : groups) {
            if (g.tokens.size() > 1) {
                alibi ? find_slopes(g) : find_edges(g);
            }
        }
        return nullptr;
    }

    // Does the sequence have this cell, which is in use?
    bool has(const group<T> & g, const uint32_t cell) const {
        return g.alone || g.cells->seq_has(cell, g.seq);
    }

    // -1 if the cell is empty
    static llama_pos pos_of(const llama_kv_cells & cells, const uint32_t cell) {
        return cells.is_empty(cell) ? -1 : cells.pos_get(cell);
    }

    place place_of(const llama_kv_cells & cells, const uint32_t cell) const {
        if (!is_2d) {
            return { cells.pos_get(cell), 0, 0 };
        }
        const llama_kv_cell_ext & ext = cells.ext_get(cell);
        return { cells.pos_get(cell), ext.y, ext.x };
    }

    range seen_by(const group<T> & g, const uint32_t token) const {
        const llama_pos pos   = ubatch.pos[token];
        const llama_pos n_swa = args.n_swa;

        llama_pos first = 0;
        llama_pos last  = INT_MAX;
        switch (args.swa_type) {
            case LLAMA_SWA_TYPE_NONE:                                                          break;
            case LLAMA_SWA_TYPE_STANDARD:  first = pos - n_swa + 1;                            break;
            case LLAMA_SWA_TYPE_CHUNKED:   first = pos/n_swa*n_swa;                            break;
            case LLAMA_SWA_TYPE_SYMMETRIC: first = pos - n_swa/2;      last = pos + n_swa/2;   break;
        }
        if (!causal && args.hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_FULL) {
            // And all from the first token of the ubatch on: still one range, because the window reaches that far.
            first = std::min(first, g.pos_min);
            last  = INT_MAX;
        }
        first = std::max(first, 0);
        if (!causal) {
            return { first, { last, INT_MAX, INT_MAX } };
        }
        if (!is_2d) {
            return { first, { pos, INT_MAX, INT_MAX } };
        }
        return { first, { pos, ubatch.pos[token + ubatch.n_tokens], ubatch.pos[token + ubatch.n_tokens*2] } };
    }

    void find_edges(group<T> & g) const {
        llama_pos first_min = INT_MAX, first_max = 0;
        llama_pos last_min  = INT_MAX, last_max  = 0;
        for (const uint32_t token : g.tokens) {
            const range seen = seen_by(g, token);
            first_min = std::min(first_min, seen.first);
            first_max = std::max(first_max, seen.first);
            last_min  = std::min(last_min, seen.last.pos);
            last_max  = std::max(last_max, seen.last.pos);
        }
        // Cells at last_min itself are seen by all tokens, but for those of an image (M-RoPE).
        const auto is_edge = [&](const uint32_t cell) {
            const llama_pos pos = pos_of(*g.cells, cell);
            return ((pos >= first_min) & (pos < first_max)) | ((pos >= last_min) & (pos <= last_max));
        };
        // Most blocks have no edge, and the compiler makes the search for one wide.
        constexpr uint32_t block = 64;
        for (uint32_t begin = 0; begin < n_kv; begin += block) {
            const uint32_t end = std::min(begin + block, n_kv);
            int any = 0;
            for (uint32_t j = begin; j < end; ++j) {
                any |= is_edge(j);
            }
            for (uint32_t j = begin; any && j < end; ++j) {
                if (is_edge(j) && has(g, j)) {
                    g.edges.emplace_back(place_of(*g.cells, j), j);
                }
            }
        }
        if (!std::is_sorted(g.edges.begin(), g.edges.end())) { // they are, but for shifted or reused cells
            std::sort(g.edges.begin(), g.edges.end());
        }
    }

    void find_slopes(group<T> & g) const {
        if (is_2d) { // no model has both: each row is decided
            return;
        }
        llama_pos pos_min = max_pos, pos_max = 0; // of the cells
        for (uint32_t j = 0; j < n_kv; ++j) {
            if (g.cells->is_empty(j) || !has(g, j)) {
                continue;
            }
            const llama_pos pos = g.cells->pos_get(j);
            run * last = g.runs.empty() ? nullptr : &g.runs.back();
            if (last != nullptr && last->cell + last->n == j && last->pos + (llama_pos) last->n == pos) {
                ++last->n;
            } else {
                g.runs.push_back({ j, 1, pos });
            }
            pos_min = std::min(pos_min, pos);
            pos_max = std::max(pos_max, pos);
        }
        if (g.runs.empty()) {
            return;
        }
        g.slopes_from       = pos_min - g.pos_max;
        const llama_pos end = pos_max - g.pos_min + 1;
        // Positions may be scattered over more than a table of them is worth.
        if (end - g.slopes_from > 4*(llama_pos) (n_kv + ubatch.n_tokens)) {
            return;
        }
        g.slopes.reserve(end - g.slopes_from);
        for (llama_pos d = g.slopes_from; d < end; ++d) {
            g.slopes.push_back(llama_cast<T>((float) -std::abs(d)));
        }
    }

    // Rows of the tokens [first, last), counted through all groups. `row` is where a row is prepared.
    void fill_tokens(size_t first, size_t last, T * row, const bool stream) const {
        for (const group<T> & g : groups) {
            const size_t n   = g.tokens.size();
            const size_t end = std::min(last, n);
            if (first < end) {
                fill_group(g, first, end, row, stream);
            }
            first = first > n ? first - n : 0;
            last  = last > n ? last - n : 0;
        }
#if defined(__SSE2__)
        _mm_sfence();
#endif
    }

    void fill_group(const group<T> & g, const size_t begin, const size_t end, T * row, const bool stream) const {
        if (alibi || end - begin == 1) {
            for (size_t k = begin; k < end; ++k) {
                const uint32_t token = g.tokens[k];
                T * dst = data + (uint64_t) n_kv*token;
                if (g.slopes.empty()) {
                    decide(g, token, dst);
                } else {
                    copy_slopes(g, token, dst);
                }
            }
            return;
        }
        decide(g, g.tokens[begin], row);
        auto shown = edges_seen(g, g.tokens[begin]);
        store(data + (uint64_t) n_kv*g.tokens[begin], row, stream);
        for (size_t k = begin + 1; k < end; ++k) {
            const auto seen = edges_seen(g, g.tokens[k]);
            set(g, shown.first, std::min(shown.second, seen.first), row, drop);
            set(g, std::max(shown.first, seen.second), shown.second, row, drop);
            set(g, seen.first, std::min(seen.second, shown.first), row, keep);
            set(g, std::max(seen.first, shown.second), seen.second, row, keep);
            shown = seen;
            store(data + (uint64_t) n_kv*g.tokens[k], row, stream);
        }
    }

    // One row cell by cell.
    void decide(const group<T> & g, const uint32_t token, T * row) const {
        const llama_kv_cells & cells = *g.cells;

        const range     seen = seen_by(g, token);
        const llama_pos last = seen.last.pos;
        // A pass for each question: the first is the only one of most rows, and the compiler makes it wide.
        for (uint32_t j = 0; j < n_kv; ++j) {
            const llama_pos pos = pos_of(cells, j);
            row[j] = (pos >= seen.first) & (pos <= last) ? keep : drop;
        }
        if (!g.alone) {
            for (uint32_t j = 0; j < n_kv; ++j) {
                if (row[j] == keep && !cells.seq_has(j, g.seq)) {
                    row[j] = drop;
                }
            }
        }
        if (is_2d && causal) {
            for (uint32_t j = 0; j < n_kv; ++j) {
                if (pos_of(cells, j) == last && seen.last < place_of(cells, j)) {
                    row[j] = drop;
                }
            }
        }
        if (alibi) {
            for (uint32_t j = 0; j < n_kv; ++j) {
                if (row[j] == keep) {
                    row[j] = llama_cast<T>((float) -std::abs(cells.pos_get(j) - ubatch.pos[token]));
                }
            }
        }
    }

    // Those of the group's edges that a token sees.
    std::pair<size_t, size_t> edges_seen(const group<T> & g, const uint32_t token) const {
        const range seen   = seen_by(g, token);
        const auto  before = [](const auto & edge, const llama_pos pos) { return edge.first.pos < pos; };
        const auto  after  = [](const place & last, const auto & edge) { return last < edge.first; };

        const auto first = std::lower_bound(g.edges.begin(), g.edges.end(), seen.first, before);
        const auto last  = std::upper_bound(first, g.edges.end(), seen.last, after);
        return { first - g.edges.begin(), last - g.edges.begin() };
    }

    static void set(const group<T> & g, const size_t begin, const size_t end, T * row, const T value) {
        for (size_t k = begin; k < end; ++k) {
            row[g.edges[k].second] = value;
        }
    }

    void copy_slopes(const group<T> & g, const uint32_t token, T * row) const {
        const range     seen = seen_by(g, token);
        const llama_pos pos  = ubatch.pos[token];

        uint32_t done = 0;
        for (const run & r : g.runs) {
            const llama_pos first = std::max(r.pos, seen.first);
            const llama_pos last  = std::min(r.pos + (llama_pos) r.n - 1, seen.last.pos);
            if (first > last) {
                continue;
            }
            const uint32_t begin = r.cell + (first - r.pos);
            const uint32_t end   = r.cell + (last - r.pos) + 1;
            std::fill(row + done, row + begin, drop);
            std::copy_n(g.slopes.begin() + (first - pos - g.slopes_from), end - begin, row + begin);
            done = end;
        }
        std::fill(row + done, row + n_kv, drop);
    }

    void store(T * dst, const T * row, const bool stream) const {
        const size_t bytes = n_kv*sizeof(T);
#if defined(__SSE2__)
        if (stream && bytes%64 == 0 && (uintptr_t) dst%16 == 0) {
            const __m128i * from = (const __m128i *) row;
            __m128i *       to   = (__m128i *) dst;
            for (size_t i = 0; i < bytes/16; i += 4) {
                const __m128i a = _mm_loadu_si128(from + i);
                const __m128i b = _mm_loadu_si128(from + i + 1);
                const __m128i c = _mm_loadu_si128(from + i + 2);
                const __m128i d = _mm_loadu_si128(from + i + 3);
                _mm_stream_si128(to + i, a);
                _mm_stream_si128(to + i + 1, b);
                _mm_stream_si128(to + i + 2, c);
                _mm_stream_si128(to + i + 3, d);
            }
            return;
        }
#endif
        GGML_UNUSED(stream);
        memcpy(dst, row, bytes);
    }
};

// Processors that this thread may run on.
static unsigned processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) {
        return CPU_COUNT(&set);
    }
#endif
    return std::thread::hardware_concurrency();
}

static manner manner_for(const size_t bytes) {
    const size_t threads = std::min<size_t>(bytes/bytes_per_thread, max_threads);
    return { threads > 1 ? std::min<unsigned>(threads, std::max(1u, processors())) : 1, bytes >= stream_from };
}

// True: the mask is written. False: nothing is, the host has to.
static bool fill(const args_set_input_kq_mask & args, ggml_tensor * dst, const bool causal) {
    static const bool off = [] {
        const char * value = getenv("GGML_FLASHRT_NO_MASK_FILL");
        return value != nullptr && strcmp(value, "0") != 0;
    }();
    if (off) {
        return false;
    }
    const manner how = manner_for(ggml_nbytes(dst));
    const char * why = dst->type == GGML_TYPE_F16
        ? filler<ggml_fp16_t>(args, (ggml_fp16_t *) dst->data, causal).fill(how)
        : filler<float>(args, (float *) dst->data, causal).fill(how);
    if (why == nullptr) {
        static const bool said = (LLAMA_LOG_INFO("flashrt: attention masks are filled by ranges of positions\n"), true);
        GGML_UNUSED(said);
    } else {
        static const bool said = (LLAMA_LOG_WARN("flashrt: some attention masks are left to llama.cpp: %s\n", why), true);
        GGML_UNUSED(said);
    }
    return why == nullptr;
}

} // namespace llama_flashrt_mask
