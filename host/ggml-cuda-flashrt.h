// SPDX-License-Identifier: Apache-2.0
// What the hook patch calls from ggml-cuda.cu. Defined in ggml-cuda-flashrt.inl, which ggml-cuda.cu includes at its end so that
// the definitions can use its static functions.
#pragma once

#include "flashrt.h"

struct ggml_backend_cuda_context;
struct ggml_cgraph;

// Start of graph_compute, before the graph's key is used. Never while capturing.
static void ggml_cuda_flashrt_eval_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);

// Number of nodes from i on that are done; 0: nothing was touched, run node i as usual.
static int ggml_cuda_flashrt_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, bool capturing);

// After the last node, a capture still open. False: a launch failed; the capture is closed, the entry of this graph is gone,
// nothing is in flight, and nothing may be replayed.
static bool ggml_cuda_flashrt_eval_end(ggml_backend_cuda_context & ctx, const void * graph_key, bool capturing);

// Did a launch of the evaluation that just ended on this thread fail?
static bool ggml_cuda_flashrt_failed();

// Will node i be fused in this evaluation, whatever happens?
static bool ggml_cuda_flashrt_takes(const ggml_cgraph * cgraph, int i);

// Should graph_optimize leave the order of the nodes alone?
static bool ggml_cuda_flashrt_keep_order(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
