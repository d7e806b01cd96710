"""Check the environment variables that the trainer reads, before any process starts."""

import contextlib
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from ..errors import nearest, refuse, shown
from ..launch import cluster, collectives, output, reports, signals
from ..strategies import registry

GPUS = "TRAINER_GPUS"
_PREFIX = "TRAINER_"
_INTERFACES = "GLOO_SOCKET_IFNAME"


def check(several: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Raise a ConfigurationError with one line for each invalid variable.

    ``several``: whether there will be several processes, which need a network interface.
    """
    refuse(
        [
            f"{name}={shown(value)}: {problem}"
            for name, problem_of in _CHECKS.items()
            if (value := environment.get(name)) and (several or name != _INTERFACES)
            if (problem := problem_of(value))
        ]
    )


def warn() -> None:
    """Print a warning once for each unknown variable that resembles one of the trainer's."""
    for name in sorted(name for name in os.environ.keys() - KNOWN if name.startswith(_PREFIX)):
        output.print_once(f"warning: {name} is not a variable of the trainer{nearest(name, KNOWN)}")


def _problem_of_backend(value: str) -> str | None:
    names = set(dist.Backend.backend_list) - {"undefined", "fake"}
    known = [name for name in names if getattr(dist, f"is_{name}_available", lambda: True)()]
    for entry in value.split(","):
        device, has_device, backend = entry.strip().rpartition(":")
        if device not in ("cpu", "cuda") and (has_device or "," in value):
            return f"{device!r} is not a device type; write it as in 'cpu:gloo,cuda:nccl'"
        if backend.lower() not in known:
            return f"this build of torch has no backend {backend!r}{nearest(backend, known)}"
    return None


def _checked(pattern: str, problem: str) -> Callable[[str], str | None]:
    return lambda value: None if re.fullmatch(pattern, value) else problem


def _problem_of_outcome(value: str) -> str | None:
    path = Path(value)
    with contextlib.suppress(OSError):  # too long a name
        place = path if path.exists() else path.absolute().parent
        if not path.is_dir() and os.access(place, os.W_OK):
            return None
    return "cannot be written; name a file in an existing directory"


def _problem_of_interfaces(value: str) -> str | None:
    known = [name for _, name in socket.if_nameindex()]
    unknown = [shown(name) + nearest(name, known) for name in value.split(",") if name not in known]
    return f"there is no network interface {unknown[0]}" if unknown else None


_of_store = _checked(f"/.*/{cluster.STORE_FILE}", "the trainer sets it for its ranks: unset it")
_of_process = _checked(r"\d{1,10}", "not a process id; the trainer sets it for its ranks: unset it")
_CHECKS: Mapping[str, Callable[[str], str | None]] = {
    **dict.fromkeys(collectives.BACKENDS, _problem_of_backend),
    signals.SAVE_SECONDS: _checked(r"\d{1,9}(\.\d*)?", "give a number of seconds, such as 120"),
    reports.OUTCOME: _problem_of_outcome,
    cluster.STORE: _of_store,
    reports.PARENT: _of_process,
    reports.RANK_PROCESS: _of_process,
    _INTERFACES: _problem_of_interfaces,
    "OMP_NUM_THREADS": _checked(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", "give a number from 1 on"),
}
KNOWN = {
    *(name for name in (*_CHECKS, *registry.variables) if name.startswith(_PREFIX)),
    *(cluster.OVERRIDE, cluster.PLANNED, reports.DIRECTORY, GPUS),
}
