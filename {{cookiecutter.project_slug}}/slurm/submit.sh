#!/usr/bin/env bash
# Check a job on this machine, and submit it with the options in settings.sh:
#
#   bash slurm/submit.sh [OPTION=VALUE of sbatch …] slurm/train.sh [option of `fit` …]
#   bash slurm/submit.sh --nodes=2 --gpus-per-node=4 slurm/train.sh --config configs/gpt.yaml
#
# By default SLURM accepts a job whose time limit its partition does not allow, and never starts it.
set -uo pipefail

fail() {
    printf 'submit.sh: %s\n' "$*" >&2
    exit 2
}

[ -f slurm/settings.sh ] || fail "run it in the project's folder: bash slurm/submit.sh …"
# shellcheck source=SCRIPTDIR/settings.sh
source slurm/settings.sh
# shellcheck source=SCRIPTDIR/checks.sh
source slurm/checks.sh
options=()
while [[ ${1-} == --* ]]; do
    options+=("$1")
    shift
done
[ -f "${1-}" ] ||
    fail "there is no script '${1-}': bash slurm/submit.sh [OPTION=VALUE of sbatch …] slurm/train.sh [option of fit …]"

# sbatch prints what the job asks for, from these options, settings.sh and the #SBATCH lines.
declare -A asked=()
while IFS= read -r line; do
    if [[ $line =~ ^sbatch:\ ([a-z-]+)\ +:\ (.+)$ ]]; then asked[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}; fi
done < <(sbatch --verbose --test-only "${options[@]}" "$@" 2>&1)

seconds() { # [DAYS-]HOURS:MINUTES:SECONDS
    [[ $1 =~ ^(([0-9]+)-)?([0-9]+):([0-9]+):([0-9]+)$ ]] || return
    echo $((10#0${BASH_REMATCH[2]} * 86400 + 10#${BASH_REMATCH[3]} * 3600 + 10#${BASH_REMATCH[4]} * 60 + 10#${BASH_REMATCH[5]}))
}

# Fail if no partition of the job allows its time limit.
check_time() {
    local facts limit limits='' time
    time=$(seconds "${asked[time]-}") || return 0
    while IFS= read -r facts; do
        if [ -n "${asked[partition]-}" ]; then
            [[ ,${asked[partition]}, == *,${facts%% *},* ]] || continue
        else
            [[ $facts == *" Default=YES "* ]] || continue
        fi
        [[ $facts =~ \ MaxTime=([^ ]+) ]] && limit=$(seconds "${BASH_REMATCH[1]}") && [ "$limit" -lt "$time" ] || return 0
        limits+="${limits:+, }${facts%% *}: ${BASH_REMATCH[1]}"
    done < <(scontrol --oneliner show partition 2> /dev/null | sed 's/^PartitionName=//')
    [ -z "$limits" ] ||
        fail "--time=${asked[time]} is more than the partition allows ($limits): the job would never start; give less, and it is requeued and resumes"
}

check_time
(
    # Where it fails here, it may work on the nodes.
    set +u
    prepare > /dev/null 2>&1 || exit 0
    set -u
    check_venv
    gpus="${asked[gpus]-} ${asked[gpus-per-node]-} ${asked[gpus-per-task]-} ${asked[gres]-}"
    if [[ $gpus =~ (^|[ :])[1-9][0-9]* ]]; then check_torch "${@:2}"; fi
) || exit

export SUBMITTED_BY=submit.sh
exec sbatch "${options[@]}" "$@"
