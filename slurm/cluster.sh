#!/usr/bin/env bash
# A real SLURM cluster with several nodes on this machine, for tests. Each node, and the controller,
# has its own network, host name and hosts file (Linux namespaces) on a bridge, and runs slurmd.
#
#   slurm/cluster.sh up N [GPUS]      start N nodes, node1 … nodeN, each with GPUS simulated GPUs
#   slurm/cluster.sh up N none HOST   … that does not know GPUs, and host names HOST1 … that do not resolve
#   eval "$(slurm/cluster.sh env)"    then sbatch, squeue, scancel … use it
#   slurm/cluster.sh run COMMAND …    run one command that uses it
#   slurm/cluster.sh kill NODE        kill a node and everything that runs on it
#   slurm/cluster.sh start NODE       start it again
#   slurm/cluster.sh stop             stop the controller, as for an update; jobs continue
#   slurm/cluster.sh start controller
#   slurm/cluster.sh down             stop everything and remove its files
#
# All files are in one folder, $SLURM_CLUSTER_DIR (by default build/slurm), and each folder is a
# separate cluster. Only a link to it, namespaces and a bridge, named after it, are elsewhere.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd -P)
dir=$(realpath -m -- "${SLURM_CLUSTER_DIR:-$root/build/slurm}")
id=$(printf %s "$dir" | sha256sum | cut -c 1-6)
# Paths of UNIX sockets have at most 107 characters, and those in slurm.conf no spaces.
link=/run/slurm-$id
bridge=slurm-$id
# 198.18.0.0/15 is reserved for network tests.
subnet=198.$((18 + 0x${id:0:1} % 2)).$((0x${id:1:2}))

fail() {
    printf 'cluster.sh: %s\n' "$*" >&2
    exit 1
}

check_machine() {
    [ "$(id -u)" = 0 ] || fail "network namespaces need root; run it as root"
    local command
    for command in slurmctld slurmd sbatch munged ip nsenter; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$command" > /dev/null ||
            fail "$command is missing: apt-get install slurm-wlm munge iproute2 util-linux"
    done
}

# A process is identified by its pid and start time, because pids are reused.
started_at() {
    local stat
    stat=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
    # After the name, which can contain anything: the 1st word is the state, the 20th the start time.
    read -r -a stat <<< "${stat##*) }"
    # A zombie counts as dead: its parent may never collect the exit code.
    [ "${stat[0]}" != Z ] && echo "${stat[19]}"
}

is_alive() { # FILE
    local pid time
    [ -f "$1" ] && read -r pid time < "$1" && [ "$(started_at "$pid")" = "$time" ]
}

is_dead() { ! is_alive "$1"; }

wait_until() { # SECONDS COMMAND …
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}

# Start a daemon in the background, detached from this terminal, this lock and these files.
daemon() { # NAME COMMAND …
    local name=$1
    shift
    setsid "$@" < /dev/null > "$dir/log/$name" 2>&1 9>&- &
    echo "$! $(started_at $!)" > "$dir/pid/$name"
}

namespace() { echo "slurm-$id-$1"; }

daemon_in_namespace() { # NAME COMMAND …
    local name=$1
    shift
    # Not `ip netns exec`: it mounts another /sys, with which slurmd does not start.
    # shellcheck disable=SC2016 # the inner shell expands them
    daemon "$name" nsenter --net="/run/netns/$(namespace "$name")" unshare --uts --mount bash -c '
        hostname "${1/node/$(< "$2/host")}" && mount --bind "$2/hosts" /etc/hosts &&
            mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf && shift 2 && cd / && exec "$@"' \
        bash "$name" "$dir" env SLURM_CONF="$link/slurm.conf" "$@"
}

start_host() { # NAME
    case $1 in
        controller) daemon_in_namespace "$1" slurmctld -D ;;
        # -b: report that the node has rebooted, so that SLURM ends what ran there.
        *) daemon_in_namespace "$1" slurmd -D -b -N "$1" ;;
    esac
}

