"""Data loading: the order of samples, batches of each replica, their hashes, randomness.

``Feed`` gives a replica its part of each global batch; ``moving`` copies it to a GPU ahead
of the step. Imports ``launch``, ``module`` and the folders below them.
"""

from .feed import Feed
from .sampling import MicroBatch, Share

__all__ = ["Feed", "MicroBatch", "Share"]
