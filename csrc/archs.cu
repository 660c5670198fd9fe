// SPDX-License-Identifier: Apache-2.0
#include "flashrt_kernels.h"

const char * frt_archs(void) {
    return FRT_ARCHS;
}
