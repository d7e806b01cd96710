"""Faults of memory, disks, files and the clock."""

import math
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial

from . import machine
from .faults import FAULTS, Strike, fault
from .ways import EVERY, Attempt, Way

__all__ = ["FAULTS"]


def _has_own_disk(way: Way) -> bool:
    return way.has_own_disk


def ends_at_once(way: Way) -> bool:
    """Whether a failure ends the attempt: elastic.sh ends it, but torchrun alone restarts ranks."""
    return way.has_own_disk and not way.restarts


preloads = partial(fault, fits=_has_own_disk, needs=machine.compiler)
mounts = partial(fault, fits=_has_own_disk, needs=machine.mounts)
# Seconds in which a save begins.
_SOON = 20.0


# --- memory --------------------------------------------------------------------------------------


@fault("out of memory", needs=machine.memory_groups)
def exhaust_memory(attempt: Attempt) -> Strike:
    yield
    with machine.limited_memory(f"soak-{attempt.folder.name}", 100 << 20) as processes:
        for rank in attempt.ranks():
            processes.write_text(str(rank))
        attempt.order("allocates")
        yield


# --- a full disk, and one that cannot be written --------------------------------------------------


@fault("a file that may not grow", says="File too large")
def limit_files(attempt: Attempt) -> Strike:
    yield
    for rank in attempt.ranks():
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (30_000, 30_000))


@mounts("disk full at the start", fits=ends_at_once, says="No space left", is_before=True)
def fill_before(attempt: Attempt) -> Strike:
    with machine.full(attempt.folder, 0):
        yield


@mounts("disk full in a save", says="No space left")
def fill(attempt: Attempt) -> Strike:
    yield
    with machine.full(attempt.folder, 20_000):
        yield


@preloads("disk full in a log", "continues", says="No space left", ends_log=True)
def fill_for_log(attempt: Attempt) -> Strike:
    _preload(attempt)
    yield
    _order(attempt, "full metrics.csv")


@mounts(
    "read-only directory at the start",
    fits=ends_at_once,
    says="Read-only file system",
    is_before=True,
)
def forbid_before(attempt: Attempt) -> Strike:
    if attempt.run.exists():
        with machine.read_only(attempt.run):
            yield


@mounts("read-only directory in a save", says="Read-only file system")
def forbid(attempt: Attempt) -> Strike:
    yield
    folder = attempt.run / "checkpoints"
    folder.mkdir(exist_ok=True)
    with machine.read_only(folder):
        yield


@fault("the run directory removed", lost=math.inf)
def remove_run(attempt: Attempt) -> Strike:
    yield
    while attempt.run.exists():
        shutil.rmtree(attempt.run, ignore_errors=True)


# --- a library that makes calls fail, wait or lie ------------------------------------------------


def _preload(attempt: Attempt) -> None:
    (attempt.folder / "preloaded").unlink(missing_ok=True)
    # Fork servers have loaded it; commands that are started otherwise find it by its variable.
    library = machine.library(attempt.log.parents[1])
    orders = attempt.folder / "preloaded"
    attempt.variables |= {"LD_PRELOAD": str(library), "SOAK_ORDERS": str(orders)}


def _order(attempt: Attempt, order: str) -> None:
    new = attempt.folder / "preloaded.new"
    new.write_text(order)
    new.rename(attempt.folder / "preloaded")


@preloads("a rename that fails", says="cannot be saved")
def fail_rename(attempt: Attempt) -> Strike:
    _preload(attempt)
    yield
    _order(attempt, "rename checkpoints/step-")


@preloads("the clock set back", "continues")
def set_clock_back(attempt: Attempt) -> Strike:
    _preload(attempt)
    yield
    _order(attempt, f"clock -{attempt.dice.choice([60, 3600, 86_400])}")


@preloads("a slow disk", "continues")
def slow_disk(attempt: Attempt) -> Strike:
    _preload(attempt)
    yield
    _order(attempt, "slow 10")


# --- saves that do not end ------------------------------------------------------------------------


def _await(attempt: Attempt, begun: Callable[[], bool]) -> None:
    """Wait until something has begun; IndexError: the run has ended."""
    deadline = time.monotonic() + _SOON
    while not begun():
        if attempt.code() is not None or time.monotonic() > deadline:
            raise IndexError
        time.sleep(0.002)


def _is_saving(attempt: Attempt) -> bool:
    return any((attempt.run / "checkpoints").glob(".step-*.partial"))


def await_save(attempt: Attempt) -> Strike:
    """The part of a fault before it strikes in a save; the disk is slow then."""
    _preload(attempt)
    yield
    _order(attempt, "slow 50")
    _await(attempt, lambda: _is_saving(attempt))


@preloads("killed in a save")
def kill_in_save(attempt: Attempt) -> Strike:
    yield from await_save(attempt)
    os.kill(attempt.a_rank(), signal.SIGKILL)


@preloads("killed in an asynchronous save", lost=2 * EVERY + 1)
def kill_in_asynchronous_save(attempt: Attempt) -> Strike:
    attempt.options += ["--trainer.async_checkpoints", "true"]
    attempt.may_lose = 2 * EVERY + 1  # by any fault: it strikes while a checkpoint is pending
    yield from await_save(attempt)
    os.kill(attempt.a_rank(), signal.SIGKILL)
