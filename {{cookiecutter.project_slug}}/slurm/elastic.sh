#!/usr/bin/env bash
# Train on the nodes that are available: torchrun's elastic launch. If a node is lost, the run
# continues on fewer nodes from its newest checkpoint, and SLURM replaces the node when one is free.
#
#   NODES_MIN=2 bash slurm/submit.sh --nodes=4 slurm/elastic.sh --trainer.checkpoint_every_n_steps 100
#
# SLURM removes a lost node from a job: a replacement job waits for one, joins the run, and ends with
# it. If the first node, which runs this script, is lost, SLURM requeues the whole job.
#
# Options of sbatch override the lines below. For other settings see slurm/settings.sh.
#SBATCH --job-name={{ cookiecutter.project_slug }}
#SBATCH --nodes=2
# One process per GPU; on CPUs --ntasks-per-node sets the number.
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
# A job that needs more time saves before its limit, is requeued and resumes.
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# A lost node does not end the job.
#SBATCH --no-kill
# One file per job, for all requeues. The output of ranks other than 0 is in runs/RUN/logs.
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# shellcheck disable=SC2030,SC2031,SC2153,SC2317,SC2329 # set by SLURM, changed for one command, in a trap
set -uo pipefail

[ -f "${SLURM_SUBMIT_DIR-}/slurm/job.sh" ] ||
    { echo "elastic.sh: submit it in the project's folder: sbatch slurm/elastic.sh …" >&2 && exit 2; }
LAUNCH=torchrun
# shellcheck source=SCRIPTDIR/job.sh
source "$SLURM_SUBMIT_DIR/slurm/job.sh"

case $RDZV_BACKEND in
    c10d) endpoint=${JOIN_ENDPOINT:-$SLURMD_NODENAME:$(free_port)} ;;
    etcd-v2 | etcd) endpoint=${RDZV_ENDPOINT:?"slurm/elastic.sh: RDZV_BACKEND=$RDZV_BACKEND needs RDZV_ENDPOINT=HOST:PORT of a server"} ;;
    *) fail "RDZV_BACKEND=$RDZV_BACKEND is unknown; use c10d, etcd-v2 or etcd" ;;
esac
# A lost node is detected after 6 s; a rendezvous waits 5 s for further nodes.
rdzv_conf=keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5
replacement=$run_name-replacement
replaced=0 code=0
declare -A agents=() boots=() attempts=()
export TRAINER_WORLD_SIZE=$((ranks * NODES_MIN)):$((ranks * NODES_MAX)) && export APPTAINERENV_TRAINER_WORLD_SIZE=$TRAINER_WORLD_SIZE

start_agent() { # NODE
    local conf=$rdzv_conf
    if [ "$RDZV_BACKEND" = c10d ]; then
        # torchrun would compare host names, which may differ from the names of nodes.
        conf+=,is_host=$([ -z "${JOIN_JOB-}" ] && [ "$1" = "$SLURMD_NODENAME" ] && echo true || echo false)
    fi
    # The trainer limits restarts: it ends torchrun if there is no progress.
    srun --input=none --nodes=1 --ntasks=1 --nodelist="$1" --cpus-per-task="$SLURM_CPUS_ON_NODE" --overlap --no-kill \
        --export=ALL "${srun_options[@]}" "${python[@]}" "${torchrun[@]}" \
        --nnodes="$NODES_MIN:$NODES_MAX" --max-restarts=100 \
        --rdzv-backend="$RDZV_BACKEND" --rdzv-id="$run_name-$restarts" --rdzv-endpoint="$endpoint" \
        --rdzv-conf="$conf" --local-addr="$1" -m "${fit[@]}" > >(trap '' TERM USR1 && exec sed -u "s/^/$1: /") 2>&1 &
    agents[$1]=$!
    steps+=($!)
    boots[$1]=$(boot_seconds "$1")
    attempts[$1]=$((${attempts[$1]-0} + 1))
    if [ "$signal" = USR1 ]; then kill -USR1 $!; fi
}

# The nodes that the job has now, without lost ones.
nodes() {
    local list
    list=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && scontrol show hostnames "$list"
}

# When a node has booted, in seconds; nothing while SLURM's controller is unavailable.
boot_seconds() { # NODE
    if [[ $(scontrol --oneliner show node "$1") =~ \ BootTime=([0-9T:-]+) ]]; then date -d "${BASH_REMATCH[1]}" +%s; fi
}

