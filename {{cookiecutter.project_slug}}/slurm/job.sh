# shellcheck shell=bash disable=SC2034,SC2054,SC2153
# What train.sh and elastic.sh share: how Python is called, how a job waits and how it ends. Nothing
# here is evaluated twice: options are kept in arrays and never joined to a command.

fail() {
    printf '%s: %s\n' "$SLURM_JOB_NAME" "$*" >&2
    exit 2
}

# sbatch runs a copy of the script, so that it cannot know where it lay. Sourcing this file has
# shown that SLURM_SUBMIT_DIR is the project.
cd "$SLURM_SUBMIT_DIR" || fail "cannot enter $SLURM_SUBMIT_DIR on $SLURMD_NODENAME"

restarts=${SLURM_RESTART_COUNT:-0}
# Whatever is begun again bears the same name. The id of an array's last task is the array's own, so
# that SLURM would take it for all of them.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
# A job that stands in for a lost node (elastic.sh) takes part in the run of another.
if [ -n "${JOIN_JOB-}" ]; then job=$JOIN_JOB restarts=$JOIN_RESTARTS; fi

# A process a GPU, unless --ntasks-per-node says otherwise; without GPUs one.
ranks=${SLURM_NTASKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
if [ "$ranks" = 0 ]; then ranks=1; fi
# srun would hold it against the number of CPUs that it is given below.
unset SLURM_CPUS_PER_GPU

# What is counted with must be numbers: bash would run what stands in some others.
: "${NODES_MAX:=$SLURM_JOB_NUM_NODES}"
for name in MAX_REQUEUES SAVE_SECONDS NODES_MIN NODES_MAX MAX_REPLACEMENTS ranks restarts; do
    [[ ${!name} =~ ^(0|[1-9][0-9]*)$ ]] || fail "$name=${!name}: a whole number is wanted"
done

read -r -a srun_options <<< "$SRUN_OPTIONS"
python=()
case $CONTAINER in
    none)
        [ -x "$VENV/bin/python" ] || fail "there is no $VENV/bin/python in $PWD; \`make setup\`, or set VENV (slurm/settings.sh)"
        python=("$VENV/bin/python")
        ;;
    apptainer)
        python=(apptainer exec --bind "$PWD${MOUNTS:+,$MOUNTS}" --pwd "$PWD")
        # The GPUs' driver is the host's.
        if [ -n "${SLURM_GPUS_ON_NODE-}" ]; then python+=(--nv); fi
        python+=("$IMAGE" python)
        ;;
    pyxis)
        srun_options+=(--container-image="$IMAGE" --container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}" --container-workdir="$PWD")
        python=(python)
        ;;
    *) fail "CONTAINER=$CONTAINER is unknown; use none, apptainer or pyxis" ;;
esac

# The value of the last `--NAME VALUE` or `--NAME=VALUE` among options; fails where there is none.
option() { # NAME OPTION …
    local name=$1 found='' is_there=1
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            "$name") is_there=0 found=${2-} ;;
            "$name="*) is_there=0 found=${1#*=} ;;
        esac
        shift
    done
    printf %s "$found"
    return "$is_there"
}

