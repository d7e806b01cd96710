# shellcheck shell=bash disable=SC2034,SC2054,SC2153
# Shared by train.sh and elastic.sh: how to call Python, to wait for the ranks and to end the job.
# Nothing is evaluated twice: options are kept in arrays and never joined to a string.

fail() { echo "$SLURM_JOB_NAME: $*" >&2; exit 2; }
note() { echo "$SLURM_JOB_NAME: note: $*" >&2; }

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash 4.4 or newer is needed; this is $BASH_VERSION"
# salloc runs it on the login node, and srun once for each task; its step ids are the small ones.
if [ "${ENVIRONMENT-}" != BATCH ] || [ "${SLURM_STEP_ID:-4294967295}" -lt 4294967280 ] || [ "${SLURM_HET_SIZE:-1}" != 1 ]; then
    fail "this is a batch script of one component; submit it: bash slurm/submit.sh slurm/train.sh … (not salloc, srun or ':')"
fi

# sbatch runs a copy of the script. Since this file was found, SLURM_SUBMIT_DIR is the project's folder.
cd "$SLURM_SUBMIT_DIR" || fail "cannot enter $SLURM_SUBMIT_DIR on $SLURMD_NODENAME"

# Settings are words before the options, too: many clusters export no variables to jobs.
while [[ ${1-} =~ ^[A-Z][A-Z_]*= ]]; do export "${1?}" && shift; done
# shellcheck source=SCRIPTDIR/settings.sh
source slurm/settings.sh
# shellcheck source=SCRIPTDIR/checks.sh
source slurm/checks.sh
if [ -z "${SUBMITTED_BY-}" ]; then
    ! grep -q '^ *export SBATCH_' slurm/settings.sh ||
        note "sbatch does not read the SBATCH_ variables in slurm/settings.sh; slurm/submit.sh does"
    [[ ${SLURM_EXPORT_ENV-ALL} == ALL* ]] ||
        note "sbatch has exported no variables (--export): write settings after the script, or use slurm/submit.sh"
fi
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || [ -n "${SWEEP_STUDY-}${SWEEP_PLAN-}" ] ||
    note "all tasks of this array get the same options; slurm/sweep.sh gives each its own"

# SLURM's controller may be unavailable for a moment, for example while it restarts.
patiently() { # COMMAND …
    local tries=0
    until "$@"; do
        ((++tries < 5)) || return 1
        sleep 4
    done
}

restarts=${SLURM_RESTART_COUNT:-0}
# The last task of an array has the id of the array, which SLURM would take for all tasks.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
# A replacement for a lost node (elastic.sh) joins the run of another job.
if [ -n "${JOIN_JOB-}" ]; then job=$JOIN_JOB restarts=$JOIN_RESTARTS; fi

# Check that these are numbers: in arithmetic, bash would execute some other values.
: "${NODES_MAX:=$SLURM_JOB_NUM_NODES}"
on_node=${SLURM_GPUS_ON_NODE:-0}
for name in MAX_REQUEUES SAVE_SECONDS NODES_MIN NODES_MAX MAX_REPLACEMENTS on_node restarts; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$name=${!name}: must be a whole number"
done

