#!/usr/bin/env bash
# Check a job on this machine, and submit it with the options in settings.sh:
#
#   bash slurm/submit.sh [option of sbatch …] slurm/train.sh [option of `fit` …]
#   bash slurm/submit.sh --nodes=2 --gpus-per-node=4 slurm/train.sh --config configs/gpt.yaml
#
# By default SLURM accepts a job whose time limit its partition does not allow, and never starts it.
set -uo pipefail

fail() { echo "submit.sh: $*" >&2; exit 2; }

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash 4.4 or newer is needed; this is $BASH_VERSION"
[ -f slurm/settings.sh ] || fail "run it in the project's folder: bash slurm/submit.sh …"
command -v sbatch > /dev/null || fail "sbatch is not on PATH: on this machine, is SLURM a module to load?"
options=()
until [[ ${1-} == *.sh && -f $1 ]]; do
    [ $# != 0 ] || fail "there is no script in '${options[*]}': bash slurm/submit.sh [option of sbatch …] slurm/train.sh [option of fit …]"
    options+=("$1")
    shift
done
script=$1
shift
while [[ ${1-} =~ ^[A-Z][A-Z_]*= ]]; do export "${1?}" && shift; done
# Settings of this job become words of its command line: many clusters export no variables to jobs.
export SUBMITTED_BY=submit.sh
settings=()
for name in SUBMITTED_BY SWEEP_PLAN SWEEP_STUDY $(sed -n 's/^: "${\([A-Z_]*\)[:=].*/\1/p' slurm/settings.sh); do
    if [ -n "${!name+set}" ]; then settings+=("$name=${!name}"); fi
done
# shellcheck source=SCRIPTDIR/settings.sh
source slurm/settings.sh
# shellcheck source=SCRIPTDIR/checks.sh
source slurm/checks.sh
leave_job

# sbatch prints what the job asks for, from these options, settings.sh and the #SBATCH lines.
declare -A asked=()
while IFS= read -r line; do
    if [[ $line =~ ^sbatch:\ ([a-z-]+)\ +:\ (.+)$ ]]; then asked[${BASH_REMATCH[1]}]=${BASH_REMATCH[2]}; fi
done < <(sbatch --verbose --test-only "${options[@]}" "$script" 2>&1)

seconds() { # [DAYS-][HOURS:]MINUTES:SECONDS
    [[ $1 =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return
    echo $((10#0${BASH_REMATCH[2]} * 86400 + 10#0${BASH_REMATCH[4]} * 3600 + 10#${BASH_REMATCH[5]} * 60 + 10#${BASH_REMATCH[6]}))
}

# Fail if no partition of the job allows its time limit, or the least that it takes, or the job would save at once.
check_time() {
    local name limit limits='' time option=time lead=${asked[signal]-}
    if [ -n "${asked[time-min]-}" ]; then option='time-min'; fi
    time=$(seconds "${asked[$option]-}") || return 0
    lead=${lead##*@}
    [[ $lead != +([0-9]) ]] || [ "$time" -gt "$lead" ] ||
        fail "--$option=${asked[$option]} is not more than the $lead s before its end at which the job saves (--signal): it would make no step"
    while read -r name limit; do # the name of the default partition ends with *
        [[ ,${asked[partition]-}, == *,${name%\*},* || (-z ${asked[partition]-} && $name == *\*) ]] || continue
        [ "$(seconds "$limit" || echo "$time")" -lt "$time" ] || return 0
        limits+="${limits:+, }${name%\*}: $limit"
    done < <(sinfo --noheader --format='%P %l' 2> /dev/null)
    [ -z "$limits" ] ||
        fail "--$option=${asked[$option]} is more than the partition allows ($limits): the job would never start; give less, and it is requeued and resumes"
}

check_time
if [ -n "${SWEEP_PLAN-}" ]; then # tasks train the lines of a file
    tasks=${asked[array]-} tasks=${tasks%\%*}
    for task in ${tasks//[^0-9]/ }; do
        [ -f "$SWEEP_PLAN/$task" ] || fail "--array=${asked[array]}: the file has lines 1 to $(wc -l < "$SWEEP_PLAN/lines"), and no line $task"
    done
fi
for name in output error; do
    path=${asked[$name]-x} folder=${path%/*}
    [[ $path != */* || $folder == *%* || -d $folder ]] ||
        fail "--$name=$path: there is no folder $folder, and SLURM makes none: the job would end without a word"
done
# A name such as docker://… is of a registry.
[ "$CONTAINER" = none ] || [[ $IMAGE != *.s@(if|qsh) || $IMAGE == *://* ]] || [ -e "$IMAGE" ] ||
    fail "there is no image $IMAGE (IMAGE in slurm/settings.sh)"
grep -q 'slurm/job\.sh' "$script" || exec sbatch "${options[@]}" "$script" "$@" # of the user
# The ranks know SIGUSR1, and the scripts also hand on two others.
[[ ${asked[signal]-USR1} =~ ^([BR]+:)?USR1|^R?BR?:(USR2|HUP) ]] ||
    fail "--signal=${asked[signal]}: the job would not save: give --signal=B:USR1@SECONDS"
of_gpus="${asked[gpus]-} ${asked[gpus-per-node]-} ${asked[gpus-per-task]-} ${asked[gres]-}"
(
    # Where it fails here, it may work on the nodes.
    set +u
    prepare > /dev/null 2>&1 || exit 0
    set -u
    check_venv
    if [[ $of_gpus =~ (^|[ :])[1-9][0-9]* ]]; then check_torch "$@"; fi
    words=()
    if [ -n "${SWEEP_PLAN-}" ]; then check_lines "$@" && mapfile -t words < "$SWEEP_PLAN/1"; fi
    check_options "$@" "${words[@]}"
) || exit

# Lines that options replace: sbatch would refuse them on a cluster without GPUs, and beside other ways to ask for the same.
replaced=
if [ -n "${asked[gpus]-}${asked[gpus-per-task]-}" ] || [[ ${asked[gres]-} == *gpu* ]]; then
    replaced='gpus-per-node'
elif [ "${asked[gpus-per-node]-}" = 0 ]; then
    replaced='gpus-per-node\|cpus-per-gpu'
fi
if [ -n "${asked[cpus-per-gpu]-}" ] && [ -n "${asked[cpus-per-task]-}" ]; then replaced+="${replaced:+\|}cpus-per-\(gpu\|task\)"; fi
[ -z "$replaced" ] || exec sbatch "${options[@]}" <(sed "/^#SBATCH --\($replaced\)=/d" "$script") "${settings[@]}" "$@"
exec sbatch "${options[@]}" "$script" "${settings[@]}" "$@"
