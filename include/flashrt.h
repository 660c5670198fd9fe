// SPDX-License-Identifier: Apache-2.0
//
// ggml-flashrt: fused CUDA kernels for chains of ggml nodes ("windows"). The C interface of libggml_flashrt.a, and all that a
// host includes. Generated from src/abi by `cargo xtask header`; edit it there.
//
// Ownership
//   The host owns its graph, tensors, buffers and streams; the library reads the structs in place during a call and keeps
//   nothing of them but addresses to compare. What the library allocates belongs to a context (flashrt_host.context) or is
//   derived from a buffer, and is freed by flashrt_context_free or flashrt_buffer_freed. A string that the library returns is
//   never freed by the caller; its comment says how long it lives. Outputs are written only on success unless stated otherwise.
//   Pointers may be null only where stated; a null is answered with FLASHRT_STATUS_BAD_ARGUMENT, or with "not ours".
//
// Threads and streams
//   Every function may be called from any thread. The calls of one context follow one another: eval_begin, then takes and fuse
//   in any number, then eval_end, all from one thread; different contexts need no order between them. Kernels go to
//   flashrt_host.stream and nowhere else, with flashrt_host.device current. The library never creates or destroys a CUDA context,
//   leaves the current device as it was, and never synchronises, with one exception: the first eval_begin on a device runs every
//   kernel once, on a stream of its own, and waits for the results to compare them.
//
// Capture
//   Between eval_begin and eval_end the stream may be capturing (FLASHRT_HOST_CAPTURING). Memory is allocated in eval_begin only,
//   and nothing that a captured graph has seen moves before the context is freed, so a captured graph may be replayed for as long
//   as its context lives. An evaluation that only replays calls eval_begin and eval_end, and no fuse.
//
// Errors
//   Before the first launch of a window everything has been checked: declining (0) leaves no trace and the host runs the node
//   itself. A launch that fails is latched, its CUDA error consumed; flashrt_eval_end reports it. No function aborts, and no
//   panic leaves the library: it is logged once and the library switches itself off, while inference goes on.
//   flashrt_last_error tells the last error of the calling thread in words.
//
// Versioning
//   flashrt_host begins with the version and size that the host was compiled with. Any difference, either way, refuses the host
//   with one log line. Status codes and flashrt_op codes keep their numbers; a retired number is not used again.
//
// Linking
//   A shared library:  c++ -shared host.o libggml_flashrt.a -Wl,--exclude-libs,libggml_flashrt.a -lcudart -lstdc++ -lpthread -ldl -lm
//   A program:         c++ host.o libggml_flashrt.a -lcudart -lstdc++ -lpthread -ldl -lm
//   --exclude-libs keeps the symbols of the archive, Rust's standard library among them, out of the dynamic symbol table. An
//   archive built without kernels needs neither cudart nor stdc++. CMake: link FlashRT::flashrt of cmake/FlashRT.cmake.

#pragma once

#include <stddef.h>
#include <stdint.h>

// Version of `flashrt_host` and of every entry point. A host built against another version is refused.
#define FLASHRT_ABI_VERSION 1

// Bit of `flashrt_host.flags`: the host launches its kernels with programmatic dependent launch.
#define FLASHRT_HOST_PDL 1

// Bit of `flashrt_host.flags`: the stream is capturing, nothing may be allocated.
#define FLASHRT_HOST_CAPTURING 2

// Bit of `flashrt_host.flags`: `GGML_CUDA_DISABLE_FUSION` is set, decline everything.
#define FLASHRT_HOST_FUSION_OFF 4

// Where the bytes of a tensor live, as the host sees it.
enum flashrt_buffer_kind
#ifdef __cplusplus
  : int32_t
#endif // __cplusplus
 {
    // Not in a buffer of this device: another device's, host memory (also where the GPU can address it), or none at all.
    FLASHRT_BUFFER_KIND_FOREIGN = 0,
    // This device's own memory.
    FLASHRT_BUFFER_KIND_OWN = 1,
    // This device's own memory, in a buffer that the host marked as weights: its bytes do not change during a graph.
    FLASHRT_BUFFER_KIND_OWN_WEIGHTS = 2,
};
#ifndef __cplusplus
typedef int32_t flashrt_buffer_kind;
#endif // __cplusplus

// Where a node stands with respect to the concurrent regions of `GGML_CUDA_GRAPH_OPT=1`.
// A value of `FLASHRT_REGION_BRANCH + b` (b >= 1) means: inside a region, on branch b.
enum flashrt_region
#ifdef __cplusplus
  : int32_t
