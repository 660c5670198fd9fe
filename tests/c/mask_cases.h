// SPDX-License-Identifier: Apache-2.0
// KV caches and ubatches for tests/c/mask.cpp and bench/mask_fill.cpp. Include it after the patched llama-kv-cache.cpp, whose
// static functions and types it uses: both ways to fill a mask are then in one program.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

// What a token is: its position, where it stands in an image, and its sequences.
struct mask_token {
    llama_pos                 pos;
    llama_pos                 y    = 0;
    llama_pos                 x    = 0;
    std::vector<llama_seq_id> seqs = { 0 };
};

// A cache, the tokens that ask, and all that a mask depends on.
struct mask_case {
    llama_hparams               hparams;
    std::vector<llama_kv_cells> cells;
    std::vector<uint32_t>       seq_to_stream = std::vector<uint32_t>(LLAMA_MAX_SEQ, 0);

    uint32_t       n_swa    = 0;
    llama_swa_type swa_type = LLAMA_SWA_TYPE_NONE;
    int64_t        n_kv     = 0;
    int64_t        n_stream = 1; // of the ubatch
    bool           causal   = true;
    bool           is_2d    = false;
    bool           f16      = true;

    std::vector<mask_token> tokens;

    // Puts a token into an empty cell.
    void put(const uint32_t stream, const uint32_t cell, const mask_token & token) {
        llama_kv_cells & c = cells[stream];
        c.pos_set(cell, token.pos);
        llama_kv_cell_ext ext;
        ext.x = token.x;
        ext.y = token.y;
        c.ext_set(cell, ext);
        for (const llama_seq_id seq : token.seqs) {
            c.seq_add(cell, seq);
        }
    }

    size_t n_values() const { return n_kv*tokens.size(); }

    size_t n_bytes() const { return n_values()*(f16 ? sizeof(ggml_fp16_t) : sizeof(float)); }

    // Calls `use` with the arguments of both ways.
    template <typename F>
    auto with_args(F && use) const {
        const uint32_t n     = tokens.size();
        const uint32_t n_pos = is_2d ? 4 : 1;

        std::vector<llama_pos>      pos(n*n_pos);
        std::vector<int32_t>        n_seq_id(n);
        std::vector<llama_seq_id *> seq_id(n);
        for (uint32_t i = 0; i < n; ++i) {
            pos[i] = tokens[i].pos;
            if (is_2d) {
                pos[i + n]   = tokens[i].y;
                pos[i + n*2] = tokens[i].x;
            }
            n_seq_id[i] = tokens[i].seqs.size();
            seq_id[i]   = const_cast<llama_seq_id *>(tokens[i].seqs.data());
        }
        llama_ubatch ubatch = {};
        ubatch.n_tokens     = n;
        ubatch.n_pos        = n_pos;
        ubatch.pos          = pos.data();
        ubatch.n_seq_id     = n_seq_id.data();
        ubatch.seq_id       = seq_id.data();

        const args_set_input_kq_mask args = { hparams, &ubatch, cells, seq_to_stream, n_swa, swa_type, n_kv, n_stream, n/n_stream };
        return use(args);
    }

    // llama.cpp's own way.
    void stock(void * data) const {
        with_args([&](const args_set_input_kq_mask & args) {
            if (f16) {
                set_input_kq_mask_impl<ggml_fp16_t>(args, (ggml_fp16_t *) data, causal);
            } else {
                set_input_kq_mask_impl<float>(args, (float *) data, causal);
            }
        });
    }

    // By ranges; a reason if it declines.
    const char * ranges(void * data, const llama_flashrt_mask::manner how) const {
        return with_args([&](const args_set_input_kq_mask & args) {
            return f16 ? llama_flashrt_mask::filler<ggml_fp16_t>(args, (ggml_fp16_t *) data, causal).fill(how)
                       : llama_flashrt_mask::filler<float>(args, (float *) data, causal).fill(how);
        });
    }
};
