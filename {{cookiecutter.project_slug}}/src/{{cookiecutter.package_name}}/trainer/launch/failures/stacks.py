"""Where a process stands, as text: a line a call, the most recent last.

A process that has a :class:`Printer` prints its stacks into a file when it is sent a signal: in C,
so that it also does so while native code holds the interpreter. Source:
https://docs.python.org/3/library/faulthandler.html#faulthandler.register
"""

import faulthandler
import linecache
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

_DEMAND = signal.SIGUSR2
_SECONDS_TO_ANSWER = 3.0
_FRAME = '  File "'
_MOST_FRAMES = 30
# All ranks have in common what called this: it says nothing.
_OUTERMOST = "run_external"
_COLLECTIVES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    " in _engine_run_backward",
)
# Calls that wait for a GPU, and so for the collectives that it was given before.
_ON_GPU = re.compile(r"\.(item|tolist|cpu|numpy)\(|\b(float|int|bool|synchronize)\(")
_PLACE = re.compile(r'  File "(.+)", line (\d+) in ')
_UNTOLD = ("_call_impl", "_wrapped_call_impl")
_STDERR = 2


class Printer:
    """Prints this process' stacks into a file when it is asked, and when a fault ends it.

    Args:
        path: of the file, which is made.
        fatal_too: what a fault prints goes there too, and not to standard error.
    """

    def __init__(self, path: Path, fatal_too: bool) -> None:
        self._file = path.open("w")
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.register(_DEMAND, file=self._file, all_threads=True)
        if not self._was_enabled:
            faulthandler.enable(self._file if fatal_too else _STDERR)

    def close(self) -> None:
        """Print no more."""
        faulthandler.unregister(_DEMAND)
        if not self._was_enabled:
            faulthandler.disable()
        self._file.close()


def ask(process: int, path: Path) -> str:
    """Where the main thread of a process stands that has a :class:`Printer` into a file."""
    try:
        before = path.stat().st_size
        os.kill(process, _DEMAND)
        # In this order: a stopped process takes the first as it goes on, before anything else.
        os.kill(process, signal.SIGCONT)
        _wait_for_more(path, before)
        threads = _threads(path.read_text()[before:])
    except OSError as error:
        return f"  (unknown: {error.strerror})"
    # The main thread stands last. Which one took the signal does not matter.
    return _shortened(threads[-1]) or "  (unknown: it does not even answer a signal)"


def of_fault(path: Path) -> str:
    """Where a process stood when a fault of its own ended it; empty if it printed nothing."""
    try:
        _, fault, text = path.read_text().rpartition("Fatal Python error")
    except OSError:
        return ""
    _, mark, current = text.rpartition("Current thread 0x")
    return _shortened(_threads(mark + current if mark else text)[-1]) if fault else ""


def of_error(error: BaseException) -> str:
    """Where an error was raised."""
    frames = traceback.extract_tb(root(error).__traceback__)
    lines = [f'{_FRAME}{each.filename}", line {each.lineno} in {each.name}' for each in frames]
    return _shortened(lines) or "  (unknown)"


def of_main_thread() -> str:
    """Where this process' main thread stands; for another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)
    lines = [f'{_FRAME}{each.filename}", line {each.lineno} in {each.name}' for each in frames]
    return _shortened(lines) or "  (unknown)"


def is_in_collective(position: str, on_gpu: bool = False) -> bool:
    """Whether the last call is one in which a process waits for others, DDP's backward included.

    Args:
        position: calls, a line each.
        on_gpu: whether the process computes on a GPU. NCCL's collectives return at once there, and
            the process waits where it reads a value: in ``item()``, say.
    """
    last = position.rpartition("\n")[2]
    if any(part in last for part in _COLLECTIVES):
        return True
    place = _PLACE.match(last) if on_gpu else None
    return (
        place is not None and _ON_GPU.search(linecache.getline(place[1], int(place[2]))) is not None
    )


def root(error: BaseException) -> BaseException:
    """The error that others were raised for, or during the handling of which they were raised."""
    while True:
        is_hidden = error.__suppress_context__ and error.__cause__ is None
        origin = None if is_hidden else error.__cause__ or error.__context__
        if origin is None:
            return error
        error = origin


def _wait_for_more(path: Path, size: int) -> None:
    """Until a file has grown, and grows no longer."""
    before = size
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = path.stat().st_size
        if now == size > before:
            return
        size = now


def _threads(text: str) -> list[list[str]]:
    """Each thread's calls, the most recent last, in what faulthandler has printed."""
    threads = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)
    frames = ([line for line in each.splitlines() if line.startswith(_FRAME)] for each in threads)
    return [lines[::-1] for lines in frames]


def _shortened(lines: Sequence[str]) -> str:
    """The calls that say something."""
    outermost = [number for number, line in enumerate(lines) if line.endswith(f" in {_OUTERMOST}")]
    told = lines[outermost[-1] + 1 :] if outermost else lines
    kept = [line for line in told if line.rpartition(" in ")[2] not in _UNTOLD]
    return "\n".join(kept[-_MOST_FRAMES:])