# Whether a node has rebooted since its agent started: srun itself may keep waiting for the agent.
# SLURM computes this time from the node's uptime at each message, which may take seconds.
has_rebooted() { # NODE
    local boot
    boot=$(boot_seconds "$1")
    if [ -z "${boots[$1]}" ]; then boots[$1]=$boot; fi
    [ -n "$boot" ] && [ "$boot" -gt $((${boots[$1]} + 30)) ]
}

# Submit a replacement job for each missing node; existing ones are found by their name.
replace_nodes() { # OPTION …
    local present coming missing
    # Do nothing while SLURM's controller is unavailable.
    present=$(nodes | wc -l) && coming=$(squeue --noheader --me --name="$replacement" | wc -l) || return
    missing=$((NODES_MAX - present - coming))
    # Read only now: at the end of the run replacement jobs have ended, and are not replaced.
    if [ -s "$TRAINER_OUTCOME" ]; then return; fi
    for ((; missing > 0 && replaced < MAX_REPLACEMENTS; missing--)); do
        replaced=$((replaced + 1))
        submit_replacement "$@" || echo "$run_name: a lost node is not replaced" >&2
    done
}

submit_replacement() { # OPTION …
    local more options
    options=(--nodes=1 --ntasks-per-node="$ranks" --no-requeue --job-name="$replacement"
        --output="slurm-$SLURM_JOB_ID-%j.out" --partition="$SLURM_JOB_PARTITION"
        --time="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%l)")
    [ "$on_node" = 0 ] || options+=(--gpus-per-node="$gpus" --cpus-per-gpu="$((SLURM_CPUS_ON_NODE / on_node))")
    if [ -n "${SLURM_JOB_ACCOUNT-}" ]; then options+=(--account="$SLURM_JOB_ACCOUNT"); fi
    read -r -a more <<< "$REPLACEMENT_OPTIONS"
    (
        leave_job
        export JOIN_JOB=$job JOIN_RESTARTS=$restarts JOIN_ENDPOINT=$endpoint NODES_MAX
        # A cluster without GPUs refuses these lines.
        sbatch --parsable --export=ALL "${options[@]}" "${more[@]}" \
            <(sed '/^#SBATCH --\(gpus-per-node\|cpus-per-gpu\)=/d' slurm/elastic.sh) "$@" > /dev/null
    )
}

# Whether the job that this job has joined is still running, and has not been restarted. Assume so
# while SLURM's controller is unavailable.
run_goes_on() {
    local facts
    facts=$(scontrol --oneliner show job "$job" 2>&1) || { [[ $facts != *"Invalid job id"* ]] && return; }
    [[ $facts =~ \ JobState=RUNNING\  && $facts =~ \ Restarts=$restarts\  ]]
}

# Remove agents that have ended; sets `code` to the exit code of the last one.
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
    for node in $(nodes); do
        if [ -z "${agents[$node]-}" ] && [ "${attempts[$node]-0}" -lt 10 ]; then start_agent "$node"; fi
    done
}

# Wait 5 s, or until an agent ends or a signal arrives.
pause() {
    sleep 5 &
    wait -n $! "${agents[@]}"
    kill $! 2> /dev/null
    wait $! 2> /dev/null
}

end_agents() { [ -z "${agents[*]}" ] || kill "-$1" "${agents[@]}" 2> /dev/null; } # SIGNAL

end_replacements() { scancel --quiet --me --name="$replacement"; }

# A replacement job: one agent, until the run that it has joined ends.
if [ -n "${JOIN_JOB-}" ]; then
    start_agent "$SLURMD_NODENAME"
    while [ -n "${agents[*]}" ]; do
        pause
        check_agents
        if ! run_goes_on; then end_agents KILL; fi
    done
    exit "$code"
fi

at_exit() { end_replacements; tidy "$requeues"; }
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
        # An error of the user, such as an unknown option: a retry would fail again.
        end_agents TERM
    elif [[ -z $signal && $outcome == "preempted SIGTERM"* ]]; then
        # Agents stop the ranks like this to let a node in. The next attempt removes the file, however
        # long its start takes.
        deadline=''
    elif [ -n "$signal" ] || [[ $outcome != failed* ]]; then
        # The run ends. Or one rank has left and the others restart, which removes the file.
        deadline=${deadline:-$((SECONDS + SAVE_SECONDS))}
        if [ "$SECONDS" -ge "$deadline" ] && [ "$signal" = TERM ] && [ -z "$is_told" ]; then
            # SLURM has not told the agents, as after `scancel --batch`: they save first.
            is_told=1 deadline=''
            end_agents USR1
        elif [ "$SECONDS" -ge "$deadline" ]; then
            end_agents KILL
        fi
    fi
done
conclude "$code"
