"""The rank of this process: read once from the environment, never guessed.

``sources.py`` has the launches that are known, in their order of precedence; ``TRAINER_CLUSTER``
overrides it. Engines with their own launchers register further sources. A SLURM job id without a
step means an interactive allocation or a batch script, not a launch.
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
