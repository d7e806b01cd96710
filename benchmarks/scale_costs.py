"""What is measured in one process: an operation of a store, and the order of a billion samples."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from my_project_trainer import Trainer, TrainingModule
from my_project_trainer.data.sampling import BatchPlan, GlobalOrder
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
ROUNDS = 5  # of which the fastest counts: other work on the machine delays some


def processor_us(what: Callable[[], Any]) -> float:
    """Processor time that it takes: this does not depend on what else the machine does."""
    before = time.process_time()
    what()
    return (time.process_time() - before) * 1e6


# --- the server of torch's TCPStore ---------------------------------------------------------------


def server_us(count: int) -> dict[str, float]:
    """Microseconds of the server's process per operation, by kind, of so many."""
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    server = context.Process(target=_serve, args=(other,), daemon=True)
    server.start()
    try:
        store = dist.TCPStore("127.0.0.1", own.recv(), is_master=False, wait_for_workers=False)
        store.set("known", "x" * 100)
        kinds: dict[str, Any] = {
            "check": lambda: store.check(["unknown"]),
            "get": lambda: store.get("known"),
            "set": lambda: store.set("other", "x" * 100),
            "compare_set": lambda: store.compare_set("unknown", "[]", "[]"),
        }
        found = {}
        for kind, operation in kinds.items():
            before = _used(own)
            for _ in range(count):
                operation()
            store.check(["unknown"])  # a set has no answer: when this one comes, all are done
            found[kind] = (_used(own) - before) / count * 1e6
        return found
    finally:
        own.close()
        server.join(60)


def _used(server: Connection) -> float:
    server.send(None)
    used: float = server.recv()
    return used


def _serve(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send(time.process_time())


# --- the order of samples -------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """An order of so many samples: ms to a batch, MiB, and microseconds of each later batch."""

    samples: int
    is_held: bool
    first_ms: float
    resume_ms: float
    mib: float
    batch_us: float


def order_of(samples: int, is_held: bool, batches: int = 2000) -> Order:
    """Measure the first batch, one in the middle, the batches after the first, and memory."""
    plan = BatchPlan(samples, BATCH)
    order = GlobalOrder(plan, 0, 0, shuffle=True, keyed=False, fill=True, is_held=is_held)

    def ms_to_batch(start: int) -> float:
        order.epoch, order.start = 0, start
        rounds = 1 if is_held else ROUNDS
        return min(processor_us(lambda: next(iter(order))) for _ in range(rounds)) / 1000

    first, resume = ms_to_batch(0), ms_to_batch(plan.batches // 2)
    order.epoch, order.start = 0, 0
    given = iter(order)
    next(given)
    each = [processor_us(lambda: list(islice(given, batches))) / batches for _ in range(ROUNDS)]
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
