"""Continue when nothing reads the output any more, as in ``fit | head``."""

import contextlib
import os
import select
import sys

OUTPUT = select.poll()
for _descriptor in (1, 2):
    OUTPUT.register(_descriptor, 0)


def show(*lines: str, error: bool = False) -> None:
    """Print lines, to stderr if ``error``, even if nothing reads them any more."""
    drop()
    with contextlib.suppress(BrokenPipeError):  # closed since then; the next one says so
        print(*lines, sep="\n", file=sys.stderr if error else sys.stdout, flush=True)


def drop() -> None:
    """Discard output that nothing reads from now on, and say so: a print would raise an error."""
    if not (events := OUTPUT.poll(0)):
        return
    if closed := [descriptor for descriptor, event in events if event & select.POLLERR]:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in closed:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
        sys.stderr.write("note: nothing reads the output any more; the command continues\n")
