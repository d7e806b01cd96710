#!/usr/bin/env bash
# Install Horovod into an environment; `make horovod` calls this with its Python. Horovod is built
# once per version of torch and Python, platform, and with or without MPI. A second call installs the
# cached wheel.
# usage: horovod.sh PYTHON
#   HOROVOD_WHEELS           where wheels are cached, ~/.cache/horovod-wheels by default
#   HOROVOD_WITHOUT_MPI=1    build without MPI, even if mpicxx is installed
#   HOROVOD_GPU_OPERATIONS   NCCL or MPI, for GPUs; cpu, for CPUs only. Default: NCCL if torch is built for CUDA
#                            and nvcc is found, else cpu. Horovod's build reads its other variables too
set -euo pipefail

complain() {
    echo "horovod.sh: $1" >&2
    exit 1
}

python=$(command -v "${1:-}") || complain "give the Python of the environment to install into"
lock=$(dirname "$0")/horovod.txt
version=$(sed -n 's/^horovod==\([^ ]*\).*/\1/p' "$lock")

with_mpi=gloo
if [ -z "${HOROVOD_WITHOUT_MPI:-}" ] && command -v mpicxx > /dev/null; then
    with_mpi=mpi
fi
has_nvcc='
import os, torch
from torch.utils.cpp_extension import CUDA_HOME
assert torch.version.cuda and os.access(f"{CUDA_HOME}/bin/nvcc", os.X_OK)'
if [ -z "${HOROVOD_GPU_OPERATIONS:-}" ] && "$python" -c "$has_nvcc" 2> /dev/null; then
    export HOROVOD_GPU_OPERATIONS=NCCL
elif [ "${HOROVOD_GPU_OPERATIONS:-}" = cpu ]; then
    unset HOROVOD_GPU_OPERATIONS
fi
key=$("$python" - "$with_mpi" "${HOROVOD_GPU_OPERATIONS:-cpu}" 2> /dev/null << 'END'
import packaging, platform, re, setuptools, sys, torch
of_python = f"py{sys.version_info[0]}{sys.version_info[1]}"
parts = [f"torch{torch.__version__}", of_python, *sys.argv[1:], platform.machine()]
print(re.sub("[^a-z0-9]+", ".", ".".join(parts).lower()))
END
) || complain "$python cannot import torch, setuptools and packaging, which the build needs"
kept=${HOROVOD_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/horovod-wheels}/$key
wheel=horovod-$version+$key

check_tools() {
    local missing=()
    command -v "${CXX:-c++}" > /dev/null || missing+=(g++)
    command -v make > /dev/null || missing+=(make)
    command -v cmake > /dev/null || missing+=(cmake)
    "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' \
        2> /dev/null || missing+=(python3-dev)
    [ -z "${missing[*]}" ] || complain "to build Horovod, first: apt-get install ${missing[*]}"
}

# At the end of a build: print the errors from its log.
conclude() {
    if [ "$1" != 0 ]; then
        grep -E -A 4 '(error|ERROR|Error at .*):' "$work/log" | head -n 40 >&3 || true
        echo "horovod.sh: Horovod could not be built" >&3
    fi
    rm -rf "$work"
}

# NCCL of torch's packages, which torch loads in any case, unless another one is named.
find_nccl() {
    local nccl
    nccl=$("$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])') || return 0
    mkdir -p "$work/nccl/lib"
    ln -s "$nccl/include" "$work/nccl/include"
    ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
    export HOROVOD_NCCL_HOME="$work/nccl" HOROVOD_NCCL_LINK=SHARED
}

build() {
    work=$(mktemp -d)
    exec 3>&2 > "$work/log" 2>&1
    trap 'conclude $?' EXIT

    "$python" -m pip download --require-hashes --no-deps --no-binary horovod \
        --no-build-isolation --dest "$work" --requirement "$lock"
    mkdir "$work/source"
    tar -xzf "$work"/horovod-*.tar.gz -C "$work/source" --strip-components 1
    # torch's headers need C++20.
    sed -i 's/CMAKE_CXX_STANDARD 14)/CMAKE_CXX_STANDARD 20)/' \
        "$work/source/CMakeLists.txt" "$work/source/horovod/torch/CMakeLists.txt"
    # Compile several sources at a time, which read torch's headers once. Debug information would be
    # stripped anyway.
    sed -i 's/"-O2" "-O3" CMAKE_CXX_FLAGS_REL/"-O2 -g" "-O3" CMAKE_CXX_FLAGS_REL/' \
        "$work/source/CMakeLists.txt"
    cat >> "$work/source/horovod/torch/CMakeLists.txt" << 'END'
if(NOT HAVE_CUDA AND NOT HAVE_ROCM)
    set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON)
endif()
END
    # It requires cffi, but does not import it.
    sed -i "s/require_list.append('cffi>=1.4.0')/pass/" "$work/source/setup.py"

    if [ "${HOROVOD_GPU_OPERATIONS:-}${HOROVOD_NCCL_HOME:-}" = NCCL ]; then find_nccl; fi
    if [ "$with_mpi" = mpi ]; then export HOROVOD_WITH_MPI=1; else export HOROVOD_WITHOUT_MPI=1; fi
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_PYTORCH=1
    export HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    # The version distinguishes this build from one for another torch.
    export HOROVOD_LOCAL_VERSION="$key"
    # CMake 4 refuses the old minimum version of gloo. GCC 13 and later include fewer headers
    # implicitly, and refuse the span of flatbuffers.
    export CMAKE_POLICY_VERSION_MINIMUM=3.5
    CXXFLAGS="${CXXFLAGS:-} -include cstdint -include stdexcept -include string"
    export CXXFLAGS="$CXXFLAGS -DFLATBUFFERS_USE_STD_SPAN"
    export LDFLAGS="${LDFLAGS:-} -s"
    # MAKEFLAGS of an outer make do not apply here.
    MAKEFLAGS="-j$(nproc)"
    export MAKEFLAGS
    # Without build isolation: build against the torch of the environment.
    "$python" -m pip wheel --use-pep517 --no-build-isolation --no-deps \
        --wheel-dir "$work" "$work/source"

    # Rename at the end: an interrupted build leaves no wheel.
    mkdir -p "$kept"
    built=$(basename "$work/$wheel"-*.whl)
    cp "$work/$built" "$kept/.$$"
    mv "$kept/.$$" "$kept/$built"
}

if ! compgen -G "$kept/$wheel-*.whl" > /dev/null; then
    check_tools
    echo "building Horovod $version for $key, once; this takes some minutes"
    (build)
fi
"$python" -m pip install --quiet "$kept/$wheel"-*.whl
