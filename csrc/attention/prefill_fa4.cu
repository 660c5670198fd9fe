// SPDX-License-Identifier: Apache-2.0
// Attention of many tokens by a FlashAttention-4 module that `cargo xtask fa4` compiled ahead of time:
//
//   dst = softmax(scale * q . k + mask) . v, or 0 where every key is masked
//
// replaces FLASH_ATTN_EXT without ALiBi, softcap and sinks.
// q f32, k and v f16, mask f16 [n_kv], all with strides in bytes; dst f32 [n_streams][n_tokens][n_heads][head_dim_v].
//
// Launches: q to f16, the module, its result to f32. q is multiplied by the power of two that is next above scale or
// equal to it, which is exact and keeps large queries within f16, as stock does with scale itself; the module gets the rest. A module
// walks the tiles of frt_mask_tiles: it adds the mask in partial ones and leaves it alone in full ones. Modules are launched plainly, so
// they start when all earlier work is over.
// Archs: sm_90a (tensor cores: wgmma; operands by TMA). Registers, tiles and shared memory of modules: build/fa4/modules.json.
#include <cuda_fp16.h>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <mutex>

#include "../common/pdl.cuh"
#include "../flashrt_kernels.h"

#ifdef FRT_FA4
// X(name, head_dim, head_dim_v, tile_m, tile_n) for each module, and the modules' own headers.
#include "fa4_modules.h"
#else
#define FRT_FA4_MODULES(X)
#endif

namespace frt {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ uint32_t narrow(float x, float y) {
    const __half2 h = __floats2half2_rn(x, y);
    uint32_t      bits;
    memcpy(&bits, &h, sizeof(bits));
    return bits;
}

__device__ __forceinline__ float2 wide(uint32_t bits) {
    __half2 h;
    memcpy(&h, &bits, sizeof(h));
    return __half22float2(h);
}

// Eight values a thread; grid: token, eights of its heads, stream.
__global__ void __launch_bounds__(kThreads) queries_kernel(const __grid_constant__ frt_prefill_fa4_args a, uint4 * to, float factor) {
    pdl_wait();
    const int in_head = a.head_dim / 8, eights = a.n_heads * in_head, i = blockIdx.y * kThreads + threadIdx.x;
    if (i >= eights) {
        return;
    }
    const char * from = reinterpret_cast<const char *>(a.q) + blockIdx.z * a.q_stream_bytes + blockIdx.x * a.q_token_bytes +
                        i / in_head * a.q_head_bytes + i % in_head * 32;
    const float4 x = reinterpret_cast<const float4 *>(from)[0], y = reinterpret_cast<const float4 *>(from)[1];
    const int64_t row = static_cast<int64_t>(blockIdx.z) * gridDim.x + blockIdx.x;
    to[row * eights + i] = make_uint4(narrow(x.x * factor, x.y * factor), narrow(x.z * factor, x.w * factor),
                                      narrow(y.x * factor, y.y * factor), narrow(y.z * factor, y.w * factor));
}

__global__ void __launch_bounds__(kThreads) results_kernel(const uint4 * from, float4 * to, int64_t eights) {
    pdl_wait();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < eights) {
        const uint4  h = from[i];
        const float2 a = wide(h.x), b = wide(h.y), c = wide(h.z), d = wide(h.w);
        to[2 * i] = make_float4(a.x, a.y, b.x, b.y);
        to[2 * i + 1] = make_float4(c.x, c.y, d.x, d.y);
    }
}

// What a module's entry takes. Strides are in elements.
struct ModuleArgs {
    void *    q, *k, *v, *o, *mask;
    frt_tiles tiles;
    int32_t   n_tokens, n_kv, n_heads, n_heads_kv, n_streams, n_token_tiles, n_key_tiles;
    int64_t   q_stream, q_token, q_head, k_stream, k_row, k_head, v_stream, v_row, v_head, o_stream, o_token, o_head;
    int64_t   mask_stream, mask_token;
    float     scale, mask_factor;
};

// A module once it is loaded. The headers' own loaders would create a context on every GPU.
struct Module {
    const char * name;
    int32_t head_dim, head_dim_v, tile_m, tile_n;
    void (*init)(void **);
    void (*load_to_device)(void **);
    int (*run)(cudaLibrary_t, const ModuleArgs &, cudaStream_t);
    cudaLibrary_t library = nullptr;
    uint64_t      devices = 0;  // a bit for each that it is ready on
};

