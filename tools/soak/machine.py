"""What faults need of the machine: root's mounts, groups with a memory limit, a C compiler."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS of linux/sched.h
_GROUPS = Path("/sys/fs/cgroup")
# Of the folder of a run, in bytes.
_SIZE = 256 << 20

Need = Callable[[], str]
"""Returns why something cannot be done here, or an empty text."""


def _mount(*arguments: str | Path | Callable[[], str]) -> None:
    for _ in range(50):
        command = ["mount", *(value() if callable(value) else value for value in arguments)]
        done = subprocess.run(command, check=False, capture_output=True, timeout=60)
        if done.returncode == 0:
            return
        time.sleep(0.1)  # a file was just being written
    raise OSError(f"mount {command[1:]}: {done.stderr.decode()}")


@cache
def mounts() -> str:
    """Have mounts of this process and of those that it starts be its own, and end with it."""
    if sys.platform != "linux" or os.getuid() != 0:
        return "mounts need root"
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
        return f"no mounts: {os.strerror(ctypes.get_errno())}"
    try:
        _mount("--make-rprivate", "/")
    except OSError as error:
        return f"no mounts: {error}"
    return ""


@contextmanager
def disk(folder: Path, is_own: bool) -> Iterator[None]:
    """A folder, if need be a file system of its own, where root can mount one."""
    folder.mkdir()
    if not is_own or mounts():
        yield
        return
    _mount("-t", "tmpfs", "-o", f"size={_SIZE}", "soak", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False, timeout=60)


@contextmanager
def full(folder: Path, free: int) -> Iterator[None]:
    """The file system of a folder has so many free bytes."""

    def options() -> str:
        usage = os.statvfs(folder)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        return f"remount,size={max(used + free, usage.f_frsize)}"  # a size of 0 is none

    _mount("-o", options, folder)
    try:
        yield
    finally:
        _mount("-o", f"remount,size={_SIZE}", folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in a folder can be written."""
    _mount("--bind", folder, folder)
    _mount("-o", "remount,bind,ro", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False, timeout=60)


@cache
def _group_of_groups() -> tuple[Path, str] | None:
    """Where groups are made, and the file of their limit."""
    for base, limit in (
        (_GROUPS / "memory", "memory.limit_in_bytes"),  # version 1
        (_GROUPS, "memory.max"),
    ):
        probe = base / f"soak-probe-{os.getpid()}"
        with suppress(OSError):
            probe.mkdir()
            try:
                (probe / limit).write_text(str(_SIZE))
                return base, limit
            finally:
                probe.rmdir()
    return None


def memory_groups() -> str:
    return "" if os.getuid() == 0 and _group_of_groups() else "no cgroup can limit memory"


@contextmanager
def limited_memory(name: str, size: int) -> Iterator[Path]:
    """A group with a limit for memory that its processes allocate from now on: its processes."""
    groups = _group_of_groups()
    assert groups is not None
    base, limit = groups
    group = base / name
    group.mkdir()
    try:
        (group / limit).write_text(str(size))
        yield group / "cgroup.procs"
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            (base / "cgroup.procs").write_text(process)
        group.rmdir()


def compiler() -> str:
    return "" if shutil.which("cc") else "cc is not installed"


@cache
def library(folder: Path) -> Path:
    """Compile preloaded.c into a folder."""
    made = folder / "preloaded.so"
    source = Path(__file__).with_name("preloaded.c")
    command: list[str | Path] = ["cc", "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return made
