"""Strategies of one process a device: their process group, and who reads what."""

import datetime
import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

# Its functions keep the group that there is when it is imported, as a default, and gloo's threads
# with it: then one of them may abort the interpreter's end. Now there is none.
import torch.distributed.nn.functional
from torch import Tensor

from .. import launch
from ..launch import rendezvous
from ..launch.cluster import Layout
from ..launch.devices import accelerator
from ..launch.failures.nccl_watch import NCCLWatch
from ..launch.failures.watchdog import process_watchdog
from .base import Strategy
from .limits import Limits
from .precision import Precision

# Ours wins; the second is Lightning's.
BACKENDS = ("TRAINER_BACKEND", "PL_TORCH_DISTRIBUTED_BACKEND")

# What torch itself notices, it reports first.
_SECONDS_FOR_TORCH = 10.0


def backends(asked: str | None, device_type: str) -> str:
    """What to form a process group of, as torch takes it: a backend for each type of device.

    Ranks exchange CPU tensors too, for signals, logging and checkpoints, which NCCL does not take.

    Args:
        asked: ``"nccl"``, ``"cuda:nccl"``, …; ``None``: NCCL on GPUs, gloo on CPUs.
        device_type: of the ranks' devices.
    """
    by_type = {"cpu": "gloo"} | ({"cuda": "nccl"} if device_type == "cuda" else {})
    if asked is None and device_type != "cuda":
        return "gloo"
    parts = [part.strip() for part in (asked or "").lower().split(",") if part]
    if parts and ":" not in parts[0]:
        types = dist.Backend.backend_capability.get(parts[0], ["cpu", "cuda"])
        if "cpu" in types:
            return parts[0]
        parts = [f"{each}:{parts[0]}" for each in types]
    for part in parts:
        each, _, backend = part.partition(":")
        if each in ("cpu", device_type):
            by_type[each] = backend
    return ",".join(f"{each}:{backend}" for each, backend in by_type.items())


class ProcessGroupStrategy(Strategy):
    """One process a device, each of which reads its part of every batch.

    Args:
        timeout_seconds: after which a collective that a rank does not join fails on the others.
    """

    limits: Limits = Limits()

    _nccl_watch: NCCLWatch | None = None

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self.timeout_seconds = timeout_seconds

    def connect(
        self, layout: Layout, own_devices: Sequence[torch.device], precision: Precision
    ) -> None:
        super().connect(layout, own_devices, precision)
        self.init_process_group(layout, self.device)
        process_watchdog.arm()
        if self.waits_for_peers():  # NCCL takes no GPU twice
            accelerator.check_one_each(self.device)
            self._nccl_watch = NCCLWatch(
                layout.rank, self.timeout_seconds, launch.end_hung, lambda: self.records_directory
            )

    def init_process_group(self, layout: Layout, device: torch.device) -> None:
        """Form the process group: NCCL on GPUs (and gloo for what is on the CPU), gloo on CPUs."""
        asked = next((os.environ[name] for name in BACKENDS if os.environ.get(name)), None)
        timeout = datetime.timedelta(seconds=self.timeout_seconds)
        # The ranks wait for one another twice: until all are there, and until all are connected.
        seconds = 2 * self.timeout_seconds + _SECONDS_FOR_TORCH
        with rendezvous.exit_if_stuck(seconds, launch.end_process):
            dist.init_process_group(
                backends(asked, device.type),
                store=rendezvous.connect_store(layout, timeout),
                rank=layout.rank,
                world_size=layout.world_size,
                timeout=timeout,
            )

    @staticmethod
    def start_equal(tensors: Iterable[Tensor]) -> None:
        """Rank 0's weights and buffers on every process, as torch's DDP does it."""
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    @staticmethod
    def local_processes(devices: int) -> int:
        return devices

    @staticmethod
    def replicas(devices: int, num_nodes: int) -> int:
        return devices * num_nodes

    @property
    def data_replicas(self) -> int:
        return self.layout.world_size

    @property
    def data_index(self) -> int:
        return self.layout.rank

    def begin_evaluation(self) -> None:
        # Training leaves each process with its own BatchNorm statistics; rank 0's are the model's.
        self.start_equal(self.module.buffers())

    def waits_for_peers(self) -> bool:
        # NCCL's communicators are destroyed when all that was started on them has ended.
        return (
            dist.is_initialized()
            and dist.get_world_size() > 1
            and "nccl" in dist.get_backend_config()
        )

    def teardown(self) -> None:
        if self._nccl_watch is not None:
            self._nccl_watch.close()
            self._nccl_watch = None
        process_watchdog.disarm()
        if dist.is_initialized():
            dist.destroy_process_group()
