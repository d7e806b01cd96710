"""Checkpoints and run directories: read, write, select and lock them.

A checkpoint is a directory per step: JSON for everything that is not a tensor, and a safetensors
file per rank. Imports ``launch`` and the folders below it; nothing here depends on a strategy.
"""

from .reading import AVERAGE, OF_ANOTHER_MODEL, Checkpoint, resolve, run_of
from .state_file import ShardedDict
from .stored_tensors import Stored, fill, fill_module, read_all
from .writing import Checkpoints

__all__ = [
    "AVERAGE",
    "OF_ANOTHER_MODEL",
    "Checkpoint",
    "Checkpoints",
    "ShardedDict",
    "Stored",
    "fill",
    "fill_module",
    "read_all",
    "resolve",
    "run_of",
]
