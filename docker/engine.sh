#!/usr/bin/env bash
# Start a separate Docker engine as root, in its own directory, without changing the machine's network; or end it and remove
# the directory. Its containers use the host's network or none.
# usage: engine.sh up DIRECTORY      prints the engine's address, for DOCKER_HOST
#        engine.sh down DIRECTORY
set -euo pipefail

command=${1:-}
dir=${2:?usage: engine.sh up|down DIRECTORY}
case $dir in /*) ;; *) dir=$PWD/$dir ;; esac

up() {
    mkdir -p "$dir"
    chmod 700 "$dir"
    # With iptables, the engine would set the machine's FORWARD chain to DROP.
    setsid dockerd --host "unix://$dir/docker.sock" --data-root "$dir/data" --exec-root "$dir/exec" \
        --pidfile "$dir/pid" --iptables=false --ip6tables=false --bridge=none \
        < /dev/null > "$dir/log" 2>&1 &
    local started=$! deadline=$((SECONDS + 60))
    until docker --host "unix://$dir/docker.sock" info > /dev/null 2>&1; do
        if ! kill -0 "$started" 2> /dev/null || [ $SECONDS -gt $deadline ]; then
            tail -n 20 "$dir/log" >&2
            echo "engine.sh: the engine did not start" >&2
            down
            exit 1
        fi
        sleep 0.2
    done
    echo "unix://$dir/docker.sock"
}

# End the process of a pid file, and wait for it.
end() {
    local pid deadline
    pid=$(cat "$1" 2> /dev/null) || return 0
    kill -TERM "$pid" 2> /dev/null || return 0
    deadline=$((SECONDS + 30))
    # If no parent waits for it, an ended process remains as a zombie.
    while [ -d "/proc/$pid" ] && ! grep -q '^State:[[:space:]]*Z' "/proc/$pid/status" 2> /dev/null; do
        if [ $SECONDS -gt $deadline ]; then
            kill -KILL "$pid" 2> /dev/null || true
            sleep 1
            return 0
        fi
        sleep 0.2
    done
}

down() {
    [ -d "$dir" ] || return 0
    end "$dir/pid"
    # dockerd ends its containerd, unless dockerd has been killed.
    end "$dir/exec/containerd/containerd.pid"
    local mounts
    mounts=$(awk -v dir="$dir/" 'index($5, dir) == 1 { print $5 }' /proc/self/mountinfo | sort -r)
    while read -r mount; do
        [ -z "$mount" ] || umount --lazy "$mount"
    done <<< "$mounts"
    rm -rf "$dir"
}

case $command in
up | down) "$command" ;;
*) echo "usage: engine.sh up|down DIRECTORY" >&2 && exit 2 ;;
esac
