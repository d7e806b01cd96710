"""``find_batch_size``: training steps on ever larger batches, until one does not fit."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..errors import UserError
from ..launch.cluster import Layout
from ..memory.batch_size import fits_in_memory, largest_that_fits
from ..module import TrainingModule
from ..strategies import SingleDevice
from ..strategies.optimizers import read_optimization
from ..strategies.precision import Precision
from .manual_optimization import ManualOptimization


def find_batch_size(
    module: TrainingModule,
    loader: object,
    device: torch.device,
    precision: str,
    replicas: int,
    use_manual: Callable[[ManualOptimization | None], None],
) -> int:
    """The largest batch that a device can train on, the same on every process.

    Each process tries alone, on a copy of the module and without a word to the others, so that one
    that runs out of memory leaves none waiting; then all agree. Two steps are made of each size:
    the second has the optimizers' state beside it.

    Args:
        module: is left as it is.
        loader: of training batches; a ``DataLoader`` of a data set that can be indexed.
        device: of this process.
        precision: of the run.
        replicas: that share the data set, which bounds the batch.
        use_manual: told of the optimizers of a module that optimizes by hand.

    Raises:
        UserError: not even one sample fits, or batches cannot be made from the loader.
    """
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__getitem__"):
        raise UserError(
            "find_batch_size makes batches of many sizes: give a DataLoader of a data set that can "
            "be indexed"
        )
    samples = len(loader.dataset)  # type: ignore[arg-type]

    def fits(size: int) -> bool:
        return fits_in_memory(lambda: _try(module, loader, size, device, precision, use_manual))

    try:
        return largest_that_fits(fits, 1, max(1, samples // replicas))
    finally:
        use_manual(None)


def _try(
    module: TrainingModule,
    loader: DataLoader[Any],
    size: int,
    device: torch.device,
    precision: str,
    use_manual: Callable[[ManualOptimization | None], None],
) -> None:
    alone = SingleDevice()
    alone.connect(Layout(), [device], Precision(precision, device.type))
    tried = _copied(module)
    optimization = alone.setup(tried, lambda: read_optimization(tried.configure_optimizers()))
    manual: ManualOptimization | None = None
    if not tried.automatic_optimization:
        manual = ManualOptimization(alone, optimization)
        use_manual(manual)
    batch = loader.collate_fn([loader.dataset[index] for index in range(size)])
    waiting = alone.move(batch)  # on a GPU, where the next batch is while a step computes
    for number in range(2):
        if manual is not None:
            alone.forward("training", batch, number)
            manual.end_batch()
            continue
        alone.forward_backward(batch, number, weight=1.0, synchronize=True)
        for optimizer in optimization.optimizers:
            alone.optimizer_step(optimizer)
        alone.end_step()
        for optimizer in optimization.optimizers:
            alone.zero_grad(optimizer)
    del waiting


def _copied(module: TrainingModule) -> TrainingModule:
    state = module.trainer_state
    module.trainer_state = replace(state, run=None)  # which cannot be copied
    try:
        copied = copy.deepcopy(module)
    finally:
        module.trainer_state = state
    copied.trainer_state = state
    return copied