# Processes of a namespace, including daemons. Zombies have no namespace.
processes() { ip netns pids "$(namespace "$1")" 2> /dev/null; }

is_empty() { [ -z "$(processes "$1")" ]; }

kill_all() { # NAME
    local pids
    mapfile -t pids < <(processes "$1")
    [ -z "${pids[*]}" ] || kill -KILL "${pids[@]}" 2> /dev/null || true
    is_empty "$1"
}

add_host() { # NAME ADDRESS
    local name=$1 address=$2 inside
    inside=$(namespace "$name")
    ip netns add "$inside"
    # At most 15 characters.
    ip link add "sl$id-${address##*.}" type veth peer name eth0 netns "$inside"
    ip link set "sl$id-${address##*.}" master "$bridge" up
    ip -n "$inside" link set lo up
    ip -n "$inside" link set eth0 up
    ip -n "$inside" address add "$address/24" dev eth0
    echo "$address $name" >> "$dir/hosts"
}

responds() { # NODE
    [[ $(SLURM_CONF=$link/slurm.conf sinfo --noheader --responding --nodes "$1" --format %t 2> /dev/null) =~ ^(idle|mix|alloc) ]]
}

answers() { SLURM_CONF=$link/slurm.conf sinfo > "$dir/log/sinfo" 2>&1; }

all_respond() {
    local name
    for name in "$@"; do responds "$name" || return 1; done
}

up() { # N [GPUS [HOST]]
    local count=${1-} gpus=${2:-0} host=${3:-node} gres='' name number
    [[ $count =~ ^[1-9][0-9]?$ && $gpus =~ ^(0|[1-9][0-9]?|none)$ && $host =~ ^[a-z]+$ ]] ||
        fail "usage: up N [GPUS [HOST]], N from 1 to 99, GPUS from 0 or none"
    if [ "$gpus" != none ]; then gres=" Gres=gpu:fake:$gpus"; fi
    check_machine
    if is_up; then fail "it is up already, in $dir; end it first: $0 down"; fi
    clean
    [ ! -e "$dir" ] || [ -z "$(ls -A "$dir")" ] || fail "$dir is not empty and no cluster's; set SLURM_CLUSTER_DIR"
    [ -z "$(ip -4 address show to "$subnet.0/24")" ] || fail "$subnet.0/24 is in use; set another SLURM_CLUSTER_DIR"
    trap 'show_logs; clean' EXIT

    mkdir -p "$dir"/{log,pid,state,spool,munge,dev}
    ln -s "$dir" "$link"
    echo "$host" > "$dir/host"
    echo "127.0.0.1 localhost" > "$dir/hosts"
    # No name server can be reached from inside: do not wait for one.
    grep -v '^hosts:' /etc/nsswitch.conf > "$dir/nsswitch.conf" || true
    echo "hosts: files" >> "$dir/nsswitch.conf"
    ip link add "$bridge" type bridge
    ip address add "$subnet.254/24" dev "$bridge"
    ip link set "$bridge" up
    add_host controller "$subnet.253"
    local names=() lines=
    for number in $(seq "$count"); do
        name=node$number
        names+=("$name")
        lines+="NodeName=$name NodeAddr=$subnet.$number CPUs=8 CoresPerSocket=8 RealMemory=4096 Features=fake$gres\\n"
        mkdir "$dir/spool/$name"
        add_host "$name" "$subnet.$number"
    done
    # Any device that can be opened: SLURM does not check that it is a GPU.
    for number in $(seq 0 $((${gpus/none/0} - 1))); do
        mknod -m 666 "$dir/dev/gpu$number" c 1 3
        echo "Name=gpu Type=fake File=$link/dev/gpu$number" >> "$dir/gres.conf"
    done
    sed "s|@DIR@|$link|; s|@CONTROLLER@|$subnet.253|; s|@NODES@|$lines|" "$root/slurm/slurm.conf.in" > "$dir/slurm.conf"
    if [ "$gpus" = none ]; then sed -i '/^GresTypes=/d' "$dir/slurm.conf"; fi

    (umask 077 && head -c 1024 /dev/urandom > "$dir/munge/key")
    # --force: parent folders may be writable by a group, as in a shared checkout.
    daemon munge munged --foreground --force --key-file="$dir/munge/key" --socket="$link/munge/socket" \
        --pid-file="$dir/munge/pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    wait_until 10 test -S "$dir/munge/socket" || fail "munged did not come up"
    for name in controller "${names[@]}"; do start_host "$name"; done
    wait_until 60 all_respond "${names[@]}" || fail "nodes did not come up"
    trap - EXIT
    echo "SLURM with $count nodes of $gpus GPUs is up in $dir; next: eval \"\$($(printf %q "$0") env)\""
}