#endif // __cplusplus
 {
    // Outside of every region.
    FLASHRT_REGION_NONE = 0,
    // The node a region forks from.
    FLASHRT_REGION_FORK = 1,
    // The node a region joins at. A node that is both counts as a join.
    FLASHRT_REGION_JOIN = 2,
    // The first branch is this value plus 1.
    FLASHRT_REGION_BRANCH = 16,
};
#ifndef __cplusplus
typedef int32_t flashrt_region;
#endif // __cplusplus

// Outcome of a call.
enum flashrt_status
#ifdef __cplusplus
  : int32_t
#endif // __cplusplus
 {
    // Done.
    FLASHRT_STATUS_OK = 0,
    // A pointer that must not be null is null, or an index is out of range.
    FLASHRT_STATUS_BAD_ARGUMENT = 1,
    // The host was compiled against another version of `flashrt.h`. Nothing is fused for it.
    FLASHRT_STATUS_ABI_MISMATCH = 2,
    // Switched off: by the user, by a failed self-check on this device, or by an earlier panic. Nothing is fused.
    FLASHRT_STATUS_DISABLED = 3,
    // A kernel launch of this evaluation failed: its results are incomplete and its capture must not be replayed.
    FLASHRT_STATUS_LAUNCH_FAILED = 4,
    // A bug in the library was caught at its boundary. The library has switched itself off.
    FLASHRT_STATUS_PANICKED = 5,
    // The caller's buffer is too small; nothing was written to it.
    FLASHRT_STATUS_BUFFER_TOO_SMALL = 6,
};
#ifndef __cplusplus
typedef int32_t flashrt_status;
#endif // __cplusplus

// Filled by the host, only read during the call it is passed to. The first four fields keep their place in every ABI version,
// so that a mismatch can be reported through the host's own log.
typedef struct flashrt_host {
    // `FLASHRT_ABI_VERSION` the host was compiled with.
    uint32_t abi_version;
    // `sizeof(flashrt_host)` the host was compiled with.
    uint32_t struct_size;
    // Takes one line without newline; level 0 debug, 1 info, 2 warning, 3 error. Null: lines go to stderr.
    void (*log)(void *user, int level, const char *text);
    // Passed to every callback.
    void *user;
    // The backend context: key of plans, arenas and hand-offs. Never dereferenced.
    void *context;
    // CUDA device ordinal. The device is current during every call.
    int device;
    // Compute capability times 10: 90 for sm_90.
    int cc;
    // Multiprocessors of the device.
    int sm_count;
    // `FLASHRT_HOST_*` bits.
    uint32_t flags;
    // `cudaStream_t` to launch on.
    void *stream;
    // `op_codes[op]` is the `flashrt_op` of the host's `ggml_op` number `op`.
    const uint8_t *op_codes;
    // Entries of `op_codes`.
    uint32_t n_op_codes;
    // Name of a `ggml_op` number of the host, for dumps. May be null.
    const char *(*op_name)(int op);
    // Where a tensor (a `const ggml_tensor *`) lives: a `flashrt_buffer_kind`. Null: every tensor is foreign.
    int (*buffer_kind)(void *user, const void *tensor);
    // Where a node stands: a `flashrt_region`. Null: there are no regions.
    int (*region)(void *user, const void *tensor);
} flashrt_host;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// `FLASHRT_ABI_VERSION` of the library.
uint32_t flashrt_abi_version(void);

// Architectures the kernels were compiled for, such as "sm_90a compute_90"; empty in a build without kernels.
// The string is constant.
const char *flashrt_archs(void);

// Start of an evaluation, before the host looks at its captured graphs. May allocate, load modules and match; must not be
// called while the stream is capturing. Anything but `FLASHRT_STATUS_OK` means that nothing will be fused in this evaluation:
// the host may leave out the other calls.
//
// Requires:
// `host` points to a filled `flashrt_host`, `graph` to a `const ggml_cgraph`; both may be null.
flashrt_status flashrt_eval_begin(const struct flashrt_host *host, const void *graph);

// Does a window start at node `i`? `n > 0`: the nodes `i … i + n - 1` are done. `0`: not ours, nothing was touched.
//
// A failed launch is latched and reported by `flashrt_eval_end`; from then on every call claims the rest of the graph, so that
// nothing more is put on a stream whose capture may be broken.
//
// Requires:
// As for `flashrt_eval_begin`, and with the graph that was passed there.
int flashrt_fuse(const struct flashrt_host *host, const void *graph, int i);

// End of an evaluation, after the last node and with a capture still open.
//
// `FLASHRT_STATUS_LAUNCH_FAILED`: close the capture, drop it, and report the evaluation as failed.
//
// Requires:
// `host` points to a filled `flashrt_host` or is null.
flashrt_status flashrt_eval_end(const struct flashrt_host *host);

