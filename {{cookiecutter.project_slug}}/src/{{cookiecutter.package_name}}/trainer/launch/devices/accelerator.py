"""Select the accelerator, and check that each rank has its own GPU."""

import os
from typing import Literal

import torch

from ...arguments import other_trainers
from ...errors import ConfigurationError, UserError
from .. import collectives
from . import hidden_gpus

# torch would initialize CUDA to check for a GPU, and no process forked afterward could use it. With
# this variable, torch queries the driver through NVML instead, if it is available.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

Accelerator = Literal["cpu", "cuda"]
_ACCELERATORS = {"auto", "cpu", "gpu", "cuda"}


def choose_accelerator(name: str) -> Accelerator:
    """Select an accelerator: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"cuda"``.

    Raises:
        ConfigurationError: Unknown name, or torch sees no GPU.
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


def check_one_each(device: torch.device) -> None:
    """Check that each rank has its own GPU; called by all ranks.

    Raises:
        UserError: Two ranks have the same GPU; raised on all ranks.
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
