#!/usr/bin/env bash
# One host of ssh/train.sh, which starts this script: it checks the host, starts its ranks, and ends
# them when it is told to, or has heard nothing for a minute. Standard input has an order in each line.
set -uo pipefail
id=$1 index=$2 nodes=$3 processes=$4 && shift 4

fail() { echo "error: $*"; exit 2; }
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash 4.4 or newer is needed; this is $BASH_VERSION"
# shellcheck source=SCRIPTDIR/../slurm/settings.sh
source slurm/settings.sh
# shellcheck source=SCRIPTDIR/../slurm/checks.sh
source slurm/checks.sh
find_python
[[ $SAVE_SECONDS =~ ^(0|[1-9][0-9]*)$ ]] || fail "SAVE_SECONDS=$SAVE_SECONDS: must be a whole number"

tell() { printf '%s: %s\n' "$id" "$*"; } # train.sh

# Wait for an order; sets `words`.
await() { # ORDER
    while read -r -t 60 -a words; do
        case ${words[0]-} in
            "$1") return ;;
            stop | end | kill) exit 143 ;;
        esac
    done
    exit 1
}

mkdir -p runs || fail "cannot make $PWD/runs"
marker=runs/.$id
export TRAINER_OUTCOME=$PWD/runs/.outcome-$id-$index APPTAINERENV_TRAINER_WORLD_SIZE=$TRAINER_WORLD_SIZE
trap 'rm -f "$marker" "$TRAINER_OUTCOME"' EXIT
if [ "$index" = 0 ]; then : > "$marker"; fi
while port=$((20000 + RANDOM % 10000)) && (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do :; done
code=$({
    find src configs -type f ! -name '*.py[co]' ! -path '*.egg-info/*' -print0
    printf '%s\0' pyproject.toml requirements/*.txt
} | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-12)
versions=$("${python[@]}" -c 'import platform; from importlib.metadata import version
print(platform.python_version(), version("torch"))' < /dev/null) || fail "${python[*]} has no torch"
tell "$code $versions $port"

await look
ls -a runs > /dev/null # so that NFS looks again
tell "$([ -e "$marker" ] && echo shared || echo apart)"
await go

fit=(fit)
if ! option --config "$@" > /dev/null; then fit+=(--config "$CONFIG"); fi
fit+=(--trainer.run_name "$id")
if [ "${words[3]}" = yes ]; then fit+=(--trainer.resume auto); fi
"${python[@]}" -m torch.distributed.run --nnodes="$nodes" --node-rank="$index" --nproc-per-node="$processes" \
    --master-addr="${words[1]}" --master-port="${words[2]}" --shutdown-timeout="$SAVE_SECONDS" \
    -m "$PACKAGE" "${fit[@]}" "$@" < /dev/null &
torchrun=$!

family() { # PID: it and all its descendants
    local child
    echo "$1"
    for child in $(pgrep -P "$1"); do family "$child"; done
}

deadline=
end_within() { # SECONDS
    if [ -z "$deadline" ]; then
        deadline=$((SECONDS + $1))
        kill -TERM "$torchrun" 2> /dev/null
    fi
}

heard=$SECONDS
while kill -0 "$torchrun" 2> /dev/null; do
    if read -r -t 2 -a words; then
        heard=$SECONDS
        case ${words[0]-} in
            stop) end_within "$SAVE_SECONDS" ;;
            end) end_within 30 ;;
            kill) deadline=0 ;;
        esac
    elif [ $? -le 128 ] || [ $((SECONDS - heard)) -gt 60 ]; then # the end of the input, not a timeout
        [ -n "$deadline" ] || echo "the connection is lost: the ranks are told to save"
        end_within "$SAVE_SECONDS"
        sleep 0.5
    fi
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ]; then
        mapfile -t pids < <(family "$torchrun")
        kill -KILL "${pids[@]}" 2> /dev/null
    fi
done
wait "$torchrun"
code=$?
outcome=$(cat "$TRAINER_OUTCOME" 2> /dev/null)
if [ -n "$outcome" ]; then tell "$outcome"; fi
exit "$code"
