// SPDX-License-Identifier: Apache-2.0
// Drives the C interface from outside, on a build without kernels. `drive`, `drive off` (GGML_FLASHRT_DISABLE is set) or
// `drive unheard` (stderr is a pipe that nobody reads; GGML_FLASHRT_STATS=1).
#include "flashrt.h"
#include "flashrt.h"  // a header that a host includes twice

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);          \
            fprintf(stderr, "last error: %s\n", flashrt_last_error());                         \
            exit(1);                                                                           \
        }                                                                                      \
    } while (0)

static int  n_lines;
static char last_line[1024];

static void log_line(void * user, int level, const char * text) {
    CHECK(user == &n_lines);
    CHECK(level >= 0 && level <= 3);
    n_lines++;
    snprintf(last_line, sizeof last_line, "%s", text);
}

static int own(void * user, const void * tensor) {
    (void) user;
    (void) tensor;
    return FLASHRT_BUFFER_KIND_OWN;
}

// The host's structs, laid out by the offsets that the header names.
#define TENSOR_AT(field, offset) TENSOR_##field = offset,
#define CGRAPH_AT(field, offset) CGRAPH_##field = offset,
enum { FLASHRT_TENSOR_FIELDS(TENSOR_AT) FLASHRT_CGRAPH_FIELDS(CGRAPH_AT) };

typedef union { unsigned char bytes[FLASHRT_TENSOR_SIZE]; int64_t align; } tensor_t;
typedef union { unsigned char bytes[FLASHRT_CGRAPH_SIZE]; int64_t align; } cgraph_t;
#define SET(object, at, value) memcpy((object).bytes + (at), &(value), sizeof(value))

// An op number of this host is the library's code plus 3, so that nothing works without the table.
enum { OP_SHIFT = 3, N_OPS = 64 };
static uint8_t op_codes[N_OPS];

static void make_tensor(tensor_t * t, int op, float * data, const tensor_t * a, const tensor_t * b) {
    static const int64_t ne[4] = { 64, 1, 1, 1 };
    static const size_t  nb[4] = { 4, 256, 256, 256 };
    const int            number = op + OP_SHIFT;
    const int32_t        flags  = FLASHRT_TENSOR_FLAG_COMPUTE;
    const tensor_t *     src[2] = { a, b };
    memset(t, 0, sizeof *t);
    SET(*t, TENSOR_ne, ne);
    SET(*t, TENSOR_nb, nb);
    SET(*t, TENSOR_op, number);
    SET(*t, TENSOR_flags, flags);
    SET(*t, TENSOR_src, src);
    SET(*t, TENSOR_data, data);
}

static flashrt_host good_host(void) {
    flashrt_host host;
    memset(&host, 0, sizeof host);
    host.abi_version = FLASHRT_ABI_VERSION;
    host.struct_size = sizeof host;
    host.log         = log_line;
    host.user        = &n_lines;
    host.context     = op_codes;
    host.cc          = 90;
    host.sm_count    = 132;
    host.op_codes    = op_codes;
    host.n_op_codes  = N_OPS;
    host.buffer_kind = own;
    return host;
}

static void check_bad_arguments(const cgraph_t * graph) {
    const flashrt_host host = good_host();
    CHECK(flashrt_eval_begin(NULL, graph) == FLASHRT_STATUS_BAD_ARGUMENT);
    CHECK(strstr(flashrt_last_error(), "host is null"));
    CHECK(flashrt_eval_begin(&host, NULL) == FLASHRT_STATUS_BAD_ARGUMENT);
    CHECK(strstr(flashrt_last_error(), "graph is null"));
    CHECK(flashrt_fuse(NULL, graph, 0) == 0);
    CHECK(flashrt_fuse(&host, NULL, 0) == 0);
    CHECK(flashrt_fuse(&host, graph, -1) == 0);
    CHECK(strstr(flashrt_last_error(), "no node -1"));
    CHECK(flashrt_fuse(&host, graph, 3) == 0);
    CHECK(strstr(flashrt_last_error(), "no node 3"));
    CHECK(flashrt_takes(NULL, graph, 0) == 0);
    CHECK(flashrt_graph_optimize(&host, NULL) == 0);
    CHECK(flashrt_eval_end(NULL) == FLASHRT_STATUS_BAD_ARGUMENT);
    flashrt_context_free(NULL);
    flashrt_buffer_freed(0, NULL, 0);
}

static void check_version_mismatch(const cgraph_t * graph) {
    flashrt_host host = good_host();
    host.abi_version++;
    n_lines = 0;
    CHECK(flashrt_eval_begin(&host, graph) == FLASHRT_STATUS_ABI_MISMATCH);
    CHECK(strstr(flashrt_last_error(), "nothing is fused"));
    CHECK(n_lines == 1 && strstr(last_line, "ABI version 2"));
    CHECK(flashrt_fuse(&host, graph, 0) == 0);
    CHECK(flashrt_takes(&host, graph, 0) == 0);
    CHECK(flashrt_eval_end(&host) == FLASHRT_STATUS_ABI_MISMATCH);

    host = good_host();
    host.struct_size -= 8;
    CHECK(flashrt_eval_begin(&host, graph) == FLASHRT_STATUS_ABI_MISMATCH);
    host.struct_size = 8;  // shorter than the log field: must not be read
    host.log         = (void (*)(void *, int, const char *)) (uintptr_t) 1;
    CHECK(flashrt_eval_begin(&host, graph) == FLASHRT_STATUS_ABI_MISMATCH);
    CHECK(n_lines == 1);
}

