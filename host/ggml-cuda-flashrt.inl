// SPDX-License-Identifier: Apache-2.0
// The host side of flashrt.h inside ggml-cuda: fills flashrt_host and answers the library's questions about tensors.

#include "ggml-cuda-flashrt.h"

#include <unordered_map>

// The library reads these structs in place.
#define FLASHRT_CHECK(type, field, offset) static_assert(offsetof(type, field) == offset, "ggml-flashrt: " #type " has changed");
#define FLASHRT_CHECK_TENSOR(field, offset) FLASHRT_CHECK(ggml_tensor, field, offset)
#define FLASHRT_CHECK_HASH_SET(field, offset) FLASHRT_CHECK(ggml_hash_set, field, offset)
#define FLASHRT_CHECK_CGRAPH(field, offset) FLASHRT_CHECK(ggml_cgraph, field, offset)
FLASHRT_TENSOR_FIELDS(FLASHRT_CHECK_TENSOR)
FLASHRT_HASH_SET_FIELDS(FLASHRT_CHECK_HASH_SET)
FLASHRT_CGRAPH_FIELDS(FLASHRT_CHECK_CGRAPH)
#undef FLASHRT_CHECK_CGRAPH
#undef FLASHRT_CHECK_HASH_SET
#undef FLASHRT_CHECK_TENSOR
#undef FLASHRT_CHECK
static_assert(sizeof(ggml_tensor) == FLASHRT_TENSOR_SIZE && sizeof(ggml_cgraph) == FLASHRT_CGRAPH_SIZE,
        "ggml-flashrt: the structs of a graph have changed");
static_assert(GGML_TENSOR_FLAG_INPUT == FLASHRT_TENSOR_FLAG_INPUT && GGML_TENSOR_FLAG_OUTPUT == FLASHRT_TENSOR_FLAG_OUTPUT &&
              GGML_TENSOR_FLAG_COMPUTE == FLASHRT_TENSOR_FLAG_COMPUTE,
        "ggml-flashrt: the flags of a tensor have changed");

// One evaluation on one thread: what the callbacks need to know. A thread computes one graph at a time.
struct ggml_cuda_flashrt_eval {
    flashrt_host                host   = {};
    ggml_backend_cuda_context * ctx    = nullptr;
    ggml_backend_buffer_type_t  buft   = nullptr;
    bool                        active = false;
    bool                        failed = false;

    // Built on the first question of an evaluation: most evaluations replay a CUDA graph and ask none.
    std::unordered_map<const ggml_tensor *, int> regions;
    bool                                         regions_known = false;

    void attach(ggml_backend_cuda_context & ctx);
};

static thread_local ggml_cuda_flashrt_eval ggml_cuda_flashrt_current;

static const std::array<uint8_t, GGML_OP_COUNT> & ggml_cuda_flashrt_op_codes() {
    static const std::array<uint8_t, GGML_OP_COUNT> codes = [] {
        std::array<uint8_t, GGML_OP_COUNT> codes;
        codes.fill(FLASHRT_OP_OTHER);
#define FLASHRT_OP_CODE(name) codes[GGML_OP_##name] = FLASHRT_OP_##name;
        FLASHRT_OPS(FLASHRT_OP_CODE)
#undef FLASHRT_OP_CODE
        return codes;
    }();
    return codes;
}

static void ggml_cuda_flashrt_log(void * /*user*/, int level, const char * text) {
    switch (level) {
        case 0:  GGML_LOG_DEBUG("%s\n", text); break;
        case 1:  GGML_LOG_INFO ("%s\n", text); break;
        case 2:  GGML_LOG_WARN ("%s\n", text); break;
        default: GGML_LOG_ERROR("%s\n", text); break;
    }
}

static const char * ggml_cuda_flashrt_op_name(int op) {
    return op >= 0 && op < GGML_OP_COUNT ? ggml_op_name((ggml_op) op) : nullptr;
}

// Only the device's own buffer type counts: its kernels may write there without asking anybody. An integrated GPU could read
// host buffers too, but their contents may change under it.
static int ggml_cuda_flashrt_buffer_kind(void * user, const void * tensor) {
    const ggml_cuda_flashrt_eval * eval = (const ggml_cuda_flashrt_eval *) user;
    const ggml_tensor *            t    = (const ggml_tensor *) tensor;

    const ggml_backend_buffer_t buffer = t->view_src ? t->view_src->buffer : t->buffer;
    if (buffer == nullptr || buffer->buft != eval->buft) {
        return FLASHRT_BUFFER_KIND_FOREIGN;
    }
    return buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS ? FLASHRT_BUFFER_KIND_OWN_WEIGHTS : FLASHRT_BUFFER_KIND_OWN;
}

static int ggml_cuda_flashrt_region(void * user, const void * tensor) {
    ggml_cuda_flashrt_eval * eval = (ggml_cuda_flashrt_eval *) user;

    const auto & events = eval->ctx->stream_context().concurrent_events;
    if (events.empty()) { // also when the loop found that the regions do not hold and dropped them
        return FLASHRT_REGION_NONE;
    }
    if (!eval->regions_known) {
        eval->regions.clear();
        for (const auto & [fork, event] : events) {
            eval->regions.emplace(fork, FLASHRT_REGION_FORK);
            for (const auto & [node, stream] : event.stream_mapping) {
                eval->regions[node] = FLASHRT_REGION_BRANCH + stream;
            }
        }
        for (const auto & [fork, event] : events) {
            eval->regions[event.join_node] = FLASHRT_REGION_JOIN;
        }
        eval->regions_known = true;
    }
    const auto it = eval->regions.find((const ggml_tensor *) tensor);
    return it == eval->regions.end() ? FLASHRT_REGION_NONE : it->second;
}

