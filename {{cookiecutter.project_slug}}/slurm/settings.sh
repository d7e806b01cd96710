# shellcheck shell=bash disable=SC2034
# Settings of these scripts; options of SLURM are in the #SBATCH lines of train.sh and elastic.sh, or
# below. Override both for a single job: variables before the command, options before the script.
#
#   LAUNCH=torchrun MAX_REQUEUES=3 bash slurm/submit.sh --nodes=4 --time=02:00:00 slurm/train.sh --model.width 64

# --- what your cluster needs ---------------------------------------------------------------------

# Options of sbatch for all jobs, as its variables (see `man sbatch`). They override the #SBATCH lines.
# Only submit.sh and sweep.sh pass them on: sbatch itself does not read this file.
#
# export SBATCH_MEM_PER_NODE=64G        # memory per node; 0 for all of it
# export SBATCH_QOS=long                # quality of service
# export SBATCH_CONSTRAINT='a100&ib'    # features that the nodes must have
# export SBATCH_GPUS_PER_NODE=a100:4    # GPUs of a type (GRES)
# export SBATCH_TIMELIMIT=12:00:00

# Commands that each job runs first, in the project's folder; all ranks get the resulting environment.
prepare() {
    : # Keep this line.
    # source /etc/profile               # if `module` is not found
    # module load cuda nccl
    # source ~/miniconda3/etc/profile.d/conda.sh && conda activate NAME && VENV=$CONDA_PREFIX
    # export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0    # the network between the nodes
}

# --- how jobs run --------------------------------------------------------------------------------

PACKAGE={{ cookiecutter.package_name }}

# The config of a job without --config.
: "${CONFIG=configs/digits.yaml}"

# How often a job is requeued after SIGUSR1, which SLURM sends before the time limit.
: "${MAX_REQUEUES=20}"

# How ranks are started: `tasks` (one SLURM task per device), `torchrun` (one per node) or `mpirun`.
{%- if cookiecutter.horovod == "yes" %}
# By default `tasks`, and `mpirun` for --trainer.strategy horovod.
: "${LAUNCH=}"
{%- else %}
: "${LAUNCH:=tasks}"
{%- endif %}

# The container runtime: `none` (use the environment in VENV), `apptainer` or `pyxis` (use IMAGE).
: "${CONTAINER={{ cookiecutter.container_runtime }}}"
: "${VENV=.venv}"
# A file such as {{ cookiecutter.project_slug }}.sif, or an image that the runtime can pull.
: "${IMAGE={{ cookiecutter.project_slug }}.sif}"
# Further mounts of the container, as FROM:TO, separated by commas; the project's folder is mounted.
: "${MOUNTS=}"

# Further options of srun, separated by spaces.
: "${SRUN_OPTIONS=}"

# Seconds from SIGUSR1 to the end of saving: less than --signal allows; for SIGTERM, than KillWait.
: "${SAVE_SECONDS=100}"

# --- elastic.sh only -----------------------------------------------------------------------------

# A job trains on the available nodes, from NODES_MIN to NODES_MAX (by default those it starts with).
: "${NODES_MIN=1}"
: "${NODES_MAX=}"
# The number of replacement jobs for lost nodes, and further options of sbatch for them, separated by spaces.
: "${MAX_REPLACEMENTS=20}"
: "${REPLACEMENT_OPTIONS=}"
# `c10d`, or `etcd-v2` with an etcd server at RDZV_ENDPOINT (HOST:PORT, --enable-v2) and python-etcd.
: "${RDZV_BACKEND=c10d}"
: "${RDZV_ENDPOINT=}"
