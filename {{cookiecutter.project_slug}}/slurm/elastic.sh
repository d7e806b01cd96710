#!/usr/bin/env bash
# Train on as many nodes as there are: torchrun's elastic launch. A lost node shrinks the run, which
# goes on from its newest checkpoint, and is replaced as soon as SLURM has a node for it.
#
#   NODES_MIN=2 sbatch --nodes=4 slurm/elastic.sh --trainer.checkpoint_every_n_steps 100
#
# SLURM takes a lost node out of a job for good. So a small job takes its place: it waits in the
# queue for a node, the same one or another, and joins the run. It ends with the run. Where the
# first node is lost, with it this script, SLURM puts the whole job back into the queue.
#
# Each line below can be overridden by the same option of sbatch. Other settings: slurm/settings.sh.
#
#SBATCH --job-name={{ cookiecutter.project_slug }}
#SBATCH --nodes=2
# A process a GPU; on CPUs --ntasks-per-node says how many.
{%- if cookiecutter.gpus_per_node == "0" %}
#SBATCH --cpus-per-task=4
{%- else %}
#SBATCH --gpus-per-node={{ cookiecutter.gpus_per_node }}
#SBATCH --cpus-per-gpu=4
{%- endif %}
{%- if cookiecutter.slurm_partition %}
#SBATCH --partition={{ cookiecutter.slurm_partition }}
{%- endif %}
{%- if cookiecutter.slurm_account %}
#SBATCH --account={{ cookiecutter.slurm_account }}
{%- endif %}
# A job that needs longer saves before its end, and goes on after its next turn in the queue.
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# The loss of a node is not the end of the job.
#SBATCH --no-kill
# One file for a job, over all its requeues. What ranks other than 0 print lies in runs/RUN/logs.
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# shellcheck disable=SC2030,SC2031,SC2153,SC2317,SC2329 # set by SLURM, changed for one command, in a trap
set -uo pipefail

if ! [ -f "${SLURM_SUBMIT_DIR-}/slurm/job.sh" ]; then
    echo "elastic.sh: submit it in the project's folder: sbatch slurm/elastic.sh …" >&2
    exit 2
fi
# shellcheck source=SCRIPTDIR/settings.sh
source "$SLURM_SUBMIT_DIR/slurm/settings.sh"
# shellcheck source=SCRIPTDIR/job.sh
source "$SLURM_SUBMIT_DIR/slurm/job.sh"

case $RDZV_BACKEND in
    c10d) endpoint=${JOIN_ENDPOINT:-$SLURMD_NODENAME:$(free_port)} ;;
    etcd-v2 | etcd) endpoint=${RDZV_ENDPOINT:?"slurm/elastic.sh: RDZV_BACKEND=$RDZV_BACKEND wants RDZV_ENDPOINT=HOST:PORT of a server"} ;;
    *) fail "RDZV_BACKEND=$RDZV_BACKEND is unknown; use c10d, etcd-v2 or etcd" ;;
esac
# Lost nodes are noticed after 6 s; a new round waits 5 s for those that may still come.
rdzv_conf=keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5
replacement=$run_name-replacement
replaced=0 code=0
declare -A agents=() started=() attempts=()

start_agent() { # NODE
    local conf=$rdzv_conf
    if [ "$RDZV_BACKEND" = c10d ]; then
        # torchrun could tell by the name of its machine, where that is the node's.
        conf+=,is_host=$([ -z "${JOIN_JOB-}" ] && [ "$1" = "$SLURMD_NODENAME" ] && echo true || echo false)
    fi
    # How often ranks may fail is the trainer's to say: it ends torchrun when there is no progress.
    srun --input=none --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="$SLURM_CPUS_ON_NODE" --overlap --no-kill \
        --export=ALL "${srun_options[@]}" "${python[@]}" "${torchrun[@]}" \
        --nnodes="$NODES_MIN:$NODES_MAX" --max-restarts=100 \
        --rdzv-backend="$RDZV_BACKEND" --rdzv-id="$run_name-$restarts" --rdzv-endpoint="$endpoint" \
        --rdzv-conf="$conf" -m "${fit[@]}" > >(trap '' TERM USR1 && exec sed -u "s/^/$1: /") 2>&1 &
    agents[$1]=$!
    steps+=($!)
    started[$1]=$(date +%FT%T)
    attempts[$1]=$((${attempts[$1]-0} + 1))
    if [ "$signal" = USR1 ]; then kill -USR1 $!; fi
}

# Nodes that the job has now; those that are lost are taken out of it.
nodes() {
    local list
    list=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && scontrol show hostnames "$list"
}

# Whether a machine was started after an agent was: srun itself may go on waiting for it.
has_rebooted() { # NODE
    [[ $(scontrol --oneliner show node "$1") =~ \ BootTime=([0-9T:-]+) ]] &&
        [[ ${BASH_REMATCH[1]} > ${started[$1]} ]]
}

