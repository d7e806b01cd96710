"""What the order of a billion samples costs: held, as it was, and computed batch by batch."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
import tracemalloc
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.data.sampling import BatchPlan, GlobalOrder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
ROUNDS = 5  # of which the fastest counts: other work on the machine delays some


@dataclass(frozen=True)
class Order:
    """An order of so many samples: ms to a batch, MiB, and microseconds of each later batch."""

    samples: int
    is_held: bool
    first_ms: float
    resume_ms: float
    mib: float
    batch_us: float


def measure(samples: int, is_held: bool, batches: int = 2000) -> Order:
    """Processor time to the first batch, to one in the middle, and of each batch; memory."""
    plan = BatchPlan(samples, BATCH)
    order = GlobalOrder(plan, 0, 0, shuffle=True, keyed=False, fill=True, is_held=is_held)

    def to_batch(start: int) -> float:
        before = time.process_time()
        order.epoch, order.start = 0, start
        next(iter(order))
        return 1000 * (time.process_time() - before)

    rounds = 1 if is_held else ROUNDS
    first = min(to_batch(0) for _ in range(rounds))
    resume = min(to_batch(plan.batches // 2) for _ in range(rounds))
    order.epoch, order.start = 0, 0
    given = iter(order)
    next(given)
    each = []
    for _ in range(ROUNDS):
        before = time.process_time()
        for _ in islice(given, batches):
            pass
        each.append((time.process_time() - before) / batches * 1e6)
    return Order(samples, is_held, first, resume, _memory(order, samples), min(each))


def _memory(order: GlobalOrder, samples: int) -> float:
    if order.is_held:  # torch's memory is none of Python's
        return 8 * samples / 2**20
    tracemalloc.start()
    order.epoch, order.start = 0, order.plan.batches // 2
    for _ in islice(order, 500):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


class _Smallest(TrainingModule):
    """One layer: next to nothing besides the trainer's own work."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.at: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.at.append(time.process_time())
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.001)


def smallest_step_us(steps: int = 500) -> float:
    """Processor time of a step of the trainer with a model of one layer, microseconds."""
    module = _Smallest()
    loader = DataLoader(TensorDataset(torch.zeros(BATCH * steps, 8)), batch_size=BATCH)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            loggers=[],
            enable_progress_bar=False,
            default_root_dir=Path(folder),
        ).fit(module, loader)
    half = len(module.at) // 2
    return (module.at[-1] - module.at[half]) / (len(module.at) - 1 - half) * 1e6
