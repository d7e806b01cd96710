#!/usr/bin/env bash
# Run commands in a copy of this checkout on a bare Debian, as an unprivileged user without pip configuration, like a new user.
# Needs root and mmdebstrap.
# usage: bare.sh COMMAND…     each a line for bash, run in the copy's root folder
#   TORCH_WHEELS   a folder with a wheel of torch's CPU build, which the copy finds through TORCH_INDEX; without it, make
#                  searches the usual places
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/system.sh

make_system user ca-certificates,git,make,python3,python3-venv
if [ -n "${TORCH_WHEELS:-}" ]; then
    # A package index can be a folder.
    mkdir -p "$root/srv/index/torch"
    cp "$TORCH_WHEELS"/torch-*.whl "$root/srv/index/torch/"
    for wheel in "$root/srv/index/torch"/*.whl; do
        name=$(basename "$wheel")
        echo "<a href=\"${name//+/%2B}\">$name</a>"
    done > "$root/srv/index/torch/index.html"
    variables+=(TORCH_INDEX=file:///srv/index)
fi

for command in "$@"; do
    printf '\n-- on a bare Debian: %s\n' "$command"
    in_system user "$command"
done
