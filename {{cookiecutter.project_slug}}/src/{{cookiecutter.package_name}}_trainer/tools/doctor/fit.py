"""Checks of a configuration: its step, its model, and its data."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ... import strategies
from ...callbacks import Callback
from ...cli.configuration import Work, read_work
from ...data import sources
from ...data.feed_creation import device_batch_size
from ...data.moving import leaves, mapped
from ...data.samples import Splitter, batch_length
from ...errors import UserError, shorten
from ...launch.pickling import find_unpicklable
from ...module import TrainingModule
from ...run.rank import RankRun
from ...strategies.base import Stage, read_loss
from ...strategies.gradients.same_use import OPTION, trained
from ...strategies.optimizers import Optimization
from ...trainer import Trainer
from ..plan.trace import PlannedRun
from .checks import Check, run
from .waits import Waits

_SECONDS, _SECONDS_TO_MEASURE, _SECONDS_EACH = 180.0, 20.0, 3.0
_STEPS, _SAMPLES, _FIRST, _MEASURED = 4, 4, 4, 64
_BATCHNORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_WAITS = "keep values on the device, log tensors with self.log, copy with non_blocking"
_SUM = "return a mean: replicas and accumulation change the scale of a sum over samples"


def check(work: Work, program: str, options: Sequence[str]) -> list[Check]:
    """Run all checks of a configuration; ``options``: its options."""
    checks = run("step", partial(_step, work), _SECONDS)
    checks += run("model", partial(_model, work), _SECONDS)
    again = partial(read_work, program, "fit", options)
    return checks + run("num_workers", partial(_workers, again), _SECONDS, how="spawn")


def _replicas(work: Work) -> int:
    plan = work.trainer._plan
    return plan.strategy.replicas(len(plan.node_devices), plan.layout.num_nodes)


def _alone(work: Work, **others: Any) -> Trainer:
    """A trainer on one device that reads the same batches as a replica of the run."""
    options = work.trainer._plan.options
    if size := options.global_batch_size:
        size = device_batch_size(size, _replicas(work), options.accumulate_grad_batches)
    names = ("seed", "meta_device", "use_distributed_sampler", "precision", "accelerator")
    kept: dict[str, Any] = {name: getattr(options, name) for name in names}
    kept |= {"strategy": "single_device", "devices": 1, "global_batch_size": size}
    return Trainer(**{"default_root_dir": work.trainer.default_root_dir} | kept | others)


def _fit(work: Work, **options: Any) -> Trainer:
    """Train some steps on one device, and validate as many batches; nothing is kept."""
    rank = PlannedRun(work.trainer._plan, _replicas(work), 1)
    with rank.running(work.model, "fit", work.data):
        rank.training_feed(sources.training_loader(work.data, work.model))
    with tempfile.TemporaryDirectory() as folder:
        options |= {"default_root_dir": folder, "enable_progress_bar": False}
        trainer = _alone(work, fast_dev_run=_STEPS, **options)
        trainer._plan = replace(trainer._plan, total_steps=rank.total_steps)
        trainer.fit(work.model, work.data)
    return trainer


class _Watched(strategies.SingleDevice):
    """Trains on some samples of each batch; notes the parameters that each batch uses."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self.used: dict[int, set[str]] = {}  # names of parameters by batch
        self.growth: list[float] = []  # of the loss of a batch if each sample is there twice

    def setup(self, module: TrainingModule, configure: Callable[[], Optimization]) -> Optimization:
        made = super().setup(module, configure)
        for name, parameter in trained(module):
            note = partial(lambda name, _: self.used[self.waits.batch].add(name), name)
            parameter.register_post_accumulate_grad_hook(note)
        return made

    def forward(self, stage: Stage, batch: Any, batch_idx: int) -> Any:
        if stage != "training":
            return super().forward(stage, batch, batch_idx)
        self.waits.batch = batch_idx
        self.used.setdefault(batch_idx, set())
        if (more := batch_length(batch) - _SAMPLES) > 0:
            with contextlib.suppress(UserError):  # it cannot be split by samples
                batch = Splitter().split(batch, [_SAMPLES, more])[0]
        if self.module.automatic_optimization:
            with contextlib.suppress(Exception):  # such as of a BatchNorm with too few samples
                self._note_growth(batch, batch_length(batch))
        tensors = [*self.module.parameters(), *self.module.buffers()]
        self.waits.mark([leaves(batch), tensors, [tensor.grad for tensor in tensors]])
        with self.waits.watching():
            return super().forward(stage, batch, batch_idx)

    def _note_growth(self, batch: Any, count: int) -> None:
        def twice(value: Any) -> Any:  # statistics of a BatchNorm stay
            is_of_samples = isinstance(value, Tensor) and value.shape[:1] == (count,)
            return torch.cat([value, value]) if is_of_samples else value

        run = partial(super().forward, "training", batch_idx=self.waits.batch)
        once, doubled = (float(read_loss(run(batch=b))) for b in (batch, mapped(batch, twice)))
        self.growth.append(doubled / once)

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        with self.waits.watching():
            super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)


