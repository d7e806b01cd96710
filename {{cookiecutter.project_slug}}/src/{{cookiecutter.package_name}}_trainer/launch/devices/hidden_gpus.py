"""Warn if this machine has GPUs that torch cannot use: the run would silently use the CPU."""

import functools
import os
import re
import sys
from pathlib import Path

import torch

from ...errors import one_line

_DRIVER = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")


def describe() -> str | None:
    """How many GPUs torch cannot use, why, and what to do; ``None`` if there are no GPUs.

    Call it if torch sees no GPU.
    """
    nodes = [path for path in sorted(_DEVICES.glob("nvidia*")) if path.name[6:].isdecimal()]
    count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else len(nodes)
    if count == 0:
        return None
    have = f"this machine has {count} GPU{'s' * (count > 1)}, which torch cannot use: "
    return have + (_reason(nodes) or _cuda_reason())


@functools.cache  # once in a process
def warn() -> None:
    """Print a warning once if there are GPUs that torch cannot use."""
    if (line := describe()) is not None:
        sys.stderr.write(f"warning: this run is on the CPU: {line}\n")


def _reason(nodes: list[Path]) -> str | None:
    """Why this build of torch, or this process, cannot access the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        built = "built for ROCm" if torch.version.hip else "a CPU build"
        return (
            f"torch {torch.__version__} is {built}; install the one for CUDA "
            "(make setup VARIANT=cuda), or set accelerator='cpu'"
        )
    if visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return (
            f"CUDA_VISIBLE_DEVICES={visible!r} hides them; unset it (in a SLURM job, ask for GPUs "
            "by --gpus-per-node), or set accelerator='cpu'"
        )
    if not nodes:
        return (
            f"there is no {_DEVICES}/nvidia0 in this container; start it with GPUs "
            "(docker run --gpus all, apptainer exec --nv), or set accelerator='cpu'"
        )
    if not any(os.access(path, os.R_OK | os.W_OK) for path in nodes):
        return (
            f"{nodes[0]} cannot be opened; in a SLURM job ask for GPUs by --gpus-per-node, "
            "elsewhere for permission, or set accelerator='cpu'"
        )
    return None


def _cuda_reason() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return one_line(error)
    return "CUDA gives no reason"
