"""Checkpoints and run directories: read, write, select and lock them.

A checkpoint is a directory per step: JSON for everything that is not a tensor, and a safetensors
file per rank. Imports ``launch`` and the folders below it; nothing here depends on a strategy.
"""

from .dtensors import is_sharded
from .reading import AVERAGE, DIRECTORY, Checkpoint, complete, resolve, run_of, step_name
from .run_choice import Request, Selection
from .run_directory import BEST, LAST, RunLock, find_link, is_link, point
from .state_file import MOST_STEPS, ShardedDict, check_count, from_tensors, to_tensors
from .stored_tensors import Stored, fill, fill_module, find_tensors, flat_part, read_all
from .writing import Checkpoints, copy_linked, set_aside

__all__ = [
    "AVERAGE",
    "BEST",
    "DIRECTORY",
    "LAST",
    "MOST_STEPS",
    "Checkpoint",
    "Checkpoints",
    "Request",
    "RunLock",
    "Selection",
    "ShardedDict",
    "Stored",
    "check_count",
    "complete",
    "copy_linked",
    "fill",
    "fill_module",
    "find_link",
    "find_tensors",
    "flat_part",
    "from_tensors",
    "is_link",
    "is_sharded",
    "point",
    "read_all",
    "resolve",
    "run_of",
    "set_aside",
    "step_name",
    "to_tensors",
]