#ifdef FRT_FA4
#define FRT_RUN(name, ...)                                                                                                              \
    int run_##name(cudaLibrary_t library, const ModuleArgs & a, cudaStream_t stream) {                                                  \
        fa4_##name##_Kernel_Module_t module = {library};                                                                                \
        return cute_dsl_fa4_##name##_wrapper(                                                                                           \
            &module, a.q, a.k, a.v, a.o, a.mask, a.tiles.partial_count, a.tiles.partial_index, a.tiles.full_count, a.tiles.full_index,  \
            a.n_tokens, a.n_kv, a.n_heads, a.n_heads_kv, a.n_streams, a.n_token_tiles, a.n_key_tiles, a.q_stream, a.q_token, a.q_head,  \
            a.k_stream, a.k_row, a.k_head, a.v_stream, a.v_row, a.v_head, a.o_stream, a.o_token, a.o_head, a.mask_stream, a.mask_token, \
            a.scale, a.mask_factor, stream);                                                                                            \
    }
FRT_FA4_MODULES(FRT_RUN)
#endif

#define FRT_MODULE(name, head_dim, head_dim_v, tile_m, tile_n)                                                                          \
    {#name, head_dim, head_dim_v, tile_m, tile_n, _mlir_fa4_##name##_cuda_init, _mlir_fa4_##name##_cuda_load_to_device, run_##name},
#define FRT_NAME(name, ...) #name " "

// Ends with one that is none.
Module modules[] = {FRT_FA4_MODULES(FRT_MODULE){}};

Module * find(int32_t head_dim, int32_t head_dim_v) {
    for (Module & m : modules) {
        if (m.init != nullptr && m.head_dim == head_dim && m.head_dim_v == head_dim_v) {
            return &m;
        }
    }
    return nullptr;
}

std::mutex loading;

// Makes a module ready on the current device.
cudaError_t load(Module & m) {
    int         device = 0;
    cudaError_t err = cudaGetDevice(&device);
    if (err != cudaSuccess || device >= 64) {
        return err != cudaSuccess ? err : cudaErrorNotSupported;
    }
    const std::lock_guard<std::mutex> lock(loading);
    cudaLibrary_t * library = &m.library;
    if (m.library == nullptr) {
        struct {
            cudaLibrary_t ** library;
            cudaError_t *    err;
        } args = {&library, &err};
        m.init(reinterpret_cast<void **>(&args));
    }
    const uint64_t bit = uint64_t{1} << device;
    if (err == cudaSuccess && (m.devices & bit) == 0) {
        int32_t id = device;
        struct {
            cudaLibrary_t ** library;
            int32_t *        device;
            cudaError_t *    err;
        } args = {&library, &id, &err};
        m.load_to_device(reinterpret_cast<void **>(&args));
        m.devices |= err == cudaSuccess ? bit : 0;
    }
    return err;
}

bool on(uintptr_t bytes, std::initializer_list<const void *> pointers, std::initializer_list<int64_t> strides) {
    for (const void * p : pointers) {
        if (p == nullptr || reinterpret_cast<uintptr_t>(p) % bytes != 0) {
            return false;
        }
    }
    for (const int64_t s : strides) {
        if (s % static_cast<int64_t>(bytes) != 0) {
            return false;
        }
    }
    return true;
}

bool valid(const frt_prefill_fa4_args & a) {
    const frt_tiles & t = a.tiles;
    return a.n_heads_kv > 0 && a.n_heads > 0 && a.n_heads % a.n_heads_kv == 0 && a.n_tokens > 0 && a.n_kv > 0 && a.n_streams > 0 &&
           a.n_streams < 65536 && a.mask_tokens >= a.n_tokens && a.scale > 0.0f && std::isfinite(1.0f / a.scale) &&
           on(16, {a.q, a.k, a.v, a.dst, a.scratch},
              {a.q_token_bytes, a.q_head_bytes, a.q_stream_bytes, a.k_row_bytes, a.k_head_bytes, a.k_stream_bytes, a.v_row_bytes,
               a.v_head_bytes, a.v_stream_bytes}) &&
           on(4, {a.mask, t.partial_count, t.partial_index, t.full_count, t.full_index}, {a.mask_token_bytes, a.mask_stream_bytes});
}

// The power of two that is next above scale, or scale itself.
float power_above(float scale) {
    int         exponent = 0;
    const float fraction = std::frexp(scale, &exponent);
    return std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

// Queries and results as f16.
char * narrow_q(const frt_prefill_fa4_args & a) { return static_cast<char *>(a.scratch); }
char * narrow_o(const frt_prefill_fa4_args & a) {
    return narrow_q(a) + static_cast<int64_t>(a.n_streams) * a.n_tokens * a.n_heads * a.head_dim * 2;
}

cudaError_t convert_queries(const frt_prefill_fa4_args & a, frt_launch how) {
    const int eights = a.n_heads * (a.head_dim / 8);
    return launch<queries_kernel>(how, dim3(a.n_tokens, (eights - 1) / kThreads + 1, a.n_streams), kThreads, 0, a,
                                  reinterpret_cast<uint4 *>(narrow_q(a)), power_above(a.scale));
}

cudaError_t attend(const Module & m, const frt_prefill_fa4_args & a, frt_launch how) {
    auto       mutable_ptr = [](const void * p) { return const_cast<void *>(p); };
    ModuleArgs args = {};
    args.q = narrow_q(a);
    args.k = mutable_ptr(a.k);
    args.v = mutable_ptr(a.v);
    args.o = narrow_o(a);
    args.mask = mutable_ptr(a.mask);
    args.tiles = a.tiles;
    args.n_tokens = a.n_tokens;
    args.n_kv = a.n_kv;
    args.n_heads = a.n_heads;
    args.n_heads_kv = a.n_heads_kv;
    args.n_streams = a.n_streams;
    args.n_token_tiles = (a.mask_tokens - 1) / a.tile_m + 1;
    args.n_key_tiles = (a.n_kv - 1) / a.tile_n + 1;
    args.q_head = a.head_dim;
    args.q_token = static_cast<int64_t>(a.n_heads) * a.head_dim;
    args.q_stream = a.n_tokens * args.q_token;
    args.o_head = a.head_dim_v;
    args.o_token = static_cast<int64_t>(a.n_heads) * a.head_dim_v;
    args.o_stream = a.n_tokens * args.o_token;
    args.k_stream = a.k_stream_bytes / 2;
    args.k_row = a.k_row_bytes / 2;
    args.k_head = a.k_head_bytes / 2;
    args.v_stream = a.v_stream_bytes / 2;
    args.v_row = a.v_row_bytes / 2;
    args.v_head = a.v_head_bytes / 2;
    args.mask_stream = a.mask_stream_bytes / 2;
    args.mask_token = a.mask_token_bytes / 2;
    args.scale = a.scale / power_above(a.scale);
    // The module multiplies scores with scale after it has added the mask.
    args.mask_factor = 1.0f / args.scale;
    return static_cast<cudaError_t>(m.run(m.library, args, static_cast<cudaStream_t>(how.stream)));
}

cudaError_t convert_results(const frt_prefill_fa4_args & a, frt_launch how) {
    const int64_t eights = static_cast<int64_t>(a.n_streams) * a.n_tokens * a.n_heads * a.head_dim_v / 8;
    return launch<results_kernel>(how, static_cast<unsigned>((eights - 1) / kThreads + 1), kThreads, 0,
                                  reinterpret_cast<const uint4 *>(narrow_o(a)), reinterpret_cast<float4 *>(a.dst), eights);
}

bool device_is_hopper() {
    int device = 0, major = 0, minor = 0;
    return cudaGetDevice(&device) == cudaSuccess && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 && minor == 0;
}

}  // namespace
}  // namespace frt

int frt_prefill_fa4_supports(int32_t head_dim, int32_t head_dim_v) {
    frt::Module * m = frt::find(head_dim, head_dim_v);
    const bool    ready = m != nullptr && frt::device_is_hopper() && frt::load(*m) == cudaSuccess;
    if (m != nullptr && !ready) {
        cudaGetLastError();  // not for the host to trip over
    }
    return ready ? 1 : 0;
}

const char * frt_prefill_fa4_modules(void) {
    return "" FRT_FA4_MODULES(FRT_NAME);
}

int frt_prefill_fa4(const frt_prefill_fa4_args * args, frt_launch how) {
    frt::Module * m = frt::find(args->head_dim, args->head_dim_v);
    if (m == nullptr || !frt::valid(*args) || args->tile_m != m->tile_m || args->tile_n != m->tile_n || how.cc != 90) {
        return cudaErrorInvalidValue;
    }
    cudaError_t err = frt::load(*m);
    err = err != cudaSuccess ? err : frt::convert_queries(*args, how);
    err = err != cudaSuccess ? err : frt::attend(*m, *args, how);
    return err != cudaSuccess ? err : frt::convert_results(*args, how);
}
