"""Check the environment variables that the trainer reads, before any process starts."""

import contextlib
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from ..errors import ConfigurationError, Problems, UserError, nearest, shown
from ..launch import cluster, outcome, rendezvous, reports, watch
from ..strategies import process_group, registry

GPUS = "TRAINER_GPUS"
_PREFIX = "TRAINER_"
_INTERFACES = "GLOO_SOCKET_IFNAME"
_DEVICE_TYPES = ("cpu", "cuda")
_warned: set[str] = set()


def check(several: bool, environment: Mapping[str, str] | None = None) -> None:
    """Check the values of environment variables.

    Args:
        several: Whether there will be several processes, which need a network interface.
        environment: Environment variables; default: ``os.environ``.

    Raises:
        ConfigurationError: One line for each invalid variable.
    """
    environment = os.environ if environment is None else environment
    problems = Problems()
    for name, check_one in _CHECKS.items():
        if environment.get(name):
            with problems:
                check_one(name, environment[name])
    if several and environment.get(_INTERFACES):
        with problems:
            _check_interfaces(environment[_INTERFACES])
    problems.raise_any()


def warn(environment: Mapping[str, str] | None = None) -> None:
    """Print a warning once for each unknown variable that resembles one of the trainer's."""
    environment = os.environ if environment is None else environment
    for name in sorted(environment.keys() - KNOWN - _warned):
        if name.startswith(_PREFIX):
            _warned.add(name)
            sys.stderr.write(
                f"warning: {name} is not a variable of the trainer{nearest(name, KNOWN)}\n"
            )


def _check_backend(name: str, value: str) -> None:
    for part in value.split(","):
        device, has_device, backend = part.strip().rpartition(":")
        if not has_device and "," in value:
            raise ConfigurationError(
                f"{name}={shown(value)}: name the device type of each of several backends, as in "
                "'cpu:gloo,cuda:nccl'"
            )
        if has_device and device not in _DEVICE_TYPES:
            raise ConfigurationError(
                f"{name}={shown(value)}: {device!r} is not a device type"
                + nearest(device, _DEVICE_TYPES)
            )
        known = [each for each in dist.Backend.backend_list if each not in ("undefined", "fake")]
        if backend.lower() not in known:
            raise ConfigurationError(
                f"{name}={shown(value)}: torch has no backend {backend!r}{nearest(backend, known)}"
            )
        built = getattr(dist, f"is_{backend.lower()}_available", None)
        if built is not None and not built():
            raise ConfigurationError(
                f"{name}={shown(value)}: this build of torch has no {backend}; use 'gloo'"
            )


def _check_seconds(name: str, value: str) -> None:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"{name}={shown(value)}: give a number of seconds, such as 120")


def _check_outcome(name: str, value: str) -> None:
    path = Path(value)
    try:
        is_folder, has_parent = path.is_dir(), path.absolute().parent.is_dir()
    except OSError as error:
        raise ConfigurationError(f"{name}={shown(value)}: {error.strerror}") from None
    if is_folder:
        raise ConfigurationError(f"{name}={shown(value)} is a directory; name a file")
    if not has_parent:
        raise ConfigurationError(
            f"{name}={shown(value)}: its directory does not exist; make it, or name another file"
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigurationError(f"{name}={shown(value)} cannot be written; name another file")


def _check_store(name: str, value: str) -> None:
    path = Path(value)
    with contextlib.suppress(OSError, UserError):
        rendezvous.check_private(path.parent)
        if path.is_absolute() and path.name == cluster.STORE_FILE:
            return
    raise ConfigurationError(
        f"{name}={shown(value)}: not a store of the trainer, which sets it for its ranks: unset it"
    )


def _check_number(name: str, value: str) -> None:
    if not value.isdecimal() or len(value) > 10:
        raise ConfigurationError(
            f"{name}={shown(value)}: not a process id; the trainer sets it for its ranks: unset it"
        )


def _check_interfaces(value: str) -> None:
    known = [name for _, name in socket.if_nameindex()]
    for name in value.split(","):
        if name not in known:
            raise ConfigurationError(
                f"{_INTERFACES}={shown(value)}: there is no network interface "
                f"{shown(name)} here{nearest(name, known)}"
            )


_CHECKS: Mapping[str, Callable[[str, str], None]] = {
    **dict.fromkeys(process_group.BACKENDS, _check_backend),
    watch.SAVE_SECONDS: _check_seconds,
    outcome.FILE: _check_outcome,
    cluster.STORE: _check_store,
    reports.PARENT: _check_number,
    reports.RANK_PROCESS: _check_number,
}
KNOWN = {
    *(name for name in (*_CHECKS, *registry.variables) if name.startswith(_PREFIX)),
    *(cluster.OVERRIDE, reports.DIRECTORY, GPUS),
}
