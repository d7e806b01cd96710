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
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ... import launch, strategies
from ...cli.configuration import Work
from ...errors import Problems, UserError
from ...launch import cluster, collectives, devices, rendezvous
from ...loop import compilation
from ...options import Options
from ...strategies.precision import Precision
from .checks import Check, output, run

_GIB, _SECONDS = 2**30, 30.0
_SHARED_MEMORY, _INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")  # noqa: S108
_NAMESPACES = Path("/proc/sys/user/max_user_namespaces")
_CONTAINERS = {
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "apptainer": ("apptainer", "--version"),
    "enroot": ("enroot", "version"),
}


def check(work: Work | None) -> list[Check]:
    """Run all checks; ``work``: that of a configuration, whose run directory is used."""
    root = Path(Options.default_root_dir) if work is None else work.trainer.default_root_dir
    named = {"versions": _versions, "GPU": _gpus, "network": _network, "limits": _limits}
    named |= {"disk": partial(_disks, root), "compilers": _compilers, "engine": _engines}
    named |= {"container": _containers, "SLURM": _slurm}
    found = [line for name, each in named.items() for line in run(name, each, _SECONDS)]
    return found + run("all-reduce", _all_reduce, 3 * _SECONDS, "fails")


def _versions() -> Iterator[Check]:
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield Check("Python", "ok", f"{platform.python_version()} on {machine}")
    cuda, hip = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPUs only"
    yield Check("torch", "ok", f"{torch.__version__}, built for {built}")
    has_nccl = bool(cuda) and dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none: ranks use gloo"
    yield Check("NCCL", "ok", version)


def _gpus() -> Iterator[Check]:
    if version := output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        yield driver(version.split()[0], output("nvidia-smi") or "", torch.version.cuda)
    hidden = devices.why_hidden()
    if hidden or not torch.cuda.is_available():
        yield Check.either("GPU", hidden or "none: a fit uses the CPU", not hidden)
        return
    for gpu in devices.read_gpus():
        memory = torch.cuda.get_device_properties(gpu.index).total_memory
        used = memory - gpu.free_bytes
        found = f"{gpu.index}: {gpu.name}, {used / _GIB:.1f} of {memory / _GIB:.0f} GiB used"
        is_idle = not (gpu.processes or gpu.obstacle) and used < memory / 10
        found += f" by {gpu.processes} processes{gpu.obstacle}" * (not is_idle)
        advice = "select others: --trainer.devices N --trainer.auto_select_gpus true"
        yield Check.either("GPU", found, is_idle, advice)


def driver(version: str, table: str, built: str | None) -> Check:
    """Compare the CUDA version that a driver supports with the one that torch is built for.

    ``table``: what ``nvidia-smi`` prints. A later minor version than the driver's runs too.
    """
    found = re.search(r"CUDA Version: ((\d+)\.\d+)", table)
    supported, major = (found[1], int(found[2])) if found else ("an unknown version", 0)
    is_new = built is None or int(built.partition(".")[0]) <= major
    advice = f"torch needs CUDA {built}: update the driver, or make setup VARIANT=cuXYZ"
    return Check.either("driver", f"{version} supports CUDA {supported}", is_new, advice)


def _network() -> Iterator[Check]:
    names, host = ", ".join(each for _, each in socket.if_nameindex()), socket.gethostname()
    try:
        address = f"{host} is {socket.gethostbyname(host)}"
    except OSError as error:
        address = f"{host} does not resolve ({error.strerror})"
    advice = ""
    try:
        rendezvous.avoid_loopback("another host")
    except UserError as error:
        advice = "; ".join(error.problems)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host name")
    found = f"{names}; {address}; between nodes gloo uses {chosen}"
    yield Check.either("network", found, not advice, advice)


def _limits() -> Iterator[Check]:
    if _SHARED_MEMORY.is_dir():
        yield shared_memory(shutil.disk_usage(_SHARED_MEMORY).total)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.RLIM_INFINITY
    advice = "loader workers need one for each tensor: ulimit -n 65536"
    yield Check.either("open files", f"at most {files}", files == most or files >= 4096, advice)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = "unlimited" if locked == most else f"at most {locked >> 10} KiB"
    is_enough = locked == most or not _INFINIBAND.is_dir()
    yield Check.either("locked memory", found, is_enough, "InfiniBand needs ulimit -l unlimited")


