#!/usr/bin/env bash
# Build the rendered project's image, look into it and train in it: tests/docker has the checks. Takes the engine that the
# user's `docker` speaks to, or starts one for this time (root, with dockerd installed).
# usage: smoke.sh [PYTHON [PYTEST OPTIONS…]]
#   PYTHON        of the template's environment, .venv/bin/python by default
#   TORCH_INDEX   a package index that has torch's CPU build, asked besides those that pip knows
#   BASE=packages does not try to pull the base image, but makes one
#   CACHE         where wheels and base image are kept between runs, build/docker by default
# Where CI is set, a missing engine is a failure; elsewhere all is skipped with the reason.
set -euo pipefail

python=${1:-.venv/bin/python}
shift || true
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
cd "$(dirname "$0")/.."
mkdir -p "${CACHE:=build/docker}"
CACHE=$(cd "$CACHE" && pwd)

skip() {
    if [ -n "${CI:-}" ]; then
        echo "docker/smoke.sh: $1" >&2
        exit 1
    fi
    echo "docker/smoke.sh: skipped, as $1"
    exit 0
}

# The first docker on PATH that can build with BuildKit: up to version 20 by itself, later by its part buildx.
find_client() {
    local found major
    while read -r found; do
        major=$("$found" --version | sed -n 's/^Docker version \([0-9]*\)\..*/\1/p')
        if [ "${major:-99}" -lt 23 ] || "$found" buildx version > /dev/null 2>&1; then
            echo "$found"
            return 0
        fi
    done < <(type -ap docker)
    return 1
}

fetch_wheels() {
    local locks='{{cookiecutter.project_slug}}/requirements'
    mkdir -p "$CACHE/wheels"
    download() {
        "$python" -m pip download -qq --disable-pip-version-check --require-hashes --no-deps --only-binary :all: \
            --python-version 3.11 --find-links "$CACHE/wheels" --dest "$CACHE/wheels" "$@"
    }
    # torch comes first and alone, so that nothing else is looked up on its index. The image takes the build that is here.
    # The base has Python 3.11, whichever Python runs this: pip would judge a marker by its own.
    { grep -A 1 "'3.11' .*'$(uname -m)'" "$locks/torch-cpu.txt" || true; } | sed 's/ ;.*/ \\/' > "$CACHE/torch.txt"
    download ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement "$CACHE/torch.txt" ||
        download --index-url "$(sed -n 's/^PYTORCH_INDEX = "\(.*\)"/\1/p' "$locks/install_torch.py")" --retries 0 \
            --requirement "$CACHE/torch.txt" || {
        echo "docker/smoke.sh: no CPU build of torch can be had; the image gets the larger build of pip's own index" >&2
        download --requirement "$locks/torch.txt" --requirement "$locks/cuda.txt"
    }
    download --requirement "$locks/cpu.txt"
    fetch_engines "$locks"
}

# What DeepSpeed needs comes as wheels, it and FairScale as source: not isolated, or pip would fetch a torch of its own.
fetch_engines() { # LOCKS
    sed '/^deepspeed==/,/[^\\]$/d' "$1/deepspeed.txt" > "$CACHE/deepspeed-needs.txt"
    sed -n '/^deepspeed==/,/[^\\]$/p' "$1/deepspeed.txt" > "$CACHE/deepspeed.txt"
    download --requirement "$CACHE/deepspeed-needs.txt"
    DS_BUILD_OPS=0 "$python" -m pip download -qq --disable-pip-version-check --require-hashes --no-deps --no-binary :all: \
        --no-build-isolation --find-links "$CACHE/wheels" --dest "$CACHE/wheels" \
        --requirement "$1/fairscale.txt" --requirement "$CACHE/deepspeed.txt"
}

# The tests have a home of their own, but the client's settings and parts lie in the user's.
export DOCKER_CONFIG=${DOCKER_CONFIG:-$HOME/.docker}
docker=$(find_client) || skip "there is no docker that can build with BuildKit (version 20, or a later one with buildx)"
network=default
if ! timeout 30 "$docker" info > /dev/null 2>&1; then
    if [ "$(id -u)" != 0 ] || ! command -v dockerd > /dev/null; then
        skip "no Docker engine answers, and to start one one must be root and have dockerd"
    fi
    own=$(mktemp -d /var/tmp/engine.XXXXXX)
    trap 'bash docker/engine.sh down "$own"' EXIT
    # A shell that is killed by a signal runs the trap of its exit only if it exits by itself.
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    DOCKER_HOST=$(bash docker/engine.sh up "$own")
    export DOCKER_HOST
    network=host
fi

echo "wheels and base image (kept in $CACHE)"
fetch_wheels
base=$(bash docker/base.sh "$docker" '{{cookiecutter.project_slug}}/Dockerfile' "$CACHE")
# Made of packages, it has all that a build wants, and what is not there cannot be asked.
case $base in base-of-packages:*) network=none ;; esac

IMAGE_DOCKER=$docker IMAGE_BASE=$base IMAGE_NETWORK=$network IMAGE_WHEELS=$CACHE/wheels \
    "$python" -m pytest -v tests/docker "$@"
