// SPDX-License-Identifier: Apache-2.0
// Compiles host/ggml-cuda-flashrt.inl against stand-ins for ggml, ggml-cuda, cudart and the library, and checks what the library
// gets to see and what a failed evaluation leaves behind.
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

// ggml

#define GGML_UNUSED(x) (void) (x)

enum ggml_op {
    GGML_OP_NONE, GGML_OP_ADD, GGML_OP_ADD_ID, GGML_OP_SUB, GGML_OP_MUL, GGML_OP_SCALE, GGML_OP_NORM, GGML_OP_RMS_NORM,
    GGML_OP_MUL_MAT, GGML_OP_MUL_MAT_ID, GGML_OP_CPY, GGML_OP_CONT, GGML_OP_RESHAPE, GGML_OP_VIEW, GGML_OP_PERMUTE,
    GGML_OP_TRANSPOSE, GGML_OP_GET_ROWS, GGML_OP_SET_ROWS, GGML_OP_SOFT_MAX, GGML_OP_ROPE, GGML_OP_CLAMP, GGML_OP_FLASH_ATTN_EXT,
    GGML_OP_UNARY, GGML_OP_GLU, GGML_OP_COUNT
};
enum { GGML_TENSOR_FLAG_INPUT = 1, GGML_TENSOR_FLAG_OUTPUT = 2, GGML_TENSOR_FLAG_COMPUTE = 16 };
enum ggml_backend_buffer_usage { GGML_BACKEND_BUFFER_USAGE_ANY, GGML_BACKEND_BUFFER_USAGE_WEIGHTS, GGML_BACKEND_BUFFER_USAGE_COMPUTE };

struct ggml_backend_buffer_type { int device; };
typedef ggml_backend_buffer_type * ggml_backend_buffer_type_t;
struct ggml_backend_buffer {
    ggml_backend_buffer_type_t buft;
    ggml_backend_buffer_usage  usage;
};
typedef ggml_backend_buffer * ggml_backend_buffer_t;

struct ggml_tensor {
    int                   type;
    ggml_backend_buffer * buffer;
    int64_t               ne[4];
    size_t                nb[4];
    ggml_op               op;
    int32_t               op_params[16];
    int32_t               flags;
    ggml_tensor *         src[10];
    ggml_tensor *         view_src;
    size_t                view_offs;
    void *                data;
    char                  name[64];
    void *                extra;
    char                  padding[8];
};
struct ggml_hash_set {
    size_t         size;
    uint32_t *     used;
    ggml_tensor ** keys;
};
struct ggml_cgraph {
    int            size, n_nodes, n_leafs;
    ggml_tensor ** nodes;
    ggml_tensor ** grads;
    ggml_tensor ** grad_accs;
    ggml_tensor ** leafs;
    int32_t *      use_counts;
    ggml_hash_set  visited_hash_set;
    int            order;
    uint64_t       uid;
};

static const char * ggml_op_name(ggml_op op) {
    return op == GGML_OP_SUB ? "SUB" : "?";
}

static std::string log_text;
#define GGML_LOG_DEBUG(...) log_line("debug ", __VA_ARGS__)
#define GGML_LOG_INFO(...)  log_line("info ", __VA_ARGS__)
#define GGML_LOG_WARN(...)  log_line("warn ", __VA_ARGS__)
#define GGML_LOG_ERROR(...) log_line("error ", __VA_ARGS__)
static void log_line(const char * level, const char * format, const char * text) {
    char line[256];
    snprintf(line, sizeof line, format, text);
    log_text = std::string(level) + line;
}

// cudart

typedef struct stream *  cudaStream_t;
typedef struct capture * cudaGraph_t;
static std::vector<std::string> cuda_calls;

static int cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * graph) {
    cuda_calls.push_back("end capture " + std::to_string((uintptr_t) stream));
    *graph = (cudaGraph_t) 1;
    return 901;  // cudaErrorStreamCaptureInvalidated
}
static int cudaGraphDestroy(cudaGraph_t) {
    cuda_calls.push_back("destroy graph");
    return 0;
}
static int cudaStreamSynchronize(cudaStream_t stream) {
    cuda_calls.push_back("synchronize " + std::to_string((uintptr_t) stream));
    return 0;
}
static int cudaGetLastError() {
    cuda_calls.push_back("last error");
    return 0;
}

// ggml-cuda

#define USE_CUDA_GRAPH
#define GGML_CUDA_USE_PDL
#define GGML_CUDA_CC_HOPPER 900

struct ggml_cuda_graph { };
struct ggml_cuda_concurrent_event {
    std::unordered_map<const ggml_tensor *, int> stream_mapping;
    const ggml_tensor *                          join_node;
};
struct ggml_cuda_stream_context {
    std::unordered_map<const ggml_tensor *, ggml_cuda_concurrent_event> concurrent_events;
};
struct ggml_backend_cuda_context {
    int                      device         = 0;
    int                      curr_stream_no = 0;
    cudaStream_t             streams[2][3]  = { { (cudaStream_t) 100, (cudaStream_t) 101, nullptr }, { (cudaStream_t) 200 } };
    ggml_cuda_stream_context regions;
    std::unordered_map<const void *, std::unique_ptr<ggml_cuda_graph>> cuda_graphs;

