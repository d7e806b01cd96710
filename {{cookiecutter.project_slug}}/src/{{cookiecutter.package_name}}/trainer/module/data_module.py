"""The user's data module."""

from collections.abc import Iterable
from typing import Any

from .hooks import StageHooks

Loader = Iterable[Any]


class DataModule(StageHooks):
    """Data loading. Override the loaders that you need; each returns a ``DataLoader``.

    The trainer replaces the samplers: training data is reshuffled each epoch; validation and test
    data is read in order, each sample once, on any number of processes.
    """

    def train_dataloader(self) -> Loader | None:
        """Loader of training batches."""
        return None

    def val_dataloader(self) -> Loader | None:
        """Loader of validation batches."""
        return None

    def test_dataloader(self) -> Loader | None:
        """Loader of test batches."""
        return None

    def predict_dataloader(self) -> Loader | None:
        """Loader of prediction batches."""
        return None
