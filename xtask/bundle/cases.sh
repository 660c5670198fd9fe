#!/bin/sh
# What only whole runs of llama.cpp on a GPU show, a line a case. Arguments go to cases.py; --help lists them.
set -eu
. "$(dirname "$0")/env.sh"
need_model
exec python3 "$bundle/run/cases.py" "$bundle/adapter" "$model" --flashrt "$bundle/bin/flashrt" "$@"
