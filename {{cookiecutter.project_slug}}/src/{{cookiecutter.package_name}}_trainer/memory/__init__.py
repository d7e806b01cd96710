"""Memory: activation checkpointing, meta-device initialization, batch-size search.

What is here works under every strategy. Imports ``data``, ``module`` and the folders below them.
"""

from .batch_size import fits_in_memory, largest_that_fits
from .blocks import repeated_blocks

__all__ = [
    "fits_in_memory",
    "largest_that_fits",
    "repeated_blocks",
]
