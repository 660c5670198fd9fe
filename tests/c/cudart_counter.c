// SPDX-License-Identifier: Apache-2.0
/*
 * Counts a process's calls of the shared CUDA runtime that synchronise, allocate, free, launch, copy or deal with graphs, and
 * the memory calls it makes to the driver directly (ggml's pool grows by cuMemCreate). Builds without CUDA's headers:
 *
 *   gcc -O2 -shared -fPIC tests/c/cudart_counter.c -o libcudart_counter.so -ldl
 *   LD_PRELOAD=$PWD/libcudart_counter.so CUDART_COUNTER_OUT=on.json CUDART_COUNTER_AFTER=64 CUDART_COUNTER_UNTIL=192 \
 *       llama-bench -m model.gguf -p 0 -n 128 -r 2
 *
 * CUDART_COUNTER_OUT    the file, written when the process exits; stderr if unset
 * CUDART_COUNTER_AFTER  counting starts when this many cudaGraphLaunch calls have returned; default 0: from the start
 * CUDART_COUNTER_UNTIL  counting ends when this many have returned, so that what happens at exit is left out; default: never
 *
 * "counts" is null, with a reason, if the process ended before counting started. A process that calls none of these functions
 * writes nothing, so that children which never touch CUDA do not replace their parent's file.
 *
 * Not seen: a runtime linked statically, and calls that libraries (cuBLAS) make to a runtime of their own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Handles and pointers are all one to the calling convention; dim3 is passed by value and needs its shape.
typedef struct {
    unsigned x, y, z;
} dim3;

typedef void * ptr;
typedef unsigned long long u64;

// Group, function, parameters, arguments. Every function returns a status that fits an int. nvcc 13 compiles `<<<>>>` to
// __cudaLaunchKernel, older ones to cudaLaunchKernel.
#define COUNTED(X)                                                                                                            \
    X(synchronise, cudaDeviceSynchronize, (void), ())                                                                         \
    X(synchronise, cudaStreamSynchronize, (ptr stream), (stream))                                                             \
    X(synchronise, cudaEventSynchronize, (ptr event), (event))                                                                \
    X(synchronise, cudaMemcpy, (ptr to, ptr from, size_t n, int kind), (to, from, n, kind))                                   \
    X(synchronise, cudaMemset, (ptr to, int value, size_t n), (to, value, n))                                                 \
    X(allocate, cudaMalloc, (ptr p, size_t n), (p, n))                                                                        \
    X(allocate, cudaMallocAsync, (ptr p, size_t n, ptr stream), (p, n, stream))                                               \
    X(allocate, cudaMallocFromPoolAsync, (ptr p, size_t n, ptr pool, ptr stream), (p, n, pool, stream))                       \
    X(allocate, cudaMallocManaged, (ptr p, size_t n, unsigned flags), (p, n, flags))                                          \
    X(allocate, cudaMallocHost, (ptr p, size_t n), (p, n))                                                                    \
    X(allocate, cudaHostAlloc, (ptr p, size_t n, unsigned flags), (p, n, flags))                                              \
    X(allocate, cudaHostRegister, (ptr p, size_t n, unsigned flags), (p, n, flags))                                           \
    X(allocate, cuMemCreate, (ptr handle, size_t n, ptr properties, u64 flags), (handle, n, properties, flags))               \
    X(free, cudaFree, (ptr p), (p))                                                                                           \
    X(free, cudaFreeAsync, (ptr p, ptr stream), (p, stream))                                                                  \
    X(free, cudaFreeHost, (ptr p), (p))                                                                                       \
    X(free, cudaHostUnregister, (ptr p), (p))                                                                                 \
    X(free, cuMemRelease, (u64 handle), (handle))                                                                             \
    X(launch, cudaLaunchKernel, (ptr f, dim3 grid, dim3 block, ptr args, size_t shared, ptr stream),                          \
      (f, grid, block, args, shared, stream))                                                                                 \
    X(launch, __cudaLaunchKernel, (ptr f, dim3 grid, dim3 block, ptr args, size_t shared, ptr stream),                        \
      (f, grid, block, args, shared, stream))                                                                                 \
    X(launch, cudaLaunchCooperativeKernel, (ptr f, dim3 grid, dim3 block, ptr args, size_t shared, ptr stream),               \
      (f, grid, block, args, shared, stream))                                                                                 \
    X(launch, cudaLaunchKernelExC, (ptr config, ptr f, ptr args), (config, f, args))                                          \
    X(launch, cudaLaunchHostFunc, (ptr stream, ptr f, ptr data), (stream, f, data))                                           \
    X(copy, cudaMemcpyAsync, (ptr to, ptr from, size_t n, int kind, ptr stream), (to, from, n, kind, stream))                 \
    X(copy, cudaMemcpyPeerAsync, (ptr to, int to_device, ptr from, int from_device, size_t n, ptr stream),                    \
      (to, to_device, from, from_device, n, stream))                                                                          \
    X(copy, cudaMemcpy2DAsync,                                                                                                \
      (ptr to, size_t to_pitch, ptr from, size_t from_pitch, size_t width, size_t height, int kind, ptr stream),              \
      (to, to_pitch, from, from_pitch, width, height, kind, stream))                                                          \
    X(copy, cudaMemsetAsync, (ptr to, int value, size_t n, ptr stream), (to, value, n, stream))                               \
    X(graph, cudaGraphLaunch, (ptr exec, ptr stream), (exec, stream))                                                         \
    X(graph, cudaGraphInstantiate, (ptr exec, ptr graph, u64 flags), (exec, graph, flags))                                    \
    X(graph, cudaGraphExecUpdate, (ptr exec, ptr graph, ptr result), (exec, graph, result))                                   \
    X(graph, cudaStreamBeginCapture, (ptr stream, int mode), (stream, mode))                                                  \
    X(graph, cudaStreamEndCapture, (ptr stream, ptr graph), (stream, graph))

enum {
#define X(group, function, parameters, arguments) index_##function,
    COUNTED(X)
#undef X
    N_FUNCTIONS
};

static const struct {
    const char * group;
    const char * name;
} functions[N_FUNCTIONS] = {
#define X(group, function, parameters, arguments) { #group, #function },
    COUNTED(X)
#undef X
};

static atomic_ullong counts[N_FUNCTIONS];
static atomic_ullong graph_launches;  // all of them, counted or not
static atomic_bool called;
static uint64_t after, until = UINT64_MAX;

static uint64_t number(const char * variable, uint64_t fallback) {
    const char * text = getenv(variable);
    if (!text || !*text) {
        return fallback;
    }
    char * end = NULL;
    const uint64_t value = strtoull(text, &end, 10);
    if (*end || *text == '-') {
        fprintf(stderr, "cudart_counter: %s=%s: not a number\n", variable, text);
        exit(2);
    }
    return value;
}

__attribute__((constructor)) static void set_up(void) {
    after = number("CUDART_COUNTER_AFTER", 0);
    until = number("CUDART_COUNTER_UNTIL", UINT64_MAX);
    if (until <= after) {
        fprintf(stderr, "cudart_counter: CUDART_COUNTER_UNTIL must be larger than CUDART_COUNTER_AFTER\n");
        exit(2);
    }
}

// A backend opened by dlopen brings a runtime that RTLD_NEXT does not find.
static void * real_function(const char * name) {
    static const char * const libraries[] = { "libcudart.so.13", "libcudart.so.12", "libcuda.so.1" };
    void * found = dlsym(RTLD_NEXT, name);
    for (size_t i = 0; !found && i < sizeof libraries / sizeof *libraries; i++) {
        void * library = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
        if (library) {
            found = dlsym(library, name);
            dlclose(library);  // gives back only what dlopen added: the process still holds the library
        }
    }
    if (!found) {
        fprintf(stderr, "cudart_counter: no loaded CUDA library has %s\n", name);
        abort();
    }
    return found;
}

static void count(int function) {
    called = 1;
    const uint64_t seen = graph_launches;
    if (seen >= after && seen < until) {
        counts[function]++;
    }
}

#define X(group, function, parameters, arguments)                         \
    __attribute__((visibility("default"))) int function parameters {      \
        static int(*_Atomic real) parameters;                             \
        if (!real) {                                                      \
            real = (int(*) parameters) real_function(#function);          \
        }                                                                 \
        count(index_##function);                                          \
        const int status = real arguments;                                \
        if (index_##function == index_cudaGraphLaunch) {                  \
            graph_launches++;                                             \
        }                                                                 \
        return status;                                                    \
    }
COUNTED(X)
#undef X

static void write_counts(FILE * out) {
    fputs("{", out);
    for (int i = 0; i < N_FUNCTIONS; i++) {
        const int opens = i == 0 || strcmp(functions[i].group, functions[i - 1].group) != 0;
        const int closes = i + 1 == N_FUNCTIONS || strcmp(functions[i].group, functions[i + 1].group) != 0;
        if (opens) {
            uint64_t total = 0;
            for (int j = i; j < N_FUNCTIONS && strcmp(functions[j].group, functions[i].group) == 0; j++) {
                total += counts[j];
            }
            fprintf(out, "%s\n  \"%s\": {\"total\": %llu", i ? "," : "", functions[i].group, (unsigned long long) total);
        }
        fprintf(out, ", \"%s\": %llu", functions[i].name, (unsigned long long) counts[i]);
        if (closes) {
            fputs("}", out);
        }
    }
    fputs("\n }", out);
}

__attribute__((destructor)) static void report(void) {
    if (!called) {
        return;
    }
    const char * path = getenv("CUDART_COUNTER_OUT");
    FILE * out = path && *path ? fopen(path, "w") : stderr;
    if (!out) {
        perror(path);
        return;
    }
    const unsigned long long seen = graph_launches;
    fprintf(out, "{\"after\": %llu, \"until\": ", (unsigned long long) after);
    if (until == UINT64_MAX) {
        fputs("null", out);
    } else {
        fprintf(out, "%llu", (unsigned long long) until);
    }
    fprintf(out, ", \"graph_launches_seen\": %llu, \"counts\": ", seen);
    if (seen >= after) {
        write_counts(out);
    } else {
        fprintf(out, "null, \"reason\": \"the process launched %llu graphs, counting starts after %llu\"", seen,
                (unsigned long long) after);
    }
    fputs("}\n", out);
    if (out != stderr && fclose(out) != 0) {
        perror(path);
    }
}
