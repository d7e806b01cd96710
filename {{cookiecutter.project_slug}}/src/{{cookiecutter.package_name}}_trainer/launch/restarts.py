"""Restarts by torchelastic: resume the run, and stop restarting when it makes no progress."""

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
    """Whether torchrun restarts the ranks when one fails (``--max-restarts``)."""
    environment = os.environ if environment is None else environment
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return layout.source == "torchelastic" and restarts != "0"


def run_name(environment: Mapping[str, str] | None = None) -> str | None:
    """Default name of the run: torchrun's ``--rdzv-id``, if it is set and so identifies the run.

    ``--standalone`` generates one.
    """
    environment = os.environ if environment is None else environment
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else f"torchrun-{name}"


def count_attempt(directory: Path, step: int, layout: Layout) -> None:
    """Count an attempt that starts from a step; the main rank counts for all ranks.

    Args:
        directory: The run directory.
        step: The step from which the run starts or resumes.
        layout: The layout of the processes.

    Raises:
        UserError: Three attempts from this step have failed. torchrun is told to stop.
    """
    failures = 0
    if layout.is_main:
        found = _read(directory / _FILE)
        failures = found["failures"] + 1 if found.get("step") == step else 0
        if failures < _MOST_FAILURES:
            text = json.dumps({"step": step, "failures": failures})
            files.write_atomically(directory / _FILE, text)
        else:
            reset(directory)
    if collectives.broadcast(failures) < _MOST_FAILURES:
        return
    problem = f"{_MOST_FAILURES} failures without progress after step {step}: see their errors"
    outcome.write_failure(problem)
    if layout.is_main:
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


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and "failures" in found else {}
