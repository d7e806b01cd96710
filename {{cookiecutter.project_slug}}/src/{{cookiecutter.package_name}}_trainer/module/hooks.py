"""Hooks: methods of a module or a data module that each rank calls at moments of a run."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

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

    def data_files(self) -> Iterable[str | os.PathLike[str]]:
        """The files, or directories of files, that data is read from, to record their hashes.

        Called on rank 0 once the loaders exist. By default: attributes that are paths of existing
        files and directories. Relative paths are those of the directory in which the run was
        started.
        """
        values = (each for each in vars(self).values() if isinstance(each, str | os.PathLike))
        return [each for each in values if each and os.path.exists(each)]  # noqa: PTH110

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


class Hooks(DataHooks):
    """Hooks of a module; override those that you need. Those of callbacks are called first."""

    def on_fit_start(self) -> None:
        """Called after the module is moved to its device, before the first step."""

    def on_fit_end(self) -> None:
        """Called after the last step, checkpoint and validation; not if the fit fails."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch; not if a run resumes within an epoch."""

    def on_train_epoch_end(self) -> None:
        """Called after the last batch of an epoch, before its values are reduced."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Called before a micro-batch's forward."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a micro-batch's backward, and after the step that it ends.

        ``outputs`` is what ``training_step`` returned, without gradients; ``{"loss": loss}`` if
        that was the loss alone. Several replicas' or micro-batches' of a process are gathered. In a
        pipeline, it is ``None`` in a process without the last stage.
        """

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before each optimizer's step, after gradients are averaged and clipped.

        Not with manual optimization, in which ``training_step`` steps. Gradients that an engine
        does not leave in the parameters cannot be used: docs/how-to/callbacks.md.
        """

    def on_after_optimizer_step(self) -> None:
        """Called after the step of all optimizers; in manual optimization after each batch."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch, before its values are reduced."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch, before its values are reduced."""

    def on_exception(self, error: BaseException) -> None:
        """Called if the fit fails on this rank, before the error is raised again."""


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
