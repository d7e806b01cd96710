"""The rank of this process: read once from the environment, never guessed.

An explicit choice (``TRAINER_CLUSTER``) takes precedence; then torchelastic, Open MPI's mpirun,
hydra (the mpiexec of MPICH and Intel MPI), an srun *step*, plain ``RANK`` and ``WORLD_SIZE``
variables (our own launcher, Kubernetes), ``NODE_RANK`` (this command, started once per node), and
last a single process. Engines with their own launchers register further sources. A SLURM job id
without a step means an interactive allocation or a batch script, not a launch.
"""

from .detection import detect, register, without_appended
from .layout import (
    NODES,
    OVERRIDE,
    STORE,
    STORE_FILE,
    Environment,
    Layout,
    Source,
    check_filled,
    read_size,
)
from .sources import first_host

__all__ = [
    "NODES",
    "OVERRIDE",
    "STORE",
    "STORE_FILE",
    "Environment",
    "Layout",
    "Source",
    "check_filled",
    "detect",
    "first_host",
    "read_size",
    "register",
    "without_appended",
]
