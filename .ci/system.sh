# shellcheck shell=bash
# For bare.sh and runner.sh: a copy of this checkout in a minimal Debian system, in the folder $root. Needs root and mmdebstrap.

make_system() { # USER PACKAGES
    root=$(mktemp -d /var/tmp/bare.XXXXXX)
    trap 'rm -rf --one-file-system "$root"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    bash docker/debian.sh "$root" "$2"
    chmod 755 "$root"
    install -m 644 "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt"
    install -m 644 /etc/resolv.conf /etc/hosts "$root/etc/"
    chroot "$root" useradd --create-home --shell /bin/bash "$1"
    git clone --quiet --no-local . "$root/home/$1/template"
    chown -R --reference "$root/home/$1" "$root/home/$1"
    variables=(
        "HOME=/home/$1" "USER=$1" PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8
        PIP_CONFIG_FILE=/dev/null PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
        "MAKEFLAGS=${MAKEFLAGS:-}"
    )
}

# Mounts and processes end together with the namespaces.
in_system() { # USER COMMAND
    # shellcheck disable=SC2016 # expanded inside
    unshare --mount --pid --fork --kill-child bash -c '
        mount --bind "$1" "$1" # unshare inside needs a root folder that is a mount
        mount -t proc proc "$1/proc"
        mount --rbind /dev "$1/dev"
        cd "$1" && exec chroot --userspec="$2:$2" "$1" env -i "${@:4}" bash -c "cd /home/$2/template && $3"
    ' - "$root" "$1" "$2" "${variables[@]}"
}
