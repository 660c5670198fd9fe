// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of mat-mul and attention share: how a figure is taken.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <unistd.h>
#include <vector>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                     \
    do {                                                                                                \
        const int err_ = static_cast<int>(call);                                                        \
        if (err_ != 0) {                                                                                \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(static_cast<cudaError_t>(err_)));     \
            exit(1);                                                                                    \
        }                                                                                               \
    } while (0)

// Calls of a sample; each has operands of its own.
static const int kCopies = 4;
// Before each sample. Tensor cores that run for some tens of milliseconds without a pause reach the GPU's power limit, and the clock
// falls.
static const int kRestUs = 20000;

// Microseconds of a call, 30 samples after three that do not count.
static std::vector<float> samples_us(cudaStream_t stream, const std::function<void(int)> & call) {
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<float> us;
    for (int i = 0; i < 33; ++i) {
        usleep(kRestUs);
        CHECK(cudaEventRecord(a, stream));
        for (int j = 0; j < kCopies; ++j) {
            call(j);
        }
        CHECK(cudaEventRecord(b, stream));
        CHECK(cudaEventSynchronize(b));
        float t;
        CHECK(cudaEventElapsedTime(&t, a, b));
        if (i >= 3) {
            us.push_back(1000.0f * t / kCopies);
        }
    }
    return us;
}
