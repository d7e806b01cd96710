"""What ``run.json`` says of an attempt: enough to run it again, and to see what differs then."""

import contextlib
import importlib.metadata
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
_DRIVER = Path("/proc/driver/nvidia/version")
_CPUS = Path("/proc/cpuinfo")
_VARIABLES = re.compile(
    r"(OMP|KMP|MKL|GOTO|OPENBLAS|NCCL|RCCL|GLOO|CUBLAS|CUDA|CUDNN|NVIDIA|HIP|ATEN|TORCH|PYTORCH)_"
    r"|PYTHONHASHSEED$|SLURM_(JOB_ID|ARRAY_JOB_ID|ARRAY_TASK_ID|STEP_ID|RESTART_COUNT|JOB_NODELIST"
    r"|JOB_NUM_NODES|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS_ON_NODE|JOB_PARTITION)$"
)
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def attempt(plan: Plan, hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of the attempt that this process starts; ``hosts`` are those of :func:`hosts`.

    Values of variables and options whose name suggests a secret are redacted.
    """
    return {
        "command": redaction.command(sys.argv),
        "directory": str(plan.started_in),
        "git": commit(plan.started_in),
        "template": template(),
        "locks": locks(),
        "image": image(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
        },
        "packages": packages(),
        "hosts": hosts,
        "variables": variables(),
        "layout": asdict(plan.layout),
        "restarts": max(int(os.environ.get(name, "0") or 0) for name in _RESTARTS),
        "strategy": plan.strategy_name,
        "precision": plan.precision.name,
        "device": str(plan.device),
        "seed": plan.options.seed,
    }


def template() -> dict[str, Any] | None:
    """Version of the template, and the answers to its questions; ``None``: not known here."""
    try:
        own = tomllib.loads((_PROJECT / "pyproject.toml").read_text())["tool"]
        found = own["cookiecutter-distributed-torch"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    answers = {name: value for name, value in found.items() if name != "version"}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        given = json.loads((_PROJECT / ".cruft.json").read_text())["context"]["cookiecutter"]
        answers |= {name: value for name, value in given.items() if not name.startswith("_")}
    return {"version": found.get("version"), "answers": redaction.value(answers)}


def locks() -> dict[str, str]:
    """SHA-256 of each lock of the project; none if they are not here."""
    paths = sorted(_PROJECT.glob("requirements/*.txt"))
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in paths}


def image() -> dict[str, str | None] | None:
    """Commit and digest of the container's image, as its variables say; ``None`` without them."""
    found = {name: os.environ.get(f"IMAGE_{name.upper()}") or None for name in ("commit", "digest")}
    return found if any(found.values()) else None


def packages() -> dict[str, str]:
    """Version of each installed package by name."""
    found: dict[str, str] = {}
    for each in importlib.metadata.distributions():
        # Not `each.name`, which parses the whole file: ten times slower.
        text = each.read_text("METADATA") or each.read_text("PKG-INFO") or ""
        head = text.partition("\n\n")[0]
        fields = dict(re.findall(r"^(Name|Version): *(.+?) *$", head, re.MULTILINE))
        if len(fields) == 2:
            found.setdefault(fields["Name"], fields["Version"])
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def variables() -> dict[str, str]:
    """Environment variables that change what is computed, and ids of the job."""
    found = {name: os.environ[name] for name in sorted(os.environ) if _VARIABLES.match(name)}
    return dict(redaction.value(found))


def hosts(plan: Plan) -> list[dict[str, Any]]:
    """Facts of each node, of its first rank; all ranks call it."""
    own = host(plan.device) if plan.layout.local_rank == 0 else None
    return [each for each in collectives.gather(own) if each is not None]


def host(device: torch.device) -> dict[str, Any]:
    """Facts of this machine; of its accelerators only if ``device`` is one."""
    found: dict[str, Any] = {
        "name": socket.gethostname(),
        "cpu": _cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        **dict.fromkeys(("driver", "cuda", "nccl")),
        "gpus": [],
    }
    if device.type == "cuda":
        count = range(torch.cuda.device_count())
        found["gpus"] = [torch.cuda.get_device_name(index) for index in count]
        found["cuda"] = torch.version.cuda or torch.version.hip
        if dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError):
            if number := re.search(r"Module .*?(\d+\.\d+[.\d]*)", _DRIVER.read_text()):
                found["driver"] = number[1]
    return found


def _cpu() -> str:
    with contextlib.suppress(OSError):
        if model := re.search(r"^model name\s*: (.+)$", _CPUS.read_text(), re.MULTILINE):
            return model[1]
    return platform.processor() or platform.machine()


def end(step: int, metrics: Mapping[str, float], error: BaseException | None) -> dict[str, Any]:
    """Facts of the end of an attempt: ``error`` has ended it, unless it is ``None``."""
    return {
        "exit_code": _exit_code(error),
        "last_step": step,
        # JSON has no NaN and no infinity.
        "metrics": {
            name: value if np.isfinite(value) else str(value) for name, value in metrics.items()
        },
    }


def _exit_code(error: BaseException | None) -> int:
    """The exit code of the command line."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if error is None or isinstance(error, KeyboardInterrupt):
        return 0 if error is None else INTERRUPTED_CODE
    return 2 if isinstance(error, UserError) else 1