# Tasks of all nodes, and at most of one, as SLURM plans them ("2(x3),1"): those that the job asks for, or one per CPU.
plan=${SLURM_TASKS_PER_NODE-1} uneven=
[[ $plan =~ ^[0-9,x\(\)]+$ ]] || fail "SLURM_TASKS_PER_NODE=$plan is not understood"
plan=${plan//(x/*} plan=${plan//)/}
tasks=$((${plan//,/+})) most=${plan%%[*,]*}
if [[ $plan == *,* ]]; then uneven=1; fi
# Other variables may be inherited from a job in which sbatch was called.
if [ "${SLURM_NTASKS-}" = "$tasks" ] && { [ "$LAUNCH" != torchrun ] || [ "$most" != 1 ] || [ "$on_node" = 0 ]; }; then
    ranks=$most
    if [ "$ranks" -lt "$on_node" ]; then note "the job asks for $ranks processes on a node with $on_node GPUs"; fi
elif [ "${SLURM_NTASKS_PER_NODE-}" = "$most" ] && [ "${SLURM_NTASKS-}" != "$tasks" ]; then
    fail "--ntasks=${SLURM_NTASKS-} is not --ntasks-per-node=$most on all nodes; give one of them"
else
    # One process per GPU, or one without GPUs. torchrun is one task itself.
    ranks=$((on_node > 0 ? on_node : 1)) tasks=$((ranks * SLURM_JOB_NUM_NODES)) uneven=
fi
if [ -n "${SLURM_GPUS-}" ]; then
    given=$(patiently scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n 's/.* TresPerJob=[^ ]*gpu:\([^ :]*:\)*\([0-9]*\).*/\2/p')
    [ "${given:=0}" = 0 ] || [ "$given" = $((on_node * SLURM_JOB_NUM_NODES)) ] ||
        fail "--gpus=$given gives nodes different numbers of GPUs, this one $on_node; use --gpus-per-node"
fi
# GPUs of a node, with their type if SLURM says it. `--gres` replaces those of the #SBATCH line, but not this variable.
gpus=${SLURM_GPUS_PER_NODE-}
if [ "${gpus##*:}" != "${SLURM_GPUS_ON_NODE-}" ]; then gpus=${SLURM_GPUS_ON_NODE-}; fi
# Without these, which may also be of the shell that submitted the job, srun gives a step all GPUs of the job, and the tasks
# and CPUs that it is told below; and scontrol and squeue print what is read here.
unset "${!SLURM_GPUS_PER_@}" "${!SLURM_NTASKS@}" "${!SLURM_CPUS_PER_@}" SLURM_GPUS SLURM_NPROCS SLURM_TRES_PER_TASK \
    "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}" SLURM_HINT SLURM_DISTRIBUTION SLURM_TIME_FORMAT "${!SQUEUE_@}"
export SLURM_EXPORT_ENV=ALL # srun, also that of mpirun, exports what was set here

read -r -a srun_options <<< "$SRUN_OPTIONS"
find_python

# Call Python in the environment of the ranks. Its errors are not the run's outcome.
run_python() { # ARGUMENT …
    local command=("${python[@]}" "$@")
    # This shell is not in pyxis' container.
    [ "$CONTAINER" != pyxis ] || command=(srun --nodes=1 --ntasks=1 --export=ALL "${srun_options[@]}" "${command[@]}")
    TRAINER_OUTCOME='' TRAINER_WORLD_SIZE='' timeout --kill-after=10 300 "${command[@]}" < /dev/null
}

# A task of slurm/sweep.sh has its own options: a line of a file of options, or a trial that it takes.
words=()
if [ -n "${SWEEP_STUDY-}" ]; then
    taken=$(run_python sweeps/sweep.py "$SWEEP_STUDY" ask "$job" "$@") || fail "$SWEEP_STUDY: no trial can be taken"
    [ -n "$taken" ] || { echo "$SWEEP_STUDY: no trial is left" && exit; }
    mapfile -t words <<< "$taken"
elif [ -n "${SWEEP_PLAN-}" ]; then
    mapfile -t words 2> /dev/null < "$SWEEP_PLAN/$SLURM_ARRAY_TASK_ID" || fail "$SWEEP_PLAN has no options of task $SLURM_ARRAY_TASK_ID; run slurm/sweep.sh again"
fi
set -- "$@" "${words[@]}"

# Each job has its own run, the same after each requeue. Options of the user come last and override.
run_name=job-${job//_/-}
fit=("$PACKAGE" fit)
if [ "${1-}" = reproduce ]; then
    # `slurm/train.sh reproduce RUN …`: the config and the devices are those of the run.
    fit=("$PACKAGE" reproduce "${2-}")
    shift "$(($# < 2 ? $# : 2))"
else
    # With GPUs from SLURM, torch must not fall back to CPUs. A config or an option overrides this.
    if [ "$on_node${SLURM_JOB_GPUS-}" != 0 ] && ! option --trainer.gpus "$@" > /dev/null; then
        fit+=(--trainer.accelerator gpu)
        check_torch "$@"
    fi
    if ! option --config "$@" > /dev/null; then fit+=(--config "$CONFIG"); fi
fi
fit+=(--trainer.run_name "$run_name" --trainer.resume auto "$@")
own=$(option --trainer.run_name "$@") || own=$run_name

# Print the run's directory, below the one that options, a config, ~ and variables say.
run_directory() {
    local root
    root=$(option --trainer.default_root_dir "${fit[@]}") || root=
    [[ $root != @(|*[~\$]*) || ${fit[1]} != fit ]] || root=$(run_python -c 'import os, sys, yaml
print(os.path.expanduser(os.path.expandvars(yaml.safe_load(sys.argv[1])["trainer"]["default_root_dir"])))' \
        "$(run_python -m "${fit[@]}" --print_config=unchecked)" 2> /dev/null)
    printf %s "${root:-runs}/$own"
}

# The user's --trainer.resume applies once: after a requeue the job resumes its own run.
if [ "$restarts" != 0 ] && option --trainer.resume "$@" > /dev/null && [ -e "$(run_directory)/run.json" ]; then
    fit+=(--trainer.resume auto)
fi

# A free port of this node.
free_port() {
    local port
    while port=$((20000 + RANDOM % 10000)) && (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do :; done
    echo "$port"
}

# By default torchrun dies of SIGUSR1, and kills ranks that are still saving after 30 s.
torchrun=(-m torch.distributed.run --nproc-per-node="$ranks"
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout="$SAVE_SECONDS")
# With a shared store, restarted ranks would connect to the port of the dead rank.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# How the run ended; the exit codes of srun, torchrun and mpirun do not say.
export TRAINER_OUTCOME=$PWD/runs/.outcome-$job
requeues=$PWD/runs/.requeues-$job # the last step, and how many attempts have not come further
mkdir -p runs || fail "cannot make $PWD/runs"
# Killed ranks leave the file with their port.
tidy() { rm -f "$TRAINER_OUTCOME" ".rendezvous-$SLURM_JOB_ID."* "$@"; }
at_exit() { tidy "$requeues"; }
if [ -z "${JOIN_JOB-}" ]; then
    tidy
    # A child that is killed before `exec` runs the trap of this shell.
    trap 'if [ "$BASHPID" = $$ ]; then at_exit; fi' EXIT
fi

# SIGUSR1 is sent to this script only (--signal=B:…), which forwards it; SIGUSR2 and SIGHUP, which
# other launchers use, mean the same. SLURM sends SIGTERM to every process of a job, but
# `scancel --batch` to this script only: ranks that still run after the time to save are told. Then
# the ranks save, and srun returns.
signal=
steps=()
hand_on() {
    echo "$run_name: $1: the ranks are told to save"
    signal=USR1 # also after a SIGTERM to this script only
    if [ -n "${steps[*]}" ]; then kill -USR1 "${steps[@]}" 2> /dev/null; fi
}
note_term() {
    signal=TERM
    (
        sleep "$SAVE_SECONDS"
        # Of SIGTERM, srun and mpirun would kill them. This script may have ended.
        kill -0 $$ && kill -USR1 "${steps[@]}" && echo "$run_name: SIGTERM: the ranks are told to save"
    ) 2> /dev/null &
}
trap 'hand_on SIGUSR1' USR1
trap 'hand_on SIGUSR2' USR2
trap 'hand_on SIGHUP' HUP
trap note_term TERM

# Wait until a process has ended: a trapped signal ends `wait`, but not the process.
await() { # PID
    local code=0
    while kill -0 "$1" 2> /dev/null; do wait "$1" || code=$?; done
    wait "$1" 2> /dev/null || code=$?
    return "$code"
}

# End the job according to the outcome of its run: requeue it, or print the reason.
conclude() { # EXIT_CODE
    local code=$1 outcome=
    if [ -f "$TRAINER_OUTCOME" ]; then outcome=$(< "$TRAINER_OUTCOME"); fi
    case $outcome in
        finished*)
            echo "$run_name: $outcome"
            record_trial || exit 1
            write_report
            exit 0
            ;;
        "preempted SIGUSR1"*) if [ "$signal" != TERM ]; then requeue "$outcome"; fi ;;
        # The signal came before the trainer was ready: restarting loses nothing.
        "") if [ "$signal" = USR1 ]; then requeue "stopped by SIGUSR1 before the first step"; fi ;;
        # SLURM does not requeue a preempted job that ends within its GraceTime.
        "preempted SIGTERM"*)
            [[ ! $(patiently scontrol --oneliner show job "$job") =~ \ PreemptTime=[0-9] ]] || requeue "$outcome"
            ;;
    esac
    record_trial
    echo "$run_name: ${outcome:-ended without reporting a reason (exit code $code)}" >&2
    exit "$((code > 0 ? code : 1))"
}

# Record the value of a sweep's trial, or that it failed.
record_trial() { [ -z "${SWEEP_STUDY-}" ] || run_python sweeps/sweep.py "$SWEEP_STUDY" tell "$job"; }

# Write a page about the run, if the project has the command. The job has succeeded, even if this fails.
write_report() {
    local run command
    [ -d "src/${PACKAGE}_trainer/tools/report" ] || grep -qs tools/report/page wheels/* || return 0
    run=$(run_directory)
    [ -e "$run/run.json" ] || return 0
    command=(-m "$PACKAGE" report "$run")
    run_python "${command[@]}" || note "the report was not written; later: python ${command[*]}"
}

requeue() { # WHY
    local attempts=0 before=0 step=0 why said
    read -r before attempts 2> /dev/null < "$requeues"
    [[ "$before $attempts" =~ ^[0-9]+\ [0-9]+$ ]] || before=0 attempts=0
    if [[ $1 == *" step "+([0-9]) ]]; then step=${1##* }; fi
    if [ "$step" -gt "$before" ]; then before=$step attempts=0; else attempts=$((attempts + 1)); fi
    if [ "$attempts" = 3 ]; then # as for restarts of torchrun
        why="3 attempts without a step after step $before: --time leaves too little before --signal"
    elif [ "$restarts" -ge "$MAX_REQUEUES" ]; then
        why="MAX_REQUEUES=$MAX_REQUEUES"
    elif [[ $(patiently scontrol --oneliner show job "$job" 2> /dev/null) == *" Requeue=0 "* ]]; then
        why=--no-requeue
    elif echo "$before $attempts" > "$requeues" && said=$(patiently scontrol requeue "$job" 2>&1); then
        requeues=
        echo "$run_name: $1; requeued ($((restarts + 1)) of at most $MAX_REQUEUES)"
        exit 0
    else
        why="scontrol requeue: ${said##*$'\n'}"
    fi
    echo "$run_name: $1; not requeued ($why). To resume: sbatch slurm/train.sh … --trainer.run_name $run_name" >&2
    exit 1
}
