#!/bin/sh
# Checks the parts beside this script and unpacks them into a new directory: sh reassemble.sh DIR
set -eu
here=$(cd "$(dirname "$0")" && pwd)
to=${1:?usage: sh reassemble.sh DIR}
if [ -e "$to" ]; then
    echo "error: $to exists: name a new directory" >&2
    exit 1
fi
if ! (cd "$here" && sha256sum --quiet --check parts.sha256 >/dev/null 2>&1); then
    echo "error: a part is missing or damaged; (cd $here && sha256sum --check parts.sha256) says which: copy it again" >&2
    exit 1
fi
# Unpacked beside its place and moved there whole.
mkdir -p "$(dirname "$to")"
staging=$(mktemp -d "$to.XXXXXX")
trap 'rm -rf "$staging"' EXIT
if command -v xz >/dev/null; then
    cat "$here"/bundle.tar.xz.* | xz --decompress | tar -x -f - -C "$staging"
else
    cat "$here"/bundle.tar.xz.* | python3 -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1])' "$staging"
fi
chmod 755 "$staging"
mv "$staging" "$to"
trap - EXIT
