"""Launcher for ``ddp``: run the current command again, once per rank."""

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
    """Whether this process is a notebook or an interactive session."""
    return hasattr(sys, "ps1")


def supervise_copies(processes: int, layout: Layout, directory: Path) -> NoReturn:
    """Start the current command once per rank, monitor the ranks, and exit with their result.

    When a rank fails, terminate the others, print the first failure, and exit with its exit code.

    Args:
        processes: Number of ranks to start on this node.
        layout: Layout of the nodes, where this command was started once per node.
        directory: Working directory of the ranks, so that relative paths keep their meaning.

    Raises:
        UserError: There is not a command to run again.
    """
    # sys.argv[0] is "" or "-" when Python reads the program from standard input.
    if is_interactive() or sys.argv[0] in ("", "-"):
        raise UserError(
            "an interactive session, or a script on standard input, has no command to start once "
            "per rank; use strategy='ddp_notebook', write a script, or use torchrun"
        )
    # Readable by this user only: on one node it contains the store of the ranks.
    with tempfile.TemporaryDirectory(prefix="trainer-launch-") as private:
        place = Place(processes, Path(private), layout)
        failure = Watcher(partial(_start_all, place, directory), "fork", place).watch()
    if failure is None:
        sys.exit(0)
    if failure.rank >= 0 or failure.code == interruption.EXIT_CODE:
        outcome.write_failure(failure.message)
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
    # Use a separate process group so that a rank's DataLoader workers are terminated with it.
    return subprocess.Popen(command, env=variables, cwd=directory, process_group=0)
