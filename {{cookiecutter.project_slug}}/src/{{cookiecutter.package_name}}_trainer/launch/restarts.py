"""Restarts by torchelastic: resume the run, and stop restarting when it makes no progress."""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import UserError
from . import collectives, files, outcome
from .cluster import Layout

_FILE = "restarts.json"
_MOST_FAILURES = 3
_SECONDS_TO_BE_ENDED = 10.0


def expected(layout: Layout, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun restarts the ranks when one fails (``--max-restarts``)."""
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return layout.source == "torchelastic" and restarts != "0"


def run_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """Default name of the run: torchrun's ``--rdzv-id``; ``None`` if it is not set."""
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun-{name}"


def count_attempt(directory: Path, step: int, layout: Layout) -> None:
    """Count an attempt that starts from a step, in the run directory; the main rank counts.

    Raises:
        UserError: Three attempts from this step have failed. torchrun is told to stop.
    """
    failures, path = 0, directory / _FILE
    if layout.is_main:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # none, or damaged
            found = json.loads(path.read_text())
            failures = found["failures"] + 1 if found["step"] == step else 0
        files.write_atomically(path, json.dumps({"step": step, "failures": failures}))
    if collectives.broadcast(failures) < _MOST_FAILURES:
        return
    problem = f"{_MOST_FAILURES} failures without progress after step {step}: see their errors"
    outcome.write_failure(problem)
    if layout.is_main:
        reset(directory)
        sys.stderr.write(f"error: {problem}\n")
        sys.stderr.flush()
    collectives.barrier()
    if layout.local_rank == 0:
        # The only way in which a rank can tell torchrun not to restart it.
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_BE_ENDED)
    raise UserError(problem)


def reset(directory: Path) -> None:
    """Reset the count: the run finished, or was asked to stop."""
    (directory / _FILE).unlink(missing_ok=True)
