"""Print lines for people, whatever the output is: closed, full, ASCII only, or read by nobody."""

import atexit
import contextlib
import functools
import os
import select
import sys
from typing import TextIO

UNREAD = select.poll()  # its ``poll(0)`` returns the outputs that nothing reads (``fit | head``)
for _descriptor in (1, 2):
    UNREAD.register(_descriptor, 0)

# Files of the run would get the numbers of those that are closed (``>&-``), and what is printed.
for _descriptor in (0, 1, 2):
    try:
        os.fstat(_descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def is_terminal() -> bool:
    """Whether stderr is a terminal; a program may have replaced it by what has ``write`` only."""
    return bool(getattr(sys.stderr, "isatty", bool)())


def print_lines(*lines: str, error: bool = False, is_result: bool = False) -> None:
    """Print lines, to stderr if ``error``; only a result that a full disk cannot hold ends it."""
    discard_unread()
    if (stream := sys.stderr if error else sys.stdout) is None:  # as print does
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = "".join(f"{line}\n" for line in lines)
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        flush(stream)
    except BrokenPipeError:
        pass  # closed since then; the next one says so
    except (OSError, ValueError) as failure:
        _discard(stream, failure)
        if is_result:
            raise SystemExit(1) from None


def flush(stream: TextIO) -> None:
    getattr(stream, "flush", bool)()


@functools.cache
def print_once(line: str) -> None:
    """Print a line to stderr, once in a process."""
    print_lines(line, error=True)


def discard_unread() -> None:
    """Discard output that nothing reads from now on, and say so: a print would raise an error."""
    if closed := [number for number, event in UNREAD.poll(0) if event & select.POLLERR]:
        to_nowhere(*closed)
        sys.stderr.write("note: nothing reads the output any more; the command continues\n")


@atexit.register
def _flush_errors() -> None:
    """Discard warnings that cannot be written: they would let the process exit with 120."""
    try:
        flush(sys.stderr)
    except (OSError, ValueError) as failure:
        _discard(sys.stderr, failure)


def _discard(stream: TextIO, failure: Exception) -> None:
    """Discard what is printed to a stream from now on, also what is left in its buffer."""
    with contextlib.suppress(OSError, ValueError):
        to_nowhere(stream.fileno())
        sys.stderr.write(f"note: the output is discarded from now on: {failure}\n")
        sys.stderr.flush()


def to_nowhere(*descriptors: int) -> None:
    """Discard what is written to these descriptors from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
