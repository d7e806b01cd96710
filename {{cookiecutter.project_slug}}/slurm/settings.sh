# shellcheck shell=bash disable=SC2034
# What the scripts here use, in one place. What SLURM reads (nodes, GPUs, time, partition, account)
# stands in the #SBATCH lines of train.sh and elastic.sh instead. Of both, each can be given for one
# job: variables before `sbatch`, SLURM's options after it.
#
#   LAUNCH=torchrun MAX_REQUEUES=3 sbatch --nodes=4 --time=02:00:00 slurm/train.sh --model.width 64

PACKAGE={{ cookiecutter.package_name }}

# The config of a job that names none by --config.
: "${CONFIG=configs/digits.yaml}"

# How often a job that was stopped by SIGUSR1, as before its time limit, goes back into the queue.
: "${MAX_REQUEUES=20}"

# How ranks are started: `tasks` (a SLURM task a device), `torchrun` (one on each node) or `mpirun`.
# By default `tasks`, and `mpirun` for --trainer.strategy horovod.
: "${LAUNCH=}"

# Where Python comes from: `none` (the environment in VENV), `apptainer` or `pyxis` (IMAGE).
: "${CONTAINER={{ cookiecutter.container_runtime }}}"
: "${VENV=.venv}"
# A file such as {{ cookiecutter.project_slug }}.sif, or what the runtime can pull.
: "${IMAGE={{ cookiecutter.project_slug }}.sif}"
# Further folders for the container, as FROM:TO, separated by commas. The project's is there anyway.
: "${MOUNTS=}"

# Further options of srun, separated by spaces.
: "${SRUN_OPTIONS=}"

# From SIGUSR1 or SIGTERM to the end of saving. Below what --signal in the #SBATCH lines gives, and
# for SIGTERM below the cluster's KillWait.
: "${SAVE_SECONDS=100}"

# --- elastic.sh only -----------------------------------------------------------------------------

# A job trains on as many nodes as there are, from NODES_MIN to NODES_MAX (by default those that the
# job begins with).
: "${NODES_MIN=1}"
: "${NODES_MAX=}"
# How many jobs may stand in for lost nodes, and further options of sbatch for them, separated by
# spaces. They have the partition, account, GPUs and time limit of the job itself.
: "${MAX_REPLACEMENTS=20}"
: "${REPLACEMENT_OPTIONS=}"
# How nodes find one another: `c10d` needs nothing; `etcd-v2` a server of etcd at RDZV_ENDPOINT
# (HOST:PORT, started with --enable-v2) and python-etcd in the environment.
: "${RDZV_BACKEND=c10d}"
: "${RDZV_ENDPOINT=}"
