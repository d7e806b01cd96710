"""Select the accelerator, and count its devices."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import ConfigurationError, nearest, shown
from . import hidden_gpus

# torch would initialize CUDA to check for a GPU, and no process forked afterward could use it. With
# this variable, torch queries the driver through NVML instead, if it is available.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

Accelerator = str
"""``"cpu"``, ``"cuda"``, or the name of a :class:`Hardware`."""
_ACCELERATORS = {"auto", "cpu", "gpu", "cuda"}


@dataclass(frozen=True)
class Hardware:
    """An accelerator that an engine adds.

    Args:
        strategy: The strategy that ``"auto"`` selects on it, on any number of devices.
        count: Counts the devices of this node without opening them; ``None`` if the engine is not
            installed, which the check of its strategy reports.
        device_type: Type of its devices in torch.
    """

    strategy: str
    count: Callable[[], int | None]
    device_type: str


ADDED: dict[str, Hardware] = {}
"""Accelerators of engines by name; their folders add them."""


def choose_accelerator(name: str) -> Accelerator:
    """Select an accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"``, or an engine's.

    Raises:
        ConfigurationError: Unknown name, or there is no such device.
    """
    if name not in (*_ACCELERATORS, *ADDED):
        known = (*_ACCELERATORS, *ADDED)
        raise ConfigurationError(f"accelerator={shown(name)} is unknown{nearest(str(name), known)}")
    if name in ADDED:
        if ADDED[name].count() == 0:
            raise ConfigurationError(
                f"accelerator={name!r}: this machine has none; use 'cpu' or 'auto'"
            )
        return name
    is_usable = name != "cpu" and torch.cuda.is_available()
    if name in ("cpu", "auto") and not is_usable:
        added = (each for each, hardware in ADDED.items() if name == "auto" and hardware.count())
        return next(added, "cpu")
    if not is_usable:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        none = f"torch {torch.__version__} ({built}) sees no GPU; use 'cpu' or 'auto'"
        raise ConfigurationError(f"accelerator={name!r}: {hidden_gpus.describe() or none}")
    return "cuda"


def count(accelerator: Accelerator) -> int | None:
    """Number of devices visible to this process; ``None`` if any number is possible."""
    if accelerator == "cpu":
        return None
    if accelerator in ADDED:
        return ADDED[accelerator].count()
    found: int = torch.get_device_module(accelerator).device_count()
    return found
