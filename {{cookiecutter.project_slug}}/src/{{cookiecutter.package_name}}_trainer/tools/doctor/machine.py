"""Checks of this machine and environment: what they can run, and why not."""

import os
import platform
import shutil
import socket
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import metadata, util
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_MEMLOCK, RLIMIT_NOFILE, getrlimit

import torch

from ... import strategies
from ...cli.configuration import Work
from ...errors import UserError
from ...launch import cluster, collectives, devices, rendezvous, start
from ...loop import compilation
from ...options import Options
from ...run import record
from ...strategies.precision import Precision
from .checks import Check, output, run

_GIB, _SECONDS = 2**30, 60.0  # each of the five programs has 10
_SHARED_MEMORY, _INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")  # noqa: S108
# Each line that a program prints is one of the result, if it is installed.
_GPUS = "index,name,driver_version,memory.used,memory.total"
_PARTITION = "partition %P is %a: %D nodes, GRES %G, time limit %l"
_PROGRAMS = (
    ("driver", "nvidia-smi", f"--query-gpu={_GPUS}", "--format=csv,noheader"),
    ("docker", "docker", "version", "--format", "{{.Server.Version}}"),
    ("apptainer", "apptainer", "--version"),
    ("enroot", "enroot", "version"),
    ("SLURM", "sinfo", "--noheader", f"--format={_PARTITION}"),
)


def check(work: Work | None) -> list[Check]:
    """Run all checks; ``work``: that of a configuration, whose run directory is used."""
    root = Path(Options.default_root_dir) if work is None else work.trainer.default_root_dir
    named = {"versions": _versions, "GPU": _gpus, "network": _network, "limits": _limits}
    named |= {"disk": partial(_disks, root), "torch.compile": _compilers, "engine": _engines}
    named |= {"programs": _programs}
    lines = [line for name, check in named.items() for line in run(name, check, _SECONDS)]
    return lines + run("all-reduce", _all_reduce, 2 * _SECONDS)


def _versions() -> Iterator[Check]:
    yield Check("Python", "ok", f"{platform.python_version()}, {platform.platform()}")
    cuda, hip = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    version = record.host(torch.device("cuda"))["nccl"]
    nccl = f"NCCL {version}" if version else "no NCCL: ranks use gloo"
    yield Check("torch", "ok", f"{torch.__version__}, built for {built}; {nccl}")


def _gpus() -> Iterator[Check]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    hidden = None if count else devices.why_hidden()  # such as a driver too old for torch
    text = hidden or (f"torch can use {count}" if count else "none: a fit uses the CPU")
    yield Check.either("GPU", text, not hidden)


def _network() -> Iterator[Check]:
    names, host = ", ".join(name for _, name in socket.if_nameindex()), socket.gethostname()
    text, advice = f"{names}; host name {host}", ""
    try:
        text += f" is {socket.gethostbyname(host)}"
        rendezvous.avoid_loopback("another host")
    except OSError as error:
        advice = f"give {host} an address ({error.strerror}), or set GLOO_SOCKET_IFNAME"
    except UserError as error:
        advice = "; ".join(error.problems)
    yield Check.either("network", text, not advice, advice)


def _limits() -> Iterator[Check]:
    if _SHARED_MEMORY.is_dir():
        yield shared_memory(shutil.disk_usage(_SHARED_MEMORY).total)
    files, locked = (getrlimit(limit)[0] for limit in (RLIMIT_NOFILE, RLIMIT_MEMLOCK))
    is_enough = files == RLIM_INFINITY or files >= 4096
    is_enough &= locked == RLIM_INFINITY or not _INFINIBAND.is_dir()
    text = f"{files} open files, {locked} bytes of locked memory (-1: unlimited)"
    advice = "ulimit -n 65536 for loader workers, ulimit -l unlimited for InfiniBand"
    yield Check.either("limits", text, is_enough, advice)


def shared_memory(size: int) -> Check:
    """Whether so many bytes of shared memory suffice for loader workers and NCCL."""
    advice = "loader workers and NCCL need more: start the container with --shm-size=8g"
    return Check.either("shared memory", f"{size / _GIB:.2g} GiB", size >= _GIB, advice)


def _disks(root: Path) -> Iterator[Check]:
    yield disk("runs", root.absolute(), "--trainer.default_root_dir")
    yield disk("temporary files", Path(tempfile.gettempdir()), "TMPDIR")


def disk(name: str, folder: Path, option: str) -> Check:
    """Whether files can be written into a folder, which may not exist yet."""
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        return Check(name, "fails", f"{above} is not writable", f"set {option}")
    free = shutil.disk_usage(above).free
    text, advice = f"{folder}: {free / _GIB:.1f} GiB free", f"free some, or set {option}"
    return Check.either(name, text, free > 5 * _GIB, advice)


def _compilers() -> Iterator[Check]:
    nvcc = shutil.which("nvcc") or "no nvcc, which engines need to build CUDA extensions"
    try:
        compilation.check_compiler(True)
        yield Check("torch.compile", "ok", f"can compile; {nvcc}")
    except UserError as error:
        yield Check("torch.compile", "warning", f"cannot compile; {nvcc}", str(error))


def _engines() -> Iterator[Check]:
    users = defaultdict(list)
    for strategy in strategies.names():
        for needed in strategies.find(strategy).limits.packages.items():
            users[needed].append(strategy)
    for (package, command), names in users.items():
        is_there = util.find_spec(package) is not None
        text = metadata.version(package) if is_there else "not installed"
        advice = "" if is_there else command
        yield Check("engine", "ok", f"{package} {text}, for {', '.join(names)}", advice)


def _programs() -> Iterator[Check]:
    for name, *command in _PROGRAMS:
        try:
            for line in (output(*command) or "").splitlines():
                yield Check(name, "ok", line)
        except UserError as error:
            yield Check(name, "warning", str(error), "start its service, or ask for access")


def _all_reduce() -> Iterable[Check]:
    """Two ranks join as ``ddp`` does it, on GPUs if there are two, and sum their numbers."""
    total, backend = start.run_in_processes("fork", 2, _reduce, {})
    text = f"1 + 2 = {total:g} on two processes by {backend}"
    return [Check("all-reduce", "ok" if total == 3.0 else "fails", text)]


def _reduce() -> tuple[float, str]:
    layout, has_two = cluster.detect(), torch.cuda.device_count() > 1
    device = torch.device("cuda", layout.rank) if has_two else torch.device("cpu")
    ddp = strategies.create("ddp", {"timeout_seconds": _SECONDS})
    ddp.connect(layout, [device], Precision("32-true", device.type))
    total = float(collectives.all_reduce(torch.tensor([layout.rank + 1.0], device=device)))
    ddp.teardown()
    return total, "NCCL" if has_two else "gloo"
