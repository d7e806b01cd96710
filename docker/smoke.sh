#!/usr/bin/env bash
# Build the rendered project's image, inspect it and train in it, with the checks in tests/docker. Uses the engine that
# `docker` is connected to, or starts a temporary one (as root, with dockerd installed).
# usage: smoke.sh [PYTHON [PYTEST OPTIONS…]]
#   PYTHON        of the template's environment, .venv/bin/python by default
#   TORCH_INDEX   a package index with torch's CPU build, in addition to those that pip is configured with
#   BASE=packages builds the base image instead of pulling it
#   CACHE         where wheels and the base image are cached, build/docker by default
# If CI is set, a missing engine is a failure; otherwise all checks are skipped with the reason.
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

# The first docker on PATH that can build with BuildKit: up to version 20 on its own, later versions with buildx.
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
    # torch is installed first and alone, so that no other package is looked up on its index. The image uses this build.
    # The base has Python 3.11; pip would evaluate markers for the Python that runs it.
    { grep -A 1 "'3.11' .*'$(uname -m)'" "$locks/torch-cpu.txt" || true; } | sed 's/ ;.*/ \\/' > "$CACHE/torch.txt"
    download ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} --requirement "$CACHE/torch.txt" ||
        download --index-url "$(sed -n 's/^PYTORCH_INDEX = "\(.*\)"/\1/p' "$locks/install_torch.py")cpu" --retries 0 \
            --requirement "$CACHE/torch.txt" || {
        echo "docker/smoke.sh: no CPU build of torch is available; the image gets the larger build of pip's own index" >&2
        download --requirement "$locks/torch.txt" --requirement "$locks/cuda.txt"
    }
    download --requirement "$locks/cpu.txt"
}

# DeepSpeed's dependencies are wheels; DeepSpeed and FairScale are sources: without isolation, or pip would download torch.
fetch_engines() {
    local locks='{{cookiecutter.project_slug}}/requirements'
    sed '/^deepspeed==/,/[^\\]$/d' "$locks/deepspeed.txt" > "$CACHE/deepspeed-needs.txt"
    sed -n '/^deepspeed==/,/[^\\]$/p' "$locks/deepspeed.txt" > "$CACHE/deepspeed.txt"
    download --requirement "$CACHE/deepspeed-needs.txt"
    DS_BUILD_OPS=0 "$python" -m pip download -qq --disable-pip-version-check --require-hashes --no-deps --no-binary :all: \
        --no-build-isolation --find-links "$CACHE/wheels" --dest "$CACHE/wheels" \
        --requirement "$locks/fairscale.txt" --requirement "$CACHE/deepspeed.txt"
}

# The tests use another home directory, but the client's settings and plugins are in the user's.
export DOCKER_CONFIG=${DOCKER_CONFIG:-$HOME/.docker}
docker=$(find_client) || skip "there is no docker that can build with BuildKit (version 20, or a later one with buildx)"
network=default
if ! timeout 30 "$docker" info > /dev/null 2>&1; then
    if [ "$(id -u)" != 0 ] || ! command -v dockerd > /dev/null; then
        skip "no Docker engine is running, and starting one needs root and dockerd"
    fi
    own=$(mktemp -d /var/tmp/engine.XXXXXX)
    trap 'bash docker/engine.sh down "$own"' EXIT
    # A shell runs its EXIT trap after a signal only if it exits on its own.
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    DOCKER_HOST=$(bash docker/engine.sh up "$own")
    export DOCKER_HOST
    network=host
fi

echo "wheels and base image (cached in $CACHE)"
fetch_wheels
base=$(bash docker/base.sh "$docker" '{{cookiecutter.project_slug}}/Dockerfile' "$CACHE")
compiler=$base
case " $* " in
    *" not exhaustive "*) ;; # no test of these is asked for
    *)
        fetch_engines
        compiler=$(bash docker/base.sh "$docker" '{{cookiecutter.project_slug}}/Dockerfile' "$CACHE" g++,python3-dev)
        ;;
esac
# Built from packages, it has everything that a build needs, and a build can download nothing.
case $base in base-of-packages:*) network=none ;; esac

IMAGE_DOCKER=$docker IMAGE_BASE=$base IMAGE_BASE_COMPILER=$compiler IMAGE_NETWORK=$network IMAGE_WHEELS=$CACHE/wheels \
    "$python" -m pytest -v tests/docker "$@"
