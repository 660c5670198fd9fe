// SPDX-License-Identifier: Apache-2.0
// Checks and choice in front of the mat-vec kernels of gemv.cuh.
#include "gemv.cuh"

namespace frt {

namespace {

enum : int32_t { kF16 = 1, kBF16 = 30, kQ4_0 = 2, kQ5_0 = 6, kQ8_0 = 8, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };  // ggml_type

struct Format {
    bool known, q8;
    int  block;  // k is a multiple of it
    int  align;  // of rows
};

Format format_of(int32_t type) {
    switch (type) {
        case kF16:
        case kBF16: return {true, false, 8, 16};
        case kQ4_0:
        case kQ5_0:
        case kQ8_0: return {true, true, 32, 2};
        case kQ4_K:
        case kQ5_K: return {true, true, 256, 16};
        case kQ6_K: return {true, true, 256, 2};
        default: return {};
    }
}

bool acceptable(const frt_gemv_args & a) {
    const Format f = format_of(a.type);
    const bool   glu = a.glu != FRT_GLU_NONE;
    if (!frt_gemv_supports(a.type, a.k, a.n_tokens, a.glu) || a.n_seg < 1 || a.n_seg > 3 || (glu && a.n_seg != 2)) {
        return false;
    }
    for (int s = 0; s < a.n_seg; ++s) {
        const frt_gemv_seg & seg = a.seg[s];
        const bool stored = !glu || s == 0;
        if (seg.n_rows < 1 || !aligned(seg.w, f.align) || seg.row_bytes % f.align != 0 || (stored && seg.dst == nullptr)) {
            return false;
        }
    }
    if (glu && a.seg[0].n_rows != a.seg[1].n_rows) {
        return false;
    }
    if (f.q8 && a.xq.qs != nullptr) {
        return aligned(a.xq.qs, 16) && aligned(a.xq.ds, 8);
    }
    return a.x != nullptr && aligned(a.x, 16) && (a.n_tokens == 1 || a.x_stride % 4 == 0);
}

}  // namespace

cudaError_t gemv_any(const frt_gemv_args & args, frt_launch how, const GemvTuning * forced) {
    if (!acceptable(args)) {
        return cudaErrorInvalidValue;
    }
    switch (args.type) {
        case kF16: return gemv_f16(args, how, forced);
        case kBF16: return gemv_bf16(args, how, forced);
        case kQ4_0: return gemv_q4_0(args, how, forced);
        case kQ5_0: return gemv_q5_0(args, how, forced);
        case kQ8_0: return gemv_q8_0(args, how, forced);
        case kQ4_K: return gemv_q4_k(args, how, forced);
        case kQ5_K: return gemv_q5_k(args, how, forced);
        case kQ6_K: return gemv_q6_k(args, how, forced);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace frt

int frt_gemv_supports(int32_t type, int32_t k, int32_t n_tokens, int32_t glu) {
    const frt::Format f = frt::format_of(type);
    if (!f.known || k < f.block || k % f.block != 0 || n_tokens < 1 || n_tokens > FRT_MAX_TOKENS || !frt::glu_known(glu)) {
        return 0;
    }
    return frt::gemv_smem(frt::kWarps * frt::kRingBytes, k, n_tokens, f.q8) <=
           frt::device_bytes(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

int frt_gemv(const frt_gemv_args * args, frt_launch launch) { return frt::gemv_any(*args, launch, nullptr); }
