"""What torchelastic restarts goes on with its run, and gives up when it gets no further."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from . import collectives, files, outcome
from .cluster import Layout

_FILE = "restarts.json"
_MOST_FAILURES = 3
_SECONDS_TO_BE_ENDED = 10.0


def expected(layout: Layout, environment: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun starts the ranks again when one fails (its ``--max-restarts``)."""
    environment = os.environ if environment is None else environment
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return layout.source == "torchelastic" and restarts != "0"


def name_of_run(environment: Mapping[str, str] | None = None) -> str | None:
    """The run's name where the user gives none: torchrun's ``--rdzv-id``, if that tells runs apart.

    ``--standalone`` draws one.
    """
    environment = os.environ if environment is None else environment
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun-{name}"


def count(directory: Path, step: int, layout: Layout) -> None:
    """Note that the run begins at a step; the main rank counts for all.

    Args:
        directory: of the run.
        step: that it goes on from.
        layout: of the processes.

    Raises:
        UserError: it has begun there three times before, and failed. torchrun is told to end.
    """
    failures = 0
    if layout.is_main:
        found = _read(directory / _FILE)
        failures = found["failures"] + 1 if found.get("step") == step else 0
        if failures < _MOST_FAILURES:
            text = json.dumps({"step": step, "failures": failures})
            files.write_atomically(directory / _FILE, text)
        else:
            forget(directory)
    if collectives.broadcast(failures) < _MOST_FAILURES:
        return
    problem = f"{_MOST_FAILURES} failures without progress after step {step}: see their errors"
    outcome.tell_failure(problem)
    if layout.is_main:
        sys.stderr.write(f"error: {problem}\n")
        sys.stderr.flush()
    collectives.barrier()
    if layout.local_rank == 0:
        # A rank cannot tell torchrun in any other way not to start it again.
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_BE_ENDED)
    raise UserError(problem)


def forget(directory: Path) -> None:
    """Begin to count anew: the run has ended well, or was asked to end."""
    (directory / _FILE).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "failures" in found else {}
