// SPDX-License-Identifier: Apache-2.0
// Calls cudart_stub.c the way ggml-cuda calls CUDA: one graph captured, then launched once a token. Returns 0 if every call
// answered what it answers without a library in between.
#include <stddef.h>
#include <stdio.h>

typedef struct {
    unsigned x, y, z;
} dim3;

int cudaMalloc(size_t p, size_t n);
int cudaFree(size_t p);
int cudaStreamSynchronize(size_t stream);
int cudaStreamBeginCapture(size_t stream, int mode);
int cudaStreamEndCapture(size_t stream, size_t graph);
int cudaGraphInstantiate(size_t exec, size_t graph, unsigned long long flags);
int cudaGraphLaunch(size_t exec, size_t stream);
int cudaLaunchKernel(size_t f, dim3 grid, dim3 block, size_t args, size_t shared, size_t stream);
int __cudaLaunchKernel(size_t f, dim3 grid, dim3 block, size_t args, size_t shared, size_t stream);
int cudaLaunchKernelExC(size_t config, size_t f, size_t args);
int cudaMemcpy2DAsync(size_t to, size_t to_pitch, size_t from, size_t from_pitch, size_t width, size_t height, int kind,
                      size_t stream);
int cuMemRelease(unsigned long long handle);
int work(int tokens);

static int wrong;

static void expect(const char * call, int got, int wanted) {
    if (got != wanted) {
        fprintf(stderr, "%s: %d instead of %d\n", call, got, wanted);
        wrong = 1;
    }
}
#define EXPECT(call, wanted) expect(#call, call, wanted)

int work(int tokens) {
    const dim3 grid = { 2, 3, 4 }, block = { 5, 6, 7 };
    EXPECT(cudaMalloc(10, 20), 10 + 2 * 20);
    EXPECT(cudaStreamBeginCapture(3, 2), 3 + 2 * 2);
    EXPECT(cudaLaunchKernel(1, grid, block, 8, 9, 10), 1 + 4 + 9 + 16 + 25 + 36 + 49 + 64 + 81 + 100);
    EXPECT(__cudaLaunchKernel(1, grid, block, 8, 9, 10), 2 + 4 + 9 + 16 + 25 + 36 + 49 + 64 + 81 + 100);
    EXPECT(cudaLaunchKernelExC(1, 2, 3), 1 + 4 + 9);
    EXPECT(cudaLaunchKernelExC(4, 5, 6), 4 + 10 + 18);
    EXPECT(cudaStreamEndCapture(3, 4), 3 + 8);
    EXPECT(cudaGraphInstantiate(5, 6, 7), 5 + 12 + 21);
    for (int i = 0; i < tokens; i++) {
        EXPECT(cudaMemcpy2DAsync(1, 2, 3, 4, 5, 6, 7, 8), 1 + 4 + 9 + 16 + 25 + 36 + 49 + 64);
        EXPECT(cudaMemcpy2DAsync(0, 0, 0, 0, 0, 0, 0, 9), 72);
        EXPECT(cudaGraphLaunch(5, 3), 5 + 6);
        EXPECT(cudaStreamSynchronize(3), 3);
    }
    EXPECT(cudaFree(10), 10);
    EXPECT(cuMemRelease(7000000000042ull), 42);
    return wrong;
}
