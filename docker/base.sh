#!/usr/bin/env bash
# Print the name of a base image for the rendered Dockerfile: the one that it names if it can be pulled, otherwise one built
# from the packages of Debian 12 by debian.sh (as root).
# usage: base.sh DOCKER DOCKERFILE CACHE_DIRECTORY [MORE_PACKAGES]     MORE_PACKAGES: in a base from packages, separated by commas
set -euo pipefail

docker=$1 dockerfile=$2 cache=$3
default=$(sed -n 's/^ARG BASE_IMAGE=//p' "$dockerfile")
release=bookworm
# What the Dockerfile needs of a base, and what it would install itself: tini, and for GPUs the rest.
packages=ca-certificates,python3,python3-venv,tini,ibverbs-providers,libibverbs1,librdmacm1${4:+,$4}

if [ "${BASE:-}" != packages ]; then
    if "$docker" image inspect "$default" > /dev/null 2>&1 ||
        timeout 180 "$docker" pull --quiet "$default" > /dev/null 2>&1; then
        echo "$default"
        exit 0
    fi
    echo "$default cannot be pulled; building a base from packages" >&2
fi

archive=$cache/base-$release-$(cksum <<< "$packages" | cut -d ' ' -f 1).tar
if [ ! -e "$archive" ]; then
    mkdir -p "$cache"
    # Rename it only when it is complete.
    bash "$(dirname "$0")/debian.sh" "$archive.part.tar" "$packages"
    mv "$archive.part.tar" "$archive"
fi
name=base-of-packages:$release${4:+-more}
"$docker" import "$archive" "$name" > /dev/null
echo "$name"
