#!/usr/bin/env bash
# Build a minimal Debian 12 system from packages, as root: with the apt sources of this machine if it has Debian 12, otherwise
# from mmdebstrap's own for Debian.
# usage: debian.sh TARGET PACKAGES     TARGET: a folder, or a file that ends in .tar; PACKAGES: separated by commas
set -euo pipefail

target=$1 packages=$2
release=bookworm
# shellcheck source=/dev/null
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
if [ "$(id -u)" != 0 ] || ! command -v mmdebstrap > /dev/null || [ ! -e "$keyring" ]; then
    echo "debian.sh: run this as root, with mmdebstrap and debian-archive-keyring installed" >&2
    exit 1
fi
sources=()
if [ "$codename" = "$release" ]; then
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources}; do
        # Skip third-party archives, whose suites have other names.
        if [ -e "$file" ] && grep -qE "^(deb|Suites:).*[[:space:]]$release([[:space:]]|\$)" "$file"; then
            sources+=("$file")
        fi
    done
fi
timeout 600 mmdebstrap --quiet --variant=minbase --include="$packages" "$release" "$target" "${sources[@]}" >&2
