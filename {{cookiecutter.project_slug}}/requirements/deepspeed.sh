#!/usr/bin/env bash
# Install DeepSpeed into an environment; `make deepspeed` and the Dockerfile call this with its Python.
# usage: deepspeed.sh PYTHON
set -euo pipefail

python=$(command -v "${1:-}") || {
    echo "deepspeed.sh: give the Python of the environment to install into" >&2
    exit 1
}
lock=$(dirname "$0")/deepspeed.txt
others=$(mktemp)
trap 'rm -f "$others"' EXIT

# Its build imports its dependencies: install them first.
sed '/^deepspeed==/,/[^\\]$/d' "$lock" > "$others"
"$python" -m pip install -qq --require-hashes --no-deps --requirement "$others"
# Do not compile its extensions.
export DS_BUILD_OPS=0
"$python" -m pip install -qq --require-hashes --no-deps --no-build-isolation --requirement "$lock"
