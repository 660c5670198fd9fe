// SPDX-License-Identifier: Apache-2.0
/*
 * Records every kernel, copy and memset that a process runs on its GPUs, those inside CUDA graphs one by one. The CUDA driver
 * loads this library into an unmodified program. bench/kernel_trace.py reads what it writes.
 *
 *   pip install --target cupti 'nvidia-cuda-cupti==13.0.*'
 *   gcc -O2 -shared -fPIC -I cupti/nvidia/cu13/include -I $CUDA_HOME/include bench/kernel_trace.c \
 *       -o libkernel_trace.so -L cupti/nvidia/cu13/lib -l:libcupti.so.13
 *   LD_LIBRARY_PATH=cupti/nvidia/cu13/lib CUDA_INJECTION64_PATH=$PWD/libkernel_trace.so KERNEL_TRACE_OUT=trace.jsonl \
 *       llama-bench -m model.gguf -p 0 -n 64 -r 2
 *
 * KERNEL_TRACE_OUT   the file, written when the process exits (not when a signal kills it)
 * KERNEL_TRACE_LAST  keep only the last N records; without it all are kept, 48 bytes each
 *
 * The file is JSON lines. First an object: format, version, how many records were dropped for want of memory, came without time
 * stamps (untimed) or made place for later ones (overwritten), and the table of names, kernels' mangled. Then one array a record,
 * in no particular order:
 *   [index into names, start ns, end ns, device, stream, graph id or 0, correlation id, bytes or 0]
 * All nodes of one graph launch share a correlation id.
 *
 * Time stamps cost time between kernels, most of all inside graphs: a traced run is slower than the same run untraced, and
 * kernels may overlap less. Read durations and shares here, tokens a second elsewhere.
 */
#include <cupti.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ACTIVITY_BUFFER_BYTES = 4 << 20,  // some 20 000 records
    ACTIVITY_BUFFER_ALIGN = 8,        // what CUPTI asks for
    NAME_SLOTS = 1 << 14,             // a power of two, far more than ggml-cuda has kernels
};

static const uint32_t NO_NAME = UINT32_MAX;

typedef struct {
    uint64_t start, end, bytes;
    uint32_t name, device, stream, graph, correlation;
} record;

typedef struct {
    const char * kind;
    char * text;
} name;

static struct {
    pthread_mutex_t lock;
    const char * path;
    record * records;
    size_t count, capacity, limit;  // count goes on beyond limit: records[count % limit] is the oldest then
    size_t dropped, untimed;
    name names[NAME_SLOTS];
    uint32_t n_names;
    uint32_t slots[NAME_SLOTS];  // open addressing by the text's hash: index into names + 1, or 0
} trace = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void complain(const char * what, const char * why) {
    fprintf(stderr, "kernel_trace: %s: %s\n", what, why);
}

static int failed(CUptiResult result, const char * call) {
    if (result == CUPTI_SUCCESS) {
        return 0;
    }
    const char * why = "unknown error";
    cuptiGetResultString(result, &why);
    complain(call, why);
    return 1;
}

// Texts are copied: CUPTI's own live only as long as the module of the kernel.
static uint32_t intern(const char * kind, const char * text) {
    uint32_t hash = 2166136261u;  // FNV-1a
    for (const char * c = text; *c; c++) {
        hash = (hash ^ (unsigned char) *c) * 16777619u;
    }
    uint32_t slot = hash % NAME_SLOTS;
    for (; trace.slots[slot]; slot = (slot + 1) % NAME_SLOTS) {
        const uint32_t index = trace.slots[slot] - 1;
        if (strcmp(trace.names[index].text, text) == 0) {
            return index;
        }
    }
    // One slot stays empty, or the search above would not end.
    char * copy = trace.n_names < NAME_SLOTS - 1 ? strdup(text) : NULL;
    if (!copy) {
        return NO_NAME;
    }
    trace.names[trace.n_names] = (name){ kind, copy };
    trace.slots[slot] = ++trace.n_names;
    return trace.n_names - 1;
}

static void keep(record r) {
    if (r.name == NO_NAME) {
        trace.dropped++;
        return;
    }
    if (r.start == 0 || r.end < r.start) {
        trace.untimed++;
        return;
    }
    if (trace.count == trace.capacity && trace.capacity < trace.limit) {
        size_t capacity = trace.capacity ? 2 * trace.capacity : 1 << 16;
        if (capacity > trace.limit) {
            capacity = trace.limit;
        }
        record * grown = realloc(trace.records, capacity * sizeof *grown);
        if (!grown) {
            trace.dropped++;
            return;
        }
        trace.records = grown;
        trace.capacity = capacity;
    }
    trace.records[trace.count++ % trace.limit] = r;
}

static const char * copy_name(uint8_t kind) {
    switch (kind) {
        case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD: return "memcpy HtoD";
        case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH: return "memcpy DtoH";
        case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD: return "memcpy DtoD";
        case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP: return "memcpy PtoP";
        default:                              return "memcpy other";
    }
}

