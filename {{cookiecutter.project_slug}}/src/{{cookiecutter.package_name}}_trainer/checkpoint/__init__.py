"""Checkpoints and run directories: read, write, select and lock them.

A checkpoint is a directory per step: JSON for everything that is not a tensor, and a safetensors
file per rank. Imports ``launch`` and the folders below it; nothing here depends on a strategy.
"""

from .dtensors import is_sharded
from .reading import AVERAGE, Checkpoint, resolve, run_of
from .run_directory import DIRECTORY, find_link, is_link
from .state_file import MOST_STEPS, ShardedDict, check_count, from_tensors, to_tensors
from .stored_tensors import Stored, fill, fill_module, read_all
from .writing import Checkpoints

__all__ = [
    "AVERAGE",
    "DIRECTORY",
    "MOST_STEPS",
    "Checkpoint",
    "Checkpoints",
    "ShardedDict",
    "Stored",
    "check_count",
    "fill",
    "fill_module",
    "find_link",
    "from_tensors",
    "is_link",
    "is_sharded",
    "read_all",
    "resolve",
    "run_of",
    "to_tensors",
]
