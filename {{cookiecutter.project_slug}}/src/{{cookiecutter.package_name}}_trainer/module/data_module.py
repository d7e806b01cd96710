"""The user's data module."""

from collections.abc import Iterable, Mapping
from typing import Any

from .hooks import StageHooks

Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]
"""A loader, or several by name."""


class DataModule(StageHooks):
    """Data loading. Override the loaders that you need; each returns a ``DataLoader``.

    For validation, test and prediction, it may return a dict of them by name: values are then
    logged by name, such as ``val_loss/clean``, each over the samples of its own loader.

    The trainer replaces the samplers: training data is reshuffled each epoch; validation and test
    data is read in order, each sample once, on any number of processes. It reads other loaders as
    they are (iterable datasets, own samplers): split their samples by :attr:`data_index`.
    """

    data_replicas: int = 1
    """Number of data-parallel replicas, which read different samples. The trainer sets it before
    :meth:`setup`."""
    data_index: int = 0
    """Index of the replica of this process. Several ranks of one replica, as in a pipeline, must
    read the same batches."""

    def train_dataloader(self) -> Loader | None:
        """Loader of training batches."""
        return None

    def val_dataloader(self) -> Loaders | None:
        """Loader of validation batches, or a dict of loaders by name."""
        return None

    def test_dataloader(self) -> Loaders | None:
        """Loader of test batches, or a dict of loaders by name."""
        return None

    def predict_dataloader(self) -> Loaders | None:
        """Loader of prediction batches, or a dict of loaders by name."""
        return None
