# Sourced by the scripts beside it: where the bundle is, and the libraries that its programs need.
bundle=$(cd "$(dirname "$0")/.." && pwd)
model=${MODEL:-$(ls "$bundle"/model/*.gguf 2>/dev/null | head -n 1)}

# cuBLAS comes with the bundle, with a toolkit, or with Python packages.
find_cublas() {
    for dir in "$bundle/lib" "${CUDA_HOME:-/usr/local/cuda}/lib64" /usr/local/cuda*/lib64 \
        $(python3 -c 'import sys; print(*(p + "/nvidia/" + d + "/lib" for p in sys.path for d in ("cu13", "cublas")))' 2>/dev/null); do
        if [ -e "$dir/libcublas.so.13" ]; then
            echo "$dir"
            return
        fi
    done
}
cublas=$(find_cublas)
if [ -z "$cublas" ]; then
    echo "error: libcublas.so.13 not found: set CUDA_HOME to a CUDA 13 toolkit, or pack the bundle with --with-cublas" >&2
    exit 1
fi
LD_LIBRARY_PATH=$bundle/lib:$cublas${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH

need_model() {
    if [ ! -f "$model" ]; then
        echo "error: no model: set MODEL to a GGUF, or pack the bundle with --with-model" >&2
        exit 1
    fi
}
