"""Checks of this machine and environment: what they can run, and why not."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import launch, strategies
from ...cli.configuration import Work
from ...errors import ConfigurationError, UserError
from ...launch import cluster, collectives, devices, rendezvous
from ...loop import compilation
from ...options import Options
from ...strategies.precision import Precision
from .checks import Check, CheckError, output, run

_GIB = 2**30
_SECONDS = 30.0
# Two ranks on one machine join in a second; on a busy one in several.
_SECONDS_TO_REDUCE = 60.0
_FEW_FILES = 4096
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_INFINIBAND = Path("/sys/class/infiniband")
_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")


def check(work: Work | None) -> list[Check]:
    """Run all checks; ``work``: that of a configuration, whose run directory is used."""
    root = Path(Options.default_root_dir) if work is None else work.trainer.default_root_dir
    checks: dict[str, Callable[[], Iterable[Check]]] = {
        "Python": _versions,
        "driver": _driver,
        "GPU": _gpus,
        "NCCL": _nccl,
        "network": _network,
        "shared memory": _shared_memory,
        "limits": _limits,
        "disk": partial(_disks, root),
        "compilers": _compilers,
        "engine": _engines,
        "container": _containers,
        "SLURM": _slurm,
    }
    found = [line for name, each in checks.items() for line in run(name, each, _SECONDS)]
    return found + run("all-reduce", _all_reduce, _SECONDS_TO_REDUCE, "fails")


def _versions() -> Iterator[Check]:
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield Check("Python", "ok", f"{platform.python_version()} on {machine}")
    yield Check("torch", "ok", f"{torch.__version__}, {_build()}")


def _build() -> str:
    if torch.version.cuda:
        return f"built for CUDA {torch.version.cuda}"
    return f"built for ROCm {torch.version.hip}" if torch.version.hip else "a CPU build"


# --- GPUs ----------------------------------------------------------------------------------------


def _driver() -> Iterator[Check]:
    version = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if version:
        yield driver(version.splitlines()[0], output("nvidia-smi") or "", torch.version.cuda)


def driver(version: str, table: str, built: str | None) -> Check:
    """Compare the CUDA version that a driver supports with the one that torch is built for.

    Args:
        version: The driver's.
        table: What ``nvidia-smi`` prints, which has the CUDA version.
        built: Version of CUDA that torch is built for; ``None``: another build.
    """
    found = re.search(r"CUDA Version: (\d+)\.(\d+)", table)
    if found is None:
        return Check("driver", "warning", f"{version}; nvidia-smi says no CUDA version")
    supports = f"{version} supports CUDA {found[1]}.{found[2]}"
    # Builds for a later minor version run too: CUDA's minor version compatibility.
    if built is not None and int(built.partition(".")[0]) > int(found[1]):
        advice = f"update the driver, or make setup VARIANT=cu{found[1]}{found[2]}"
        return Check("driver", "warning", f"{supports}, and torch is built for {built}", advice)
    return Check("driver", "ok", supports)


def _gpus() -> Iterator[Check]:
    if (line := devices.why_hidden()) is not None:
        yield Check("GPU", "warning", line)
        return
    if not torch.cuda.is_available():
        yield Check("GPU", "ok", "none: a fit uses the CPU")
        return
    try:
        state = {gpu.index: gpu for gpu in devices.read_gpus()}
    except ConfigurationError as error:
        state = {}
        yield Check("GPU", "warning", "; ".join(error.problems))
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found = f"{index}: {facts.name}, {facts.total_memory / _GIB:.0f} GiB"
        gpu = state.get(index)
        used = 0 if gpu is None else facts.total_memory - gpu.free_bytes
        if gpu is None or not (gpu.obstacle or gpu.processes or used > facts.total_memory / 10):
            yield Check("GPU", "ok", found)
            continue
        found += f", {used / _GIB:.1f} GiB used by {gpu.processes} processes{gpu.obstacle}"
        yield Check("GPU", "warning", found, "--trainer.devices N --trainer.auto_select_gpus true")


def _nccl() -> Iterator[Check]:
    if torch.version.cuda is None or not dist.is_nccl_available():
        yield Check("NCCL", "ok", f"none in {_build()}: ranks communicate by gloo")
        return
    found: Any = torch.cuda.nccl.version()
    yield Check("NCCL", "ok", ".".join(map(str, found)))


# --- network, memory and disks -------------------------------------------------------------------


def _network() -> Iterator[Check]:
    names = ", ".join(each for _, each in socket.if_nameindex())
    host = socket.gethostname()
    try:
        address = f"{host} is {socket.gethostbyname(host)}"
    except OSError as error:
        address = f"{host} does not resolve ({error.strerror})"
    try:
        rendezvous.avoid_loopback("another host")
    except UserError as error:
        yield Check("network", "warning", f"{names}; {address}", "; ".join(error.problems))
        return
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host name")
    yield Check("network", "ok", f"{names}; {address}; between nodes gloo uses {chosen}")


def _shared_memory() -> Iterator[Check]:
    if _SHARED_MEMORY.is_dir():
        yield shared_memory(shutil.disk_usage(_SHARED_MEMORY).total)


def shared_memory(size: int) -> Check:
    """Whether so many bytes of shared memory suffice for loader workers and NCCL."""
    found = f"{size / _GIB:.2g} GiB"
    if size >= _GIB:
        return Check("shared memory", "ok", found)
    why = "loader workers and NCCL need more: start the container with --ipc=host or --shm-size=8g"
    return Check("shared memory", "warning", found, why)


def _limits() -> Iterator[Check]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = files != resource.RLIM_INFINITY and files < _FEW_FILES
    advice = f"loader workers need one for each tensor: ulimit -n {16 * _FEW_FILES}"
    status: Any = "warning" if is_few else "ok"
    yield Check("open files", status, f"at most {files}", advice if is_few else "")
    if not hasattr(resource, "RLIMIT_MEMLOCK"):
        return
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if locked == resource.RLIM_INFINITY else f"at most {locked >> 10} KiB"
    if locked == resource.RLIM_INFINITY or not _INFINIBAND.is_dir():
        yield Check("locked memory", "ok", found)
    else:
        advice = "InfiniBand needs more: ulimit -l unlimited"
        yield Check("locked memory", "warning", found, advice)


def _disks(root: Path) -> Iterator[Check]:
    for name, folder in (("runs", root.absolute()), ("temporary files", tempfile.gettempdir())):
        yield disk(name, Path(folder))


def disk(name: str, folder: Path) -> Check:
    """Whether files can be written into a folder, which may not exist yet."""
    above = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(above).free
    found = f"{folder}: {free / _GIB:.1f} GiB free"
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        where = "--trainer.default_root_dir" if name == "runs" else "TMPDIR"
        return Check(f"disk: {name}", "fails", f"{above} is not writable", f"set {where}")
    if free < 5 * _GIB:
        status: Any = "fails" if free < _GIB / 10 else "warning"
        return Check(f"disk: {name}", status, found, "free some space for checkpoints")
    return Check(f"disk: {name}", "ok", found)


# --- programs and packages -----------------------------------------------------------------------


def _compilers() -> Iterator[Check]:
    try:
        compilation.check_compiler(True)
        yield Check("torch.compile", "ok", "its C++ compiler and Python's headers are installed")
    except ConfigurationError as error:
        yield Check("torch.compile", "warning", "cannot compile", "; ".join(error.problems))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if nvcc := shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc"):
        yield Check("nvcc", "ok", nvcc)
    elif torch.version.cuda is not None:
        found = "not found: engines cannot build their CUDA extensions"
        yield Check("nvcc", "ok", found, "install the CUDA toolkit, or set CUDA_HOME")


def _engines() -> Iterator[Check]:
    needed: dict[str, tuple[str, list[str]]] = {}
    for name in strategies.names():
        for package, command in strategies.find(name).limits.packages.items():
            needed.setdefault(package, (command, []))[1].append(name)
    for package, (command, names) in needed.items():
        of = f"for {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        if importlib.util.find_spec(package) is None:
            yield Check("engine", "ok", f"{package}, {of}, is not installed", command)
            continue
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        yield Check("engine", "ok", f"{package} {version}, {of}")


def _containers() -> Iterator[Check]:
    commands = {
        "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
        "apptainer": ("apptainer", "--version"),
        "enroot": ("enroot", "version"),
    }
    installed = [name for name in commands if shutil.which(name)]
    for name in installed:
        try:
            version = output(*commands[name])
        except CheckError as error:
            advice = "start its daemon, or join the group docker" if name == "docker" else ""
            yield Check("container", "warning", f"this user cannot use {name}: {error}", advice)
            continue
        if name != "docker" and _NAMESPACES.is_file() and not int(_NAMESPACES.read_text()):
            advice = f"allow user namespaces: {_NAMESPACES} is 0"
            yield Check("container", "warning", f"this user may not use {name}", advice)
        else:
            yield Check("container", "ok", f"{name}: {version}")
    if not installed:
        yield Check("container", "ok", f"none of {', '.join(commands)} is installed")


def _slurm() -> Iterator[Check]:
    listed = output("sinfo", "--noheader", "--format", "%P|%a|%D|%G|%l")
    for line in (listed or "").splitlines():
        name, state, nodes, gres, limit = (*line.split("|"), *[""] * 5)[:5]
        found = f"partition {name} ({state}): {nodes} nodes, GRES {gres}, time limit {limit}"
        yield Check("SLURM", "ok" if state == "up" else "warning", found)


# --- two processes -------------------------------------------------------------------------------


def _all_reduce() -> Iterator[Check]:
    """As ``ddp`` does it: two ranks join, on GPUs if there are two, and sum their numbers."""
    total, backend = launch.run_in_processes("fork", 2, _reduce, {})
    status: Any = "ok" if total == 3.0 else "fails"
    yield Check("all-reduce", status, f"1 + 2 = {total:g} on two processes by {backend}")


def _reduce() -> tuple[float, str]:
    layout, has_two = cluster.detect(), torch.cuda.device_count() > 1
    device = torch.device("cuda", layout.rank) if has_two else torch.device("cpu")
    ddp = strategies.create("ddp", {"timeout_seconds": _SECONDS_TO_REDUCE / 2})
    ddp.connect(layout, [device], Precision("32-true", device.type))
    try:
        own = torch.tensor([layout.rank + 1.0], device=device)
        return float(collectives.all_reduce(own)), "NCCL" if has_two else "gloo"
    finally:
        ddp.teardown()
