// SPDX-License-Identifier: Apache-2.0
// Stands for llama.cpp in the link matrix. `host` has the backend linked in; built with HOST_LOADS it opens argv[1] instead.
#include <stdio.h>

#ifdef HOST_LOADS
#    include <dlfcn.h>

int main(int argc, char ** argv) {
    void * backend = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (backend == NULL) {
        fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "which backend?");
        return 1;
    }
    int (*run)(void) = NULL;
    *(void **) &run  = dlsym(backend, "backend_run");
    return run != NULL && run() > 0 ? 0 : 1;
}
#else
int backend_run(void);

int main(void) {
    return backend_run() > 0 ? 0 : 1;
}
#endif
