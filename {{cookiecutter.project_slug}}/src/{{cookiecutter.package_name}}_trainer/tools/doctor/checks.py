"""What a check finds, and processes in which checks run: with a time limit, and no traceback."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from ...errors import UserError, one_line
from ...options import redaction
from .waits import LIBRARIES

Status = Literal["ok", "warning", "fails"]
Work = Callable[[], Iterable[Any]]


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
    width = max(len(each.name) for each in lines) + 2
    table = [
        f"{each.status:9}{each.name:{width}}{each.found}{each.advice and f' -> {each.advice}'}\n"
        for each in lines
    ]
    start = "cannot start" if fails else "can start"
    return f"{''.join(table)}\na fit {start}: {fails} fails, {warnings} warnings"


def _plain(text: str) -> str:
    return " ".join(redaction.message(text).split())


def run(
    name: str, check: Work, seconds: float, failing: Status = "warning", how: str = "fork"
) -> list[Check]:
    """Run a check as :func:`apart` does; if it does not come to its end, a last line says why.

    ``failing``: status of this line, unless there was too little time or memory.
    """
    found = []
    try:
        for line in apart(check, seconds, how):
            found.append(Check(*line))
    except TimeoutError as error:
        found.append(Check(name, "warning", f"not checked: {error}"))
    except UserError as error:
        found.append(Check(name, failing, f"not checked: {error}"))
    return found


def apart(work: Work, seconds: float, how: str = "fork") -> Iterator[Any]:
    """Yield what a function yields in a process of its own, as JSON.

    Args:
        work: The function; with ``"spawn"`` it is pickled.
        seconds: Time limit.
        how: ``"fork"``, or ``"spawn"`` for a new interpreter.

    Raises:
        UserError: It raised, or its process died.
        TimeoutError: It took too long, or was killed, as if there is too little memory.
    """
    context: Any = multiprocessing.get_context(how)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, sender, seconds, how))
    process.start()
    sender.close()
    ends = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, ends - time.monotonic())):
            kind, value = json.loads(receiver.recv_bytes())
            if kind == "problem":
                raise UserError(value)
            if kind == "end":
                return
            yield value
        raise TimeoutError(f"it took longer than {seconds:g} s")
    except EOFError:
        process.join()
        error = TimeoutError if process.exitcode == -signal.SIGKILL else UserError
        raise error(f"its process ended with exit code {process.exitcode}") from None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.kill()


def _send(work: Work, sender: Any, seconds: float, how: str) -> None:
    os.setpgid(0, 0)
    signal.alarm(int(seconds) + 10)  # if the parent process is killed
    with Path(os.devnull).open("w") as nothing:  # what the user's code prints is no result
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if how == "fork":
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork

    def send(kind: str, value: Any) -> None:
        sender.send_bytes(json.dumps([kind, value]).encode())

    try:
        for each in work():
            send("line", each)
        send("end", None)
    except UserError as error:
        send("problem", "; ".join(error.problems))
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        users = (each for each in frames if not each.filename.startswith(LIBRARIES))
        at = next(users, frames[0])
        place = f"{Path(at.filename).name}:{at.lineno}"
        send("problem", f"{type(error).__name__} in {place}: {one_line(error)}")


def output(*command: str, seconds: float = 10) -> str | None:
    """Return what a program prints; ``None`` if it is not installed; UserError if it fails."""
    if shutil.which(command[0]) is None:
        return None
    how: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "text": True}
    try:
        return str(subprocess.check_output(command, timeout=seconds, **how)).strip()
    except subprocess.CalledProcessError as error:
        said = f"{error}\n{error.stdout}"
        raise UserError(f"{command[0]}: {said.strip().splitlines()[-1]}") from None
    except (subprocess.TimeoutExpired, OSError) as error:
        raise UserError(f"{command[0]}: {one_line(error)}") from None