static void take(const CUpti_Activity * activity) {
    switch (activity->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
            const CUpti_ActivityKernel10 * a = (const void *) activity;
            keep((record){ a->start, a->end, 0, intern("kernel", a->name ? a->name : "(no name)"), a->deviceId, a->streamId,
                           a->graphId, a->correlationId });
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
            const CUpti_ActivityMemcpy6 * a = (const void *) activity;
            keep((record){ a->start, a->end, a->bytes, intern("memcpy", copy_name(a->copyKind)), a->deviceId, a->streamId,
                           a->graphId, a->correlationId });
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
            const CUpti_ActivityMemset4 * a = (const void *) activity;
            keep((record){ a->start, a->end, a->bytes, intern("memset", "memset"), a->deviceId, a->streamId, a->graphId,
                           a->correlationId });
            break;
        }
        default: break;
    }
}

static void CUPTIAPI buffer_requested(uint8_t ** buffer, size_t * size, size_t * max_records) {
    *buffer = aligned_alloc(ACTIVITY_BUFFER_ALIGN, ACTIVITY_BUFFER_BYTES);
    *size = *buffer ? ACTIVITY_BUFFER_BYTES : 0;
    *max_records = 0;  // as many as fit
}

static void CUPTIAPI buffer_completed(CUcontext context, uint32_t stream, uint8_t * buffer, size_t size, size_t valid) {
    (void) size;
    pthread_mutex_lock(&trace.lock);
    CUpti_Activity * activity = NULL;
    while (valid > 0 && cuptiActivityGetNextRecord(buffer, valid, &activity) == CUPTI_SUCCESS) {
        take(activity);
    }
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS) {
        trace.dropped += dropped;
    }
    pthread_mutex_unlock(&trace.lock);
    free(buffer);
}

static void write_string(FILE * out, const char * text) {
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') {
            fputc('\\', out);
        }
        fputc(*text, out);
    }
    fputc('"', out);
}

static void write_trace(void) {
    failed(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
    pthread_mutex_lock(&trace.lock);
    FILE * out = fopen(trace.path, "w");
    if (!out) {
        perror(trace.path);
        pthread_mutex_unlock(&trace.lock);
        return;
    }
    const size_t kept = trace.count < trace.limit ? trace.count : trace.limit;
    fprintf(out, "{\"format\":\"kernel_trace\",\"version\":1,\"dropped\":%zu,\"untimed\":%zu,\"overwritten\":%zu,\"names\":[",
            trace.dropped, trace.untimed, trace.count - kept);
    for (uint32_t i = 0; i < trace.n_names; i++) {
        fprintf(out, "%s{\"kind\":\"%s\",\"name\":", i ? "," : "", trace.names[i].kind);
        write_string(out, trace.names[i].text);
        fputc('}', out);
    }
    fputs("]}\n", out);
    for (const record * r = trace.records; r < trace.records + kept; r++) {
        fprintf(out, "[%" PRIu32 ",%" PRIu64 ",%" PRIu64 ",%" PRIu32 ",%" PRIu32 ",%" PRIu32 ",%" PRIu32 ",%" PRIu64 "]\n",
                r->name, r->start, r->end, r->device, r->stream, r->graph, r->correlation, r->bytes);
    }
    const int bad = ferror(out);
    if (fclose(out) != 0 || bad) {
        complain(trace.path, "could not be written whole");
    }
    pthread_mutex_unlock(&trace.lock);
}

// Called by the driver when the process initialises CUDA. The process goes on untraced when tracing cannot start.
__attribute__((visibility("default"))) int InitializeInjection(void) {
    trace.path = getenv("KERNEL_TRACE_OUT");
    if (!trace.path || !*trace.path) {
        complain("KERNEL_TRACE_OUT", "not set, nothing is recorded");
        return 1;
    }
    trace.limit = SIZE_MAX / sizeof(record);
    const char * last = getenv("KERNEL_TRACE_LAST");
    if (last && *last) {
        char * end = NULL;
        trace.limit = strtoull(last, &end, 10);
        if (*end || trace.limit == 0) {
            complain("KERNEL_TRACE_LAST", "must be a number of records above 0, nothing is recorded");
            return 1;
        }
    }
    // Newer libraries keep the layout of the records; older ones write shorter ones.
    uint32_t version = 0;
    if (failed(cuptiGetVersion(&version), "cuptiGetVersion")) {
        return 1;
    }
    if (version < CUPTI_API_VERSION) {
        complain("libcupti", "older than the headers this library was compiled with, nothing is recorded");
        return 1;
    }
    if (failed(cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed), "cuptiActivityRegisterCallbacks") ||
        failed(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "cuptiActivityEnable(CONCURRENT_KERNEL)") ||
        failed(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "cuptiActivityEnable(MEMCPY)") ||
        failed(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET), "cuptiActivityEnable(MEMSET)")) {
        return 1;
    }
    atexit(write_trace);
    return 1;
}
