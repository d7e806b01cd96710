#!/usr/bin/env bash
# Run commands in a copy of this checkout on a bare Debian, as an unprivileged user without pip configuration, like a new user.
# Needs root and mmdebstrap.
# usage: bare.sh COMMAND…     each a line for bash, run in the copy's root folder
#   TORCH_WHEELS   a folder with a wheel of torch's CPU build, which the copy finds through TORCH_INDEX; without it, make
#                  searches the usual places
set -euo pipefail
cd "$(dirname "$0")/.."

root=$(mktemp -d /var/tmp/bare.XXXXXX)
trap 'rm -rf --one-file-system "$root"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
bash docker/debian.sh "$root" ca-certificates,git,make,python3,python3-venv
chmod 755 "$root"

certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
install -m 644 "$certificates" "$root/etc/ssl/certs/ca-certificates.crt"
install -m 644 /etc/resolv.conf /etc/hosts "$root/etc/"
chroot "$root" useradd --create-home user
git clone --quiet --no-local . "$root/home/user/template"
variables=(
    HOME=/home/user USER=user PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
    PIP_CONFIG_FILE=/dev/null PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
)
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
chown -R --reference "$root/home/user" "$root/home/user"

# Mounts and processes end together with the namespaces.
for command in "$@"; do
    printf '\n-- on a bare Debian: %s\n' "$command"
    # shellcheck disable=SC2016 # expanded inside
    unshare --mount --pid --fork --kill-child bash -c '
        mount -t proc proc "$1/proc"
        mount --rbind /dev "$1/dev"
        exec chroot --userspec=user:user "$1" env -i "${@:3}" bash -c "cd /home/user/template && $2"
    ' - "$root" "$command" "${variables[@]}"
done