    cudaStream_t               stream() { return streams[device][curr_stream_no]; }
    ggml_cuda_stream_context & stream_context() { return regions; }
};
struct ggml_cuda_device_info {
    struct { int cc, nsm, physical_device; } devices[2];
};
static ggml_cuda_device_info & ggml_cuda_info() {
    static ggml_cuda_device_info info = { { { 900, 132, 0 }, { 870, 16, 0 } } };
    return info;
}
static ggml_backend_buffer_type device_buft = { 0 }, other_buft = { 1 };
static ggml_backend_buffer_type_t ggml_backend_cuda_buffer_type(int device) {
    return device == 0 ? &device_buft : &other_buft;
}
static std::mutex              ggml_cuda_lock;
static std::condition_variable ggml_cuda_lock_cv;
static std::atomic<int>        ggml_cuda_lock_counter;

#include "ggml-cuda-flashrt.inl"

// The library: answers as told and keeps what it saw.

static flashrt_host   seen;
static flashrt_status begin_status = FLASHRT_STATUS_OK;
static flashrt_status end_status   = FLASHRT_STATUS_OK;
static int            fuse_answer, fuse_calls, keep_order;

flashrt_status flashrt_eval_begin(const flashrt_host * host, const void *) {
    seen = *host;
    return begin_status;
}
int flashrt_fuse(const flashrt_host * host, const void *, int) {
    seen = *host;
    fuse_calls++;
    return fuse_answer;
}
flashrt_status flashrt_eval_end(const flashrt_host * host) {
    seen = *host;
    return end_status;
}
int flashrt_takes(const flashrt_host *, const void *, int i) {
    return i == 2;
}
int flashrt_graph_optimize(const flashrt_host * host, const void *) {
    seen = *host;
    return keep_order;
}

static void check_host() {
    ggml_backend_cuda_context ctx;
    ggml_cgraph               graph = {};
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(seen.abi_version == FLASHRT_ABI_VERSION && seen.struct_size == sizeof(flashrt_host));
    CHECK(seen.context == &ctx && seen.device == 0 && seen.cc == 90 && seen.sm_count == 132);
    CHECK(seen.stream == ctx.streams[0][0]);
    CHECK(seen.n_op_codes == GGML_OP_COUNT);
    CHECK(seen.op_codes[GGML_OP_RMS_NORM] == FLASHRT_OP_RMS_NORM && seen.op_codes[GGML_OP_NONE] == FLASHRT_OP_NONE);
    CHECK(seen.op_codes[GGML_OP_SUB] == FLASHRT_OP_OTHER);
    CHECK(strcmp(seen.op_name(GGML_OP_SUB), "SUB") == 0);
    CHECK(seen.op_name(-1) == nullptr && seen.op_name(GGML_OP_COUNT) == nullptr);
    seen.log(seen.user, 2, "50%s");
    CHECK(log_text == "warn 50%s\n");

    // The environment is read once, so the caller says what it set.
    const uint32_t expected = (uint32_t) atoi(getenv("EXPECTED_FLAGS"));
    CHECK(seen.flags == expected);

    // A node on another stream, under capture.
    ctx.curr_stream_no = 1;
    fuse_answer        = 4;
    CHECK(ggml_cuda_flashrt_fuse(ctx, &graph, 0, true) == 4);
    CHECK(seen.stream == ctx.streams[0][1]);
    CHECK(seen.flags == (expected | FLASHRT_HOST_CAPTURING));

    // The next evaluation starts without the bit, and older GPUs have no dependent launch.
    ggml_cuda_info().devices[0].cc = 890;
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(seen.cc == 89 && seen.flags == (expected & ~(uint32_t) FLASHRT_HOST_PDL));
    ggml_cuda_info().devices[0].cc = 900;

    // ggml's device 1 is a second face of CUDA's device 0.
    ctx.device         = 1;
    ctx.curr_stream_no = 0;
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(seen.device == 0 && seen.cc == 87 && seen.sm_count == 16 && seen.stream == ctx.streams[1][0]);
}

static void check_buffers() {
    ggml_backend_cuda_context ctx;
    ggml_cgraph               graph = {};
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    ggml_backend_buffer compute = { &device_buft, GGML_BACKEND_BUFFER_USAGE_COMPUTE };
    ggml_backend_buffer weights = { &device_buft, GGML_BACKEND_BUFFER_USAGE_WEIGHTS };
    ggml_backend_buffer foreign = { &other_buft, GGML_BACKEND_BUFFER_USAGE_WEIGHTS };
    ggml_tensor         t       = {};
    const auto kind = [&](ggml_backend_buffer * buffer) {
        t.buffer = buffer;
        return seen.buffer_kind(seen.user, &t);
    };
    CHECK(kind(nullptr) == FLASHRT_BUFFER_KIND_FOREIGN);
    CHECK(kind(&foreign) == FLASHRT_BUFFER_KIND_FOREIGN);
    CHECK(kind(&compute) == FLASHRT_BUFFER_KIND_OWN);
    CHECK(kind(&weights) == FLASHRT_BUFFER_KIND_OWN_WEIGHTS);

    ggml_tensor view = {};
    view.view_src    = &t;  // a view may have no buffer of its own
    CHECK(seen.buffer_kind(seen.user, &view) == FLASHRT_BUFFER_KIND_OWN_WEIGHTS);
}

