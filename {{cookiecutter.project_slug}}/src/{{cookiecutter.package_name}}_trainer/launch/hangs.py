"""Stack traces of ranks, and a timer that ends a rank that hangs.

A stack has one call per line, the latest last. faulthandler writes in C, even without the GIL.
"""

import contextlib
import faulthandler
import linecache
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch

_SIGNAL = signal.SIGUSR2
_STDERR = 2
_MARGIN_SECONDS = 5.0  # after gloo's own timeout, which ends the ranks that wait
NCCL_SECONDS = 30.0  # by which NCCL's timeout is longer: it aborts, and prints no stacks
_SECONDS_TO_ANSWER = 10.0
_FRAME = '  File "'
_MOST_FRAMES = 30
_OMITTED = ("_call_impl", "_wrapped_call_impl")
_COLLECTIVES = re.compile("torch/(nn/parallel/)?distributed[/.]| in _engine_run_backward")
# Calls that wait for a GPU, and so for the collectives enqueued on it.
_ON_GPU = re.compile(r"\.(item|tolist|cpu|numpy)\(|\b(float|int|bool|synchronize)\(")
_SYNCHRONIZED = (
    "\nall ranks take part in SyncBatchNorm's forward in training mode: call it on each of them, "
    "or after module.eval()"
)
_PLACE = re.compile(r'  File "(.+)", line (\d+) in ')


class HangTimer:
    """Prints this process' stacks and ends it when a batch takes too long."""

    is_armed = False
    _file: TextIO | None = None
    _seconds = math.inf
    _next = -math.inf
    _was_enabled = True
    _loops: frozenset[str] = frozenset()

    def arm(self, seconds: float, path: Path | None) -> None:
        """Print stacks on a fatal error, and if a batch takes longer than a collective may.

        To standard error, or to a file, then also on SIGUSR2.
        """
        self.disarm()
        self.is_armed = True
        self._seconds = seconds + _MARGIN_SECONDS
        self._was_enabled = faulthandler.is_enabled()
        if path is None:
            # Of the terminal: a run redirects the output of all ranks but the first to its logs.
            self._file = os.fdopen(os.dup(_STDERR), "w", encoding="utf-8")
        else:
            self._file = path.open("w", encoding="utf-8")
            faulthandler.register(_SIGNAL, file=self._file, all_threads=True)
        if not self._was_enabled:
            faulthandler.enable(self._file)

    def begin(self, loop: str) -> None:
        """Note that a loop reads its first batch: limited, but for the first time it compiles."""
        if loop in self._loops:
            self.note_batch()
        self._loops |= {loop}

    def note_batch(self) -> None:
        """Note that another batch begins: the timer starts again, at most once a second."""
        now = time.monotonic()
        if self._file is not None and math.isfinite(self._seconds) and now >= self._next:
            self._next = now + 1
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=self._file)

    def pause(self) -> None:
        """Stop the timer until the next batch: what comes between may take any time."""
        if math.isfinite(self._next):
            self._next = -math.inf
            faulthandler.cancel_dump_traceback_later()

    def disarm(self) -> None:
        self.pause()
        if self._file is None:
            return
        if not self._was_enabled:
            faulthandler.disable()
        faulthandler.unregister(_SIGNAL)
        self._file.close()
        self._file = None
        self.is_armed = False
        self._loops = frozenset()


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End this process, with its stacks, if this context takes too long, even in the kernel."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


timer = HangTimer()  # of this process


def request(process: int, path: Path) -> str:
    """Stack of the main thread of a running process whose timer prints to a file."""
    with contextlib.suppress(OSError):  # it has ended, or is not armed: SIGUSR2 would kill it
        size = before = path.stat().st_size
        os.kill(process, _SIGNAL)
        # In this order: a stopped process handles the first signal when it continues.
        os.kill(process, signal.SIGCONT)
        deadline = time.monotonic() + _SECONDS_TO_ANSWER
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = path.stat().st_size
            if now == before > size:
                return printed(path)
            before = now
    return "  (unknown)"


def is_stopped(process: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in b"tT"
    except OSError:
        return False


def has_timed_out(path: Path) -> bool:
    """Whether the timer that prints to this file has ended its process."""
    return path.exists() and "Timeout (" in path.read_text("utf-8")


def printed(path: Path) -> str:
    """The last stack in a file: of the main thread, or of the one in which a fatal error came."""
    text = path.read_text("utf-8") if path.exists() else ""
    _, fault, of_fault = text.rpartition("Fatal Python error")
    threads = re.split(r"^(?=Current thread 0x|Thread 0x)", of_fault or text, flags=re.MULTILINE)
    # faulthandler prints the main thread last, and each one's last call first.
    current = [thread for thread in threads if fault and thread.startswith("Current thread")]
    last = (current or threads)[-1]
    return _shortened([line for line in last.splitlines() if line.startswith(_FRAME)][::-1])


def of_error(error: BaseException) -> str:
    """Stack at which an error was raised."""
    frames = traceback.extract_tb(root(error).__traceback__)
    calls = [f'{_FRAME}{frame.filename}", line {frame.lineno} in {frame.name}' for frame in frames]
    return _shortened(calls)


def waits_for_peers(stack: str) -> bool:
    """Whether the last call waits for other ranks; DDP's backward is included."""
    if _COLLECTIVES.search(last := stack.rpartition("\n")[2]):
        return True
    place = _PLACE.match(last) if torch.cuda.is_available() else None
    return place is not None and bool(_ON_GPU.search(linecache.getline(place[1], int(place[2]))))


def advice(stacks: Iterable[str]) -> str:
    """A line on what a rank that waits for others has entered alone, if that is known."""
    return _SYNCHRONIZED if any("/sync_batchnorm.py" in stack for stack in stacks) else ""


def root(error: BaseException) -> BaseException:
    """The original error of a chain of causes and contexts."""
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error if origin is None else root(origin)


def _shortened(lines: Sequence[str]) -> str:
    kept = [line for line in lines if line.rpartition(" in ")[2] not in _OMITTED]
    return "\n".join(kept[-_MOST_FRAMES:])