def _step(work: Work) -> Iterator[Check]:
    """Train on the CPU; find what waits, and parameters that are not used."""
    file = getattr(sys.modules[type(work.model).__module__], "__file__", None) or __file__
    watched = _Watched(Waits(file))
    _fit(work, accelerator="cpu", precision="32-true", strategy=watched)
    steps = len(watched.used)
    yield Check("step", "ok", f"{steps} steps of at most {_SAMPLES} samples on the CPU")
    # A wait in one batch only, such as every 50th, costs little.
    waits = [line for line, in_ in watched.waits.seen.items() if len(in_) > (steps > 1)]
    for line in waits or ["no line of the training step waits for the device"]:
        yield Check.either("waits", line, not waits, _WAITS)
    if watched.growth:
        is_sum = 1.6 < median(watched.growth) < 2.5  # of a mean 1, but for dropout
        text = f"{'doubles' if is_sum else 'does not double'} with the batch"
        yield Check.either("loss", text, not is_sum, _SUM)
    always = set.intersection(*watched.used.values())
    rare = [name for name, _ in trained(work.model) if name not in always]
    names = shorten(", ".join(rare))
    text = f"{names}: not used in each step" if rare else "each step uses all parameters"
    yield Check.either("unused parameters", text, not rare, f"freeze or remove them, or {OPTION}")


def _model(work: Work) -> Iterator[Check]:
    """What cannot be pickled, and layers that are wrong under some strategies."""
    for name, owner in (("model", work.model), ("data", work.data)):
        line = find_unpicklable(owner, name)
        yield Check.either("pickling", line or f"{name} can be pickled", line is None)
    norms = [name for name, module in work.model.named_modules() if isinstance(module, _BATCHNORM)]
    if norms and not work.trainer._plan.options.sync_batchnorm:
        refused = {name: strategies.find(name).limits.refused for name in strategies.names()}
        without = [name for name in refused if "sync_batchnorm" in refused[name]]
        text = f"{shorten(', '.join(norms))}: each replica normalizes with its own part of a batch"
        advice = f"--trainer.sync_batchnorm true, which {', '.join(without)} do not support"
        yield Check("BatchNorm", "warning" if _replicas(work) > 1 else "ok", text, advice)


def _read(work: Work, workers: int) -> tuple[float, int | None]:
    """Seconds for a batch after the first ones, and a DataLoader's own ``num_workers``."""
    trainer = _alone(work, accelerator="cpu", precision="32-true", max_steps=1)
    rank = RankRun(trainer._plan, None, is_started=False)
    rank.connect("fit")
    with rank.running(work.model, "fit", work.data):
        loader, asked = sources.training_loader(work.data, work.model), None
        if isinstance(loader, DataLoader):
            asked, loader.num_workers = loader.num_workers, workers
            loader.timeout = loader.timeout if workers else 0
            loader.prefetch_factor = (loader.prefetch_factor or 2) if workers else None
        feed = rank.training_feed(loader)
        batches = chain.from_iterable(feed.epoch(epoch, 0) for epoch in count())
        for _ in range(_FIRST):
            next(batches)
        started, number = time.perf_counter(), 0
        while number < _MEASURED and time.perf_counter() - started < _SECONDS_EACH:
            next(batches)
            number += 1
        return (time.perf_counter() - started) / number, asked


class _Clock(Callback):
    """Measures steps, with what the device does in them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seconds.append(-time.perf_counter())

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[-1] += time.perf_counter()


def _workers(read_again: Callable[[], Work]) -> list[Check]:
    work, clock, measured = read_again(), _Clock(), dict[int, float]()
    device = _fit(work, callbacks=[clock])._plan.device.type
    step, ends = median(clock.seconds[1:] or clock.seconds), time.monotonic() + _SECONDS_TO_MEASURE
    for workers in (0, *(2**power for power in range((os.cpu_count() or 1).bit_length() + 1))):
        measured[workers], asked = _read(work, workers)
        if asked is None:
            return [Check("num_workers", "ok", "not measured: the loader is no DataLoader")]
        if time.monotonic() > ends or _is_fed(workers, measured[workers], step):
            break
    return [suggest(asked or 0, measured, step, device)]


def _is_fed(workers: int, batch: float, step: float) -> bool:
    return batch < (step if workers else step / 10)  # without workers, a step waits for each batch


def suggest(asked: int, measured: dict[int, float], step: float, device: str) -> Check:
    """Suggest the smallest number of workers that keeps a step fed, or else the fastest.

    ``asked``: the loader's; ``measured``: seconds of a batch, by workers; ``step``: its seconds.
    """
    times = ", ".join(f"{1e3 * took:.3g} ms with {number}" for number, took in measured.items())
    text = f"a step takes {1e3 * step:.3g} ms on {device}, a batch {times} workers; it has {asked}"
    fed = [number for number, took in measured.items() if _is_fed(number, took, step)]
    best = min(fed) if fed else min(measured, key=lambda number: measured[number])
    slow = "" if fed else ", and make samples cheaper: a step waits for them even then"
    is_good = bool(fed) and asked >= best
    return Check.either("num_workers", text, is_good, f"use num_workers={best}{slow}")
