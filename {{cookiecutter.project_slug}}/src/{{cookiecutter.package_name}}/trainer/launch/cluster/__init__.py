"""Who am I among the processes of this run? Read once from the environment, never guessed.

An explicit choice (``TRAINER_CLUSTER``) wins, then torchelastic, Open MPI's mpirun, hydra (the
mpiexec of MPICH and Intel MPI), an srun *step*, plain ``RANK``/``WORLD_SIZE`` variables (our own
launcher, Kubernetes), ``NODE_RANK`` (this command, started once on each node), and last alone.
Engines with launchers of their own register sources between these. A SLURM job id without a step
is an interactive allocation or a batch script, not a launch: such a process is alone.
"""

from .detection import detect, register, without_appended
from .layout import NODES, OVERRIDE, STORE, Environment, Layout, Source, check_filled, read_size
from .srun import first_host

__all__ = [
    "NODES",
    "OVERRIDE",
    "STORE",
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
