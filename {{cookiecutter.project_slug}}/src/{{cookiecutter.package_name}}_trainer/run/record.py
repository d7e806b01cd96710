"""What ``run.json`` says of an attempt: enough to run it again, and to see what differs then."""

import contextlib
import json
import os
import platform
import re
import socket
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import UserError
from ..launch import collectives
from ..launch.signals import INTERRUPTED_CODE
from ..options import redaction
from .plan import Plan
from .repository import commit

# The project's folder, unless the package was installed from a wheel.
_PROJECT = Path(__file__).resolve().parents[3]
_VARIABLES = re.compile(
    r"(OMP|KMP|MKL|GOTO|OPENBLAS|NCCL|RCCL|GLOO|CUBLAS|CUDA|CUDNN|NVIDIA|HIP|ATEN|TORCH|PYTORCH)_"
    r"|PYTHONHASHSEED$|SLURM_\w+(_ID|_COUNT|_NODELIST|_NODES|_NODE|_PER_TASK|_PARTITION)$"
)
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def attempt(plan: Plan, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of the attempt that this process starts; ``hosts`` are those of :func:`hosts`."""
    return {
        "command": redaction.command(sys.argv),
        **here(plan.started_in),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
        },
        "hosts": hosts,
        "layout": asdict(plan.layout),
        "restarts": max(int(os.environ.get(name, "0") or 0) for name in _RESTARTS),
        "strategy": plan.strategy_name,
        "precision": plan.precision.name,
        "device": str(plan.device),
        "seed": plan.options.seed,
    }


def here(directory: Path) -> dict[str, Any]:
    """Facts that do not depend on a run: of a working directory, the project and this process.

    Values of variables and answers whose name suggests a secret are redacted.
    """
    image = {name: os.environ.get(f"IMAGE_{name.upper()}") or None for name in ("commit", "digest")}
    locks = sorted(_PROJECT.glob("requirements/*.txt"))
    variables = {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.match(name)}
    return {
        "directory": str(directory),
        "git": commit(directory),
        "template": redaction.value(_template()),
        "locks": {path.name: sha256(path.read_bytes()).hexdigest() for path in locks},
        "image": image if any(image.values()) else None,
        "packages": _packages(),
        "variables": redaction.value(variables),
    }


def _template() -> dict[str, Any] | None:
    """Version of the template, and the answers to its questions; ``None``: not known here."""
    try:
        own = tomllib.loads((_PROJECT / "pyproject.toml").read_text())["tool"]
        answers = dict(own["cookiecutter-distributed-torch"])
        version = answers.pop("version")
    except (OSError, ValueError, LookupError, TypeError):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        given = json.loads((_PROJECT / ".cruft.json").read_text())["context"]["cookiecutter"]
        answers |= {name: value for name, value in given.items() if not name.startswith("_")}
    return {"version": version, "answers": answers}


def _packages() -> dict[str, str]:
    """Version of each installed package by its normalized name."""
    found = {}
    for folder in reversed(sys.path):  # the first of several is imported
        # Not importlib.metadata, which parses whole files: a hundred times slower.
        for path in Path(folder).glob("*-*.*-info"):
            name, _, version = path.stem.partition("-")
            found[re.sub("[-_.]+", "-", name).lower()] = version
    return dict(sorted(found.items()))


def hosts(plan: Plan) -> list[dict[str, Any]]:
    """Facts of each node, of its first rank; all ranks call it."""
    own = host(plan.device) if plan.layout.local_rank == 0 else None
    return [each for each in collectives.gather(own) if each is not None]


def host(device: torch.device) -> dict[str, Any]:
    """Facts of this machine; of its accelerators only if ``device`` is one."""
    model = _read("/proc/cpuinfo", r"^model name\s*: (.+)$")
    found: dict[str, Any] = {
        "name": socket.gethostname(),
        "cpu": model or platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **{"gpus": [], "driver": None, "cuda": None, "nccl": None},
    }
    if device.type == "cuda":
        count = range(torch.cuda.device_count())
        found["gpus"] = [torch.cuda.get_device_name(index) for index in count]
        found["driver"] = _read("/proc/driver/nvidia/version", r"Module .*?(\d+\.\d+[.\d]*)")
        found["cuda"] = torch.version.cuda or torch.version.hip
        if dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _read(path: str, pattern: str) -> str | None:
    with contextlib.suppress(OSError):
        if found := re.search(pattern, Path(path).read_text(), re.MULTILINE):
            return found[1]
    return None


def end(step: int, metrics: Mapping[str, float], error: BaseException | None) -> dict[str, Any]:
    """Facts of the end of an attempt: ``error`` has ended it, unless it is ``None``."""
    # JSON has no NaN and no infinity.
    texts = {name: str(value) for name, value in metrics.items() if not np.isfinite(value)}
    return {"exit_code": _exit_code(error), "last_step": step, "metrics": {**metrics, **texts}}


def _exit_code(error: BaseException | None) -> int:
    """The exit code of the command line."""
    if error is None or isinstance(error, SystemExit):
        code = getattr(error, "code", None)
        return code if isinstance(code, int) else int(code is not None)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_CODE
    return 2 if isinstance(error, UserError) else 1
