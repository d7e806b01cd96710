"""Data loading: the order of samples, batches of each replica, their hashes, randomness.

``Feed`` gives a replica its part of each global batch; ``transfer`` copies it to the device ahead
of the step. Imports ``launch``, ``module`` and the folders below them.
"""

from .feed import Feed
from .feed_creation import BatchLimit, feed_evaluation, feed_first, feed_trained, feed_training
from .randomness import seed_everything
from .sampling import MicroBatch, Share
from .sources import Data, LoadersByName

__all__ = [
    "BatchLimit",
    "Data",
    "Feed",
    "LoadersByName",
    "MicroBatch",
    "Share",
    "feed_evaluation",
    "feed_first",
    "feed_trained",
    "feed_training",
    "seed_everything",
]
