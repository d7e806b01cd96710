#!/usr/bin/env bash
# Train the runs of a sweep as a job array:
#
#   bash slurm/sweep.sh [--at-once=N] [option of sbatch …] FILE [option of `fit` …]
#   bash slurm/sweep.sh --at-once=4 --time=02:00:00 sweeps/digits.yaml
#
# With a FILE.yaml of sweeps/sweep.py, each task trains a trial of its study. There is a task for each
# trial that is left: the same command continues a sweep.
#
# Each line of any other file has options of `fit`, which override those of the command line. Quotes
# keep spaces together, as in a shell, but nothing is expanded. Empty lines and # comments are skipped.
# Task I of the array trains line I, in the run job-ARRAY-I.
set -euo pipefail

fail() { echo "sweep.sh: $*" >&2; exit 2; }
# Until tasks are submitted that read it.
trap '[ -z "${plan-}" ] || rm -r "$plan"' EXIT

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash 4.4 or newer is needed; this is $BASH_VERSION"
[ -f slurm/train.sh ] || fail "run it in the project's folder: bash slurm/sweep.sh …"
options=() at_once=
until [ -f "${1-}" ] || [ $# = 0 ]; do
    case $1 in
        --at-once=*) at_once=${1#*=} ;;
        *) options+=("$1") ;;
    esac
    shift
done
[[ $at_once =~ ^([1-9][0-9]*)?$ ]] || fail "--at-once=$at_once: must be a whole number of at least 1"
[[ $# != 0 && $(wc -c < "$1") -le 16777216 ]] || fail "there is no file ${1-${options[*]: -1}}: bash slurm/sweep.sh [option of sbatch …] FILE [option of fit …], a FILE of at most 16 MiB"
grid=$1
shift

submit() { # NUMBER_OF_TASKS OPTION …
    local most
    most=$(scontrol show config 2> /dev/null | sed -n 's/^MaxArraySize *= //p') || true # sbatch says why
    [ "$1" -lt "${most:=1000000000}" ] || fail "$grid is $1 tasks, and this cluster allows $((most - 1)) in an array: split it"
    bash slurm/submit.sh --array="1-$1${at_once:+%$at_once}" --output=slurm-%A_%a.out "${options[@]}" slurm/train.sh "${@:2}"
    [[ " ${options[*]-} " == *" --test-only "* ]] || plan=
    exit
}

if [[ $grid == *.y@(a|)ml ]]; then
    # shellcheck source=SCRIPTDIR/settings.sh
    source slurm/settings.sh
    [ -x "$VENV/bin/python" ] || fail "there is no $VENV/bin/python in $PWD; \`make optuna\`, or set VENV (slurm/settings.sh)"
    printed=$("$VENV/bin/python" sweeps/sweep.py "$grid" left "$@") || exit
    mapfile -t words <<< "$printed"
    [ "${words[0]}" != 0 ] || fail "$grid: no trial is left; for more, raise \`trials\`"
    export SWEEP_STUDY=$grid
    submit "${words[@]}" "$@"
fi

# Tasks read this copy, so the file may change: one file per task, one line per word.
mkdir -p runs
plan=$(mktemp -d "$PWD/runs/.sweep-XXXXXX")
count=0 number=0
comment='^(([^"'\''#]|"[^"]*"|'\''[^'\'']*'\''|[^[:space:]"'\'']#)*[[:space:]])#'
while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    line=${line%$'\r'}
    if [[ " $line" =~ $comment ]]; then line=${BASH_REMATCH[1]# }; fi
    if [[ $line =~ ^[[:space:]]*$ ]]; then continue; fi
    count=$((count + 1))
    # xargs removes quotes, and interprets no other shell syntax.
    xargs printf '%s\n' <<< "$line" > "$plan/$count" 2> /dev/null ||
        fail "$grid, line $number: a quote is not closed"
    echo "$grid, line $number" >> "$plan/lines"
    printf '%d: %s\n' "$count" "$line"
done < "$grid"
[ "$count" != 0 ] || fail "$grid has no line with options"

export SWEEP_PLAN=$plan
submit "$count" "$@"
