#!/bin/sh
# Generates text with the adapter and prints its table of windows. Arguments go to llama-completion.
set -eu
. "$(dirname "$0")/env.sh"
need_model
GGML_FLASHRT_STATS=1 exec "$bundle/adapter/llama-completion" -m "$model" -ngl 99 --temp 0 --no-conversation -n 128 \
    -p "The three laws of thermodynamics are" "$@"
