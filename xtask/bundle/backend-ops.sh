#!/bin/sh
# ggml's own comparison of every operation with the CPU, with the adapter in place. Arguments go to test-backend-ops.
set -eu
. "$(dirname "$0")/env.sh"
exec "$bundle/adapter/test-backend-ops" test -b CUDA0 "$@"
