#!/usr/bin/env bash
# Print the name of a base image for the rendered Dockerfile: the one that it names if that can be had, or one made of this
# distribution's packages, from the apt sources of this machine (root and Debian 12 only).
# usage: base.sh DOCKER DOCKERFILE CACHE_DIRECTORY
set -euo pipefail

docker=$1 dockerfile=$2 cache=$3
default=$(sed -n 's/^ARG BASE_IMAGE=//p' "$dockerfile")
release=bookworm
# All that the Dockerfile wants of a base, and tini, which it would fetch itself.
packages=ca-certificates,python3,python3-venv,tini

if [ "${BASE:-}" != packages ]; then
    if "$docker" image inspect "$default" > /dev/null 2>&1 ||
        timeout 180 "$docker" pull --quiet "$default" > /dev/null 2>&1; then
        echo "$default"
        exit 0
    fi
    echo "$default cannot be pulled; a base is made of packages" >&2
fi

# shellcheck source=/dev/null
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
if [ "$(id -u)" != 0 ] || ! command -v mmdebstrap > /dev/null || [ "$codename" != "$release" ]; then
    echo "base.sh: to make a base of packages, be root on Debian 12, with mmdebstrap installed" >&2
    exit 1
fi
archive=$cache/base-$release-$(cksum <<< "$packages" | cut -d ' ' -f 1).tar
if [ ! -e "$archive" ]; then
    mkdir -p "$cache"
    sources=()
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
        # Other people's archives have suites of other names.
        if [ -e "$file" ] && grep -qE "^(deb|Suites:).*[[:space:]]$release([[:space:]]|\$)" "$file"; then
            sources+=("$file")
        fi
    done
    # Under another name until it is whole.
    timeout 600 mmdebstrap --quiet --variant=minbase --include="$packages" "$release" "$archive.part.tar" \
        "${sources[@]}" >&2
    mv "$archive.part.tar" "$archive"
fi
name=base-of-packages:$release
"$docker" import "$archive" "$name" > /dev/null
echo "$name"
