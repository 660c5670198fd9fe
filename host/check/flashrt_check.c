// SPDX-License-Identifier: Apache-2.0
// libflashrt_check.so: the few calls into libllama that `flashrt check` makes. `cargo xtask host` compiles it against the
// headers of the llama.cpp it builds and puts it beside libllama.so, so that the layout of llama.cpp's parameter structs
// (passed by value, and different in every version) is known to the C compiler alone. src/host is the other side.
#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#if defined(_WIN32)
#    define FRT_CHECK_API __declspec(dllexport)
#else
#    define FRT_CHECK_API __attribute__((visibility("default")))
#endif

// Raised whenever a signature below changes; src/host refuses another number.
#define FRT_CHECK_VERSION 1

typedef void (*frt_check_log)(int32_t level, const char * text, void * user);  // level: a ggml_log_level
typedef bool (*frt_check_eval)(struct ggml_tensor * node, bool ask, void * user);

FRT_CHECK_API int32_t frt_check_version(void) {
    return FRT_CHECK_VERSION;
}

// Version of ggml that was linked, for the report.
FRT_CHECK_API const char * frt_check_ggml_version(void) {
    return ggml_version();
}

struct frt_check_sink {
    frt_check_log log;
    void *        user;
};
static struct frt_check_sink sink;

static void forward_log(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    if (sink.log) {
        sink.log((int32_t) level, text, sink.user);
    }
}

// Sends every log line of llama.cpp and ggml to `log`; null silences them.
FRT_CHECK_API void frt_check_set_log(frt_check_log log, void * user) {
    sink.log  = log;
    sink.user = user;
    llama_log_set(forward_log, NULL);
}

// Once, before any model: backends that were built as modules of their own are looked for in `dir`.
FRT_CHECK_API void frt_check_init(const char * dir) {
    ggml_backend_load_all_from_path(dir);
    llama_backend_init();
}

// Null when llama.cpp refused the file: the log says why. Only the CPU backend is used, and weights keep the layout they
// have in the file (no repacking), so that a tensor's bytes can be read as what its type says.
FRT_CHECK_API struct llama_model * frt_check_model_load(const char * path) {
    ggml_backend_dev_t        devices[] = { NULL };
    struct llama_model_params params    = llama_model_default_params();
    params.devices         = devices;
    params.n_gpu_layers    = 0;
    params.use_extra_bufts = false;
    return llama_model_load_from_file(path, params);
}

FRT_CHECK_API void frt_check_model_free(struct llama_model * model) {
    llama_model_free(model);
}

FRT_CHECK_API int32_t frt_check_vocab(const struct llama_model * model) {
    return llama_vocab_n_tokens(llama_model_get_vocab(model));
}

FRT_CHECK_API int32_t frt_check_layers(const struct llama_model * model) {
    return llama_model_n_layer(model);
}

FRT_CHECK_API int32_t frt_check_describe(const struct llama_model * model, char * text, size_t size) {
    return llama_model_desc(model, text, size);
}

FRT_CHECK_API struct llama_context * frt_check_context_new(struct llama_model * model, uint32_t n_ctx, uint32_t n_seq,
                                                           int32_t n_threads, frt_check_eval eval, void * user) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx             = n_ctx;
    params.n_batch           = n_ctx;
    params.n_ubatch          = n_ctx;
    params.n_seq_max         = n_seq;
    params.n_threads         = n_threads;
    params.n_threads_batch   = n_threads;
    params.flash_attn_type   = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.op_offload        = false;
    params.offload_kqv       = false;
    params.cb_eval           = eval;
    params.cb_eval_user_data = user;
    return llama_init_from_model(model, params);
}

FRT_CHECK_API void frt_check_context_free(struct llama_context * context) {
    llama_free(context);
}

// One batch; token i of sequence seq[i] stands at pos[i]. Logits are asked for where output[i] != 0.
// Returns what llama_decode returns: 0 is success.
FRT_CHECK_API int32_t frt_check_decode(struct llama_context * context, int32_t n_tokens, const int32_t * token,
                                       const int32_t * pos, const int32_t * seq, const int8_t * output) {
    struct llama_batch batch = llama_batch_init(n_tokens, 0, 1);
    for (int32_t i = 0; i < n_tokens; i++) {
        batch.token[i]     = token[i];
        batch.pos[i]       = pos[i];
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq[i];
        batch.logits[i]    = output[i];
    }
    batch.n_tokens = n_tokens;
    const int32_t rc = llama_decode(context, batch);
    llama_batch_free(batch);
    return rc;
}

FRT_CHECK_API size_t frt_check_nbytes(const struct ggml_tensor * tensor) {
    return ggml_nbytes(tensor);
}

// True for a tensor whose bytes do not change while the model is loaded.
FRT_CHECK_API bool frt_check_is_weight(const struct ggml_tensor * tensor) {
    const struct ggml_tensor * owner = tensor->view_src ? tensor->view_src : tensor;
    return owner->buffer && ggml_backend_buffer_get_usage(owner->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

// Number of ops this ggml knows, and their names: "MUL_MAT", ….
FRT_CHECK_API int32_t frt_check_n_ops(void) {
    return (int32_t) GGML_OP_COUNT;
}

FRT_CHECK_API const char * frt_check_op_name(int32_t op) {
    return ggml_op_name((enum ggml_op) op);
}