# Let jobs wait for as many nodes as are missing; those that wait or run already are known by name.
replace_nodes() { # OPTION …
    local present coming missing
    # Nothing is known while SLURM's controller is away.
    present=$(nodes | wc -l) && coming=$(squeue --noheader --me --name="$replacement" | wc -l) || return
    missing=$((NODES_MAX - present - coming))
    # Read after it was counted: at the end of the run a stand-in is gone, and wants no other.
    if [ -s "$TRAINER_OUTCOME" ]; then return; fi
    for ((; missing > 0 && replaced < MAX_REPLACEMENTS; missing--)); do
        replaced=$((replaced + 1))
        submit_replacement "$@" || echo "$run_name: a lost node is not replaced" >&2
    done
}

submit_replacement() { # OPTION …
    local name more options
    options=(--nodes=1 --ntasks-per-node="$ranks" --no-requeue --job-name="$replacement"
        --output="slurm-$SLURM_JOB_ID-%j.out" --partition="$SLURM_JOB_PARTITION"
        --time="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l)")
    if [ -n "${SLURM_GPUS_ON_NODE-}" ]; then
        options+=(--gpus-per-node="$SLURM_GPUS_ON_NODE" --cpus-per-gpu="$((SLURM_CPUS_ON_NODE / SLURM_GPUS_ON_NODE))")
    fi
    if [ -n "${SLURM_JOB_ACCOUNT-}" ]; then options+=(--account="$SLURM_JOB_ACCOUNT"); fi
    read -r -a more <<< "$REPLACEMENT_OPTIONS"
    (
        # What SLURM has told this job is not true of the other.
        for name in "${!SLURM_@}"; do [ "$name" = SLURM_CONF ] || unset "$name"; done
        export JOIN_JOB=$job JOIN_RESTARTS=$restarts JOIN_ENDPOINT=$endpoint NODES_MAX
        sbatch --parsable --export=ALL "${options[@]}" "${more[@]}" slurm/elastic.sh "$@" > /dev/null
    )
}

# Whether the run that this job takes part in still goes on, by the same start of its job. It does
# while SLURM's controller is away, and cannot tell.
run_goes_on() {
    local facts
    if facts=$(scontrol --oneliner show job "$job" 2>&1); then
        [[ $facts =~ \ JobState=RUNNING\  && $facts =~ \ Restarts=$restarts\  ]]
    else
        [[ $facts != *"Invalid job id"* ]]
    fi
}

# Collect agents that have ended; sets `code` to the last one's.
check_agents() {
    local node
    for node in "${!agents[@]}"; do
        if has_rebooted "$node"; then
            kill -KILL "${agents[$node]}" 2> /dev/null
        elif kill -0 "${agents[$node]}" 2> /dev/null; then
            continue
        fi
        await "${agents[$node]}" 2> /dev/null
        code=$?
        unset "agents[$node]"
        echo "$run_name: the agent on $node has ended"
    done
}

start_missing_agents() {
    local node
    while read -r node; do
        if [ -z "${agents[$node]-}" ] && [ "${attempts[$node]-0}" -lt 10 ]; then start_agent "$node"; fi
    done < <(nodes)
}

# Wait a moment, or until an agent ends or a signal comes.
pause() {
    sleep 5 &
    wait -n $! "${agents[@]}"
    kill $! 2> /dev/null
    wait $! 2> /dev/null
}

end_agents() { # SIGNAL
    if [ -n "${agents[*]}" ]; then kill "-$1" "${agents[@]}" 2> /dev/null; fi
}

end_replacements() { scancel --quiet --me --name="$replacement"; }

# The job of a stand-in: one agent, for as long as the run that it takes part in goes on.
if [ -n "${JOIN_JOB-}" ]; then
    start_agent "$SLURMD_NODENAME"
    while [ -n "${agents[*]}" ]; do
        pause
        check_agents
        if ! run_goes_on; then end_agents KILL; fi
    done
    exit "$code"
fi

at_exit() {
    end_replacements
    tidy
}
trap 'signal=TERM; end_replacements' TERM
is_told='' deadline=''
start_missing_agents
while [ -n "${agents[*]}" ]; do
    pause
    check_agents
    if [ "$signal" = USR1 ] && [ -z "$is_told" ]; then
        is_told=1
        scancel --quiet --me --name="$replacement" --state=RUNNING --signal=USR1
    fi
    outcome=$(cat "$TRAINER_OUTCOME" 2> /dev/null)
    if [ -z "$signal$outcome" ]; then
        deadline=''
        start_missing_agents
        replace_nodes "$@"
    elif [[ $outcome == "failed error: "* ]]; then
        # The user's own mistake, such as an unknown option, stays one however often it is tried.
        end_agents TERM
    elif [ -n "$signal" ] || [[ $outcome != failed* ]]; then
        # It ends, or all ranks but one that has left begin again, and then the file goes.
        deadline=${deadline:-$((SECONDS + SAVE_SECONDS))}
        if [ "$SECONDS" -ge "$deadline" ]; then end_agents KILL; fi
    fi
done
conclude "$code"
