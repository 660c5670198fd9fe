// SPDX-License-Identifier: Apache-2.0
// Stands for ggml-cuda in the link matrix: an object that calls the library and offers one function to its host.
#include "flashrt.h"

#include <string.h>

__attribute__((visibility("default"))) int backend_run(void);

// The bytes that the library's statistics take, or 0 when anything is not as it should be.
int backend_run(void) {
    flashrt_host host;
    memset(&host, 0, sizeof host);
    host.abi_version = FLASHRT_ABI_VERSION;
    host.struct_size = sizeof host;

    const int begun = flashrt_eval_begin(&host, NULL);
    if (begun != FLASHRT_STATUS_BAD_ARGUMENT || flashrt_fuse(&host, NULL, 0) != 0 || flashrt_takes(&host, NULL, 0) != 0 ||
        flashrt_graph_optimize(&host, NULL) != 0 || flashrt_eval_end(&host) != FLASHRT_STATUS_OK) {
        return 0;
    }
    flashrt_buffer_freed(0, &host, sizeof host);
    flashrt_context_free(&host);

    size_t needed = 0;
    return flashrt_stats(NULL, 0, &needed) == FLASHRT_STATUS_BUFFER_TOO_SMALL ? (int) needed : 0;
}
