#!/usr/bin/env bash
# Run the scripts of the workflow in a system like GitHub's runner ubuntu-24.04: its /etc/os-release, its sudoers (secure_path),
# an unprivileged user who may use sudo, Python in the tool cache and nowhere else. apt-get simulates, and make prints its
# commands (make -n): tested is what each script decides, requires and finds, as the user and as root. The packages are Debian's,
# because Ubuntu's may be out of reach. Needs root and mmdebstrap.
# usage: runner.sh [STAGE…]     those of the workflow by default
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/system.sh

if [ $# = 0 ]; then # each once, without the stage that runs this
    mapfile -t stages < <(sed -n 's/^ *stages: \[\(.*\)\]$/\1/p' .github/workflows/ci.yml | tr -s ', ' '\n' | grep -vx runner | awk '!seen[$0]++')
    set -- "${stages[@]}"
fi
make_system runner sudo,ca-certificates,git,make,python3,python3-venv,mmdebstrap,debian-archive-keyring

cat > "$root/usr/lib/os-release" <<< 'PRETTY_NAME="Ubuntu 24.04.3 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=noble'
cat > "$root/etc/sudoers" <<< 'Defaults env_reset
Defaults mail_badpass
Defaults secure_path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/snap/bin"
Defaults use_pty
runner ALL=(ALL) NOPASSWD:ALL'
echo 'APT::Get::Simulate "true";' > "$root/etc/apt/apt.conf.d/99simulate"
tools=/opt/hostedtoolcache/Python/3.11.99/x64
mkdir -p "$root$tools/bin"
mv "$root/usr/bin/python3.11" "$root$tools/bin/"
ln -s /usr/lib "$root$tools/lib"
ln -s python3.11 "$root$tools/bin/python3"
rm -f "$root/usr/bin/python3"
variables+=("PATH=$tools/bin:/snap/bin:/home/runner/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
variables+=(CI=true PIP_NO_INDEX=1 MAKEFLAGS=n)

in_system runner "make lint test-template"
in_system runner "bash .ci/run '$*'"
