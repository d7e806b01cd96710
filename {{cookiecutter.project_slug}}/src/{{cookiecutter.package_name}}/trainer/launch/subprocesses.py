"""The launcher of ``ddp``: this same command, started once a rank."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NoReturn

from ..errors import UserError
from . import interruption, outcome
from .cluster import Layout
from .failures.watcher import Place, Watcher, threads_each


def is_interactive() -> bool:
    """Whether this process is a notebook's or an interactive session's."""
    return hasattr(sys, "ps1")


def supervise_copies(processes: int, layout: Layout, directory: Path) -> NoReturn:
    """Start this same command once a rank, watch the ranks, and end as they end.

    When one fails, the others are ended and the first failure is shown; its exit code becomes
    this process'.

    Args:
        processes: ranks to start on this node.
        layout: of the nodes, where this command was started once on each.
        directory: in which they start, for relative paths mean something there.

    Raises:
        UserError: there is no command that could be started again.
    """
    # Python calls what it reads from standard input "" or "-".
    if is_interactive() or sys.argv[0] in ("", "-"):
        raise UserError(
            "an interactive session, or a script on standard input, has no command that could be "
            "started once a rank; use strategy='ddp_notebook', write a script, or use torchrun"
        )
    # That only this user can open: on one node the ranks' store is in it.
    with tempfile.TemporaryDirectory(prefix="trainer-launch-") as private:
        place = Place(processes, Path(private), layout)
        failure = Watcher(partial(_start_all, place, directory), "fork", place).watch()
    if failure is None:
        sys.exit(0)
    if failure.rank >= 0 or failure.code == interruption.EXIT_CODE:
        outcome.tell_failure(failure.message)
        print(failure.message, file=sys.stderr, flush=True)
    sys.exit(failure.code)


def _start_all(place: Place, directory: Path) -> "list[subprocess.Popen[bytes]]":
    command = [sys.executable, *sys.orig_argv[1:]]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(place.processes):
            ranks.append(_start(command, local_rank, place, directory))
    except BaseException:
        for each in ranks:
            each.kill()
        raise
    return ranks


def _start(
    command: list[str], local_rank: int, place: Place, directory: Path
) -> "subprocess.Popen[bytes]":
    variables = {**os.environ, **place.variables(local_rank)}
    variables.setdefault("OMP_NUM_THREADS", threads_each(place.processes))
    # A process group of its own, so that a rank's loader workers are ended with it.
    return subprocess.Popen(command, env=variables, cwd=directory, process_group=0)
