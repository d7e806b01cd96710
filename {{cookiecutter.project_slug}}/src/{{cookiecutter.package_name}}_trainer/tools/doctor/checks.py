"""A check and its result, and processes in which checks run: with a time limit, and no traceback.

A check that raises, crashes or hangs is one line of the result.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import UserError, one_line
from ...options import redaction

Status = Literal["ok", "warning", "fails"]
Method = Literal["fork", "spawn"]


@dataclass(frozen=True)
class Check:
    """A result: ``fails`` if a ``fit`` cannot start; ``advice``: what to do, if there is anything.

    A result may have several lines of one name, such as one for each line of source.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


class CheckError(Exception):
    """A check has not come to a result: it raised, its process died, or it took too long.

    ``is_of_machine``: it needs more time or memory than there is here, and may be right elsewhere.
    """

    def __init__(self, line: str, is_of_machine: bool = False) -> None:
        super().__init__(line)
        self.is_of_machine = is_of_machine


def can_start(found: Iterable[Check]) -> bool:
    """Whether a ``fit`` can start."""
    return all(each.status != "fails" for each in found)


def as_json(found: Sequence[Check]) -> str:
    """All results as a JSON object with ``can_start`` and ``checks``."""
    lines = [asdict(each) for each in map(_redacted, found)]
    return json.dumps({"can_start": can_start(found), "checks": lines}, indent=2)


def as_table(found: Sequence[Check]) -> str:
    """One line for each result, and what follows from all of them."""
    width = max(len(each.name) for each in found)
    lines = [
        f"{each.status:9}{each.name:{width + 2}}{each.found}{each.advice and f' -> {each.advice}'}"
        for each in map(_redacted, found)
    ]
    fails, warnings = (sum(each.status == kind for each in found) for kind in ("fails", "warning"))
    verdict = "cannot start" if fails else "can start"
    return "\n".join([*lines, "", f"a fit {verdict}: {fails} fails, {warnings} warnings"])


def _redacted(each: Check) -> Check:
    found, advice = (" ".join(redaction.message(t).split()) for t in (each.found, each.advice))
    return Check(each.name, each.status, found, advice)


def run(
    name: str,
    check: Callable[[], Iterable[Check]],
    seconds: float,
    failing: Status = "warning",
    method: Method = "fork",
) -> list[Check]:
    """Run a check in a process of its own; if it does not come to a result, one line says why.

    Args:
        name: Of this line.
        check: The check; with ``"spawn"`` it is pickled.
        seconds: Time limit.
        failing: Status of this line, unless there was too little time or memory.
        method: How the process is started: ``"spawn"`` starts a new interpreter.
    """
    try:
        lines = apart(partial(_lines, check), seconds, method)
    except CheckError as error:
        status: Status = "warning" if error.is_of_machine else failing
        return [Check(name, status, f"not checked: {error}")]
    return [Check(**line) for line in lines]


def _lines(check: Callable[[], Iterable[Check]]) -> list[dict[str, str]]:
    return [asdict(each) for each in check()]


def apart(work: Callable[[], Any], seconds: float, method: Method = "fork") -> Any:
    """Return what a function returns in a process of its own, as JSON.

    Raises:
        CheckError: It raised, its process died, or it took longer than ``seconds``.
    """
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, sender, method, seconds))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            raise CheckError(f"it took longer than {seconds:g} s", is_of_machine=True)
        answer = json.loads(receiver.recv_bytes())
    except EOFError:
        process.join(5)
        code = process.exitcode  # SIGKILL: there was too little memory
        line = f"its process ended with exit code {code}"
        raise CheckError(line, is_of_machine=code == -signal.SIGKILL) from None
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.kill()
        process.join()
    if "error" in answer:
        raise CheckError(answer["error"])
    return answer["value"]


def _send(work: Callable[[], Any], sender: Any, method: Method, seconds: float) -> None:
    os.setpgid(0, 0)
    signal.alarm(int(seconds) + 10)  # if the parent process is killed
    with Path(os.devnull).open("w") as nothing:  # what the user's code prints is no result
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    if method == "fork":
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        answer = {"value": work()}
    except UserError as error:
        answer = {"error": "; ".join(error.problems)}
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        answer = {"error": f"{type(error).__name__} in {place}: {one_line(error)}"}
    sender.send_bytes(json.dumps(answer).encode())


def output(*command: str, seconds: float = 10) -> str | None:
    """What an external program prints; ``None`` if it is not installed.

    Raises:
        CheckError: It failed, or took too long.
    """
    if shutil.which(command[0]) is None:
        return None
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    try:
        done = subprocess.run(command, timeout=seconds, check=False, **how)
    except subprocess.TimeoutExpired:
        raise CheckError(f"{command[0]} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise CheckError(f"{command[0]}: {one_line(error)}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise CheckError(f"{command[0]}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return str(done.stdout).strip()
