"""The runtime of PyTorch/XLA in this process: started once, on one device.

Source: https://docs.pytorch.org/xla/release/r2.9/learn/pytorch-on-xla-devices.html
"""

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...errors import UserError
from ...launch.cluster import Layout
from .hardware import DEVICE

_SEEDS = 2**63


def start(layout: Layout, chip: int | None) -> torch.device:
    """Start the runtime, and return this process' device.

    Args:
        layout: Layout of the processes.
        chip: Index of the TPU chip of a single process; ``None``: XLA's CPU device.

    Raises:
        UserError: The runtime cannot be started in this process.
    """
    os.environ[DEVICE] = "CPU" if chip is None else "TPU"
    if chip is not None and layout.world_size == 1:
        os.environ.setdefault("TPU_VISIBLE_CHIPS", str(chip))
    import torch_xla
    from torch_xla import runtime
    from torch_xla._internal import pjrt

    if chip is not None and layout.world_size > 1:
        pjrt.initialize_multiprocess(layout.local_rank, layout.local_world_size)
    else:
        pjrt.initialize_singleprocess()
    if runtime.addressable_device_count() > 1:
        raise UserError(
            "strategy='xla': a process has several devices here (TPU v2, v3 and 7x, or "
            "CPU_NUM_DEVICES), and it trains on one; use TPU v4 to v6e, and unset CPU_NUM_DEVICES"
        )
    device: torch.device = torch_xla.device()
    return device


def sync() -> None:
    """End the graph that was recorded, and have the device run it; the host does not wait."""
    import torch_xla

    torch_xla.sync()


def sync_outside_steps() -> None:
    """The same, with the device's generator left as it is, which :func:`sync` moves on."""
    from torch_xla.core import xla_model

    state = xla_model.get_rng_state()
    sync()
    xla_model.set_rng_state(state)


def sum_over_devices(tensor: Tensor) -> Tensor:
    """Sum over all TPU devices, inside the graph: the host does not take part."""
    from torch_xla.core import xla_model

    total: Tensor = xla_model.all_reduce(xla_model.REDUCE_SUM, tensor)
    return total


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Copy all tensors in a nested dict to the CPU."""
    sync_outside_steps()
    copied: dict[str, Any] = tree_map_only(Tensor, lambda each: each.cpu(), state)
    return copied


def seed(value: int) -> None:
    """Seed the device's generator, which draws dropout masks."""
    from torch_xla.core import xla_model

    xla_model.set_rng_state(value % _SEEDS)


def generator_state() -> Tensor:
    """State of the device's generator."""
    from torch_xla.core import xla_model

    return torch.tensor(xla_model.get_rng_state() % 2**64 - _SEEDS, dtype=torch.int64)


def set_generator_state(state: Tensor) -> None:
    """Restore a state of :func:`generator_state`."""
    from torch_xla.core import xla_model

    xla_model.set_rng_state(int(state) + _SEEDS)
