#!/bin/sh
# The kernels' tests: machine code of this GPU, then the text for Orin as this GPU's driver compiles it.
set -eu
. "$(dirname "$0")/env.sh"
FLASHRT_REQUIRE_CUDA=1
export FLASHRT_REQUIRE_CUDA
failed=
for test in "$bundle"/tests/gpu_* "$bundle"/tests-ptx87/gpu_*; do
    [ -x "$test" ] || continue
    echo "== ${test#"$bundle"/}"
    "$test" "$@" || failed="$failed ${test#"$bundle"/}"
done
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
