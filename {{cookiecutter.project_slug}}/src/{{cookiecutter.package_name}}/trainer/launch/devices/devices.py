"""Which devices this machine has, which of them the user means, and how a batch gets there."""

import copy
import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn

from ...arguments import other_trainers
from ...errors import ConfigurationError, UserError, shown
from .. import collectives
from . import hidden_gpus

# To answer whether there is a GPU, torch would start CUDA, and no process forked from then on could
# use it. So let the driver's library be asked, which starts nothing; without it torch asks CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

Accelerator = Literal["cpu", "cuda"]
_ACCELERATORS = {"auto", "cpu", "gpu", "cuda"}
# A mistyped number must not fill a machine; no node has as many GPUs, or cores.
_MOST_DEVICES = 1024


def choose_accelerator(name: str) -> Accelerator:
    """What ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"`` means on this machine.

    Raises:
        ConfigurationError: an unknown name, or a GPU that torch cannot see.
    """
    if name not in _ACCELERATORS:
        raise ConfigurationError(other_trainers.unknown("accelerator", name, _ACCELERATORS))
    is_usable = name != "cpu" and torch.cuda.is_available() and hidden_gpus.too_old() is None
    if name in ("cpu", "auto") and not is_usable:
        return "cpu"
    if not is_usable:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        none = f"torch {torch.__version__} ({built}) sees no GPU; use 'cpu' or 'auto'"
        raise ConfigurationError(f"accelerator={name!r}: {hidden_gpus.describe() or none}")
    return "cuda"


def parse_devices(value: int | str | list[int] | None, available: int | None) -> list[int]:
    """The device indices that a value of ``devices`` means.

    Args:
        value: ``3`` or ``"3"``: the first three; ``-1``, ``"-1"``, ``"auto"``: all;
            ``[1, 3]``, ``"1, 3"``: these; ``"0,"``: device 0.
        available: how many devices there are; ``None`` where any number can be made up (CPU
            processes), and "all" is one.

    Raises:
        ConfigurationError: a duplicate, a negative other than -1, an index that does not exist,
            no device at all, or a value of another type. The line names it.
    """
    indices = _indices(value, available)
    where = f"devices={shown(value)}"
    if not indices:
        raise ConfigurationError(f"{where} is no device; a run needs at least one")
    if len(indices) > _MOST_DEVICES:
        raise ConfigurationError(
            f"{where}: a node has at most {_MOST_DEVICES}; give a smaller number"
        )
    negative = [index for index in indices if index < 0]
    if negative:
        raise ConfigurationError(f"{where}: {negative[0]} is no device; only -1 alone means all")
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ConfigurationError(f"{where} names device {twice} more than once")
    if available is not None and max(indices) >= available:
        there = f"0 to {available - 1}" if available else "none"
        raise ConfigurationError(
            f"{where}: there is no device {max(indices)} here (known: {there})"
        )
    return indices


def check_one_each(device: torch.device) -> None:
    """Check that each rank has a GPU to itself; to be called by all ranks.

    Raises:
        UserError: two have the same; on all ranks.
    """
    uuids = collectives.gather(str(torch.cuda.get_device_properties(device).uuid))
    used = len(set(uuids))
    if used == len(uuids):
        return
    twice = next(each for each in uuids if uuids.count(each) > 1)
    ranks = ", ".join(str(rank) for rank, each in enumerate(uuids) if each == twice)
    raise UserError(
        f"{len(uuids)} ranks have {used} GPU{'s' * (used > 1)}: ranks {ranks} are all on {twice}; "
        "start a process for each GPU"
    )


def _indices(value: int | str | list[int] | None, available: int | None) -> list[int]:
    if value is None:
        value = "auto"
    if isinstance(value, str):
        return _indices_from_text(value, available)
    if isinstance(value, bool):
        raise ConfigurationError(
            f"devices={shown(value)}: give a number, a list of indices, or 'auto'"
        )
    if isinstance(value, int):
        if value == -1:
            return list(range(1 if available is None else available))
        return [value] if value < 0 else list(range(min(value, _MOST_DEVICES + 1)))
    if isinstance(value, list) and all(type(index) is int for index in value):
        return list(value)
    raise ConfigurationError(f"devices={shown(value)}: give a number, a list of indices, or 'auto'")


def _indices_from_text(text: str, available: int | None) -> list[int]:
    stripped = text.strip()
    if stripped in ("auto", "-1"):
        return list(range(1 if available is None else available))
    if stripped == "0":
        raise ConfigurationError(
            f"devices={text!r} may mean no device or device 0; say [0] for device 0"
        )
    try:
        if "," in stripped:
            return [int(part) for part in stripped.split(",") if part.strip()]
        return _indices(int(stripped), available)
    except ValueError:
        raise ConfigurationError(
            f"devices={shown(text)}: give a number, a list of indices, or 'auto'"
        ) from None


def move(batch: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The batch on a device: tensors in dicts, lists, (named) tuples of any depth; others as is.

    Anything with a ``to`` method that takes a device moves too, and so do the fields of a
    dataclass without one.

    Args:
        batch: of any nesting.
        device: where to.
        dtype: of floating-point tensors, in packed sequences too; ``None``: as they are. Whole and
            complex numbers stay, and so does what is in other things with a ``to`` method.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return to(value, device, dtype)
        if isinstance(value, nn.utils.rnn.PackedSequence):
            cast = dtype if value.data.is_floating_point() else None
            return value.to(device, cast, non_blocking=device.type != "cpu")  # type: ignore[arg-type,misc]
        if hasattr(value, "to") and callable(value.to):
            return value.to(device)
        return value

    return mapped(batch, moved)


def to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor on a device; one of floating-point numbers is then cast there, not before."""
    # Nothing waits for a copy to a device; what arrives on the host is read at once.
    moved = tensor.to(device, non_blocking=device.type != "cpu")
    return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A batch in which ``change`` is made of all in its dicts, lists, tuples and dataclasses."""
    if isinstance(batch, torch.Tensor | nn.utils.rnn.PackedSequence):
        return change(batch)
    if isinstance(batch, defaultdict):
        items = ((key, mapped(value, change)) for key, value in batch.items())
        return defaultdict(batch.default_factory, items)
    if isinstance(batch, Mapping):
        return type(batch)((key, mapped(value, change)) for key, value in batch.items())  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, change) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(value, change) for value in batch)
    has_own = hasattr(batch, "to") and callable(batch.to)
    if dataclasses.is_dataclass(batch) and not (has_own or isinstance(batch, type)):
        names = (each.name for each in dataclasses.fields(batch) if hasattr(batch, each.name))
        return with_fields(batch, {name: mapped(getattr(batch, name), change) for name in names})
    return change(batch)


def with_fields(batch: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a dataclass in which some fields have other values."""
    changed = copy.copy(batch)
    for name, value in values.items():
        # It may be frozen, and __init__ may not take what the fields hold.
        object.__setattr__(changed, name, value)
    return changed
