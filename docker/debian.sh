#!/usr/bin/env bash
# Build a minimal Debian system from packages, with the apt sources of this machine (root and Debian 12 only).
# usage: debian.sh TARGET PACKAGES     TARGET: a folder, or a file that ends in .tar; PACKAGES: separated by commas
set -euo pipefail

target=$1 packages=$2
release=bookworm
# shellcheck source=/dev/null
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
if [ "$(id -u)" != 0 ] || ! command -v mmdebstrap > /dev/null || [ "$codename" != "$release" ]; then
    echo "debian.sh: run this as root on Debian 12, with mmdebstrap installed" >&2
    exit 1
fi
sources=()
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
    # Skip third-party archives, whose suites have other names.
    if [ -e "$file" ] && grep -qE "^(deb|Suites:).*[[:space:]]$release([[:space:]]|\$)" "$file"; then
        sources+=("$file")
    fi
done
timeout 600 mmdebstrap --quiet --variant=minbase --include="$packages" "$release" "$target" "${sources[@]}" >&2
