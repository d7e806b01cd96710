"""``find_batch_size``: try training steps on larger and larger batches until one does not fit."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..errors import UserError
from ..launch.cluster import Layout
from ..memory import fits_in_memory, largest_that_fits
from ..module import TrainingModule
from ..strategies import BatchSkipped, SingleDevice
from ..strategies.optimizers import configured
from ..strategies.precision import Precision
from .manual_optimization import ManualOptimization


@dataclass(frozen=True)
class Trial:
    """What training steps are tried on.

    Args:
        module: The user's; it is not changed.
        loader: Training batches; a ``DataLoader`` of a dataset that can be indexed.
        device: Device of this process.
        precision: Precision of the run.
        use_manual: Called with the manual optimization of a copy of the module, and at the end with
            ``None``.
    """

    module: TrainingModule
    loader: object
    device: torch.device
    precision: str
    use_manual: Callable[[ManualOptimization | None], None]


def find_batch_size(trial: Trial, replicas: int) -> tuple[int, str]:
    """Find the largest batch on which a device can train, the same on every process.

    Each process tries on its own, on a copy of the module and without collectives, so that one that
    runs out of memory does not block its peers; then all agree. Two steps are tried for each size:
    the second one includes the optimizer state.

    Args:
        trial: What steps are tried on.
        replicas: Number of data-parallel replicas, which bounds the batch.

    Returns:
        The size, and why no larger one was tried, if that is so.

    Raises:
        UserError: Not even one sample fits, or batches cannot be made from the loader.
    """
    loader = trial.loader
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        raise UserError(
            "find_batch_size makes batches of many sizes: give a DataLoader of a data set that can "
            "be indexed"
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]
    largest = max(1, samples // replicas)

    def fits(size: int) -> bool:
        return fits_in_memory(lambda: _try(trial, loader, size))

    try:  # not one sample first, which BatchNorm refuses in training
        found = largest_that_fits(fits, 2, largest)
    finally:
        trial.use_manual(None)
    if found < largest:
        return found, ""
    of_all = f" for {replicas} replicas" if replicas > 1 else ""
    return found, f"; no larger one was tried: the dataset has {samples} samples{of_all}"


def _try(trial: Trial, loader: DataLoader[Any], size: int) -> None:
    alone = SingleDevice()
    alone.connect(Layout(), [trial.device], Precision(trial.precision, trial.device.type))
    tried = copied(trial.module)
    optimization = alone.setup(tried, lambda: configured(tried))
    manual: ManualOptimization | None = None
    if not tried.automatic_optimization:
        manual = ManualOptimization(alone, optimization)
        trial.use_manual(manual)
    batch = loader.collate_fn([loader.dataset[index] for index in range(size)])
    waiting = alone.move(batch)  # the prefetched batch, which is also on the GPU
    for number in range(2):
        if manual is not None:
            alone.forward("training", batch, number)
            manual.end_batch()
            continue
        try:
            alone.forward_backward(batch, number, weight=1.0, synchronize=True)
        except BatchSkipped:
            raise UserError(
                "find_batch_size: training_step returned None for the first samples, so that the "
                "memory of backward is unknown; set batch_size"
            ) from None
        for optimizer in optimization.optimizers:
            alone.optimizer_step(optimizer)
        alone.end_step()
        for optimizer in optimization.optimizers:
            alone.zero_grad(optimizer)
    del waiting


def copied(module: TrainingModule) -> TrainingModule:
    """Copy a module, with the same run."""
    state = module.trainer_state
    module.trainer_state = replace(state, run=None, weights={})  # neither can be copied
    try:
        copied = copy.deepcopy(module)
    finally:
        module.trainer_state = state
    copied.trainer_state = state
    return copied
