"""Warn if this machine has GPUs that torch cannot use: the run would silently use the CPU."""

import ctypes
import functools
import os
import re
import sys
from pathlib import Path

import torch

from ...errors import one_line

_DRIVER = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_LIBRARY = "libcuda.so.1"


def describe() -> str | None:
    """How many GPUs torch cannot use, why, and what to do; ``None`` if there are no GPUs.

    Call it if torch sees no GPU.
    """
    nodes = _nodes()
    count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else len(nodes)
    if count == 0:
        return None
    have = f"this machine has {count} GPU{'s' * (count > 1)}, which torch cannot use: "
    return have + (_torch_reason() or _process_reason(nodes) or too_old() or _cuda_reason())


@functools.cache  # once in a process
def warn() -> None:
    """Print a warning once if there are GPUs that torch cannot use."""
    if (line := describe()) is not None:
        sys.stderr.write(f"warning: this run is on the CPU: {line}\n")


def too_old() -> str | None:
    """Why the driver is too old for this build of torch; ``None`` if it is not.

    torch also lists GPUs with such a driver, and fails when it uses one.
    """
    needed, supported = torch.version.cuda, _supported()
    if needed is None or supported is None or supported // 1000 >= int(needed.partition(".")[0]):
        return None
    version = f"{supported // 1000}.{supported % 1000 // 10}"
    older = ", or install torch for CUDA 12 (make setup VARIANT=cu126)" * (supported // 1000 == 12)
    return (
        f"its driver supports CUDA {version} at most, and torch {torch.__version__} is built for "
        f"CUDA {needed}; update the driver{older}"
    )


def _supported() -> int | None:
    """The newest CUDA version that the driver supports, 12020 for 12.2; does not initialize CUDA.

    Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VERSION.html
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def _nodes() -> list[Path]:
    return [path for path in sorted(_DEVICES.glob("nvidia*")) if path.name[6:].isdecimal()]


def _torch_reason() -> str | None:
    if torch.version.cuda is not None:
        return None
    built = "built for ROCm" if torch.version.hip else "a CPU build"
    return (
        f"torch {torch.__version__} is {built}; install the one for CUDA "
        "(make setup VARIANT=cuda), or set accelerator='cpu'"
    )


def _process_reason(nodes: list[Path]) -> str | None:
    """Why this process cannot access the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
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
    refusals = [refusal for path in nodes if (refusal := _open_error(path)) is not None]
    if len(refusals) == len(nodes):
        return (
            f"{nodes[0]} cannot be opened ({refusals[0]}); in a SLURM job ask for GPUs by "
            "--gpus-per-node, elsewhere for permission, or set accelerator='cpu'"
        )
    return None


def _open_error(path: Path) -> str | None:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        return error.strerror
    return None


def _cuda_reason() -> str:
    if _supported() is None:
        return (
            f"the driver's library {_LIBRARY} is not found; in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return one_line(error)
    return "CUDA gives no reason"
