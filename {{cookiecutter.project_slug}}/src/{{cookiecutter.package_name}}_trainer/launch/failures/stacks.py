"""Stack traces as text, one call per line, most recent call last.

A process with a :class:`Printer` writes its stacks to a file when it receives a signal.
faulthandler does so in C, so it also works while native code holds the GIL. Source:
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

_SIGNAL = signal.SIGUSR2
_SECONDS_TO_ANSWER = 3.0
_FRAME = '  File "'
_MOST_FRAMES = 30
_COLLECTIVES = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    " in _engine_run_backward",
)
# Calls that synchronize with a GPU, and so wait for the collectives enqueued on it.
_ON_GPU = re.compile(r"\.(item|tolist|cpu|numpy)\(|\b(float|int|bool|synchronize)\(")
_PLACE = re.compile(r'  File "(.+)", line (\d+) in ')
_OMITTED = ("_call_impl", "_wrapped_call_impl")
_STDERR = 2


class Printer:
    """Writes this process' stacks to a file on a signal, and on a fatal error.

    Args:
        path: The file, which is created.
        fatal_too: Write fatal errors to the file too, instead of standard error.
    """

    def __init__(self, path: Path, fatal_too: bool) -> None:
        self._file = path.open("w")
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.register(_SIGNAL, file=self._file, all_threads=True)
        if not self._was_enabled:
            faulthandler.enable(self._file if fatal_too else _STDERR)

    def close(self) -> None:
        """Unregister the handlers."""
        faulthandler.unregister(_SIGNAL)
        if not self._was_enabled:
            faulthandler.disable()
        self._file.close()


def request(process: int, path: Path) -> str:
    """Stack of the main thread of a process that has a :class:`Printer` for this file."""
    try:
        before = path.stat().st_size
        os.kill(process, _SIGNAL)
        # In this order: a stopped process handles the first signal when it continues.
        os.kill(process, signal.SIGCONT)
        _wait_for_more(path, before)
        threads = _threads(path.read_text()[before:])
    except OSError as error:
        return f"  (unknown: {error.strerror})"
    # faulthandler prints the main thread last, whichever thread handled the signal.
    return _shortened(threads[-1]) or "  (unknown: it does not even answer a signal)"


def of_fault(path: Path) -> str:
    """Stack of a process when a fatal error ended it; empty if it printed none."""
    try:
        _, fault, text = path.read_text().rpartition("Fatal Python error")
    except OSError:
        return ""
    _, mark, current = text.rpartition("Current thread 0x")
    return _shortened(_threads(mark + current if mark else text)[-1]) if fault else ""


def of_error(error: BaseException) -> str:
    """Stack at which an error was raised."""
    frames = traceback.extract_tb(root(error).__traceback__)
    lines = [f'{_FRAME}{each.filename}", line {each.lineno} in {each.name}' for each in frames]
    return _shortened(lines) or "  (unknown)"


def of_main_thread() -> str:
    """Stack of this process' main thread, for another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame)
    lines = [f'{_FRAME}{each.filename}", line {each.lineno} in {each.name}' for each in frames]
    return _shortened(lines) or "  (unknown)"


def is_in_collective(position: str, on_gpu: bool = False) -> bool:
    """Whether the last call waits for peers; DDP's backward is included.

    Args:
        position: A stack, one call per line.
        on_gpu: Whether the process computes on a GPU. NCCL's collectives return at once there,
            and the process waits where it reads a value, such as in ``item()``.
    """
    last = position.rpartition("\n")[2]
    if any(part in last for part in _COLLECTIVES):
        return True
    place = _PLACE.match(last) if on_gpu else None
    return (
        place is not None and _ON_GPU.search(linecache.getline(place[1], int(place[2]))) is not None
    )


def root(error: BaseException) -> BaseException:
    """The original error of a chain of causes and contexts."""
    while True:
        is_hidden = error.__suppress_context__ and error.__cause__ is None
        origin = None if is_hidden else error.__cause__ or error.__context__
        if origin is None:
            return error
        error = origin


def _wait_for_more(path: Path, size: int) -> None:
    """Wait until a file has grown and no longer grows."""
    before = size
    deadline = time.monotonic() + _SECONDS_TO_ANSWER
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = path.stat().st_size
        if now == size > before:
            return
        size = now


def _threads(text: str) -> list[list[str]]:
    """The calls of each thread, most recent last, in faulthandler's output."""
    threads = re.split(r"^(?:Current thread|Thread) 0x", text, flags=re.MULTILINE)
    frames = ([line for line in each.splitlines() if line.startswith(_FRAME)] for each in threads)
    return [lines[::-1] for lines in frames]


def _shortened(lines: Sequence[str]) -> str:
    """The relevant calls of a stack."""
    kept = [line for line in lines if line.rpartition(" in ")[2] not in _OMITTED]
    return "\n".join(kept[-_MOST_FRAMES:])
