"""Devices of this machine: which ones torch can use, and why it cannot use the others."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigurationError, nearest, one_line, shown
from ..options import Options

# torch would initialize CUDA to check for a GPU, and no process forked afterward could use it. With
# this variable, torch queries the driver through NVML instead, if it is available.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Segments that grow leave fewer gaps. torch reads it when it first allocates memory on a GPU.
if torch.version.cuda and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

Accelerator = str  # ``"cpu"``, ``"cuda"``, or the name of a :class:`Hardware`
_ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
_MOST_DEVICES = 1024  # a mistyped number must not start more processes; no node has more devices
_DRIVER = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")


@dataclass(frozen=True)
class Hardware:
    strategy: str  # which ``"auto"`` selects on it, on any number of devices
    count: Callable[[], int | None]  # of this node; None: no engine, as its strategy reports
    device_type: str  # of its devices in torch


ENGINE_HARDWARE: dict[str, Hardware] = {}  # accelerators of engines by name; their folders add them


def choose_accelerator(name: str) -> Accelerator:
    """Select an accelerator that is there: of ``"auto"``, ``"cpu"``, ``"gpu"``, or an engine's."""
    if name in ENGINE_HARDWARE:
        if ENGINE_HARDWARE[name].count() == 0:
            problem = "this machine has none; use 'cpu' or 'auto'"
            raise ConfigurationError(f"accelerator={name!r}: {problem}")
        return name
    if name not in _ACCELERATORS:
        known = (*_ACCELERATORS, *ENGINE_HARDWARE)
        raise ConfigurationError(f"accelerator={shown(name)} is unknown{nearest(str(name), known)}")
    if name != "cpu" and torch.cuda.is_available():
        return "cuda"
    if name == "auto":
        return next((kind for kind, hardware in ENGINE_HARDWARE.items() if hardware.count()), "cpu")
    if name != "cpu":
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        none = f"torch {torch.__version__} ({built}) sees no GPU; use 'cpu' or 'auto'"
        raise ConfigurationError(f"accelerator={name!r}: {why_hidden() or none}")
    return "cpu"


def count(accelerator: Accelerator) -> int | None:
    """Number of devices visible to this process; ``None`` if any number is possible."""
    if accelerator == "cpu":
        return None
    if accelerator in ENGINE_HARDWARE:
        return ENGINE_HARDWARE[accelerator].count()
    return int(torch.get_device_module(accelerator).device_count())


def parse_devices(value: int | str | list[int] | None, available: int | None) -> list[int]:
    """Parse a value of ``devices`` into device indices, or raise ConfigurationError.

    ``3`` or ``"3"``: the first three; ``-1``, ``"-1"``, ``"auto"``: all; ``[1, 3]``, ``"1, 3"``:
    these; ``"0,"``: device 0. ``available``: how many there are; ``None`` if any number is possible
    (CPU processes), and "all" means one.
    """
    where = f"devices={shown(value)}"
    indices = _indices(value, where, 1 if available is None else available)
    if not indices:
        problem = " is not a device; a run needs at least one"
    elif len(indices) > _MOST_DEVICES:
        problem = f": a node has at most {_MOST_DEVICES}; give a smaller number"
    elif min(indices) < 0:
        problem = f": {min(indices)} is not a device; only -1 alone means all"
    elif len(set(indices)) < len(indices):
        problem = f" names device {max(indices, key=indices.count)} more than once"
    elif available is not None and max(indices) >= available:
        there = f"0 to {available - 1}" if available else "none"
        problem = f": there is no device {max(indices)} here (known: {there})"
    else:
        return indices
    raise ConfigurationError(f"{where}{problem}")


def _indices(value: int | str | list[int] | None, what: str, all_of: int) -> list[int]:
    choice: object = -1 if value is None else value
    if isinstance(value, str):
        text = "-1" if value.strip() == "auto" else value.strip()
        if text == "0":
            raise ConfigurationError(f"{what} may mean no device or device 0; say [0] for device 0")
        with contextlib.suppress(ValueError):  # refused below
            parts = [int(item) for item in text.split(",") if item.strip()]
            choice = parts if "," in text else int(text)
    if type(choice) is int:
        if choice == -1:
            return list(range(all_of))
        return [choice] if choice < 0 else list(range(min(choice, _MOST_DEVICES + 1)))
    if isinstance(choice, list) and all(type(index) is int for index in choice):
        return choice
    raise ConfigurationError(f"{what}: give a number, a list of indices, or 'auto'")


# --- GPUs that torch cannot use: a run would silently use the CPU --------------------------------


def why_hidden() -> str | None:
    """If torch sees no GPU: how many there are, why, and what to do; ``None`` if there are none."""
    nodes = [path for path in sorted(_DEVICES.glob("nvidia*")) if path.name[6:].isdecimal()]
    count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else len(nodes)
    if count == 0:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        built = "built for ROCm" if torch.version.hip else "a CPU build"
        reason = f"torch {torch.__version__} is {built}; for CUDA: make setup VARIANT=cuda"
    elif visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        reason = f"CUDA_VISIBLE_DEVICES={visible!r} hides them; unset it (in a SLURM job, ask for "
        reason += "GPUs by --gpus-per-node)"
    elif not nodes:
        reason = f"there is no {_DEVICES}/nvidia0 in this container; start it with GPUs "
        reason += "(docker run --gpus all, apptainer exec --nv)"
    elif not any(os.access(path, os.R_OK | os.W_OK) for path in nodes):
        reason = f"{nodes[0]} cannot be opened; in a SLURM job ask for GPUs by --gpus-per-node, "
        reason += "elsewhere for permission"
    else:
        reason = "CUDA gives no reason; update its driver"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = one_line(error)
    advice = f"{reason}, or set accelerator='cpu'"
    return f"this machine has {count} GPU{'s' * (count > 1)}, which torch cannot use: {advice}"


@contextlib.contextmanager
def backends_set(device_type: str, options: Options) -> Iterator[None]:
    """Set the matmul precision and cuDNN's benchmark on GPUs, and restore them on exit.

    torch has two APIs for this precision, and torch.compile reads both. The older one sets both
    settings of the newer one, and can be read only if they agree. Source:
    https://docs.pytorch.org/docs/stable/generated/torch.set_float32_matmul_precision.html
    """
    if device_type != "cuda":
        yield
        return
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    newer = [backend.fp32_precision for backend in backends]
    older = "highest"  # the only value at which both APIs can disagree
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    benchmark, wanted = torch.backends.cudnn.benchmark, options.matmul_precision
    if options.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = options.cudnn_benchmark
    if wanted is not None or str(newer[0]) == "none":  # the program has not set it
        _set_matmul_precision(wanted or "high")
    try:
        yield
    finally:
        _set_matmul_precision(older)
        for backend, precision in zip(backends, newer, strict=True):
            backend.fp32_precision = precision
        torch.backends.cudnn.benchmark = benchmark


def precision_notes(device_type: str, precision: str) -> list[str]:
    """One line if the run's float32 matrix products are computed in lower precision."""
    is_float32 = device_type == "cuda" and precision == "32-true"
    if not is_float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return []
    return ["float32 matrix products in TF32 (matmul_precision 'highest': in float32)"]


def _set_matmul_precision(precision: str) -> None:
    with warnings.catch_warnings():
        # Some versions of torch recommend the newer API, which torch.compile does not support.
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision(precision)
