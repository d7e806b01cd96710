#!/usr/bin/env bash
# Train on machines without a scheduler: torchrun on each host, started by ssh.
#
#   bash ssh/train.sh HOSTS [option of `fit` …]
#   bash ssh/train.sh ssh/hosts --config configs/gpt.yaml --trainer.run_name gpt
#
# HOSTS is a file with a host in each line, as ssh knows it, and its number of processes, by default {{ cookiecutter.gpus_per_node if cookiecutter.gpus_per_node != "0" else "1" }}.
# Rank 0 is on the first. Each host has the project in the same folder. Settings are those of
# slurm/settings.sh (VENV, CONTAINER, SAVE_SECONDS, …), and:
#
#   FOLDER                    the project's folder on the hosts; by default this one
#   SSH_OPTIONS               options of ssh, separated by spaces
#   MASTER_ADDR, MASTER_PORT  where the hosts reach the first; by default ssh's name of it, a free port
set -uo pipefail

fail() { echo "train.sh: $*" >&2; exit 2; }

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash 4.4 or newer is needed; this is $BASH_VERSION"
[ -f ssh/host.sh ] || fail "run it in the project's folder: bash ssh/train.sh HOSTS …"
[[ -f ${1-} && $(wc -c < "$1") -le 1048576 ]] || fail "there is no file '${1-}' of hosts: bash ssh/train.sh HOSTS [option of fit …], HOSTS of at most 1 MiB"
hosts=() counts=() nodes=0 ranks=0
while IFS=$' \t\r' read -r host count more || [ -n "$host" ]; do
    if [[ $host == @(|\#*) ]]; then continue; fi
    # No option of ssh, and nothing that a shell or sed would read.
    [[ $host =~ ^[A-Za-z0-9_][A-Za-z0-9_.@:-]*$ && ${count:={{ cookiecutter.gpus_per_node if cookiecutter.gpus_per_node != "0" else "1" }}} =~ ^[1-9][0-9]{0,2}$ && $more == @(|\#*) ]] ||
        fail "$1: '$host $count $more' is not a host and its number of processes"
    hosts+=("$host") counts+=("$count") nodes=$((nodes + 1)) ranks=$((ranks + count))
done < "$1"
[ "$nodes" -gt 0 ] || fail "$1 names no host"
shift && export TRAINER_WORLD_SIZE=$ranks # a run of another size ends at once

id=ssh-$(date +%Y%m%d-%H%M%S)-$$
read -r -a ssh_options <<< "${SSH_OPTIONS-}"
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 "${ssh_options[@]}")
dir=$(mktemp -d) || exit 2
trap 'rm -rf "$dir"' EXIT # feeds end without it, so that the hosts end their ranks

order() { # WORD …: what all hosts are told, every second
    printf '%s\n' "$*" > "$dir/order.new" && mv "$dir/order.new" "$dir/order"
}

# The standard input of a host: how to start host.sh, for whatever shell it has, and then orders.
feed() { # INDEX OPTION …
    local name index=$1
    shift
    for name in VENV CONTAINER IMAGE MOUNTS CONFIG SAVE_SECONDS "${!TRAINER_@}" "${!TORCH_@}" "${!NCCL_@}" "${!GLOO_@}" "${!OMP_@}"; do
        if [ -n "${!name+set}" ]; then printf 'export %s=%q\n' "$name" "${!name}"; fi
    done
    printf 'cd %q || exit 2\nexec bash ssh/host.sh' "${FOLDER:-$PWD}"
    printf ' %q' "$id" "$index" "$nodes" "${counts[index]}" "$@"
    printf '\n'
    while kill -0 $$ && cat "$dir/order"; do sleep 1; done 2> /dev/null
}

# Lines for this script go to a file, all others to the terminal with the name of the host.
label() { # INDEX
    local line
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
            "$id: "*) printf '%s\n' "${line#"$id: "}" >> "$dir/facts-$1" ;;
            *) printf '%s: %s\n' "${hosts[$1]}" "$line" ;;
        esac
    done
}

# The first signal is a request to save; the second kills.
signal=
# shellcheck disable=SC2317,SC2329 # traps call it
stop() { # SIGNAL
    if [ -n "$signal" ]; then order kill; else order stop; fi
    signal=${signal:-$1}
    echo "train.sh: SIG$1: the ranks are told to $([ "$(< "$dir/order")" = stop ] && echo save || echo end)" >&2
}
# shellcheck disable=SC2064
for name in INT TERM HUP; do trap "stop $name" "$name"; done

order wait
for index in "${!hosts[@]}"; do
    : > "$dir/facts-$index"
    (
        trap '' INT TERM HUP # of a terminal, for all of its processes
        feed "$index" "$@" | "${ssh[@]}" "${hosts[index]}" 'exec bash -s' 2>&1 | label "$index"
        echo "${PIPESTATUS[1]}" > "$dir/code.$index" && mv "$dir/code.$index" "$dir/code-$index"
    ) &
done

# These have no subshell: Ctrl-C in a terminal kills subshells too, and their output would be empty.
ended() { # NUMBER: whether so many hosts have
    set -- "$1" "$dir"/code-*
    [ -e "$2" ] && [ $(($# - 1)) -ge "$1" ]
}

# Set fact to a line of what a host has reported; fail if it has not.
fact() { # INDEX NUMBER
    local number
    for ((number = 0; number < $2; number++)); do
        IFS= read -r fact || { fact= && return 1; }
    done < "$dir/facts-$1"
}

# Wait until each host has reported so many facts, or one has ended.
facts() { # NUMBER
    local index
    for index in "${!hosts[@]}"; do
        until fact "$index" "$1" || ended 1; do sleep 0.2; done
    done
}

# Set first to the index of the host that has failed first, and code to its exit code; fail if none has.
first_failed() {
    local file own oldest=
    for file in "$dir"/code-*; do
        if [ -e "$file" ] && read -r own < "$file" && [ "$own" != 0 ] && { [ -z "$oldest" ] || [ "$file" -ot "$oldest" ]; }; then
            oldest=$file code=$own
        fi
    done
    first=${oldest##*-}
    [ -n "$first" ]
}

wrong=() is_shared=yes
facts 1
read -r code0 versions0 < "$dir/facts-0"
for index in "${!hosts[@]}"; do
    if ended 1; then break; fi
    read -r code versions < "$dir/facts-$index"
    [ "$code" = "$code0" ] ||
        wrong+=("${hosts[index]} has other files in src, configs or requirements than ${hosts[0]}: copy the folder")
    [ "${versions% *}" = "${versions0% *}" ] ||
        wrong+=("${hosts[index]} has Python and torch ${versions% *}, ${hosts[0]} ${versions0% *}: \`make setup\` on both")
done
[ -z "${wrong[*]}" ] || { order kill && wait && printf 'train.sh: %s\n' "${wrong[@]}" >&2 && exit 2; }
if [ -z "$signal" ]; then
    order look
    facts 2
fi
for index in "${!hosts[@]}"; do fact "$index" 2 && [ "$fact" = shared ] || is_shared=; done
address=${MASTER_ADDR:-$("${ssh[@]}" -TG "${hosts[0]}" | sed -n 's/^hostname //p')}
if [ -z "$signal" ] && ! ended 1; then
    [ -n "$is_shared" ] || echo "train.sh: note: the hosts do not share runs/: a restart does not resume, and each host has only its shards of a sharded checkpoint" >&2
    order go "$address" "${MASTER_PORT:-${versions0##* }}" "${is_shared:-no}"
    if [ -n "$signal" ]; then order stop; fi # it came while this was written
fi

# Wait for all. The first that fails ends the others, which would wait for it in vain.
first=
until ended "$nodes"; do
    if [ -z "$first" ] && first_failed && [ -z "$signal" ]; then order end; fi
    sleep 0.2
done
[ -n "$first" ] || first_failed || exit 0
# How the run ended, as the host says that failed first, or else another one: exit codes do not say.
outcome=
for index in "$first" "${!hosts[@]}"; do fact "$index" 3 && outcome=${outcome:-$fact}; done
if [ "$code" = 255 ]; then outcome=${outcome:-ssh has lost it, or has not reached it}; fi
echo "train.sh: ${hosts[first]} ended with exit code $code${outcome:+: $outcome}" >&2
case $outcome in
    "failed error: "*) exit 2 ;;
    preempted*) exit $((128 + $(kill -l "${signal:-TERM}"))) ;;
esac
exit "$code"