show_logs() { tail -n 15 "$dir"/log/* >&2 || true; }

# Stop and remove the cluster of this folder, even if it has started only partly.
clean() {
    local name inside pid
    while read -r inside _; do
        if [[ $inside != "slurm-$id-"* ]]; then continue; fi
        name=${inside#"slurm-$id-"}
        wait_until 20 kill_all "$name" || fail "processes of $name do not end: $(processes "$name" | xargs)"
        ip netns delete "$inside"
    done < <(ip netns list 2> /dev/null)  # it complains of one that another process just removes
    # Deleting a namespace deletes its network interfaces.
    if [ -e "/sys/class/net/$bridge" ]; then ip link delete "$bridge"; fi
    if is_alive "$dir/pid/munge"; then
        read -r pid _ < "$dir/pid/munge"
        kill "$pid"
        wait_until 10 is_dead "$dir/pid/munge" || fail "munged does not end: process $pid"
    fi
    # Remove only what this script has created: the link marks the folder of a cluster.
    if [ -L "$link" ]; then
        rm -rf -- "${dir:?}"
        rm "$link"
    fi
}

# Not the controller, which may be stopped.
is_up() { is_alive "$dir/pid/munge"; }

check_up() { is_up || fail "it is not up; start it: $0 up N [GPUS]"; }

check_node() { # NODE
    [[ ${1-} == node* && -d $dir/spool/$1 ]] || fail "there is no node ${1-}"
}

# It saves its state before it ends.
stop_controller() {
    local pid
    is_alive "$dir/pid/controller" || fail "the controller is not up"
    read -r pid _ < "$dir/pid/controller"
    kill "$pid"
    wait_until 20 is_dead "$dir/pid/controller" || fail "the controller does not end: process $pid"
}

# Run only one of up, down, kill, start and stop at a time.
lock() {
    # Lock an existing folder, so that no lock file remains.
    exec 9< /run
    flock --timeout 60 9 || fail "another $0 is at work"
}

export PATH=$PATH:/usr/sbin:/sbin
action=${1-}
shift || true
case $action in
    up)
        check_machine
        lock
        up "$@"
        ;;
    down)
        check_machine
        lock
        clean
        ;;
    kill)
        check_up
        check_node "${1-}"
        lock
        wait_until 20 kill_all "$1" || fail "processes of $1 do not end"
        ;;
    start)
        check_up
        [ "${1-}" = controller ] || check_node "${1-}"
        lock
        if is_alive "$dir/pid/$1"; then fail "$1 is up"; fi
        start_host "$1"
        [ "$1" != controller ] || wait_until 20 answers || fail "the controller does not answer"
        ;;
    stop)
        check_up
        lock
        stop_controller
        ;;
    env)
        check_up
        echo "export SLURM_CONF=$link/slurm.conf"
        ;;
    run)
        check_up
        SLURM_CONF=$link/slurm.conf exec "$@"
        ;;
    *)
        fail "usage: $0 up N [GPUS] | env | run COMMAND … | kill NODE | start NODE | stop | down"
        ;;
esac