static void check_regions() {
    ggml_backend_cuda_context ctx;
    ggml_cgraph               graph = {};
    ggml_tensor               fork = {}, q = {}, k = {}, join = {}, outside = {};
    auto & events       = ctx.regions.concurrent_events;
    const auto region   = [&](ggml_tensor & t) { return seen.region(seen.user, &t); };
    const auto add_fork = [&] { events[&fork] = { { { &q, 1 }, { &k, 2 } }, &join }; };

    add_fork();
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(region(fork) == FLASHRT_REGION_FORK && region(join) == FLASHRT_REGION_JOIN);
    CHECK(region(q) == FLASHRT_REGION_BRANCH + 1 && region(k) == FLASHRT_REGION_BRANCH + 2);
    CHECK(region(outside) == FLASHRT_REGION_NONE);

    events.clear();  // ggml-cuda drops regions that do not hold
    CHECK(region(fork) == FLASHRT_REGION_NONE);

    add_fork();
    events[&outside] = { { { &q, 1 } }, &fork };  // what joins and forks counts as a join
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(region(fork) == FLASHRT_REGION_JOIN && region(outside) == FLASHRT_REGION_FORK);
}

static void check_answers() {
    ggml_backend_cuda_context ctx;
    ggml_cgraph               graph = {};
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(ggml_cuda_flashrt_takes(&graph, 2) && !ggml_cuda_flashrt_takes(&graph, 1));
    CHECK(!ggml_cuda_flashrt_keep_order(ctx, &graph));
    keep_order = 1;
    CHECK(ggml_cuda_flashrt_keep_order(ctx, &graph));

    // A library that is off is not asked again.
    begin_status = FLASHRT_STATUS_DISABLED;
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    fuse_calls = 0;
    CHECK(ggml_cuda_flashrt_fuse(ctx, &graph, 0, false) == 0 && fuse_calls == 0);
    CHECK(!ggml_cuda_flashrt_takes(&graph, 2));
    CHECK(ggml_cuda_flashrt_eval_end(ctx, &graph, false) && !ggml_cuda_flashrt_failed());
    begin_status = FLASHRT_STATUS_OK;
}

static void check_end() {
    typedef std::vector<std::string> calls;
    ggml_backend_cuda_context ctx;
    ggml_cgraph               graph = {};
    const void *              key   = &graph;
    ctx.cuda_graphs[key]   = std::make_unique<ggml_cuda_graph>();
    ctx.cuda_graphs[&ctx]  = std::make_unique<ggml_cuda_graph>();
    ggml_cuda_lock_counter = 1;

    cuda_calls.clear();
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(ggml_cuda_flashrt_eval_end(ctx, key, true) && !ggml_cuda_flashrt_failed());
    CHECK(cuda_calls.empty() && ctx.cuda_graphs.size() == 2 && ggml_cuda_lock_counter == 1);

    // A launch failed on a branch, under capture: the capture of the main stream is closed, its waiters go on, nothing is left.
    end_status         = FLASHRT_STATUS_LAUNCH_FAILED;
    ctx.curr_stream_no = 1;
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(!ggml_cuda_flashrt_eval_end(ctx, key, true) && ggml_cuda_flashrt_failed());
    CHECK((cuda_calls == calls{ "end capture 100", "destroy graph", "synchronize 100", "synchronize 101", "last error" }));
    CHECK(ctx.cuda_graphs.size() == 1 && ctx.cuda_graphs.count(key) == 0);
    CHECK(ggml_cuda_lock_counter == 0 && ctx.curr_stream_no == 0);

    // Without a capture there is none to close.
    cuda_calls.clear();
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(!ggml_cuda_flashrt_failed());
    CHECK(!ggml_cuda_flashrt_eval_end(ctx, key, false) && ggml_cuda_flashrt_failed());
    CHECK((cuda_calls == calls{ "synchronize 100", "synchronize 101", "last error" }));
    CHECK(ggml_cuda_lock_counter == 0);

    end_status = FLASHRT_STATUS_OK;
    ggml_cuda_flashrt_eval_begin(ctx, &graph);
    CHECK(ggml_cuda_flashrt_eval_end(ctx, key, false) && !ggml_cuda_flashrt_failed());
}

int main() {
    check_host();
    check_buffers();
    check_regions();
    check_answers();
    check_end();
}