// Without kernels the self-check fails: one line says so, and every node is declined.
static void check_evaluations(const cgraph_t * graph, int off) {
    const flashrt_host host = good_host();
    n_lines = 0;
    for (int evaluation = 0; evaluation < 2; evaluation++) {
        const int status = flashrt_eval_begin(&host, graph);
        CHECK(status == FLASHRT_STATUS_DISABLED);
        CHECK(off || (n_lines == 1 && strstr(last_line, "stock kernels run instead")));
        for (int i = 0; i < 3; i++) {
            CHECK(flashrt_takes(&host, graph, i) == 0);
            CHECK(flashrt_fuse(&host, graph, i) == 0);
        }
        CHECK(flashrt_eval_end(&host) == FLASHRT_STATUS_OK);
    }
    CHECK(flashrt_graph_optimize(&host, graph) == 0);
    flashrt_context_free(host.context);
}

// A server whose log was piped to a program that has ended. Lines are lost; neither the library nor the process stops for that.
static void check_unheard(const cgraph_t * graph) {
    int ends[2];
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR && pipe(ends) == 0 && close(ends[0]) == 0);
    CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
    flashrt_host host = good_host();
    host.log          = NULL;
    host.abi_version++;
    if (flashrt_eval_begin(&host, graph) != FLASHRT_STATUS_ABI_MISMATCH) {
        exit(2);
    }
    host.abi_version--;
    if (flashrt_eval_begin(&host, graph) != FLASHRT_STATUS_DISABLED) {
        exit(3);
    }
    exit(flashrt_eval_end(&host) == FLASHRT_STATUS_OK ? 0 : 4);  // and prints the table
}

static void check_stats(void) {
    size_t needed = 0;
    CHECK(flashrt_stats(NULL, 0, &needed) == FLASHRT_STATUS_BUFFER_TOO_SMALL);
    CHECK(needed > 2);
    CHECK(flashrt_stats(NULL, 8, NULL) == FLASHRT_STATUS_BAD_ARGUMENT);

    char * text = malloc(needed);
    CHECK(text != NULL);
    memset(text, 'x', needed);
    CHECK(flashrt_stats(text, needed - 1, NULL) == FLASHRT_STATUS_BUFFER_TOO_SMALL);
    for (size_t i = 0; i < needed; i++) {
        CHECK(text[i] == 'x');
    }
    CHECK(flashrt_stats(text, needed, NULL) == FLASHRT_STATUS_OK);
    CHECK(strlen(text) + 1 == needed);
    puts(text);
    free(text);
}

int main(int argc, char ** argv) {
    const int off = argc > 1 && strcmp(argv[1], "off") == 0;

    CHECK(flashrt_abi_version() == FLASHRT_ABI_VERSION);
    CHECK(strcmp(flashrt_archs(), "") == 0);
    CHECK(strcmp(flashrt_last_error(), "") == 0);
    CHECK(strcmp(flashrt_status_name(FLASHRT_STATUS_ABI_MISMATCH), "ABI mismatch") == 0);
    CHECK(strcmp(flashrt_status_name(-7), "unknown status") == 0);

    memset(op_codes, FLASHRT_OP_OTHER, sizeof op_codes);
#define OP_CODE(name) op_codes[FLASHRT_OP_##name + OP_SHIFT] = FLASHRT_OP_##name;
    FLASHRT_OPS(OP_CODE)

    static float    memory[6][64];
    static tensor_t x, h, w, sum, norm, scaled;
    make_tensor(&x, FLASHRT_OP_NONE, memory[0], NULL, NULL);
    make_tensor(&h, FLASHRT_OP_NONE, memory[1], NULL, NULL);
    make_tensor(&w, FLASHRT_OP_NONE, memory[2], NULL, NULL);
    make_tensor(&sum, FLASHRT_OP_ADD, memory[3], &x, &h);
    make_tensor(&norm, FLASHRT_OP_RMS_NORM, memory[4], &sum, NULL);
    make_tensor(&scaled, FLASHRT_OP_MUL, memory[5], &norm, &w);

    static tensor_t * nodes[3]   = { &sum, &norm, &scaled };
    tensor_t **       node_list  = nodes;
    const int         n_nodes    = 3;
    cgraph_t          graph;
    memset(&graph, 0, sizeof graph);
    SET(graph, CGRAPH_n_nodes, n_nodes);
    SET(graph, CGRAPH_nodes, node_list);

    if (argc > 1 && strcmp(argv[1], "unheard") == 0) {
        check_unheard(&graph);
    }
    check_bad_arguments(&graph);
    check_version_mismatch(&graph);
    check_evaluations(&graph, off);
    check_stats();
    return 0;
}