// `1` is a promise: `flashrt_fuse` will not decline node `i` in this evaluation. `0`: it may.
//
// Requires:
// As for `flashrt_fuse`.
int flashrt_takes(const struct flashrt_host *host, const void *graph, int i);

// Asked before the host re-orders nodes for concurrent regions; the graph has no addresses yet. `1`: leave the order alone.
// The answer is the same for every batch size of a model.
//
// Requires:
// As for `flashrt_eval_begin`.
int flashrt_graph_optimize(const struct flashrt_host *host, const void *graph);

// A backend context is about to be freed, its streams idle: plans, arenas and hand-offs under this key die with it.
void flashrt_context_free(const void *context);

// The device buffer of `size` bytes at `base` is about to be freed: what was derived from its contents dies with it.
void flashrt_buffer_freed(int device, const void *base, size_t size);

// Counters of every window as JSON, NUL-terminated. `needed` (may be null) receives the bytes that the text takes with its NUL,
// also when `capacity` is smaller than that; `buffer` is written only on success. `buffer` may be null when `capacity` is 0.
//
// Requires:
// `buffer` has room for `capacity` bytes.
flashrt_status flashrt_stats(char *buffer, size_t capacity, size_t *needed);

// What went wrong in the last call on this thread that did not return `FLASHRT_STATUS_OK`; empty when none did.
// Valid until the next call on this thread.
const char *flashrt_last_error(void);

// Name of a status, or "unknown status". The string is constant.
const char *flashrt_status_name(int status);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// Operations in the library's numbering. FLASHRT_OPS(X) names those that ggml has too: GGML_OP_<name>.
enum flashrt_op {
    FLASHRT_OP_OTHER = 0,
    FLASHRT_OP_NONE = 1,
    FLASHRT_OP_VIEW = 2,
    FLASHRT_OP_RESHAPE = 3,
    FLASHRT_OP_PERMUTE = 4,
    FLASHRT_OP_TRANSPOSE = 5,
    FLASHRT_OP_ADD = 6,
    FLASHRT_OP_MUL = 7,
    FLASHRT_OP_SCALE = 8,
    FLASHRT_OP_RMS_NORM = 9,
    FLASHRT_OP_NORM = 10,
    FLASHRT_OP_MUL_MAT = 11,
    FLASHRT_OP_MUL_MAT_ID = 12,
    FLASHRT_OP_ROPE = 13,
    FLASHRT_OP_GLU = 14,
    FLASHRT_OP_UNARY = 15,
    FLASHRT_OP_SET_ROWS = 16,
    FLASHRT_OP_GET_ROWS = 17,
    FLASHRT_OP_CPY = 18,
    FLASHRT_OP_CONT = 19,
    FLASHRT_OP_FLASH_ATTN_EXT = 20,
    FLASHRT_OP_SOFT_MAX = 21,
    FLASHRT_OP_CLAMP = 22,
    FLASHRT_OP_ADD_ID = 23,
};

#define FLASHRT_OPS(X) \
    X(NONE) \
    X(VIEW) \
    X(RESHAPE) \
    X(PERMUTE) \
    X(TRANSPOSE) \
    X(ADD) \
    X(MUL) \
    X(SCALE) \
    X(RMS_NORM) \
    X(NORM) \
    X(MUL_MAT) \
    X(MUL_MAT_ID) \
    X(ROPE) \
    X(GLU) \
    X(UNARY) \
    X(SET_ROWS) \
    X(GET_ROWS) \
    X(CPY) \
    X(CONT) \
    X(FLASH_ATTN_EXT) \
    X(SOFT_MAX) \
    X(CLAMP) \
    X(ADD_ID)

// Layout of the host's structs as the library reads them: X(field, offset).
#define FLASHRT_TENSOR_FIELDS(X) \
    X(type, 0) \
    X(buffer, 8) \
    X(ne, 16) \
    X(nb, 48) \
    X(op, 80) \
    X(op_params, 84) \
    X(flags, 148) \
    X(src, 152) \
    X(view_src, 232) \
    X(view_offs, 240) \
    X(data, 248) \
    X(name, 256) \
    X(extra, 320)

#define FLASHRT_HASH_SET_FIELDS(X) \
    X(size, 0) \
    X(used, 8) \
    X(keys, 16)

#define FLASHRT_CGRAPH_FIELDS(X) \
    X(n_nodes, 4) \
    X(nodes, 16) \
    X(use_counts, 48) \
    X(visited_hash_set, 56) \
    X(uid, 88)

#define FLASHRT_TENSOR_SIZE 336
#define FLASHRT_CGRAPH_SIZE 96
#define FLASHRT_TENSOR_FLAG_INPUT 1
#define FLASHRT_TENSOR_FLAG_OUTPUT 2
#define FLASHRT_TENSOR_FLAG_COMPUTE 16
