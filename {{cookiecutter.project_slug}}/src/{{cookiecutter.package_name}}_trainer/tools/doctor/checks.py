"""Results of checks; each check runs in a separate process with a time limit."""

import json
import os
import subprocess
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ...checkpoint import run_directory
from ...cli import imports
from ...errors import UserError, one_line
from ...options import redaction
from ..isolated import Child, Exhausted
from .waits import LIBRARIES

Status = Literal["ok", "warning", "unknown", "fails"]
Find = Callable[[], Iterable["Check"]]
_NEEDED = ("step", "all-reduce")  # without which a ``fit`` cannot start


class Check(NamedTuple):
    """A line of the result; ``fails``: a ``fit`` cannot start; ``unknown``: perhaps it cannot."""

    name: str
    status: Status
    found: str
    advice: str = ""

    @classmethod
    def either(cls, name: str, finding: str, is_good: bool, advice: str = "") -> "Check":
        """``ok``, or a warning with advice."""
        return cls(name, "ok", finding) if is_good else cls(name, "warning", finding, advice)


def report(rows: Sequence[Check], is_json: bool) -> str:
    """Format lines as a table; or as JSON: ``can_start``, null if unknown, and ``checks``."""
    lines = [Check._make(" ".join(redaction.message(x).split()) for x in row) for row in rows]
    of = Counter(row.status for row in rows)
    start = False if of["fails"] else None if of["unknown"] else True
    if is_json:
        return json.dumps({"can_start": start, "checks": [x._asdict() for x in lines]}, indent=2)
    table = [f"{x.status:9}{x.name:19}{x.found}{x.advice and f' -> {x.advice}'}\n" for x in lines]
    verb = {True: "can", False: "cannot", None: "may not"}[start]
    counts = f"{of['fails']} fails, {of['unknown']} unknown, {of['warning']} warnings"
    return f"{''.join(table)}\na fit {verb} start: {counts}"


def run(name: str, check: Find, seconds: float, how: str = "fork") -> list[Check]:
    """Run a check in a separate process; if it fails or takes too long, a line says why.

    ``how``: the new interpreter of ``"spawn"`` has all threads, and other hashes of strings.
    """
    try:
        return Child(partial(_listed, check, how), seconds, how).result()
    except UserError as error:
        failed: Status = "unknown" if isinstance(error, Exhausted) else "fails"
        reason = f"not checked: {'; '.join(error.problems)}"
        return [Check(name, failed if name in _NEEDED else "warning", reason)]


def _listed(check: Find, how: str) -> list[Check]:
    """What a check yields; its errors are named by the user's line of source."""
    if how == "fork":
        torch.set_num_threads(1)  # OpenMP's threads do not survive it
    try:  # what the user's code prints is no result
        with run_directory.output_to(Path(os.devnull)), imports.checked():
            return list(check())
    except UserError:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        users = (frame for frame in frames if not frame.filename.startswith(LIBRARIES))
        at = next(users, frames[0])
        place = f"{Path(at.filename).name}:{at.lineno}"
        raise UserError(f"{type(error).__name__} in {place}: {one_line(error)}") from None


def output(*command: str, seconds: float = 10) -> str | None:
    """Return what a program prints; ``None`` if it is not installed; UserError if it fails."""
    try:
        how: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "text": True}
        return str(subprocess.check_output(command, timeout=seconds, **how)).strip()
    except FileNotFoundError:
        return None
    except subprocess.CalledProcessError as error:
        said = f"{error}\n{error.stdout}".strip().splitlines()[-1]
    except (subprocess.TimeoutExpired, OSError) as error:
        said = one_line(error)
    raise UserError(f"{command[0]}: {said}")
