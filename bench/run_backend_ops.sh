#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the cases that cmake/hosts/llama.cpp-*-tests.patch adds to test-backend-ops, a window at a time, and compares with the
# CPU backend. Every case of a window must pass, and the window must fire in each of them: a case that stock ggml computed
# shows nothing about the adapter.
#
#   bench/run_backend_ops.sh HOST_DIR
#
# HOST_DIR is a build of llama.cpp with the adapter and that patch (test-backend-ops and the libraries lie there or in
# HOST_DIR/bin). TEST_BACKEND_OPS names another executable, FLASHRT_TEST_DEVICE another device than CUDA0.
set -u

die() {
    echo "run_backend_ops: $*" >&2
    exit 2
}

[ $# -eq 1 ] || die "usage: $0 HOST_DIR"
bin=$1
[ -d "$bin/bin" ] && bin=$bin/bin
bin=$(cd "$bin" 2>/dev/null && pwd) || die "$1 is no folder"
exe=${TEST_BACKEND_OPS:-$bin/test-backend-ops}
[ -x "$exe" ] || die "$exe is missing: apply the tests patch and build the target test-backend-ops"
device=${FLASHRT_TEST_DEVICE:-CUDA0}

scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
export LD_LIBRARY_PATH=$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# A replayed graph does not call the hook, and launches would not be counted.
export GGML_CUDA_DISABLE_GRAPHS=1
unset GGML_FLASHRT_DUMP

# fired WINDOW: its launches in the statistics of the last run, nothing if there are none.
fired() {
    sed -n "s/.*\"$1\":{\([^{}]*{[^{}]*}\)\{0,1\}[^{}]*\"fired\":\([0-9]*\).*/\2/p" "$scratch/stats.json" 2>/dev/null
}

failed=0
# check CASES WINDOW...: runs the cases called FLASHRT_<CASES>, and expects each of the windows once in each.
check() {
    local cases=$1 log=$scratch/log status passed total verdict count
    shift
    rm -f "$scratch/stats.json"
    GGML_FLASHRT_STATS=$scratch/stats.json "$exe" test -b "$device" -o "FLASHRT_$cases" >"$log" 2>&1
    status=$?
    read -r passed total <<<"$(sed -n 's|^ *\([0-9]*\)/\([0-9]*\) tests passed.*|\1 \2|p' "$log" | tail -n 1)"
    for window in "$@"; do
        count=$(fired "$window")
        verdict=ok
        if [ "${total:-0}" -eq 0 ]; then
            verdict="FAIL: no case ran on $device (exit status $status)"
        elif [ "$status" -ne 0 ] || [ "$passed" -ne "$total" ]; then
            verdict="FAIL: exit status $status"
        elif [ "${count:-0}" -ne "$total" ]; then
            verdict="FAIL: the window must fire in every case"
        fi
        printf '%-14s in %-14s %5s of %5s cases passed, fired %5s: %s\n' \
            "$window" "$cases" "${passed:-0}" "${total:-0}" "${count:-none}" "$verdict"
        [ "$verdict" = ok ] || failed=1
    done
    if [ "$status" -ne 0 ] || [ "${total:-0}" -eq 0 ]; then
        grep -E 'FAIL|rror|not found|no such' "$log" | head -n 20 >&2
    fi
}

for window in ADD_NORM SANDWICH_NORM QKV_GEMV GLU_GEMV GEMV_RES; do
    check "$window" "$window"
done
check FFN ADD_NORM GLU_GEMV GEMV_RES
# Few tokens run sooner on the CPU, and the windows take them when told to.
export GGML_FLASHRT_MM_MIN_TOKENS=1
for window in MM_PREFILL MM_RES GEGLU_FFN MOE_FFN MOE_PREFILL; do
    check "$window" "$window"
done
exit $failed