// The condition under which ggml_cuda_kernel_launch uses programmatic dependent launch, for kernels compiled for the device.
static bool ggml_cuda_flashrt_pdl(const int cc) {
#if defined(GGML_CUDA_USE_PDL)
    static const bool enabled = [] {
        const char * env = getenv("GGML_CUDA_PDL");
        return env == nullptr || std::atoi(env) != 0;
    }();
    return enabled && cc >= GGML_CUDA_CC_HOPPER;
#else
    GGML_UNUSED(cc);
    return false;
#endif // defined(GGML_CUDA_USE_PDL)
}

void ggml_cuda_flashrt_eval::attach(ggml_backend_cuda_context & ctx) {
    static const bool fusion_off =
        getenv("GGML_CUDA_DISABLE_FUSION") != nullptr && std::atoi(getenv("GGML_CUDA_DISABLE_FUSION"));

    this->ctx     = &ctx;
    buft          = ggml_backend_cuda_buffer_type(ctx.device);
    regions_known = false;
    active        = false;
    failed        = false;

    const auto & device = ggml_cuda_info().devices[ctx.device];

    host.abi_version = FLASHRT_ABI_VERSION;
    host.struct_size = sizeof(host);
    host.log         = ggml_cuda_flashrt_log;
    host.user        = this;
    host.context     = &ctx;
    host.device      = device.physical_device;
    host.cc          = device.cc / 10;
    host.sm_count    = device.nsm;
    host.flags       = (ggml_cuda_flashrt_pdl(device.cc) ? FLASHRT_HOST_PDL : 0) | (fusion_off ? FLASHRT_HOST_FUSION_OFF : 0);
    host.stream      = ctx.stream();
    host.op_codes    = ggml_cuda_flashrt_op_codes().data();
    host.n_op_codes  = GGML_OP_COUNT;
    host.op_name     = ggml_cuda_flashrt_op_name;
    host.buffer_kind = ggml_cuda_flashrt_buffer_kind;
    host.region      = ggml_cuda_flashrt_region;
}

static void ggml_cuda_flashrt_eval_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    ggml_cuda_flashrt_eval & eval = ggml_cuda_flashrt_current;
    eval.attach(ctx);
    eval.active = flashrt_eval_begin(&eval.host, cgraph) == FLASHRT_STATUS_OK;
}

static int ggml_cuda_flashrt_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, bool capturing) {
    ggml_cuda_flashrt_eval & eval = ggml_cuda_flashrt_current;
    if (!eval.active) {
        return 0;
    }
    eval.host.stream = ctx.stream();
    if (capturing) {
        eval.host.flags |= FLASHRT_HOST_CAPTURING;
    }
    return flashrt_fuse(&eval.host, cgraph, i);
}

static bool ggml_cuda_flashrt_eval_end(ggml_backend_cuda_context & ctx, const void * graph_key, bool capturing) {
    ggml_cuda_flashrt_eval & eval = ggml_cuda_flashrt_current;
    if (!eval.active) {
        return true;
    }
    eval.active      = false;
    eval.host.stream = ctx.stream();
    if (flashrt_eval_end(&eval.host) != FLASHRT_STATUS_LAUNCH_FAILED) {
        return true;
    }

    eval.failed        = true;
    ctx.curr_stream_no = 0;
#ifdef USE_CUDA_GRAPH
    if (capturing) {
        // The failed launch may have invalidated the capture, which is closed all the same: others wait for it.
        cudaGraph_t graph = nullptr;
        (void) cudaStreamEndCapture(ctx.stream(), &graph);
        if (graph != nullptr) {
            (void) cudaGraphDestroy(graph);
        }
        std::lock_guard<std::mutex> lock(ggml_cuda_lock);
        if (ggml_cuda_lock_counter.fetch_sub(1, std::memory_order_relaxed) == 1) {
            ggml_cuda_lock_cv.notify_all();
        }
    }
    ctx.cuda_graphs.erase(graph_key);
#endif // USE_CUDA_GRAPH
    GGML_UNUSED(graph_key);
    GGML_UNUSED(capturing);

    // Branches of a region that was left half-way were never joined.
    for (cudaStream_t stream : ctx.streams[ctx.device]) {
        if (stream != nullptr) {
            (void) cudaStreamSynchronize(stream);
        }
    }
    (void) cudaGetLastError();
    return false;
}

static bool ggml_cuda_flashrt_failed() {
    return ggml_cuda_flashrt_current.failed;
}

static bool ggml_cuda_flashrt_takes(const ggml_cgraph * cgraph, int i) {
    ggml_cuda_flashrt_eval & eval = ggml_cuda_flashrt_current;
    return eval.active && flashrt_takes(&eval.host, cgraph, i) == 1;
}

static bool ggml_cuda_flashrt_keep_order(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph) {
    ggml_cuda_flashrt_eval eval;
    eval.attach(ctx);
    return flashrt_graph_optimize(&eval.host, cgraph) == 1;
}
