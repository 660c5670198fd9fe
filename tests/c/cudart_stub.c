// SPDX-License-Identifier: Apache-2.0
// Stands for libcudart and libcuda in the test of cudart_counter.c: every function answers with a number made from all of its
// arguments, so that a caller notices when one is lost on the way.
#include <stddef.h>

typedef struct {
    unsigned x, y, z;
} dim3;

static int sum(const size_t * values, size_t n) {
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        total += (i + 1) * values[i];
    }
    return (int) (total % 1000003);
}
#define SUM(...) sum((const size_t[]){ __VA_ARGS__ }, sizeof((const size_t[]){ __VA_ARGS__ }) / sizeof(size_t))
#define P(pointer) ((size_t) (pointer))

int cudaMalloc(void ** p, size_t n) { return SUM(P(p), n); }
int cudaFree(void * p) { return SUM(P(p)); }
int cudaStreamSynchronize(void * stream) { return SUM(P(stream)); }
int cudaStreamBeginCapture(void * stream, int mode) { return SUM(P(stream), (size_t) mode); }
int cudaStreamEndCapture(void * stream, void * graph) { return SUM(P(stream), P(graph)); }
int cudaGraphInstantiate(void * exec, void * graph, unsigned long long flags) { return SUM(P(exec), P(graph), flags); }
int cudaGraphLaunch(void * exec, void * stream) { return SUM(P(exec), P(stream)); }
int cudaLaunchKernelExC(const void * config, const void * f, void ** args) { return SUM(P(config), P(f), P(args)); }
int cuMemRelease(unsigned long long handle) { return SUM(handle % 1000); }

// Not through each other: a call between them would be counted as well.
#define LAUNCH SUM(P(f), grid.x, grid.y, grid.z, block.x, block.y, block.z, P(args), shared, P(stream))
int cudaLaunchKernel(const void * f, dim3 grid, dim3 block, void ** args, size_t shared, void * stream) { return LAUNCH; }
int __cudaLaunchKernel(void * f, dim3 grid, dim3 block, void ** args, size_t shared, void * stream) { return 1 + LAUNCH; }

int cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from, size_t from_pitch, size_t width, size_t height, int kind,
                      void * stream) {
    return SUM(P(to), to_pitch, P(from), from_pitch, width, height, (size_t) kind, P(stream));
}