# A run of its own for the job, the same after each requeue. The user's options come last and win.
run_name=job-${job//_/-}
fit=("$PACKAGE" fit)
# Where SLURM has given GPUs, torch must not fall back to CPUs. A config or an option that says otherwise comes later.
if [ "${SLURM_GPUS_ON_NODE:-0}" != 0 ] || [ -n "${SLURM_JOB_GPUS-}" ]; then
    if ! { option --trainer.gpus "$@" || option --trainer.num_processes "$@"; } > /dev/null; then
        fit+=(--trainer.accelerator gpu)
    fi
fi
if ! option --config "$@" > /dev/null; then fit+=(--config "$CONFIG"); fi
fit+=(--trainer.run_name "$run_name" --trainer.resume auto "$@")
# What the user resumes from counts once: after a requeue the job's own run is continued.
root=$(option --trainer.default_root_dir "$@") || root=runs
own=$(option --trainer.run_name "$@") || own=$run_name
if [ "$restarts" != 0 ] && [ -e "$root/$own/run.json" ]; then fit+=(--trainer.resume auto); fi

# A port of this node that nobody answers at.
free_port() {
    local port
    while port=$((20000 + RANDOM % 10000)) && (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do :; done
    echo "$port"
}

# torchrun dies of SIGUSR1 unless it is told of it, and kills what is still saving after 30 s.
torchrun=(-m torch.distributed.run --nproc-per-node="$ranks"
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout="$SAVE_SECONDS")
# Ranks that come back would dial the dead one's port in a store that is kept.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# How the run ended; exit codes of srun, torchrun and mpirun do not tell.
export TRAINER_OUTCOME=$PWD/runs/.outcome-$job
mkdir -p runs || fail "cannot make $PWD/runs"
# Ranks that were killed leave the file by which they have told their port.
tidy() { rm -f "$TRAINER_OUTCOME" ".rendezvous-$SLURM_JOB_ID."*; }
at_exit() { tidy; }
if [ -z "${JOIN_JOB-}" ]; then
    tidy
    # A child that is killed before it has become its command runs this shell's trap.
    trap 'if [ "$BASHPID" = $$ ]; then at_exit; fi' EXIT
fi

# SIGUSR1 comes to this script alone (--signal=B:…) and is handed on; SLURM itself sends SIGTERM to
# every process of a job that it ends. Both are only noted here: the ranks save, then srun returns.
signal=
steps=()
hand_on() {
    echo "$run_name: SIGUSR1: the ranks are told to save"
    signal=${signal:-USR1}
    if [ -n "${steps[*]}" ]; then kill -USR1 "${steps[@]}" 2> /dev/null; fi
}
trap hand_on USR1
trap 'signal=TERM' TERM

# Wait for a process to its end: a signal that is trapped ends `wait`, and not the process.
await() { # PID
    local code=0
    while kill -0 "$1" 2> /dev/null; do wait "$1" || code=$?; done
    wait "$1" 2> /dev/null || code=$?
    return "$code"
}

# End the job as its run has ended: put it back into the queue, or give its reason.
conclude() { # EXIT_CODE
    local code=$1 outcome=
    if [ -f "$TRAINER_OUTCOME" ]; then outcome=$(< "$TRAINER_OUTCOME"); fi
    case $outcome in
        finished*)
            echo "$run_name: $outcome"
            exit 0
            ;;
        "preempted SIGUSR1"*) if [ "$signal" != TERM ]; then requeue "$outcome"; fi ;;
        # Told to save before the trainer could listen: nothing is lost by beginning again.
        "") if [ "$signal" = USR1 ]; then requeue "stopped by SIGUSR1 before the first step"; fi ;;
        # SLURM gives a preempted job its GraceTime, and does not put it back if it ends within.
        "preempted SIGTERM"*) if is_preempted; then requeue "$outcome"; fi ;;
    esac
    echo "$run_name: ${outcome:-killed before it could say why (exit code $code)}" >&2
    if [ "$code" = 0 ]; then code=1; fi
    exit "$code"
}

# SLURM's controller may be away for a moment, as where it is started anew.
patiently() { # COMMAND …
    local tries=1
    until "$@"; do
        [ "$tries" -lt 5 ] || return 1
        tries=$((tries + 1))
        sleep 4
    done
}

is_preempted() {
    [[ $(patiently scontrol --oneliner show job "$job") =~ \ PreemptTime=[0-9] ]]
}

requeue() { # WHY
    if [ "$restarts" -ge "$MAX_REQUEUES" ]; then
        echo "$run_name: $1; not requeued again (MAX_REQUEUES=$MAX_REQUEUES). To go on: sbatch slurm/train.sh … --trainer.run_name $run_name" >&2
        exit 1
    fi
    echo "$run_name: $1; requeued ($((restarts + 1)) of at most $MAX_REQUEUES)"
    patiently scontrol requeue "$job" || fail "scontrol requeue has failed"
    exit 0
}
