"""Select the devices of a node, and those of this process."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from .. import launch, strategies
from ..errors import ConfigurationError
from ..launch import devices
from ..launch.cluster import Layout
from ..launch.devices import ADDED, Accelerator, count, parse_devices
from ..options import Options
from ..strategies import Limits, SingleDevice, Strategy
from . import environment


def choose(options: Options, accelerator: Accelerator, layout: Layout) -> list[int]:
    """Indices of the devices to use on this node.

    Args:
        options: The trainer's options.
        accelerator: Accelerator of the devices.
        layout: Layout of the processes.

    Raises:
        ConfigurationError: There are no such devices, or fewer GPUs than processes.
    """
    value = options.devices
    available = count(accelerator)
    selects = options.auto_select_gpus and accelerator == "cuda"
    if layout.started_outside:
        if selects:
            _check_chosen_by_one(layout)
        limits, drives_all = _of_strategy(options.strategy)
        if available is not None and not drives_all:
            _check_enough(available, layout)
        # Such a launcher decides how many processes there are, whatever devices says.
        if limits.launched_by is not None or (value == "auto" and not drives_all):
            return list(range(layout.local_world_size))
        if available == 1 and _is_count(value):
            available = layout.local_world_size
    if selects and str(value).isdigit() and value not in (0, "0"):
        return _idle(int(str(value)))
    return parse_devices(value, available)


def torch_device(accelerator: Accelerator, index: int) -> torch.device:
    """A device of this node, as visible to this process."""
    if accelerator == "cpu":
        return torch.device("cpu")
    if accelerator in ADDED:
        return torch.device(ADDED[accelerator].device_type, index)
    # A cluster may show each process only its own GPU (srun --gpus-per-task=1), as device 0.
    return torch.device(accelerator, index if index < (count(accelerator) or 0) else 0)


def _is_count(value: Any) -> bool:
    """Whether ``devices`` is a number of devices, not a selection."""
    return not isinstance(value, list) and "," not in str(value)


def _check_enough(available: int, layout: Layout) -> None:
    processes = layout.local_world_size
    # A process that sees one GPU may see its own: the ranks compare GPUs after they have joined.
    if processes > available != 1:
        raise ConfigurationError(
            f"{layout.source} started {processes} processes on this node, which has {available} "
            f"GPUs for them: start {available}, or set accelerator='cpu'"
        )


def _check_chosen_by_one(layout: Layout) -> None:
    if layout.local_world_size > 1 and not launch.is_reported():
        raise ConfigurationError(
            f"auto_select_gpus: {layout.source} started {layout.local_world_size} processes on "
            "this node, each of which would choose by itself; name the GPUs in "
            "CUDA_VISIBLE_DEVICES, or leave it to this command to start the processes"
        )


def _idle(count: int) -> list[int]:
    """Idle GPUs; in a rank of our launcher, those that the launcher has selected."""
    if launch.is_reported() and environment.GPUS in os.environ:
        return [int(index) for index in os.environ[environment.GPUS].split(",")]
    return devices.choose_idle(devices.read_gpus(), count)


def pass_to_ranks(gpus: Sequence[torch.device]) -> None:
    """Make copies of this command, which are about to start, use the GPUs selected here."""
    os.environ[environment.GPUS] = ",".join(str(each.index) for each in gpus)


def _of_strategy(wanted: object) -> tuple[Limits, bool]:
    """Limits of a strategy that may not exist, and whether one process drives all devices."""
    cls: type[Strategy] = SingleDevice
    limits = cls.limits
    if isinstance(wanted, Strategy):
        cls, limits = type(wanted), wanted.limits
    else:
        with contextlib.suppress(ConfigurationError):  # an unknown name is reported with the rest
            found = strategies.find(wanted)
            cls, limits = found.cls, found.limits
    return limits, cls.local_processes(2) == 1 and cls is not SingleDevice