def shared_memory(size: int) -> Check:
    """Whether so many bytes of shared memory suffice for loader workers and NCCL."""
    advice = "loader workers and NCCL need more: start the container with --shm-size=8g"
    return Check.either("shared memory", f"{size / _GIB:.2g} GiB", size >= _GIB, advice)


def _disks(root: Path) -> Iterator[Check]:
    yield disk("runs", root.absolute(), "--trainer.default_root_dir")
    yield disk("temporary files", Path(tempfile.gettempdir()), "TMPDIR")


def disk(name: str, folder: Path, option: str) -> Check:
    """Whether files can be written into a folder, which may not exist yet."""
    above = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(above, os.W_OK | os.X_OK):
        return Check(name, "fails", f"{above} is not writable", f"set {option}")
    free = shutil.disk_usage(above).free
    found, advice = f"{folder}: {free / _GIB:.1f} GiB free", f"free some, or set {option}"
    return Check.either(name, found, free > 5 * _GIB, advice)


def _compilers() -> Iterator[Check]:
    problems = Problems()
    with problems:
        compilation.check_compiler(True)
    found = "cannot compile" if problems.lines else "g++ and Python's headers"
    yield Check.either("torch.compile", found, not problems.lines, "; ".join(problems.lines))
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if nvcc or torch.version.cuda:
        yield Check("nvcc", "ok", nvcc or "none, to build engines' CUDA extensions: set CUDA_HOME")


def _engines() -> Iterator[Check]:
    limits = {name: strategies.find(name).limits for name in strategies.names()}
    needed = {p: (name, how) for name, each in limits.items() for p, how in each.packages.items()}
    for package, (name, command) in needed.items():
        advice = "" if (is_there := importlib.util.find_spec(package)) else command
        found = importlib.metadata.version(package) if is_there else "not installed"
        yield Check("engine", "ok", f"{package} {found} (strategy {name})", advice)


def _containers() -> Iterator[Check]:
    installed = [name for name in _CONTAINERS if shutil.which(name)]
    for name in installed:
        advice = "start its daemon, or join the group docker" * (name == "docker")
        try:
            found = output(*_CONTAINERS[name]) or ""
            if name != "docker" and _NAMESPACES.is_file() and not int(_NAMESPACES.read_text()):
                raise UserError(f"{_NAMESPACES} is 0: user namespaces are not allowed")
            yield Check("container", "ok", f"{name} {found}")
        except UserError as error:
            found = f"{name} is not usable by this user: {'; '.join(error.problems)}"
            yield Check("container", "warning", found, advice)
    if not installed:
        yield Check("container", "ok", f"none of {', '.join(_CONTAINERS)} is installed")


def _slurm() -> Iterator[Check]:
    for line in (output("sinfo", "--noheader", "--format", "%P|%a|%D|%G|%l") or "").splitlines():
        name, state, nodes, gres, limit = (*line.split("|"), *[""] * 5)[:5]
        found = f"partition {name} is {state}: {nodes} nodes, GRES {gres}, time limit {limit}"
        yield Check.either("SLURM", found, state == "up")


def _all_reduce() -> Iterable[Check]:
    """Two ranks join as ``ddp`` does it, on GPUs if there are two, and sum their numbers."""
    total, backend = launch.run_in_processes("fork", 2, _reduce, {})
    found = f"1 + 2 = {total:g} on two processes by {backend}"
    return [Check("all-reduce", "ok" if total == 3.0 else "fails", found)]


def _reduce() -> tuple[float, str]:
    layout, has_two = cluster.detect(), torch.cuda.device_count() > 1
    device = torch.device("cuda", layout.rank) if has_two else torch.device("cpu")
    ddp = strategies.create("ddp", {"timeout_seconds": _SECONDS})
    ddp.connect(layout, [device], Precision("32-true", device.type))
    try:
        own = torch.tensor([layout.rank + 1.0], device=device)
        return float(collectives.all_reduce(own)), "NCCL" if has_two else "gloo"
    finally:
        ddp.teardown()
