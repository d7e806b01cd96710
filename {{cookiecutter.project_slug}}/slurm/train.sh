#!/usr/bin/env bash
# Train on one or several nodes; options of `fit` follow the script's name:
#
#   bash slurm/submit.sh --nodes=2 --gpus-per-node=4 slurm/train.sh --config configs/gpt.yaml --trainer.max_epochs 3
{%- if cookiecutter.tools == "yes" %}
#
#   bash slurm/submit.sh --nodes=2 --gpus-per-node=4 slurm/train.sh reproduce runs/RUN
{%- endif %}
#
# Options of sbatch override the lines below. For other settings see slurm/settings.sh.
#SBATCH --job-name={{ cookiecutter.project_slug }}
#SBATCH --nodes=1
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
# One file per job, for all requeues. The output of ranks other than 0 is in runs/RUN/logs.
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
set -uo pipefail

[ -f "${SLURM_SUBMIT_DIR-}/slurm/job.sh" ] ||
    { echo "train.sh: submit it in the project's folder: sbatch slurm/train.sh …" >&2 && exit 2; }
# shellcheck source=SCRIPTDIR/job.sh
source "$SLURM_SUBMIT_DIR/slurm/job.sh"
{% if cookiecutter.horovod == "yes" %}
: "${LAUNCH:=$([ "$(option --trainer.strategy "$@")" = horovod ] && echo mpirun || echo tasks)}"
{%- endif %}
# shellcheck disable=SC2153 # SLURM sets it
cpus=$((SLURM_CPUS_ON_NODE / ranks))
if [ "$cpus" = 0 ]; then cpus=1 srun_options+=(--overcommit); fi
# A run with another number of processes ends at once, also one in a container that loses SLURM's variables.
export TRAINER_WORLD_SIZE=$tasks APPTAINERENV_TRAINER_WORLD_SIZE=$tasks
[ -z "$uneven" ] || [ "$LAUNCH" = tasks ] || fail "LAUNCH=$LAUNCH starts as many processes on each node; SLURM plans $SLURM_TASKS_PER_NODE"
# Without --kill-on-bad-exit, which would kill ranks that are still saving. If a rank fails, the
# trainer ends the others; --wait is for ranks that hang.
step=(srun --nodes="$SLURM_JOB_NUM_NODES" --export=ALL --label --kill-on-bad-exit=0
    --wait="$((SAVE_SECONDS + 60))" "${srun_options[@]}")
case $LAUNCH in
    tasks)
        if [ -z "$uneven" ]; then step+=(--ntasks-per-node="$ranks"); fi
        command=("${step[@]}" --ntasks="$tasks" --cpus-per-task="$cpus" "${python[@]}" -m "${fit[@]}")
        ;;
    torchrun)
        # torchrun would compare host names, which may differ from the names of nodes.
        # shellcheck disable=SC2016
        command=("${step[@]}" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"
            sh -c 'export PET_RDZV_CONF=is_host=$((SLURM_NODEID == 0)) PET_LOCAL_ADDR=$SLURMD_NODENAME && exec "$@"' torchrun
            "${python[@]}" "${torchrun[@]}" --nnodes="$SLURM_JOB_NUM_NODES"
            --rdzv-backend=c10d --rdzv-id="$run_name-$restarts" --rdzv-endpoint="$SLURMD_NODENAME:$(free_port)"
            -m "${fit[@]}")
        ;;
    mpirun)
        [ "$CONTAINER" != pyxis ] || fail "mpirun cannot start ranks in pyxis' containers; use CONTAINER=apptainer or none"
        # srun starts its daemons, so ssh is not needed. A rank that exits must not kill others, which
        # may still be saving.
        export MASTER_ADDR=$SLURMD_NODENAME
        command=(mpirun --allow-run-as-root --oversubscribe --bind-to none --tag-output
            --mca orte_abort_on_non_zero_status 0 -np "$tasks" --map-by "ppr:$ranks:node" -x MASTER_ADDR
            -x PYTHONPATH -x APPTAINERENV_PYTHONPATH -x TRAINER_WORLD_SIZE -x APPTAINERENV_TRAINER_WORLD_SIZE
            "${python[@]}" -m "${fit[@]}")
        ;;
    *) fail "LAUNCH=$LAUNCH is unknown; use tasks, torchrun or mpirun" ;;
esac

echo "$run_name: processes: $tasks (${uneven:+at most }$ranks per node) by $LAUNCH on $SLURM_JOB_NODELIST"
"${command[@]}" &
steps=($!)
# SIGUSR1 may have arrived before the ranks were started.
if [ "$signal" = USR1 ]; then kill -USR1 "${steps[@]}"; fi
await "${steps[0]}"
conclude $?
