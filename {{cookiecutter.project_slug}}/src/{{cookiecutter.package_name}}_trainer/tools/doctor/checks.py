"""What a check finds, and its process: with a time limit, and without a traceback."""

import json
import os
import subprocess
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ...errors import UserError, one_line
from ...options import redaction
from ..isolated import Child, Exhausted
from .waits import LIBRARIES

Status = Literal["ok", "warning", "fails"]


class Check(NamedTuple):
    """A line of the result; ``fails``: a ``fit`` cannot start; ``advice``: what to do about it."""

    name: str
    status: Status
    found: str
    advice: str = ""

    @classmethod
    def either(cls, name: str, found: str, is_good: bool, advice: str = "") -> "Check":
        """``ok``, or a warning with advice."""
        return cls(name, "ok", found) if is_good else cls(name, "warning", found, advice)


def report(found: Iterable[Check], is_json: bool) -> str:
    """Format lines as a table; or as JSON, with ``can_start`` and the same lines as ``checks``."""
    lines = [each._replace(found=_plain(each.found), advice=_plain(each.advice)) for each in found]
    fails, warnings = (sum(each.status == kind for each in lines) for kind in ("fails", "warning"))
    if is_json:
        checks = [each._asdict() for each in lines]
        return json.dumps({"can_start": not fails, "checks": checks}, indent=2)
    table = [
        f"{each.status:9}{each.name:19}{each.found}{each.advice and f' -> {each.advice}'}\n"
        for each in lines
    ]
    start = "cannot start" if fails else "can start"
    return f"{''.join(table)}\na fit {start}: {fails} fails, {warnings} warnings"


def _plain(text: str) -> str:
    return " ".join(redaction.message(text).split())


def run(
    name: str, check: Callable[[], Iterable[Check]], seconds: float, failing: Status = "warning"
) -> list[Check]:
    """Run a check in a process of its own; if it does not come to a result, a line says why.

    ``failing``: status of this line, unless there was too little time or memory.
    """
    try:
        found: list[Check] = Child(partial(_listed, check), seconds).result()
        return found
    except UserError as error:
        status = "warning" if isinstance(error, Exhausted) else failing
        return [Check(name, status, f"not checked: {'; '.join(error.problems)}")]


def _listed(check: Callable[[], Iterable[Any]]) -> list[Any]:
    """What a check yields; its errors are named by the user's line of source."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    with Path(os.devnull).open("w") as nothing:  # what the user's code prints is no result
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    try:
        return list(check())
    except UserError:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        users = (each for each in frames if not each.filename.startswith(LIBRARIES))
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
        said = f"{error}\n{error.stdout}"
        raise UserError(f"{command[0]}: {said.strip().splitlines()[-1]}") from None
    except (subprocess.TimeoutExpired, OSError) as error:
        raise UserError(f"{command[0]}: {one_line(error)}") from None
