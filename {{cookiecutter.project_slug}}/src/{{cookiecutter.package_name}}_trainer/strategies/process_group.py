"""Base class of strategies with one process per device and a process group."""

import datetime
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

# Import it while there is no process group: default arguments of its functions would keep the group
# and gloo's threads alive, and one of them may abort the interpreter at exit.
import torch.distributed.nn.functional
from torch import Tensor

from ..errors import UserError
from ..launch import collectives, hangs, rendezvous, reports
from ..launch.cluster import Layout
from ..module import TrainingModule
from .base import DataLayout, Devices, StepOutput, Strategy
from .engine_optimizers import EngineGroups
from .gradients.averaging import GradientAverage, accumulated_once
from .gradients.same_use import SameUse
from .limits import Limits
from .optimizers import Optimization
from .precision import Precision
from .user_code import refuse_sharded

_SECONDS_FOR_TORCH = 10.0  # torch's own timeouts should report first


def backends(requested: str | None, device_type: str) -> str:
    """Backends of the process group, in torch's format: one for each type of device.

    Ranks also exchange CPU tensors (signals, logging, checkpoints), which NCCL does not support.
    ``requested``: ``"nccl"``, ``"cuda:nccl"``, …; ``None``: NCCL on GPUs, gloo on CPUs.
    """
    by_type = {"cpu": "gloo"} | ({"cuda": "nccl"} if device_type == "cuda" else {})
    if requested is None and device_type != "cuda":
        return "gloo"
    entries = [entry.strip() for entry in (requested or "").lower().split(",") if entry]
    if entries and ":" not in entries[0]:
        types = dist.Backend.backend_capability.get(entries[0], ["cpu", "cuda"])
        if "cpu" in types:
            return entries[0]
        entries = [f"{kind}:{entries[0]}" for kind in types]
    for entry in entries:
        kind, _, backend = entry.partition(":")
        if kind in ("cpu", device_type):
            by_type[kind] = backend
    return ",".join(f"{kind}:{backend}" for kind, backend in by_type.items())


class ProcessGroupStrategy(Strategy):
    """One process per device; each reads its part of every batch.

    Args:
        timeout_seconds: Timeout of collectives: if a rank does not join, they fail on its peers.
            A batch, with what callbacks do after it, may take five seconds more.
    """

    limits: Limits = Limits()
    same_use: SameUse | None = None  # compares what ranks use, if their collectives depend on it
    averaged: GradientAverage | None = None  # averages gradients that no engine does
    engine_groups: EngineGroups | None = None  # of the optimizers, if the strategy took them over
    wrapped: Any = None  # an engine's wrapper of a module, whose ``no_sync`` accumulates gradients
    layout: Layout
    _has_run = False
    _has_prefix = False  # whether torch prefixes errors of this process with its rank

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self.timeout_seconds = timeout_seconds

    def connect(self, layout: Layout, devices: Devices, precision: Precision) -> None:
        super().connect(layout, devices, precision)
        self.layout = layout
        collectives.timeout_seconds = self.timeout_seconds
        self.init_process_group(layout, self.device)
        reports.watch_for_hangs(self.timeout_seconds)

    @property
    def group_timeout(self) -> datetime.timedelta:
        """Timeout of every process group; on GPUs, ranks that hang are reported before it.

        With ``compile``, the timer of ``launch.hangs`` ends ranks that hang after a first batch.
        """
        seconds = self.timeout_seconds + collectives.compile_seconds
        margin = hangs.NCCL_SECONDS if self.device.type == "cuda" else 0.0
        return datetime.timedelta(seconds=seconds + margin)

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        """Initialize the process group; an override uses ``launch.rendezvous.connect_store``."""
        if dist.is_initialized():
            raise UserError("leave init_process_group out of the program: the trainer calls it")
        requested = next((os.environ[n] for n in collectives.BACKENDS if os.environ.get(n)), None)
        names = backends(requested, device.type)
        to_join, shows = datetime.timedelta(seconds=self.timeout_seconds), sys.excepthook
        # Ranks wait for each other twice: until all have joined, and until all are connected. In
        # the kernel no timeout of torch applies: a rank may be stopped with the lock of the store.
        with hangs.limited((to_join + self.group_timeout).total_seconds() + _SECONDS_FOR_TORCH):
            dist.init_process_group(
                names,
                store=rendezvous.connect_store(layout, to_join),
                rank=layout.rank,
                world_size=layout.world_size,
                timeout=self.group_timeout,
                # NCCL connects now instead of in a step, and other groups are split from this one.
                device_id=device if "cuda:nccl" in names else None,
            )
        if ProcessGroupStrategy._has_prefix:
            sys.excepthook = shows  # torch would prefix the lines of errors once more
        ProcessGroupStrategy._has_prefix = True

    def place(self, module: TrainingModule) -> None:
        refuse_sharded(module)
        super().place(module)

    @staticmethod
    def start_equal(tensors: Iterable[Tensor], sources: Mapping[int, int] | None = None) -> None:
        """Broadcast parameters and buffers: rank 0's, as torch's DDP does, or by id another's."""
        for tensor in tensors:
            collectives.broadcast_in_place(tensor.detach(), (sources or {}).get(id(tensor), 0))

    @property
    def data(self) -> DataLayout:
        size, rank = self.layout.world_size, self.layout.rank
        return replace(super().data, replicas=size, index=rank, random_rank=rank)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        # BatchNorm statistics and other buffers differ between ranks: evaluate with rank 0's.
        buffers = list(self.module.buffers())
        # Wrappers of engines broadcast rank 0's in the next step, too.
        kept = [] if self.wrapped is not None else [buffer.detach().clone() for buffer in buffers]
        self.start_equal(buffers)
        versions = [buffer._version for buffer in buffers]
        try:
            yield
        finally:
            for buffer, own, version in zip(buffers, kept, versions, strict=False):
                if buffer._version == version:  # else the evaluation has set it
                    buffer.detach().copy_(own)

    def forward_backward(
        self, batch: Any, batch_idx: int, *, weight: float, synchronize: bool
    ) -> StepOutput:
        # In forward, the engine decides whether the following backward averages gradients.
        run, waits = super().forward_backward, self.wrapped is not None and not synchronize
        with self.wrapped.no_sync() if waits else nullcontext():
            return run(batch, batch_idx, weight=weight, synchronize=synchronize)

    def backward(self, loss: Tensor, *, synchronize: bool, retain_graph: bool = False) -> None:
        is_checked, self._has_run = self.wrapped is None or self._has_run, True
        with nullcontext() if is_checked else accumulated_once(self.module):
            super().backward(loss, synchronize=synchronize, retain_graph=retain_graph)
        if synchronize and self.averaged is not None:
            self.averaged.average()

    def step(self, optimization: Optimization, *, ends: bool = True) -> None:
        if self.engine_groups is not None:
            self.engine_groups.check()
        super().step(optimization, ends=ends)

    def teardown(self) -> None:
        for hooks in (self.same_use, self.averaged):
            if hooks is not None:
                hooks.close()
        self.same_use = self.averaged = self.engine_groups = None
        self.steps = {}
        hangs.timer.disarm()
        if dist.is_initialized():
            dist.destroy_process_group()
