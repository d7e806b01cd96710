"""Checks of the data: how many workers keep a step fed, and whether its order is reproducible."""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ...callbacks import Callback
from ...cli import imports
from ...cli.configuration import Work
from ...data import Feed, scaling, sources
from ...data.first_batches import fingerprint
from ...data.moving import leaves
from ...run.rank import RankRun
from ...trainer import Trainer
from .checks import Check, CheckError, apart, run

_BATCHES = 4  # whose order is compared
_STEPS = 5
_MOST_BATCHES = 64  # to measure the time of a batch
_SECONDS = 180.0
_SECONDS_TO_MEASURE = 20.0
_SECONDS_EACH = 3.0
Order = list[list[list[str]]]
"""For each batch, for each of its parts, what it is and a hash of its values."""


def check(work: Work, read: Callable[[], Work]) -> list[Check]:
    """Check the data; ``read`` creates the objects once more, in another process."""
    try:
        first: Order = apart(partial(_order, work, 0), _SECONDS)
    except CheckError as error:
        return [Check("data order", "warning", f"not checked: {error}")]
    # A new interpreter, as another run would be: with all its threads, and other hashes of strings.
    return run("workers", partial(_check_again, read, first), _SECONDS, "warning", "spawn")


def _check_again(read: Callable[[], Work], first: Order) -> Iterator[Check]:
    with imports.checked():
        yield _compare("two runs with one seed", first, _order(read(), 0))
        yield _compare("0 and 2 workers", first, _order(read(), 2))
        yield from _workers(read)


def options(work: Work, **others: Any) -> dict[str, Any]:
    """Options of a trainer on one device that reads the same batches as a replica of the run."""
    plan = work.trainer._plan
    given, size = plan.options, plan.options.global_batch_size
    if size is not None:
        replicas = plan.strategy.replicas(len(plan.node_devices), plan.layout.num_nodes)
        size = scaling.device_batch_size(size, replicas, given.accumulate_grad_batches)
    names = ("seed", "meta_device", "use_distributed_sampler", "precision", "accelerator")
    kept = {name: getattr(given, name) for name in names}
    return {**kept, "devices": 1, "global_batch_size": size, **others}


@contextlib.contextmanager
def _feed(work: Work, workers: int | None) -> Iterator[tuple[object, Feed]]:
    """The training loader, and its batches as the trainer reads them, with so many workers."""
    kept = options(work, accelerator="cpu", precision="32-true", strategy="single_device")
    rank = RankRun(Trainer(**kept, max_steps=1)._plan, None, is_started=False)
    rank.connect()
    with rank.attached(work.model, "fit", work.data):
        loader = sources.training_loader(work.data, work.model)
        if isinstance(loader, DataLoader) and workers is not None:
            loader.num_workers = workers
            loader.prefetch_factor = (loader.prefetch_factor or 2) if workers else None
            loader.timeout = loader.timeout if workers else 0
        yield loader, rank.training_feed(loader)


def _batches(feed: Feed) -> Iterator[Any]:
    return chain.from_iterable(feed.epoch(epoch, 0) for epoch in count())


# --- the order -----------------------------------------------------------------------------------


def _order(work: Work, workers: int) -> Order:
    with _feed(work, workers) as (_, feed):
        return [
            [[_kind(each), _hash(each)] for each in leaves(batch.data)]
            for batch in islice(_batches(feed), _BATCHES)
        ]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
    return type(value).__name__


def _hash(value: Any) -> str:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return str(fingerprint(value))
    plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()


def _compare(what: str, first: Order, second: Order) -> Check:
    for number, (one, other) in enumerate(zip(first, second, strict=True), 1):
        if one == other:
            continue
        pairs = enumerate(zip(one, other, strict=False))
        part = next((index for index, (old, new) in pairs if old != new), 0)
        found = f"{what}: batch {number} differs in part {part + 1} of {len(one)} ({one[part][0]})"
        advice = "draw random numbers from torch's, NumPy's or Python's global generator in the "
        advice += "dataset, and sort files and sets"
        return Check("data order", "warning", found, advice)
    return Check("data order", "ok", f"{what}: the first {len(first)} batches are equal")


# --- workers -------------------------------------------------------------------------------------


class _Clock(Callback):
    """Measures steps, from a batch to the end of what the device does with it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._started)


def _workers(read: Callable[[], Work]) -> Iterator[Check]:
    work = read()
    step, device = _step_seconds(work)
    with _feed(work, None) as (loader, _):
        given = getattr(loader, "num_workers", None)
    if given is None:
        yield Check("num_workers", "ok", "the training loader is no DataLoader: not measured")
        return
    ends, measured = time.monotonic() + _SECONDS_TO_MEASURE, dict[int, float]()
    for workers in (0, *(2**power for power in range(_cores().bit_length() + 1))):
        measured[workers] = _batch_seconds(work, workers)
        if time.monotonic() > ends or _keeps_fed(workers, measured[workers], step):
            break
    yield suggest(given, measured, step, device)


def suggest(given: int, measured: dict[int, float], step: float, device: str) -> Check:
    """Suggest the smallest number of workers that keeps a step fed, or else the fastest.

    Args:
        given: The training loader's.
        measured: Seconds for a batch by number of workers.
        step: Seconds for a step.
        device: Where the step was measured.
    """
    times = ", ".join(f"{1e3 * each:.3g} ms with {number}" for number, each in measured.items())
    found = f"a step takes {1e3 * step:.3g} ms on {device}, a batch {times} workers"
    fed = [number for number, each in measured.items() if _keeps_fed(number, each, step)]
    best = min(fed) if fed else min(measured, key=lambda number: measured[number])
    if not fed:
        found += "; the step waits for the loader with all of them"
    if given >= best and (fed or given == best):
        return Check("num_workers", "ok" if fed else "warning", f"{found}; it has {given}")
    return Check("num_workers", "warning", f"{found}; it has {given}", f"use num_workers={best}")


def _keeps_fed(workers: int, batch: float, step: float) -> bool:
    # Without workers, no batch is loaded while a step runs.
    return batch < (step if workers else step / 10)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _batch_seconds(work: Work, workers: int) -> float:
    with _feed(work, workers) as (_, feed):
        batches = _batches(feed)
        next(batches)
        started, passed, number = time.perf_counter(), 0.0, 0
        while number < _MOST_BATCHES and passed < _SECONDS_EACH:
            next(batches)
            passed, number = time.perf_counter() - started, number + 1
        return passed / number


def _step_seconds(work: Work) -> tuple[float, str]:
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            **options(work),
            strategy="single_device",
            callbacks=[clock],
            fast_dev_run=_STEPS,
            default_root_dir=folder,
            enable_progress_bar=False,
        )
        trainer.fit(work.model, work.data)
    return median(clock.seconds[1:] or clock.seconds), str(trainer._plan.device.type)
