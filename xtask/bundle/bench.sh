#!/bin/sh
# Adapter, stock, adapter: tokens per second of each as llama-bench prints them. Arguments go to llama-bench.
set -eu
. "$(dirname "$0")/env.sh"
need_model
for build in adapter stock adapter; do
    echo "== $build"
    "$bundle/$build/llama-bench" -m "$model" -ngl 99 -fa 1 -p 512 -n 128 "$@"
done
