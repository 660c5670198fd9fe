// SPDX-License-Identifier: Apache-2.0
/*
 * Loads models one after another in one process, each freed before the next, and prints the tokens that each generates greedily
 * after the same few. For case B22 of bench/run_cases.py.
 *
 *   gcc -O2 bench/reload.c -I LLAMA/include -I LLAMA/ggml/include -o reload -L HOST -lllama -lggml -lggml-base -Wl,-rpath-link,HOST
 *   reload N MODEL.gguf...
 */
#include <stdio.h>
#include <stdlib.h>

#include "ggml-backend.h"
#include "llama.h"

static void quiet(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (level >= GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}

static int die(const char * what, const char * model) {
    fprintf(stderr, "reload: %s: %s\n", model, what);
    return 1;
}

static int generate(const char * path, int n) {
    struct llama_model_params model_params = llama_model_default_params();
    model_params.n_gpu_layers              = 99;

    struct llama_model * model = llama_model_load_from_file(path, model_params);
    if (model == NULL) {
        return die("cannot be loaded", path);
    }
    struct llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx                       = 512;
    struct llama_context * context             = llama_init_from_model(model, context_params);
    if (context == NULL) {
        return die("no context", path);
    }

    // Any tokens do, and every vocabulary has these.
    llama_token        prompt[] = {2, 17, 101, 42, 230, 5, 77, 190};
    struct llama_batch batch    = llama_batch_get_one(prompt, sizeof(prompt) / sizeof(prompt[0]));
    const int          n_vocab  = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_token        token    = 0;
    printf("tokens:");
    for (int i = 0; i < n; i++) {
        if (llama_decode(context, batch) != 0) {
            return die("decode failed", path);
        }
        const float * logits = llama_get_logits_ith(context, -1);
        token                = 0;
        for (llama_token t = 1; t < n_vocab; t++) {
            if (logits[t] > logits[token]) {
                token = t;
            }
        }
        printf(" %d", token);
        batch = llama_batch_get_one(&token, 1);
    }
    printf("\n");
    llama_free(context);
    llama_model_free(model);
    return 0;
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: reload N MODEL.gguf...\n");
        return 2;
    }
    llama_log_set(quiet, NULL);
    ggml_backend_load_all();
    for (int i = 2; i < argc; i++) {
        if (generate(argv[i], atoi(argv[1])) != 0) {
            return 1;
        }
    }
    return 0;
}
