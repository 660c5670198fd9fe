// SPDX-License-Identifier: Apache-2.0
// Checks and choice in front of the mat-mul kernels of mm.cuh.
#include <string.h>
#include "../quant/h16.cuh"
#include "mm.cuh"

namespace frt {
namespace mm {

namespace {

struct Entry {
    int32_t           type;  // ggml_type
    int               block, row_align;
    const Launchers * launchers;
};

constexpr Entry kEntries[] = {
    {1, 64, 16, &mm_f16},    {30, 64, 16, &mm_bf16},   {2, 32, 2, &mm_q4_0},    {3, 32, 4, &mm_q4_1},   {6, 32, 2, &mm_q5_0},   {7, 32, 8, &mm_q5_1},
    {8, 32, 2, &mm_q8_0},    {10, 256, 4, &mm_q2_k},   {11, 256, 2, &mm_q3_k},  {12, 256, 16, &mm_q4_k}, {13, 256, 16, &mm_q5_k}, {14, 256, 2, &mm_q6_k},
    {20, 32, 2, &mm_iq4_nl}, {23, 256, 8, &mm_iq4_xs}, {39, 32, 1, &mm_mxfp4},  {40, 64, 4, &mm_nvfp4},
};

const Entry * find(int32_t type) {
    for (const Entry & e : kEntries) {
        if (e.type == type) {
            return &e;
        }
    }
    return nullptr;
}

// Code for exactly this device: wgmma exists on no other, and PTX of it neither.
bool device_has_kernel() {
    int device = 0, major = 0, minor = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    return strstr(FRT_ARCHS, "sm_90a") != nullptr && major == 9 && minor == 0;
}

bool usable(const frt_h16 & x) { return x.x != nullptr && x.scale != nullptr && aligned(x.x, kH16Align); }

bool usable(const void * w, int64_t row_bytes, const Entry & e) { return w != nullptr && aligned(w, 16) && row_bytes % e.row_align == 0; }

// Time of a product so cut, in units that only compare: waves of tiles, each as long as its steps, and a step as it is wide plus what it
// takes to dequantise the weights for however many tokens. Measured on an H200: a step of 256, 128 columns takes Q8_0 1090, 890 cycles,
// NVFP4 1070, 790. Infinite where it cannot be cut so.
int64_t cost(const frt_mm_args & a, Cut cut, int sm_count) {
    const int     rows = a.glu == FRT_GLU_NONE ? kTileRows<false> : kTileRows<true>;
    const int64_t tiles = static_cast<int64_t>(ceil_div(a.n_tokens, cut.tokens)) * ceil_div(a.n_rows, rows);
    if (cut.blocks > 1 && (tiles * cut.blocks > sm_count || a.k < 8 * kSpan)) {
        return INT64_MAX;
    }
    const int64_t steps = a.k / kStep / cut.blocks + (cut.blocks > 1 ? 8 : 0);
    return (tiles * cut.blocks + sm_count - 1) / sm_count * steps * (cut.tokens + 256);
}

Cut best_cut(const frt_mm_args & a, int sm_count) {
    Cut best = {256, 1};
    for (Cut cut : {Cut{256, 2}, Cut{128, 1}, Cut{128, 2}, Cut{64, 1}, Cut{64, 2}}) {
        best = cost(a, cut, sm_count) < cost(a, best, sm_count) ? cut : best;
    }
    return best;
}

}  // namespace

cudaError_t mm_any(const frt_mm_args & a, frt_launch how, Cut cut) {
    const Entry * e = find(a.type);
    const bool    glu = a.glu != FRT_GLU_NONE;
    if (!frt_mm_supports(a.type, a.k, a.glu) || a.n_rows < 1 || a.n_tokens < 1 || a.dst == nullptr || !usable(a.x) ||
        !usable(a.w, a.row_bytes, *e) || (glu && (!usable(a.w2, a.row_bytes, *e) || a.bias != nullptr || a.res != nullptr))) {
        return cudaErrorInvalidValue;
    }
    return e->launchers->plain(a, how, cut.tokens > 0 ? cut : best_cut(a, how.sm_count));
}

cudaError_t moe_any(const frt_moe_mm_args & a, frt_launch how) {
    const Entry * e = find(a.type);
    if (!frt_moe_mm_supports(a.type, a.k, a.glu, a.n_experts) || a.n_rows < 1 || a.n_pairs < 1 || a.dst == nullptr || !usable(a.x) ||
        !usable(a.w, a.row_bytes, *e) || a.expert_bytes % e->row_align != 0 ||
        (a.glu != FRT_GLU_NONE && !usable(a.w2, a.row_bytes, *e)) || a.route.rows == nullptr || a.route.begin == nullptr ||
        a.route.count == nullptr) {
        return cudaErrorInvalidValue;
    }
    return e->launchers->routed(a, how);
}

}  // namespace mm
}  // namespace frt

extern "C" int frt_mm(const frt_mm_args * args, frt_launch how) { return frt::mm::mm_any(*args, how, {0, 0}); }

extern "C" int frt_moe_mm(const frt_moe_mm_args * args, frt_launch how) { return frt::mm::moe_any(*args, how); }

extern "C" int frt_mm_supports(int32_t type, int32_t k, int32_t glu) {
    const frt::mm::Entry * e = frt::mm::find(type);
    return e != nullptr && frt::glu_known(glu) && k >= 64 && k % 64 == 0 && k % e->block == 0 && frt::mm::device_has_kernel() ? 1 : 0;
}

extern "C" int frt_moe_mm_supports(int32_t type, int32_t k, int32_t glu, int32_t n_experts) {
    return n_experts >= 1 && n_experts <= FRT_MOE_MAX_EXPERTS && frt_mm_supports(type, k, glu) ? 1 : 0;
}
