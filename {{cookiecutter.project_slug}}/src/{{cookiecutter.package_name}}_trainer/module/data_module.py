"""The user's data module, and the hooks that modules have in common with it."""

from collections.abc import Iterable, Mapping
from typing import Any

Loader = Iterable[Any]
Loaders = Loader | Mapping[str, Loader]
"""A loader, or several by name."""


class DataHooks:
    """Loaders, and hooks around a command, of modules and data modules.

    A module's loaders are used if there is no data module. Hooks of data modules are called first.
    ``stage`` is ``"fit"`` (also for ``find_batch_size``), ``"validate"``, ``"test"`` or
    ``"predict"``. Each command calls them again.
    """

    def prepare_data(self) -> None:
        """Called by one process per node while the others wait: download or convert data.

        Set no attributes here: the other processes would not have them.
        """

    def setup(self, stage: str) -> None:
        """Called on every rank, before the loaders are created and the module is placed.

        A module may create layers here. With ``meta_device``, their parameters are created on the
        meta device, as in ``__init__``. With ``ddp_spawn`` and ``ddp_fork``, layers must be created
        in ``__init__``, because the trained weights are returned into the module of the script.
        """

    def teardown(self, stage: str) -> None:
        """Called on every rank after the command; not if it fails."""

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


class DataModule(DataHooks):
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
